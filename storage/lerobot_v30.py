"""Layout of LeRobot v3.0: many episodes a file, files followed by new ones by size, metadata in parquet.

Source: huggingface/lerobot 0.4.4 (datasets/utils.py, lerobot_dataset.py).

    meta/stats.json                              {feature: {min, max, mean, std, count, q01, q10, q50, q90, q99}}
    meta/tasks.parquet                           task text as index (or column `task`), column task_index
    meta/episodes/chunk-000/file-000.parquet     a row an episode: where its frames lie, its own statistics
    data/chunk-000/file-000.parquet              a row a frame; a row group an episode as LeRobot and we write them
    videos/KEY/chunk-000/file-000.mp4            frames of many episodes, each from its `from_timestamp` on
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from storage.lerobot_format import (
    INFO,
    PER_CHUNK,
    EpisodeRecord,
    VideoPart,
    Written,
    json_bytes,
    json_of,
    path_from,
    torn,
)

_STATS = "meta/stats.json"
_TASKS = "meta/tasks.parquet"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_EPISODES = f"meta/episodes/{_FILE}.parquet"
_DATA = f"data/{_FILE}.parquet"
_VIDEOS = f"videos/{{video_key}}/{_FILE}.mp4"
_RANGE = ("episode_index", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
_VIDEO = ("chunk_index", "file_index", "from_timestamp")


class V30:
    """See `storage.lerobot_format.Layout`."""

    version = "v3.0"
    file_an_episode = False
    quantiles = True

    def data_file(self, number: int) -> str:
        """`data/chunk-000/file-000.parquet`."""
        return _DATA.format(**_numbers(number))

    def video_file(self, key: str, number: int) -> str:
        """`videos/KEY/chunk-000/file-000.mp4`."""
        return _VIDEOS.format(video_key=key, **_numbers(number))

    def metadata(self, written: Written) -> dict[str, bytes]:
        """info.json, stats.json, tasks and episodes."""
        info = {
            "codebase_version": self.version,
            "robot_type": written.robot_type,
            "total_episodes": len(written.episodes),
            "total_frames": written.frames,
            "total_tasks": len(written.tasks),
            "chunks_size": PER_CHUNK,
            "data_files_size_in_mb": written.data_file_mb,
            "video_files_size_in_mb": written.video_file_mb,
            "fps": written.fps,
            "splits": {"train": f"0:{len(written.episodes)}"},
            "data_path": _DATA,
            "video_path": _VIDEOS if written.video_keys else None,
            "features": dict(written.features),
        }
        tasks = pd.DataFrame({"task_index": range(len(written.tasks))}, index=pd.Index(written.tasks, name="task"))
        rows = []
        for episode in written.episodes:
            row: dict[str, Any] = {
                "episode_index": episode.index,
                "tasks": [episode.task],
                "length": episode.length,
                "data/chunk_index": episode.data_file // PER_CHUNK,
                "data/file_index": episode.data_file % PER_CHUNK,
                "dataset_from_index": episode.start,
                "dataset_to_index": episode.start + episode.length,
            }
            for key, (number, first) in episode.videos.items():
                row |= {f"videos/{key}/{name}": value for name, value in _numbers(number).items()}
                row[f"videos/{key}/from_timestamp"] = first / written.fps
                row[f"videos/{key}/to_timestamp"] = (first + episode.length) / written.fps
            for key, stats in episode.stats.items():
                row |= {f"stats/{key}/{name}": value for name, value in stats.items()}
            rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        return {
            INFO: json_bytes(info),
            _STATS: json_bytes(dict(written.stats)),
            _TASKS: _frame_bytes(tasks),
            _EPISODES.format(**_numbers(0)): _table_bytes(pa.Table.from_pylist(rows)),
        }

    def tasks(self, root: Path) -> tuple[str, ...]:
        """From `meta/tasks.parquet`."""
        try:
            frame = pd.read_parquet(root / _TASKS)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise torn(root, f"{_TASKS} cannot be read ({error})") from error
        if "task_index" not in frame.columns:
            raise torn(root, f"{_TASKS} has no column task_index")
        frame = frame.sort_values("task_index")
        if frame["task_index"].tolist() != list(range(len(frame))):
            raise torn(root, f"{_TASKS} does not number its tasks from 0")
        return tuple(str(text) for text in (frame["task"] if "task" in frame.columns else frame.index))

    def episodes(self, root: Path, info: Mapping[str, Any]) -> list[EpisodeRecord]:
        """From `meta/episodes`."""
        videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
        names = [*_RANGE, *(f"videos/{key}/{name}" for key in videos for name in _VIDEO)]
        paths = sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))
        if not paths:
            raise torn(root, "meta/episodes has no file")
        tables = []
        for path in paths:
            try:
                file = pq.ParquetFile(path)
                lacks = sorted(set(names) - set(file.schema_arrow.names))
                if lacks:
                    raise torn(root, f"{path.name} of meta/episodes lacks {lacks}")
                tables.append(file.read(columns=names).select(names))
            except (pa.ArrowException, OSError) as error:
                raise torn(root, f"meta/episodes/{path.parent.name}/{path.name} cannot be read ({error})") from error
        table = pa.concat_tables(tables, promote_options="permissive").sort_by("episode_index")
        columns = {name: table.column(name).to_numpy() for name in names}
        if any(column.dtype.kind not in "iuf" or not np.isfinite(column).all() for column in columns.values()):
            raise torn(root, "meta/episodes holds something else than numbers")
        return [
            EpisodeRecord(
                index=int(columns["episode_index"][i]),
                start=int(columns["dataset_from_index"][i]),
                stop=int(columns["dataset_to_index"][i]),
                data=path_from(info["data_path"], root, **_at(columns, "data", i)),
                videos={
                    key: VideoPart(
                        path_from(info["video_path"], root, video_key=key, **_at(columns, f"videos/{key}", i)),
                        float(columns[f"videos/{key}/from_timestamp"][i]),
                    )
                    for key in videos
                },
            )
            for i in range(len(table))
        ]

    def statistics(self, root: Path, features: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """From `meta/stats.json`."""
        return json_of(root / _STATS, root) if (root / _STATS).is_file() else None


def _numbers(file: int) -> dict[str, int]:
    return {"chunk_index": file // PER_CHUNK, "file_index": file % PER_CHUNK}


def _at(columns: Mapping[str, Any], prefix: str, row: int) -> dict[str, int]:
    return {name: int(columns[f"{prefix}/{name}"][row]) for name in ("chunk_index", "file_index")}


def _frame_bytes(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


def _table_bytes(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="snappy")
    return buffer.getvalue()
