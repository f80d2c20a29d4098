"""Offline RL of modules that denoise, through the slot and the training service: numbers, bits, company, restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import AwrSpec
from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT
from kernels import backbones
from kernels.backbones import Backbone
from services.policy_slot import PolicySlot, training_fields
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore
from tests.services.policies import BASE, BASES, FLOWS, backend, job, observation, put_demonstrations

HORIZON = 2
WHOLE = 1 << 30  # bytes of features: all of a job's
KINDS = [(kind, name) for kind in ("gr00t", "pi", "pi05") for name in FLOWS]
PROMPTS = ("push", "push the red cube to the green target on the table and then move the gripper back to the left")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def offline(tenant: str, kind: str, name: str, **settings: Any) -> BackendConfig:
    """A workload of AWR: jobs of 8 samples, by default in two microbatches."""
    found = backend(tenant, "rl", kind=kind, horizon=HORIZON, flow=FLOWS[name])
    fields = {"jobs": 2, "batches_per_job": 2, "microbatch_size": 4, "optimizer": {"learning_rate": 3e-3}}
    algorithm = AwrSpec.model_validate(fields | settings)
    return found.model_copy(update={"algorithm": algorithm, "environment": None})


def recorded(seed: int = 0) -> dict[str, Any]:
    """8 samples with prompts of two lengths; the last two chunks end after their first action, and NaN follows."""
    seen, random = observation(8, seed), np.random.default_rng(seed + 1)
    is_pad = np.zeros((8, HORIZON), bool)
    is_pad[6:, 1] = True
    action = random.normal(0.5, 2.0, size=(8, HORIZON, 2)).astype(np.float32)
    action[is_pad] = np.nan
    return {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": [PROMPTS[i % 3 == 1] for i in range(8)],
        "action": action,
        "action_is_pad": is_pad,
        "return": random.normal(size=8).astype(np.float32),
    }


def slot_of(config: BackendConfig) -> PolicySlot:
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    return slot


def assert_same(one: PolicySlot, other: PolicySlot, key: str) -> None:
    """Parameters, optimizer and random state, to the bit."""
    assert one.version == other.version
    ours, theirs = one.parameters(), other.parameters()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    states = [
        {name: s.optimizers[key].adam.state.get(p, {}) for name, p in s.module.named_parameters()} for s in (one, other)
    ]
    assert any(states[0].values())
    for name, mine in states[0].items():
        assert mine.keys() == states[1][name].keys()
        assert all(torch.equal(value, states[1][name][field]) for field, value in mine.items())


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_step_weighs_the_flows_errors_by_what_the_critic_did_not_expect(
    backbone: Backbone, kind: str, name: str
) -> None:
    """One microbatch: mean of min(exp((G − V) / ½), 3) · error over its 14 valid actions; half the mean squared error
    of V over 8 rows.

    Reference: numpy in float64; errors and V by the module itself, of actions brought to scale by hand, with the draws
    that follow the shuffle.
    """
    config = offline("a", kind, name, temperature=0.5, weight_cap=3.0, batches_per_job=1, microbatch_size=8)
    slot, data = slot_of(config), recorded()
    drawing = torch.Generator()
    drawing.set_state(slot.generator.get_state())
    order = torch.randperm(8, generator=drawing)
    with torch.no_grad():
        found = slot.module.regress(
            slot._features(backbone, data, slice(0, 8))[order],
            torch.from_numpy(data["proprioception"])[order],
            (torch.from_numpy(data["action"]) - 0.5)[order] / 2.0,
            torch.from_numpy(data["action_is_pad"])[order],
            drawing,
        )
    error, value = found.error.double().numpy(), found.value.double().numpy()
    gained = data["return"][order.numpy()].astype(np.float64)
    weight = np.minimum(np.exp((gained - value) / 0.5), 3.0)
    counted = ~data["action_is_pad"][order.numpy()]
    trained, result = slot.trained(backbone, config, data, WHOLE)
    metrics = result["metrics"]
    assert metrics["policy_loss"] == pytest.approx((weight[:, None] * error)[counted].sum() / 14, rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(0.5 * ((value - gained) ** 2).mean(), rel=1e-4)
    assert metrics["weight_mean"] == pytest.approx(np.broadcast_to(weight[:, None], (8, 2))[counted].mean(), rel=1e-4)
    assert metrics["capped_fraction"] == pytest.approx(np.broadcast_to(weight[:, None] == 3, (8, 2))[counted].mean())
    assert (trained.version, metrics["nothing_to_learn"]) == (1, 0)
    assert torch.equal(trained.generator.get_state(), drawing.get_state()), "one shuffle, one draw a row, no more"


def test_a_job_reads_what_was_recorded_and_no_traces_of_decisions() -> None:
    for kind, name in KINDS:
        fields = {"image.top", "proprioception", "action", "action_is_pad", "return"}
        assert set(training_fields(offline("a", kind, name))) == fields


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_slot_restored_between_two_jobs_ends_as_one_that_was_not(
    backbone: Backbone, tmp_path: Path, kind: str, name: str
) -> None:
    """The noise that the second job draws follows from the checkpoint's random state, too; cosine goes on."""
    config = offline("a", kind, name, passes=2)
    first, _ = slot_of(config).trained(backbone, config, recorded(0), WHOLE)
    through, result = first.trained(backbone, config, recorded(1), WHOLE)
    assert result["version"] == 8
    assert result["metrics"]["policy_loss"] > 0
    first.save(
        tmp_path,
        config.policy_key,
        {
            "schema_signature": config.policy.schema_signature,
            "policy": config.policy.model_dump(mode="json"),
        },
    )
    again, _ = PolicySlot.restored(config, tmp_path, None, True).trained(backbone, config, recorded(1), WHOLE)
    assert_same(again, through, config.policy_key)


def test_company_changes_no_bit_of_an_offline_job(tmp_path: Path, backbone: Backbone) -> None:
    """Jobs of gr00t and of pi by the service, beside two supervised tenants that share its base in a group."""
    configs = [offline("denoises", "gr00t", "flow_sde"), offline("matches", "pi", "flow_noise")]
    supervised = [backend(f"shows-{kind}", kind=kind, horizon=HORIZON) for kind in ("oft", "gr00t")]
    root = tmp_path / "partitions"

    def put(config: BackendConfig) -> dict[str, Any]:
        described, data = job(config), recorded()
        PartitionStore(root).put(
            described["partition_id"],
            {name: data[name] for name in training_fields(config)}
            | {"instruction_index": np.array([PROMPTS.index(text) for text in data["instructions"]], np.int64)},
            tenant_id=config.policy.tenant,
            schema_signature=config.policy.schema_signature,
            policy_version=None,
            chunk=4,
            instructions=list(PROMPTS),
        )
        return described

    async def main() -> TrainingModelService:
        service = TrainingModelService(str(tmp_path), BASES, 4)
        for config in (*configs, *supervised):
            await service.open_slot(config.model_dump(mode="json"), str(tmp_path / config.policy.tenant), fresh=True)
        shown = [put_demonstrations(root, config) for config in supervised]
        group = [described["job_id"] for described in shown]
        calls = [service.train_job(put(configs[0])), *(service.train_job(described, group) for described in shown)]
        results = await asyncio.gather(*calls, service.train_job(put(configs[1])))
        assert [result["version"] for result in results] == [2, 2, 2, 2]
        return service

    service = asyncio.run(main())
    for config in configs:
        alone, _ = slot_of(config).trained(backbone, config, recorded(), WHOLE)
        assert_same(service._slots[config.policy.tenant], alone, config.policy_key)
