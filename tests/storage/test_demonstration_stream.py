"""Streams of demonstrations: the samples of the order, whoever decodes them when, within bounded memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.errors import DataFault, SpecError
from configs.home import PROJECT_ROOT
from storage.demonstration_stream import DemonstrationStream, Source, order_of
from storage.demonstrations import LeRobotDataset, LeRobotWriter
from storage.sample_order import Mixture, ShuffledOrder

LENGTHS = (5, 9, 3, 7)
SIZE = (8, 12)


def sample_indices(num_frames: int, start: int, count: int, seed: int) -> np.ndarray:
    """Of a dataset that fits into one window."""
    return ShuffledOrder(((0, num_frames),), num_frames, seed).at(start, count)


def write(root: Path, first: int, *, rewards: bool = False, size: tuple[int, int] = SIZE) -> Path:
    """Episodes whose frame i shows first + i in every pixel, and has it as state and action."""
    with LeRobotWriter(
        root, fps=10, cameras={"top": size, "wrist": size}, state_width=2, action_width=1, rewards=rewards
    ) as writer:
        start = first
        for episode, length in enumerate(LENGTHS):
            number = np.arange(start, start + length)
            pictures = np.broadcast_to(number[:, None, None, None].astype(np.uint8), (length, *size, 3))
            writer.add_episode(
                {"top": pictures, "wrist": 255 - pictures},
                np.stack([number, -number], axis=1).astype(np.float32),
                number[:, None].astype(np.float32),
                f"task {first} {episode % 2}",
                np.ones(length, np.float32) if rewards else None,
            )
            start += length
    return root


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("datasets")
    return write(folder / "a", 0, rewards=True), write(folder / "b", 100)


@pytest.fixture
def datasets(roots: tuple[Path, Path]) -> Iterator[list[LeRobotDataset]]:
    opened = [LeRobotDataset(root) for root in roots]
    yield opened
    for dataset in opened:
        dataset.close()


def test_batches_are_the_samples_of_the_order(datasets: list[LeRobotDataset]) -> None:
    with DemonstrationStream([Source(datasets[0])], samples=10, horizon=3, seed=4, workers=3) as stream:
        for number in range(5):
            frames = sample_indices(sum(LENGTHS), number * 10, 10, 4)
            batch, wanted = stream.batch(number), datasets[0].sample(frames, 3)
            np.testing.assert_array_equal(batch["images"]["top"][:, 0, 0, 0], frames)
            np.testing.assert_array_equal(batch["images"]["wrist"][:, -1, -1, 2], 255 - frames)
            for key in ("proprioception", "action", "action_is_pad"):
                np.testing.assert_array_equal(batch[key], wanted[key])
                assert batch[key].dtype == wanted[key].dtype
            assert batch["instructions"] == wanted["instructions"]
            assert "return" not in batch


@pytest.mark.parametrize("numbers", [[3, 4, 5], [2, 0, 7, 7, 1]])
def test_a_stream_begun_anywhere_goes_on_with_the_same_batches(
    datasets: list[LeRobotDataset], numbers: list[int]
) -> None:
    """A resumed workload continues the order; a batch asked for twice is the same again."""
    sources = [Source(datasets[0], 1.0), Source(datasets[1], 3.0)]
    with DemonstrationStream(sources, samples=7, horizon=1, seed=1, ahead=2) as whole:
        expected = [whole.batch(number)["proprioception"] for number in range(8)]
    with DemonstrationStream(sources, samples=7, horizon=1, seed=1, ahead=0, workers=1) as resumed:
        for number in numbers:
            np.testing.assert_array_equal(resumed.batch(number)["proprioception"], expected[number])


def test_a_mixture_takes_each_datasets_own_order(datasets: list[LeRobotDataset]) -> None:
    sources = [Source(datasets[0], 1.0), Source(datasets[1], 3.0)]
    chosen, positions = Mixture((1.0, 3.0), 2).at(0, 40)
    with DemonstrationStream(sources, samples=40, horizon=2, seed=2) as stream:
        batch = stream.batch(0)
    for row, (source, position) in enumerate(zip(chosen.tolist(), positions.tolist(), strict=True)):
        frame = int(sample_indices(sum(LENGTHS), position, 1, 2)[0])
        shown = frame + 100 * source
        assert batch["images"]["top"][row, 0, 0, 0] == shown
        assert batch["images"]["wrist"][row, 0, 0, 0] == 255 - shown
        assert batch["proprioception"][row].tolist() == [shown, -shown]
        assert batch["instructions"][row] == datasets[source].sample([frame], 1)["instructions"][0]
    assert (chosen == 1).sum() > (chosen == 0).sum() > 0


def test_returns_come_with_gamma(datasets: list[LeRobotDataset]) -> None:
    """Rewards of 1: with gamma 1 the return is the frames that are left of the episode."""
    left = np.concatenate([np.arange(length, 0, -1) for length in LENGTHS])
    with DemonstrationStream([Source(datasets[0])], samples=24, horizon=1, seed=0, gamma=1.0) as stream:
        batch = stream.batch(0)
    np.testing.assert_array_equal(batch["return"], left[batch["action"][:, 0, 0].astype(int)])
    with pytest.raises(DataFault, match=r"next\.reward"):
        DemonstrationStream([Source(datasets[1])], samples=1, horizon=1, seed=0, gamma=1.0)


def test_a_dataset_larger_than_what_is_kept_is_shuffled_by_windows(roots: tuple[Path, Path]) -> None:
    """Kept may be half of the encoded pictures, that is 12 frames: no row group is read twice in an epoch."""
    whole = LeRobotDataset(roots[0])
    small = LeRobotDataset(roots[0], cache_bytes=whole.encoded_bytes // 2)
    order = order_of(small, seed=0)
    assert order.window == sum(LENGTHS) * small.cache_bytes // small.encoded_bytes in (11, 12)
    assert order_of(whole, seed=0).window >= sum(LENGTHS)
    with DemonstrationStream([Source(small)], samples=6, horizon=1, seed=0) as stream:
        shown = np.concatenate([stream.batch(i)["images"]["top"][:, 0, 0, 0] for i in range(4)])
    np.testing.assert_array_equal(shown, order.at(0, 24))
    assert sorted(shown.tolist()) == list(range(24))


def test_what_cannot_be_read_fails_its_own_batch(tmp_path: Path) -> None:
    root = write(tmp_path / "a", 0)
    dataset = LeRobotDataset(root)
    data = next((root / "data").glob("*/*.parquet"))
    content = data.read_bytes()
    with DemonstrationStream([Source(dataset)], samples=4, horizon=1, seed=0, ahead=0) as stream:
        data.write_bytes(content[: len(content) // 4])
        with pytest.raises(DataFault, match="dataset a"):
            stream.batch(0)
        data.write_bytes(content)
        assert len(stream.batch(0)["action"]) == 4


def test_datasets_that_show_something_else_are_refused(datasets: list[LeRobotDataset], tmp_path: Path) -> None:
    other = LeRobotDataset(write(tmp_path / "other", 0, size=(8, 16)))
    with pytest.raises(SpecError, match=r"dataset other.*those of a"):
        DemonstrationStream([Source(datasets[0]), Source(other)], samples=1, horizon=1, seed=0)
    with pytest.raises(SpecError, match="datasets"):
        DemonstrationStream([], samples=1, horizon=1, seed=0)


@pytest.mark.parametrize(("field", "value"), [("samples", 0), ("workers", 0), ("ahead", -1)])
def test_numbers_out_of_range_are_refused(datasets: list[LeRobotDataset], field: str, value: int) -> None:
    settings = {"samples": 1, "horizon": 1, "seed": 0, field: value}
    with pytest.raises(SpecError, match=field):
        DemonstrationStream([Source(datasets[0])], **settings)  # type: ignore[arg-type]


_READ_AN_EPOCH = """
import sys
from pathlib import Path
import psutil
from storage.demonstration_stream import DemonstrationStream, Source
from storage.demonstrations import LeRobotDataset

dataset = LeRobotDataset(Path(sys.argv[1]), cache_bytes=int(sys.argv[2]))
with DemonstrationStream([Source(dataset)], samples=16, horizon=1, seed=0, ahead=2) as stream:
    stream.batch(0)
    process, most = psutil.Process(), 0
    before = process.memory_info().rss
    for number in range(1, len(dataset) // 16):
        stream.batch(number)
        most = max(most, process.memory_info().rss)
print(dataset.encoded_bytes, most - before)
"""


def test_memory_is_bounded_on_a_dataset_that_is_larger(tmp_path: Path) -> None:
    """An epoch over 94 MB of pictures of which 8 MB may be kept: a process grows by far less than the dataset."""
    rng = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "d", fps=10, cameras={"top": (160, 160)}, state_width=1, action_width=1) as writer:
        for _ in range(24):
            noise = rng.integers(0, 256, (50, 160, 160, 3), dtype=np.uint8)  # does not compress
            vectors = np.zeros((50, 1), np.float32)
            writer.add_episode({"top": noise}, vectors, vectors, "go")
    kept = 8 << 20
    command = [sys.executable, "-c", _READ_AN_EPOCH, str(tmp_path / "d"), str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    encoded, grown = map(int, done.stdout.split())
    assert encoded > 90e6
    print(f"{encoded / 1e6:.0f} MB read, grown by {grown / 1e6:.1f} MB")
    assert grown < encoded / 2  # what is kept, batches, and what the allocator does not give back
