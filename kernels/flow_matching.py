"""Flow matching: straight paths between noise and actions, their velocity, its loss, and the way back by Euler steps.

Source: Lipman et al. 2023 (conditional flow matching with straight paths), with times from a Beta distribution as in
π0 (Black et al. 2024, appendix B). Here time runs from 0, pure noise, to 1, the action; velocity = action − noise.
A family whose time runs the other way says so in `euler_step`'s `direction` and turns its velocity's sign.
Everything drawn is drawn row after row, so that consecutive microbatches with one generator get what the whole batch
would. Legend: B rows, R draws a row, H action horizon, A action width, n any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIXED_SEED = 0
"""Of the one draw that stands for "no generator": the same each time, and for every row in any company."""


def sample_beta(alpha: float, beta: float, count: int, generator: torch.Generator) -> Tensor:
    """float32 [count] in [0, 1], independent draws from Beta(alpha, beta).

    A ratio of Gamma draws; torch's own Beta distribution takes no generator.
    """
    shapes = torch.tensor([alpha, beta], dtype=torch.float64).expand(count, 2).contiguous()
    gamma = torch._standard_gamma(shapes, generator=generator)
    # Tiny shapes underflow to 0, and 0 / 0 is no time.
    gamma = gamma.clamp(min=torch.finfo(torch.float64).tiny)
    return (gamma[:, 0] / gamma.sum(dim=1)).float()


def sample_noise(rows: int, horizon: int, action_width: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal float32 [B, H, A] on the CPU, drawn row after row; None gives every row the same fixed noise."""
    if generator is None:
        fixed = torch.Generator().manual_seed(FIXED_SEED)
        return torch.randn(horizon, action_width, generator=fixed).expand(rows, horizon, action_width)
    return torch.stack([torch.randn(horizon, action_width, generator=generator) for _ in range(rows)])


def sample_training(
    rows: int,
    repeats: int,
    horizon: int,
    action_width: int,
    *,
    alpha: float,
    beta: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """What a training step draws: for each row R noises, then R numbers from Beta(alpha, beta).

    Args:
        rows: B.
        repeats: R.
        horizon, action_width: H and A.
        alpha, beta: of the distribution; the family makes times of it.
        generator: on the CPU; its state moves on. None gives every row the same fixed draws.

    Returns:
        float32 [B, R, H, A] and float32 [B, R], on the CPU.
    """
    fixed = torch.Generator().manual_seed(FIXED_SEED)
    draws = [
        (
            torch.randn(repeats, horizon, action_width, generator=generator or fixed),
            sample_beta(alpha, beta, repeats, generator or fixed),
        )
        for _ in range(1 if generator is None else rows)
    ]
    noise, beta_draws = (torch.stack(list(of_row)) for of_row in zip(*draws, strict=True))
    return noise.expand(rows, -1, -1, -1), beta_draws.expand(rows, -1)


def interpolate(noise: Tensor, action: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """A point on the straight path from noise (time 0) to the action (time 1), and the velocity there.

    Args:
        noise: float32 [..., H, A].
        action: float32 [..., H, A], broadcast against it.
        time: float32 [...], 0 … 1.

    Returns:
        x_t = (1 − time) · noise + time · action, and velocity = action − noise, each [..., H, A].
    """
    t = time[..., None, None]
    return (1 - t) * noise + t * action, action - noise


def euler_step(x: Tensor, velocity: Tensor, direction: float, steps: int) -> Tensor:
    """One of `steps` equal steps through the whole of time: x + direction / steps · velocity, each [B, H, A].

    `direction` is 1 where the velocity points from noise to the action, −1 where it points back.
    """
    return x + (direction / steps) * velocity


def squared_error(predicted: Tensor, velocity: Tensor, is_pad: Tensor) -> Tensor:
    """Of predicted velocities, scalar by scalar; 0 and without gradient where padded.

    Args:
        predicted: float32 [..., H, A]; may hold anything, NaN too, under the mask.
        velocity: float32 [..., H, A]; likewise.
        is_pad: bool [..., H], broadcast against them, True past the episode's end; such actions carry no loss.
    """
    padded, zero = is_pad[..., None], torch.zeros_like(velocity)
    # Both, before they meet: else a NaN under the mask comes back as the gradient of the square, 0 · NaN.
    return (torch.where(padded, zero, predicted) - torch.where(padded, zero, velocity)).square()


def velocity_loss(predicted: Tensor, velocity: Tensor, is_pad: Tensor, valid_count: float) -> Tensor:
    """Squared error of predicted velocities: a sum over valid scalars / `valid_count`.

    Args:
        predicted, velocity, is_pad: as of `squared_error`.
        valid_count: scalars that count in the whole optimizer step, times the draws of each sample.
    """
    return squared_error(predicted, velocity, is_pad).sum() / max(valid_count, 1.0)
