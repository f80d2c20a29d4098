"""Who used a service's compute when: intervals for the timeline, seconds for the bill and for utilisation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class BusyLog:
    """Intervals of compute by one service, the newest `capacity` of them, with running sums a tenant.

    A shared forward is one interval for several tenants; its seconds are divided by their rows, so that
    the tenants' sums add up to the busy seconds.
    """

    def __init__(self, capacity: int = 50_000) -> None:
        self._intervals: deque[tuple[float, float, dict[str, int], str]] = deque(maxlen=capacity)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def record(self, kind: str, rows: Mapping[str, int]) -> Iterator[None]:
        """Time the block as `kind` (for instance "train" or "forward"), shared by tenants in proportion to rows."""
        start = time.time()
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self._intervals.append((start, start + seconds, dict(rows), kind))
            total = sum(rows.values()) or 1
            for tenant, n in rows.items():
                self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds * n / total

    def seconds(self) -> dict[str, float]:
        """Compute seconds a tenant since the service started."""
        return dict(self._seconds)

    def intervals(self, since: float) -> list[list[object]]:
        """`[start, end, {tenant: rows}, kind]` of the intervals that ended after `since` (epoch seconds)."""
        return [[s, e, rows, kind] for s, e, rows, kind in self._intervals if e > since]


def busy_seconds(intervals: list[list[object]], start: float, end: float) -> float:
    """Seconds of [start, end] that the union of the intervals covers."""
    covered = 0.0
    reached = start
    for s, e in sorted((max(float(i[0]), start), min(float(i[1]), end)) for i in intervals):  # type: ignore[arg-type]
        if e > max(s, reached):
            covered += e - max(s, reached)
            reached = e
    return covered
