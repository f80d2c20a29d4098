"""Group commit: concurrent callers share one transaction, and each goes on only after it is on disk.

While one group is being written in a thread, the next one gathers; no time is waited for company.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from configs.errors import ServiceUnavailable

R = TypeVar("R")
logger = logging.getLogger(__name__)


class GroupCommit(Generic[R]):
    """A queue in front of a blocking `write`. All methods belong to one event loop.

    After a failed write nothing is accepted any more: what the caller holds in memory is ahead of the disk, and only
    a new start from the disk brings the two together.
    """

    def __init__(self, write: Callable[[Sequence[R]], None]) -> None:
        """Args: write: writes all records of a group or none, and returns when they are durable."""
        self._write = write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="group-commit")
        self._gathering: list[R] = []
        self._next: asyncio.Future[None] | None = None  # resolved when what is gathering now is on disk
        self._current: asyncio.Future[None] | None = None  # resolved when what is being written is on disk
        self._loop_task: asyncio.Task[None] | None = None
        self.failure: str | None = None

    def add(self, records: Sequence[R]) -> None:
        """Put records into the next group; `durable` waits for them.

        Raises:
            ServiceUnavailable: after a failed write.
        """
        self.check()
        if not records:
            return
        self._gathering.extend(records)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run())

    async def durable(self) -> None:
        """Return when all that was added so far is on disk.

        Raises:
            ServiceUnavailable: if it could not be written.
        """
        self.check()
        pending = self._next or self._current
        if pending is not None:
            # Shielded: a caller that is cancelled must not cancel the group of the others.
            await asyncio.shield(pending)

    def check(self) -> None:
        """Raise ServiceUnavailable after a failed write."""
        if self.failure is not None:
            raise ServiceUnavailable(self.failure)

    async def close(self) -> None:
        """Write what is left and end the thread."""
        if self._loop_task is not None:
            await self._loop_task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._gathering:
            group, self._gathering = self._gathering, []
            self._current, self._next = self._next, None
            assert self._current is not None
            try:
                await loop.run_in_executor(self._thread, self._write, group)
            except Exception as error:  # noqa: BLE001 - whatever it is, memory is ahead of the disk now
                self._fail(error)
                return
            self._current.set_result(None)
            self._current = None
        self._loop_task = None

    def _fail(self, error: Exception) -> None:
        logger.exception("the journal could not be written", exc_info=error)
        self.failure = f"journal: could not be written ({error}); start the scheduler again from its journal"
        for waiting in (self._current, self._next):
            if waiting is not None:
                waiting.set_exception(ServiceUnavailable(self.failure))
                waiting.exception()  # retrieved: nobody may wait for it
