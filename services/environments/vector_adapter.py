"""Adapter for gymnasium vector environments: `gymnasium.make_vec` of a registered id, or of its `vector_entry_point`.

The vector environment steps all of its environments together and may reset them by itself; whichever way it does so
(see `services.environments.autoreset`), the transitions that count are those of separate environments. Where an
episode has ended before its chunk, or a row is idle, the row goes on with a filler action and nobody looks: a reset of
that row by the next seed follows before anything of it counts again. So the reset transition of the next-step style
falls among a chunk's masked actions or does not happen at all.

What is expected, and tried when it is built: `reset(seed=[one an environment], options={"reset_mask": bool [n]})`, with
which a row's initial observation is a function of its seed alone and the other rows stay; a Box action space of the
declared width; observations as for a single environment (see `gymnasium_adapter`), batched. Instructions of their own
come in the reset's infos. Episodes are truncated at the declared number of steps, by its own count too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from configs.errors import EnvironmentFault, SpecError, refusal
from services.environments import observations, reach
from services.environments.adapter import StepResult, action_bounds, keyword_arguments, one_line
from services.environments.autoreset import Row, as_numpy, autoreset_mode, final_rows, reset_rows, succeeded

logger = logging.getLogger(__name__)

FILLER_SEED = 0
"""Of episodes that are begun only because the whole is stepped; nothing of them is handed out."""


class GymnasiumVectorAdapter:
    """The environments of one vector environment; another number of them means making it anew."""

    action_low: np.ndarray
    action_high: np.ndarray

    def __init__(self, spec: Mapping[str, Any]) -> None:
        reach.register()
        self._spec = spec
        self._cameras = {c["name"]: (c["height"], c["width"]) for c in spec["cameras"]}
        self._env: Any = None
        self._num_envs = 0
        self.versions = {"gymnasium": gymnasium.__version__, "numpy": np.__version__}

    def resize(self, num_envs: int) -> None:
        """Hold `num_envs` environments.

        Raises:
            SpecError: if the vector environment does not do what is expected of it; the message says what to change.
        """
        if num_envs == self._num_envs:
            return
        self.close()
        self._env = self._made(num_envs)
        self._num_envs = num_envs
        try:
            self._set_up(num_envs)
        except SpecError:
            self.close()  # not to be found here, as if it had passed, by the next session
            raise

    def _set_up(self, num_envs: int) -> None:
        space = self._env.single_action_space
        self.action_low, self.action_high = action_bounds(self._spec, space)
        self._filler = np.clip(np.zeros_like(self.action_low), self.action_low, self.action_high)
        self._dtype = space.dtype
        self._style = autoreset_mode(self._env, self._spec["id"])
        self._told = [self._spec["instruction"]] * num_envs
        self._observation: Any = None
        self._final: dict[int, Row] = {}  # rows whose final observation is not in `_observation`
        self._steps = np.zeros(num_envs, int)
        self._over = np.zeros(num_envs, bool)  # ended by the environment itself and not reset by us since
        self._try()

    def _made(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        env_id = self._spec["id"]
        fixed = {
            "num_envs": num_envs,
            "max_episode_steps": self._spec["max_episode_steps"],
            "render_mode": "rgb_array",
        }
        arguments = keyword_arguments(self._spec, fixed)
        try:
            env = gymnasium.make_vec(env_id, **arguments)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise SpecError(
                refusal("id", env_id, "a registered gymnasium id", f"correct it ({one_line(error)})")
            ) from None
        except TypeError as error:
            options = "".join(f" and {name}" for name in self._spec["options"])
            accepted = f"a factory of num_envs, max_episode_steps and render_mode{options}"
            raise SpecError(refusal("id", env_id, accepted, f"let it accept them ({one_line(error)})")) from None
        if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
            given = f"{type(env).__name__} of {getattr(env, 'num_envs', 'no number of')} environments"
            wanted = f"a gymnasium.vector.VectorEnv of the {num_envs} that it was asked for"
            raise SpecError(refusal("id", given, wanted, f"let the factory of {env_id} return one"))
        return env

    def _try(self) -> None:
        """Hold the vector environment to what resets by seed and steps have to be.

        Raises:
            SpecError: naming the call and what it gave.
        """
        env_id, every = self._spec["id"], range(self._num_envs)
        wanted = "reset(seed=[one an environment], options={'reset_mask': bool [n]})"
        remedy = f"let {env_id} do so, or declare kind: gymnasium where it is registered as single environments"
        try:
            self._begin_all(every, every)
            first = self.proprioception(every)
            reward, terminated, truncated = self._step_all(np.tile(self._filler, (self._num_envs, 1)))[:3]
            stepped = self.proprioception(every)
            # Row 0 by the last row's seed: the row may not matter either.
            self._observation, _ = reset_rows(self._env, [0], [every[-1]])
            again = self.proprioception(every)
        except SpecError:
            raise
        except Exception as error:
            # A boundary: a tenant's environment raises anything where it does not know a call's form.
            logger.exception("%s was tried", env_id)
            given = f"{type(error).__name__}: {one_line(error)}"
            raise SpecError(refusal("reset, step", given, wanted, remedy)) from None
        for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if value.shape != (self._num_envs,):
                raise SpecError(refusal(f"step's {name}", value.shape, f"shape ({self._num_envs},)", f"mend {env_id}"))
        if not _alike(again[0], first[-1]):
            given = "two initial observations for one seed"
            raise SpecError(refusal("reset", given, f"{wanted}, whose seed alone decides", remedy))
        if not _alike(again[1:], stepped[1:]):
            given = "other rows' observations changed by a reset of row 0"
            raise SpecError(refusal("reset", given, f"{wanted}, which leaves rows out of the mask as they are", remedy))
        self._observation = None

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each, by its seed."""
        if not indices:
            return
        if self._observation is None:
            infos = self._begin_all(indices, seeds)
        else:
            self._observation, infos = reset_rows(self._env, indices, seeds)
        rows = list(indices)
        self._steps[rows], self._over[rows] = 0, False
        told, has = infos.get("instruction"), infos.get("_instruction")
        for row in rows:
            self._final.pop(row, None)
            own = told is not None and (has is None or has[row])
            text = self._spec["instruction"] if told is None or not own else told
            self._told[row] = text if isinstance(text, str) else str(text[row])

    def _begin_all(self, indices: Sequence[int], seeds: Sequence[int]) -> Mapping[str, Any]:
        chosen = dict(zip(indices, seeds, strict=True))
        every = range(self._num_envs)
        self._observation, infos = reset_rows(self._env, every, [chosen.get(row, FILLER_SEED) for row in every])
        self._final = {}
        self._steps[:], self._over[:] = 0, False
        return infos

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A]; the others get a filler."""
        rows = list(indices)
        every = np.tile(self._filler, (self._num_envs, 1))
        every[rows] = actions
        if self._style is AutoresetMode.DISABLED:
            # Rows that wait for their next seed: a step of the whole must not find them ended.
            waiting = [row for row in np.flatnonzero(self._over).tolist() if row not in rows]
            if waiting:
                reset_rows(self._env, waiting, [FILLER_SEED] * len(waiting))
                self._over[waiting] = False
        reward, terminated, truncated, infos = self._step_all(every)
        self._steps += 1
        self._over = terminated | truncated
        ended = [row for row in rows if self._over[row]]
        self._final = final_rows(infos, ended, self._spec["id"]) if self._style is AutoresetMode.SAME_STEP else {}
        limit = self._steps >= self._spec["max_episode_steps"]
        success = np.array([succeeded(infos, row) for row in rows], bool)
        return StepResult(reward[rows], terminated[rows], (truncated | limit)[rows], success)

    def _step_all(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, Mapping[str, Any]]:
        self._observation, reward, terminated, truncated, infos = self._env.step(actions.astype(self._dtype))
        flags = (as_numpy(flag).astype(bool) for flag in (terminated, truncated))
        return as_numpy(reward).astype(np.float32), *flags, infos  # type: ignore[return-value]

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S]."""
        rows = self._part(observations.state_key(self._spec, self._observation), indices)
        if rows.ndim != 2:
            raise SpecError(
                refusal("state_width", self._spec["state_width"], f"the state's shape {rows.shape[1:]}", "correct it")
            )
        return rows[:, observations.state_slice(self._spec, rows.shape[1])].astype(np.float32, copy=False)

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""
        images = {}
        for name, (height, width) in self._cameras.items():
            images[name] = self._image(name, indices)
            if images[name].shape[1:] != (height, width, 3):
                raise observations.wrong_size(name, (height, width, 3), images[name].shape[1:])
        return images

    def _image(self, camera: str, indices: Sequence[int]) -> np.ndarray:
        key = observations.picture_key(self._spec, camera, self._observation)
        if key != observations.RENDERED:
            return self._part(key, indices)
        parts = self._observation if isinstance(self._observation, Mapping) else {}
        known = ", ".join(sorted(set(parts) - {"proprioception"})) or "none"
        if self._style is AutoresetMode.SAME_STEP:
            # Its render() shows the next episode already where one has ended.
            remedy = "put pictures into the observations, or take another auto-reset than same-step"
            raise SpecError(refusal("cameras", camera, known, remedy))
        frames = self._env.render()
        if frames is None:
            raise SpecError(refusal("cameras", camera, known, "let render() give a picture of each environment"))
        return np.stack([np.array(as_numpy(frames[row])) for row in indices])

    def _part(self, key: str | None, indices: Sequence[int]) -> np.ndarray:
        """A copy of some rows of the observation, of their final ones where an episode has just ended."""
        batch = as_numpy(self._observation if key is None else self._observation[key])
        rows = batch[list(indices)]  # a copy
        for place, row in enumerate(indices):
            if row in self._final:
                rows[place] = self._final[row] if key is None else self._final[row][key]
        return rows

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """What each environment's robot is told now."""
        return [self._told[row] for row in indices]

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [n, 3]."""
        ask = getattr(self._env.unwrapped, "scene_positions", None)
        if not callable(ask):
            raise EnvironmentFault(f"scene_positions: {self._spec['id']} offers none; add that method to it")
        return {name: np.array(as_numpy(places)[list(indices)], np.float32) for name, places in ask().items()}

    def close(self) -> None:
        """Close the vector environment."""
        if self._env is not None:
            self._env.close()
            self._env, self._num_envs = None, 0


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Near enough for one state: simulators on a device place each row elsewhere in one world, and round."""
    return np.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
