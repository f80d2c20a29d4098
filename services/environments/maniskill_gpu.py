"""ManiSkill's batched simulation and rendering on a CUDA device.

All environments are one scene and move together: one that is not listed in a step gets a zero action, and its state
is not used before its next reset. Environments are reset one at a time, since ManiSkill draws the initial states of
a joint reset from the first seed alone, and here they are a function of each environment's own seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from configs.errors import SpecError, refusal
from services.environments.adapter import StepResult
from services.environments.maniskill import ManiSkillTask, versions


class ManiSkillGpuAdapter:
    """B environments in one batched scene.

    Raises:
        SpecError: there is no CUDA device, or light visuals are asked for.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        if not torch.cuda.is_available():
            raise SpecError(refusal("backend", "gpu", "cpu, since this machine has no CUDA device", "set backend: cpu"))
        if spec["light_visuals"]:
            # The batched renderer's objects are fixed when the scene is built; it does not need them either.
            raise SpecError(refusal("light_visuals", True, "false with backend gpu", "set light_visuals: false"))
        self._spec = spec
        self._num_envs = 1
        self._task = ManiSkillTask(spec, 1)
        self.action_low, self.action_high = self._task.low, self._task.high
        self.versions = versions()

    def resize(self, num_envs: int) -> None:
        """Hold `num_envs` environments; another number than before means building the scene anew."""
        if num_envs != self._num_envs:
            self._task.close()
            self._task = ManiSkillTask(self._spec, num_envs)
            self._num_envs = num_envs

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each, by its seed."""
        env = self._task.env
        for index, seed in zip(indices, seeds, strict=True):
            env.reset(seed=int(seed), options={"env_idx": torch.tensor([index], device=env.device)})

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A]; the others get zeros."""
        rows = np.asarray(indices, np.int64)
        every = np.zeros((self._num_envs, actions.shape[1]), np.float32)
        every[rows] = actions
        result = self._task.step(every)
        return StepResult(result.reward[rows], result.terminated[rows], result.truncated[rows], result.success[rows])

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S]."""
        return self._task.proprioception()[np.asarray(indices, np.int64)]

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""
        rows = np.asarray(indices, np.int64)
        return {name: stack[rows] for name, stack in self._task.render().items()}

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """The declared instruction."""
        return [self._spec["instruction"]] * len(indices)

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [n, 3]."""
        rows = np.asarray(indices, np.int64)
        return {name: stack[rows] for name, stack in self._task.scene_positions().items()}

    def close(self) -> None:
        """Release the scene."""
        self._task.close()
