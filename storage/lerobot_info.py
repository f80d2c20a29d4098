"""What a dataset's `meta/info.json` has to be, whoever wrote it: checked whole before anything else is read."""

from __future__ import annotations

import string
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from configs.errors import DataFault, refusal
from storage import lerobot_format as layout

_PLACEHOLDERS = ("episode_chunk", "episode_index", "chunk_index", "file_index", "video_key")
_WIDEST = 9  # digits of a number in a path: no format is to make a path that fills memory


def _checked_template(template: str) -> str:
    """A path under the dataset with known placeholders, zero-padded at most."""
    path = PurePosixPath(template)
    if path.is_absolute() or ".." in path.parts or path.suffix not in (".parquet", ".mp4"):
        raise ValueError("possible: a path under the dataset that ends in .parquet or .mp4")
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        digits = (spec or "").removesuffix("d")
        plain = digits == "" or (digits.isascii() and digits.isdigit() and int(digits) <= _WIDEST)
        if name not in _PLACEHOLDERS or conversion is not None or not plain:
            raise ValueError(f"possible: {', '.join(_PLACEHOLDERS)}, as in {{file_index:03d}}")
    return template


_Template = Annotated[str, AfterValidator(_checked_template)]


class _Feature(BaseModel):
    """One feature: what matters of it here; whatever else stands there stays."""

    model_config = ConfigDict(extra="allow")

    dtype: str
    shape: list[Annotated[int, Field(strict=True, gt=0)]] = Field(min_length=1)


class _Info(BaseModel):
    """What is read of info.json."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    features: dict[str, _Feature]
    fps: float = Field(strict=True, gt=0, le=10_000)
    total_frames: int = Field(strict=True, ge=0)
    total_episodes: int = Field(strict=True, ge=0)
    chunks_size: int = Field(default=layout.PER_CHUNK, strict=True, gt=0)
    data_path: _Template
    video_path: _Template | None = None

    @model_validator(mode="after")
    def _has_what_every_dataset_has(self) -> _Info:
        if lacks := sorted(set(layout.INDEX_FEATURES) - set(self.features)):
            raise ValueError(f"features lacks {', '.join(lacks)}")
        if self.video_path is None and any(f.dtype == "video" for f in self.features.values()):
            raise ValueError("video_path is missing, though there are videos")
        return self


def read_info(root: Path, versions: tuple[str, ...]) -> dict[str, Any]:
    """`meta/info.json` as it is, once all that is read of it is of its kind.

    Raises:
        DataFault: it is of another version, or something in it is missing or is not what it should be.
    """
    info = layout.json_of(root / layout.INFO, root)
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if version not in versions:
        where = f"codebase_version of dataset {root.name}"
        raise DataFault(refusal(where, version, ", ".join(versions), "convert it with LeRobot's converter"))
    try:
        _Info.model_validate(info)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        )
        raise layout.torn(root, f"{layout.INFO}: {faults[:600]}") from None
    return dict(info)
