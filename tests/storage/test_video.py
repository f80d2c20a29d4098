"""Video files: each frame comes back as itself, whatever the order it is asked for in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import DataFault, SpecError
from storage.video import CODECS, VideoReader, VideoWriter

FRAMES = 23


def numbered(count: int, height: int = 32, width: int = 64) -> np.ndarray:
    """Frames that show their number in five bars, bright for 1; and so survive a lossy coder."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    for i in range(count):
        for bit in range(5):
            frames[i, :, bit * 12 : bit * 12 + 12] = 230 if i >> bit & 1 else 20
    return frames


def number(frame: np.ndarray) -> int:
    return sum(int(frame[:, bit * 12 + 3 : bit * 12 + 9].mean() > 125) << bit for bit in range(5))


@pytest.fixture(scope="module", params=sorted(CODECS))
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    with VideoWriter(path, fps=10, height=32, width=64, codec=request.param, keyframe_every=4) as writer:
        frames = numbered(FRAMES)
        writer.add(frames[:9])  # the second part begins on a keyframe of its own
        writer.add(frames[9:])
        assert writer.frames == FRAMES
    return path


def test_frames_in_order(video: Path) -> None:
    reader = VideoReader(video)
    assert len(reader) == FRAMES
    assert reader.size == (32, 64)
    assert reader.fps == 10
    found = reader.read(np.arange(FRAMES))
    assert [number(frame) for frame in found] == list(range(FRAMES))
    assert np.abs(found.astype(int) - numbered(FRAMES)).mean() < 4


@settings(max_examples=25, deadline=None)
@given(indices=st.lists(st.integers(0, FRAMES - 1), max_size=8), calls=st.integers(1, 3))
def test_frames_in_any_order(video: Path, indices: list[int], calls: int) -> None:
    reader = VideoReader(video)
    for _ in range(calls):
        found = reader.read(np.array(indices, np.int64))
        assert [number(frame) for frame in found] == indices
    reader.close()


def test_an_index_out_of_range_is_refused(video: Path) -> None:
    with pytest.raises(SpecError, match="0 to 22"):
        VideoReader(video).read(np.array([23]))
    with pytest.raises(SpecError, match="0 to 22"):
        VideoReader(video).read(np.array([-1]))


def test_a_torn_file_is_refused(video: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.mp4"
    torn.write_bytes(video.read_bytes()[:200])
    with pytest.raises(DataFault, match=r"torn\.mp4"):
        VideoReader(torn)
    with pytest.raises(DataFault, match=r"none\.mp4"):
        VideoReader(tmp_path / "none.mp4")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"height": 33}, "33 × 64"),
        ({"codec": "mjpeg"}, "libsvtav1, libx264"),
        ({"fps": 0}, "fps"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        VideoWriter(tmp_path / "a.mp4", **{"fps": 10, "height": 32, "width": 64, **changed})  # type: ignore[arg-type]
    assert not (tmp_path / "a.mp4").exists()


def test_frames_of_another_size_are_refused(tmp_path: Path) -> None:
    with (
        VideoWriter(tmp_path / "a.mp4", fps=10, height=32, width=64) as writer,
        pytest.raises(SpecError, match=r"uint8 \[T, 32, 64, 3\]"),
    ):
        writer.add(numbered(2, 64, 64))
