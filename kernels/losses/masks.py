"""What counts: sums over valid elements, and the elements of a chunk that one probability ratio is taken of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Granularity = Literal["action", "chunk"]
"""One probability ratio an action, or one a chunk (log-probabilities summed over its valid actions)."""


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum [] of `x` (float32, any shape) where `mask` (bool of that shape), with x's gradient; none gives 0."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_max(x: Tensor, mask: Tensor) -> float:
    """Greatest of `x` (float32, any shape) where `mask` (bool of that shape); none gives 0."""
    return float(x[mask].max()) if mask.any() else 0.0


def elements(x: Tensor, valid: Tensor, granularity: Granularity) -> Tensor:
    """`x` [B, H] with 0 where not `valid` (bool [B, H]): itself, or its sum over each chunk, [B]."""
    x = torch.where(valid, x, torch.zeros_like(x))
    return x.sum(dim=1) if granularity == "chunk" else x


def advantage_elements(advantage: Tensor, valid: Tensor, granularity: Granularity) -> Tensor:
    """The advantage of each element: `advantage` [B, H], which is equal over a chunk's valid actions, or [B]."""
    masked = elements(advantage, valid, granularity)
    # Equal over the chunk's valid actions: the mean of them is the chunk's.
    return masked / valid.sum(dim=1).clamp(min=1) if granularity == "chunk" else masked


def element_mask(valid: Tensor, granularity: Granularity) -> Tensor:
    """Elements that count, bool [B, H] or [B]: a chunk does if any of its actions was executed."""
    return valid.any(dim=1) if granularity == "chunk" else valid


@dataclass(frozen=True)
class PpoCounts:
    """Valid elements of the whole optimizer step: `actions` executed actions (or chunks), `rows` chunk decisions."""

    actions: float
    rows: float


def ppo_counts(valid: Tensor, granularity: Granularity) -> PpoCounts:
    """PpoCounts of a batch with `valid` bool [B, H], True where an action was executed."""
    rows = float(valid.any(dim=1).sum())
    return PpoCounts(float(valid.sum()) if granularity == "action" else rows, rows)
