"""Environment hosts as processes: started, handed out, kept warm, recycled, killed.

A ManiSkill host's first picture costs 12 to 14 s, so a host whose session closed is kept for a later session of the
same environment. After a bounded number of sessions it is replaced: some simulators fail at the 40th create/close
of one process. Hosts are children of this process and die with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import AdmissionRefused, EnvironmentFault, JoyNexusError, refusal
from services.environment_folder import HostFolder
from services.environment_launch import Launch, container_command
from services.environment_protocol import HostClient

logger = logging.getLogger(__name__)
PLAIN = Launch()
"""A child of this interpreter."""


class HostProcess:
    """One child process and the control connection to it."""

    def __init__(self, number: int, folder: Path, key: str, launch: Launch) -> None:
        self.number = number
        self.key = key
        self.sessions = 0
        self.address = str(folder / f"{number}.sock")
        self._log = folder / f"{number}.log"
        name = f"{folder.name}-{number}"
        self._container = None if launch.engine is None else (launch.engine, name)
        if self._container is not None:
            sockets = folder / str(number)  # not those of other hosts
            sockets.mkdir(mode=0o700)
            self.address = str(sockets / "host.sock")
            self._start(container_command(launch, name, sockets), launch)
            self.control = HostClient(str(sockets / "control.sock"), name=f"environment host {number}")
            return
        ours, theirs = socket.socketpair()
        # No shell, no preexec: the child itself asks to die with us. It is started from the event loop's thread,
        # whose end is what "the parent died" means to Linux.
        with theirs:
            self._start(
                [
                    *(launch.interpreter, "-m", "services.environment_host"),
                    *("--control-fd", str(theirs.fileno()), "--listen", self.address, "--parent", str(os.getpid())),
                ],
                launch,
                theirs.fileno(),
            )
        self.control = HostClient(ours, name=f"environment host {number}")

    def _start(self, command: list[str], launch: Launch, *passed: int) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.environment(),
            )

    async def listening(self, timeout_s: float) -> None:
        """Wait for the control socket of a container; that of a child is there from the start.

        Raises:
            EnvironmentFault: it ended, or took too long.
        """
        if self._container is None:
            return
        until = asyncio.get_running_loop().time() + timeout_s
        while not Path(self.address).exists():  # made after the control socket
            if self._process.poll() is not None or asyncio.get_running_loop().time() > until:
                said = self.log_tail(1)
                raise EnvironmentFault(f"own.image: its container did not start ({said}); run it by hand to see why")
            await asyncio.sleep(0.05)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that the process wrote; for our log, not for a tenant."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def kill(self) -> None:
        """End the process now, by its id, whatever it does. It is reaped in the background: freeing a simulator's
        memory takes a while, and this runs on an event loop."""
        self.control.close()
        self._process.kill()
        if self._container is not None:  # what was killed is the engine's client alone
            engine, name = self._container
            threading.Thread(target=_remove_container, args=(engine, name), daemon=True).start()
        threading.Thread(target=self._process.wait, daemon=True).start()
        for path in (Path(self.address), self._log):
            path.unlink(missing_ok=True)


def _remove_container(engine: str, name: str) -> None:
    subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=60)


@dataclass(eq=False)
class _Waiter:
    """An `acquire` that waits its turn."""

    count: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class HostPool:
    """At most `max_hosts` hosts at one time, in use or warm; first come, first served.

    Args:
        max_hosts: processes at one time.
        max_idle: warm ones kept after their session closed.
        sessions_per_host: sessions after which a host is replaced.
        start_timeout_s: longest start, first picture included.
    """

    def __init__(self, max_hosts: int, *, max_idle: int, sessions_per_host: int, start_timeout_s: float) -> None:
        self._max_hosts = max_hosts
        self._max_idle = max_idle
        self._sessions_per_host = sessions_per_host
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count(1)
        self._reserved = 0  # hosts in use, or promised to an `acquire` that is starting them
        self._idle: list[HostProcess] = []  # least recently used first
        self._all: set[HostProcess] = set()  # all and only living hosts, idle or in use
        self._waiters: deque[_Waiter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: HostFolder | None = None

    def usage(self) -> dict[str, int]:
        """Counts: `max`, `in_use`, `warm`, `waiting`."""
        return {
            "max": self._max_hosts,
            "in_use": self._reserved,
            "warm": len(self._idle),
            "waiting": sum(waiter.count for waiter in self._waiters),
        }

    async def acquire(
        self, key: str, configurations: Sequence[dict[str, Any]], *, wait_s: float, launch: Launch = PLAIN
    ) -> tuple[list[HostProcess], list[dict[str, Any]]]:
        """Hosts, one a configuration, warm ones of `key` first; all or none.

        Args:
            key: hosts of equal key are interchangeable.
            configurations: fields of `configure` for each host.
            wait_s: how long to queue while others use the hosts.
            launch: how new ones are started.

        Returns:
            The hosts and what each said to its configuration.

        Raises:
            AdmissionRefused: more than there can ever be, or none came free in time.
            JoyNexusError: a host could not be configured (SpecError for a wrong declaration).
        """
        count = len(configurations)
        if count > self._max_hosts:
            raise AdmissionRefused(refusal("hosts", count, f"up to {self._max_hosts}", "ask for fewer"))
        await self._turn(count, wait_s)
        hosts: list[HostProcess] = []
        try:
            warm = [host for host in self._idle if host.key == key][-count:]
            for host in warm:
                self._idle.remove(host)
                hosts.append(host)
            while len(hosts) < count:
                hosts.append(self._start(key, launch))

            async def configured(place: int) -> dict[str, Any]:
                try:
                    return await self._configure(hosts[place], configurations[place])
                except EnvironmentFault:
                    if place >= len(warm):
                        raise
                # It ended, or stopped to answer, while nobody used it: that is no fault of this session's.
                self._kill(hosts[place])
                hosts[place] = self._start(key, launch)
                return await self._configure(hosts[place], configurations[place])

            replies = await asyncio.gather(*map(configured, range(count)), return_exceptions=True)
            for reply in replies:
                if isinstance(reply, BaseException):
                    raise reply
        except BaseException:
            for host in hosts:
                self._kill(host)
            self._return(count)
            raise
        return hosts, [reply for reply in replies if isinstance(reply, dict)]

    async def release(self, host: HostProcess, *, healthy: bool) -> None:
        """Take a host back: kept warm if it is healthy, answers, and is not due for replacement; else killed."""
        keep = healthy and host.sessions < self._sessions_per_host and self._max_idle > 0
        if keep:
            try:
                await host.control.call("ping", 5.0)
            except EnvironmentFault:
                keep = False
        if keep:
            self._idle.append(host)
            while len(self._idle) > self._max_idle:
                self._kill(self._idle.pop(0))
        else:
            self._kill(host)
        self._return(1)

    def replace(self, key: str, configuration: dict[str, Any], launch: Launch = PLAIN) -> None:
        """Start a warm host in the background in place of a failed one, if there is room for it."""
        task = asyncio.get_running_loop().create_task(self._replace(key, configuration, launch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every host."""
        for task in list(self._tasks):
            task.cancel()
        for host in list(self._all):
            self._kill(host)
        self._idle.clear()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _replace(self, key: str, configuration: dict[str, Any], launch: Launch) -> None:
        if self._reserved + len(self._idle) >= self._max_hosts or self._waiters or len(self._idle) >= self._max_idle:
            return
        self._reserved += 1
        host: HostProcess | None = None
        try:
            host = self._start(key, launch)
            await self._configure(host, configuration)
        except BaseException as error:
            if host is not None:
                self._kill(host)
            self._return(1)
            if not isinstance(error, (JoyNexusError, OSError)):
                raise
            logger.warning("a replacement host did not start: %s", error)
            return
        await self.release(host, healthy=True)

    async def _turn(self, count: int, wait_s: float) -> None:
        if not self._waiters and self._reserved + count <= self._max_hosts:
            self._reserved += count
            return
        waiter = _Waiter(count)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.turn
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._wake()
            elif not waiter.turn.cancelled():
                # Its turn came in the very moment it gave up.
                self._return(count)
            if not isinstance(error, TimeoutError):
                raise
            free = self._max_hosts - self._reserved
            raise AdmissionRefused(
                refusal(
                    "hosts",
                    count,
                    f"{free} of {self._max_hosts} free after {wait_s:g} s",
                    "try again when a session closes, ask for fewer, or raise max_environment_hosts",
                )
            ) from None

    def _return(self, count: int) -> None:
        self._reserved -= count
        self._wake()

    def _wake(self) -> None:
        # Strictly in order: a request for few hosts does not overtake one for many, which would starve that one.
        while self._waiters and self._reserved + self._waiters[0].count <= self._max_hosts:
            waiter = self._waiters.popleft()
            if not waiter.turn.done():
                self._reserved += waiter.count
                waiter.turn.set_result(None)

    def _start(self, key: str, launch: Launch) -> HostProcess:
        while self._idle and len(self._all) >= self._max_hosts:
            self._kill(self._idle.pop(0))
        if self._folder is None:
            self._folder = HostFolder()
        host = HostProcess(next(self._numbers), self._folder.path, key, launch)
        self._all.add(host)
        return host

    async def _configure(self, host: HostProcess, configuration: dict[str, Any]) -> dict[str, Any]:
        host.sessions += 1
        try:
            await host.listening(self._start_timeout_s)
            reply = await host.control.call("configure", self._start_timeout_s, **configuration)
        except EnvironmentFault:
            logger.warning("environment host %d (pid %d) failed:\n%s", host.number, host.pid, host.log_tail())
            raise
        return dict(reply)

    def _kill(self, host: HostProcess) -> None:
        self._all.discard(host)
        host.kill()
