"""Supervised jobs that are leased together, on the real services of the session's platform."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from configs.cluster import TrainingGroupSpec
from configs.home import Home
from configs.platform import PlatformAddresses
from storage.partitions import PartitionStore
from tasks.connection import Platform, platform_connection
from tasks.jobs import lease_company, train_job
from tests.services.policies import backend, put_demonstrations

ROLE = "tests-groups"  # nobody else leases jobs of this role
JOBS = 2


async def produced(platform: Platform, tenant: str, kind: str, seed: int) -> None:
    """A tenant's slot, policy and ready jobs; twins with one seed have the same samples."""
    config = backend(tenant, kind=kind, seed=seed)
    training, scheduler = await platform.training(), await platform.scheduler()
    folder = str(platform.home.tenant(tenant))
    await training.open_slot(config.model_dump(mode="json"), folder, fresh=True)
    await scheduler.register_policy(config.scheduler_policy() | {"domain": ROLE})
    for number in range(JOBS):
        metadata = {"schema_signature": config.policy.schema_signature, "mlflow_run": "none"}
        reply = await scheduler.reserve(None, config.policy_key, 8, None, None, metadata, consumer_role=ROLE)
        job = reply["job"]
        await asyncio.to_thread(put_demonstrations, platform.home.partitions, config, described=job, seed=seed + number)
        await scheduler.mark(job["job_id"], "ready")


async def consumed(platform: Platform, *, together: bool) -> list[list[str]]:
    """Train all that is ready, as the flow `train` does; the tenants of each group."""
    scheduler, groups = await platform.scheduler(), []
    while (job := (await scheduler.lease_next(ROLE, [ROLE], "holder", 600.0))["job"]) is not None:
        jobs = [job, *(await lease_company(platform, job, "holder", None) if together else [])]
        group = [one["job_id"] for one in jobs]
        await asyncio.gather(*(train_job.fn(platform, one, group) for one in jobs))
        groups.append([one["tenant_id"] for one in jobs])
    return groups


async def closed(platform: Platform, tenant: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tenant's parameters; its slot is another test's now."""
    training = await platform.training()
    found = dict((await training.export_params(tenant))["tensors"])
    await (await platform.scheduler()).close_policy(f"{tenant}.sft", "the test is over")
    await training.close_slot(tenant)
    return found


def test_jobs_leased_together_give_what_each_gives_alone(platform: PlatformAddresses, home: Home) -> None:
    """Three kinds, two jobs each, in two groups of three; then their twins one job after another."""
    kinds = {"company-oft": "oft", "company-pi": "pi", "company-lora": "lora"}

    async def main() -> None:
        async with platform_connection(home) as connection:
            # Other tests' RL workloads may still be open.
            groups = TrainingGroupSpec(max_jobs=3, beside_rl=True)
            connection.cluster = connection.cluster.model_copy(update={"training_groups": groups})
            scheduler = await connection.scheduler()
            for seed, (tenant, kind) in enumerate(kinds.items()):
                await produced(connection, tenant, kind, seed)
            found = await consumed(connection, together=True)
            assert sorted(map(sorted, found)) == [sorted(kinds)] * JOBS
            for tenant in kinds:
                for job in await scheduler.jobs(f"{tenant}.sft"):
                    assert job["state"] == "completed"
                    assert len(job["metadata"]["trained_with"]) == 2
                    assert job["partition_id"] not in PartitionStore(home.partitions).list()
            together = {tenant: await closed(connection, tenant) for tenant in kinds}
            for seed, (tenant, kind) in enumerate(kinds.items()):
                await produced(connection, f"{tenant}-alone", kind, seed)
            found = await consumed(connection, together=False)
            assert [len(group) for group in found] == [1] * len(kinds) * JOBS
            for tenant, ours in together.items():
                theirs = await closed(connection, f"{tenant}-alone")
                assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)

    asyncio.run(main())
