"""The transformer of π-style heads: Gemma layers of their own width that go on from a base's keys and values.

Source: openpi, models/gemma.py (layers, adaptive norms) and models/pi0.py (`posemb_sincos`). Legend: B rows, S suffix
tokens, L prefix tokens, K key/value heads, G query heads of each, W the expert's width. Everything is float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.action_modules.base import RowLinear, over_rows
from kernels.features import PrefixCache

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
EPSILON = 1e-6

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [B, 1, S, head width] each."""


def sincos_embedding(time: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of `time` [B] in 0 … 1 at width / 2 periods from 0.004 to 4; float32 [B, width].

    Source: openpi, models/pi0.py, `posemb_sincos`. In float64 until the end: at the shortest period a rounding of
    2πt/0.004 in float32 is 1e-4.
    """
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    angle = time.double().unsqueeze(1) * (2 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def rotation(position: Tensor, head_width: int, theta: float) -> Rotation:
    """Of positions int64 [B, S]. Dimension i turns together with i + head width / 2, as in the base's own keys."""
    exponent = torch.arange(0, head_width, 2, dtype=torch.float32, device=position.device) / head_width
    angle = position.unsqueeze(1).unsqueeze(3).float() * (1.0 / theta**exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """`x` [B, heads, S, head width], turned."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = by
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def normed(x: Tensor) -> Tensor:
    """x / rms(x)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON)


class RmsNorm(nn.Module):
    """Gemma's: x / rms(x) · (1 + weight)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B, S, W] to [B, S, W] and no gate; nothing is conditioned on."""
        del condition
        return normed(x) * (1 + self.weight), None

    def initialise(self) -> None:
        """To the plain norm."""
        nn.init.zeros_(self.weight)


class AdaptiveRmsNorm(nn.Module):
    """π0.5's adaRMS: x / rms(x) · (1 + scale) + shift, and a gate for the branch behind it, all linear in a condition.

    It starts at zero, so every branch's gate is closed and the layers pass their input on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = RowLinear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B, S, W] and conditions [m, W], each of B / m rows, to [B, S, W] and a gate [B or 1, 1, W]."""
        assert condition is not None
        scale, shift, gate = over_rows(self.modulation(condition), len(x)).unsqueeze(1).chunk(3, dim=-1)
        return normed(x) * (1 + scale) + shift, gate

    def initialise(self) -> None:
        """To zero."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)


def _residual(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else x + branch * gate


class ExpertLayer(nn.Module):
    """Attention to prefix and suffix, then a gated MLP, each behind a norm."""

    def __init__(self, width: int, mlp_width: int, heads: int, kv_heads: int, head_width: int, adaptive: bool) -> None:
        super().__init__()
        self.kv_heads, self.head_width = kv_heads, head_width
        norm = AdaptiveRmsNorm if adaptive else RmsNorm
        self.attention_norm = norm(width)
        self.query = RowLinear(width, heads * head_width, bias=False)
        self.key = RowLinear(width, kv_heads * head_width, bias=False)
        self.value = RowLinear(width, kv_heads * head_width, bias=False)
        self.out = RowLinear(heads * head_width, width, bias=False)
        self.mlp_norm = norm(width)
        self.gate = RowLinear(width, mlp_width, bias=False)
        self.up = RowLinear(width, mlp_width, bias=False)
        self.down = RowLinear(mlp_width, width, bias=False)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, by: Rotation, condition: Tensor | None
    ) -> Tensor:
        """[B, S, W], the base layer's keys and values [B, K, L, head width] and `mask` [B, 1, G·S, S + L] to [B, S, W].

        A mask's last dimension has the suffix first: no block of keys is then wholly hidden from a query.
        """
        normed, gate = self.attention_norm(x, condition)
        own = [self._heads(linear(normed)) for linear in (self.query, self.key, self.value)]
        query, key = rotated(own[0], by), rotated(own[1], by)
        # All query heads of one key/value head are rows of one product: nothing is repeated.
        folded = query.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)
        found = F.scaled_dot_product_attention(
            folded, torch.cat([key, keys], dim=2), torch.cat([own[2], values], dim=2), attn_mask=mask
        )
        heads = found.unflatten(2, (-1, x.shape[1])).flatten(1, 2)
        x = _residual(x, self.out(heads.transpose(1, 2).flatten(2)), gate)
        normed, gate = self.mlp_norm(x, condition)
        return _residual(x, self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed)), gate)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class Expert(nn.Module):
    """As many layers as the base has, and a final norm.

    Args:
        layers: of the base.
        width: W.
        mlp_width: of the MLPs.
        heads: query heads, K · G.
        kv_heads: K, the base's.
        head_width: the base's.
        theta: base of the base's rotary frequencies.
        adaptive: whether the norms are conditioned.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        mlp_width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        theta: float,
        adaptive: bool,
    ) -> None:
        super().__init__()
        self.groups, self.head_width, self.theta = heads // kv_heads, head_width, theta
        self.layers = nn.ModuleList(
            ExpertLayer(width, mlp_width, heads, kv_heads, head_width, adaptive) for _ in range(layers)
        )
        self.norm = AdaptiveRmsNorm(width) if adaptive else RmsNorm(width)

    def forward(
        self, x: Tensor, prefix: PrefixCache, prefix_mask: Tensor, suffix_mask: Tensor, condition: Tensor | None = None
    ) -> Tensor:
        """What the suffix says, after the final norm.

        Args:
            x: float32 [B, S, W], suffix tokens.
            prefix: float32, of B rows; finite, also where it is masked.
            prefix_mask: bool [B, L], what of the prefix every suffix token sees.
            suffix_mask: bool [S, S], which suffix tokens (columns) each one (row) sees.
            condition: float32 [m, W], of adaptive norms, each for B / m consecutive rows.

        Returns:
            float32 [B, S, W].
        """
        rows, tokens = x.shape[:2]
        positions = prefix.position.unsqueeze(1) + torch.arange(tokens, device=x.device)
        by = rotation(positions, self.head_width, self.theta)
        sees = torch.cat(
            [suffix_mask.expand(rows, -1, -1), prefix_mask.unsqueeze(1).expand(-1, tokens, -1)],
            dim=2,
        )
        mask = sees.repeat(1, self.groups, 1).unsqueeze(1)
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            x = layer(x, keys, values, mask, by, condition)
        normed: Tensor = self.norm(x, condition)[0]
        return normed
