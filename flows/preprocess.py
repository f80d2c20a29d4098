"""Flow `preprocess`: leases the stages before training and has the services compute them beside the partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from configs.errors import JoyNexusError, ServiceUnavailable
from tasks.connection import Platform, platform_connection
from tasks.jobs import DOMAIN, actor_forward, compute_advantages
from tasks.leases import leased

_WAIT_S = 10.0
Stage = Callable[[Platform, dict[str, Any]], Awaitable[None]]


@flow(name="preprocess")
async def preprocess() -> None:
    """Serve both stages until cancelled; they do not wait for each other."""
    holder = f"preprocess-{flow_run.id or 'local'}"
    async with platform_connection() as platform:
        await asyncio.gather(
            _serve(platform, holder, "needs_actor_forward", "computing_actor_forward", actor_forward),
            _serve(platform, holder, "needs_advantages", "computing_advantages", compute_advantages),
        )


async def _serve(platform: Platform, holder: str, state: str, leased_state: str, stage: Stage) -> None:
    logger = get_run_logger()
    while True:
        try:
            job = await leased(
                platform,
                "lease_stage",
                state=state,
                leased_state=leased_state,
                consumer_role="actor",
                domain=DOMAIN,
                holder=holder,
            )
            if job is None:
                scheduler = await platform.scheduler()
                await scheduler.wait_for_state(state=state, timeout_s=_WAIT_S)
            else:
                await stage(platform, job)
        except ServiceUnavailable as error:
            logger.warning("%s", error)
            platform.forget()
            await asyncio.sleep(1)
        except JoyNexusError as error:
            logger.warning("%s", error)
