"""Flow `train`: the actor's consumer. Leases ready jobs, alone or in groups, and has training carry them out."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from configs.errors import JoyNexusError, ServiceUnavailable
from tasks.connection import Platform, platform_connection
from tasks.jobs import DOMAIN, drop_if_stale, lease_company, train_job
from tasks.leases import leased

_WAIT_S = 10.0
_AWAY_S = 1.0  # between two looks for a service that is being restarted
_ROLE = "actor"


@flow(name="train")
async def train(max_jobs: int | None = None) -> int:
    """Consume ready training jobs of all tenants until cancelled (or `max_jobs` were consumed); returns how many."""
    consumed = 0
    holder = f"train-{flow_run.id or 'local'}"
    async with platform_connection() as platform:
        while max_jobs is None or consumed < max_jobs:
            consumed += await _consume(platform, holder, None if max_jobs is None else max_jobs - consumed)
    return consumed


async def _consume(platform: Platform, holder: str, at_most: int | None) -> int:
    """Lease and carry out a job, or several that share the base's forwards; how many.

    0 if none became ready in time or a service was away.
    """
    try:
        job = await leased(platform, "lease_next", consumer_role=_ROLE, domains=[DOMAIN], holder=holder)
        if job is None:
            scheduler = await platform.scheduler()
            await scheduler.wait_for_ready(consumer_role=_ROLE, domains=[DOMAIN], timeout_s=_WAIT_S)
            return 0
        if await drop_if_stale(platform, job):
            return 1
    except JoyNexusError as error:
        return await _consumed_by(platform, error)
    jobs = [job, *await lease_company(platform, job, holder, at_most)]
    group = [member["job_id"] for member in jobs]
    if len(jobs) > 1:
        names = ", ".join(f"{member['job_id']} of {member['policy_key']}" for member in jobs)
        get_run_logger().info("%d jobs share the base's forwards: %s", len(jobs), names)
    ends = await asyncio.gather(*(_carry_out(platform, member, group) for member in jobs))
    return sum(ends)


async def _carry_out(platform: Platform, job: dict[str, Any], group: list[str]) -> int:
    try:
        await train_job(platform, job, group)
    except JoyNexusError as error:
        return await _consumed_by(platform, error)
    return 1


async def _consumed_by(platform: Platform, error: JoyNexusError) -> int:
    """Whether the job counts as consumed: its own fault fails it, and the next tenant's turn comes regardless."""
    get_run_logger().warning("%s", error)
    if not isinstance(error, ServiceUnavailable):
        return 1
    platform.forget()
    await asyncio.sleep(_AWAY_S)
    return 0
