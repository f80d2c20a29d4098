"""Advantage-weighted regression: weights by hand, the cap, microbatches, masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.losses import AwrLoss, advantage_weights, awr, ppo_counts


def test_weights_by_hand() -> None:
    """β = ½: exp(2 · 0) = 1, exp(2 · ½) = e, exp(−2) ; exp(6) and exp(1000) are capped at 20."""
    weights, capped = advantage_weights(torch.tensor([0.0, 0.5, -1.0, 3.0, 500.0]), 0.5, 20.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, math.e, math.exp(-2), 20.0, 20.0]))
    assert capped.tolist() == [0, 0, 0, 1, 1]


def awr_of(error: torch.Tensor, advantage: torch.Tensor, valid: torch.Tensor, **settings: Any) -> AwrLoss:
    settings = {"temperature": 1.0, "weight_cap": 20.0, "granularity": "action"} | settings
    counts = settings.pop("counts", None) or ppo_counts(valid, settings["granularity"])
    return awr(error=error, advantage=advantage, valid=valid, counts=counts, **settings)


def test_loss_by_hand_in_both_granularities() -> None:
    """Row 0: A = log 2, errors 1 and 3; row 1: A = 0, error 5, its second action masked.

    An action: (2 · 1 + 2 · 3 + 1 · 5) / 3; a chunk: (2 · 4 + 1 · 5) / 2. The gradient is weight / count.
    """
    error = torch.tensor([[1.0, 3.0], [5.0, math.nan]], requires_grad=True)
    advantage = torch.tensor([[math.log(2.0)] * 2, [0.0, math.nan]], requires_grad=True)
    valid = torch.tensor([[True, True], [True, False]])
    loss = awr_of(error, advantage, valid)
    assert loss.total.item() == pytest.approx(13 / 3)
    assert (loss.weight_mean, loss.weight_max) == (pytest.approx(5 / 3), pytest.approx(2))
    assert loss.capped_fraction == 0
    loss.total.backward()
    assert error.grad is not None
    torch.testing.assert_close(error.grad, torch.tensor([[2 / 3, 2 / 3], [1 / 3, 0]]))
    assert advantage.grad is None, "weights are constants"
    assert awr_of(error, advantage, valid, granularity="chunk").total.item() == pytest.approx(13 / 2)
    assert awr_of(error, advantage, valid, weight_cap=1.5).capped_fraction == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # exp(½ / β) of the better row, exp(−½ / β) of the worse, times mean errors 2 and 6, halved: each has 2 actions.
        (1e9, (2 + 6) / 2),
        (1.0, (math.exp(0.5) * 2 + math.exp(-0.5) * 6) / 2),
        (0.25, (math.exp(2) * 2 + math.exp(-2) * 6) / 2),
        (0.01, 100 * 2 / 2),  # exp(50) is capped at 100, and exp(−50) is nothing beside it
    ],
)
def test_the_lower_the_temperature_the_more_the_best_rows_count(temperature: float, expected: float) -> None:
    error = torch.tensor([[1.0, 3.0], [5.0, 7.0]], dtype=torch.float64)
    advantage = torch.tensor([[0.5, 0.5], [-0.5, -0.5]], dtype=torch.float64)
    valid = torch.ones(2, 2, dtype=torch.bool)
    loss = awr_of(error, advantage, valid, temperature=temperature, weight_cap=100.0)
    assert loss.total.item() == pytest.approx(expected, rel=1e-8)


def test_nothing_valid_is_zero() -> None:
    none = torch.zeros(2, 2, dtype=torch.bool)
    loss = awr_of(torch.full((2, 2), math.nan), torch.zeros(2, 2), none)
    assert (loss.total.item(), loss.weight_mean, loss.weight_max) == (0, 0, 0)


@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(0, 6), st.sampled_from(["action", "chunk"]), st.integers(0, 99)
)
def test_microbatches_add_up(rows: int, horizon: int, cut: int, granularity: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(rows, horizon, generator=generator)
    advantage = 2 * torch.randn(rows, 1, generator=generator).expand(rows, horizon)
    valid = torch.arange(horizon) < torch.randint(0, horizon + 1, (rows, 1), generator=generator)
    counts = ppo_counts(valid, granularity)
    whole = awr_of(error, advantage, valid, granularity=granularity, weight_cap=2.0)
    parts = [
        awr_of(error[of], advantage[of], valid[of], granularity=granularity, counts=counts, weight_cap=2.0)
        for of in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total, rtol=1e-4, atol=1e-5)
    for name in ("weight_mean", "capped_fraction"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name), abs=1e-5)
    assert 0 <= whole.capped_fraction <= 1 + 1e-6
