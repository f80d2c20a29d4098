"""Supervised updates of one tenant's action module over the frozen base, and the optimizer of all updates.

Plain functions over a module, an optimizer and tensors. They raise where a number is not finite, before the optimizer
step that it would spoil. Legend: n samples, H horizon, A action width, S state width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithm import AlgorithmSpec
from configs.errors import TenantFault
from kernels.action_modules import ActionModule
from kernels.features import VLAFeature, concatenated
from kernels.losses import sft_valid_count

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
        self.begin(loss)
        loss.backward()
        return self.finish(parameters)

    def begin(self, loss: Tensor) -> None:
        """Make ready for the backward pass of `loss`.

        Raises:
            TenantFault: if it is not finite.
        """
        if not math.isfinite(loss.item()):
            raise TenantFault(f"loss: got {loss.item()} at step {self.steps}; possible: finite numbers; check the data")
        self.adam.zero_grad(set_to_none=True)

    def finish(self, parameters: Sequence[Tensor]) -> float:
        """Clip and step after the backward pass; returns the gradient's norm before clipping.

        Raises:
            TenantFault: if the gradient is not finite; the parameters are as before.
        """
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


def new_optimizer(module: ActionModule, algorithm: AlgorithmSpec) -> Optimizer:
    """A fresh optimizer as the algorithm declares it."""
    spec = algorithm.optimizer
    adam = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad],
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        fused=True,
    )
    return Optimizer(adam, spec.max_grad_norm, spec.learning_rate, 0, algorithm.decay_steps)


class SftUpdate:
    """One tenant's supervised update of one job, one optimizer step a microbatch: consecutive ones first, then shuffled
    passes. A step is `rows` → their features → `loss` → its backward pass → `finish`, so that whoever drives several
    tenants' updates shares what lies between.

    Args:
        module: trained in place.
        optimizer: of the module.
        proprioception: normalised, float32 [n, S].
        action: normalised, float32 [n, H, A].
        is_pad: bool [n, H].
        microbatch_size: samples of one step.
        passes: over the samples.
        keeps: features of the first pass for the others; not those of a module with an adapter, which change with it.
        generator: shuffles the passes after the first, and draws what the module's loss asks for; its state moves on.

    Attributes:
        rows: samples of the present step; None after the last.
    """

    def __init__(
        self,
        module: ActionModule,
        optimizer: Optimizer,
        *,
        proprioception: Tensor,
        action: Tensor,
        is_pad: Tensor,
        microbatch_size: int,
        passes: int = 1,
        keeps: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self.module = module.train()
        self._optimizer = optimizer
        self._proprioception, self._action, self._is_pad = proprioception, action, is_pad
        self._generator = generator
        self._parameters = list(module.parameters())
        self._keeps = keeps and passes > 1 and module.adapter is None
        self._first_pass: list[VLAFeature] = []
        self._all: VLAFeature | None = None
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._order = self._microbatches(microbatch_size, passes)
        self.rows: slice | Tensor | None = next(self._order, None)

    @property
    def kept(self) -> VLAFeature | None:
        """Features of the present rows, from the first pass; None: they have to be encoded."""
        if not self._keeps or self.rows is None or isinstance(self.rows, slice):
            return None
        if self._all is None:
            self._all = concatenated(self._first_pass)
        return self._all[self.rows]

    def loss(self, feature: VLAFeature) -> Tensor:
        """Of the present rows, with gradient; whoever drives the update runs its backward pass.

        Raises:
            TenantFault: if it is not finite.
        """
        assert self.rows is not None
        if self._keeps and isinstance(self.rows, slice):
            self._first_pass.append(feature)
        action, is_pad = self._action[self.rows], self._is_pad[self.rows]
        count = sft_valid_count(is_pad, action.shape[2])
        loss = self.module.imitation_loss(
            feature, self._proprioception[self.rows], action, is_pad, count, self._generator
        )
        self._optimizer.begin(loss)
        self._losses.append(loss.item())
        return loss

    def finish(self) -> None:
        """The optimizer step after the backward pass; the next rows' turn comes.

        Raises:
            TenantFault: if the gradient is not finite; the parameters are as before.
        """
        self._norms.append(self._optimizer.finish(self._parameters))
        self.rows = next(self._order, None)

    def metrics(self) -> dict[str, float]:
        """{"loss", "grad_norm"}, means over the steps."""
        return {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._norms) / len(self._norms),
        }

    def _microbatches(self, size: int, passes: int) -> Iterator[slice | Tensor]:
        count = len(self._action)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))
        for _ in range(passes - 1):
            yield from torch.randperm(count, generator=self._generator).split(size)
