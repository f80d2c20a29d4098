"""Losses of supervised and reinforcement learning, reduced by counts that the caller gives.

A microbatch returns *sums* over its valid elements divided by the count of valid elements of the whole optimizer
step: splitting a batch, over microbatches or replicas, then changes nothing. Masked elements are replaced before any
arithmetic, so that NaN under a mask reaches neither value nor gradient. Legend: B batch, H action horizon, A action
width. One family a file; `policy_gradient` puts them together.
"""

from __future__ import annotations

from kernels.losses.advantage_weighted import AwrLoss, advantage_weights, awr
from kernels.losses.masks import Granularity, PpoCounts, elements, masked_max, masked_sum, ppo_counts
from kernels.losses.policy import behaviour_weights, clip_fraction, clipped_surrogate, log_ratio, reinforce
from kernels.losses.policy_gradient import Coefficients, PolicyLoss, policy_gradient
from kernels.losses.regularisers import KlEstimator, kl_estimate
from kernels.losses.sft import sft_l1, sft_valid_count
from kernels.losses.value import explained_variance, value_loss

__all__ = [
    "AwrLoss",
    "Coefficients",
    "Granularity",
    "KlEstimator",
    "PolicyLoss",
    "PpoCounts",
    "advantage_weights",
    "awr",
    "behaviour_weights",
    "clip_fraction",
    "clipped_surrogate",
    "elements",
    "explained_variance",
    "kl_estimate",
    "log_ratio",
    "masked_max",
    "masked_sum",
    "policy_gradient",
    "ppo_counts",
    "reinforce",
    "sft_l1",
    "sft_valid_count",
    "value_loss",
]
