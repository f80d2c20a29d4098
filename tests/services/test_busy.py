"""Compute seconds: what is covered, and who pays for a shared forward."""

from __future__ import annotations

import pytest

from services.busy import BusyLog, busy_seconds


def test_overlapping_intervals_count_once() -> None:
    """[0, 2] and [1, 4] cover 4 of [0, 5]; [6, 9] lies outside."""
    intervals: list[list[object]] = [[0.0, 2.0, {}, ""], [1.0, 4.0, {}, ""], [6.0, 9.0, {}, ""]]
    assert busy_seconds(intervals, 0.0, 5.0) == pytest.approx(4.0)


def test_intervals_are_cut_at_the_window() -> None:
    assert busy_seconds([[0.0, 10.0, {}, ""]], 2.0, 5.0) == pytest.approx(3.0)


def test_a_shared_forward_is_paid_in_proportion_to_rows() -> None:
    log = BusyLog()
    with log.record("forward", {"a": 3, "b": 1}):
        sum(range(10000))
    seconds = log.seconds()
    assert seconds["a"] == pytest.approx(3 * seconds["b"])
    (start, end, rows, kind) = log.intervals(0.0)[0]
    assert (rows, kind) == ({"a": 3, "b": 1}, "forward")
    assert seconds["a"] + seconds["b"] == pytest.approx(float(end) - float(start), abs=1e-3)  # type: ignore[arg-type]


def test_the_log_is_bounded() -> None:
    log = BusyLog(capacity=2)
    for _ in range(5):
        with log.record("train", {"a": 1}):
            pass
    assert len(log.intervals(0.0)) == 2
