"""What a dataset's columns are bound to: declared names against `info.json`'s features, all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.data import ColumnsSpec
from configs.errors import DataFault, SpecError, refusal
from configs.spec import checked_name
from storage import lerobot_format as layout


@dataclass(frozen=True)
class Camera:
    """One camera of a dataset, as it was recorded and as its pictures are given."""

    name: str
    key: str
    video: bool
    recorded: tuple[int, int]  # (height, width)
    size: tuple[int, int]  # (height, width) after the declared resize
    turned: bool = False  # by 180 degrees, where it is read


@dataclass(frozen=True)
class Columns:
    """The columns that are read."""

    cameras: tuple[Camera, ...]
    state: str
    action: str
    state_width: int
    action_width: int


def as_recorded(features: Mapping[str, Mapping[str, Any]], dataset: str) -> Columns:
    """LeRobot's own names: every picture column, by its name after `observation.images.`; state and action.

    Raises:
        DataFault: the dataset has no pictures, or other names.
    """
    cameras = []
    for key in _pictures(features):
        size = layout.picture_size(features[key])
        assert size is not None  # `_pictures` leaves others out
        name = key.removeprefix(layout.IMAGE_PREFIX)
        try:
            checked_name(name)
        except ValueError:
            possible = "letters, digits, '_' and '-' after observation.images."
            raise DataFault(
                refusal(f"camera of dataset {dataset}", key, possible, "name it anew (data.columns.cameras)")
            ) from None
        cameras.append(Camera(name, key, features[key]["dtype"] == "video", size, size))
    if not cameras:
        known = ", ".join(features)
        possible = "features of dtype 'image' or 'video' with three channels"
        raise DataFault(refusal(f"cameras of dataset {dataset}", known, possible, "record pictures"))
    for key in (layout.STATE, layout.ACTION):
        if _width(features.get(key)) is None:
            raise DataFault(
                refusal(
                    f"features of dataset {dataset}",
                    ", ".join(features),
                    f"a vector {key}",
                    "declare its columns (data.columns), or add it",
                )
            )
    widths = {key: _width(features[key]) or 0 for key in (layout.STATE, layout.ACTION)}
    return Columns(tuple(cameras), layout.STATE, layout.ACTION, widths[layout.STATE], widths[layout.ACTION])


def bound(features: Mapping[str, Mapping[str, Any]], declared: ColumnsSpec, dataset: str) -> Columns:
    """The declared columns of a dataset.

    Raises:
        SpecError: with all names that are not there, and all widths that are others; those that are get listed.
    """
    faults, cameras = [], []
    pictures = _pictures(features)
    shown = ", ".join("{} ({} × {})".format(k, *(layout.picture_size(features[k]) or ())) for k in pictures)
    for name, column in declared.cameras.items():
        if column.key not in pictures:
            possible = f"{shown or 'no column with pictures'} of dataset {dataset}"
            faults.append(refusal(f"data.columns.cameras.{name}.key", column.key, possible, "bind cameras by name"))
            continue
        recorded = layout.picture_size(features[column.key])
        assert recorded is not None
        resized = recorded if column.height is None or column.width is None else (column.height, column.width)
        video = features[column.key]["dtype"] == "video"
        cameras.append(Camera(name, column.key, video, recorded, resized, column.turned))
    widths: dict[str, int] = {}
    vectors = {k: w for k, f in features.items() if k not in layout.INDEX_FEATURES and (w := _width(f)) is not None}
    for role, key, wanted in (
        ("state", declared.state, declared.state_width),
        ("action", declared.action, declared.action_width),
    ):
        if key not in vectors:
            possible = ", ".join(f"{k} (width {w})" for k, w in vectors.items()) or "no vector"
            possible = f"{possible} of dataset {dataset}"
            faults.append(refusal(f"data.columns.{role}", key, possible, "name one of its vectors"))
        elif wanted is not None and vectors[key] != wanted:
            possible = f"{vectors[key]}, the width of {key} in dataset {dataset}"
            faults.append(refusal(f"data.columns.{role}_width", wanted, possible, "declare that"))
        else:
            widths[role] = vectors[key]
    if faults:
        raise SpecError("; ".join(faults))
    return Columns(tuple(cameras), declared.state, declared.action, widths["state"], widths["action"])


def _pictures(features: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        key
        for key, feature in features.items()
        if feature["dtype"] in ("image", "video") and layout.picture_size(feature) is not None
    ]


def _width(feature: Mapping[str, Any] | None) -> int | None:
    """Of a vector of numbers; None if it is none."""
    if feature is None or len(feature["shape"]) != 1:
        return None
    number = str(feature["dtype"]).startswith(("float", "int", "uint"))
    return int(feature["shape"][0]) if number else None
