"""Pretraining the small base to ground: positions in a scene are read off its action tokens by a linear head.

Objective: a linear head a task on the N action tokens regresses standardised positions; all weights of base and
heads train with AdamW, cosine decay after a short warm-up, gradients clipped to norm 1. The heads are thrown away.
The data come as arrays; nothing here renders or writes.

Legend: M scenes, B batch, K position coordinates of a task, N action tokens, D base width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.action_modules.base import initialise_linear
from kernels.backbones import Backbone
from kernels.normalisation import Normaliser


@dataclass(frozen=True, eq=False)
class Scenes:
    """Rendered scenes of one task.

    Attributes:
        images: uint8 [M, h, w, 3] of each camera.
        instruction: what names the task.
        positions: float32 [M, K], raw (metres, or an environment's own unit); three coordinates a thing.
        things: names of the things, K / 3 of them.
    """

    images: Mapping[str, np.ndarray]
    instruction: str
    positions: np.ndarray
    things: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.positions)

    def observation(self, rows: np.ndarray) -> dict[str, object]:
        """An observation batch of those scenes."""
        images = {name: stack[rows] for name, stack in self.images.items()}
        return {"images": images, "instructions": [self.instruction] * len(rows)}


class GroundingTrainer:
    """Owns base, heads and optimizer; the caller owns the loop, so that it can show progress.

    Args:
        backbone: its weights are unfrozen and changed.
        tasks: training scenes by task.
        seed: of heads and sample order.
        steps: optimizer steps in all.
        batch_size: scenes a step, drawn evenly from the tasks.
        learning_rate: peak.
        warmup: steps of linear rise.
    """

    def __init__(
        self,
        backbone: Backbone,
        tasks: Mapping[str, Scenes],
        *,
        seed: int,
        steps: int,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        warmup: int = 50,
    ) -> None:
        self.backbone = backbone
        self.tasks = dict(tasks)
        self.normalisers = {
            name: Normaliser(s.positions.mean(axis=0), _deviations(s.positions)) for name, s in tasks.items()
        }
        self._targets = {
            name: torch.from_numpy(self.normalisers[name].normalise(s.positions)) for name, s in tasks.items()
        }
        width = backbone.spec.hidden_width * backbone.spec.num_action_tokens
        self.heads = nn.ModuleDict({name: nn.Linear(width, s.positions.shape[1]) for name, s in tasks.items()})
        generator = torch.Generator().manual_seed(seed)
        for head in self.heads.values():
            assert isinstance(head, nn.Linear)
            initialise_linear(head, generator)
        self._random = np.random.default_rng(seed)
        self._batch_size = batch_size
        self._parameters = [*backbone.model.requires_grad_(True).parameters(), *self.heads.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, weight_decay=0.01)
        warmup = min(warmup, max(steps // 10, 1))

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)

    def step(self) -> float:
        """One optimizer step on scenes drawn at random; its loss (standardised units)."""
        names = list(self.tasks)
        counts = [self._batch_size // len(names)] * len(names)
        for extra in range(self._batch_size - sum(counts)):
            counts[extra] += 1
        loss = torch.zeros(())
        for name, count in zip(names, counts, strict=True):
            rows = self._random.integers(len(self.tasks[name]), size=count)
            predicted = self.heads[name](_features(self.backbone, self.tasks[name], rows))
            # Near zero squared, beyond it absolute: a few occluded scenes do not rule the gradient.
            loss = loss + F.smooth_l1_loss(predicted, self._targets[name][rows], beta=0.1, reduction="sum")
        loss = loss / (self._batch_size * sum(head.out_features for head in self._linear_heads()) / len(names))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(loss.detach())

    def freeze(self) -> None:
        """End training: the base is as it will be served."""
        self.backbone.model.requires_grad_(False).eval()

    def errors(self, name: str, scenes: Scenes, batch_size: int = 64) -> dict[str, float]:
        """Mean Euclidean distance between read and true position of each thing, in the positions' own unit."""
        parts = []
        with torch.no_grad():
            for start in range(0, len(scenes), batch_size):
                rows = np.arange(start, min(start + batch_size, len(scenes)))
                parts.append(self.heads[name](_features(self.backbone, scenes, rows)).numpy())
        read = self.normalisers[name].unnormalise(np.concatenate(parts))
        return position_errors(read, scenes.positions, scenes.things)

    def _linear_heads(self) -> list[nn.Linear]:
        return [head for head in self.heads.values() if isinstance(head, nn.Linear)]


def _deviations(positions: np.ndarray) -> np.ndarray:
    """[K] deviations; a coordinate that hardly varies (a height on the table) gets a quarter of its thing's largest,
    so that its millimetres do not count as much as the others' decimetres."""
    deviation = positions.std(axis=0).reshape(-1, 3)
    return np.maximum(deviation, 0.25 * deviation.max(axis=1, keepdims=True)).reshape(-1)


def position_errors(read: np.ndarray, true: np.ndarray, things: Sequence[str]) -> dict[str, float]:
    """Mean Euclidean distance of each thing; both float32 [M, 3 × things]."""
    distance = np.linalg.norm((read - true).reshape(len(true), len(things), 3), axis=2).mean(axis=0)
    return {thing: float(d) for thing, d in zip(things, distance, strict=True)}


def frozen_features(backbone: Backbone, scenes: Scenes, batch_size: int = 64) -> Tensor:
    """float32 [M, N × D]: what the base as it is says of each scene."""
    with torch.no_grad():
        rows = [np.arange(i, min(i + batch_size, len(scenes))) for i in range(0, len(scenes), batch_size)]
        return torch.cat([_features(backbone, scenes, r) for r in rows])


def _features(backbone: Backbone, scenes: Scenes, rows: np.ndarray) -> Tensor:
    """float32 [rows, N × D], in the caller's gradient mode."""
    feature = backbone.features(backbone.prepare(scenes.observation(rows), list(scenes.images)))
    assert feature.action_tokens is not None
    return feature.action_tokens.flatten(1)
