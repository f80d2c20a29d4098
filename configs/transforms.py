"""What is done to pictures, states and actions between the world and the policy, in training and in serving alike."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.environment import LARGEST_CAMERA
from configs.spec import Name, Spec

Scaling = Literal["mean_std", "quantiles", "min_max"]
STATISTICS: dict[Scaling, tuple[str, str]] = {
    "mean_std": ("mean", "std"),
    "quantiles": ("q01", "q99"),
    "min_max": ("min", "max"),
}
"""Fields of `StatisticsSpec` that each scaling asks for."""
Dimension = Annotated[int, Field(strict=True, ge=0)]


class PictureSize(Spec):
    """Of one camera, in pixels."""

    height: int = Field(gt=0, le=LARGEST_CAMERA)
    width: int = Field(gt=0, le=LARGEST_CAMERA)


class TransformsSpec(Spec):
    """Declared transforms of a policy's interface; with the statistics they are part of every adapter's manifest."""

    cameras: dict[Name, PictureSize] = Field(
        default={},
        description="Sizes that pictures are resized to, by camera, wherever they come from; others stay as they come.",
    )
    scaling: Scaling = Field(
        default="mean_std",
        description="How states and actions are normalised: to mean 0 and deviation 1; or q01 to q99, or least to "
        "greatest value, to -1 to 1 (nothing is clipped).",
    )
    exempt_state: tuple[Dimension, ...] = Field(
        default=(), description="Dimensions of the state that are left as they are."
    )
    exempt_action: tuple[Dimension, ...] = Field(
        default=(), description="Dimensions of the action that are left as they are, a gripper's for instance."
    )
    delta_action: tuple[Dimension, ...] = Field(
        default=(),
        description="Dimensions of the action that the policy gives as differences to the state in which the chunk "
        "begins, while datasets and environments have them absolute; a gripper's are left out.",
    )
    delta_state: tuple[Dimension, ...] | None = Field(
        default=None, description="The state's dimension for each of delta_action; None: the same numbers."
    )

    @model_validator(mode="after")
    def _dimensions(self) -> Self:
        for field in ("exempt_state", "exempt_action", "delta_action"):
            given = getattr(self, field)
            if len(set(given)) < len(given):
                raise ValueError(f"{field}: got {list(given)}; possible: each dimension once; remove what is repeated")
        if self.delta_state is not None and len(self.delta_state) != len(self.delta_action):
            raise ValueError(
                f"delta_state: got {list(self.delta_state)}; possible: one for each of delta_action "
                f"{list(self.delta_action)}; give as many"
            )
        return self

    @property
    def delta_from(self) -> tuple[int, ...]:
        """The state's dimension for each of `delta_action`."""
        return self.delta_action if self.delta_state is None else self.delta_state

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """{camera: (height, width)} of those that are resized."""
        return {name: (size.height, size.width) for name, size in self.cameras.items()}
