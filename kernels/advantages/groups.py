"""Advantages of whole episodes against others of their group; no critic is asked.

A group is what shares a group id (the same task from the same start, tried several times), whatever the label's value
or the rows' order. An episode's outcome is the sum of its executed rewards, each discounted by how many actions came
before it, and its advantage stands at each of its valid actions. Episodes are found by their ends: what an environment
does from its first row, or the row after an end, up to the next. One that did not end within the rollout has no
outcome: it joins no group and carries no loss, so the rollout has to be long enough for what it is to learn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from configs.errors import DataFault, refusal
from kernels.advantages.decisions import Fields, check_rows, ended, executed

KeepReturn = tuple[float, float]
"""Bounds, both included, on a group's mean outcome; groups beyond them carry no loss."""


@dataclass(frozen=True, eq=False)
class _Episodes:
    """k episodes of a rollout.

    Attributes:
        valid: bool [n, H], actions that were executed.
        of_row: int64 [n], the row's episode; −1 where the row is no sample.
        outcome: float64 [k].
        has_ended: bool [k].
        group: int64 [k].
    """

    valid: np.ndarray
    of_row: np.ndarray
    outcome: np.ndarray
    has_ended: np.ndarray
    group: np.ndarray


@dataclass(frozen=True)
class _Group:
    """Episodes of one group that ended, and what they have in common."""

    members: np.ndarray
    mean: float
    std: float
    is_constant: bool
    is_kept: bool


def grpo(
    fields: Fields,
    *,
    num_envs: int,
    scale: Literal["std", "none"],
    keep_return: KeepReturn | None,
    gamma: float = 1.0,
) -> dict[str, np.ndarray]:
    """Group-relative advantages: A = (R − mean of the group) / deviation of the group.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; `scale` "none" leaves the division out, as Liu et al. 2025
    (Dr. GRPO) do. The deviation is the group's own (ddof 0). A group whose outcomes are all equal, by their range, has
    advantage exactly 0; so has a group of one. `keep_return` filters groups as the dynamic sampling of Yu et al. 2025
    (DAPO) does: with outcomes of 0 and 1, (0.1, 0.9) leaves out what is always or never solved.

    Args:
        fields: reward f32 [n, H], valid bool [n, H], terminated bool [n, H], truncated bool [n, H],
            sample_valid bool [n], group int64 [n], the group of the row's episode; n = steps × num_envs.
        num_envs: environments stepped together.
        scale: what the difference is divided by.
        keep_return: bounds on a group's mean outcome; None keeps all.
        gamma: discount of one action; below 1, of two episodes that gain the same the quicker one is better.

    Returns:
        {"advantage": f32 [n, H], 0 where it carries no loss; "loss_mask": bool [n, H], valid actions of episodes that
        ended, in groups that are kept}.

    Raises:
        DataFault: if n is no multiple of `num_envs`, an episode's rows name several groups, or a reward is NaN.
    """
    episodes = _episodes(fields, num_envs, gamma)
    advantage = np.zeros(len(episodes.outcome))
    for group in _groups(episodes, keep_return):
        if not group.is_constant:
            difference = episodes.outcome[group.members] - group.mean
            advantage[group.members] = difference / group.std if scale == "std" else difference
    return _columns(episodes, advantage, keep_return)


def rloo(fields: Fields, *, num_envs: int, keep_return: KeepReturn | None, gamma: float = 1.0) -> dict[str, np.ndarray]:
    """Leave-one-out advantages: A = R − mean of the *others* of the group.

    Source: Kool et al. 2019, Ahmadian et al. 2024 (RLOO); it equals k / (k − 1) · (R − mean of all k).
    A group of one has nothing to compare with: 0. Equal outcomes, by their range, give exactly 0.

    Args:
        fields: as `grpo` reads them.
        num_envs: environments stepped together.
        keep_return: bounds on a group's mean outcome; None keeps all.
        gamma: as `grpo`.

    Returns:
        As `grpo`.

    Raises:
        DataFault: as `grpo`.
    """
    episodes = _episodes(fields, num_envs, gamma)
    advantage = np.zeros(len(episodes.outcome))
    for group in _groups(episodes, keep_return):
        if not group.is_constant:
            size = len(group.members)
            advantage[group.members] = size / (size - 1) * (episodes.outcome[group.members] - group.mean)
    return _columns(episodes, advantage, keep_return)


def group_counts(
    fields: Fields, *, num_envs: int, keep_return: KeepReturn | None, gamma: float = 1.0
) -> dict[str, int]:
    """What became of a rollout's groups: groups, filtered_groups, constant_groups (of those kept), unfinished_episodes.

    Args:
        fields: as `grpo` reads them.
        num_envs: environments stepped together.
        keep_return: bounds on a group's mean outcome.
        gamma: as `grpo`.

    Raises:
        DataFault: as `grpo`.
    """
    episodes = _episodes(fields, num_envs, gamma)
    groups = _groups(episodes, keep_return)
    return {
        "groups": len(groups),
        "filtered_groups": sum(not group.is_kept for group in groups),
        "constant_groups": sum(group.is_kept and group.is_constant for group in groups),
        "unfinished_episodes": int((~episodes.has_ended).sum()),
    }


def _episodes(fields: Fields, num_envs: int, gamma: float) -> _Episodes:
    check_rows(fields, num_envs)
    valid = executed(fields)
    is_sample = valid.any(axis=1)
    over = np.logical_or(*ended(fields, valid)).reshape(-1, num_envs)
    number = np.cumsum(over, axis=0) - over  # ends before the row, in its environment
    key = (number * num_envs + np.arange(num_envs)).reshape(-1)
    keys, of_sample = np.unique(key[is_sample], return_inverse=True)
    of_row = np.full(len(key), -1)
    of_row[is_sample] = of_sample

    discount = gamma ** _actions_before(valid, over)
    reward = (np.where(valid, fields["reward"], 0.0).astype(np.float64) * discount).sum(axis=1)
    outcome = np.bincount(of_sample, reward[is_sample], minlength=len(keys))
    if not np.isfinite(outcome).all():
        rows = np.flatnonzero(~np.isfinite(reward))[:8].tolist()
        raise DataFault(refusal("reward", f"NaN or infinity at rows {rows}", "finite numbers", "drop the job"))
    has_ended = np.bincount(of_sample, over.reshape(-1)[is_sample], minlength=len(keys)) > 0

    group = np.zeros(len(keys), np.int64)
    group[of_sample] = fields["group"][is_sample]
    if (mixed := fields["group"][is_sample] != group[of_sample]).any():
        row = int(np.flatnonzero(is_sample)[mixed][0])
        given = f"{int(fields['group'][row])} at row {row}"
        raise DataFault(refusal("group", given, "one group an episode", "name the episode's group at all of its rows"))
    return _Episodes(valid, of_row, outcome, has_ended, group)


def _actions_before(valid: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Actions executed in the episode before each one: valid [n, H] and over [T, E] to int64 [n, H]."""
    of_row = valid.sum(axis=1).reshape(over.shape)
    earlier = np.cumsum(of_row, axis=0) - of_row  # in this environment, in the rollout
    begins = np.vstack([np.ones_like(over[:1]), over[:-1]])
    at_begin = np.maximum.accumulate(np.where(begins, earlier, 0), axis=0)
    return (earlier - at_begin).reshape(-1, 1) + np.cumsum(valid, axis=1) - valid


def _groups(episodes: _Episodes, keep_return: KeepReturn | None) -> list[_Group]:
    """Groups of the episodes that ended. Sums are exactly rounded, so that the order of episodes changes no bit."""
    found = []
    for label in np.unique(episodes.group[episodes.has_ended]):
        members = np.flatnonzero(episodes.has_ended & (episodes.group == label))
        outcome = episodes.outcome[members]
        mean = math.fsum(outcome) / len(members)
        # By range: ten rewards of 0.7 in float32 have a deviation that is tiny, but not 0.
        is_constant = float(np.ptp(outcome)) <= 1e-6 * max(1.0, float(np.abs(outcome).max()))
        std = math.sqrt(math.fsum((outcome - mean) ** 2) / len(members))
        is_kept = keep_return is None or keep_return[0] <= mean <= keep_return[1]
        found.append(_Group(members, mean, std, is_constant, is_kept))
    return found


def _columns(episodes: _Episodes, advantage: np.ndarray, keep_return: KeepReturn | None) -> dict[str, np.ndarray]:
    carries = np.zeros(len(advantage) + 1, bool)  # the last one is read by rows of no episode
    for group in _groups(episodes, keep_return):
        carries[group.members] = group.is_kept
    mask = episodes.valid & carries[episodes.of_row][:, None]
    of_row = np.append(advantage, 0.0)[episodes.of_row]
    return {"advantage": np.where(mask, of_row[:, None], 0.0).astype(np.float32), "loss_mask": mask}
