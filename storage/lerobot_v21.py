"""Layout of LeRobot v2.1: a data file and a video file a camera for each episode, metadata in JSON lines.

Source: huggingface/lerobot 0.3.2 (datasets/utils.py, lerobot_dataset.py).

    meta/tasks.jsonl                             {"task_index": 0, "task": "…"} a line
    meta/episodes.jsonl                          {"episode_index": 0, "tasks": ["…"], "length": 9} a line
    meta/episodes_stats.jsonl                    {"episode_index": 0, "stats": {feature: {min, max, mean, std, count}}}
    data/chunk-000/episode_000000.parquet        a row a frame
    videos/chunk-000/KEY/episode_000000.mp4      the episode's frames
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.lerobot_format import (
    INFO,
    PER_CHUNK,
    EpisodeRecord,
    VideoPart,
    Written,
    json_bytes,
    json_lines_of,
    path_from,
    torn,
)
from storage.lerobot_statistics import aggregated

_TASKS = "meta/tasks.jsonl"
_EPISODES = "meta/episodes.jsonl"
_STATS = "meta/episodes_stats.jsonl"
_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_VIDEOS = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


class V21:
    """See `storage.lerobot_format.Layout`."""

    version = "v2.1"
    file_an_episode = True
    quantiles = False

    def data_file(self, number: int) -> str:
        """`data/chunk-000/episode_000000.parquet`."""
        return _DATA.format(**_numbers(number, PER_CHUNK))

    def video_file(self, key: str, number: int) -> str:
        """`videos/chunk-000/KEY/episode_000000.mp4`."""
        return _VIDEOS.format(video_key=key, **_numbers(number, PER_CHUNK))

    def metadata(self, written: Written) -> dict[str, bytes]:
        """info.json, tasks, episodes and their statistics."""
        count = len(written.episodes)
        info = {
            "codebase_version": self.version,
            "robot_type": written.robot_type,
            "total_episodes": count,
            "total_frames": written.frames,
            "total_tasks": len(written.tasks),
            "total_videos": count * len(written.video_keys),
            "total_chunks": -(-count // PER_CHUNK),
            "chunks_size": PER_CHUNK,
            "fps": written.fps,
            "splits": {"train": f"0:{count}"},
            "data_path": _DATA,
            "video_path": _VIDEOS if written.video_keys else None,
            "features": dict(written.features),
        }
        return {
            INFO: json_bytes(info),
            _TASKS: _lines([{"task_index": i, "task": task} for i, task in enumerate(written.tasks)]),
            _EPISODES: _lines(
                [{"episode_index": e.index, "tasks": [e.task], "length": e.length} for e in written.episodes]
            ),
            _STATS: _lines([{"episode_index": e.index, "stats": dict(e.stats)} for e in written.episodes]),
        }

    def tasks(self, root: Path) -> tuple[str, ...]:
        """From `meta/tasks.jsonl`."""
        try:
            found = sorted((int(line["task_index"]), str(line["task"])) for line in json_lines_of(root / _TASKS, root))
        except (KeyError, TypeError, ValueError) as error:
            raise torn(root, f"{_TASKS} holds a line without task_index and task ({error})") from error
        if [index for index, _ in found] != list(range(len(found))):
            raise torn(root, f"{_TASKS} does not number its tasks from 0")
        return tuple(task for _, task in found)

    def episodes(self, root: Path, info: Mapping[str, Any]) -> list[EpisodeRecord]:
        """From `meta/episodes.jsonl`."""
        videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
        a_chunk = int(info.get("chunks_size", PER_CHUNK))
        try:
            lengths = sorted(
                (int(line["episode_index"]), int(line["length"])) for line in json_lines_of(root / _EPISODES, root)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise torn(root, f"{_EPISODES} holds a line without episode_index and length ({error})") from error
        found, start = [], 0
        for index, length in lengths:
            numbers = _numbers(index, a_chunk)
            found.append(
                EpisodeRecord(
                    index=index,
                    start=start,
                    stop=start + length,
                    data=path_from(info["data_path"], root, **numbers),
                    videos={
                        key: VideoPart(path_from(info["video_path"], root, video_key=key, **numbers), 0.0)
                        for key in videos
                    },
                )
            )
            start += length
        return found

    def statistics(self, root: Path, features: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """From `meta/episodes_stats.jsonl`, over all episodes."""
        if not (root / _STATS).is_file():
            return None
        try:
            return aggregated([line["stats"] for line in json_lines_of(root / _STATS, root)])
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise torn(root, f"{_STATS} is not of one form ({error})") from error


def _numbers(episode: int, a_chunk: int) -> dict[str, int]:
    return {"episode_chunk": episode // a_chunk, "episode_index": episode}


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows).encode()
