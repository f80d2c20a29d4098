"""The order in which datasets' frames are seen: shuffled epochs and mixtures, as pure functions of position and seed.

Nothing is remembered between calls, so a resumed workload continues the order where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from configs.errors import SpecError, refusal

MIXTURE_BLOCK = 1000
"""Samples in which each dataset of a mixture has its exact share."""


@dataclass(frozen=True)
class ShuffledOrder:
    """Shuffled epochs of one dataset, of which no more than a window has to be at hand at one time.

    Stretches of frames that are read together (a row group, an episode) are put in random order and cut into windows;
    the frames of a window are shuffled together. Where one window holds all, that is a shuffle of all frames:
    `numpy.random.default_rng([seed, epoch]).permutation(frames)`.

    Attributes:
        stretches: [G, 2] int64, first frame of each and the one after its last; they follow one another from 0.
        window: frames at most of a window, unless one stretch alone has more.
        seed: the workload's.
    """

    stretches: tuple[tuple[int, int], ...]
    window: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse a dataset without frames.

        Raises:
            SpecError: there is none.
        """
        if not self.stretches or self.num_frames < 1:
            raise SpecError(refusal("frames", 0, "1 or more", "record some"))

    @property
    def num_frames(self) -> int:
        """Positions of an epoch."""
        return self.stretches[-1][1]

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Frames at positions start … start + count − 1, int64 [count]."""
        parts = []
        position, end = start, start + count
        while position < end:
            epoch, offset = divmod(position, self.num_frames)
            begins, windows = _windows(self, epoch)
            window = int(np.searchsorted(begins, offset, side="right")) - 1
            frames = _shuffled(self, epoch, window, windows[window])
            offset -= int(begins[window])
            parts.append(frames[offset : offset + end - position])
            position += len(parts[-1])
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=4)
def _windows(order: ShuffledOrder, epoch: int) -> tuple[NDArray[np.int64], list[tuple[int, ...]]]:
    """Position within the epoch at which each window begins, and the stretches of each."""
    lengths = [stop - start for start, stop in order.stretches]
    begins: list[int] = [0]
    windows: list[list[int]] = [[]]
    held = 0
    shuffled = np.random.default_rng([order.seed, epoch]).permutation(len(lengths)).tolist()
    for stretch in shuffled:
        if windows[-1] and held + lengths[stretch] > order.window:
            begins.append(begins[-1] + held)
            windows.append([])
            held = 0
        windows[-1].append(stretch)
        held += lengths[stretch]
    return np.array(begins, np.int64), [tuple(window) for window in windows]


@lru_cache(maxsize=8)
def _shuffled(order: ShuffledOrder, epoch: int, window: int, stretches: tuple[int, ...]) -> NDArray[np.int64]:
    """The frames of a window in the order in which they are seen. Shared: not to be changed."""
    whole = len(stretches) == len(order.stretches)
    if whole:  # in the order of their frames, so that where windows would be cut makes no difference
        frames = np.arange(order.num_frames)
        return np.random.default_rng([order.seed, epoch]).permutation(frames)
    frames = np.concatenate([np.arange(*order.stretches[stretch]) for stretch in stretches])
    return np.random.default_rng([order.seed, epoch, window]).permutation(frames)


@dataclass(frozen=True)
class Mixture:
    """Which of several datasets each sample comes from.

    In every block of `MIXTURE_BLOCK` positions each dataset has its share by weight to the sample (largest remainders),
    in an order drawn for that block; so a dataset's own position is known without going through those before.

    Attributes:
        weights: of the datasets, above 0; their scale makes no difference.
        seed: the workload's.
    """

    weights: tuple[float, ...]
    seed: int

    def shares(self) -> NDArray[np.int64]:
        """Samples of each dataset in a block, [D].

        Raises:
            SpecError: a weight that is none, or so small that its dataset has no sample in a block.
        """
        weights = np.asarray(self.weights, np.float64)
        if not len(weights) or not np.isfinite(weights).all() or (weights <= 0).any():
            raise SpecError(refusal("weights", list(self.weights), "numbers above 0, one a dataset", "correct them"))
        wanted = weights / weights.sum() * MIXTURE_BLOCK
        found = np.floor(wanted).astype(np.int64)
        short = MIXTURE_BLOCK - int(found.sum())
        found[np.argsort(found - wanted, kind="stable")[:short]] += 1
        if (found == 0).any():
            raise SpecError(
                refusal(
                    "weights", list(self.weights), f"each at least 1/{MIXTURE_BLOCK} of their sum", "raise the least"
                )
            )
        return found

    def at(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Dataset [count] of positions start … start + count − 1, and the position within it [count]."""
        shares = self.shares()
        sources, positions = [], []
        position, end = start, start + count
        while position < end:
            block, offset = divmod(position, MIXTURE_BLOCK)
            order = np.random.default_rng([self.seed, block]).permutation(np.repeat(np.arange(len(shares)), shares))
            within = np.zeros(MIXTURE_BLOCK, np.int64)
            for source, share in enumerate(shares):
                within[order == source] = block * share + np.arange(share)
            taken = slice(offset, min(MIXTURE_BLOCK, offset + end - position))
            sources.append(order[taken])
            positions.append(within[taken])
            position += len(sources[-1])
        if not sources:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(sources), np.concatenate(positions)
