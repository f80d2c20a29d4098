"""Which of MuJoCo's off-screen renderers is used, and what is missing for it. Imports no simulator."""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

from configs.errors import refusal

LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_REMEDY = "as root on Debian run `apt-get install libosmesa6`, or set MUJOCO_GL=egl where there is a GPU"


def select(wanted: str | None = None) -> None:
    """Set `MUJOCO_GL`, before MuJoCo is imported, unless the user has: `wanted`, else EGL on an NVIDIA GPU and OSMesa
    elsewhere. Where there is a screen and nothing is wanted, MuJoCo chooses."""
    if "MUJOCO_GL" not in os.environ and (wanted or not os.environ.get("DISPLAY")):
        os.environ["MUJOCO_GL"] = wanted or _suitable()


def missing() -> str | None:
    """None where the renderer that is selected, or would be, has its library; else what to install, in one line."""
    chosen = os.environ.get("MUJOCO_GL") or _suitable()
    library = LIBRARIES.get(chosen)
    if library is None or ctypes.util.find_library(library) is not None:
        return None
    return refusal("MUJOCO_GL", chosen, f"a machine with lib{library}", _REMEDY)


def _suitable() -> str:
    return "egl" if Path("/dev/nvidiactl").exists() else "osmesa"
