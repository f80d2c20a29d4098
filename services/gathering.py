"""Jobs that were leased as a group find each other before they are trained; a thin asynchronous shell without torch.

Each job comes by a call of its own, so that it has its own lease, reply and fault. The last one to come, or to be
given up, starts the group; if one never comes (its caller died), the others start after a while without it, and it
starts alone if it comes after all. Who trains with whom changes nobody's numbers, so it may be left to time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")  # what is trained
R = TypeVar("R")  # what comes of it
_REMEMBERED = 1024


@dataclass(eq=False)
class _Group(Generic[M, R]):
    expected: set[str]
    members: dict[str, tuple[M, asyncio.Future[R]]] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


Resolve = Callable[[R | Exception], None]
"""Gives a member's caller what came of it; may be called from any thread."""


class Gathering(Generic[M, R]):
    """Groups that are not complete yet.

    Args:
        start: takes the members of a group, each with what resolves it.
        patience_s: the longest wait for a member, from the first one's coming.
    """

    def __init__(self, start: Callable[[list[tuple[M, Resolve[R]]]], None], patience_s: float) -> None:
        self._start = start
        self._patience_s = patience_s
        self._groups: dict[tuple[str, ...], _Group[M, R]] = {}
        self._begun: OrderedDict[tuple[str, ...], None] = OrderedDict()  # who comes late waits for nobody

    async def join(self, group: Sequence[str], job_id: str, member: M) -> R:
        """Wait for the others of `group` (job ids, this one among them), and for the result."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        found = self._group(group)
        found.expected.discard(job_id)
        found.members[job_id] = (member, future)
        self._look(tuple(group))
        return await future

    def give_up(self, group: Sequence[str], job_id: str) -> None:
        """The job will not come (it was done before, or cannot be read); the others need not wait for it."""
        if len(group) > 1:
            self._group(group).expected.discard(job_id)
            self._look(tuple(group))

    def _group(self, group: Sequence[str]) -> _Group[M, R]:
        key = tuple(group)
        if key not in self._groups:
            late = key in self._begun
            self._groups[key] = _Group(set() if late else set(key))
            if len(key) > 1 and not late:
                timer = asyncio.get_running_loop().call_later(self._patience_s, self._begin, key)
                self._groups[key].timer = timer
        return self._groups[key]

    def _look(self, key: tuple[str, ...]) -> None:
        if not self._groups[key].expected:
            self._begin(key)

    def _begin(self, key: tuple[str, ...]) -> None:
        group = self._groups.pop(key)
        self._begun[key] = None
        while len(self._begun) > _REMEMBERED:
            self._begun.popitem(last=False)
        if group.timer is not None:
            group.timer.cancel()
        if group.members:
            self._start([(member, _resolver(future)) for member, future in group.members.values()])


def _resolver(future: asyncio.Future[R]) -> Resolve[R]:
    def resolve(outcome: R | Exception) -> None:
        future.get_loop().call_soon_threadsafe(_resolve, future, outcome)

    return resolve


def _resolve(future: asyncio.Future[R], outcome: R | Exception) -> None:
    """Unless nobody waits for it any more."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
