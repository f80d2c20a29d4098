"""Evaluations kept as LeRobot datasets: every action with what was seen before it, its reward, and how it ended.

Whole or nothing, in order of episodes: each goes to disk when it has ended (`storage.episode_spool`), and the dataset
is written when all have.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.environment import EnvironmentSpec
from configs.errors import SpecError, refusal
from services.rollout import Observation
from storage.dataset_names import claimed, clean, refuse_existing
from storage.demonstrations import LeRobotWriter
from storage.episode_spool import EpisodeSpool

FPS = 20
"""Control steps a second that datasets of rollouts, evaluations and demonstrations say."""
RECORDED_BYTES = 1 << 30
"""Of pictures of the episodes under way, at most."""

Episode = tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]


class Recorder:
    """Keeps every episode on disk as it ends. A `Watcher`.

    Args:
        spool: where they go.
        bounds: [A] each, between which an environment clips its actions.
        seeds: of the episodes by number.
    """

    every_step = True

    def __init__(self, spool: EpisodeSpool, bounds: Sequence[NDArray[np.float32]], seeds: Sequence[int]) -> None:
        self._spool = spool
        self._low, self._high = bounds
        self._seeds = seeds
        self._running: dict[int, list[dict[str, NDArray[Any]]]] = {}  # {environment: its episode's chunks so far}

    async def keep(
        self, observation: Observation, actions: np.ndarray, step: dict[str, Any], number: Mapping[int, int]
    ) -> None:
        """See `Watcher`."""
        seen = step["seen"]
        over = (step["terminated"] | step["truncated"]).any(axis=1)
        for e, episode in number.items():
            steps = np.flatnonzero(step["valid"][e])
            chunks = self._running.setdefault(e, [])
            # Indexed by an array, so copied: what a session gives out is of the whole batch.
            chunks.append(
                {
                    **{f"image.{name}": stack[e][steps] for name, stack in seen["images"].items()},
                    "proprioception": seen["proprioception"][e][steps],
                    "action": np.clip(actions[e][steps], self._low, self._high),
                    "reward": step["reward"][e][steps],
                }
            )
            if not over[e]:
                continue
            arrays = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
            del self._running[e]
            facts = {
                "seed": int(self._seeds[episode]),
                "success": bool(step["success"][e]),
                "ended": True,
                "instruction": observation["instructions"][e],
                "return": total_reward(arrays["reward"]),
            }
            await asyncio.to_thread(self._spool.put, episode, arrays, facts)


def check_recordable(spec: EnvironmentSpec, num_envs: int) -> None:
    """Hold what episodes under way may take in memory against the bound.

    Raises:
        SpecError: if it is more.
    """
    episode = spec.max_episode_steps * sum(3 * camera.height * camera.width for camera in spec.cameras)
    if num_envs * episode > RECORDED_BYTES:
        possible = f"up to {RECORDED_BYTES // episode} environments of {episode >> 20} MiB an episode"
        raise SpecError(refusal("record, num_envs", num_envs, possible, "lower num_envs, or the cameras' size"))


@contextmanager
def recording(datasets: Path, name: str) -> Iterator[EpisodeSpool]:
    """The right to write dataset `name`, and a place for its episodes that is gone when the block ends.

    Raises:
        SpecError: there is a dataset of that name.
        Conflict: another one is writing it.
    """
    with claimed(datasets, name) as building:
        refuse_existing(datasets, name, "record")
        clean(building, name)
        spool = EpisodeSpool(building / f"{name}.{uuid.uuid4().hex}")
        try:
            yield spool
        finally:
            shutil.rmtree(spool.folder, ignore_errors=True)


def write_dataset(
    root: Path,
    episodes: Iterable[Episode],
    spec: EnvironmentSpec,
    provenance: Mapping[str, Any],
    *,
    actions_a_frame: int = 1,
    rewards: bool = True,
) -> int:
    """Write episodes (arrays, facts) as a new LeRobot dataset; returns how many.

    `arrays`: `image.<camera>` uint8 [T, h, w, 3], `proprioception` float32 [T, S], `action` float32 [T, A ×
    actions_a_frame], and with `rewards` `reward` float32 [T]. `facts`: `instruction`, and what `provenance` is to hold
    of each episode.
    """
    told: list[dict[str, Any]] = []
    with LeRobotWriter(
        root,
        fps=max(1, round(FPS / actions_a_frame)),
        cameras={camera.name: (camera.height, camera.width) for camera in spec.cameras},
        state_width=spec.state_width,
        action_width=spec.action_width * actions_a_frame,
        robot_type=spec.id,
        rewards=rewards,
        # Read when the writer ends, by when `told` has an entry for each episode.
        provenance={**provenance, "turned_cameras": sorted(spec.turned_cameras), "episodes": told},
    ) as writer:
        for arrays, facts in episodes:
            writer.add_episode(
                {name.removeprefix("image."): stack for name, stack in arrays.items() if name.startswith("image.")},
                arrays["proprioception"],
                arrays["action"],
                facts["instruction"],
                arrays["reward"] if rewards else None,
            )
            told.append({key: value for key, value in facts.items() if key != "instruction"})
    return len(told)


def total_reward(reward: NDArray[np.float32]) -> float:
    """Of an episode's rewards [T]."""
    return float(reward.sum(dtype=np.float64))
