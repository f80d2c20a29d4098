"""Advantages brought to zero mean and unit deviation over the valid elements of a whole job, in any number of parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Float64 moments of some elements; those of parts add up (`+`) to those of the whole.

    Squares are kept about the parts' own means and joined as in Chan, Golub and LeVeque 1979: plain sums of squares
    would lose the deviation of advantages that lie far from 0. So they are added by `+`, never field by field.

    Attributes:
        count: elements.
        total: their sum.
        squared_deviations: sum of squared distances from their mean.
        low: the least of them, +inf where there is none.
        high: the greatest of them, −inf where there is none.
    """

    count: float = 0.0
    total: float = 0.0
    squared_deviations: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    @property
    def mean(self) -> float:
        """0 where there is no element."""
        return self.total / max(self.count, 1.0)

    @property
    def std(self) -> float:
        """The elements' own (population) deviation, 0 where there is none."""
        return float(np.sqrt(self.squared_deviations / max(self.count, 1.0)))

    @property
    def is_constant(self) -> bool:
        """Whether all are equal, by their range: a tiny deviation in float32 would blow rounding up."""
        return self.count == 0 or self.high - self.low <= 1e-6 * max(1.0, abs(self.low), abs(self.high))

    def __add__(self, other: Moments) -> Moments:
        between = (self.mean - other.mean) ** 2 * self.count * other.count / max(self.count + other.count, 1.0)
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squared_deviations + other.squared_deviations + between,
            min(self.low, other.low),
            max(self.high, other.high),
        )


def moments(advantage: np.ndarray, mask: np.ndarray) -> Moments:
    """Of the elements of `advantage` (float32, any shape) where `mask` (bool of that shape)."""
    chosen = advantage[mask].astype(np.float64)
    if chosen.size == 0:
        return Moments()
    total = float(chosen.sum())
    distance = chosen - total / chosen.size
    return Moments(
        float(chosen.size), total, float((distance * distance).sum()), float(chosen.min()), float(chosen.max())
    )


_own_moments = moments  # the argument below has the same name


def standardise(advantage: np.ndarray, mask: np.ndarray, moments: Moments | None = None) -> np.ndarray:
    """Zero mean and unit deviation over the masked elements, 0 elsewhere.

    Where all are equal (`Moments.is_constant`) the result is exactly 0.

    Args:
        advantage: float32, any shape.
        mask: bool of the same shape, elements that count.
        moments: of the whole job, where these are a part of it (a data-parallel replica's share); None: they are
            the whole.
    """
    whole = _own_moments(advantage, mask) if moments is None else moments
    out = np.zeros(advantage.shape, np.float32)
    if not whole.is_constant:
        out[mask] = (advantage[mask].astype(np.float64) - whole.mean) / whole.std
    return out
