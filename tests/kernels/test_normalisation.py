"""Normalisation by hand: the round trip, constant dimensions, exemptions, text bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.environment import StatisticsSpec
from configs.errors import TenantFault
from configs.transforms import Scaling
from kernels.normalisation import Normaliser, require_finite, state_text


def test_by_hand_and_back() -> None:
    normaliser = Normaliser.from_statistics(StatisticsSpec(mean=(1, -2), std=(0.5, 4)))
    raw = np.array([[2, 2], [1, -2]], np.float32)
    normal = normaliser.normalise(raw)
    np.testing.assert_array_equal(normal, [[2, 1], [0, 0]])
    assert normal.dtype == np.float32
    np.testing.assert_array_equal(normaliser.unnormalise(normal), raw)


@pytest.mark.parametrize("std", [0.0, 5e-9])
def test_a_constant_dimension_neither_explodes_nor_fails_the_round_trip(std: float) -> None:
    """1e-3 off a constant of deviation 5e-9 would be 2e5."""
    normaliser = Normaliser([0.25, 0], [std, 1])
    normal = normaliser.normalise(np.array([0.251, 3], np.float32))
    np.testing.assert_allclose(normal, [1e-3, 3], atol=1e-7)
    np.testing.assert_allclose(normaliser.unnormalise(normal), [0.251, 3], atol=1e-7)
    # What a policy says about it comes back as the constant, give or take what it said.
    np.testing.assert_allclose(normaliser.unnormalise(np.zeros(2, np.float32)), [0.25, 0])


def test_exempt_dimensions_are_left_as_they_are() -> None:
    normaliser = Normaliser([1, 1], [2, 2], exempt=[1])
    np.testing.assert_array_equal(normaliser.normalise(np.array([3, -1], np.float32)), [1, -1])
    np.testing.assert_array_equal(normaliser.unnormalise(np.array([1, -1], np.float32)), [3, -1])


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 100)), min_size=1, max_size=6),
    st.integers(0, 2**16),
)
def test_the_round_trip_holds_for_all_statistics(statistics: list[tuple[float, float]], seed: int) -> None:
    mean, std = zip(*statistics, strict=True)
    normaliser = Normaliser(mean, std)
    raw = np.array(mean) + np.array(std) * np.random.default_rng(seed).standard_normal((5, len(mean)))
    back = normaliser.unnormalise(normaliser.normalise(raw.astype(np.float32)))
    np.testing.assert_allclose(back, raw, atol=1e-3)
    assert np.abs(normaliser.normalise(raw.astype(np.float32))).max() < 10


def test_the_argument_is_not_changed() -> None:
    raw = np.ones((2, 1), np.float32)
    Normaliser([1], [2]).normalise(raw)
    np.testing.assert_array_equal(raw, [[1], [1]])


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0, 0], [1], "statistics: got .* possible: two vectors of one width"),
        ([float("nan")], [1], "statistics: got .* possible: finite numbers"),
        ([0], [-1], "statistics: got .* possible: finite numbers, deviations and ranges ≥ 0"),
    ],
)
def test_missing_or_broken_statistics_are_refused(mean: list[float], std: list[float], message: str) -> None:
    with pytest.raises(TenantFault, match=message):
        Normaliser(mean, std)


def test_wrong_width_and_nan_are_refused() -> None:
    with pytest.raises(TenantFault, match=r"width: got \(2, 3\); possible: \[..., 2\]"):
        Normaliser([0, 0], [1, 1]).normalise(np.zeros((2, 3), np.float32))
    with pytest.raises(TenantFault, match=r"proprioception: got 'NaN or infinity in rows \[1\]'"):
        require_finite("proprioception", np.array([[0.0], [np.nan], [1.0]]))
    with pytest.raises(TenantFault, match="proprioception"):
        state_text(np.array([[np.inf]], np.float32))
    require_finite("proprioception", np.zeros((0, 2)))


def test_text_bins_by_hand() -> None:
    """±3 deviations over 256 bins: −3 → 0, 0 → 128, beyond 3 → 255; 1 → (4 / 6) · 256 = 170.67 → 170."""
    assert state_text(np.array([[-3, 0, 9], [1, -50, 2.999]], np.float32)) == ["000 128 255", "170 000 255"]


STATISTICS = StatisticsSpec(
    mean=(1.0, 0.0, 0.0),
    std=(2.0, 1.0, 0.0),
    min=(-4.0, -1.0, 0.5),
    max=(4.0, 1.0, 0.5),
    q01=(-3, 0, 0.5),
    q99=(1, 0, 0.5),
)


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ("mean_std", [0.0, 0.5, 0.5]),  # (1 − 1) / 2; 0.5; a constant is only shifted: 0.5 − 0
        ("quantiles", [1.0, 0.5, 0.0]),  # 1 is q99; a dimension whose quantiles are equal is only shifted, by 0
        ("min_max", [0.25, 0.5, 0.0]),  # 1 of −4 … 4
    ],
)
def test_each_scaling_by_hand_and_back(scaling: Scaling, wanted: list[float]) -> None:
    normaliser, raw = Normaliser.from_statistics(STATISTICS, (), scaling), np.array([1.0, 0.5, 0.5], np.float32)
    np.testing.assert_allclose(normaliser.normalise(raw), wanted)
    np.testing.assert_allclose(normaliser.unnormalise(normaliser.normalise(raw)), raw)
    beyond = np.array([50.0, -9.0, 0.5], np.float32)  # nothing is clipped
    np.testing.assert_allclose(normaliser.unnormalise(normaliser.normalise(beyond)), beyond)


def test_a_scaling_whose_statistics_are_missing_is_refused() -> None:
    plain = StatisticsSpec(mean=(0.0,), std=(1.0,))
    with pytest.raises(TenantFault, match="statistics: got 'no q01 and q99'; possible: those that scaling 'quantiles'"):
        Normaliser.from_statistics(plain, (), "quantiles")
    with pytest.raises(TenantFault, match="no min and max"):
        Normaliser.from_statistics(plain, (), "min_max")


def test_text_bins_of_a_range_by_hand() -> None:
    """−1 to 1 over 256 bins: 0.5 → (1.5 / 2) · 256 = 192; beyond 1 → 255."""
    assert state_text(np.array([[-1, 0, 0.5, 2]], np.float32), "quantiles") == ["000 128 192 255"]
