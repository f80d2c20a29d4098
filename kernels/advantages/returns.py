"""Returns that are summed, not averaged over horizons: n decisions and then the critic, or all of the episode."""

from __future__ import annotations

import numpy as np

from kernels.advantages.decisions import Decisions, Fields, columns, decisions


def n_step(fields: Fields, *, num_envs: int, gamma: float, n_steps: int, value_baseline: bool) -> dict[str, np.ndarray]:
    """Returns of n decisions, then the critic (Sutton and Barto 2018, equation 7.1), over chunk decisions.

    G = R₀ + d₀ R₁ + d₀ d₁ R₂ + … + d₀ … dₘ₋₁ · V', d = gamma to the executed actions, with m = n, or fewer where the
    episode or the rollout ends before: then V' is what followed the last of them, 0 after a termination, the value
    of the *final* observation after a truncation, `next_value` at the rollout's end.

    Args:
        fields: as `kernels.advantages.gae` reads them.
        num_envs: environments stepped together.
        gamma: discount of one action.
        n_steps: decisions (chunks, not actions) whose reward is counted, at least 1.
        value_baseline: the advantage is G − V; else G itself.

    Returns:
        {"advantage": f32 [n, H], the decision's at each valid action and 0 elsewhere; "return": f32 [n], G}.

    Raises:
        DataFault: if the rows are no multiple of `num_envs`, or a valid row holds NaN.
    """
    of = decisions(fields, num_envs=num_envs, gamma=gamma)
    one, goes_on, reward, discount = _one_step(of, num_envs)
    returns = one
    for _ in range(min(n_steps, len(one)) - 1):
        longer = one.copy()
        longer[:-1] = np.where(goes_on[:-1], reward[:-1] + discount[:-1] * returns[1:], one[:-1])
        returns = longer
    return _with_baseline(of, returns.reshape(-1), value_baseline)


def monte_carlo(fields: Fields, *, num_envs: int, gamma: float, value_baseline: bool) -> dict[str, np.ndarray]:
    """Returns up to the episode's end (Sutton and Barto 2018, equation 3.8), over chunk decisions.

    The critic is asked only where what came after was not seen: at a truncation and at the rollout's end, as in
    `n_step` with as many decisions as the rollout has. With `value_baseline` this is GAE with lambda 1.

    Args:
        fields: as `kernels.advantages.gae` reads them.
        num_envs: environments stepped together.
        gamma: discount of one action.
        value_baseline: the advantage is G − V; else G itself.

    Returns:
        {"advantage": f32 [n, H], the decision's at each valid action and 0 elsewhere; "return": f32 [n], G}.

    Raises:
        DataFault: if the rows are no multiple of `num_envs`, or a valid row holds NaN.
    """
    of = decisions(fields, num_envs=num_envs, gamma=gamma)
    one, goes_on, reward, discount = _one_step(of, num_envs)
    returns = one.copy()
    for step in reversed(range(len(one) - 1)):
        seen = reward[step] + discount[step] * returns[step + 1]
        returns[step] = np.where(goes_on[step], seen, one[step])
    return _with_baseline(of, returns.reshape(-1), value_baseline)


def _one_step(of: Decisions, num_envs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[steps, num_envs] each: return of one decision and then the critic, whether the next row goes on with the
    episode, reward, discount."""

    def by_step(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, num_envs)

    reward, discount, is_sample = by_step(of.reward), by_step(of.discount), by_step(of.is_sample)
    one = np.where(is_sample, reward + discount * by_step(of.following), 0.0)
    # Where the next row is no sample nothing more was seen, and the critic's word on what came next stands.
    goes_on = by_step(of.goes_on) & np.concatenate([is_sample[1:], np.zeros((1, num_envs), bool)])
    return one, goes_on, reward, discount


def _with_baseline(of: Decisions, returns: np.ndarray, value_baseline: bool) -> dict[str, np.ndarray]:
    advantage = returns - of.value if value_baseline else returns
    return columns(of.valid, advantage, returns)
