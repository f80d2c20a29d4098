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

from configs.errors import UnknownObject, refusal
from services.environments.reach import STEP


@dataclass(frozen=True)
class Expert:
    """A scripted policy.

    Attributes:
        act: positions and memory to the action float32 [A] of this step.
        steady: action dimensions that get no noise when demonstrations are disturbed (a gripper would drop things).
    """

    act: Callable[[Mapping[str, np.ndarray], dict[str, Any]], np.ndarray]
    steady: tuple[int, ...] = ()


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


def pick_cube(positions: Mapping[str, np.ndarray], memory: dict[str, Any]) -> np.ndarray:
    """PickCube-v1: above the cube, down, close, carry to the goal and rest; float32 [4] of `pd_ee_delta_pos`."""
    gripper, cube, goal = positions["gripper"], positions["object"], positions["goal"]
    offset = cube - gripper
    across = float(np.hypot(*offset[:2]))
    if np.linalg.norm(offset) > 0.035:
        memory["closing"] = 0  # not between the fingers (any more)
    closing = memory.get("closing", 0)
    if closing or (across < 0.012 and abs(offset[2]) < 0.012):
        memory["closing"] = closing + 1
        if closing < 2:
            return _towards(gripper, cube, _CLOSED)
        return _towards(gripper, goal + (gripper - cube), _CLOSED)
    # A funnel over the cube: the nearer to its axis, the lower.
    height = 0.0 if across < 0.015 else 0.07
    return _towards(gripper, cube + np.array([0.0, 0.0, height]), _OPEN)


def _towards(gripper: np.ndarray, target: np.ndarray, fingers: float) -> np.ndarray:
    move = np.clip((target - gripper) / _REACH_M, -1.0, 1.0)
    return np.array([*move, fingers], np.float32)


EXPERTS: dict[str, Expert] = {
    "Reach-v0": Expert(reach),
    "PushCube-v1": Expert(push_cube, steady=(3,)),
    "PickCube-v1": Expert(pick_cube, steady=(3,)),
}


def expert_for(env_id: str) -> Expert:
    """The expert of one environment id.

    Raises:
        UnknownObject: if there is none; the known ids are listed.
    """
    if env_id not in EXPERTS:
        raise UnknownObject(refusal("expert", env_id, ", ".join(sorted(EXPERTS)), "write one in experts.py"))
    return EXPERTS[env_id]
