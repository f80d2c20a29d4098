"""A remote environment over TCP: what it gives, who is let in, what is bounded, and what a lost connection does."""

import asyncio
import os
import re
import signal
import struct
import sys
from contextlib import asynccontextmanager

import msgpack
import numpy as np
import psutil
import pytest

from configs.environment import EnvironmentSpec
from configs.errors import AdmissionRefused, EnvironmentFault, SpecError, UnknownObject
from services import environment_tcp
from services.environment_check import check
from services.environment_client import SessionClient
from services.environment_protocol import HostClient, encode
from services.environment_server import EnvironmentServer
from tests.services.environment_specs import toy
from tests.services.test_environment_service import GO, HANG, action, gone, request, run, service

TOKEN = "the-servers-token-0123456789"
VARIABLE = "JOYNEXUS_TEST_TOKEN"


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)


def at(port, env="Counter-v0", **changes):
    """The toy environment, of a server at that port."""
    remote = {"address": f"127.0.0.1:{port}", "token_file": None, "token_variable": VARIABLE, "connect_timeout_s": 30.0}
    return toy(env, **{"remote": remote, **changes})


@asynccontextmanager
async def server(env="Counter-v0", **options):
    """A server in this process; its port and itself."""
    made = EnvironmentServer(EnvironmentSpec.model_validate(toy(env)), TOKEN, **options)
    try:
        yield await made.start("127.0.0.1", 0), made
    finally:
        await made.close()


async def until(condition):
    """Wait for what nobody tells."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def in_use(made):
    return made._pool.usage()["in_use"]


def test_a_remote_environment_gives_what_a_local_one_gives():
    """Through the service and over direct connections, on two hosts; no token is in what the opener gets or sees."""

    async def main():
        async with server() as (port, made), service() as svc:
            remote = await svc.open(request(at(port), num_envs=3, hosts=2))
            local = await svc.open(request(num_envs=3))
            assert TOKEN not in repr(remote)
            direct = SessionClient.direct(remote)
            for reset, step in (
                (
                    lambda seeds: svc.reset(local["session_id"], seeds),
                    lambda *a: svc.batch_step(local["session_id"], *a),
                ),
                (
                    lambda seeds: svc.reset(remote["session_id"], seeds),
                    lambda *a: svc.batch_step(remote["session_id"], *a),
                ),
                (direct.reset, direct.batch_step),
            ):
                first = await reset([4, 5, 6])
                np.testing.assert_array_equal(first["proprioception"], [[4, 0], [5, 0], [6, 0]])
                assert first["instructions"] == ["count from 4", "count from 5", "count from 6"]
                result = await step(action(GO, 3, 3), [None] * 3)
                np.testing.assert_array_equal(result["observation"]["proprioception"], [[4, 3], [5, 3], [6, 3]])
                np.testing.assert_array_equal(result["observation"]["images"]["front"], np.full((3, 4, 6, 3), 3))
            assert in_use(made) == 2
            await svc.close(remote["session_id"])
            await until(lambda: in_use(made) == 0)
            assert made._pool.usage()["warm"] == 2
            with pytest.raises(EnvironmentFault):
                await direct.reset([1, 2, 3])

    run(main())


async def _greet(port, token=TOKEN):
    """A bare connection after the handshake, and what the server said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    challenged = await reader.readexactly(environment_tcp.CHALLENGE_BYTES)
    writer.write(environment_tcp.answer(challenged, token))
    return reader, writer, await reader.read(1)


def test_strangers_and_garbage_are_turned_away_and_the_server_goes_on():
    """Each bad peer is dropped, unanswered; none takes a host, and a session that is open does not notice."""

    async def main():
        async with server(max_message_bytes=1 << 16) as (port, made), service() as svc:
            opened = await svc.open(request(at(port)))
            wrong = at(port) | {"name": "other"}
            os.environ[VARIABLE] = "another-token-0123456789"
            with pytest.raises(SpecError) as caught:
                await svc.open(request(wrong))
            os.environ[VARIABLE] = TOKEN
            possible = f"possible: the token that this server knows, in ${VARIABLE}; put it there"
            assert str(caught.value) == f"remote: got '127.0.0.1:{port}'; {possible}"
            # No token: the answer is 32 bytes of something else, then a frame that is never read.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.readexactly(environment_tcp.CHALLENGE_BYTES)
            writer.write(b"x" * 32 + encode({"id": 1, "op": "ping"}))
            assert await reader.read() == environment_tcp.REFUSED
            # With the token: an oversized announcement, a body that is no message, a map without an op.
            for sent in (struct.pack(">I", (1 << 16) + 1), struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1"):
                reader, writer, said = await _greet(port)
                assert said == environment_tcp.ACCEPTED
                writer.write(sent)
                assert await reader.read() == b""
            reader, writer, _ = await _greet(port)
            packed = msgpack.packb({"id": 1})
            writer.write(struct.pack(">II", 8 + len(packed), len(packed)) + packed + bytes(4))
            assert b"this connection has no session" in await reader.read(4096)
            writer.close()
            assert in_use(made) == 1
            assert (await svc.reset(opened["session_id"], [1, 2]))["proprioception"][0, 0] == 1

    run(main())


def test_an_answer_is_good_for_one_challenge_and_one_token():
    """The HMAC by hand; the same answer to another challenge, or of another token, is nobody's."""
    import hashlib
    import hmac

    first, second = environment_tcp.challenge(), environment_tcp.challenge()
    given = environment_tcp.answer(first, "a" * 32)
    assert given == hmac.new(b"a" * 32, b"joynexus environment\0" + first, hashlib.sha256).digest()
    tokens = {"one": "b" * 32, "two": "a" * 32}
    assert environment_tcp.recognised(first, given, tokens) == "two"
    assert environment_tcp.recognised(second, given, tokens) is None
    assert environment_tcp.recognised(first, b"", tokens) is None


def test_two_tenants_on_one_server_keep_apart():
    """Each has a host of its own; a session's token opens none and ends with it; one's end is not the other's."""

    async def main():
        async with server() as (port, made), service() as svc:
            ada = await svc.open(request(at(port)))
            bob = await svc.open(request(at(port), tenant_id="bob"))
            assert in_use(made) == 2
            mine, theirs = SessionClient.direct(ada), SessionClient.direct(bob)
            await mine.reset([1, 2])
            await theirs.reset([7, 8])
            await mine.batch_step(action(GO), [None, None])
            result = await theirs.batch_step(action(GO, 2, 2), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[7, 2], [8, 2]])
            address = ada["hosts"][0]["address"]
            with pytest.raises(UnknownObject, match="op: got 'configure'"):
                await HostClient(address, token=ada["hosts"][0]["token"]).call("configure", 5.0, spec={})
            with pytest.raises(EnvironmentFault, match="does not know the token"):
                await HostClient(address, token="c" * 32).call("reset", 5.0, seeds=[1, 2])
            await svc.close_tenant("ada")
            await until(lambda: in_use(made) == 1)
            with pytest.raises(EnvironmentFault, match="does not know the token"):
                await HostClient(address, token=ada["hosts"][0]["token"]).call("reset", 5.0, seeds=[1, 2])
            result = await theirs.batch_step(action(GO), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[7, 3], [8, 3]])

    run(main())


def test_a_full_server_is_waited_for_with_its_reason_and_refused_in_the_end():
    async def main():
        async with server(max_sessions=1) as (port, made), service() as svc:
            first = await svc.open(request(at(port)))
            with pytest.raises(AdmissionRefused) as caught:
                await svc.open(request(at(port), wait_s=0.0))
            full = f"127.0.0.1:{port}: sessions: got 1; possible: 0 of 1 free; try again later"
            assert str(caught.value) == f"remote.address: {full}"
            waiting = asyncio.create_task(svc.open(request(at(port), wait_s=60.0)))
            await until(lambda: "0 of 1 free" in svc._remote.reason(f"127.0.0.1:{port}"))
            rows = [row["reason"] for row in await svc.sessions() if row["state"] == "opening"]
            assert rows == [f"needs 1 hosts; {full}"]
            await svc.close(first["session_id"])
            assert (await waiting)["num_envs"] == 2
            assert in_use(made) == 1

    run(main())


def test_a_server_of_another_preset_says_in_which_fields():
    async def main():
        async with server() as (port, made), service() as svc:
            with pytest.raises(SpecError) as caught:
                await svc.open(request(at(port, max_episode_steps=9, instruction="count up")))
            assert str(caught.value) == (
                "environment.instruction: got 'count up'; possible: 'count', as the server's preset says; make them "
                "equal; environment.max_episode_steps: got 9; possible: 5, as the server's preset says; make them equal"
            )
            assert in_use(made) == 0

    run(main())


@pytest.mark.parametrize(
    ("killed", "reason"), [(False, "did not return within 4 s"), (True, "closed the connection|reset by peer")]
)
def test_a_step_that_hangs_there_or_whose_host_is_killed_ends_its_session_alone(killed, reason):
    async def main():
        async with server("Faulty-v0") as (port, made), service() as svc:
            bad = await svc.open(request(at(port, "Faulty-v0", step_timeout_s=4.0)))
            good = await svc.open(request(at(port, "Faulty-v0")))
            client = SessionClient.direct(bad)
            await client.reset([1, 2])
            await svc.reset(good["session_id"], [3, 4])
            hanging = asyncio.create_task(client.batch_step(action(HANG), [None, None]))
            result = await svc.batch_step(good["session_id"], action(GO), [None, None])
            # A sign is answered although the host is busy with a direct call.
            await svc._sessions[bad["session_id"]].hosts[0].control.call("sign", 3.0)
            if killed:
                (session,) = (s for s in made._sessions.values() if s.token == bad["hosts"][0]["token"])
                os.kill(session.host.pid, signal.SIGKILL)
            with pytest.raises(EnvironmentFault, match=reason) as caught:
                await hanging
            await svc.report_fault(bad["session_id"], str(caught.value))
            await until(lambda: in_use(made) == 1)
            assert made._pool.usage()["warm"] == 0  # the one that hangs was killed
            result = await svc.batch_step(good["session_id"], action(GO), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[3, 2], [4, 2]])

    run(main())


def test_a_silent_owners_session_ends_and_one_that_gives_signs_stays():
    async def main():
        async with server(lease_s=0.5) as (port, made):
            fields = {"spec": toy(), "num_envs": 1, "images": True, "session_token": "d" * 32, "tenant_id": "ada"}
            owners = []
            for token in ("d" * 32, "e" * 32):
                sock = await environment_tcp.connect(f"tcp://127.0.0.1:{port}", TOKEN)
                owners.append(HostClient(sock, name="server"))
                await owners[-1].call("configure", 60.0, **(fields | {"session_token": token}))
            async with asyncio.timeout(60):
                while in_use(made) > 1:
                    await owners[1].call("sign", 5.0)
                    await asyncio.sleep(0.05)
            with pytest.raises(EnvironmentFault, match="the host closed the connection"):
                await owners[0].call("sign", 5.0)
            assert (await owners[1].call("reset", 5.0, seeds=[3]))["proprioception"][0, 0] == 3

    run(main())


_SERVER = """
import asyncio, sys
from configs.environment import EnvironmentSpec
from services.environment_server import EnvironmentServer, serve
from tests.services.environment_specs import toy
server = EnvironmentServer(EnvironmentSpec.model_validate(toy("Faulty-v0")), sys.argv[1])
asyncio.run(serve(server, "127.0.0.1", int(sys.argv[2]), lambda port: print(port, flush=True)))
"""


async def _process(port=0):
    """A server in a process of its own, and its port."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, TOKEN, str(port), stdout=asyncio.subprocess.PIPE
    )
    assert made.stdout is not None
    return made, int(await made.stdout.readline())


def test_a_killed_servers_session_fails_and_the_retry_opens_it_anew_when_a_server_is_back():
    """kill -9 in the middle of a step. The running call fails at once and is not sent again; a local session goes on;
    the same request, made while nobody answers, opens another session once a server does, from a reset on."""

    async def main():
        process, port = await _process()
        async with service() as svc:
            neighbour = (await svc.open(request()))["session_id"]
            await svc.reset(neighbour, [5, 6])
            wanted = request(at(port, "Faulty-v0"))
            first = await svc.open(wanted)
            await svc.reset(first["session_id"], [1, 2])
            (host,) = [p.pid for p in psutil.Process(process.pid).children()]
            stepping = asyncio.create_task(svc.batch_step(first["session_id"], action(HANG), [None, None]))
            await until(lambda: svc._sessions[first["session_id"]].active == 1)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(EnvironmentFault) as caught:
                await stepping
            lost = (
                rf"remote environment 127\.0\.0\.1:{port}: batch_step failed \(.*\); its session ends; open a new one"
            )
            assert re.fullmatch(lost, str(caught.value))
            await gone(host)  # with its server
            retry = asyncio.create_task(svc.open(wanted))
            await until(lambda: "Connect" in svc._remote.reason(f"127.0.0.1:{port}"))
            result = await svc.batch_step(neighbour, action(GO), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[5, 1], [6, 1]])
            again, _ = await _process(port)
            try:
                second = await retry
                assert second["session_id"] != first["session_id"]
                seen = await svc.reset(second["session_id"], [1, 2])
                np.testing.assert_array_equal(seen["proprioception"], [[1, 0], [2, 0]])
            finally:
                again.terminate()
                await again.wait()

    run(main())


def test_a_server_that_does_not_answer_is_given_up_with_its_address():
    async def main():
        async with server() as (port, _):
            pass  # nobody listens there any more
        remote = at(port)["remote"] | {"connect_timeout_s": 0.5}
        async with service() as svc:
            with pytest.raises(EnvironmentFault) as caught:
                await svc.open(request(at(port, remote=remote)))
            possible = "possible: a server that answers within 0.5 s; start `joynexus env serve` there ("
            assert str(caught.value).startswith(f"remote.address: got '127.0.0.1:{port}'; {possible}")

    run(main())


def test_what_fails_at_the_server_is_told_at_once_in_its_words_and_not_tried_again():
    """No library, for instance: `connect_timeout_s` is 30 s, and no second host is started there."""

    async def main():
        async with server("Unmade-v0") as (port, made), service() as svc:
            with pytest.raises(EnvironmentFault) as caught:
                await svc.open(request(at(port, "Unmade-v0")))
            said = "configure: the simulator raised RuntimeError: no arm is attached"
            assert str(caught.value) == f"remote.address: 127.0.0.1:{port}: {said}"
            assert next(made._pool._numbers) == 2  # the next host's
            assert in_use(made) == 0

    run(main())


def test_the_check_tries_the_server_itself_and_its_token(monkeypatch):
    async def found(port, **changes):
        spec = EnvironmentSpec.model_validate(at(port, max_episode_steps=5, **changes))
        return [finding async for finding in check(spec)]

    async def main():
        async with server() as (port, made):
            said = await found(port)
            assert said[0].what == f"server 127.0.0.1:{port} knows the token and takes a session"
            assert said[-1].what.startswith("an episode of random actions was t")
            assert next(made._pool._numbers) == 2  # one host was started, there
            assert in_use(made) == 0
            (wrong,) = await found(port, instruction="count up")
            assert wrong.what == f"server 127.0.0.1:{port}"
            assert wrong.fault.startswith("environment.instruction: got 'count up'; possible: 'count', as the server")
            monkeypatch.setenv(VARIABLE, "another-token-0123456789")
            (refused,) = await found(port)
            assert "possible: the token that this server knows" in refused.fault

    run(main())
