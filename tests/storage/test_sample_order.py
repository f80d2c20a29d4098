"""The order of samples: whole epochs, a function of position alone, so that a resumed workload continues it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import SpecError
from storage.sample_order import MIXTURE_BLOCK, Mixture, ShuffledOrder


def sample_indices(num_frames: int, start: int, count: int, seed: int) -> np.ndarray:
    """Of a dataset in one stretch."""
    return ShuffledOrder(((0, num_frames),), num_frames, seed).at(start, count)


def test_each_epoch_shows_every_frame_once_and_epochs_differ() -> None:
    order = sample_indices(7, 0, 21, seed=3)
    epochs = order.reshape(3, 7)
    for epoch, frames in enumerate(epochs):
        np.testing.assert_array_equal(frames, np.random.default_rng([3, epoch]).permutation(7))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


def test_another_seed_gives_another_order() -> None:
    assert sample_indices(50, 0, 50, 0).tolist() != sample_indices(50, 0, 50, 1).tolist()


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 60), st.integers(0, 5))
def test_any_part_is_what_the_whole_has_there(frames: int, start: int, count: int, seed: int) -> None:
    whole = sample_indices(frames, 0, start + count, seed)
    np.testing.assert_array_equal(sample_indices(frames, start, count, seed), whole[start:])


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def order_of(lengths: list[int], window: int, seed: int = 0) -> ShuffledOrder:
    edges = [0, *np.cumsum(lengths).tolist()]
    return ShuffledOrder(tuple(itertools.pairwise(edges)), window, seed)


@given(LENGTHS, st.integers(1, 20), st.integers(0, 60), st.integers(0, 40), st.integers(0, 3))
def test_windows_cover_each_epoch_once_and_any_part_is_what_the_whole_has_there(
    lengths: list[int], window: int, start: int, count: int, seed: int
) -> None:
    order, frames = order_of(lengths, window, seed), sum(lengths)
    whole = order.at(0, 3 * frames + start + count)
    for epoch in range(3):
        assert sorted(whole[epoch * frames : (epoch + 1) * frames].tolist()) == list(range(frames))
    np.testing.assert_array_equal(order.at(start, count), whole[start : start + count])


@given(LENGTHS, st.integers(1, 20))
def test_no_more_than_a_window_is_at_hand(lengths: list[int], window: int) -> None:
    """Stretches are begun and ended within a window: from the first frame of one to its last, those of others that are
    begun meanwhile have `window` frames at most together, or it is one stretch alone."""
    order = order_of(lengths, window)
    stretch_of = np.repeat(np.arange(len(lengths)), lengths)
    seen = stretch_of[order.at(0, sum(lengths))]
    for stretch in range(len(lengths)):
        where = np.flatnonzero(seen == stretch)
        beside = np.unique(seen[where[0] : where[-1] + 1])
        assert sum(lengths[i] for i in beside) <= max(window, lengths[stretch])


def test_one_window_is_a_shuffle_of_all_frames() -> None:
    np.testing.assert_array_equal(order_of([2, 3, 4], 9, seed=5).at(0, 18), sample_indices(9, 0, 18, 5))


def test_a_mixture_has_its_shares_to_the_sample() -> None:
    """1/6, 2/6 and 3/6 of 1,000 are 166.67, 333.33 and 500; the one left over goes to the largest remainder."""
    mixture = Mixture((1.0, 2.0, 3.0), seed=1)
    assert mixture.shares().tolist() == [167, 333, 500]
    for block in range(3):
        sources, positions = mixture.at(block * MIXTURE_BLOCK, MIXTURE_BLOCK)
        for source, share in enumerate([167, 333, 500]):
            own = positions[sources == source]
            assert own.tolist() == list(range(block * share, (block + 1) * share))
    first, second = (mixture.at(i * MIXTURE_BLOCK, MIXTURE_BLOCK)[0].tolist() for i in (0, 1))
    assert first != second
    assert first != sorted(first)


@given(st.integers(0, 2500), st.integers(0, 1200), st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4))
def test_any_part_of_a_mixture_is_what_the_whole_has_there(start: int, count: int, weights: list[float]) -> None:
    mixture = Mixture(tuple(weights), seed=2)
    sources, positions = mixture.at(0, start + count)
    part = mixture.at(start, count)
    np.testing.assert_array_equal(part[0], sources[start:])
    np.testing.assert_array_equal(part[1], positions[start:])


@pytest.mark.parametrize(
    ("weights", "message"),
    [((), "one a dataset"), ((1.0, 0.0), "above 0"), ((1.0, float("nan")), "above 0"), ((1.0, 1e-5), "1/1000")],
)
def test_weights_that_cannot_be_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Mixture(weights, seed=0).at(0, 1)


def test_a_dataset_without_frames_is_refused() -> None:
    with pytest.raises(SpecError, match="1 or more"):
        sample_indices(0, 0, 1, seed=0)
    with pytest.raises(SpecError, match="1 or more"):
        ShuffledOrder((), 1, seed=0)
