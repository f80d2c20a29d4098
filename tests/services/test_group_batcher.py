"""Grouping in time: what shares a forward, who waits for whom, and whose fault is whose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from configs.cluster import InferenceBatchingSpec
from configs.errors import AdmissionRefused, JoyNexusError, TenantFault
from services.group_batcher import MAX_WAITING_ROWS, GroupBatcher

T = TypeVar("T")


class Forwards:
    """Records its batches; a forward goes on while `open` is not set, and `begun` counts those that entered."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Semaphore(0)

    def __call__(self, requests: Sequence[str]) -> list[str | JoyNexusError]:
        self.batches.append(list(requests))
        self.begun.release()
        assert self.open.wait(10)
        if "breaks all" in requests:
            raise RuntimeError("out of memory")
        return [TenantFault("its own") if r == "faulty" else r.upper() for r in requests]

    async def entered(self) -> None:
        """One more forward has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=10)


def run(coroutine: Awaitable[T]) -> T:
    async def main() -> T:
        return await coroutine

    return asyncio.run(main())


def batcher(forward: Forwards, max_batch_size: int = 8, batch_timeout_s: float = 0.0) -> GroupBatcher[str, str]:
    spec = InferenceBatchingSpec(max_batch_size=max_batch_size, batch_timeout_s=batch_timeout_s)
    return GroupBatcher("tiny", forward, spec, ThreadPoolExecutor(1))


async def occupied(group: GroupBatcher[str, str], forward: Forwards, rows: int = 1) -> asyncio.Task[str]:
    """Request "a", whose forward has begun and goes on until `forward.open` is set."""
    forward.open.clear()
    first = asyncio.create_task(group.submit("k", rows, "a"))
    await forward.entered()
    return first


async def waiting(group: GroupBatcher[str, str], rows: int) -> None:
    """So many rows wait."""
    while group.waiting_rows < rows:
        await asyncio.sleep(0)


def test_what_arrives_in_one_turn_of_the_loop_shares_a_forward_without_waiting() -> None:
    forward = Forwards()

    async def main() -> list[str]:
        group = batcher(forward)
        return await asyncio.gather(*(group.submit("k", 1, r) for r in "abc"))

    assert run(main()) == ["A", "B", "C"]
    assert forward.batches == [["a", "b", "c"]]


def test_the_next_batch_fills_while_a_forward_runs() -> None:
    """b and c come one after the other while a computes; they then go together, and never beside a."""
    forward = Forwards()

    async def main() -> None:
        group = batcher(forward)
        first = await occupied(group, forward)
        later = [asyncio.create_task(group.submit("k", 1, r)) for r in "bc"]
        await waiting(group, 2)
        assert forward.batches == [["a"]]
        forward.open.set()
        assert await asyncio.gather(first, *later) == ["A", "B", "C"]

    run(main())
    assert forward.batches == [["a"], ["b", "c"]]


def test_a_full_batch_does_not_wait_for_company_and_a_lone_request_does() -> None:
    """A batch that can no longer grow leaves; one that could waits T."""
    forward = Forwards()

    async def main() -> None:
        group = batcher(forward, max_batch_size=2, batch_timeout_s=1.0)
        done = [asyncio.create_task(group.submit("k", 1, r)) for r in "ab"]
        assert await asyncio.gather(*done) == ["A", "B"]
        alone = asyncio.create_task(group.submit("k", 1, "c"))
        await asyncio.sleep(0)
        other = asyncio.create_task(group.submit("another", 1, "d"))
        assert await alone == "C", "d ends its prefix, so c leaves before T"
        assert group.waiting_rows == 1
        assert await other == "D", "after T"

    run(main())
    assert forward.batches == [["a", "b"], ["c"], ["d"]]


def test_waiting_counts_from_the_oldest_request() -> None:
    """One that waited T while another's forward ran leaves at once when that ends."""
    forward = Forwards()
    waited: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        group = batcher(forward, max_batch_size=4, batch_timeout_s=0.2)
        first = await occupied(group, forward, rows=4)
        second = asyncio.create_task(group.submit("k", 1, "b"))
        await waiting(group, 1)
        came = loop.time()
        await asyncio.sleep(0.25)
        forward.open.set()
        await first
        await forward.entered()
        waited.append(loop.time() - came)
        await second

    run(main())
    assert waited[0] < 0.25 + 0.2, "not T again"


def test_a_fault_is_its_requests_own_and_a_broken_forward_ends_nothing_but_its_batch() -> None:
    forward = Forwards()

    async def main() -> list[Any]:
        group = batcher(forward)
        own = await asyncio.gather(*(group.submit("k", 1, r) for r in ("a", "faulty")), return_exceptions=True)
        shared = await asyncio.gather(*(group.submit("k", 1, r) for r in ("b", "breaks all")), return_exceptions=True)
        return [*own, *shared, await group.submit("k", 1, "c")]

    a, faulty, b, breaks, c = run(main())
    assert (a, c) == ("A", "C")
    assert isinstance(faulty, TenantFault)
    for error in (b, breaks):
        assert isinstance(error, JoyNexusError)
        assert "out of memory" in str(error)
        assert "send the request again" in str(error)


def test_a_request_nobody_waits_for_any_more_is_not_computed() -> None:
    forward = Forwards()

    async def main() -> None:
        group = batcher(forward)
        first = await occupied(group, forward)
        gone = asyncio.create_task(group.submit("k", 1, "gone"))
        await waiting(group, 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        forward.open.set()
        assert await first == "A"
        assert await group.submit("k", 1, "b") == "B"
        assert group.waiting_rows == 0

    run(main())
    assert forward.batches == [["a"], ["b"]]


def test_the_queue_is_bounded() -> None:
    forward = Forwards()

    async def main() -> None:
        group = batcher(forward)
        first = await occupied(group, forward)
        full = asyncio.create_task(group.submit("k", MAX_WAITING_ROWS, "b"))
        await waiting(group, MAX_WAITING_ROWS)
        with pytest.raises(AdmissionRefused, match="send again later"):
            await group.submit("k", 1, "c")
        forward.open.set()
        assert await asyncio.gather(first, full) == ["A", "B"]

    run(main())
