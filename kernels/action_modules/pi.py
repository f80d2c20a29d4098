"""π-style head: an action expert over the base's keys and values turns noise into a chunk by flow matching.

Source: openpi, models/pi0.py (π0 and π0.5), in its direction of time: x_t = t · noise + (1 − t) · action, velocity =
noise − action, from t = 1 (noise) to t = 0 (actions). The tenant's own action and state widths stand where openpi pads
to 32. Not covered: training the base together with the expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec, PiSpec
from kernels import flow_matching
from kernels.action_modules.base import (
    RowLinear,
    checked_proprioception,
    initialise_linear,
    over_rows,
)
from kernels.action_modules.flow import FlowModule
from kernels.action_modules.pi_expert import AdaptiveRmsNorm, Expert, RmsNorm, sincos_embedding
from kernels.features import PrefixCache, VLAFeature

TIME_SCALE, TIME_OFFSET = 0.999, 0.001


class _Context(NamedTuple):
    """What all denoising steps share, on the module's device.

    Attributes:
        state: the state token, float32 [B, 1, W], or None.
        prefix: zero where it is masked.
        prefix_mask: bool [B, L].
        suffix_mask: bool [S, S], which suffix tokens (columns) each one (row) sees.
    """

    state: Tensor | None
    prefix: PrefixCache
    prefix_mask: Tensor
    suffix_mask: Tensor


class PiModule(FlowModule):
    """One tenant's action expert, as deep as the base and with its key/value heads. Legend: W the expert's width.

    Args:
        spec: version and widths.
        base: what the prefix's keys and values look like.
        seed: of the initial parameters.

    Raises:
        SpecError: if the query heads are no multiple of the base's key/value heads.
    """

    spec: PiSpec
    direction = -1.0

    def __init__(self, spec: PiSpec, base: BaseModelSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        if spec.heads % base.num_key_value_heads:
            possible = f"multiples of {base.num_key_value_heads}, the key/value heads of base {base.name!r}"
            raise SpecError(refusal("action_module.heads", spec.heads, possible, "change heads or the base"))
        width = spec.hidden_width
        # Built without storage and filled from one generator: torch's global random state is neither read nor moved.
        with torch.device("meta"):
            self.action_in = RowLinear(spec.action_width, width)
            self.state_in = RowLinear(spec.state_width, width) if spec.proprioception == "head" else None
            self.time_in = RowLinear(2 * width if spec.version == "pi0" else width, width)
            self.time_out = RowLinear(width, width)
            self.expert = Expert(
                layers=base.num_layers,
                width=width,
                mlp_width=spec.mlp_width,
                heads=spec.heads,
                kv_heads=base.num_key_value_heads,
                head_width=base.head_width,
                theta=base.rope_theta,
                adaptive=spec.version == "pi05",
            )
            self.action_out = RowLinear(width, spec.action_width)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        self._initialise(generator)
        self._add_policy(base, width, generator)

    @classmethod
    def build(cls, spec: PiSpec, base: BaseModelSpec, seed: int) -> PiModule:
        """The registry's signature."""
        return cls(spec, base, seed)

    def _initialise(self, generator: torch.Generator) -> None:
        """As openpi: weights of variance 1 / fan_in, biases and norms zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initialise_linear(module, generator, math.sqrt(3))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, RmsNorm | AdaptiveRmsNorm):
                module.initialise()

    def velocity(self, feature: VLAFeature, proprioception: Tensor | None, x_t: Tensor, time: Tensor) -> Tensor:
        """noise − action as the expert sees it, float32 [B, H, A], on the CPU.

        Args:
            feature: with the cache and its mask; what is masked may hold anything.
            proprioception: normalised, float32 [B, S]; read only where it enters the head.
            x_t: float32 [B, H, A].
            time: [B], 1 at noise and 0 at actions.
        """
        context = self._context(feature, proprioception)
        return self._velocity(context, x_t.to(self.device), time.to(self.device))[0].cpu()

    def _velocities(
        self, feature: VLAFeature, proprioception: Tensor | None, action: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """See `FlowModule`: one draw a row."""
        noise, draws = flow_matching.sample_training(
            len(action),
            1,
            self.spec.horizon,
            self.spec.action_width,
            alpha=self.spec.beta_alpha,
            beta=self.spec.beta_beta,
            generator=generator,
        )
        time = draws[:, 0] * TIME_SCALE + TIME_OFFSET
        # Its time runs the other way: the same path, the velocity turned round.
        x_t, towards_action = flow_matching.interpolate(noise[:, 0], action, 1 - time)
        predicted = self.velocity(feature, proprioception, x_t, time)
        return predicted.unsqueeze(1), -towards_action.unsqueeze(1)

    def _field(self, context: _Context, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlowModule`."""
        return self._velocity(context, x, 1.0 - step.to(self.device).double() / self.spec.denoising_steps)

    def _context(self, feature: VLAFeature, proprioception: Tensor | None) -> _Context:
        """What is masked becomes zero: a NaN would pass through a weight of zero."""
        assert feature.cache is not None
        assert feature.mask is not None
        mask, state = feature.mask.to(self.device), None
        hidden = mask.logical_not().unsqueeze(1).unsqueeze(3)
        keys, values = (
            tuple(layer.to(self.device).masked_fill(hidden, 0.0) for layer in layers)
            for layers in (feature.cache.keys, feature.cache.values)
        )
        if self.state_in is not None:
            given = checked_proprioception(proprioception, feature.rows, self.spec.state_width)
            state = self.state_in(given.to(self.device, torch.float32)).unsqueeze(1)
        # The state token sees the prefix and itself; the actions see everything, also those after them.
        before = 0 if state is None else 1
        sees = torch.ones(before + self.spec.horizon, before + self.spec.horizon, dtype=torch.bool)
        sees[:before, before:] = False
        prefix = PrefixCache(keys, values, feature.cache.position.to(self.device))
        return _Context(state, prefix, mask, sees.to(self.device))

    def _velocity(self, context: _Context, x_t: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, A] and times [m], each of B / m consecutive rows, to [B, H, A] and the expert's states [B, H, W].

        All on the module's device.
        """
        tokens: Tensor = self.action_in(x_t)
        embedded, condition = sincos_embedding(time, self.spec.hidden_width), None
        if self.spec.version == "pi05":
            condition = F.silu(self.time_out(F.silu(self.time_in(embedded))))
        else:
            embedded = over_rows(embedded, len(tokens))
            fused = torch.cat([tokens, embedded.unsqueeze(1).expand_as(tokens)], dim=2)
            tokens = self.time_out(F.silu(self.time_in(fused)))
        if context.state is not None:
            tokens = torch.cat([context.state, tokens], dim=1)
        out = self.expert(tokens, context.prefix, context.prefix_mask, context.suffix_mask, condition)
        hidden: Tensor = out.narrow(1, out.shape[1] - self.spec.horizon, self.spec.horizon)
        return self.action_out(hidden), hidden
