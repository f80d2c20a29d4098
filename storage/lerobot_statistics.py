"""Statistics as the LeRobot format keeps them, of vectors and of pictures, and of a dataset from its episodes'.

Source: huggingface/lerobot, datasets/compute_stats.py. LeRobot 0.4 estimates quantiles from histograms an episode and
then averages them over episodes; these are exact, over all frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def vector_stats(values: NDArray[Any], quantiles: bool = False) -> dict[str, Any]:
    """Statistics over the rows of `values` [T, W] or [T]; a constant dimension has its value as mean and deviation 0.

    Sums are float64. Rounding would leave a constant dimension a deviation of about 1e-17, by which nobody must divide.
    Quantiles are interpolated linearly between neighbours.
    """
    rows = values.reshape(len(values), -1)
    low, high = rows.min(axis=0), rows.max(axis=0)
    constant = low == high
    found: dict[str, Any] = {
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": np.where(constant, low, rows.mean(axis=0, dtype=np.float64)).tolist(),
        "std": np.where(constant, 0.0, rows.std(axis=0, dtype=np.float64)).tolist(),
        "count": [len(rows)],
    }
    if quantiles:
        at = np.quantile(rows.astype(np.float64), list(QUANTILES.values()), axis=0)
        found |= {name: row.tolist() for name, row in zip(QUANTILES, at, strict=True)}
    return found


class ImageStats:
    """Statistics of one camera in [0, 1] by channel, from counts of the 256 values, so their order does not matter."""

    def __init__(self) -> None:
        self._frames = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Take in frames uint8 [T, h, w, 3]."""
        self._frames += len(frames)
        for frame in frames:  # one by one: counting makes integers of eight bytes of them
            for channel in range(3):
                self._counts[channel] += np.bincount(frame[..., channel].reshape(-1), minlength=256)

    def merge(self, other: ImageStats) -> None:
        """Take in what another one has."""
        self._frames += other._frames
        self._counts += other._counts

    def result(self, quantiles: bool = False) -> dict[str, Any]:
        """The statistics, each [3, 1, 1] as the format wants them."""
        pixels = int(self._counts[0].sum())
        values = np.arange(256)
        mean, std = [], []
        for counts in self._counts.tolist():
            total = sum(n * v for v, n in enumerate(counts))
            squares = sum(n * v * v for v, n in enumerate(counts))
            mean.append(total / pixels)
            # n·Σx² − (Σx)² is exact in integers, so equal pixels give exactly 0
            std.append(float(np.sqrt(float(pixels * squares - total * total))) / pixels)
        found: dict[str, Any] = {
            "min": [values[c > 0].min() for c in self._counts],
            "max": [values[c > 0].max() for c in self._counts],
            "mean": mean,
            "std": std,
        }
        if quantiles:
            found |= {name: [_quantile(c, q) for c in self._counts] for name, q in QUANTILES.items()}
        scaled = {k: (np.asarray(v, np.float64) / 255).reshape(3, 1, 1).tolist() for k, v in found.items()}
        return scaled | {"count": [self._frames]}


def aggregated(of_episodes: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Statistics of a dataset from those of its episodes (min, max, mean, std, count), as LeRobot's `aggregate_stats`.

    The variance is the mean of the episodes' variances plus that of their means around the whole's, both weighted by
    count; a dimension that is the same in all of them keeps its value as mean and deviation 0.

    Raises:
        KeyError, ValueError: a statistic is missing, or they are not of one shape.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for stats in of_episodes for key in stats):
        parts = [stats[key] for stats in of_episodes if key in stats]
        count = np.array([np.ravel(part["count"])[0] for part in parts], np.int64)
        low, high = _stacked(parts, "min").min(axis=0), _stacked(parts, "max").max(axis=0)
        means, deviations = _stacked(parts, "mean"), _stacked(parts, "std")
        weight = (count / count.sum()).reshape(-1, *[1] * (means.ndim - 1))
        mean = (weight * means).sum(axis=0)
        std = np.sqrt((weight * (deviations**2 + (means - mean) ** 2)).sum(axis=0))
        constant = low == high
        found[key] = {
            "min": low.tolist(),
            "max": high.tolist(),
            "mean": np.where(constant, low, mean).tolist(),
            "std": np.where(constant, 0.0, std).tolist(),
            "count": [int(count.sum())],
        }
    return found


def _stacked(parts: Iterable[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    return np.stack([np.asarray(part[name], np.float64) for part in parts])


def _quantile(counts: NDArray[np.int64], q: float) -> float:
    """As `np.quantile` of the counted values 0 to 255: linear between neighbours."""
    cumulative = np.cumsum(counts)
    at = q * (int(cumulative[-1]) - 1)
    below = int(np.floor(at))
    low = int(np.searchsorted(cumulative, below, side="right"))
    high = int(np.searchsorted(cumulative, min(below + 1, int(cumulative[-1]) - 1), side="right"))
    return low + (at - below) * (high - low)
