"""The Inference Scheduler's decision: which waiting requests form the next shared forward. No clock, no I/O.

Source: JoyNexus, sections 4.3 and A.3: requests are examined in arrival order, and the largest FIFO-compatible
prefix of at most B samples is taken. A request that does not fit ends the prefix, so nobody is overtaken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Waiting(Generic[R]):
    """A queued request: its compatibility key, its rows, and whatever the service attached."""

    prefix_key: str
    rows: int
    request: R


class InferenceQueue(Generic[R]):
    """Requests in arrival order.

    Args:
        max_batch_size: B, samples of one forward. A single larger request forms a batch of its own.
        max_waiting_rows: most rows that may wait; a further request is refused by `full`.
    """

    def __init__(self, max_batch_size: int, max_waiting_rows: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_waiting_rows = max_waiting_rows
        self._waiting: deque[Waiting[R]] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> R:
        """The request that came first; there must be one."""
        return self._waiting[0].request

    @property
    def waiting_rows(self) -> int:
        """Rows of all queued requests."""
        return self._rows

    def full(self, rows: int) -> bool:
        """Whether `rows` more would exceed the bound."""
        return self._rows + rows > self._max_waiting_rows

    def push(self, waiting: Waiting[R]) -> None:
        """Append a request."""
        self._waiting.append(waiting)
        self._rows += waiting.rows

    def prefix_size(self) -> tuple[int, int]:
        """(requests, rows) of the largest compatible prefix now."""
        count = rows = 0
        for waiting in self._waiting:
            if count and (
                waiting.prefix_key != self._waiting[0].prefix_key or rows + waiting.rows > self._max_batch_size
            ):
                break
            count, rows = count + 1, rows + waiting.rows
        return count, rows

    def complete(self) -> bool:
        """Whether waiting longer cannot enlarge the prefix: it holds B rows, or another request ends it."""
        count, rows = self.prefix_size()
        return rows >= self._max_batch_size or count < len(self._waiting)

    def take(self) -> list[R]:
        """Remove and return the largest compatible prefix, in arrival order."""
        count, rows = self.prefix_size()
        self._rows -= rows
        return [self._waiting.popleft().request for _ in range(count)]
