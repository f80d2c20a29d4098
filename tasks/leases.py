"""Keeping a lease of the scheduler while something is done under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from configs.errors import JoyNexusError, ServiceUnavailable
from services.lookup import Service
from tasks.connection import Platform

logger = logging.getLogger(__name__)


@asynccontextmanager
async def renewed(platform: Platform, renew: Callable[[Service], Awaitable[Any]]) -> AsyncIterator[None]:
    """Call `renew` with the scheduler at a fifth of the lease's duration while the block runs.

    A scheduler that is away is asked again. A lost lease ends the renewals: whoever acts under it hears so from the
    scheduler, which refuses what comes after.
    """

    async def keep() -> None:
        while True:
            await asyncio.sleep(platform.cluster.lease_s / 5)
            try:
                await renew(await platform.scheduler())
            except ServiceUnavailable as error:  # the next one may still be in time
                logger.warning("%s", error)
                platform.forget()
            except JoyNexusError as error:
                logger.warning("%s", error)
                return

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
