"""The versions of the LeRobot format that are read and written, one line each."""

from __future__ import annotations

from storage.lerobot_format import Layout
from storage.lerobot_v21 import V21
from storage.lerobot_v30 import V30

LAYOUTS: dict[str, Layout] = {
    V21.version: V21(),
    V30.version: V30(),
}
NEWEST = V30.version
