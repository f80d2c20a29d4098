"""Tenants of every algorithm of RL, from rollouts and from recorded episodes, all at once through the whole way."""

from __future__ import annotations

import asyncio

from configs.home import Home
from configs.platform import PlatformAddresses
from configs.workload import WorkloadSpec
from services import lookup
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore
from tests.flows.running import running, workload

SHORT = {"jobs": 2, "num_envs": 4, "rollout_steps": 20, "microbatch_size": 40, "epochs": 1}


def offline(tenant: str, dataset: str) -> WorkloadSpec:
    """The preset's policy by AWR from a dataset in place of the environment."""
    found = workload("reach", tenant).model_dump(mode="json")
    algorithm = {
        "kind": "awr",
        "jobs": 2,
        "batches_per_job": 3,
        "microbatch_size": 8,
        "optimizer": {"learning_rate": 0.001},
    }
    evaluation = {"environment": "reach", "episodes": 2, "first_seed": 47_000, "num_envs": 2, "before": False}
    source = {"environment": None, "data": {"dataset": dataset}}
    return WorkloadSpec.model_validate(found | source | {"algorithm": algorithm, "evaluation": evaluation})


def test_tenants_of_every_algorithm_learn_at_once(platform: PlatformAddresses, home: Home, dataset: str) -> None:
    """GRPO and a Gaussian, PPO and a stochastic flow, AWR from what an expert executed; and groups that are all
    filtered out, whose jobs complete without a step.

    PPO: 80 samples in microbatches of 40 are 2 steps a job. AWR: 3. GRPO's microbatches may hold no ended episode.
    """
    specs = {
        "grouped": workload("reach-grpo", "grouped", **SHORT, group_size=2),
        "flowing-rl": workload("reach-flow", "flowing-rl", **SHORT),
        "recorded": offline("recorded", dataset),
        "filtered": workload("reach-grpo", "filtered", **SHORT, group_size=2, keep_return=(1e6, 2e6)),
    }

    async def main() -> None:
        assert LeRobotDataset(home.datasets / dataset).provenance["turned_cameras"] == []
        async with running(platform, home) as here:
            runs = {name: await here.start(one) for name, one in specs.items()}
            reports = {}
            for name, run in runs.items():
                await here.completed(run)
                reports[name] = here.report(specs[name], run)
                assert reports[name]["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}, name
            assert reports["flowing-rl"]["policy_version"] == 4
            assert 1 <= reports["grouped"]["policy_version"] <= 4
            assert [reports[name]["nothing_to_learn"] for name in specs] == [0, 0, 0, 2]
            assert reports["recorded"]["policy_version"] == 6
            assert reports["recorded"]["success_after"] is not None
            assert reports["filtered"]["policy_version"] == 0
            scheduler = await here.service(lookup.SCHEDULER)
            for job in await scheduler.jobs(policy_key="filtered.rl"):
                assert job["metadata"]["nothing_to_learn"] is True
                metrics = dict(job["metadata"]["metrics"])
                assert metrics.pop("nothing_to_learn") == 1.0
                assert metrics == job["metadata"]["group_counts"]
                assert metrics["filtered_groups"] == metrics["groups"] > 0
                curves = await here.service(lookup.METRICS)
                curve = await curves.history(job["metadata"]["mlflow_run"], "train/filtered_groups")
                assert metrics["filtered_groups"] in [value for _, value in curve]
            totals = [reports[name]["group_counts"] for name in specs]
            assert totals[0]["groups"] >= totals[0]["constant_groups"]
            assert totals[1:3] == [{}, {}]
            assert totals[3]["filtered_groups"] == totals[3]["groups"] > totals[3]["constant_groups"] == 0
            served = await (await here.service(lookup.TRAINING)).versions()
            assert {name: served[name] for name in specs} == {n: r["policy_version"] for n, r in reports.items()}
            assert PartitionStore(home.partitions).list() == []
            await here.closed(*specs)

    asyncio.run(main())
