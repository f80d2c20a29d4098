"""The RL benchmark's figures by hand, that its single file is the same PPO as ours, and its waiting environment."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import rl_throughput, single_file_ppo, waiting_reach
from configs import presets
from configs.algorithm import PpoSpec
from kernels import action_modules
from kernels.advantages import standardise
from kernels.advantages.gae import gae
from kernels.features import VLAFeature
from kernels.updates import new_optimizer
from services.environment_client import SessionClient
from services.environment_service import EnvironmentService
from services.environments.adapter import make_adapter
from services.environments.reach import MAX_EPISODE_STEPS, ReachEnv
from tests.kernels.whole_updates import ppo_update


def _ppo() -> PpoSpec:
    algorithm = presets.workload("reach").algorithm
    assert isinstance(algorithm, PpoSpec)
    return algorithm.model_copy(update={"epochs": 2, "microbatch_size": 5})


def test_a_jobs_seconds_are_those_between_its_moves() -> None:
    """Both waits for a worker are one part; a job that came back from a worker is refused."""
    states = ("reserved", "needs_advantages", "computing_advantages", "ready", "leased", "completed")
    story = [{"state": s, "timestamp": t} for s, t in zip(states, (1.0, 3.0, 3.5, 3.75, 4.0, 8.0), strict=True)]
    assert rl_throughput.parts(story) == {"collect": 2.0, "handed on": 0.75, "estimate": 0.25, "update": 4.0}
    failed = [*story[:1], {"state": "failed", "timestamp": 2.0, "reason": "its simulator died"}]
    with pytest.raises(RuntimeError, match="from reserved to failed: its simulator died"):
        rl_throughput.parts(failed)


def test_a_turn_is_held_against_its_neighbours() -> None:
    """The machine slows down by half meanwhile, and the ratio is the same."""
    assert rl_throughput.against([90.0, 60.0], [100.0, 80.0, 40.0]) == [1.0, 1.0]


def test_the_workload_is_the_presets() -> None:
    """Its hyper-parameters are; it learns in lock-step or as the preset does."""
    preset = presets.workload("reach")
    for in_flight, lockstep in ((1, True), (2, False)):
        found = rl_throughput.workload("one", "cpu", in_flight=in_flight)
        assert found.algorithm == preset.algorithm.model_copy(update={"jobs": 1000, "lockstep": lockstep})
        assert (found.action_module, found.environment) == (preset.action_module, preset.environment)
        assert found.limits.max_in_flight_jobs == in_flight


def test_the_gpus_presets_differ_in_name_and_device_alone() -> None:
    cpu, gpu = presets.base_model("tiny-qwen3-vl"), presets.base_model("tiny-qwen3-vl-cuda")
    assert gpu == cpu.model_copy(update={"name": "tiny-qwen3-vl-cuda", "device": "cuda"})
    laptop, tiny_gpu = presets.cluster("laptop"), presets.cluster("tiny-gpu")
    assert tiny_gpu == laptop.model_copy(update={"name": "tiny-gpu", "base_models": ("tiny-qwen3-vl-cuda",)})


def test_the_single_files_estimates_are_ours() -> None:
    """Episodes that end either way, both at once, and neither, against kernels/."""
    random = np.random.default_rng(0)
    shape = (6, 3)
    reward, value, bootstrap = (random.normal(size=shape).astype(np.float32) for _ in range(3))
    last = random.normal(size=3).astype(np.float32)
    terminated, truncated = random.random(shape) < 0.25, random.random(shape) < 0.25
    terminated[2, 1] = truncated[2, 1] = True
    assert (terminated ^ truncated).any()
    assert not (terminated | truncated).all()
    advantage, returns = single_file_ppo.estimate(
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        value=value,
        last_value=last,
        bootstrap=bootstrap,
        gamma=0.9,
        gae_lambda=0.8,
    )
    fields = {
        "reward": reward.reshape(-1, 1),
        "terminated": terminated.reshape(-1, 1),
        "truncated": truncated.reshape(-1, 1),
        "valid": np.ones((18, 1), bool),
        "sample_valid": np.ones(18, bool),
        "value": value.reshape(-1),
        "bootstrap_value": bootstrap.reshape(-1),
        "next_value": np.concatenate([value.reshape(-1)[3:], last]),
    }
    ours = gae(fields, num_envs=3, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(returns, ours["return"], rtol=1e-5, atol=1e-6)
    expected = standardise(ours["advantage"], fields["valid"])[:, 0]
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)


def test_the_single_files_update_is_ours() -> None:
    """The same steps on the same rows in the same order, so the same parameters but for rounding."""
    algorithm, base = _ppo(), presets.base_model("tiny-qwen3-vl")
    draw = torch.Generator().manual_seed(1)
    n = 12
    feature = VLAFeature(torch.randn(n, base.num_action_tokens, base.hidden_width, generator=draw))
    state = torch.randn(n, 2, generator=draw)
    advantage, returns = torch.randn(n, generator=draw), torch.randn(n, generator=draw)
    spec = presets.workload("reach").action_module
    ours, theirs = (action_modules.build(spec, base, 0) for _ in range(2))
    first = ours.act(feature, state, draw)
    assert first.log_prob is not None
    # The policy has moved since: ratios on both sides of both bounds.
    log_prob = first.log_prob + 0.5 * torch.randn(n, 1, generator=draw)
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    ppo_update(
        ours,
        new_optimizer(ours, algorithm),
        lambda rows: feature[rows],
        algorithm,
        torch.Generator().manual_seed(2),
        proprioception=state,
        trace={"action": first.action},
        log_prob=log_prob,
        advantage=advantage[:, None],
        returns=returns,
        valid=torch.ones(n, 1, dtype=torch.bool),
    )
    single_file_ppo.update(
        theirs,
        single_file_ppo.new_optimizer(theirs, algorithm),
        algorithm,
        torch.Generator().manual_seed(2),
        feature,
        state=state,
        action=first.action,
        log_prob=log_prob,
        advantage=advantage,
        returns=returns,
    )
    before = dict(action_modules.build(spec, base, 0).named_parameters())
    found = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-3, atol=2e-5)
        assert not torch.equal(before[name], parameter), name


def test_the_single_files_environments_are_reach() -> None:
    """From a thread instead of a process: pictures, states and final observations are a lone environment's."""
    pipe, theirs = multiprocessing.Pipe()
    child = threading.Thread(target=single_file_ppo.simulate, args=(theirs, 2, 0.0, 7), daemon=True)
    child.start()
    pipe.send({"reset": True})
    images, states = pipe.recv()
    alone = ReachEnv()
    first, _ = alone.reset(seed=8)
    np.testing.assert_array_equal(images[1], first["image"])
    action = np.zeros((2, 2), np.float32)
    for _ in range(MAX_EPISODE_STEPS):
        pipe.send(action)
        images, states, reward, terminated, truncated, final = pipe.recv()
    assert truncated.tolist() == [True, True]
    assert terminated.tolist() == [False, False]
    assert reward.tolist() == [0.0, 0.0]
    assert [row for row, _, _ in final] == [0, 1]
    np.testing.assert_array_equal(final[1][1], first["image"])  # it has not moved
    np.testing.assert_array_equal(final[1][2], first["proprioception"])
    following, _ = alone.reset(seed=10)
    np.testing.assert_array_equal(images[1], following["image"])
    np.testing.assert_array_equal(states[1], following["proprioception"])
    pipe.close()
    child.join(10)
    assert not child.is_alive()


def test_the_waiting_environment_is_reach_and_waits_once_a_step() -> None:
    """Rows, rewards and pictures as of the preset `reach`; a step of three takes 20 ms and no 60."""
    waiting = make_adapter(waiting_reach.spec().model_dump(mode="json"), 3)
    plain = make_adapter(presets.environment("reach").model_dump(mode="json"), 3)
    rows, action = [0, 1, 2], np.full((3, 2), 0.5, np.float32)
    fastest = float("inf")
    for adapter in (waiting, plain):
        adapter.reset(rows, [5, 6, 7])
    for _ in range(5):
        begun = time.perf_counter()
        found = waiting.step(rows, action)
        fastest = min(fastest, time.perf_counter() - begun)
        expected = plain.step(rows, action)
        np.testing.assert_array_equal(found.reward, expected.reward)
        np.testing.assert_array_equal(waiting.render(rows)["top"], plain.render(rows)["top"])
    assert waiting_reach.STEP_S <= fastest < 2 * waiting_reach.STEP_S
    waiting.close()
    plain.close()


def test_a_host_process_steps_the_waiting_environment() -> None:
    """It is found there by its id alone; a session of two ends an episode and goes on."""

    async def main() -> None:
        service = EnvironmentService(1)
        try:
            opened = await service.open(
                {
                    "environment": waiting_reach.spec().model_dump(mode="json"),
                    "num_envs": 2,
                    "hosts": 1,
                    "tenant_id": "one",
                    "request_id": "one",
                }
            )
            session = SessionClient.direct(opened)
            await session.reset([1, 2])
            for _ in range(MAX_EPISODE_STEPS):
                step = await session.batch_step(np.zeros((2, 1, 2), np.float32), [3, 4])
            assert step["truncated"].tolist() == [[True], [True]]
            alone = ReachEnv()
            for row, seed in enumerate((3, 4)):
                first, _ = alone.reset(seed=seed)
                np.testing.assert_array_equal(step["observation"]["images"]["top"][row], first["image"])
            session.disconnect()
        finally:
            await service.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_rows_ratios_and_pictures_are_of_the_turns(tmp_path: Path) -> None:
    """Hand numbers: a ratio is the median over the rounds, a row's seconds the means over its jobs."""
    ours = {"collect": 2.0, "handed on": 0.1, "estimate": 0.1, "update": 0.5}
    theirs = {"collect": 1.0, "estimate": 0.0, "update": 0.5}
    rates = {
        ("reach", "single file"): [100.0, 100.0, 300.0],
        ("reach", "platform"): [90.0, 100.0],
        ("reach", "two in flight"): [150.0, 150.0],
        ("waiting", "platform"): [50.0, 40.0],
        ("waiting", "single file"): [100.0, 50.0],
        ("waiting", "three tenants"): [100.0, 60.0],
    }
    jobs = {key: [theirs if key[1] == "single file" else ours] for key in rates}
    jobs["waiting", "platform"] = [ours, ours | {"collect": 4.0}]
    report = rl_throughput.report_of(rates, jobs)
    assert {key: value for key, value in report.summary.items() if not key.endswith(("_low", "_high"))} == {
        "one_tenant_ratio": pytest.approx((0.9 + 0.5) / 2),
        "one_tenant_two_in_flight_ratio": pytest.approx((1.5 + 0.5) / 2),
        "waiting_one_tenant_ratio": pytest.approx((0.5 + 0.8) / 2),
        "three_tenant_ratio": pytest.approx((2.0 + 1.5) / 2),
        "three_tenant_over_single_files": pytest.approx((1.0 + 1.2) / 2),
    }
    assert (report.summary["three_tenant_ratio_low"], report.summary["three_tenant_ratio_high"]) == (1.5, 2.0)
    assert report.rows[3] == {
        "environment": "waiting",
        "way": "platform",
        "steps_per_second": 45.0,
        "low": 40.0,
        "high": 50.0,
        "turns": 2,
        "collect_s": 3.0,
        "handed on_s": 0.1,
        "estimate_s": 0.1,
        "update_s": 0.5,
    }
    rl_throughput.draw(report, tmp_path / "out.png")
    for name in ("out.png", "out_split.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
