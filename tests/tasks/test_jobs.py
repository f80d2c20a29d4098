"""Verbs on training jobs against the real services of the session's platform."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from configs import presets
from configs.errors import JoyNexusError, ServiceUnavailable, TenantFault
from configs.home import Home
from configs.platform import PlatformAddresses
from storage.partitions import PartitionStore
from tasks.connection import Platform, platform_connection
from tasks.jobs import carried_out, clear_leftovers, close_leftover_sessions

ROLE = "tests"  # nobody else leases jobs of this role


@asynccontextmanager
async def reserved(home: Home, tenant: str) -> AsyncIterator[tuple[Platform, dict[str, Any]]]:
    """A connection and a job of a policy of its own, with its partition written."""
    async with platform_connection(home) as platform:
        scheduler = await platform.scheduler()
        key = f"{tenant}.sft"
        policy = {"policy_key": key, "tenant_id": tenant, "task_type": "sft", "domain": ROLE, "priority": 0}
        bounds = {"max_in_flight": 4, "completion_target": None, "max_active_rollouts": None}
        await scheduler.register_policy(policy | bounds)
        try:
            reply = await scheduler.reserve(None, key, 4, None, None, {}, consumer_role=ROLE)
            job: dict[str, Any] = reply["job"]
            PartitionStore(home.partitions).put(
                job["partition_id"],
                {"action": np.zeros((4, 1, 2), np.float32)},
                tenant_id=tenant,
                schema_signature="none",
                policy_version=None,
                chunk=4,
                instructions=["wait"],
            )
            yield platform, job
        finally:
            await scheduler.close_policy(key, "the test is over")


@pytest.mark.parametrize(
    "error", [TenantFault("action: got NaN"), KeyError("adam"), RuntimeError("sizes do not match")]
)
def test_a_fault_of_any_kind_fails_its_job_alone(platform: PlatformAddresses, home: Home, error: Exception) -> None:
    """Failed with the reason, the descriptor kept, the partition cleared; what is raised is one of our errors."""

    async def main() -> None:
        async with reserved(home, "unlucky") as (connection, job):
            with pytest.raises(JoyNexusError):
                async with carried_out(connection, job):
                    raise error
            found = await (await connection.scheduler()).job(job["job_id"])
            assert found["state"] == "failed"
            assert found["reason"] == f"{type(error).__name__}: {error}"
            assert job["partition_id"] not in PartitionStore(home.partitions).list()

    asyncio.run(main())


def test_a_lost_service_gives_the_leased_job_back(platform: PlatformAddresses, home: Home) -> None:
    """The fault is not the job's: it is ready again, its partition stays, and the next holder has another token."""

    async def main() -> None:
        async with reserved(home, "given-back") as (connection, job):
            scheduler = await connection.scheduler()
            await scheduler.mark(job["job_id"], "ready")
            leased = (await scheduler.lease_next(ROLE, [ROLE], "first", 600.0))["job"]
            with pytest.raises(ServiceUnavailable):
                async with carried_out(connection, leased):
                    raise ServiceUnavailable("joynexus-training: its worker was lost")
            found = await scheduler.job(job["job_id"])
            assert (found["state"], found["reason"]) == ("ready", "joynexus-training: its worker was lost")
            assert job["partition_id"] in PartitionStore(home.partitions).list()
            again = (await scheduler.lease_next(ROLE, [ROLE], "second", 600.0))["job"]
            assert again["lease_token"] > leased["lease_token"]

    asyncio.run(main())


def test_only_partitions_of_ended_jobs_are_leftovers(platform: PlatformAddresses, home: Home) -> None:
    """One of an unfinished job stays; when its job is dropped it goes."""

    async def main() -> None:
        async with reserved(home, "leaving") as (connection, job):
            store = PartitionStore(home.partitions)
            assert job["partition_id"] not in await clear_leftovers(connection)
            assert job["partition_id"] in store.list()
            await (await connection.scheduler()).drop(job["job_id"], "by hand")
            await clear_leftovers(connection)  # or the flow `platform` was faster
            assert job["partition_id"] not in store.list()

    asyncio.run(main())


def test_only_sessions_of_ended_jobs_are_leftovers(platform: PlatformAddresses, home: Home) -> None:
    """Whoever rolled out for a job whose flow was killed is told by its session's end."""

    async def main() -> None:
        async with reserved(home, "rolling") as (connection, job):
            environments = await connection.environments()
            reach = presets.environment("reach").model_dump(mode="json")

            async def opened(owner: str) -> str:
                asked = {"environment": reach, "num_envs": 1, "tenant_id": "rolling", "images": False}
                return str((await environments.open({**asked, "owner": owner, "request_id": owner}))["session_id"])

            of_job, of_another = await opened(job["job_id"]), await opened("by-hand")
            of_none = await opened(f"evaluation-{uuid4()}-{uuid4()}")
            assert of_job not in await close_leftover_sessions(connection)
            assert of_none not in [session["session_id"] for session in await environments.sessions()]
            await (await connection.scheduler()).drop(job["job_id"], "by hand")
            await close_leftover_sessions(connection)  # or the flow `platform` was faster
            left = [session["session_id"] for session in await environments.sessions()]
            assert of_job not in left
            assert of_another in left
            await environments.close(of_another)

    asyncio.run(main())
