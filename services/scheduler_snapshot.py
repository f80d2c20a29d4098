"""What a person asks the Training Scheduler: what is there and why nothing runs, in the words of the rules."""

from __future__ import annotations

from typing import Any

from services.scheduler_moves import JobTable
from services.scheduler_records import HELD, READY, TERMINAL, Policy


def idle_report(policy: Policy) -> dict[str, Any]:
    """Counts of a policy's ends (of the dropped ones, too, how many were stale), and whether anything may still come.

    `idle`: nothing unfinished is left, and the completion target is met or the policy is closed.
    """
    completed, target = policy.counts["completed"], policy.spec.completion_target
    done = policy.closed is not None or (target is not None and completed >= target)
    return {
        **{state: policy.counts[state] for state in TERMINAL},
        "stale": policy.stale,
        "open": len(policy.open),
        "closed": policy.closed,
        "holder": policy.holder,
        "idle": done and not policy.open,
    }


def snapshot(table: JobTable) -> dict[str, Any]:
    """Totals, held leases and, a policy, its counts, bounds and the reasons why it does not move on."""
    unfinished = [table.jobs[job_id] for policy in table.policies.values() for job_id in policy.open]
    return {
        "now": table.now,
        "totals": dict(table.counts),
        "active_rollouts": table.admission.active_rollouts,
        "max_active_rollouts": table.admission.max_active_rollouts,
        "leases": [
            {
                "job_id": job.job_id,
                "state": job.state,
                "holder": job.lease_holder,
                "expires_in_s": (job.lease_expires_at or table.now) - table.now,
                "attempts": job.attempts,
            }
            for job in unfinished
            if job.state in HELD
        ],
        "policies": {key: _policy(table, policy) for key, policy in table.policies.items()},
    }


def _policy(table: JobTable, policy: Policy) -> dict[str, Any]:
    refused = table.admission.refusal(policy)
    return {
        **policy.spec.model_dump(mode="json"),
        **idle_report(policy),
        "counts": dict(policy.counts),
        "waits_for_admission": policy.key in table.admission.waiting,
        "admission": None if refused is None else refused.message,
        "training": _training(table, policy),
    }


def _training(table: JobTable, policy: Policy) -> str | None:
    """Why its ready jobs are not trained, or None if none is ready."""
    ready = policy.counts[READY]
    if not ready:
        return None
    turn = table.ready.turns.get(policy.spec.tenant_id)
    if turn is not None and table.jobs[turn].state != READY:
        holder = table.jobs[turn].lease_holder
        return f"{ready} ready jobs wait for {turn}, which {holder} trains: one update a tenant at a time"
    first = table.jobs[next(iter(policy.open))]
    if policy.spec.in_order and first.state != READY:
        return f"{ready} ready jobs wait for the end of {first.job_id} ({first.state}): {policy.key} trains in order"
    return f"{ready} ready jobs wait for a trainer to lease them"
