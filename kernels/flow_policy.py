"""Flow policies that act at random and can be scored: one stochastic denoising step, or all of them.

Noise level t runs from 1 (noise) to 0 (the action), in K equal steps; step k leaves t = 1 − k / K. Velocities here
point towards noise: w = noise − action.

Sources: Liu et al. 2025 (Flow-GRPO), equations 7 to 9: the stochastic differential equation that has the flow's
marginals, with sigma = a · √(t / (1 − t)); at t = 1, where that is infinite, its code takes the next time's 1 − t. Chen
et al. 2025 (π_RL): Flow-SDE with one randomly chosen stochastic step a chunk, Flow-Noise with a learned deviation at
each step. Legend: B rows, H action horizon, A action width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import flow_matching

_BLOCK = 16


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function`, elementwise, of x; an element's bits do not depend on how many there are.

    Torch computes the last few elements of a tensor by other code than the rest; here these are filling.
    """
    flat = x.flatten()
    return function(F.pad(flat, (0, -len(flat) % _BLOCK), value=1.0)).narrow(0, 0, len(flat)).view(x.shape)


def noise_level(step: Tensor, steps: int) -> Tensor:
    """t before each denoising step: int64 [...] in 0 … K − 1 to float32 [...] in (0, 1]."""
    return (1.0 - step.double() / steps).float()


def ode_step(x: Tensor, velocity: Tensor, steps: int) -> Tensor:
    """One Euler step towards the action: x, w [B, H, A] at one noise level to [B, H, A] at the next."""
    return flow_matching.euler_step(x, velocity, -1.0, steps)


def sde_step(x: Tensor, velocity: Tensor, step: Tensor, steps: int, level: float) -> tuple[Tensor, Tensor]:
    """Where one stochastic step leads: x' ~ N(mean, deviation²), with the flow's marginals in the limit of many steps.

    mean = x − δ · (w + sigma² / (2t) · (x + (1 − t) · w)), deviation = sigma · √δ, with δ = 1 / K.

    Args:
        x: float32 [B, H, A].
        velocity: w, float32 [B, H, A].
        step: k, int64 [B].
        steps: K.
        level: a, how much noise.

    Returns:
        float32 [B, H, A] and [B, 1, 1].
    """
    t = noise_level(step, steps)
    left = torch.where(step == 0, 1.0 / steps, 1.0 - t).view(-1, 1, 1)
    t = t.view(-1, 1, 1)
    sigma = level * (t / left).sqrt()
    drift = velocity + sigma.square() / (2 * t) * (x + (1 - t) * velocity)
    return ode_step(x, drift, steps), sigma / math.sqrt(steps)


def log_density(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, summed over A: [..., H, A] each (deviation broadcast) to [..., H]."""
    deviation = deviation.expand_as(mean)
    scaled = (x - mean) / deviation
    return (-0.5 * scaled.square() - in_blocks(torch.log, deviation) - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def entropy(deviation: Tensor, like: Tensor) -> Tensor:
    """Of the same Gaussian, in nats: deviation, broadcast to `like` [..., H, A], to [..., H]."""
    return (deviation.expand_as(like).log() + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)
