"""It learns: Reach-v0 by PPO, from no success to most of it, with the services' own parts and no platform around them.

The curves of docs/benchmarks.md are by the platform itself: `python -m benchmarks.learning`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import presets, seeds
from configs.algorithm import PpoSpec
from configs.home import PROJECT_ROOT, Home
from kernels import backbones
from kernels.backbones import Backbone
from services import serving
from services.admission import admit
from services.environments.adapter import make_adapter
from services.environments.batch import EnvironmentBatch
from services.policy_slot import PolicySlot, advantages
from services.policy_stacks import PolicyStacks
from services.rollout import Observation, Prediction, collect_rollout, run_episodes
from services.serving import Request, ServingPolicy
from tests.services.environment_specs import preset
from tests.services.in_process import InProcess

JOBS, EPISODES, ENVS = 10, 32, 8


class Learner:
    """Lock-step: a rollout by the serving side, its advantages, an update of the slot."""

    def __init__(self, home: Path, backbone: Backbone) -> None:
        workload = presets.workload("reach")
        algorithm = workload.algorithm.model_copy(update={"jobs": JOBS, "cosine": True})
        declared = workload.model_copy(update={"algorithm": algorithm})
        self.backend = admit(declared, Home(home), presets.cluster("laptop"))
        self.backbone = backbone
        self.slot = PolicySlot(self.backend.policy)
        self.slot.ensure_optimizer(self.backend.policy_key, self.backend.algorithm)
        self.served = ServingPolicy(self.backend.policy, 0, None)
        spec = preset("reach")
        self.session = InProcess(EnvironmentBatch(spec, make_adapter(spec, ENVS), ENVS, images=True))

    def bound(self, generator: torch.Generator | None, *, exploring: bool = True, keep: bool = False) -> Any:
        policy = self.served

        async def answer(observation: Observation) -> Prediction:
            request = Request(policy, *policy.prepare(self.backbone, observation), generator, keep, exploring)
            (found,) = serving.forward(self.backbone, [request], PolicyStacks(0))
            assert isinstance(found, Prediction), found
            return found

        return answer

    async def job(self, number: int) -> None:
        algorithm = self.backend.algorithm
        assert isinstance(algorithm, PpoSpec)
        first = seeds.training_seed(algorithm.seed, number, 0)
        collected = await collect_rollout(
            self.bound(torch.Generator().manual_seed(first), keep=self.backend.features_travel),
            self.session,
            num_envs=algorithm.num_envs,
            steps=algorithm.rollout_steps,
            seed_of_episode=lambda n: seeds.training_seed(algorithm.seed, number, n),
            progress=lambda _done, _of: None,
        )
        data: dict[str, Any] = collected.data | await collected.values_after(self.bound(None))
        data |= advantages(data, algorithm)
        data["instructions"] = collected.instructions
        self.slot, _ = self.slot.trained(self.backbone, self.backend, data, 1 << 30)
        self.served = self.served.following(self.slot.version, self.slot.parameters())

    async def success(self) -> float:
        """Of the mean action, over held-out seeds."""
        ended = await run_episodes(
            self.bound(None),
            self.session,
            num_envs=ENVS,
            seeds=range(30_000, 30_000 + EPISODES),
            progress=lambda _done, _of: None,
        )
        return float(ended.summary()["success_rate"])


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(presets.base_model("tiny-qwen3-vl"), PROJECT_ROOT)


def test_reach_is_learned_by_ppo(tmp_path: Path, backbone: Backbone) -> None:
    """10 jobs of 512 transitions; the goal is in the picture only: a policy that does not see it stays below 30 %."""

    async def learn() -> tuple[float, float]:
        learner = Learner(tmp_path, backbone)
        before = await learner.success()
        for number in range(JOBS):
            await learner.job(number)
        return before, await learner.success()

    before, after = asyncio.run(learn())
    assert before <= 0.1
    assert after >= 0.5
