"""RGB video files: written frame by frame, read by integer frame index. PyAV (FFmpeg's libraries) does the coding.

Frames are addressed by their rank in order of presentation, never by a float timestamp: a float32 second drifts by more
than a frame's tolerance in a long file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import av.error
import numpy as np
from av.video.frame import PictureType
from numpy.typing import NDArray

from configs.errors import DataFault, SpecError, refusal

os.environ.setdefault("SVT_LOG", "1")  # errors; else the AV1 encoder writes a page a file to standard error
CODECS = {
    "libsvtav1": {"crf": "30", "preset": "10", "svtav1-params": "lp=1"},
    "libx264": {"crf": "20", "preset": "veryfast"},
}
"""{encoder: its options}. AV1 is what LeRobot's own writer makes; H.264 is what every browser and player opens."""


_STREAMS = {"libsvtav1": "av1", "libx264": "h264"}  # what each encoder makes


def described(codec: str, fps: int) -> dict[str, Any]:
    """What LeRobot's info.json says of such a video beside its size (0.4.4, `get_video_info`).

    Raises:
        SpecError: an encoder that is not one of `CODECS`.
    """
    _refuse_codec(codec)
    return {
        "video.codec": _STREAMS[codec],
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def _refuse_codec(codec: str) -> None:
    if codec not in CODECS:
        raise SpecError(refusal("video codec", codec, ", ".join(CODECS), "name one of them"))


class VideoWriter:
    """Writes one file; use it in a `with` block.

    What is written appears under the path at once: write below a folder that is made visible as a whole.
    """

    def __init__(
        self, path: Path, *, fps: int, height: int, width: int, codec: str = "libx264", keyframe_every: int = 2
    ) -> None:
        """Open the file.

        Args:
            path: ends in `.mp4`; must not exist.
            fps: frames a second.
            height: in pixels, even (chroma is kept at half the resolution).
            width: in pixels, even.
            codec: one of `CODECS`.
            keyframe_every: frames from one that decodes by itself to the next; 2 as LeRobot's, for random access.

        Raises:
            SpecError: a size, rate or codec that cannot be written.
        """
        _refuse_codec(codec)
        if height < 2 or width < 2 or height % 2 or width % 2:
            raise SpecError(
                refusal("video size", f"{height} × {width}", "even numbers of pixels", "resize, or write images")
            )
        if fps < 1 or keyframe_every < 1:
            raise SpecError(refusal("fps, keyframe_every", (fps, keyframe_every), "1 or more each", "correct them"))
        self._shape = (height, width, 3)
        self._time_base = Fraction(1, fps)
        self._keyframe_every = keyframe_every
        self.frames = 0
        self._container: Any = av.open(str(path), "w", options={"movflags": "faststart"})
        stream: Any = self._container.add_stream(codec, rate=fps, options={**CODECS[codec], "g": str(keyframe_every)})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.thread_count = 1
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Append frames uint8 [T, h, w, 3]; the first decodes by itself.

        Raises:
            SpecError: another shape or dtype.
        """
        if frames.dtype != np.uint8 or frames.shape[1:] != self._shape:
            given = f"{frames.dtype} {list(frames.shape)}"
            raise SpecError(refusal("video frames", given, f"uint8 [T, {self._shape[0]}, {self._shape[1]}, 3]", "fix"))
        for i, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = self.frames
            frame.time_base = self._time_base
            # An episode that begins on a keyframe is read without the one before it.
            frame.pict_type = PictureType.I if i % self._keyframe_every == 0 else PictureType.NONE
            for packet in self._stream.encode(frame):
                self._container.mux(packet)
            self.frames += 1

    def close(self) -> None:
        """Write what the encoder still holds, and the file's index."""
        if self._container is None:
            return
        container, self._container = self._container, None
        try:
            for packet in self._stream.encode(None):
                container.mux(packet)
        finally:
            container.close()


class DecoderPool:
    """Open readers of any number of files, bounded in all. Thread-safe: a reader is one thread's while it is lent.

    Who asks while all are lent waits; who holds one must not ask for another.
    """

    def __init__(self, limit: int) -> None:
        """At most `limit` files are open at one time."""
        if limit < 1:
            raise SpecError(refusal("decoders", limit, "1 or more", "allow one at least"))
        self._limit = limit
        self._open = 0  # idle and lent
        self._idle: list[VideoReader] = []  # least recently used first
        self._changed = threading.Condition()

    @contextmanager
    def reader(self, path: Path) -> Iterator[VideoReader]:
        """A reader of `path` for the block's time.

        Raises:
            DataFault: the file cannot be read.
        """
        found, closing = None, None
        with self._changed:
            while found is None:
                if (i := next((i for i, r in enumerate(self._idle) if r.path == path), None)) is not None:
                    found = self._idle.pop(i)
                elif self._open < self._limit or self._idle:
                    closing = self._idle.pop(0) if self._open >= self._limit else None
                    self._open += closing is None
                    break
                else:
                    self._changed.wait()
        try:
            if closing is not None:
                closing.close()
            lent = VideoReader(path) if found is None else found
        except BaseException:
            self._give_back(None)
            raise
        try:
            yield lent
        except BaseException:
            lent.close()
            self._give_back(None)
            raise
        self._give_back(lent)

    def close(self) -> None:
        """Close what is not lent."""
        with self._changed:
            for reader in self._idle:
                reader.close()
            self._open -= len(self._idle)
            self._idle.clear()
            self._changed.notify_all()

    def _give_back(self, reader: VideoReader | None) -> None:
        with self._changed:
            if reader is None:
                self._open -= 1
            else:
                self._idle.append(reader)
            self._changed.notify()


class VideoReader:
    """Random access to one file's frames. Not thread-safe: one reader a thread."""

    def __init__(self, path: Path) -> None:
        """Open the file and index its packets, which decodes nothing.

        Raises:
            DataFault: it cannot be opened, or holds no video.
        """
        self.path = Path(path)
        with ExitStack() as opened:  # what fails in here leaves no file open
            try:
                # No other format: a playlist would have files read that lie elsewhere.
                self._container: Any = opened.enter_context(av.open(str(path), format="mov"))
                if not self._container.streams.video:
                    raise DataFault(refusal(f"video {self.path.name}", "no video stream", "one", "copy it anew"))
                self._stream = self._container.streams.video[0]
                self._stream.codec_context.thread_count = 1
                packets = [(p.pts, p.is_keyframe) for p in self._container.demux(self._stream) if p.pts is not None]
            except (av.error.FFmpegError, OSError, AttributeError) as error:  # the last: a stream without a decoder
                raise DataFault(f"video {self.path.name}: it cannot be read ({error}); copy it anew") from error
            packets.sort()
            self._pts = np.array([pts for pts, _ in packets], np.int64)  # of each frame, in order of presentation
            keys = np.array([i for i, (_, key) in enumerate(packets) if key], np.int64)
            if not len(keys):
                raise DataFault(refusal(f"video {self.path.name}", "no keyframe", "one or more", "copy it anew"))
            # Frame from which decoding has to begin, for each frame.
            self._begin = keys[np.maximum(np.searchsorted(keys, np.arange(len(packets)), side="right") - 1, 0)]
            opened.pop_all()
        self._decoder: Any = None
        self._next = -1  # index of the frame that the decoder gives next

    def __len__(self) -> int:
        """Frames."""
        return len(self._pts)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self._stream.height, self._stream.width

    @property
    def fps(self) -> Fraction | None:
        """Frames a second, as the file says."""
        return self._stream.average_rate

    def read(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """Frames uint8 [n, h, w, 3] by index, in any order and repeated as wished; each is decoded once.

        Raises:
            SpecError: an index out of range.
            DataFault: the file is torn.
        """
        wanted = np.asarray(indices, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise SpecError(
                refusal(f"frames of video {self.path.name}", wanted.tolist()[:8], f"0 to {len(self) - 1}", "correct")
            )
        found = np.empty((len(wanted), *self.size, 3), np.uint8)
        for index in np.unique(wanted):
            found[wanted == index] = self._frame(int(index))
        return found

    def close(self) -> None:
        """Close the file."""
        self._decoder = None
        self._container.close()

    def _frame(self, index: int) -> NDArray[np.uint8]:
        begin = int(self._begin[index])
        try:
            # Going on is cheaper than to seek, where no keyframe lies between.
            if self._decoder is None or not begin <= self._next <= index:
                self._container.seek(int(self._pts[begin]), stream=self._stream, backward=True)
                self._decoder = self._container.decode(self._stream)
            for frame in self._decoder:
                rank = int(np.searchsorted(self._pts, frame.pts))
                self._next = rank + 1
                if rank >= index:
                    if rank != index:
                        break
                    return frame.to_ndarray(format="rgb24")
        except av.error.FFmpegError as error:
            self._decoder = None
            raise DataFault(f"video {self.path.name}: frame {index} cannot be decoded ({error})") from error
        self._decoder = None
        raise DataFault(f"video {self.path.name}: frame {index} is missing; copy it anew")
