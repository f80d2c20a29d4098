"""What the columns of a dataset are, bound by name, and which datasets are learned from."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from configs.environment import LARGEST_CAMERA
from configs.spec import Name, Spec

MOST_DATASETS = 16
"""Datasets of a mixture."""
_DATASET = "Name of a dataset of this installation, or absolute path of a LeRobot folder."


class CameraColumn(Spec):
    """The column that one camera's pictures lie in, and the size that they are given."""

    key: str = Field(min_length=1, description="The dataset's column, for instance observation.images.image.")
    height: int | None = Field(
        default=None, gt=0, le=LARGEST_CAMERA, description="Resize to this height; None: as recorded."
    )
    width: int | None = Field(
        default=None, gt=0, le=LARGEST_CAMERA, description="Resize to this width; None: as recorded."
    )
    turned: bool = Field(
        default=False,
        description="Turn its pictures by 180 degrees where they are read (LIBERO's stand on their heads).",
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.height is None) != (self.width is None):
            raise ValueError(f"got height {self.height} and width {self.width}; possible: both or neither; give both")
        return self


class ColumnsSpec(Spec):
    """Which columns of a dataset a policy learns from, and what they must be."""

    cameras: dict[Name, CameraColumn] = Field(
        min_length=1, description="Cameras by the names that the policy knows them under."
    )
    state: str = Field(default="observation.state", min_length=1, description="Column of the proprioception.")
    action: str = Field(default="action", min_length=1, description="Column of the actions.")
    state_width: int | None = Field(default=None, gt=0, description="Width the state must have; None: any.")
    action_width: int | None = Field(default=None, gt=0, description="Width the actions must have; None: any.")

    @model_validator(mode="after")
    def _each_column_once(self) -> Self:
        keys = [camera.key for camera in self.cameras.values()]
        if len(set(keys)) != len(keys):
            raise ValueError(f"cameras: got columns {keys}; possible: each once; correct the key of one")
        return self


class _WithColumns(Spec):
    """What the columns of a dataset are: declared, by preset, or LeRobot's own."""

    preset: Name | None = Field(
        default=None, description="Columns of a published dataset, by preset; None: those declared, else LeRobot's own."
    )
    columns: ColumnsSpec | None = Field(
        default=None, description="Which columns are cameras, state and action, and the sizes that pictures are given."
    )

    @model_validator(mode="after")
    def _one_declaration(self) -> Self:
        if self.preset is not None and self.columns is not None:
            raise ValueError(f"preset: got {self.preset!r} beside columns; possible: one of them; remove one")
        return self


class MixedDatasetSpec(_WithColumns):
    """A dataset of a mixture."""

    dataset: str = Field(min_length=1, description=_DATASET)
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        strict=True,
        description="Its share of the samples, against the others'; their scale makes no difference.",
    )


class DataSpec(_WithColumns):
    """Demonstrations, or recorded episodes with rewards, to learn from: one dataset, or several mixed by weight."""

    dataset: str | None = Field(default=None, min_length=1, description=f"{_DATASET} None: see mixture.")
    mixture: tuple[MixedDatasetSpec, ...] = Field(
        default=(), max_length=MOST_DATASETS, description="Several datasets with their weights, in place of dataset."
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if (self.dataset is None) != bool(self.mixture):
            raise ValueError(
                f"dataset: got {self.dataset!r} with a mixture of {len(self.mixture)}; possible: one of the two; "
                "name a dataset, or several in the mixture"
            )
        if self.mixture and (self.preset is not None or self.columns is not None):
            raise ValueError(
                "mixture: got preset or columns beside it; possible: those of each dataset; move them into the mixture"
            )
        return self

    @property
    def datasets(self) -> tuple[MixedDatasetSpec, ...]:
        """All of them; one alone has the weight 1."""
        if self.dataset is None:
            return self.mixture
        return (MixedDatasetSpec(dataset=self.dataset, preset=self.preset, columns=self.columns),)
