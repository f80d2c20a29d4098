"""A diffusion transformer whose even blocks attend to a source and whose odd blocks attend to the sequence itself.

Source: Peebles & Xie 2023 (DiT) as GR00T N1.5 and StarVLA's QwenGR00T have it (`cross_attention_dit.py`: scale and
shift from the time before attention, a plain norm before the feed-forward, both again before the output). Their
dropout (0.2) is left out: it takes no generator, and rows would meet in its random numbers.

Legend: B rows, n sequences (consecutive n / B of them belong to one row), T tokens of a sequence, L tokens of the
source, W the blocks' width, D the source's width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.action_modules.base import RowLinear, RowSequential, over_rows

TIME_FREQUENCIES = 256


def sinusoid(position: Tensor, frequencies: int, last: int) -> tuple[Tensor, Tensor]:
    """Sine and cosine of position · 10000^(−i / last) for i in 0 … frequencies − 1, each [..., frequencies]."""
    steps = torch.arange(frequencies, dtype=torch.float32, device=position.device)
    angle = position.unsqueeze(-1).float() * torch.exp(-math.log(10_000) / last * steps)
    return angle.sin(), angle.cos()


class TimeEmbedding(nn.Module):
    """256 cosines and sines of a time's bucket → linear → SiLU → linear → SiLU, float32 [n] to [n, W].

    The last SiLU is what every adaptive norm would begin with.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = RowSequential(nn.Linear(TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, bucket: Tensor) -> Tensor:
        """[n] to [n, W]."""
        half = TIME_FREQUENCIES // 2
        sine, cosine = sinusoid(bucket, half, half - 1)
        embedded: Tensor = self.layers(torch.cat([cosine, sine], dim=-1))
        return embedded


class AdaptiveNorm(nn.Module):
    """norm(x) · (1 + scale) + shift, both linear in the time's embedding."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.linear = RowLinear(width, 2 * width)
        self.eps = eps

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[n, T, W] with time [m, W], each for n / m consecutive sequences."""
        scale, shift = over_rows(self.linear(time), len(x)).unsqueeze(1).chunk(2, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift


class Attention(nn.Module):
    """Multi-head attention of a sequence to keys and values that are computed apart, so that they can be kept."""

    def __init__(self, width: int, heads: int, source_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = RowLinear(width, width)
        self.key = RowLinear(source_width, width)
        self.value = RowLinear(source_width, width)
        self.out = RowLinear(width, width)

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, source width] to two of [B, heads, L, W / heads]."""
        return self._split(self.key(source)), self._split(self.value(source))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[n, T, W] to [n, T, W]; mask bool [B, 1, 1, L], True where a key may be attended to."""
        # Sequences of one row ask the same keys, so they become one longer sequence of questions.
        queries = self._split(self.query(x).reshape(len(keys), -1, x.shape[-1]))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Source:
    """What the even blocks attend to, computed once for all times of one prefix.

    Attributes:
        keys, values: float32 [B, heads, L, W / heads] an even block.
        mask: bool [B, 1, 1, L], True at real tokens.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor


class Block(nn.Module):
    """Attention behind an adaptive norm, a GELU feed-forward four times as wide behind a plain one, each residual."""

    def __init__(self, width: int, heads: int, source_width: int) -> None:
        super().__init__()
        self.norm = AdaptiveNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, source_width)
        self.feed_forward = RowSequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, time: Tensor, source: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """[n, T, W] to [n, T, W]; source is (keys, values, mask), or None where the sequence attends to itself."""
        normed = self.norm(x, time)
        keys, values, mask = source if source is not None else (*self.attention.keys_and_values(normed), None)
        x = x + self.attention(normed, keys, values, mask)
        return x + self.feed_forward(F.layer_norm(x, x.shape[-1:], eps=1e-5))


class DiffusionTransformer(nn.Module):
    """Blocks and output projection.

    Args:
        width: W.
        heads: of every attention; divides W.
        layers: blocks, the even ones (0, 2, …) attending to the source.
        source_width: D.
        output_width: of the result.
    """

    def __init__(self, width: int, heads: int, layers: int, source_width: int, output_width: int) -> None:
        super().__init__()
        self.time = TimeEmbedding(width)
        self.blocks = nn.ModuleList(Block(width, heads, width if i % 2 else source_width) for i in range(layers))
        self.norm = AdaptiveNorm(width, eps=1e-6)
        self.out = RowLinear(width, output_width)

    def source(self, tokens: Tensor, mask: Tensor) -> Source:
        """Keys and values of tokens [B, L, D] where mask [B, L]; what stands behind the mask may be anything."""
        # A masked value is multiplied by 0, but 0 · NaN is NaN.
        tokens = torch.where(mask.unsqueeze(-1), tokens, torch.zeros_like(tokens))
        attentions = [m.attention for m in list(self.blocks)[::2] if isinstance(m, Block)]
        keys, values = zip(*(attention.keys_and_values(tokens) for attention in attentions), strict=True)
        return Source(keys, values, mask.unsqueeze(1).unsqueeze(1))

    def forward(self, x: Tensor, bucket: Tensor, source: Source, last: int) -> Tensor:
        """The last tokens of each sequence, decoded.

        Args:
            x: float32 [n, T, W].
            bucket: the time's, [m], each of n / m consecutive sequences.
            source: of B rows, n a multiple of B.
            last: how many tokens leave.

        Returns:
            float32 [n, last, output width].
        """
        time = self.time(bucket)
        for i, block in enumerate(self.blocks):
            x = block(x, time, None if i % 2 else (source.keys[i // 2], source.values[i // 2], source.mask))
        out: Tensor = self.out(self.norm(x.narrow(1, x.shape[1] - last, last), time))
        return out
