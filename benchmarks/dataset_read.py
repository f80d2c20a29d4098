"""Shuffled samples per second out of a LeRobot dataset: our stream against LeRobot's own loader.

One dataset, written here in the format that both read, once with its pictures in parquet files and once in videos (AV1,
a keyframe every second frame, as LeRobot's writer makes them). Both sides shuffle all frames, give a chunk of actions a
sample, have the same number of workers (threads here, processes there) and work ahead by two batches. Each side gives
what it gives its trainer: ours uint8 [n, h, w, 3], LeRobot float32 [n, 3, h, w]. They are measured in turns, in
processes that live on; left out: opening the dataset and starting workers, and the first epoch, which fills what either
side keeps. What we keep is held to `--cache-mb`; LeRobot keeps an Arrow copy of the parquet files on disk.

LeRobot has its own virtual environment, since it wants another torch: `make test-interop` builds it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from benchmarks import partitions
from benchmarks.report import Report, main
from benchmarks.timing import interval
from configs.home import PROJECT_ROOT
from storage.demonstration_stream import DemonstrationStream, Source
from storage.demonstrations import LeRobotDataset, LeRobotWriter

AIMS = {"parquet_ratio": (">=", 2.0), "video_ratio": (">=", 1.5)}
CAMERAS = ("front", "wrist")
FPS, HORIZON = 20, 8
LEROBOT = "lerobot==0.4.4"
"""Folder within the virtual environment, as `scripts/interop.sh` makes it: its versions lie side by side."""


def write(root: Path, kind: str, episodes: int, frames: int, size: int) -> Path:
    """A dataset of rendered-like pictures; `kind` is image or video."""
    with LeRobotWriter(
        root,
        fps=FPS,
        cameras=dict.fromkeys(CAMERAS, (size, size)),
        state_width=partitions.STATE_WIDTH,
        action_width=partitions.ACTION_WIDTH,
        video_codec="libsvtav1" if kind == "video" else None,
    ) as writer:
        fields = partitions.rollout(frames, size, noisy=False)
        for episode in range(episodes):
            # Turned round by the episode's number, so that no two episodes are alike.
            pictures = np.roll(fields["image.base"], episode * 3, axis=2)
            writer.add_episode(
                {name: np.ascontiguousarray(np.roll(pictures, i * 5, axis=1)) for i, name in enumerate(CAMERAS)},
                fields["proprioception"],
                fields["action"][:, 0],
                "push the cube to the target",
            )
    return root


class Peer:
    """LeRobot's loader in its own process."""

    def __init__(self, installed: Path, root: Path, batch: int, workers: int) -> None:
        script = PROJECT_ROOT / "benchmarks" / "lerobot_loader.py"
        self._process = subprocess.Popen(
            [str(installed / "bin" / "python"), str(script), str(root), str(HORIZON), str(batch), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(installed / LEROBOT)},
        )
        self.versions: dict[str, str] = self._answer()["ready"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def rate(self, batches: int) -> float:
        """Samples per second of so many batches."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batches}\n")
        self._process.stdin.flush()
        found = self._answer()
        return found["samples"] / found["seconds"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries write to it, too
                return json.loads(line)
        raise RuntimeError(f"lerobot's loader ended with {self._process.wait()}")


class Ours:
    """Our stream, read batch after batch."""

    def __init__(self, root: Path, batch: int, workers: int, cache_mb: int) -> None:
        self._stream = DemonstrationStream(
            [Source(LeRobotDataset(root, cache_bytes=cache_mb << 20))],
            samples=batch,
            horizon=HORIZON,
            seed=0,
            workers=workers,
            ahead=2,
        )
        self._samples = batch
        self._number = 0

    def rate(self, batches: int) -> float:
        """Samples per second of so many batches."""
        begun = time.perf_counter()
        for _ in range(batches):
            self._stream.batch(self._number)
            self._number += 1
        return batches * self._samples / (time.perf_counter() - begun)

    def close(self) -> None:
        """End its threads."""
        self._stream.close()


def measure(options: argparse.Namespace) -> Report:
    """Both sides in turns on both kinds."""
    report = Report(aims=AIMS)
    frames = options.episodes * options.frames
    epoch = max(frames // options.batch, 1)
    for kind, name in (("image", "parquet"), ("video", "video")):
        with tempfile.TemporaryDirectory() as folder:
            root = write(Path(folder) / "dataset", kind, options.episodes, options.frames, options.size)
            ours = Ours(root, options.batch, options.workers, options.cache_mb)
            rates: dict[str, list[float]] = {"ours": [], "lerobot": []}
            try:
                with Peer(Path(options.installed), root, options.batch, options.workers) as peer:
                    ours.rate(epoch)
                    peer.rate(epoch)
                    for _ in range(options.rounds):
                        rates["ours"].append(ours.rate(options.batches))
                        rates["lerobot"].append(peer.rate(options.batches))
                    versions = peer.versions
            finally:
                ours.close()
        ratios = [a / b for a, b in zip(rates["ours"], rates["lerobot"], strict=True)]
        for side, of_rounds in rates.items():
            low, high = interval(of_rounds)
            report.add(
                pictures=name,
                side=side if side == "ours" else f"lerobot {versions['lerobot']}",
                samples_per_second=statistics.median(of_rounds),
                low=low,
                high=high,
            )
        report.summary[f"{name}_ratio"] = statistics.median(ratios)
        report.summary[f"{name}_ratio_low"], report.summary[f"{name}_ratio_high"] = interval(ratios)
    return report


if __name__ == "__main__":
    main(
        "Shuffled samples per second out of a LeRobot dataset: our stream against LeRobot's own loader",
        measure,
        options=[
            ("installed", ".venv-interop", "virtual environment that has lerobot"),
            ("episodes", 40, "of the dataset"),
            ("frames", 100, "an episode"),
            ("size", 128, "pixels of the pictures' height and width"),
            ("batch", 64, "samples of a batch"),
            ("batches", 20, "a round"),
            ("rounds", 7, "turns"),
            ("workers", 2, "threads or processes that decode"),
            ("cache-mb", 64, "what our side may keep of the pictures"),
        ],
    )
