"""Admission of declared transforms: against the cameras, widths and statistics of what a workload learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from configs.environment import CameraSpec, EnvironmentSpec
from configs.transforms import STATISTICS, TransformsSpec
from configs.workload import WorkloadSpec
from services.admission_of_rl import Fault


def sized(cameras: Sequence[CameraSpec], transforms: TransformsSpec) -> tuple[CameraSpec, ...]:
    """Cameras as the policy sees them."""
    declared = transforms.cameras
    return tuple(
        c if c.name not in declared else CameraSpec(name=c.name, **declared[c.name].model_dump()) for c in cameras
    )


def faults_of_transforms(
    workload: WorkloadSpec, cameras: Sequence[CameraSpec], widths: Mapping[str, int], source: str
) -> Iterator[Fault]:
    """Cameras and dimensions that are not there.

    Args:
        workload: that declares the transforms.
        cameras: of what it learns from.
        widths: {"state", "action"} of that.
        source: what it is, in words.
    """
    transforms = workload.transforms
    names = [camera.name for camera in cameras]
    for name in sorted(set(transforms.cameras) - set(names)):
        yield "transforms.cameras", name, f"{', '.join(names)} (of {source})", "bind cameras by name"
    for field, role, given in (
        ("exempt_state", "state", transforms.exempt_state),
        ("exempt_action", "action", transforms.exempt_action),
        ("delta_action", "action", transforms.delta_action),
        ("delta_state", "state", transforms.delta_from),
    ):
        outside = [d for d in given if d >= widths[role]]
        if outside:
            possible = f"0 … {widths[role] - 1}, dimensions of the {role} of {source}"
            yield f"transforms.{field}", outside, possible, "name such"


def faults_of_statistics(workload: WorkloadSpec, environment: EnvironmentSpec) -> Iterator[Fault]:
    """What an environment's preset does not say of the states and actions in it.

    A slot that is there keeps the statistics that it was made with.
    """
    if workload.start == "continue":
        return
    transforms, source = workload.transforms, f"environment {environment.name!r}"
    for role, statistics in (("state", environment.state), ("action", environment.action)):
        if lacking := [name for name in STATISTICS[transforms.scaling] if getattr(statistics, name) is None]:
            wanted = f"one for which {source} has statistics"
            remedy = f"add {role}.{' and '.join(lacking)} to its preset, or choose mean_std"
            yield "transforms.scaling", transforms.scaling, wanted, remedy
    if transforms.delta_action:
        possible = f"none with a fresh policy: {source} has statistics of absolute actions"
        yield (
            "transforms.delta_action",
            list(transforms.delta_action),
            possible,
            "fine-tune first, then `start: continue`",
        )
