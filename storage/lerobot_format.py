"""The LeRobot v3.0 layout: names of files and columns, their schemas, and statistics as that format keeps them.

Source: huggingface/lerobot, `CODEBASE_VERSION = "v3.0"` (datasets/utils.py, dataset_metadata.py, compute_stats.py).

    meta/info.json                               shape, dtype and names of every feature, fps, path templates
    meta/stats.json                              {feature: {min, max, mean, std, count}}
    meta/tasks.parquet                           task text as index, column task_index
    meta/episodes/chunk-000/file-000.parquet     a row an episode: where its frames lie, its own statistics
    data/chunk-000/file-000.parquet              a row a frame, a row group an episode, many episodes a file
    meta/joynexus.json                           ours, optional: where the demonstrations come from

Pictures are PNG inside the parquet file (`dtype` "image"). Videos (`dtype` "video") are not handled here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

CODEBASE_VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
PROVENANCE = "meta/joynexus.json"

IMAGE_PREFIX = "observation.images."
STATE = "observation.state"
ACTION = "action"
REWARD = "next.reward"  # of the frame's action; LeRobot's name
FILES_PER_CHUNK = 1000

# Columns every dataset has beside its own features.
INDEX_FEATURES: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}


def features(
    cameras: Mapping[str, tuple[int, int]],
    state_width: int,
    action_width: int,
    state_names: Sequence[str] | None = None,
    action_names: Sequence[str] | None = None,
    rewards: bool = False,
) -> dict[str, dict[str, Any]]:
    """`info.json`'s features: cameras {name: (height, width)}, one state and one action vector, with `rewards` one
    number a frame, the index columns."""
    found: dict[str, dict[str, Any]] = {
        IMAGE_PREFIX + name: {"dtype": "image", "shape": [h, w, 3], "names": ["height", "width", "channels"]}
        for name, (h, w) in cameras.items()
    }
    for key, width, names in ((STATE, state_width, state_names), (ACTION, action_width, action_names)):
        stem = key.rsplit(".", 1)[-1]
        shown = list(names) if names is not None else [f"{stem}_{i}" for i in range(width)]
        found[key] = {"dtype": "float32", "shape": [width], "names": shown}
    if rewards:
        found[REWARD] = {"dtype": "float32", "shape": [1], "names": None}
    return {**found, **INDEX_FEATURES}


def info(
    declared: Mapping[str, dict[str, Any]],
    *,
    fps: int,
    robot_type: str | None,
    episodes: int,
    frames: int,
    tasks: int,
    file_size_mb: int,
) -> dict[str, Any]:
    """Contents of `meta/info.json`."""
    return {
        "codebase_version": CODEBASE_VERSION,
        "robot_type": robot_type,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": file_size_mb,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA,
        "video_path": None,
        "features": dict(declared),
    }


def data_schema(declared: Mapping[str, dict[str, Any]]) -> pa.Schema:
    """Arrow schema of a data file, with the metadata by which Hugging Face `datasets` decodes the pictures."""
    arrow: list[tuple[str, pa.DataType]] = []
    hugging: dict[str, Any] = {}
    for key, feature in declared.items():
        if feature["dtype"] == "image":
            arrow.append((key, pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
            hugging[key] = {"_type": "Image"}
            continue
        value = pa.type_for_alias(feature["dtype"])
        described = {"dtype": feature["dtype"], "_type": "Value"}
        (width,) = feature["shape"]
        if width == 1:  # the format keeps vectors of one value as plain columns
            arrow.append((key, value))
            hugging[key] = described
        else:
            arrow.append((key, pa.list_(value, width)))
            # Read as `List` by datasets ≥ 4 and as `Sequence` before; the older name is understood by both.
            hugging[key] = {"feature": described, "length": width, "_type": "Sequence"}
    return pa.schema(arrow, metadata={"huggingface": json.dumps({"info": {"features": hugging}})})


def vector_stats(values: NDArray[Any]) -> dict[str, Any]:
    """Statistics over the rows of `values` [T, W] or [T]; a constant dimension has its value as mean and deviation 0.

    Sums are float64. Rounding would leave a constant dimension a deviation of about 1e-17, by which nobody must divide.
    """
    rows = values.reshape(len(values), -1)
    low, high = rows.min(axis=0), rows.max(axis=0)
    constant = low == high
    return {
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": np.where(constant, low, rows.mean(axis=0, dtype=np.float64)).tolist(),
        "std": np.where(constant, 0.0, rows.std(axis=0, dtype=np.float64)).tolist(),
        "count": [len(rows)],
    }


class ImageStats:
    """Statistics of one camera in [0, 1] by channel, from exact integer sums, so that their order does not matter."""

    def __init__(self) -> None:
        self._frames = 0
        self._pixels = 0
        self._sum = np.zeros(3, np.uint64)
        self._squares = np.zeros(3, np.uint64)
        self._low = np.full(3, 255, np.uint8)
        self._high = np.zeros(3, np.uint8)

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Take in frames uint8 [T, h, w, 3]."""
        flat = frames.reshape(-1, 3)
        self._frames += len(frames)
        self._pixels += len(flat)
        self._sum += flat.sum(axis=0, dtype=np.uint64)
        self._squares += (flat.astype(np.uint16) ** 2).sum(axis=0, dtype=np.uint64)
        self._low = np.minimum(self._low, flat.min(axis=0))
        self._high = np.maximum(self._high, flat.max(axis=0))

    def result(self) -> dict[str, Any]:
        """The statistics, each [3, 1, 1] as the format wants them."""
        mean = self._sum.astype(np.float64) / self._pixels
        # E[x²] − E[x]² in integers first: n·Σx² − (Σx)² is exact, so equal pixels give exactly 0
        spread = [
            self._pixels * int(q) - int(s) * int(s)
            for q, s in zip(self._squares.tolist(), self._sum.tolist(), strict=True)
        ]
        std = np.sqrt(np.array([float(v) for v in spread])) / self._pixels
        values = {"min": self._low / 255, "max": self._high / 255, "mean": mean / 255, "std": std / 255}
        return {k: np.asarray(v, np.float64).reshape(3, 1, 1).tolist() for k, v in values.items()} | {
            "count": [self._frames]
        }
