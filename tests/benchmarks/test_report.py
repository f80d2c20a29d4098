"""What all benchmarks share, and that the scheduler's runs through at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import Report, table, write
from configs.errors import SpecError


def test_the_table_is_aligned() -> None:
    """A column a key in order of appearance, numbers to the right, large ones in thousands."""
    rows = [{"way": "a", "per_s": 12345.6}, {"way": "longer", "per_s": 0.5, "note": "x"}]
    assert table(rows).splitlines() == [
        "way      per_s  note",
        "a       12,346",
        "longer     0.5  x",
    ]


def test_the_file_has_machine_rows_and_summary(tmp_path: Path) -> None:
    """As the parts of it were given."""
    report = Report()
    report.add(way="a", per_s=1.5)
    report.summary["key"] = 2.0
    write(tmp_path / "out.json", {"cpus": 2}, report)
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "machine": {"cpus": 2},
        "rows": [{"way": "a", "per_s": 1.5}],
        "summary": {"key": 2.0},
    }
    with pytest.raises(SpecError, match=r"--json: got '.*'; possible: a file in an existing folder; make "):
        write(tmp_path / "none" / "out.json", {}, report)


def test_the_scheduler_benchmark_measures_all_three(tmp_path: Path) -> None:
    """Small, so its figures mean nothing; all keys are there and above 0."""
    out = tmp_path / "scheduler.json"
    arguments = ["--json", out, "--clients", 2, "--jobs", 20, "--repeats", 1, "--depth", 1000, "--folder", tmp_path]
    command = [sys.executable, "-m", "benchmarks.scheduler", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text())["summary"]
    assert set(summary) == {"actor_lifecycles_per_second", "lifecycles_per_second", "cost_ratio_100k"}
    assert all(value > 0 for value in summary.values())
    assert "actor_lifecycles_per_second" in done.stdout
