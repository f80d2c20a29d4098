"""Workloads through their deployments on a real platform: what is left behind, and what is the same to the bit."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from configs import presets
from configs.errors import UnknownObject
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.requests import CollectRequest, EvaluateRequest
from configs.workload import EvaluationSpec, WorkloadSpec
from flows.evaluate import evaluate
from joynexus.demo import job_run_counts
from joynexus.prefect_api import TERMINAL_STATES
from services import lookup
from services.mirror_state import prefect_state
from storage.checkpoints import CheckpointStore
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore
from storage.registry import mlflow_client
from tests.flows.running import Running, running, workload

SMALL = {"jobs": 2, "num_envs": 4, "rollout_steps": 8, "epochs": 1, "microbatch_size": 16}


def final_parameters(home: Home, spec: WorkloadSpec, run_id: str) -> dict[str, np.ndarray]:
    folder: Path = home.tenant(spec.tenant.name) / "workloads" / run_id / "checkpoints"
    return dict(CheckpointStore(folder).load().params)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_dataset_is_replaced_only_by_a_whole_one(platform: PlatformAddresses, home: Home, dataset: str) -> None:
    """Refused without `replace`; with it the new one takes the name, and nothing is left beside it."""

    async def main() -> None:
        shutil.copytree(home.datasets / dataset, home.datasets / "again")
        async with running(platform, home) as here:
            request = CollectRequest(dataset="again", environment="reach", episodes=3, hosts=1)
            kept, taken = [
                await here.api.start("collect", {"request": asked.model_dump(mode="json")})
                for asked in (request, request.model_copy(update={"replace": True}))
            ]
            assert "choose one, or set replace" in (await here.ended(kept))["state"]["message"]
            await here.completed(taken)
            assert LeRobotDataset(home.datasets / dataset).num_episodes == 6
            assert LeRobotDataset(home.datasets / "again").num_episodes == 3
            assert list((home.datasets / ".writing").glob("again*")) == []

    asyncio.run(main())


def sft(tenant: str, dataset: str, **changes: Any) -> WorkloadSpec:
    """A short fine-tuning on the demonstrations of Reach-v0."""
    reach = presets.workload("reach").action_module
    found = workload("demos", tenant, **({"jobs": 2, "batches_per_job": 2, "microbatch_size": 16} | changes))
    widths = {"state_width": reach.state_width, "action_width": reach.action_width}
    return found.model_copy(
        update={
            "data": found.data and found.data.model_copy(update={"dataset": dataset}),
            "action_module": found.action_module.model_copy(update=widths),
        }
    )


def test_rl_and_sft_leave_checkpoints_an_adapter_and_no_partition(
    platform: PlatformAddresses, home: Home, dataset: str, tmp_path: Path
) -> None:
    """Both run at once, are evaluated and registered; job runs in Prefect equal the scheduler's counts.

    Films of the evaluations are linked on Prefect's pages; one of them is recorded, and exported.
    """

    async def main() -> None:
        async with running(platform, home) as here:
            held_out = EvaluationSpec(environment="reach", episodes=4, first_seed=40_000, num_envs=4)
            recorded = held_out.model_copy(update={"record": "learner-evaluated"})
            specs = [
                workload("reach", "learner", **SMALL).model_copy(update={"evaluation": recorded}),
                sft("copier", dataset).model_copy(update={"evaluation": held_out}),
            ]
            runs = [await here.start(spec) for spec in specs]
            for run in runs:
                await here.completed(run)
            for spec, run in zip(specs, runs, strict=True):
                report = here.report(spec, run)
                assert report["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}
                assert report["policy_version"] > 0
                assert report["episodes"] == 8
                folder = home.tenant(spec.tenant.name) / "workloads" / run
                assert {"workload.yaml", "backend.json", "checkpoints", "report.json"} <= {
                    p.name for p in folder.iterdir()
                }
                champion = await (await here.service(lookup.METRICS)).resolve(f"models:/{spec.policy_key}@champion")
                assert equal(champion.params, final_parameters(home, spec, run))
                assert champion.tags["policy_version"] == str(report["policy_version"])
            assert PartitionStore(home.partitions).list() == []
            await counts_agree(here)
            await films_are_linked(here, platform, "learner.rl")
            request = {"source": "learner-evaluated", "folder": str(tmp_path / "out")}
            await here.completed(await here.api.start("export", {"request": request}))
            exported = LeRobotDataset(tmp_path / "out" / "lerobot")
            assert exported.provenance["policy_version"] == here.report(specs[0], runs[0])["policy_version"]
            assert [e["seed"] for e in exported.provenance["episodes"]] == [40_000, 40_001, 40_002, 40_003]
            assert len(list((tmp_path / "out" / "films").glob("*.mp4"))) == exported.num_episodes == 4

    asyncio.run(main())


async def films_are_linked(here: Running, platform: PlatformAddresses, policy_key: str) -> None:
    """The links of Prefect's artifacts lead to the files that MLflow has of the workload's run, each of them."""
    job = (await (await here.service(lookup.SCHEDULER)).jobs(policy_key=policy_key))[0]
    run = job["metadata"]["mlflow_run"]
    films = {entry.path for entry in mlflow_client(platform.mlflow_uri).list_artifacts(run, "films")}
    assert films
    async with httpx.AsyncClient(base_url=platform.prefect_api_url, trust_env=False) as client:
        found = await client.post("/artifacts/filter", json={"artifacts": {"key": {"any_": ["films"]}}})
    links = re.findall(rf"\(http://[^)]*/#/experiments/\d+/runs/{run}/artifacts/([^)]*)\)", found.text)
    assert set(links) == films


async def counts_agree(here: Running) -> None:
    """Flow runs of jobs by state equal the scheduler's counts, once the mirror has caught up."""
    assert await (await here.service(lookup.MIRROR)).caught_up(timeout_s=30)
    counts: dict[str, int] = {}
    for state, n in (await (await here.service(lookup.SCHEDULER)).counts()).items():
        if n:
            name = prefect_state(state)[1]
            counts[name] = counts.get(name, 0) + n
    assert await job_run_counts(here.api) == counts


def test_the_mirror_is_at_most_five_seconds_behind_while_jobs_run(
    platform: PlatformAddresses, home: Home, dataset: str
) -> None:
    """Sampled while a workload runs: every job that the scheduler ended 5 s ago has ended in Prefect too."""

    async def main() -> None:
        async with running(platform, home) as here:
            spec = sft("mirrored", dataset, jobs=12)
            run = await here.start(spec)
            scheduler, mirror = await here.service(lookup.SCHEDULER), await here.service(lookup.MIRROR)
            samples = 0
            while (await here.api.run(run))["state_type"] not in ("COMPLETED", "FAILED", "CRASHED"):
                old = time.time() - 5.0
                ended = {
                    job["job_id"]
                    for job in await scheduler.jobs(states=["completed", "failed", "dropped"])
                    if job["ended_at"] < old
                }
                shown = {
                    row["name"]
                    for row in await here.api.runs_with_tag("joynexus-job")
                    if row["state_type"] in ("COMPLETED", "FAILED", "CANCELLED")
                }
                assert ended <= shown
                assert (await mirror.status())["lag_s"] <= 5.0
                samples += 1
                await asyncio.sleep(0.3)
            assert samples > 3
            await here.completed(run)
            assert await mirror.caught_up(timeout_s=30)
            children = await here.api.children(run)
            assert len(children) == 12, "each job's run is a child of its workload's"

    asyncio.run(main())


MOVING = workload("reach", "moving", **(SMALL | {"jobs": 1000}))


@pytest.fixture(scope="module")
def moving(platform: PlatformAddresses, home: Home) -> Iterator[str]:
    """Flow run of a workload that goes on until it is cancelled; a job of it has completed."""

    async def start() -> str:
        async with running(platform, home) as here:
            run = await here.start(MOVING)
            scheduler = await here.service(lookup.SCHEDULER)
            await here.until(run, lambda: _completed(scheduler, MOVING.policy_key))
            return run

    async def end(run: str) -> None:
        async with running(platform, home) as here:
            if (await here.api.run(run))["state_type"] not in TERMINAL_STATES:
                await here.api.cancel(run)
                await here.ended(run)

    run = asyncio.run(start())
    yield run
    asyncio.run(end(run))


@pytest.fixture(scope="module")
def killed(platform: PlatformAddresses, home: Home) -> dict[str, Any]:
    """Flow run of a workload whose process was killed after a job had completed; asked for early, since what it leaves
    goes when its policy's lease has run out."""

    async def main() -> dict[str, Any]:
        async with running(platform, home) as here:
            run = await here.start(workload("reach", "killed", **(SMALL | {"jobs": 200})))
            scheduler = await here.service(lookup.SCHEDULER)
            await here.until(run, lambda: _completed(scheduler, "killed.rl"))
            os.kill(int((await here.api.run(run))["infrastructure_pid"].rsplit(":", 1)[-1]), signal.SIGKILL)
            return await here.ended(run)

    return asyncio.run(main())


@pytest.mark.usefixtures("killed")
def test_a_second_workload_of_a_running_policy_is_refused(platform: PlatformAddresses, home: Home, moving: str) -> None:
    async def main() -> None:
        async with running(platform, home) as here:
            refused = await here.ended(await here.start(MOVING))
            assert refused["state_type"] == "FAILED"
            assert MOVING.policy_key in refused["state"]["message"]
            assert moving in refused["state"]["message"]
            assert (await here.api.run(moving))["state_type"] not in TERMINAL_STATES

    asyncio.run(main())


def test_an_evaluation_that_overlaps_training_uses_one_version_and_leaves_nothing(
    platform: PlatformAddresses, home: Home, moving: str
) -> None:
    """And the workload beside it, cancelled, leaves the queue, clears its partitions, and its results are discarded."""

    async def main() -> None:
        async with running(platform, home) as here:
            scheduler, inference = await here.service(lookup.SCHEDULER), await here.service(lookup.INFERENCE)
            training = await here.service(lookup.TRAINING)
            request = EvaluateRequest(targets=("moving",), environment="reach", episodes=12, first_seed=41_000)
            evaluation = await here.api.start("evaluate", {"request": request.model_dump(mode="json")})
            seen: set[int] = set()
            meanwhile: set[int] = set()
            while (await here.api.run(evaluation))["state_type"] not in ("COMPLETED", "FAILED", "CRASHED"):
                status = await inference.status()
                mine = [a for a in status["active"] if a["kind"] == "evaluation" and a["tenant"] == "moving"]
                if mine:
                    seen.add(mine[0]["version"])
                    meanwhile.add((await training.versions())["moving"])
                await asyncio.sleep(0.05)
            await here.completed(evaluation)
            assert len(seen) == 1
            assert len(meanwhile) > 1, "training went on beside it"
            await here.api.cancel(moving)
            assert (await here.ended(moving))["state_type"] == "CANCELLED"
            await _gone(here, "moving.rl")
            # 32 samples in microbatches of 16, one epoch: two steps a job, none from the evaluation. The job that was
            # being trained when the workload was cancelled is dropped, but its update may have been made.
            completed = len(await scheduler.jobs(policy_key="moving.rl", states=["completed"]))
            assert (await training.versions())["moving"] in (2 * completed, 2 * completed + 2)
            assert (await inference.status())["tenants"]["moving"]["pinned"] == {}

    asyncio.run(main())


def test_versions_at_the_cadence_are_evaluated_and_one_is_champion(platform: PlatformAddresses, home: Home) -> None:
    """Every fourth of 12 jobs registers a version of its own moment, with its evaluation; the curves are in MLflow.

    Then twice the same champion on the same seeds: the same outcomes, and its temporary serving state is gone after.
    """

    async def main() -> None:
        async with running(platform, home) as here:
            held_out = EvaluationSpec(environment="reach", episodes=4, first_seed=40_000, num_envs=4, every_jobs=4)
            spec = workload("reach", "graded", **(SMALL | {"jobs": 12})).model_copy(update={"evaluation": held_out})
            run = await here.start(spec)
            await here.completed(run)
            metrics = await here.service(lookup.METRICS)
            versions = await metrics.list_adapters("graded.rl")
            # One at the end; how often the cadence came depends on how long an evaluation takes beside the jobs.
            assert len(versions) >= 2
            assert all("evaluation.success_rate" in version["tags"] for version in versions)
            assert sum("champion" in version["aliases"] for version in versions) == 1
            last = max(versions, key=lambda version: int(version["version"]))
            assert last["tags"]["policy_version"] == str(here.report(spec, run)["policy_version"]) == "24"
            job = (await (await here.service(lookup.SCHEDULER)).jobs(policy_key="graded.rl"))[0]
            curve = await metrics.history(job["metadata"]["mlflow_run"], "train/policy_version")
            assert curve == [(version, float(version)) for version in range(2, 25, 2)]
            request = EvaluateRequest(
                targets=("models:/graded.rl@champion",), environment="reach", episodes=4, first_seed=40_000, rounds=2
            )
            first, second = await evaluate(request)
            assert first["outcomes"] == second["outcomes"]
            assert first["policy_version"] == second["policy_version"]
            # No workload holds these results: each has an MLflow run of its own.
            curves = [await metrics.history(e["mlflow_run"], "evaluation/success_rate") for e in (first, second)]
            assert curves == [[(first["policy_version"], first["success_rate"])]] * 2
            assert first["mlflow_run"] != second["mlflow_run"]
            status = await (await here.service(lookup.INFERENCE)).status()
            assert not [name for name in status["tenants"] if name.startswith("adapter-")]

    asyncio.run(main())


def test_sft_with_fixed_seeds_and_rl_in_lock_step_give_the_same_parameters_twice(
    platform: PlatformAddresses, home: Home, dataset: str
) -> None:
    """One beside the other, and both again."""
    specs = [sft("repeated", dataset), workload("reach", "locked", **(SMALL | {"lockstep": True}))]

    async def main() -> None:
        async with running(platform, home) as here:
            ends = []
            for _ in range(2):
                runs = [await here.start(spec) for spec in specs]
                for run in runs:
                    await here.completed(run)
                ends.append([final_parameters(home, spec, run) for spec, run in zip(specs, runs, strict=True)])
                jobs = await (await here.service(lookup.SCHEDULER)).jobs(policy_key="locked.rl")
                # Each rollout acted under the version that the job before it made.
                assert [job["behavior_policy_version"] for job in jobs[-2:]] == [0, 2]
            assert all(equal(first, second) for first, second in zip(*ends, strict=True))

    asyncio.run(main())


def test_a_killed_workload_leaves_the_queue_too(
    platform: PlatformAddresses, home: Home, killed: dict[str, Any]
) -> None:
    """SIGKILL: nothing of its own code runs any more; its policy's lease runs out and the platform cleans up."""
    assert killed["state_type"] == "CRASHED"

    async def main() -> None:
        async with running(platform, home) as here:
            await _gone(here, "killed.rl")
            again = await here.start(workload("reach", "killed", **SMALL))
            await here.completed(again)

    asyncio.run(main())


def test_a_failing_tenant_leaves_the_others_and_the_flow_train_alone(
    platform: PlatformAddresses, home: Home, dataset: str
) -> None:
    """Demonstrations whose loss is infinite: each job fails with the reason, its workload ends, a neighbour goes on."""

    async def main() -> None:
        broken = home.datasets / "reach-broken"
        shutil.copytree(home.datasets / dataset, broken)
        for path in broken.glob("data/*/*.parquet"):
            table = parquet.read_table(path)
            place = table.schema.get_field_index("action")
            width = len(table["action"][0])
            numbers = pyarrow.array([[3e38] * width] * len(table), table.schema.field(place).type)
            parquet.write_table(table.set_column(place, table.schema.field(place), numbers), path)
        async with running(platform, home) as here:
            (train,) = await here.api.open_runs("train")
            faulty, sound = sft("faulty", "reach-broken"), sft("sound", dataset, jobs=4)
            runs = [await here.start(spec) for spec in (faulty, sound)]
            await here.completed(runs[1])
            ended = await here.ended(runs[0])
            assert ended["state_type"] == "FAILED"
            jobs = await _jobs(await here.service(lookup.SCHEDULER), "faulty.sft")
            failed = [job for job in jobs if job["state"] == "failed"]
            assert failed
            assert all("loss: got inf" in job["reason"] for job in failed)
            assert "loss: got inf" in ended["state"]["message"]
            assert [run["id"] for run in await here.api.open_runs("train")] == [train["id"]]
            await _gone(here, "faulty.sft")

    asyncio.run(main())


def test_a_job_is_cancelled_by_cancelling_its_run(platform: PlatformAddresses, home: Home) -> None:
    """A person does so on Prefect's page; the scheduler drops the job."""

    async def main() -> None:
        async with running(platform, home) as here:
            scheduler = await here.service(lookup.SCHEDULER)
            policy = {
                "policy_key": "page.sft",
                "tenant_id": "page",
                "task_type": "sft",
                "domain": "tests",
                "priority": 0,
            }
            bounds = {"max_in_flight": 1, "completion_target": None, "max_active_rollouts": None}
            await scheduler.register_policy(policy | bounds)
            job = (await scheduler.reserve(None, "page.sft", 1, None, None, {}, consumer_role="tests"))["job"]
            async with asyncio.timeout(60):
                while not (
                    mine := [r for r in await here.api.runs_with_tag("tenant:page") if r["name"] == job["job_id"]]
                ):
                    await asyncio.sleep(0.2)
                await here.api.end(mine[0]["id"], "CANCELLED", "by a person")
                assert (await scheduler.wait_admission("page.sft", timeout_s=60)) is True  # its place is free again
            found = await scheduler.job(job["job_id"])
            assert (found["state"], found["reason"]) == ("dropped", "cancelled in Prefect")
            await scheduler.close_policy("page.sft", "the test is over")

    asyncio.run(main())


def test_services_outlive_the_run_that_placed_them(platform: PlatformAddresses, home: Home) -> None:
    """The run of the flow `platform` is killed: the same actors answer, with their slots, and a new run looks after."""

    async def main() -> None:
        async with running(platform, home) as here:
            before = (await (await here.service(lookup.TRAINING)).status())["slots"]
            assert before
            (run,) = await here.api.open_runs("platform")
            pid = int((await here.api.run(run["id"]))["infrastructure_pid"].rsplit(":", 1)[-1])
            os.kill(pid, signal.SIGKILL)
            await here.ended(run["id"])
            assert (await (await here.service(lookup.TRAINING)).status())["slots"] == before
            async with asyncio.timeout(120):
                while not [r for r in await here.api.open_runs("platform") if r["state_type"] == "RUNNING"]:
                    await asyncio.sleep(0.5)
            assert (await (await here.service(lookup.TRAINING)).status())["slots"] == before

    asyncio.run(main())


def test_job_runs_equal_the_schedulers_counts_after_all_that(platform: PlatformAddresses, home: Home) -> None:
    """Completed, failed and dropped ones: the last test of the module, after all ways in which a job can end."""

    async def main() -> None:
        async with running(platform, home) as here:
            counts = await (await here.service(lookup.SCHEDULER)).counts()
            assert all(counts[state] for state in ("completed", "failed", "dropped"))
            await counts_agree(here)

    asyncio.run(main())


async def _gone(here: Running, policy_key: str) -> None:
    """The policy is closed, its unfinished jobs are dropped with the reason, and no partition of it is left.

    Within the time that the lease on the policy lasts, and some more for a rollout that was under way.
    """
    scheduler = await here.service(lookup.SCHEDULER)
    async with asyncio.timeout(180):
        assert (await scheduler.wait_policy_idle(policy_key, timeout_s=120))["closed"] is not None
        jobs = await _jobs(scheduler, policy_key)
        assert {job["state"] for job in jobs} <= {"completed", "failed", "dropped"}
        assert all("cancelled" in job["reason"] for job in jobs if job["state"] == "dropped")
        tenant = policy_key.split(".")[0]
        while [p for p in PartitionStore(here.home.partitions).list() if p.split(".")[2] == tenant]:
            await asyncio.sleep(0.1)


async def _completed(scheduler: lookup.Service, policy_key: str) -> list[dict[str, Any]]:
    return [job for job in await _jobs(scheduler, policy_key) if job["state"] == "completed"]


async def _jobs(scheduler: lookup.Service, policy_key: str) -> list[dict[str, Any]]:
    try:
        return list(await scheduler.jobs(policy_key=policy_key))
    except UnknownObject:
        return []
