"""Updates of one tenant's action module over the frozen base: supervised steps and PPO epochs.

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
from kernels.advantages import standardise
from kernels.features import VLAFeature, concatenated
from kernels.losses import PpoCounts, ppo, ppo_counts, sft_valid_count

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
) -> dict[str, float]:
    """PPO epochs over one job's samples, one optimizer step a shuffled microbatch.

    Advantages are standardised over the valid elements of the whole job. A microbatch without a valid element makes
    no step.

    Args:
        module: trained in place.
        optimizer: of the module.
        encode: called once for all n samples; for a module with an adapter, whose features change with it, once a
            microbatch.
        algorithm: coefficients.
        generator: shuffles; its state moves on.
        proprioception: normalised, float32 [n, S].
        action: as sampled, normalised, float32 [n, H, A].
        log_prob: of the behaviour (or recomputed) policy, float32 [n, H].
        advantage: float32 [n, H].
        returns: float32 [n].
        valid: bool [n, H].

    Returns:
        Means over the steps of loss, policy_loss, value_loss, entropy, approx_kl, clip_fraction, grad_norm.
    """
    module.train()
    parameters = list(module.parameters())
    standardised = torch.from_numpy(standardise(advantage.numpy(), valid.numpy()))
    of_rows: Encode = encode(slice(0, len(action))).__getitem__ if module.adapter is None else encode
    sums: dict[str, float] = {}
    steps = 0
    for _ in range(algorithm.epochs):
        order = torch.randperm(len(action), generator=generator)
        for index in order.split(algorithm.microbatch_size):
            counts: PpoCounts = ppo_counts(valid[index], algorithm.log_prob_granularity)
            if counts.rows == 0:
                continue
            scored = module.evaluate(of_rows(index), proprioception[index], action[index])
            loss = ppo(
                log_prob=scored.log_prob,
                old_log_prob=log_prob[index],
                entropy=scored.entropy,
                value=scored.value,
                advantage=standardised[index],
                returns=returns[index],
                valid=valid[index],
                counts=counts,
                clip_coef=algorithm.clip_coef,
                value_coef=algorithm.value_coef,
                entropy_coef=algorithm.entropy_coef,
                granularity=algorithm.log_prob_granularity,
            )
            norm = optimizer.step(loss.total, parameters)
            steps += 1
            for name, value in (
                ("loss", loss.total.item()),
                ("policy_loss", loss.policy),
                ("value_loss", loss.value),
                ("entropy", loss.entropy),
                ("approx_kl", loss.approx_kl),
                ("clip_fraction", loss.clip_fraction),
                ("grad_norm", norm),
            ):
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / steps for name, value in sums.items()}


def _consecutive(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
