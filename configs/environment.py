"""Simulated environments: what they show, what they accept, how they are hosted."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from configs.environment_hosting import ENTRY_POINT, OwnSpec, RemoteSpec
from configs.errors import refusal
from configs.spec import Name, Spec

LARGEST_CAMERA = 1024  # pixels a side
_OF_GYMNASIUM = frozenset({"options", "state_key", "state_range", "camera_keys"})
USED_BY: dict[str, frozenset[str]] = {
    "gymnasium": _OF_GYMNASIUM,
    "gymnasium_vector": _OF_GYMNASIUM,
    "libero": frozenset({"options", "light_visuals"}),
    "maniskill": frozenset({"options", "control_mode", "light_visuals", "show_goal", "fresh_scenes", "backend"}),
    "python": frozenset(),
}
"""Kind: those of the fields which not every kind uses that it does; another kind's would have no effect."""


class CameraSpec(Spec):
    """One RGB camera, bound by name."""

    name: Name
    height: int = Field(gt=0, le=LARGEST_CAMERA, description="Rendered height in pixels.")
    width: int = Field(gt=0, le=LARGEST_CAMERA, description="Rendered width in pixels.")


class StatisticsSpec(Spec):
    """Statistics of one vector, a value a dimension; used alike in training and in serving."""

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        description="Standard deviations; a constant dimension has 0."
    )
    min: tuple[float, ...] | None = Field(default=None, description="Least values; None: not known.")
    max: tuple[float, ...] | None = Field(default=None, description="Greatest values; None: not known.")
    q01: tuple[float, ...] | None = Field(default=None, description="First percentiles; None: not known.")
    q99: tuple[float, ...] | None = Field(default=None, description="99th percentiles; None: not known.")

    @model_validator(mode="after")
    def _same_width(self) -> Self:
        for name in ("std", "min", "max", "q01", "q99"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.mean):
                raise ValueError(
                    f"mean has {len(self.mean)} values and {name} {len(values)}; give one of each a dimension"
                )
        return self


class EnvironmentSpec(Spec):
    """An environment preset: what a tenant's policy sees and does there."""

    name: Name = Field(description="Name under which workloads ask for this environment.")
    kind: Literal["gymnasium", "gymnasium_vector", "libero", "maniskill", "python"] = Field(
        description="Which adapter hosts it; gymnasium_vector makes one vector environment a host, of that host's part "
        "of the session's environments, and takes every auto-reset style; python is a tenant's own (`own`)."
    )
    id: str = Field(
        description="Registered id, for instance PushCube-v1; of LIBERO the suite and the task's number from 0, for "
        "instance libero_object/3; of kind python package.module:factory."
    )
    requirements: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.txt$",
        description="Requirements file beside the environment presets; its packages are installed for this simulator "
        "alone by `joynexus env install`. None: it runs under the platform's own interpreter.",
    )
    options: dict[str, bool | int | float | str] = Field(
        default={},
        description="What the simulator is made with beside what is declared here: keyword arguments of gymnasium's "
        "and ManiSkill's make; of LIBERO initial_states (fixed or sampled) and renderer (osmesa or egl).",
    )
    instruction: str = Field(min_length=1, description="What the robot is told to do.")
    cameras: tuple[CameraSpec, ...] = Field(min_length=1, description="RGB cameras by name.")
    state_width: int = Field(gt=0, description="S, width of proprioception (no object poses).")
    action_width: int = Field(gt=0, description="A, width of one action.")
    state: StatisticsSpec = Field(description="Statistics that normalise proprioception.")
    action: StatisticsSpec = Field(description="Statistics that un-normalise the policy's actions.")
    state_key: str | None = Field(
        default=None,
        description="Entry of a gymnasium environment's dict observation that is the state; None: `proprioception`, or "
        "the whole observation where that is no dict.",
    )
    state_range: tuple[NonNegativeInt, NonNegativeInt] | None = Field(
        default=None, description="First value of that vector that belongs to the state, and the one after its last."
    )
    camera_keys: dict[Name, str] = Field(
        default={},
        description="Entry of a gymnasium environment's observation that is a camera's picture, where it is not called "
        "as the camera is; `render()` for what its render method gives.",
    )
    max_episode_steps: int = Field(gt=0, description="Steps after which an episode is truncated.")
    reward: Literal["environment", "progress", "success"] = Field(
        default="environment",
        description="What is learned from: the environment's own reward; by how much it grew since the step before, "
        "from 0 at an episode's begin; or 1 in a step that succeeds and 0 elsewhere. A dense reward that stops with "
        "success can make waiting worth more than success; its progress does not.",
    )
    control_mode: str | None = Field(default=None, description="ManiSkill control mode; None elsewhere.")
    light_visuals: bool = Field(
        default=False, description="Render collision hulls instead of the robot's visual meshes (physics untouched)."
    )
    show_goal: bool = Field(
        default=False,
        description="Render goal markers that ManiSkill hides from cameras; proprioception does not hold the goal.",
    )
    turned_cameras: tuple[Name, ...] = Field(
        default=(),
        description="Cameras whose pictures are turned by 180 degrees where they leave the simulator, so once for "
        "demonstrations, training and serving alike (LIBERO's stand on their heads).",
    )
    fresh_scenes: bool = Field(
        default=False,
        description="ManiSkill builds a new scene for every episode. Else what a contact does depends, by rounding, on "
        "the scene's episodes before, so that only initial states are functions of the seed.",
    )
    backend: Literal["cpu", "gpu"] = Field(default="cpu", description="Physics and rendering device.")
    step_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest step of a host's environments, and longest reset: a chunk may take this times its steps, "
        "an expert's episode this times max_episode_steps. A call that takes longer fails its session.",
    )

    own: OwnSpec | None = Field(default=None, description="Where the code of kind python lies and what it may use.")
    remote: RemoteSpec | None = Field(default=None, description="Server that runs it; None: this installation does.")

    @model_validator(mode="after")
    def _own_code(self) -> Self:
        if (self.kind == "python") != (self.own is not None):
            raise ValueError(
                f"own: got {self.own!r} with kind {self.kind!r}; possible: given with python alone; mend one"
            )
        if self.kind == "python" and not re.fullmatch(ENTRY_POINT, self.id, re.ASCII):
            raise ValueError(f"id: got {self.id!r}; possible: package.module:factory; name the function to call")
        return self

    @model_validator(mode="after")
    def _used_by_kind(self) -> Self:
        faults = []
        for field in sorted(frozenset().union(*USED_BY.values()) - USED_BY[self.kind]):
            given, default = getattr(self, field), type(self).model_fields[field].default
            if given != default:
                users = " and ".join(kind for kind, used in USED_BY.items() if field in used)
                possible = f"{default!r} with kind {self.kind}"
                faults.append(refusal(field, given, possible, f"used by {users}; leave it out"))
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @model_validator(mode="after")
    def _widths(self) -> Self:
        for field, stats, width in (
            ("state", self.state, self.state_width),
            ("action", self.action, self.action_width),
        ):
            if len(stats.mean) != width:
                raise ValueError(
                    f"{field}.mean has {len(stats.mean)} values but {field}_width is {width}; make them equal"
                )
        if self.fresh_scenes and self.backend != "cpu":
            raise ValueError(refusal("fresh_scenes", True, f"False on backend {self.backend}", "leave it out"))
        names = [camera.name for camera in self.cameras]
        if len(set(names)) != len(names):
            raise ValueError(f"cameras: got {names}; possible: each name once; rename one")
        if not set(self.camera_keys) <= set(names):
            raise ValueError(f"camera_keys: got {sorted(self.camera_keys)}; possible: {', '.join(names)}; correct it")
        first, end = self.state_range or (0, self.state_width)
        if end - first != self.state_width:
            raise ValueError(
                f"state_range: got {[first, end]}; possible: two numbers {self.state_width} apart, the state_width; "
                "make them equal"
            )
        turned = self.turned_cameras
        if len(set(turned)) != len(turned) or not set(turned) <= set(names):
            raise ValueError(f"turned_cameras: got {list(turned)}; possible: {', '.join(names)}, each once; correct it")
        return self


class SessionRequest(Spec):
    """What a caller asks the environment service for: environments of one preset, spread over hosts."""

    environment: EnvironmentSpec
    num_envs: int = Field(gt=0, le=4096, description="B, environments of the session.")
    hosts: int = Field(default=1, gt=0, description="Simulator processes side by side that share the environments.")
    tenant_id: Name = Field(description="Whose session it is.")
    images: bool = Field(default=True, description="False: nothing is rendered and observations have no pictures.")
    owner: str | None = Field(default=None, max_length=200, description="Job or run whose end closes the session.")
    request_id: str = Field(min_length=1, max_length=200, description="A repeated id opens nothing new.")
    wait_s: float = Field(default=300.0, ge=0, description="Longest wait for hosts that others use.")

    @model_validator(mode="after")
    def _an_environment_a_host(self) -> Self:
        if self.hosts > self.num_envs:
            raise ValueError(
                f"hosts: got {self.hosts}; possible: up to num_envs, which is {self.num_envs}; ask for fewer hosts"
            )
        return self
