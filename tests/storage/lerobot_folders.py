"""Small LeRobot datasets for tests: three episodes whose frames show their number, also after a lossy coder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from storage.demonstrations import LeRobotWriter

LENGTHS = (4, 1, 6)
TASKS = ("push it", "pick it", "push it")
CAMERAS = {"base": (32, 64), "wrist": (16, 64)}
WIDTHS = {"state_width": 3, "action_width": 2}
FPS = 10
TOTAL = sum(LENGTHS)
OFFSET = {"base": 0, "wrist": 16}  # a wrist's frames show other numbers


def numbered(numbers: np.ndarray, height: int, width: int) -> np.ndarray:
    """Frames uint8 [T, h, w, 3] that show their number in five vertical bars, bright for 1."""
    frames = np.zeros((len(numbers), height, width, 3), np.uint8)
    bar = width // 5
    for i, number in enumerate(numbers):
        for bit in range(5):
            frames[i, :, bit * bar : (bit + 1) * bar] = 230 if int(number) >> bit & 1 else 20
    return frames


def number(frame: np.ndarray) -> int:
    """The number that a frame shows."""
    bar = frame.shape[1] // 5
    shown = [frame[:, bit * bar + 3 : (bit + 1) * bar - 3].mean() > 125 for bit in range(5)]
    return sum(int(lit) << bit for bit, lit in enumerate(shown))


def episodes() -> list[dict[str, Any]]:
    """What `LeRobotWriter.add_episode` takes, three times."""
    found, start = [], 0
    for length, task in zip(LENGTHS, TASKS, strict=True):
        frames = np.arange(start, start + length)
        random = np.random.default_rng(start)
        found.append(
            {
                "images": {name: numbered(frames + OFFSET[name], h, w) for name, (h, w) in CAMERAS.items()},
                "state": random.normal(size=(length, 3)).astype(np.float32),
                "action": random.normal(size=(length, 2)).astype(np.float32),
                "task": task,
            }
        )
        start += length
    return found


def write(root: Path, **changes: Any) -> Path:
    """The three episodes as a dataset."""
    with LeRobotWriter(root, **{"fps": FPS, "cameras": CAMERAS, **WIDTHS, **changes}) as writer:
        for episode in episodes():
            writer.add_episode(**episode)
    return root
