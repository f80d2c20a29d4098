"""Keeping what is leased while its holder lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from configs.errors import JoyNexusError, ServiceUnavailable


@asynccontextmanager
async def renewed_every(
    seconds: float, renew: Callable[[], Awaitable[Any]], logger: logging.Logger, lost: int = logging.WARNING
) -> AsyncIterator[None]:
    """Call `renew` at this distance while the block runs.

    A service that is away (ServiceUnavailable) is asked again: the next call may still be in time. What it refuses
    ends the renewals: whoever holds the lease hears so from what it does next.

    Args:
        seconds: between two calls, and before the first.
        renew: renews once.
        logger: told of what failed.
        lost: level at which it is told that the renewals ended.
    """

    async def keep() -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await renew()
            except ServiceUnavailable as error:
                logger.warning("%s", error)
            except JoyNexusError as error:
                logger.log(lost, "%s", error)
                return

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
