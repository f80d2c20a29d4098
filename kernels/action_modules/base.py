"""What every action module is: a tenant's private decoder from shared features to a chunk of actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import Conflict, SpecError, TenantFault, refusal
from configs.model import ActionModuleSpec, Part
from kernels.features import VLAFeature
from kernels.lora import LoraWeights

Noise = Mapping[str, Tensor]
"""All that is random in the decisions of B rows, by name, [B, …] each, on the CPU."""

Trace = Mapping[str, Tensor]
"""What scoring a decision later takes, by the names of `spec.trace`, [B, …] each, on the CPU."""


@dataclass(frozen=True, eq=False)
class Decision:
    """One chunk a row, in the policy's own normalised action space.

    Attributes:
        action: float32 [B, H, A].
        log_prob: float32 [B, H], summed over A; None from a module that does not learn by RL.
        value: float32 [B]; None likewise.
        trace: for `evaluate`; empty likewise.
    """

    action: Tensor
    log_prob: Tensor | None = None
    value: Tensor | None = None
    trace: Trace = field(default_factory=dict)


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


@dataclass(frozen=True, eq=False)
class Regression:
    """How far the current parameters are from recorded actions, and what they expect, with gradients.

    Attributes:
        error: float32 [B, H], what regression onto each action descends on; finite and without gradient where padded.
        value: float32 [B].
    """

    error: Tensor
    value: Tensor


class ActionModule(nn.Module, ABC):
    """A tenant's trainable part. Legend: B rows, H horizon, A action width, S state width, N tokens, D base width.

    Rows never meet in it, and no random numbers are drawn but from the generator that is passed, so that a row's
    result depends on the row, the parameters and the generator alone.

    A module lives on its base's device, where the features are. Features and proprioception may come from any device;
    actions, generators (so noise is the same everywhere) and all results are on the CPU, where losses and partitions
    are. Gradients find their way back. Where everything is on the CPU nothing is copied.

    Attributes:
        spec: as it was declared.
        adapter: what the module changes inside the base, a part of its parameters; whoever encodes for it passes this
            to the base. Features of a module with an adapter are those of its present parameters: they are computed
            with gradient where it trains, and not kept across optimizer steps. None: the frozen base's features.
        tenants: T, how many tenants' modules it is: 1, but of a stack (`stacking.stack`), whose B rows are those of
            one tenant after another, B / T each.
    """

    spec: ActionModuleSpec

    def __init__(self) -> None:
        super().__init__()
        self.adapter: LoraWeights | None = None
        self.tenants = 1

    @property
    def reads(self) -> frozenset[Part]:
        """Parts of the base's features that it decodes from."""
        return self.spec.reads

    @property
    def learns_by_rl(self) -> bool:
        """Whether `act` gives log-probabilities and values and `evaluate` scores actions."""
        return self.spec.learns_by_rl

    @property
    def device(self) -> torch.device:
        """Where all of its parameters are."""
        return next(self.parameters()).device

    @property
    def num_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @abstractmethod
    def imitation_loss(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        valid_count: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        """What supervised training descends on: a sum over valid scalars divided by `valid_count`, with gradient.

        Args:
            feature: of the frozen base.
            proprioception: normalised, float32 [B, S]; read only where the module declares that it enters the head.
            action: demonstrated chunks, normalised, float32 [B, H, A].
            is_pad: bool [B, H], True past the episode's end; such actions carry no loss, and may hold anything.
            valid_count: scalars that count in the whole optimizer step, see `kernels.losses.sft_valid_count`.
            generator: draws noise and times, for modules that train on them; its state moves on.
        """

    def act(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        generator: torch.Generator | None,
        *,
        exploring: bool = True,
    ) -> Decision:
        """A chunk a row, without gradients, from what `draw` gives."""
        return self.decode(feature, proprioception, self.draw(feature.rows, generator, exploring=exploring))

    @abstractmethod
    def draw(self, rows: int, generator: torch.Generator | None, *, exploring: bool = True) -> Noise:
        """All that is random in the decisions of so many rows; the generator's state moves on.

        Args:
            rows: B.
            generator: on the CPU. None asks for the same chunk each time, and for a row the same in any company: the
                mean of a Gaussian, the result of one fixed noise of a flow.
            exploring: with the noise that a policy learns by. Without it a Gaussian gives its mean, and a flow what
                follows from noise drawn anew for each chunk, which it was trained to begin from.
        """

    @abstractmethod
    def decode(self, feature: VLAFeature, proprioception: Tensor | None, noise: Noise) -> Decision:
        """The chunks that follow from `noise` of `draw`, without gradients and with no further randomness.

        A row's bits do not depend on the other rows: requests of one tenant may be decoded in one call.
        """

    def regress(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        generator: torch.Generator | None,
    ) -> Regression:
        """Errors of recorded actions that are not reduced yet, so that they can be weighted, and the critic's values.

        A module with a density gives −log π(a), summed over A. One without gives each action's part of its imitation
        loss, the mean over A and all draws: their sum over valid actions / the number of these is that loss.

        Args:
            feature, proprioception, action, is_pad, generator: as of `imitation_loss`; the generator draws row by row.

        Raises:
            SpecError: of a module without a critic.
        """
        raise SpecError(f"action_module: {type(self).__name__} has no critic; possible: supervised fine-tuning")

    @property
    def undecoded(self) -> frozenset[str]:
        """Names of the parts that `decode` does not run, for instance what works inside the base."""
        return frozenset({"adapter"})

    def own(self, parameter: Tensor, rows: int) -> Tensor:
        """A parameter [...] that is the same for all rows of a tenant, as [1 or rows, ...]."""
        return over_rows(parameter.unsqueeze(0) if self.tenants == 1 else parameter, rows)

    def evaluate(self, feature: VLAFeature, proprioception: Tensor | None, trace: Trace) -> Evaluation:
        """Score decisions by their traces, with gradients.

        Under the parameters that decided, the log-probabilities are those of `decode`.

        Raises:
            SpecError: of a module that does not learn by RL.
        """
        raise SpecError(f"action_module: {type(self).__name__} scores no actions; possible: supervised fine-tuning")


# A float32 Linear picks its kernel by the number of rows: 1 to 3, and odd remainders, differ in the last bits from
# the same rows in company. At multiples of 16 all row counts gave the same bits.
ROW_BLOCK = 16


def padded_rows(tensor: Tensor) -> Tensor:
    """`tensor` [B, …] with zero rows up to a multiple of `ROW_BLOCK`, so that a row's bits do not depend on B."""
    padding = -len(tensor) % ROW_BLOCK
    return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor


def over_rows(x: Tensor, rows: int) -> Tensor:
    """x [m, ...], each of which holds for rows / m consecutive rows, as [rows, ...]; as it is where m is 1."""
    return x if len(x) in (1, rows) else x.repeat_interleave(rows // len(x), dim=0)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function`, which takes rows to rows, of x [..., width]; a row's bits do not depend on the others' number."""
    flat = x.flatten(0, -2)
    return function(padded_rows(flat)).narrow(0, 0, len(flat)).unflatten(0, x.shape[:-1])


class RowLinear(nn.Linear):
    """A linear layer whose rows do not depend on their number: all leading dimensions are padded as one.

    At most 15 tokens more, where padding the batch's rows would compute up to 15 whole chunks more.
    """

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """[…, inputs] to […, outputs]."""
        return rowwise(super().forward, input)


class RowSequential(nn.Sequential):
    """Layers one after another whose rows do not depend on their number: padded once for all of them."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return rowwise(super().forward, input)


def checked_proprioception(proprioception: Tensor | None, rows: int, state_width: int) -> Tensor:
    """Proprioception of a module that reads it.

    Raises:
        TenantFault: if it is missing or has another shape.
    """
    expected = (rows, state_width)
    if proprioception is None or tuple(proprioception.shape) != expected:
        given = None if proprioception is None else tuple(proprioception.shape)
        raise TenantFault(refusal("proprioception", given, f"shape {expected}", "send the declared state"))
    return proprioception


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
