"""Action modules: what every registered one keeps, and the oft head's own numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from configs import presets
from configs.errors import Conflict, TenantFault
from configs.model import ActionModuleSpec, LoraSpec, OftSpec, PiSpec
from kernels import action_modules
from kernels.action_modules import ActionModule, export_parameters, load_parameters
from kernels.features import PrefixCache, VLAFeature
from kernels.losses import PpoCounts, ppo

BASE = presets.base_model("tiny-qwen3-vl")
SPECS: dict[str, ActionModuleSpec] = {
    "oft": OftSpec(horizon=4, action_width=3, state_width=5, proprioception="head"),
    "pi": PiSpec(
        horizon=4,
        action_width=3,
        state_width=5,
        proprioception="head",
        hidden_width=32,
        mlp_width=64,
        heads=2 * BASE.num_key_value_heads,
    ),
    "lora": LoraSpec(horizon=4, action_width=3, state_width=5, proprioception="head", rank=4, alpha=8),
}


def inputs(rows: int, seed: int = 0, state_width: int = 5) -> tuple[VLAFeature, torch.Tensor]:
    """A feature of all parts, its rows' prefixes of 17 to 24 tokens, and a state."""
    generator = torch.Generator().manual_seed(seed)
    action_tokens = torch.randn(rows, BASE.num_action_tokens, BASE.hidden_width, generator=generator)
    state = torch.randn(rows, state_width, generator=generator)
    tokens = torch.randn(rows, 24, BASE.hidden_width, generator=generator)
    shape = (rows, BASE.num_key_value_heads, 24, BASE.head_width)
    keys, values = (tuple(torch.randn(shape, generator=generator) for _ in range(BASE.num_layers)) for _ in range(2))
    position = 24 - torch.arange(rows) % 8
    mask = torch.arange(24) < position[:, None]
    return VLAFeature(action_tokens, tokens, PrefixCache(keys, values, position), mask), state


def only_rl(module: ActionModule) -> None:
    """Leave a test that scores actions to the modules that do."""
    if not module.learns_by_rl:
        pytest.skip("scores no actions")


@pytest.fixture(params=sorted(action_modules.MODULES))
def module(request: pytest.FixtureRequest) -> ActionModule:
    return action_modules.build(SPECS[request.param], BASE, seed=7)


def test_registered_kinds_are_the_declared_ones() -> None:
    assert set(action_modules.MODULES) == set(SPECS)


def test_shapes_are_the_documented_ones(module: ActionModule) -> None:
    feature, state = inputs(6)
    decision = module.act(feature, state, torch.Generator().manual_seed(0))
    assert decision.action.shape == (6, 4, 3)
    assert not decision.action.requires_grad
    if not module.learns_by_rl:
        return
    assert decision.log_prob.shape == (6, 4)
    assert decision.value.shape == (6,)
    scored = module.evaluate(feature, state, decision.action)
    assert scored.log_prob.shape == scored.entropy.shape == (6, 4)
    assert scored.value.shape == (6,)
    assert module.mean(feature, state).shape == (6, 4, 3)
    assert scored.log_prob.requires_grad


def test_a_module_is_built_on_its_bases_device_with_the_same_weights() -> None:
    """`meta` stands for any device that is not the CPU."""
    there = action_modules.build(SPECS["oft"], BASE.model_copy(update={"device": "meta"}), seed=7)
    assert {p.device.type for p in there.parameters()} == {"meta"}
    assert there.device.type == "meta"
    assert action_modules.build(SPECS["oft"], BASE, seed=7).device.type == BASE.device == "cpu"


def test_a_module_on_a_gpu_takes_what_is_on_the_cpu_and_answers_there(module: ActionModule) -> None:
    """Without a GPU: torch's fake tensors have no numbers, but refuse an operation over two devices like real ones.

    The backward pass of such tensors takes torch's CUDA build, so it is not part of this.
    """
    known, _ = inputs(6)
    with FakeTensorMode(), torch.no_grad():
        for part in module.modules():
            for name, p in part.named_parameters(recurse=False):
                part.register_parameter(name, nn.Parameter(torch.empty(p.shape, device="cuda"), requires_grad=False))
        assert module.device.type == "cuda"
        feature = known.map(lambda part: torch.empty(part.shape, dtype=part.dtype, device="cuda"))
        state, action = torch.empty(6, 5), torch.empty(6, 4, 3)
        with pytest.raises(RuntimeError, match="same device"):  # what the moves are for
            feature.action_tokens + torch.empty(feature.action_tokens.shape)
        for generator in (None, torch.Generator()):
            decision = module.act(feature, state, generator)
            assert decision.action.device.type == "cpu"
            if module.learns_by_rl:
                assert {decision.log_prob.device.type, decision.value.device.type} == {"cpu"}
        loss = module.imitation_loss(feature, state, action, torch.zeros(6, 4, dtype=torch.bool), 72.0, None)
        assert loss.device.type == "cpu"
        if not module.learns_by_rl:
            return
        scored = module.evaluate(feature, state, action)
        assert {scored.log_prob.device.type, scored.entropy.device.type, scored.value.device.type} == {"cpu"}
        assert module.mean(feature, state).device.type == "cpu"


def test_a_rows_decision_does_not_depend_on_its_company(module: ActionModule) -> None:
    feature, state = inputs(70)
    whole = module.act(feature, state, None)
    for start, stop in ((0, 1), (0, 3), (5, 22), (9, 27), (0, 30), (69, 70), (1, 70)):
        part = module.act(feature[start:stop], state[start:stop], None)
        assert torch.equal(part.action, whole.action[start:stop])
        if module.learns_by_rl:
            assert torch.equal(part.log_prob, whole.log_prob[start:stop])
            assert torch.equal(part.value, whole.value[start:stop])


def test_sampler_and_scorer_agree_so_that_frozen_weights_give_ratio_one(module: ActionModule) -> None:
    """An optimizer step with learning rate 0 lies between acting on 8 rows and scoring them in two microbatches."""
    only_rl(module)
    feature, state = inputs(8)
    decision = module.act(feature, state, torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for rows in (slice(0, 4), slice(4, 8)):
        scored = module.evaluate(feature[rows], state[rows], decision.action[rows])
        loss = ppo(
            log_prob=scored.log_prob,
            old_log_prob=decision.log_prob[rows],
            entropy=scored.entropy,
            value=scored.value,
            advantage=torch.ones(4, 4),
            returns=torch.zeros(4),
            valid=torch.ones(4, 4, dtype=torch.bool),
            counts=PpoCounts(16.0, 4.0),
            clip_coef=0.2,
            value_coef=0.5,
            entropy_coef=0.0,
            granularity="action",
        )
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        torch.testing.assert_close(
            scored.log_prob.exp() / decision.log_prob[rows].exp(), torch.ones(4, 4), atol=1e-5, rtol=0
        )
        assert abs(loss.approx_kl) < 1e-6
        assert loss.clip_fraction == 0
        assert loss.policy == pytest.approx(-1, abs=1e-5)
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_the_same_generator_gives_the_same_sample(module: ActionModule) -> None:
    feature, state = inputs(3)
    one, two = (module.act(feature, state, torch.Generator().manual_seed(4)).action for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, module.act(feature, state, torch.Generator().manual_seed(5)).action)


def test_the_same_seed_gives_the_same_parameters_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one, two, other = (action_modules.build(SPECS["oft"], BASE, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.get_parameter("policy.last.weight"), other.get_parameter("policy.last.weight"))


def test_exported_parameters_are_copies_and_come_back_exactly(module: ActionModule) -> None:
    payload = export_parameters(module)
    other = action_modules.build(module.spec, BASE, seed=8)
    load_parameters(other, payload)
    feature, state = inputs(2)
    assert torch.equal(module.act(feature, state, None).action, other.act(feature, state, None).action)
    next(iter(payload.values()))[...] = 99.0
    assert all(float(p.detach().abs().max()) < 99 for p in module.parameters())


def test_a_payload_that_does_not_fit_is_refused_and_changes_nothing(module: ActionModule) -> None:
    before = export_parameters(module)
    last = list(before)[-1]
    for wrong in (
        {name: value for name, value in before.items() if name != last},
        {**before, "extra": np.zeros(1, np.float32)},
        {**before, last: np.zeros(9, np.float32)},
        {**before, last: before[last].astype(np.float64)},
    ):
        changed = {name: value if name in (last, "extra") else value + 1 for name, value in wrong.items()}
        with pytest.raises(Conflict, match=rf"parameters\.({re.escape(last)}|extra): got .* possible: "):
            load_parameters(module, changed)
    assert all(np.array_equal(before[name], value) for name, value in export_parameters(module).items())


def test_oft_log_probability_and_entropy_by_hand() -> None:
    """A = 2, log-std 0: at distance (1, 2) from the mean, −½(1 + 4) − ln 2π; entropy 2 · ½ ln 2πe."""
    spec = OftSpec(horizon=1, action_width=2, state_width=1, proprioception="none", initial_log_std=0.0)
    module = action_modules.build(spec, BASE, seed=0)
    feature, _ = inputs(1)
    mean = module.mean(feature, None)
    scored = module.evaluate(feature, None, mean.detach() + torch.tensor([1.0, 2.0]))
    assert scored.log_prob.item() == pytest.approx(-2.5 - math.log(2 * math.pi), abs=1e-5)
    assert scored.entropy.item() == pytest.approx(math.log(2 * math.pi * math.e), abs=1e-5)


def test_oft_starts_near_zero_with_a_small_final_layer() -> None:
    feature, state = inputs(64)
    spec = SPECS["oft"]
    small = action_modules.build(spec.model_copy(update={"final_layer_scale": 0.01}), BASE, seed=0)
    assert small.act(feature, state, None).action.abs().max() < 0.05
    assert action_modules.build(spec, BASE, seed=0).act(feature, state, None).action.abs().max() > 0.2


@pytest.mark.parametrize("where", ["none", "prompt"])
def test_oft_reads_proprioception_in_the_head_only_where_declared(where: str) -> None:
    feature, state = inputs(2)
    deaf = action_modules.build(SPECS["oft"].model_copy(update={"proprioception": where}), BASE, seed=0)
    assert torch.equal(deaf.act(feature, state, None).action, deaf.act(feature, state + 1, None).action)
    hearing = action_modules.build(SPECS["oft"], BASE, seed=0)
    assert not torch.equal(hearing.act(feature, state, None).action, hearing.act(feature, state + 1, None).action)
    with pytest.raises(TenantFault, match=r"proprioception: got \(2, 4\); possible: shape \(2, 5\)"):
        hearing.act(feature, state[:, :4], None)
    with pytest.raises(TenantFault, match="proprioception: got None"):
        hearing.act(feature, None, None)


def test_the_values_loss_does_not_move_the_policy() -> None:
    module = action_modules.build(SPECS["oft"], BASE, seed=0)
    feature, state = inputs(4)
    module.evaluate(feature, state, torch.zeros(4, 4, 3)).value.sum().backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved
    assert not any(name.startswith("policy") or name == "log_std" for name in moved)


def test_interleaved_backwards_move_only_the_module_that_steps() -> None:
    """A backward, B backward, A step."""
    a, b = (action_modules.build(SPECS["oft"], BASE, seed) for seed in (0, 1))
    before = {"a": export_parameters(a), "b": export_parameters(b)}
    optimizer = torch.optim.AdamW(a.parameters(), lr=1e-2)
    feature, state = inputs(4)
    for module in (a, b):
        module.mean(feature, state).square().mean().backward()
    optimizer.step()
    assert all(np.array_equal(before["b"][name], value) for name, value in export_parameters(b).items())
    assert not np.array_equal(before["a"]["policy.last.weight"], export_parameters(a)["policy.last.weight"])
