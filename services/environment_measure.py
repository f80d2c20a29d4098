"""What `joynexus env measure NAME` does: statistics of a preset's state and action, from episodes in a host of its own.

The host runs under the preset's own interpreter, or at the server that the preset names, and renders nothing. Half of
the frames come from the scripted expert with action noise, where there is one, half from uniformly random actions
within the bounds; where there is none, all do. The seeds are of no training, demonstration or evaluation.

Legend: T steps, S state width, A action width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from configs import seeds
from configs.environment import EnvironmentSpec, StatisticsSpec
from configs.errors import SpecError, UnknownObject
from configs.home import Home
from kernels.vector_statistics import Vectors, statistics_of
from services.environment_check import one_host
from services.environment_protocol import HostClient, longest_s

FIRST_SEED = seeds.PRETRAINING.stop - 1_000_000
"""Of pretraining's last million, which nobody else takes."""
LEAST_STD = 0.01
"""Deviations are not given smaller: a pose that hardly ever changes would turn its smallest change into many."""


async def measure(
    spec: EnvironmentSpec, episodes: int, noise: float, home: Home | None = None
) -> dict[str, StatisticsSpec]:
    """Statistics of `state` and of the executed `action`, from so many episodes of each kind.

    Args:
        spec: what is measured; its own statistics are of no consequence.
        episodes: of the expert, and of random actions as many steps; without an expert of random actions.
        noise: standard deviation of what disturbs the expert, in action units.
        home: of folders with tenants' own environments.

    Raises:
        JoyNexusError: the environment cannot be started or failed.
    """
    pool, launch, configuration = await one_host(spec, home, "measure", images=False)
    try:
        hosts, replies = await pool.acquire("measure", [configuration], wait_s=0, launch=launch)
        measured = _Measured(hosts[0].control, spec, replies[0])
        expert = _has_expert(spec)
        for episode in range(episodes):
            steps = await measured.expert(FIRST_SEED + episode, noise) if expert else None
            await measured.random(FIRST_SEED + episodes + episode, steps)
    finally:
        await pool.close()
    return {name: _statistics(name, pieces) for name, pieces in measured.pieces.items()}


def _has_expert(spec: EnvironmentSpec) -> bool:
    from services.environments.experts import expert_for  # with gymnasium, which nothing else here needs

    try:
        expert_for(spec.id, spec.control_mode)
    except (UnknownObject, SpecError):
        return False
    return True


def _statistics(name: str, pieces: list[np.ndarray]) -> StatisticsSpec:
    found = statistics_of([Vectors(name, lambda: pieces)])
    return found.model_copy(update={"std": tuple(max(std, LEAST_STD) for std in found.std)})


class _Measured:
    """Keeps float32 [T, S] and [T, A] of episodes in one host."""

    def __init__(self, client: HostClient, spec: EnvironmentSpec, configured: dict[str, Any]) -> None:
        self._client = client
        self._spec = spec
        self._random = np.random.default_rng(FIRST_SEED)
        self._low, self._high = (np.array(configured[f"action_{end}"], np.float32) for end in ("low", "high"))
        self.pieces: dict[str, list[np.ndarray]] = {"state": [], "action": []}

    async def expert(self, seed: int, noise: float) -> int:
        """An episode of the expert; its steps."""
        episode = await self._ask("expert_episode", seed=seed, noise=noise)
        return self._keep(episode["proprioception"], episode["executed"])

    async def random(self, seed: int, steps: int | None) -> None:
        """Random actions: so many steps, over the ends of episodes; None: one episode."""
        left = steps or self._spec.max_episode_steps
        while left > 0:
            await self._ask("reset", seeds=[seed])
            horizon = min(left, self._spec.max_episode_steps)
            actions = self._random.uniform(self._low, self._high, (1, horizon, len(self._low))).astype(np.float32)
            result = await self._ask("batch_step", actions=actions, next_seeds=[None], every_step=True)
            valid = result["valid"][0]
            left -= self._keep(result["seen"]["proprioception"][0][valid], actions[0][valid])
            if steps is None:
                return
            seed = FIRST_SEED + int(self._random.integers(500_000, 1_000_000))

    def _keep(self, states: np.ndarray, actions: np.ndarray) -> int:
        self.pieces["state"].append(states)
        self.pieces["action"].append(actions)
        return len(actions)

    async def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        longest = longest_s(op, fields, self._spec.step_timeout_s, self._spec.max_episode_steps)
        return dict(await self._client.call(op, longest, **fields))
