"""The environment loops against a scripted session whose every number is known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from configs import seeds
from configs.errors import EnvironmentFault
from services.rollout import Observation, Prediction, collect_rollout, run_episodes


class CountingSession:
    """Environments whose state is (seed, step): an episode of seed s ends after `length(s)` steps.

    Odd seeds end by termination and succeed, even ones by truncation. Reward is the step's number.
    """

    def __init__(self, num_envs: int, lengths: dict[int, int]) -> None:
        self._lengths = lengths
        self._state: list[tuple[int, int] | None] = [None] * num_envs
        self.resets: list[int] = []

    async def reset(self, seeds: Sequence[int | None]) -> Observation:
        self._state = [None if seed is None else (seed, 0) for seed in seeds]
        self.resets += [seed for seed in seeds if seed is not None]
        return self._observe(range(len(self._state)))

    def _observe(self, rows: Sequence[int]) -> Observation:
        states = [self._state[e] or (0, 0) for e in rows]
        return {
            "images": {"top": np.array([[[[s % 256, t, 0]]] for s, t in states], np.uint8)},
            "proprioception": np.array(states, np.float32),
            "instructions": [f"seed {s}" for s, _ in states],
        }

    async def batch_step(
        self, actions: np.ndarray, next_seeds: Sequence[int | None], *, every_step: bool = False
    ) -> dict[str, Any]:
        shape = actions.shape[:2]
        reward, flags = (
            np.zeros(shape, np.float32),
            {k: np.zeros(shape, bool) for k in ("valid", "terminated", "truncated")},
        )
        success, ended = np.zeros(shape[0], bool), []
        for e, state in enumerate(self._state):
            for h in range(shape[1]):
                if (state := self._state[e]) is None or e in ended:
                    continue
                seed, step = state
                self._state[e] = (seed, step + 1)
                reward[e, h], flags["valid"][e, h] = step + 1, True
                if step + 1 == self._lengths[seed]:
                    flags["terminated" if seed % 2 else "truncated"][e, h] = True
                    success[e] = bool(seed % 2)
                    ended.append(e)
        final = self._observe(ended)
        for e in ended:
            seed = next_seeds[e]
            self._state[e] = None if seed is None else (seed, 0)
            self.resets += [] if seed is None else [seed]
        return {
            "reward": reward,
            **flags,
            "success": success,
            "final_rows": np.array(ended, np.int64),
            "final_observation": final,
            "observation": self._observe(range(len(self._state))),
        }


async def value_is_seed_and_step(observation: Observation) -> Prediction:
    """V = 100 × seed + step, so that every value tells which observation it was of."""
    seed, step = observation["proprioception"].T
    n = len(seed)
    action = np.zeros((n, 1, 2), np.float32)
    return Prediction(action, action, np.zeros((n, 1), np.float32), (100 * seed + step).astype(np.float32))


def collect(session: CountingSession, **arguments: Any) -> tuple[dict[str, np.ndarray], list[str], Any]:
    async def main() -> tuple[dict[str, np.ndarray], list[str], Any]:
        collected = await collect_rollout(
            value_is_seed_and_step,
            session,
            **{"seed_of_episode": lambda n: n, "progress": lambda _done, _of: None} | arguments,
        )
        after = await collected.values_after(value_is_seed_and_step)
        return {**collected.data, **after}, collected.instructions, collected.episodes

    return asyncio.run(main())


def test_truncation_is_bootstrapped_from_the_final_observation_of_that_environment_alone() -> None:
    """Environment 0 (seed 0, even) is truncated after 2 steps, environment 1 (seed 1) goes on.

    Row 2 is step 1 of environment 0: its bootstrap is V(seed 0, step 2) = 2, not V of seed 2's first observation (200).
    """
    data, _, _ = collect(CountingSession(2, {0: 2, 1: 9, 2: 9}), num_envs=2, steps=3)
    np.testing.assert_array_equal(data["bootstrap_value"], [0, 0, 2, 0, 0, 0])
    assert "group" not in data, "nothing is compared where no group was asked for"
    np.testing.assert_array_equal(data["truncated"][:, 0], [False, False, True, False, False, False])


def test_termination_is_not_bootstrapped() -> None:
    data, _, _ = collect(CountingSession(1, {0: 9}), num_envs=1, steps=1)
    assert data["bootstrap_value"].tolist() == [0]
    session = CountingSession(2, {0: 9, 1: 1, 3: 9})
    data, _, episodes = collect(session, num_envs=2, steps=1)
    assert data["terminated"][1, 0]
    assert data["bootstrap_value"].tolist() == [0, 0]
    assert episodes.success == {1: True}


def test_the_last_rows_are_followed_by_the_observation_after_the_rollout() -> None:
    """V(t+1) inside; behind the last step V of what is seen then: seed 0 at step 2 → 2, seed 1 at step 2 → 102."""
    data, _, _ = collect(CountingSession(2, {0: 9, 1: 9}), num_envs=2, steps=2)
    np.testing.assert_array_equal(data["value"], [0, 100, 1, 101])
    np.testing.assert_array_equal(data["next_value"], [1, 101, 2, 102])


def test_an_episodes_seed_depends_on_its_number_not_on_who_finishes_first() -> None:
    """Environment 1's episodes last one step: it runs the seeds 1, 3, 5; environment 0 stays at 0."""
    session = CountingSession(2, {0: 9, 1: 1, 3: 1, 5: 9})
    _, instructions, episodes = collect(session, num_envs=2, steps=3)
    assert session.resets == [0, 1, 3, 5]
    assert instructions == ["seed 0", "seed 1", "seed 0", "seed 3", "seed 0", "seed 5"]
    assert episodes.success == {1: True, 3: True}


def test_episodes_of_a_group_begin_alike_in_environments_side_by_side() -> None:
    """Four environments in groups of two: seeds a, a, b, b; episodes of a last one step, so its environments go on
    together to the group c = a + 2, whose seed is the same whoever came there first."""
    a = seeds.group_seed(0, 3, 0, 2)
    session = CountingSession(4, {a: 1, a + 1: 9, a + 2: 9})
    data, instructions, _ = collect(
        session,
        seed_of_episode=lambda n: seeds.group_seed(0, 3, n, 2),
        group_of_episode=lambda n: seeds.group_id(3, n, 2),
        num_envs=4,
        steps=2,
    )
    first = 3 * 2**32
    assert data["group"].dtype == np.int64
    assert (data["group"] - first).tolist() == [0, 0, 1, 1, 2, 2, 1, 1]
    assert session.resets == [a, a, a + 1, a + 1, a + 2, a + 2]
    assert instructions == [f"seed {seed}" for seed in (a, a, a + 1, a + 1, a + 2, a + 2, a + 1, a + 1)]
    np.testing.assert_array_equal(data["proprioception"][:4, 1], 0)


def test_handed_out_observations_are_copies() -> None:
    """A simulator that reuses its buffer does not change what was collected."""
    data, _, _ = collect(CountingSession(1, {0: 9}), num_envs=1, steps=3)
    assert data["image.top"][:, 0, 0, 1].tolist() == [0, 1, 2]


def test_evaluation_runs_one_episode_a_seed_whoever_finishes_first() -> None:
    """Five seeds over two environments: 11, 13, 15 in one, 12, 14 in the other; returns are 1 + … + length."""
    session = CountingSession(2, {11: 1, 12: 3, 13: 2, 14: 1, 15: 1})
    episodes = asyncio.run(
        run_episodes(value_is_seed_and_step, session, num_envs=2, seeds=range(11, 16), progress=lambda _done, _of: None)
    )
    assert episodes.success == {0: True, 1: False, 2: True, 3: False, 4: True}
    assert episodes.total_reward == {0: 1.0, 1: 6.0, 2: 3.0, 3: 1.0, 4: 1.0}
    assert sorted(session.resets) == [11, 12, 13, 14, 15]
    assert episodes.summary()["success_rate"] == pytest.approx(0.6)


def test_fewer_seeds_than_environments_leave_the_others_idle() -> None:
    session = CountingSession(4, {7: 2})
    episodes = asyncio.run(
        run_episodes(value_is_seed_and_step, session, num_envs=4, seeds=[7], progress=lambda _done, _of: None)
    )
    assert (session.resets, episodes.length) == ([7], {0: 2})


def test_a_simulator_of_garbage_shapes_is_an_environment_fault() -> None:
    class Garbage(CountingSession):
        async def batch_step(
            self, actions: np.ndarray, next_seeds: Sequence[int | None], *, every_step: bool = False
        ) -> dict[str, Any]:
            return {**await super().batch_step(actions, next_seeds), "reward": np.zeros(3)}

    with pytest.raises(EnvironmentFault, match=r"environment.reward: got shape \(3,\); possible: \(1, 1\)"):
        collect(Garbage(1, {0: 9}), num_envs=1, steps=1)
