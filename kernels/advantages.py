"""Advantage estimators over a rollout's partition fields (numpy; nothing here needs gradients).

Rows are t-major (row = t × num_envs + environment); a row is one decision: a chunk of H actions of which the first
`valid` were executed. The decision's reward is the discounted sum of its valid rewards and its discount gamma to the
number of executed actions, so a chunk that ended early counts only what happened in it. Time runs with the index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from configs.errors import DataFault, refusal

Fields = Mapping[str, np.ndarray]


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
    count = len(fields["reward"])
    if num_envs <= 0 or count % num_envs:
        raise DataFault(refusal("num_envs", num_envs, f"a divisor of the {count} rows", "pass the rollout's own"))
    sample_valid = fields["sample_valid"].astype(bool)
    valid = fields["valid"].astype(bool) & sample_valid[:, None]
    terminated = (fields["terminated"].astype(bool) & valid).any(axis=1)
    truncated = (fields["truncated"].astype(bool) & valid).any(axis=1) & ~terminated
    executed = valid.sum(axis=1)
    # float64 inside: sums of a long rollout keep their float32 result exact.
    reward = np.where(valid, fields["reward"], 0.0).astype(np.float64)
    reward = (reward * gamma ** np.maximum(np.cumsum(valid, axis=1) - 1, 0)).sum(axis=1)
    discount = gamma ** executed.astype(np.float64)
    value = np.where(sample_valid, fields["value"], 0.0).astype(np.float64)
    following = np.where(truncated, fields["bootstrap_value"], fields["next_value"]).astype(np.float64)
    following = np.where(terminated | ~sample_valid, 0.0, following)
    delta = np.where(sample_valid, reward + discount * following - value, 0.0)
    goes_on = sample_valid & ~terminated & ~truncated

    def by_step(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, num_envs)

    decay = by_step(np.where(goes_on, discount * gae_lambda, 0.0))
    deltas = by_step(delta)
    advantages = np.zeros_like(deltas)
    later = np.zeros(num_envs)
    for step in reversed(range(len(deltas))):
        later = deltas[step] + decay[step] * later
        advantages[step] = later
    advantage = advantages.reshape(-1)
    if not np.isfinite(advantage).all():
        rows = np.flatnonzero(~np.isfinite(advantage))[:8].tolist()
        raise DataFault(refusal("reward, value", f"NaN or infinity at rows {rows}", "finite numbers", "drop the job"))
    return {
        "advantage": np.where(valid, advantage[:, None], 0.0).astype(np.float32),
        "return": (advantage + value).astype(np.float32),
    }


def standardise(advantage: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Zero mean and unit deviation over the masked elements, 0 elsewhere.

    Where all are equal (by range: a tiny deviation in float32 would blow rounding up) the result is exactly 0.

    Args:
        advantage: float32, any shape.
        mask: bool of the same shape, elements that count.
    """
    chosen = advantage[mask].astype(np.float64)
    out = np.zeros(advantage.shape, np.float32)
    if chosen.size == 0 or float(np.ptp(chosen)) <= 1e-6 * max(1.0, float(np.abs(chosen).max())):
        return out
    out[mask] = (chosen - chosen.mean()) / chosen.std()
    return out


ESTIMATORS: dict[str, Callable[..., dict[str, np.ndarray]]] = {"gae": gae}
