"""What is stored and scored is the action as sampled; it is clipped in the environment and nowhere before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import torch

from services.environments.adapter import make_adapter
from services.environments.batch import EnvironmentBatch
from services.environments.reach import STEP
from services.inference_model import InferenceModelService
from services.rollout import Observation, Prediction, collect_rollout
from tests.services.environment_specs import preset
from tests.services.in_process import InProcess
from tests.services.policies import BASES, policy

ENVS, STEPS, HORIZON = 3, 6, 2


def test_stored_actions_and_their_log_probabilities_are_those_of_the_sample(tmp_path: Path) -> None:
    """Reach-v0 allows ±1; the policy's actions are 0.5 + 2 · N(mean, σ²), so most are outside.

    Reference: torch's own Normal around the mean action of the same observations. The clipped action would score
    differently, and the environment moves by the clipped one.
    """
    spec = preset("reach")
    batch = EnvironmentBatch(spec, make_adapter(spec, ENVS), ENVS, images=True)
    config = policy("t", horizon=HORIZON)
    means: list[np.ndarray] = []
    sent: list[np.ndarray] = []

    async def main() -> dict[str, np.ndarray]:
        service = InferenceModelService(
            home=str(tmp_path),
            base_models=BASES,
            batching={"max_batch_size": 64, "batch_timeout_s": 0.0},
            max_slots=4,
            max_pinned_versions=2,
        )
        await service.open_policy(config.model_dump(mode="json"), fresh=True)

        async def sampled(observation: Observation) -> Prediction:
            means.append((await service.predict(observation, "t"))["action"])
            answer = await service.predict(observation, "t", seed=len(means))
            sent.append(answer["environment_action"])
            return Prediction(**{name: value for name, value in answer.items() if name != "policy_version"})

        collected = await collect_rollout(
            sampled,
            InProcess(batch),
            num_envs=ENVS,
            steps=STEPS,
            seed_of_episode=lambda n: n,
            progress=lambda _done, _of: None,
        )
        return collected.data

    data = asyncio.run(main())
    stored, mean, wanted = data["action"], np.concatenate(means), np.concatenate(sent)
    std = torch.tensor(config.action_module.initial_log_std).exp()  # type: ignore[union-attr]
    distribution = torch.distributions.Normal(torch.from_numpy(mean), std)
    reference = distribution.log_prob(torch.from_numpy(stored)).sum(dim=-1).numpy()
    np.testing.assert_allclose(data["log_prob"], reference, rtol=1e-5, atol=1e-5)
    # Statistics of the tenant are mean 0.5, deviation 2: the environment was sent the same sample in its units.
    np.testing.assert_allclose(wanted, 0.5 + 2 * stored, rtol=1e-6, atol=1e-6)
    outside = np.abs(wanted) > 1
    assert outside.mean() > 0.3
    clipped = (np.clip(wanted, -1, 1) - 0.5) / 2
    other = distribution.log_prob(torch.from_numpy(clipped)).sum(dim=-1).numpy()
    assert (np.abs(other - data["log_prob"])[outside.any(axis=2)] > 1e-3).mean() > 0.9
    # Where the episode went on, the agent moved by the clipped actions, one after another, within the table.
    checked = 0
    for row in range((STEPS - 1) * ENVS):
        if data["done"][row]:
            continue
        place = data["proprioception"][row].astype(np.float64)
        for action in wanted[row]:
            place = np.clip(place + STEP * np.clip(action.astype(np.float64), -1, 1), -1, 1)
        np.testing.assert_allclose(data["proprioception"][row + ENVS], place, atol=1e-6)
        checked += 1
    assert checked > STEPS
