"""A migrated MLflow database for each test that wants one, made once: creating its tables takes seconds."""

from __future__ import annotations

import functools
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
    path = Path(tempfile.mkdtemp(prefix="joynexus-test-")) / "deep" / "mlflow.sqlite"
    create_and_migrate(f"sqlite:///{path}")
    return path
