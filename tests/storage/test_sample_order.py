"""The order of samples: whole epochs, a function of position alone, so that a resumed workload continues it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.sample_order import sample_indices


def test_each_epoch_shows_every_frame_once_and_epochs_differ() -> None:
    order = sample_indices(7, 0, 21, seed=3)
    epochs = order.reshape(3, 7)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(7))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


def test_another_seed_gives_another_order() -> None:
    assert sample_indices(50, 0, 50, 0).tolist() != sample_indices(50, 0, 50, 1).tolist()


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 60), st.integers(0, 5))
def test_any_part_is_what_the_whole_has_there(frames: int, start: int, count: int, seed: int) -> None:
    whole = sample_indices(frames, 0, start + count, seed)
    np.testing.assert_array_equal(sample_indices(frames, start, count, seed), whole[start:])
