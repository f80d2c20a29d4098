"""Hosts of a remote environment, as the EnvironmentService sees them: one connection to its server for each.

Reconnecting: a lost connection is the end of its session, and a call that ran has failed; it is never sent again,
since it may have been carried out. Who opens the session again (by the same request id) gets a new one, at a reset.
Only connecting tries again: where nothing answers after 0.2 s, 0.4 s, … up to 5 s between two tries, for
`connect_timeout_s`; where the server is full likewise, for as long as the session may wait. What fails at the server
after that is told at once. Each session has its own connections, so none waits for another's.

The token is read when a session opens and is in no message, log or frame.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from configs.environment_hosting import RemoteSpec
from configs.errors import AdmissionRefused, EnvironmentFault, SpecError, refusal
from services import environment_tcp
from services.environment_launch import Launch
from services.environment_protocol import HostClient

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_ANSWER_S = 10.0
_SIGNS_S = 15.0
"""Between two signs of life to a server; it ends a session that gives none for four of them."""


class Unreachable(EnvironmentFault):
    """Nothing that answers as a server does."""


class RemoteHost:
    """One session of a remote server: the owner's connection to it."""

    pid: int | None = None  # on another machine

    def __init__(self, number: int, remote: RemoteSpec, control: HostClient) -> None:
        self.number = number
        self.address = environment_tcp.SCHEME + remote.address
        self.control = control
        self.signs = asyncio.get_running_loop().create_task(self._give_signs())

    def log_tail(self) -> str:
        """What the host wrote last lies with its server."""
        return f"see the log of the server at {self.address}"

    async def _give_signs(self) -> None:
        while True:
            await asyncio.sleep(_SIGNS_S)
            try:
                # A call that runs is a sign too; this one waits for it. The server answers for a host that is busy.
                await self.control.call("sign", 2 * _SIGNS_S)
            except EnvironmentFault as error:
                logger.info("%s", error)
                return


class RemoteHosts:
    """Opens and ends sessions of remote servers.

    Args:
        start_timeout_s: longest start of a host there.
    """

    def __init__(self, *, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count(1)
        self._hosts: set[RemoteHost] = set()
        self._waiting: dict[str, str] = {}  # address: why the last try to open a session there did not succeed

    def reason(self, address: str) -> str:
        """Why a session at `address` waits."""
        return self._waiting.get(address, f"connects to {address}")

    async def acquire(
        self, key: str, configurations: Sequence[dict[str, Any]], *, wait_s: float, launch: Launch
    ) -> tuple[list[RemoteHost], list[dict[str, Any]]]:
        """A session of the server for each configuration, all or none, and what each said to it.

        Raises:
            SpecError: the token is not there or not the server's, or the server's preset is another one.
            EnvironmentFault: nothing answers for `connect_timeout_s`, or a host there does not start.
            AdmissionRefused: the server is full for `wait_s`.
        """
        opening = [asyncio.ensure_future(self._open(configuration, wait_s)) for configuration in configurations]
        try:
            opened = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            for result in await asyncio.gather(*opening, return_exceptions=True):
                if not isinstance(result, BaseException):
                    await self.release(result[0], healthy=True)
            raise
        return [host for host, _ in opened], [reply for _, reply in opened]

    async def release(self, host: RemoteHost, *, healthy: bool) -> None:
        """End the session; the server keeps a healthy host warm and kills another."""
        self._hosts.discard(host)
        if healthy and host.control.broken is None:
            try:
                await host.control.call("close", _ANSWER_S)
            except EnvironmentFault as error:
                logger.info("%s", error)
        host.signs.cancel()
        host.control.close()

    def replace(self, key: str, configuration: dict[str, Any], launch: Launch) -> None:
        """Nothing: the server replaces its own hosts."""

    async def close(self) -> None:
        """End every session."""
        await asyncio.gather(*(self.release(host, healthy=True) for host in list(self._hosts)))

    async def _open(self, configuration: dict[str, Any], wait_s: float) -> tuple[RemoteHost, dict[str, Any]]:
        remote = RemoteSpec.model_validate(configuration["spec"]["remote"])
        token = await asyncio.to_thread(remote.token)
        sent = {**configuration, "spec": {**configuration["spec"], "remote": None}}
        clock = asyncio.get_running_loop().time
        answers_by, free_by, pause_s = clock() + remote.connect_timeout_s, clock() + wait_s, _FIRST_PAUSE_S
        try:
            while True:
                try:
                    return await self._try(remote, token, sent)
                except Unreachable as error:
                    if clock() + pause_s > answers_by:
                        possible = f"a server that answers within {remote.connect_timeout_s:g} s"
                        remedy = f"start `joynexus env serve` there ({error})"
                        raise EnvironmentFault(refusal("remote.address", remote.address, possible, remedy)) from None
                    self._waiting[remote.address] = str(error)
                except AdmissionRefused as error:
                    if clock() + pause_s > free_by:
                        raise AdmissionRefused(f"remote.address: {remote.address}: {error}") from None
                    self._waiting[remote.address] = f"{remote.address}: {error}"
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._waiting.pop(remote.address, None)

    async def _try(self, remote: RemoteSpec, token: str, sent: dict[str, Any]) -> tuple[RemoteHost, dict[str, Any]]:
        """One try.

        Raises:
            Unreachable: nothing answers; another try may succeed.
            AdmissionRefused: the server is full; likewise.
            SpecError: the token or the declaration is refused.
            EnvironmentFault: no host starts there, or the connection was lost meanwhile.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                sock = await environment_tcp.connect(environment_tcp.SCHEME + remote.address, token)
        except environment_tcp.TokenRefused:
            where = remote.token_file or f"${remote.token_variable}"
            raise SpecError(
                refusal("remote", remote.address, f"the token that this server knows, in {where}", "put it there")
            ) from None
        except environment_tcp.ServerFull as error:
            raise AdmissionRefused(str(error)) from None
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{remote.address}: {error or type(error).__name__}") from None
        control = HostClient(sock, name=f"remote environment {remote.address}")
        try:
            reply = await control.call("configure", self._start_timeout_s, **sent)
        except BaseException as error:
            lost = control.broken is not None
            control.close()
            if isinstance(error, EnvironmentFault) and not lost:  # the server's own words
                raise EnvironmentFault(f"remote.address: {remote.address}: {error}") from None
            raise
        host = RemoteHost(next(self._numbers), remote, control)
        self._hosts.add(host)
        return host, dict(reply)
