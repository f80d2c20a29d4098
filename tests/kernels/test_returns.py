"""n-step and Monte-Carlo returns by hand and against a loop over single actions; what all estimators share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import DataFault
from kernels.advantages import gae, monte_carlo, n_step
from tests.kernels.rollouts import random_rollout, rollout

Estimate = Callable[[dict[str, np.ndarray], int, float], dict[str, np.ndarray]]

OF_DECISIONS: dict[str, Estimate] = {
    "gae": lambda fields, num_envs, gamma: gae(fields, num_envs=num_envs, gamma=gamma, gae_lambda=1.0),
    "n_step": lambda fields, num_envs, gamma: n_step(
        fields, num_envs=num_envs, gamma=gamma, n_steps=9, value_baseline=True
    ),
    "monte_carlo": lambda fields, num_envs, gamma: monte_carlo(
        fields, num_envs=num_envs, gamma=gamma, value_baseline=True
    ),
}


@pytest.fixture(params=sorted(OF_DECISIONS))
def estimate(request: pytest.FixtureRequest) -> Estimate:
    """Each estimator of decisions, with settings under which all give the discounted return minus the value."""
    return OF_DECISIONS[request.param]


@pytest.mark.parametrize("valid", [[1, 0, 0, 0], [1, 1, 1, 1]])
def test_reward_after_the_end_leaks_nowhere(estimate: Estimate, valid: list[int]) -> None:
    """Rewards 1, −1, 0.5, 0, terminated at the first: 1.0, the rest masked, even where it is called valid.

    With everything counted it would be 1 − 1 + 0.5 + 0 = 0.5.
    """
    fields = rollout(1, 1, 4, reward=[1, -1, 0.5, 0], valid=valid, terminated=[1, 0, 0, 0], next_value=[9])
    result = estimate(fields, 1, 1.0)
    np.testing.assert_array_equal(result["advantage"], [[1, 0, 0, 0]])
    np.testing.assert_array_equal(result["return"], [1])


def test_an_end_after_the_end_is_none(estimate: Estimate) -> None:
    """Truncated at the first action, "terminated" at the second, which was not executed: bootstrap, 2 + 0.5 · 4."""
    fields = rollout(1, 1, 2, reward=[2, 8], truncated=[1, 0], terminated=[0, 1], bootstrap_value=[4], next_value=[9])
    np.testing.assert_array_equal(estimate(fields, 1, 0.5)["advantage"], [[4, 0]])


def test_truncation_is_not_termination_and_the_reset_does_not_leak() -> None:
    """V = 1, truncated at t = 1, V(final) = 2, V(first after reset) = 5, γ = 0.99.

    Monte-Carlo: G1 = 0.99 · 2 = 1.98, G0 = 0.99 · 1.98 = 1.9602. One step: G0 = 0.99 · V(1) = 0.99.
    """
    fields = rollout(2, 1, 1, value=[1, 1], truncated=[0, 1], bootstrap_value=[0, 2], next_value=[1, 5])
    whole = monte_carlo(fields, num_envs=1, gamma=0.99, value_baseline=True)
    np.testing.assert_allclose(whole["return"], [1.9602, 1.98], rtol=1e-6)
    np.testing.assert_allclose(whole["advantage"][:, 0], [0.9602, 0.98], rtol=1e-6)
    one = n_step(fields, num_envs=1, gamma=0.99, n_steps=1, value_baseline=True)
    np.testing.assert_allclose(one["return"], [0.99, 1.98], rtol=1e-6)
    ended = monte_carlo(fields | {"terminated": fields["truncated"]}, num_envs=1, gamma=0.99, value_baseline=True)
    np.testing.assert_array_equal(ended["return"], [0, 0])


def test_only_the_environment_that_truncated_is_bootstrapped_from_its_end(estimate: Estimate) -> None:
    fields = rollout(1, 2, 1, value=[1, 1], truncated=[1, 0], bootstrap_value=[2, 100], next_value=[50, 3])
    np.testing.assert_array_equal(estimate(fields, 2, 0.5)["advantage"][:, 0], [0.5 * 2 - 1, 0.5 * 3 - 1])


def test_n_decisions_by_hand() -> None:
    """Rewards 1, 2, 4, 8, γ = ½, V of what follows 16 each: G of two decisions is R0 + ½ R1 + ¼ · 16.

    1 + 1 + 4 = 6; 2 + 2 + 4 = 8; 4 + 4 + 4 = 12; at the rollout's end one decision: 8 + ½ · 16 = 16.
    """
    fields = rollout(4, 1, 1, reward=[1, 2, 4, 8], next_value=[16] * 4, value=[1] * 4)
    with_baseline = n_step(fields, num_envs=1, gamma=0.5, n_steps=2, value_baseline=True)
    np.testing.assert_array_equal(with_baseline["return"], [6, 8, 12, 16])
    np.testing.assert_array_equal(with_baseline["advantage"][:, 0], [5, 7, 11, 15])
    without = n_step(fields, num_envs=1, gamma=0.5, n_steps=2, value_baseline=False)
    np.testing.assert_array_equal(without["advantage"][:, 0], [6, 8, 12, 16])


def test_a_chunk_is_one_decision_discounted_by_what_it_executed() -> None:
    """Chunks of 2, γ = ½: R = 1 + ½ · 1 = 1.5, d = ¼. Two decisions: 1.5 + ¼ · 1.5 + 1/16 · 32 = 3.875."""
    fields = rollout(2, 1, 2, reward=np.ones((2, 2)), next_value=[0, 32])
    found = n_step(fields, num_envs=1, gamma=0.5, n_steps=2, value_baseline=False)
    np.testing.assert_array_equal(found["return"], [3.875, 1.5 + 0.25 * 32])
    np.testing.assert_array_equal(found["advantage"], [[3.875, 3.875], [9.5, 9.5]])


def test_the_reset_transition_is_no_sample(estimate: Estimate) -> None:
    """Auto-reset in the next step: the row after an end resets and executes nothing; what it holds reaches nobody.

    Terminated with reward 1, reset, then 2 and 4 with γ = ½: 1 | masked | 2 + ½ · (4 + ½ · V(6)) = 5.5, 4 + ½ · 6 = 7.
    """
    fields = rollout(
        4,
        1,
        1,
        reward=[1, np.nan, 2, 4],
        valid=[1, 0, 1, 1],
        sample_valid=[1, 0, 1, 1],
        terminated=[1, 1, 0, 0],
        value=[0, np.nan, 0, 0],
        next_value=[50, np.nan, 0, 6],
    )
    found = estimate(fields, 1, 0.5)
    np.testing.assert_array_equal(found["advantage"][:, 0], [1, 0, 5.5, 7])
    np.testing.assert_array_equal(found["return"], found["advantage"][:, 0])


def test_an_environment_that_idles_is_bootstrapped_where_it_stopped(estimate: Estimate) -> None:
    """t = 0 goes on, but no sample follows: 1 + ½ · V(8)."""
    fields = rollout(2, 1, 1, reward=[1, 9], valid=[1, 0], sample_valid=[1, 0], next_value=[8, 3])
    np.testing.assert_array_equal(estimate(fields, 1, 0.5)["return"], [5, 0])


def test_nan_and_rows_that_do_not_fit_are_refused(estimate: Estimate) -> None:
    with pytest.raises(DataFault, match=r"reward, value: got 'NaN or infinity at rows \[0\]'; possible: finite"):
        estimate(rollout(1, 1, 1, reward=[np.nan]), 1, 1.0)
    with pytest.raises(DataFault, match="num_envs: got 2; possible: a divisor of the 3 rows"):
        estimate(rollout(3, 1, 1), 2, 1.0)


def loop(fields: dict[str, np.ndarray], num_envs: int, gamma: float, n_steps: int) -> np.ndarray:
    """G of every row, by walking single actions forward from it."""
    n = len(fields["reward"])
    returns = np.zeros(n)
    for start in range(n):
        row, discount, decisions_left = start, 1.0, n_steps
        while True:
            for h in range(int(fields["valid"][row].sum())):
                returns[start] += discount * float(fields["reward"][row, h])
                discount *= gamma
            decisions_left -= 1
            if fields["terminated"][row].any():
                break
            if fields["truncated"][row].any():
                returns[start] += discount * float(fields["bootstrap_value"][row])
                break
            if decisions_left == 0 or row + num_envs >= n:
                returns[start] += discount * float(fields["next_value"][row])
                break
            row += num_envs
    return returns


SIZES = (st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))


@given(*SIZES, st.integers(1, 7), st.booleans())
def test_equals_a_walk_over_single_actions(
    steps: int, num_envs: int, horizon: int, seed: int, n_steps: int, value_baseline: bool
) -> None:
    fields = random_rollout(steps, num_envs, horizon, seed)
    taken_off = fields["value"] if value_baseline else np.zeros_like(fields["value"])
    for found, length in (
        (n_step(fields, num_envs=num_envs, gamma=0.9, n_steps=n_steps, value_baseline=value_baseline), n_steps),
        (monte_carlo(fields, num_envs=num_envs, gamma=0.9, value_baseline=value_baseline), steps),
    ):
        expected = loop(fields, num_envs, 0.9, length)
        np.testing.assert_allclose(found["return"], expected, atol=1e-5)
        spread = np.where(fields["valid"], (expected - taken_off)[:, None], 0)
        np.testing.assert_allclose(found["advantage"], spread, atol=1e-5)


@given(*SIZES)
def test_gae_lies_between_one_step_and_monte_carlo(steps: int, num_envs: int, horizon: int, seed: int) -> None:
    """Lambda 0 is one decision and then the critic, lambda 1 the whole episode."""
    fields = random_rollout(steps, num_envs, horizon, seed)
    for gae_lambda, other in (
        (0.0, n_step(fields, num_envs=num_envs, gamma=0.9, n_steps=1, value_baseline=True)),
        (1.0, monte_carlo(fields, num_envs=num_envs, gamma=0.9, value_baseline=True)),
    ):
        found = gae(fields, num_envs=num_envs, gamma=0.9, gae_lambda=gae_lambda)
        np.testing.assert_allclose(found["advantage"], other["advantage"], atol=1e-5)
        np.testing.assert_allclose(found["return"], other["return"], atol=1e-5)
