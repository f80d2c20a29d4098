"""Statistics of vectors read in pieces, against numpy's of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from configs.errors import DataFault
from kernels.vector_statistics import Vectors, statistics_of


def source(values: np.ndarray, weight: float = 1.0, size: int = 7) -> Vectors:
    def pieces() -> Iterator[np.ndarray]:
        yield from np.split(values, range(size, len(values), size))

    return Vectors("action of dataset d", pieces, weight)


def drawn(seed: int, count: int) -> np.ndarray:
    """A far mean, a skewed one, two values, and one that is always the same."""
    rng = np.random.default_rng(seed)
    columns = [rng.normal(1e4, 1e-2, count), rng.exponential(3.0, count), rng.choice([-1.0, 1.0], count)]
    return np.stack([*columns, np.full(count, 0.3)], axis=1).astype(np.float32)


def test_one_source_has_the_statistics_of_its_vectors() -> None:
    values = drawn(0, 2000)
    exact, found = values.astype(np.float64), statistics_of([source(values)])
    np.testing.assert_allclose(found.mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.std[:3], exact.std(axis=0)[:3], rtol=1e-9)
    np.testing.assert_array_equal(found.min, exact.min(axis=0))
    np.testing.assert_array_equal(found.max, exact.max(axis=0))
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        np.testing.assert_array_equal(getattr(found, name), np.quantile(exact, q, axis=0, method="inverted_cdf"), name)
    assert (found.std[3], found.q01[3] if found.q01 else None) == (0.0, found.mean[3])


def test_several_sources_count_by_their_weights_whatever_their_size() -> None:
    """Three quarters of what is drawn are 0, a quarter is 4: mean 1, variance ¾·1 + ¼·9 = 3; q99 lies at 4."""
    rare, often = np.full((100, 1), 4.0, np.float32), np.zeros((3, 1), np.float32)
    found = statistics_of([source(rare, weight=1.0), source(often, weight=3.0)])
    np.testing.assert_allclose([found.mean[0], found.std[0] ** 2], [1.0, 3.0], rtol=1e-12)
    assert (found.min, found.max) == ((0.0,), (4.0,))
    assert (found.q01, found.q99) == ((0.0,), (4.0,))


@pytest.mark.parametrize("outlier", [-3e38, 1e9, 3e38])
def test_an_outlier_does_not_coarsen_the_quantiles(outlier: float) -> None:
    """1 to 999 thousandths and one that is far off: the 10th and the 990th of a thousand, or their neighbours."""
    values = np.append(np.arange(1, 1000) / 1000, outlier).astype(np.float32)[:, None]
    found = statistics_of([source(values, size=100)])
    wanted = np.quantile(values[:, 0], [0.01, 0.99], method="inverted_cdf").tolist()
    assert [found.q01, found.q99] == [(wanted[0],), (wanted[1],)]


def test_equal_weights_of_halves_are_the_whole() -> None:
    values = drawn(1, 400)
    whole, halves = statistics_of([source(values)]), statistics_of([source(values[:200]), source(values[200:])])
    for name in ("mean", "std", "min", "max", "q01", "q99"):
        np.testing.assert_allclose(getattr(halves, name), getattr(whole, name), rtol=1e-9, err_msg=name)


def test_what_is_not_finite_or_not_there_is_refused() -> None:
    with pytest.raises(DataFault, match="action of dataset d: got 'NaN or infinity'; possible: finite numbers; mend"):
        statistics_of([source(np.array([[1.0], [np.nan]], np.float32))])
    with pytest.raises(DataFault, match="action of dataset d: got 'no vectors'"):
        statistics_of([source(np.zeros((0, 2), np.float32))])
