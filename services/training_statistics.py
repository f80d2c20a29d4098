"""Statistics of the datasets that a workload learns from, after the declared transform of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from configs.environment import StatisticsSpec
from configs.transforms import TransformsSpec
from kernels.delta_actions import to_deltas
from kernels.vector_statistics import Vectors, statistics_of
from storage.demonstration_stream import Source
from storage.lerobot_dataset import LeRobotDataset

_FRAMES = 1 << 14
"""Read at a time; with a horizon of 64 and 32 dimensions 134 MB."""


def training_statistics(
    sources: Sequence[Source], transforms: TransformsSpec, horizon: int
) -> tuple[StatisticsSpec, StatisticsSpec]:
    """Statistics of the state and of the action as the policy is to give it.

    Those that a dataset brings are taken where it is the only one and they tell what is asked for; LeRobot's quantiles
    do not, since they are averages of its episodes'. Where actions become differences, those of all chunks' steps count
    that lie within the episode; else each recorded action once.

    Raises:
        DataFault: a dataset has a state or an action that is not finite.
    """
    alone = sources[0].dataset if len(sources) == 1 else None
    if alone is not None and transforms.scaling == "mean_std" and not transforms.delta_action:
        return alone.state_statistics, alone.action_statistics
    states = [_vectors(source, "state", partial(_states, source.dataset)) for source in sources]
    actions = [_vectors(source, "action", partial(_actions, source.dataset, transforms, horizon)) for source in sources]
    return statistics_of(states), statistics_of(actions)


def _vectors(source: Source, role: str, pieces: partial[Iterator[NDArray[np.float32]]]) -> Vectors:
    return Vectors(f"{role} of dataset {source.dataset.root.name}", pieces, source.weight)


def _states(dataset: LeRobotDataset) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(dataset), _FRAMES):
        yield dataset.state[start : start + _FRAMES]


def _actions(dataset: LeRobotDataset, transforms: TransformsSpec, horizon: int) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(dataset), _FRAMES):
        rows = np.arange(start, min(start + _FRAMES, len(dataset)))
        if not transforms.delta_action:
            yield dataset.action[rows]
            continue
        found = dataset.vectors(rows, horizon)
        deltas = to_deltas(found["action"], found["proprioception"], transforms.delta_action, transforms.delta_from)
        yield deltas[~found["action_is_pad"]]
