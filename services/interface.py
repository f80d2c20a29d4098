"""A tenant's interface to the base: the one path from raw observations to the base's input, and from what the policy
gives to actions, in training and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.backend import PolicyConfig
from configs.errors import TenantFault, refusal
from kernels.backbones import Backbone
from kernels.delta_actions import to_absolute, to_deltas
from kernels.features import PrefixBatch
from kernels.normalisation import Normaliser, require_finite, state_text
from storage.resizing import resized


class Interface:
    """Cameras by name, state and action statistics, and the declared transforms of one tenant."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        transforms = config.transforms
        self.state = Normaliser.from_statistics(config.state, transforms.exempt_state, transforms.scaling)
        self.action = Normaliser.from_statistics(config.action, transforms.exempt_action, transforms.scaling)
        self.cameras = [camera.name for camera in config.cameras]
        self._delta = transforms.delta_action, transforms.delta_from
        for field, given, width in (
            ("delta_action", transforms.delta_action, self.action.width),
            ("delta_state", transforms.delta_from, self.state.width),
        ):
            if any(d >= width for d in given):
                raise TenantFault(refusal(f"transforms.{field}", list(given), f"0 … {width - 1}", "correct the policy"))

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

    def prepare(self, backbone: Backbone, observation: Mapping[str, Any]) -> tuple[PrefixBatch, np.ndarray, Tensor]:
        """Canonicalise an observation batch: its prefix, and proprioception float32 [B, S], raw and normalised.

        Raises:
            TenantFault: for a wrong camera, size or width, or a NaN in the tenant's observation.
        """
        state = np.asarray(observation["proprioception"], np.float32)
        normalised = self.proprioception(state)
        seen = {**observation, "images": self._pictures(observation["images"])}
        prefix = backbone.prepare(seen, self.cameras, self.state_texts(normalised))
        return prefix, state, torch.from_numpy(normalised)

    def state_texts(self, normalised: np.ndarray) -> list[str] | None:
        """The texts that stand for proprioception in the prompt, where it enters there."""
        if self.config.action_module.proprioception != "prompt":
            return None
        return state_text(normalised, self.config.transforms.scaling)

    def policy_action(self, action: np.ndarray, state: np.ndarray) -> np.ndarray:
        """A recorded chunk as the policy is to give it, float32 [n, H, A].

        Args:
            action: float32 [n, H, A], in the environment's units.
            state: raw proprioception that it begins in, float32 [n, S].
        """
        return self.action.normalise(to_deltas(action, np.asarray(state, np.float32), *self._delta))

    def environment_action(self, action: np.ndarray, state: np.ndarray) -> np.ndarray:
        """What the policy gave as a chunk in the environment's units, float32 [B, H, A]; inverse of `policy_action`.

        Args:
            action: float32 [B, H, A].
            state: raw proprioception that the policy saw, float32 [B, S].
        """
        return to_absolute(self.action.unnormalise(action), np.asarray(state, np.float32), *self._delta)

    def _pictures(self, images: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """In the declared sizes. What is no batch of pictures is left to the base to refuse."""
        found = {name: np.asarray(picture) for name, picture in images.items()}
        for name, size in self.config.transforms.sizes.items():
            picture = found.get(name)
            if picture is not None and picture.dtype == np.uint8 and picture.ndim == 4 and picture.shape[-1] == 3:
                found[name] = resized(picture, size)
        return found
