"""Calls of a named service: bounded in time, and cancelled when their caller is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from configs.errors import NoReply
from services.lookup import Service


class Slow:
    """Replies when told to."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ping(self) -> str:
        return await self.reply


def test_a_cancellation_that_meets_the_reply_is_not_lost() -> None:
    """Else whoever renews a lease goes on for ever where the block ends just then."""

    async def main() -> None:
        actor = Slow()
        calling: asyncio.Task[Any] = asyncio.ensure_future(Service("slow", actor, 60).ping())
        await asyncio.sleep(0)
        actor.reply.set_result("ok")
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(main())


def test_a_service_that_does_not_reply_is_named() -> None:
    async def main() -> None:
        with pytest.raises(NoReply, match=r"slow.ping: no reply in 0.01 s; possible: it hangs or is overloaded"):
            await Service("slow", Slow(), 0.01).ping()

    asyncio.run(main())
