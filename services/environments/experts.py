"""Scripted experts: privileged positions in, the action of one step out.

An expert is a function of `positions` (`object`, `goal`, `gripper`, each float32 [3], in metres or, for Reach-v0,
table half-widths) and of `memory`, a dict that is empty at the start of an episode and in which it may keep its
phase. Actions are in the environment's own units. Experts never see pictures; policies never see positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import SpecError, UnknownObject, refusal
from services.environments.reach import STEP


@dataclass(frozen=True)
class Expert:
    """A scripted policy.

    Attributes:
        act: positions and memory to the action float32 [A] of this step.
        steady: action dimensions that get no noise when demonstrations are disturbed (a gripper would drop things).
        rests: a step in which it asks for no movement gets none either: the task ends when the robot stands still,
            which noise alone would prevent.
        control_mode: whose actions it gives; None where the environment has but one.
    """

    act: Callable[[Mapping[str, np.ndarray], dict[str, Any]], np.ndarray]
    steady: tuple[int, ...] = ()
    rests: bool = False
    control_mode: str | None = None

    def disturbance(self, action: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """What of `noise` [A] is added to the `action` [A] that it asks for."""
        moving = np.ones(len(action), bool)
        moving[list(self.steady)] = False
        return np.where(moving & (action[moving].any() or not self.rests), noise, np.float32(0))


def reach(positions: Mapping[str, np.ndarray], _memory: dict[str, Any]) -> np.ndarray:
    """Proportional control to the target; float32 [2]."""
    return np.clip((positions["goal"] - positions["gripper"])[:2] / STEP, -1.0, 1.0).astype(np.float32)


_REACH_M = 0.1
"""Displacement of the gripper that a full action of `pd_ee_delta_pos` asks for, in metres."""
_OPEN, _CLOSED = 1.0, -1.0


def push_cube(positions: Mapping[str, np.ndarray], _memory: dict[str, Any]) -> np.ndarray:
    """PushCube-v1: go behind the cube, down, and push it along +x; float32 [4] of `pd_ee_delta_pos`.

    A function of the positions alone, so that after a disturbance it takes up where the scene now is.
    """
    gripper, cube, goal = positions["gripper"], positions["object"], positions["goal"]
    behind = np.array([cube[0] - 0.065, cube[1], 0.02])
    ready = gripper[0] < cube[0] - 0.015 and abs(gripper[1] - cube[1]) < 0.02 and gripper[2] < 0.05
    if ready:
        target = np.array([goal[0] - 0.03, cube[1], 0.02])
    elif gripper[0] > cube[0] - 0.04 and gripper[2] < 0.06 and np.hypot(*(gripper - cube)[:2]) < 0.09:
        target = np.array([behind[0], gripper[1], 0.12])  # beside or before the cube: over it, not through it
    elif np.hypot(*(gripper - behind)[:2]) > 0.03:
        target = np.array([behind[0], behind[1], 0.08])
    else:
        target = behind
    return _towards(gripper, target, _CLOSED)


_ANSWER = np.array([1.4, 2.0, 2.0])
"""By how much more than the way to go is asked for: in one step the arm covers a half of what is asked along x, and a
third along y and z."""
_BETWEEN = np.array([0.018, 0.015, 0.017])
"""Offset of the cube from the gripper, in metres, at which closing the fingers takes hold of it (they open along y)."""
_LOST = 0.035
"""A cube farther from the gripper than this, in metres, is not between its fingers."""
_RESTS = 0.016
"""So near to its goal, in metres, the cube is held still: the task is done when the robot is at rest."""


def pick_cube(positions: Mapping[str, np.ndarray], memory: dict[str, Any]) -> np.ndarray:
    """PickCube-v1: above the cube, down, close, carry to the goal and rest; float32 [4] of `pd_ee_delta_pos`.

    Where the scene is decides; the memory counts the steps since the fingers began to close. A cube that slipped out of
    them is far from the gripper: they open again, and it is approached anew.
    """
    gripper, cube, goal = positions["gripper"], positions["object"], positions["goal"]
    offset = cube - gripper
    across = np.abs(offset)
    closed = memory.get("closed", 0)
    if closed and np.linalg.norm(offset) > _LOST:
        closed = 0
    if closed or (across < _BETWEEN).all():
        memory["closed"] = closed + 1
        if closed < 2:  # the fingers take two steps, and centre the cube along y themselves
            return _towards(gripper, np.array([cube[0], gripper[1], cube[2]]), _CLOSED)
        if np.linalg.norm(goal - cube) < _RESTS:
            return _towards(gripper, gripper, _CLOSED)
        return _towards(gripper, gripper + (goal - cube), _CLOSED, _ANSWER)
    memory["closed"] = 0
    over = across[0] < 0.022 and across[1] < 0.018
    # Elsewhere the fingers pass over the cube, not through it.
    return _towards(gripper, cube + np.array([0.0, 0.0, -0.004 if over else 0.055]), _OPEN, _ANSWER)


def _towards(gripper: np.ndarray, target: np.ndarray, fingers: float, gain: np.ndarray | float = 1.0) -> np.ndarray:
    move = np.clip((target - gripper) / _REACH_M * gain, -1.0, 1.0)
    return np.array([*move, fingers], np.float32)


EXPERTS: dict[str, Expert] = {
    "Reach-v0": Expert(reach),
    "PushCube-v1": Expert(push_cube, steady=(3,), control_mode="pd_ee_delta_pos"),
    "PickCube-v1": Expert(pick_cube, steady=(3,), rests=True, control_mode="pd_ee_delta_pos"),
}


def expert_for(env_id: str, control_mode: str | None) -> Expert:
    """The expert of one environment id.

    Raises:
        UnknownObject: if there is none; the known ids are listed.
        SpecError: if it acts in another control mode.
    """
    if env_id not in EXPERTS:
        raise UnknownObject(refusal("expert", env_id, ", ".join(sorted(EXPERTS)), "write one in experts.py"))
    expert = EXPERTS[env_id]
    if control_mode != expert.control_mode:
        possible = f"{expert.control_mode}, in which the expert of {env_id} acts"
        raise SpecError(refusal("control_mode", control_mode, possible, "take a preset with it"))
    return expert
