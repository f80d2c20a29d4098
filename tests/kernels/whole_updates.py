"""Whole updates of one tenant alone, as a job makes them, for tests on features in memory."""

from __future__ import annotations

from typing import Any

import torch

from configs.algorithm import PpoSpec
from kernels.action_modules import ActionModule
from kernels.policy_gradient import policy_gradient_update, update_settings
from kernels.updates import Encode, Optimizer, SftUpdate


def sft_update(module: ActionModule, optimizer: Optimizer, encode: Encode, **samples: Any) -> dict[str, float]:
    """A whole `SftUpdate`; `encode` is asked for what the update does not keep."""
    update = SftUpdate(module, optimizer, **samples)
    while update.rows is not None:
        kept = update.kept
        update.loss(encode(update.rows) if kept is None else kept).backward()
        update.finish()
    return update.metrics()


def ppo_update(
    module: ActionModule,
    optimizer: Optimizer,
    encode: Encode,
    algorithm: PpoSpec,
    generator: torch.Generator,
    **samples: Any,
) -> dict[str, float]:
    """`policy_gradient_update` as a PPO workload declares it."""
    settings = update_settings(algorithm)
    return policy_gradient_update(
        module,
        optimizer,
        encode,
        settings.coefficients,
        generator,
        epochs=settings.epochs,
        microbatch_size=algorithm.microbatch_size,
        standardised=settings.standardised,
        **samples,
    )
