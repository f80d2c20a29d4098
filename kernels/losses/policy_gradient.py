"""One policy-gradient loss whose settings are PPO, decoupled PPO, GRPO and REINFORCE.

| | clip bounds | value_coef | behaviour_weight_cap | kl_coef |
|---|---|---|---|---|
| PPO (Schulman et al. 2017) | equal | set | | may be |
| decoupled PPO (Hilton et al. 2022) | equal | set | set | may be |
| GRPO (Shao et al. 2024), DAPO (Yu et al. 2025) | equal, unequal | | | set, not set |
| REINFORCE with baseline (Williams 1992) | none | set | | may be |

All means are over the valid elements of the whole optimizer step, as DAPO's. So GRPO's objective (Shao et al. 2024,
equation 3), the mean over episodes of each one's own mean (1/|o_i|), is not what is computed here: a longer episode
counts more, each of its actions as much as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.errors import SpecError, refusal
from kernels.losses.masks import (
    Granularity,
    PpoCounts,
    advantage_elements,
    element_mask,
    elements,
    masked_max,
    masked_sum,
)
from kernels.losses.policy import behaviour_weights, clip_fraction, clipped_surrogate, log_ratio, reinforce
from kernels.losses.regularisers import KlEstimator, kl_estimate
from kernels.losses.value import value_loss


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What the loss is made of; None leaves a term out.

    Attributes:
        granularity: one ratio an action, or one a chunk.
        clip_low: ratios are clipped to 1 − this; without bounds the policy's term is REINFORCE's.
        clip_high: and to 1 + this; both or neither.
        dual_clip: floor of the objective where the advantage is negative, > 1.
        behaviour_weight_cap: the surrogate is weighted by π_old / π_behaviour, at most this.
        value_coef: weight of the value loss.
        value_clip: how far the value may move from what it was.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the distance from another policy.
        kl_reference: that policy: the one that acted, or a given reference.
        kl_estimator: how the distance is estimated, see `kl_estimate`.
    """

    granularity: Granularity
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    behaviour_weight_cap: float | None = None
    value_coef: float | None = None
    value_clip: float | None = None
    entropy_coef: float | None = None
    kl_coef: float | None = None
    kl_reference: Literal["behaviour", "reference"] = "behaviour"
    kl_estimator: KlEstimator = "k3"

    def __post_init__(self) -> None:
        if (self.clip_low is None) != (self.clip_high is None):
            raise SpecError(refusal("clip_high", self.clip_high, "both bounds or none", f"clip_low is {self.clip_low}"))
        if self.dual_clip is not None and (self.clip_low is None or self.dual_clip <= 1):
            raise SpecError(refusal("dual_clip", self.dual_clip, "above 1, with clip bounds", "leave it out"))
        if self.value_clip is not None and self.value_coef is None:
            raise SpecError(refusal("value_clip", self.value_clip, "None without value_coef", "leave it out"))


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Loss of one microbatch and, detached, its shares of the step's means (they add up over microbatches).

    Attributes:
        total: policy + value_coef × value − entropy_coef × entropy + kl_coef × kl, with gradient.
        policy: the surrogate's, or REINFORCE's.
        value: half squared error; 0 without a value loss.
        entropy: nats an action (or chunk).
        kl: estimated distance that is held small; 0 without that term.
        approx_kl: mean of (ratio − 1) − log ratio, ≥ 0: how far the policy is from the one the step began with.
        clip_fraction: share of elements whose ratio was out of bounds, 0 … 1.
        capped_fraction: share of elements whose importance weight was capped, 0 … 1.
        ratio_mean: of π / π_old.
        ratio_max: not a share: the greatest of the microbatch.
    """

    total: Tensor
    policy: float
    value: float
    entropy: float
    kl: float
    approx_kl: float
    clip_fraction: float
    capped_fraction: float
    ratio_mean: float
    ratio_max: float


def policy_gradient(
    coefficients: Coefficients,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    advantage: Tensor,
    valid: Tensor,
    counts: PpoCounts,
    value: Tensor | None = None,
    returns: Tensor | None = None,
    old_value: Tensor | None = None,
    behaviour_log_prob: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
) -> PolicyLoss:
    """The loss of one microbatch.

    Args:
        coefficients: what it is made of.
        log_prob: float32 [B, H], of the stored actions under the current parameters, with gradient.
        old_log_prob: float32 [B, H], under the parameters that ratios are taken against: those that acted, or the
            actor's at the job's begin (the proximal policy).
        entropy: float32 [B, H].
        advantage: float32 [B, H], equal over a chunk.
        valid: bool [B, H], actions that carry loss; a row without any carries none.
        counts: of the whole optimizer step, see `kernels.losses.ppo_counts`.
        value: float32 [B], with gradient; read with `value_coef`.
        returns: float32 [B], the value's target; read with `value_coef`.
        old_value: float32 [B], when the data was collected; read with `value_clip`.
        behaviour_log_prob: float32 [B, H], under the parameters that acted; read with `behaviour_weight_cap` and
            `kl_reference` "behaviour".
        reference_log_prob: float32 [B, H]; read with `kl_reference` "reference".

    Raises:
        SpecError: if something is missing that a coefficient asks for.
    """
    c, granularity = coefficients, coefficients.granularity
    mask, row_valid = element_mask(valid, granularity), valid.any(dim=1)
    actions, zero = max(counts.actions, 1.0), log_prob.new_zeros(())
    log_ratios = log_ratio(log_prob, old_log_prob, valid, granularity)
    advantages = advantage_elements(advantage, valid, granularity)
    ratio = log_ratios.exp()

    if c.clip_low is None or c.clip_high is None:
        surrogate = reinforce(elements(log_prob, valid, granularity), advantages)
    else:
        surrogate = clipped_surrogate(ratio, advantages, c.clip_low, c.clip_high, c.dual_clip)
    capped = None
    if c.behaviour_weight_cap is not None:
        behaviour = _given("behaviour_log_prob", behaviour_log_prob)
        staleness = log_ratio(old_log_prob, behaviour, valid, granularity)
        weight, capped = behaviour_weights(staleness, c.behaviour_weight_cap)
        surrogate = weight * surrogate
    policy_mean = masked_sum(surrogate, mask) / actions
    entropy_mean = masked_sum(elements(entropy, valid, granularity), mask) / actions

    total, value_mean, kl_mean = policy_mean, zero, zero
    if c.value_coef is not None:
        old = None if c.value_clip is None else _given("old_value", old_value)
        value, returns = _given("value", value), _given("returns", returns)
        value_mean = value_loss(value, returns, row_valid, counts.rows, old_value=old, clip=c.value_clip)
        total = total + c.value_coef * value_mean
    if c.entropy_coef is not None:
        total = total - c.entropy_coef * entropy_mean
    if c.kl_coef is not None:
        name = f"{c.kl_reference}_log_prob"
        other = _given(name, behaviour_log_prob if c.kl_reference == "behaviour" else reference_log_prob)
        distance = kl_estimate(log_ratio(log_prob, other, valid, granularity), c.kl_estimator)
        kl_mean = masked_sum(distance, mask) / actions
        total = total + c.kl_coef * kl_mean

    with torch.no_grad():
        approx_kl = masked_sum((ratio - 1) - log_ratios, mask) / actions
        outside = zero
        if c.clip_low is not None and c.clip_high is not None:
            outside = masked_sum(clip_fraction(ratio, c.clip_low, c.clip_high), mask) / actions
        return PolicyLoss(
            total,
            policy_mean.item(),
            value_mean.item(),
            entropy_mean.item(),
            kl_mean.item(),
            approx_kl.item(),
            outside.item(),
            0.0 if capped is None else (masked_sum(capped, mask) / actions).item(),
            (masked_sum(ratio, mask) / actions).item(),
            masked_max(ratio, mask),
        )


def _given(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise SpecError(refusal(name, None, "a tensor, which the coefficients ask for", "pass it"))
    return tensor
