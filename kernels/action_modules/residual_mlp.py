"""The MLP of OFT-style heads and of value heads.

Source: OpenVLA-OFT's L1-regression head (a residual MLP on the flattened hidden states of the action tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.action_modules.base import initialise_linear


class ResidualBlock(nn.Module):
    """x + relu(W · norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to [B, width]."""
        return x + F.relu(self.linear(self.norm(x)))


class ResidualMlp(nn.Module):
    """Linear → ReLU → residual blocks → norm → linear."""

    def __init__(self, inputs: int, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] to [B, outputs]."""
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

    def initialise(self, generator: torch.Generator, last_scale: float) -> None:
        """Fill all parameters from `generator`; the last layer's are multiplied by `last_scale`."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                initialise_linear(module, generator, last_scale if module is self.last else 1.0)
