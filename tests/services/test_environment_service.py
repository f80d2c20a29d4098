"""The service: sessions over real host processes, what happens when one hangs or dies, and who may use a host."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from configs.errors import AdmissionRefused, Conflict, EnvironmentFault, SpecError, TenantFault, UnknownObject
from services.environment_client import SessionClient
from services.environment_protocol import HostClient
from services.environment_service import EnvironmentService
from services.environments import renderer
from tests.services.environment_specs import preset, toy

HANG, DIE, RAISE, GO = -0.95, -0.7, -0.5, 0.0


def request(environment=None, **changes):
    request.count += 1
    base = {
        "environment": environment or toy(),
        "num_envs": 2,
        "hosts": 1,
        "tenant_id": "ada",
        "images": True,
        "request_id": f"r{request.count}",
        "wait_s": 0.2,
    }
    return base | changes


request.count = 0


@asynccontextmanager
async def service(max_hosts=3, **options):
    made = EnvironmentService(max_hosts, **options)
    try:
        yield made
    finally:
        await made.shutdown()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def action(value, num_envs=2, horizon=1):
    return np.full((num_envs, horizon, 1), value, np.float32)


async def pids(svc):
    return {row["session_id"]: row["pids"] for row in await svc.sessions()}


async def gone(pid):
    """Wait until the process has ended (a bounded poll: nobody tells us about another's child)."""
    async with asyncio.timeout(20):
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.02)


def test_hosts_side_by_side_give_what_one_host_gives():
    async def main():
        async with service() as svc:
            one = await svc.open(request(preset("reach"), num_envs=5))
            three = await svc.open(request(preset("reach"), num_envs=5, hosts=2))
            assert [(h["start"], h["stop"]) for h in three["hosts"]] == [(0, 2), (2, 5)]
            results = []
            for opened in (one, three):
                name = opened["session_id"]
                first = await svc.reset(name, [3, 4, 5, 6, 7])
                # Environments 1 and 4 walk to their targets, the others stand still.
                places = await svc.scene_positions(name)
                walk = (places["goal"] - places["gripper"])[:, None, :2] / 0.2 * np.ones((5, 15, 1), np.float32)
                walk[[0, 2, 3]] = 0
                chunk = await svc.batch_step(name, np.clip(walk, -0.2, 0.2).astype(np.float32), [None, 50, 51, 52, 53])
                results.append((first, chunk))
            for field in ("reward", "valid", "terminated", "truncated", "success", "final_rows"):
                np.testing.assert_array_equal(results[0][1][field], results[1][1][field])
            for a, b in (
                (results[0][0], results[1][0]),
                (results[0][1]["observation"], results[1][1]["observation"]),
                (results[0][1]["final_observation"], results[1][1]["final_observation"]),
            ):
                np.testing.assert_array_equal(a["images"]["top"], b["images"]["top"])
                np.testing.assert_array_equal(a["proprioception"], b["proprioception"])
                assert a["instructions"] == b["instructions"]

    run(main())


def test_a_vector_environment_a_host_gives_what_separate_environments_give():
    """Three environments as one and two to a host, each host's own vector environment, then all of them in a host that
    held two; seeds 0, 1, 2 end after 2, 3, 4 of the chunk's 4 steps and go on with 6, 7, 8."""

    async def main():
        vector = toy(kind="gymnasium_vector", id="tests.services.counting_environments:CountingSameStep-v0")
        single = toy(id="tests.services.counting_environments:Counting-v0")
        async with service(1 + 2) as svc:
            results = []
            for environment, hosts in ((single, 1), (vector, 2), (vector, 1)):
                opened = await svc.open(request(environment, num_envs=3, hosts=hosts, wait_s=60.0))
                await svc.reset(opened["session_id"], [0, 1, 2])
                results.append(await svc.batch_step(opened["session_id"], action(GO, 3, 4), [6, 7, 8]))
                await svc.close(opened["session_id"])
            for result in results:
                np.testing.assert_array_equal(result["reward"], [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]])
                np.testing.assert_array_equal(result["final_observation"]["proprioception"], [[0, 2], [1, 3], [2, 4]])
                np.testing.assert_array_equal(result["observation"]["proprioception"], [[6, 0], [7, 0], [8, 0]])
                assert result["observation"]["instructions"] == [f"count from {seed}" for seed in (6, 7, 8)]
            broken = toy(kind="gymnasium_vector", id="tests.services.counting_environments:CountingNoStyle-v0")
            with pytest.raises(SpecError, match=r"autoreset_mode.*: got None; possible: AutoresetMode\.NEXT_STEP"):
                await svc.open(request(broken, wait_s=60.0))

    run(main())


def test_hosts_side_by_side_hand_out_what_was_seen_before_each_action():
    """Three environments of Counter on two hosts, seeds 5, 6, 7: the state is (seed, step)."""

    async def main():
        async with service() as svc:
            opened = await svc.open(request(num_envs=3, hosts=2))
            client = SessionClient.direct(opened)
            assert [bound.tolist() for bound in client.action_bounds] == [[-1.0], [1.0]]
            assert client.versions["python"] == sys.version.split()[0]
            await client.reset([5, 6, 7])
            result = await client.batch_step(action(GO, 3, 2), [None] * 3, every_step=True)
            states = [[[seed, 0], [seed, 1]] for seed in (5, 6, 7)]
            np.testing.assert_array_equal(result["seen"]["proprioception"], states)
            assert result["seen"]["images"]["front"].shape == (3, 2, 4, 6, 3)
            client.disconnect()

    run(main())


def test_step_is_a_chunk_of_one_and_experts_work_through_the_service():
    async def main():
        async with service() as svc:
            opened = await svc.open(request(preset("reach"), num_envs=2, hosts=2))
            name = opened["session_id"]
            await svc.reset(name, [1, 2])
            result = await svc.step(name, np.zeros((2, 2), np.float32), [None, None])
            assert result["reward"].shape == (2, 1)
            episodes = await svc.expert_episodes(name, [5, 6, 7], 0.0)
            assert [e["success"] for e in episodes] == [True] * 3
            again = await svc.expert_episodes(name, [7], 0.0)
            np.testing.assert_array_equal(again[0]["images"]["top"], episodes[2]["images"]["top"])

    run(main())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (HANG, "batch_step did not return within 3 s"),
        (DIE, "the host closed the connection"),
        (RAISE, "the simulator raised RuntimeError: the gearbox broke"),
    ],
)
def test_a_fault_ends_its_session_alone_and_the_host_is_replaced(value, reason):
    async def main():
        async with service() as svc:
            bad = (await svc.open(request(toy("Faulty-v0", step_timeout_s=3.0))))["session_id"]
            good = (await svc.open(request(tenant_id="bob")))["session_id"]
            await svc.reset(bad, [1, 2])
            await svc.reset(good, [3, 4])
            (old,) = (await pids(svc))[bad]
            failing = asyncio.create_task(svc.batch_step(bad, action(value), [None, None]))
            for step in range(1, 4):
                # The neighbour goes on while the other hangs.
                result = await svc.batch_step(good, action(GO), [None, None])
                np.testing.assert_array_equal(result["observation"]["proprioception"], [[3, step], [4, step]])
            with pytest.raises(EnvironmentFault) as caught:
                await failing
            assert reason in str(caught.value)
            assert "Traceback" not in str(caught.value)
            await gone(old)
            with pytest.raises(EnvironmentFault, match="failed: "):
                await svc.reset(bad, [1, 2])
            assert list(await pids(svc)) == [good]
            # A new session of the same environment works, in another process.
            new = (await svc.open(request(toy("Faulty-v0", step_timeout_s=3.0))))["session_id"]
            assert (await pids(svc))[new] != [old]
            await svc.reset(new, [1, 2])

    run(main())


def test_a_chunk_may_take_the_bound_of_a_step_times_its_steps():
    """Four steps of 0.3 s each, of which one may take 1 s."""

    async def main():
        async with service() as svc:
            opened = await svc.open(request(toy("Slow-v0", step_timeout_s=1.0), num_envs=1))
            await svc.reset(opened["session_id"], [1])
            result = await svc.batch_step(opened["session_id"], action(GO, 1, 4), [None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[1, 4]])

    run(main())


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda client: client.reset([1]), "0.02"),
        (lambda client: client.step(action(GO, 1)[:, 0], [None]), "0.02"),
        (lambda client: client.batch_step(action(GO, 1, 4), [None]), "0.08"),
        (lambda client: client.expert_episodes([1], 0.0), "0.2"),  # of at most ten steps
    ],
)
def test_a_host_that_does_not_answer_is_given_up_after_the_steps_that_were_asked_for(call, seconds):
    async def main():
        ours, _theirs = socket.socketpair()
        bounds = {"step_timeout_s": 0.02, "max_episode_steps": 10, "action_low": [-1.0], "action_high": [1.0]}
        opened = {"session_id": "s", "num_envs": 1, "versions": {}, "hosts": [{"start": 0, "stop": 1}], **bounds}
        with pytest.raises(EnvironmentFault, match=f"did not return within {seconds} s; its session ends"):
            await call(SessionClient(opened, [HostClient(ours)]))

    run(main())


def test_a_direct_client_reports_its_fault_and_the_host_is_replaced():
    async def main():
        async with service() as svc:
            opened = await svc.open(request(toy("Faulty-v0", step_timeout_s=2.0)))
            (old,) = (await pids(svc))[opened["session_id"]]
            client = SessionClient.direct(opened)
            np.testing.assert_array_equal((await client.reset([1, 2]))["proprioception"], [[1, 0], [2, 0]])
            with pytest.raises(EnvironmentFault, match="did not return within") as caught:
                await client.batch_step(action(HANG), [None, None])
            await svc.report_fault(opened["session_id"], str(caught.value))
            await svc.report_fault(opened["session_id"], str(caught.value))
            await gone(old)
            assert await svc.sessions() == []

    run(main())


def test_a_warm_host_that_ended_unseen_is_replaced_at_its_next_session():
    """One of two was killed while nobody used them: the session has both all the same, the other one as it was."""

    async def main():
        async with service(2) as svc:
            opened = await svc.open(request(preset("reach"), hosts=2))
            before = await svc.reset(opened["session_id"], [7, 8])
            first, second = (await pids(svc))[opened["session_id"]]
            await svc.close(opened["session_id"])
            os.kill(first, signal.SIGKILL)
            await gone(first)
            again = await svc.open(request(preset("reach"), hosts=2))
            now = (await pids(svc))[again["session_id"]]
            assert second in now
            assert first not in now
            after = await svc.reset(again["session_id"], [7, 8])
            np.testing.assert_array_equal(before["images"]["top"], after["images"]["top"])
            assert (await svc.capabilities())["hosts"]["in_use"] == 2

    run(main())


def test_a_replacement_that_cannot_be_started_costs_no_place(monkeypatch):
    """As where no process or file can be had any more."""

    async def main():
        async with service(1) as svc:
            opened = await svc.open(request(toy("Faulty-v0", step_timeout_s=2.0)))
            await svc.reset(opened["session_id"], [1, 2])
            tried = asyncio.Event()

            def none_left(*_, **__):
                tried.set()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            with monkeypatch.context() as patched:
                patched.setattr(subprocess, "Popen", none_left)
                with pytest.raises(EnvironmentFault):
                    await svc.batch_step(opened["session_id"], action(DIE), [None, None])
                async with asyncio.timeout(20):
                    await tried.wait()
            again = await svc.open(request(toy("Faulty-v0")))
            await svc.reset(again["session_id"], [1, 2])

    run(main())


def test_closing_an_owner_ends_its_opening_while_it_is_prepared(monkeypatch):
    async def main():
        async with service() as svc:
            entered, going_on = asyncio.Event(), asyncio.Event()

            async def slow(_):
                entered.set()
                await going_on.wait()

            monkeypatch.setattr(svc, "_prepared", slow)
            opening = asyncio.ensure_future(svc.open(request(owner="job-1")))
            await entered.wait()
            await svc.close_owned(["job-1"])
            with pytest.raises(UnknownObject, match="was closed while it waited"):
                await opening
            assert await svc.sessions() == []

    run(main())


def test_bad_actions_are_the_tenants_fault_and_the_session_goes_on():
    async def main():
        async with service() as svc:
            name = (await svc.open(request()))["session_id"]
            await svc.reset(name, [1, 2])
            with pytest.raises(TenantFault, match="not finite"):
                await svc.batch_step(name, action(np.nan), [None, None])
            with pytest.raises(TenantFault, match="seeds: got '1 rows'; possible: 2, one an environment"):
                await svc.reset(name, [1])
            result = await svc.batch_step(name, action(GO), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[1, 1], [2, 1]])

    run(main())


def test_a_closed_sessions_host_is_reused_and_its_old_client_is_shut_out():
    async def main():
        async with service() as svc:
            first = await svc.open(request(preset("reach"), num_envs=1))
            before = await svc.reset(first["session_id"], [7])
            old = SessionClient.direct(first)
            await old.reset([8])
            (pid,) = (await pids(svc))[first["session_id"]]
            await svc.close(first["session_id"])
            await svc.close(first["session_id"])
            second = await svc.open(request(preset("reach"), num_envs=3, tenant_id="bob"))
            assert (await pids(svc))[second["session_id"]] == [pid]
            # The same bits as from the fresh process.
            warm = await svc.reset(second["session_id"], [5, 7, 6])
            np.testing.assert_array_equal(warm["images"]["top"][1], before["images"]["top"][0])
            np.testing.assert_array_equal(warm["proprioception"][1], before["proprioception"][0])
            with pytest.raises(EnvironmentFault):
                await old.reset([8])
            stranger = HostClient(second["hosts"][0]["address"], token=first["hosts"][0]["token"])
            with pytest.raises(UnknownObject, match="this session is closed"):
                await stranger.call("reset", 5.0, seeds=[1, 2, 3])
            with pytest.raises(UnknownObject, match="was closed; open a new one"):
                await svc.reset(first["session_id"], [7])

    run(main())


def test_a_host_is_recycled_after_its_number_of_sessions():
    async def main():
        async with service(sessions_per_host=2) as svc:
            seen = []
            for _ in range(3):
                opened = await svc.open(request())
                seen += (await pids(svc))[opened["session_id"]]
                await svc.close(opened["session_id"])
            assert seen[0] == seen[1] != seen[2]
            await gone(seen[0])

    run(main())


def test_a_warm_host_of_another_environment_makes_room():
    async def main():
        async with service(max_hosts=1) as svc:
            first = await svc.open(request())
            (pid,) = (await pids(svc))[first["session_id"]]
            await svc.close(first["session_id"])
            assert (await svc.capabilities())["hosts"] == {"max": 1, "in_use": 0, "warm": 1, "waiting": 0}
            await svc.open(request(preset("reach")))
            await gone(pid)

    run(main())


def test_opening_is_idempotent_by_request_id():
    async def main():
        async with service() as svc:
            wanted = request()
            both = await asyncio.gather(svc.open(wanted), svc.open(wanted))
            assert both[0] == both[1]
            assert len(await svc.sessions()) == 1
            with pytest.raises(Conflict, match="the same contents as before"):
                await svc.open(wanted | {"num_envs": 3})
            await svc.close(both[0]["session_id"])
            with pytest.raises(Conflict, match="which has ended"):
                await svc.open(wanted)

    run(main())


def test_hosts_are_bounded_queued_in_order_and_refused_with_the_reason():
    async def main():
        async with service(max_hosts=2) as svc:
            with pytest.raises(AdmissionRefused, match="hosts: got 3; possible: up to 2; ask for fewer"):
                await svc.open(request(num_envs=3, hosts=3))
            first = await svc.open(request())
            late = request(num_envs=2, hosts=2)
            with pytest.raises(AdmissionRefused, match=r"hosts: got 2; possible: '?1 of 2 free after 0.2 s"):
                await svc.open(late)
            # Asked again under the same id it waits; a later, smaller one does not overtake it.
            order = []

            async def opening(name, wanted):
                opened = await svc.open(wanted)
                order.append(name)
                return opened["session_id"]

            big_request = late | {"wait_s": 60.0, "request_id": "big"}
            big = asyncio.create_task(opening("big", big_request))
            await asyncio.sleep(0)
            small = asyncio.create_task(opening("small", request(wait_s=60.0, tenant_id="bob")))
            async with asyncio.timeout(20):
                while len(await svc.sessions()) < 3:
                    await asyncio.sleep(0)
            waiting = [row for row in await svc.sessions() if row["state"] == "opening"]
            assert [row["reason"] for row in waiting] == [
                "needs 2 hosts; 1 of 2 are in use or starting",
                "needs 1 hosts; 1 of 2 are in use or starting",
            ]
            await svc.close(first["session_id"])
            await svc.close(await big)
            await small
            assert order == ["big", "small"]
            assert await svc.close_tenant("bob") == [small.result()]
            assert await svc.sessions() == []

    run(main())


def test_a_wrong_request_starts_nothing():
    async def main():
        async with service() as svc:
            with pytest.raises(SpecError, match=r"session: hosts: got 3; possible: up to num_envs, which is 2|session"):
                await svc.open(request(hosts=3))
            with pytest.raises(SpecError, match="colour: unknown key"):
                await svc.open(request(colour="red"))
            with pytest.raises(SpecError, match="id: got 'Nowhere-v0'"):
                await svc.open(request(preset("reach", id="Nowhere-v0")))
            assert (await svc.capabilities())["hosts"]["in_use"] == 0
            with pytest.raises(UnknownObject, match="session_id: got 'x'; possible: none; open one first"):
                await svc.reset("x", [])

    run(main())


def test_a_session_whose_client_is_dead_expires_and_a_connected_one_does_not():
    async def main():
        async with service(lease_s=0.4) as svc:
            dead = await svc.open(request())
            alive = await svc.open(request())
            client = SessionClient.direct(alive)
            await client.reset([1, 2])
            async with asyncio.timeout(20):
                while len(await svc.sessions()) > 1:
                    await asyncio.sleep(0.05)
            assert list(await pids(svc)) == [alive["session_id"]]
            with pytest.raises(UnknownObject, match="closed: not used or renewed for"):
                await svc.reset(dead["session_id"], [1, 2])
            client.disconnect()
            async with asyncio.timeout(20):
                while await svc.sessions():
                    await asyncio.sleep(0.05)

    run(main())


_ORPHAN = """
import asyncio, time
from services.environment_service import EnvironmentService
from tests.services.test_environment_service import request
async def main():
    service = EnvironmentService(1)
    await service.open(request())
    print((await service.sessions())[0]["pids"][0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_hosts_die_with_their_parent():
    with subprocess.Popen([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the host outlived its parent"
        time.sleep(0.02)


def test_the_service_is_an_actor_and_hosts_are_driven_from_another_process():
    from distributed import Client, LocalCluster

    async def main():
        async with (
            LocalCluster(n_workers=1, threads_per_worker=1, asynchronous=True, dashboard_address=None) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            actor = await client.submit(EnvironmentService, 2, actor=True, pure=False)
            opened = await actor.open(request(preset("reach"), num_envs=2))
            through = await actor.reset(opened["session_id"], [1, 2])
            direct = SessionClient.direct(opened)
            np.testing.assert_array_equal((await direct.reset([1, 2]))["images"]["top"], through["images"]["top"])
            with pytest.raises(TenantFault, match="not finite"):
                await actor.batch_step(opened["session_id"], np.full((2, 1, 2), np.inf, np.float32), [None, None])
            direct.disconnect()
            await actor.close(opened["session_id"])
            with contextlib.suppress(OSError):
                await actor.shutdown()

    run(main())


def test_importing_the_service_imports_no_torch():
    code = "import sys, services.environment_service; sys.exit('torch' in sys.modules or 'sapien' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(renderer.check() is not None, reason=str(renderer.check()))
def test_a_warm_maniskill_host_shows_what_a_fresh_one_showed():
    async def main():
        async with service() as svc:
            seen = []
            for num_envs in (1, 2):
                opened = await svc.open(request(preset("pushcube"), num_envs=num_envs))
                assert opened["action_low"] == [-1.0] * 4
                assert "sapien" in opened["versions"]
                name = opened["session_id"]
                first = await svc.reset(name, [9] * num_envs)
                after = await svc.batch_step(name, np.full((num_envs, 3, 4), -0.5, np.float32), [None] * num_envs)
                seen.append((first, after["observation"], (await pids(svc))[name]))
                await svc.close(name)
            assert seen[0][2] == seen[1][2]
            for fresh, warm in zip(seen[0][:2], seen[1][:2], strict=True):
                for place in range(2):
                    np.testing.assert_array_equal(fresh["images"]["base"][0], warm["images"]["base"][place])
                    np.testing.assert_array_equal(fresh["proprioception"][0], warm["proprioception"][place])

    run(main())
