"""Modules learn by RL, those that denoise too: what serving acted and stored is what training scores, through both
services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT
from configs.workload import ResourcesSpec
from kernels import backbones
from kernels.backbones import Backbone
from services import serving
from services.policy_stacks import PolicyStacks
from services.rollout import Prediction
from services.serving import Request, ServingPolicy
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore
from tests.services.policies import BASE, BASES, FLOWS, backend, job, observation

ROWS, HORIZON = 8, 2
KINDS = [(kind, name) for kind in ("gr00t", "pi", "pi05") for name in FLOWS]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def declared(kind: str, name: str | None, **settings: Any) -> BackendConfig:
    config = backend("a", "rl", kind=kind, horizon=HORIZON, flow=None if name is None else FLOWS[name], **settings)
    # Rollouts hold pictures: what modules denoise from is larger than they are, and what a lora reads changes.
    assert config.features_travel == (kind == "oft")
    return config.model_copy(update={"resources": ResourcesSpec(reuse_features="never")})


def acted(backbone: Backbone, config: BackendConfig, seen: dict[str, Any]) -> Prediction:
    """A decision a row by the serving side, sampled."""
    policy = ServingPolicy(config.policy, 0, None)
    prefix, state, proprioception = policy.prepare(backbone, seen)
    request = Request(policy, prefix, state, proprioception, torch.Generator().manual_seed(7))
    (prediction,) = serving.forward(backbone, [request], PolicyStacks(0))
    assert isinstance(prediction, Prediction), prediction
    return prediction


def partition(root: Path, config: BackendConfig, seen: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """The rollout's partition: 4 steps of 2 environments, a reward for each action; returns its job."""
    described = job(config)
    shape = (ROWS, HORIZON)
    reward = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    data = {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "action": prediction.action,
        "log_prob": prediction.log_prob,
        "value": prediction.value,
        "reward": reward,
        "valid": np.ones(shape, bool),
        "terminated": np.zeros(shape, bool),
        "truncated": np.zeros(shape, bool),
        "next_value": np.zeros(ROWS, np.float32),
        "bootstrap_value": np.zeros(ROWS, np.float32),
        "sample_valid": np.ones(ROWS, bool),
        "done": np.zeros(ROWS, bool),
        **prediction.trace,
    }
    PartitionStore(root).put(
        described["partition_id"],
        data,
        tenant_id=config.policy.tenant,
        schema_signature=config.policy.schema_signature,
        policy_version=0,
        chunk=4,
        instructions=["reach the red target"],
    )
    return described


@pytest.mark.parametrize(("kind", "name"), [*KINDS, ("oft", None), ("lora", None)])
def test_with_frozen_weights_what_was_stored_has_ratio_one(
    tmp_path: Path, backbone: Backbone, kind: str, name: str | None
) -> None:
    """Acted by the inference side, stored, read, scored by the training side twice over in shuffled microbatches."""
    config, seen = declared(kind, name, learning_rate=0.0), observation(ROWS, 3)
    prediction = acted(backbone, config, seen)
    # An action is a field of its own, whatever scores it.
    assert set(prediction.trace) == set(config.policy.action_module.trace) - {"action"}

    async def main() -> dict[str, Any]:
        service = TrainingModelService(str(tmp_path), BASES, 4)
        await service.open_slot(config.model_dump(mode="json"), str(tmp_path / "a"), fresh=True)
        described = partition(tmp_path / "partitions", config, seen, prediction)
        await service.compute_advantages(described)
        return await service.train_job(described)

    result = asyncio.run(main())
    assert result["optimizer_steps"] == 4
    assert result["metrics"]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert result["metrics"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert result["metrics"]["clip_fraction"] == 0.0
    assert result["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_updates_make_what_was_rewarded_likelier(tmp_path: Path, backbone: Backbone, kind: str, name: str) -> None:
    """Rewards are drawn: log-probabilities rise where the advantage is above the mean, more than elsewhere."""
    config, seen = declared(kind, name, learning_rate=1e-3), observation(ROWS, 3)
    prediction = acted(backbone, config, seen)

    async def main() -> np.ndarray[Any, Any]:
        service = TrainingModelService(str(tmp_path), BASES, 4)
        await service.open_slot(config.model_dump(mode="json"), str(tmp_path / "a"), fresh=True)
        described = partition(tmp_path / "partitions", config, seen, prediction)
        store = PartitionStore(tmp_path / "partitions")
        await service.compute_advantages(described)
        meta = store.get_meta(
            described["partition_id"],
            task_name="test",
            data_fields=["advantage"],
            batch_size=ROWS,
            tenant_id="a",
            schema_signature=config.policy.schema_signature,
        )
        assert meta is not None
        advantage = store.get_data(meta)["advantage"]
        await service.train_job(described)
        slot = service._slots["a"]
        data = {
            "image.top": seen["images"]["top"],
            "proprioception": seen["proprioception"],
            "instructions": seen["instructions"],
            **prediction.trace,
        }
        after = slot.evaluated(backbone, config, data)["actor_log_prob"]
        assert prediction.log_prob is not None
        gain = after - prediction.log_prob
        assert float((gain * (advantage - advantage.mean())).sum()) > 0
        return gain

    assert np.isfinite(asyncio.run(main())).all()


def test_a_chain_is_that_of_its_action(backbone: Backbone) -> None:
    """Flow-Noise stores all of it: it ends in the action. Flow-SDE stores its one stochastic step."""
    seen = observation(ROWS, 3)
    noisy = acted(backbone, declared("pi", "flow_noise"), seen)
    assert noisy.trace["chain"].shape == (ROWS, 11, HORIZON, 2)
    np.testing.assert_array_equal(noisy.trace["chain"][:, -1], noisy.action)
    sparse = acted(backbone, declared("gr00t", "flow_sde"), seen)
    assert sparse.trace["chain"].shape == (ROWS, 2, HORIZON, 2)
    assert set(sparse.trace["denoising_step"].tolist()) <= {0, 1, 2, 3}
    assert len(set(sparse.trace["denoising_step"].tolist())) > 1
    last = sparse.trace["denoising_step"] == 3
    np.testing.assert_array_equal(sparse.trace["chain"][last, 1], sparse.action[last])


def test_without_a_declared_policy_nothing_is_scored(backbone: Backbone) -> None:
    config = backend("a", "sft", kind="gr00t", horizon=HORIZON)
    prediction = acted(backbone, config, observation(ROWS, 3))
    assert prediction.log_prob is None
    assert prediction.trace == {}
    with pytest.raises(ValidationError, match="most_deviation"):
        backend("a", "rl", kind="pi", flow={"kind": "flow_noise", "least_deviation": 0.3, "most_deviation": 0.3})
