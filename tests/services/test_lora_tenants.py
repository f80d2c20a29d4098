"""Tenants that adapt the base: trained by their slot, served in one forward with those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs.backend import BackendConfig, PolicyConfig
from configs.home import PROJECT_ROOT
from configs.model import LoraSpec
from configs.signature import schema_signature
from kernels import backbones
from kernels.backbones import Backbone
from services import serving
from services.policy_slot import PolicySlot
from services.policy_stacks import PolicyStacks
from services.serving import Request, ServingPolicy
from tests.services import policies


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(policies.BASE, PROJECT_ROOT)


def adapted(policy: PolicyConfig) -> PolicyConfig:
    """The same tenant with an adapter below its head."""
    module = LoraSpec(**policy.action_module.model_dump(exclude={"kind"}), rank=4, alpha=8)
    signature = schema_signature(policy.base_model, module, policy.cameras, light_visuals=False)
    return policy.model_copy(update={"action_module": module, "schema_signature": signature})


def backend(task: str) -> BackendConfig:
    declared = policies.backend("a", task)
    return declared.model_copy(update={"policy": adapted(declared.policy)})


def samples(seed: int = 0) -> dict[str, object]:
    """8 samples with the fields of an SFT partition."""
    seen = policies.observation(8, seed)
    return {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": seen["instructions"],
        "action": np.random.default_rng(seed + 1).normal(size=(8, 1, 2)).astype(np.float32),
        "action_is_pad": np.zeros((8, 1), bool),
    }


def rollout(slot: PolicySlot, backbone: Backbone, config: BackendConfig) -> dict[str, object]:
    """8 samples with the fields of an RL partition, as the slot's own parameters would act."""
    data = samples()
    scored = slot.evaluated(backbone, config, data)
    executed = np.ones((8, 1), bool)
    return {
        **data,
        "log_prob": scored["actor_log_prob"],
        "advantage": np.random.default_rng(3).normal(size=(8, 1)).astype(np.float32),
        "return": np.zeros(8, np.float32),
        "valid": executed,
        "sample_valid": np.ones(8, bool),
    }


def test_a_slot_trains_the_adapter_by_both_algorithms_and_the_base_stays(backbone: Backbone) -> None:
    base = {name: p.clone() for name, p in backbone.model.named_parameters()}
    for task, steps in (("sft", 2), ("rl", 4)):
        config = backend(task)
        slot = PolicySlot(config.policy)
        slot.ensure_optimizer(config.policy_key, config.algorithm)
        data = samples() if task == "sft" else rollout(slot, backbone, config)
        trained, report = slot.trained(backbone, config, data)
        assert report["optimizer_steps"] == steps
        before, after = slot.parameters(), trained.parameters()
        moved = {name for name in before if not np.array_equal(before[name], after[name])}
        assert {name for name in before if "lora_B" in name} <= moved, task
        again, _ = slot.trained(backbone, config, data)
        assert all(np.array_equal(array, again.parameters()[name]) for name, array in after.items()), task
    assert all(torch.equal(p, base[name]) for name, p in backbone.model.named_parameters())
    assert not any(p.requires_grad or p.grad is not None for p in backbone.model.parameters())


def test_adapted_and_plain_tenants_share_a_forward_and_answer_as_alone(backbone: Backbone) -> None:
    """Four requests, two of them of one adapted tenant; each with the bits of a forward of its own."""
    configs = [policies.policy("plain"), adapted(policies.policy("one")), adapted(policies.policy("two", seed=1))]
    served = []
    for config in configs:
        tensors = PolicySlot(config).parameters()
        rng = np.random.default_rng(config.seed)
        for name, array in tensors.items():
            if "lora_B" in name:
                array[...] = rng.normal(size=array.shape, scale=0.1)
        served.append(ServingPolicy(config, 0, tensors))
    requests = []
    for i, (policy, rows) in enumerate(((served[1], 2), (served[0], 3), (served[2], 1), (served[1], 1))):
        prefix, proprioception = policy.prepare(backbone, policies.observation(rows, i))
        requests.append(Request(policy, prefix, proprioception, None))
    together = serving.forward(backbone, requests, PolicyStacks(0))
    for request, prediction in zip(requests, together, strict=True):
        (alone,) = serving.forward(backbone, [request], PolicyStacks(0))
        assert np.array_equal(prediction.action, alone.action)
        assert np.array_equal(prediction.value, alone.value)
    # With the adapter left out, the same head answers otherwise.
    without = served[1].module.act(backbone.encode(requests[0].prefix), requests[0].proprioception, None)
    assert np.abs(without.action.numpy() - together[0].action).max() > 1e-3
