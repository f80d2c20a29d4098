"""Flow `train`: the actor's consumer. Leases ready jobs one after another and has training carry them out."""

from __future__ import annotations

import asyncio

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from configs.errors import JoyNexusError, ServiceUnavailable
from tasks.connection import Platform, platform_connection
from tasks.jobs import DOMAIN, drop_if_stale, train_job

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
            consumed += await _consume_one(platform, holder)
    return consumed


async def _consume_one(platform: Platform, holder: str) -> int:
    """Lease and carry out one job; 0 if none became ready in time or a service was away."""
    logger = get_run_logger()
    try:
        scheduler = await platform.scheduler()
        leased = await scheduler.lease_next(
            consumer_role=_ROLE, domains=[DOMAIN], holder=holder, lease_s=platform.cluster.lease_s
        )
        if (job := leased["job"]) is None:
            await scheduler.wait_for_ready(consumer_role=_ROLE, domains=[DOMAIN], timeout_s=_WAIT_S)
            return 0
        if not await drop_if_stale(platform, job):
            await train_job(platform, job)
    except ServiceUnavailable as error:
        logger.warning("%s", error)
        platform.forget()
        await asyncio.sleep(_AWAY_S)
        return 0
    except JoyNexusError as error:
        # The job is failed with its reason; the next tenant's turn comes regardless.
        logger.warning("%s", error)
    return 1
