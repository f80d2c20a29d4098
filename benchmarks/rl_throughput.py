"""Environment steps per second of whole RL iterations: the platform against PPO in a single file, alone and by three.

An iteration is collect, estimate advantages, update. Ours are those of a real platform (its processes under a temporary
home) from a job's reservation to its completion: the rollout through the inference service and its environment host,
the partition, the mark, the platform's own flows `preprocess` and `train` leasing the job's stages, `train_job` with a
checkpoint, the publishing, the curves, the clearing of the partition. Only the flow `rl` is replaced by a loop in this
file, which makes the same calls and the same Prefect task run in a flow run of its own, so that iterations of both
sides can be made in turns: nothing of Prefect is left out. The workload is in lock-step, so that it learns by the same
algorithm to the letter; `two in flight` is what the preset `reach` does instead, collecting beside training.
The other side is `benchmarks.single_file_ppo`: same base, action module, environment, hyper-parameters and thread
settings. Left out of both: starting processes, loading the base, opening the tenant, the first iteration.

Three tenants: with simulators that wait, 20 ms a step of all environments of a host (`benchmarks.waiting_reach`), one
tenant alone, the single file, and three tenants together on the same services, in turns. The single file run three
times one after another has the rate of one run, which is measured.

Every ratio is taken round by round and its median given, with the 95 % interval by order statistics.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import charts, report, waiting_reach
from benchmarks.single_file_ppo import SingleFilePpo
from benchmarks.sizes import DEVICES
from benchmarks.temporary_platform import temporary_platform
from benchmarks.timing import interval
from configs import presets
from configs.algorithm import PpoSpec
from configs.workload import WorkloadSpec
from services.scheduler_records import TERMINAL
from tasks.connection import Platform, platform_connection
from tasks.jobs import reserve, rollout
from tasks.tenants import OpenedTenant, kept_policy, open_tenant

AIMS = {"one_tenant_ratio": (">=", 0.9), "three_tenant_ratio": (">=", 1.5)}
PARTS = {
    ("reserved", "needs_advantages"): "collect",
    ("needs_advantages", "computing_advantages"): "handed on",
    ("computing_advantages", "ready"): "estimate",
    ("ready", "leased"): "handed on",
    ("leased", "completed"): "update",
}
"""{(a job's state, its next one): part of the iteration}."""
_CLUSTERS = {"cpu": "laptop", "cuda": "tiny-gpu"}
_BASES = {"cpu": "tiny-qwen3-vl", "cuda": "tiny-qwen3-vl-cuda"}
_RUN = "benchmark"
_WAIT_S = 30.0
_TOGETHER = 2  # iterations a turn of each of several tenants, so that one trains while another collects
_IN_FLIGHT = 6  # iterations a turn of the one that trains while it collects; only the last of them has its update alone


def workload(name: str, device: str, *, in_flight: int = 1) -> WorkloadSpec:
    """The preset `reach`, without evaluation and with no end; in lock-step unless two jobs may be in flight."""
    preset = presets.workload("reach")
    assert isinstance(preset.algorithm, PpoSpec)
    return preset.model_copy(
        update={
            "tenant": preset.tenant.model_copy(update={"name": name}),
            "base_model": _BASES[device],
            "algorithm": preset.algorithm.model_copy(update={"jobs": 1000, "lockstep": in_flight == 1}),
            "evaluation": None,
            "limits": preset.limits.model_copy(update={"max_in_flight_jobs": in_flight}),
            "outputs": preset.outputs.model_copy(update={"register_adapter": False}),
        }
    )


def parts(story: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """{part: seconds} of a completed job, by its moves (oldest first, each with `state` and `timestamp`).

    Raises:
        RuntimeError: if it went another way.
    """
    found = dict.fromkeys(PARTS.values(), 0.0)
    for before, after in itertools.pairwise(story):
        step = before["state"], after["state"]
        if step not in PARTS:
            raise RuntimeError(f"a job went from {step[0]} to {step[1]}: {after.get('reason')}")
        found[PARTS[step]] += after["timestamp"] - before["timestamp"]
    return found


def against(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of `ours` to the mean of what was measured right before and right after; one more of `theirs`."""
    return [mine / statistics.mean(pair) for mine, pair in zip(ours, itertools.pairwise(theirs), strict=True)]


async def _iterate(platform: Platform, tenant: OpenedTenant, count: int) -> list[str]:
    """What the flow `rl` does for `count` rollouts; ids of the jobs, the last of which are under way still."""
    first = len(await (await platform.scheduler()).jobs(policy_key=tenant.backend.policy_key))
    backend, algorithm = tenant.backend, tenant.backend.algorithm
    assert isinstance(algorithm, PpoSpec)
    scheduler, inference = await platform.scheduler(), await platform.inference()
    made: list[str] = []
    while len(made) < count:
        if not await scheduler.wait_admission(backend.policy_key, timeout_s=_WAIT_S):
            continue
        version = await inference.current_version(tenant.name)
        reply = await reserve(scheduler, tenant, first + len(made), request_id=None, flow_run_id=_RUN, version=version)
        if reply["job"] is not None:
            await rollout(platform, tenant, reply["job"])
            made.append(reply["job"]["job_id"])
    return made


async def _turn(
    platform: Platform, tenants: Sequence[OpenedTenant], count: int
) -> tuple[float, list[dict[str, float]]]:
    """Steps per second of `count` iterations of each tenant, all at once, and each job's parts."""
    scheduler = await platform.scheduler()
    made = await asyncio.gather(*(_iterate(platform, tenant, count) for tenant in tenants))
    jobs = [job for of_tenant in made for job in of_tenant]
    for job in jobs:
        while (await scheduler.wait_ended(job, timeout_s=_WAIT_S))["state"] not in TERMINAL:
            pass
    stories = [await scheduler.story(job) for job in jobs]
    moments = [move["timestamp"] for story in stories for move in story]
    steps = sum(count * tenant.backend.sample_count for tenant in tenants)
    return steps / (max(moments) - min(moments)), [parts(story) for story in stories]


class _Run:
    """Rates of each way's turns, and the parts of their jobs."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.rates: dict[tuple[str, str], list[float]] = {}  # {(environment, way): a rate a turn}
        self.parts: dict[tuple[str, str], list[dict[str, float]]] = {}

    async def ours(self, environment: str, way: str, tenants: Sequence[OpenedTenant], count: int) -> None:
        rate, of_jobs = await _turn(self._platform, tenants, count)
        self._keep(environment, way, rate, of_jobs)

    def peer(self, environment: str, peer: SingleFilePpo) -> None:
        self._keep(environment, "single file", peer.iteration(), [peer.seconds])

    def _keep(self, environment: str, way: str, rate: float, of_jobs: list[dict[str, float]]) -> None:
        self.rates.setdefault((environment, way), []).append(rate)
        self.parts.setdefault((environment, way), []).extend(of_jobs)


def report_of(
    rates: Mapping[tuple[str, str], Sequence[float]], jobs: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]
) -> report.Report:
    """Rows and ratios.

    Args:
        rates: {("reach" or "waiting", way): steps per second of each turn, in order}.
        jobs: {the same: each job's parts}; a row has their means.
    """
    found = report.Report(aims=AIMS)
    for (environment, way), of_turns in rates.items():
        low, high = interval(of_turns)
        of_jobs = jobs[environment, way]
        seconds = {f"{part}_s": statistics.mean(job[part] for job in of_jobs) for part in of_jobs[0]}
        found.add(
            environment=environment,
            way=way,
            steps_per_second=statistics.median(of_turns),
            low=low,
            high=high,
            turns=len(of_turns),
            **seconds,
        )
    reach, waiting = ({way: of for (e, way), of in rates.items() if e == name} for name in ("reach", "waiting"))
    ratios = {
        "one_tenant_ratio": against(reach["platform"], reach["single file"]),
        # Each of its turns comes right after one of the single file's.
        "one_tenant_two_in_flight_ratio": _quotients(reach["two in flight"], reach["single file"][1:]),
        "waiting_one_tenant_ratio": _quotients(waiting["platform"], waiting["single file"]),
        "three_tenant_ratio": _quotients(waiting["three tenants"], waiting["platform"]),
        "three_tenant_over_single_files": _quotients(waiting["three tenants"], waiting["single file"]),
    }
    for name, values in ratios.items():
        found.summary[name] = statistics.median(values)
        found.summary[f"{name}_low"], found.summary[f"{name}_high"] = interval(values)
    return found


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


async def _opened(platform: Platform, stack: AsyncExitStack, spec: WorkloadSpec) -> OpenedTenant:
    """A tenant that stays open until the stack is left."""
    tenant = await open_tenant(platform, spec, _RUN)
    await stack.enter_async_context(kept_policy(platform, tenant.backend.policy_key, _RUN))
    return tenant


def _waiting(tenant: OpenedTenant) -> OpenedTenant:
    """The tenant in the environment that waits; no preset, so it cannot be asked for by a workload."""
    return replace(tenant, backend=tenant.backend.model_copy(update={"environment": waiting_reach.spec()}))


def _peer(tenant: OpenedTenant, step_s: float) -> SingleFilePpo:
    algorithm, environment = tenant.backend.algorithm, tenant.backend.environment
    assert isinstance(algorithm, PpoSpec)
    assert environment is not None
    return SingleFilePpo(tenant.backend.policy, algorithm, environment.instruction, step_s)


async def _measured(arguments: argparse.Namespace) -> report.Report:
    device = arguments.device
    async with platform_connection() as platform, AsyncExitStack() as stack:
        run = _Run(platform)
        one = await _opened(platform, stack, workload("one", device))
        two = await _opened(platform, stack, workload("two-in-flight", device, in_flight=2))
        peer = _peer(one, 0.0)
        stack.callback(peer.close)
        await _turn(platform, [one], 1)  # hosts, first forwards
        await _turn(platform, [two], 1)
        peer.iteration()
        run.peer("reach", peer)
        for _ in range(arguments.rounds):
            await run.ours("reach", "platform", [one], 1)
            run.peer("reach", peer)
            await run.ours("reach", "two in flight", [two], _IN_FLIGHT)
        three = [_waiting(await _opened(platform, stack, workload(f"waiting-{i}", device))) for i in range(3)]
        slow = _peer(three[0], waiting_reach.STEP_S)
        stack.callback(slow.close)
        await _turn(platform, three, 1)
        slow.iteration()
        for _ in range(arguments.rounds_of_three):
            await run.ours("waiting", "platform", three[:1], _TOGETHER)
            run.peer("waiting", slow)
            await run.ours("waiting", "three tenants", three, _TOGETHER)
        return report_of(run.rates, run.parts)


def measure(arguments: argparse.Namespace) -> report.Report:
    """A platform under a temporary home, both sides in turns on it and beside it."""
    from prefect import flow
    from prefect.settings import PREFECT_API_URL, temporary_settings

    cluster = _CLUSTERS[arguments.device]
    torch.set_num_threads(presets.cluster(cluster).torch_threads)

    @flow(name="rl-throughput")
    async def measured() -> list[report.Report]:
        return [await _measured(arguments)]

    with temporary_platform(cluster) as (_, addresses):
        os.environ.update(addresses.export())
        with temporary_settings({PREFECT_API_URL: addresses.prefect_api_url}):
            return asyncio.run(measured())[0]


def draw(found: report.Report, path: Path) -> None:
    """Rates in `path`; beside it, with `_split` in its name, the parts of an iteration."""
    rates = {(row["environment"], row["way"]): row["steps_per_second"] for row in found.rows}
    ways = ("single file", "platform")
    both = {way: [rates["reach", way], rates["waiting", way]] for way in ways}
    others = [rates["reach", "two in flight"], rates["waiting", "three tenants"]]
    groups = ["Reach-v0\n(third: two in flight)", "20 ms a step\n(third: three tenants)"]
    series = {**both, "platform, third": others}
    charts.bars(path, groups, series, "environment steps / s", "Whole RL iterations (median of the turns)")
    rows = {(row["environment"], row["way"]): row for row in found.rows}
    names = ("collect", "handed on", "estimate", "update")
    split = {
        way: {part: [rows[e, way].get(f"{part}_s", 0.0) for e in ("reach", "waiting")] for part in names}
        for way in ways
    }
    title = "Seconds of an iteration of 512 steps"
    charts.stacked(path.with_stem(f"{path.stem}_split"), ["Reach-v0", "20 ms a step"], split, "seconds", title)


if __name__ == "__main__":
    report.main(
        "Environment steps per second of whole RL iterations: the platform against PPO in a single file",
        measure,
        options=[
            ("rounds", 6, "turns of one tenant"),
            ("rounds-of-three", 3, "turns of three tenants"),
            ("device", DEVICES, "where base model and modules are"),
        ],
        draw=draw,
    )
