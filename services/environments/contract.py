"""The contract of a single environment, checked call by call: what came back, what was expected, what to change.

The environment is gymnasium's in form: `reset(seed=…) -> (observation, info)`, `step(action) -> (observation, reward,
terminated, truncated, info)`, an `action_space` that is a Box of finite bounds, and `render()` where the observation
has no picture. The observation is a dict with `proprioception` and an entry a camera, or the state alone.

Legend: A action width, S state width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.errors import EnvironmentFault, SpecError, refusal
from services.environments.adapter import action_bounds, one_line

STATE = "proprioception"


class CheckedEnvironment:
    """An environment that keeps the contract or says how it does not; its episodes end at `max_episode_steps`.

    Args:
        spec: an `EnvironmentSpec` as plain data.
        env: the environment. `begin` tries it, once.
    """

    def __init__(self, spec: Mapping[str, Any], env: Any) -> None:
        self._spec = spec
        self._env = env
        self._cameras = {c["name"]: (c["height"], c["width"], 3) for c in spec["cameras"]}
        self._steps = 0
        self.action_space = getattr(env, "action_space", None)
        self._low, self._high = action_bounds(spec, self.action_space)

    @property
    def unwrapped(self) -> Any:
        """The environment itself."""
        return getattr(self._env, "unwrapped", self._env)

    def begin(self) -> None:
        """Try a reset, a step, a picture, and the same reset again.

        Raises:
            SpecError: naming the call, what it gave and what to change.
        """
        try:
            first, _ = self._reset(0)
            self._step(np.clip(np.zeros_like(self._low), self._low, self._high))
            if not isinstance(first, Mapping):
                self._picture()
            again, _ = self._reset(0)
        except SpecError:
            raise
        except Exception as error:
            # A boundary: a tenant's environment raises anything.
            given = f"{type(error).__name__}: {one_line(error)}"
            raise SpecError(refusal("own", given, "reset(seed=0), a step, a reset", "mend it")) from error
        if not np.array_equal(_state(first), _state(again)):
            given = "two initial states for seed 0"
            raise SpecError(refusal("reset", given, "the same initial state for the same seed", "draw from the seed"))

    def reset(self, *, seed: int) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode.

        Raises:
            EnvironmentFault: it broke the contract.
        """
        try:
            return self._reset(seed)
        except SpecError as error:
            raise EnvironmentFault(str(error)) from None

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """Apply an action float32 [A].

        Raises:
            EnvironmentFault: it broke the contract.
        """
        try:
            return self._step(action)
        except SpecError as error:
            raise EnvironmentFault(str(error)) from None

    def render(self) -> np.ndarray:
        """A picture uint8 [h, w, 3] of the only camera.

        Raises:
            EnvironmentFault: it broke the contract.
        """
        try:
            return self._picture()
        except SpecError as error:
            raise EnvironmentFault(str(error)) from None

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if callable(closing := getattr(self._env, "close", None)):
            closing()

    def _reset(self, seed: int) -> tuple[Any, Mapping[str, Any]]:
        given = self._env.reset(seed=seed)
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], Mapping):
            raise SpecError(refusal("reset", _kind(given), "(observation, info), info a dict", "return both"))
        self._steps = 0
        return self._checked(given[0], "reset"), given[1]

    def _step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        given = self._env.step(action)
        if not isinstance(given, tuple) or len(given) != 5 or not isinstance(given[4], Mapping):
            wanted = "(observation, reward, terminated, truncated, info), info a dict"
            raise SpecError(refusal("step", _kind(given), wanted, "return all five"))
        observation, reward, terminated, truncated, info = given
        if np.shape(reward) != () or not np.issubdtype(np.asarray(reward).dtype, np.number) or not np.isfinite(reward):
            raise SpecError(refusal("step's reward", reward, "one finite number", "return float(reward)"))
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise SpecError(refusal(f"step's {name}", flag, "True or False", f"return bool({name})"))
        self._steps += 1
        over = bool(truncated) or self._steps >= self._spec["max_episode_steps"]
        return self._checked(observation, "step"), float(reward), bool(terminated), over, info

    def _checked(self, observation: Any, call: str) -> Any:
        """A copy of it: environments reuse buffers."""
        if not isinstance(observation, Mapping):
            if len(self._cameras) != 1:
                wanted = f"a dict with {STATE}, {', '.join(self._cameras)}"
                raise SpecError(refusal(f"{call}'s observation", _kind(observation), wanted, "return one"))
            return check_state(self._spec, observation, f"{call}'s observation")
        kept = {STATE: check_state(self._spec, _entry(observation, STATE, call), f"{call}'s {STATE}")}
        for name, shape in self._cameras.items():
            key = name if name in observation or len(self._cameras) > 1 or "image" not in observation else "image"
            kept[name] = check_picture(shape, _entry(observation, key, call), f"{call}'s {key}").copy()
        return kept

    def _picture(self) -> np.ndarray:
        (name,) = self._cameras
        if not callable(getattr(self._env, "render", None)):
            raise SpecError(
                refusal("render", "no such method", f"render(), or {name!r} in a dict of observations", "add one")
            )
        return check_picture(self._cameras[name], self._env.render(), "render").copy()


def check_state(spec: Mapping[str, Any], state: Any, what: str) -> np.ndarray:
    """The state as float32 [S], a copy.

    Raises:
        SpecError: if it has another shape, is no array of real numbers, or holds one that is not finite in float32.
    """
    width, remedy = spec["state_width"], "return it flat, or correct state_width"
    array = np.asarray(state)
    if array.shape != (width,):
        raise SpecError(refusal(what, f"shape {array.shape}", f"({width},), as state_width says", remedy))
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise SpecError(refusal(what, str(array.dtype), "numbers such as float32", "convert it"))
    with np.errstate(over="ignore"):
        copy = array.astype(np.float32)
    if not np.isfinite(copy).all():
        wrong = int(np.flatnonzero(~np.isfinite(copy))[0])
        raise SpecError(refusal(f"{what}[{wrong}]", float(array[wrong]), "a finite float32", "bound it"))
    return copy


def check_picture(shape: tuple[int, int, int], picture: Any, what: str) -> np.ndarray:
    """The picture, uint8 [h, w, 3].

    Raises:
        SpecError: if it has another shape or dtype; the message tells channels-first and floating pictures apart.
    """
    array = np.asarray(picture)
    height, width, _ = shape
    if array.shape != shape:
        remedy = "correct the camera's size, or render at the declared one"
        if array.shape == (3, height, width):
            remedy = "move the channels last: picture.transpose(1, 2, 0)"
        elif array.shape == (height, width, 4):
            remedy = "leave the alpha channel out: picture[..., :3]"
        raise SpecError(refusal(what, f"shape {array.shape}", f"{shape}, as the camera says", remedy))
    if array.dtype != np.uint8:
        floating = np.issubdtype(array.dtype, np.floating)
        remedy = "scale it: (255 * picture).round().astype(np.uint8)" if floating else "convert it to np.uint8"
        raise SpecError(refusal(what, str(array.dtype), "uint8 from 0 to 255", remedy))
    return array


def _entry(observation: Mapping[str, Any], key: str, call: str) -> Any:
    if key not in observation:
        raise SpecError(
            refusal(f"{call}'s observation", f"no {key!r}", f"it beside {', '.join(map(str, observation))}", "add it")
        )
    return observation[key]


def _state(observation: Any) -> np.ndarray:
    return np.asarray(observation[STATE] if isinstance(observation, Mapping) else observation)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple) else type(value).__name__
