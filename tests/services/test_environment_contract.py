"""The contract of a tenant's own environment: what breaks it is told with what to change; what keeps it is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from configs.errors import EnvironmentFault, SpecError
from services.environments.contract import CheckedEnvironment
from tests.services.environment_specs import toy

SPEC = toy(kind="python", id="toybox.counter:make")


class Own:
    """Keeps the contract with one and the same buffers; `faults` replaces a result by call, from a step on."""

    def __init__(self, **changes: Any) -> None:
        self.action_space = changes.pop("action_space", spaces.Box(-1.0, 1.0, (1,), np.float32))
        self._changes = changes
        self._state, self._image = np.zeros(2, np.float32), np.zeros((4, 6, 3), np.uint8)
        self._begun = 0

    def reset(self, *, seed: int) -> Any:
        self._begun += 1
        self._state[:] = seed, 0
        if "resets" in self._changes:
            return self._changes["resets"]
        if "unseeded" in self._changes:
            self._state[0] = self._begun
        return self._observation(), {"instruction": f"count from {seed}"}

    def step(self, action: np.ndarray) -> Any:
        self._state[1] += 1
        self._image[:] = int(self._state[1])
        if "steps" in self._changes:
            return self._changes["steps"]
        flags = self._changes.get("flags", (False, False))
        return self._observation(), self._changes.get("reward", 1.0), *flags, {}

    def _observation(self) -> Any:
        if "observation" in self._changes:
            return self._changes["observation"]
        return {"proprioception": self._state, "front": self._image} | self._changes.get("entries", {})


def tried(spec: dict[str, Any] = SPEC, **changes: Any) -> CheckedEnvironment:
    env = CheckedEnvironment(spec, Own(**changes))
    env.begin()
    return env


def _bounded(low: float, high: float) -> spaces.Box:
    return spaces.Box(low, high, (1,), np.float32)


FLOATS, FIRST = np.zeros((4, 6, 3), np.float32), np.zeros((3, 4, 6), np.uint8)
BROKEN = {
    "no space": (
        {"action_space": None},
        "None; wrap the environment so that its actions are a Box [A]",
    ),
    "unbounded": (
        {"action_space": _bounded(-np.inf, np.inf)},
        "possible: finite bounds, low below high; give each action its bounds, policies are clipped to them",
    ),
    "empty range": ({"action_space": _bounded(1.0, 1.0)}, "possible: finite bounds, low below high"),
    "reset's form": (
        {"resets": np.zeros(2)},
        "reset: got 'ndarray'; possible: (observation, info), info a dict; return both",
    ),
    "step's form": (
        {"steps": (np.zeros(2), 1.0, False, {})},
        "step: got 'tuple of 4'; possible: (observation, reward, terminated, truncated, info), info a dict; return "
        "all five",
    ),
    "reward": ({"reward": np.nan}, "step's reward: got nan; possible: one finite number; return float(reward)"),
    "rewards": ({"reward": np.ones(1)}, "step's reward: got array([1.]); possible: one finite number"),
    "flag": (
        {"flags": (0, False)},
        "step's terminated: got 0; possible: True or False; return bool(terminated)",
    ),
    "missing camera": (
        {"observation": {"proprioception": np.zeros(2)}},
        "reset's observation: got \"no 'front'\"; possible: it beside proprioception; add it",
    ),
    "missing state": (
        {"observation": {"front": np.zeros((4, 6, 3), np.uint8)}},
        "reset's observation: got \"no 'proprioception'\"; possible: it beside front; add it",
    ),
    "state's width": (
        {"entries": {"proprioception": np.zeros(3)}},
        "reset's proprioception: got 'shape (3,)'; possible: (2,), as state_width says; return it flat, or correct "
        "state_width",
    ),
    "state's dtype": (
        {"entries": {"proprioception": np.array(["a", "b"])}},
        "reset's proprioception: got '<U1'; possible: numbers such as float32; convert it",
    ),
    "state's value": (
        {"entries": {"proprioception": np.array([0.0, np.inf])}},
        "reset's proprioception[1]: got inf; possible: a finite float32; bound it",
    ),
    "beyond float32": ({"entries": {"proprioception": np.array([1e300, 0.0])}}, "possible: a finite float32"),
    "floating picture": (
        {"entries": {"front": FLOATS}},
        "reset's front: got 'float32'; possible: uint8 from 0 to 255; scale it: (255 * "
        "picture).round().astype(np.uint8)",
    ),
    "channels first": (
        {"entries": {"front": FIRST}},
        "reset's front: got 'shape (3, 4, 6)'; possible: (4, 6, 3), as the camera says; move the channels last: "
        "picture.transpose(1, 2, 0)",
    ),
    "alpha": (
        {"entries": {"front": np.zeros((4, 6, 4), np.uint8)}},
        "leave the alpha channel out: picture[..., :3]",
    ),
    "another size": ({"entries": {"front": np.zeros((8, 6, 3), np.uint8)}}, "correct the camera's size, or render at"),
    "no picture": (
        {"observation": np.zeros(2, np.float32)},
        "render: got 'no such method'; possible: render(), or 'front' in a dict of observations; add one",
    ),
    "unseeded": (
        {"unseeded": True},
        "reset: got 'two initial states for seed 0'; possible: the same initial state for the same seed; draw from the "
        "seed",
    ),
    "raises": ({"steps": None, "resets": None, "action_space": _bounded(-1, 1)}, "reset: got 'NoneType'"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_breaks_the_contract_is_told_with_what_to_change(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        tried(**changes)
    assert message in str(caught.value)


def test_two_cameras_take_a_dict() -> None:
    cameras = [{"name": name, "height": 4, "width": 6} for name in ("front", "wrist")]
    with pytest.raises(SpecError, match="possible: a dict with proprioception, front, wrist; return one"):
        tried(SPEC | {"cameras": cameras}, observation=np.zeros(2))


def test_what_breaks_later_is_the_environments_fault() -> None:
    env = tried()
    env._env._changes["entries"] = {"proprioception": np.array([np.nan, 0.0])}
    with pytest.raises(EnvironmentFault, match=r"step's proprioception\[0\]: got nan; possible: a finite float32"):
        env.step(np.zeros(1, np.float32))


def test_observations_are_copies_and_an_episode_ends_at_its_limit() -> None:
    """Buffers are reused by the environment: what was handed out stays. max_episode_steps is 5."""
    env = tried()
    first, info = env.reset(seed=3)
    assert info["instruction"] == "count from 3"
    steps = [env.step(np.zeros(1, np.float32)) for _ in range(5)]
    np.testing.assert_array_equal(first["proprioception"], [3, 0])
    for number, (observation, reward, terminated, truncated, _) in enumerate(steps, start=1):
        np.testing.assert_array_equal(observation["proprioception"], [3, number])
        assert observation["proprioception"].dtype == np.float32
        assert (observation["front"] == number).all()
        assert (reward, terminated, truncated) == (1.0, False, number == 5)
