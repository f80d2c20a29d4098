"""Where a gymnasium environment's observation has the state and the pictures that are declared; for one environment and
for a batch of them alike.

State: the entry `state_key` of a dict observation (else `proprioception`), or the whole of one that is no dict; of it
the values of `state_range`. Picture: the entry that `camera_keys` names, else the one called as the camera, else
`image` where there is but one camera; where there is none, or it says `render()`, what the render method gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import SpecError, refusal

RENDERED = "render()"


def state_key(spec: Mapping[str, Any], observation: Any) -> str | None:
    """The entry that is the state; None where the observation is the state itself.

    Raises:
        SpecError: it has no such entry; those that it has are listed.
    """
    if not isinstance(observation, Mapping):
        if spec["state_key"] is not None:
            remedy = f"leave it out: the observation of {spec['id']} is no dict"
            raise SpecError(refusal("state_key", spec["state_key"], "none", remedy))
        return None
    key = spec["state_key"] or "proprioception"
    if key not in observation:
        raise SpecError(refusal("state_key", spec["state_key"], _listed(observation), "name the one that is the state"))
    return str(key)


def state_slice(spec: Mapping[str, Any], length: int) -> slice:
    """Which of an entry's `length` values are the state.

    Raises:
        SpecError: there are fewer or, where no range is declared, another number than `state_width`.
    """
    if spec["state_range"] is None:
        if length != spec["state_width"]:
            possible = f"{length}, the values that {spec['id']} gives, or a state_range of them"
            raise SpecError(refusal("state_width", spec["state_width"], possible, "correct it"))
        return slice(0, length)
    first, end = spec["state_range"]
    if end > length:
        raise SpecError(refusal("state_range", [first, end], f"within the {length} of {spec['id']}", "correct it"))
    return slice(first, end)


def picture_key(spec: Mapping[str, Any], camera: str, observation: Any) -> str:
    """The entry that is a camera's picture, or `RENDERED`.

    Raises:
        SpecError: there is none; the entries are listed.
    """
    parts = observation if isinstance(observation, Mapping) else {}
    only = len(spec["cameras"]) == 1
    declared = spec["camera_keys"].get(camera)
    for key in (declared,) if declared else (camera, "image") if only else (camera,):
        if key in parts:
            return str(key)
    if declared == RENDERED or (declared is None and only):
        return RENDERED
    possible = ", ".join([_listed(parts), repr(RENDERED)]) if parts else repr(RENDERED)
    raise SpecError(
        refusal(f"camera_keys.{camera}", declared, possible, "name what shows it, or take a camera out of `cameras`")
    )


def wrong_size(camera: str, declared: tuple[int, int, int], shape: tuple[int, ...]) -> SpecError:
    """The refusal of a picture of another size."""
    remedy = "correct height and width, or set in `options` the size that the environment is to render"
    return SpecError(refusal(f"cameras.{camera}", declared, f"the picture's shape {shape}", remedy))


def _listed(observation: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in sorted(observation.items()))
