"""GR00T-style head: flow matching of an action chunk by a diffusion transformer that attends to all prefix tokens.

Source: StarVLA's QwenGR00T (`GR00T_ActionHeader.py`, config DiT-B), after NVIDIA's GR00T N1.5
(`flow_matching_action_head.py`); of N1.5 the norm and the four self-attention layers over the prefix are left out, as
in StarVLA. Time runs from 0 (noise) to 1 (action). Training times are (1 − u) · s with u from Beta(1.5, 1), as in N1.6;
N1.5 has (s − u) / s, which for u > s falls below 0.

Legend as in `base`; W width of the transformer's tokens, R draws of noise and time a sample, n = B · R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.model import BaseModelSpec, Gr00tSpec
from kernels import flow_matching
from kernels.action_modules.base import (
    RowLinear,
    RowSequential,
    checked_proprioception,
    initialise_linear,
    over_rows,
)
from kernels.action_modules.diffusion_transformer import DiffusionTransformer, Source, sinusoid
from kernels.action_modules.flow import FlowModule
from kernels.features import VLAFeature


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Linear → ReLU → linear."""
    return RowSequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


class ActionEncoder(nn.Module):
    """Noisy actions and their time to tokens: linear, beside it sines and cosines of the time, linear, SiLU, linear."""

    def __init__(self, action_width: int, width: int) -> None:
        super().__init__()
        self.first = RowLinear(action_width, width)
        self.rest = RowSequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x_t: Tensor, bucket: Tensor) -> Tensor:
        """[n, H, A] with times' buckets [m], each of n / m consecutive chunks, to [n, H, W]."""
        actions = self.first(x_t)
        half = actions.shape[-1] // 2
        time = over_rows(torch.cat(sinusoid(bucket, half, half), dim=-1), len(x_t))
        tokens: Tensor = self.rest(torch.cat([actions, time.unsqueeze(1).expand_as(actions)], dim=-1))
        return tokens


class EmbodimentLayers(nn.Module):
    """The layers that know a robot's widths, one set an embodiment."""

    def __init__(self, spec: Gr00tSpec) -> None:
        super().__init__()
        width = spec.heads * spec.head_width
        self.state = mlp(spec.state_width, spec.hidden_width, width) if spec.proprioception == "head" else None
        self.encoder = ActionEncoder(spec.action_width, width)
        self.decoder = mlp(spec.hidden_width, spec.hidden_width, spec.action_width)


@dataclass(frozen=True, eq=False)
class Condition:
    """What a chunk is decoded from, the same at all times.

    Attributes:
        source: keys and values of the prefix.
        state: float32 [B, 1, W], the proprioception's token; None where it does not enter the head.
    """

    source: Source
    state: Tensor | None


class Gr00tModule(FlowModule):
    """State token, future tokens and action tokens through the transformer; velocities leave at the action tokens.

    The layers of embodiments that the tenant does not declare get no gradient and stay as they were.

    Args:
        spec: sizes, times and steps.
        base: what it decodes from.
        seed: of the initial parameters.
    """

    spec: Gr00tSpec
    direction = 1.0

    def __init__(self, spec: Gr00tSpec, base: BaseModelSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        width = spec.heads * spec.head_width
        # Built without storage and filled from one generator: torch's global random state is neither read nor moved.
        with torch.device("meta"):
            self.embodiments = nn.ModuleList(EmbodimentLayers(spec) for _ in range(spec.embodiments))
            self.future = nn.Parameter(torch.empty(spec.future_tokens, width))
            self.position = nn.Parameter(torch.empty(spec.horizon, width))
            self.transformer = DiffusionTransformer(
                width, spec.heads, spec.layers, base.hidden_width, spec.hidden_width
            )
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initialise_linear(module, generator)
        with torch.no_grad():
            for tokens in (self.future, self.position):
                tokens.normal_(0, 0.02, generator=generator)
        self._add_policy(base, spec.hidden_width, generator)

    @classmethod
    def build(cls, spec: Gr00tSpec, base: BaseModelSpec, seed: int) -> Gr00tModule:
        """The registry's signature."""
        return cls(spec, base, seed)

    def _velocities(
        self, feature: VLAFeature, proprioception: Tensor | None, action: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """See `FlowModule`: R is `repeated_steps`. Attention shows every action to the others, padded ones as zeros."""
        spec = self.spec
        noise, u = flow_matching.sample_training(
            feature.rows,
            spec.repeated_steps,
            spec.horizon,
            spec.action_width,
            alpha=spec.beta_alpha,
            beta=spec.beta_beta,
            generator=generator,
        )
        time = (1 - u) * spec.time_scale
        x_t, velocity = flow_matching.interpolate(noise, action[:, None], time)
        condition = self._context(feature, proprioception)
        flat = x_t.flatten(0, 1).to(self.device)
        predicted = self._velocity(flat, self._bucket(time.flatten()), condition)[0].cpu()
        return predicted.view_as(velocity), velocity

    @property
    def undecoded(self) -> frozenset[str]:
        """The layers of other embodiments."""
        others = (f"embodiments.{i}" for i in range(self.spec.embodiments) if i != self.spec.embodiment)
        return super().undecoded | frozenset(others)

    def velocity(self, feature: VLAFeature, proprioception: Tensor | None, x_t: Tensor, time: Tensor) -> Tensor:
        """Predicted velocity float32 [B, H, A] at x_t [B, H, A] and time [B] (0 noise … 1 action), on the CPU."""
        condition = self._context(feature, proprioception)
        return self._velocity(x_t.to(self.device), self._bucket(time), condition)[0].cpu()

    def _field(self, context: Condition, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlowModule`."""
        return self._velocity(x, self._bucket((step.double() / self.spec.denoising_steps).float()), context)

    def _bucket(self, time: Tensor) -> Tensor:
        """Times rounded down to one of `time_buckets`, float32."""
        return (time * self.spec.time_buckets).floor().clamp(max=self.spec.time_buckets - 1)

    def _context(self, feature: VLAFeature, proprioception: Tensor | None) -> Condition:
        assert feature.tokens is not None
        assert feature.mask is not None
        source = self.transformer.source(feature.tokens.to(self.device), feature.mask.to(self.device))
        encoder = self._layers.state
        if encoder is None:
            return Condition(source, None)
        state = checked_proprioception(proprioception, feature.rows, self.spec.state_width)
        return Condition(source, encoder(state.to(self.device, torch.float32)).unsqueeze(1))

    def _velocity(self, x_t: Tensor, bucket: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Velocity [n, H, A] and hidden states at buckets [m], each of n / m consecutive chunks; on the module's
        device."""
        bucket = bucket.to(self.device)
        actions = self._layers.encoder(x_t, bucket) + self.own(self.position, len(x_t))
        tokens = [self.own(self.future, len(x_t)).expand(len(x_t), -1, -1), actions]
        if condition.state is not None:
            tokens.insert(0, condition.state.repeat_interleave(len(x_t) // len(condition.state), dim=0))
        hidden = self.transformer(torch.cat(tokens, dim=1), bucket, condition.source, self.spec.horizon)
        return self._layers.decoder(hidden), hidden

    @property
    def _layers(self) -> EmbodimentLayers:
        layers = self.embodiments[self.spec.embodiment]
        assert isinstance(layers, EmbodimentLayers)
        return layers
