"""Episodes over an adapter: open-loop chunks, early ends, same-step automatic reset, final observations.

One place for what every simulator needs, so that all adapters behave alike. Legend: B environments, H horizon,
A action width, S state width. An environment is *idle* before its first reset and after an episode for which no
next seed was given: it is not stepped, and its last observation is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import TenantFault, refusal
from services.environments.adapter import Adapter, StepResult
from services.environments.experts import expert_for

Observation = dict[str, Any]
"""`{"images": {camera: uint8 [B, h, w, 3]}, "proprioception": float32 [B, S], "instructions": list[str]}`."""


class EnvironmentBatch:
    """B environments of one adapter. `images=False` renders nothing and gives no pictures."""

    def __init__(self, spec: Mapping[str, Any], adapter: Adapter, num_envs: int, *, images: bool) -> None:
        self._spec = spec
        self._adapter = adapter
        self._images = images
        self.num_envs = num_envs
        self._idle = np.ones(num_envs, bool)
        self._earlier = np.zeros(num_envs, np.float32)  # the environment's reward of the step before, 0 at the begin
        self._last = self._blank()
        # Between two steps an open environment's last observation is current, which saves a second rendering.

    def reset(self, seeds: Sequence[int | None]) -> Observation:
        """Start an episode in each environment by its seed; `None` leaves that one idle.

        Returns:
            The observation of all B environments.

        Raises:
            TenantFault: if there is not one seed an environment.
        """
        self._check_length("seeds", seeds)
        started = [e for e in range(self.num_envs) if seeds[e] is not None]
        self._idle[:] = [seed is None for seed in seeds]
        self._begin(started, [seed for seed in seeds if seed is not None])
        self._store(started, self._observe(started))
        return _copy(self._last)

    def batch_step(
        self, actions: np.ndarray, next_seeds: Sequence[int | None], every_step: bool = False
    ) -> dict[str, Any]:
        """Execute a chunk of H actions in each environment, open-loop, until its episode ends.

        Args:
            actions: float32 [B, H, A] in environment units; clipped to the bounds here.
            next_seeds: the seed each environment goes on with if its episode ends now; `None`: it becomes idle.
            every_step: also return what was seen before each action, which costs H − 1 renderings more.

        Returns:
            `reward` float32 [B, H] (0 where not valid), `valid` bool [B, H] (that action was executed),
            `terminated`, `truncated` bool [B, H] at the step where it happened, `success` bool [B], `observation`
            after automatic reset, `final_rows` int64 [K] and `final_observation` of the K environments whose
            episode ended, `busy_s` seconds spent in the simulator; with `every_step` also `seen`: `images` {camera:
            uint8 [B, H, h, w, 3]} and `proprioception` float32 [B, H, S] (0 where not valid).

        Raises:
            TenantFault: wrong shape or a value that is not finite; nothing was stepped.
        """
        began = time.perf_counter()
        actions = self._checked(actions)
        self._check_length("next_seeds", next_seeds)
        shape = actions.shape[:2]
        reward = np.zeros(shape, np.float32)
        valid, terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
        success = np.zeros(self.num_envs, bool)
        stepped = [e for e in range(self.num_envs) if not self._idle[e]]
        active = stepped
        ended: list[int] = []
        seen = self._nothing_seen(shape[1]) if every_step else None
        for h in range(shape[1]):
            if not active:
                break
            if seen is not None:
                before = self._observe(active) if h else _take(self._last, active)
                for stack, rows in _pairs(seen, before):
                    stack[active, h] = rows
            result = self._adapter.step(active, actions[active, h])
            reward[active, h], valid[active, h] = self._reward(active, result), True
            terminated[active, h] = result.terminated
            # An episode that succeeded in its last allowed step has terminated; it is not bootstrapped.
            truncated[active, h] = result.truncated & ~result.terminated
            success[active] |= result.success
            over = result.terminated | result.truncated
            if over.any():
                finished = [e for e, done in zip(active, over, strict=True) if done]
                # Taken now: a batched simulator moves on even where an episode has ended.
                self._store(finished, self._observe(finished))
                ended += finished
                active = [e for e, done in zip(active, over, strict=True) if not done]
        self._store(active, self._observe(active))
        ended.sort()
        final = _take(self._last, ended)
        again = [e for e in ended if next_seeds[e] is not None]
        self._begin(again, [seed for seed in (next_seeds[e] for e in again) if seed is not None])
        self._store(again, self._observe(again))
        self._idle[ended] = [next_seeds[e] is None for e in ended]
        return {
            "reward": reward,
            "valid": valid,
            "terminated": terminated,
            "truncated": truncated,
            "success": success,
            "observation": _copy(self._last),
            "final_rows": np.array(ended, np.int64),
            "final_observation": final,
            "busy_s": time.perf_counter() - began,
            **({} if seen is None else {"seen": seen}),
        }

    def expert_episode(self, seed: int, noise: float) -> dict[str, Any]:
        """One episode of the scripted expert in environment 0, which is idle afterwards.

        The executed action is the expert's plus Gaussian noise; the recorded one is the expert's own, so that
        states off its path are paired with what it would do there.

        Args:
            seed: the initial state; the noise follows from it too.
            noise: standard deviation of the noise in action units.

        Returns:
            `images` {camera: uint8 [T, h, w, 3]}, `proprioception` float32 [T, S], `actions` and `executed`
            float32 [T, A], `reward` float32 [T], `success` bool, `instruction` str. Row t is what was seen before
            action t.
        """
        random = np.random.default_rng([seed, 0x0E5BE27])
        expert = expert_for(self._spec["id"], self._spec["control_mode"])
        memory: dict[str, Any] = {}
        seen: list[Observation] = []
        wanted, executed, rewards = [], [], []
        self._begin([0], [seed])
        self._idle[0] = True
        success = False
        for _ in range(self._spec["max_episode_steps"]):
            seen.append(self._observe([0]))
            positions = {name: rows[0] for name, rows in self._adapter.scene_positions([0]).items()}
            action = self._clip(expert.act(positions, memory))
            disturbance = noise * random.standard_normal(action.shape).astype(np.float32)
            moved = self._clip(action + expert.disturbance(action, disturbance))
            result = self._adapter.step([0], moved[None])
            wanted.append(action)
            executed.append(moved)
            rewards.append(self._reward([0], result)[0])
            success = success or bool(result.success[0])
            if result.terminated[0] or result.truncated[0]:
                break
        self._store([0], self._observe([0]))
        cameras = [c["name"] for c in self._spec["cameras"]] if self._images else []
        return {
            "images": {name: np.concatenate([o["images"][name] for o in seen]) for name in cameras},
            "proprioception": np.concatenate([o["proprioception"] for o in seen]),
            "actions": np.stack(wanted),
            "executed": np.stack(executed),
            "reward": np.array(rewards, np.float32),
            "success": success,
            "instruction": seen[0]["instructions"][0],
        }

    def scene_positions(self) -> dict[str, np.ndarray]:
        """Privileged `object`, `goal`, `gripper` positions of all environments, each float32 [B, 3]."""
        return self._adapter.scene_positions(range(self.num_envs))

    def _begin(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        self._adapter.reset(indices, seeds)
        self._earlier[list(indices)] = 0

    def _reward(self, indices: Sequence[int], result: StepResult) -> np.ndarray:
        """What is learned from of this step, float32 [n]."""
        if self._spec["reward"] == "success":
            return result.success.astype(np.float32)
        if self._spec["reward"] == "environment":
            return result.reward
        grown = result.reward - self._earlier[indices]
        self._earlier[indices] = result.reward
        return grown

    def _observe(self, indices: Sequence[int]) -> Observation:
        if not indices:
            return _take(self._last, [])
        return {
            "images": self._pictures(indices) if self._images else {},
            "proprioception": self._adapter.proprioception(indices),
            "instructions": self._adapter.instructions(indices),
        }

    def _pictures(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """What the cameras show, the declared ones turned by 180°: here and nowhere else."""
        images = self._adapter.render(indices)
        for name in self._spec["turned_cameras"]:
            images[name] = images[name][:, ::-1, ::-1]
        return images

    def _store(self, indices: Sequence[int], observation: Observation) -> None:
        if not indices:
            return
        self._last["proprioception"][indices] = observation["proprioception"]
        for name, stack in observation["images"].items():
            self._last["images"][name][indices] = stack
        for index, text in zip(indices, observation["instructions"], strict=True):
            self._last["instructions"][index] = text

    def _nothing_seen(self, steps: int) -> Observation:
        blank = self._blank()
        return {
            "images": {
                name: np.zeros((len(stack), steps, *stack.shape[1:]), stack.dtype)
                for name, stack in blank["images"].items()
            },
            "proprioception": np.zeros((self.num_envs, steps, self._spec["state_width"]), np.float32),
        }

    def _blank(self) -> Observation:
        cameras = self._spec["cameras"] if self._images else []
        return {
            "images": {c["name"]: np.zeros((self.num_envs, c["height"], c["width"], 3), np.uint8) for c in cameras},
            "proprioception": np.zeros((self.num_envs, self._spec["state_width"]), np.float32),
            "instructions": [self._spec["instruction"]] * self.num_envs,
        }

    def _clip(self, actions: np.ndarray) -> np.ndarray:
        return np.clip(actions, self._adapter.action_low, self._adapter.action_high)

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        wanted = f"[{self.num_envs}, H, {self._spec['action_width']}]"
        if not isinstance(actions, np.ndarray) or actions.ndim != 3:
            raise TenantFault(refusal("actions", np.shape(actions), wanted, "send one chunk an environment"))
        if actions.shape[0] != self.num_envs or actions.shape[2] != self._spec["action_width"] or not actions.shape[1]:
            raise TenantFault(refusal("actions", actions.shape, wanted, "send one chunk an environment"))
        if not np.isfinite(actions).all():
            raise TenantFault("actions: got a value that is not finite; possible: finite numbers; check the policy")
        return self._clip(actions.astype(np.float32, copy=False))

    def _check_length(self, field: str, seeds: Sequence[int | None]) -> None:
        if len(seeds) != self.num_envs:
            raise TenantFault(
                refusal(field, f"{len(seeds)} values", f"{self.num_envs}, one an environment", "send as many")
            )


def _take(observation: Observation, rows: Sequence[int]) -> Observation:
    """A copy of some rows."""
    index = np.array(rows, np.int64)
    return {
        "images": {name: stack[index] for name, stack in observation["images"].items()},
        "proprioception": observation["proprioception"][index],
        "instructions": [observation["instructions"][row] for row in rows],
    }


def _pairs(kept: Observation, seen: Observation) -> list[tuple[np.ndarray, np.ndarray]]:
    """Arrays of the same name."""
    pictures = [(stack, seen["images"][name]) for name, stack in kept["images"].items()]
    return [*pictures, (kept["proprioception"], seen["proprioception"])]


def _copy(observation: Observation) -> Observation:
    return {
        "images": {name: stack.copy() for name, stack in observation["images"].items()},
        "proprioception": observation["proprioception"].copy(),
        "instructions": list(observation["instructions"]),
    }
