"""Taking a lease of the scheduler, and keeping it while something is done under it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from configs.errors import ServiceUnavailable
from services.lookup import Service
from services.renewals import renewed_every
from tasks.connection import Platform

logger = logging.getLogger(__name__)
_AWAY_S = 1.0  # between two tries while the scheduler is being restarted


async def leased(platform: Platform, verb: str, **arguments: Any) -> dict[str, Any] | None:
    """The job that a lease verb of the scheduler gives, for the cluster's `lease_s`, or None.

    A reply that was lost with the scheduler is asked for again under the same id: the job that it may have named would
    else be held by nobody until its lease runs out.

    Args:
        platform: whose scheduler is asked.
        verb: `lease_next`, `lease_beside` or `lease_stage`.
        arguments: of the verb, but for `lease_s` and `request_id`.

    Raises:
        ServiceUnavailable: if there is no scheduler for half of `lease_s`.
    """
    lease_s, now = platform.cluster.lease_s, asyncio.get_running_loop().time
    request_id, until = f"lease-{secrets.token_hex(8)}", now() + lease_s / 2
    while True:
        try:
            scheduler = await platform.scheduler()
            reply = await getattr(scheduler, verb)(**arguments, lease_s=lease_s, request_id=request_id)
        except ServiceUnavailable as error:
            platform.forget()
            if now() + _AWAY_S > until:
                raise
            logger.warning("%s; asked again", error)
            await asyncio.sleep(_AWAY_S)
        else:
            job: dict[str, Any] | None = reply["job"]
            return job


def renewed(platform: Platform, renew: Callable[[Service], Awaitable[Any]]) -> AbstractAsyncContextManager[None]:
    """Call `renew` with the scheduler at a fifth of the lease's duration while the block runs; see `renewed_every`."""

    async def once() -> None:
        try:
            await renew(await platform.scheduler())
        except ServiceUnavailable:
            platform.forget()
            raise

    return renewed_every(platform.cluster.lease_s / 5, once, logger)
