"""What modules that denoise a chunk share: learning it by flow matching, acting at random on the way from noise to
actions, and scoring that.

A family gives the velocities of its field, in training beside the right ones on drawn points of the paths to recorded
chunks. A module without a declared policy follows the flow. With one, denoising steps are stochastic
(`kernels.flow_policy`), what they came through is stored as the trace, and `evaluate` scores it step by step with the
code that sampled it: one time grid, one field, one distribution. Legend as in `base`; K denoising steps, R draws of
noise and time a row, W width of the field's hidden states.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from configs.model import BaseModelSpec, FlowNoiseSpec, FlowSdeSpec, Gr00tSpec, PiSpec
from kernels import flow_matching, flow_policy
from kernels.action_modules.base import (
    ActionModule,
    Decision,
    Evaluation,
    Noise,
    Regression,
    RowLinear,
    Trace,
    checked_proprioception,
    initialise_linear,
    padded_rows,
)
from kernels.action_modules.residual_mlp import ResidualMlp
from kernels.features import VLAFeature

Transition = tuple[Tensor, Tensor, Tensor]
"""x before a stochastic step and after it, float32 [B, H, A], and which step, int64 [B]."""


class FlowSde(nn.Module):
    """One stochastic step a chunk, each equally likely; no parameters."""

    def __init__(self, spec: FlowSdeSpec, steps: int) -> None:
        super().__init__()
        self.level, self.steps = spec.noise_level, steps

    def draw(self, rows: int, horizon: int, width: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Which step, and its noise, row by row; step −1, none, without a generator.

        Args:
            rows: B.
            horizon: H.
            width: A.
            generator: on the CPU; its state moves on.

        Returns:
            denoising_step int64 [B] in −1 … K − 1, and step_noise, standard normal (0 without a generator), float32
            [B, H, A].
        """
        if generator is None:
            step, noise = torch.full((rows,), -1), torch.zeros(rows, horizon, width)
        else:
            drawn = [
                (torch.randint(self.steps, (), generator=generator), torch.randn(horizon, width, generator=generator))
                for _ in range(rows)
            ]
            step, noise = (torch.stack(list(part)) for part in zip(*drawn, strict=True))
        return {"denoising_step": step, "step_noise": noise}

    def noise_at(self, noise: Noise, step: int) -> tuple[Tensor, Tensor]:
        """Of one step: standard normal [B, H, A], and which rows take it, bool [B]."""
        return noise["step_noise"], noise["denoising_step"] == step

    def distribution(self, x: Tensor, velocity: Tensor, hidden: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, H, A] and deviation [B, 1, 1] after one step; velocity towards noise."""
        del hidden
        return flow_policy.sde_step(x, velocity, step, self.steps, self.level)

    def trace(self, path: list[Tensor], noise: Noise) -> dict[str, Tensor]:
        """chain float32 [B, 2, H, A] around the stochastic step, and denoising_step int64 [B]."""
        step = noise["denoising_step"].clamp(min=0)
        whole, rows = torch.stack(path, dim=1), torch.arange(len(step))
        return {"chain": torch.stack([whole[rows, step], whole[rows, step + 1]], dim=1), "denoising_step": step}

    def transitions(self, trace: Trace) -> Iterator[Transition]:
        """The one that was stored."""
        chain = trace["chain"]
        yield chain[:, 0], chain[:, 1], trace["denoising_step"]


class FlowNoise(nn.Module):
    """A stochastic step after another, deviations learned from the field's hidden states."""

    def __init__(self, spec: FlowNoiseSpec, steps: int, width: int, action_width: int) -> None:
        super().__init__()
        self.least, self.most, self.steps = spec.least_deviation, spec.most_deviation, steps
        self.deviation = RowLinear(width, action_width)

    def draw(self, rows: int, horizon: int, width: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The noise of all steps, row by row; none without a generator.

        Args:
            rows: B.
            horizon: H.
            width: A.
            generator: on the CPU; its state moves on.

        Returns:
            step_noise, standard normal (0 without a generator), float32 [B, K, H, A].
        """
        if generator is None:
            return {"step_noise": torch.zeros(rows, self.steps, horizon, width)}
        drawn = [torch.randn(self.steps, horizon, width, generator=generator) for _ in range(rows)]
        return {"step_noise": torch.stack(drawn)}

    def noise_at(self, noise: Noise, step: int) -> tuple[Tensor, Tensor]:
        """As of `FlowSde`; all rows take it."""
        own = noise["step_noise"][:, step]
        return own, torch.ones(len(own), dtype=torch.bool)

    def distribution(self, x: Tensor, velocity: Tensor, hidden: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation [B, H, A] after one step; velocity towards noise."""
        del step
        share = flow_policy.in_blocks(torch.sigmoid, self.deviation(hidden))
        deviation = flow_policy.in_blocks(torch.exp, math.log(self.least) + math.log(self.most / self.least) * share)
        return flow_policy.ode_step(x, velocity, self.steps), deviation

    def trace(self, path: list[Tensor], noise: Noise) -> dict[str, Tensor]:
        """chain float32 [B, K + 1, H, A], from noise to actions."""
        del noise
        return {"chain": torch.stack(path, dim=1)}

    def transitions(self, trace: Trace) -> Iterator[Transition]:
        """All K."""
        chain = trace["chain"]
        for k in range(self.steps):
            yield chain[:, k], chain[:, k + 1], torch.full((len(chain),), k)


class ValueHead(nn.Module):
    """V of the frozen features and the state, apart from the policy, so that its loss cannot bend that."""

    def __init__(self, spec: Gr00tSpec | PiSpec, base: BaseModelSpec) -> None:
        super().__init__()
        assert spec.policy is not None
        features = base.hidden_width * base.num_action_tokens
        inputs = features + (spec.state_width if spec.proprioception == "head" else 0)
        self.norm = nn.LayerNorm(features)
        self.mlp = ResidualMlp(inputs, spec.policy.value_width, spec.policy.value_blocks, 1)

    def forward(self, tokens: Tensor, state: Tensor | None, pad: bool) -> Tensor:
        """Action tokens [B, N, D] and state [B, S] to [B]; `pad` fills rows up to blocks."""
        x = self.norm(tokens.flatten(1))
        x = x if state is None else torch.cat([x, state.to(x.device, x.dtype)], dim=1)
        value: Tensor = self.mlp(padded_rows(x) if pad else x)
        return value.narrow(0, 0, len(tokens)).squeeze(1)

    def initialise(self, generator: torch.Generator) -> None:
        """Fill all parameters from `generator`."""
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        self.mlp.initialise(generator, 1.0)


class FlowModule(ActionModule):
    """A module that denoises. A family gives its field; construction ends with `_add_policy`.

    Attributes:
        direction: of the family's velocities, 1 from noise to the action, −1 from the action to noise.
        sampling: how it acts at random; None: it follows the flow and learns by supervision alone.
        value: its value head; None likewise.
    """

    spec: Gr00tSpec | PiSpec
    direction: ClassVar[float]
    sampling: FlowSde | FlowNoise | None
    value: ValueHead | None

    def _add_policy(self, base: BaseModelSpec, hidden_width: int, generator: torch.Generator) -> None:
        """What the declared policy needs, initialised after all else, so that it changes nothing of that."""
        spec, policy = self.spec, self.spec.policy
        self.sampling, self.value = None, None
        if policy is None:
            return
        with torch.device("meta"):
            self.value = ValueHead(spec, base)
            if isinstance(policy, FlowSdeSpec):
                self.sampling = FlowSde(policy, spec.denoising_steps)
            else:
                self.sampling = FlowNoise(policy, spec.denoising_steps, hidden_width, spec.action_width)
        self.value.to_empty(device="cpu")
        self.sampling.to_empty(device="cpu")
        self.value.initialise(generator)
        if isinstance(self.sampling, FlowNoise):
            initialise_linear(self.sampling.deviation, generator)

    @abstractmethod
    def _velocities(
        self, feature: VLAFeature, proprioception: Tensor | None, action: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Predicted and right velocities at R drawn points of the paths to a chunk, float32 [B, R, H, A], on the CPU.

        Args:
            feature, proprioception: as of `imitation_loss`.
            action: normalised, float32 [B, H, A], finite everywhere.
            generator: draws noises and times row by row; None gives every row the same fixed ones.
        """

    def imitation_loss(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        valid_count: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        """See `ActionModule`: squared error of the velocity, the mean over all draws of a row.

        None instead of a generator gives every row the same fixed draws.
        """
        safe = torch.where(is_pad[..., None], torch.zeros_like(action), action)
        predicted, velocity = self._velocities(feature, proprioception, safe, generator)
        return flow_matching.velocity_loss(predicted, velocity, is_pad.unsqueeze(1), valid_count * predicted.shape[1])

    def regress(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        generator: torch.Generator | None,
    ) -> Regression:
        """See `ActionModule`: squared error of the velocity, the mean over A and all draws of a row."""
        if self.value is None:
            return super().regress(feature, proprioception, action, is_pad, generator)
        safe = torch.where(is_pad[..., None], torch.zeros_like(action), action)
        predicted, velocity = self._velocities(feature, proprioception, safe, generator)
        error = flow_matching.squared_error(predicted, velocity, is_pad.unsqueeze(1)).mean(dim=(1, 3))
        return Regression(error, self._value(feature, proprioception, pad=False))

    @abstractmethod
    def _context(self, feature: VLAFeature, proprioception: Tensor | None) -> Any:
        """What all denoising steps share, on the module's device."""

    @abstractmethod
    def _field(self, context: Any, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] in the family's direction, and the hidden states [B, H, W] that it is read from.

        Args:
            context: of `_context`.
            x: float32 [B, H, A], on the module's device.
            step: int64 [m], the denoising step of B / m consecutive rows each.
        """

    def draw(self, rows: int, generator: torch.Generator | None, *, exploring: bool = True) -> Noise:
        """See `ActionModule`: where the path begins, row by row, and what its stochastic steps take."""
        horizon, width = self.spec.horizon, self.spec.action_width
        start = {"start": flow_matching.sample_noise(rows, horizon, width, generator)}
        if self.sampling is None:
            return start
        return start | self.sampling.draw(rows, horizon, width, generator if exploring else None)

    def decode(self, feature: VLAFeature, proprioception: Tensor | None, noise: Noise) -> Decision:
        """See `ActionModule`: K Euler steps from noise, those that the policy says stochastic."""
        with torch.no_grad():
            context, steps = self._context(feature, proprioception), self.spec.denoising_steps
            path = [noise["start"].to(self.device)]
            log_prob = torch.zeros(path[0].shape[:2], device=self.device)
            for k in range(steps):
                x = path[-1]
                velocity, hidden = self._field(context, x, torch.full((self.tenants,), k))
                following = flow_matching.euler_step(x, velocity, self.direction, steps)
                if self.sampling is not None:
                    drawn, taken = (part.to(self.device) for part in self.sampling.noise_at(noise, k))
                    at = torch.full((len(x),), k, device=self.device)
                    mean, deviation = self.sampling.distribution(x, -self.direction * velocity, hidden, at)
                    following = torch.where(taken.view(-1, 1, 1), mean + deviation * drawn, following)
                    scored = flow_policy.log_density(following, mean, deviation)
                    log_prob = log_prob + torch.where(taken.unsqueeze(1), scored, torch.zeros_like(scored))
                path.append(following)
            action = path[-1].cpu()
            if self.sampling is None:
                return Decision(action)
            value = self._value(feature, proprioception, pad=self.tenants == 1)
            trace = self.sampling.trace([x.cpu() for x in path], noise)
            return Decision(action, log_prob.cpu(), value, trace)

    def evaluate(self, feature: VLAFeature, proprioception: Tensor | None, trace: Trace) -> Evaluation:
        """See `ActionModule`."""
        if self.sampling is None:
            return super().evaluate(feature, proprioception, trace)
        context = self._context(feature, proprioception)
        log_prob = entropy = torch.zeros(())
        for before, after, step in self.sampling.transitions(trace):
            x, following, at = (part.to(self.device) for part in (before, after, step))
            velocity, hidden = self._field(context, x, at)
            mean, deviation = self.sampling.distribution(x, -self.direction * velocity, hidden, at)
            log_prob = log_prob + flow_policy.log_density(following, mean, deviation).cpu()
            entropy = entropy + flow_policy.entropy(deviation, mean).cpu()
        return Evaluation(log_prob, entropy, self._value(feature, proprioception, pad=False))

    def _value(self, feature: VLAFeature, proprioception: Tensor | None, *, pad: bool) -> Tensor:
        """[B], on the CPU."""
        assert self.value is not None
        assert feature.action_tokens is not None
        state = None
        if self.spec.proprioception == "head":
            state = checked_proprioception(proprioception, feature.rows, self.spec.state_width)
        value: Tensor = self.value(feature.action_tokens.to(self.device), state, pad)
        return value.cpu()
