"""Partitions against one `np.save` per field: the same RL rollout written and read back, in one run.

Timed: `PartitionStore.put` of a new partition (tags, attributes, every chunk, the rename) against `np.save` of each
field into a new folder; reading all fields whole, and in microbatches, against `np.load` of each field; writing two
derived columns against two `np.save`. Each figure is the median of interleaved repetitions on files in the page cache;
nobody waits for the disk. Left out: making the data, removing the files.

numpy's files have no tags, no atomicity, no check for what is missing and no compression, so a ratio of 1 is not within
reach: about 2 ms a field are Zarr's metadata and chunk bookkeeping, whatever the size. What counts is milliseconds
beside a rollout of seconds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import Report, main
from storage.partitions import PartitionStore

HORIZON, ACTION_WIDTH, STATE_WIDTH = 4, 4, 25
Fields = dict[str, np.ndarray]


def rollout(rows: int, size: int, noisy: bool) -> Fields:
    """A rollout's fields; pictures of flat areas with moving discs (rendered ones look so), or of noise."""
    r = np.random.default_rng(0)
    if noisy:
        images = r.integers(0, 256, (rows, size, size, 3), dtype=np.uint8)
    else:
        images = np.empty((rows, size, size, 3), np.uint8)
        y, x = np.mgrid[:size, :size]
        images[:] = np.where(y[..., None] < size // 3, (90, 120, 150), (200, 190, 170))
        for radius, colour in ((size // 6, (200, 30, 30)), (size // 9, (30, 30, 200)), (size // 4, (60, 60, 60))):
            centre = r.uniform(0, size, (rows, 2))
            inside = (y - centre[:, :1, None]) ** 2 + (x - centre[:, 1:, None]) ** 2 < radius**2
            images[inside] = colour
    fields: Fields = {
        "image.base": images,
        "proprioception": r.normal(size=(rows, STATE_WIDTH)).astype(np.float32),
        "action": r.normal(size=(rows, HORIZON, ACTION_WIDTH)).astype(np.float32),
    }
    fields |= {k: r.normal(size=(rows, HORIZON)).astype(np.float32) for k in ("log_prob", "reward")}
    fields |= {k: r.random((rows, HORIZON)) < 0.1 for k in ("valid", "terminated", "truncated")}
    fields |= {k: r.normal(size=rows).astype(np.float32) for k in ("value", "bootstrap_value", "next_value")}
    return fields | {k: r.random(rows) < 0.1 for k in ("done", "sample_valid")}


def measure(options: argparse.Namespace) -> Report:
    """Time both ways on rendered-like and on noisy pictures."""
    report = Report()
    ratios: dict[str, list[float]] = {}
    for kind in ("rendered", "noise"):
        fields = rollout(options.rows, options.size, noisy=kind == "noise")
        megabytes = sum(a.nbytes for a in fields.values()) / 1e6
        with tempfile.TemporaryDirectory() as folder:
            ours, numpy_s, on_disk = _both(Path(folder), fields, options)
        for what, seconds in ours.items():
            against = numpy_s["read" if what.startswith("read") else what]
            ratios.setdefault(what, []).append(seconds / against)
            report.add(
                pictures=kind,
                what=what,
                mb=megabytes if what != "derive" else 2 * fields["reward"].nbytes / 1e6,
                ours_ms=1e3 * seconds,
                numpy_ms=1e3 * against,
                times_numpy=seconds / against,
                ours_disk_mb=on_disk / 1e6,
            )
        if kind == "rendered":
            report.summary["write_mb_per_second"] = megabytes / ours["write"]
            report.summary["read_mb_per_second"] = megabytes / ours["read"]
            report.summary["disk_ratio"] = on_disk / 1e6 / megabytes
    report.summary |= {f"{what}_times_numpy": max(values) for what, values in ratios.items()}
    return report


def _both(folder: Path, fields: Fields, options: argparse.Namespace) -> tuple[dict, dict, int]:
    """Median seconds of each act, ours and numpy's, and the bytes of our partition on disk."""
    store, names, rows = PartitionStore(folder / "store"), list(fields), options.rows
    derived = {"advantage": fields["reward"], "return": fields["log_prob"]}
    ours: dict[str, list[float]] = {"write": [], "read": [], "read_microbatches": [], "derive": []}
    numpy_s: dict[str, list[float]] = {"write": [], "read": [], "derive": []}

    plain = folder / "plain"

    def write() -> None:
        store.put("p", fields, tenant_id="push", schema_signature="ab" * 32, policy_version=3, chunk=options.microbatch)

    def write_plain() -> None:
        plain.mkdir()
        _save(plain, fields)

    def read(batch_size: int, task_name: str) -> None:
        while meta := store.get_meta("p", task_name=task_name, data_fields=names, batch_size=batch_size):
            store.get_data(meta)

    def derive() -> None:
        meta = store.get_meta("p", task_name="advantages", data_fields=[], batch_size=rows)
        assert meta is not None
        store.put_derived(meta, derived)

    for _ in range(options.repetitions + 1):  # the first warms up and is not counted
        shutil.rmtree(plain, ignore_errors=True)
        store.clear("p")
        ours["write"].append(_timed(write))
        numpy_s["write"].append(_timed(write_plain))
        ours["read"].append(_timed(lambda: read(rows, "whole")))
        numpy_s["read"].append(_timed(lambda: [np.load(plain / f"{name}.npy") for name in names]))
        ours["read_microbatches"].append(_timed(lambda: read(options.microbatch, "train")))
        ours["derive"].append(_timed(derive))
        numpy_s["derive"].append(_timed(lambda: _save(plain, derived)))
    on_disk = sum(p.stat().st_size for p in (folder / "store" / "p").rglob("*") if p.is_file())
    return _medians(ours), _medians(numpy_s), on_disk


def _save(folder: Path, fields: Fields) -> None:
    for name, array in fields.items():
        np.save(folder / name, array)


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {what: statistics.median(values[1:]) for what, values in seconds.items()}


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(
        "Partitions on Zarr against one np.save per field",
        measure,
        options=(
            ("rows", 512, "samples of the partition"),
            ("size", 64, "height and width of the pictures"),
            ("microbatch", 32, "rows of a chunk"),
            ("repetitions", 9, "interleaved repetitions"),
        ),
    )
