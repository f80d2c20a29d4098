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

    def __init__(self, take: Callable[[], Sequence[R]], write: Callable[[Sequence[R]], None]) -> None:
        """Nothing is started before the first `touch`.

        Args:
            take: called on the event loop; hands over what there is to write since its last call.
            write: called in a thread; writes all of that or none, and returns when it is durable.
        """
        self._take = take
        self._write = write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="group-commit")
        self._dirty = False  # something was touched since the last `take`
        self._next: list[asyncio.Future[None]] = []  # who waits for what the next `take` will hand over
        self._current: list[asyncio.Future[None]] = []  # who waits for what is being written
        self._task: asyncio.Task[None] | None = None  # writes groups, as long as there are any
        self.failure: str | None = None

    def touch(self) -> None:
        """There is something to write.

        Raises:
            ServiceUnavailable: after a failed write.
        """
        self.check()
        self._dirty = True
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def durable(self) -> None:
        """Return when all that was touched so far is on disk.

        Raises:
            ServiceUnavailable: if it could not be written.
        """
        self.check()
        if self._task is not None:
            # A future of its own for each caller: one that is cancelled takes nobody along.
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._next if self._dirty else self._current).append(future)
            await future

    def check(self) -> None:
        """Raise ServiceUnavailable after a failed write."""
        if self.failure is not None:
            raise ServiceUnavailable(self.failure)

    async def close(self) -> None:
        """Write what is left and end the thread."""
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._dirty:
            self._dirty = False
            self._current, self._next = self._next, []
            try:
                await loop.run_in_executor(self._thread, self._write, self._take())
            except Exception as error:  # noqa: BLE001 - whatever it is, memory is ahead of the disk now
                self._fail(error)
                return
            for future in self._current:
                if not future.done():
                    future.set_result(None)
            self._current = []
        self._task = None

    def _fail(self, error: Exception) -> None:
        logger.error("the journal could not be written", exc_info=error)
        self.failure = f"journal: could not be written ({error}); start the scheduler again from its journal"
        for future in self._current + self._next:
            if not future.done():
                future.set_exception(ServiceUnavailable(self.failure))
        self._current, self._next = [], []
