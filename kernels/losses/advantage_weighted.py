"""Advantage-weighted regression: imitation of the actions that turned out better than expected, for offline data.

What is regressed onto an action is the module's own affair (`ActionModule.regress`): its log-probability where there is
one (Peng et al. 2019, "Advantage-weighted regression"), else the flow-matching error of its velocity. Weighting the
latter by exp(A / β) leads to the flow of the data's distribution times exp(A / β), the same policy that the former aims
at (Zhang et al. 2025, "Energy-weighted flow matching for offline reinforcement learning", with the energy −A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.losses.masks import (
    Granularity,
    PpoCounts,
    advantage_elements,
    element_mask,
    elements,
    masked_max,
    masked_sum,
)


@dataclass(frozen=True, eq=False)
class AwrLoss:
    """Loss of one microbatch and, detached, its shares of the step's means (they add up over microbatches).

    Attributes:
        total: with gradient.
        weight_mean: of exp(A / β), capped.
        weight_max: not a share: the greatest of the microbatch.
        capped_fraction: share of elements whose weight was capped, 0 … 1.
    """

    total: Tensor
    weight_mean: float
    weight_max: float
    capped_fraction: float


def advantage_weights(advantage: Tensor, temperature: float, weight_cap: float) -> tuple[Tensor, Tensor]:
    """min(exp(A / β), cap), without gradient (Peng et al. 2019; the cap as in their experiments).

    Args:
        advantage: any shape; for weights of rows float32 [B], 0 where a row is masked.
        temperature: β > 0; small ones imitate the best only, large ones everything alike.
        weight_cap: the greatest weight.

    Returns:
        The weights, and 1 where one was capped, else 0; both of advantage's shape.
    """
    with torch.no_grad():
        exponent = advantage / temperature
        capped = exponent > math.log(weight_cap)
        # Bounded before it is raised: what is capped may be too large for a float32.
        weight = exponent.clamp(max=math.log(weight_cap)).exp()
        return torch.where(capped, torch.full_like(weight, weight_cap), weight), capped.to(weight.dtype)


def awr(
    *,
    error: Tensor,
    advantage: Tensor,
    valid: Tensor,
    counts: PpoCounts,
    temperature: float,
    weight_cap: float,
    granularity: Granularity,
) -> AwrLoss:
    """min(exp(A / β), cap) · error, summed over valid elements / their count in the whole step.

    Args:
        error: float32 [B, H], of the recorded actions, with gradient: −log π(a), or as `ActionModule.regress` says.
        advantage: float32 [B, H], equal over a chunk.
        valid: bool [B, H].
        counts: of the whole optimizer step, see `kernels.losses.ppo_counts`.
        temperature: β > 0.
        weight_cap: the greatest weight.
        granularity: an element is an action or a chunk.
    """
    mask, count = element_mask(valid, granularity), max(counts.actions, 1.0)
    weight, capped = advantage_weights(advantage_elements(advantage, valid, granularity), temperature, weight_cap)
    total = masked_sum(weight * elements(error, valid, granularity), mask) / count
    return AwrLoss(
        total,
        (masked_sum(weight, mask) / count).item(),
        masked_max(weight, mask),
        (masked_sum(capped, mask) / count).item(),
    )
