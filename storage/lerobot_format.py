"""What all versions of the LeRobot format have in common: features, columns and their schemas, and what a version's
own layout has to say (`Layout`). Each version has its file, `storage.lerobot_v21` and `storage.lerobot_v30`.

Source: huggingface/lerobot (lerobot/datasets/utils.py and lerobot_dataset.py of 0.3.2 for v2.1 and of 0.4.4 for v3.0).

    meta/info.json         codebase_version; shape, dtype and names of every feature, fps, path templates
    meta/joynexus.json     ours, optional: where the demonstrations come from

Pictures are PNG inside the data files (`dtype` "image") or frames of mp4 files (`dtype` "video").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import pyarrow as pa

from configs.errors import DataFault, refusal

INFO = "meta/info.json"
PROVENANCE = "meta/joynexus.json"

IMAGE_PREFIX = "observation.images."
STATE = "observation.state"
ACTION = "action"
REWARD = "next.reward"  # of the frame's action; LeRobot's name
PER_CHUNK = 1000  # files (v3.0) or episodes (v2.1) a chunk folder

# Columns every dataset has beside its own features.
INDEX_FEATURES: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}


@dataclass(frozen=True)
class VideoPart:
    """Where an episode's frames of one camera begin: in the file `path` (under the dataset), `from_timestamp` s in."""

    path: str
    from_timestamp: float


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode as a dataset describes it: frames `start` to `stop` − 1 of all, in the file `data`."""

    index: int
    start: int
    stop: int
    data: str
    videos: Mapping[str, VideoPart]  # {video key: where}


@dataclass(frozen=True)
class WrittenEpisode:
    """One episode as a writer knows it. Files are numbered from 0, a number a camera of its own."""

    index: int
    start: int
    length: int
    task: str
    data_file: int
    videos: Mapping[str, tuple[int, int]]  # {video key: (file, frame of it that is the episode's first)}
    stats: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Written:
    """A dataset as a writer knows it when its last frame is written."""

    features: Mapping[str, dict[str, Any]]
    fps: int
    robot_type: str | None
    tasks: Sequence[str]  # by task_index
    episodes: Sequence[WrittenEpisode]
    frames: int
    stats: Mapping[str, Mapping[str, Any]]
    data_file_mb: int
    video_file_mb: int

    @property
    def video_keys(self) -> list[str]:
        """Features whose pictures lie in mp4 files."""
        return [key for key, feature in self.features.items() if feature["dtype"] == "video"]


class Layout(Protocol):
    """One version of the format: how it names its files and what it writes under `meta/`."""

    version: str
    file_an_episode: bool  # else files are followed by new ones by size
    quantiles: bool  # whether statistics hold q01 to q99

    def data_file(self, number: int) -> str:
        """Path of data file `number` (the episode's index with a file an episode)."""

    def video_file(self, key: str, number: int) -> str:
        """Path of video file `number` of a camera (the episode's index with a file an episode)."""

    def metadata(self, written: Written) -> dict[str, bytes]:
        """Contents of all files under `meta/` that the format asks for, by path."""

    def tasks(self, root: Path) -> tuple[str, ...]:
        """Instructions by task_index. Raises DataFault."""

    def episodes(self, root: Path, info: Mapping[str, Any]) -> list[EpisodeRecord]:
        """Episodes by index, one after the other without a gap. Raises DataFault."""

    def statistics(self, root: Path, features: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """{feature: {min, max, mean, std, count, …}}; None where the dataset has none. Raises DataFault."""


def features(
    cameras: Mapping[str, tuple[int, int]],
    state_width: int,
    action_width: int,
    state_names: Sequence[str] | None = None,
    action_names: Sequence[str] | None = None,
    rewards: bool = False,
    video: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """`info.json`'s features: cameras {name: (height, width)}, one state and one action vector, with `rewards` one
    number a frame, the index columns. With `video` pictures are videos, which it describes beside their size."""
    found: dict[str, dict[str, Any]] = {}
    for name, (h, w) in cameras.items():
        shape = {"shape": [h, w, 3], "names": ["height", "width", "channels"]}
        if video is None:
            found[IMAGE_PREFIX + name] = {"dtype": "image", **shape}
        else:
            described = {"video.height": h, "video.width": w, **video}
            found[IMAGE_PREFIX + name] = {"dtype": "video", **shape, "info": described}
    for key, width, names in ((STATE, state_width, state_names), (ACTION, action_width, action_names)):
        stem = key.rsplit(".", 1)[-1]
        shown = list(names) if names is not None else [f"{stem}_{i}" for i in range(width)]
        found[key] = {"dtype": "float32", "shape": [width], "names": shown}
    if rewards:
        found[REWARD] = {"dtype": "float32", "shape": [1], "names": None}
    return {**found, **INDEX_FEATURES}


def data_schema(declared: Mapping[str, dict[str, Any]]) -> pa.Schema:
    """Arrow schema of a data file, with the metadata by which Hugging Face `datasets` decodes the pictures."""
    arrow: list[tuple[str, pa.DataType]] = []
    hugging: dict[str, Any] = {}
    for key, feature in declared.items():
        if feature["dtype"] == "video":
            continue
        if feature["dtype"] == "image":
            arrow.append((key, pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
            hugging[key] = {"_type": "Image"}
            continue
        value = pa.type_for_alias(feature["dtype"])
        described = {"dtype": feature["dtype"], "_type": "Value"}
        (width,) = feature["shape"]
        if width == 1:  # the format keeps vectors of one value as plain columns
            arrow.append((key, value))
            hugging[key] = described
        else:
            arrow.append((key, pa.list_(value, width)))
            # Read as `List` by datasets ≥ 4 and as `Sequence` before; the older name is understood by both.
            hugging[key] = {"feature": described, "length": width, "_type": "Sequence"}
    return pa.schema(arrow, metadata={"huggingface": json.dumps({"info": {"features": hugging}})})


def picture_size(feature: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) of an image or video feature, channels last or first; None where it does not say so.

    Where the three stands decides, since published datasets have channels-first shapes with channels-last names; names
    decide only where both ends are three.
    """
    shape = list(feature["shape"])
    if len(shape) != 3 or not all(isinstance(side, int) and side > 0 for side in shape):
        return None
    names = feature.get("names")
    first = shape[0] == 3 and (shape[2] != 3 or (isinstance(names, list) and str(names[0]).startswith("channel")))
    if not first and shape[2] != 3:
        return None
    return (shape[1], shape[2]) if first else (shape[0], shape[1])


def json_of(path: Path, root: Path) -> Any:
    """The parsed file of a dataset.

    Raises:
        DataFault: it is not there or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise torn(root, f"{path.relative_to(root)} is missing") from None
    except (ValueError, RecursionError, OSError) as error:
        raise torn(root, f"{path.relative_to(root)} is not JSON ({error})") from error


def json_lines_of(path: Path, root: Path) -> list[dict[str, Any]]:
    """The parsed lines of a dataset's file.

    Raises:
        DataFault: it is not there or not a JSON object a line.
    """
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except FileNotFoundError:
        raise torn(root, f"{path.relative_to(root)} is missing") from None
    except ValueError as error:
        raise torn(root, f"{path.relative_to(root)} is not JSON lines ({error})") from error
    if not all(isinstance(line, dict) for line in found):
        raise torn(root, f"{path.relative_to(root)} holds a line that is no object")
    return found


def json_bytes(content: Any) -> bytes:
    """A metadata file; numbers that JSON has not are an error."""
    return json.dumps(content, indent=4, allow_nan=False, ensure_ascii=False).encode()


def path_from(template: object, root: Path, **numbers: Any) -> str:
    """A file's path under the dataset, by a template of its info.json.

    Raises:
        DataFault: the template is of another form, or leads out of the dataset.
    """
    try:
        path = PurePosixPath(str(template).format(**numbers))
    except (KeyError, IndexError, ValueError, AttributeError):
        path = PurePosixPath("..")
    if path.is_absolute() or ".." in path.parts:
        possible = f"a path under the dataset with {', '.join(numbers)}"
        raise DataFault(refusal(f"path template of dataset {root.name}", template, possible, "correct info.json"))
    return str(path)


def torn(root: Path, what: str) -> DataFault:
    """The error of a dataset that cannot be read as it is."""
    return DataFault(f"dataset {root.name}: {what}; collect or copy it anew")
