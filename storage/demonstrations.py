"""Demonstrations on disk in the LeRobot v3.0 layout (`storage.lerobot_format`), pictures inside the parquet files.

`LeRobotWriter` makes a dataset that appears whole or not at all; `LeRobotDataset` reads it, frames addressed by integer
index (float32 timestamps drift), as samples a policy can learn from.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from configs.errors import SpecError, TenantFault, refusal
from configs.spec import checked_name
from storage import lerobot_format as layout
from storage.atomic import new_folder, write_synced
from storage.lerobot_dataset import LeRobotDataset

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
            file_size_mb: A data file that has grown past this is followed by a new one.
            rewards: Every episode has the reward of each action.
        """
        if fps < 1:
            raise SpecError(refusal("fps", fps, "1 or more", "give frames a second"))
        if not cameras:
            raise SpecError(refusal("cameras", dict(cameras), "one camera or more", "name the cameras"))
        self._root = Path(root)
        self._fps = fps
        self._cameras = {checked_name(name): (int(h), int(w)) for name, (h, w) in cameras.items()}
        self._widths = {layout.STATE: state_width, layout.ACTION: action_width}
        self._robot_type = robot_type
        self._provenance = dict(provenance or {})
        self._features = layout.features(self._cameras, state_width, action_width, state_names, action_names, rewards)
        self._rewards = rewards
        self._schema = layout.data_schema(self._features)
        self._file_size_mb = file_size_mb
        self._tasks: dict[str, int] = {}  # {instruction: task_index}
        self._episodes: list[dict[str, Any]] = []
        vectors = (*self._widths, *([layout.REWARD] if rewards else []), *layout.INDEX_FEATURES)
        self._vectors: dict[str, list[NDArray[Any]]] = {key: [] for key in vectors}
        self._images = {name: layout.ImageStats() for name in self._cameras}
        self._frames = 0
        self._file = 0
        self._file_bytes = 0
        self._parquet: pq.ParquetWriter | None = None
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
        self._write_frames(images, columns)
        stats = {key: layout.vector_stats(values) for key, values in columns.items()}
        for name, frames in images.items():
            of_episode = layout.ImageStats()
            of_episode.add(frames)
            stats[layout.IMAGE_PREFIX + name] = of_episode.result()
            self._images[name].add(frames)
        for key, values in columns.items():
            self._vectors[key].append(values)
        self._frames += length
        self._episodes.append(
            {
                "episode_index": episode,
                "tasks": [task],
                "length": length,
                "data/chunk_index": self._file // layout.FILES_PER_CHUNK,
                "data/file_index": self._file % layout.FILES_PER_CHUNK,
                "dataset_from_index": start,
                "dataset_to_index": start + length,
                **{f"stats/{key}/{stat}": value for key, all_of in stats.items() for stat, value in all_of.items()},
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )

    def _write_frames(self, images: Mapping[str, NDArray[np.uint8]], columns: Mapping[str, NDArray[Any]]) -> None:
        if self._parquet is not None and self._file_bytes >= self._file_size_mb << 20:
            self._parquet.close()
            self._parquet, self._file, self._file_bytes = None, self._file + 1, 0
        arrays = []
        for field in self._schema:
            camera = field.name.removeprefix(layout.IMAGE_PREFIX)
            if camera in self._cameras and camera != field.name:
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
            path = self._path(
                layout.DATA.format(
                    chunk_index=self._file // layout.FILES_PER_CHUNK, file_index=self._file % layout.FILES_PER_CHUNK
                )
            )
            self._parquet = pq.ParquetWriter(path, self._schema, compression="snappy")
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def _finish(self) -> None:
        if not self._episodes:
            raise SpecError(
                refusal("episodes", 0, "1 or more", "add an episode, a dataset without one teaches nothing")
            )
        stats = {key: layout.vector_stats(np.concatenate(parts)) for key, parts in self._vectors.items()}
        stats.update({layout.IMAGE_PREFIX + name: found.result() for name, found in self._images.items()})
        described = layout.info(
            self._features,
            fps=self._fps,
            robot_type=self._robot_type,
            episodes=len(self._episodes),
            frames=self._frames,
            tasks=len(self._tasks),
            file_size_mb=self._file_size_mb,
        )
        files = {layout.INFO: described, layout.STATS: stats}
        if self._provenance:
            files[layout.PROVENANCE] = self._provenance
        for name, content in files.items():
            write_synced(self._path(name), json.dumps(content, indent=4, allow_nan=False).encode())
        index = pd.Index(list(self._tasks), name="task")
        pd.DataFrame({"task_index": list(self._tasks.values())}, index=index).to_parquet(self._path(layout.TASKS))
        table = pa.Table.from_pylist(self._episodes)
        pq.write_table(table, self._path(layout.EPISODES.format(chunk_index=0, file_index=0)), compression="snappy")

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
            if kind == "f" and not np.isfinite(array).all():
                row = int(np.argmax(~np.isfinite(array).all(axis=1)))
                raise TenantFault(refusal(f"{where}: {name}", f"no number in frame {row}", "finite values", "drop it"))
        return length


def _png(frame: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    # Lossless at any level; 1 costs a third of the default's time for a few per cent of size on rendered pictures.
    Image.fromarray(frame).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
