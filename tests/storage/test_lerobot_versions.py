"""LeRobot v2.1 and v3.0, pictures in parquet files and as videos: every frame comes back as itself."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from configs.errors import DataFault, SpecError
from storage import demonstrations
from storage.demonstrations import LeRobotDataset, LeRobotWriter
from storage.lerobot_format import picture_size
from storage.lerobot_pictures import RecentlyUsed
from storage.video import DecoderPool, VideoReader
from tests.storage.lerobot_folders import (
    CAMERAS,
    FPS,
    LENGTHS,
    OFFSET,
    TASKS,
    TOTAL,
    WIDTHS,
    episodes,
    number,
    numbered,
    write,
)

KINDS = [(version, codec) for version in ("v2.1", "v3.0") for codec in (None, "libx264")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1] or 'images'}")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    version, codec = request.param
    return write(tmp_path_factory.mktemp("datasets") / "d", version=version, video_codec=codec)


def test_every_frame_comes_back_as_itself(folder: Path) -> None:
    """In any order and repeated, whatever is kept."""
    order = np.array([10, 0, 4, 4, 9, 1, 3, 2, 5, 8, 7, 6])
    given = episodes()
    for cache_bytes in (0, 1 << 30):
        found = LeRobotDataset(folder, cache_bytes=cache_bytes)
        for _ in range(2):
            sample = found.sample(order, horizon=1)
            for name, (height, width) in CAMERAS.items():
                assert sample["images"][name].shape == (len(order), height, width, 3)
                assert [number(frame) for frame in sample["images"][name]] == (order + OFFSET[name]).tolist()
            for key, name in (("proprioception", "state"), ("action", "action")):
                wanted = np.concatenate([episode[name] for episode in given])[order]
                np.testing.assert_array_equal(sample[key].reshape(wanted.shape), wanted)
        instructions = np.repeat(TASKS, LENGTHS)
        assert sample["instructions"] == instructions[order].tolist()
        found.close()


def test_what_it_says_of_itself(folder: Path) -> None:
    found = LeRobotDataset(folder)
    assert (len(found), found.num_episodes, found.fps, found.tasks) == (TOTAL, 3, FPS, ("push it", "pick it"))
    assert found.episode_ranges.tolist() == [[0, 4], [4, 5], [5, 11]]
    assert (found.cameras, found.state_width, found.action_width) == (CAMERAS, 3, 2)


def test_chunks_end_with_their_episode(folder: Path) -> None:
    sample = LeRobotDataset(folder).vectors([2, 4], horizon=3)
    assert sample["action_is_pad"].tolist() == [[False, False, True], [False, True, True]]


def test_statistics_are_those_of_all_frames(folder: Path) -> None:
    """v2.1 has them an episode: the whole's are made of them. Against numpy over all frames."""
    found = LeRobotDataset(folder)
    for key, name in (("observation.state", "state"), ("action", "action")):
        values = np.concatenate([episode[name] for episode in episodes()]).astype(np.float64)
        stats = found.stats[key]
        for stat, wanted in (("mean", values.mean(0)), ("std", values.std(0)), ("min", values.min(0))):
            np.testing.assert_allclose(stats[stat], wanted, rtol=1e-6)
        assert stats["count"] == [TOTAL]
    pixels = np.concatenate([episode["images"]["base"] for episode in episodes()]).reshape(-1, 3) / 255
    stats = found.stats["observation.images.base"]
    np.testing.assert_allclose(np.ravel(stats["mean"]), pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.ravel(stats["std"]), pixels.std(0), rtol=1e-12)


def test_quantiles_are_written_where_the_format_has_them(tmp_path: Path) -> None:
    """Against numpy's, of vectors and of pixels, over the dataset and an episode."""
    root = write(tmp_path / "d", version="v3.0")
    stats = json.loads((root / "meta/stats.json").read_text())
    values = np.concatenate([episode["state"] for episode in episodes()]).astype(np.float64)
    pixels = np.concatenate([episode["images"]["base"] for episode in episodes()]).reshape(-1, 3) / 255
    for name, q in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(stats["observation.state"][name], np.quantile(values, q, axis=0), rtol=1e-12)
        wanted = np.quantile(pixels, q, axis=0)
        np.testing.assert_allclose(np.ravel(stats["observation.images.base"][name]), wanted, rtol=1e-12)
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    wanted = np.quantile(episodes()[2]["state"].astype(np.float64), 0.9, axis=0)
    np.testing.assert_allclose(rows[2]["stats/observation.state/q90"], wanted, rtol=1e-12)
    old = write(tmp_path / "old", version="v2.1")
    line = json.loads((old / "meta/episodes_stats.jsonl").read_text().splitlines()[0])
    assert set(line["stats"]["action"]) == {"min", "max", "mean", "std", "count"}


def test_pixel_quantiles_between_two_values(tmp_path: Path) -> None:
    """Pixels 0, 0, 0, 100: the 0.9 quantile lies 0.7 of the way from the third to the fourth, at 70."""
    frames = np.array([0, 0, 0, 100], np.uint8).reshape(1, 2, 2, 1).repeat(3, axis=3)
    stats = demonstrations.ImageStats()
    stats.add(frames)
    found = stats.result(quantiles=True)
    np.testing.assert_allclose(np.ravel(found["q90"]), [70 / 255] * 3, rtol=1e-12)
    assert np.ravel(found["q50"]).tolist() == [0, 0, 0]


def test_files_and_metadata_of_v21(tmp_path: Path) -> None:
    """Names, keys and lines as lerobot 0.3.2 writes them."""
    root = write(tmp_path / "d", version="v2.1", video_codec="libx264")
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert files == [
        *(f"data/chunk-000/episode_00000{i}.parquet" for i in range(3)),
        *(f"meta/{name}" for name in ("episodes.jsonl", "episodes_stats.jsonl", "info.json", "tasks.jsonl")),
        *(f"videos/chunk-000/observation.images.{camera}/episode_00000{i}.mp4" for camera in CAMERAS for i in range(3)),
    ]
    info = json.loads((root / "meta/info.json").read_text())
    counts = ("total_episodes", "total_frames", "total_tasks", "total_videos", "total_chunks", "chunks_size")
    assert [info[name] for name in counts] == [3, TOTAL, 2, 6, 1, 1000]
    assert info["data_path"] == "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    assert info["video_path"] == "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    assert info["features"]["observation.images.base"]["info"]["video.codec"] == "h264"
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    assert json.loads(lines[2]) == {"episode_index": 2, "tasks": ["push it"], "length": 6}
    assert json.loads((root / "meta/tasks.jsonl").read_text().splitlines()[1]) == {"task_index": 1, "task": "pick it"}
    table = pq.read_table(root / "data/chunk-000/episode_000002.parquet")
    assert table.column("index").to_pylist() == list(range(5, 11))
    assert "observation.images.base" not in table.column_names


def test_where_videos_of_v30_begin(tmp_path: Path) -> None:
    """Episodes follow one another in a camera's file, and files one another by size."""
    root = write(tmp_path / "d", video_codec="libx264")
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    stem = "videos/observation.images.wrist"
    assert [row[f"{stem}/from_timestamp"] for row in rows] == [0.0, 0.4, 0.5]
    assert [row[f"{stem}/to_timestamp"] for row in rows] == [0.4, 0.5, 1.1]
    assert [row[f"{stem}/file_index"] for row in rows] == [0, 0, 0]
    rotated = write(tmp_path / "rotated", video_codec="libx264", video_file_size_mb=0)
    rows = pq.read_table(rotated / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row[f"{stem}/file_index"] for row in rows] == [0, 1, 2]
    assert [row[f"{stem}/from_timestamp"] for row in rows] == [0.0, 0.0, 0.0]
    frames = LeRobotDataset(rotated).pictures("wrist", np.arange(TOTAL))
    assert [number(frame) for frame in frames] == [i + OFFSET["wrist"] for i in range(TOTAL)]


@pytest.mark.parametrize("codec", [None, "libx264"])
def test_an_episode_that_was_written_by_half_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    """A disk that is full is told again at the end, whatever the caller made of it before."""
    root = tmp_path / "d"

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    def write_on() -> None:
        with LeRobotWriter(root, fps=FPS, cameras=CAMERAS, video_codec=codec, **WIDTHS) as writer:
            writer.add_episode(**episodes()[0])
            with monkeypatch.context() as patch:
                patch.setattr(demonstrations.pq.ParquetWriter, "write_table", full)
                with pytest.raises(OSError, match="no space"):
                    writer.add_episode(**episodes()[1])
            with pytest.raises(SpecError, match="not written whole"):
                writer.add_episode(**episodes()[2])

    with pytest.raises(SpecError, match="not written whole"):
        write_on()
    assert not root.exists()


def test_tasks_by_column_too(tmp_path: Path) -> None:
    """Some writers keep the text in a column `task`, LeRobot in the index."""
    root = write(tmp_path / "d")
    pd.DataFrame({"task": ["pick it", "push it"], "task_index": [1, 0]}).to_parquet(root / "meta/tasks.parquet")
    assert LeRobotDataset(root).tasks == ("push it", "pick it")


@pytest.mark.parametrize(
    ("shape", "names", "size"),
    [
        ([200, 84, 3], ["height", "width", "channels"], (200, 84)),
        ([3, 200, 84], ["channels", "height", "width"], (200, 84)),
        ([3, 200, 84], ["height", "width", "channels"], (200, 84)),  # as some published datasets have it
        ([3, 8, 3], ["height", "width", "channel"], (3, 8)),
        ([3, 8, 3], ["channel", "height", "width"], (8, 3)),
        ([8, 8, 1], ["height", "width", "channel"], None),
        ([8, 8], None, None),
    ],
)
def test_sizes_of_pictures_channels_last_or_first(shape: list, names: list | None, size: tuple | None) -> None:
    assert picture_size({"dtype": "image", "shape": shape, "names": names}) == size


def test_channels_first_datasets_are_read(tmp_path: Path) -> None:
    root = write(tmp_path / "d", version="v2.1", video_codec="libx264")
    info = json.loads((root / "meta/info.json").read_text())
    for name, (height, width) in CAMERAS.items():
        info["features"][f"observation.images.{name}"]["shape"] = [3, height, width]
    (root / "meta/info.json").write_text(json.dumps(info))
    assert LeRobotDataset(root).cameras == CAMERAS


def test_frames_are_addressed_by_integers(tmp_path: Path) -> None:
    """A `from_timestamp` in float32 after 100,000 frames at 30 a second is off by 5e-5 s: the frame is the same."""
    at = np.float32(100_000 / 30)
    assert abs(float(at) - 100_000 / 30) > 5e-5
    root = write(tmp_path / "d", video_codec="libx264")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pd.read_parquet(path)
    for camera in CAMERAS:
        column = f"videos/observation.images.{camera}/from_timestamp"
        table[column] = table[column].astype(np.float32) + np.float32(0.02)
    table.to_parquet(path)
    frames = LeRobotDataset(root).pictures("base", [4, 5, 10])
    assert [number(frame) for frame in frames] == [4, 5, 10]


def harmed_info(root: Path, **changes: object) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, **changes}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("template", "meta/info.json: data_path: possible: a path under the dataset that ends in .parquet or .mp4"),
        ("rate", r"timestamps are not frame_index / fps \(20\)"),
        ("episode", "cover its frames"),
        ("fewer", "4 frames where meta/info.json names 11"),
        ("tasks", "does not number its tasks from 0"),
        ("lines", r"meta/episodes\.jsonl is not JSON lines"),
        ("stats", r"statistics of dataset d: got None"),
        ("mean", r"meta/episodes_stats\.jsonl is not of one form"),
        ("video", r"video episode_000000\.mp4: it cannot be read"),
        ("short", r"episode_000002\.mp4 has 4 frames and its episodes need 6"),
        ("fps", r"frames a second of videos/.*: got 5\.0; possible: 10\.0"),
    ],
)
def test_torn_datasets_of_v21(tmp_path: Path, harm: str, message: str) -> None:
    root = write(tmp_path / "d", version="v2.1", video_codec="libx264")
    base = root / "videos/chunk-000/observation.images.base"
    if harm == "template":
        harmed_info(root, data_path="../{episode_index}")
    elif harm == "rate":
        harmed_info(root, fps=20)
    elif harm == "episode":
        lengths = enumerate((4, 2, 5))
        lines = [json.dumps({"episode_index": i, "length": length}) + "\n" for i, length in lengths]
        (root / "meta/episodes.jsonl").write_text("".join(lines))
    elif harm == "fewer":
        (root / "meta/episodes.jsonl").write_text('{"episode_index": 0, "length": 4}\n')
    elif harm == "tasks":
        (root / "meta/tasks.jsonl").write_text('{"task_index": 1, "task": "push it"}\n')
    elif harm == "lines":
        (root / "meta/episodes.jsonl").write_text("no JSON\n")
    elif harm == "stats":
        (root / "meta/episodes_stats.jsonl").unlink()
    elif harm == "mean":
        (root / "meta/episodes_stats.jsonl").write_text('{"episode_index": 0, "stats": {"action": {"count": [3]}}}\n')
    elif harm == "video":
        (base / "episode_000000.mp4").unlink()
    elif harm == "short":
        (base / "episode_000002.mp4").write_bytes((base / "episode_000000.mp4").read_bytes())
    else:
        slow = write(tmp_path / "slow", version="v2.1", video_codec="libx264", fps=5)
        path = "videos/chunk-000/observation.images.base/episode_000002.mp4"
        (root / path).write_bytes((slow / path).read_bytes())
    with pytest.raises(DataFault, match=message):
        LeRobotDataset(root).pictures("base", np.arange(TOTAL))


def test_frames_not_in_their_order_are_refused(tmp_path: Path) -> None:
    """Frame indices that do not count up within their episode."""
    root = write(tmp_path / "d", version="v2.1")
    path = root / "data/chunk-000/episode_000002.parquet"
    table = pq.read_table(path)
    reversed_index = table.column("frame_index").take(list(range(5, -1, -1)))
    at = table.column_names.index("frame_index")
    pq.write_table(table.set_column(at, "frame_index", reversed_index), path)
    with pytest.raises(DataFault, match="cover its frames"):
        LeRobotDataset(root)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"version": "v2.0"}, r"version of the LeRobot format: got 'v2\.0'; possible: v2\.1, v3\.0"),
        ({"video_codec": "mjpeg"}, "video codec: got 'mjpeg'; possible: libsvtav1, libx264"),
    ):
        with pytest.raises(SpecError, match=message):
            LeRobotWriter(tmp_path / "d", fps=FPS, cameras=CAMERAS, **WIDTHS, **changes)


def test_threads_read_side_by_side(folder: Path) -> None:
    """Eight threads over two decoders and a store that holds a few frames: each gets what it asked for."""
    found = LeRobotDataset(folder, cache_bytes=20_000, decoders=2)
    random = np.random.default_rng(0)
    asked = [(name, random.integers(0, TOTAL, 5)) for name in CAMERAS for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda ask: found.pictures(*ask), asked))
    for (name, rows), frames in zip(asked, given, strict=True):
        assert [number(frame) for frame in frames] == (rows + OFFSET[name]).tolist()


def test_decoders_are_bounded_and_lent_to_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two files are open, whoever asks; the third asks until one is given back."""
    root = write(tmp_path / "d", version="v2.1", video_codec="libx264")
    paths = sorted((root / "videos/chunk-000/observation.images.base").iterdir())
    is_open: set[int] = set()
    most = 0
    opened, closed = VideoReader.__init__, VideoReader.close

    def opening(self: VideoReader, path: Path) -> None:
        nonlocal most
        opened(self, path)
        is_open.add(id(self))
        most = max(most, len(is_open))

    def closing(self: VideoReader) -> None:
        is_open.discard(id(self))
        closed(self)

    monkeypatch.setattr(VideoReader, "__init__", opening)
    monkeypatch.setattr(VideoReader, "close", closing)
    pool = DecoderPool(2)
    waiting, third = threading.Event(), threading.Event()

    def ask() -> None:
        waiting.set()
        with pool.reader(paths[2]) as reader:
            third.set()
            assert len(reader) == 6

    thread = threading.Thread(target=ask)
    with pool.reader(paths[0]) as first, pool.reader(paths[0]) as second:
        assert first is not second
        thread.start()
        assert waiting.wait(10)
        assert not third.is_set()
    thread.join(10)
    assert third.is_set()
    with pytest.raises(DataFault), pool.reader(tmp_path / "none.mp4"):
        pass
    with pytest.raises(ZeroDivisionError), pool.reader(paths[1]):
        raise ZeroDivisionError
    with pool.reader(paths[0]), pool.reader(paths[1]):  # what failed has not used the bound up
        pass
    assert most == 2
    pool.close()
    assert not is_open


def test_what_is_kept_is_bounded() -> None:
    """Three of four bytes each in ten: the least recently used goes."""
    kept = RecentlyUsed(10)
    kept.put({"a": (1, 4), "b": (2, 4)})
    assert kept.get(["a"]) == [1]
    kept.put({"c": (3, 4), "large": (4, 11)})
    assert kept.get(["a", "b", "c", "large"]) == [1, None, 3, None]


def test_numbered_frames_survive_a_resize() -> None:
    """The tests' own frames can be told apart."""
    assert [number(frame) for frame in numbered(np.arange(32), 16, 64)] == list(range(32))
