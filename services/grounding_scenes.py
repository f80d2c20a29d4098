"""Renders the scenes that the small base is pretrained on: seeded wandering near the objects, positions beside.

Actions are random, not an expert's: the gripper goes to a random waypoint about the object, then to another one
anywhere in reach, and opens or closes as it likes, so that pushed, held and hidden objects all occur. Episodes are
short and start from seeds of the pretraining range alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.environment import EnvironmentSpec
from services.environment_service import EnvironmentService

STEPS_A_FRAME = 4
FRAMES_AN_EPISODE = 3
"""Few, since frames of one episode share their goal: 2,600 frames in episodes of 8 were learnt by heart."""
THINGS = ("object", "goal", "gripper")


@dataclass(frozen=True)
class _Manner:
    """How a kind of environment is wandered in."""

    step: float
    """Displacement that a full action makes, in the environment's unit."""
    near: float
    """Deviation of waypoints about the object."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Box of free waypoints, one bound for each dimension that moves."""


MANNERS = {
    # Panda on its table, metres; pd_ee_delta_pos moves up to 0.1 m a step and the arm lags behind.
    "maniskill": _Manner(0.05, 0.05, (-0.2, -0.25, 0.02), (0.25, 0.25, 0.3)),
    "gymnasium": _Manner(0.2, 0.3, (-1.0, -1.0), (1.0, 1.0)),
}


class _Wanderer:
    """Actions of one environment; a function of its episode's seed and of the positions seen."""

    def __init__(self, manner: _Manner, action_width: int) -> None:
        self._manner = manner
        self._width = action_width

    def begin(self, seed: int, positions: dict[str, np.ndarray]) -> None:
        """A new episode whose first positions ([3] each) are given."""
        self._random = np.random.default_rng([seed, 0x6071D])
        manner, moves = self._manner, len(self._manner.low)
        spread = manner.near * self._random.choice([0.2, 1.0])
        about = positions["object"][:moves] + spread * self._random.standard_normal(moves)
        free = self._random.uniform(manner.low, manner.high)
        order = [about, free] if self._random.random() < 0.8 else [free, about]
        self._waypoints = [np.maximum(w, [*manner.low[:2], *([0.01] * (moves - 2))]) for w in order]
        self._switch = int(self._random.integers(1, FRAMES_AN_EPISODE + 1))
        self._grip = self._random.choice([-1.0, 1.0])
        self._frame = 0

    def chunk(self, positions: dict[str, np.ndarray]) -> np.ndarray:
        """float32 [STEPS_A_FRAME, A]."""
        moves = len(self._manner.low)
        if self._frame == self._switch and self._random.random() < 0.7:
            self._grip = -self._grip
        target = self._waypoints[int(self._frame >= self._switch)]
        self._frame += 1
        wanted = (target - positions["gripper"][:moves]) / (self._manner.step * STEPS_A_FRAME)
        actions = np.full((STEPS_A_FRAME, self._width), self._grip, np.float32)
        actions[:, :moves] = np.clip(wanted, -1, 1) + 0.3 * self._random.standard_normal((STEPS_A_FRAME, moves))
        return actions


async def render_scenes(
    service: EnvironmentService,
    spec: EnvironmentSpec,
    *,
    count: int,
    first_seed: int,
    num_envs: int = 4,
    advance: Callable[[int], None] = lambda _frames: None,
) -> dict[str, Any]:
    """`count` scenes of one environment, the same for the same arguments.

    Args:
        service: hosts the environment.
        spec: with its cameras and light visuals as policies will see them.
        count: frames to keep.
        first_seed: episodes start from this seed and its successors.
        num_envs: environments side by side in one host.
        advance: told after each round how many frames it gave.

    Returns:
        {"images": {camera: uint8 [count, h, w, 3]}, "positions": float32 [count, 9] (object, goal, gripper),
        "instruction": str, "seeds": int, the number of seeds used}.
    """
    opened = await service.open(
        {
            "environment": spec.model_dump(mode="json"),
            "num_envs": num_envs,
            "hosts": 1,
            "tenant_id": "pretraining",
            "request_id": f"scenes-{spec.name}-{first_seed}",
        }
    )
    session = opened["session_id"]
    wanderers = [_Wanderer(MANNERS[spec.kind], spec.action_width) for _ in range(num_envs)]
    pictures: list[dict[str, np.ndarray]] = []
    places: list[np.ndarray] = []
    seed = first_seed
    try:
        while num_envs * len(places) < count:
            seeds = list(range(seed, seed + num_envs))
            seed += num_envs
            observation = await service.reset(session, list(seeds))
            positions = await service.scene_positions(session)
            for e, wanderer in enumerate(wanderers):
                wanderer.begin(seeds[e], {name: rows[e] for name, rows in positions.items()})
            for frame in range(FRAMES_AN_EPISODE):
                if frame:
                    chunk = np.stack(
                        [w.chunk({n: rows[e] for n, rows in positions.items()}) for e, w in enumerate(wanderers)]
                    )
                    # An episode that ends is left idle: its last picture and positions are as valid as any.
                    result = await service.batch_step(session, chunk, [None] * num_envs)
                    observation = result["observation"]
                    positions = await service.scene_positions(session)
                pictures.append(observation["images"])
                places.append(np.concatenate([positions[name] for name in THINGS], axis=1))
                advance(num_envs)
    finally:
        await service.close(session)
    return {
        "images": {name: np.concatenate([p[name] for p in pictures])[:count] for name in pictures[0]},
        "positions": np.concatenate(places)[:count].astype(np.float32),
        "instruction": spec.instruction,
        "seeds": seed - first_seed,
    }
