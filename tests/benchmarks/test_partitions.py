"""The partition benchmark runs and reports every figure it names."""

from __future__ import annotations

import argparse

from benchmarks.partitions import measure


def test_small_run() -> None:
    """Both kinds of pictures, each act once; rendered-like pictures take less room than they have."""
    report = measure(argparse.Namespace(rows=20, size=16, microbatch=8, repetitions=1))
    assert len(report.rows) == 8
    assert set(report.summary) == {
        "write_mb_per_second",
        "read_mb_per_second",
        "disk_ratio",
        "write_times_numpy",
        "read_times_numpy",
        "read_microbatches_times_numpy",
        "derive_times_numpy",
    }
    assert all(value > 0 for value in report.summary.values())
