"""Updates of an action module: steps, base forwards, schedule, and faults that spoil nothing."""

from __future__ import annotations

import math

import pytest
import torch

from configs import presets
from configs.algorithm import AdamSpec, PpoSpec, SftSpec
from configs.errors import TenantFault
from configs.model import OftSpec
from kernels import action_modules
from kernels.features import VLAFeature
from kernels.updates import new_optimizer, ppo_update, sft_update

BASE = presets.base_model("tiny-qwen3-vl")
SPEC = OftSpec(horizon=2, action_width=3, state_width=4, hidden_width=16, residual_blocks=1, proprioception="head")
ROWS = 10


def module() -> action_modules.ActionModule:
    return action_modules.build(SPEC, BASE, 0)


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(ROWS, BASE.num_action_tokens, BASE.hidden_width, generator=generator),
        "proprioception": torch.randn(ROWS, 4, generator=generator),
        "action": torch.randn(ROWS, 2, 3, generator=generator),
    }


def sft(passes: int, **changes: torch.Tensor) -> tuple[action_modules.ActionModule, int, list[slice], dict[str, float]]:
    """Train on 10 samples in microbatches of 4."""
    given = inputs() | changes
    trained, asked = module(), []
    spec = SftSpec(jobs=2, batches_per_job=3, passes=passes, microbatch_size=4, optimizer=AdamSpec(learning_rate=1e-3))
    optimizer = new_optimizer(trained, spec)

    def encode(rows: slice) -> VLAFeature:
        asked.append(rows)
        return VLAFeature(given["features"][rows])

    metrics = sft_update(
        trained,
        optimizer,
        encode,
        proprioception=given["proprioception"],
        action=given["action"],
        is_pad=torch.zeros(ROWS, 2, dtype=torch.bool),
        microbatch_size=4,
        passes=passes,
        generator=torch.Generator().manual_seed(1),
    )
    return trained, optimizer.steps, asked, metrics


def test_each_microbatch_is_one_step_and_each_sample_is_encoded_once_whatever_the_passes() -> None:
    """10 samples by 4: microbatches of 4, 4 and 2; three passes make nine steps and still three base forwards."""
    for passes, steps in ((1, 3), (3, 9)):
        _, made, asked, metrics = sft(passes)
        assert made == steps
        assert asked == [slice(0, 4), slice(4, 8), slice(8, 10)]
        assert metrics["grad_norm"] > 0


def test_the_same_generator_gives_the_same_bits() -> None:
    first, second = sft(3)[0], sft(3)[0]
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_learning_rate_is_half_a_cosine_over_all_declared_steps() -> None:
    """2 jobs × 3 batches × 1 pass = 6 steps: the fourth is made at step 3, ½(1 + cos(π·3/6)) = ½ of the peak."""
    trained = module()
    spec = SftSpec(jobs=2, batches_per_job=3, microbatch_size=4, optimizer=AdamSpec(learning_rate=1e-3))
    optimizer = new_optimizer(trained, spec)
    parameters = list(trained.parameters())
    for step in range(6):
        optimizer.step(sum((p.square().sum() for p in parameters), torch.zeros(())), parameters)
        expected = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 6))
        assert optimizer.adam.param_groups[0]["lr"] == pytest.approx(expected)
    assert expected == pytest.approx(1e-3 * 0.0669873, rel=1e-5)


def test_a_loss_that_is_no_number_changes_no_parameter() -> None:
    bad = inputs()["action"].clone()
    bad[0] = math.nan
    trained = module()
    with pytest.raises(TenantFault, match="loss: got nan at step 0"):
        sft(1, action=bad)
    for a, b in zip(trained.parameters(), module().parameters(), strict=True):
        assert torch.equal(a, b)


def _ppo(valid: torch.Tensor) -> tuple[int, dict[str, float]]:
    given, trained = inputs(), module()
    spec = PpoSpec(
        jobs=1, num_envs=2, rollout_steps=5, epochs=2, microbatch_size=5, optimizer=AdamSpec(learning_rate=0.0)
    )
    optimizer = new_optimizer(trained, spec)
    with torch.no_grad():
        scored = trained.evaluate(VLAFeature(given["features"]), given["proprioception"], given["action"])
    metrics = ppo_update(
        trained,
        optimizer,
        VLAFeature(given["features"]).__getitem__,
        spec,
        torch.Generator().manual_seed(0),
        proprioception=given["proprioception"],
        action=given["action"],
        log_prob=scored.log_prob,
        advantage=torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(3)),
        returns=torch.zeros(ROWS),
        valid=valid,
    )
    return optimizer.steps, metrics


def test_with_frozen_weights_the_ratio_is_one() -> None:
    """Learning rate 0: approximate KL 0 and nothing clipped over all epochs; 2 epochs × 2 microbatches = 4 steps."""
    steps, metrics = _ppo(torch.ones(ROWS, 2, dtype=torch.bool))
    assert steps == 4
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["grad_norm"] > 0


def test_a_job_without_a_valid_element_makes_no_step() -> None:
    steps, metrics = _ppo(torch.zeros(ROWS, 2, dtype=torch.bool))
    assert steps == 0
    assert metrics == {"nothing_to_learn": 1.0}
