"""What the columns of a dataset are: cameras, state and action, bound by name."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from configs.environment import LARGEST_CAMERA
from configs.spec import Name, Spec


class CameraColumn(Spec):
    """The column that one camera's pictures lie in, and the size that they are given."""

    key: str = Field(min_length=1, description="The dataset's column, for instance observation.images.image.")
    height: int | None = Field(
        default=None, gt=0, le=LARGEST_CAMERA, description="Resize to this height; None: as recorded."
    )
    width: int | None = Field(
        default=None, gt=0, le=LARGEST_CAMERA, description="Resize to this width; None: as recorded."
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
