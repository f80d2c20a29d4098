"""A migrated MLflow database for each test that wants one, made once: creating its tables takes seconds."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

from storage.registry import create_and_migrate


def migrated_database(folder: Path) -> str:
    """URI of a fresh sqlite database in `folder`."""
    shutil.copy(_template(), folder / "mlflow.sqlite")
    return f"sqlite:///{folder / 'mlflow.sqlite'}"


@functools.cache
def _template() -> Path:
    # In the session's home, which the session removes; "deep" is a folder that does not exist yet.
    path = Path(tempfile.mkdtemp(dir=os.environ["JOYNEXUS_HOME"])) / "deep" / "mlflow.sqlite"
    create_and_migrate(f"sqlite:///{path}")
    return path
