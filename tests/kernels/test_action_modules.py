"""Action modules: what every registered one keeps, and the oft head's own numbers."""

from __future__ import annotations

import math
import re
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from configs import presets
from configs.errors import Conflict, SpecError, TenantFault
from configs.model import ActionModuleSpec, FlowNoiseSpec, FlowSdeSpec, Gr00tSpec, LoraSpec, OftSpec, Part, PiSpec
from kernels import action_modules, flow_matching
from kernels.action_modules import ActionModule, export_parameters, load_parameters
from kernels.features import PrefixCache, VLAFeature
from kernels.losses import Coefficients, PpoCounts, policy_gradient, sft_valid_count

BASE = presets.base_model("tiny-qwen3-vl")
LENGTH = 24
SPECS: dict[str, ActionModuleSpec] = {
    "gr00t": Gr00tSpec(
        horizon=4,
        action_width=3,
        state_width=5,
        proprioception="head",
        hidden_width=24,
        layers=3,
        heads=2,
        head_width=16,
        future_tokens=3,
        repeated_steps=3,
        embodiments=2,
        embodiment=1,
    ),
    "oft": OftSpec(horizon=4, action_width=3, state_width=5, hidden_width=256, proprioception="head"),
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
STOCHASTIC = {
    "sde": FlowSdeSpec(value_width=16, value_blocks=1),
    "noise": FlowNoiseSpec(value_width=16, value_blocks=1),
}
SPECS |= {
    f"{kind} by {name}": SPECS[kind].model_copy(update={"policy": policy})
    for kind in ("gr00t", "pi")
    for name, policy in STOCHASTIC.items()
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


def demonstration(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks [B, 4, 3] and is_pad [B, 4]; every other row ends after its third action."""
    action = torch.randn(rows, 4, 3, generator=torch.Generator().manual_seed(100))
    is_pad = torch.zeros(rows, 4, dtype=torch.bool)
    is_pad[::2, 3] = True
    return action, is_pad


def changed_behind_the_mask(feature: VLAFeature, value: float) -> VLAFeature:
    """The same feature with `value` wherever its mask is False."""
    assert feature.cache is not None
    real = feature.mask[:, None, :, None]
    keys, values = (
        tuple(torch.where(real, layer, torch.tensor(value)) for layer in layers)
        for layers in (feature.cache.keys, feature.cache.values)
    )
    tokens = torch.where(feature.mask[..., None], feature.tokens, torch.tensor(value))
    return VLAFeature(feature.action_tokens, tokens, PrefixCache(keys, values, feature.cache.position), feature.mask)


def loss_and_gradients(
    module: ActionModule,
    feature: VLAFeature,
    state: torch.Tensor,
    action: torch.Tensor,
    is_pad: torch.Tensor,
    count: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    count = sft_valid_count(is_pad, 3) if count is None else count
    loss = module.imitation_loss(feature, state, action, is_pad, count, generator)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.fixture(params=sorted(SPECS))
def module(request: pytest.FixtureRequest) -> ActionModule:
    return action_modules.build(SPECS[request.param], BASE, seed=7)


BY_RL = {kind for kind in SPECS if action_modules.build(SPECS[kind], BASE, seed=0).learns_by_rl}


@pytest.fixture(params=sorted(BY_RL))
def scoring(request: pytest.FixtureRequest) -> ActionModule:
    """A module that learns by RL."""
    return action_modules.build(SPECS[request.param], BASE, seed=7)


def test_registered_kinds_are_the_declared_ones() -> None:
    assert set(action_modules.MODULES) == {spec.kind for spec in SPECS.values()}


def test_shapes_are_the_documented_ones(module: ActionModule) -> None:
    feature, state = inputs(6)
    for generator in (None, torch.Generator().manual_seed(0)):
        decision = module.act(feature, state, generator)
        assert decision.action.shape == (6, 4, 3)
        assert decision.action.dtype == torch.float32
        assert not decision.action.requires_grad
        assert (decision.log_prob is not None) == (decision.value is not None) == module.learns_by_rl
    loss = module.imitation_loss(feature, state, *demonstration(6), 1.0, torch.Generator())
    assert loss.shape == ()
    assert loss.requires_grad


def test_shapes_of_scores_are_the_documented_ones(scoring: ActionModule) -> None:
    feature, state = inputs(6)
    decision = scoring.act(feature, state, torch.Generator().manual_seed(0))
    assert decision.log_prob.shape == (6, 4)
    assert decision.value.shape == (6,)
    assert set(decision.trace) == set(scoring.spec.trace)
    scored = scoring.evaluate(feature, state, decision.trace)
    assert scored.log_prob.shape == scored.entropy.shape == (6, 4)
    assert scored.value.shape == (6,)
    assert scored.log_prob.requires_grad


@pytest.mark.parametrize("kind", sorted(set(SPECS) - BY_RL))
def test_a_module_that_does_not_learn_by_rl_refuses_to_score(kind: str) -> None:
    module = action_modules.build(SPECS[kind], BASE, seed=7)
    feature, state = inputs(2)
    with pytest.raises(SpecError, match=r"action_module: \w+ scores no actions; possible: supervised fine-tuning"):
        module.evaluate(feature, state, module.act(feature, state, None).trace)


def test_the_parts_that_a_module_reads_are_enough_and_all_of_them_matter(module: ActionModule) -> None:
    feature, state = inputs(3)
    only = feature.only(module.reads)
    assert {name for name in get_args(Part) if getattr(only, name) is not None} == module.reads
    given = module.act(only, state, None).action
    assert torch.equal(given, module.act(feature, state, None).action)
    turned = only.map(lambda t: t.flip(-1) if t.is_floating_point() else t)
    assert not torch.equal(given, module.act(turned, state, None).action)


def test_what_stands_behind_the_mask_changes_no_bit(module: ActionModule) -> None:
    feature, state = inputs(5)
    assert not feature.mask.all()
    action, is_pad = demonstration(5)
    right = module.act(feature, state, None).action
    loss, gradients = loss_and_gradients(module, feature, state, action, is_pad)
    for value in (0.0, 1e30, float("nan")):
        other = changed_behind_the_mask(feature, value)
        assert torch.equal(module.act(other, state, None).action, right)
        other_loss, other_gradients = loss_and_gradients(module, other, state, action, is_pad)
        assert torch.equal(other_loss, loss)
        assert all(torch.equal(other_gradients[n], g) for n, g in gradients.items())


def test_what_is_padded_reaches_neither_loss_nor_gradient(module: ActionModule) -> None:
    feature, state = inputs(5)
    action, is_pad = demonstration(5)
    loss, gradients = loss_and_gradients(module, feature, state, action, is_pad)
    assert loss > 0
    assert torch.isfinite(loss)
    for value in (1e30, float("nan")):
        padded = torch.where(is_pad[..., None], torch.tensor(value), action)
        other_loss, other_gradients = loss_and_gradients(module, feature, state, padded, is_pad)
        assert torch.equal(other_loss, loss)
        assert all(torch.equal(other_gradients[n], g) for n, g in gradients.items())
    nothing, none = loss_and_gradients(module, feature, state, action, torch.ones(5, 4, dtype=torch.bool))
    assert nothing == 0
    assert all((g == 0).all() for g in none.values())


def test_what_is_padded_reaches_neither_scores_nor_errors(scoring: ActionModule) -> None:
    """NaN behind the prefix's mask, and in recorded actions that are padding: the same bits, gradients too."""
    feature, state = inputs(5)
    assert not feature.mask.all()
    action, is_pad = demonstration(5)
    trace = scoring.act(feature, state, torch.Generator().manual_seed(1)).trace

    def found(feature: VLAFeature, action: torch.Tensor) -> list[torch.Tensor]:
        scoring.zero_grad()
        scored = scoring.evaluate(feature, state, trace)
        regression = scoring.regress(feature, state, action, is_pad, torch.Generator().manual_seed(2))
        results = [scored.log_prob, scored.entropy, scored.value, regression.error, regression.value]
        sum((result.sum() for result in results), torch.zeros(())).backward()
        return [*(result.detach() for result in results), *(p.grad for p in scoring.parameters() if p.grad is not None)]

    right = found(feature, action)
    assert all(result.isfinite().all() for result in right)
    assert (right[3][is_pad] == 0).all()
    assert (right[3][~is_pad] != 0).all()
    for value in (1e30, math.nan):
        padded = torch.where(is_pad[..., None], torch.tensor(value), action)
        other = found(changed_behind_the_mask(feature, value), padded)
        assert len(other) == len(right)
        assert all(torch.equal(a, b) for a, b in zip(other, right, strict=True))


def test_microbatches_with_one_generator_add_up_to_the_whole_batch(module: ActionModule) -> None:
    """17 valid actions of 20; as 2 + 2 + 1 rows, each divided by the whole batch's count."""
    feature, state = inputs(5)
    action, is_pad = demonstration(5)
    count = sft_valid_count(is_pad, 3)
    assert count == 17 * 3
    whole, gradients = loss_and_gradients(
        module, feature, state, action, is_pad, generator=torch.Generator().manual_seed(3)
    )
    generator = torch.Generator().manual_seed(3)
    total, sums = torch.zeros(()), {n: torch.zeros_like(g) for n, g in gradients.items()}
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        loss, part = loss_and_gradients(
            module, feature[rows], state[rows], action[rows], is_pad[rows], count, generator
        )
        total += loss
        for n, g in part.items():
            sums[n] += g
    torch.testing.assert_close(total, whole, atol=1e-6, rtol=1e-5)
    for n, g in gradients.items():
        torch.testing.assert_close(sums[n], g, atol=1e-6, rtol=1e-4)


def test_a_module_is_built_on_its_bases_device_with_the_same_weights() -> None:
    """`meta` stands for any device that is not the CPU."""
    for spec in SPECS.values():
        there = action_modules.build(spec, BASE.model_copy(update={"device": "meta"}), seed=7)
        assert {p.device.type for p in there.parameters()} == {"meta"}
        assert there.device.type == "meta"
        assert action_modules.build(spec, BASE, seed=7).device.type == BASE.device == "cpu"


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
            results = [decision.action, decision.log_prob, decision.value]
            results.append(
                module.imitation_loss(
                    feature, state, action, torch.empty(6, 4, dtype=torch.bool), 1.0, generator or torch.Generator()
                )
            )
            if module.learns_by_rl:
                scored = module.evaluate(feature, state, decision.trace)
                found = module.regress(feature, state, action, torch.empty(6, 4, dtype=torch.bool), torch.Generator())
                results += [scored.log_prob, scored.entropy, scored.value, found.error, found.value]
            assert {result.device.type for result in results if result is not None} == {"cpu"}


def test_a_rows_decision_does_not_depend_on_its_company(module: ActionModule) -> None:
    feature, state = inputs(70)
    whole = module.act(feature, state, None)
    for start, stop in ((0, 1), (0, 3), (5, 22), (9, 27), (0, 30), (69, 70), (1, 70)):
        part = module.act(feature[start:stop], state[start:stop], None)
        assert torch.equal(part.action, whole.action[start:stop])
        if module.learns_by_rl:
            assert torch.equal(part.log_prob, whole.log_prob[start:stop])
            assert torch.equal(part.value, whole.value[start:stop])


def test_a_row_of_nan_leaves_its_neighbours_bits(module: ActionModule) -> None:
    feature, state = inputs(3)
    quiet = module.act(feature, state, None).action
    ill = state.clone()
    ill[1] = float("nan")
    beside = module.act(feature, ill, None).action
    assert beside[1].isnan().all()
    assert torch.equal(beside[[0, 2]], quiet[[0, 2]])


def test_sampler_and_scorer_agree_so_that_frozen_weights_give_ratio_one(scoring: ActionModule) -> None:
    """An optimizer step with learning rate 0 lies between acting on 8 rows and scoring them in two microbatches."""
    feature, state = inputs(8)
    decision = scoring.act(feature, state, torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(scoring.parameters(), lr=0.0)
    for rows in (slice(0, 4), slice(4, 8)):
        trace = {name: kept[rows] for name, kept in decision.trace.items()}
        scored = scoring.evaluate(feature[rows], state[rows], trace)
        loss = policy_gradient(
            Coefficients(granularity="action", clip_low=0.2, clip_high=0.2, value_coef=0.5),
            log_prob=scored.log_prob,
            old_log_prob=decision.log_prob[rows],
            entropy=scored.entropy,
            value=scored.value,
            advantage=torch.ones(4, 4),
            returns=torch.zeros(4),
            valid=torch.ones(4, 4, dtype=torch.bool),
            counts=PpoCounts(16.0, 4.0),
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
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in scoring.parameters())


def test_the_same_generator_gives_the_same_sample(module: ActionModule) -> None:
    feature, state = inputs(3)
    one, two = (module.act(feature, state, torch.Generator().manual_seed(4)).action for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, module.act(feature, state, torch.Generator().manual_seed(5)).action)
    alike = feature[torch.zeros(3, dtype=torch.long)], state[torch.zeros(3, dtype=torch.long)]
    first, second, _ = module.act(*alike, torch.Generator().manual_seed(4)).action
    assert not torch.equal(first, second)
    first, second, _ = module.act(*alike, None).action
    assert torch.equal(first, second)


def test_without_exploring_a_gaussian_gives_its_mean_and_a_flow_what_follows_from_its_drawn_start(
    scoring: ActionModule,
) -> None:
    """Reference of a flow: the start that the same generator gives, decoded with no stochastic step."""
    feature, state = inputs(3)
    quiet = scoring.draw(3, torch.Generator().manual_seed(4), exploring=False)
    found = scoring.act(feature, state, torch.Generator().manual_seed(4), exploring=False).action
    if "start" not in quiet:
        assert torch.equal(found, scoring.act(feature, state, None).action)
        return
    assert not torch.equal(quiet["start"][0], quiet["start"][1])
    still = scoring.draw(3, None) | {"start": flow_matching.sample_noise(3, 4, 3, torch.Generator().manual_seed(4))}
    assert torch.equal(found, scoring.decode(feature, state, still).action)
    assert not torch.equal(found, scoring.act(feature, state, torch.Generator().manual_seed(4)).action)
    assert not torch.equal(found, scoring.act(feature, state, None).action)


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_the_same_seed_gives_the_same_parameters_and_leaves_the_global_generator_alone(kind: str) -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one, two, other = (action_modules.build(SPECS[kind], BASE, seed) for seed in (7, 7, 8))
    feature, state = inputs(2)
    one.act(feature, state, None)
    one.imitation_loss(feature, state, *demonstration(2), 1.0, torch.Generator())
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    drawn = [name for name, p in one.named_parameters() if p.dim() == 2 and p.abs().max() > 0]
    assert drawn
    assert not any(torch.equal(one.get_parameter(name), other.get_parameter(name)) for name in drawn)
    assert all(torch.isfinite(p).all() for p in one.parameters())


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_exported_parameters_are_copies_and_come_back_exactly(kind: str) -> None:
    module = action_modules.build(SPECS[kind], BASE, seed=7)
    payload = export_parameters(module)
    other = action_modules.build(SPECS[kind], BASE, seed=8)
    feature, state = inputs(2)
    assert not torch.equal(module.act(feature, state, None).action, other.act(feature, state, None).action)
    load_parameters(other, payload)
    assert torch.equal(module.act(feature, state, None).action, other.act(feature, state, None).action)
    next(iter(payload.values()))[...] = 99.0
    assert all(float(p.detach().abs().max()) < 99 for p in module.parameters())


def test_a_payload_that_does_not_fit_is_refused_and_changes_nothing(module: ActionModule) -> None:
    before = export_parameters(module)
    last = next(reversed(before))
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
    declared = {"horizon": 1, "action_width": 2, "state_width": 1, "hidden_width": 32, "proprioception": "none"}
    spec = OftSpec(**declared, initial_log_std=0.0)
    module = action_modules.build(spec, BASE, seed=0)
    feature, _ = inputs(1)
    mean = module.mean(feature, None)
    scored = module.evaluate(feature, None, {"action": mean.detach() + torch.tensor([1.0, 2.0])})
    assert scored.log_prob.item() == pytest.approx(-2.5 - math.log(2 * math.pi), abs=1e-5)
    assert scored.entropy.item() == pytest.approx(math.log(2 * math.pi * math.e), abs=1e-5)


def test_oft_starts_near_zero_with_a_small_final_layer() -> None:
    feature, state = inputs(64)
    spec = SPECS["oft"]
    small = action_modules.build(spec.model_copy(update={"final_layer_scale": 0.01}), BASE, seed=0)
    assert small.act(feature, state, None).action.abs().max() < 0.05
    assert action_modules.build(spec, BASE, seed=0).act(feature, state, None).action.abs().max() > 0.2


@pytest.mark.parametrize("kind", sorted(SPECS))
@pytest.mark.parametrize("where", ["none", "prompt"])
def test_proprioception_is_read_in_the_head_only_where_declared(kind: str, where: str) -> None:
    feature, state = inputs(2)
    deaf = action_modules.build(SPECS[kind].model_copy(update={"proprioception": where}), BASE, seed=0)
    assert torch.equal(deaf.act(feature, state, None).action, deaf.act(feature, None, None).action)
    hearing = action_modules.build(SPECS[kind], BASE, seed=0)
    assert not torch.equal(hearing.act(feature, state, None).action, hearing.act(feature, state + 1, None).action)
    with pytest.raises(TenantFault, match=r"proprioception: got \(2, 4\); possible: shape \(2, 5\)"):
        hearing.act(feature, state[:, :4], None)
    with pytest.raises(TenantFault, match="proprioception: got None"):
        hearing.act(feature, None, None)


def test_the_values_loss_does_not_move_the_policy(scoring: ActionModule) -> None:
    feature, state = inputs(4)
    trace = scoring.act(feature, state, torch.Generator().manual_seed(0)).trace
    scoring.evaluate(feature, state, trace).value.sum().backward()
    moved = {name for name, p in scoring.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any(name.startswith("value.") for name in moved)
    assert all(name.startswith(("value.", "norm.")) for name in moved)  # oft's two heads share the norm


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_interleaved_backwards_move_only_the_module_that_steps(kind: str) -> None:
    """A backward, B backward, A step."""
    a, b = (action_modules.build(SPECS[kind], BASE, seed) for seed in (0, 1))
    before = {"a": export_parameters(a), "b": export_parameters(b)}
    optimizer = torch.optim.AdamW(a.parameters(), lr=1e-2)
    feature, state = inputs(4)
    for module in (a, b):
        module.imitation_loss(feature, state, *demonstration(4), 1.0, torch.Generator()).backward()
    optimizer.step()
    assert all(np.array_equal(before["b"][name], value) for name, value in export_parameters(b).items())
    assert any(not np.array_equal(before["a"][name], value) for name, value in export_parameters(a).items())
