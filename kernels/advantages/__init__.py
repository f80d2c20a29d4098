"""Advantage estimators over a rollout's partition fields (numpy; nothing here needs gradients).

Rows are t-major (row = t × num_envs + environment); a row is one decision: a chunk of H actions of which the first
were executed. Time runs with the index. Estimators of decisions (`gae`, `n_step`, `monte_carlo`) ask the critic what
comes after, those of groups (`grpo`, `rloo`) compare the outcomes of episodes and need none. A new one: a function of
the same signature in its family's file, one line in `ESTIMATORS`, one literal in configs/algorithm.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.advantages.decisions import Fields, executed
from kernels.advantages.gae import gae
from kernels.advantages.groups import group_counts, grpo, rloo
from kernels.advantages.returns import monte_carlo, n_step
from kernels.advantages.standardise import Moments, moments, standardise

ESTIMATORS: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "gae": gae,
    "n_step": n_step,
    "monte_carlo": monte_carlo,
    "group_mean": grpo,
    "leave_one_out": rloo,
}

__all__ = [
    "ESTIMATORS",
    "Fields",
    "Moments",
    "executed",
    "gae",
    "group_counts",
    "grpo",
    "moments",
    "monte_carlo",
    "n_step",
    "rloo",
    "standardise",
]
