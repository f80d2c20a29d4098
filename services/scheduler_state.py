"""The Training Scheduler's state machine: events in, instructions out; no clock, no I/O, no randomness.

`SchedulerState.handle` is the only way to change it. A handler checks everything before it changes anything, so a
refused event leaves no trace. What this does not prevent: a job whose producer dies stays `reserved` until the lease
on its policy runs out or its request is repeated; a holder that lost its lease may still compute, but its token is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from configs.errors import Conflict, JoyNexusError, LeaseLost, SpecError, refusal
from configs.spec import parse
from services.scheduler_admission import TURN_S
from services.scheduler_checks import check_plain, checked_lease, checked_metadata, checked_reason, digest
from services.scheduler_events import (
    AwaitAdmission,
    ClosePolicy,
    Complete,
    Drop,
    DropIfStale,
    Event,
    Fail,
    Forget,
    KeepPolicy,
    Lease,
    LeasedGroup,
    Mark,
    Outcome,
    Prune,
    RegisterPolicy,
    Release,
    Renew,
    Reserve,
    Tick,
    Wake,
    Write,
)
from services.scheduler_invariants import validate
from services.scheduler_moves import JobTable
from services.scheduler_queues import Lane
from services.scheduler_records import (
    COMPLETED,
    DROPPED,
    FAILED,
    HELD,
    JOB_ID_PREFIX,
    LEASED,
    POLICY_STALE,
    READY,
    STAGES,
    Job,
    Policy,
    PolicySpec,
    is_stale,
    staleness,
)


class SchedulerState(JobTable):
    """The table of jobs with the events that change it."""

    def __init__(self, max_active_rollouts: int, *, validating: bool = False) -> None:
        """An empty state.

        Args:
            max_active_rollouts: RL jobs in `reserved` at one time, over all tenants.
            validating: assert all invariants after every event (slow; for tests).
        """
        super().__init__(max_active_rollouts)
        self._validating = validating

    def handle(self, event: Event) -> Outcome:
        """Let `event` happen.

        Returns:
            The reply (plain types) or the error, and what is to be done. A refused event has an error, see `Outcome`.
        """
        self.now = max(self.now, event.now)
        self._run_out()
        reply, error = None, None
        try:
            check_plain(event)
            reply = _HANDLERS[type(event)](self, event)
        except JoyNexusError as refused:
            error = refused
        if self._validating:
            self.validate()
        # Emptied here and not at the start: after an exception of another kind the next event hands over the rest.
        instructions, self._out = tuple(self._out), []
        return Outcome(reply, error, instructions)

    def validate(self) -> None:
        """Assert all invariants, by brute force over all jobs."""
        validate(self)

    def overslept(self, now: float) -> None:
        """Nobody could be heard until `now` (the machine slept): what is held is held for its whole length again."""
        self.now = max(self.now, now)
        self.renew_all()

    def next_deadline(self) -> float | None:
        """When the next `Tick` has something to do, at the earliest."""
        lapse = self.admission.next_lapse()
        expiries = [heap[0][0] for heap in (self._expiries, self._policy_expiries) if heap]
        return min(expiries if lapse is None else [lapse, *expiries], default=None)

    # Handlers, in the order of a job's life.

    def _tick(self, _event: Tick) -> None:
        """`handle` let run out what had to."""

    def _register(self, event: RegisterPolicy) -> None:
        spec = parse(PolicySpec, event.policy, where="policy")
        if event.lease_s is not None:
            checked_lease(event.lease_s)
        if (event.lease_s is None) != (event.holder is None):
            raise SpecError(refusal("lease_s", event.lease_s, "seconds with a holder, none without", "send both"))
        former = self.policies.get(spec.policy_key)
        if former is not None and former.closed is None:
            if former.holder not in (None, event.holder):
                raise Conflict(
                    refusal(
                        f"policy {spec.policy_key}",
                        f"flow run {event.holder}",
                        f"flow run {former.holder}, whose workload runs",
                        "wait for its end or cancel it",
                    )
                )
            # Of what may be trained together an older journal knows nothing; it changes no bound.
            given, known = (s.model_dump(exclude={"base_model", "job_bytes"}) for s in (spec, former.spec))
            if given == known:
                if former.holder != event.holder or former.spec != spec:  # nobody held it: now this flow run does
                    former.holder, former.lease_s, former.spec = event.holder, event.lease_s, spec
                    self._out.append(Write("policy", former.key, former.body()))
                self._renew_policy(former)
                return
            field = next(name for name in given if given[name] != known[name])
            raise Conflict(
                refusal(f"policy {spec.policy_key}.{field}", given[field], f"{known[field]!r}", "close it first")
            )
        generation = former.generation + 1 if former else 0
        policy = Policy(spec, generation, holder=event.holder, lease_s=event.lease_s)
        policy.last_admitted_seq = former.last_admitted_seq if former else 0
        self._set_policy(policy)
        self._renew_policy(policy)
        self._out += [Write("policy", policy.key, policy.body()), Wake("admission"), Wake(f"policy:{policy.key}")]

    def _close(self, event: ClosePolicy) -> list[str]:
        policy = self.policy(event.policy_key)
        checked_reason(event.reason)
        if event.holder is not None and policy.holder != event.holder:
            return []  # it was closed before, and the key is another workload's now
        return self._close_policy(policy, event.reason)

    def _keep(self, event: KeepPolicy) -> None:
        policy = self.policy(event.policy_key)
        if policy.closed is not None or policy.holder != event.holder:
            held = f"closed ({policy.closed})" if policy.closed is not None else f"held by {policy.holder}"
            raise LeaseLost(refusal(f"policy {policy.key} holder", event.holder, held, "end the workload"))
        self._renew_policy(policy)  # not journalled: after a restart it has its whole length again

    def _reserve(self, event: Reserve) -> dict[str, Any]:
        policy = self.policy(event.policy_key)
        if policy.holder is not None and policy.closed is None and event.flow_run_id != policy.holder:
            raise LeaseLost(
                refusal(f"policy {policy.key} flow_run_id", event.flow_run_id, policy.holder, "end the workload")
            )
        metadata = checked_metadata(event.metadata)
        # Who asks (flow_run_id) is not part of what is asked: a flow that was restarted repeats its request.
        contents = {**vars(event), "metadata": metadata, "now": None, "flow_run_id": None}
        contents_digest = digest(contents) if event.request_id is not None else None
        if event.request_id is not None and event.request_id in self.requests:
            job = self.jobs[self.requests[event.request_id]]
            if job.request_digest != contents_digest:
                raise Conflict(
                    refusal("request_id", event.request_id, f"the contents that made {job.job_id}", "use a new id")
                )
            return {"job": job.describe(), "refused": None, "rule": None, "final": False}
        if event.sample_count < 1:
            raise SpecError(refusal("sample_count", event.sample_count, "1 or more", "correct it"))
        refused = self.admission.refusal(policy)
        if refused is not None:
            if refused.rule in ("all_rollouts", "turn"):
                self.admission.wait(policy, self.counters["created_seq"], self.now + TURN_S)
            return {"job": None, "refused": refused.message, "rule": refused.rule, "final": refused.final}
        self.admission.waiting.pop(policy.key, None)
        job = self._create(policy, event, metadata, contents_digest)
        return {"job": job.describe(), "refused": None, "rule": None, "final": False}

    def _create(self, policy: Policy, event: Reserve, metadata: dict[str, Any], contents_digest: str | None) -> Job:
        spec, created_seq = policy.spec, self._next("created_seq")
        job_id = f"{JOB_ID_PREFIX}{created_seq:08d}"
        job = Job(
            job_id=job_id,
            created_seq=created_seq,
            policy_key=policy.key,
            policy_generation=policy.generation,
            tenant_id=spec.tenant_id,
            task_type=spec.task_type,
            domain=spec.domain,
            partition_id=f"{job_id}.{spec.domain}.{spec.tenant_id}.{spec.task_type}",
            sample_count=event.sample_count,
            priority=spec.priority,
            behavior_policy_version=event.behavior_policy_version,
            max_policy_staleness=event.max_policy_staleness,
            producer_role=event.producer_role,
            consumer_role=event.consumer_role,
            metadata=metadata,
            flow_run_id=event.flow_run_id,
            request_id=event.request_id,
            request_digest=contents_digest,
            created_at=self.now,
            updated_at=self.now,
        )
        self._add(job)
        policy.last_admitted_seq = created_seq
        self._note(job, None, None, metadata)
        if job.task_type == "rl":
            self._out.append(Wake("admission"))  # one of several free places went: the others' turn may have come
        return job

    def _await(self, event: AwaitAdmission) -> bool:
        policy = self.policy(event.policy_key)
        refused = self.admission.refusal(policy)
        if policy.spec.task_type == "rl":
            if refused is None:
                # It may reserve now and nobody overtakes it, for as long as it takes to come.
                self.admission.waiting.pop(policy.key, None)
                self.admission.wait(policy, self.counters["created_seq"], self.now + TURN_S)
            elif refused.rule in ("all_rollouts", "turn"):
                self.admission.wait(policy, self.counters["created_seq"], event.until + TURN_S)
        return refused is None or refused.final

    def _mark(self, event: Mark) -> dict[str, Any]:
        job = self.job(event.job_id)
        metadata = checked_metadata(event.metadata)
        if self._repeated(job, event.state, event.lease_token, metadata):
            return job.describe()
        self._check_hands(job, event.lease_token)
        self._move(job, event.state, "mark", token=event.lease_token, metadata=metadata)
        return job.describe()

    def _lease(self, event: Lease) -> dict[str, Any]:
        if STAGES.get(event.state, LEASED if event.state == READY else None) != event.leased_state:
            possible = ", ".join(f"{a}→{b}" for a, b in {**STAGES, READY: LEASED}.items())
            raise SpecError(
                refusal("state→leased_state", f"{event.state}→{event.leased_state}", possible, "choose one")
            )
        checked_lease(event.lease_s)
        if event.request_id is not None and event.request_id in self.lease_requests:
            job = self.jobs[self.lease_requests[event.request_id]]
            led = event.group is not None and job.job_id in event.group.job_ids  # company of itself
            if led or (job.state, job.lease_holder) != (event.leased_state, event.holder):
                raise Conflict(
                    refusal(
                        "request_id",
                        event.request_id,
                        f"the lease of {job.job_id} by {job.lease_holder}",
                        "use a new id",
                    )
                )
            return {"job": job.describe()}
        found = self._first(event)
        if found is None or (event.group is not None and not self._joins(self.jobs[found], event.group, event.holder)):
            return {"job": None}
        job = self.jobs[found]
        job.attempts += 1
        job.lease_token = self._next("lease_token")
        job.lease_holder = event.holder
        if event.request_id is not None:
            job.lease_request_id = event.request_id
            self.lease_requests[event.request_id] = job.job_id
        self._hold(job, event.lease_s)
        self._move(job, event.leased_state, "lease")
        return {"job": job.describe()}

    def _first(self, event: Lease) -> str | None:
        lanes: list[Lane] = [(event.consumer_role, domain) for domain in event.domains]
        if event.state == READY:
            heads = [head for head in map(self.ready.first, lanes) if head is not None]
            return min(heads)[2] if heads else None
        ids = [found for found in (self.stages.first(event.state, lane) for lane in lanes) if found is not None]
        return min(ids, key=lambda job_id: self.jobs[job_id].stage_key, default=None)

    def _joins(self, job: Job, group: LeasedGroup, holder: str) -> bool:
        """Whether the next job may be trained together with those that are held.

        Only the next one is looked at: a group overtakes nobody. A policy may be open with its jobs all in training,
        so what would wait is not what is ready but what may become so.

        Raises:
            LeaseLost: if a job of the group is not the holder's.
        """
        held = [self.job(job_id) for job_id in group.job_ids]
        for one in held:
            if (one.state, one.lease_holder) != (LEASED, holder):
                state = f"{one.state}, held by {one.lease_holder}"
                raise LeaseLost(refusal(f"{one.job_id} holder", holder, state, "train the others without it"))
        if self.open_rl and not group.beside_rl:
            return False
        members = [*held, job]
        specs = [self.policies[member.policy_key].spec for member in members]
        one_base = len({spec.base_model for spec in specs}) == 1 and specs[0].base_model is not None
        supervised = all(member.task_type == "sft" for member in members)
        return one_base and supervised and sum(spec.job_bytes for spec in specs) <= group.max_bytes

    def _renew(self, event: Renew) -> dict[str, Any]:
        job = self.job(event.job_id)
        checked_lease(event.lease_s)
        self._check_held(job, event.lease_token)
        # Not journalled: after a restart every lease that was held gets its whole length again.
        self._hold(job, event.lease_s)
        return job.describe()

    def _release(self, event: Release) -> dict[str, Any]:
        job = self.job(event.job_id)
        self._check_held(job, event.lease_token)
        self._move(job, HELD[job.state], "return", reason=event.reason)
        return job.describe()

    def _complete(self, event: Complete) -> dict[str, Any]:
        job = self.job(event.job_id)
        metadata = checked_metadata(event.metadata)
        if self._repeated(job, COMPLETED, event.lease_token, metadata):
            return job.describe()
        self._check_held(job, event.lease_token)
        self._move(job, COMPLETED, "complete", token=event.lease_token, metadata=metadata)
        return job.describe()

    def _fail(self, event: Fail) -> dict[str, Any]:
        job = self.job(event.job_id)
        checked_reason(event.reason)
        if self._repeated(job, FAILED, event.lease_token, {}):
            return job.describe()
        self._check_hands(job, event.lease_token)
        self._move(job, FAILED, "fail", token=event.lease_token, reason=event.reason)
        return job.describe()

    def _drop(self, event: Drop) -> dict[str, Any]:
        job = self.job(event.job_id)
        checked_reason(event.reason)
        if self._repeated(job, DROPPED, event.lease_token, {}):
            return job.describe()
        if event.lease_token is not None:
            self._check_held(job, event.lease_token)
        self._move(job, DROPPED, "drop", token=event.lease_token, reason=event.reason)
        return job.describe()

    def _drop_if_stale(self, event: DropIfStale) -> dict[str, Any]:
        job = self.job(event.job_id)
        if not self._repeated(job, DROPPED, event.lease_token, {}):
            self._check_held(job, event.lease_token)
            if is_stale(vars(job), event.actor_version):
                metadata = {
                    "actor_version": event.actor_version,
                    "staleness": staleness(vars(job), event.actor_version),
                }
                reason = (
                    f"{POLICY_STALE}: actor {event.actor_version} − behaviour {job.behavior_policy_version} > "
                    f"{job.max_policy_staleness}"
                )
                self._move(job, DROPPED, "drop", token=event.lease_token, reason=reason, metadata=metadata)
        return {"stale": job.state == DROPPED, "job": job.describe()}

    def _prune(self, event: Prune) -> int:
        pruned = 0
        touched: dict[str, Policy] = {}
        while self._ended and cast(float, self.jobs[self._ended[0]].ended_at) < event.before:
            job = self.jobs.pop(self._ended.popleft())
            pruned += 1
            self.counts[job.state] -= 1
            self.tenant_counts[job.tenant_id][job.state] -= 1
            self.requests.pop(job.request_id or "", None)
            policy = self.policies[job.policy_key]
            if policy.generation == job.policy_generation:  # its counts are those of its own generation
                policy.pruned[job.state] = policy.pruned.get(job.state, 0) + 1
                policy.pruned_stale += job.stale
                touched[policy.key] = policy
            self._out.append(Forget(job.job_id, job.created_seq))
        self._out += [Write("policy", key, policy.body()) for key, policy in touched.items()]
        return pruned


_HANDLERS: dict[type[Event], Callable[[SchedulerState, Any], Any]] = {
    Tick: SchedulerState._tick,
    RegisterPolicy: SchedulerState._register,
    KeepPolicy: SchedulerState._keep,
    ClosePolicy: SchedulerState._close,
    Reserve: SchedulerState._reserve,
    AwaitAdmission: SchedulerState._await,
    Mark: SchedulerState._mark,
    Lease: SchedulerState._lease,
    Renew: SchedulerState._renew,
    Release: SchedulerState._release,
    Complete: SchedulerState._complete,
    Fail: SchedulerState._fail,
    Drop: SchedulerState._drop,
    DropIfStale: SchedulerState._drop_if_stale,
    Prune: SchedulerState._prune,
}
