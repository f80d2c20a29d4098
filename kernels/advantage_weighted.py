"""Advantage-weighted epochs over recorded samples: offline RL of every module that has a critic.

Legend: n samples, H horizon, A action width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.algorithm import AwrSpec
from kernels.action_modules import ActionModule
from kernels.losses import awr, ppo_counts, value_loss
from kernels.updates import Encode, Optimizer


def awr_update(
    module: ActionModule,
    optimizer: Optimizer,
    encode: Encode,
    algorithm: AwrSpec,
    generator: torch.Generator,
    *,
    proprioception: Tensor,
    action: Tensor,
    valid: Tensor,
    returns: Tensor,
) -> dict[str, float]:
    """Shuffled passes over one job's samples; a step descends on `kernels.losses.awr` plus the critic's error.

    The advantage of a chunk is its return less the critic's value of that moment, without gradient. So critic and
    policy learn together, where Peng et al. (2019, algorithm 1) fit the critic first in each of their iterations.
    An element is an action, never a chunk: a chunk's error would grow with its length, and there is no ratio to bound
    it. A microbatch without a valid element makes no step, and a job without one none at all.

    Args:
        module: trained in place.
        optimizer: of the module.
        encode: called once a microbatch; what it holds in between is its own affair.
        algorithm: temperature, cap, passes and microbatch size.
        generator: shuffles, and draws what the module's regression asks for; its state moves on.
        proprioception: normalised, float32 [n, S].
        action: recorded, normalised, float32 [n, H, A]; may hold anything where not valid.
        valid: bool [n, H].
        returns: float32 [n], from the chunk's first action to the episode's end.

    Returns:
        {"nothing_to_learn": 1.0}, or 0.0 and means over the steps of loss, policy_loss, value_loss, weight_mean,
        capped_fraction, grad_norm, and the greatest weight_max.

    Raises:
        TenantFault: if loss or gradient is not finite.
    """
    if not valid.any():
        return {"nothing_to_learn": 1.0}
    module.train()
    parameters, count = list(module.parameters()), len(action)
    sums: dict[str, float] = {}
    steps, weight_max = 0, 0.0
    for _ in range(algorithm.passes):
        for index in torch.randperm(count, generator=generator).split(algorithm.microbatch_size):
            counts = ppo_counts(valid[index], "action")
            if counts.rows == 0:
                continue
            found = module.regress(encode(index), proprioception[index], action[index], ~valid[index], generator)
            advantage = (returns[index] - found.value.detach())[:, None].expand_as(valid[index])
            policy = awr(
                error=found.error,
                advantage=advantage,
                valid=valid[index],
                counts=counts,
                temperature=algorithm.temperature,
                weight_cap=algorithm.weight_cap,
                granularity="action",
            )
            critic = value_loss(found.value, returns[index], valid[index].any(dim=1), counts.rows)
            loss = policy.total + critic
            norm = optimizer.step(loss, parameters)
            steps += 1
            weight_max = max(weight_max, policy.weight_max)
            for name, value in (
                ("loss", loss.item()),
                ("policy_loss", policy.total.item()),
                ("value_loss", critic.item()),
                ("weight_mean", policy.weight_mean),
                ("capped_fraction", policy.capped_fraction),
                ("grad_norm", norm),
            ):
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / steps for name, value in sums.items()} | {"weight_max": weight_max, "nothing_to_learn": 0.0}
