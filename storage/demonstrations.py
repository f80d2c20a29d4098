"""Demonstrations on disk in the LeRobot format (`storage.lerobot_format`), pictures in the data files or as videos.

`LeRobotWriter` makes a dataset that appears whole or not at all; `LeRobotDataset` reads it, frames addressed by integer
index (float32 timestamps drift), as samples a policy can learn from.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from configs.errors import SpecError, TenantFault, refusal
from configs.spec import checked_name
from storage import lerobot_format as layout
from storage.atomic import new_folder, write_synced
from storage.lerobot_dataset import LeRobotDataset
from storage.lerobot_layouts import LAYOUTS, NEWEST
from storage.lerobot_statistics import ImageStats, vector_stats
from storage.video import VideoWriter, described

__all__ = ["LeRobotDataset", "LeRobotWriter"]


class LeRobotWriter:
    """Writes a new dataset folder, episode by episode; use it in a `with` block, whose clean end makes it visible.

    An exception in the block, or a kill, leaves nothing under the folder's name.
    """

    def __init__(
        self,
        root: Path,
        *,
        fps: int,
        cameras: Mapping[str, tuple[int, int]],
        state_width: int,
        action_width: int,
        robot_type: str | None = None,
        state_names: Sequence[str] | None = None,
        action_names: Sequence[str] | None = None,
        provenance: Mapping[str, Any] | None = None,
        file_size_mb: int = 100,
        rewards: bool = False,
        version: str = NEWEST,
        video_codec: str | None = None,
        video_file_size_mb: int = 200,
    ) -> None:
        """Describe the dataset; nothing is written before the block begins.

        Args:
            root: The dataset's folder, which must not exist.
            fps: Frames a second; timestamps are frame_index / fps.
            cameras: {name: (height, width)} of RGB cameras.
            state_width: S, width of proprioception.
            action_width: A, width of one action, in environment units.
            robot_type: What the robot is called.
            state_names: A name each state dimension.
            action_names: A name each action dimension.
            provenance: JSON on where the demonstrations come from (environment, seeds, noise), kept beside them.
            file_size_mb: A data file that has grown past this is followed by a new one (v3.0; in v2.1 an episode is).
            rewards: Every episode has the reward of each action.
            version: Of the format, one of `LAYOUTS`.
            video_codec: Write pictures as mp4, one file or more a camera, with this encoder (`storage.video.CODECS`);
                None: as PNG inside the data files, to the bit.
            video_file_size_mb: As `file_size_mb`, of a camera's video files.

        Raises:
            SpecError: a version, codec, rate or size that cannot be written.
        """
        if fps < 1:
            raise SpecError(refusal("fps", fps, "1 or more", "give frames a second"))
        if not cameras:
            raise SpecError(refusal("cameras", dict(cameras), "one camera or more", "name the cameras"))
        if version not in LAYOUTS:
            raise SpecError(refusal("version of the LeRobot format", version, ", ".join(LAYOUTS), "choose one"))
        self._root = Path(root)
        self._fps = fps
        self._cameras = {checked_name(name): (int(h), int(w)) for name, (h, w) in cameras.items()}
        self._widths = {layout.STATE: state_width, layout.ACTION: action_width}
        self._robot_type = robot_type
        self._provenance = dict(provenance or {})
        self._layout = LAYOUTS[version]
        self._codec = video_codec
        video = None if video_codec is None else described(video_codec, fps)
        self._features = layout.features(
            self._cameras, state_width, action_width, state_names, action_names, rewards, video
        )
        self._rewards = rewards
        self._schema = layout.data_schema(self._features)
        self._file_size_mb, self._video_file_size_mb = file_size_mb, video_file_size_mb
        self._tasks: dict[str, int] = {}  # {instruction: task_index}
        self._episodes: list[layout.WrittenEpisode] = []
        vectors = (*self._widths, *([layout.REWARD] if rewards else []), *layout.INDEX_FEATURES)
        self._vectors: dict[str, list[NDArray[Any]]] = {key: [] for key in vectors}
        self._images = {name: ImageStats() for name in self._cameras}
        self._frames = 0
        self._file = 0
        self._file_bytes = 0
        self._parquet: pq.ParquetWriter | None = None
        self._videos: dict[str, _RotatedVideo] = {}
        self._broken: BaseException | None = None
        self._stack = ExitStack()
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        """Begin; refuses a folder that exists (Conflict)."""
        self._folder = self._stack.enter_context(new_folder(self._root, "dataset"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the metadata and make the dataset visible, or remove all of it after an error."""
        try:
            if self._parquet is not None:
                self._parquet.close()
            for video in self._videos.values():
                video.close()
            if kind is None:
                self._finish()
        except BaseException as failure:
            self._stack.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._stack.__exit__(kind, error, traceback)

    @property
    def episodes(self) -> int:
        """Episodes added so far."""
        return len(self._episodes)

    def add_episode(
        self,
        images: Mapping[str, NDArray[np.uint8]],
        state: NDArray[np.float32],
        action: NDArray[np.float32],
        task: str,
        reward: NDArray[np.float32] | None = None,
    ) -> None:
        """Append one episode of T ≥ 1 frames.

        Args:
            images: {camera: uint8 [T, h, w, 3]}, each declared camera once.
            state: Proprioception [T, S]; row t is what the robot was when action t was chosen.
            action: [T, A], environment units.
            task: The instruction.
            reward: [T], of each action, where the dataset was declared to have rewards; else None.

        Raises:
            TenantFault: a camera, shape, dtype or value that does not fit; nothing of the episode is written.
        """
        if self._folder is None:
            raise SpecError("writer: not open; possible: inside its with block; write `with LeRobotWriter(...) as w`")
        if self._broken is not None:
            raise SpecError(
                "writer: an episode was not written whole; nothing more can be added; write the dataset anew"
            )
        length = self._checked_length(images, state, action, task, reward)
        episode, start = len(self._episodes), self._frames
        task_index = self._tasks.setdefault(task, len(self._tasks))
        frame_index = np.arange(length, dtype=np.int64)
        columns: dict[str, NDArray[Any]] = {
            layout.STATE: np.asarray(state, np.float32),
            layout.ACTION: np.asarray(action, np.float32),
            **({} if reward is None else {layout.REWARD: np.asarray(reward, np.float32)}),
            "timestamp": (frame_index / self._fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full(length, episode, np.int64),
            "index": start + frame_index,
            "task_index": np.full(length, task_index, np.int64),
        }
        stats = {key: vector_stats(values, self._layout.quantiles) for key, values in columns.items()}
        try:
            self._write_frames(images, columns)
            videos = self._write_videos(images, episode)
        except BaseException as failure:  # part of the episode may be on the disk, and the next one would follow it
            self._broken = failure
            raise
        for name, frames in images.items():
            of_episode = ImageStats()
            of_episode.add(frames)
            stats[layout.IMAGE_PREFIX + name] = of_episode.result(self._layout.quantiles)
            self._images[name].merge(of_episode)
        for key, values in columns.items():
            self._vectors[key].append(values)
        self._frames += length
        self._episodes.append(
            layout.WrittenEpisode(
                index=episode,
                start=start,
                length=length,
                task=task,
                data_file=self._file,
                videos=videos,
                stats=stats,
            )
        )

    def _write_frames(self, images: Mapping[str, NDArray[np.uint8]], columns: Mapping[str, NDArray[Any]]) -> None:
        full = self._layout.file_an_episode or self._file_bytes >= self._file_size_mb << 20
        if self._parquet is not None and full:
            self._parquet.close()
            self._parquet, self._file, self._file_bytes = None, self._file + 1, 0
        arrays = []
        for field in self._schema:
            camera = field.name.removeprefix(layout.IMAGE_PREFIX)
            if camera in self._cameras and camera != field.name:  # a video's column is not in the schema
                frames = [
                    {"bytes": _png(frame), "path": f"frame-{i:06d}.png"} for i, frame in enumerate(images[camera])
                ]
                self._file_bytes += sum(len(frame["bytes"]) for frame in frames)
                arrays.append(pa.array(frames, type=field.type))
                continue
            values = columns[field.name]
            self._file_bytes += values.nbytes
            if pa.types.is_fixed_size_list(field.type):
                arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=field.type))
            else:
                arrays.append(pa.array(values.reshape(-1), type=field.type))
        if self._parquet is None:
            path = self._path(self._layout.data_file(self._file))
            self._parquet = pq.ParquetWriter(path, self._schema, compression="snappy")
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def _write_videos(self, images: Mapping[str, NDArray[np.uint8]], episode: int) -> dict[str, tuple[int, int]]:
        """{video key: (file, frame of it that the episode begins with)}."""
        if self._codec is None:
            return {}
        found = {}
        for name, (height, width) in self._cameras.items():
            key = layout.IMAGE_PREFIX + name
            if key not in self._videos:
                self._videos[key] = _RotatedVideo(
                    lambda number, key=key: self._path(self._layout.video_file(key, number)),  # type: ignore[misc]
                    bound=0 if self._layout.file_an_episode else self._video_file_size_mb << 20,
                    options={"fps": self._fps, "height": height, "width": width, "codec": self._codec},
                )
            found[key] = self._videos[key].add(images[name])
        return found

    def _finish(self) -> None:
        if self._broken is not None:
            raise SpecError("writer: an episode was not written whole; nothing of the dataset is kept; write it anew")
        if not self._episodes:
            raise SpecError(
                refusal("episodes", 0, "1 or more", "add an episode, a dataset without one teaches nothing")
            )
        quantiles = self._layout.quantiles
        stats = {key: vector_stats(np.concatenate(parts), quantiles) for key, parts in self._vectors.items()}
        stats.update({layout.IMAGE_PREFIX + name: found.result(quantiles) for name, found in self._images.items()})
        files = self._layout.metadata(
            layout.Written(
                features=self._features,
                fps=self._fps,
                robot_type=self._robot_type,
                tasks=list(self._tasks),
                episodes=self._episodes,
                frames=self._frames,
                stats=stats,
                data_file_mb=self._file_size_mb,
                video_file_mb=self._video_file_size_mb,
            )
        )
        if self._provenance:
            files[layout.PROVENANCE] = layout.json_bytes(self._provenance)
        for name, content in files.items():
            write_synced(self._path(name), content)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _checked_length(self, images: Mapping[str, Any], state: Any, action: Any, task: str, reward: Any) -> int:
        where = f"episode {len(self._episodes)}"
        if sorted(images) != sorted(self._cameras):
            possible = ", ".join(self._cameras)
            raise TenantFault(refusal(f"{where}: cameras", sorted(images), possible, "give each declared camera once"))
        if not task:
            raise TenantFault(refusal(f"{where}: task", task, "an instruction in words", "say what the robot is told"))
        if (reward is not None) != self._rewards:
            given, possible = "none" if reward is None else "some", "some" if self._rewards else "none"
            raise TenantFault(refusal(f"{where}: reward", given, possible, "declare rewards for all episodes or none"))
        length = len(action)
        wanted: dict[str, tuple[Any, tuple[int, ...], str]] = {
            "state": (state, (length, self._widths[layout.STATE]), "f"),
            "action": (action, (length, self._widths[layout.ACTION]), "f"),
            **({} if reward is None else {"reward": (reward, (length,), "f")}),
            **{f"image of camera {n}": (images[n], (length, h, w, 3), "u") for n, (h, w) in self._cameras.items()},
        }
        for name, (values, shape, kind) in wanted.items():
            array = np.asarray(values)
            if (
                array.shape != shape
                or array.dtype.kind != kind
                or (kind == "u" and array.dtype != np.uint8)
                or not length
            ):
                possible = f"{'float32' if kind == 'f' else 'uint8'} {list(shape)} with one frame or more"
                raise TenantFault(
                    refusal(
                        f"{where}: {name}", f"{array.dtype} {list(array.shape)}", possible, "convert it or declare it"
                    )
                )
            # As it is stored: a number too large for that would fail when all episodes are there.
            finite = np.isfinite(array.astype(np.float32)).reshape(length, -1).all(axis=1) if kind == "f" else None
            if finite is not None and not finite.all():
                row = int(np.argmin(finite))
                raise TenantFault(refusal(f"{where}: {name}", f"no number in frame {row}", "finite values", "drop it"))
        return length


class _RotatedVideo:
    """One camera's video files, each followed by a new one when it has grown past `bound` bytes (0: each episode)."""

    def __init__(self, path: Callable[[int], Path], *, bound: int, options: Mapping[str, Any]) -> None:
        self._path_of = path
        self._bound = bound
        self._options = options
        self._number = -1
        self._path: Path | None = None
        self._writer: VideoWriter | None = None

    def add(self, frames: NDArray[np.uint8]) -> tuple[int, int]:
        """Write one episode; the file's number and the index in it of the episode's first frame."""
        if self._writer is None or self._grown():
            self.close()
            self._number += 1
            self._path = self._path_of(self._number)
            self._writer = VideoWriter(self._path, **self._options)
        first = self._writer.frames
        self._writer.add(frames)
        return self._number, first

    def _grown(self) -> bool:
        if self._bound == 0 or self._path is None:
            return True
        # An encoder looks ahead: while it holds all frames, there is no file yet.
        return self._path.exists() and self._path.stat().st_size >= self._bound

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _png(frame: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    # Lossless at any level; 1 costs a third of the default's time for a few per cent of size on rendered pictures.
    Image.fromarray(frame).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
