"""What always holds in the Training Scheduler, asserted by brute force: every index equals what the jobs say."""

from __future__ import annotations

from collections import Counter

from services.scheduler_moves import JobTable
from services.scheduler_records import HELD, READY, RESERVED, STAGES, STATES, TERMINAL, Job


def validate(table: JobTable) -> None:
    """Assert all invariants of `table`; the message of a failed one names the job or policy."""
    _jobs(table)
    _indices(table)
    _order(table)
    _policies(table)


def _jobs(table: JobTable) -> None:
    for job in table.jobs.values():
        held = job.state in HELD
        given = (job.lease_token, job.lease_holder, job.lease_s, job.lease_expires_at)
        assert all(part is not None for part in given) if held else not any(part is not None for part in given), job
        assert not held or (job.lease_expires_at or 0) > table.now, f"lease outlived its time: {job}"
        assert (job.ended_at is not None) == (job.state in TERMINAL), job
        assert job.train_seq is None or job.ready_seq is not None, job
        assert job.state not in (RESERVED, *STAGES, *STAGES.values()) or job.ready_seq is None, job
        assert job.task_type == "rl" or job.state not in (*STAGES, *STAGES.values()), job
        assert job.reason or job.state not in ("failed", "dropped"), job


def _indices(table: JobTable) -> None:
    jobs = table.jobs.values()
    assert table.counts == {state: sum(job.state == state for job in jobs) for state in STATES}
    for tenant_id, counts in table.tenant_counts.items():
        found = Counter(job.state for job in jobs if job.tenant_id == tenant_id)
        assert counts == {state: found[state] for state in STATES}, tenant_id
    assert table.stages.waiting() == {
        job.job_id: job.state for job in jobs if job.state in STAGES and not table.held_back(job)
    }
    assert table.ready.waiting() == {job.job_id for job in jobs if job.state == READY and not table.held_back(job)}
    assert table.requests == {job.request_id: job.job_id for job in jobs if job.request_id is not None}
    assert table.lease_requests == {
        job.lease_request_id: job.job_id for job in jobs if job.lease_request_id is not None
    }
    timers = set(table._expiries)
    for job in jobs:
        assert job.lease_token is None or (job.lease_expires_at, job.job_id, job.lease_token) in timers, job
    ended = [table.jobs[job_id] for job_id in table._ended]
    assert {job.job_id for job in ended} == {job.job_id for job in jobs if job.state in TERMINAL}
    assert [job.ended_at for job in ended] == sorted(job.ended_at or 0 for job in ended)
    tokens = [job.lease_token for job in jobs if job.lease_token is not None]
    assert len(tokens) == len(set(tokens)), "one token in two jobs"
    assert max(tokens, default=0) <= table.counters["lease_token"]


def _order(table: JobTable) -> None:
    began: dict[str, list[Job]] = {}
    for job in table.jobs.values():
        if job.train_seq is not None:
            began.setdefault(job.tenant_id, []).append(job)
    for tenant_id, jobs in began.items():
        seqs = [job.train_seq for job in jobs]
        assert len(seqs) == len(set(seqs)), f"{tenant_id}: one train_seq twice"
        assert max(seq or 0 for seq in seqs) <= table.train_seq[tenant_id], tenant_id
        running = [job for job in jobs if job.state not in TERMINAL]
        assert len(running) <= 1, f"{tenant_id}: two updates at one time"
        assert table.ready.turns.get(tenant_id) == (running[0].job_id if running else None), tenant_id
        assert not running or all((job.train_seq or 0) <= (running[0].train_seq or 0) for job in jobs), tenant_id
    assert set(table.ready.turns) <= set(began)
    for lane in {(job.consumer_role, job.domain) for job in table.jobs.values()}:
        entry = table.ready.first(lane)
        assert (entry[2] if entry else None) == first_by_brute_force(table, lane), lane


def first_by_brute_force(table: JobTable, lane: tuple[str, str]) -> str | None:
    """The ready job to train next, found by looking at all of them."""
    ready = [job for job in table.jobs.values() if job.state == READY and (job.consumer_role, job.domain) == lane]
    ready = [job for job in ready if not table.held_back(job)]
    free = [job for job in ready if table.ready.turns.get(job.tenant_id, job.job_id) == job.job_id]
    return min(free, key=lambda job: job.training_key).job_id if free else None


def _policies(table: JobTable) -> None:
    rollouts = [job for job in table.jobs.values() if job.state == RESERVED and job.task_type == "rl"]
    assert table.admission.active_rollouts == len(rollouts) <= table.admission.max_active_rollouts
    rl = {key for key, p in table.policies.items() if p.closed is None and p.spec.task_type == "rl"}
    assert table.open_rl == rl
    for key, policy in table.policies.items():
        mine = [job for job in table.jobs.values() if job.policy_key == key]
        now = [job for job in mine if job.policy_generation == policy.generation]
        found = Counter(job.state for job in now) + Counter(policy.pruned)
        assert policy.counts == {state: found[state] for state in STATES}, key
        assert policy.stale == policy.pruned_stale + sum(job.stale for job in now), key
        assert policy.stale <= policy.counts["dropped"], key
        unfinished = [job.job_id for job in mine if job.state not in TERMINAL]
        assert list(policy.open) == unfinished, key
        assert len(unfinished) <= policy.spec.max_in_flight, key
        assert policy.closed is None or not unfinished, key
        leased = policy.closed is None and policy.lease_s is not None
        assert (policy.lease_expires_at is not None) == leased, key
        if policy.lease_expires_at is not None:
            assert policy.lease_expires_at > table.now, f"{key}: its lease outlived its time"
            assert (policy.lease_expires_at, key, policy.generation) in table._policy_expiries, key
        target, own_rollouts = policy.spec.completion_target, policy.spec.max_active_rollouts
        assert target is None or policy.counts["completed"] + len(unfinished) <= target, key
        assert own_rollouts is None or policy.spec.task_type != "rl" or policy.counts[RESERVED] <= own_rollouts, key
    for key in table.admission.waiting:
        assert table.policies[key].spec.task_type == "rl", key
        assert table.policies[key].closed is None, key
