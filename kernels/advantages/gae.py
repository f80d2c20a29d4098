"""Generalised advantage estimation."""

from __future__ import annotations

import numpy as np

from kernels.advantages.decisions import Fields, columns, decisions


def gae(fields: Fields, *, num_envs: int, gamma: float, gae_lambda: float) -> dict[str, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016) over chunk decisions.

    δ = R + gamma^k · V' − V; A = δ + gamma^k · lambda · A', the last term only where the episode went on.
    V' is 0 where the chunk terminated, the value of the *final* observation (`bootstrap_value`) where it was
    truncated, `next_value` elsewhere. An episode that terminates and is truncated at once has terminated.

    Args:
        fields: reward f32 [n, H], valid bool [n, H], terminated bool [n, H], truncated bool [n, H], value f32 [n],
            bootstrap_value f32 [n], next_value f32 [n], sample_valid bool [n]; n = steps × num_envs.
        num_envs: environments stepped together.
        gamma: discount of one action.
        gae_lambda: decay of one decision.

    Returns:
        {"advantage": f32 [n, H], the decision's at each valid action and 0 elsewhere; "return": f32 [n], A + V}.

    Raises:
        DataFault: if n is no multiple of `num_envs`, or a valid row holds NaN.
    """
    of = decisions(fields, num_envs=num_envs, gamma=gamma)
    delta = np.where(of.is_sample, of.reward + of.discount * of.following - of.value, 0.0)
    deltas = delta.reshape(-1, num_envs)
    decay = np.where(of.goes_on, of.discount * gae_lambda, 0.0).reshape(-1, num_envs)
    advantages = np.zeros_like(deltas)
    later = np.zeros(num_envs)
    for step in reversed(range(len(deltas))):
        later = deltas[step] + decay[step] * later
        advantages[step] = later
    advantage = advantages.reshape(-1)
    return columns(of.valid, advantage, advantage + of.value)
