"""A session over environments of this process, for tests of the loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.environments.batch import EnvironmentBatch
from services.rollout import Observation


class InProcess:
    """`services.rollout.Session`; keeps what `batch_step` gave."""

    def __init__(self, batch: EnvironmentBatch) -> None:
        self._batch = batch
        self.steps: list[dict[str, Any]] = []

    async def reset(self, seeds: Sequence[int | None]) -> Observation:
        return self._batch.reset(seeds)

    async def batch_step(
        self, actions: np.ndarray, next_seeds: Sequence[int | None], *, every_step: bool = False
    ) -> dict[str, Any]:
        self.steps.append(self._batch.batch_step(actions, next_seeds, every_step))
        return self.steps[-1]
