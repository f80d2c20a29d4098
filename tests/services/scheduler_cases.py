"""What the scheduler's tests share: short names for events, and a stand-in for the disk."""

from __future__ import annotations

from typing import Any

import orjson

from configs.errors import JoyNexusError
from services.scheduler_events import (
    ClosePolicy,
    Complete,
    Drop,
    Event,
    Fail,
    Forget,
    Instruction,
    Lease,
    LeasedGroup,
    Mark,
    Outcome,
    RegisterPolicy,
    Reserve,
    Tick,
    Write,
    WriteJob,
)
from services.scheduler_records import LEASED, READY, STAGES
from services.scheduler_state import SchedulerState


class Disk:
    """What was written, as JSON gives it back; a state can be made from it alone."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, Any]] = {"tenant": {}, "policy": {}}
        self.jobs: dict[int, dict[str, Any]] = {}
        self.changes: list[dict[str, Any]] = []
        self.counters: dict[str, int] = {}

    def write(self, state: SchedulerState, instructions: tuple[Instruction, ...]) -> None:
        """Carry out the writing instructions of one event."""
        for instruction in instructions:
            if isinstance(instruction, WriteJob):
                job = state.jobs[instruction.job_id]
                self.jobs[job.created_seq] = orjson.loads(orjson.dumps(job.describe()))
            elif isinstance(instruction, Forget):
                del self.jobs[instruction.created_seq]
            elif isinstance(instruction, Write) and instruction.kind == "change":
                self.changes.append(instruction.body)
            elif isinstance(instruction, Write):
                self.facts[instruction.kind][str(instruction.key)] = orjson.loads(orjson.dumps(instruction.body))
        self.counters = dict(state.counters)

    def restored(self, max_active_rollouts: int, now: float) -> SchedulerState:
        """A new state, as after a restart at `now`."""
        state = SchedulerState(max_active_rollouts, validating=True)
        jobs = [body for _, body in sorted(self.jobs.items())]
        state.restore(
            now=now, counters=self.counters, tenants=self.facts["tenant"], policies=self.facts["policy"], jobs=jobs
        )
        return state


class Bench:
    """A validated state with a clock and a disk; every call is one event."""

    def __init__(self, max_active_rollouts: int = 3) -> None:
        self.state = SchedulerState(max_active_rollouts, validating=True)
        self.disk = Disk()
        self.now = 1000.0
        self.last = Outcome(None, None, ())

    def do(self, event: Event) -> Any:
        """Let it happen; an error is raised."""
        self.last = self.state.handle(event)
        self.disk.write(self.state, self.last.instructions)
        if self.last.error is not None:
            raise self.last.error
        return self.last.reply

    def restart(self) -> None:
        """Go on with a state that was made from the disk alone."""
        self.state = self.disk.restored(self.state.admission.max_active_rollouts, self.now)
        self.state.validate()

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.do(Tick(self.now))

    def register(self, tenant: str = "push", task: str = "rl", **other: Any) -> str:
        """A policy with wide bounds unless said otherwise; returns its key."""
        self.do(self.registration(tenant, task, **other))
        return f"{tenant}.{task}"

    def registration(
        self, tenant: str, task: str = "rl", holder: str | None = None, lease_s: float | None = None, **other: Any
    ) -> RegisterPolicy:
        """The event that `register` lets happen, for a flow run `holder` where one is named."""
        policy = {
            "policy_key": f"{tenant}.{task}",
            "tenant_id": tenant,
            "task_type": task,
            "domain": "vla",
            "priority": 0,
            "max_in_flight": 8,
            "completion_target": None,
            "max_active_rollouts": None,
        }
        return RegisterPolicy(self.now, policy | other, holder, lease_s)

    def close(self, key: str = "push.rl", reason: str = "by hand") -> list[str]:
        """Close a policy."""
        return self.do(ClosePolicy(self.now, key, reason))

    def try_reserve(self, key: str = "push.rl", request_id: str | None = None, **other: Any) -> dict[str, Any]:
        """The reservation's whole reply."""
        fields: dict[str, Any] = {
            "sample_count": 64,
            "behavior_policy_version": 0,
            "max_policy_staleness": 10,
            "metadata": {"schema_signature": "abc"},
            "producer_role": "rollout",
            "consumer_role": "actor",
            "flow_run_id": None,
        }
        return self.do(Reserve(self.now, request_id, key, **(fields | other)))

    def reserve(self, key: str = "push.rl", request_id: str | None = None, **other: Any) -> str:
        """The id of a job that must be admitted."""
        reply = self.try_reserve(key, request_id, **other)
        assert reply["job"] is not None, reply
        return reply["job"]["job_id"]

    def mark(
        self, job_id: str, state: str, token: int | None = None, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Mark a job."""
        return self.do(Mark(self.now, job_id, state, token, metadata))

    def lease(
        self, state: str = READY, holder: str = "h", lease_s: float = 60.0, request_id: str | None = None
    ) -> dict[str, Any] | None:
        """The leased job, or None."""
        leased = LEASED if state == READY else STAGES[state]
        return self.do(Lease(self.now, state, leased, "actor", ("vla",), holder, lease_s, request_id))["job"]

    def lease_beside(self, *job_ids: str, **how: Any) -> dict[str, Any] | None:
        """The job that was leased to be trained together with these, or None."""
        return self.do(self.beside(*job_ids, **how))["job"]

    def beside(
        self,
        *job_ids: str,
        holder: str = "h",
        max_bytes: int = 100,
        beside_rl: bool = False,
        request_id: str | None = None,
    ) -> Lease:
        """The event that `lease_beside` lets happen."""
        group = LeasedGroup(job_ids, max_bytes, beside_rl)
        return Lease(self.now, READY, LEASED, "actor", ("vla",), holder, 60.0, request_id, group)

    def complete(self, job_id: str, token: int, **metadata: Any) -> dict[str, Any]:
        """Complete a job."""
        return self.do(Complete(self.now, job_id, token, metadata))

    def fail(self, job_id: str, token: int | None = None, reason: str = "ValueError: bad") -> dict[str, Any]:
        """Fail a job."""
        return self.do(Fail(self.now, job_id, reason, token))

    def drop(self, job_id: str, token: int | None = None, reason: str = "policy_stale") -> dict[str, Any]:
        """Drop a job."""
        return self.do(Drop(self.now, job_id, reason, token))

    def ready(self, key: str = "demos.sft") -> str:
        """A new SFT job that is ready."""
        job_id = self.reserve(key, behavior_policy_version=None)
        self.mark(job_id, READY)
        return job_id

    def ready_rl(self, key: str = "push.rl") -> str:
        """A new RL job that is ready; no other one may wait for its advantages."""
        job_id = self.reserve(key)
        self.mark(job_id, "needs_advantages")
        leased = self.lease("needs_advantages")
        assert leased is not None
        assert leased["job_id"] == job_id
        self.mark(job_id, READY, leased["lease_token"])
        return job_id

    def refused(self, event: Event) -> JoyNexusError:
        """The error of an event that must be refused and change nothing."""
        before = {job_id: job.describe() for job_id, job in self.state.jobs.items()}
        counters = dict(self.state.counters)
        self.last = self.state.handle(event)
        assert self.last.error is not None
        assert self.last.instructions == ()
        assert {job_id: job.describe() for job_id, job in self.state.jobs.items()} == before
        assert self.state.counters == counters
        return self.last.error
