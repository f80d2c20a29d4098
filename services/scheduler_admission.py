"""Whether a reservation is admitted: an ordered list of small rules, each with one reason.

The first rule that refuses gives the answer. Bounds of the policy come before those of the platform, so that a
policy at its own bound does not count as waiting for a rollout and takes no turn from others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler_records import COMPLETED, RESERVED, Policy

TURN_S = 5.0  # a policy that was told to come, or came and was refused for others' sake, keeps its place so long


@dataclass(frozen=True)
class Refusal:
    """Why not. `final` means that no later try will be admitted."""

    rule: str
    message: str
    final: bool = False


@dataclass
class Admission:
    """What the rules look at.

    `waiting` holds all and only the RL policies that want a rollout and keep their place in the round:
    {policy_key: (created_seq counter when it began to wait, time at which it loses its place)}.
    """

    max_active_rollouts: int
    policies: dict[str, Policy] = field(default_factory=dict)
    active_rollouts: int = 0  # RL jobs in `reserved`, over all tenants
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)

    def refusal(self, policy: Policy) -> Refusal | None:
        """The first rule's reason, or None: a reservation would be admitted now."""
        for rule in RULES:
            reason = rule(self, policy)
            if reason is not None:
                return reason
        return None

    def own_refusal(self, policy: Policy) -> Refusal | None:
        """As `refusal`, by the policy's own bounds alone."""
        for rule in OWN_RULES:
            reason = rule(self, policy)
            if reason is not None:
                return reason
        return None

    def wait(self, policy: Policy, now_seq: int, until: float) -> None:
        """Give the policy a place in the round, or keep the one it has for longer."""
        since, former = self.waiting.get(policy.key, (now_seq, until))
        self.waiting[policy.key] = (since, max(former, until))

    def lapse(self, now: float) -> bool:
        """Forget policies whose place ran out (their producer is gone); True if there were any."""
        gone = [key for key, (_, until) in self.waiting.items() if until <= now]
        for key in gone:
            del self.waiting[key]
        return bool(gone)

    def next_lapse(self) -> float | None:
        """When the next policy loses its place."""
        return min((until for _, until in self.waiting.values()), default=None)

    def before(self, policy: Policy) -> list[str]:
        """Waiting policies whose turn comes before this one's: the least recently admitted first, then who came first.

        A policy at one of its own bounds could not use its turn, so it is not counted.
        """
        mine = self._place(policy)
        others = (self.policies[key] for key in self.waiting if key != policy.key)
        return [other.key for other in others if self._place(other) < mine and self.own_refusal(other) is None]

    def _place(self, policy: Policy) -> tuple[int, int, str]:
        since, _ = self.waiting.get(policy.key, (1 << 62, 0.0))
        return (policy.last_admitted_seq, since, policy.key)


def _closed(_admission: Admission, policy: Policy) -> Refusal | None:
    if policy.closed is None:
        return None
    return Refusal("closed", f"{policy.key} is closed ({policy.closed}); register it again to go on", final=True)


def _completed(_admission: Admission, policy: Policy) -> Refusal | None:
    target, completed = policy.spec.completion_target, policy.counts[COMPLETED]
    if target is None or completed < target:
        return None
    return Refusal(
        "completed", f"{policy.key} completed {completed} jobs of its target of {target}; nothing is left", final=True
    )


def _completion_bound(_admission: Admission, policy: Policy) -> Refusal | None:
    target, completed, unfinished = policy.spec.completion_target, policy.counts[COMPLETED], len(policy.open)
    if target is None or completed + unfinished < target:
        return None
    return Refusal(
        "completion_bound",
        f"{policy.key} has {completed} completed and {unfinished} unfinished jobs for its target of {target}; "
        "wait for their end",
    )


def _in_flight(_admission: Admission, policy: Policy) -> Refusal | None:
    if len(policy.open) < policy.spec.max_in_flight:
        return None
    return Refusal(
        "in_flight",
        f"{policy.key} has {len(policy.open)} unfinished jobs, its bound is {policy.spec.max_in_flight}; "
        "wait until one ends",
    )


def _tenant_rollouts(_admission: Admission, policy: Policy) -> Refusal | None:
    bound, active = policy.spec.max_active_rollouts, policy.counts[RESERVED]
    if policy.spec.task_type != "rl" or bound is None or active < bound:
        return None
    return Refusal(
        "tenant_rollouts", f"{policy.key} has {active} active rollouts, its bound is {bound}; wait until one ends"
    )


def _all_rollouts(admission: Admission, policy: Policy) -> Refusal | None:
    active, bound = admission.active_rollouts, admission.max_active_rollouts
    if policy.spec.task_type != "rl" or active < bound:
        return None
    return Refusal(
        "all_rollouts", f"{active} rollouts are active over all tenants, the bound is {bound}; wait until one ends"
    )


def _turn(admission: Admission, policy: Policy) -> Refusal | None:
    if policy.spec.task_type != "rl":
        return None
    before, free = admission.before(policy), admission.max_active_rollouts - admission.active_rollouts
    if len(before) < free:
        return None
    return Refusal(
        "turn",
        f"{free} more rollouts may start and {', '.join(before)} waited longer than {policy.key}; wait for its turn",
    )


Rule = Callable[[Admission, Policy], Refusal | None]
OWN_RULES: tuple[Rule, ...] = (_closed, _completed, _completion_bound, _in_flight, _tenant_rollouts)
PLATFORM_RULES: tuple[Rule, ...] = (_all_rollouts, _turn)
RULES: tuple[Rule, ...] = OWN_RULES + PLATFORM_RULES
