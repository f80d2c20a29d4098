"""Stochastic denoising steps: formulas by hand, and the flow's own marginals by simulation."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.flow_policy import entropy, log_density, noise_level, ode_step, sde_step


def test_one_step_by_hand() -> None:
    """K = 4, a = 0.5, k = 2: t = 1/2, sigma = 0.5·√(0.5/0.5) = 0.5, x = 1, w = 2.

    drift = 2 + 0.25 / 1 · (1 + 0.5·2) = 2.5; mean = 1 − 2.5/4 = 0.375; deviation = 0.5·√(1/4) = 0.25.
    """
    x, w = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0)
    assert noise_level(torch.tensor([0, 1, 2, 3]), 4).tolist() == [1.0, 0.75, 0.5, 0.25]
    mean, deviation = sde_step(x, w, torch.tensor([2]), 4, 0.5)
    assert (mean.item(), deviation.item()) == (0.375, 0.25)
    assert ode_step(x, w, 4).item() == 0.5
    at = torch.full((1, 1, 1), 0.625)  # one deviation above the mean
    assert log_density(at, mean, deviation).item() == pytest.approx(-0.5 - math.log(0.25) - 0.9189385, abs=1e-6)
    assert entropy(deviation, at).item() == pytest.approx(math.log(0.25) + 1.4189385, abs=1e-6)


def test_the_first_step_is_finite() -> None:
    """K = 4, a = 0.5, k = 0: t = 1, 1 − t taken of the next time, 1/4: sigma = 0.5·√4 = 1.

    x = 1, w = 2: drift = 2 + 1/2 · (1 + 0) = 2.5; mean = 0.375; deviation = 1·√(1/4) = 0.5.
    """
    mean, deviation = sde_step(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([0]), 4, 0.5)
    assert (mean.item(), deviation.item()) == (0.375, 0.5)
    assert torch.isfinite(sde_step(torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([0]), 1, 0.5)[0]).all()


def test_without_noise_the_step_is_the_flows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 2, 3, generator=generator), torch.randn(5, 2, 3, generator=generator)
    mean, deviation = sde_step(x, w, torch.tensor([0, 1, 2, 3, 4]), 5, 0.0)
    assert torch.equal(mean, ode_step(x, w, 5))
    assert deviation.abs().max() == 0


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_many_steps_end_in_the_distribution_of_the_actions_whatever_the_noise(level: float) -> None:
    """Actions ~ N(2, 0.5²): the exact velocity at t is known, and mean and deviation at t = 0 are the actions'.

    x_t = (1 − t)·action + t·noise, so Var = (1 − t)²·0.25 + t², and E[noise − action | x] =
    −2 + (t − (1 − t)·0.25) / Var · (x − (1 − t)·2). 20,000 samples: standard errors are 0.0035 and
    0.0025.
    """
    steps, count = 400, 20_000
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 1, generator=generator)
    for k in range(steps):
        step = torch.full((count,), k)
        t = 1 - k / steps
        variance = (1 - t) ** 2 * 0.25 + t**2
        w = -2 + (t - (1 - t) * 0.25) / variance * (x - (1 - t) * 2)
        mean, deviation = sde_step(x, w, step, steps, level)
        x = mean + deviation * torch.randn(x.shape, generator=generator)
    assert x.mean().item() == pytest.approx(2.0, abs=0.03)
    assert x.std().item() == pytest.approx(0.5, abs=0.03)
