"""Pictures of a LeRobot dataset by frame number, out of parquet files or videos, resized as declared.

Encoded columns and decoded frames are kept in one store of recently used entries, bounded in bytes; open videos are
bounded in number.
"""

from __future__ import annotations

import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from configs.errors import DataFault, refusal
from storage.lerobot_columns import Camera
from storage.lerobot_format import EpisodeRecord, torn
from storage.resizing import resized
from storage.video import DecoderPool


class RecentlyUsed:
    """Values by key, the least recently used dropped when their bytes grow past a bound. Thread-safe."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[Hashable]) -> list[Any]:
        """The value of each key, or None."""
        found = []
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    found.append(self._kept[key][0])
                else:
                    found.append(None)
        return found

    def put(self, values: dict[Hashable, tuple[Any, int]]) -> None:
        """Keep {key: (value, its bytes)}; what is larger than the bound by itself is not kept."""
        with self._lock:
            for key, (value, size) in values.items():
                if key in self._kept or size > self._bound:
                    continue
                self._kept[key] = (value, size)
                self._bytes += size
            while self._bytes > self._bound:
                self._bytes -= self._kept.popitem(last=False)[1][1]


_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_SIZE = slice(16, 24)


class Pictures:
    """Frames of one dataset's cameras. Thread-safe.

    Beyond the bound on what is kept, a call holds the frames that it gives back and one encoded row group of one
    column; several threads hold as much each.
    """

    def __init__(
        self,
        root: Path,
        episodes: Sequence[EpisodeRecord],
        row_groups: Sequence[tuple[str, int, int]],
        fps: float,
        *,
        cache_bytes: int,
        keeps_frames: bool,
        decoders: int,
    ) -> None:
        """Nothing is read before a frame is asked for.

        Args:
            root: the dataset's folder.
            episodes: in the order of their frames, without a gap.
            row_groups: (data file, row group, its first frame), ascending.
            fps: frames a second of the dataset; its videos must have the same.
            cache_bytes: bound on what is kept.
            keeps_frames: keep decoded frames. Where not all fit, an epoch would only drive the encoded row groups out.
            decoders: video files open at one time, at most.
        """
        self._root = root
        self._episodes = episodes
        self._starts = np.array([episode.start for episode in episodes], np.int64)
        self._row_groups = row_groups
        self._group_starts = np.array([start for _, _, start in row_groups], np.int64)
        self._fps = fps
        self._kept = RecentlyUsed(cache_bytes)
        self._keeps_frames = keeps_frames
        self._decoders = DecoderPool(decoders)

    def read(self, camera: Camera, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Frames uint8 [n, h, w, 3] of one camera, in its declared size, turned where that is declared.

        Raises:
            DataFault: a file is missing or torn, or its pictures are not what info.json says.
        """
        wanted, inverse = np.unique(rows, return_inverse=True)
        found = np.empty((len(wanted), *camera.size, 3), np.uint8)
        keys: list[Hashable] = [(camera.name, row) for row in wanted.tolist()]
        kept = self._kept.get(keys) if self._keeps_frames else [None] * len(wanted)
        for i, frame in enumerate(kept):
            if frame is not None:
                found[i] = frame
        missing = np.array([i for i, frame in enumerate(kept) if frame is None], np.int64)
        if len(missing):
            decoded = self._from_videos if camera.video else self._from_parquet
            new = decoded(camera, wanted[missing])
            if camera.turned:
                new = new[:, ::-1, ::-1]
            found[missing] = new
            if self._keeps_frames:
                self._kept.put({keys[i]: (f.copy(), f.nbytes) for i, f in zip(missing, new, strict=True)})
        return found[inverse]

    def close(self) -> None:
        """Close open videos."""
        self._decoders.close()

    def _from_parquet(self, camera: Camera, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        found = np.empty((len(rows), *camera.size, 3), np.uint8)
        groups = np.searchsorted(self._group_starts, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            column = self._encoded(camera, group)
            for i in np.flatnonzero(groups == group).tolist():
                stored = column[int(rows[i] - self._group_starts[group])].as_py()
                found[i] = resized(self._decoded(camera, stored, int(rows[i]))[None], camera.size)[0]
        return found

    def _decoded(self, camera: Camera, stored: bytes | None, row: int) -> NDArray[np.uint8]:
        if stored is None:
            raise torn(self._root, f"frame {row} of {camera.key} is not inside the data file")
        self._refuse_size(camera, self._size_of(camera, stored, row))  # before a small file fills memory
        try:
            # Other than Pillow's, this decoder lets go of Python's lock, so that threads decode side by side.
            picture: Any = cv2.imdecode(np.frombuffer(stored, np.uint8), cv2.IMREAD_COLOR_RGB)
        except cv2.error as error:
            raise torn(self._root, f"frame {row} of {camera.key} is no picture ({error.err})") from error
        if picture is None:
            raise torn(self._root, f"frame {row} of {camera.key} is no picture")
        return picture

    def _size_of(self, camera: Camera, stored: bytes, row: int) -> tuple[int, int]:
        """(height, width) of an encoded picture, as its header says."""
        if stored.startswith(_PNG) and len(stored) >= _PNG_SIZE.stop:
            width, height = struct.unpack(">II", stored[_PNG_SIZE])
            return height, width
        try:
            with Image.open(io.BytesIO(stored)) as header:
                return header.height, header.width
        except (OSError, ValueError) as error:
            raise torn(self._root, f"frame {row} of {camera.key} is no picture") from error

    def _encoded(self, camera: Camera, group: int) -> pa.ChunkedArray:
        """The encoded pictures of one row group, binary [rows]."""
        (column,) = self._kept.get([(camera.key, "encoded", group)])
        if column is None:
            name, row_group, _ = self._row_groups[group]
            (metadata,) = self._kept.get([(name, "footer")])
            try:
                file = pq.ParquetFile(self._root / name, metadata=metadata)
                structs = file.read_row_group(row_group, columns=[camera.key], use_threads=False).column(camera.key)
                column = pa.chunked_array([chunk.field("bytes") for chunk in structs.chunks], type=pa.binary())
            except (pa.ArrowException, OSError, KeyError) as error:
                raise torn(self._root, f"{name} cannot be read ({error})") from error
            new: dict[Hashable, tuple[Any, int]] = {(camera.key, "encoded", group): (column, column.nbytes)}
            if metadata is None:
                new[name, "footer"] = (file.metadata, file.metadata.serialized_size)
            self._kept.put(new)
        return column

    def _from_videos(self, camera: Camera, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        found = np.empty((len(rows), *camera.size, 3), np.uint8)
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        parts = [self._episodes[episode].videos[camera.key] for episode in of_row.tolist()]
        # Integers from here on: a float32 timestamp drifts by more than a frame's tolerance in a long file.
        firsts = np.array([round(part.from_timestamp * self._fps) for part in parts], np.int64)
        frames = firsts + rows - self._starts[of_row]
        paths = np.array([part.path for part in parts])
        for path in np.unique(paths).tolist():
            chosen = paths == path
            with self._decoders.reader(self._root / path) as reader:
                self._refuse_size(camera, reader.size)
                # Frames would be others than meant where the two rates drift apart by half a frame.
                if reader.fps is None or abs(float(reader.fps) / self._fps - 1) * len(reader) > 0.5:
                    raise DataFault(
                        refusal(
                            f"frames a second of {path} in dataset {self._root.name}",
                            None if reader.fps is None else float(reader.fps),
                            str(self._fps),
                            "encode it anew, or correct info.json",
                        )
                    )
                last = int(frames[chosen].max())
                if last >= len(reader):
                    raise torn(self._root, f"{path} has {len(reader)} frames and its episodes need {last + 1}")
                found[chosen] = resized(reader.read(frames[chosen]), camera.size)
        return found

    def _refuse_size(self, camera: Camera, size: tuple[int, int]) -> None:
        if size != camera.recorded:
            raise DataFault(
                refusal(
                    f"camera {camera.name} of dataset {self._root.name}",
                    [*size, 3],
                    str([*camera.recorded, 3]),
                    "its pictures must have the declared size",
                )
            )
