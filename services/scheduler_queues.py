"""Orders in which waiting jobs are found: one queue a stage, one for training. All operations are O(log n).

Heaps with lazy removal: an entry is left where it lies and skipped when it comes up and no longer counts.
"""

from __future__ import annotations

import heapq

from services.scheduler_records import Job

Lane = tuple[str, str]  # (consumer_role, domain)


class StageQueue:
    """Jobs that wait for a preprocessing stage, in order of `Job.stage_key`."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, Lane]] = {}  # {job_id: (state, lane)}, all and only the waiting jobs
        self._heaps: dict[tuple[str, Lane], list[tuple[tuple[int, int], str]]] = {}

    def push(self, job: Job) -> None:
        """Add a job in the state in which it is."""
        where = (job.state, (job.consumer_role, job.domain))
        self._waiting[job.job_id] = where
        heapq.heappush(self._heaps.setdefault(where, []), (job.stage_key, job.job_id))

    def discard(self, job_id: str) -> None:
        """Remove a job, whichever state it waits in."""
        self._waiting.pop(job_id, None)

    def first(self, state: str, lane: Lane) -> str | None:
        """The job to take next, left where it is."""
        heap = self._heaps.get((state, lane), [])
        while heap and self._waiting.get(heap[0][1]) != (state, lane):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def any_in(self, state: str) -> bool:
        """Whether a job waits in `state`."""
        return any(self.first(*where) is not None for where in self._heaps if where[0] == state)

    def waiting(self) -> dict[str, str]:
        """{job_id: state} of all that wait."""
        return {job_id: state for job_id, (state, _) in self._waiting.items()}


Entry = tuple[tuple[int, int, int], str, str]  # (training_key, tenant_id, job_id)


class TrainingQueue:
    """Ready jobs in order of `Job.training_key`, one update a tenant at a time.

    A tenant whose job is in training has its *turn* taken: its other jobs wait until that one is terminal, so that
    its updates happen in the order in which they began, also when a lease expires and the job comes back.

    Two levels: a heap of jobs a tenant, and a heap of the tenants' heads. The second one advertises at most one
    entry a tenant; an entry that is not advertised any more is skipped.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Lane, Entry]] = {}  # {job_id: where}, all and only the ready jobs
        self._tenants: dict[tuple[Lane, str], list[Entry]] = {}
        self._heads: dict[Lane, list[Entry]] = {}
        self._listed: set[tuple[Lane, Entry]] = set()  # all and only the entries that lie in _heads, counting or not
        self._advertised: dict[tuple[Lane, str], Entry] = {}
        self._turns: dict[str, str] = {}  # {tenant_id: job_id whose training began and is not terminal}

    @property
    def turns(self) -> dict[str, str]:
        """{tenant_id: job_id} of the updates that began."""
        return self._turns

    def push(self, job: Job) -> bool:
        """Add a ready job; True if its tenant's head became another one."""
        lane = (job.consumer_role, job.domain)
        entry = (job.training_key, job.tenant_id, job.job_id)
        self._waiting[job.job_id] = (lane, entry)
        self._heads.setdefault(lane, [])  # known from now on, though a tenant whose turn is taken advertises nothing
        heapq.heappush(self._tenants.setdefault((lane, job.tenant_id), []), entry)
        return self._advertise(lane, job.tenant_id)

    def discard(self, job: Job) -> bool:
        """Remove a job that is not ready any more; True if its tenant's head became another one."""
        found = self._waiting.pop(job.job_id, None)
        return found is not None and self._advertise(found[0], job.tenant_id)

    def take_turn(self, job: Job) -> None:
        """The job's update begins: its tenant's other jobs wait for its end."""
        self._turns[job.tenant_id] = job.job_id
        for lane in self._heads:
            self._advertise(lane, job.tenant_id)

    def end_turn(self, job: Job) -> bool:
        """The job is terminal; True if another job of its tenant may be leased now."""
        if self._turns.get(job.tenant_id) != job.job_id:
            return False
        del self._turns[job.tenant_id]
        renewed = [self._advertise(lane, job.tenant_id) for lane in self._heads]  # all lanes, so no lazy any()
        return any(renewed)

    def first(self, lane: Lane) -> Entry | None:
        """The entry to take next, left where it is."""
        heads = self._heads.get(lane, [])
        while heads and self._advertised.get((lane, heads[0][1])) != heads[0]:
            self._listed.discard((lane, heapq.heappop(heads)))
        return heads[0] if heads else None

    def waiting(self) -> set[str]:
        """Ids of all ready jobs."""
        return set(self._waiting)

    def _head(self, lane: Lane, tenant_id: str) -> Entry | None:
        turn = self._turns.get(tenant_id)
        if turn is not None:  # only the job that came back may be taken, whatever overtook it meanwhile
            found = self._waiting.get(turn)
            return found[1] if found is not None and found[0] == lane else None
        heap = self._tenants.get((lane, tenant_id), [])
        while heap and heap[0][2] not in self._waiting:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _advertise(self, lane: Lane, tenant_id: str) -> bool:
        """Make the tenant's present head the one that counts; True if there is a new one."""
        head = self._head(lane, tenant_id)
        if head == self._advertised.get((lane, tenant_id)):
            return False
        if head is None:
            del self._advertised[lane, tenant_id]
            return False
        self._advertised[lane, tenant_id] = head
        # A head that was outranked still lies in the heap and counts again: a second entry would stay for ever.
        if (lane, head) not in self._listed:
            self._listed.add((lane, head))
            heapq.heappush(self._heads[lane], head)
        return True
