"""Disjoint ranges of environment seeds: evaluation, demonstrations, pretraining and RL training never share one.

An initial state is a function of its seed alone, so disjoint ranges make "held out" a matter of arithmetic.
"""

from __future__ import annotations

from typing import Final

EVALUATION: Final = range(0, 100_000)
DEMONSTRATIONS: Final = range(100_000, 1_000_000)
PRETRAINING: Final = range(1_000_000, 10_000_000)
TRAINING: Final = range(10_000_000, 2**31)
EPISODES_PER_ROLLOUT: Final = 4_096
ROLLOUTS_PER_SEED: Final = 4_096


def training_seed(seed: int, rollout: int, episode: int) -> int:
    """Environment seed of the `episode`-th episode of the `rollout`-th rollout under a workload's `seed`.

    Episodes are numbered by environment and order within it, never by who finished first.
    """
    index = (seed * ROLLOUTS_PER_SEED + rollout) * EPISODES_PER_ROLLOUT + episode
    return TRAINING.start + index % len(TRAINING)
