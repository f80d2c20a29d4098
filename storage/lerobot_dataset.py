"""Reads a LeRobot dataset, v2.1 or v3.0, with its pictures in parquet files or videos, as samples to learn from.

It refuses what it cannot read right: another format version, missing statistics, frames out of order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from configs.data import ColumnsSpec
from configs.environment import StatisticsSpec
from configs.errors import DataFault, SpecError, UnknownObject, refusal
from storage import lerobot_format as layout
from storage.lerobot_columns import as_recorded, bound
from storage.lerobot_frames import matrix, picture_bytes
from storage.lerobot_info import read_info
from storage.lerobot_layouts import LAYOUTS
from storage.lerobot_pictures import Pictures

_FOREIGN = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    ZeroDivisionError,
    RecursionError,
)


class LeRobotDataset:
    """A dataset folder, opened for reading.

    Thread-safe: all methods may be called from several threads at one time, and work side by side in decoding. What was
    read when the dataset was opened does not change: `state`, `action`, `reward`, `episode_ranges`, `row_groups`,
    `tasks`, `stats`, `cameras`. These vectors are held in memory whole, about 4 (S + A + 5) bytes a frame; pictures are
    read when they are asked for and kept while they fit `cache_bytes`.

    Frames are addressed by integer index, 0 to len − 1. Those of one row group (parquet) or one stretch of an episode
    (video) are cheapest read together.

    Attributes:
        cameras: {name: (height, width)} as pictures are given, after the declared resize.
        turned_cameras: those whose pictures are turned by 180 degrees against what the simulator showed: as they were
            recorded, or where they are read; None where neither is known nor declared.
        state: [frames, S] float32, as recorded.
        action: [frames, A] float32, as recorded.
        reward: [frames] float32, of each frame's action; None: none was recorded.
        episode_ranges: [episodes, 2], first frame of each, and the one after its last.
        row_groups: (data file, row group, its first frame), ascending.
        cache_bytes: bound on pictures that are kept.
        encoded_bytes: of all pictures in parquet files, as they are kept; 0 with videos.
    """

    def __init__(
        self,
        root: Path,
        columns: ColumnsSpec | None = None,
        *,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        cache_bytes: int = 1 << 30,
        decoders: int = 8,
    ) -> None:
        """Read the metadata and vectors.

        Args:
            root: the dataset's folder.
            columns: which columns are cameras, state and action, and the sizes that pictures are given; None:
                LeRobot's own names, sizes as recorded.
            sizes: {camera: (height, width)} that pictures are given whatever the columns say; others are no fault.
            cache_bytes: bound on pictures that are kept: decoded where all of them fit, else encoded row groups.
            decoders: video files open at one time, at most; more threads than that wait for one another.

        Raises:
            UnknownObject: there is no dataset at `root`.
            SpecError: declared columns that it has not, or of other widths.
            DataFault: it is of another version, torn, without statistics, or its frames are not in order.
        """
        self.root = Path(root)
        if not (self.root / layout.INFO).is_file():
            raise UnknownObject(
                refusal("dataset", str(root), f"a folder with {layout.INFO}", "collect it first, or correct its name")
            )
        info = read_info(self.root, tuple(LAYOUTS))
        try:
            self._open(info, columns, sizes or {}, cache_bytes, decoders)
        except _FOREIGN as error:  # a boundary: whatever a file of others does to the libraries that read it
            raise self._torn(f"it cannot be read ({type(error).__name__}: {str(error)[:200]})") from error

    def _open(
        self,
        info: Mapping[str, Any],
        columns: ColumnsSpec | None,
        sizes: Mapping[str, tuple[int, int]],
        cache_bytes: int,
        decoders: int,
    ) -> None:
        of_version = LAYOUTS[info["codebase_version"]]
        self.features: dict[str, dict[str, Any]] = info["features"]
        self.fps = float(info["fps"])
        self._inode = self.root.stat().st_ino
        name = self.root.name
        self._columns = as_recorded(self.features, name) if columns is None else bound(self.features, columns, name)
        sized = (replace(camera, size=sizes.get(camera.name, camera.size)) for camera in self._columns.cameras)
        self._cameras = {camera.name: camera for camera in sized}
        self.cameras = {camera.name: camera.size for camera in self._cameras.values()}
        self.state_width, self.action_width = self._columns.state_width, self._columns.action_width
        stats = of_version.statistics(self.root, self.features)
        self.stats = self._checked_stats(stats)
        self._statistics = {key: _statistics(self.stats[key]) for key in (self._columns.state, self._columns.action)}
        self.tasks = of_version.tasks(self.root)
        path = self.root / layout.PROVENANCE
        self.provenance: dict[str, Any] = layout.json_of(path, self.root) if path.is_file() else {}
        self.turned_cameras = self._turned()
        episodes = of_version.episodes(self.root, info)
        self.row_groups: list[tuple[str, int, int]] = []
        self.cache_bytes = cache_bytes
        self.encoded_bytes = 0
        frame_index, timestamp = self._read_frames(episodes, int(info["total_frames"]))
        self.episode_ranges = self._checked_ranges(episodes, int(info["total_episodes"]), frame_index)
        if any(camera.video for camera in self._columns.cameras) and not np.array_equal(
            np.rint(timestamp.astype(np.float64) * self.fps), frame_index
        ):
            raise self._torn(
                f"its timestamps are not frame_index / fps ({self.fps:g}), so frames of videos are unknown"
            )
        decoded = len(self) * sum(3 * height * width for height, width in self.cameras.values())
        self._pictures = Pictures(
            self.root,
            episodes,
            self.row_groups,
            self.fps,
            cache_bytes=cache_bytes,
            keeps_frames=decoded <= cache_bytes,
            decoders=decoders,
        )

    def __len__(self) -> int:
        """Frames."""
        return len(self.state)

    @property
    def num_episodes(self) -> int:
        """Episodes."""
        return len(self.episode_ranges)

    @property
    def state_statistics(self) -> StatisticsSpec:
        """Of the column that is bound as state: for normalising in training and in serving alike."""
        return self._statistics[self._columns.state]

    @property
    def action_statistics(self) -> StatisticsSpec:
        """Of the column that is bound as action; likewise."""
        return self._statistics[self._columns.action]

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
        """Frames by integer index, each with the chunk of actions that begins there: `vectors` and `pictures`.

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
            DataFault: pictures that cannot be read.
        """
        names = list(self.cameras) if cameras is None else list(cameras)
        for name in names:
            self._refuse_unknown(name)
        vectors = self.vectors(indices, horizon)
        return {"images": {name: self.pictures(name, indices) for name in names}, **vectors}

    def vectors(self, indices: Sequence[int] | NDArray[np.integer[Any]], horizon: int) -> dict[str, Any]:
        """What `sample` gives, without the pictures. Reads no file.

        Raises:
            SpecError: an index out of range, or a horizon below 1.
        """
        rows = self._checked_rows(indices)
        if horizon < 1:
            raise SpecError(refusal("horizon", horizon, "1 or more", "give the action module's horizon"))
        last = self.episode_ranges[self._episode_index[rows], 1] - 1
        wanted = rows[:, None] + np.arange(horizon)
        task_index = self._task_index[rows].astype(np.int32)
        return {
            "proprioception": self.state[rows],
            "action": self.action[np.minimum(wanted, last[:, None])],
            "action_is_pad": wanted > last[:, None],
            "instructions": [self.tasks[i] for i in task_index],
            "task_index": task_index,
        }

    def pictures(self, camera: str, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """One camera's frames by integer index, uint8 [n, h, w, 3] in its declared size.

        Raises:
            UnknownObject: a camera that is not there; those that are get listed.
            SpecError: an index out of range.
            DataFault: a file is missing, torn, or another than was opened.
        """
        self._refuse_unknown(camera)
        rows = self._checked_rows(indices)
        self._refuse_another()
        return self._pictures.read(self._cameras[camera], rows)

    def close(self) -> None:
        """Close video files that are open; they are opened anew where a frame is asked for."""
        self._pictures.close()

    def _turned(self) -> tuple[str, ...] | None:
        recorded = self.provenance.get("turned_cameras")
        here = {camera.name for camera in self._cameras.values() if camera.turned}
        if recorded is None:
            return tuple(sorted(here)) or None
        before = {c.name for c in self._cameras.values() if c.key.removeprefix(layout.IMAGE_PREFIX) in recorded}
        return tuple(sorted(here ^ before))

    def _refuse_unknown(self, camera: str) -> None:
        if camera not in self.cameras:
            possible = ", ".join(self.cameras)
            raise UnknownObject(
                refusal(f"camera of dataset {self.root.name}", camera, possible, "bind cameras by name")
            )

    def _checked_rows(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        rows = np.asarray(indices, dtype=np.int64)
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= len(self))):
            raise SpecError(refusal("indices", rows.tolist()[:8], f"0 to {len(self) - 1}", "address existing frames"))
        return rows

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

    def _read_frames(
        self, episodes: Sequence[layout.EpisodeRecord], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Sets the vectors and row groups; returns frame_index and timestamp, [frames] each."""
        columns = self._columns
        widths = {columns.state: columns.state_width, columns.action: columns.action_width}
        widths |= dict.fromkeys((k for k in (layout.REWARD, *layout.INDEX_FEATURES) if k in self.features), 1)
        parts: dict[str, list[NDArray[Any]]] = {key: [] for key in widths}
        pictures = tuple(f"{camera.key}." for camera in columns.cameras)
        start = 0
        names = list(dict.fromkeys(episode.data for episode in episodes))
        if (rows := sum(self._rows(name) for name in names)) != total or not total:  # before memory is filled with them
            raise self._torn(f"{rows} frames where {layout.INFO} names {total}")
        for name in names:
            path = self.root / name
            try:
                file = pq.ParquetFile(path)
                groups = file.metadata
                within = [camera.key for camera in columns.cameras if not camera.video]
                lacks = sorted({*widths, *within} - set(file.schema_arrow.names))
                if lacks:
                    raise self._torn(f"{name} lacks {lacks}")
                for key in within:
                    stored = file.schema_arrow.field(key).type
                    if not pa.types.is_struct(stored) or stored.get_field_index("bytes") < 0:
                        raise self._torn(f"{key} in {name} is {stored}, and not a struct with the pictures' bytes")
                table = file.read(columns=list(widths))
                for key, column in parts.items():
                    column.append(matrix(table.column(key), widths[key]))
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise self._torn(f"{name} cannot be read ({error})") from error
            for group in range(groups.num_row_groups):
                self.row_groups.append((name, group, start))
                start += groups.row_group(group).num_rows
                self.encoded_bytes += picture_bytes(groups.row_group(group), pictures)
        found = {key: np.concatenate(values) for key, values in parts.items()}
        if not np.array_equal(found["index"][:, 0], np.arange(total)):
            raise self._torn("its frames are not in the order of their index")
        self.state: NDArray[np.float32] = found[columns.state].astype(np.float32, copy=False)
        self.action: NDArray[np.float32] = found[columns.action].astype(np.float32, copy=False)
        self.reward: NDArray[np.float32] | None = None
        if layout.REWARD in found:
            self.reward = found[layout.REWARD][:, 0].astype(np.float32, copy=False)
        for key, vectors in ((columns.state, self.state), (columns.action, self.action), (layout.REWARD, self.reward)):
            if vectors is not None and not np.isfinite(vectors).all():
                raise self._torn(f"{key} holds NaN or infinity")
        self._episode_index = found["episode_index"][:, 0]
        self._task_index = found["task_index"][:, 0]
        if self._task_index.min() < 0 or self._task_index.max() >= len(self.tasks):
            raise self._torn(f"task_index {int(self._task_index.max())} has no task")
        return found["frame_index"][:, 0], found["timestamp"][:, 0]

    def _checked_ranges(
        self, episodes: Sequence[layout.EpisodeRecord], total: int, frame_index: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        ranges = np.array([(episode.start, episode.stop) for episode in episodes], np.int64).reshape(-1, 2)
        edges = np.concatenate([[0], ranges[:, 1]])
        lengths = ranges[:, 1] - ranges[:, 0]
        if (
            len(episodes) != total
            or [episode.index for episode in episodes] != list(range(total))
            or not np.array_equal(edges[:-1], ranges[:, 0])
            or edges[-1] != len(self.state)
            or not np.array_equal(self._episode_index, np.repeat(np.arange(total), lengths))
            or not np.array_equal(frame_index, np.arange(len(self.state)) - np.repeat(ranges[:, 0], lengths))
        ):
            raise self._torn("its episodes do not cover its frames one after the other")
        return ranges

    def _checked_stats(self, stats: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
        if stats is None:
            possible = "meta/stats.json (v3.0) or meta/episodes_stats.jsonl (v2.1)"
            raise DataFault(
                refusal(f"statistics of dataset {self.root.name}", None, possible, "write them; none are made up")
            )
        columns = self._columns
        for key, width in ((columns.state, columns.state_width), (columns.action, columns.action_width)):
            for stat in ("mean", "std"):
                values = stats.get(key, {}).get(stat)
                if values is None or np.shape(values) != (width,) or not np.isfinite(values).all():
                    raise DataFault(
                        refusal(
                            f"statistics {key}.{stat} of dataset {self.root.name}",
                            values,
                            f"{width} finite numbers",
                            "write them; none are made up",
                        )
                    )
        return stats

    def _rows(self, name: str) -> int:
        """Of a data file, as its footer says."""
        path = self.root / name
        if not path.is_file():
            raise self._torn(f"{name} is missing")
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise self._torn(f"{name} cannot be read ({error})") from error

    def _torn(self, what: str) -> DataFault:
        return layout.torn(self.root, what)


def _statistics(stats: Mapping[str, Any]) -> StatisticsSpec:
    """Mean and deviation of a vector column."""
    return StatisticsSpec(mean=tuple(stats["mean"]), std=tuple(stats["std"]))
