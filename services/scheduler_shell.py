"""What surrounds the scheduler's state machine inside its actor: the journal, the clock and who waits.

Everything happens on one event loop, and events are applied one after another between two awaits, so no lock is
needed. What is answered was on disk before: see `SchedulerShell.do`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.errors import JoyNexusError
from services.actor_reply import on_its_way
from services.group_commit import GroupCommit
from services.scheduler_events import Event, Forget, Instruction, Tick, Wake, Write, WriteJob
from services.scheduler_state import SchedulerState
from storage.journal import Journal, Record

logger = logging.getLogger(__name__)


_LATE_S = 5.0


class SchedulerShell:
    """Feeds events to a `SchedulerState` and carries out its instructions."""

    def __init__(self, journal_path: str, max_active_rollouts: int) -> None:
        """Open the journal and restore from it alone.

        Args:
            journal_path: SQLite file on a local disk, made if missing.
            max_active_rollouts: RL jobs in `reserved` at one time, over all tenants.
        """
        self._state = SchedulerState(max_active_rollouts)
        self._journal = Journal(Path(journal_path))
        self._state.restore(
            now=time.time(),
            counters=self._journal.facts("counters").get("", {}),
            tenants=self._journal.facts("tenant"),
            policies=self._journal.facts("policy"),
            jobs=self._journal.jobs(),
        )
        self._commits: GroupCommit[Record] = GroupCommit(self._take, self._journal.commit)
        self._records: list[Record] = []  # facts, changes and jobs to forget, since the last group
        self._moved: set[str] = set()  # ids of jobs that changed since the last group
        self._reads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-read")
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}  # {topic: who waits for it}
        self._timer: asyncio.TimerHandle | None = None  # runs at the time `_timer_due`
        self._timer_due = math.inf

    def _now(self) -> float:
        return time.time()

    def _feed(self, event: Event) -> Any:
        """Let an event happen now; the caller awaits `durable` before it answers."""
        self._commits.check()
        self._look_whether_late(event.now)
        outcome = self._state.handle(event)
        self._carry_out(outcome.instructions)
        self._set_timer()
        if outcome.error is not None:
            logger.debug("%s refused: %s", type(event).__name__, outcome.error)
            raise outcome.error
        return outcome.reply

    async def _do(self, event: Event) -> Any:
        try:
            return on_its_way(self._feed(event))
        finally:  # a refusal, too, speaks of a state that has to be on disk
            await self._commits.durable()

    async def _read(self, look: Callable[[], Any]) -> Any:
        """What `look` sees, after it is on disk."""
        found = look()
        await self._commits.durable()
        return on_its_way(found)

    def _carry_out(self, instructions: tuple[Instruction, ...]) -> None:
        topics: set[str] = set()
        for instruction in instructions:
            if isinstance(instruction, Write):
                self._records.append(Record(instruction.kind, instruction.key, instruction.body))
            elif isinstance(instruction, WriteJob):
                self._moved.add(instruction.job_id)
                topics.add("changes")
            elif isinstance(instruction, Wake):
                topics.add(instruction.topic)
            elif isinstance(instruction, Forget):
                self._moved.discard(instruction.job_id)
                self._records.append(Record("job", instruction.created_seq, None))
        if self._records or self._moved:
            self._commits.touch()
        for topic in topics:
            for waiter in self._waiters.pop(topic, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def _take(self) -> list[Record]:
        """A group: what is to be written, as of now. No event happens meanwhile, so it is one consistent state."""
        records, moved = self._records, self._moved
        self._records, self._moved = [], set()
        jobs = map(self._state.jobs.__getitem__, moved)
        records.extend(Record("job", job.created_seq, job.describe()) for job in jobs)
        records.append(Record("counters", "", dict(self._state.counters)))
        return records

    async def _until(self, holds: Callable[[], bool], topics: list[str], timeout_s: float) -> bool:
        """Look, and look again whenever a topic is woken, until it `holds` or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0 or not await self._wait(topics, left):
                return holds()
        return True

    async def _wait(self, topics: list[str], timeout_s: float) -> bool:
        """True when a topic was woken, False when the time was over first."""
        self._set_timer()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiters.setdefault(topic, set()).add(waiter)
        try:
            done, _ = await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            for topic in topics:
                self._waiters.get(topic, set()).discard(waiter)
        return bool(done)

    def _set_timer(self) -> None:
        """Have the state look at the clock when its next lease or place runs out."""
        due = self._state.next_deadline()
        if due is None or due >= self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._time_is_up)

    def _look_whether_late(self, now: float) -> None:
        """Hold nobody to a lease that ran out while nobody could be heard.

        The machine slept, this process was stopped, or the clock was set: the timer should have gone off long ago.
        """
        if now > self._timer_due + _LATE_S:
            logger.warning("%.0f s late: held leases last their whole length again", now - self._timer_due)
            self._state.overslept(now)
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_due = None, math.inf

    def _time_is_up(self) -> None:
        now = self._now()
        self._look_whether_late(now)
        self._timer, self._timer_due = None, math.inf
        try:
            self._feed(Tick(now))
        except JoyNexusError as error:
            logger.error("leases do not expire any more: %s", error)

    async def close(self) -> None:
        """Write what is left and close the journal. Not needed for safety: a kill loses nothing that was answered."""
        if self._timer is not None:
            self._timer.cancel()
        await self._commits.close()
        self._reads.shutdown()
        self._journal.close()
