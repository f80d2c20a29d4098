"""Flow `platform`: brings the resident services up and stays running while they live."""

from __future__ import annotations

import asyncio

from distributed import Event
from prefect import flow, get_run_logger

from configs.errors import ServiceUnavailable
from configs.platform import READY_EVENT
from services import lookup
from tasks.collection import sweep_interrupted
from tasks.connection import Platform, platform_connection
from tasks.jobs import clear_leftovers, close_leftover_sessions, sweep_half_written
from tasks.services import place_service

_WATCH_EVERY_S = 5.0
_CLEARING_S = 10.0
_PRUNE_EVERY_S = 3600.0
_KEEP_ENDED_JOBS_S = 7 * 24 * 3600.0
_HALF_WRITTEN_S = 24 * 3600.0
_INTERRUPTED_S = 7 * 24 * 3600.0  # a collection that was killed goes on with what it has


@flow(name="platform", flow_run_name="platform {cluster}")
async def platform(cluster: str = "laptop") -> None:
    """Place every service on its role's worker, say so, put back what is lost and clear what nobody needs.

    The services outlive this run: ending it takes nothing along.
    """
    logger = get_run_logger()
    async with platform_connection() as connection:
        if connection.cluster.name != cluster:
            logger.warning("the platform runs cluster preset %r, not %r", connection.cluster.name, cluster)
        # The scheduler first, since others look it up; the model services load their bases side by side.
        await place_service(connection, lookup.SCHEDULER)
        await asyncio.gather(
            *(place_service(connection, n) for n in lookup.NAMES if n not in (lookup.SCHEDULER, lookup.MIRROR))
        )
        await place_service(connection, lookup.MIRROR)
        await Event(READY_EVENT, client=connection.client).set()
        logger.info("all services answer: %s", ", ".join(lookup.NAMES))
        pruned = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if asyncio.get_running_loop().time() - pruned > _PRUNE_EVERY_S:
                pruned = asyncio.get_running_loop().time()
                await _prune(connection)
            for name in lookup.NAMES:
                if await lookup.reachable(name, connection.client) is None:
                    logger.warning("%s does not answer; placing it again", name)
                    await place_service(connection, name)
            await _clear_leftovers(connection)


async def _clear_leftovers(connection: Platform) -> None:
    """Clear what killed and cancelled workloads left; a scheduler that is away is asked again at the next look."""
    try:
        async with asyncio.timeout(_CLEARING_S):
            cleared = await clear_leftovers(connection)
            closed = await close_leftover_sessions(connection)
    except (ServiceUnavailable, OSError) as error:  # TimeoutError is an OSError
        connection.forget()
        get_run_logger().warning("%s", error)
    else:
        if cleared:
            get_run_logger().info("partitions of ended jobs were cleared: %s", ", ".join(cleared))
        if closed:
            get_run_logger().info("sessions of ended jobs were closed: %s", ", ".join(closed))


async def _prune(connection: Platform) -> None:
    """Forget descriptors of jobs that ended a week ago, and what killed writers left half-written.

    A scheduler that is away is asked again in an hour.
    """
    await sweep_half_written(connection, _HALF_WRITTEN_S)
    await sweep_interrupted(connection, _INTERRUPTED_S)
    try:
        forgotten = await (await connection.scheduler()).prune(_KEEP_ENDED_JOBS_S)
    except ServiceUnavailable as error:
        connection.forget()
        get_run_logger().warning("%s", error)
    else:
        get_run_logger().info("%d descriptors of ended jobs were pruned", forgotten)
