"""What moves the policy: probability ratios, the clipped surrogate, importance weights of old data, REINFORCE.

Element by element (an action, or a chunk); who calls masks, sums and divides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.losses.masks import Granularity


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, valid: Tensor, granularity: Granularity) -> Tensor:
    """log π(a) − log π_old(a) of each element, 0 where masked.

    Args:
        log_prob: float32 [B, H].
        old_log_prob: float32 [B, H].
        valid: bool [B, H].
        granularity: of the ratio; a chunk's is the product over its valid actions, which grows with its length.

    Returns:
        float32 [B, H] (action) or [B] (chunk).
    """
    zero = torch.zeros_like(old_log_prob)
    difference = torch.where(valid, log_prob, zero) - torch.where(valid, old_log_prob, zero)
    return difference.sum(dim=1) if granularity == "chunk" else difference


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """−min(r A, clip(r, 1 − low, 1 + high) A) of each element.

    Source: Schulman et al. 2017 (PPO), equation 7; unequal bounds from Yu et al. 2025 (DAPO, "clip-higher"): more room
    above keeps rare actions alive. `dual_clip` is Ye et al. 2020 (dual-clip PPO): where A < 0, the objective is no less
    than c A, so that an action that has become far likelier than it was does not dominate the step.

    Args:
        ratio: π(a) / π_old(a), with gradient, float32 [B, H] (an action's) or [B] (a chunk's).
        advantage: float32, of ratio's shape.
        clip_low: room below 1.
        clip_high: room above 1.
        dual_clip: c > 1; None: off.

    Returns:
        float32, of ratio's shape; to be minimised.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective


def clip_fraction(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """1 where the ratio is out of bounds, else 0.

    Args:
        ratio: float32 [B, H] or [B].
        clip_low: room below 1.
        clip_high: room above 1.

    Returns:
        float32, of ratio's shape.
    """
    offset = ratio - 1
    return ((offset > clip_high) | (offset < -clip_low)).to(ratio.dtype)


def behaviour_weights(log_ratio: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Importance weights of data from an older policy than the one that the update starts from.

    w = min(π_proximal(a) / π_behaviour(a), cap), without gradient. The decoupled objective is w times the surrogate of
    the ratio π / π_proximal.

    Source: Hilton et al. 2022 ("Batch size-invariance for policy optimization"); used for asynchronous
    rollouts by Fu et al. 2025 (AReaL). The cap bounds the variance (truncated importance sampling, Ionides 2008).

    Args:
        log_ratio: log π_proximal(a) − log π_behaviour(a) of each element, float32 [B, H] or [B].
        cap: the greatest weight.

    Returns:
        The weights, and 1 where one was capped, else 0; float32, of log_ratio's shape, without gradient.
    """
    with torch.no_grad():
        capped = log_ratio > math.log(cap)
        # Bounded before it is raised: what is capped may be too large for a float32.
        weight = torch.where(capped, torch.full_like(log_ratio, cap), log_ratio.clamp(max=math.log(cap)).exp())
        return weight, capped.to(log_ratio.dtype)


def reinforce(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """−A log π(a) of each element (Williams 1992; the baseline is in the advantage).

    Args:
        log_prob: with gradient, float32 [B, H] (an action's) or [B] (a chunk's sum).
        advantage: float32, of log_prob's shape.

    Returns:
        float32, of log_prob's shape; to be minimised.
    """
    return -advantage * log_prob
