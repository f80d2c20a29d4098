"""Advantage-weighted updates of every module with a critic: what they regress, draw and weigh, and what they learn."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm import AwrSpec
from configs.errors import SpecError
from kernels import action_modules
from kernels.action_modules import ActionModule, Regression
from kernels.action_modules.flow import FlowModule
from kernels.advantage_weighted import awr_update
from kernels.features import VLAFeature
from kernels.flow_matching import sample_training
from kernels.losses import awr, ppo_counts, sft_valid_count
from kernels.updates import new_optimizer
from tests.kernels.test_action_modules import BASE, BY_RL, SPECS, demonstration, inputs

FLOWING = sorted(kind for kind in BY_RL if issubclass(type(action_modules.build(SPECS[kind], BASE, 0)), FlowModule))
ONE_OF_EACH = {"oft": "oft", "lora": "lora", "gr00t": "gr00t by sde", "pi": "pi by noise"}
"""Each kind of module once, and each kind of stochastic flow."""


def built(kind: str) -> ActionModule:
    return action_modules.build(SPECS[kind], BASE, seed=7)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(module: ActionModule, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def weighed(found: Regression, advantage: list[float], is_pad: Tensor, temperature: float) -> Tensor:
    """The policy's loss with these advantages of the rows."""
    return awr(
        error=found.error,
        advantage=torch.tensor(advantage)[:, None].expand_as(is_pad),
        valid=~is_pad,
        counts=ppo_counts(~is_pad, "action"),
        temperature=temperature,
        weight_cap=20.0,
        granularity="action",
    ).total


def test_every_kind_of_module_is_among_them() -> None:
    assert set(ONE_OF_EACH) == set(action_modules.MODULES)
    assert set(FLOWING) == {f"{kind} by {name}" for kind in ("gr00t", "pi") for name in ("sde", "noise")}


@pytest.mark.parametrize("kind", sorted(BY_RL))
def test_shapes_are_the_documented_ones_and_what_is_padded_is_not_read(kind: str) -> None:
    """NaN and 1e30 in its place change neither errors nor gradients."""
    module, (feature, state), (action, is_pad) = built(kind), inputs(5), demonstration(5)
    found = module.regress(feature, state, action, is_pad, seeded())
    assert (found.error.shape, found.value.shape) == ((5, 4), (5,))
    assert found.error.dtype == torch.float32
    assert (found.error[is_pad] == 0).all()
    assert (found.error[~is_pad] != 0).all()
    right = gradients(module, found.error.sum())
    for value in (float("nan"), 1e30):
        other = torch.where(is_pad[..., None], torch.tensor(value), action)
        again = module.regress(feature, state, other, is_pad, seeded())
        assert torch.equal(again.error, found.error)
        assert all(torch.equal(g, right[n]) for n, g in gradients(module, again.error.sum()).items())


@pytest.mark.parametrize("kind", sorted(set(SPECS) - BY_RL))
def test_a_module_without_a_critic_is_refused(kind: str) -> None:
    module, (feature, state) = built(kind), inputs(2)
    expected = f"action_module: {type(module).__name__} has no critic; possible: supervised fine-tuning"
    with pytest.raises(SpecError, match=re.escape(expected)):
        module.regress(feature, state, *demonstration(2), seeded())


@pytest.mark.parametrize("kind", sorted(BY_RL))
def test_rows_in_parts_draw_and_err_as_the_whole_batch_does(kind: str) -> None:
    """Five rows at once, and as 2 + 1 + 2 with a generator of the same seed; the generators end alike."""
    module, (feature, state), (action, is_pad) = built(kind), inputs(5), demonstration(5)
    one, two = seeded(), seeded()
    whole = module.regress(feature, state, action, is_pad, one)
    parts = [
        module.regress(feature[rows], state[rows], action[rows], is_pad[rows], two)
        for rows in (slice(0, 2), slice(2, 3), slice(3, 5))
    ]
    torch.testing.assert_close(torch.cat([part.error for part in parts]), whole.error, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([part.value for part in parts]), whole.value, atol=1e-6, rtol=1e-5)
    assert torch.equal(one.get_state(), two.get_state())


@pytest.mark.parametrize("kind", FLOWING)
def test_a_flows_errors_are_those_of_its_velocity_at_the_drawn_points(kind: str) -> None:
    """Reference: float64, draw by draw, from the module's own velocity alone."""
    module, (feature, state), (action, is_pad) = built(kind), inputs(3), demonstration(3)
    spec = module.spec
    gr00t = kind.startswith("gr00t")
    repeats = spec.repeated_steps if gr00t else 1
    drawn = sample_training(3, repeats, 4, 3, alpha=1.5, beta=1.0, generator=seeded())
    noise, u = (part.double().numpy() for part in drawn)
    # Time of the noise's share: gr00t's runs from noise to action, (1 − u) · s; pi's back, 0.001 + 0.999 u.
    share = 1 - (1 - u) * spec.time_scale if gr00t else 0.001 + 0.999 * u
    chunk = np.where(is_pad.numpy()[..., None], 0.0, action.double().numpy())
    expected = np.zeros((3, 4))
    for r in range(repeats):
        t = share[:, r, None, None]
        x_t = torch.from_numpy(t * noise[:, r] + (1 - t) * chunk).float()
        velocity = module.velocity(feature, state, x_t, torch.from_numpy(1 - t if gr00t else t).float().flatten())
        towards_action = velocity.detach().double().numpy() * (1 if gr00t else -1)
        expected += ((towards_action - (chunk - noise[:, r])) ** 2).mean(axis=2) / repeats
    expected[is_pad.numpy()] = 0
    found = module.regress(feature, state, action, is_pad, seeded())
    np.testing.assert_allclose(found.error.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "oft"])
def test_a_gaussians_errors_are_its_negative_log_probabilities(kind: str) -> None:
    module, (feature, state), (action, is_pad) = built(kind), inputs(5), demonstration(5)
    found = module.regress(feature, state, action, is_pad, None)
    scored = module.evaluate(feature, state, {"action": action})
    assert torch.equal(found.error[~is_pad], -scored.log_prob[~is_pad])
    assert torch.equal(found.value, scored.value)


@pytest.mark.parametrize("kind", FLOWING)
def test_equal_weights_are_imitation(kind: str) -> None:
    """Advantages of 0 are weights of 1: loss and gradients are those of the module's imitation with the same draws."""
    module, (feature, state), (action, is_pad) = built(kind), inputs(5), demonstration(5)
    count = sft_valid_count(is_pad, 3)
    imitation = module.imitation_loss(feature, state, action, is_pad, count, seeded())
    expected = gradients(module, imitation)
    loss = weighed(module.regress(feature, state, action, is_pad, seeded()), [0.0] * 5, is_pad, 1.0)
    torch.testing.assert_close(loss, imitation)
    found = gradients(module, loss)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(BY_RL))
def test_at_a_low_temperature_only_the_best_rows_count(kind: str) -> None:
    """Advantages 0 and −1 at β = 0.01: exp(−100) is no float32, so rows 1, 2 and 4 add nothing.

    What is left is the sum of rows 0 and 3 (three and four valid actions) over the 17 of all.
    """
    module, (feature, state), (action, is_pad) = built(kind), inputs(5), demonstration(5)
    found = module.regress(feature, state, action, is_pad, seeded())
    loss = weighed(found, [0.0, -1.0, -1.0, 0.0, -1.0], is_pad, 0.01)
    expected = found.error[[0, 3]].sum() / 17
    torch.testing.assert_close(loss, expected)
    module.zero_grad()
    expected.backward(retain_graph=True)
    of_best = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    for name, gradient in gradients(module, loss).items():
        torch.testing.assert_close(gradient, of_best[name], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("kind", FLOWING)
def test_neither_loss_moves_what_the_other_trains(kind: str) -> None:
    """A flow's critic shares nothing with its policy; and regression alone cannot tell how much noise it should add."""
    module, (feature, state) = built(kind), inputs(4)
    found = module.regress(feature, state, *demonstration(4), seeded())
    by_value = gradients(module, found.value.square().sum())
    assert all(name.startswith("value.") for name in by_value)
    found = module.regress(feature, state, *demonstration(4), seeded())
    by_error = gradients(module, found.error.sum())
    assert by_error
    assert not any(name.startswith(("value.", "sampling.")) for name in by_error)


def updated(
    module: ActionModule, feature: VLAFeature, state: Tensor, action: Tensor, returns: Tensor, **settings: float
) -> dict[str, float]:
    """Passes over these samples, all in one microbatch."""
    fields = {"jobs": 1, "batches_per_job": 1, "microbatch_size": len(action), "cosine": False} | settings
    spec = AwrSpec.model_validate({"optimizer": {"learning_rate": 3e-3}} | fields)
    return awr_update(
        module,
        new_optimizer(module, spec),
        lambda rows: feature[rows],
        spec,
        seeded(0),
        proprioception=state,
        action=action,
        valid=torch.ones(action.shape[:2], dtype=torch.bool),
        returns=returns,
    )


@pytest.mark.parametrize("kind", sorted(ONE_OF_EACH))
def test_the_policy_moves_to_the_better_of_two_actions(kind: str) -> None:
    """One observation in which +0.8 was worth 1 and −0.8 nothing, eight times each.

    A large temperature leaves both as they are in the data, with mean 0; at a small one, whose weights are 20 (the
    cap) and exp(−5), nearly all that the policy samples is the better one. The critic learns their mean return.
    """
    feature, state = (part[torch.zeros(64, dtype=torch.long)] for part in inputs(1))
    good = torch.arange(16) % 2 == 0
    action = torch.where(good[:, None, None], 0.8, -0.8).repeat(1, 4, 3)
    means, shares = [], []
    for temperature in (100.0, 0.1):
        module = built(ONE_OF_EACH[kind])
        updated(module, feature[:16], state[:16], action, good.float(), temperature=temperature, passes=48)
        decision = module.act(feature, state, seeded(1))
        means.append(decision.action.mean().item())
        shares.append((decision.action.mean(dim=(1, 2)) > 0).float().mean().item())
        assert decision.value[0].item() == pytest.approx(0.5, abs=0.2)
    assert abs(means[0]) < 0.4
    assert 0.2 < shares[0] < 0.8
    assert means[1] == pytest.approx(0.8, abs=0.2)
    assert shares[1] > 0.95


@pytest.mark.parametrize("kind", sorted(ONE_OF_EACH))
def test_what_was_padded_in_a_recorded_chunk_teaches_nothing(kind: str) -> None:
    """The same update to the bit with NaN and with zeros there, in a microbatch with a row of padding alone."""
    (feature, state), (action, is_pad) = inputs(5), demonstration(5)
    is_pad[1] = True
    ends = []
    for value in (0.0, float("nan")):
        module = built(ONE_OF_EACH[kind])
        spec = AwrSpec.model_validate(
            {"jobs": 1, "batches_per_job": 1, "microbatch_size": 2, "passes": 2, "optimizer": {"learning_rate": 1e-2}}
        )
        returns = torch.arange(5.0)
        returns[1] = value
        metrics = awr_update(
            module,
            new_optimizer(module, spec),
            lambda rows: feature[rows],
            spec,
            seeded(0),
            proprioception=state,
            action=torch.where(is_pad[..., None], torch.tensor(value), action),
            valid=~is_pad,
            returns=returns,
        )
        assert metrics["nothing_to_learn"] == 0
        ends.append(action_modules.export_parameters(module))
    assert all(np.array_equal(ends[1][name], array) for name, array in ends[0].items())
    assert all(np.isfinite(array).all() for array in ends[1].values())
