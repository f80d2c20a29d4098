"""What the mirror has yet to write: the latest state of each job, coalesced. No clock, no I/O.

A job that moved several times since its run was written gets one write; the path it took goes into the message.
So the backlog is bounded by the number of jobs, and a job that ended before its run was made gets one terminal run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from services.scheduler_records import COMPLETED, DROPPED, FAILED, RESERVED, TERMINAL

# {our state: Prefect's (type, name)}: built-in ones, since its pages filter on a fixed list. Everything between
# `reserved` and the end is Running, because Prefect refuses the way back to Pending that an expired lease takes.
PREFECT_STATES: dict[str, tuple[str, str]] = {
    RESERVED: ("PENDING", "Pending"),
    COMPLETED: ("COMPLETED", "Completed"),
    FAILED: ("FAILED", "Failed"),
    DROPPED: ("CANCELLED", "Cancelled"),
}
RUNNING = ("RUNNING", "Running")
_PATH_KEPT = 24


def prefect_state(state: str) -> tuple[str, str]:
    """Prefect's type and name of one of our states."""
    return PREFECT_STATES.get(state, RUNNING)


@dataclass
class Entry:
    """One job as the mirror knows it.

    Attributes:
        job: fields of the last change.
        path: states since the beginning, the oldest left out past a bound.
        dirty_since: scheduler's timestamp of the first change not yet written; None where all is written.
        run_id: Prefect's flow run, once made.
    """

    job: dict[str, Any]
    path: list[str] = field(default_factory=list)
    dirty_since: float | None = None
    run_id: str | None = None

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.job["state"] in TERMINAL

    def state(self) -> dict[str, Any]:
        """Prefect's state as JSON: our states with the scheduler's times (UTC) and the reason in the message.

        Prefect stamps a state itself and refuses a timestamp from outside.
        """
        kind, name = prefect_state(self.job["state"])
        reason = f" — {self.job['reason']}" if self.job.get("reason") else ""
        return {
            "type": kind,
            "name": name,
            "message": (" → ".join(self.path) + reason)[:4000],
        }

    def tags(self) -> list[str]:
        """Tags of the run; the state is in the message, since tags cannot change with it for free."""
        return ["joynexus-job", f"tenant:{self.job['tenant_id']}", f"task:{self.job['task_type']}"]


class MirrorState:
    """Jobs by id; `pending` holds all and only those with an unwritten change, the longest waiting first."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.pending: OrderedDict[str, None] = OrderedDict()

    def change(self, change: Mapping[str, Any]) -> None:
        """Take in one of the scheduler's changes."""
        entry = self.entries.setdefault(change["job_id"], Entry({}))
        entry.job = {**entry.job, **change}
        at = datetime.fromtimestamp(change["timestamp"], UTC).strftime("%H:%M:%S.%f")[:-3]
        entry.path = [*entry.path, f"{change['state']} {at}"][-_PATH_KEPT:]
        self.touch(change["job_id"], change["timestamp"])

    def touch(self, job_id: str, since: float) -> None:
        """Have the job written (again)."""
        entry = self.entries[job_id]
        if entry.dirty_since is None:
            entry.dirty_since = since
        self.pending[job_id] = None

    def next(self) -> Entry | None:
        """Take the longest waiting entry; its later changes make it pending again."""
        if not self.pending:
            return None
        job_id, _ = self.pending.popitem(last=False)
        return self.entries[job_id]

    def written(self, entry: Entry, state: str) -> None:
        """`state` stands in Prefect. Ended and written jobs are forgotten, so that nothing grows with history."""
        job_id = entry.job["job_id"]
        entry.dirty_since = entry.job["timestamp"] if job_id in self.pending else None
        if state in TERMINAL:
            self.entries.pop(job_id, None)

    def lag_s(self, now: float) -> float:
        """Age of the oldest unwritten change in seconds."""
        waiting = [e.dirty_since for e in self.entries.values() if e.dirty_since is not None]
        return max(0.0, now - min(waiting)) if waiting else 0.0
