"""Advantages against a group: by hand, constant and lone groups, filters, unfinished episodes, order and labels."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import DataFault
from kernels.advantages import group_counts, grpo, rloo
from tests.kernels.rollouts import random_rollout, rollout


def episodes(outcomes: list[float], groups: list[int], **fields: Any) -> dict[str, np.ndarray]:
    """One environment an episode, each of one decision."""
    count = len(outcomes)
    return rollout(1, count, 1, reward=outcomes, group=groups, terminated=np.ones(count), **fields)


def by_std(fields: dict[str, np.ndarray], num_envs: int, **settings: Any) -> dict[str, np.ndarray]:
    return grpo(fields, num_envs=num_envs, **{"scale": "std", "keep_return": None, **settings})


def test_two_groups_by_hand() -> None:
    """Group 7: 1 and 3, mean 2, deviation 1. Group −2: 0, 0, 3, mean 1, deviation √2, the others' means 1.5, 1.5, 0."""
    fields = episodes([1, 0, 3, 0, 3], [7, -2, 7, -2, -2])
    root = 2**0.5
    np.testing.assert_allclose(by_std(fields, 5)["advantage"][:, 0], [-1, -1 / root, 1, -1 / root, 2 / root])
    np.testing.assert_allclose(by_std(fields, 5, scale="none")["advantage"][:, 0], [-1, -1, 1, -1, 2])
    np.testing.assert_allclose(
        rloo(fields, num_envs=5, keep_return=None)["advantage"][:, 0], [-2, -1.5, 2, -1.5, 3], rtol=1e-7
    )
    assert group_counts(fields, num_envs=5, keep_return=None) == {
        "groups": 2,
        "filtered_groups": 0,
        "constant_groups": 0,
        "unfinished_episodes": 0,
    }


def test_a_discount_makes_the_quicker_of_two_equal_episodes_better() -> None:
    """Two environments, chunks of 2, gamma ½; the second chunk of each first episode ends it, as the third does.

    Environment 0: 1 at once, then an end: outcome 1. Its second episode: 4 in its first action: 4, though the rollout
    is at its third chunk. Environment 1: 8 at its third action, ½² · 8 = 2; what stands past the end does not count.
    Its second episode: 2 at its second action, ½ · 2 = 1. One group: mean 2; the others' means 7/3, 4/3, 2, 7/3.
    """
    reward = np.float32([[[1, 0], [0, 0]], [[0, 0], [8, 99]], [[4, 0], [0, 2]]])
    terminated = np.array([[[0, 0], [0, 0]], [[0, 1], [1, 0]], [[0, 1], [0, 1]]], bool)
    valid = np.ones((3, 2, 2), bool)
    valid[1, 1, 1] = False
    rows = {
        name: kept.reshape(6, 2) for name, kept in (("reward", reward), ("terminated", terminated), ("valid", valid))
    }
    fields = rollout(3, 2, 2, **rows, group=np.zeros(6, np.int64))
    found = by_std(fields, 2, scale="none", gamma=0.5)["advantage"][:, 0].reshape(3, 2)
    np.testing.assert_allclose(found, [[-1, 0], [-1, 0], [2, -1]])
    left_out = rloo(fields, num_envs=2, keep_return=None, gamma=0.5)["advantage"][:, 0].reshape(3, 2)
    np.testing.assert_allclose(left_out, [[-4 / 3, 0], [-4 / 3, 0], [8 / 3, -4 / 3]], rtol=1e-6)
    assert group_counts(fields, num_envs=2, keep_return=(1.9, 2.1), gamma=0.5)["filtered_groups"] == 0
    assert group_counts(fields, num_envs=2, keep_return=(1.9, 2.1))["filtered_groups"] == 1


def test_a_constant_group_is_exactly_zero_whatever_its_deviation() -> None:
    """Ten outcomes of 0.7 in float32; ten that are 0.7 but for the order in which seven tenths were added up."""
    same = episodes([0.7] * 10, [0] * 10)
    parts = np.random.default_rng(0).permuted(np.tile(np.float32([0.1, 0.25, 0.35]), (10, 1)), axis=1)
    rounded = rollout(1, 10, 3, reward=parts, terminated=np.tile([0, 0, 1], (10, 1)))
    for fields in (same, rounded):
        for found in (by_std(fields, 10), rloo(fields, num_envs=10, keep_return=None)):
            np.testing.assert_array_equal(found["advantage"], np.zeros_like(fields["reward"]))
            assert found["loss_mask"].all(), "it still counts"
        assert group_counts(fields, num_envs=10, keep_return=None)["constant_groups"] == 1


def test_a_group_of_one_is_zero_and_no_nan() -> None:
    fields = episodes([5, 1, 2], [0, 1, 1])
    np.testing.assert_allclose(by_std(fields, 3)["advantage"][:, 0], [0, -1, 1])
    np.testing.assert_allclose(rloo(fields, num_envs=3, keep_return=None)["advantage"][:, 0], [0, -1, 1])


def test_groups_beyond_the_bounds_carry_no_loss_and_are_counted() -> None:
    """Means 0 (never solved), 0.5, 1 (always); (0.1, 0.9) keeps the middle one, and bounds are included."""
    fields = episodes([0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    found = by_std(fields, 6, keep_return=(0.1, 0.9))
    np.testing.assert_array_equal(found["loss_mask"][:, 0], [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(found["advantage"][:, 0], [0, 0, 1, -1, 0, 0])
    assert group_counts(fields, num_envs=6, keep_return=(0.1, 0.9)) == {
        "groups": 3,
        "filtered_groups": 2,
        "constant_groups": 0,
        "unfinished_episodes": 0,
    }
    np.testing.assert_array_equal(by_std(fields, 6, keep_return=(0.5, 1.0))["loss_mask"][:, 0], [0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(rloo(fields, num_envs=6, keep_return=(0, 0))["loss_mask"][:, 0], [1, 1, 0, 0, 0, 0])


def test_episodes_are_found_by_their_ends_and_the_unfinished_carry_nothing() -> None:
    """Two environments, three steps. e0: 1 + 1 terminated, then 9 unfinished; e1: 4 truncated, then 0 + 6 terminated.

    Outcomes 2, 4, 6 of one group: mean 4, differences −2, 0, 2. The 9 counts nowhere.
    """
    fields = rollout(
        3,
        2,
        1,
        reward=[1, 4, 1, 0, 9, 6],
        terminated=[0, 0, 1, 0, 0, 1],
        truncated=[0, 1, 0, 0, 0, 0],
    )
    found = by_std(fields, 2, scale="none")
    np.testing.assert_array_equal(found["advantage"][:, 0], [-2, 0, -2, 2, 0, 2])
    np.testing.assert_array_equal(found["loss_mask"][:, 0], [1, 1, 1, 1, 0, 1])
    counts = group_counts(fields, num_envs=2, keep_return=None)
    assert (counts["groups"], counts["unfinished_episodes"]) == (1, 1)


def test_reward_after_the_end_and_rows_that_are_no_samples_leak_nowhere() -> None:
    """Chunks of 4: 1 at the end, then −1, 0.5, 0 that were not executed; then a reset row full of NaN."""
    fields = rollout(
        2,
        2,
        4,
        reward=[[1, -1, 0.5, 0], [3, 0, 0, 0], [np.nan] * 4, [np.nan] * 4],
        terminated=[[1, 0, 0, 0], [0, 0, 0, 1], [1] * 4, [0] * 4],
        sample_valid=[1, 1, 0, 0],
        group=[5, 5, 8, 9],
    )
    found = by_std(fields, 2)
    np.testing.assert_array_equal(found["advantage"], [[-1, 0, 0, 0], [1, 1, 1, 1], [0] * 4, [0] * 4])
    np.testing.assert_array_equal(found["loss_mask"], [[1, 0, 0, 0], [1, 1, 1, 1], [0] * 4, [0] * 4])
    assert group_counts(fields, num_envs=2, keep_return=None)["groups"] == 1


def test_a_rollout_in_which_nothing_ended_or_is_a_sample_gives_zero() -> None:
    for fields in (rollout(2, 2, 1, reward=[1, 2, 3, 4]), rollout(2, 2, 1, sample_valid=[0] * 4)):
        found = by_std(fields, 2)
        assert not found["loss_mask"].any()
        np.testing.assert_array_equal(found["advantage"], np.zeros((4, 1)))
        assert group_counts(fields, num_envs=2, keep_return=None)["groups"] == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataFault, match="num_envs: got 2; possible: a divisor of the 3 rows"):
        by_std(rollout(3, 1, 1), 2)
    with pytest.raises(DataFault, match=r"reward: got 'NaN or infinity at rows \[1\]'"):
        by_std(episodes([1, np.nan], [0, 0]), 2)
    with pytest.raises(DataFault, match=r"group: got '(3 at row 0|4 at row 1)'; possible: one group an episode"):
        by_std(rollout(2, 1, 1, group=[3, 4]), 1)


def grouped_rollout(steps: int, num_envs: int, horizon: int, seed: int) -> dict[str, np.ndarray]:
    """A random rollout whose episodes fall into up to three groups; outcomes are whole numbers, so that some agree."""
    fields = random_rollout(steps, num_envs, horizon, seed, end=0.3)
    random = np.random.default_rng(seed + 1)
    fields["reward"] = random.integers(0, 2, fields["reward"].shape).astype(np.float32)
    over = (fields["terminated"] | fields["truncated"]).any(axis=1)
    for env in range(num_envs):
        group = random.integers(3)
        for row in range(env, steps * num_envs, num_envs):
            fields["group"][row] = group
            if over[row]:
                group = random.integers(3)
    return fields


SIZES = (st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**16))


@given(*SIZES)
def test_equals_a_loop_over_episodes(steps: int, num_envs: int, horizon: int, seed: int) -> None:
    fields = grouped_rollout(steps, num_envs, horizon, seed)
    found: dict[int, list[tuple[float, list[int]]]] = {}
    for env in range(num_envs):
        outcome, rows = 0.0, []
        for row in range(env, steps * num_envs, num_envs):
            rows.append(row)
            outcome += float(fields["reward"][row][fields["valid"][row]].sum())
            if (fields["terminated"][row] | fields["truncated"][row]).any():
                found.setdefault(int(fields["group"][row]), []).append((outcome, rows))
                outcome, rows = 0.0, []
    scaled, left_out = np.zeros(steps * num_envs), np.zeros(steps * num_envs)
    for members in found.values():
        outcomes = [outcome for outcome, _ in members]
        for i, (outcome, rows) in enumerate(members):
            if len(set(outcomes)) > 1:
                scaled[rows] = (outcome - statistics.fmean(outcomes)) / statistics.pstdev(outcomes)
                left_out[rows] = outcome - statistics.fmean(outcomes[:i] + outcomes[i + 1 :])
    for expected, result in (
        (scaled, by_std(fields, num_envs)),
        (left_out, rloo(fields, num_envs=num_envs, keep_return=None)),
    ):
        np.testing.assert_allclose(result["advantage"], np.where(fields["valid"], expected[:, None], 0), atol=1e-6)


@given(*SIZES, st.permutations(range(4)), st.permutations([-5, 0, 2**40]))
def test_neither_the_order_of_environments_nor_the_labels_change_a_bit(
    steps: int, num_envs: int, horizon: int, seed: int, order: list[int], labels: list[int]
) -> None:
    fields = grouped_rollout(steps, num_envs, horizon, seed)
    fields["reward"] += np.random.default_rng(seed).standard_normal(fields["reward"].shape).astype(np.float32)
    order = [env for env in order if env < num_envs]
    moved = (np.arange(steps)[:, None] * num_envs + order).reshape(-1)
    other = {name: column[moved] for name, column in fields.items()}
    other["group"] = np.array(labels)[other["group"]]
    for keep_return in (None, (0.5, 2.0)):
        for estimate in (by_std, rloo):
            one = estimate(fields, num_envs=num_envs, keep_return=keep_return)
            two = estimate(other, num_envs=num_envs, keep_return=keep_return)
            for name in ("advantage", "loss_mask"):
                np.testing.assert_array_equal(one[name][moved], two[name])
        assert group_counts(fields, num_envs=num_envs, keep_return=keep_return) == group_counts(
            other, num_envs=num_envs, keep_return=keep_return
        )
