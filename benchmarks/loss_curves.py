"""Loss curves of four pi tenants, two of LIBERO's schema, two of CALVIN's, grouped or serial (the paper's Figure 12).

The pictures, states and actions are generated; actions follow from states, so that there is something to learn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from configs.model import ActionModuleSpec, BaseModelSpec
from kernels import action_modules, group_batching
from kernels.backbones import Backbone
from kernels.features import PrefixBatch, VLAFeature
from kernels.losses import sft_valid_count


@dataclass(frozen=True)
class Schema:
    """A tenant's published interface: cameras (name, height, width), state and action widths, an instruction."""

    cameras: tuple[tuple[str, int, int], ...]
    state: int
    action: int
    instruction: str


# Key names and widths as the datasets publish them; the pictures and numbers here are generated.
LIBERO = Schema((("image", 128, 128), ("wrist_image", 128, 128)), 8, 7, "put the black bowl on the plate")
CALVIN = Schema((("rgb_gripper", 84, 84), ("rgb_static", 200, 200)), 15, 7, "push the red block to the left")
STREAMS = {"libero 1": LIBERO, "libero 2": LIBERO, "calvin 1": CALVIN, "calvin 2": CALVIN}
_SAMPLES, _ROWS, _LEARNING_RATE = 64, 4, 1e-3


class _Learner:
    """One tenant: a pi module, its optimizer, and a stream whose actions follow from its states."""

    def __init__(self, spec: BaseModelSpec, module: ActionModuleSpec, schema: Schema, seed: int) -> None:
        own = module.model_copy(update={"action_width": schema.action, "state_width": schema.state})
        rng = np.random.default_rng(seed)
        self.schema = schema
        self.module = action_modules.build(own, spec, seed)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=_LEARNING_RATE, foreach=False)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []
        self._horizon = module.horizon
        self._images = {
            name: rng.integers(0, 256, (_SAMPLES, h, w, 3), dtype=np.uint8) for name, h, w in schema.cameras
        }
        self._state = rng.normal(size=(_SAMPLES, schema.state)).astype(np.float32)
        law = rng.normal(size=(schema.state, self._horizon * schema.action)) / math.sqrt(schema.state)
        self._action = np.tanh(self._state @ law).reshape(_SAMPLES, self._horizon, schema.action).astype(np.float32)

    def rows(self, step: int) -> slice:
        start = step * _ROWS % _SAMPLES
        return slice(start, start + _ROWS)

    def prefix(self, backbone: Backbone, step: int) -> PrefixBatch:
        rows = self.rows(step)
        images = {name: image[rows] for name, image in self._images.items()}
        seen = {"images": images, "instructions": [self.schema.instruction] * _ROWS}
        return backbone.prepare(seen, list(images))

    def update(self, feature: VLAFeature, step: int) -> None:
        rows = self.rows(step)
        action, is_pad = torch.from_numpy(self._action[rows]), torch.zeros(_ROWS, self._horizon, dtype=torch.bool)
        count = sft_valid_count(is_pad, action.shape[2])
        state = torch.from_numpy(self._state[rows])
        loss = self.module.imitation_loss(feature, state, action, is_pad, count, self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def curves(backbone: Backbone, module: ActionModuleSpec, steps: int, *, grouped: bool) -> dict[str, list[float]]:
    """{stream: losses}, of one base forward a step for all or of one each.

    Args:
        backbone: the shared base.
        module: a pi module; state and action widths are those of each stream.
        steps: optimizer steps of each tenant.
        grouped: whether the tenants share the forward.
    """
    learners = {
        name: _Learner(backbone.spec, module, schema, seed) for seed, (name, schema) in enumerate(STREAMS.items())
    }
    for step in range(steps):
        prefixes = [learner.prefix(backbone, step) for learner in learners.values()]
        if grouped:
            batch, slices = group_batching.group(prefixes)
            features = group_batching.split(backbone.encode(batch, {"cache"}), slices)
        else:
            features = [backbone.encode(prefix, {"cache"}) for prefix in prefixes]
        for learner, feature in zip(learners.values(), features, strict=True):
            learner.update(feature, step)
    return {name: learner.losses for name, learner in learners.items()}
