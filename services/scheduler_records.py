"""What the Training Scheduler keeps of a job and of a policy: fields, states and the table of transitions.

The job descriptor has the fields of the paper's Table 3, its states are those of Table 4 with the waiting states
of Appendix A. Plain data without clock and I/O; who may change it is `services.scheduler_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from configs.spec import Name, Spec

RESERVED = "reserved"
NEEDS_ACTOR_FORWARD = "needs_actor_forward"
COMPUTING_ACTOR_FORWARD = "computing_actor_forward"
NEEDS_ADVANTAGES = "needs_advantages"
COMPUTING_ADVANTAGES = "computing_advantages"
READY = "ready"
LEASED = "leased"
COMPLETED = "completed"
FAILED = "failed"
DROPPED = "dropped"

STATES: tuple[str, ...] = (
    RESERVED,
    NEEDS_ACTOR_FORWARD,
    COMPUTING_ACTOR_FORWARD,
    NEEDS_ADVANTAGES,
    COMPUTING_ADVANTAGES,
    READY,
    LEASED,
    COMPLETED,
    FAILED,
    DROPPED,
)
POLICY_STALE = "policy_stale"  # how the reason begins with which a job older than its bound was dropped
JOB_ID_PREFIX = "job-"
TERMINAL: tuple[str, ...] = (COMPLETED, FAILED, DROPPED)  # absorb: no row of TRANSITIONS starts here
HELD_BACK: tuple[str, ...] = (NEEDS_ACTOR_FORWARD, READY)  # what follows reads or moves the actor
STAGES: dict[str, str] = {  # {state in which a job waits: state in which a stage worker holds it}
    NEEDS_ACTOR_FORWARD: COMPUTING_ACTOR_FORWARD,
    NEEDS_ADVANTAGES: COMPUTING_ADVANTAGES,
}
HELD: dict[str, str] = {  # {state that is a lease: state to which the job returns when the lease expires}
    COMPUTING_ACTOR_FORWARD: NEEDS_ACTOR_FORWARD,
    COMPUTING_ADVANTAGES: NEEDS_ADVANTAGES,
    LEASED: READY,
}

Act = Literal["mark", "lease", "return", "complete", "fail", "drop"]
ANY_TASK = ("rl", "sft")

# {(start, finish): (act that makes the move, task types that may)}. Every move not listed is refused.
TRANSITIONS: dict[tuple[str, str], tuple[Act, tuple[str, ...]]] = {
    (RESERVED, READY): ("mark", ("sft",)),
    (RESERVED, NEEDS_ACTOR_FORWARD): ("mark", ("rl",)),
    (RESERVED, NEEDS_ADVANTAGES): ("mark", ("rl",)),
    (NEEDS_ACTOR_FORWARD, COMPUTING_ACTOR_FORWARD): ("lease", ("rl",)),
    (COMPUTING_ACTOR_FORWARD, NEEDS_ACTOR_FORWARD): ("return", ("rl",)),
    (COMPUTING_ACTOR_FORWARD, NEEDS_ADVANTAGES): ("mark", ("rl",)),
    (NEEDS_ADVANTAGES, COMPUTING_ADVANTAGES): ("lease", ("rl",)),
    (COMPUTING_ADVANTAGES, NEEDS_ADVANTAGES): ("return", ("rl",)),
    (COMPUTING_ADVANTAGES, READY): ("mark", ("rl",)),
    (READY, LEASED): ("lease", ANY_TASK),
    (LEASED, READY): ("return", ANY_TASK),
    (LEASED, COMPLETED): ("complete", ANY_TASK),
    **{(state, FAILED): ("fail", ANY_TASK) for state in STATES if state not in TERMINAL},
    **{(state, DROPPED): ("drop", ANY_TASK) for state in STATES if state not in TERMINAL},
}


def possible_from(start: str, task_type: str) -> list[str]:
    """States that a job of `task_type` may reach from `start` in one move."""
    return [finish for (state, finish), (_, tasks) in TRANSITIONS.items() if state == start and task_type in tasks]


class PolicySpec(Spec):
    """What a producer registers before its first reservation."""

    policy_key: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,126}$", description="`<tenant>.<task>`, the unit of bounds."
    )
    tenant_id: Name
    task_type: Literal["rl", "sft"]
    domain: Name = Field(description="Backend that serves it, for instance 'vla'.")
    priority: int = Field(ge=-100, le=100, description="Higher is leased first; RL precedes SFT at a tie.")
    max_in_flight: int = Field(gt=0, description="Jobs that are not terminal at one time (SFT: prefetch depth).")
    completion_target: int | None = Field(gt=0, description="Jobs to complete in all; None: until closed.")
    max_active_rollouts: int | None = Field(gt=0, description="RL jobs in `reserved` at one time; None: no own bound.")
    base_model: Name | None = Field(
        default=None, description="SFT jobs of one base model may be trained together; None: its jobs never are."
    )
    job_bytes: int = Field(
        default=0, ge=0, description="Bytes that training a job takes, about: its samples, its copy of the policy."
    )
    in_order: bool = Field(
        default=False, description="A job meets the actor only when all those reserved before it have ended."
    )


@dataclass
class Policy:
    """One registered policy. `counts`, `stale` and `open` are derived from its jobs, the rest is journalled."""

    spec: PolicySpec
    generation: int  # counts registrations after a close, so that old jobs do not count for a new workload
    closed: str | None = None  # reason; a closed policy admits nothing
    holder: str | None = None  # the flow run whose workload this is
    lease_s: float | None = None  # without a sign of its holder for so long it is closed; None: it stays open
    lease_expires_at: float | None = None  # derived: after a restart the lease has its whole length again
    pruned: dict[str, int] = field(default_factory=dict)  # {terminal state: jobs of this generation forgotten by age}
    pruned_stale: int = 0  # of those pruned: dropped as stale
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))  # this generation, with pruned
    stale: int = 0  # how many of the dropped ones in `counts` were stale
    open: dict[str, None] = field(default_factory=dict)  # all and only its non-terminal jobs, in order of creation
    last_admitted_seq: int = 0  # created_seq of its newest job: round-robin takes the least recently admitted first

    @property
    def key(self) -> str:
        """Its policy key."""
        return self.spec.policy_key

    def body(self) -> dict[str, Any]:
        """What the journal keeps."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "generation": self.generation,
            "closed": self.closed,
            "holder": self.holder,
            "lease_s": self.lease_s,
            "pruned": self.pruned,
            "pruned_stale": self.pruned_stale,
        }


@dataclass
class Job:
    """A training job's descriptor: no tensors, found there by `partition_id`.

    Invariants: `lease_token`, `lease_holder` and `lease_expires_at` are set in all and only the states of `HELD`;
    `ready_seq` is set once, at the first `ready`, and kept by an expired lease; `train_seq` is set at the first
    lease for training and never changes; `metadata` and `marks` are replaced, never changed in place (replies
    share them).
    """

    job_id: str
    created_seq: int
    policy_key: str
    policy_generation: int
    tenant_id: str
    task_type: str
    domain: str
    partition_id: str
    sample_count: int
    priority: int
    behavior_policy_version: int | None
    max_policy_staleness: int | None
    producer_role: str
    consumer_role: str
    metadata: dict[str, Any]
    flow_run_id: str | None
    request_id: str | None
    request_digest: str | None  # of the reservation's contents: the same id with other contents is refused
    created_at: float
    updated_at: float
    state: str = RESERVED
    ready_seq: int | None = None
    train_seq: int | None = None  # position among the tenant's updates
    ended_at: float | None = None
    reason: str | None = None  # of the last move: why it failed, was dropped or came back
    attempts: int = 0  # leases so far, of stages and of training
    lease_token: int | None = None
    lease_holder: str | None = None
    lease_s: float | None = None
    lease_expires_at: float | None = None
    lease_request_id: str | None = None
    marks: dict[str, int | None] = field(default_factory=dict)  # {state reached by its holder's word: token then}

    def describe(self) -> dict[str, Any]:
        """The descriptor as plain types; later changes do not reach it."""
        return vars(self).copy()

    @property
    def stale(self) -> bool:
        """Whether it was dropped for its age."""
        return self.state == DROPPED and (self.reason or "").startswith(POLICY_STALE)

    @property
    def training_key(self) -> tuple[int, int, int]:
        """Order of training: priority, RL before SFT, then FIFO by `ready_seq`."""
        assert self.ready_seq is not None
        return (-self.priority, 0 if self.task_type == "rl" else 1, self.ready_seq)

    @property
    def stage_key(self) -> tuple[int, int]:
        """Order of the stages before: priority, then FIFO by `created_seq`."""
        return (-self.priority, self.created_seq)


def delayed_version(rollout: int, delay: int, made: Sequence[int | None], initial: int) -> int:
    """The version that a rollout acts with where a delay is declared: the one that job rollout − 1 − delay made.

    A job that failed or was dropped made none, nor did one whose update made no step: the version before it stands.

    Args:
        rollout: its number k, from 0; of its job too.
        delay: d, 0 or more.
        made: versions of jobs 0 … k − 1 − d at least, in order; None of a job that failed or was dropped.
        initial: the version before job 0.
    """
    decided = made[: max(rollout - delay, 0)]
    return next((version for version in reversed(decided) if version is not None), initial)


def staleness(job: dict[str, Any], actor_version: int) -> int | None:
    """Microbatch updates between the policy that collected the job and the actor; None where it has no meaning.

    Demonstrations (SFT) do not depend on the policy, so they are never stale.
    """
    behavior = job["behavior_policy_version"]
    return None if job["task_type"] != "rl" or behavior is None else actor_version - behavior


def is_stale(job: dict[str, Any], actor_version: int) -> bool:
    """The paper's equation 1: actor − behaviour > the policy's bound."""
    age, bound = staleness(job, actor_version), job["max_policy_staleness"]
    return age is not None and bound is not None and age > bound
