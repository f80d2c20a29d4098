"""Scripted experts: privileged positions in, the action of one step out.

An expert is a function of `positions` (`object`, `goal`, `gripper`, each float32 [3], in metres or, for Reach-v0,
table half-widths) and of `memory`, a dict that is empty at the start of an episode and in which it may keep its
phase. Actions are in the environment's own units. Experts never see pictures; policies never see positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from configs.errors import UnknownObject, refusal
from services.environments.reach import STEP

Expert = Callable[[Mapping[str, np.ndarray], dict[str, Any]], np.ndarray]


def reach(positions: Mapping[str, np.ndarray], _memory: dict[str, Any]) -> np.ndarray:
    """Proportional control to the target; float32 [2]."""
    return np.clip((positions["goal"] - positions["gripper"])[:2] / STEP, -1.0, 1.0).astype(np.float32)


EXPERTS: dict[str, Expert] = {"Reach-v0": reach}


def expert_for(env_id: str) -> Expert:
    """The expert of one environment id.

    Raises:
        UnknownObject: if there is none; the known ids are listed.
    """
    if env_id not in EXPERTS:
        raise UnknownObject(refusal("expert", env_id, ", ".join(sorted(EXPERTS)), "write one in experts.py"))
    return EXPERTS[env_id]
