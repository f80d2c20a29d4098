"""Counting environments in every auto-reset style, registered by importing this module.

An episode of seed s has s % 3 + 2 steps; odd ones end by termination and succeed, even ones by truncation. The
observation tells (seed, steps made), the picture the steps; the reward of a step is its number. An episode that was
begun without a seed calls itself −1 and lasts one step, so that an environment's own reset cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

OBSERVATION = spaces.Dict(
    {
        "proprioception": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "image": spaces.Box(0, 255, (4, 6, 3), np.uint8),
    }
)
ACTION = spaces.Box(-1.0, 1.0, (1,), np.float32)


def length_of(seed: int) -> int:
    """Steps of the episode."""
    return 1 if seed == -1 else seed % 3 + 2


class Counting(gymnasium.Env[Any, np.ndarray]):
    """One of them."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = OBSERVATION, ACTION

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._seed, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed, self._step = -1 if seed is None else seed, 0
        return self._observation(), {"instruction": f"count from {self._seed}"}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over, odd = self._step >= length_of(self._seed), self._seed % 2 == 1
        return self._observation(), float(self._step), over and odd, over and not odd, {"success": over and odd}

    def _observation(self) -> dict[str, np.ndarray]:
        state = np.array([self._seed, self._step], np.float32)
        return {"proprioception": state, "image": np.full((4, 6, 3), self._step, np.uint8)}


class Flat(Counting):
    """The state alone, and the picture by `render()`."""

    observation_space = OBSERVATION["proprioception"]  # type: ignore[assignment]

    def _observation(self) -> Any:
        return super()._observation()["proprioception"]

    def render(self) -> Any:
        return np.full((4, 6, 3), self._step, np.uint8)


def synchronous(mode: AutoresetMode, single: type[Counting] = Counting, *, copy: bool = True) -> Any:
    """A factory of gymnasium's own vector environment."""

    def make(num_envs: int, max_episode_steps: int, render_mode: str) -> VectorEnv[Any, Any, Any]:
        return SyncVectorEnv([lambda: single(render_mode)] * num_envs, copy=copy, autoreset_mode=mode)

    return make


def asynchronous(num_envs: int, max_episode_steps: int, render_mode: str) -> VectorEnv[Any, Any, Any]:
    """The same in processes."""
    return AsyncVectorEnv([Counting] * num_envs)


def maniskill(**settings: Any) -> Callable[..., Any]:
    """A factory of ManiSkill's own wrapper around a batch that resets in its dialect."""

    def make(num_envs: int, max_episode_steps: int, render_mode: str) -> Any:
        from services.environments import renderer

        renderer.select()
        from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

        return ManiSkillVectorEnv(ManiSkillLike(num_envs), **settings)

    return make


class ManiSkillLike(gymnasium.Env[Any, Any]):
    """n counting environments as ManiSkill's `BaseEnv` shows them: tensors, `env_idx`, a joint reset by one seed."""

    reconfiguration_freq = 0

    def __init__(self, num_envs: int) -> None:
        import torch

        self.metadata = {}
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_observation_space, self.single_action_space = OBSERVATION, ACTION
        self.observation_space, self.action_space = OBSERVATION, ACTION
        self._seeds = torch.full((num_envs,), -1)
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        rows = (options or {}).get("env_idx", range(self.num_envs))
        for place, row in enumerate(rows):
            self._seeds[row] = -1 if seed is None or place else int(np.ravel(seed)[0])
            self.elapsed_steps[row] = 0
        told = [f"count from {int(seed)}" for seed in self._seeds]
        return self._observation(), {"elapsed_steps": self.elapsed_steps, "instruction": told}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        import torch

        self.elapsed_steps += 1
        over = self.elapsed_steps >= torch.tensor([length_of(int(seed)) for seed in self._seeds])
        odd = self._seeds % 2 == 1  # a remainder in [0, 2): −1 is odd here as well
        info = {"elapsed_steps": self.elapsed_steps, "success": over & odd}
        return self._observation(), self.elapsed_steps.float(), over & odd, over & ~odd, info

    def _observation(self) -> dict[str, Any]:
        import torch

        state = torch.stack([self._seeds, self.elapsed_steps], dim=1).float()
        image = self.elapsed_steps.to(torch.uint8)[:, None, None, None].expand(-1, 4, 6, 3).clone()
        return {"proprioception": state, "image": image}


class Changed(VectorWrapper[Any, Any, Any, Any, Any]):
    """A next-step counting environment with one fault; `fault` names it."""

    def __init__(self, fault: str, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._fault = fault
        self._metadata = dict(env.metadata)
        if fault == "no style":
            del self._metadata["autoreset_mode"]
        elif fault == "unknown style":
            self._metadata["autoreset_mode"] = "Sometimes"
        elif fault == "no final observation":
            self._metadata["autoreset_mode"] = AutoresetMode.SAME_STEP

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._fault == "one seed" and not isinstance(seed, int | None):
            raise TypeError("seed has to be an integer")
        if self._fault == "mask ignored":
            options = None
        if self._fault == "seeds ignored":
            self._begun = getattr(self, "_begun", 0) + 1
            seed = [self._begun] * self.num_envs
        if self._fault == "row decides":
            seed = [None if s is None else s + 10 * row for row, s in enumerate(seed)]
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, *rest = self.env.step(actions)
        return observation, reward[:, None] if self._fault == "column of rewards" else reward, *rest  # type: ignore[return-value]


def changed(fault: str) -> Any:
    """A factory of `Changed`."""
    return lambda **kwargs: Changed(fault, synchronous(AutoresetMode.NEXT_STEP)(**kwargs))


def single_in_disguise(num_envs: int, max_episode_steps: int, render_mode: str) -> Any:
    """No vector environment at all."""
    env = Counting(render_mode)
    env.metadata = {**Counting.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    return env


STYLES = {
    "SameStep": synchronous(AutoresetMode.SAME_STEP),
    "SameStepReusing": synchronous(AutoresetMode.SAME_STEP, copy=False),
    "NextStep": synchronous(AutoresetMode.NEXT_STEP),
    "NextStepReusing": synchronous(AutoresetMode.NEXT_STEP, copy=False),
    "NextStepProcesses": asynchronous,
    "Disabled": synchronous(AutoresetMode.DISABLED),
    "ManiSkill": maniskill(),
    "ManiSkillDisabled": maniskill(auto_reset=False),
}
OTHERS = {
    "FlatSameStep": synchronous(AutoresetMode.SAME_STEP, Flat),
    "FlatNextStep": synchronous(AutoresetMode.NEXT_STEP, Flat),
    "ManiSkillWithoutTerminations": maniskill(ignore_terminations=True),
    "Single": single_in_disguise,
    "Bare": lambda num_envs: None,
    **{
        fault.title().replace(" ", ""): changed(fault)
        for fault in (
            "no style",
            "unknown style",
            "no final observation",
            "one seed",
            "mask ignored",
            "seeds ignored",
            "row decides",
            "column of rewards",
        )
    },
}
if "Counting-v0" not in gymnasium.registry:
    gymnasium.register("Counting-v0", entry_point=Counting)
    for name, factory in {**STYLES, **OTHERS}.items():
        gymnasium.register(f"Counting{name}-v0", entry_point=Counting, vector_entry_point=factory)
