"""The server of a remote environment: `joynexus env serve PRESET`.

It runs its own preset and no other: who connects says what it believes the preset to be, and is refused where the two
differ. A connection that shows the server's token may open one session, which lives as long as that connection: when
it ends, or gives no sign for `lease_s`, the session's host is killed (kept warm after an orderly `close`). A
connection that shows a session's token is joined to that session's host, as a local direct connection would be.
Everything that comes in is bounded: connections, sessions, message bytes, environments, and the seconds of a
handshake, of a frame and of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from configs.environment import EnvironmentSpec
from configs.errors import (
    AdmissionRefused,
    Conflict,
    EnvironmentFault,
    JoyNexusError,
    SpecError,
    UnknownObject,
    refusal,
)
from configs.home import Home
from configs.signature import canonical_json
from configs.spec import parse
from services import environment_tcp
from services.environment_launch import prepared
from services.environment_pool import HostPool, HostProcess
from services.environment_protocol import ProtocolError, body_length, decode, encode, error_reply, longest_s

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
FRAME_S = 30.0
"""A peer that leaves a frame half sent or half read for so long is disconnected."""
_HEADER = 4
_OWNER = "owner"
_MARGIN_S = 30.0
# What is the platform's business or this server's own.
_NOT_COMPARED = frozenset({"name", "state", "action", "remote", "own", "backend", "step_timeout_s"})


@dataclass(eq=False)
class _Session:
    """A host that belongs to one connection, and the direct connections joined to it."""

    host: HostProcess
    token: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class EnvironmentServer:
    """Serves one preset.

    Args:
        spec: the preset.
        token: of those who may open sessions.
        max_sessions: at one time, a host process each; others are refused with that reason.
        max_envs: of one session.
        max_message_bytes: of one request.
        lease_s: a session whose connection is silent for so long is ended.
        start_timeout_s: longest start of a host.
        home: of the folders that are registered here.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        token: str,
        *,
        max_sessions: int = 4,
        max_envs: int = 64,
        max_message_bytes: int = 64 << 20,
        lease_s: float = 60.0,
        start_timeout_s: float = 300.0,
        home: Home | None = None,
    ) -> None:
        self._spec = spec
        self._token = token
        self._home = home
        self._max_envs = max_envs
        self._max_message_bytes = max_message_bytes
        self._lease_s = lease_s
        self._pool = HostPool(
            max_sessions, max_idle=max_sessions, sessions_per_host=30, start_timeout_s=start_timeout_s
        )
        self._sessions: dict[str, _Session] = {}
        self._max_connections = 8 * max_sessions + 16
        self._connections: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port (port 0 takes a free one).

        Raises:
            OSError: if that is not possible there.
        """
        self._server = await asyncio.start_server(self._connected, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End every connection, session and host."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._pool.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer = ":".join(map(str, writer.get_extra_info("peername")[:2]))
        if len(self._connections) >= 2 * self._max_connections:  # of which half may be strangers
            writer.close()
            return
        self._connections.add(task)
        try:
            who = await self._recognise(reader, writer)
            if who == _OWNER:
                await self._serve_owner(reader, writer)
            elif who is not None and who in self._sessions:
                await self._join(self._sessions[who], reader, writer)
            else:
                logger.warning("connection from %s refused: no token of ours, or too many connections", peer)
        except asyncio.CancelledError:
            logger.info("connection from %s ended with its session or its server", peer)
        except (OSError, ProtocolError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.warning("connection from %s dropped: %s", peer, error or type(error).__name__)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """The handshake: `_OWNER`, a session's id, or None; nothing of the peer's is parsed before."""
        environment_tcp.keep_alive(writer.get_extra_info("socket"))
        challenged = environment_tcp.challenge()
        async with asyncio.timeout(HANDSHAKE_S):
            writer.write(challenged)
            await writer.drain()
            given = await reader.readexactly(environment_tcp.ANSWER_BYTES)
            tokens = {_OWNER: self._token, **{name: s.token for name, s in self._sessions.items()}}
            who = environment_tcp.recognised(challenged, given, tokens)
            said = environment_tcp.REFUSED if who is None else environment_tcp.ACCEPTED
            if who is not None and len(self._connections) > self._max_connections:
                who, said = None, environment_tcp.FULL
            writer.write(said)
            await writer.drain()
        return who

    async def _serve_owner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of who may open a session: one after another, until the connection ends."""
        session_id = f"remote-{secrets.token_hex(6)}"
        try:
            while True:
                body = await self._frame(reader, self._lease_s)
                if body is None:
                    return
                request = decode(body)
                request.pop("token", None)
                request_id, op = request.pop("id", -1), str(request.pop("op", None))
                try:
                    reply = {"id": request_id, "result": await self._carry_out(session_id, op, request)}
                except JoyNexusError as error:
                    reply = error_reply(request_id, error)
                except (KeyError, TypeError) as error:
                    logger.warning("%s: %s: %s", op, type(error).__name__, error)
                    reply = error_reply(request_id, SpecError(f"{op}: its fields are not those of the protocol"))
                await _send(writer, encode(reply))
                if op == "close":
                    return
        finally:
            await self._end(session_id, healthy=False)

    async def _carry_out(self, session_id: str, op: str, fields: dict[str, Any]) -> Any:
        if op == "configure":
            return await self._configure(session_id, **fields)
        if op == "sign":
            return None
        if op == "close":
            await self._end(session_id, healthy=True)  # before the reply, so that its place is free by then
            return None
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownObject(f"{op}: this connection has no session; configure it first")
        return await session.host.control.call(op, self._longest_s(op, fields), **fields)

    async def _configure(
        self, session_id: str, spec: dict[str, Any], num_envs: int, images: bool, session_token: str, tenant_id: str
    ) -> dict[str, Any]:
        if session_id in self._sessions:
            raise Conflict("configure: this connection has its session; open another connection")
        self._check(spec)
        if type(num_envs) is not int or not 0 < num_envs <= self._max_envs:
            raise SpecError(
                refusal("num_envs", num_envs, f"1 to {self._max_envs}, this server's bound", "ask for fewer")
            )
        if type(session_token) is not str or len(session_token) < 32:
            raise SpecError("session_token: got a shorter one; possible: 32 characters or more; draw such a one")
        plain, launch = await asyncio.to_thread(prepared, self._spec, self._home)
        # A tenant's own code may keep things from one session to the next.
        key = canonical_json({"images": bool(images), "of": str(tenant_id) if self._spec.own else None})
        configuration = {"spec": plain, "num_envs": num_envs, "images": bool(images), "session_token": session_token}
        try:
            hosts, replies = await self._pool.acquire(key, [configuration], wait_s=0, launch=launch)
        except AdmissionRefused:
            usage = self._pool.usage()
            raise AdmissionRefused(
                refusal("sessions", 1, f"{usage['max'] - usage['in_use']} of {usage['max']} free", "try again later")
            ) from None
        self._sessions[session_id] = _Session(hosts[0], session_token)
        return replies[0]

    def _check(self, theirs: dict[str, Any]) -> None:
        """Hold their preset against ours.

        Raises:
            SpecError: naming each field that differs.
        """
        ours = self._spec.model_dump(mode="json")
        given = parse(EnvironmentSpec, theirs, where="spec").model_dump(mode="json")
        faults = [
            refusal(
                f"environment.{name}", given[name], f"{ours[name]!r}, as the server's preset says", "make them equal"
            )
            for name in ours
            if name not in _NOT_COMPARED and given[name] != ours[name]
        ]
        if faults:
            raise SpecError("; ".join(faults))

    async def _end(self, session_id: str, *, healthy: bool) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for task in session.tasks:
            task.cancel()
        await self._pool.release(session.host, healthy=healthy and session.host.control.broken is None)

    async def _join(self, session: _Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass whole frames on to the session's host and back; the host itself reads what they say."""
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        from_host, to_host = await asyncio.open_unix_connection(session.host.address)
        try:
            while (body := await self._frame(reader, None)) is not None:
                await _send(to_host, len(body).to_bytes(_HEADER, "big") + body)
                request = decode(body)
                async with asyncio.timeout(self._longest_s(str(request.get("op")), request)):
                    header = await from_host.readexactly(_HEADER)
                    reply = await from_host.readexactly(body_length(header))
                await _send(writer, header + reply)
        finally:
            session.tasks.discard(task)
            to_host.close()

    def _longest_s(self, op: str, fields: dict[str, Any]) -> float:
        return longest_s(op, fields, self._spec.step_timeout_s, self._spec.max_episode_steps) + _MARGIN_S

    async def _frame(self, reader: asyncio.StreamReader, idle_s: float | None) -> bytearray | None:
        """One frame's body, of bounded size and duration; None where the peer closed, or was silent for `idle_s`."""
        try:
            async with asyncio.timeout(idle_s):
                first = await reader.read(1)
        except TimeoutError:
            return None
        if not first:
            return None
        async with asyncio.timeout(FRAME_S):
            header = first + await reader.readexactly(_HEADER - 1)
            return bytearray(await reader.readexactly(body_length(header, self._max_message_bytes)))


async def _send(writer: asyncio.StreamWriter, frame: bytes | bytearray) -> None:
    writer.write(frame)
    async with asyncio.timeout(FRAME_S):
        await writer.drain()


async def serve(server: EnvironmentServer, host: str, port: int, told: Any) -> None:
    """Serve until cancelled; `told` hears the port."""
    try:
        told(await server.start(host, port))
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(EnvironmentFault):
            await server.close()
