"""A tenant's interface to the base: the one path from raw observations to the base's input, in training and serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.backend import PolicyConfig
from configs.errors import TenantFault, refusal
from kernels.backbones import Backbone
from kernels.features import PrefixBatch
from kernels.normalisation import Normaliser, require_finite, state_text


class Interface:
    """Cameras by name, state and action statistics of one tenant."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.state = Normaliser.from_statistics(config.state)
        self.action = Normaliser.from_statistics(config.action)
        self.cameras = [camera.name for camera in config.cameras]

    def proprioception(self, raw: np.ndarray) -> np.ndarray:
        """Normalised proprioception, float32 [B, S].

        Raises:
            TenantFault: for another width, NaN or infinity.
        """
        raw = np.asarray(raw, np.float32)
        width = self.config.action_module.state_width
        if raw.ndim != 2 or raw.shape[1] != width:
            raise TenantFault(
                refusal(
                    "observation.proprioception",
                    tuple(raw.shape),
                    f"[rows, {width}] for tenant {self.config.tenant!r}",
                    "send the declared state width",
                )
            )
        require_finite("observation.proprioception", raw)
        return self.state.normalise(raw)

    def prepare(self, backbone: Backbone, observation: Mapping[str, Any]) -> tuple[PrefixBatch, Tensor]:
        """Canonicalise an observation batch: its prefix, and normalised proprioception float32 [B, S].

        Raises:
            TenantFault: for a wrong camera, size or width, or a NaN in the tenant's observation.
        """
        normalised = self.proprioception(observation["proprioception"])
        prefix = backbone.prepare(dict(observation), self.cameras, self.state_texts(normalised))
        return prefix, torch.from_numpy(normalised)

    def state_texts(self, normalised: np.ndarray) -> list[str] | None:
        """The texts that stand for proprioception in the prompt, where it enters there."""
        return state_text(normalised) if self.config.action_module.proprioception == "prompt" else None
