"""Environment steps per second: flow → scheduler → services → partition, against a bare loop.

Timed, both in one run and taken in turns: (a) a real platform with a workload of the flow `rl`; from a job's
reservation to the word that its partition is written, for all its rollouts but the first, which opens the simulator;
(b) `benchmarks.peers.PlainCollection`, the same environments, base model, action module, batch and thread settings
in one process. Left out of both: starting processes, loading the base, the simulator's first picture. While (a) is
timed the platform also trains on what it collected, as it does in life; (b) trains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.peers import PlainCollection
from configs import presets
from configs.cluster import ClusterSpec
from configs.home import Home
from configs.workload import WorkloadSpec
from joynexus import processes
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from services import lookup
from services.admission import admit

AIMS = {"reach_ratio": 0.85, "pushcube_ratio": 0.95}


def _workload(environment: str, num_envs: int, steps: int, jobs: int, name: str) -> WorkloadSpec:
    """The preset workload of that environment, sized for the benchmark: no evaluation, nothing registered."""
    workload = presets.workload({"reach": "reach", "pushcube": "push"}[environment])
    algorithm = workload.algorithm.model_copy(
        update={"jobs": jobs, "num_envs": num_envs, "rollout_steps": steps, "epochs": 1}
    )
    return workload.model_copy(
        update={
            "tenant": workload.tenant.model_copy(update={"name": name}),
            "algorithm": algorithm,
            "evaluation": None,
            "outputs": workload.outputs.model_copy(update={"register_adapter": False}),
        }
    )


async def _platform_rate(api_url: str, dask: str, workload: WorkloadSpec) -> list[float]:
    """Environment steps per second of each rollout of the workload's flow run, but for the first."""
    async with PrefectApi(api_url) as api, await lookup.connect(dask) as client:
        run = await api.start("rl", {"workload": workload.model_dump(mode="json")}, name=workload.tenant.name)
        while (state := (await api.run(run))["state_type"]) not in TERMINAL_STATES:
            await asyncio.sleep(0.5)
        if state != "COMPLETED":
            raise RuntimeError(f"the workload's flow run ended {state}; see the logs under the home's logs")
        scheduler = await lookup.service(lookup.SCHEDULER, client)
        rates = []
        for job in await scheduler.jobs(policy_key=workload.policy_key):
            moves = {move["state"]: move["timestamp"] for move in reversed(await scheduler.story(job["job_id"]))}
            rates.append(job["sample_count"] / (moves["needs_advantages"] - moves["reserved"]))
        return rates[1:]


def measure(arguments: argparse.Namespace) -> report.Report:
    """Both ways in turns, for each environment."""
    found = report.Report(aims={key: (">=", aim) for key, aim in AIMS.items()})
    wanted = [("reach", 8, 64)] + ([] if arguments.without_renderer else [("pushcube", 4, 50)])
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        home = Home(Path(folder))
        os.environ["JOYNEXUS_HOME"] = folder
        addresses = processes.ensure_up(home)
        cluster: ClusterSpec = presets.cluster("laptop")
        try:
            for environment, num_envs, steps in wanted:
                plain: list[float] = []
                ours: list[float] = []
                declared = _workload(environment, num_envs, steps, arguments.rollouts + 1, "plain")
                bare = PlainCollection(admit(declared, home, cluster).policy, environment, num_envs)
                bare.run(2)  # the first picture
                for turn in range(arguments.turns):
                    plain += [bare.run(steps) for _ in range(arguments.rollouts)]
                    workload = _workload(environment, num_envs, steps, arguments.rollouts + 1, f"{environment}-{turn}")
                    ours += asyncio.run(_platform_rate(addresses.prefect_api_url, addresses.dask_scheduler, workload))
                bare.close()
                for way, rates in (("bare loop", plain), ("platform", ours)):
                    found.add(
                        environment=environment,
                        envs=num_envs,
                        way=way,
                        steps_per_second=statistics.median(rates),
                        lowest=min(rates),
                        highest=max(rates),
                        rollouts=len(rates),
                    )
                found.summary[f"{environment}_ratio"] = statistics.median(ours) / statistics.median(plain)
        finally:
            processes.down(home)
    return found


if __name__ == "__main__":
    report.main(
        "Environment steps per second: through the platform against a bare loop",
        measure,
        options=[
            ("turns", 3, "times that both ways are taken in turn"),
            ("rollouts", 4, "rollouts a turn"),
            ("without-renderer", False, "leave PushCube out"),
        ],
    )
