"""What goes into the Training Scheduler's state machine and what comes out.

Events carry their time (`now`, seconds since the epoch), so the machine needs no clock. Instructions say what the
caller is to do: write something down, or wake who waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from configs.errors import JoyNexusError


@dataclass(frozen=True)
class Event:
    """Something that happened at `now`. Time never runs backwards: an earlier `now` counts as the latest one seen."""

    now: float


@dataclass(frozen=True)
class Tick(Event):
    """Time passed; leases and places that ran out end."""


@dataclass(frozen=True)
class RegisterPolicy(Event):
    """A producer declares a policy, held by `holder` (its flow run; None: by nobody). The same again renews it."""

    policy: dict[str, Any]
    holder: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True)
class KeepPolicy(Event):
    """The policy's producer is still there."""

    policy_key: str
    holder: str


@dataclass(frozen=True)
class ClosePolicy(Event):
    """A policy's work is over or cancelled; its unfinished jobs are dropped."""

    policy_key: str
    reason: str
    holder: str | None = None  # a flow run closes what it holds itself; None: a person's or the platform's word


@dataclass(frozen=True)
class Reserve(Event):
    """A producer wants to make a job. With a `request_id` a repeated reservation gives the first one's job."""

    request_id: str | None
    policy_key: str
    sample_count: int
    behavior_policy_version: int | None
    max_policy_staleness: int | None
    metadata: dict[str, Any]
    producer_role: str
    consumer_role: str
    flow_run_id: str | None


@dataclass(frozen=True)
class AwaitAdmission(Event):
    """A producer will wait until `until` for a reservation that is admitted."""

    policy_key: str
    until: float


@dataclass(frozen=True)
class Mark(Event):
    """The job's producer or stage worker finished its part: the job is in `state` now."""

    job_id: str
    state: str
    lease_token: int | None
    metadata: dict[str, Any] | None


@dataclass(frozen=True)
class LeasedGroup:
    """Jobs that a worker holds already and would train together with one more.

    Attributes:
        job_ids: the first one was leased alone.
        max_bytes: of all their `job_bytes` together, with the one more.
        beside_rl: also while an RL policy is open, whose jobs would then wait for a whole group.
    """

    job_ids: tuple[str, ...]
    max_bytes: int
    beside_rl: bool


@dataclass(frozen=True)
class Lease(Event):
    """A worker takes the first job in `state`. With a `request_id` a repeated call gives the job it still holds."""

    state: str
    leased_state: str
    consumer_role: str
    domains: tuple[str, ...]
    holder: str
    lease_s: float
    request_id: str | None
    group: LeasedGroup | None = None  # only a job that may be trained together with these


@dataclass(frozen=True)
class Renew(Event):
    """The holder still works."""

    job_id: str
    lease_token: int
    lease_s: float


@dataclass(frozen=True)
class Release(Event):
    """The holder gives the job back, unfinished."""

    job_id: str
    lease_token: int
    reason: str


@dataclass(frozen=True)
class Complete(Event):
    """The holder trained the job."""

    job_id: str
    lease_token: int
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Fail(Event):
    """The job's producer or holder hit an exception."""

    job_id: str
    reason: str
    lease_token: int | None


@dataclass(frozen=True)
class Drop(Event):
    """The job is stale or cancelled. Without a token it is a person's or the platform's word, and takes leased jobs."""

    job_id: str
    reason: str
    lease_token: int | None


@dataclass(frozen=True)
class DropIfStale(Event):
    """The holder compares the job with the actor's version before it reads the partition."""

    job_id: str
    lease_token: int
    actor_version: int


@dataclass(frozen=True)
class Prune(Event):
    """Forget terminal jobs that ended before `before`."""

    before: float


@dataclass(frozen=True)
class Write:
    """Keep `body` (plain JSON values) under (kind, key), in place of a former one. A change is new under every key."""

    kind: Literal["tenant", "policy", "change"]
    key: int | str
    body: dict[str, Any]


@dataclass(frozen=True)
class WriteJob:
    """Keep the job as it is now. Carries no body: who writes groups takes the descriptor once a group."""

    job_id: str


@dataclass(frozen=True)
class Forget:
    """Remove the job with this `created_seq`, with its changes."""

    job_id: str
    created_seq: int


@dataclass(frozen=True)
class Wake:
    """Who waits for `topic` should look again: a state's name, `admission`, or `policy:<policy_key>`."""

    topic: str


Instruction = Write | WriteJob | Forget | Wake


@dataclass(frozen=True)
class Outcome:
    """What an event led to. An event that is refused has an `error` and changes nothing, but its time counts:
    leases that ran out until then end, so instructions are to be carried out in any case."""

    reply: Any
    error: JoyNexusError | None
    instructions: tuple[Instruction, ...]
