"""Adapter for any registered gymnasium environment, by id (`module:Id` imports the module that registers it).

What is expected of the environment: a Box action space of the declared width, and either

* a dict observation with `proprioception` and an entry a camera (under the camera's name, or `image` if there is
  but one camera), or
* a flat Box observation, taken as proprioception; the only camera is then what `render()` gives in `rgb_array` mode.

Where it has other names, `state_key`, `state_range` and `camera_keys` of the declaration say which (see
`observations.py`), and `options` are further arguments of `gymnasium.make`.

An environment may offer `draws_each_step` (set to False here) and `render()`, so that frames nobody sees are not
drawn, and `scene_positions()`. Success is `info["success"]` or `info["is_success"]`; an instruction of its own is
`info["instruction"]` at reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from configs.errors import EnvironmentFault, SpecError, refusal
from services.environments import mujoco_renderer, observations, reach
from services.environments.adapter import StepResult, action_bounds, keyword_arguments, one_line


class GymnasiumAdapter:
    """Separate environments of one id, stepped one after another."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        reach.register()
        mujoco_renderer.select()  # of no consequence elsewhere
        self._spec = spec
        self.remarks: list[str] = []
        self._cameras = {c["name"]: (c["height"], c["width"]) for c in spec["cameras"]}
        self._envs: list[gymnasium.Env[Any, Any]] = []
        self._observations: list[Any] = []
        self._told: list[str] = []
        self._envs.append(self._make())
        self._observations.append(None)
        self._told.append(spec["instruction"])
        self.action_low, self.action_high = action_bounds(spec, self._envs[0].action_space)
        self.versions = {"gymnasium": gymnasium.__version__, "numpy": np.__version__}

    def _make(self) -> gymnasium.Env[Any, Any]:
        fixed = {
            "max_episode_steps": self._spec["max_episode_steps"],
            "disable_env_checker": True,
            "render_mode": "rgb_array",
        }
        given = keyword_arguments(self._spec, fixed)
        try:
            env = gymnasium.make(self._spec["id"], **given)
        except TypeError as error:
            line, possible = one_line(error), f"arguments that {self._spec['id']} takes"
            raise SpecError(refusal("options", self._spec["options"], possible, f"correct them ({line})")) from None
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            remedy = f"correct it ({one_line(error)})"
            raise SpecError(refusal("id", self._spec["id"], "a registered gymnasium id", remedy)) from None
        if hasattr(env.unwrapped, "draws_each_step"):
            env.unwrapped.draws_each_step = False  # type: ignore[attr-defined]
        return env

    def resize(self, num_envs: int) -> None:
        """Hold environments 0 … num_envs-1."""
        while len(self._envs) < num_envs:
            self._envs.append(self._make())
            self._observations.append(None)
            self._told.append(self._spec["instruction"])
        while len(self._envs) > max(num_envs, 1):
            self._envs.pop().close()
            self._observations.pop()
            self._told.pop()

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each, by its seed."""
        for index, seed in zip(indices, seeds, strict=True):
            self._observations[index], info = self._envs[index].reset(seed=int(seed))
            self._told[index] = str(info["instruction"]) if "instruction" in info else self._spec["instruction"]

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A]."""
        n = len(indices)
        reward = np.zeros(n, np.float32)
        terminated, truncated, success = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        for row, index in enumerate(indices):
            observation, reward[row], terminated[row], truncated[row], info = self._envs[index].step(actions[row])
            self._observations[index] = observation
            success[row] = bool(info["success"] if "success" in info else info.get("is_success"))
            if not {"success", "is_success"} & set(info) and not self.remarks:
                possible, remedy = (
                    "success or is_success",
                    "put one there; without it every episode counts as a failure",
                )
                self.remarks.append(refusal("step's info", sorted(info), possible, remedy))
        return StepResult(reward, terminated, truncated, success)

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S]."""
        rows = np.empty((len(indices), self._spec["state_width"]), np.float32)
        for row, index in enumerate(indices):
            observation = self._observations[index]
            key = observations.state_key(self._spec, observation)
            state = np.asarray(observation if key is None else observation[key])
            if state.ndim != 1:
                remedy = "name a vector of the observation as state_key, or wrap the environment"
                raise SpecError(refusal("state_key", key, f"a vector, not the state's shape {state.shape}", remedy))
            rows[row] = state[observations.state_slice(self._spec, len(state))]
        return rows

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""
        images = {name: np.empty((len(indices), h, w, 3), np.uint8) for name, (h, w) in self._cameras.items()}
        for row, index in enumerate(indices):
            for name, stack in images.items():
                image = self._image(index, name)
                if image.shape != stack.shape[1:]:
                    raise observations.wrong_size(name, stack.shape[1:], image.shape)
                stack[row] = image
        return images

    def _image(self, index: int, camera: str) -> np.ndarray:
        observation = self._observations[index]
        key = observations.picture_key(self._spec, camera, observation)
        image = self._envs[index].render() if key == observations.RENDERED else observation[key]
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            given = f"{key} that gives {getattr(image, 'dtype', type(image).__name__)}"
            remedy = "let the environment give it so, or name another in camera_keys"
            raise SpecError(refusal(f"cameras.{camera}", given, "a picture of uint8 [h, w, 3]", remedy))
        return image

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """What each environment's robot is told now."""
        return [self._told[index] for index in indices]

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [n, 3]."""
        ask = [getattr(self._envs[index].unwrapped, "scene_positions", None) for index in indices]
        if not all(callable(method) for method in ask):
            raise EnvironmentFault(f"scene_positions: {self._spec['id']} offers none; add that method to it")
        rows = [method() for method in ask if method is not None]
        return {name: np.stack([row[name] for row in rows]) for name in ("object", "goal", "gripper")}

    def close(self) -> None:
        """Close all environments."""
        while self._envs:
            self._envs.pop().close()
