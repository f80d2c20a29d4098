"""Paths, times and Euler steps against numbers by hand."""

from __future__ import annotations

import pytest
import torch

from kernels.flow_matching import (
    euler_step,
    interpolate,
    sample_beta,
    sample_noise,
    sample_training,
    squared_error,
    velocity_loss,
)


@pytest.mark.parametrize(
    ("alpha", "beta", "mean", "variance"),
    [(1.5, 1.0, 0.6, 1.5 / (2.5**2 * 3.5)), (1.0, 1.0, 1 / 2, 1 / 12), (2.0, 3.0, 0.4, 6 / (25 * 6))],
)
def test_beta_draws_have_its_moments(alpha: float, beta: float, mean: float, variance: float) -> None:
    """Mean a / (a + b), variance a b / ((a + b)² (a + b + 1)); 40,000 draws leave a standard error below 0.0015."""
    draws = sample_beta(alpha, beta, 40_000, torch.Generator().manual_seed(0))
    assert draws.dtype == torch.float32
    assert 0 <= draws.min() < draws.max() <= 1
    assert draws.mean().item() == pytest.approx(mean, abs=0.005)
    assert draws.var().item() == pytest.approx(variance, abs=0.002)


def test_beta_draws_have_its_quantiles() -> None:
    """The distribution function of Beta(1.5, 1) is u^1.5, so its q-quantile is q^(2/3)."""
    draws = sample_beta(1.5, 1.0, 40_000, torch.Generator().manual_seed(0))
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert draws.quantile(q).item() == pytest.approx(q ** (2 / 3), abs=0.01)


def test_beta_draws_come_from_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (sample_beta(1.5, 1.0, 4, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)


def test_beta_draws_of_tiny_shapes_are_numbers() -> None:
    assert sample_beta(1e-4, 1e-4, 1000, torch.Generator().manual_seed(0)).isfinite().all()


def test_rows_drawn_in_parts_are_those_drawn_together() -> None:
    """Seven numbers a row: torch's own batch draw would differ from draws in parts."""
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    whole = sample_noise(5, 1, 7, one)
    assert torch.equal(whole, torch.cat([sample_noise(n, 1, 7, two) for n in (2, 1, 2)]))
    assert not torch.equal(whole[0], whole[1])
    noise, draws = sample_training(5, 3, 1, 7, alpha=1.5, beta=1.0, generator=one)
    parts = [sample_training(n, 3, 1, 7, alpha=1.5, beta=1.0, generator=two) for n in (2, 1, 2)]
    assert torch.equal(noise, torch.cat([part[0] for part in parts]))
    assert torch.equal(draws, torch.cat([part[1] for part in parts]))
    assert noise.shape == (5, 3, 1, 7)
    assert len(draws.unique()) == 15


def test_without_a_generator_all_rows_have_one_draw() -> None:
    noise = sample_noise(3, 2, 4, None)
    assert torch.equal(noise[0], noise[2])
    assert torch.equal(noise[:1], sample_noise(1, 2, 4, None))
    training, draws = sample_training(3, 2, 2, 4, alpha=1.5, beta=1.0, generator=None)
    assert torch.equal(training[0], training[2])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(training[0, 0], training[0, 1])


def test_the_path_starts_at_the_noise_and_ends_at_the_action() -> None:
    noise, action = torch.tensor([[[2.0]]]), torch.tensor([[[-6.0]]])
    for time, point in ((0.0, 2.0), (0.25, 0.0), (1.0, -6.0)):
        x_t, velocity = interpolate(noise, action, torch.tensor([time]))
        assert x_t.item() == point
        assert velocity.item() == -8.0


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_euler_steps_of_a_linear_field(direction: float) -> None:
    """dx/dt = 3x in n steps: x · (1 + 3 · direction / n)^n."""
    x = torch.tensor([[[1.0, -2.0]]])
    for n in (1, 4, 10):
        expected, found = x * (1 + 3 * direction / n) ** n, x
        for _ in range(n):
            found = euler_step(found, 3 * found, direction, n)
        torch.testing.assert_close(found, expected)
    assert x.tolist() == [[[1.0, -2.0]]]


def test_the_loss_is_a_sum_over_valid_scalars_by_the_given_count() -> None:
    """Errors 1, 2 and, under the mask, NaN: (1 + 4) / 10; its gradient 2 · error / 10."""
    predicted = torch.tensor([[[1.0], [2.0], [5.0]]], requires_grad=True)
    velocity = torch.tensor([[[0.0], [4.0], [float("nan")]]])
    loss = velocity_loss(predicted, velocity, torch.tensor([[False, False, True]]), 10.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert predicted.grad is not None
    torch.testing.assert_close(predicted.grad.flatten(), torch.tensor([0.2, -0.4, 0.0]))


def test_a_velocity_that_was_predicted_as_nan_under_the_mask_reaches_no_gradient() -> None:
    """Three rows of two actions; the masked ones predicted, right, or both, as NaN and infinity.

    What is left has the gradients, and the loss, of the valid actions alone.
    """
    generator = torch.Generator().manual_seed(0)
    given, velocity = torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, 4, generator=generator)
    is_pad = torch.tensor([[False, True], [True, True], [False, False]])
    predicted = given.clone()
    predicted[0, 1], predicted[1, 0], predicted[1, 1] = float("nan"), float("nan"), float("inf")
    velocity[1, 0], velocity[1, 1] = float("nan"), float("inf")
    predicted.requires_grad_()
    loss = velocity_loss(predicted, velocity, is_pad, 12.0)
    loss.backward()
    alone = given[~is_pad].unsqueeze(0).requires_grad_()  # one row of the three valid actions
    expected = velocity_loss(alone, velocity[~is_pad].unsqueeze(0), torch.zeros(1, 3, dtype=torch.bool), 12.0)
    expected.backward()
    assert predicted.grad is not None
    assert alone.grad is not None
    torch.testing.assert_close(loss, expected)
    assert torch.equal(predicted.grad[~is_pad], alone.grad[0])
    assert (predicted.grad[is_pad] == 0).all()


def test_errors_of_several_draws_are_masked_alike() -> None:
    """One row, two draws, two actions of which the second is padded: 1, 9 and twice 0."""
    predicted = torch.tensor([[[[2.0], [7.0]], [[4.0], [float("nan")]]]])
    error = squared_error(predicted, torch.ones(1, 2, 2, 1), torch.tensor([[[False, True]]]))
    assert error.flatten().tolist() == [1, 0, 9, 0]
