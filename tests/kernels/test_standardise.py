"""Standardised advantages: by hand, constant ones, and in parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.advantages import Moments, moments, standardise


def test_a_constant_group_has_advantage_exactly_zero() -> None:
    """Ten rewards of 0.7 in float32, and a group of one."""
    for count in (10, 1):
        values = np.full(count, 0.7, np.float32)
        np.testing.assert_array_equal(standardise(values, np.ones(count, bool)), np.zeros(count))


def test_standardised_by_hand_over_the_mask_only() -> None:
    """1 and 3 have mean 2 and deviation 1; 100 is masked, and so may be NaN."""
    for masked in (100, np.nan):
        out = standardise(np.array([1, masked, 3], np.float32), np.array([True, False, True]))
        np.testing.assert_array_equal(out, [-1, 0, 1])
    np.testing.assert_array_equal(standardise(np.ones(2, np.float32), np.zeros(2, bool)), [0, 0])


def test_moments_by_hand_and_their_sum() -> None:
    """1, 2 and 6 have mean 3 and squared distances 4 + 1 + 9; without 6: mean 1.5, ¼ + ¼."""
    one, two = moments(np.array([1, 2], np.float32), np.ones(2, bool)), moments(np.array([6.0]), np.ones(1, bool))
    assert one == Moments(2, 3, 0.5, 1, 2)
    assert one + two == Moments(3, 9, 14, 1, 6)
    assert one + Moments() == one
    assert (Moments().mean, Moments().std, Moments().is_constant) == (0, 0, True)


def test_a_part_is_standardised_by_the_whole_even_where_it_is_constant_or_empty() -> None:
    """1, 1 | 3, 3: mean 2, deviation 1, though neither half varies and a third replica holds nothing valid."""
    halves = [np.array([1, 1], np.float32), np.array([3, 3], np.float32)]
    every = np.ones(2, bool)
    whole = moments(halves[0], every) + moments(halves[1], every) + moments(halves[0], ~every)
    np.testing.assert_array_equal(standardise(halves[0], every, whole), [-1, -1])
    np.testing.assert_array_equal(standardise(halves[1], every, whole), [1, 1])
    np.testing.assert_array_equal(standardise(halves[0], ~every, whole), [0, 0])


@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_any_split_gives_what_the_whole_gives(drawn: list[tuple[float, bool]], cuts: list[int]) -> None:
    values = np.array([x for x, _ in drawn], np.float32)
    mask = np.array([m for _, m in drawn])
    pieces = list(zip(np.split(values, sorted(cuts)), np.split(mask, sorted(cuts)), strict=True))
    whole = Moments()
    for part, chosen in pieces:
        whole += moments(part, chosen)
    parts = np.concatenate([standardise(part, chosen, whole) for part, chosen in pieces])
    np.testing.assert_allclose(parts, standardise(values, mask), atol=1e-5)
    everywhere = np.ones_like(mask)
    np.testing.assert_array_equal(standardise(values[mask], everywhere[mask]), standardise(values, mask)[mask])


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=40))
def test_the_same_bits_as_numpys_mean_and_deviation(drawn: list[float]) -> None:
    values = np.array(drawn, np.float32)
    wide = values.astype(np.float64)
    if np.ptp(wide) > 1e-6 * max(1.0, np.abs(wide).max()):
        expected = ((wide - wide.mean()) / wide.std()).astype(np.float32)
        np.testing.assert_array_equal(standardise(values, np.ones(len(values), bool)), expected)
