"""Statistics of vectors that are read piece by piece, from one source or several that are mixed by weight.

All are exact up to the rounding of sums, whatever outliers there are: the bits of a float32, read as an integer, order
as the numbers do, so a quantile is found by counting their upper and then their lower halves. Memory does not depend on
how many vectors there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.environment import StatisticsSpec
from configs.errors import DataFault, refusal

_HALF = 1 << 16
_AT_ONCE = 32  # dimensions, whose counts take 50 MB
_SLACK = 1e-12  # of a share, so that the rounding of sums does not move a quantile to the next vector


@dataclass(frozen=True)
class Vectors:
    """One source.

    Attributes:
        name: for messages.
        pieces: gives all its vectors, float32 [n, W] at a time; asked again for each count.
        weight: its share of what is learned from, against the others'.
    """

    name: str
    pieces: Callable[[], Iterable[NDArray[np.float32]]]
    weight: float = 1.0


def statistics_of(sources: Sequence[Vectors]) -> StatisticsSpec:
    """Statistics of what is drawn from the sources by their weights; a quantile q is the least value that a share q of
    them does not exceed.

    Raises:
        DataFault: a source has no vectors, or one that is not finite.
    """
    extents = [_extent(source) for source in sources]
    low = np.min([low for _, low, _ in extents], axis=0)
    high = np.max([high for _, _, high in extents], axis=0)
    total = sum(source.weight for source in sources)
    shares = [source.weight / total / count for source, (count, _, _) in zip(sources, extents, strict=True)]
    found: dict[str, list[float]] = {"min": low.tolist(), "max": high.tolist()}
    for start in range(0, len(low), _AT_ONCE):
        block = slice(start, min(start + _AT_ONCE, len(low)))
        for name, values in _of_block(sources, shares, low[block], high[block], block).items():
            found.setdefault(name, []).extend(values.tolist())
    return StatisticsSpec.model_validate(found)


def _of_block(
    sources: Sequence[Vectors],
    shares: Sequence[float],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    block: slice,
) -> dict[str, NDArray[np.float64]]:
    """{"mean", "std", "q01", "q99"} of some of the dimensions."""
    middle, width = (low + high) / 2, len(low)
    first, second, upper = np.zeros(width), np.zeros(width), np.zeros((width, _HALF))
    for share, piece in _pieces(sources, shares, block):
        away = piece.astype(np.float64) - middle  # about the middle, so that squares lose nothing to a far mean
        first += share * away.sum(axis=0)
        second += share * (away**2).sum(axis=0)
        keys = _ordered(piece) >> 16
        for d in range(width):
            upper[d] += share * np.bincount(keys[:, d], minlength=_HALF)
    constant = low == high
    deviation = np.sqrt(np.maximum(second - first**2, 0.0))
    q01, q99 = _quantiles(sources, shares, block, upper, (0.01, 0.99))
    return {
        "mean": np.where(constant, low, middle + first),
        "std": np.where(constant, 0.0, deviation),
        "q01": q01,
        "q99": q99,
    }


def _pieces(
    sources: Sequence[Vectors], shares: Sequence[float], block: slice
) -> Iterable[tuple[float, NDArray[np.float32]]]:
    """Some dimensions of every piece, with the share of one of its vectors."""
    for source, share in zip(sources, shares, strict=True):
        for piece in source.pieces():
            yield share, piece[:, block]


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


def _ordered(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Integers that order as the numbers do: of negative ones all bits are turned, of others the sign."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    return bits ^ np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))


def _number(key: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The inverse of `_ordered`."""
    return (key ^ np.where(key >> 31, np.uint32(0x80000000), np.uint32(0xFFFFFFFF))).view(np.float32)


def _quantiles(
    sources: Sequence[Vectors],
    shares: Sequence[float],
    block: slice,
    upper: NDArray[np.float64],
    wanted: Sequence[float],
) -> list[NDArray[np.float64]]:
    """[W] for each of the shares `wanted`, given what lies in each upper half [W, 2^16]."""
    width, before = len(upper), np.cumsum(upper, axis=1)
    places = [(q, d) for q in wanted for d in range(width)]
    chosen = {(q, d): int(np.searchsorted(before[d], q - _SLACK)) for q, d in places}
    lower = {place: np.zeros(_HALF) for place in places}
    for share, piece in _pieces(sources, shares, block):
        keys = _ordered(piece)
        for (q, d), half in chosen.items():
            inside = keys[keys[:, d] >> 16 == half, d] & (_HALF - 1)
            lower[q, d] += share * np.bincount(inside, minlength=_HALF)
    found = np.zeros((len(wanted), width), np.uint32)
    for place, (q, d) in enumerate(places):
        half = chosen[q, d]
        within = before[d, half] - upper[d, half] + np.cumsum(lower[q, d])
        last = int(np.flatnonzero(lower[q, d])[-1])
        found.flat[place] = (half << 16) + min(int(np.searchsorted(within, q - _SLACK)), last)
    return list(_number(found).astype(np.float64))
