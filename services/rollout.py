"""The environment loop composed over `predict`: collecting an RL rollout, and running evaluation episodes.

Plain coroutines over two callables' worth of interface (a policy bound to one version, an environment session), so the
loops are the same under any batching and any simulator. Nothing here reads a clock or writes a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from configs.errors import EnvironmentFault

FEATURE = "feature.action_tokens"
"""Partition field float32 [n, N, D] that stands in the pictures' place; see `BackendConfig.features_travel`."""

EXECUTED = "executed"
"""Partition field float32 [n, H, A]: the actions in the environment's units, which an exported rollout holds."""

Observation = dict[str, Any]
Progress = Callable[[int, int], None]


class Session(Protocol):
    """B environments stepped together; `SessionClient` is one."""

    async def reset(self, seeds: Sequence[int | None]) -> Observation: ...

    async def batch_step(
        self, actions: np.ndarray, next_seeds: Sequence[int | None], *, every_step: bool = False
    ) -> dict[str, Any]:
        """Execute a chunk open-loop, in each environment until its episode ends; see `SessionClient.batch_step`.

        Returns:
            reward float32 [B, H], valid, terminated and truncated bool [B, H], success bool [B], observation after
            automatic reset, final_rows int64 [K] and final_observation of the K whose episode ended, busy_s.
        """
        ...


class Watcher(Protocol):
    """Sees what an evaluation's episodes show; nothing that it does changes an action or a result."""

    every_step: bool
    """Wants what was seen before each action of a chunk, not only before the chunk."""

    async def keep(
        self, observation: Observation, actions: np.ndarray, step: dict[str, Any], number: Mapping[int, int]
    ) -> None:
        """Take in a chunk.

        Args:
            observation: of all environments, before it.
            actions: float32 [B, H, A] as they were sent.
            step: what came of them.
            number: of the episode that each environment was in; others are idle.
        """


@dataclass(frozen=True)
class Prediction:
    """What a bound policy answers for B rows.

    Attributes:
        action: float32 [B, H, A], in the policy's normalised space, as sampled (before any clipping).
        environment_action: float32 [B, H, A], in the environment's units.
        log_prob: float32 [B, H]; None from an action module that does not learn by RL.
        value: float32 [B]; None likewise.
        feature: float32 [B, N, D], the base's action tokens, where they were asked for.
        trace: what scoring the decision takes beside that, [B, …] each; fields of the partition.
    """

    action: np.ndarray
    environment_action: np.ndarray
    log_prob: np.ndarray | None
    value: np.ndarray | None
    feature: np.ndarray | None = None
    trace: Mapping[str, np.ndarray] = field(default_factory=dict)


Policy = Callable[[Observation], Awaitable[Prediction]]


@dataclass
class Episodes:
    """Episodes that ended, in the order of their numbers."""

    success: dict[int, bool] = field(default_factory=dict)
    total_reward: dict[int, float] = field(default_factory=dict)
    length: dict[int, int] = field(default_factory=dict)

    def summary(self) -> dict[str, float | int]:
        """Counts and means over ended episodes (0 where none ended)."""
        n = len(self.success)
        return {
            "episodes": n,
            "successes": sum(self.success.values()),
            "success_rate": sum(self.success.values()) / n if n else 0.0,
            "mean_return": sum(self.total_reward.values()) / n if n else 0.0,
            "mean_length": sum(self.length.values()) / n if n else 0.0,
        }


class _Counting:
    """Return and length of the episode that each environment is in; a finished one is filed under its number."""

    def __init__(self, num_envs: int) -> None:
        self.episodes = Episodes()
        self._reward = np.zeros(num_envs)
        self._length = np.zeros(num_envs, int)

    def add(self, step: dict[str, Any], number: Sequence[int], counted: Sequence[int]) -> list[int]:
        """Account for the chunks of the environments `counted`; those whose episode, `number[e]`, ended in it."""
        self._reward += np.where(step["valid"], step["reward"], 0).sum(axis=1, dtype=np.float64)
        self._length += step["valid"].sum(axis=1)
        over = (step["terminated"] | step["truncated"]).any(axis=1)
        ended = [e for e in counted if over[e]]
        for e in ended:
            self.episodes.success[number[e]] = bool(step["success"][e])
            self.episodes.total_reward[number[e]] = float(self._reward[e])
            self.episodes.length[number[e]] = int(self._length[e])
            self._reward[e], self._length[e] = 0.0, 0
        return ended


def rows_of(observation: Observation, rows: Sequence[int]) -> Observation:
    """Some rows of an observation batch."""
    index = list(rows)
    return {
        "images": {name: image[index] for name, image in observation["images"].items()},
        "proprioception": observation["proprioception"][index],
        "instructions": [observation["instructions"][i] for i in index],
    }


def concatenated(observations: Sequence[Observation]) -> Observation:
    """Observation batches of the same cameras, one after another."""
    return {
        "images": {n: np.concatenate([o["images"][n] for o in observations]) for n in observations[0]["images"]},
        "proprioception": np.concatenate([o["proprioception"] for o in observations]),
        "instructions": [i for o in observations for i in o["instructions"]],
    }


@dataclass
class Collected:
    """A rollout whose environments are done with.

    Attributes:
        data: partition fields [T × E, …], row = t × E + e, but for those that `values_after` adds.
        instructions: of each row.
        episodes: those that ended.
    """

    data: dict[str, np.ndarray]
    instructions: list[str]
    episodes: Episodes
    num_envs: int
    _after: list[Observation] = field(repr=False)  # what is seen after the last step, then the final observations
    _final_rows: list[int] = field(repr=False)  # rows whose episode was truncated, as in `_after[1:]`

    async def values_after(self, values: Policy, at_a_time: int = 128) -> dict[str, np.ndarray]:
        """What only values of observations outside the rows can tell, float32 [T × E] each.

        `next_value` is V of what the row's environment sees next (after its automatic reset); `bootstrap_value` V of
        the true final observation where the chunk was truncated, 0 elsewhere.

        Args:
            values: the behaviour policy's values, without sampling.
            at_a_time: rows of one request.
        """
        after = await _values(values, self._after, at_a_time)
        known = self.data["value"]
        bootstrap = np.zeros(len(known), np.float32)
        bootstrap[self._final_rows] = after[self.num_envs :]
        following = np.concatenate([known[self.num_envs :], after[: self.num_envs]]).astype(np.float32)
        return {"next_value": following, "bootstrap_value": bootstrap}


class _Collector:
    """What a rollout keeps of its observations, predictions and steps."""

    def __init__(
        self, num_envs: int, seed_of_episode: Callable[[int], int], group_of_episode: Callable[[int], int] | None
    ) -> None:
        self.number = list(range(num_envs))  # the episode that each environment is in
        self._num_envs = num_envs
        self._seed_of_episode = seed_of_episode
        self._group_of_episode = group_of_episode
        self._counting = _Counting(num_envs)
        self._columns: dict[str, list[np.ndarray]] = {}
        self._instructions: list[str] = []
        self._finals: list[Observation] = []
        self._final_rows: list[int] = []
        self._steps = 0

    def following(self) -> list[int]:
        """The seed each environment goes on with if its episode ends now."""
        return [self._seed_of_episode(n + self._num_envs) for n in self.number]

    def keep_decision(self, observation: Observation, prediction: Prediction) -> None:
        """What was seen and what was answered."""
        if prediction.feature is not None:  # all that an update reads of the pictures
            self._keep(FEATURE, prediction.feature)
        else:
            for name, image in observation["images"].items():
                self._keep(f"image.{name}", image)
        self._keep("proprioception", observation["proprioception"])
        for name in ("action", "log_prob", "value"):
            self._keep(name, getattr(prediction, name))
        self._keep(EXECUTED, prediction.environment_action)
        for name, kept in prediction.trace.items():
            self._keep(name, kept)
        if self._group_of_episode is not None:
            self._keep("group", np.array([self._group_of_episode(n) for n in self.number], np.int64))
        self._instructions += observation["instructions"]

    def keep_step(self, step: dict[str, Any]) -> None:
        """What came of it; environments whose episode ended are in their next one from here on."""
        for name in ("reward", "valid", "terminated", "truncated", "success"):
            self._keep(name, step[name])
        by_truncation = [
            k
            for k, e in enumerate(step["final_rows"])
            if step["truncated"][e].any() and not step["terminated"][e].any()
        ]
        if by_truncation:
            self._finals.append(rows_of(step["final_observation"], by_truncation))
            first = self._steps * self._num_envs
            self._final_rows += [first + int(step["final_rows"][k]) for k in by_truncation]
        for e in self._counting.add(step, self.number, range(self._num_envs)):
            self.number[e] += self._num_envs
        self._steps += 1

    def collected(self, last: Observation) -> Collected:
        """All of it; `last` is what is seen after the last step."""
        data = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        data["done"] = np.any(data["terminated"] | data["truncated"], axis=1)
        data["sample_valid"] = np.any(data["valid"], axis=1)
        after = [last, *self._finals]
        return Collected(data, self._instructions, self._counting.episodes, self._num_envs, after, self._final_rows)

    def _keep(self, name: str, value: np.ndarray) -> None:
        self._columns.setdefault(name, []).append(np.array(value))


async def collect_rollout(
    policy: Policy,
    session: Session,
    *,
    num_envs: int,
    steps: int,
    seed_of_episode: Callable[[int], int],
    progress: Progress,
    group_of_episode: Callable[[int], int] | None = None,
) -> Collected:
    """Collect `steps` chunks in each of `num_envs` environments, from a reset on, with same-step auto-reset.

    Episode numbers: environment e's k-th episode of this rollout has number e + k × num_envs, so its seed does not
    depend on who finishes first. The environments are not needed any more when this returns; `values_after` then
    completes the fields: a truncated chunk is bootstrapped from the environment's true final observation.

    Args:
        policy: samples actions under the behaviour policy's version.
        session: the environments.
        num_envs: E.
        steps: T.
        seed_of_episode: environment seed of an episode's number.
        progress: called with (chunks done, chunks in all).
        group_of_episode: what an episode is compared within, kept as the field `group` int64 [T × E]; None: no group.

    Raises:
        EnvironmentFault: if the session breaks the contract's shapes.
    """
    collector = _Collector(num_envs, seed_of_episode, group_of_episode)
    observation = await session.reset([seed_of_episode(n) for n in collector.number])
    for t in range(steps):
        prediction = await policy(observation)
        stepping = asyncio.ensure_future(session.batch_step(prediction.environment_action, collector.following()))
        try:
            await asyncio.sleep(0)  # the request leaves; what is known is kept while the simulator steps
            collector.keep_decision(observation, prediction)
            step = await stepping
        finally:
            stepping.cancel()  # nobody waits for it any more if this was left early
        _check_step(step, prediction.environment_action.shape)
        collector.keep_step(step)
        observation = step["observation"]
        progress(t + 1, steps)
    return collector.collected(observation)


async def run_episodes(
    policy: Policy,
    session: Session,
    *,
    num_envs: int,
    seeds: Sequence[int],
    progress: Progress,
    watchers: Sequence[Watcher] = (),
) -> Episodes:
    """Run one episode a seed; environment e runs the seeds e, e + num_envs, …, whoever finishes first.

    Returns:
        Episodes numbered by their place in `seeds`.
    """
    watched = {"every_step": True} if any(watcher.every_step for watcher in watchers) else {}
    active = min(num_envs, len(seeds))
    number = list(range(num_envs))
    counting = _Counting(num_envs)
    observation = await session.reset([seeds[e] if e < active else None for e in range(num_envs)])
    running = list(range(active))
    while running:
        prediction = await policy(rows_of(observation, running))
        actions = np.zeros((num_envs, *prediction.environment_action.shape[1:]), np.float32)
        actions[running] = prediction.environment_action
        following = [
            seeds[number[e] + num_envs] if e in running and number[e] + num_envs < len(seeds) else None
            for e in range(num_envs)
        ]
        step = await session.batch_step(actions, following, **watched)
        _check_step(step, actions.shape)
        for watcher in watchers:
            await watcher.keep(observation, actions, step, {e: number[e] for e in running})
        for e in counting.add(step, number, list(running)):
            number[e] += num_envs
            if number[e] >= len(seeds):
                running.remove(e)
            progress(len(counting.episodes.success), len(seeds))
        observation = step["observation"]
    return counting.episodes


async def _values(values: Policy, observations: Sequence[Observation], at_a_time: int) -> np.ndarray:
    """V of all rows, float32, in order."""
    everything = concatenated(observations)
    rows = len(everything["instructions"])
    parts = []
    for start in range(0, rows, at_a_time):
        answered = await values(rows_of(everything, range(start, min(start + at_a_time, rows))))
        assert answered.value is not None  # only what learns by RL is admitted to rollouts
        parts.append(answered.value)
    return np.concatenate(parts)


def _check_step(step: dict[str, Any], shape: tuple[int, ...]) -> None:
    for name in ("reward", "valid", "terminated", "truncated"):
        if step[name].shape != shape[:2]:
            raise EnvironmentFault(
                f"environment.{name}: got shape {step[name].shape}; possible: {shape[:2]} (environments × horizon); "
                "the simulator breaks the contract; mend it, see services/environments/adapter.py"
            )
    if not np.isfinite(step["reward"]).all():
        raise EnvironmentFault("environment.reward: got NaN or infinity; possible: finite numbers; mend the simulator")
