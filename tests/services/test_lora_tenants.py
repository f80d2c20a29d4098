"""Tenants that adapt the base: trained by their slot, served in one forward with those that do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.backend import BackendConfig, PolicyConfig
from configs.errors import DataFault, SpecError
from configs.home import PROJECT_ROOT
from configs.model import LoraSpec
from configs.signature import schema_signature
from kernels import backbones
from kernels.backbones import Backbone
from kernels.peft_adapters import adapter_shapes, exported
from services import serving
from services.busy import BusyLog
from services.inference_model import InferenceModelService
from services.policy_slot import PolicySlot
from services.policy_stacks import PolicyStacks
from services.serving import Request, ServingPolicy
from services.training_group import Member, train_alone
from services.training_model import TrainingModelService
from storage.peft_files import write_adapter
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
        "value": np.zeros(8, np.float32),
        "valid": executed,
        "terminated": ~executed,
        "truncated": ~executed,
        "sample_valid": np.ones(8, bool),
    }


def test_a_slot_trains_the_adapter_by_both_algorithms_and_the_base_stays(backbone: Backbone) -> None:
    base = {name: p.clone() for name, p in backbone.model.named_parameters()}
    for task, steps in (("sft", 2), ("rl", 4)):
        config = backend(task)
        slot = PolicySlot(config.policy)
        slot.ensure_optimizer(config.policy_key, config.algorithm)
        data = samples() if task == "sft" else rollout(slot, backbone, config)
        trained, report = train_alone(backbone, Member(slot, config, data), None, BusyLog())
        assert report["optimizer_steps"] == steps
        before, after = slot.parameters(), trained.parameters()
        moved = {name for name in before if not np.array_equal(before[name], after[name])}
        assert {name for name in before if "lora_B" in name} <= moved, task
        again, _ = train_alone(backbone, Member(slot, config, data), None, BusyLog())
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
        prefix, state, proprioception = policy.prepare(backbone, policies.observation(rows, i))
        requests.append(Request(policy, prefix, state, proprioception, None))
    together = serving.forward(backbone, requests, PolicyStacks(0))
    for request, prediction in zip(requests, together, strict=True):
        (alone,) = serving.forward(backbone, [request], PolicyStacks(0))
        assert np.array_equal(prediction.action, alone.action)
        assert np.array_equal(prediction.value, alone.value)
    # With the adapter left out, the same head answers otherwise.
    without = served[1].module.act(backbone.encode(requests[0].prefix), requests[0].proprioception, None)
    assert np.abs(without.action.numpy() - together[0].action).max() > 1e-3


def an_adapter_of_peft(folder: Path, config: BackendConfig, scale: float) -> dict[str, np.ndarray]:
    """Write the files; returns what is in them by own names."""
    module, base = config.policy.action_module, config.policy.base_model
    assert isinstance(module, LoraSpec)
    rng = np.random.default_rng(9)
    shapes = adapter_shapes(base, module.rank, module.target_modules)
    own = {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}
    write_adapter(folder, *exported(own, base, rank=module.rank, alpha=module.alpha))
    return own


def test_training_and_serving_start_from_the_same_adapter_at_version_0(tmp_path: Path) -> None:
    """A and B are the file's, the head is the seed's, and what is served is what a fresh forward with them gives."""
    config = backend("sft").model_copy(update={"start_from": str(tmp_path / "peft")})
    own = an_adapter_of_peft(tmp_path / "peft", config, 0.1)
    seeded = PolicySlot(config.policy).parameters()

    async def main() -> None:
        training = TrainingModelService(str(tmp_path), policies.BASES, 4)
        opened = await training.open_slot(config.model_dump(mode="json"), str(tmp_path / "out"), fresh=True)
        assert opened["version"] == 0
        started = (await training.export_params("a"))["tensors"]
        for name, array in started.items():
            expected = own[name.removeprefix("adapter.")] if name.startswith("adapter.") else seeded[name]
            assert np.array_equal(array, expected), name
        batching = {"max_batch_size": 64, "batch_timeout_s": 0.01}
        inference = InferenceModelService(str(tmp_path), policies.BASES, batching, 4, 2)
        policy = config.policy.model_dump(mode="json")
        seen, answers = policies.observation(3, 1), []
        for tensors in (started, None):
            assert await inference.open_policy(policy, fresh=True, tensors=tensors) == {"version": 0}
            answers.append((await inference.predict(seen, "a"))["action"])
        assert np.abs(answers[0] - answers[1]).max() > 1e-3, "the seed's own adapter adds nothing yet"
        await training.train_job(policies.put_demonstrations(tmp_path / "partitions", config))
        assert (await training.versions())["a"] == 2

    asyncio.run(main())


def test_files_that_changed_since_admission_are_refused_and_the_slot_stays(tmp_path: Path) -> None:
    config = backend("sft").model_copy(update={"start_from": str(tmp_path / "peft")})
    an_adapter_of_peft(tmp_path / "peft", config, np.inf)

    async def main() -> None:
        training = TrainingModelService(str(tmp_path), policies.BASES, 4)
        plain = config.model_copy(update={"start_from": None})
        await training.open_slot(plain.model_dump(mode="json"), str(tmp_path / "out"), fresh=True)
        before = (await training.export_params("a"))["tensors"]
        with pytest.raises(SpecError, match=r"adapter_model.*: got 'NaN or infinity'; possible: finite numbers"):
            await training.open_slot(config.model_dump(mode="json"), str(tmp_path / "out"), fresh=True)
        (tmp_path / "peft" / "adapter_model.safetensors").unlink()
        with pytest.raises(DataFault, match="No such file"):
            await training.open_slot(config.model_dump(mode="json"), str(tmp_path / "out"), fresh=True)
        after = (await training.export_params("a"))["tensors"]
        assert all(np.array_equal(array, after[name]) for name, array in before.items())

    asyncio.run(main())
