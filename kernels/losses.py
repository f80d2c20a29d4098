"""Losses of supervised and reinforcement learning, reduced by counts that the caller gives.

A microbatch returns *sums* over its valid elements divided by the count of valid elements of the whole optimizer
step: splitting a batch then changes nothing. Masked elements are replaced before any arithmetic, so that NaN under
a mask reaches neither value nor gradient. Legend: B batch, H action horizon, A action width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask`; an empty mask gives 0."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def sft_l1(
    predicted: Tensor, target: Tensor, is_pad: Tensor, valid_count: float, dimension_mask: Tensor | None = None
) -> Tensor:
    """L1 distance of normalised action chunks.

    Args:
        predicted: float32 [B, H, A].
        target: float32 [B, H, A], normalised.
        is_pad: bool [B, H], True past the episode's end; such actions carry no loss.
        valid_count: scalars (actions × dimensions) that count in the whole optimizer step, see `sft_valid_count`.
        dimension_mask: bool [A], False at padded action dimensions; None: all count.

    Returns:
        Scalar: sum over valid elements / valid_count.
    """
    mask = ~is_pad[..., None].expand_as(target)
    if dimension_mask is not None:
        mask = mask & dimension_mask
    safe = torch.where(mask, target, predicted.detach())
    return masked_sum((predicted - safe).abs(), mask) / max(valid_count, 1.0)


def sft_valid_count(is_pad: Tensor, action_width: int) -> float:
    """Scalars that carry loss, of a batch with `action_width` real dimensions."""
    return float((~is_pad).sum()) * action_width


@dataclass(frozen=True)
class PpoCounts:
    """Valid elements of the whole optimizer step: `actions` executed actions (or chunks), `rows` chunk decisions."""

    actions: float
    rows: float


def ppo_counts(valid: Tensor, granularity: Literal["action", "chunk"]) -> PpoCounts:
    """Counts of a batch with `valid` bool [B, H], True where an action was executed."""
    rows = float(valid.any(dim=1).sum())
    return PpoCounts(float(valid.sum()) if granularity == "action" else rows, rows)


@dataclass(frozen=True, eq=False)
class PpoLoss:
    """Loss of one microbatch and, detached, its shares of the step's means (they add up over microbatches).

    Attributes:
        total: policy + value_coef × value − entropy_coef × entropy, with gradient.
        policy: clipped surrogate.
        value: half squared error.
        entropy: nats an action (or chunk).
        approx_kl: mean of (ratio − 1) − log ratio, ≥ 0.
        clip_fraction: share of elements whose ratio was clipped, 0 … 1.
    """

    total: Tensor
    policy: float
    value: float
    entropy: float
    approx_kl: float
    clip_fraction: float


def ppo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    advantage: Tensor,
    returns: Tensor,
    valid: Tensor,
    counts: PpoCounts,
    clip_coef: float,
    value_coef: float,
    entropy_coef: float,
    granularity: Literal["action", "chunk"],
) -> PpoLoss:
    """Proximal policy optimisation with a clipped ratio.

    Source: Schulman et al. 2017, equation 7; names and value loss (half squared error, not clipped) as in cleanrl.

    Args:
        log_prob: float32 [B, H], of the stored actions under the current parameters, with gradient.
        old_log_prob: float32 [B, H], under the parameters that acted (or the actor's at the job's begin).
        entropy: float32 [B, H].
        value: float32 [B], with gradient.
        advantage: float32 [B, H], equal over a chunk.
        returns: float32 [B], the value's target.
        valid: bool [B, H], actions that were executed; a row without any carries no loss.
        counts: of the whole optimizer step.
        clip_coef: ratios are clipped to 1 ± this.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        granularity: one ratio an action, or one a chunk (log-probabilities summed over its valid actions).
    """
    zero = torch.zeros_like(old_log_prob)
    log_ratio = torch.where(valid, log_prob, zero) - torch.where(valid, old_log_prob, zero)
    advantage = torch.where(valid, advantage, zero)
    entropy = torch.where(valid, entropy, zero)
    row_valid = valid.any(dim=1)
    mask = valid
    if granularity == "chunk":
        log_ratio, entropy = log_ratio.sum(dim=1), entropy.sum(dim=1)
        # Equal over the chunk's valid actions: the mean of them is the chunk's.
        advantage = advantage.sum(dim=1) / valid.sum(dim=1).clamp(min=1)
        mask = row_valid
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    actions, rows = max(counts.actions, 1.0), max(counts.rows, 1.0)
    policy_loss = masked_sum(-torch.minimum(ratio * advantage, clipped * advantage), mask) / actions
    target = torch.where(row_valid, returns, value.detach())
    value_loss = masked_sum(0.5 * (value - target).square(), row_valid) / rows
    entropy_mean = masked_sum(entropy, mask) / actions
    with torch.no_grad():
        kl = masked_sum((ratio - 1) - log_ratio, mask) / actions
        fraction = masked_sum(((ratio - 1).abs() > clip_coef).to(ratio.dtype), mask) / actions
    return PpoLoss(
        policy_loss + value_coef * value_loss - entropy_coef * entropy_mean,
        policy_loss.item(),
        value_loss.item(),
        entropy_mean.item(),
        kl.item(),
        fraction.item(),
    )
