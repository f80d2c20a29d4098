"""Generalised advantages by hand: ends, truncations, chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.algorithm import GaeSpec, GroupMeanSpec, LeaveOneOutSpec, MonteCarloSpec, NStepSpec
from configs.errors import DataFault
from kernels.advantages import ESTIMATORS, gae
from tests.kernels.rollouts import rollout


def test_a_chunk_that_ended_early_counts_only_what_happened_in_it() -> None:
    """Rewards 1, −1, 0.5, 0, terminated at the first: the advantage is 1.0 and the rest is masked."""
    fields = rollout(1, 1, 4, reward=[1, -1, 0.5, 0], valid=[1, 0, 0, 0], terminated=[1, 0, 0, 0], next_value=[9])
    result = gae(fields, num_envs=1, gamma=1.0, gae_lambda=1.0)
    np.testing.assert_array_equal(result["advantage"], [[1, 0, 0, 0]])
    np.testing.assert_array_equal(result["return"], [1])


def test_truncation_bootstraps_from_the_final_observation() -> None:
    """V = 1, truncated at t = 1 with V(final) = 2, V(first after reset) = 5:
    A1 = 0.99·2 − 1 = 0.98, A0 = (0.99 − 1) + 0.99·0.95·0.98 = 0.9117."""
    fields = rollout(2, 1, 1, value=[1, 1], truncated=[0, 1], bootstrap_value=[0, 2], next_value=[1, 5])
    result = gae(fields, num_envs=1, gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(result["advantage"][:, 0], [0.91169, 0.98], atol=1e-6)
    np.testing.assert_allclose(result["return"], [1.91169, 1.98], atol=1e-6)


def test_only_the_environment_that_truncated_is_bootstrapped() -> None:
    """Two environments, t-major: the second is not truncated and goes on from next_value."""
    fields = rollout(1, 2, 1, value=[1, 1], truncated=[1, 0], bootstrap_value=[2, 100], next_value=[50, 3])
    result = gae(fields, num_envs=2, gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(result["advantage"][:, 0], [0.5 * 2 - 1, 0.5 * 3 - 1])


def test_termination_bootstraps_nothing_even_if_truncated_too() -> None:
    fields = rollout(
        1, 1, 2, reward=[1, 2], terminated=[0, 1], truncated=[0, 1], bootstrap_value=[7], next_value=[7], value=[0.5]
    )
    result = gae(fields, num_envs=1, gamma=0.5, gae_lambda=1.0)
    # 1 + 0.5·2 − 0.5
    np.testing.assert_allclose(result["advantage"], [[1.5, 1.5]])


def test_the_next_decision_is_discounted_by_the_actions_executed() -> None:
    """Chunks of 3: R = 1 + 0.5 + 0.25 = 1.75 and gamma³ = 0.125; A1 = 1.75 + 0.125·8, A0 = 1.75 + 0.125·A1."""
    fields = rollout(2, 1, 3, reward=np.ones((2, 3)), next_value=[0, 8])
    result = gae(fields, num_envs=1, gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(result["advantage"][:, 0], [1.75 + 0.125 * 2.75, 2.75])


def test_a_reset_within_the_rollout_separates_episodes() -> None:
    """Terminated at t = 0; the reward of 10 at t = 1 belongs to the next episode."""
    fields = rollout(2, 1, 1, reward=[1, 10], terminated=[1, 1], next_value=[4, 4])
    result = gae(fields, num_envs=1, gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(result["advantage"][:, 0], [1, 10])


def test_rows_that_are_no_samples_get_zero_and_give_nothing() -> None:
    """An idle environment's row, with anything in its fields, even NaN."""
    fields = rollout(
        2,
        1,
        2,
        reward=[[1, 1], [np.nan, 5]],
        valid=[[1, 1], [0, 0]],
        terminated=[[0, 1], [1, 1]],
        value=[0, np.nan],
        next_value=[3, np.nan],
        sample_valid=[1, 0],
    )
    result = gae(fields, num_envs=1, gamma=1.0, gae_lambda=1.0)
    np.testing.assert_array_equal(result["advantage"], [[2, 2], [0, 0]])
    np.testing.assert_array_equal(result["return"], [2, 0])


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))
def test_equals_a_loop_over_single_actions(steps: int, num_envs: int, horizon: int, seed: int) -> None:
    """With lambda 1 the advantage is the discounted return up to the episode's end, minus the value."""
    random = np.random.default_rng(seed)
    n = steps * num_envs
    ends = random.random((n, horizon)) < 0.2
    valid = np.cumsum(ends, axis=1) - ends == 0
    kind = random.random(n) < 0.5
    fields = rollout(
        steps,
        num_envs,
        horizon,
        reward=random.standard_normal((n, horizon)),
        valid=valid,
        terminated=ends & valid & kind[:, None],
        truncated=ends & valid & ~kind[:, None],
        value=random.standard_normal(n),
        bootstrap_value=random.standard_normal(n),
        next_value=random.standard_normal(n),
    )
    gamma = 0.9
    expected = np.zeros(n)
    for env in range(num_envs):
        following = None
        for step in reversed(range(steps)):
            row = step * num_envs + env
            if fields["terminated"][row].any():
                after = 0.0
            elif fields["truncated"][row].any():
                after = float(fields["bootstrap_value"][row])
            else:
                after = float(fields["next_value"][row]) if following is None else following
            for h in reversed(range(int(valid[row].sum()))):
                after = float(fields["reward"][row, h]) + gamma * after
            expected[row] = after
            following = after
    # With lambda 1 the values in between cancel only if next_value is the next row's value.
    for env in range(num_envs):
        for step in range(steps - 1):
            row = step * num_envs + env
            fields["next_value"][row] = fields["value"][row + num_envs]
    result = gae(fields, num_envs=num_envs, gamma=gamma, gae_lambda=1.0)
    np.testing.assert_allclose(result["return"], expected, atol=1e-4)
    np.testing.assert_allclose(result["advantage"][~valid], 0)


def test_rows_that_do_not_fit_and_nan_are_refused() -> None:
    with pytest.raises(DataFault, match="num_envs: got 2; possible: a divisor of the 3 rows"):
        gae(rollout(3, 1, 1), num_envs=2, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(DataFault, match=r"reward, value: got 'NaN or infinity at rows \[0\]'"):
        gae(rollout(1, 1, 1, value=[np.nan]), num_envs=1, gamma=1.0, gae_lambda=1.0)


def test_estimators_are_those_that_a_workload_can_name() -> None:
    """The literals of PPO's and REINFORCE's estimators and of GRPO's baselines, no more and no fewer."""
    kinds = [GaeSpec, NStepSpec, MonteCarloSpec, GroupMeanSpec, LeaveOneOutSpec]
    assert set(ESTIMATORS) == {kind.model_fields["kind"].default for kind in kinds}
