"""Updates of one tenant's action module over the frozen base: supervised steps and policy-gradient epochs.

Plain functions over a module, an optimizer and tensors. They raise where a number is not finite, before the optimizer
step that it would spoil. Legend: n samples, H horizon, A action width, S state width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithm import PpoSpec, SftSpec
from configs.errors import TenantFault
from kernels.action_modules import ActionModule
from kernels.advantages import Moments, standardise
from kernels.features import VLAFeature, concatenated
from kernels.losses import Coefficients, explained_variance, policy_gradient, ppo_counts, sft_valid_count

Encode = Callable[[slice | Tensor], VLAFeature]
"""Features of some of the samples, consecutive ones or by index; with gradient where the module adapts the base."""


@dataclass(eq=False)
class Optimizer:
    """AdamW with clipping and a schedule over all of a workload's steps.

    Attributes:
        steps: optimizer steps made so far.
        total_steps: those the workload declares; None keeps the learning rate constant.
    """

    adam: torch.optim.AdamW
    max_grad_norm: float
    learning_rate: float
    steps: int
    total_steps: int | None

    def step(self, loss: Tensor, parameters: Sequence[Tensor]) -> float:
        """Backward, clip, step; returns the gradient's norm before clipping.

        Raises:
            TenantFault: if loss or gradient is not finite; the parameters are as before.
        """
        if not math.isfinite(loss.item()):
            raise TenantFault(f"loss: got {loss.item()} at step {self.steps}; possible: finite numbers; check the data")
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        if not math.isfinite(norm):
            raise TenantFault(
                f"gradient: got norm {norm} at step {self.steps}; possible: finite; lower the learning rate"
            )
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate * self._decay()
        self.adam.step()
        self.steps += 1
        return norm

    def _decay(self) -> float:
        """Half a cosine from 1 to 0 over `total_steps`, 0 beyond."""
        if self.total_steps is None:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * min(self.steps / self.total_steps, 1.0)))


def new_optimizer(module: ActionModule, algorithm: SftSpec | PpoSpec) -> Optimizer:
    """A fresh optimizer as the algorithm declares it."""
    spec = algorithm.optimizer
    adam = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad],
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        foreach=False,
    )
    total = None
    if isinstance(algorithm, SftSpec) and algorithm.cosine:
        total = algorithm.jobs * algorithm.batches_per_job * algorithm.passes
    return Optimizer(adam, spec.max_grad_norm, spec.learning_rate, 0, total)


def sft_update(
    module: ActionModule,
    optimizer: Optimizer,
    encode: Encode,
    *,
    proprioception: Tensor,
    action: Tensor,
    is_pad: Tensor,
    microbatch_size: int,
    passes: int = 1,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """One optimizer step a microbatch on the module's imitation loss: consecutive ones first, then shuffled passes.

    Args:
        module: trained in place.
        optimizer: of the module.
        encode: called once a sample, whatever the passes; for a module with an adapter, whose features change with
            it, once a sample and pass.
        proprioception: normalised, float32 [n, S].
        action: normalised, float32 [n, H, A].
        is_pad: bool [n, H].
        microbatch_size: samples of one step.
        passes: over the samples; features of the first are kept for the others.
        generator: shuffles the passes after the first, and draws what the module's loss asks for; its state moves on.

    Returns:
        {"loss", "grad_norm"}, means over the steps.
    """
    module.train()
    parameters = list(module.parameters())
    losses, norms = [], []

    def step(feature: VLAFeature, rows: slice | Tensor) -> None:
        count = sft_valid_count(is_pad[rows], action.shape[2])
        loss = module.imitation_loss(feature, proprioception[rows], action[rows], is_pad[rows], count, generator)
        norms.append(optimizer.step(loss, parameters))
        losses.append(loss.item())

    kept: list[VLAFeature] = []
    frozen = module.adapter is None
    for rows in _consecutive(len(action), microbatch_size):
        feature = encode(rows)
        if passes > 1 and frozen:
            kept.append(feature)
        step(feature, rows)
    for _ in range(passes - 1):
        of_rows: Encode = concatenated(kept).__getitem__ if frozen else encode
        for index in torch.randperm(len(action), generator=generator).split(microbatch_size):
            step(of_rows(index), index)
    return {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}


def ppo_update(
    module: ActionModule,
    optimizer: Optimizer,
    encode: Encode,
    algorithm: PpoSpec,
    generator: torch.Generator,
    *,
    proprioception: Tensor,
    action: Tensor,
    log_prob: Tensor,
    advantage: Tensor,
    returns: Tensor,
    valid: Tensor,
    old_value: Tensor | None = None,
    behaviour_log_prob: Tensor | None = None,
) -> dict[str, float]:
    """`policy_gradient_update` as a PPO workload declares it, on advantages standardised over the whole job."""
    return policy_gradient_update(
        module,
        optimizer,
        encode,
        ppo_coefficients(algorithm),
        generator,
        epochs=algorithm.epochs,
        microbatch_size=algorithm.microbatch_size,
        standardised=True,
        proprioception=proprioception,
        action=action,
        log_prob=log_prob,
        advantage=advantage,
        valid=valid,
        returns=returns,
        old_value=old_value,
        behaviour_log_prob=behaviour_log_prob,
    )


def ppo_coefficients(algorithm: PpoSpec) -> Coefficients:
    """The terms of the loss that a PPO workload declares."""
    kl, decoupled = algorithm.kl, algorithm.decoupled
    return Coefficients(
        granularity=algorithm.log_prob_granularity,
        clip_low=algorithm.clip_coef,
        clip_high=algorithm.clip_coef if algorithm.clip_high is None else algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        behaviour_weight_cap=None if decoupled is None else decoupled.weight_cap,
        value_coef=algorithm.value_coef,
        value_clip=algorithm.value_clip,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=None if kl is None else kl.coef,
        kl_estimator="k3" if kl is None else kl.estimator,
    )


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
    action: Tensor,
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
        encode: called once for all n samples; for a module with an adapter, whose features change with it, once a
            microbatch.
        coefficients: what the loss is made of.
        generator: shuffles; its state moves on.
        epochs: passes over the samples.
        microbatch_size: samples of one step.
        standardised: bring the advantages to zero mean and unit deviation over the job's valid elements.
        proprioception: normalised, float32 [n, S].
        action: as sampled, normalised, float32 [n, H, A].
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
    of_rows: Encode = encode(slice(0, len(action))).__getitem__ if module.adapter is None else encode
    sums: dict[str, float] = {}
    steps, ratio_max = 0, 0.0
    for _ in range(epochs):
        order = torch.randperm(len(action), generator=generator)
        for index in order.split(microbatch_size):
            counts = ppo_counts(valid[index], coefficients.granularity)
            if counts.rows == 0:
                continue
            scored = module.evaluate(of_rows(index), proprioception[index], action[index])
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


def _consecutive(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
