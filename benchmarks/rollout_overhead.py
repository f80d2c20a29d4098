"""Environment steps per second: flow → scheduler → services → partition, against a bare loop.

Timed, both in one run and in turns, a rollout each: (a) a real platform with a workload of the flow `rl`; from a
job's reservation to the word that its partition is written; (b) `benchmarks.peers.PlainCollection`, the same
environments, base model, action module, batch and thread settings in one process. The ratio is the median over the
rounds, each rollout against the bare ones before and after it, since a shared machine's speed drifts. Left out of
both: starting processes, loading the base, the simulator's first picture.

Training is no part of what is compared: the tenant's turn to train is held by a job of the benchmark's own, and each
job is dropped once its rollout is timed, which admits the next. The row `platform, training` shows (a) in life, with
training on the same cores beside it; it is not interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers import PlainCollection
from configs import presets
from configs.algorithm import PpoSpec
from configs.cluster import ClusterSpec
from configs.errors import UnknownObject
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.workload import WorkloadSpec
from joynexus import processes
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from services import lookup
from services.admission import admit

AIMS = {"reach_ratio": 0.85, "pushcube_ratio": 0.95}
_ROLE = "benchmark"
_HELD_S = 1800.0


def _workload(environment: str, num_envs: int, steps: int, jobs: int, name: str, in_flight: int) -> WorkloadSpec:
    """The preset workload of that environment, sized for the benchmark: no evaluation, nothing registered."""
    workload = presets.workload({"reach": "reach", "pushcube": "push"}[environment])
    algorithm = workload.algorithm.model_copy(
        update={"jobs": jobs, "num_envs": num_envs, "rollout_steps": steps, "epochs": 1}
    )
    return workload.model_copy(
        update={
            "tenant": workload.tenant.model_copy(update={"name": name}),
            "algorithm": algorithm,
            "start": "continue",  # the job that holds the turn is of the same tenant, whose slot must not be replaced
            "evaluation": None,
            "limits": workload.limits.model_copy(update={"max_in_flight_jobs": in_flight}),
            "outputs": workload.outputs.model_copy(update={"register_adapter": False}),
        }
    )


@asynccontextmanager
async def _turn_held(scheduler: lookup.Service, tenant: str) -> AsyncIterator[None]:
    """One update a tenant runs at a time, so nothing of the tenant's is trained while this one is leased."""
    key = f"{tenant}.sft"
    await scheduler.register_policy(
        {
            "policy_key": key,
            "tenant_id": tenant,
            "task_type": "sft",
            "domain": _ROLE,
            "priority": 0,
            "max_in_flight": 1,
            "completion_target": None,
            "max_active_rollouts": None,
        }
    )
    reserved = await scheduler.reserve(None, key, 1, None, None, {}, consumer_role=_ROLE)
    await scheduler.mark(reserved["job"]["job_id"], "ready")
    held = await scheduler.lease_next(_ROLE, [_ROLE], _ROLE, _HELD_S)
    assert held["job"] is not None
    try:
        yield
    finally:
        await scheduler.close_policy(key, "the rollouts are timed")


async def _rate(scheduler: lookup.Service, job: dict[str, Any]) -> float:
    """Environment steps per second of a job's rollout."""
    moves = {move["state"]: move["timestamp"] for move in reversed(await scheduler.story(job["job_id"]))}
    return float(job["sample_count"] / (moves["needs_advantages"] - moves["reserved"]))


async def _rollout_of(api: PrefectApi, run: str, scheduler: lookup.Service, policy_key: str) -> tuple[str, float]:
    """The newest job's id and rate, once its partition is whole and what comes after the rollout is done too."""
    while True:
        if (state := await api.run(run))["state_type"] in TERMINAL_STATES:
            raise RuntimeError(f"the workload's flow run ended {state['state_type']}: {state['state']['message']}")
        with contextlib.suppress(UnknownObject):  # the flow has not registered it yet
            for job in await scheduler.jobs(policy_key=policy_key, states=["ready"], limit=1):
                return job["job_id"], await _rate(scheduler, job)
        await asyncio.sleep(0.2)


async def _ended(api: PrefectApi, run: str) -> str:
    """The state in which the flow run has ended."""
    while (state := str((await api.run(run))["state_type"])) not in TERMINAL_STATES:
        await asyncio.sleep(0.5)
    return state


async def _in_turns(
    addresses: PlatformAddresses, workload: WorkloadSpec, bare: PlainCollection, rounds: int
) -> tuple[list[float], list[float]]:
    """Rates of the platform's rollouts but the first, and of the bare ones around them (one more)."""
    assert isinstance(workload.algorithm, PpoSpec)
    ours, plain = [], []
    async with PrefectApi(addresses.prefect_api_url) as api, await lookup.connect(addresses.dask_scheduler) as client:
        scheduler = await lookup.service(lookup.SCHEDULER, client)
        async with _turn_held(scheduler, workload.tenant.name):
            run = await api.start("rl", {"workload": workload.model_dump(mode="json")}, name=workload.tenant.name)
            for _ in range(rounds + 1):
                job_id, rate = await asyncio.wait_for(_rollout_of(api, run, scheduler, workload.policy_key), _HELD_S)
                ours.append(rate)
                plain.append(bare.run(workload.algorithm.rollout_steps))
                await scheduler.drop(job_id, "its rollout is timed")
            await api.cancel(run)
            await _ended(api, run)
    return ours[1:], plain


async def _while_training(addresses: PlatformAddresses, workload: WorkloadSpec) -> list[float]:
    """Rates of a whole workload's rollouts but the first."""
    async with PrefectApi(addresses.prefect_api_url) as api, await lookup.connect(addresses.dask_scheduler) as client:
        scheduler = await lookup.service(lookup.SCHEDULER, client)
        run = await api.start("rl", {"workload": workload.model_dump(mode="json")}, name=workload.tenant.name)
        state = await _ended(api, run)
        if state != "COMPLETED":
            raise RuntimeError(f"the workload's flow run ended {state}; see the logs under the home's logs")
        return [await _rate(scheduler, job) for job in (await scheduler.jobs(policy_key=workload.policy_key))[1:]]


def measure(arguments: argparse.Namespace) -> report.Report:
    """Both ways in turns, for each environment."""
    found = report.Report(aims={key: (">=", aim) for key, aim in AIMS.items()})
    wanted = [("reach", 8, 64, arguments.rounds)]
    if not arguments.without_renderer:
        wanted.append(("pushcube", 4, 50, max(arguments.rounds // 2, 1)))
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        home = Home(Path(folder))
        os.environ["JOYNEXUS_HOME"] = folder
        addresses = processes.ensure_up(home)
        cluster: ClusterSpec = presets.cluster("laptop")
        try:
            for environment, num_envs, steps, rounds in wanted:
                turns = _workload(environment, num_envs, steps, rounds + 2, environment, 1)
                bare = PlainCollection(admit(turns, home, cluster).policy, environment, num_envs)
                bare.run(2)  # the first picture
                ours, plain = asyncio.run(_in_turns(addresses, turns, bare, rounds))
                bare.close()
                trained = _workload(environment, num_envs, steps, 5, f"{environment}-trained", 2)
                beside = asyncio.run(_while_training(addresses, trained))
                for way, rates in (("bare loop", plain), ("platform", ours), ("platform, training", beside)):
                    found.add(
                        environment=environment,
                        envs=num_envs,
                        way=way,
                        steps_per_second=statistics.median(rates),
                        lowest=min(rates),
                        highest=max(rates),
                        rollouts=len(rates),
                    )
                around = [statistics.mean(pair) for pair in itertools.pairwise(plain)]
                ratios = [a / b for a, b in zip(ours, around, strict=True)]
                found.summary[f"{environment}_ratio"] = statistics.median(ratios)
        finally:
            processes.down(home)
    return found


if __name__ == "__main__":
    report.main(
        "Environment steps per second: through the platform against a bare loop",
        measure,
        options=[
            ("rounds", 12, "rollouts each way (half as many on PushCube)"),
            ("without-renderer", 0, "1 leaves PushCube out"),
        ],
    )
