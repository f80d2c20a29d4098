"""Statistics of vectors that are read piece by piece, from one source or several that are mixed by weight.

Means, deviations and bounds are exact; quantiles come from histograms that the sources are counted into together, so
they are off by one of `BINS` parts of the range at most. Memory does not depend on how many vectors there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.environment import StatisticsSpec
from configs.errors import DataFault, refusal

BINS = 1 << 14


@dataclass(frozen=True)
class Vectors:
    """One source.

    Attributes:
        name: for messages.
        pieces: gives all its vectors, float [n, W] at a time; asked twice.
        weight: its share of what is learned from, against the others'.
    """

    name: str
    pieces: Callable[[], Iterable[NDArray[np.floating]]]
    weight: float = 1.0


def statistics_of(sources: Sequence[Vectors]) -> StatisticsSpec:
    """Statistics of what is drawn from the sources by their weights.

    Raises:
        DataFault: a source has no vectors, or one that is not finite.
    """
    extents = [_extent(source) for source in sources]
    low = np.min([low for _, low, _ in extents], axis=0)
    high = np.max([high for _, _, high in extents], axis=0)
    middle, reach = (low + high) / 2, high - low
    width = len(low)
    first, second, counts = np.zeros(width), np.zeros(width), np.zeros((width, BINS))
    total = sum(source.weight for source in sources)
    for source, (count, _, _) in zip(sources, extents, strict=True):
        share = source.weight / total / count
        for piece in source.pieces():
            away = piece.astype(np.float64) - middle  # about the middle, so that squares lose nothing to a far mean
            first += share * away.sum(axis=0)
            second += share * (away**2).sum(axis=0)
            for d in range(width):
                place = (away[:, d] / (reach[d] or 1.0) + 0.5) * BINS
                counts[d] += share * np.bincount(np.clip(place.astype(np.int64), 0, BINS - 1), minlength=BINS)
    constant = reach == 0
    deviation = np.sqrt(np.maximum(second - first**2, 0.0))
    q01, q99 = (np.array([_quantile(c, q) for c in counts]) * reach + low for q in (0.01, 0.99))
    return StatisticsSpec(
        mean=tuple(np.where(constant, low, middle + first).tolist()),
        std=tuple(np.where(constant, 0.0, deviation).tolist()),
        min=tuple(low.tolist()),
        max=tuple(high.tolist()),
        q01=tuple(np.where(constant, low, q01).tolist()),
        q99=tuple(np.where(constant, low, q99).tolist()),
    )


def _extent(source: Vectors) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """How many vectors, their least and greatest values [W] each."""
    count, lows, highs = 0, [], []
    for piece in source.pieces():
        if not np.isfinite(piece).all():
            raise DataFault(refusal(source.name, "NaN or infinity", "finite numbers", "mend the dataset"))
        if len(piece):
            count += len(piece)
            lows.append(piece.min(axis=0).astype(np.float64))
            highs.append(piece.max(axis=0).astype(np.float64))
    if not count:
        raise DataFault(refusal(source.name, "no vectors", "1 or more", "record some"))
    return count, np.min(lows, axis=0), np.max(highs, axis=0)


def _quantile(counts: NDArray[np.float64], q: float) -> float:
    """Where in [0, 1] of the range; what a bin holds lies evenly in it."""
    cumulative = np.cumsum(counts)
    wanted = q * cumulative[-1]
    place = int(np.searchsorted(cumulative, wanted))
    below = cumulative[place - 1] if place else 0.0
    return float(place + (wanted - below) / counts[place]) / BINS
