"""The scheduler's state machine: one test a behaviour, events to a bare state, all invariants asserted after each."""

from __future__ import annotations

from itertools import product

import pytest

from configs.errors import Conflict, LeaseLost, SpecError, UnknownObject
from services.scheduler_admission import TURN_S
from services.scheduler_events import (
    AwaitAdmission,
    ClosePolicy,
    Complete,
    DropIfStale,
    Fail,
    KeepPolicy,
    Lease,
    Mark,
    Prune,
    RegisterPolicy,
    Release,
    Renew,
    Reserve,
    Wake,
    Write,
    WriteJob,
)
from services.scheduler_records import HELD, STATES, TERMINAL, TRANSITIONS, possible_from
from tests.services.scheduler_cases import Bench


@pytest.fixture
def bench() -> Bench:
    """A state with one RL and one SFT policy, of different tenants."""
    bench = Bench()
    bench.register("push", "rl")
    bench.register("demos", "sft")
    return bench


# The table.


def test_every_state_is_reachable_and_terminal_ones_lead_nowhere() -> None:
    """The table itself: terminal absorbs, every held state can be returned, every unfinished one failed or dropped."""
    assert {finish for _, finish in TRANSITIONS} == set(STATES) - {"reserved"}
    assert not {start for start, _ in TRANSITIONS} & set(TERMINAL)
    assert {start: finish for (start, finish), (act, _) in TRANSITIONS.items() if act == "return"} == HELD
    for start in set(STATES) - set(TERMINAL):
        assert {"failed", "dropped"} <= set(possible_from(start, "rl"))


@pytest.mark.parametrize(("task", "target"), list(product(("rl", "sft"), STATES)))
def test_a_reserved_job_can_be_marked_as_its_task_allows(bench: Bench, task: str, target: str) -> None:
    """SFT: ready. RL: the stages before. Nothing else, and the refusal names what is possible."""
    key = "push.rl" if task == "rl" else "demos.sft"
    job_id = bench.reserve(key)
    allowed = {"rl": {"needs_actor_forward", "needs_advantages"}, "sft": {"ready"}}[task]
    if target in allowed:
        assert bench.mark(job_id, target)["state"] == target
    else:
        error = bench.refused(Mark(bench.now, job_id, target, None, None))
        assert isinstance(error, Conflict)
        possible = ", ".join(possible_from("reserved", task))
        assert str(error) == (
            f"{job_id} ({task}, reserved) mark: got {target!r}; possible: {possible}; check the order"
        )


def test_instructions_of_one_event(bench: Bench) -> None:
    """Write the job and its change, wake who waits for ready jobs: no more, no less, and in this order."""
    job_id = bench.reserve("demos.sft")
    bench.mark(job_id, "ready")
    wake, job, change = bench.last.instructions
    assert wake == Wake("ready")
    assert job == WriteJob(job_id)
    assert isinstance(change, Write)
    assert (change.kind, change.body["from"], change.body["state"]) == ("change", "reserved", "ready")


@pytest.mark.parametrize("end", TERMINAL)
def test_terminal_states_absorb(bench: Bench, end: str) -> None:
    """Nothing moves a job on from an end, not even its last holder."""
    job_id = bench.ready()
    token = bench.lease()["lease_token"]
    {"completed": bench.complete, "failed": bench.fail, "dropped": bench.drop}[end](job_id, token)
    for event in (
        Mark(bench.now, job_id, "ready", None, {"other": 1}),
        Complete(bench.now, job_id, token + 1, {}),
        Renew(bench.now, job_id, token, 60.0),
        Release(bench.now, job_id, token, "x"),
        Fail(bench.now, job_id, "late", token + 1),
        Fail(bench.now, job_id, "late", None),
    ):
        assert isinstance(bench.refused(event), Conflict | LeaseLost)
    bench.wait(3600)
    assert bench.state.jobs[job_id].state == end


def test_a_failed_job_keeps_its_descriptor_and_reason(bench: Bench) -> None:
    """The tensors go, the descriptor stays."""
    job_id = bench.reserve()
    bench.fail(job_id, reason="EnvironmentFault: host 3 died")
    job = bench.state.jobs[job_id]
    assert (job.state, job.reason, job.ended_at) == ("failed", "EnvironmentFault: host 3 died", 1000.0)
    with pytest.raises(SpecError, match="reason: got ''; possible: a sentence; say why"):
        bench.fail(bench.reserve(), reason="")


# Reservations.


def test_the_partition_is_named_after_the_job(bench: Bench) -> None:
    """Job, domain, tenant and task: no two jobs address one partition."""
    names = [bench.state.jobs[bench.reserve()].partition_id for _ in range(2)]
    assert names == ["job-00000001.vla.push.rl", "job-00000002.vla.push.rl"]


def test_a_retried_reservation_gives_the_first_job(bench: Bench) -> None:
    """Same id and contents: the same job, nothing written, also by a restarted flow and after the job moved on."""
    job_id = bench.reserve(request_id="r1")
    assert bench.reserve(request_id="r1") == job_id
    assert bench.last.instructions == ()
    bench.mark(job_id, "needs_advantages")
    bench.restart()
    assert bench.try_reserve(request_id="r1", flow_run_id="another")["job"]["state"] == "needs_advantages"
    assert len(bench.state.jobs) == 1


def test_a_request_id_with_other_contents_is_refused(bench: Bench) -> None:
    """The message names the job that the id made."""
    bench.reserve(request_id="r1")
    with pytest.raises(Conflict) as refused:
        bench.try_reserve(request_id="r1", sample_count=65)
    assert str(refused.value) == ("request_id: got 'r1'; possible: the contents that made job-00000001; use a new id")


def test_two_requests_at_once_are_one_job(bench: Bench) -> None:
    """Two events of one time and id: the second one finds the first one's job."""
    event = Reserve(bench.now, "r1", "push.rl", 64, 0, 10, {}, "rollout", "actor", None)
    assert bench.do(event)["job"]["job_id"] == bench.do(event)["job"]["job_id"]


def test_without_an_id_every_reservation_is_new(bench: Bench) -> None:
    """None never equals None."""
    assert bench.reserve() != bench.reserve()


def test_in_flight_bound_refuses_with_its_reason() -> None:
    """Two unfinished jobs of two; one ends, the next is admitted."""
    bench = Bench()
    bench.register("demos", "sft", max_in_flight=2)
    first = bench.reserve("demos.sft")
    bench.reserve("demos.sft")
    reply = bench.try_reserve("demos.sft")
    assert reply == {
        "job": None,
        "refused": "demos.sft has 2 unfinished jobs, its bound is 2; wait until one ends",
        "rule": "in_flight",
        "final": False,
    }
    bench.fail(first)
    assert Wake("admission") in bench.last.instructions
    bench.reserve("demos.sft")


def test_the_completion_target_bounds_and_ends() -> None:
    """Target 2: a third is refused while two are under way, a failed one is replaced, then it is over for good."""
    bench = Bench()
    bench.register("demos", "sft", completion_target=2)
    bench.ready()
    failed = bench.ready()
    assert bench.try_reserve("demos.sft")["rule"] == "completion_bound"
    bench.fail(failed)
    bench.ready()
    for _ in range(2):
        leased = bench.lease()
        bench.complete(leased["job_id"], leased["lease_token"])
    reply = bench.try_reserve("demos.sft")
    assert (reply["rule"], reply["final"]) == ("completed", True)
    assert reply["refused"] == "demos.sft completed 2 jobs of its target of 2; nothing is left"


def test_rollouts_are_bounded_a_tenant_and_in_all() -> None:
    """2 in all, 1 of push; SFT is not counted; a rollout that ended makes room."""
    bench = Bench(max_active_rollouts=2)
    bench.register("push", max_active_rollouts=1)
    bench.register("pick")
    bench.register("reach")
    bench.register("demos", "sft")
    first = bench.reserve("push.rl")
    assert bench.try_reserve("push.rl")["rule"] == "tenant_rollouts"
    bench.reserve("demos.sft")
    bench.reserve("pick.rl")
    reply = bench.try_reserve("reach.rl")
    assert reply["refused"] == "2 rollouts are active over all tenants, the bound is 2; wait until one ends"
    bench.mark(first, "needs_advantages")
    bench.reserve("reach.rl")


def test_waiting_tenants_are_admitted_in_turns() -> None:
    """One rollout at a time, three tenants that all ask at once: each gets every third one."""
    bench = Bench(max_active_rollouts=1)
    keys = [bench.register(tenant) for tenant in ("a", "b", "c")]
    order = []
    for _ in range(9):
        admitted = [(key, reply["job"]["job_id"]) for key in keys if (reply := bench.try_reserve(key))["job"]]
        assert len(admitted) == 1
        order.append(admitted[0][0])
        bench.mark(admitted[0][1], "needs_advantages")
    assert order == keys * 3


def test_a_tenant_whose_turn_it_is_not_hears_who_comes_first() -> None:
    """The reason of a refused turn names the policies before it."""
    bench = Bench(max_active_rollouts=1)
    bench.register("a")
    bench.register("b")
    running = bench.reserve("a.rl")
    bench.try_reserve("b.rl")
    bench.mark(running, "needs_advantages")
    reply = bench.try_reserve("a.rl")
    assert reply["refused"] == "1 more rollouts may start and b.rl waited longer than a.rl; wait for its turn"


def test_more_free_places_than_tenants_before_admit() -> None:
    """Two places are free and only b comes before a: both are admitted, in whichever order they call."""
    bench = Bench(max_active_rollouts=2)
    bench.register("a")
    bench.register("b")
    running = [bench.reserve("a.rl"), bench.reserve("a.rl")]
    bench.try_reserve("b.rl")
    bench.mark(running[0], "needs_advantages")
    assert bench.try_reserve("a.rl")["rule"] == "turn"
    bench.mark(running[1], "needs_advantages")
    bench.reserve("a.rl")
    bench.reserve("b.rl")


def test_a_waiting_tenant_that_is_gone_loses_its_turn() -> None:
    """b asked and died: a is held up for TURN_S and no longer, and who waits is woken."""
    bench = Bench(max_active_rollouts=1)
    bench.register("a")
    bench.register("b")
    running = bench.reserve("a.rl")
    bench.try_reserve("b.rl")
    bench.mark(running, "needs_advantages")
    assert bench.try_reserve("a.rl")["rule"] == "turn"
    assert bench.state.next_deadline() == bench.now + TURN_S
    bench.wait(TURN_S)
    assert bench.last.instructions == (Wake("admission"),)
    bench.reserve("a.rl")


def test_a_tenant_at_its_own_bound_takes_no_turn() -> None:
    """b waited, but its in-flight bound is reached meanwhile: a need not wait for it."""
    bench = Bench(max_active_rollouts=1)
    bench.register("a")
    bench.register("b", max_in_flight=1)
    first = bench.reserve("b.rl")
    bench.mark(first, "needs_advantages")
    running = bench.reserve("a.rl")
    assert not bench.do(AwaitAdmission(bench.now, "b.rl", bench.now + 60))
    bench.mark(running, "needs_advantages")
    bench.reserve("a.rl")


def test_await_admission_says_when_a_call_is_worth_it() -> None:
    """Admitted now: True, and the turn is kept. At a bound: False. Over for good: True, to hear the refusal."""
    bench = Bench(max_active_rollouts=1)
    bench.register("a")
    bench.register("b")
    running = bench.reserve("b.rl")
    assert not bench.do(AwaitAdmission(bench.now, "a.rl", bench.now + 60))
    bench.mark(running, "needs_advantages")
    assert bench.do(AwaitAdmission(bench.now, "a.rl", bench.now + 60))
    assert bench.try_reserve("b.rl")["rule"] == "turn"
    bench.close("a.rl")
    assert bench.do(AwaitAdmission(bench.now, "a.rl", bench.now + 60))
    bench.reserve("b.rl")


# Policies.


def test_registering_twice_is_idempotent_and_other_contents_conflict(bench: Bench) -> None:
    """The message names the field that differs."""
    bench.register("push", "rl")
    assert bench.last.instructions == ()
    with pytest.raises(Conflict) as refused:
        bench.register("push", "rl", priority=5)
    assert str(refused.value) == "policy push.rl.priority: got 5; possible: 0; close it first"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_in_flight", 0, "max_in_flight"),
        ("tenant_id", "../x", "tenant_id"),
        ("colour", 1, "colour: unknown key"),
        ("completion_target", 0, "completion_target"),
    ],
)
def test_a_wrong_policy_is_refused_by_field(field: str, value: object, message: str) -> None:
    """Strict: wrong bounds, names that are paths, unknown keys."""
    with pytest.raises(SpecError, match=message):
        Bench().register("push", "rl", **{field: value})


def test_closing_drops_what_is_unfinished_and_refuses_more(bench: Bench) -> None:
    """A cancelled policy: reserved, ready and leased jobs end; the holder's late result is discarded."""
    leased_id, ready_id, reserved_id = bench.ready(), bench.ready(), bench.reserve("demos.sft")
    token = bench.lease()["lease_token"]
    assert bench.close("demos.sft", "cancelled in Prefect") == [leased_id, ready_id, reserved_id]
    assert {bench.state.jobs[job_id].reason for job_id in (leased_id, ready_id, reserved_id)} == {
        "cancelled: cancelled in Prefect"
    }
    with pytest.raises(LeaseLost) as lost:
        bench.complete(leased_id, token)
    assert str(lost.value) == (
        f"{leased_id} lease_token: got {token}; possible: the job is dropped (cancelled: cancelled in Prefect); "
        "discard the result"
    )
    assert bench.try_reserve("demos.sft")["refused"] == (
        "demos.sft is closed (cancelled in Prefect); register it again to go on"
    )
    assert bench.close("demos.sft", "again") == []


def test_a_policy_registered_after_its_close_starts_anew() -> None:
    """The old workload's jobs do not count for the new one's target; numbers of jobs go on."""
    bench = Bench()
    bench.register("demos", "sft", completion_target=1)
    leased = bench.ready() and bench.lease()
    bench.complete(leased["job_id"], leased["lease_token"])
    bench.close("demos.sft")
    bench.register("demos", "sft", completion_target=1, priority=3)
    bench.restart()
    assert bench.reserve("demos.sft") == "job-00000002"


def test_a_policy_whose_flow_run_is_gone_is_closed(bench: Bench) -> None:
    """Registered at 1000 for 60 s, kept at 1050, so it ends at 1110: its jobs are dropped, the others' are not."""
    bench.do(bench.registration("left", holder="run-1", lease_s=60.0))
    reserved, others = bench.reserve("left.rl", flow_run_id="run-1"), bench.reserve("push.rl")
    bench.wait(50)
    bench.do(KeepPolicy(bench.now, "left.rl", "run-1"))
    bench.wait(59.5)
    assert bench.state.next_deadline() == 1110.0
    assert bench.state.policies["left.rl"].closed is None
    bench.wait(0.5)
    assert bench.state.policies["left.rl"].closed == "its flow run gave no sign for 60 s"
    assert bench.state.jobs[reserved].state == "dropped"
    assert bench.state.jobs[reserved].reason == "cancelled: its flow run gave no sign for 60 s"
    assert bench.state.jobs[others].state == "reserved"
    error = bench.refused(KeepPolicy(bench.now, "left.rl", "run-1"))
    assert isinstance(error, LeaseLost)
    assert "gave no sign" in str(error)
    bench.do(bench.registration("left", holder="run-2", lease_s=60.0))  # the next workload of this policy
    bench.wait(61)
    bench.restart()
    assert bench.state.policies["left.rl"].closed is not None


def test_two_flow_runs_of_one_policy_are_not_mixed(bench: Bench) -> None:
    """The same workload started twice: the second one hears whose it is; the first one's retry renews its lease."""
    bench.do(bench.registration("twice", holder="run-1", lease_s=60.0))
    bench.wait(50)
    error = bench.refused(bench.registration("twice", holder="run-2", lease_s=60.0))
    assert isinstance(error, Conflict)
    assert "flow run run-1" in str(error)
    bench.do(bench.registration("twice", holder="run-1", lease_s=60.0))
    bench.restart()  # at 1050: the whole length again
    bench.wait(59)
    assert bench.state.policies["twice.rl"].closed is None
    assert isinstance(bench.refused(KeepPolicy(bench.now, "twice.rl", "run-2")), LeaseLost)
    assert isinstance(bench.refused(bench.registration("twice", holder="run-1")), SpecError)
    bench.wait(1)
    assert bench.state.policies["twice.rl"].closed is not None


def test_a_run_that_lost_its_policy_neither_feeds_nor_closes_its_successor(bench: Bench) -> None:
    """Run 1 was closed by hand, run 2 registered the same policy: run 1's close does nothing, its reservation fails."""
    bench.do(bench.registration("next", holder="run-1", lease_s=60.0))
    bench.close("next.rl")
    bench.do(bench.registration("next", holder="run-2", lease_s=60.0))
    job_id = bench.reserve("next.rl", flow_run_id="run-2")
    with pytest.raises(LeaseLost, match="got 'run-1'; possible: run-2"):
        bench.reserve("next.rl", flow_run_id="run-1")
    assert bench.do(ClosePolicy(bench.now, "next.rl", "the workload failed", "run-1")) == []
    assert bench.state.jobs[job_id].state == "reserved"
    assert bench.do(ClosePolicy(bench.now, "next.rl", "the workload failed", "run-2")) == [job_id]


def test_a_policy_that_nobody_held_can_be_taken_up(bench: Bench) -> None:
    """As those of a journal from before policies had leases."""
    spec = bench.state.policies["push.rl"].spec.model_dump()
    bench.do(RegisterPolicy(bench.now, spec, "run-1", 60.0))
    bench.restart()
    assert bench.state.policies["push.rl"].holder == "run-1"
    bench.wait(60)
    assert bench.state.policies["push.rl"].closed is not None


def test_time_in_which_nobody_was_heard_costs_no_lease(bench: Bench) -> None:
    """A machine that slept from 1000 to 4600: job and policy are held for their whole length from then."""
    bench.do(bench.registration("slept", holder="run-1", lease_s=60.0))
    bench.ready("demos.sft")
    leased = bench.lease(lease_s=60.0)
    bench.now = 4600.0
    bench.state.overslept(bench.now)
    bench.state.validate()
    bench.wait(59)
    assert bench.state.policies["slept.rl"].closed is None
    assert bench.do(Renew(bench.now, leased["job_id"], leased["lease_token"], 60.0))["state"] == "leased"
    bench.wait(1)
    assert bench.state.policies["slept.rl"].closed is not None


def test_an_unknown_policy_lists_the_known(bench: Bench) -> None:
    """A typo in the key."""
    with pytest.raises(UnknownObject) as unknown:
        bench.try_reserve("pusch.rl")
    assert str(unknown.value) == ("policy_key: got 'pusch.rl'; possible: push.rl, demos.sft; register the policy first")


# Order.


def test_fifo_by_ready_seq_not_by_creation(bench: Bench) -> None:
    """The later reserved job that is ready first is trained first."""
    first, second = bench.reserve("demos.sft"), bench.reserve("demos.sft")
    bench.mark(second, "ready")
    bench.mark(first, "ready")
    leased = bench.lease()
    assert leased["job_id"] == second
    bench.complete(second, leased["lease_token"])
    assert bench.lease()["job_id"] == first


def test_rl_precedes_sft_unless_priorities_say_otherwise() -> None:
    """Ready SFT first in time: RL goes first at a tie, and last below the SFT's priority."""
    for priority, expected in ((0, "push"), (1, "demos")):
        bench = Bench()
        bench.register("push", "rl")
        bench.register("demos", "sft", priority=priority)
        bench.ready()
        bench.ready_rl()
        assert bench.lease()["tenant_id"] == expected


def test_one_update_a_tenant_at_a_time(bench: Bench) -> None:
    """A tenant's second job waits for the first one's end; another tenant's does not."""
    first, second = bench.ready(), bench.ready()
    other = bench.ready_rl()
    assert [bench.lease()["job_id"] for _ in range(2)] == [other, first]
    assert bench.lease() is None
    token = bench.state.jobs[first].lease_token
    bench.complete(first, token)
    assert Wake("ready") in bench.last.instructions
    assert bench.lease()["job_id"] == second


def test_an_update_that_began_keeps_its_place_after_its_lease_expired() -> None:
    """A tenant's RL job of higher priority does not overtake its SFT job that was leased once."""
    bench = Bench()
    bench.register("both", "sft")
    bench.register("both", "rl", priority=9)
    began = bench.ready("both.sft")
    bench.lease(lease_s=10)
    bench.ready_rl("both.rl")
    assert bench.lease() is None
    bench.wait(10)
    again = bench.lease()
    assert (again["job_id"], again["train_seq"], again["attempts"]) == (began, 1, 2)


def test_stages_are_taken_by_priority_then_creation() -> None:
    """Of three that need advantages: the urgent one, then the oldest."""
    bench = Bench()
    bench.register("low")
    bench.register("high", priority=1)
    old, new, urgent = bench.reserve("low.rl"), bench.reserve("low.rl"), bench.reserve("high.rl")
    for job_id in (new, urgent, old):
        bench.mark(job_id, "needs_advantages")
    taken = [bench.lease("needs_advantages", holder=f"w{i}")["job_id"] for i in range(3)]
    assert taken == [urgent, old, new]


# Leases.


def test_an_expired_lease_gives_the_job_to_another_and_fences_the_first(bench: Bench) -> None:
    """Killed holder: the same job with a new token; the old holder can do nothing any more."""
    job_id = bench.ready()
    old = bench.lease(holder="dead", lease_s=10)["lease_token"]
    bench.wait(10)
    assert bench.state.jobs[job_id].state == "ready"
    assert bench.state.jobs[job_id].reason == "the lease of dead expired"
    new = bench.lease(holder="alive")["lease_token"]
    for event in (
        Complete(bench.now, job_id, old, {}),
        Fail(bench.now, job_id, "x", old),
        Fail(bench.now, job_id, "x", None),
        Renew(bench.now, job_id, old, 60.0),
        Mark(bench.now, job_id, "ready", old, None),
    ):
        assert isinstance(bench.refused(event), LeaseLost)
    assert bench.complete(job_id, new)["state"] == "completed"


def test_a_refused_event_still_lets_time_pass(bench: Bench) -> None:
    """The expired holder's own call finds its lease gone, and what expired with it is written down."""
    job_id = bench.ready()
    token = bench.lease(lease_s=10)["lease_token"]
    bench.now += 10
    with pytest.raises(LeaseLost):
        bench.complete(job_id, token)
    assert bench.disk.jobs[1]["state"] == "ready"


def test_renewal_keeps_a_lease(bench: Bench) -> None:
    """Renewed twice at 8 of 10 seconds: held until 26, gone at 26."""
    job_id = bench.ready()
    token = bench.lease(lease_s=10)["lease_token"]
    for _ in range(2):
        bench.wait(8)
        bench.do(Renew(bench.now, job_id, token, 10.0))
    bench.wait(9.9)
    assert bench.state.jobs[job_id].state == "leased"
    bench.wait(0.1)
    assert bench.state.jobs[job_id].state == "ready"


@pytest.mark.parametrize(
    ("waiting", "held"),
    [("needs_actor_forward", "computing_actor_forward"), ("needs_advantages", "computing_advantages")],
)
def test_stage_leases_expire_back_to_their_stage(bench: Bench, waiting: str, held: str) -> None:
    """Both stages: leased, expired, leased by another one; the first one's mark is refused."""
    job_id = bench.reserve()
    bench.mark(job_id, waiting)
    old = bench.lease(waiting, lease_s=5)
    assert old["state"] == held
    assert bench.lease(waiting) is None
    bench.wait(5)
    assert bench.state.jobs[job_id].state == waiting
    bench.lease(waiting)
    after = "needs_advantages" if held == "computing_actor_forward" else "ready"
    assert isinstance(bench.refused(Mark(bench.now, job_id, after, old["lease_token"], None)), LeaseLost)


def test_a_restart_gives_held_leases_their_whole_length_again(bench: Bench) -> None:
    """The scheduler was away for an hour: the holder lives and goes on with its token."""
    job_id = bench.ready()
    token = bench.lease(lease_s=10)["lease_token"]
    bench.now += 3600
    bench.restart()
    bench.wait(9)
    assert bench.complete(job_id, token)["state"] == "completed"


def test_released_jobs_keep_their_order(bench: Bench) -> None:
    """Given back and taken again before the later one."""
    first = bench.ready()
    bench.ready()
    token = bench.lease()["lease_token"]
    bench.do(Release(bench.now, first, token, "shutting down"))
    assert bench.lease()["job_id"] == first


def test_a_lease_must_name_a_possible_pair(bench: Bench) -> None:
    """The stages are named in the refusal."""
    event = Lease(bench.now, "reserved", "leased", "actor", ("vla",), "h", 1.0, None)
    assert str(bench.refused(event)) == (
        "state→leased_state: got 'reserved→leased'; possible: needs_actor_forward→computing_actor_forward, "
        "needs_advantages→computing_advantages, ready→leased; choose one"
    )
    with pytest.raises(SpecError, match="lease_s: got 0; possible: seconds above 0"):
        bench.lease(lease_s=0)


# Calls that are sent twice.


def test_a_repeated_lease_with_an_id_gives_the_held_job(bench: Bench) -> None:
    """Retry: the same lease. Reuse by another holder: refused. After its end the id may be used again."""
    first = bench.ready()
    bench.ready_rl()
    taken = bench.lease(request_id="l1")
    assert bench.lease(request_id="l1") == taken
    with pytest.raises(Conflict, match="request_id: got 'l1'; possible: the lease of"):
        bench.lease(request_id="l1", holder="other")
    bench.restart()
    assert bench.lease(request_id="l1")["job_id"] == taken["job_id"]
    bench.complete(taken["job_id"], taken["lease_token"])
    assert bench.lease(request_id="l1")["job_id"] == first


def test_repeated_moves_are_done_once(bench: Bench) -> None:
    """mark, complete, fail and drop again by the same hands: the job as it is, nothing written."""
    job_id = bench.reserve()
    bench.mark(job_id, "needs_advantages", metadata={"episodes": 4})
    token = bench.lease("needs_advantages")["lease_token"]
    assert bench.mark(job_id, "needs_advantages", metadata={"episodes": 4})["state"] == "computing_advantages"
    bench.mark(job_id, "ready", token)
    leased = bench.lease()
    bench.complete(job_id, leased["lease_token"], loss=0.5)
    assert bench.complete(job_id, leased["lease_token"], loss=0.5)["state"] == "completed"
    assert bench.last.instructions == ()
    assert bench.mark(job_id, "ready", token)["state"] == "completed"
    error = bench.refused(Complete(bench.now, job_id, leased["lease_token"], {"loss": 0.7}))
    assert str(error) == f"{job_id} metadata.loss: got 0.7; possible: 0.5, as at completed; send the same"
    failed, dropped = bench.reserve(), bench.reserve()
    for _ in range(2):
        bench.fail(failed)
        bench.drop(dropped)
    assert bench.last.instructions == ()


# Staleness.


@pytest.mark.parametrize(
    ("actor", "bound", "stale"), [(10, 10, False), (11, 10, True), (0, 0, False), (1, 0, True), (99, None, False)]
)
def test_staleness_is_actor_minus_behaviour_over_the_bound(
    bench: Bench, actor: int, bound: int | None, stale: bool
) -> None:
    """Behaviour version 0: 11 − 0 > 10 is stale, 10 − 0 is not; None is no bound."""
    job_id = bench.reserve(max_policy_staleness=bound)
    bench.mark(job_id, "needs_advantages")
    bench.mark(job_id, "ready", bench.lease("needs_advantages")["lease_token"])
    token = bench.lease()["lease_token"]
    for _ in range(2):  # the second call is a repeated one
        reply = bench.do(DropIfStale(bench.now, job_id, token, actor))
        assert reply["stale"] is stale
    job = bench.state.jobs[job_id]
    reason = f"policy_stale: actor {actor} − behaviour 0 > {bound}"
    assert (job.state, job.reason) == (("dropped", reason) if stale else ("leased", None))
    assert job.metadata.get("staleness") == (actor if stale else None)


def test_demonstrations_are_never_stale(bench: Bench) -> None:
    """SFT does not depend on the policy."""
    job_id = bench.ready()
    token = bench.lease()["lease_token"]
    assert not bench.do(DropIfStale(bench.now, job_id, token, 10_000))["stale"]


# What is written.


def test_what_could_not_be_written_is_refused_at_once(bench: Bench) -> None:
    """An object, an integer over 64 bits, a lone surrogate: before anything changes."""
    job_id = bench.reserve()
    for metadata in ({"x": object()}, {"x": 1 << 70}, {"x": "\ud800"}):
        assert isinstance(bench.refused(Mark(bench.now, job_id, "needs_advantages", None, metadata)), SpecError)
    assert isinstance(bench.refused(Reserve(bench.now, None, "push.rl", 0, 0, 0, {}, "r", "a", None)), SpecError)


def test_nan_becomes_null(bench: Bench) -> None:
    """A tenant's NaN loss must not keep its job from ending; JSON has none."""
    bench.ready()
    leased = bench.lease()
    assert bench.complete(leased["job_id"], leased["lease_token"], loss=float("nan"))["metadata"]["loss"] is None


def test_descriptors_handed_out_do_not_change(bench: Bench) -> None:
    """A reply is a copy: later moves do not reach it."""
    job_id = bench.reserve()
    reply = bench.mark(job_id, "needs_advantages", metadata={"a": 1})
    bench.fail(job_id)
    assert (reply["state"], reply["metadata"]) == ("needs_advantages", {"schema_signature": "abc", "a": 1})


def test_time_does_not_run_backwards(bench: Bench) -> None:
    """A clock that was set back: timestamps stay in order and leases last longer, not shorter."""
    job_id = bench.ready()
    bench.now -= 500
    leased = bench.lease(lease_s=10)
    assert leased["lease_expires_at"] == 1010.0
    assert bench.state.jobs[job_id].updated_at == 1000.0


def test_pruning_forgets_old_ends_alone(bench: Bench) -> None:
    """Of two ends the one before the given time; unfinished jobs stay whatever their age; counts remember."""
    old, unfinished = bench.reserve("demos.sft", request_id="r1"), bench.reserve("demos.sft")
    bench.fail(old)
    bench.wait(100)
    new = bench.ready()
    bench.fail(new)
    assert bench.do(Prune(bench.now, bench.now - 50)) == 1
    assert list(bench.state.jobs) == [unfinished, new]
    assert bench.state.policies["demos.sft"].counts["failed"] == 2
    assert bench.reserve("demos.sft", request_id="r1") == "job-00000004"
    bench.restart()
    assert bench.state.policies["demos.sft"].counts["failed"] == 2


def test_unknown_policy_fields_are_named(bench: Bench) -> None:
    """The message has the field, what is possible and what to do."""
    error = bench.refused(RegisterPolicy(bench.now, {"policy_key": "x.rl"}))
    assert "tenant_id: missing; it is required; add it" in str(error)
