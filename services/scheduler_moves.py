"""The Training Scheduler's table of jobs: every move of a job, and all indices that follow from it.

`JobTable._move` is the only place that changes a job's state; it obeys `scheduler_records.TRANSITIONS`. Which event
leads to which move is `services.scheduler_state`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any

from configs.errors import Conflict, LeaseLost, SpecError, UnknownObject, refusal
from services.scheduler_admission import Admission
from services.scheduler_events import Instruction, Wake, Write, WriteJob
from services.scheduler_queues import StageQueue, TrainingQueue
from services.scheduler_records import (
    DROPPED,
    HELD,
    HELD_BACK,
    LEASED,
    READY,
    RESERVED,
    STAGES,
    STATES,
    TERMINAL,
    TRANSITIONS,
    Act,
    Job,
    Policy,
    PolicySpec,
    possible_from,
)

COUNTERS = ("created_seq", "ready_seq", "change_seq", "lease_token")
SHOWN_IDS = 8  # as many known ids an error message lists


class JobTable:
    """All jobs and policies. Attributes are for reading; each says what it holds."""

    def __init__(self, max_active_rollouts: int) -> None:
        """An empty table.

        Args:
            max_active_rollouts: RL jobs in `reserved` at one time, over all tenants.
        """
        if max_active_rollouts < 1:
            raise SpecError(refusal("max_active_rollouts", max_active_rollouts, "1 or more", "raise it"))
        self.admission = Admission(max_active_rollouts)
        self.policies: dict[str, Policy] = self.admission.policies  # {policy_key: policy}, all ever registered
        self.open_rl: set[str] = set()  # keys of all and only open policies that learn by RL
        self.jobs: dict[str, Job] = {}  # {job_id: job} in order of creation, terminal ones until pruned
        self.counts: dict[str, int] = dict.fromkeys(STATES, 0)  # of `jobs`
        self.tenant_counts: dict[str, dict[str, int]] = {}  # {tenant_id: {state: jobs}}
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)  # last value given out
        self.train_seq: dict[str, int] = {}  # {tenant_id: last value given out}
        self.stages = StageQueue()  # all and only jobs in a state of STAGES
        self.ready = TrainingQueue()  # all and only jobs in READY
        self.requests: dict[str, str] = {}  # {request_id: job_id} of all reservations with an id, until pruned
        self.lease_requests: dict[str, str] = {}  # {request_id: job_id} of leases that are held
        self.now = 0.0  # latest time seen
        self._expiries: list[tuple[float, str, int]] = []  # heap of (time, job_id, token); renewed ones are skipped
        self._policy_expiries: list[tuple[float, str, int]] = []  # heap of (time, policy_key, generation), likewise
        self._ended: deque[str] = deque()  # job_ids in order of their end
        self._out: list[Instruction] = []  # what the caller is to do, since the last event

    def restore(
        self,
        *,
        now: float,
        counters: dict[str, int],
        tenants: dict[str, dict[str, Any]],
        policies: dict[str, dict[str, Any]],
        jobs: Iterable[dict[str, Any]],
    ) -> None:
        """Fill an empty table from what was journalled.

        Leases that were held get their whole length again from `now`: their holders could not renew meanwhile.

        Args:
            now: seconds since the epoch.
            counters: `counters` as last written, empty if never.
            tenants: `tenant` records by tenant_id.
            policies: `policy` records by policy_key.
            jobs: `job` records in order of creation.
        """
        self.now = now
        self.counters.update(counters)
        self.train_seq = {tenant_id: body["train_seq"] for tenant_id, body in tenants.items()}
        for body in policies.values():
            policy = Policy(
                PolicySpec(**body["spec"]),
                body["generation"],
                closed=body["closed"],
                holder=body.get("holder"),  # journals from before policies had leases lack both
                lease_s=body.get("lease_s"),
                pruned=dict(body["pruned"]),
                pruned_stale=body.get("pruned_stale", 0),
            )
            policy.stale = policy.pruned_stale
            for state, pruned in policy.pruned.items():
                policy.counts[state] += pruned
            self._set_policy(policy)
        ready, ended = [], []
        for body in jobs:
            job = Job(**body)
            self._add(job)
            if self.held_back(job):  # those before it are known by now
                continue
            if job.state in STAGES:
                self.stages.push(job)
            elif job.state == READY:
                ready.append(job)
            elif job.state in TERMINAL:
                ended.append(job)
            elif job.lease_request_id is not None:
                self.lease_requests[job.lease_request_id] = job.job_id
            if job.train_seq is not None and job.state not in TERMINAL:
                self.ready.take_turn(job)
        self.renew_all()
        for job in ready:  # after all turns are known
            self.ready.push(job)
        self._ended.extend(job.job_id for job in sorted(ended, key=lambda job: (job.ended_at, job.created_seq)))

    def may_lease(self, consumer_role: str, domains: Iterable[str]) -> bool:
        """Whether a `Lease` of a ready job would find one."""
        return any(self.ready.first((consumer_role, domain)) is not None for domain in domains)

    def held_back(self, job: Job) -> bool:
        """Whether it waits for the end of a job that its policy reserved before."""
        policy = self.policies[job.policy_key]
        return policy.spec.in_order and job.state in HELD_BACK and next(iter(policy.open)) != job.job_id

    def policy(self, policy_key: str) -> Policy:
        """The policy of that key.

        Raises:
            UnknownObject: if none was registered.
        """
        if policy_key not in self.policies:
            known = ", ".join(list(self.policies)[-SHOWN_IDS:]) or "none yet"
            raise UnknownObject(refusal("policy_key", policy_key, known, "register the policy first"))
        return self.policies[policy_key]

    def job(self, job_id: str) -> Job:
        """The job of that id.

        Raises:
            UnknownObject: if there is none, or it was pruned.
        """
        if job_id not in self.jobs:
            newest = next(reversed(self.jobs), "none yet")
            raise UnknownObject(
                refusal("job_id", job_id, f"{len(self.jobs)} jobs, the newest {newest}", "check the id")
            )
        return self.jobs[job_id]

    def _next(self, counter: str) -> int:
        self.counters[counter] += 1
        return self.counters[counter]

    def _run_out(self) -> None:
        """End leases, policies and places whose time has come."""
        while self._expiries and self._expiries[0][0] <= self.now:
            expires_at, job_id, token = heapq.heappop(self._expiries)
            job = self.jobs.get(job_id)
            if job is not None and job.lease_token == token and job.lease_expires_at == expires_at:
                self._move(job, HELD[job.state], "return", reason=f"the lease of {job.lease_holder} expired")
        while self._policy_expiries and self._policy_expiries[0][0] <= self.now:
            expires_at, key, generation = heapq.heappop(self._policy_expiries)
            policy = self.policies[key]
            if policy.closed is None and (policy.generation, policy.lease_expires_at) == (generation, expires_at):
                self._close_policy(policy, f"its flow run gave no sign for {policy.lease_s:g} s")
        if self.admission.waiting and self.admission.lapse(self.now):
            self._out.append(Wake("admission"))

    def renew_all(self) -> None:
        """Every lease that is held, of jobs and policies, lasts its whole length from now."""
        for policy in self.policies.values():
            self._renew_policy(policy)
            for job in map(self.jobs.__getitem__, policy.open):
                if job.lease_s is not None:
                    self._hold(job, job.lease_s)

    def _hold(self, job: Job, lease_s: float) -> None:
        """Its lease lasts `lease_s` from now."""
        assert job.lease_token is not None
        job.lease_s, job.lease_expires_at = lease_s, self.now + lease_s
        heapq.heappush(self._expiries, (job.lease_expires_at, job.job_id, job.lease_token))

    def _set_policy(self, policy: Policy) -> None:
        self.policies[policy.key] = policy
        if policy.closed is None and policy.spec.task_type == "rl":
            self.open_rl.add(policy.key)

    def _renew_policy(self, policy: Policy) -> None:
        """Its lease lasts its whole length from now."""
        if policy.closed is None and policy.lease_s is not None:
            policy.lease_expires_at = self.now + policy.lease_s
            heapq.heappush(self._policy_expiries, (policy.lease_expires_at, policy.key, policy.generation))

    def _close_policy(self, policy: Policy, reason: str) -> list[str]:
        """Admit none of its jobs any more and drop those that are not ended; returns their ids."""
        dropped = list(policy.open)
        if policy.closed is None:
            policy.closed, policy.lease_expires_at = reason, None
            self.open_rl.discard(policy.key)
            self._out.append(Write("policy", policy.key, policy.body()))
        for job_id in dropped:
            self._move(self.jobs[job_id], DROPPED, "drop", reason=f"cancelled: {reason}")
        self.admission.waiting.pop(policy.key, None)
        self._out += [Wake("admission"), Wake(f"policy:{policy.key}")]
        return dropped

    def _repeated(self, job: Job, state: str, token: int | None, metadata: dict[str, Any]) -> bool:
        """Whether the same hands brought the job to `state` before: the call was sent twice.

        Raises:
            Conflict: if it comes with other metadata.
        """
        if state not in job.marks or job.marks[state] != token:
            return False
        for key, value in metadata.items():
            if key not in job.metadata or job.metadata[key] != value:
                raise Conflict(
                    refusal(
                        f"{job.job_id} metadata.{key}",
                        value,
                        f"{job.metadata.get(key)!r}, as at {state}",
                        "send the same",
                    )
                )
        return True

    def _check_hands(self, job: Job, token: int | None) -> None:
        """A held job obeys its holder alone, any other one a caller without a token."""
        if token is not None:
            self._check_held(job, token)
        elif job.state in HELD:
            raise LeaseLost(
                refusal(
                    f"{job.job_id} lease_token", None, f"the token of {job.lease_holder}", "send it or leave the job"
                )
            )

    def _check_held(self, job: Job, token: int) -> None:
        if job.lease_token is None or job.lease_token != token:
            why = f" ({job.reason})" if job.reason else ""
            held = f"the job is {job.state}{why}" + (f" and held by {job.lease_holder}" if job.lease_holder else "")
            raise LeaseLost(refusal(f"{job.job_id} lease_token", token, held, "discard the result"))

    def _move(
        self,
        job: Job,
        finish: str,
        act: Act,
        *,
        token: int | None = None,
        reason: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Make one move of the table; the only place that changes a job's state.

        Raises:
            Conflict: if the table has no such move for this act and task.
        """
        start = job.state
        allowed = TRANSITIONS.get((start, finish))
        if allowed is None or allowed[0] != act or job.task_type not in allowed[1]:
            possible = ", ".join(possible_from(start, job.task_type)) or "none, it is terminal"
            raise Conflict(
                refusal(f"{job.job_id} ({job.task_type}, {start}) {act}", finish, possible, "check the order")
            )
        self._leave(job, start, finish)
        if act not in ("lease", "return"):
            job.marks = {**job.marks, finish: token}
        holder = job.lease_holder
        if act != "lease" and start in HELD:
            if job.lease_request_id is not None:
                self.lease_requests.pop(job.lease_request_id, None)
            job.lease_token = job.lease_holder = job.lease_expires_at = job.lease_s = job.lease_request_id = None
        job.state, job.reason, job.updated_at = finish, reason, self.now
        if metadata:
            job.metadata = {**job.metadata, **metadata}
        self._enter(job, finish)
        self._note(job, start, holder, metadata)

    def _leave(self, job: Job, start: str, finish: str) -> None:
        policy = self.policies[job.policy_key]
        self.counts[start] -= 1
        self.tenant_counts[job.tenant_id][start] -= 1
        policy.counts[start] -= 1
        if start in STAGES:
            self.stages.discard(job.job_id)
        elif start == READY:
            if finish == LEASED:
                if job.train_seq is None:
                    job.train_seq = self.train_seq[job.tenant_id] = self.train_seq.get(job.tenant_id, 0) + 1
                    self._out.append(Write("tenant", job.tenant_id, {"train_seq": job.train_seq}))
                self.ready.take_turn(job)
            if self.ready.discard(job):
                self._out.append(Wake(READY))
        elif start == RESERVED and job.task_type == "rl":
            self.admission.active_rollouts -= 1
            self._out.append(Wake("admission"))

    def _enter(self, job: Job, finish: str) -> None:
        policy = self.policies[job.policy_key]
        self.counts[finish] += 1
        self.tenant_counts[job.tenant_id][finish] += 1
        policy.counts[finish] += 1
        if finish == READY and job.ready_seq is None:
            job.ready_seq = self._next("ready_seq")
        if finish in (*STAGES, READY):
            if not self.held_back(job):
                self._queue(job)
        elif finish in TERMINAL:
            job.ended_at = self.now
            self._ended.append(job.job_id)
            policy.stale += job.stale
            was_first = next(iter(policy.open)) == job.job_id
            del policy.open[job.job_id]
            if self.ready.end_turn(job):
                self._out.append(Wake(READY))
            following = self.jobs[next(iter(policy.open))] if policy.open else None
            if was_first and following is not None and policy.spec.in_order and following.state in HELD_BACK:
                self._queue(following)
            self._out += [Wake("admission"), Wake(f"policy:{policy.key}")]

    def _queue(self, job: Job) -> None:
        """It waits for a worker, and who looks for such jobs is woken."""
        if job.state in STAGES:
            self.stages.push(job)
            self._out.append(Wake(job.state))
        elif self.ready.push(job):
            self._out.append(Wake(READY))

    def _note(self, job: Job, start: str | None, holder: str | None, metadata: dict[str, Any] | None) -> None:
        """Have the job and its change written down."""
        seq = self._next("change_seq")
        change = {
            "seq": seq,
            "job_id": job.job_id,
            "created_seq": job.created_seq,
            "policy_key": job.policy_key,
            "tenant_id": job.tenant_id,
            "task_type": job.task_type,
            "flow_run_id": job.flow_run_id,
            "from": start,
            "state": job.state,
            "timestamp": self.now,
            "reason": job.reason,
            "holder": holder,
            "metadata": metadata or {},
        }
        self._out += (WriteJob(job.job_id), Write("change", seq, change))

    def _add(self, job: Job) -> None:
        """Enter a job, new or restored, into everything that is derived from jobs."""
        policy = self.policies[job.policy_key]
        self.jobs[job.job_id] = job
        self.counts[job.state] += 1
        self.tenant_counts.setdefault(job.tenant_id, dict.fromkeys(STATES, 0))[job.state] += 1
        if job.policy_generation == policy.generation:
            policy.counts[job.state] += 1
            policy.stale += job.stale
            policy.last_admitted_seq = max(policy.last_admitted_seq, job.created_seq)
            if job.state not in TERMINAL:
                policy.open[job.job_id] = None
        if job.request_id is not None:
            self.requests[job.request_id] = job.job_id
        if job.state == RESERVED and job.task_type == "rl":
            self.admission.active_rollouts += 1
