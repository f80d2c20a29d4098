"""What is expensive and shared by tests of the services: LIBERO, installed under an interpreter of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from configs.home import PROJECT_ROOT
from services import environment_installs


@pytest.fixture(scope="session")
def libero() -> str:
    """Path of LIBERO's interpreter, installed where it is not; its scene files are found by their variable.

    The virtual environment is kept in the user's cache folder for the next run, where that can be written.
    """
    scenes = Path(os.environ.get("JOYNEXUS_LIBERO_ASSETS") or PROJECT_ROOT.parent / "shared" / "libero" / "assets")
    if not (scenes / "scenes").is_dir():
        # Nothing of LIBERO can run without them, and they do not come with its packages.
        pytest.fail(f"LIBERO's scene files are not in {scenes}; set JOYNEXUS_LIBERO_ASSETS")
    os.environ["JOYNEXUS_LIBERO_ASSETS"] = str(scenes)
    try:
        environment_installs.root().mkdir(parents=True, exist_ok=True)
    except OSError:
        os.environ["JOYNEXUS_ENVIRONMENTS"] = tempfile.mkdtemp(prefix="joynexus-environments-")
    environment_installs.install("libero.txt", lambda line: print(f"libero: {line}"))
    return environment_installs.interpreter("libero.txt")
