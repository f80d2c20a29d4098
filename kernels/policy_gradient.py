"""Policy-gradient epochs over one job's samples: PPO, GRPO, REINFORCE by the coefficients of one loss.

Legend: n samples, H horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.algorithm import GrpoSpec, KlSpec, PpoSpec, ReinforceSpec, RolloutAlgorithm
from kernels.action_modules import ActionModule, Trace
from kernels.advantages import Moments, standardise
from kernels.losses import Coefficients, explained_variance, policy_gradient, ppo_counts
from kernels.updates import Encode, Optimizer


def ppo_coefficients(algorithm: PpoSpec) -> Coefficients:
    """The terms of the loss that a PPO workload declares."""
    decoupled = algorithm.decoupled
    return Coefficients(
        granularity=algorithm.log_prob_granularity,
        clip_low=algorithm.clip_coef,
        clip_high=algorithm.clip_coef if algorithm.clip_high is None else algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        behaviour_weight_cap=None if decoupled is None else decoupled.weight_cap,
        value_coef=algorithm.value_coef,
        value_clip=algorithm.value_clip,
        entropy_coef=algorithm.entropy_coef,
        **_penalty(algorithm.kl),
    )


def grpo_coefficients(algorithm: GrpoSpec) -> Coefficients:
    """The terms of the loss that a GRPO workload declares: no critic."""
    return Coefficients(
        granularity=algorithm.log_prob_granularity,
        clip_low=algorithm.clip_coef,
        clip_high=algorithm.clip_coef if algorithm.clip_high is None else algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        entropy_coef=algorithm.entropy_coef,
        **_penalty(algorithm.kl),
    )


def reinforce_coefficients(algorithm: ReinforceSpec) -> Coefficients:
    """The terms of the loss that a REINFORCE workload declares: no ratio, no bounds."""
    return Coefficients(
        granularity=algorithm.log_prob_granularity,
        value_coef=algorithm.value_coef,
        entropy_coef=algorithm.entropy_coef,
        **_penalty(algorithm.kl),
    )


def _penalty(kl: KlSpec | None) -> dict[str, Any]:
    if kl is None:
        return {}
    return {"kl_coef": kl.coef, "kl_reference": kl.reference, "kl_estimator": kl.estimator}


@dataclass(frozen=True)
class UpdateSettings:
    """What `policy_gradient_update` takes from a declaration; the attributes are its arguments."""

    coefficients: Coefficients
    epochs: int
    standardised: bool


def update_settings(algorithm: RolloutAlgorithm) -> UpdateSettings:
    """The update that a workload declares.

    Advantages of groups stay as they are: within its group each is in its scale already.
    """
    if isinstance(algorithm, PpoSpec):
        return UpdateSettings(ppo_coefficients(algorithm), algorithm.epochs, standardised=True)
    if isinstance(algorithm, GrpoSpec):
        return UpdateSettings(grpo_coefficients(algorithm), algorithm.epochs, standardised=False)
    return UpdateSettings(reinforce_coefficients(algorithm), 1, standardised=algorithm.standardise)


def policy_gradient_update(
    module: ActionModule,
    optimizer: Optimizer,
    encode: Encode,
    coefficients: Coefficients,
    generator: torch.Generator,
    *,
    epochs: int,
    microbatch_size: int,
    standardised: bool,
    proprioception: Tensor,
    trace: Trace,
    log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor,
    returns: Tensor | None = None,
    old_value: Tensor | None = None,
    behaviour_log_prob: Tensor | None = None,
    reference_log_prob: Tensor | None = None,
    moments: Moments | None = None,
) -> dict[str, float]:
    """Epochs over one job's samples, one optimizer step a shuffled microbatch: PPO, GRPO, REINFORCE by coefficients.

    A microbatch without a valid element makes no step. Neither does a job that has nothing to learn from: nothing is
    valid, or no advantage is other than 0, be it before they are standardised (the critic then has met its returns
    already) or after (all alike, and no critic to learn from them).

    Args:
        module: trained in place.
        optimizer: of the module.
        encode: called once a microbatch; what it holds in between is its own affair.
        coefficients: what the loss is made of.
        generator: shuffles; its state moves on.
        epochs: passes over the samples.
        microbatch_size: samples of one step.
        standardised: bring the advantages to zero mean and unit deviation over the job's valid elements.
        proprioception: normalised, float32 [n, S].
        trace: of the decisions, as `ActionModule.evaluate` takes it, [n, …] each.
        log_prob: of the policy that ratios are taken against (behaviour, or recomputed), float32 [n, H].
        advantage: float32 [n, H].
        valid: bool [n, H], actions that carry loss.
        returns: float32 [n]; for a critic.
        old_value: float32 [n], what the critic said when `advantage` was estimated.
        behaviour_log_prob: float32 [n, H], of the policy that acted, where the coefficients ask for it.
        reference_log_prob: float32 [n, H], likewise.
        moments: of the advantages of the whole job where these samples are a share of it.

    Returns:
        {"nothing_to_learn": 1.0}, or 0.0 and means over the steps of loss, policy_loss, value_loss, entropy, kl,
        approx_kl, clip_fraction, capped_fraction, ratio_mean, grad_norm; the greatest ratio_max; with `old_value` and
        `returns` explained_variance, of the critic that the job began with.
    """
    used = advantage
    if standardised:
        used = torch.from_numpy(standardise(advantage.numpy(), valid.numpy(), moments))
    learned_from = advantage if coefficients.value_coef else used
    if not (valid & (learned_from != 0)).any():
        return {"nothing_to_learn": 1.0}
    module.train()
    parameters = list(module.parameters())
    count = len(log_prob)
    sums: dict[str, float] = {}
    steps, ratio_max = 0, 0.0
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for index in order.split(microbatch_size):
            counts = ppo_counts(valid[index], coefficients.granularity)
            if counts.rows == 0:
                continue
            of_index = {name: kept[index] for name, kept in trace.items()}
            scored = module.evaluate(encode(index), proprioception[index], of_index)
            loss = policy_gradient(
                coefficients,
                log_prob=scored.log_prob,
                old_log_prob=log_prob[index],
                entropy=scored.entropy,
                advantage=used[index],
                valid=valid[index],
                counts=counts,
                value=scored.value,
                returns=_rows(returns, index),
                old_value=_rows(old_value, index),
                behaviour_log_prob=_rows(behaviour_log_prob, index),
                reference_log_prob=_rows(reference_log_prob, index),
            )
            norm = optimizer.step(loss.total, parameters)
            steps += 1
            ratio_max = max(ratio_max, loss.ratio_max)
            for name, value in (
                ("loss", loss.total.item()),
                ("policy_loss", loss.policy),
                ("value_loss", loss.value),
                ("entropy", loss.entropy),
                ("kl", loss.kl),
                ("approx_kl", loss.approx_kl),
                ("clip_fraction", loss.clip_fraction),
                ("capped_fraction", loss.capped_fraction),
                ("ratio_mean", loss.ratio_mean),
                ("grad_norm", norm),
            ):
                sums[name] = sums.get(name, 0.0) + value
    metrics = {name: value / steps for name, value in sums.items()} | {"ratio_max": ratio_max, "nothing_to_learn": 0.0}
    if old_value is not None and returns is not None:
        metrics["explained_variance"] = explained_variance(old_value, returns, valid.any(dim=1))
    return metrics


def _rows(tensor: Tensor | None, index: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[index]
