"""Rollouts beside training on a real platform: with a declared delay the same to the bit, and old jobs dropped."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np

from configs.home import Home
from configs.platform import PlatformAddresses
from services import lookup
from storage.checkpoints import CheckpointStore
from storage.partitions import PartitionStore
from tests.flows.running import running, workload

# 32 samples in microbatches of 16, one epoch: each job moves the version by 2.
SMALL = {"jobs": 2, "num_envs": 4, "rollout_steps": 8, "epochs": 1, "microbatch_size": 16}


def test_rollouts_ahead_of_training_by_a_declared_delay_give_the_same_parameters_twice(
    platform: PlatformAddresses, home: Home
) -> None:
    """d = 1, two tenants with equal seeds at once: rollouts run while jobs are trained, and all is the same."""

    async def main() -> None:
        async with running(platform, home) as here:
            scheduler = await here.service(lookup.SCHEDULER)
            specs = [workload("reach", name, **(SMALL | {"jobs": 4, "delay": 1})) for name in ("ahead", "likewise")]
            runs = [await here.start(spec) for spec in specs]
            ends = []
            for spec, run in zip(specs, runs, strict=True):
                await here.completed(run)
                jobs = await scheduler.jobs(policy_key=spec.policy_key)
                assert [job["behavior_policy_version"] for job in jobs] == [0, 0, 2, 4]
                assert [job["metadata"]["rollout_summary"]["policy_version"] for job in jobs] == [0, 0, 2, 4]
                assert [job["metadata"]["version"] for job in jobs] == [2, 4, 6, 8]
                for before, following in zip(jobs, jobs[2:], strict=False):
                    assert following["created_at"] >= before["ended_at"]
                beside = [b["created_at"] < a["ended_at"] for a, b in pairwise(jobs)]
                assert any(beside), "each rollout waited for training"
                folder = home.tenant(spec.tenant.name) / "workloads" / run / "checkpoints"
                ends.append(dict(CheckpointStore(folder).load().params))
            first, second = ends
            assert first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)
            await here.closed("ahead", "likewise")

    asyncio.run(main())


def test_jobs_older_than_the_bound_are_dropped_cleared_and_counted(platform: PlatformAddresses, home: Home) -> None:
    """Bound 0, two in flight: job 1 acted with version 0 while job 0 made version 2; a third takes its place."""

    async def main() -> None:
        async with running(platform, home) as here:
            spec = workload("reach", "aged", **(SMALL | {"max_policy_staleness": 0}))
            run = await here.start(spec)
            await here.completed(run)
            jobs = await (await here.service(lookup.SCHEDULER)).jobs(policy_key="aged.rl")
            assert [job["state"] for job in jobs] == ["completed", "dropped", "completed"]
            assert jobs[1]["reason"] == "policy_stale: actor 2 − behaviour 0 > 0"
            report = here.report(spec, run)
            assert report["jobs"] == {"completed": 2, "failed": 0, "dropped": 1}
            assert report["stale_jobs"] == 1
            assert not [p for p in PartitionStore(home.partitions).list() if p.split(".")[2] == "aged"]
            await here.closed("aged")

    asyncio.run(main())
