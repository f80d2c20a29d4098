"""Disjoint ranges of environment seeds: evaluation, demonstrations, pretraining and RL training never share one.

An initial state is a function of its seed alone, so disjoint ranges make "held out" a matter of arithmetic. Every
request for seeds is held to its range: those that a person chooses by the declarations (`require_within`), those of
RL rollouts by `training_seed` and `group_seed`.
"""

from __future__ import annotations

from typing import Final

from configs.errors import SpecError, refusal

EVALUATION: Final = range(0, 100_000)
DEMONSTRATIONS: Final = range(100_000, 1_000_000)
PRETRAINING: Final = range(1_000_000, 10_000_000)
TRAINING: Final = range(10_000_000, 2**31)
EPISODES_PER_ROLLOUT: Final = 4_096
ROLLOUTS_PER_SEED: Final = 4_096
_GROUPS_PER_ROLLOUT: Final = 2**32
ALGORITHM_SEEDS: Final = range(len(TRAINING) // (ROLLOUTS_PER_SEED * EPISODES_PER_ROLLOUT))
"""What an RL workload may declare as its `algorithm.seed`: each has a part of TRAINING of its own."""


def training_seed(seed: int, rollout: int, episode: int) -> int:
    """Environment seed of the `episode`-th episode of the `rollout`-th rollout under a workload's `seed`.

    Episodes are numbered by environment and order within it, never by who finished first. Those beyond
    EPISODES_PER_ROLLOUT see the next rollout's initial states, rollouts beyond ROLLOUTS_PER_SEED (of a policy that is
    continued again and again) the first ones' once more; all stay in TRAINING.

    Raises:
        SpecError: where the number would leave TRAINING.
    """
    index = (seed * ROLLOUTS_PER_SEED + rollout % ROLLOUTS_PER_SEED) * EPISODES_PER_ROLLOUT + episode
    if not 0 <= index < len(TRAINING):
        raise SpecError(
            refusal(
                "algorithm.seed",
                f"{seed} in rollout {rollout}, episode {episode}",
                f"seeds 0 to {ALGORITHM_SEEDS[-1]} with {ROLLOUTS_PER_SEED} rollouts each",
                "choose a smaller seed or fewer jobs",
            )
        )
    return TRAINING[index]


def group_seed(seed: int, rollout: int, episode: int, group_size: int) -> int:
    """Environment seed of an episode that shares its initial state with its group: that of the group's number.

    Episodes are numbered as in services/rollout.py (environment e's k-th is e + k × num_envs). Where `group_size`
    divides num_envs, a group is the k-th episodes of `group_size` environments side by side. With groups of one this
    is `training_seed`.

    Raises:
        SpecError: as `training_seed`, or for a `group_size` below 1.
    """
    return training_seed(seed, rollout, _group_number(episode, group_size))


def group_id(rollout: int, episode: int, group_size: int) -> int:
    """Which group an episode is compared within: one number for each group of each rollout, fit for int64.

    Unlike `group_seed` it does not come round to the next rollout's, however many groups a rollout has.

    Raises:
        SpecError: for a `group_size` below 1.
    """
    return rollout * _GROUPS_PER_ROLLOUT + _group_number(episode, group_size)


def _group_number(episode: int, group_size: int) -> int:
    if group_size < 1:
        raise SpecError(refusal("group_size", group_size, "1 or more", "correct it"))
    return episode // group_size


def require_within(allowed: range, first_seed: int, count: int, terms: str) -> None:
    """Check that the `count` seeds from `first_seed` on lie in `allowed`; for validators of declarations.

    Args:
        allowed: one of the ranges above.
        first_seed: the first seed.
        count: seeds that may be used.
        terms: `count` in words of the declaration's fields, for the message.

    Raises:
        ValueError: naming `first_seed` and what bounds it.
    """
    if first_seed < allowed.start or first_seed + count > allowed.stop:
        raise ValueError(
            refusal(
                "first_seed",
                first_seed,
                f"{allowed.start} to {allowed.stop - count} ({allowed.stop} less {count}, {terms})",
                "choose one of these, or fewer episodes: seeds outside are other work's",
            )
        )
