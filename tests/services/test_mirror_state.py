"""What the mirror has to write, without Prefect: coalescing, states, forgetting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.mirror_state import MirrorState, prefect_state
from services.scheduler_records import STATES, TERMINAL


def change(job: str, state: str, at: float, reason: str | None = None) -> dict[str, Any]:
    return {
        "job_id": job,
        "state": state,
        "timestamp": at,
        "reason": reason,
        "tenant_id": "a",
        "task_type": "rl",
        "policy_key": "a.rl",
    }


def test_states_are_prefects_own_and_only_reserved_is_pending() -> None:
    """Running → Pending aborts in Prefect, so a job whose lease expired must not have to go back there."""
    shown = {state: prefect_state(state)[1] for state in STATES}
    assert {s for s, name in shown.items() if name == "Pending"} == {"reserved"}
    assert (shown["completed"], shown["failed"], shown["dropped"]) == ("Completed", "Failed", "Cancelled")
    assert {shown[s] for s in STATES if s not in TERMINAL and s != "reserved"} == {"Running"}


def test_moves_before_a_write_are_one_write_whose_message_tells_the_path() -> None:
    mirror = MirrorState()
    for at, state in enumerate(("reserved", "ready", "leased", "completed")):
        mirror.change(change("j", state, float(at)))
    entry = mirror.next()
    assert entry is not None
    assert mirror.next() is None
    assert entry.state()["type"] == "COMPLETED"
    assert entry.state()["message"] == (
        "reserved 00:00:00.000 → ready 00:00:01.000 → leased 00:00:02.000 → completed 00:00:03.000"
    )
    assert set(entry.state()) == {"type", "name", "message"}, "Prefect refuses anything else, a timestamp too"


def test_the_reason_of_a_failure_is_in_the_message() -> None:
    mirror = MirrorState()
    mirror.change(change("j", "failed", 1.0, "TenantFault: NaN"))
    entry = mirror.next()
    assert entry is not None
    assert entry.state()["message"] == "failed 00:00:01.000 — TenantFault: NaN"


def test_the_longest_waiting_is_written_first_and_ended_jobs_are_forgotten() -> None:
    mirror = MirrorState()
    mirror.change(change("old", "reserved", 1.0))
    mirror.change(change("new", "reserved", 2.0))
    mirror.change(change("old", "completed", 3.0))
    first = mirror.next()
    assert first is not None
    assert first.job["job_id"] == "old"
    assert mirror.lag_s(now=5.0) == pytest.approx(4.0)
    mirror.written(first, "completed")
    assert set(mirror.entries) == {"new"}
    assert mirror.lag_s(now=5.0) == pytest.approx(3.0)


def test_a_change_during_a_write_is_written_too() -> None:
    mirror = MirrorState()
    mirror.change(change("j", "reserved", 1.0))
    entry = mirror.next()
    assert entry is not None
    mirror.change(change("j", "ready", 2.0))
    mirror.written(entry, "reserved")
    again = mirror.next()
    assert again is entry
    assert again.state()["type"] == "RUNNING"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["reserved", "ready", "leased"])), max_size=60))
def test_the_backlog_is_bounded_by_jobs_and_ends_at_the_last_state(moves: list[tuple[str, str]]) -> None:
    mirror = MirrorState()
    for at, (job, state) in enumerate(moves):
        mirror.change(change(job, state, float(at)))
    assert len(mirror.pending) == len({job for job, _ in moves})
    written = {}
    while (entry := mirror.next()) is not None:
        written[entry.job["job_id"]] = entry.job["state"]
        mirror.written(entry, entry.job["state"])
    assert written == dict(moves)
    assert mirror.lag_s(now=1e9) == 0.0
