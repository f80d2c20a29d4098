"""Small gymnasium environments for tests, registered by importing this module.

`Counter-v0`: a flat observation [seed, steps] and a picture by `render()`; +1 a step; ends when action[0] > 0.5.
`Faulty-v0`: hangs, dies or raises as its action says.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[np.ndarray, np.ndarray]):
    """Hands out one and the same buffer every time, as some simulators do."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._state = np.zeros(2, np.float32)
        self._image = np.zeros((4, 6, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._state[:] = (seed or 0) % 1000, 0
        return self._state, {"instruction": f"count from {seed}"}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._state[1] += 1
        success = bool(action[0] > 0.5)
        return self._state, 1.0, success, False, {"success": success}

    def render(self) -> np.ndarray:
        self._image[:] = int(self._state[1])
        return self._image


class Faulty(Counter):
    """action[0] < -0.9: never returns; -0.9 to -0.6: the process dies; -0.6 to -0.3: raises."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action[0] < -0.9:
            threading.Event().wait()
        if action[0] < -0.6:
            os._exit(3)
        if action[0] < -0.3:
            raise RuntimeError("the gearbox broke")
        return super().step(action)


class Goals(Counter):
    """A dict observation in the manner of gymnasium-robotics, with a picture as an entry, and no word of success."""

    def __init__(self, render_mode: str | None = None, depth: bool = False) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float64)
        self._depth = depth

    def _seen(self) -> dict[str, np.ndarray]:
        self._image[:] = 100 + int(self._state[1])
        eye = self._image.astype(np.float32) if self._depth else self._image
        return {"observation": np.array([7, *self._state, 8], np.float64), "desired_goal": self._state, "eye": eye}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, _ = super().step(action)
        return self._seen(), reward, terminated, truncated, {}


class Restless(Counter):
    """How an episode begins is not the seed's to say, and what steps do is not seen."""

    begun = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        Restless.begun += 1
        self._state[:] = Restless.begun, 0
        return self._state, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._state, float("nan"), False, False, {"success": False}

    def render(self) -> np.ndarray:
        return self._image


class Boundless(Counter):
    """Takes any action."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)


class Slow(Counter):
    """A step takes 0.3 s."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        threading.Event().wait(0.3)
        return super().step(action)


class Unmade(Counter):
    """Cannot be made."""

    def __init__(self, render_mode: str | None = None) -> None:
        raise RuntimeError("no arm is attached")


_ALL = {
    "Boundless-v0": Boundless,
    "Counter-v0": Counter,
    "Faulty-v0": Faulty,
    "Goals-v0": Goals,
    "Restless-v0": Restless,
    "Slow-v0": Slow,
    "Unmade-v0": Unmade,
}
for name, entry in _ALL.items():
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point=entry, max_episode_steps=5)
