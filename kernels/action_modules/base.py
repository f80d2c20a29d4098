"""What every action module is: a tenant's private decoder from shared features to a chunk of actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import Conflict, refusal
from kernels.features import VLAFeature


@dataclass(frozen=True, eq=False)
class Decision:
    """One chunk a row, in the policy's own normalised action space.

    Attributes:
        action: float32 [B, H, A].
        log_prob: float32 [B, H], summed over A.
        value: float32 [B].
    """

    action: Tensor
    log_prob: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What the current parameters say of given actions.

    Attributes:
        log_prob: float32 [B, H], summed over A.
        entropy: float32 [B, H], summed over A, in nats.
        value: float32 [B].
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class ActionModule(nn.Module, ABC):
    """A tenant's trainable part. Legend: B rows, H horizon, A action width, S state width, N tokens, D base width.

    Rows never meet in it, and no random numbers are drawn but from the generator that is passed, so that a row's
    result depends on the row, the parameters and the generator alone.

    A module lives on its base's device, where the features are. Features and proprioception may come from any device;
    actions, generators (so noise is the same everywhere) and all results are on the CPU, where losses and partitions
    are. Gradients find their way back. Where everything is on the CPU nothing is copied.
    """

    @property
    def device(self) -> torch.device:
        """Where all of its parameters are."""
        return next(self.parameters()).device

    @abstractmethod
    def mean(self, feature: VLAFeature, proprioception: Tensor | None) -> Tensor:
        """The chunk without noise, float32 [B, H, A]; what supervised training regresses and evaluation executes.

        Args:
            feature: of the frozen base.
            proprioception: normalised, float32 [B, S]; read only where the module declares that it enters the head.
        """

    @abstractmethod
    def act(self, feature: VLAFeature, proprioception: Tensor | None, generator: torch.Generator | None) -> Decision:
        """Sample a chunk a row, without gradients; `generator` None takes the mean."""

    @abstractmethod
    def evaluate(self, feature: VLAFeature, proprioception: Tensor | None, action: Tensor) -> Evaluation:
        """Score `action` [B, H, A] (normalised space), with gradients."""


def export_parameters(module: nn.Module) -> dict[str, np.ndarray]:
    """Copies of all parameters by name, the payload of a policy version; never the base's."""
    return {name: p.detach().cpu().numpy().copy() for name, p in module.named_parameters()}


def load_parameters(module: nn.Module, parameters: Mapping[str, np.ndarray]) -> None:
    """Copy a payload into the module.

    Raises:
        Conflict: if names, shapes or dtypes are not exactly the module's; nothing is changed then.
    """
    own = dict(module.named_parameters())
    expected = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in own.items()}
    given = {name: (tuple(a.shape), str(a.dtype)) for name, a in parameters.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            remedy = "load a payload of the same schema signature"
            raise Conflict(refusal(f"parameters.{name}", given.get(name), f"{expected.get(name)}", remedy))
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(torch.from_numpy(np.ascontiguousarray(parameters[name])))


def initialise_linear(linear: nn.Linear, generator: torch.Generator, scale: float = 1.0) -> None:
    """torch's default for `nn.Linear` (uniform within 1/√fan_in) times `scale`, from one generator."""
    bound = scale / math.sqrt(linear.in_features)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=generator)
        if linear.bias is not None:
            linear.bias.uniform_(-bound, bound, generator=generator)
