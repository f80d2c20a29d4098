"""Datasets of others whose files are not what they say: refused in one line, before memory or time is spent on them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from configs.errors import DataFault, TenantFault
from storage.demonstrations import LeRobotDataset, LeRobotWriter
from storage.video import VideoReader
from tests.storage.lerobot_folders import TOTAL, write

DATA = "data/chunk-000/file-000.parquet"


def changed(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fps": "abc"}, "fps: Input should be a valid number"),
        ({"fps": None}, "fps: Input should be a valid number"),
        ({"fps": 0}, "fps: Input should be greater than 0"),
        ({"fps": float("nan")}, "fps: Input should be"),
        ({"total_frames": "x"}, "total_frames: Input should be a valid integer"),
        ({"total_episodes": 10**10}, "its episodes do not cover its frames"),
        ({"chunks_size": 0}, "chunks_size: Input should be greater than 0"),
        ({"features": [1]}, "features: Input should be a valid dictionary"),
        ({"data_path": "/etc/{file_index}.parquet"}, "data_path: possible: a path under the dataset"),
        ({"data_path": "data/{file_index:0900000000d}.parquet"}, "data_path: possible: episode_chunk"),
        ({"data_path": "data/{file_index.__class__}.parquet"}, "data_path: possible: episode_chunk"),
        ({"video_path": "videos/{video_key}/x.m3u8"}, "video_path: possible: a path under the dataset that ends in"),
        ({"codebase_version": []}, "codebase_version of dataset d: got "),
    ],
)
def test_an_info_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    root = write(tmp_path / "d")
    changed(root, lambda info: info.update(change))
    with pytest.raises(DataFault, match=message):
        LeRobotDataset(root)


@pytest.mark.parametrize("feature", ["index", "task_index", "timestamp", "action"])
@pytest.mark.parametrize(
    "declared", [None, {}, {"dtype": "float32", "shape": None}, {"dtype": "float32", "shape": [0]}]
)
def test_a_feature_that_is_none_is_refused(tmp_path: Path, feature: str, declared: dict[str, Any] | None) -> None:
    root = write(tmp_path / "d")
    if declared is None:
        changed(root, lambda info: info["features"].pop(feature))
    else:
        changed(root, lambda info: info["features"].update({feature: declared}))
    with pytest.raises(DataFault, match=r"dataset d"):
        LeRobotDataset(root)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[1.0], [2.0, 3.0, 4.0]], "rows of other widths"),
        ([None, [1.0, 2.0]], "without a value"),
        (["a", "2"], "string"),
    ],
)
def test_rows_that_are_no_vectors_are_refused(tmp_path: Path, version: str, content: list[Any], message: str) -> None:
    """Read one after the other they would be other vectors."""
    root = write(tmp_path / "d", version=version)
    path = sorted((root / "data").rglob("*.parquet"))[0]
    table = pq.read_table(path)
    rows = (content * table.num_rows)[: table.num_rows]
    place = table.schema.get_field_index("action")
    pq.write_table(table.set_column(place, "action", pa.array(rows)), path)
    with pytest.raises(DataFault, match=message):
        LeRobotDataset(root)


@pytest.mark.parametrize("number", [float("nan"), 1e300])
def test_states_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    root = write(tmp_path / "d")
    table = pq.read_table(root / DATA)
    states = np.array(table.column("observation.state").to_pylist(), np.float64)
    states[3, 0] = number
    place = table.schema.get_field_index("observation.state")
    pq.write_table(table.set_column(place, "observation.state", pa.array(states.tolist())), root / DATA)
    with pytest.raises(DataFault, match=r"observation\.state holds NaN or infinity"):
        LeRobotDataset(root)


def test_more_rows_than_are_named_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "d", version="v2.1")  # whose metadata is JSON
    path = sorted((root / "data").rglob("*.parquet"))[0]
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 3), path)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("read"))
    more = TOTAL + 2 * table.num_rows
    with pytest.raises(DataFault, match=rf"{more} frames where meta/info\.json names {TOTAL}"):
        LeRobotDataset(root)


def test_a_pipe_in_a_files_place_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "d")
    (root / DATA).unlink()
    os.mkfifo(root / DATA)
    with pytest.raises(DataFault, match=r"file-000\.parquet is missing"):
        LeRobotDataset(root)


@pytest.mark.parametrize("statistics", [[], {"observation.state": {"mean": ["1", "2", "3"], "std": [-1, 1, 1]}}])
def test_statistics_that_are_none_are_refused(tmp_path: Path, statistics: Any) -> None:
    root = write(tmp_path / "d")
    (root / "meta/stats.json").write_text(json.dumps(statistics))
    with pytest.raises(DataFault, match="dataset d"):
        LeRobotDataset(root)


def test_a_playlist_is_no_video(tmp_path: Path) -> None:
    """It would have files read that lie elsewhere."""
    path = tmp_path / "x.mp4"
    path.write_text("#EXTM3U\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataFault, match=r"video x\.mp4: it cannot be read"):
        VideoReader(path)


@pytest.mark.parametrize("field", ["state", "action", "reward"])
@pytest.mark.parametrize("number", [float("nan"), 1e300])
def test_what_cannot_be_stored_is_refused_with_its_episode(tmp_path: Path, field: str, number: float) -> None:
    """And those before it are kept."""
    widths = {"state_width": 1, "action_width": 1}
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"top": (8, 8)}, rewards=True, **widths) as writer:
        vectors = {"state": np.zeros((3, 1)), "action": np.zeros((3, 1)), "reward": np.zeros(3)}
        pictures = {"top": np.zeros((3, 8, 8, 3), np.uint8)}
        writer.add_episode(pictures, vectors["state"], vectors["action"], "go", vectors["reward"])
        vectors[field][1] = number
        with pytest.raises(TenantFault, match=f"{field}: got 'no number in frame 1'"):
            writer.add_episode(pictures, vectors["state"], vectors["action"], "go", vectors["reward"])
    assert len(LeRobotDataset(tmp_path / "d")) == 3


def test_a_picture_larger_than_declared_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file can be a picture that fills memory, so it is not decoded first."""
    root = write(tmp_path / "d")
    table = pq.read_table(root / DATA)
    key = "observation.images.base"
    large = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(large, "PNG")
    rows = [{"bytes": large.getvalue(), "path": None}] * table.num_rows
    place = table.schema.get_field_index(key)
    pq.write_table(
        table.set_column(place, table.schema.field(key), pa.array(rows, table.schema.field(key).type)), root / DATA
    )
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataFault, match=r"camera base of dataset d: got \[2000, 3000, 3\]"):
        LeRobotDataset(root).pictures("base", [0])


def test_pictures_that_are_no_struct_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "d")
    table = pq.read_table(root / DATA)
    place = table.schema.get_field_index("observation.images.base")
    pq.write_table(table.set_column(place, "observation.images.base", pa.array([b"x"] * table.num_rows)), root / DATA)
    with pytest.raises(DataFault, match=r"observation\.images\.base in .* is binary, and not a struct"):
        LeRobotDataset(root)
