"""An arm with two joints that is to bring its hand to a red mark: an environment of one's own, with numpy alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from gymnasium import spaces

SIZE = 64  # pixels of the picture's sides
LINKS = (0.5, 0.4)
REACHED = 0.1


class Arm:
    """Actions turn the two joints by up to 0.2 rad; the state is their angles."""

    action_space = spaces.Box(-0.2, 0.2, (2,), np.float32)

    def reset(self, *, seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode: the same seed gives the same one."""
        random = np.random.default_rng(seed)
        self.angles = random.uniform(-math.pi, math.pi, 2)
        radius, angle = random.uniform(0.2, 0.8), random.uniform(-math.pi, math.pi)
        self.mark = radius * np.array([math.cos(angle), math.sin(angle)])
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Turn the joints; an episode ends with success, and is cut by the preset's `max_episode_steps`."""
        self.angles = (self.angles + action + math.pi) % (2 * math.pi) - math.pi
        away = float(np.linalg.norm(self._joints()[-1] - self.mark))
        success = away < REACHED
        return self._observation(), -away, success, False, {"success": success}

    def _joints(self) -> list[np.ndarray]:
        """Positions of shoulder, elbow and hand."""
        turned = np.cumsum(self.angles)
        links = [length * np.array([math.cos(a), math.sin(a)]) for length, a in zip(LINKS, turned, strict=True)]
        return [np.zeros(2), links[0], links[0] + links[1]]

    def _observation(self) -> dict[str, np.ndarray]:
        picture = np.full((SIZE, SIZE, 3), 235, np.uint8)
        joints = self._joints()
        for begin, end in itertools.pairwise(joints):
            for part in np.linspace(0, 1, 40):
                _dot(picture, begin + part * (end - begin), 1, (40, 40, 40))
        _dot(picture, self.mark, 3, (220, 30, 30))
        return {"proprioception": self.angles.astype(np.float32), "top": picture}


def _dot(picture: np.ndarray, at: np.ndarray, radius: int, colour: tuple[int, int, int]) -> None:
    column, row = (round(float(side)) for side in (np.array([1 + at[0], 1 - at[1]]) / 2 * (SIZE - 1)))
    rows = slice(max(row - radius, 0), row + radius + 1)
    picture[rows, max(column - radius, 0) : column + radius + 1] = colour


def make() -> Arm:
    """What the preset's `id` names."""
    return Arm()
