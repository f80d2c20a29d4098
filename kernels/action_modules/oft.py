"""OFT-style head: hidden states at the N action tokens → MLP with residual blocks → a chunk of actions.

Source: OpenVLA-OFT's L1-regression head (parallel decoding of a chunk by a residual MLP), with a Gaussian of
state-independent log-std around it and a value head for RL. Not covered: diffusion or flow heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from configs.model import BaseModelSpec, LoraSpec, OftSpec
from kernels.action_modules.base import (
    ActionModule,
    Decision,
    Evaluation,
    Noise,
    Regression,
    Trace,
    checked_proprioception,
    padded_rows,
)
from kernels.action_modules.residual_mlp import ResidualMlp
from kernels.features import VLAFeature
from kernels.losses import sft_l1


class OftModule(ActionModule):
    """Policy and value head of one tenant: two trunks on one layer norm of the features.

    So the value's loss reaches the policy through that norm's scale and offset, and in `lora` through the adapter, and
    through nothing else.

    Args:
        spec: widths and where proprioception enters.
        base_hidden_width: D.
        num_action_tokens: N.
        generator: draws the initial parameters.
    """

    spec: OftSpec | LoraSpec

    def __init__(
        self, spec: OftSpec | LoraSpec, base_hidden_width: int, num_action_tokens: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.spec = spec
        features = base_hidden_width * num_action_tokens
        inputs = features + (spec.state_width if spec.proprioception == "head" else 0)
        # Built without storage and filled from one generator: torch's global random state is neither read nor moved.
        with torch.device("meta"):
            self.norm = nn.LayerNorm(features)
            self.policy = ResidualMlp(inputs, spec.hidden_width, spec.residual_blocks, spec.horizon * spec.action_width)
            self.value = ResidualMlp(inputs, spec.hidden_width, spec.residual_blocks, 1)
            self.log_std = nn.Parameter(torch.empty(spec.action_width))
        self.to_empty(device="cpu")
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        self.policy.initialise(generator, spec.final_layer_scale)
        self.value.initialise(generator, 1.0)
        nn.init.constant_(self.log_std, spec.initial_log_std)

    @classmethod
    def build(cls, spec: OftSpec, base: BaseModelSpec, seed: int) -> OftModule:
        """The registry's signature."""
        return cls(spec, base.hidden_width, base.num_action_tokens, torch.Generator().manual_seed(seed))

    def mean(self, feature: VLAFeature, proprioception: Tensor | None) -> Tensor:
        """The Gaussian's mean, float32 [B, H, A], on the CPU."""
        return self._chunk(self.policy(self._inputs(feature, proprioception))).cpu()

    def imitation_loss(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        valid_count: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        """See `ActionModule`: L1 between the mean and the demonstration."""
        del generator  # nothing is drawn
        return sft_l1(self.mean(feature, proprioception), action, is_pad, valid_count)

    def regress(
        self,
        feature: VLAFeature,
        proprioception: Tensor | None,
        action: Tensor,
        is_pad: Tensor,
        generator: torch.Generator | None,
    ) -> Regression:
        """See `ActionModule`: −log π(a)."""
        del generator  # nothing is drawn
        mean, value = self._mean_and_value(self._inputs(feature, proprioception))
        padded, zero = is_pad[..., None], torch.zeros_like(mean)
        log_prob = self._log_prob(torch.where(padded, zero, mean), torch.where(padded, zero, action))
        return Regression(torch.where(is_pad, torch.zeros_like(log_prob), -log_prob), value)

    def draw(self, rows: int, generator: torch.Generator | None, *, exploring: bool = True) -> Noise:
        """See `ActionModule`: deviation float32 [B, H, A], standard deviations from the mean."""
        shape = (rows, self.spec.horizon, self.spec.action_width)
        drawn = generator is not None and exploring
        return {"deviation": torch.randn(shape, generator=generator) if drawn else torch.zeros(shape)}

    def decode(self, feature: VLAFeature, proprioception: Tensor | None, noise: Noise) -> Decision:
        """See `ActionModule`. Rows are padded to blocks, so that their bits do not depend on their number."""
        with torch.no_grad():
            inputs, rows = self._inputs(feature, proprioception), feature.rows
            if self.tenants == 1:  # the linears of a stack pad each tenant's rows themselves
                inputs = padded_rows(inputs)
            mean, value = (x[:rows] for x in self._mean_and_value(inputs))
            action = mean + noise["deviation"] * self._log_std(rows).exp()
            return Decision(action, self._log_prob(mean, action), value, {"action": action})

    def evaluate(self, feature: VLAFeature, proprioception: Tensor | None, trace: Trace) -> Evaluation:
        """See `ActionModule`."""
        mean, value = self._mean_and_value(self._inputs(feature, proprioception))
        log_prob = self._log_prob(mean, trace["action"])
        entropy = (self.log_std.cpu() + 0.5 * math.log(2 * math.pi * math.e)).sum().expand_as(log_prob)
        return Evaluation(log_prob, entropy, value)

    def _mean_and_value(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, A] and [B], brought to the CPU: the networks run on the device, the Gaussian around them here."""
        return self._chunk(self.policy(inputs)).cpu(), self.value(inputs).cpu()[:, 0]

    def _inputs(self, feature: VLAFeature, proprioception: Tensor | None) -> Tensor:
        assert feature.action_tokens is not None
        x = self.norm(feature.action_tokens.to(self.device).flatten(1))
        if self.spec.proprioception != "head":
            return x
        state = checked_proprioception(proprioception, feature.rows, self.spec.state_width)
        return torch.cat([x, state.to(x.device, x.dtype)], dim=1)

    def _chunk(self, flat: Tensor) -> Tensor:
        return flat.unflatten(1, (self.spec.horizon, self.spec.action_width))

    def _log_std(self, rows: int) -> Tensor:
        """To be broadcast over [rows, H, A], on the CPU."""
        log_std = self.log_std.cpu()
        return log_std if self.tenants == 1 else self.own(log_std, rows).unsqueeze(1)

    def _log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        """[B, H]: log-density of a diagonal Gaussian, summed over A."""
        log_std = self._log_std(len(mean))
        scaled = (action - mean) * torch.exp(-log_std)
        return (-0.5 * scaled.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)
