"""Partition fields of small rollouts, by hand and at random."""

from __future__ import annotations

from typing import Any

import numpy as np


def rollout(steps: int, num_envs: int, horizon: int, **fields: Any) -> dict[str, np.ndarray]:
    """A rollout without reward or end whose values are all 0, with some fields replaced."""
    n = steps * num_envs
    made = {
        "reward": np.zeros((n, horizon), np.float32),
        "valid": np.ones((n, horizon), bool),
        "terminated": np.zeros((n, horizon), bool),
        "truncated": np.zeros((n, horizon), bool),
        "value": np.zeros(n, np.float32),
        "bootstrap_value": np.zeros(n, np.float32),
        "next_value": np.zeros(n, np.float32),
        "sample_valid": np.ones(n, bool),
        "group": np.zeros(n, np.int64),
    }
    for name, value in fields.items():
        made[name] = np.asarray(value, made[name].dtype).reshape(made[name].shape)
    return made


def random_rollout(steps: int, num_envs: int, horizon: int, seed: int, end: float = 0.2) -> dict[str, np.ndarray]:
    """Numbers of all fields drawn at random; an action ends its episode with probability `end`, of either kind.

    Inside the rollout `next_value` is the next row's value, as services record it where no episode ended.
    """
    random = np.random.default_rng(seed)
    n = steps * num_envs
    ends = random.random((n, horizon)) < end
    valid = np.cumsum(ends, axis=1) - ends == 0
    kind = random.random((n, 1)) < 0.5
    value = random.standard_normal(n)
    return rollout(
        steps,
        num_envs,
        horizon,
        reward=random.standard_normal((n, horizon)),
        valid=valid,
        terminated=ends & valid & kind,
        truncated=ends & valid & ~kind,
        value=value,
        bootstrap_value=random.standard_normal(n),
        next_value=np.concatenate([value[num_envs:], random.standard_normal(num_envs)]),
    )
