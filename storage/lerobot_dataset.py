"""Reads a LeRobot v3.0 dataset with pictures inside its parquet files, as samples a policy can learn from.

It refuses what it cannot read right: another format version, videos, missing statistics, frames out of order.
"""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from configs.environment import StatisticsSpec
from configs.errors import DataFault, SpecError, UnknownObject, refusal
from storage import lerobot_format as layout


class LeRobotDataset:
    """A dataset folder, opened for reading. Thread-safe.

    Vectors are kept in memory; pictures are decoded a row group at a time (an episode, as our writer and LeRobot's
    record them) and kept while they fit `cache_bytes`.
    """

    def __init__(self, root: Path, *, cache_bytes: int = 1 << 30) -> None:
        """Read the metadata and vectors.

        Raises:
            UnknownObject: there is no dataset at `root`.
            DataFault: it is of another version, torn, without statistics, or its frames are not in order.
        """
        self.root = Path(root)
        if not (self.root / layout.INFO).is_file():
            raise UnknownObject(
                refusal("dataset", str(root), f"a folder with {layout.INFO}", "collect it first, or correct its name")
            )
        info = self._json(layout.INFO)
        if info.get("codebase_version") != layout.CODEBASE_VERSION:
            raise DataFault(
                refusal(
                    f"codebase_version of dataset {self.root.name}",
                    info.get("codebase_version"),
                    layout.CODEBASE_VERSION,
                    "convert it with LeRobot's converter",
                )
            )
        self.features: dict[str, dict[str, Any]] = info["features"]
        self.fps = int(info["fps"])
        self.cameras = {  # {name: (height, width)}
            key.removeprefix(layout.IMAGE_PREFIX): (int(f["shape"][0]), int(f["shape"][1]))
            for key, f in self.features.items()
            if f["dtype"] == "image"
        }
        self._inode = self.root.stat().st_ino
        self._refuse_what_is_not_read()
        self.state_width = int(self.features[layout.STATE]["shape"][0])
        self.action_width = int(self.features[layout.ACTION]["shape"][0])
        self.stats = self._read_stats()
        self.tasks = self._read_tasks()
        self.provenance = self._json(layout.PROVENANCE) if (self.root / layout.PROVENANCE).is_file() else {}
        self._groups: list[tuple[Path, int, int]] = []  # (file, row group, its first frame), ascending
        self._read_frames(int(info["total_frames"]))
        self._read_episodes(int(info["total_episodes"]))
        self._cache_bytes = cache_bytes
        self._cached = 0
        self._pictures: OrderedDict[tuple[int, str], NDArray[np.uint8]] = OrderedDict()  # {(group, camera): frames}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Frames."""
        return len(self.state)

    @property
    def num_episodes(self) -> int:
        """Episodes."""
        return len(self.episode_ranges)

    def statistics(self, key: str) -> StatisticsSpec:
        """Mean and deviation of `observation.state` or `action`, for normalising in training and in serving alike."""
        stats = self.stats[key]
        return StatisticsSpec(mean=tuple(stats["mean"]), std=tuple(stats["std"]))

    def returns(self, gamma: float) -> NDArray[np.float32]:
        """Discounted sum of the rewards from each frame to its episode's end, [frames].

        Nothing is assumed to come after the end, whether the episode terminated there or was cut.

        Raises:
            DataFault: no reward was recorded.
        """
        if self.reward is None:
            known = ", ".join(self.features)
            raise DataFault(
                refusal(f"rewards of dataset {self.root.name}", known, f"a column {layout.REWARD}", "record rewards")
            )
        found = self.reward.astype(np.float64)
        for start, stop in self.episode_ranges:
            for frame in range(stop - 2, start - 1, -1):
                found[frame] += gamma * found[frame + 1]
        return found.astype(np.float32)

    def sample(
        self, indices: Sequence[int] | NDArray[np.integer[Any]], horizon: int, cameras: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Frames by integer index, each with the chunk of actions that begins there.

        Args:
            indices: n frames, 0 to len − 1, repeated and in any order as wished.
            horizon: H, actions a chunk. Past the episode's end its last action is repeated and marked as padding.
            cameras: Names to read; None is all.

        Returns:
            images {camera: uint8 [n, h, w, 3]}, proprioception float32 [n, S], action float32 [n, H, A] (both raw),
            action_is_pad bool [n, H], instructions (n texts), task_index int32 [n] (index into `tasks`).

        Raises:
            UnknownObject: a camera that is not there; those that are get listed.
            SpecError: an index out of range, or a horizon below 1.
        """
        names = list(self.cameras) if cameras is None else list(cameras)
        for name in names:
            if name not in self.cameras:
                possible = ", ".join(self.cameras)
                raise UnknownObject(
                    refusal(f"camera of dataset {self.root.name}", name, possible, "bind cameras by name")
                )
        rows = np.asarray(indices, dtype=np.int64)
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= len(self))):
            raise SpecError(refusal("indices", rows.tolist()[:8], f"0 to {len(self) - 1}", "address existing frames"))
        if horizon < 1:
            raise SpecError(refusal("horizon", horizon, "1 or more", "give the action module's horizon"))
        last = self.episode_ranges[self._episode_index[rows], 1] - 1
        wanted = rows[:, None] + np.arange(horizon)
        task_index = self._task_index[rows].astype(np.int32)
        return {
            "images": {name: self._frames_of(name, rows) for name in names},
            "proprioception": self.state[rows],
            "action": self.action[np.minimum(wanted, last[:, None])],
            "action_is_pad": wanted > last[:, None],
            "instructions": [self.tasks[i] for i in task_index],
            "task_index": task_index,
        }

    def _frames_of(self, camera: str, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        found = np.empty((len(rows), *self.cameras[camera], 3), np.uint8)
        starts = np.array([start for _, _, start in self._groups])
        groups = np.searchsorted(starts, rows, side="right") - 1
        for group in np.unique(groups):
            chosen = groups == group
            found[chosen] = self._decoded(int(group), camera)[rows[chosen] - starts[group]]
        return found

    def _decoded(self, group: int, camera: str) -> NDArray[np.uint8]:
        with self._lock:
            if (group, camera) in self._pictures:
                self._pictures.move_to_end((group, camera))
                return self._pictures[group, camera]
        self._refuse_another()
        path, row_group, _ = self._groups[group]
        key = layout.IMAGE_PREFIX + camera
        column = pq.ParquetFile(path).read_row_group(row_group, columns=[key]).column(key)
        frames = np.empty((len(column), *self.cameras[camera], 3), np.uint8)
        for i, stored in enumerate(column.to_pylist()):
            picture = np.asarray(Image.open(io.BytesIO(stored["bytes"])).convert("RGB"))
            if picture.shape != frames.shape[1:]:
                raise DataFault(
                    refusal(
                        f"camera {camera} of dataset {self.root.name}",
                        list(picture.shape),
                        str(list(frames.shape[1:])),
                        "its pictures must have the declared size",
                    )
                )
            frames[i] = picture
        with self._lock:
            if (group, camera) not in self._pictures:
                self._pictures[group, camera] = frames
                self._cached += frames.nbytes
            while self._cached > self._cache_bytes and len(self._pictures) > 1:
                self._cached -= self._pictures.popitem(last=False)[1].nbytes
        return frames

    def _refuse_another(self) -> None:
        """Pictures are read as they are wanted; states and actions were read when the dataset was opened."""
        try:
            inode = self.root.stat().st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            raise DataFault(
                f"dataset {self.root.name}: it was replaced or removed while it was read; possible: the dataset that "
                "was opened; start the workload again"
            )

    def _read_frames(self, total: int) -> None:
        own = [key for key in (layout.STATE, layout.ACTION, layout.REWARD) if key in self.features]
        parts: dict[str, list[NDArray[Any]]] = {k: [] for k in (*own, *layout.INDEX_FEATURES)}
        start = 0
        for path in sorted((self.root / "data").glob("chunk-*/file-*.parquet")):
            try:
                table = pq.read_table(path, columns=list(parts))
                groups = pq.ParquetFile(path).metadata
            except (pa.ArrowException, OSError, KeyError) as error:
                raise self._torn(f"{path.parent.name}/{path.name} cannot be read ({error})") from error
            if table.column_names and set(table.column_names) != set(parts):
                raise self._torn(f"{path.name} lacks {sorted(set(parts) - set(table.column_names))}")
            for key, column in parts.items():
                column.append(_matrix(table.column(key), int(self.features[key]["shape"][0])))
            for group in range(groups.num_row_groups):
                self._groups.append((path, group, start))
                start += groups.row_group(group).num_rows
        if start != total:
            raise self._torn(f"{start} frames where {layout.INFO} names {total}")
        columns = {key: np.concatenate(values) for key, values in parts.items()}
        if not np.array_equal(columns["index"][:, 0], np.arange(total)):
            raise self._torn("its frames are not in the order of their index")
        self.state: NDArray[np.float32] = columns[layout.STATE].astype(np.float32, copy=False)  # [frames, S]
        self.action: NDArray[np.float32] = columns[layout.ACTION].astype(np.float32, copy=False)  # [frames, A]
        self.reward: NDArray[np.float32] | None = None  # [frames], of each frame's action; None: none was recorded
        if layout.REWARD in columns:
            self.reward = columns[layout.REWARD][:, 0].astype(np.float32, copy=False)
            if not np.isfinite(self.reward).all():
                raise self._torn(f"{layout.REWARD} holds NaN or infinity")
        self._episode_index = columns["episode_index"][:, 0]
        self._task_index = columns["task_index"][:, 0]
        if self._task_index.min() < 0 or self._task_index.max() >= len(self.tasks):
            raise self._torn(f"task_index {int(self._task_index.max())} is not in {layout.TASKS}")

    def _read_episodes(self, total: int) -> None:
        names = ["episode_index", "dataset_from_index", "dataset_to_index"]
        paths = sorted((self.root / "meta/episodes").glob("chunk-*/file-*.parquet"))
        if not paths:
            raise self._torn("meta/episodes has no file")
        table = pa.concat_tables(pq.read_table(path, columns=names) for path in paths).sort_by("episode_index")
        index, start, stop = (table.column(name).to_numpy() for name in names)
        # [episodes, 2]: first frame, and the one after the last
        self.episode_ranges: NDArray[np.int64] = np.stack([start, stop], axis=1)
        edges = np.concatenate([start, stop[-1:]])
        counts = np.bincount(self._episode_index, minlength=total)
        if (
            not np.array_equal(index, np.arange(total))
            or not np.array_equal(edges[1:], stop)
            or not np.array_equal(stop - start, counts)
            or edges[0] != 0
        ):
            raise self._torn("its episodes do not cover its frames one after the other")

    def _read_stats(self) -> dict[str, dict[str, Any]]:
        if not (self.root / layout.STATS).is_file():
            raise DataFault(
                refusal(f"statistics of dataset {self.root.name}", None, layout.STATS, "write them; none are made up")
            )
        stats = self._json(layout.STATS)
        for key, width in ((layout.STATE, self.state_width), (layout.ACTION, self.action_width)):
            for stat in ("mean", "std"):
                values = stats.get(key, {}).get(stat)
                if values is None or len(values) != width or not np.isfinite(values).all():
                    raise DataFault(
                        refusal(
                            f"statistics {key}.{stat} of dataset {self.root.name}",
                            values,
                            f"{width} finite numbers",
                            "write them; none are made up",
                        )
                    )
        return stats

    def _read_tasks(self) -> tuple[str, ...]:
        frame = pd.read_parquet(self.root / layout.TASKS).sort_values("task_index")
        texts = frame["task"] if "task" in frame.columns else frame.index
        if frame["task_index"].tolist() != list(range(len(frame))):
            raise self._torn(f"{layout.TASKS} does not number its tasks from 0")
        return tuple(str(text) for text in texts)

    def _refuse_what_is_not_read(self) -> None:
        videos = [key for key, f in self.features.items() if f["dtype"] == "video"]
        if videos or not self.cameras:
            raise DataFault(
                refusal(
                    f"cameras of dataset {self.root.name}",
                    videos,
                    "features of dtype 'image'",
                    "write its pictures into the parquet files",
                )
            )
        for key in (layout.STATE, layout.ACTION):
            if key not in self.features or len(self.features[key]["shape"]) != 1:
                known = ", ".join(self.features)
                raise DataFault(refusal(f"features of dataset {self.root.name}", known, f"a vector {key}", "add it"))

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.root / name).read_bytes())
        except ValueError as error:
            raise self._torn(f"{name} is not JSON ({error})") from error

    def _torn(self, what: str) -> DataFault:
        return DataFault(f"dataset {self.root.name}: {what}; collect or copy it anew")


def _matrix(column: pa.ChunkedArray, width: int) -> NDArray[Any]:
    """A column of scalars or of equally long lists as [rows, width]."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(len(column), width)
