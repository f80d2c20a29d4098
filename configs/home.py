"""Where everything of one installation lies: paths under one home folder, computed and never created here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from configs.spec import checked_name

PROJECT_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Home:
    """Paths of one installation; two installations with other folders never meet."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        """The folder that `JOYNEXUS_HOME` names, or `.joynexus` in the user's home."""
        named = os.environ.get("JOYNEXUS_HOME")
        return cls(Path(named).expanduser().resolve() if named else Path.home() / ".joynexus")

    @property
    def partitions(self) -> Path:
        """Zarr groups, one a partition."""
        return self.root / "partitions"

    @property
    def journal(self) -> Path:
        """SQLite journal of the Training Scheduler."""
        return self.root / "journal.sqlite"

    @property
    def tenants(self) -> Path:
        """Output folders, one a tenant; they outlive runtime state."""
        return self.root / "tenants"

    def tenant(self, name: str) -> Path:
        """The tenant's output folder."""
        return self.tenants / checked_name(name)

    @property
    def datasets(self) -> Path:
        """LeRobot folders by name."""
        return self.root / "datasets"

    @property
    def models(self) -> Path:
        """Base models pretrained here."""
        return self.root / "models"

    @property
    def prefect(self) -> Path:
        """Prefect's home: its database and profiles."""
        return self.root / "prefect"

    @property
    def mlflow(self) -> Path:
        """MLflow's sqlite file and artifacts."""
        return self.root / "mlflow"

    @property
    def mlflow_uri(self) -> str:
        """Tracking and registry URI."""
        return f"sqlite:///{self.mlflow / 'mlflow.sqlite'}"

    @property
    def environment_folders(self) -> Path:
        """JSON of the folders with tenants' own environments, by name."""
        return self.root / "environment-folders.json"

    @property
    def logs(self) -> Path:
        """One log a process that `joynexus up` started."""
        return self.root / "logs"

    @property
    def state(self) -> Path:
        """JSON of the running platform: addresses and process ids, written by `joynexus up`."""
        return self.root / "platform.json"
