"""Losses by hand: masks, microbatches, ratios, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.losses import (
    Coefficients,
    PolicyLoss,
    masked_sum,
    policy_gradient,
    ppo_counts,
    sft_l1,
    sft_valid_count,
)


def ppo_of(rows: slice | None = None, counts_from: torch.Tensor | None = None, **fields: Any) -> PolicyLoss:
    """PPO on 2 rows of 2 actions, with some arguments replaced; `rows` takes a microbatch of it."""
    arguments: dict[str, Any] = {
        "log_prob": torch.zeros(2, 2),
        "old_log_prob": torch.zeros(2, 2),
        "entropy": torch.ones(2, 2),
        "value": torch.zeros(2),
        "advantage": torch.ones(2, 2),
        "returns": torch.zeros(2),
        "valid": torch.ones(2, 2, dtype=torch.bool),
        **{name: value for name, value in fields.items() if isinstance(value, torch.Tensor)},
    }
    settings = {"clip_low": 0.2, "clip_high": 0.2, "value_coef": 0.5, "entropy_coef": 0.1, "granularity": "action"}
    settings |= {name: value for name, value in fields.items() if not isinstance(value, torch.Tensor)}
    counts = ppo_counts(arguments["valid"] if counts_from is None else counts_from, settings["granularity"])
    if rows is not None:
        arguments = {name: value[rows] for name, value in arguments.items()}
    return policy_gradient(Coefficients(**settings), **arguments, counts=counts)


def test_l1_by_hand_with_padding() -> None:
    """|1| + |2| of one valid action of width 2, over 2 valid scalars: 1.5."""
    predicted = torch.tensor([[[1.0, 2.0], [50.0, 50.0]]])
    is_pad = torch.tensor([[False, True]])
    assert sft_valid_count(is_pad, 2) == 2
    assert sft_l1(predicted, torch.zeros(1, 2, 2), is_pad, 2).item() == 1.5


def test_padded_action_dimensions_carry_no_loss() -> None:
    predicted = torch.tensor([[[1.0, 2.0, 9.0]]])
    mask = torch.tensor([True, True, False])
    loss = sft_l1(predicted, torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.bool), 2, dimension_mask=mask)
    assert loss.item() == 1.5


def test_nan_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    predicted = torch.ones(1, 2, 1, requires_grad=True)
    target = torch.tensor([[[0.0], [float("nan")]]])
    loss = sft_l1(predicted, target, torch.tensor([[False, True]]), 1)
    loss.backward()
    assert loss.item() == 1
    assert predicted.grad is not None
    assert predicted.grad.flatten().tolist() == [1, 0]


def test_nan_that_was_predicted_under_the_mask_reaches_no_gradient() -> None:
    predicted = torch.tensor([[[1.0], [float("nan")]]], requires_grad=True)
    loss = sft_l1(predicted, torch.zeros(1, 2, 1), torch.tensor([[False, True]]), 1)
    loss.backward()
    assert loss.item() == 1
    assert predicted.grad is not None
    assert predicted.grad.flatten().tolist() == [1, 0]


def test_no_padding_equals_a_mask_of_ones_and_nothing_valid_is_zero() -> None:
    predicted, target = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    none = torch.zeros(3, 2, dtype=torch.bool)
    torch.testing.assert_close(sft_l1(predicted, target, none, 12), (predicted - target).abs().mean())
    assert sft_l1(predicted, target, ~none, 0).item() == 0
    assert masked_sum(torch.full((2,), float("nan")), torch.zeros(2, dtype=torch.bool)).item() == 0


def test_microbatches_add_up_to_the_whole_batch() -> None:
    """5 valid of 8 as 2 × 4 gives what 8 at once gives (dividing each half by its own count would not)."""
    predicted, target = torch.arange(8.0).reshape(8, 1, 1), torch.zeros(8, 1, 1)
    is_pad = torch.tensor([0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool).reshape(8, 1)
    whole = sft_l1(predicted, target, is_pad, sft_valid_count(is_pad, 1))
    halves = sum(sft_l1(predicted[i : i + 4], target[i : i + 4], is_pad[i : i + 4], 5) for i in (0, 4))
    assert whole.item() == halves.item() == pytest.approx((0 + 4 + 5 + 6 + 7) / 5)


def test_ratio_one_is_minus_the_advantage() -> None:
    loss = ppo_of()
    assert (loss.policy, loss.approx_kl, loss.clip_fraction) == (-1, 0, 0)
    assert loss.total.item() == pytest.approx(-1 + 0.5 * 0 - 0.1 * 1)


def test_clipping_by_hand() -> None:
    """Ratio 2 with advantage 1 counts as 1.2; with advantage −1 it is not clipped: max(2, 1.2) = 2."""
    log_prob = torch.full((2, 2), math.log(2.0))
    up = ppo_of(log_prob=log_prob)
    assert up.policy == pytest.approx(-1.2)
    assert up.clip_fraction == 1
    assert up.approx_kl == pytest.approx(1 - math.log(2))
    assert ppo_of(log_prob=log_prob, advantage=-torch.ones(2, 2)).policy == pytest.approx(2)


def test_a_clipped_ratio_has_no_gradient() -> None:
    """d(−ratio · A)/d log_prob = −ratio · A / count where not clipped, 0 where it is."""
    log_prob = torch.tensor([[0.0, math.log(2.0)], [math.log(2.0), 0.0]], requires_grad=True)
    advantage = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    ppo_of(log_prob=log_prob, advantage=advantage).total.backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.25, 0.0], [0.5, 0.25]]))


def test_value_loss_by_hand_over_valid_rows() -> None:
    """½ · 3² for the one valid row; the other's NaN is not read."""
    loss = ppo_of(
        value=torch.tensor([3.0, float("nan")]),
        returns=torch.tensor([0.0, float("nan")]),
        valid=torch.tensor([[True, False], [False, False]]),
        log_prob=torch.tensor([[0.0, float("nan")], [float("nan"), float("nan")]]),
        advantage=torch.tensor([[2.0, float("nan")], [float("nan"), float("nan")]]),
        entropy=torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")]]),
    )
    assert (loss.value, loss.policy, loss.entropy) == (4.5, -2, 1)
    assert loss.total.item() == pytest.approx(-2 + 0.5 * 4.5 - 0.1)


def test_a_chunks_ratio_is_the_product_over_its_valid_actions() -> None:
    """log-ratios 0.05 and 0.05 (valid) and 5 (not): e^0.1 for the chunk, e^0.05 an action."""
    fields: dict[str, Any] = {
        "log_prob": torch.tensor([[0.05, 0.05], [0.1, 5.0]]),
        "advantage": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "valid": torch.tensor([[True, True], [True, False]]),
    }
    assert ppo_of(**fields, granularity="chunk").policy == pytest.approx(-math.exp(0.1), rel=1e-6)
    assert ppo_of(**fields).policy == pytest.approx(-(2 * math.exp(0.05) + math.exp(0.1)) / 3, rel=1e-6)
    # Entropy of a chunk is the sum over its executed actions: (2 + 1) / 2.
    assert ppo_of(**fields, granularity="chunk").entropy == pytest.approx(1.5)


def test_a_shift_in_every_dimension_explodes_a_chunks_ratio_but_not_an_actions() -> None:
    """0.2 a dimension over 8 × 7 dimensions: e^11.2 = 73,130 for the chunk, e^1.4 = 4.06 an action."""
    arguments: dict[str, Any] = {
        "log_prob": torch.full((1, 8), 7 * 0.2),
        "old_log_prob": torch.zeros(1, 8),
        "advantage": -torch.ones(1, 8),
        "entropy": torch.zeros(1, 8),
        "value": torch.zeros(1),
        "returns": torch.zeros(1),
        "valid": torch.ones(1, 8, dtype=torch.bool),
    }
    assert ppo_of(**arguments, granularity="chunk").policy == pytest.approx(73130, rel=1e-3)
    assert ppo_of(**arguments).policy == pytest.approx(math.exp(1.4), rel=1e-5)


@pytest.mark.parametrize("granularity", ["action", "chunk"])
def test_ppo_microbatches_add_up_in_value_and_gradient(granularity: str) -> None:
    generator = torch.Generator().manual_seed(0)
    valid = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    fields: dict[str, Any] = {
        name: torch.randn(4, 2, generator=generator) for name in ("log_prob", "old_log_prob", "entropy")
    }
    fields |= {"advantage": torch.where(valid, torch.tensor([[1.0], [-2.0], [3.0], [0.5]]), torch.zeros(4, 2))}
    fields |= {name: torch.randn(4, generator=generator) for name in ("value", "returns")}
    fields |= {"valid": valid}
    whole_input = fields["log_prob"].clone().requires_grad_(True)
    whole = ppo_of(**{**fields, "log_prob": whole_input}, granularity=granularity)
    whole.total.backward()
    part_input = fields["log_prob"].clone().requires_grad_(True)
    parts = [
        ppo_of(rows=rows, counts_from=valid, **{**fields, "log_prob": part_input}, granularity=granularity)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(sum(p.total for p in parts), whole.total)
    assert sum(p.approx_kl for p in parts) == pytest.approx(whole.approx_kl)
    assert sum(p.clip_fraction for p in parts) == pytest.approx(whole.clip_fraction)
    assert 0 <= whole.clip_fraction <= 1
    torch.testing.assert_close(part_input.grad, whole_input.grad)


def test_nothing_valid_gives_zero_and_no_nan() -> None:
    loss = ppo_of(valid=torch.zeros(2, 2, dtype=torch.bool), log_prob=torch.zeros(2, 2, requires_grad=True))
    loss.total.backward()
    assert loss.total.item() == 0
