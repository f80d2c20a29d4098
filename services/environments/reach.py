"""Reach-v0: a disc on a 2-D tabletop is moved to the red disc among another one; drawn with numpy.

The goal is seen only in the picture: proprioception is the agent's own position. One step costs tens of
microseconds, so tests and machines without a renderer run thousands of steps a second.

World: a square of half-width 1, x to the right, y up. Picture: 64 × 64 RGB, row 0 at y = +1.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ENV_ID = "Reach-v0"
MAX_EPISODE_STEPS = 20
SIZE = 64
STEP = 0.2
"""Displacement of a full action in one axis, in table half-widths."""
REACH_RADIUS = 0.12
"""The episode ends when the agent's centre is nearer to the target's than this."""
SPAWN = 0.85
"""Discs are placed in [-SPAWN, SPAWN]², so that all of them lie on the picture."""
MIN_DISTANCE = 0.5
"""Least distance between agent and target at the start."""
SUCCESS_BONUS = 1.0

_DISC = 0.12
_AGENT_DISC = 0.09
_RED = np.array([220, 30, 30], np.float32)
_AGENT = np.array([250, 250, 250], np.float32)
_DISTRACTORS = np.array([[40, 90, 220], [40, 180, 70], [230, 200, 40]], np.float32)
_TABLE = np.array([70, 62, 56], np.uint8)


def register() -> None:
    """Make `gymnasium.make("Reach-v0")` work; a second call changes nothing."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            ENV_ID,
            entry_point="services.environments.reach:ReachEnv",
            max_episode_steps=MAX_EPISODE_STEPS,
            disable_env_checker=True,
        )


class ReachEnv(gymnasium.Env[Any, np.ndarray]):
    """Move to the red disc.

    Observation: `image` uint8 [64, 64, 3] and `proprioception` float32 [2], the agent's x, y.
    Action: float32 [2] in [-1, 1], a displacement in units of `STEP`; clipped here.
    Reward: decrease of the distance to the target in this step, plus `SUCCESS_BONUS` on arrival.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
                "proprioception": spaces.Box(-1.0, 1.0, (2,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.draws_each_step = True
        """False: `image` is left out of observations and `render` is called for the frames that are wanted."""
        self.agent = np.zeros(2)
        self.target = np.zeros(2)
        self.distractor = np.zeros(2)
        self._ground = np.full((SIZE, SIZE, 3), _TABLE, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Place agent, target and distractor as the seed says."""
        super().reset(seed=seed)
        random = self.np_random
        self.agent = random.uniform(-SPAWN, SPAWN, 2)
        self.target = _apart(random, [(self.agent, MIN_DISTANCE)])
        # The distractor overlaps neither disc, else it could hide the target.
        self.distractor = _apart(random, [(self.agent, _DISC + _AGENT_DISC), (self.target, 2.5 * _DISC)])
        colour = _DISTRACTORS[random.integers(len(_DISTRACTORS))]
        # What does not move within an episode is drawn once.
        self._ground = np.full((SIZE, SIZE, 3), _TABLE, np.uint8)
        _draw(self._ground, self.distractor, _DISC, colour)
        _draw(self._ground, self.target, _DISC, _RED)
        return self._observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One displacement; truncation is the registered time limit's business."""
        before = float(np.hypot(*(self.target - self.agent)))
        move = np.clip(np.asarray(action, np.float64), -1.0, 1.0) * STEP
        self.agent = np.clip(self.agent + move, -1.0, 1.0)
        after = float(np.hypot(*(self.target - self.agent)))
        success = after < REACH_RADIUS
        reward = before - after + (SUCCESS_BONUS if success else 0.0)
        return self._observation(), reward, success, False, {"success": success}

    def render(self) -> np.ndarray:  # type: ignore[override]
        """The picture now, uint8 [64, 64, 3], a new array each time."""
        image = self._ground.copy()
        _draw(image, self.agent, _AGENT_DISC, _AGENT)
        return image

    def scene_positions(self) -> dict[str, np.ndarray]:
        """Privileged: x, y, 0 of what stands for object (the distractor), goal and gripper."""
        return {
            name: np.array([*place, 0.0], np.float32)
            for name, place in (("object", self.distractor), ("goal", self.target), ("gripper", self.agent))
        }

    def _observation(self) -> dict[str, np.ndarray]:
        observation = {"proprioception": self.agent.astype(np.float32)}
        if self.draws_each_step:
            observation["image"] = self.render()
        return observation


def _apart(random: np.random.Generator, others: list[tuple[np.ndarray, float]]) -> np.ndarray:
    """A place at least the given distance away from each of `others` (rejection; most draws fit)."""
    while True:
        place = random.uniform(-SPAWN, SPAWN, 2)
        if all(np.hypot(*(place - other)) >= distance for other, distance in others):
            return place


def _draw(image: np.ndarray, centre: np.ndarray, radius: float, colour: np.ndarray) -> None:
    """Blend an anti-aliased disc into `image`; soft edges carry the sub-pixel position that a base has to read."""
    scale = SIZE / 2
    column, row, reach = (centre[0] + 1) * scale - 0.5, (1 - centre[1]) * scale - 0.5, radius * scale
    left, right = max(int(column - reach - 1), 0), min(int(column + reach + 3), SIZE)
    top, bottom = max(int(row - reach - 1), 0), min(int(row + reach + 3), SIZE)
    if left >= right or top >= bottom:
        return
    across = (np.arange(left, right, dtype=np.float32) - np.float32(column)) ** 2
    down = (np.arange(top, bottom, dtype=np.float32) - np.float32(row)) ** 2
    cover = np.float32(reach + 0.5) - np.sqrt(down[:, None] + across[None, :])
    cover = np.minimum(np.maximum(cover, 0), 1)[..., None]
    patch = image[top:bottom, left:right]
    patch[...] = (patch + cover * (colour - patch) + 0.5).astype(np.uint8)
