"""Demonstrations in the LeRobot v3.0 layout: to the bit, chunks end with their episode, statistics by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from configs.errors import Conflict, DataFault, SpecError, TenantFault, UnknownObject
from storage.atomic import replace_folder
from storage.demonstrations import LeRobotDataset, LeRobotWriter

LENGTHS = (3, 1, 5)
TASKS = ("push it", "pick it", "push it")
WIDTHS = {"state_width": 3, "action_width": 2}
CAMERAS = {"base": (6, 8), "wrist": (4, 4)}


def episode(number: int, length: int) -> dict[str, object]:
    """Frames and vectors that differ in every episode, frame and camera."""
    r = np.random.default_rng(number)
    return {
        "images": {n: r.integers(0, 256, (length, h, w, 3), dtype=np.uint8) for n, (h, w) in CAMERAS.items()},
        "state": r.normal(size=(length, 3)).astype(np.float32),
        "action": r.normal(size=(length, 2)).astype(np.float32),
    }


def write(root: Path, **changes: object) -> Path:
    """The example dataset of three episodes."""
    with LeRobotWriter(root, **{"fps": 20, "cameras": CAMERAS, **WIDTHS, **changes}) as writer:
        for number, (length, task) in enumerate(zip(LENGTHS, TASKS, strict=True)):
            writer.add_episode(**episode(number, length), task=task)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example on disk; tests that harm it write their own."""
    return write(tmp_path_factory.mktemp("datasets") / "demos", provenance={"seeds": [1, 2, 3]})


def test_round_trip_to_the_bit(folder: Path) -> None:
    """Pictures, vectors and instructions of every frame, in any order and repeated, with any cache size."""
    wanted = [episode(number, length) for number, length in enumerate(LENGTHS)]
    order = np.array([8, 0, 3, 3, 1, 2, 4, 5, 6, 7])
    for cache_bytes in (0, 1 << 30):
        found = LeRobotDataset(folder, cache_bytes=cache_bytes).sample(order, horizon=1)
        for camera in CAMERAS:
            frames = np.concatenate([e["images"][camera] for e in wanted])
            np.testing.assert_array_equal(found["images"][camera], frames[order])
        np.testing.assert_array_equal(found["proprioception"], np.concatenate([e["state"] for e in wanted])[order])
        np.testing.assert_array_equal(found["action"][:, 0], np.concatenate([e["action"] for e in wanted])[order])
        assert found["proprioception"].dtype == found["action"].dtype == np.float32
        instructions = ["push it"] * 3 + ["pick it"] + ["push it"] * 5
        assert found["instructions"] == [instructions[i] for i in order]
        np.testing.assert_array_equal(found["task_index"], np.array([0, 0, 0, 1, 0, 0, 0, 0, 0])[order])


def test_what_a_dataset_says_of_itself(folder: Path) -> None:
    """Sizes, cameras, tasks and where it comes from."""
    found = LeRobotDataset(folder)
    assert (len(found), found.num_episodes, found.fps) == (9, 3, 20)
    assert (found.state_width, found.action_width, found.cameras) == (3, 2, CAMERAS)
    assert found.tasks == ("push it", "pick it")
    assert found.episode_ranges.tolist() == [[0, 3], [3, 4], [4, 9]]
    assert found.provenance == {"seeds": [1, 2, 3]}


def test_chunks_end_with_their_episode(folder: Path) -> None:
    """Horizon 4 at frame 1 of an episode of 3: actions 1, 2, then 2 repeated as padding; never the next episode's."""
    found = LeRobotDataset(folder)
    sample = found.sample([1, 3, 4, 8], horizon=4)
    assert sample["action_is_pad"].tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [False, False, False, False],
        [False, True, True, True],
    ]
    rows = [[1, 2, 2, 2], [3, 3, 3, 3], [4, 5, 6, 7], [8, 8, 8, 8]]
    np.testing.assert_array_equal(sample["action"], found.action[rows])


def test_statistics_by_hand(tmp_path: Path) -> None:
    """States 1, 2 and 6: mean 3, deviation √((4 + 1 + 9)/3); a constant dimension has deviation 0 to the bit."""
    constant = np.float32(0.1)  # not a binary fraction: naive sums leave a deviation of about 1e-9
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"base": (1, 2)}, state_width=2, action_width=1) as writer:
        for rows in ([1.0, 2.0], [6.0]):
            images = {"base": np.full((len(rows), 1, 2, 3), [0, 51, 255], np.uint8)}
            state = np.array([[x, constant] for x in rows], np.float32)
            writer.add_episode(images, state, np.array([[-x] for x in rows], np.float32), "go")
    found = LeRobotDataset(tmp_path / "d")
    state = found.state_statistics
    assert state.mean == (3.0, float(constant))
    assert state.std == pytest.approx((np.sqrt(14 / 3), 0.0), rel=1e-15, abs=0)
    assert found.action_statistics.mean == (-3.0,)
    assert found.stats["action"]["min"] == [-6.0]
    assert found.stats["action"]["max"] == [-1.0]
    assert found.stats["action"]["count"] == [3]
    pictures = found.stats["observation.images.base"]
    assert pictures["mean"] == [[[0.0]], [[0.2]], [[1.0]]]
    assert pictures["std"] == [[[0.0]], [[0.0]], [[0.0]]]
    assert pictures["count"] == [3]


def test_image_statistics_by_hand(tmp_path: Path) -> None:
    """Two pixels 0 and 255 in red: mean 0.5, deviation 0.5; over two episodes as over one."""
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"base": (1, 1)}, state_width=1, action_width=1) as writer:
        for red in (0, 255):
            images = {"base": np.array([[[[red, 7, 7]]]], np.uint8)}
            writer.add_episode(images, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), "go")
    pictures = LeRobotDataset(tmp_path / "d").stats["observation.images.base"]
    assert (pictures["mean"][0], pictures["std"][0]) == ([[0.5]], [[0.5]])
    assert (pictures["min"][0], pictures["max"][0]) == ([[0.0]], [[1.0]])
    assert pictures["std"][1] == [[0.0]]


def test_vectors_of_one_value(tmp_path: Path) -> None:
    """The format keeps them as plain columns; they still read as [n, 1]."""
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"base": (1, 1)}, state_width=1, action_width=1) as writer:
        writer.add_episode(
            {"base": np.zeros((2, 1, 1, 3), np.uint8)}, np.array([[1], [2]], np.float32), np.ones((2, 1), "f4"), "go"
        )
    found = LeRobotDataset(tmp_path / "d").sample([0, 1], horizon=2)
    assert found["proprioception"].tolist() == [[1], [2]]
    assert found["action"].shape == (2, 2, 1)


def test_the_layout_is_lerobots(folder: Path) -> None:
    """Files, keys and columns by the names LeRobot v3.0 reads them under."""
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 9, 2)
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert info["splits"] == {"train": "0:3"}
    assert info["features"]["observation.images.base"] == {
        "dtype": "image",
        "shape": [6, 8, 3],
        "names": ["height", "width", "channels"],
    }
    assert info["features"]["observation.state"]["shape"] == [3]
    assert info["features"]["index"] == {"dtype": "int64", "shape": [1], "names": None}
    tasks = pd.read_parquet(folder / "meta/tasks.parquet")
    assert (tasks.index.tolist(), tasks["task_index"].tolist()) == (["push it", "pick it"], [0, 1])
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["length"] for e in episodes] == [3, 1, 5]
    last = episodes[2]
    assert (last["dataset_from_index"], last["dataset_to_index"]) == (4, 9)
    assert (last["data/chunk_index"], last["data/file_index"]) == (0, 0)
    assert (last["meta/episodes/chunk_index"], last["meta/episodes/file_index"]) == (0, 0)
    assert last["tasks"] == ["push it"]
    assert last["stats/index/min"] == [4]
    assert np.array(last["stats/observation.images.base/mean"]).shape == (3, 1, 1)
    stats = json.loads((folder / "meta/stats.json").read_text())
    assert set(stats) == set(info["features"])
    assert set(stats["action"]) == {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}


def test_data_file_decodes_without_us(folder: Path) -> None:
    """Pictures are PNG in {bytes, path}, vectors fixed-size lists, and the schema tells `datasets` so."""
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    hugging = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert hugging["observation.images.base"] == {"_type": "Image"}
    assert hugging["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "Sequence"}
    assert hugging["timestamp"] == {"dtype": "float32", "_type": "Value"}
    assert list(hugging) == table.column_names
    assert str(table.schema.field("action").type) == "fixed_size_list<element: float>[2]"
    row = table.slice(5, 1).to_pylist()[0]
    picture = Image.open(io.BytesIO(row["observation.images.base"]["bytes"]))
    assert picture.format == "PNG"
    np.testing.assert_array_equal(np.asarray(picture), episode(2, 5)["images"]["base"][1])
    assert (row["frame_index"], row["episode_index"], row["index"], row["task_index"]) == (1, 2, 5, 0)
    assert row["timestamp"] == np.float32(1 / 20)
    assert pq.ParquetFile(folder / "data/chunk-000/file-000.parquet").num_row_groups == 3


def test_files_are_followed_by_new_ones(tmp_path: Path) -> None:
    """A data file past its size is closed; frames are found across files."""
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"base": (700, 700)}, **WIDTHS, file_size_mb=1) as writer:
        frames = [np.random.default_rng(i).integers(0, 256, (1, 700, 700, 3), dtype=np.uint8) for i in range(3)]
        for i, image in enumerate(frames):
            writer.add_episode({"base": image}, np.full((1, 3), i, "f4"), np.full((1, 2), i, "f4"), "go")
    assert len(list((tmp_path / "d/data/chunk-000").iterdir())) == 3
    episodes = pq.read_table(tmp_path / "d/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["data/file_index"] for e in episodes] == [0, 1, 2]
    found = LeRobotDataset(tmp_path / "d").sample([2, 0], horizon=1)
    np.testing.assert_array_equal(found["images"]["base"][0], frames[2][0])
    assert found["action"][:, 0, 0].tolist() == [2, 0]


def test_existing_dataset_is_refused(tmp_path: Path) -> None:
    """It stays as it is."""
    root = write(tmp_path / "d")
    with pytest.raises(Conflict, match="dataset: got 'd'"):
        write(root)
    assert len(LeRobotDataset(root)) == 9


def test_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    """Nothing is visible while writing, nor after an error, nor without an episode."""
    root = tmp_path / "d"

    def fail() -> None:
        with LeRobotWriter(root, fps=20, cameras=CAMERAS, **WIDTHS) as writer:
            writer.add_episode(**episode(0, 3), task="go")
            assert not root.exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(SpecError, match="add an episode"), LeRobotWriter(root, fps=20, cameras=CAMERAS, **WIDTHS):
        pass
    assert not root.exists()
    assert list((tmp_path / ".writing").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": {"base": np.zeros((3, 6, 8, 3), np.uint8)}}, r"cameras: got \['base'\]; possible: base, wrist"),
        ({"state": np.zeros((3, 4), np.float32)}, r"state: got 'float32 \[3, 4\]'; possible: float32 \[3, 3\]"),
        ({"state": np.zeros((2, 3), np.float32)}, r"float32 \[2, 3\]"),
        ({"action": np.zeros((0, 2), np.float32)}, "one frame or more"),
        ({"action": np.array([[0, 0], [0, np.nan], [0, 0]], np.float32)}, "action: got 'no number in frame 1'"),
        ({"task": ""}, "an instruction in words"),
    ],
)
def test_episodes_that_do_not_fit(tmp_path: Path, change: dict, message: str) -> None:
    """Each fault names the episode and the field, and what was written before it stays right."""
    with LeRobotWriter(tmp_path / "d", fps=20, cameras=CAMERAS, **WIDTHS) as writer:
        writer.add_episode(**episode(0, 3), task="go")
        with pytest.raises(TenantFault, match=message):
            writer.add_episode(**{**episode(1, 3), "task": "go", **change})
        writer.add_episode(**episode(1, 3), task="go")
    assert LeRobotDataset(tmp_path / "d").num_episodes == 2


def test_unknown_camera_is_refused_with_the_names(folder: Path) -> None:
    """Cameras are bound by name."""
    found = LeRobotDataset(folder)
    assert list(found.sample([0], 1, ["wrist"])["images"]) == ["wrist"]
    with pytest.raises(UnknownObject, match="got 'top'; possible: base, wrist"):
        found.sample([0], 1, ["base", "top"])


@pytest.mark.parametrize("indices", [[-1], [9], [[0]]])
def test_indices_out_of_range(folder: Path, indices: list) -> None:
    """Refused, not wrapped around."""
    with pytest.raises(SpecError, match="0 to 8"):
        LeRobotDataset(folder).sample(indices, horizon=1)


def test_missing_statistics_are_an_error(tmp_path: Path) -> None:
    """No file, no key, a wrong width, no number: never an unnormalised run."""
    root = write(tmp_path / "d")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    for harm in (
        {"action": {}},
        {"action": {"mean": [0, 0], "std": [1]}},
        {"action": {"mean": [0, None], "std": [1, 1]}},
    ):
        path.write_text(json.dumps({**stats, **harm}).replace("null", "NaN"))
        with pytest.raises(DataFault, match=r"statistics action\.(mean|std) of dataset d"):
            LeRobotDataset(root)
    path.unlink()
    with pytest.raises(DataFault, match="statistics of dataset d: got None"):
        LeRobotDataset(root)


def test_other_datasets_are_refused(tmp_path: Path) -> None:
    """No dataset, another version, a camera without its video."""
    with pytest.raises(UnknownObject, match="collect it first"):
        LeRobotDataset(tmp_path / "nothing")
    root = write(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v1.6"}))
    with pytest.raises(DataFault, match=r"got 'v1\.6'; possible: v2\.1, v3\.0"):
        LeRobotDataset(root)
    info["features"]["observation.images.base"]["dtype"] = "video"
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DataFault, match=r"dataset d: meta/info\.json: it: video_path is missing, though there"):
        LeRobotDataset(root)


@pytest.mark.parametrize("harm", ["cut", "missing", "order", "count"])
def test_torn_data_is_noticed(tmp_path: Path, harm: str) -> None:
    """A cut or missing data file, frames in another order, counts that do not add up."""
    root = write(tmp_path / "d")
    path = root / "data/chunk-000/file-000.parquet"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif harm == "missing":
        path.unlink()
    elif harm == "order":
        table = pq.read_table(path)
        pq.write_table(table.take(list(reversed(range(9)))), path)
    else:
        episodes = root / "meta/episodes/chunk-000/file-000.parquet"
        pq.write_table(pq.read_table(episodes).slice(0, 2), episodes)
    with pytest.raises(DataFault, match="dataset d: "):
        LeRobotDataset(root)


def test_a_dataset_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Its pictures would be the new one's, its states and actions the old one's."""
    for name in ("old", "new"):
        write(tmp_path / name)
    reader = LeRobotDataset(tmp_path / "old")
    replace_folder(tmp_path / "new", tmp_path / "old")
    with pytest.raises(DataFault, match="replaced or removed while it was read"):
        reader.sample([0], horizon=1)
    assert len(LeRobotDataset(tmp_path / "old").sample([0], horizon=1)["instructions"]) == 1
    assert list((tmp_path / ".writing").iterdir()) == []


def test_a_replacement_that_cannot_be_moved_leaves_the_old_dataset(tmp_path: Path) -> None:
    write(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "never-written", tmp_path / "old")
    assert LeRobotDataset(tmp_path / "old").sample([0], horizon=1)["instructions"]


def test_rewards_are_kept_and_returns_end_with_their_episode(tmp_path: Path) -> None:
    """γ = ½, by hand: 1 + ½ · 2 + ¼ · 4 = 3, 2 + ½ · 4 = 4, 4; an episode of one frame; 0 + … + 8 / 16."""
    rewards = ([1, 2, 4], [7], [0, 0, 0, 0, 8])
    with LeRobotWriter(tmp_path / "d", fps=20, cameras=CAMERAS, rewards=True, **WIDTHS) as writer:
        for number, reward in enumerate(rewards):
            writer.add_episode(**episode(number, len(reward)), task="push it", reward=np.array(reward, np.float32))
        with pytest.raises(TenantFault, match="episode 3: reward: got 'none'; possible: some"):
            writer.add_episode(**episode(3, 2), task="push it")
        with pytest.raises(TenantFault, match=r"episode 3: reward: got 'float32 \[3\]'; possible: float32 \[2\]"):
            writer.add_episode(**episode(3, 2), task="push it", reward=np.zeros(3, np.float32))
    found = LeRobotDataset(tmp_path / "d")
    assert found.reward is not None
    assert found.reward.tolist() == [1, 2, 4, 7, 0, 0, 0, 0, 8]
    assert found.returns(0.5).tolist() == [3, 4, 4, 7, 0.5, 1, 2, 4, 8]
    assert found.returns(0.5).dtype == np.float32
    assert found.stats["next.reward"]["max"] == [8]


def test_a_dataset_without_rewards_has_no_returns(folder: Path, tmp_path: Path) -> None:
    found = LeRobotDataset(folder)
    assert found.reward is None
    with pytest.raises(DataFault, match=r"rewards of dataset demos: got .*; possible: a column next.reward"):
        found.returns(0.9)
    with LeRobotWriter(tmp_path / "d", fps=20, cameras=CAMERAS, **WIDTHS) as writer:
        writer.add_episode(**episode(0, 1), task="push it")
        with pytest.raises(TenantFault, match="reward: got 'some'; possible: none"):
            writer.add_episode(**episode(1, 1), task="push it", reward=np.zeros(1, np.float32))
