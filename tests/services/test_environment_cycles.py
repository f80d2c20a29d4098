"""Forty sessions opened, stepped and closed in a row, for every kind of simulator: none leaks, hosts are recycled.

Some simulators fail at the 40th create/close of one process; a process serves 30 sessions and is then replaced.
"""

import asyncio
import os

import numpy as np
import pytest

from configs import environment_folders
from configs.environment import EnvironmentSpec
from configs.home import Home
from services.environment_client import SessionClient
from services.environment_server import EnvironmentServer
from services.environments import renderer
from tests.services.environment_specs import preset, toy
from tests.services.test_environment_own import CODE
from tests.services.test_environment_own import own as own_environment
from tests.services.test_environment_service import pids, request, run, service

CYCLES, SESSIONS_PER_HOST = 40, 30
TOKEN = "the-servers-token-0123456789"
needs_renderer = pytest.mark.skipif(renderer.check() is not None, reason=str(renderer.check()))


async def cycles(svc, environment, *, images=True):
    """The processes that served, in order; the first and the last cycle saw the same, so nothing was carried on."""
    served, seen = [], []
    descriptors = None
    for _ in range(CYCLES):
        opened = await svc.open(request(environment, num_envs=2, images=images, wait_s=60.0))
        name = opened["session_id"]
        served += (await pids(svc))[name]
        client = SessionClient.direct(opened)
        first = await client.reset([3, 4])
        actions = np.full((2, 2, environment["action_width"]), 0.1, np.float32)
        after = (await client.batch_step(actions, [None, None]))["observation"]
        seen.append(np.concatenate([first["proprioception"], after["proprioception"]]))
        client.disconnect()
        await svc.close(name)
        descriptors = descriptors or len(os.listdir("/proc/self/fd"))
    np.testing.assert_array_equal(seen[0], seen[-1])
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3  # sockets of a session are closed with it
    assert await svc.sessions() == []
    return served


@pytest.mark.parametrize(
    ("environment", "images"),
    [
        pytest.param(preset("reach"), True, id="reach"),
        pytest.param(
            toy(kind="gymnasium_vector", id="tests.services.counting_environments:CountingSameStep-v0"),
            True,
            id="vector",
        ),
        pytest.param(preset("pushcube"), True, id="maniskill", marks=needs_renderer),
    ],
)
def test_forty_sessions_in_a_row(environment, images):
    forty_sessions(environment, images=images)


@pytest.mark.usefixtures("libero")
def test_forty_sessions_of_libero():
    forty_sessions(preset("libero-object-small"), images=True)


def forty_sessions(environment, *, images):
    async def main():
        async with service(max_hosts=1, sessions_per_host=SESSIONS_PER_HOST) as svc:
            served = await cycles(svc, environment, images=images)
            assert len(set(served)) == 2  # 30 sessions, then 10
            assert (await svc.capabilities())["hosts"] == {"max": 1, "in_use": 0, "warm": 1, "waiting": 0}

    asyncio.run(asyncio.wait_for(main(), 500))  # a simulator's host takes long to start on a busy machine


def test_forty_sessions_of_an_own_environment(tmp_path):
    (tmp_path / "code" / "toybox").mkdir(parents=True)
    (tmp_path / "code" / "toybox" / "counter.py").write_text(CODE)
    environment_folders.register(Home(tmp_path), "toys", tmp_path / "code")

    async def main():
        async with service(max_hosts=1, sessions_per_host=SESSIONS_PER_HOST, home=str(tmp_path)) as svc:
            assert len(set(await cycles(svc, own_environment()))) == 2

    run(main())


def test_forty_sessions_of_a_remote_environment(monkeypatch):
    monkeypatch.setenv("JOYNEXUS_TEST_TOKEN", TOKEN)

    async def main():
        server = EnvironmentServer(EnvironmentSpec.model_validate(preset("reach")), TOKEN, max_sessions=1)
        port = await server.start("127.0.0.1", 0)
        try:
            async with service() as svc:
                remote = {"address": f"127.0.0.1:{port}", "token_variable": "JOYNEXUS_TEST_TOKEN"}
                await cycles(svc, preset("reach", remote=remote))
            assert server._pool.usage() == {"max": 1, "in_use": 0, "warm": 1, "waiting": 0}
        finally:
            await server.close()

    run(main())
