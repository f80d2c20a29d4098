"""The composed policy-gradient loss: each term by hand, the whole against float64, splits, masks, NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import SpecError
from kernels.losses import (
    Coefficients,
    PolicyLoss,
    PpoCounts,
    behaviour_weights,
    clipped_surrogate,
    explained_variance,
    kl_estimate,
    policy_gradient,
    ppo_counts,
    value_loss,
)

PER_ACTION = (
    "log_prob",
    "old_log_prob",
    "entropy",
    "advantage",
    "behaviour_log_prob",
    "reference_log_prob",
)
WITH_GRADIENT = ("log_prob", "entropy", "value")

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "value_coef": 0.5, "entropy_coef": 0.01},
    "ppo with all": {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "value_coef": 0.5,
        "value_clip": 0.2,
        "entropy_coef": 0.01,
        "kl_coef": 0.1,
    },
    "decoupled": {"clip_low": 0.2, "clip_high": 0.2, "value_coef": 0.5, "behaviour_weight_cap": 1.5},
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.04, "kl_reference": "reference"},
    "reinforce": {"value_coef": 0.5, "entropy_coef": 0.01},
}


def batch(rows: int, horizon: int, seed: int) -> dict[str, torch.Tensor]:
    """A microbatch: chunks cut off anywhere, some rows empty, advantages equal over a chunk."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: 0.5 * torch.randn(rows, horizon, generator=generator) for name in PER_ACTION}
    made |= {name: torch.randn(rows, generator=generator) for name in ("value", "returns", "old_value")}
    executed = torch.randint(0, horizon + 1, (rows, 1), generator=generator)
    made["valid"] = torch.arange(horizon) < executed
    made["advantage"] = torch.where(made["valid"], torch.randn(rows, 1, generator=generator), torch.zeros(()))
    return made


def loss_of(
    coefficients: Coefficients, fields: dict[str, torch.Tensor], counts: PpoCounts | None = None
) -> tuple[PolicyLoss, dict[str, torch.Tensor]]:
    """The loss and the gradients of what has one (0 where nothing asks for it)."""
    leaves = {name: fields[name].clone().requires_grad_(True) for name in WITH_GRADIENT}
    counts = counts or ppo_counts(fields["valid"], coefficients.granularity)
    loss = policy_gradient(coefficients, **{**fields, **leaves}, counts=counts)
    loss.total.backward()
    return loss, {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}


def one(coefficients: Coefficients, **fields: Any) -> PolicyLoss:
    """Of one action; what is left out is 0."""
    made = {name: torch.zeros(1, 1) for name in PER_ACTION} | {
        name: torch.zeros(1) for name in ("value", "returns", "old_value")
    }
    made |= {name: torch.full_like(made[name], value) for name, value in fields.items()}
    return policy_gradient(coefficients, **made, valid=torch.ones(1, 1, dtype=torch.bool), counts=PpoCounts(1.0, 1.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "outside"),
    [
        (1.5, 1.0, -1.3, 1.0),  # above, held at 1 + 0.3
        (1.25, 1.0, -1.25, 0.0),  # beyond 1 + 0.2, yet within its own bound
        (0.5, -2.0, 1.6, 1.0),  # below, held at 1 − 0.2
        (0.5, 1.0, -0.5, 1.0),  # worse than clipped: the minimum keeps it
        (2.0, -1.0, 2.0, 1.0),  # likewise, below the floor of 3
        (10.0, -1.0, 3.0, 1.0),  # dual clip: no less than 3 · A
        (10.0, 1.0, -1.3, 1.0),  # which is for negative advantages only
    ],
)
def test_bounds_by_hand(ratio: float, advantage: float, expected: float, outside: float) -> None:
    coefficients = Coefficients(granularity="action", clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    loss = one(coefficients, log_prob=math.log(ratio), advantage=advantage)
    assert loss.policy == pytest.approx(expected, rel=1e-6)
    assert loss.clip_fraction == outside
    assert (loss.ratio_mean, loss.ratio_max) == (pytest.approx(ratio), pytest.approx(ratio))
    assert loss.approx_kl == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-5)


def test_beyond_the_dual_clip_there_is_no_gradient() -> None:
    ratio = torch.tensor([10.0, 2.0], requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([-1.0, -1.0]), 0.2, 0.2, 3.0).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, 1]


def test_old_data_is_weighted_by_how_likely_the_actor_finds_it() -> None:
    """π_proximal / π_behaviour = 1.5 counts 1.5, 4 is capped at 2 and counted; e^200 neither overflows nor is NaN.

    The ratio stays π / π_proximal: 1.1, within the bounds; the weight has no gradient.
    """
    coefficients = Coefficients(granularity="action", clip_low=0.2, clip_high=0.2, behaviour_weight_cap=2.0)
    proximal = -1.0
    for log_weight, weight, capped in ((math.log(1.5), 1.5, 0.0), (math.log(4.0), 2.0, 1.0), (200.0, 2.0, 1.0)):
        fields = {"log_prob": proximal + math.log(1.1), "old_log_prob": proximal, "advantage": 1.0}
        loss = one(coefficients, **fields, behaviour_log_prob=proximal - log_weight)
        assert loss.policy == pytest.approx(-weight * 1.1, rel=1e-5)
        assert loss.capped_fraction == capped
        assert loss.ratio_mean == pytest.approx(1.1)
    weight, _ = behaviour_weights(torch.zeros(1, requires_grad=True), 2.0)
    assert not weight.requires_grad


def test_with_fresh_data_decoupled_ppo_is_ppo_to_the_bit() -> None:
    fields = batch(6, 3, 0)
    fields["behaviour_log_prob"] = fields["old_log_prob"]
    plain, gradients = loss_of(Coefficients(granularity="action", **SETTINGS["ppo"]), fields)
    also, same = loss_of(Coefficients(granularity="action", behaviour_weight_cap=5.0, **SETTINGS["ppo"]), fields)
    assert torch.equal(plain.total, also.total)
    assert all(torch.equal(gradients[name], same[name]) for name in WITH_GRADIENT)


def test_value_clip_by_hand() -> None:
    """Old value 0, clip 0.2. V = 1, R = 2: errors 1² and (0.2 − 2)² = 3.24, the greater counts: 1.62, no gradient.

    V = 1, R = 0: errors 1 and 0.04: ½, gradient 1. V = 0.1, R = 1: within, ½ · 0.81, gradient −0.9.
    """
    value = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    returns, valid = torch.tensor([2.0, 0.0, 1.0]), torch.ones(3, dtype=torch.bool)
    loss = value_loss(value, returns, valid, 3.0, old_value=torch.zeros(3), clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx((1.62 + 0.5 + 0.405) / 3)
    assert value.grad is not None
    torch.testing.assert_close(value.grad, torch.tensor([0.0, 1.0, -0.9]) / 3)


def test_kl_estimates_by_hand_and_on_average() -> None:
    """log π − log π_ref = log 2, so r = ½: k1 = log 2, k2 = ½ log² 2, k3 = ½ − 1 + log 2.

    Over samples of N(0, 1) against N(0.5, 1), whose distance is ½ · 0.25 = 0.125, k1 and k3 are unbiased.
    """
    log_ratio = torch.tensor(math.log(2.0))
    expected = {"k1": math.log(2), "k2": 0.5 * math.log(2) ** 2, "k3": math.log(2) - 0.5}
    for name, value in expected.items():
        assert kl_estimate(log_ratio, name).item() == pytest.approx(value)  # type: ignore[arg-type]
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratios = -0.5 * x.square() + 0.5 * (x - 0.5).square()
    assert kl_estimate(ratios, "k1").mean().item() == pytest.approx(0.125, abs=4e-3)
    assert kl_estimate(ratios, "k3").mean().item() == pytest.approx(0.125, abs=2e-3)
    assert (kl_estimate(ratios, "k3") >= 0).all()


@pytest.mark.parametrize("reference", ["behaviour", "reference"])
def test_the_penalty_reads_the_policy_that_it_names(reference: Any) -> None:
    """k3 of log-ratio log 2 is log 2 − ½; the other policy's log-probability is far off and does not count."""
    coefficients = Coefficients(granularity="action", clip_low=0.2, clip_high=0.2, kl_coef=10.0, kl_reference=reference)
    other = "reference" if reference == "behaviour" else "behaviour"
    loss = one(coefficients, **{f"{reference}_log_prob": -math.log(2.0), f"{other}_log_prob": -50.0})
    assert loss.kl == pytest.approx(math.log(2) - 0.5)
    assert loss.total.item() == pytest.approx(10 * (math.log(2) - 0.5))


def test_reinforce_by_hand() -> None:
    """−A log π, whatever the ratio: A = 2, log π = −1.5 give 3 and gradient −2; half the squared error of 1 on top."""
    coefficients = Coefficients(granularity="action", value_coef=0.5)
    loss = one(coefficients, log_prob=-1.5, old_log_prob=-9.0, advantage=2.0, value=1.0)
    assert (loss.policy, loss.value, loss.clip_fraction) == (3.0, 0.5, 0.0)
    assert loss.total.item() == pytest.approx(3.25)
    fields = {"valid": torch.ones(1, 1, dtype=torch.bool), "advantage": torch.full((1, 1), 2.0)}
    _, gradients = loss_of(coefficients, {**batch(1, 1, 0), **fields})
    assert gradients["log_prob"].item() == -2


def test_frozen_weights_have_ratio_one_and_no_distance() -> None:
    for name, settings in SETTINGS.items():
        fields = batch(6, 3, 1)
        for other in ("old_log_prob", "behaviour_log_prob", "reference_log_prob"):
            fields[other] = fields["log_prob"]
        for granularity in ("action", "chunk"):
            loss, _ = loss_of(Coefficients(granularity=granularity, **settings), fields)  # type: ignore[arg-type]
            assert (loss.ratio_mean, loss.ratio_max) == (pytest.approx(1), 1), name
            assert (loss.approx_kl, loss.kl, loss.clip_fraction, loss.capped_fraction) == (0, 0, 0, 0), name


def test_granularity_is_declared_and_a_chunks_ratio_explodes() -> None:
    """0.2 a dimension over 8 × 7 dimensions: ratio e^11.2 = 73,130 for the chunk, e^1.4 = 4.055 an action."""
    fields = batch(1, 8, 0)
    fields |= {"log_prob": torch.full((1, 8), 1.4), "old_log_prob": torch.zeros(1, 8), "valid": torch.ones(1, 8) > 0}
    found = {
        granularity: loss_of(Coefficients(granularity=granularity, **SETTINGS["ppo"]), fields)[0].ratio_max
        for granularity in ("action", "chunk")
    }
    assert found["chunk"] == pytest.approx(math.exp(11.2), rel=1e-4)
    assert found["chunk"] == pytest.approx(73130, rel=1e-4)
    assert found["action"] == pytest.approx(4.0552, rel=1e-4)


def plainly(c: Coefficients, fields: dict[str, torch.Tensor]) -> dict[str, float]:
    """The same in numpy's float64, element by element."""
    f = {name: tensor.double().numpy() for name, tensor in fields.items()}
    valid = fields["valid"].numpy()
    policy, entropy, kl, approx, outside, capped, ratios = [], [], [], [], [], [], []
    for b in range(len(valid)):
        actions = np.flatnonzero(valid[b])
        for group in [[h] for h in actions] if c.granularity == "action" else [list(actions)]:
            if not group:
                continue

            def of(name: str, b: int = b, group: list[Any] = group) -> float:
                return float(f[name][b, group].sum())

            a, log_ratio = f["advantage"][b, group[0]], of("log_prob") - of("old_log_prob")
            ratio = math.exp(log_ratio)
            if c.clip_low is None or c.clip_high is None:
                objective = a * of("log_prob")
            else:
                objective = min(ratio * a, min(max(ratio, 1 - c.clip_low), 1 + c.clip_high) * a)
                outside.append(ratio < 1 - c.clip_low or ratio > 1 + c.clip_high)
                if c.dual_clip is not None and a < 0:
                    objective = max(objective, c.dual_clip * a)
            if c.behaviour_weight_cap is not None:
                weight = math.exp(of("old_log_prob") - of("behaviour_log_prob"))
                objective *= min(weight, c.behaviour_weight_cap)
                capped.append(weight > c.behaviour_weight_cap)
            away = of("log_prob") - of(f"{c.kl_reference}_log_prob")
            kl.append(math.exp(-away) - 1 + away)
            policy.append(-objective)
            entropy.append(of("entropy"))
            approx.append(ratio - 1 - log_ratio)
            ratios.append(ratio)
    values = []
    for b in np.flatnonzero(valid.any(axis=1)):
        error = (f["value"][b] - f["returns"][b]) ** 2
        if c.value_clip is not None:
            held = f["old_value"][b] + np.clip(f["value"][b] - f["old_value"][b], -c.value_clip, c.value_clip)
            error = max(error, (held - f["returns"][b]) ** 2)
        values.append(0.5 * error)

    def mean(x: list[Any]) -> float:
        return float(np.mean(x)) if x else 0.0

    total = mean(policy) + (c.value_coef or 0) * mean(values) - (c.entropy_coef or 0) * mean(entropy)
    return {
        "total": total + (c.kl_coef or 0) * mean(kl),
        "policy": mean(policy),
        "value": mean(values) if c.value_coef is not None else 0.0,
        "entropy": mean(entropy),
        "kl": mean(kl) if c.kl_coef is not None else 0.0,
        "approx_kl": mean(approx),
        "clip_fraction": mean(outside),
        "capped_fraction": mean(capped),
        "ratio_mean": mean(ratios),
        "ratio_max": max(ratios, default=0.0),
    }


CASES = {
    "rows": st.integers(1, 8),
    "horizon": st.integers(1, 4),
    "seed": st.integers(0, 2**16),
    "name": st.sampled_from(sorted(SETTINGS)),
    "granularity": st.sampled_from(["action", "chunk"]),
}


@given(**CASES)
def test_equals_float64_element_by_element(rows: int, horizon: int, seed: int, name: str, granularity: Any) -> None:
    coefficients, fields = Coefficients(granularity=granularity, **SETTINGS[name]), batch(rows, horizon, seed)
    loss, _ = loss_of(coefficients, fields)
    for key, expected in plainly(coefficients, fields).items():
        found = loss.total.item() if key == "total" else getattr(loss, key)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), key


@given(**CASES, cut=st.integers(0, 8))
def test_microbatches_add_up_in_value_gradient_and_statistics(
    rows: int, horizon: int, seed: int, name: str, granularity: Any, cut: int
) -> None:
    """Also where a part holds nothing valid, or nothing at all."""
    coefficients, fields = Coefficients(granularity=granularity, **SETTINGS[name]), batch(rows, horizon, seed)
    counts = ppo_counts(fields["valid"], granularity)
    whole, gradients = loss_of(coefficients, fields)
    parts = [
        loss_of(coefficients, {n: t[of] for n, t in fields.items()}, counts) for of in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(sum(part.total for part, _ in parts), whole.total.detach(), rtol=1e-4, atol=1e-5)
    for leaf in WITH_GRADIENT:
        torch.testing.assert_close(torch.cat([g[leaf] for _, g in parts]), gradients[leaf])
    for share in ("policy", "value", "entropy", "kl", "approx_kl", "clip_fraction", "capped_fraction", "ratio_mean"):
        added = sum(getattr(part, share) for part, _ in parts)
        assert added == pytest.approx(getattr(whole, share), rel=1e-4, abs=1e-5), share
    assert 0 <= whole.clip_fraction <= 1 + 1e-6
    assert max(part.ratio_max for part, _ in parts) == whole.ratio_max


@given(**CASES)
def test_nan_under_the_mask_reaches_nothing(rows: int, horizon: int, seed: int, name: str, granularity: Any) -> None:
    """Value, statistics and gradient have the bits that zeros under the mask give."""
    coefficients, fields = Coefficients(granularity=granularity, **SETTINGS[name]), batch(rows, horizon, seed)
    row_valid = fields["valid"].any(dim=1)

    def filled(value: float) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            if name == "valid"
            else torch.where(fields["valid"] if tensor.ndim == 2 else row_valid, tensor, torch.tensor(value))
            for name, tensor in fields.items()
        }

    (clean, expected), (dirty, found) = (loss_of(coefficients, filled(value)) for value in (0.0, math.nan))
    assert torch.equal(clean.total, dirty.total)
    for key in ("policy", "value", "entropy", "kl", "approx_kl", "ratio_mean", "ratio_max"):
        assert getattr(clean, key) == getattr(dirty, key), key
    for leaf in WITH_GRADIENT:
        assert torch.equal(expected[leaf], found[leaf])
        assert (found[leaf][~(fields["valid"] if found[leaf].ndim == 2 else row_valid)] == 0).all()


@given(**CASES)
def test_a_mask_of_ones_equals_plain_means(rows: int, horizon: int, seed: int, name: str, granularity: Any) -> None:
    """And one valid element alone is no NaN."""
    settings = SETTINGS[name] | {"entropy_coef": 0.01}
    fields = batch(rows, horizon, seed)
    fields["valid"] = torch.ones(rows, horizon, dtype=torch.bool)
    fields["advantage"] = torch.ones(rows, horizon)
    loss, _ = loss_of(Coefficients(granularity=granularity, **settings), fields)
    per_element = (lambda x: x.sum(dim=1)) if granularity == "chunk" else (lambda x: x)
    assert loss.entropy == pytest.approx(per_element(fields["entropy"]).mean().item(), abs=1e-5)
    ratio = per_element(fields["log_prob"] - fields["old_log_prob"]).exp()
    assert loss.ratio_mean == pytest.approx(ratio.mean().item(), rel=1e-4)
    lone = torch.zeros(rows, horizon, dtype=torch.bool)
    lone[0, 0] = True
    single, gradients = loss_of(Coefficients(granularity=granularity, **settings), {**fields, "valid": lone})
    assert math.isfinite(single.total.item())
    assert all(g.isfinite().all() for g in gradients.values())


def test_five_valid_of_eight_in_two_halves() -> None:
    """Values 0 … 7 against 0, valid 0, 4, 5, 6, 7: ½ · (0 + 16 + 25 + 36 + 49) / 5 = 12.6.

    Halves divided by their own counts would give (0/1 + 126/4) / 2 · ½ = 7.875.
    """
    value, valid = torch.arange(8.0), torch.tensor([1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    halves = [value_loss(value[i : i + 4], torch.zeros(4), valid[i : i + 4], 5.0).item() for i in (0, 4)]
    assert sum(halves) == pytest.approx(12.6)
    assert value_loss(value, torch.zeros(8), valid, 5.0).item() == pytest.approx(12.6)


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2 (variance 1) and a masked one. Right values: 1; a constant: 0; the opposite (2, 0): 1 − 4 = −3."""
    returns, valid = torch.tensor([0.0, 2.0, math.nan]), torch.tensor([True, True, False])
    for value, expected in (((0, 2), 1.0), ((1, 1), 0.0), ((2, 0), -3.0)):
        assert explained_variance(torch.tensor([*map(float, value), math.nan]), returns, valid) == expected
    assert explained_variance(torch.ones(1), torch.zeros(1), torch.ones(1, dtype=torch.bool)) == 0
    assert explained_variance(torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 0.2}, "clip_high: got None; possible: both bounds or none; clip_low is 0.2"),
        ({"dual_clip": 3.0}, "dual_clip: got 3.0; possible: above 1, with clip bounds; leave it out"),
        (
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0},
            "dual_clip: got 1.0; possible: above 1, with clip bounds; leave it out",
        ),
        ({"value_clip": 0.2}, "value_clip: got 0.2; possible: None without value_coef; leave it out"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Coefficients(granularity="action", **settings)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"value_coef": 0.5}, "value"),
        ({"value_coef": 0.5, "value_clip": 0.2}, "old_value"),
        ({"behaviour_weight_cap": 2.0}, "behaviour_log_prob"),
        ({"kl_coef": 0.1}, "behaviour_log_prob"),
        ({"kl_coef": 0.1, "kl_reference": "reference"}, "reference_log_prob"),
    ],
)
def test_what_a_coefficient_asks_for_is_not_left_out_in_silence(settings: dict[str, Any], missing: str) -> None:
    fields = {name: tensor for name, tensor in batch(2, 2, 0).items() if name != missing}
    with pytest.raises(SpecError, match=f"^{missing}: got None; possible: a tensor"):
        policy_gradient(Coefficients(granularity="action", **settings), **fields, counts=PpoCounts(4.0, 2.0))
