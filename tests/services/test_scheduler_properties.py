"""Random histories of the scheduler's state machine against a model that knows only what callers were told.

The machine itself asserts its indices after every event; here stands what a caller may rely on: no job in two hands,
no job lost, FIFO within a priority, ends absorb, bounds are kept, refusals change nothing, and a restart from what
was written changes nothing but the leases' time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from configs.errors import Conflict, JoyNexusError, LeaseLost
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
    Tick,
)
from services.scheduler_invariants import first_by_brute_force
from services.scheduler_records import HELD, LEASED, READY, STAGES, STATES, TERMINAL
from services.scheduler_state import SchedulerState
from tests.services.scheduler_cases import Disk

MAX_ACTIVE_ROLLOUTS = 2
LEASE_S = 10.0
IN_ORDER = "b.rl"  # its jobs meet the actor in the order of their reservation
LEASED_POLICY, POLICY_LEASE_S = "c.sft", 25.0  # held by a flow run "f" that may die
# {policy_key: (tenant, task, priority, max_in_flight, completion_target, max_active_rollouts)}; `both` has two
POLICIES = {
    "a.rl": ("a", "rl", 0, 3, None, 1),
    "b.rl": ("b", "rl", 0, 4, 5, None),
    "both.rl": ("both", "rl", 1, 2, None, 2),
    "both.sft": ("both", "sft", 0, 3, 4, None),
    "c.sft": ("c", "sft", 1, 2, None, None),
}
keys = st.sampled_from(sorted(POLICIES))
Hands = tuple[str, int]  # (job_id, lease_token) as a holder was told


def producer(key: str) -> str | None:
    """The flow run that reserves."""
    return "f" if key == LEASED_POLICY else None


class SchedulerHistory(RuleBasedStateMachine):
    """One random history."""

    hands = Bundle("hands")  # leases that were given, whether or not they still hold

    def __init__(self) -> None:
        super().__init__()
        self.state = SchedulerState(MAX_ACTIVE_ROLLOUTS, validating=True)
        self.disk = Disk()
        self.now = 0.0
        self.known: dict[str, str] = {}  # {job_id: policy_key} of all that were reserved and not pruned
        self.ended: dict[str, dict[str, Any]] = {}  # {job_id: descriptor at its end}
        self.held: dict[str, tuple[int, float]] = {}  # {job_id: (token, expiry)} as the holders were told
        self.completed = dict.fromkeys(POLICIES, 0)  # since the policy was registered last
        self.policy_expiry: float | None = None  # of LEASED_POLICY, None while it is closed
        self.ready_order: list[str] = []
        self.requests: dict[str, str] = {}

    # Helpers.

    def do(self, event: Event) -> Any:
        """The reply, or the error as a value; an error must have changed nothing but what time changes."""
        # Time first, so that what is compared is this event's effect alone.
        self.disk.write(self.state, self.state.handle(Tick(event.now)).instructions)
        self.held = {job_id: hold for job_id, hold in self.held.items() if hold[1] > self.now}
        if self.policy_expiry is not None and self.policy_expiry <= self.now:
            self.policy_expiry = None
            for job_id in self.unfinished(LEASED_POLICY):
                assert self.state.jobs[job_id].state == "dropped"
                self.end(self.state.jobs[job_id].describe())
        before = self.picture()
        outcome = self.state.handle(event)
        self.disk.write(self.state, outcome.instructions)
        if outcome.error is not None:
            assert self.picture() == before
            return outcome.error
        return outcome.reply

    def picture(self) -> Any:
        jobs = {job_id: job.describe() for job_id, job in self.state.jobs.items()}
        return jobs, dict(self.state.counters), dict(self.state.ready.turns), dict(self.state.train_seq)

    def unfinished(self, key: str) -> list[str]:
        return [job_id for job_id, owner in self.known.items() if owner == key and job_id not in self.ended]

    def end(self, job: dict[str, Any]) -> None:
        """A job was reported terminal."""
        if job["job_id"] not in self.ended:
            self.ended[job["job_id"]] = job
            self.held.pop(job["job_id"], None)
            if job["state"] == "completed":
                self.completed[job["policy_key"]] += 1

    def holds(self, hand: Hands) -> bool:
        return self.held.get(hand[0], (None, 0.0))[0] == hand[1]

    # Rules.

    @initialize()
    def register_all(self) -> None:
        """Histories start with all policies, and a few jobs of each."""
        for key in POLICIES:
            self.register(key)
        for key in POLICIES:
            self.produce(key)

    @rule(key=keys)
    def produce(self, key: str) -> None:
        """A producer as it should be: reserve, fill, mark."""
        reply = self.do(Reserve(self.now, None, key, 1, 0, 3, {}, "rollout", "actor", producer(key)))
        if reply["job"] is not None:
            job_id = reply["job"]["job_id"]
            self.known[job_id] = key
            state = READY if POLICIES[key][1] == "sft" else "needs_advantages"
            self.note_ready(self.do(Mark(self.now, job_id, state, None, None)))

    @rule()
    def preprocess(self) -> None:
        """A stage worker as it should be: all that wait for it become ready."""
        for state, held in STAGES.items():
            after = "needs_advantages" if state == "needs_actor_forward" else READY
            while (job := self.do(Lease(self.now, state, held, "actor", ("vla",), "p", 1.0, None))["job"]) is not None:
                self.note_ready(self.do(Mark(self.now, job["job_id"], after, job["lease_token"], None)))

    @rule(key=keys)
    def register(self, key: str) -> None:
        """The same contents each time."""
        tenant, task, priority, in_flight, target, rollouts = POLICIES[key]
        self.do(Tick(self.now))
        fresh = key not in self.state.policies or self.state.policies[key].closed is not None
        policy = {
            "policy_key": key,
            "tenant_id": tenant,
            "task_type": task,
            "domain": "vla",
            "priority": priority,
            "max_in_flight": in_flight,
            "completion_target": target,
            "max_active_rollouts": rollouts,
            "base_model": "tiny",
            "job_bytes": 1,
            "in_order": key == IN_ORDER,
        }
        leased = key == LEASED_POLICY
        event = RegisterPolicy(self.now, policy, "f", POLICY_LEASE_S) if leased else RegisterPolicy(self.now, policy)
        assert self.do(event) is None
        if leased:
            self.policy_expiry = self.now + POLICY_LEASE_S
        if fresh:
            self.completed[key] = 0
        elif leased:
            assert isinstance(self.do(RegisterPolicy(self.now, policy, "another", 5.0)), Conflict)
            assert self.do(ClosePolicy(self.now, key, "mine is over", "another")) == []
            stranger = Reserve(self.now, None, key, 1, 0, 3, {}, "rollout", "actor", "another")
            assert isinstance(self.do(stranger), LeaseLost)

    @rule(holder=st.sampled_from(["f", "f", "another"]))
    def keep(self, holder: str) -> None:
        """Its holder alone keeps a policy, and only while it is not closed."""
        reply = self.do(KeepPolicy(self.now, LEASED_POLICY, holder))
        if self.policy_expiry is not None and holder == "f":
            assert reply is None
            self.policy_expiry = self.now + POLICY_LEASE_S
        else:
            assert isinstance(reply, LeaseLost)

    @rule(key=keys, request=st.sampled_from([None, None, "r1", "r2", "r3"]), size=st.integers(1, 2))
    def reserve(self, key: str, request: str | None, size: int) -> None:
        """With or without an id; an id gives the same job or a conflict, whatever the bounds say now."""
        seen = self.requests.get(f"{request}")
        reply = self.do(Reserve(self.now, request, key, size, 0, 3, {}, "rollout", "actor", producer(key)))
        if seen is not None and seen in self.known:
            job = self.state.jobs[seen]
            same = (job.policy_key, job.sample_count) == (key, size)
            assert reply["job"]["job_id"] == seen if same else isinstance(reply, Conflict)
        elif reply["job"] is None:
            assert reply["refused"]
        else:
            job_id = reply["job"]["job_id"]
            assert job_id not in self.known
            self.known[job_id] = key
            if request is not None:
                self.requests[request] = job_id

    @rule(key=keys, seconds=st.floats(0, 30))
    def await_admission(self, key: str, seconds: float) -> None:
        """Told to come now means that a reservation is admitted now, or never."""
        if self.do(AwaitAdmission(self.now, key, self.now + seconds)):
            reply = self.do(Reserve(self.now, None, key, 1, 0, 3, {}, "rollout", "actor", producer(key)))
            assert reply["job"] is not None or reply["final"]
            if reply["job"] is not None:
                self.known[reply["job"]["job_id"]] = key

    @precondition(lambda self: self.known)
    @rule(data=st.data(), state=st.sampled_from(STATES))
    def mark_without_token(self, data: st.DataObject, state: str) -> None:
        """A producer's word, right or wrong; a held job does not obey it."""
        job_id = data.draw(st.sampled_from(sorted(self.known)))
        start = self.state.jobs[job_id].state
        marked = dict(self.state.jobs[job_id].marks)
        reply = self.do(Mark(self.now, job_id, state, None, None))
        if isinstance(reply, JoyNexusError):
            return
        if state in marked:  # sent twice
            assert reply["state"] == self.state.jobs[job_id].state
            return
        assert (start, reply["state"]) == ("reserved", state)
        self.note_ready(reply)

    def note_ready(self, job: dict[str, Any]) -> None:
        if job["state"] == READY and job["job_id"] not in self.ready_order:
            self.ready_order.append(job["job_id"])

    @rule(target=hands, state=st.sampled_from([READY, READY, READY, *STAGES]), holder=st.sampled_from(["x", "y"]))
    def lease(self, state: str, holder: str) -> Any:
        """What is given was in nobody's hands and is the right one."""
        self.do(Tick(self.now))
        expected = first_by_brute_force(self.state, ("actor", "vla"))
        leased = LEASED if state == READY else STAGES[state]
        reply = self.do(Lease(self.now, state, leased, "actor", ("vla",), holder, LEASE_S, None))
        job = reply["job"]
        if job is None:
            assert state != READY or expected is None
            assert state == READY or not any(
                job.state == state and not self.state.held_back(job) for job in self.state.jobs.values()
            )
            return multiple()
        assert job["job_id"] not in self.held, "in two hands"
        assert job["job_id"] not in self.ended
        if state == READY:
            assert job["job_id"] == expected
            for earlier in self.ready_order[: self.ready_order.index(job["job_id"])]:
                other = self.state.jobs.get(earlier)
                assert (
                    other is None
                    or other.state != READY
                    or self.state.held_back(other)
                    or (other.priority, other.task_type) != (job["priority"], job["task_type"])
                    or self.state.ready.turns[other.tenant_id] != earlier
                ), "overtaken by a job of its own priority"
        self.held[job["job_id"]] = (job["lease_token"], self.now + LEASE_S)
        return job["job_id"], job["lease_token"]

    @rule(target=hands, hand=hands, holder=st.sampled_from(["x", "y"]), beside_rl=st.booleans())
    def lease_beside(self, hand: Hands, holder: str, beside_rl: bool) -> Any:
        """Company is the job that would be leased next, of another tenant, supervised as the first; or none."""
        self.do(Tick(self.now))
        first = self.state.jobs.get(hand[0])
        expected = first_by_brute_force(self.state, ("actor", "vla"))
        group = LeasedGroup((hand[0],), 2, beside_rl)
        reply = self.do(Lease(self.now, READY, LEASED, "actor", ("vla",), holder, LEASE_S, None, group))
        if isinstance(reply, JoyNexusError):
            assert first is None or (first.state, first.lease_holder) != (LEASED, holder)
            return multiple()
        assert first is not None
        rl_open = any(p.closed is None and p.spec.task_type == "rl" for p in self.state.policies.values())
        job = reply["job"]
        if job is None:
            fits = expected is not None and self.state.jobs[expected].task_type == first.task_type == "sft"
            assert not fits or (rl_open and not beside_rl)
            return multiple()
        assert (first.state, first.lease_holder, first.task_type, job["task_type"]) == (LEASED, holder, "sft", "sft")
        assert job["job_id"] == expected
        assert job["tenant_id"] != first.tenant_id
        assert beside_rl or not rl_open
        assert job["job_id"] not in self.held
        self.held[job["job_id"]] = (job["lease_token"], self.now + LEASE_S)
        return job["job_id"], job["lease_token"]

    @rule(hand=hands)
    def finish(self, hand: Hands) -> None:
        """Who holds the job may bring it on; who does not is refused, or repeats what he did."""
        job_id, token = hand
        if job_id not in self.known:
            return
        held, start = self.holds(hand), self.state.jobs[job_id].state
        if start == LEASED:
            reply = self.do(Complete(self.now, job_id, token, {"n": token}))
        else:
            target = {"computing_actor_forward": "needs_advantages", "computing_advantages": READY}.get(start, "ready")
            reply = self.do(Mark(self.now, job_id, target, token, None))
        if held:
            assert reply["state"] != start
            del self.held[job_id]
            self.note_ready(reply)
            if reply["state"] in TERMINAL:
                self.end(reply)
        else:
            assert isinstance(reply, LeaseLost) or reply["state"] == start

    @rule(target=hands, hand=hands)
    def lose(self, hand: Hands) -> Any:
        """A holder that is away too long: another one gets the job, then the first one comes back."""
        if not self.holds(hand):
            return multiple()
        waiting = HELD[self.state.jobs[hand[0]].state]
        self.wait(LEASE_S)
        taken = []
        while hand[0] not in self.held:
            taken.append(self.lease(waiting, "z"))
            assert isinstance(taken[-1], tuple), "nobody gets it"
        self.finish(hand)
        assert hand[0] in self.held
        return multiple(*taken)

    @rule(hand=hands)
    def renew(self, hand: Hands) -> None:
        """Only the holder can."""
        if hand[0] in self.known:
            reply = self.do(Renew(self.now, hand[0], hand[1], LEASE_S))
            if self.holds(hand):
                self.held[hand[0]] = (hand[1], self.now + LEASE_S)
            else:
                assert isinstance(reply, LeaseLost)

    @rule(hand=consumes(hands), way=st.sampled_from(["release", "fail", "drop", "stale"]))
    def give_up(self, hand: Hands, way: str) -> None:
        """Only the holder can; a released job is there again."""
        job_id, token = hand
        if job_id not in self.known:
            return
        event: Event = {
            "release": Release(self.now, job_id, token, "stop"),
            "fail": Fail(self.now, job_id, "ValueError", token),
            "drop": Drop(self.now, job_id, "policy_stale", token),
            "stale": DropIfStale(self.now, job_id, token, 4),
        }[way]
        held = self.holds(hand)
        reply = self.do(event)
        if not held:
            assert isinstance(reply, LeaseLost) or job_id in self.ended
            return
        job = reply["job"] if way == "stale" else reply
        if job["state"] in TERMINAL:
            self.end(job)
        elif way == "release":
            del self.held[job_id]
            assert job["state"] in HELD.values()

    @precondition(lambda self: len(self.known) - len(self.ended) > 5)
    @rule(data=st.data(), failing=st.booleans())
    def end_without_token(self, data: st.DataObject, failing: bool) -> None:
        """An operator drops anything unfinished; a producer fails what nobody holds."""
        job_id = data.draw(st.sampled_from(sorted(self.known)))
        event = Fail(self.now, job_id, "x", None) if failing else Drop(self.now, job_id, "cancelled", None)
        self.do(Tick(self.now))
        held = job_id in self.held
        reply = self.do(event)
        if isinstance(reply, JoyNexusError):
            assert job_id in self.ended or (held and failing)
        else:
            self.end(reply)

    @precondition(lambda self: len(self.ended) > 8)
    @rule(key=keys)
    def close(self, key: str) -> None:
        """Now and then: all that is unfinished is dropped, nothing else."""
        self.do(Tick(self.now))
        unfinished = self.unfinished(key)
        assert self.do(ClosePolicy(self.now, key, "over")) == unfinished
        if key == LEASED_POLICY:
            self.policy_expiry = None
        for job_id in unfinished:
            self.end(self.state.jobs[job_id].describe())

    @rule(seconds=st.sampled_from([0.5, 0.5, 4.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        """Time passes, leases run out."""
        self.now += seconds
        self.do(Tick(self.now))

    @rule(age=st.sampled_from([0.0, 5.0, 20.0]))
    def prune(self, age: float) -> None:
        """Ends of that age are forgotten, nothing else."""
        old = {job_id for job_id, job in self.ended.items() if job["ended_at"] < self.now - age}
        assert self.do(Prune(self.now, self.now - age)) == len(old)
        for job_id in old:
            del self.known[job_id], self.ended[job_id]

    def leases_are_whole_again(self) -> None:
        self.held = {job_id: (token, self.now + LEASE_S) for job_id, (token, _) in self.held.items()}
        if self.policy_expiry is not None:
            self.policy_expiry = self.now + POLICY_LEASE_S

    @rule()
    def oversleep(self) -> None:
        """An hour in which nobody could be heard takes nothing from anybody."""
        self.now += 3600.0
        self.state.overslept(self.now)
        self.leases_are_whole_again()
        self.do(Tick(self.now))

    @rule()
    def restart(self) -> None:
        """From what was written alone: the same jobs, counts and order; held leases last their whole length again."""
        old, self.state = self.state, self.disk.restored(MAX_ACTIVE_ROLLOUTS, self.now)
        self.state.validate()
        self.leases_are_whole_again()
        assert self.state.counts == old.counts
        assert list(self.state.jobs) == list(old.jobs)
        for job_id, job in self.state.jobs.items():
            assert {**job.describe(), "lease_expires_at": 0} == {**old.jobs[job_id].describe(), "lease_expires_at": 0}

    # What always holds.

    @invariant()
    def no_job_is_lost(self) -> None:
        """All that were reserved are there, and no others."""
        assert set(self.state.jobs) == set(self.known)
        assert sum(self.state.counts.values()) == len(self.known)

    @invariant()
    def ends_absorb(self) -> None:
        """What ended is as it was at its end."""
        for job_id, job in self.ended.items():
            assert self.state.jobs[job_id].describe() == job

    @invariant()
    def hands_are_as_told(self) -> None:
        """A job is held exactly by whom was told so."""
        held = {job.job_id: job.lease_token for job in self.state.jobs.values() if job.state in HELD}
        assert held == {job_id: token for job_id, (token, expiry) in self.held.items() if expiry > self.state.now}

    @invariant()
    def bounds_are_kept(self) -> None:
        """By counting what callers were told, not by the machine's own counters."""
        open_jobs = [self.state.jobs[job_id] for job_id in self.known if job_id not in self.ended]
        rollouts = [job for job in open_jobs if job.task_type == "rl" and job.state == "reserved"]
        assert len(rollouts) <= MAX_ACTIVE_ROLLOUTS
        for key, (_, _, _, in_flight, target, own_rollouts) in POLICIES.items():
            mine = [job for job in open_jobs if job.policy_key == key]
            assert len(mine) <= in_flight
            assert target is None or self.completed[key] + len(mine) <= target
            assert own_rollouts is None or sum(job.policy_key == key for job in rollouts) <= own_rollouts

    def teardown(self) -> None:
        """Whatever happened: every unfinished job can still be brought to its end."""
        self.now += 2 * LEASE_S
        self.do(Tick(self.now))
        for job in list(self.state.jobs.values()):
            if job.state == "reserved":
                self.do(
                    Mark(self.now, job.job_id, READY if job.task_type == "sft" else "needs_actor_forward", None, None)
                )
        while self.one_round():
            pass
        assert all(job.state in TERMINAL for job in self.state.jobs.values())

    def one_round(self) -> bool:
        """All stages, then training; whether a job was trained: those behind it in order may come now."""
        for state, held in STAGES.items():
            after = "needs_advantages" if state == "needs_actor_forward" else READY
            while (job := self.do(Lease(self.now, state, held, "actor", ("vla",), "h", 1.0, None))["job"]) is not None:
                self.do(Mark(self.now, job["job_id"], after, job["lease_token"], None))
        trained = False
        while (job := self.do(Lease(self.now, READY, LEASED, "actor", ("vla",), "h", 1.0, None))["job"]) is not None:
            self.do(Complete(self.now, job["job_id"], job["lease_token"], {}))
            trained = True
        return trained


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
