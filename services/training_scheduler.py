"""The Training Scheduler as a resident Dask actor: the state machine, its journal, its clock and who waits.

All methods are coroutines on the worker's event loop, take and give plain types, and answer only after what they saw
and changed is on disk. Events are applied one after another between two awaits, so no lock is needed. A call may be
sent twice: reservations and leases by `request_id`, the others by the job and its lease token.

What can still go wrong: after a failed write every call raises `ServiceUnavailable`, until a new actor is made from
the same journal; a newer actor on the same journal does the same to an older one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec

from configs import errors
from configs.errors import JoyNexusError, SpecError, refusal
from services.actor_reply import on_its_way
from services.scheduler_events import (
    AwaitAdmission,
    ClosePolicy,
    Complete,
    Drop,
    DropIfStale,
    Event,
    Fail,
    KeepPolicy,
    Lease,
    LeasedGroup,
    Mark,
    Prune,
    RegisterPolicy,
    Release,
    Renew,
    Reserve,
)
from services.scheduler_records import LEASED, READY, STAGES, STATES, TERMINAL
from services.scheduler_shell import SchedulerShell
from services.scheduler_snapshot import idle_report, snapshot

P = ParamSpec("P")
_VERBS: dict[str, Callable[..., Event]] = {}  # {name: what makes its event}, filled by `_verb`


def _verb(
    make: Callable[Concatenate[TrainingScheduler, P], Event],
) -> Callable[Concatenate[TrainingScheduler, P], Coroutine[Any, Any, Any]]:
    """A method that makes an event becomes a coroutine that lets it happen, and a verb that `apply` knows."""
    _VERBS[make.__name__] = make

    @functools.wraps(make)
    async def method(self: TrainingScheduler, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await self._do(make(self, *args, **kwargs))

    return method


class TrainingScheduler(SchedulerShell):
    """Decides what is trained next: `TrainingScheduler(journal_path, max_active_rollouts)`.

    Job descriptors are dictionaries with the fields of `scheduler_records.Job`.
    """

    async def ping(self) -> str:
        """Answer "ok": the event loop is alive, and the journal can be written.

        Raises:
            ServiceUnavailable: after a failed write; the platform then makes a new actor from the same journal.
        """
        self._commits.check()
        return "ok"

    # Policies.

    @_verb
    def register_policy(self, policy: dict[str, Any], holder: str | None = None, lease_s: float | None = None) -> Event:
        """Declare a policy (fields of `PolicySpec`), closed when `holder` does not `keep_policy` within `lease_s`.

        The same again renews the lease; without a holder it stays open until it is closed.

        Raises:
            Conflict: if it is active with other contents or another holder. A closed one starts anew, its counts at 0.
        """
        return RegisterPolicy(self._now(), policy, holder, lease_s)

    @_verb
    def keep_policy(self, policy_key: str, holder: str) -> Event:
        """The policy's lease lasts its whole length from now.

        Raises:
            LeaseLost: if it is closed or another's.
        """
        return KeepPolicy(self._now(), policy_key, holder)

    @_verb
    def close_policy(self, policy_key: str, reason: str, holder: str | None = None) -> Event:
        """Drop all its unfinished jobs ("cancelled: <reason>") and admit none any more; returns the dropped job ids.

        With a `holder` only what that flow run holds is closed, not what another one registered under the key since.
        """
        return ClosePolicy(self._now(), policy_key, reason, holder)

    async def wait_policy_idle(self, policy_key: str, timeout_s: float) -> dict[str, Any]:
        """Wait until nothing unfinished is left and the target is met or the policy is closed; see `idle_report`.

        After `timeout_s` it returns too, with `idle` False. The report names the holder.
        """
        policy = self._state.policy(policy_key)
        await self._until(
            lambda: idle_report(self._state.policy(policy_key))["idle"], [f"policy:{policy.key}"], timeout_s
        )
        return await self._read(lambda: idle_report(self._state.policy(policy_key)))

    # Producers.

    @_verb
    def reserve(
        self,
        request_id: str | None,
        policy_key: str,
        sample_count: int,
        behavior_policy_version: int | None,
        max_policy_staleness: int | None,
        metadata: dict[str, Any],
        producer_role: str = "rollout",
        consumer_role: str = "actor",
        flow_run_id: str | None = None,
    ) -> Event:
        """Ask for a job to fill.

        Returns:
            {"job": descriptor or None, "refused": reason or None, "rule": which rule refused, "final": whether no
            later try can be admitted}. The same `request_id` gives the same job; None is never the same.

        Raises:
            Conflict: if the request_id made a job with other contents (`flow_run_id` does not count).
        """
        return Reserve(
            self._now(),
            request_id,
            policy_key,
            sample_count,
            behavior_policy_version,
            max_policy_staleness,
            metadata,
            producer_role,
            consumer_role,
            flow_run_id,
        )

    async def wait_admission(self, policy_key: str, timeout_s: float) -> bool:
        """Wait until `reserve` is worth a call: it would be admitted, or will never be.

        RL policies that wait for a rollout keep a place in the round meanwhile, and their turn for 5 s after True.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = self._now()
            left = deadline - time.monotonic()
            if await self._do(AwaitAdmission(now, policy_key, now + max(left, 0.0))):
                return True
            if left <= 0 or not await self._wait(["admission"], left):
                return False

    async def wait_ended(self, job_id: str, timeout_s: float) -> dict[str, Any]:
        """Wait until the job is terminal; its descriptor then, or as it is after `timeout_s`."""
        job = self._state.job(job_id)
        await self._until(lambda: job.state in TERMINAL, [f"policy:{job.policy_key}"], timeout_s)
        return await self._read(job.describe)

    @_verb
    def mark(
        self, job_id: str, state: str, lease_token: int | None = None, metadata: dict[str, Any] | None = None
    ) -> Event:
        """The caller's part is done and the job is in `state` now; `metadata` is added to the job's.

        Raises:
            Conflict: if the job's state does not lead there.
            LeaseLost: if the job is held and the token is not its holder's.
        """
        return Mark(self._now(), job_id, state, lease_token, metadata)

    # Stage workers and trainers.

    @_verb
    def lease_stage(
        self,
        state: str,
        leased_state: str,
        consumer_role: str,
        domain: str,
        holder: str,
        lease_s: float,
        request_id: str | None = None,
    ) -> Event:
        """Take the first job that waits in `state`: {"job": descriptor with `lease_token`} or {"job": None}.

        Without renewal the lease expires after `lease_s` and the job waits again. The same `request_id` gives the
        job that is still held under it.
        """
        return Lease(self._now(), state, leased_state, consumer_role, (domain,), holder, lease_s, request_id)

    @_verb
    def lease_next(
        self,
        consumer_role: str,
        domains: Sequence[str],
        holder: str,
        lease_s: float,
        request_id: str | None = None,
    ) -> Event:
        """Take the ready job to train next: as `lease_stage`. One update a tenant runs at a time."""
        return Lease(self._now(), READY, LEASED, consumer_role, _checked_domains(domains), holder, lease_s, request_id)

    @_verb
    def lease_beside(
        self,
        job_ids: Sequence[str],
        consumer_role: str,
        domains: Sequence[str],
        holder: str,
        lease_s: float,
        max_bytes: int,
        beside_rl: bool = False,
        request_id: str | None = None,
    ) -> Event:
        """Take the next ready job too, if it may be trained together with `job_ids`, which the holder has leased.

        It may if all are supervised jobs of policies of one base model, of about `max_bytes` together, and no RL policy
        is open, whose jobs would wait for the whole group (unless `beside_rl`). Nobody is overtaken: if the next job
        does not fit, the answer is {"job": None}. The same `request_id` gives the job that is still held under it.

        Raises:
            LeaseLost: if one of `job_ids` is not the holder's any more.
            Conflict: if the request_id leased one of `job_ids`, or a job to another holder.
        """
        group = LeasedGroup(tuple(job_ids), max_bytes, beside_rl)
        wanted = _checked_domains(domains)
        return Lease(self._now(), READY, LEASED, consumer_role, wanted, holder, lease_s, request_id, group)

    @_verb
    def renew(self, job_id: str, lease_token: int, lease_s: float) -> Event:
        """The lease lasts `lease_s` from now.

        Raises:
            LeaseLost: if the caller holds it no more (expired, cancelled); stop and discard the result.
        """
        return Renew(self._now(), job_id, lease_token, lease_s)

    @_verb
    def release(self, job_id: str, lease_token: int, reason: str) -> Event:
        """Give the job back unfinished; it keeps its place in the order."""
        return Release(self._now(), job_id, lease_token, reason)

    @_verb
    def complete(self, job_id: str, lease_token: int, metadata: dict[str, Any]) -> Event:
        """The job was trained.

        Raises:
            LeaseLost: if the caller holds it no more; discard the result.
        """
        return Complete(self._now(), job_id, lease_token, metadata)

    @_verb
    def fail(self, job_id: str, reason: str, lease_token: int | None = None) -> Event:
        """The job's producer or holder hit an exception; a held job takes this from its holder alone."""
        return Fail(self._now(), job_id, reason, lease_token)

    @_verb
    def drop(self, job_id: str, reason: str, lease_token: int | None = None) -> Event:
        """The job is stale or cancelled. Without a token this takes a held job away from its holder."""
        return Drop(self._now(), job_id, reason, lease_token)

    @_verb
    def drop_if_stale(self, job_id: str, lease_token: int, actor_version: int) -> Event:
        """Drop the held job if actor − behaviour version > its bound: {"stale": bool, "job": descriptor}."""
        return DropIfStale(self._now(), job_id, lease_token, actor_version)

    async def wait_for_ready(self, consumer_role: str, domains: Sequence[str], timeout_s: float) -> bool:
        """Wait until `lease_next` would find a job."""
        wanted = _checked_domains(domains)
        found = await self._until(lambda: self._state.may_lease(consumer_role, wanted), [READY], timeout_s)
        return await self._read(lambda: found)

    async def wait_for_state(self, state: str, timeout_s: float) -> bool:
        """Wait until a job may be leased for a stage (`needs_actor_forward`, `needs_advantages`)."""
        if state not in STAGES:
            raise SpecError(refusal("state", state, ", ".join(STAGES), "choose one (wait_for_ready for ready jobs)"))
        found = await self._until(lambda: self._state.stages.any_in(state), [state], timeout_s)
        return await self._read(lambda: found)

    async def apply(self, commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Several verbs in one call and one commit, in order; each on its own, one's error does not stop the next.

        Args:
            commands: each {"verb": name, **arguments of the method of that name}.

        Returns:
            A command: {"reply": as the method's, "error": None} or {"reply": None, "error": {"kind", "message"}};
            `raise_error` turns the latter into the exception.
        """
        results: list[dict[str, Any]] = []
        try:
            for command in commands:
                try:
                    results.append({"reply": self._feed(self._event(command)), "error": None})
                except JoyNexusError as error:
                    results.append({"reply": None, "error": {"kind": type(error).__name__, "message": str(error)}})
        finally:
            await self._commits.durable()
        return on_its_way(results)

    # Whoever looks.

    async def job(self, job_id: str) -> dict[str, Any]:
        """One descriptor."""
        return await self._read(lambda: self._state.job(job_id).describe())

    async def jobs(
        self, policy_key: str | None = None, states: Sequence[str] | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Descriptors in order of creation, of one policy and of these states; the newest `limit` of them."""
        unknown = set(states or ()) - set(STATES)
        if unknown:
            raise SpecError(refusal("states", sorted(unknown), ", ".join(STATES), "choose of these"))
        return await self._read(lambda: self._select(policy_key, states, limit))

    async def unfinished(self, job_ids: Sequence[str]) -> list[str]:
        """Those of `job_ids` that are known and not ended."""

        def look() -> list[str]:
            found = ((job_id, self._state.jobs.get(job_id)) for job_id in job_ids)
            return [job_id for job_id, job in found if job is not None and job.state not in TERMINAL]

        return await self._read(look)

    async def counts(self) -> dict[str, int]:
        """{state: jobs}, terminal ones until they are pruned."""
        return await self._read(lambda: dict(self._state.counts))

    async def counts_by_tenant(self) -> dict[str, dict[str, int]]:
        """{tenant_id: {state: jobs}}."""
        return await self._read(lambda: {tenant: dict(found) for tenant, found in self._state.tenant_counts.items()})

    async def story(self, job_id: str) -> list[dict[str, Any]]:
        """All moves of a job, oldest first, as in `changes_since`."""
        created_seq = self._state.job(job_id).created_seq
        await self._commits.durable()
        return await asyncio.get_running_loop().run_in_executor(self._reads, self._journal.story, created_seq)

    async def changes_since(self, seq: int, limit: int, timeout_s: float) -> dict[str, Any]:
        """Moves of all jobs after `seq`, waiting for the first one: {"seq": to go on from, "changes": [...]}.

        A change: job_id, created_seq, policy_key, tenant_id, task_type, flow_run_id, seq, from, state, timestamp,
        reason, holder and the metadata that came with it.
        """
        if limit < 1:
            raise SpecError(refusal("limit", limit, "1 or more", "raise it"))
        await self._until(lambda: self._state.counters["change_seq"] > seq, ["changes"], timeout_s)
        await self._commits.durable()
        loop = asyncio.get_running_loop()
        changes = await loop.run_in_executor(self._reads, self._journal.changes, seq, limit)
        return {"seq": changes[-1]["seq"] if changes else seq, "changes": changes}

    async def snapshot(self) -> dict[str, Any]:
        """Totals, leases and, a policy, why nothing runs."""
        return await self._read(lambda: snapshot(self._state))

    @_verb
    def prune(self, older_than_s: float) -> Event:
        """Forget terminal jobs that ended longer ago, with their stories; returns how many."""
        return Prune(self._now(), self._now() - older_than_s)

    def _event(self, command: dict[str, Any]) -> Event:
        arguments = {key: value for key, value in command.items() if key != "verb"}
        verb = command.get("verb")
        if verb not in _VERBS:
            raise SpecError(refusal("verb", verb, ", ".join(_VERBS), "choose one"))
        try:
            return _VERBS[verb](self, **arguments)
        except TypeError as error:
            raise SpecError(refusal(f"{verb} arguments", sorted(arguments), str(error), "correct them")) from None

    def _select(self, policy_key: str | None, states: Sequence[str] | None, limit: int | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for job in reversed(self._state.jobs.values()):
            if limit is not None and len(found) >= limit:
                break
            if (policy_key is None or job.policy_key == policy_key) and (states is None or job.state in states):
                found.append(job.describe())
        return found[::-1]


def _checked_domains(domains: Sequence[str]) -> tuple[str, ...]:
    if isinstance(domains, str):  # its letters would be taken for domains
        raise SpecError(refusal("domains", domains, "a list of names", f"send [{domains!r}]"))
    return tuple(domains)


def raise_error(result: dict[str, Any]) -> Any:
    """The reply of one result of `TrainingScheduler.apply`.

    Raises:
        JoyNexusError: of the kind that the result names.
    """
    error = result["error"]
    if error is not None:
        raise getattr(errors, error["kind"])(error["message"])
    return result["reply"]
