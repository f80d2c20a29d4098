"""Leases of sessions: who is dead loses them soon, who lives keeps them, what belongs together is closed together."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from configs.errors import EnvironmentFault, UnknownObject
from services import environment_folder
from services.environment_client import SessionClient
from services.environment_folder import HostFolder
from services.environment_lease import renewed_session
from tests.services.environment_specs import toy
from tests.services.test_environment_service import DIE, action, gone, pids, request, run, service


async def ended(svc, count):
    """Wait until `count` sessions are left."""
    async with asyncio.timeout(20):
        while len(await svc.sessions()) > count:
            await asyncio.sleep(0.02)


def test_renewals_keep_a_session_that_nobody_steps_and_their_end_frees_its_host():
    async def main():
        async with service(max_hosts=2, lease_s=0.6) as svc:
            kept = await svc.open(request())
            async with renewed_session(svc, kept):
                await svc.open(request())
                await ended(svc, 1)  # the other one, which nobody renews
                assert list(await pids(svc)) == [kept["session_id"]]
            await ended(svc, 0)
            with pytest.raises(UnknownObject, match=r"closed: not used or renewed for 0\.6 s; open a new one"):
                await svc.renew(kept["session_id"])
            assert (await svc.capabilities())["hosts"]["in_use"] == 0

    run(main())


def test_renewals_end_with_their_session():
    async def main():
        async with service(lease_s=0.1) as svc:
            opened = await svc.open(request())
            async with renewed_session(svc, opened):
                renewing = next(t for t in asyncio.all_tasks() if t.get_coro().__qualname__.endswith("keep"))
                await svc.close(opened["session_id"])
                await asyncio.wait_for(renewing, 20)

    run(main())


def _step_and_stay(opened, stepped) -> None:
    async def main():
        client = SessionClient.direct(opened)
        await client.reset([1, 2])
        stepped.set()
        await asyncio.Event().wait()

    asyncio.run(main())


def test_a_killed_callers_session_ends_within_its_lease():
    """An inference worker's stand-in, with a direct connection of its own, is killed by -9."""

    async def main():
        async with service(lease_s=0.4) as svc:
            opened = await svc.open(request())
            spawn = multiprocessing.get_context("spawn")
            stepped = spawn.Event()
            caller = spawn.Process(target=_step_and_stay, args=(opened, stepped))
            caller.start()
            async with renewed_session(svc, opened):
                assert await asyncio.to_thread(stepped.wait, 60)
            async with asyncio.timeout(20):
                while not svc._checks:  # nobody renews any more: its host is asked, where its connection speaks for it
                    await asyncio.sleep(0.02)
            await asyncio.gather(*svc._checks.values())
            assert list(await pids(svc)) == [opened["session_id"]]
            os.kill(caller.pid, signal.SIGKILL)
            await ended(svc, 0)
            await asyncio.to_thread(caller.join)

    run(main())


def test_a_failed_session_is_opened_anew_under_its_request_id():
    """The caller's retry gets another session, which begins with a reset: no step is done again."""

    async def main():
        async with service() as svc:
            wanted = request(toy("Faulty-v0"))
            first = await svc.open(wanted)
            await svc.reset(first["session_id"], [1, 2])
            with pytest.raises(EnvironmentFault, match="closed the connection"):
                await svc.batch_step(first["session_id"], action(DIE), [None, None])
            again = await asyncio.gather(svc.open(wanted), svc.open(wanted))
            assert again[0] == again[1]
            assert again[0]["session_id"] != first["session_id"]
            seen = await svc.reset(again[0]["session_id"], [1, 2])
            np.testing.assert_array_equal(seen["proprioception"], [[1, 0], [2, 0]])

    run(main())


def test_closing_what_owns_sessions_closes_them_and_those_that_wait():
    async def main():
        async with service(max_hosts=2) as svc:
            mine = await svc.open(request(owner="job-1"))
            other = await svc.open(request(owner="job-2"))
            waiting = asyncio.create_task(svc.open(request(owner="job-1", wait_s=60.0)))
            async with asyncio.timeout(20):
                while len(await svc.sessions()) < 3:
                    await asyncio.sleep(0)
            assert await svc.close_owned(["job-1"]) == [mine["session_id"]]
            with pytest.raises(UnknownObject, match="of ada was closed while it waited for hosts; open a new one"):
                await waiting
            assert list(await pids(svc)) == [other["session_id"]]
            assert (await svc.capabilities())["hosts"] == {"max": 2, "in_use": 1, "warm": 1, "waiting": 0}

    run(main())


_KILLED = """
import asyncio
from services.environment_service import EnvironmentService
from tests.services.test_environment_service import request
async def main():
    service = EnvironmentService(1)
    await service.open(request())
    print(service._pool._folder.path, (await service.sessions())[0]["pids"][0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_the_folder_of_a_killed_service_is_removed_by_the_next_and_a_living_ones_stays():
    with subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True) as other:
        folder, pid = other.stdout.readline().split()
        assert Path(folder).parent == Path(tempfile.gettempdir())
        assert any(Path(folder).glob("*.sock"))
        beside = HostFolder()
        assert Path(folder).exists()  # its service lives
        other.kill()
    asyncio.run(gone(int(pid)))
    assert Path(folder) in environment_folder.sweep(Path(tempfile.gettempdir()))
    assert not Path(folder).exists()
    assert beside.path.exists()
    beside.remove()
    assert not beside.path.exists()


def test_what_is_not_a_host_folder_of_ours_is_left_alone(tmp_path):
    """A link to a folder elsewhere, a folder without a lock, and a lock that is a link: none is followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp_path / "joynexus-hosts-link").symlink_to(elsewhere)
    (tmp_path / "joynexus-hosts-older").mkdir()
    (tmp_path / "joynexus-hosts-linked").mkdir()
    (tmp_path / "joynexus-hosts-linked" / "owner.lock").symlink_to(elsewhere / "owner.lock")
    (tmp_path / "joynexus-hosts-dead").mkdir()
    (tmp_path / "joynexus-hosts-dead" / "owner.lock").touch()
    assert environment_folder.sweep(tmp_path) == [tmp_path / "joynexus-hosts-dead"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere",
        "joynexus-hosts-link",
        "joynexus-hosts-linked",
        "joynexus-hosts-older",
    ]
