"""A rollout's rows as decisions: what each chunk earned, what it discounts, what followed it.

The decision's reward is the discounted sum of its executed rewards and its discount gamma to the number of executed
actions, so a chunk that ended early counts only what happened in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.errors import DataFault, refusal

Fields = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Decisions:
    """n = steps × num_envs decisions; float64, so that sums of a long rollout keep their float32 result exact.

    Attributes:
        valid: bool [n, H], actions that were executed.
        reward: [n], discounted to the chunk's first action.
        discount: [n], gamma to the number of executed actions.
        value: [n], V; 0 where the row is no sample.
        following: [n], V': 0 where the chunk terminated, the value of the *final* observation where it was truncated,
            of the next one elsewhere.
        is_sample: bool [n].
        goes_on: bool [n], a sample whose episode did not end in it.
    """

    valid: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    value: np.ndarray
    following: np.ndarray
    is_sample: np.ndarray
    goes_on: np.ndarray


def check_rows(fields: Fields, num_envs: int) -> None:
    """Raises DataFault if the rows are no multiple of `num_envs`."""
    count = len(fields["reward"])
    if num_envs <= 0 or count % num_envs:
        raise DataFault(refusal("num_envs", num_envs, f"a divisor of the {count} rows", "pass the rollout's own"))


def executed(fields: Fields) -> np.ndarray:
    """bool [n, H]: valid actions of rows that are samples, up to the one in which the episode ended.

    What a chunk holds after its episode's end is masked here whatever `valid` says of it.
    """
    valid = fields["valid"].astype(bool) & fields["sample_valid"].astype(bool)[:, None]
    ends = (fields["terminated"].astype(bool) | fields["truncated"].astype(bool)) & valid
    return valid & (np.cumsum(ends, axis=1) - ends == 0)


def ended(fields: Fields, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [n] each: rows that terminated, and those that were only truncated (both at once is a termination)."""
    terminated = (fields["terminated"].astype(bool) & valid).any(axis=1)
    return terminated, (fields["truncated"].astype(bool) & valid).any(axis=1) & ~terminated


def decisions(fields: Fields, *, num_envs: int, gamma: float) -> Decisions:
    """The rows of a rollout.

    Args:
        fields: reward f32 [n, H], valid bool [n, H], terminated bool [n, H], truncated bool [n, H], value f32 [n],
            bootstrap_value f32 [n], next_value f32 [n], sample_valid bool [n].
        num_envs: environments stepped together.
        gamma: discount of one action.

    Raises:
        DataFault: if n is no multiple of `num_envs`.
    """
    check_rows(fields, num_envs)
    is_sample = fields["sample_valid"].astype(bool)
    valid = executed(fields)
    terminated, truncated = ended(fields, valid)
    reward = np.where(valid, fields["reward"], 0.0).astype(np.float64)
    reward = (reward * gamma ** np.maximum(np.cumsum(valid, axis=1) - 1, 0)).sum(axis=1)
    following = np.where(truncated, fields["bootstrap_value"], fields["next_value"]).astype(np.float64)
    return Decisions(
        valid,
        reward,
        gamma ** valid.sum(axis=1).astype(np.float64),
        np.where(is_sample, fields["value"], 0.0).astype(np.float64),
        np.where(terminated | ~is_sample, 0.0, following),
        is_sample,
        is_sample & ~terminated & ~truncated,
    )


def columns(valid: np.ndarray, advantage: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """What an estimator of decisions gives: {"advantage": f32 [n, H], "return": f32 [n]}.

    Args:
        valid: bool [n, H]; the advantage is 0 elsewhere.
        advantage: float64 [n], of each decision.
        target: float64 [n], what the critic is to learn.

    Raises:
        DataFault: if a number is not finite.
    """
    if not np.isfinite(advantage).all():
        rows = np.flatnonzero(~np.isfinite(advantage))[:8].tolist()
        raise DataFault(refusal("reward, value", f"NaN or infinity at rows {rows}", "finite numbers", "drop the job"))
    return {
        "advantage": np.where(valid, advantage[:, None], 0.0).astype(np.float32),
        "return": target.astype(np.float32),
    }
