"""The scheduler actor: durability, waiting, repeated calls, restarts, and life in a Dask worker."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from configs import errors
from configs.errors import Conflict, JoyNexusError, LeaseLost, ServiceUnavailable, SpecError, UnknownObject
from services.training_scheduler import TrainingScheduler, raise_error

WAIT_S = 10.0  # longer than anything here takes: a test that needs it fails


def policy(tenant: str = "push", task: str = "rl", **other: Any) -> dict[str, Any]:
    """A policy with bounds that nothing here reaches unless it says so."""
    return {
        "policy_key": f"{tenant}.{task}",
        "tenant_id": tenant,
        "task_type": task,
        "domain": "vla",
        "priority": 0,
        "max_in_flight": 8,
        "completion_target": None,
        "max_active_rollouts": None,
    } | other


def request(policy_key: str = "push.rl", request_id: str | None = None, **other: Any) -> dict[str, Any]:
    """Arguments of a reservation."""
    return {
        "request_id": request_id,
        "policy_key": policy_key,
        "sample_count": 64,
        "behavior_policy_version": 0,
        "max_policy_staleness": 10,
        "metadata": {"schema_signature": "abc"},
    } | other


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run one scenario on its own event loop."""
    asyncio.run(scenario)


async def to_ready(actor: TrainingScheduler, policy_key: str = "demos.sft") -> dict[str, Any]:
    """Reserve an SFT job and bring it to ready."""
    job = (await actor.reserve(**request(policy_key, behavior_policy_version=None)))["job"]
    return await actor.mark(job["job_id"], "ready")


def test_an_rl_job_goes_through_all_stages(tmp_path: Path) -> None:
    """Reserve → actor forward → advantages → ready → leased → completed; the story tells every move."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy())
        job = (await actor.reserve(**request()))["job"]
        assert job["state"] == "reserved"
        assert job["partition_id"] == "job-00000001.vla.push.rl"
        await actor.mark(job["job_id"], "needs_actor_forward", metadata={"episodes": 4})
        leased = await actor.lease_stage("needs_actor_forward", "computing_actor_forward", "actor", "vla", "w1", 60)
        await actor.mark(job["job_id"], "needs_advantages", leased["job"]["lease_token"])
        leased = await actor.lease_stage("needs_advantages", "computing_advantages", "actor", "vla", "w1", 60)
        await actor.mark(job["job_id"], "ready", leased["job"]["lease_token"])
        leased = await actor.lease_next("actor", ["vla"], "trainer", 60)
        done = await actor.complete(job["job_id"], leased["job"]["lease_token"], {"actor_version": 4})
        assert (done["state"], done["train_seq"], done["attempts"]) == ("completed", 1, 3)
        assert done["metadata"] == {"schema_signature": "abc", "episodes": 4, "actor_version": 4}
        story = await actor.story(job["job_id"])
        assert [change["state"] for change in story] == [
            "reserved",
            "needs_actor_forward",
            "computing_actor_forward",
            "needs_advantages",
            "computing_advantages",
            "ready",
            "leased",
            "completed",
        ]
        assert story[1]["metadata"] == {"episodes": 4}
        assert await actor.counts() == {state: int(state == "completed") for state in await actor.counts()}
        await actor.close()

    run(scenario())


def test_a_killed_actor_is_restored_from_its_journal_alone(tmp_path: Path) -> None:
    """Without a close: jobs, counters, leases and request ids are what they were, and a holder goes on."""
    path = str(tmp_path / "journal.sqlite")

    async def scenario() -> None:
        first = TrainingScheduler(path, 3)
        await first.register_policy(policy("demos", "sft"))
        await first.register_policy(policy())
        await first.close_policy("push.rl", "over")
        await to_ready(first)
        await to_ready(first)
        await first.reserve(**request("demos.sft", "r1", behavior_policy_version=None))
        leased = (await first.lease_next("actor", ["vla"], "trainer", 60))["job"]
        jobs, counts = await first.jobs(), await first.counts()

        second = TrainingScheduler(path, 3)
        second._state.validate()
        assert [{**job, "lease_expires_at": None} for job in await second.jobs()] == [
            {**job, "lease_expires_at": None} for job in jobs
        ]
        assert await second.counts() == counts
        assert await second.counts_by_tenant() == {"demos": counts}
        again = await second.reserve(**request("demos.sft", "r1", behavior_policy_version=None))
        assert again["job"]["job_id"] == "job-00000003"
        assert (await second.complete(leased["job_id"], leased["lease_token"], {}))["state"] == "completed"
        following = (await second.lease_next("actor", ["vla"], "trainer", 60))["job"]
        assert (following["job_id"], following["train_seq"]) == ("job-00000002", 2)
        assert following["lease_token"] > leased["lease_token"]
        new = (await second.reserve(**request("demos.sft", behavior_policy_version=None)))["job"]
        assert new["job_id"] == "job-00000004"
        assert (await second.reserve(**request()))["rule"] == "closed"

    run(scenario())


def test_an_older_actor_on_the_same_journal_is_fenced(tmp_path: Path) -> None:
    """Two actors, one journal: the older one can write no more and says so, also on the next call."""

    async def scenario() -> None:
        old = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await old.register_policy(policy())
        new = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match="a newer scheduler has the journal"):
                await old.reserve(**request())
        with pytest.raises(ServiceUnavailable):
            await old.counts()
        assert (await new.reserve(**request()))["job"]["job_id"] == "job-00000001"

    run(scenario())


def test_concurrent_calls_share_commits(tmp_path: Path) -> None:
    """A hundred reservations at once take far fewer transactions, and all are on disk when they are answered."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy("demos", "sft", max_in_flight=1000))
        groups = []
        commit = actor._commits._write
        actor._commits._write = lambda records: (groups.append(records), commit(records))[1]
        await asyncio.gather(*(actor.reserve(**request("demos.sft", f"r{i}")) for i in range(100)))
        assert len(groups) < 10
        assert len(list(actor._journal.jobs())) == 100

    run(scenario())


def test_a_waiter_is_woken_by_the_event(tmp_path: Path) -> None:
    """wait_for_ready, wait_for_state, changes_since and wait_policy_idle return when it happens, not before."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy("demos", "sft", completion_target=1))
        await actor.register_policy(policy())
        ready = asyncio.create_task(actor.wait_for_ready("actor", ["vla"], WAIT_S))
        idle = asyncio.create_task(actor.wait_policy_idle("demos.sft", WAIT_S))
        stage = asyncio.create_task(actor.wait_for_state("needs_advantages", WAIT_S))
        changes = asyncio.create_task(actor.changes_since(0, 10, WAIT_S))
        await asyncio.sleep(0)
        assert not await actor.wait_for_ready("actor", ["vla"], 0)
        assert not any(task.done() for task in (ready, idle, stage, changes))
        job = await to_ready(actor)
        assert await ready
        assert (await changes)["changes"][0]["job_id"] == job["job_id"]
        rollout = (await actor.reserve(**request()))["job"]
        assert not stage.done()
        await actor.mark(rollout["job_id"], "needs_advantages")
        assert await stage
        leased = (await actor.lease_next("actor", ["vla"], "trainer", 60))["job"]
        assert not idle.done()
        await actor.complete(leased["job_id"], leased["lease_token"], {})
        report = {"completed": 1, "failed": 0, "dropped": 0, "stale": 0, "open": 0, "closed": None, "holder": None}
        assert await idle == report | {"idle": True}
        assert not (await actor.wait_policy_idle("push.rl", 0))["idle"]

    run(scenario())


def test_a_lease_expires_on_the_actors_own_clock(tmp_path: Path) -> None:
    """A holder that is gone: somebody who waits gets the job again, without any other call."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy("demos", "sft"))
        await to_ready(actor)
        dead = (await actor.lease_next("actor", ["vla"], "dead", 0.1))["job"]
        assert not await actor.wait_for_ready("actor", ["vla"], 0)
        assert await actor.wait_for_ready("actor", ["vla"], WAIT_S)
        taken = (await actor.lease_next("actor", ["vla"], "living", 60))["job"]
        assert (taken["job_id"], taken["attempts"]) == (dead["job_id"], 2)
        with pytest.raises(LeaseLost, match="held by living; discard the result"):
            await actor.complete(dead["job_id"], dead["lease_token"], {})

    run(scenario())


def test_admission_is_waited_for_in_turns(tmp_path: Path) -> None:
    """One rollout in all, two tenants that always want one: they alternate."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 1)
        order: list[str] = []

        async def producer(tenant: str) -> None:
            await actor.register_policy(policy(tenant))
            for _ in range(4):
                while (reply := await actor.reserve(**request(f"{tenant}.rl")))["job"] is None:
                    assert await actor.wait_admission(f"{tenant}.rl", WAIT_S)
                order.append(tenant)
                await asyncio.sleep(0)
                await actor.mark(reply["job"]["job_id"], "needs_advantages")

        await asyncio.gather(producer("a"), producer("b"))
        assert order == ["a", "b"] * 4

    run(scenario())


def test_apply_runs_each_command_on_its_own(tmp_path: Path) -> None:
    """Several verbs in one call: replies in order, an error stays with its command."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        results = await actor.apply(
            [
                {"verb": "register_policy", "policy": policy("demos", "sft")},
                {"verb": "reserve", **request("demos.sft", behavior_policy_version=None)},
                {"verb": "mark", "job_id": "job-00000001", "state": "completed"},
                {"verb": "mark", "job_id": "job-00000001", "state": "ready"},
                {"verb": "lease_next", "consumer_role": "actor", "domains": ["vla"], "holder": "t", "lease_s": 9},
                {"verb": "lease_next", "consumer_role": "actor"},
                {"verb": "counts"},
            ]
        )
        assert [result["error"] and result["error"]["kind"] for result in results] == [
            None,
            None,
            "Conflict",
            None,
            None,
            "SpecError",
            "SpecError",
        ]
        assert raise_error(results[4])["job"]["job_id"] == "job-00000001"
        with pytest.raises(Conflict, match=r"mark: got 'completed'; possible: ready, failed, dropped"):
            raise_error(results[2])
        with pytest.raises(SpecError, match="lease_next arguments"):
            raise_error(results[5])

    run(scenario())


def test_pruned_jobs_are_gone_after_a_restart_and_still_counted(tmp_path: Path) -> None:
    """Descriptors and stories go by age; the completion target still knows of them, and ids are not used again."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy("demos", "sft", completion_target=2))
        await to_ready(actor)
        leased = (await actor.lease_next("actor", ["vla"], "t", 60))["job"]
        await actor.complete(leased["job_id"], leased["lease_token"], {})
        assert await actor.prune(3600) == 0
        assert await actor.prune(-1) == 1
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        assert await actor.jobs() == []
        assert (await actor.changes_since(0, 10, 0))["changes"] == []
        assert (await actor.wait_policy_idle("demos.sft", 0))["completed"] == 1
        assert (await to_ready(actor))["job_id"] == "job-00000002"
        refused = await actor.reserve(**request("demos.sft", behavior_policy_version=None))
        assert refused["rule"] == "completion_bound"

    run(scenario())


def test_jobs_are_selected(tmp_path: Path) -> None:
    """By policy and state, the newest ones in order of creation; an unknown state is named."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 3)
        await actor.register_policy(policy("demos", "sft"))
        await actor.register_policy(policy())
        for _ in range(3):
            await to_ready(actor)
        await actor.reserve(**request())
        assert [job["created_seq"] for job in await actor.jobs(states=["ready"], limit=2)] == [2, 3]
        assert [job["created_seq"] for job in await actor.jobs("push.rl")] == [4]
        with pytest.raises(SpecError, match="states: got \\['done'\\]; possible: reserved, "):
            await actor.jobs(states=["done"])
        with pytest.raises(UnknownObject, match="job_id: got 'job-9'; possible: 4 jobs, the newest job-00000004"):
            await actor.job("job-9")

    run(scenario())


def test_the_snapshot_says_why_nothing_runs(tmp_path: Path) -> None:
    """In the words of the rule that refuses, and of the turn that is waited for."""

    async def scenario() -> None:
        actor = TrainingScheduler(str(tmp_path / "journal.sqlite"), 1)
        await actor.register_policy(policy("demos", "sft", max_in_flight=2))
        await actor.register_policy(policy())
        await actor.register_policy(policy("pick"))
        await to_ready(actor)
        await to_ready(actor)
        await actor.reserve(**request())
        leased = (await actor.lease_next("actor", ["vla"], "trainer-1", 60))["job"]
        seen = await actor.snapshot()
        assert seen["policies"]["demos.sft"]["admission"].startswith("demos.sft has 2 unfinished jobs, its bound is 2")
        assert seen["policies"]["demos.sft"]["training"] == (
            f"1 ready jobs wait for {leased['job_id']}, which trainer-1 trains: one update a tenant at a time"
        )
        assert seen["policies"]["pick.rl"]["admission"].startswith("1 rollouts are active over all tenants")
        assert [lease["holder"] for lease in seen["leases"]] == ["trainer-1"]

    run(scenario())


@pytest.mark.parametrize("kind", [value for value in vars(errors).values() if isinstance(value, type)])
def test_errors_survive_pickling(kind: type[JoyNexusError]) -> None:
    """All of them cross an actor: the class and the message arrive."""
    error = pickle.loads(pickle.dumps(kind("x: got 1; possible: 2; choose 2")))
    assert (type(error), str(error)) == (kind, "x: got 1; possible: 2; choose 2")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A Dask worker in a process of its own."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        ) as cluster,
        Client(cluster, direct_to_workers=True) as client,
    ):
        yield client


def test_a_worker_process_holds_it(client: Client, tmp_path: Path) -> None:
    """Calls, waits and errors cross the process border; torch is not imported for it."""
    actor = client.submit(TrainingScheduler, str(tmp_path / "journal.sqlite"), 3, actor=True, pure=False).result()
    actor.register_policy(policy("demos", "sft")).result(WAIT_S)
    ready = actor.wait_for_ready("actor", ["vla"], WAIT_S)
    job = actor.reserve(**request("demos.sft", "r1")).result(WAIT_S)["job"]
    assert actor.mark(job["job_id"], "ready").result(WAIT_S)["state"] == "ready"
    assert ready.result(WAIT_S)
    with pytest.raises(Conflict, match="request_id: got 'r1'; possible: the contents that made job-00000001"):
        actor.reserve(**request("demos.sft", "r1", sample_count=1)).result(WAIT_S)
    assert client.run(lambda: "torch" in __import__("sys").modules) == {client.nthreads().popitem()[0]: False}


def test_a_killed_worker_loses_nothing_that_was_answered(client: Client, tmp_path: Path) -> None:
    """kill -9 on the worker; a new actor in the next one has every answered reservation."""
    path = str(tmp_path / "journal.sqlite")
    actor = client.submit(TrainingScheduler, path, 3, actor=True, pure=False).result()
    actor.register_policy(policy("demos", "sft", max_in_flight=100)).result(WAIT_S)
    answered = [actor.reserve(**request("demos.sft", f"r{i}")).result(WAIT_S)["job"]["job_id"] for i in range(20)]
    (pid,) = client.run(os.getpid).values()
    os.kill(pid, 9)
    client.wait_for_workers(1, timeout=30)
    actor = client.submit(TrainingScheduler, path, 3, actor=True, pure=False).result(30)
    assert [job["job_id"] for job in actor.jobs().result(WAIT_S)] == answered
