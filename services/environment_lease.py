"""Keeping an environment session while its caller lives: signs to the service at a fifth of the session's lease.

A caller that is gone gives none, so its hosts are others' within `lease_s` and a quarter; one that steps through the
service or has a direct connection open is known to live without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from configs.errors import JoyNexusError, ServiceUnavailable

logger = logging.getLogger(__name__)


@asynccontextmanager
async def renewed_session(service: Any, opened: Mapping[str, Any]) -> AsyncIterator[None]:
    """Renew the session `opened` with the EnvironmentService, or a handle of it, while the block runs.

    A service that is away is asked again. One that says that the session has ended ends the renewals: the caller
    hears so from its next call.
    """

    async def keep() -> None:
        while True:
            await asyncio.sleep(opened["lease_s"] / 5)
            try:
                await service.renew(opened["session_id"])
            except ServiceUnavailable as error:
                logger.warning("%s", error)
            except JoyNexusError as error:
                logger.info("%s", error)
                return

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
