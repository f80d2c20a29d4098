"""Updates of an action module: steps, base forwards, schedule, and faults that spoil nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from configs import presets
from configs.algorithm import AdamSpec, DecoupledSpec, GrpoSpec, KlSpec, PpoSpec, ReinforceSpec, SftSpec
from configs.errors import TenantFault
from configs.model import OftSpec
from kernels import action_modules
from kernels.features import VLAFeature
from kernels.losses import Coefficients
from kernels.policy_gradient import UpdateSettings, policy_gradient_update, ppo_coefficients, update_settings
from kernels.updates import new_optimizer
from tests.kernels.whole_updates import ppo_update, sft_update

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


def test_the_learning_rate_of_rollouts_is_constant_unless_its_decay_is_declared() -> None:
    """3 jobs of 2 environments × 8 steps in microbatches of 4, 2 epochs: 3 · 4 · 2 = 24 steps."""
    declared = {"jobs": 3, "num_envs": 2, "rollout_steps": 8, "microbatch_size": 4, "epochs": 2}
    optimizer = AdamSpec(learning_rate=1e-3)
    for cosine, steps in ((False, None), (True, 24)):
        spec = PpoSpec(**declared, optimizer=optimizer, cosine=cosine)
        assert new_optimizer(module(), spec).total_steps == steps


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
        trace = {"action": given["action"]}
        scored = trained.evaluate(VLAFeature(given["features"]), given["proprioception"], trace)
    metrics = ppo_update(
        trained,
        optimizer,
        VLAFeature(given["features"]).__getitem__,
        spec,
        torch.Generator().manual_seed(0),
        proprioception=given["proprioception"],
        trace=trace,
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


def job(seed: int = 0) -> dict[str, torch.Tensor]:
    """Samples of a rollout: stale log-probabilities, advantages equal over a chunk, chunks cut short, an empty row."""
    generator = torch.Generator().manual_seed(seed)
    given = inputs(seed)
    with torch.no_grad():
        scored = module().evaluate(VLAFeature(given["features"]), given["proprioception"], {"action": given["action"]})
    executed = torch.tensor([[2], [1], [0], [2], [2], [1], [2], [2], [1], [2]])
    return given | {
        "log_prob": scored.log_prob + 0.4 * torch.randn(ROWS, 2, generator=generator),
        "advantage": torch.randn(ROWS, 1, generator=generator).expand(ROWS, 2).contiguous(),
        "returns": torch.randn(ROWS, generator=generator),
        "valid": torch.arange(2) < executed,
        "old_value": scored.value,
    }


def ppo_spec(**changes: Any) -> PpoSpec:
    adam = AdamSpec(learning_rate=3e-3)
    settings = {"jobs": 1, "num_envs": 2, "rollout_steps": 5, "epochs": 3, "microbatch_size": 4, "optimizer": adam}
    return PpoSpec.model_validate(settings | changes)


def updated(update: Any, *settings: Any, **arguments: Any) -> tuple[action_modules.ActionModule, int, dict[str, float]]:
    """A fresh module after `update` on `arguments`, the steps made, and what it reported."""
    trained = module()
    optimizer = new_optimizer(trained, ppo_spec())
    encode = VLAFeature(arguments.pop("features")).__getitem__
    arguments["trace"] = {"action": arguments.pop("action")}
    metrics = update(trained, optimizer, encode, *settings, torch.Generator().manual_seed(5), **arguments)
    return trained, optimizer.steps, metrics


def same_bits(one: action_modules.ActionModule, two: action_modules.ActionModule) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("granularity", ["action", "chunk"])
def test_ppo_has_the_bits_of_one_written_plainly(granularity: str) -> None:
    """Shuffles, microbatches, clipped surrogate, critic and entropy in one loop, without any of the kernels' losses."""
    given, spec = job(), ppo_spec(log_prob_granularity=granularity, entropy_coef=0.01)
    trained, steps, metrics = updated(ppo_update, spec, **given)

    plain, generator = module(), torch.Generator().manual_seed(5)
    adam = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    valid = given["valid"]
    chosen = given["advantage"][valid].double().numpy()
    advantage = torch.zeros(ROWS, 2)
    advantage[valid] = torch.from_numpy((chosen - chosen.mean()) / chosen.std()).float()
    losses = []
    for _ in range(3):
        for index in torch.randperm(ROWS, generator=generator).split(4):
            scored = plain.evaluate(
                VLAFeature(given["features"][index]), given["proprioception"][index], {"action": given["action"][index]}
            )
            here = valid[index]
            rows = here.any(dim=1)
            log_ratio = (scored.log_prob - given["log_prob"][index]) * here
            entropy, a, mask = scored.entropy * here, advantage[index], here
            if granularity == "chunk":
                log_ratio, entropy, mask = log_ratio.sum(dim=1), entropy.sum(dim=1), rows
                a = a.sum(dim=1) / here.sum(dim=1).clamp(min=1)
            ratio = log_ratio.exp()
            surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            error = 0.5 * (scored.value - given["returns"][index]).square()
            loss = (
                (surrogate * mask).sum() / mask.sum()
                + 0.5 * ((error * rows).sum() / rows.sum())
                - 0.01 * (entropy.sum() / mask.sum())
            )
            adam.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            adam.step()
            losses.append(loss.item())
    assert steps == len(losses) == 9
    assert same_bits(trained, plain)
    assert metrics["loss"] == sum(losses) / 9
    assert metrics["nothing_to_learn"] == 0


def test_what_is_not_declared_changes_no_bit_and_what_is_does() -> None:
    """Bounds given twice are the symmetric ones; each other setting moves the parameters elsewhere."""
    given = job() | {"behaviour_log_prob": job()["log_prob"] - 0.7}
    plain = updated(ppo_update, ppo_spec(), **given)[0]
    assert same_bits(plain, updated(ppo_update, ppo_spec(clip_high=0.2), **given)[0])
    everything: tuple[dict[str, Any], ...] = (
        {"clip_high": 0.5},
        {"dual_clip": 1.01},
        {"value_clip": 0.01},
        {"kl": KlSpec(coef=1.0)},
        {"decoupled": DecoupledSpec(weight_cap=1.5), "actor_forward": True},
    )
    for changes in everything:
        assert not same_bits(plain, updated(ppo_update, ppo_spec(**changes), **given)[0]), changes


def test_weights_of_old_data_are_reported_as_capped() -> None:
    """π_proximal / π_behaviour = e^0.7 ≈ 2.01 everywhere: none is capped at 3, all are at 1.5."""
    given = job() | {"behaviour_log_prob": job()["log_prob"] - 0.7}
    for cap, fraction in ((3.0, 0.0), (1.5, 1.0)):
        spec = ppo_spec(decoupled=DecoupledSpec(weight_cap=cap), actor_forward=True)
        assert updated(ppo_update, spec, **given)[2]["capped_fraction"] == pytest.approx(fraction)


def test_the_critics_explained_variance_is_that_of_the_jobs_begin() -> None:
    given = job()
    rows = given["valid"].any(dim=1)
    returns, left = given["returns"][rows].double(), (given["returns"] - given["old_value"])[rows].double()
    expected = 1 - left.var(correction=0) / returns.var(correction=0)
    metrics = updated(ppo_update, ppo_spec(), **given)[2]
    assert metrics["explained_variance"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["ratio_max"] >= metrics["ratio_mean"] > 0


def group_update(**changes: Any) -> tuple[action_modules.ActionModule, int, dict[str, float]]:
    """GRPO as a setting: no critic, no standardising, the distance from a reference."""
    given = job()
    given["reference_log_prob"] = given["log_prob"]
    for name in ("returns", "old_value"):
        del given[name]
    coefficients = Coefficients(
        granularity="action", clip_low=0.2, clip_high=0.28, kl_coef=0.04, kl_reference="reference"
    )
    settings: dict[str, Any] = {"epochs": 2, "microbatch_size": 5, "standardised": False}
    return updated(policy_gradient_update, coefficients, **{**settings, **given, **changes})


def test_grpo_needs_no_critic_and_leaves_it_as_it_was() -> None:
    trained, steps, metrics = group_update()
    assert steps == 4
    assert metrics["value_loss"] == 0
    assert "explained_variance" not in metrics
    before = dict(module().named_parameters())
    after = dict(trained.named_parameters())
    assert any(name.startswith("value.") for name in after)
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name]) == name.startswith("value."), name


def test_reinforce_makes_one_step_a_microbatch_on_log_probabilities() -> None:
    """One microbatch: the loss is the mean of −A log π over the job's valid actions."""
    given = job()
    settings: dict[str, Any] = {"epochs": 1, "microbatch_size": ROWS, "standardised": False}
    _, steps, metrics = updated(policy_gradient_update, Coefficients(granularity="action"), **settings, **given)
    with torch.no_grad():
        scored = module().evaluate(VLAFeature(given["features"]), given["proprioception"], {"action": given["action"]})
    expected = -(given["advantage"] * scored.log_prob)[given["valid"]].mean()
    assert steps == 1
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": torch.zeros(ROWS, 2)},
        {"valid": torch.zeros(ROWS, 2, dtype=torch.bool)},
        {"advantage": torch.full((ROWS, 2), 3.0), "standardised": True},
        {"advantage": torch.full((ROWS, 2), math.nan), "valid": torch.zeros(ROWS, 2, dtype=torch.bool)},
    ],
    ids=["no advantage", "nothing valid", "all alike and standardised", "NaN where nothing is valid"],
)
def test_a_job_with_nothing_to_learn_from_makes_no_step_and_says_so(changes: dict[str, Any]) -> None:
    """The distance from the reference alone moves nothing either."""
    trained, steps, metrics = group_update(**changes)
    assert steps == 0
    assert metrics == {"nothing_to_learn": 1.0}
    assert same_bits(trained, module())


def test_a_critic_learns_from_advantages_that_are_alike_but_not_from_none() -> None:
    """All 3: returns are 3 above the values, the policy's standardised advantages 0. All 0: the critic was right."""
    given = job()
    given["advantage"] = torch.full((ROWS, 2), 3.0)
    _, steps, metrics = updated(ppo_update, ppo_spec(), **given)
    assert (steps, metrics["policy_loss"]) == (9, 0)
    given["advantage"] = torch.zeros(ROWS, 2)
    _, steps, metrics = updated(ppo_update, ppo_spec(), **given)
    assert (steps, metrics) == (0, {"nothing_to_learn": 1.0})


def test_the_coefficients_are_what_the_workload_declares() -> None:
    assert ppo_coefficients(ppo_spec(clip_coef=0.1, entropy_coef=0.02)) == Coefficients(
        granularity="action", clip_low=0.1, clip_high=0.1, value_coef=0.5, entropy_coef=0.02
    )
    declared = ppo_spec(
        clip_high=0.3,
        dual_clip=3.0,
        value_clip=0.2,
        kl=KlSpec(coef=0.1, estimator="k2"),
        decoupled=DecoupledSpec(weight_cap=2.0),
        actor_forward=True,
        log_prob_granularity="chunk",
    )
    assert ppo_coefficients(declared) == Coefficients(
        granularity="chunk",
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3.0,
        behaviour_weight_cap=2.0,
        value_coef=0.5,
        value_clip=0.2,
        entropy_coef=0.0,
        kl_coef=0.1,
        kl_estimator="k2",
    )


DECLARED: dict[str, Any] = {
    "jobs": 1,
    "num_envs": 2,
    "rollout_steps": 5,
    "microbatch_size": 4,
    "optimizer": {"learning_rate": 1e-3},
    "log_prob_granularity": "chunk",
    "entropy_coef": 0.02,
    "gamma": 0.9,
    "kl": {"coef": 0.04, "estimator": "k2", "reference": "behaviour"},
}
KL: dict[str, Any] = {"kl_coef": 0.04, "kl_estimator": "k2", "kl_reference": "behaviour"}
CHUNKS: dict[str, Any] = {"granularity": "chunk"}
CLIPS = {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}
CLIPPED = {"clip_coef": 0.1, "clip_high": 0.28, "dual_clip": 3.0, "epochs": 3}


@pytest.mark.parametrize(
    ("spec", "fields", "settings", "estimation"),
    [
        (
            GrpoSpec,
            CLIPPED | {"group_size": 2, "baseline": {"kind": "group_mean", "scale": "none"}, "keep_return": (0.1, 0.8)},
            (Coefficients(**CHUNKS, **CLIPS, entropy_coef=0.02, **KL), 3, False),
            ("group_mean", {"scale": "none", "keep_return": (0.1, 0.8), "gamma": 0.9}),
        ),
        (
            GrpoSpec,
            {"group_size": 2, "baseline": {"kind": "leave_one_out"}, "kl": {"coef": 0.5}},
            (
                Coefficients(
                    **CHUNKS, clip_low=0.2, clip_high=0.2, entropy_coef=0.02, kl_coef=0.5, kl_reference="reference"
                ),
                4,
                False,
            ),
            ("leave_one_out", {"keep_return": None, "gamma": 0.9}),
        ),
        (
            ReinforceSpec,
            {
                "estimator": {"kind": "n_step", "n_steps": 2, "value_baseline": False},
                "value_coef": 0.3,
                "standardise": False,
            },
            (Coefficients(**CHUNKS, value_coef=0.3, entropy_coef=0.02, **KL), 1, False),
            ("n_step", {"n_steps": 2, "value_baseline": False, "gamma": 0.9}),
        ),
        (
            ReinforceSpec,
            {"kl": None},
            (Coefficients(**CHUNKS, value_coef=0.5, entropy_coef=0.02), 1, True),
            ("monte_carlo", {"value_baseline": True, "gamma": 0.9}),
        ),
        (
            PpoSpec,
            CLIPPED | {"gae_lambda": 0.7, "value_coef": 0.3, "kl": {"coef": 0.04, "reference": "reference"}},
            (
                Coefficients(
                    **CHUNKS,
                    **CLIPS,
                    value_coef=0.3,
                    entropy_coef=0.02,
                    kl_coef=0.04,
                    kl_reference="reference",
                    kl_estimator="k3",
                ),
                3,
                True,
            ),
            ("gae", {"gamma": 0.9, "gae_lambda": 0.7}),
        ),
    ],
    ids=["grpo", "rloo", "n-step reinforce", "reinforce", "ppo"],
)
def test_loss_and_estimator_are_what_a_workload_declares(
    spec: Any, fields: dict[str, Any], settings: tuple[Coefficients, int, bool], estimation: tuple[str, dict[str, Any]]
) -> None:
    algorithm = spec.model_validate(DECLARED | fields)
    assert update_settings(algorithm) == UpdateSettings(*settings)
    assert algorithm.estimation == estimation
