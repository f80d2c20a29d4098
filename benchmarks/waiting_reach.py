"""Reach-v0 whose simulator makes everybody wait: 20 ms a step, in which its host's process sleeps.

It stands for a simulator that computes elsewhere (a GPU, another machine): a step of all environments of a host takes
that long however many there are, and no core is busy meanwhile.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from configs import presets
from configs.environment import EnvironmentSpec
from services.environments import reach

ENV_ID = "WaitingReach-v0"
STEP_S = 0.02

if ENV_ID not in gymnasium.registry:  # hosts import this module for the sake of this: the id names it
    gymnasium.register(ENV_ID, vector_entry_point="benchmarks.waiting_reach:WaitingReach")


class WaitingReach(SyncVectorEnv):
    """`num_envs` times Reach-v0; a step sleeps once for all of them, a reset does not.

    Args:
        num_envs: environments.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: of each.
    """

    def __init__(self, num_envs: int, max_episode_steps: int, render_mode: str | None = None) -> None:
        reach.register()
        one = partial(gymnasium.make, reach.ENV_ID, max_episode_steps=max_episode_steps, render_mode=render_mode)
        super().__init__([one] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """As Reach-v0's, `STEP_S` later."""
        time.sleep(STEP_S)
        return super().step(actions)


def spec() -> EnvironmentSpec:
    """The preset `reach` with this environment in its place."""
    return presets.environment("reach").model_copy(
        update={"name": "waiting-reach", "kind": "gymnasium_vector", "id": f"{__name__}:{ENV_ID}"}
    )
