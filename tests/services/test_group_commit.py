"""Group commit: one write for all who came meanwhile, nobody answered before it, and a failure ends it for good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from configs.errors import ServiceUnavailable
from services.group_commit import GroupCommit


class SlowDisk:
    """A disk whose writes wait until they are let through, or fail."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.groups: list[list[int]] = []
        self.through = threading.Semaphore(0)
        self.broken = False
        self.commits: GroupCommit[int] = GroupCommit(self._take, self._write)

    def put(self, value: int) -> Coroutine[Any, Any, None]:
        """Add a value and wait for it."""
        self.pending.append(value)
        self.commits.touch()
        return self.commits.durable()

    def _take(self) -> list[int]:
        taken, self.pending = self.pending, []
        return taken

    def _write(self, values: Sequence[int]) -> None:
        assert self.through.acquire(timeout=10)
        if self.broken:
            raise OSError("disk full")
        self.groups.append(list(values))


def test_who_comes_during_a_write_shares_the_next() -> None:
    """1 is being written; 2, 3 and 4 come and are one group; nobody returns before his group is on disk."""

    async def scenario() -> None:
        disk = SlowDisk()
        first = asyncio.create_task(disk.put(1))
        while disk.pending:  # until the first group was taken
            await asyncio.sleep(0)
        others = [asyncio.create_task(disk.put(value)) for value in (2, 3, 4)]
        disk.through.release()
        await first
        assert disk.groups == [[1]]
        assert not any(task.done() for task in others)
        disk.through.release()
        await asyncio.gather(*others)
        assert disk.groups == [[1], [2, 3, 4]]
        await disk.commits.durable()  # nothing is left: returns at once
        await disk.commits.close()

    asyncio.run(scenario())


def test_a_reader_waits_for_what_it_saw() -> None:
    """Without a record of its own: after what was touched before it, not after what comes later."""

    async def scenario() -> None:
        disk = SlowDisk()
        writer = asyncio.create_task(disk.put(1))
        while disk.pending or not writer:
            await asyncio.sleep(0)
        reader = asyncio.create_task(disk.commits.durable())
        await asyncio.sleep(0)
        later = asyncio.create_task(disk.put(2))
        await asyncio.sleep(0)
        disk.through.release()
        await reader
        assert not later.done()
        disk.through.release()
        await later

    asyncio.run(scenario())


def test_a_cancelled_caller_takes_nobody_along() -> None:
    """Two wait for one group; one is cancelled; the other's record is written and answered."""

    async def scenario() -> None:
        disk = SlowDisk()
        gone, stays = asyncio.create_task(disk.put(1)), asyncio.create_task(disk.put(2))
        await asyncio.sleep(0)
        gone.cancel()
        disk.through.release()
        await stays
        assert disk.groups == [[1, 2]]
        assert gone.cancelled()

    asyncio.run(scenario())


def test_after_a_failed_write_nothing_is_accepted() -> None:
    """Those in the group, those who wait for the next one and all later ones are told the same."""

    async def scenario() -> None:
        disk = SlowDisk()
        disk.broken = True
        writing = asyncio.create_task(disk.put(1))
        while disk.pending:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(disk.put(2))
        await asyncio.sleep(0)
        disk.through.release()
        for task in (writing, waiting):
            with pytest.raises(ServiceUnavailable, match=r"journal: could not be written \(disk full\); start the"):
                await task
        with pytest.raises(ServiceUnavailable):
            disk.commits.touch()
        with pytest.raises(ServiceUnavailable):
            await disk.commits.durable()

    asyncio.run(scenario())
