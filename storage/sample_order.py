"""The order in which a dataset's frames are seen: shuffled epochs, as a pure function of position and seed.

Nothing is remembered between calls, so a resumed workload continues the order where it was.
"""

from __future__ import annotations

import numpy as np


def sample_indices(num_frames: int, start: int, count: int, seed: int) -> np.ndarray:
    """Frames at positions start … start + count − 1 of the endless concatenation of shuffled epochs.

    Args:
        num_frames: frames in the dataset, at least 1.
        start: position of the first, counted from the start of training.
        count: how many.
        seed: the workload's.

    Returns:
        int64 [count]; each epoch's permutation is that of `numpy.random.default_rng([seed, epoch])`.
    """
    parts = []
    position, end = start, start + count
    while position < end:
        epoch, offset = divmod(position, num_frames)
        take = min(end - position, num_frames - offset)
        parts.append(np.random.default_rng([seed, epoch]).permutation(num_frames)[offset : offset + take])
        position += take
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
