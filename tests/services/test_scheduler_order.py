"""Jobs of a policy with a declared delay: which version a rollout acts with, and that jobs meet the actor in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.scheduler_events import DropIfStale, Prune, Wake
from services.scheduler_records import delayed_version
from services.scheduler_snapshot import idle_report, snapshot
from services.training_scheduler import TrainingScheduler
from tasks.jobs import DelayedVersions
from tests.services.scheduler_cases import Bench

WAIT_S = 10.0  # longer than anything here takes


@pytest.mark.parametrize(
    ("delay", "made", "expected"),
    [
        (0, [2, 4, 6], [0, 2, 4, 6]),
        (1, [2, 4, 6], [0, 0, 2, 4]),
        (2, [2, 4, 6], [0, 0, 0, 2]),
        (5, [2, 4, 6], [0, 0, 0, 0]),
        (1, [2, None, 6], [0, 0, 2, 2]),  # job 1 failed: rollout 3 acts with what was there before it
        (0, [None, None, 2], [0, 0, 0, 2]),
        (1, [0, 2, 2], [0, 0, 0, 2]),  # job 0 made no step
    ],
)
def test_rollout_k_acts_with_what_job_k_minus_1_minus_d_made(
    delay: int, made: Sequence[int | None], expected: list[int]
) -> None:
    """By hand, for four rollouts; what later jobs made is known already and changes nothing."""
    assert [delayed_version(k, delay, made, 0) for k in range(4)] == expected


def test_the_first_version_need_not_be_zero() -> None:
    """A workload that continues acts with the version that it found."""
    assert [delayed_version(k, 1, [None, 14], 12) for k in range(4)] == [12, 12, 12, 14]


def in_order() -> Bench:
    bench = Bench()
    bench.register("push", in_order=True)
    bench.register("pick")
    return bench


def test_a_job_that_is_ready_early_waits_for_the_one_before_and_holds_up_nobody_else() -> None:
    """Job 1 fell back to its stage: job 2 is ready and not trained, another tenant's is; then 1, and then 2."""
    bench = in_order()
    first = bench.reserve()
    bench.mark(first, "needs_advantages")
    token = bench.lease("needs_advantages")["lease_token"]
    second, others = bench.ready_rl(), bench.ready_rl("pick.rl")
    assert bench.lease()["job_id"] == others
    assert bench.lease() is None
    reason = snapshot(bench.state)["policies"]["push.rl"]["training"]
    assert reason == f"1 ready jobs wait for the end of {first} (computing_advantages): push.rl trains in order"
    bench.restart()
    assert bench.lease() is None
    bench.mark(first, "ready", token)
    leased = bench.lease()
    assert leased["job_id"] == first
    assert bench.lease() is None
    bench.complete(first, leased["lease_token"], version=2)
    assert Wake("ready") in bench.last.instructions
    assert bench.lease()["job_id"] == second


def test_a_job_that_fails_or_is_dropped_lets_the_next_one_through() -> None:
    """Of three the second fails before the first has ended: the third follows the first."""
    bench = in_order()
    first, second, third = bench.ready_rl(), bench.reserve(), bench.ready_rl()
    bench.fail(second)
    assert bench.lease()["job_id"] == first
    bench.drop(first)
    assert bench.lease()["job_id"] == third


def test_the_actor_forward_waits_too_and_advantages_do_not() -> None:
    """What the actor is asked depends on its version, so it waits for the job before; nobody looks for it in vain."""
    bench = in_order()
    first, second, third = bench.reserve(), bench.reserve(), bench.reserve()
    bench.mark(first, "needs_advantages")
    bench.mark(second, "needs_actor_forward")
    bench.mark(third, "needs_advantages")
    assert not bench.state.stages.any_in("needs_actor_forward")
    assert bench.lease("needs_actor_forward") is None
    assert [bench.lease("needs_advantages")["job_id"] for _ in range(2)] == [first, third]
    bench.drop(first)
    assert Wake("needs_actor_forward") in bench.last.instructions
    assert bench.state.stages.any_in("needs_actor_forward")
    assert bench.lease("needs_actor_forward")["job_id"] == second


def test_without_a_declared_delay_the_first_that_is_ready_is_trained() -> None:
    """The same history as above, of a policy that declares nothing."""
    bench = Bench()
    bench.register("push")
    bench.reserve()
    second = bench.ready_rl()
    assert bench.lease()["job_id"] == second


def test_jobs_dropped_as_stale_are_counted_apart_and_remembered() -> None:
    """Two dropped, one for its age; pruned and after a restart it still counts; a new workload has none."""
    bench = Bench()
    bench.register("push")
    stale, cancelled = bench.ready_rl(), bench.reserve()
    bench.do(DropIfStale(bench.now, stale, bench.lease()["lease_token"], 11))
    bench.drop(cancelled, reason="cancelled in Prefect")
    report = idle_report(bench.state.policies["push.rl"])
    assert (report["dropped"], report["stale"]) == (2, 1)
    bench.restart()
    bench.do(Prune(bench.now, bench.now + 1))
    assert not bench.state.jobs
    bench.restart()
    assert bench.state.policies["push.rl"].stale == 1
    bench.close()
    bench.register("push")
    assert bench.state.policies["push.rl"].stale == 0


class Here:
    """A connection to one scheduler in this process."""

    def __init__(self, actor: TrainingScheduler) -> None:
        self.actor = actor

    async def scheduler(self) -> TrainingScheduler:
        """The scheduler."""
        return self.actor


def test_the_next_rollouts_version_is_waited_for_and_taken_from_the_job(tmp_path: Path) -> None:
    """d = 1. Rollout 1 waits for nobody, rollout 2 for job 0; job 1 fails first, so rollout 3 keeps job 0's version."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        spec = {"policy_key": "push.rl", "tenant_id": "push", "task_type": "rl", "domain": "vla", "priority": 0}
        bounds = {"max_in_flight": 8, "completion_target": None, "max_active_rollouts": None, "in_order": True}
        await actor.register_policy(spec | bounds)
        versions, platform = DelayedVersions(1, 5), Here(actor)

        async def reserve(expected: int) -> str:
            assert await versions.next(platform) == expected
            made = await actor.reserve(None, "push.rl", 64, expected, 10, {})
            versions.reserved(made["job"]["job_id"])
            return str(made["job"]["job_id"])

        first, second = await reserve(5), await reserve(5)
        waiting = asyncio.create_task(versions.next(platform))
        await actor.fail(second, "EnvironmentFault: host 0 died")  # wakes who waits, and is not what is waited for
        unended = await actor.wait_ended(first, 0)
        assert unended["state"] == "reserved"
        assert not waiting.done()
        leased: dict[str, Any] = {}
        for state, held in (("needs_advantages", "computing_advantages"), ("ready", "leased")):
            await actor.mark(first, state, leased.get("lease_token"))
            leased = (await actor.lease_stage(state, held, "actor", "vla", "h", 60))["job"]
        await actor.complete(first, leased["lease_token"], {"version": 9})
        async with asyncio.timeout(WAIT_S):
            assert await waiting == 9
            await reserve(9)
            assert await versions.next(platform) == 9
        await actor.close()

    asyncio.run(scenario())
