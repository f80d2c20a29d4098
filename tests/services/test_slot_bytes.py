"""What a tenant costs in memory: its own parameters and optimizer state, and nothing of the base.

Sizes are those of `policies.SMALL` on the tiny Qwen3-VL: D 128, N 4 action tokens, 2 layers of 4 query and 2 key/value
heads of width 32; one action of width 2, state of width 2.
"""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.backend import BackendConfig
from services.inference_model import InferenceModelService
from services.policy_slot import PolicySlot
from services.training_model import TrainingModelService
from tests.services.policies import BASE, BASES, SMALL, backend, put_demonstrations

TENANTS = "abc"


def linear(inputs: int, outputs: int, bias: int = 1) -> int:
    return inputs * outputs + bias * outputs


def residual_mlp(outputs: int) -> int:
    """4 · 128 features and the state to 32, one residual block, a norm, out."""
    return linear(514, 32) + (2 * 32 + linear(32, 32)) + 2 * 32 + linear(32, outputs)


HEAD_NORM = 2 * 512
VALUE_AND_LOG_STD = residual_mlp(1) + 2  # supervised training gives these no gradient, so they have no moments
# Rank 4 in queries and outputs (128 to 128), keys and values (128 to 64) of two layers.
ADAPTER = 2 * 4 * (2 * (128 + 128) + 2 * (128 + 64))
GR00T = (
    (linear(2, 32) + linear(32, 32))  # state
    + (linear(2, 32) + linear(64, 32) + linear(32, 32))  # action encoder
    + (linear(32, 32) + linear(32, 2))  # action decoder
    + 4 * 32  # future tokens
    + 1 * 32  # position
    + (linear(256, 32) + linear(32, 32))  # time
    + 2 * (linear(32, 64) + 2 * linear(32, 32) + linear(32, 128) + linear(128, 32))  # norm, query, out, feed-forward
    + 2 * linear(128, 32)  # keys and values of the block that attends to the prefix
    + 2 * linear(32, 32)  # of the block that attends to itself
    + (linear(32, 64) + linear(32, 32))  # norm and out
)
# Query, key, value and out of two heads of 32; gate, up and down of 64.
EXPERT_LAYER = 4 * linear(32, 64, 0) + 3 * linear(32, 64, 0)
PI0 = 2 * linear(2, 32) + linear(64, 32) + linear(32, 32) + 2 * (EXPERT_LAYER + 2 * 32) + 32 + linear(32, 2)
PI05 = linear(2, 32) + 2 * linear(32, 32) + 2 * (EXPERT_LAYER + 2 * linear(32, 96)) + linear(32, 96) + linear(32, 2)

# Kind: all parameters, those that supervised training moves, and in how many tensors these are.
NUMBERS = {
    "oft": (HEAD_NORM + residual_mlp(2) + VALUE_AND_LOG_STD, HEAD_NORM + residual_mlp(2), 12),
    "lora": (ADAPTER + HEAD_NORM + residual_mlp(2) + VALUE_AND_LOG_STD, ADAPTER + HEAD_NORM + residual_mlp(2), 28),
    "gr00t": (GR00T, GR00T, 52),
    "pi": (PI0, PI0, 29),
    "pi05": (PI05, PI05, 32),
}


def live(service: TrainingModelService | InferenceModelService) -> int:
    """Bytes of all tensors' memory, but for that of bases: what is resident for good is not walked."""
    # A thread that has just answered may still hold what it worked on: the service gets new ones.
    for name in ("_compute", "_files", "_prepare"):
        if (executor := getattr(service, name, None)) is not None:
            executor.shutdown(wait=True)
            setattr(service, name, ThreadPoolExecutor(1))
    return tensor_bytes()


def tensor_bytes() -> int:
    """Bytes of all tensors' memory in this process."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_every_kind_of_module_is_counted() -> None:
    assert NUMBERS.keys() == SMALL.keys()


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_tenants_of_the_training_service_cost_their_slots_and_no_base(kind: str, tmp_path: Path) -> None:
    """Parameters, and once trained two moments of each that moves and Adam's counter a tensor; gradients are let go."""
    numbers, moved, tensors = NUMBERS[kind]

    async def main() -> None:
        service = TrainingModelService(str(tmp_path), BASES, 4)

        async def open_slot(config: BackendConfig) -> None:
            await service.open_slot(config.model_dump(mode="json"), str(tmp_path / config.policy.tenant), fresh=True)

        first = backend("first", kind=kind)  # with it the base makes what it keeps for pictures of this size
        await open_slot(first)
        await service.train_job(put_demonstrations(tmp_path / "partitions", first))
        await service.close_slot("first")
        configs = [backend(tenant, kind=kind) for tenant in TENANTS]
        base, before = (await service.status())["base_models"], live(service)
        for config in configs:
            await open_slot(config)
        assert await slots(service) == dict.fromkeys(TENANTS, 4 * numbers)
        assert live(service) - before == 3 * 4 * numbers
        for config in configs:
            await service.train_job(put_demonstrations(tmp_path / "partitions", config))
        trained = 4 * numbers + 2 * 4 * moved + 4 * tensors
        assert await slots(service) == dict.fromkeys(TENANTS, trained)
        assert live(service) - before == 3 * trained
        status = await service.status()
        assert status["base_models"] == base, "counted once, whatever the number of tenants"
        for tenant in TENANTS:
            await service.close_slot(tenant)
        assert live(service) - before == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_what_a_job_is_trained_on_is_counted_before_it_is_there(kind: str) -> None:
    """A copy of the slot whose parameters all have gradients and moments, of which the slot itself has none yet; and of
    a second optimizer, which is copied too, the room that it is to have."""
    config, rl = backend("a", kind=kind), backend("a", "rl", kind=kind)
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    counted = slot.copy_bytes
    before = tensor_bytes()
    copy = slot.copied()
    loss = torch.stack([p.square().sum() for p in copy.module.parameters()]).sum()
    loss.backward()
    del loss
    copy.optimizers[config.policy_key].adam.step()
    assert tensor_bytes() - before == counted == 4 * 4 * NUMBERS[kind][0] + 4 * len(list(slot.module.parameters()))
    slot.ensure_optimizer(rl.policy_key, rl.algorithm)
    assert slot.copy_bytes - counted == 2 * 4 * NUMBERS[kind][0] + 4 * len(list(slot.module.parameters()))


async def slots(service: TrainingModelService) -> dict[str, int]:
    return {tenant: slot["bytes"] for tenant, slot in (await service.status())["slots"].items()}


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_tenants_of_the_inference_service_cost_their_parameters_and_no_base(kind: str, tmp_path: Path) -> None:
    """A second version is kept beside the first; neither has an optimizer."""
    numbers, _, _ = NUMBERS[kind]

    async def main() -> None:
        batching = {"max_batch_size": 64, "batch_timeout_s": 0.01}
        service = InferenceModelService(str(tmp_path), BASES, batching, 4, 2)
        base, before = (await service.status())["base_models"], live(service)
        configs = [backend(tenant, kind=kind).policy for tenant in TENANTS]
        for config in configs:
            await service.open_policy(config.model_dump(mode="json"), fresh=True)
        assert await tenants(service) == dict.fromkeys(TENANTS, 4 * numbers)
        assert live(service) - before == 3 * 4 * numbers
        current = service._tenants["a"].current.module
        tensors = {name: p.numpy().copy() for name, p in current.named_parameters()}
        await service.load_weights("a", configs[0].schema_signature, 1, tensors)
        assert await tenants(service) == {"a": 8 * numbers, "b": 4 * numbers, "c": 4 * numbers}
        assert live(service) - before == 4 * 4 * numbers
        assert (await service.status())["base_models"] == base == {BASE.name: base[BASE.name]}

    asyncio.run(main())


async def tenants(service: InferenceModelService) -> dict[str, Any]:
    return {tenant: serving["bytes"] for tenant, serving in (await service.status())["tenants"].items()}
