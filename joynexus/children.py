"""Child processes of the supervisor: how each is started, kept alive with back-off, and ended.

Not to be confused with Dask's nannies: those restart a worker process inside a living Dask; a scheduler that dies
takes workers and nannies with it, so what restarts all of them stands here, outside Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from configs.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STABLE_S = 60.0  # a child that lived so long starts again without delay
_EARLY_EXITS = 3  # a child that ended so often before it was ever ready is given up


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on now; another process may still take one first: retry with others."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


# A statistical profiler stops a Dask worker's event loop 100 times a second to look at its task threads; resident
# actors compute in threads of their own, so it sees nothing and takes time from every environment step.
_QUIET_DASK = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "200ms",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "2s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__DISK": "False",
}
# Setting one of glibc's thresholds fixes the other at its small default, where each larger tensor is mapped anew.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(512 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def thread_environment(threads: int) -> dict[str, str]:
    """Thread limits of numerical libraries, which read them when first imported (Dask's nanny sets its own).

    And the C library's own choice of when to give memory back: Dask's nanny asks for it at every 64 KiB, so that each
    forward's buffers are returned and faulted in again; a training job took twice its time that way.
    """
    plain = {name: str(threads) for name in _THREAD_VARIABLES} | _QUIET_DASK
    nanny = {f"DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON__{name}": str(threads) for name in _THREAD_VARIABLES}
    return plain | nanny | MEMORY


def python(module: str, *arguments: str) -> list[str]:
    """Command that runs `module` under this interpreter."""
    return [sys.executable, "-m", module, *arguments]


class Child:
    """One supervised process.

    Attributes:
        name: What logs and `joynexus status` call it.
        restarts: Times it was started again after it had been ready.
        failed_starts: Times it ended before it was ever ready.
        ready: Set while the process has passed its readiness check.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        environment: Callable[[], Mapping[str, str]],
        log: Path,
        check: Callable[[], Awaitable[bool]],
        *,
        on_change: Callable[[], None],
        cwd: Path,
        ready_within_s: float = 300.0,
    ) -> None:
        """Describe it; nothing is started yet.

        Args:
            name: What logs and `joynexus status` call it.
            command: Its command line, asked before each start (a port may change before the first success).
            environment: All of its environment, asked before each start.
            log: File that gets its output.
            check: Says whether it answers.
            on_change: Hears of new process ids and readiness.
            cwd: Its working folder.
            ready_within_s: How long the first start may take in all.
        """
        self.name = name
        self.log = log
        self.restarts = 0
        self.failed_starts = 0
        self.ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._command = command
        self._environment = environment
        self._check = check
        self._on_change = on_change
        self._cwd = cwd
        self._ready_within_s = ready_within_s
        self._stopping = False
        self._once_ready = False
        self._keeper: asyncio.Task[None] | None = None
        self._error: str | None = None

    def describe(self) -> dict[str, Any]:
        """What `platform.json` says of it."""
        pid = self.process.pid if self.process and self.process.returncode is None else None
        return {"pid": pid, "ready": self.ready.is_set(), "restarts": self.restarts, "log": str(self.log)}

    async def start(self) -> None:
        """Start it and return when it is ready.

        Raises:
            ServiceUnavailable: if it ends early too often or does not answer in time; the log is named.
        """
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")
        waiter = asyncio.create_task(self.ready.wait())
        done, _ = await asyncio.wait(
            {waiter, self._keeper}, timeout=self._ready_within_s, return_when=asyncio.FIRST_COMPLETED
        )
        waiter.cancel()
        if not done:
            self._error = f"did not answer within {self._ready_within_s:g} s"
        if not self.ready.is_set():
            raise ServiceUnavailable(f"{self.name}: {self._error}; possible: see {self.log}; {_tail(self.log)}")

    async def stop(self, grace_s: float = 8.0) -> None:
        """End it: TERM to its process group, KILL to what is left after `grace_s`."""
        self._stopping = True
        self.ready.clear()
        process = self.process
        if process is not None:
            family = _family(process.pid)
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
            _signal_group(process.pid, signal.SIGKILL)
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._stopping:
            started = time.monotonic()
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._cwd,
                    env=self._environment(),
                    start_new_session=True,
                )
            logger.info("%s: started as process %d", self.name, self.process.pid)
            self._on_change()
            watcher = asyncio.create_task(self._watch_ready())
            code = await self.process.wait()
            watcher.cancel()
            self.ready.clear()
            if self._stopping:
                return
            # Left-overs of its group would hold ports and sessions against the next one.
            _signal_group(self.process.pid, signal.SIGKILL)
            self._error = f"ended with code {code}"
            logger.warning("%s: %s after %.1f s", self.name, self._error, time.monotonic() - started)
            self._on_change()
            if not self._once_ready:
                self.failed_starts += 1
                if self.failed_starts >= _EARLY_EXITS:
                    return
            if time.monotonic() - started > _STABLE_S:
                delay_s = _FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            self.restarts += self._once_ready

    async def _watch_ready(self) -> None:
        while not await self._check():
            await asyncio.sleep(0.2)
        self._once_ready = True
        self.ready.set()
        logger.info("%s: ready", self.name)
        self._on_change()


def _family(pid: int) -> list[psutil.Process]:
    """The process and all below it; flow runs and simulators have sessions of their own."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _tail(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    return f"its last line: {lines[-1][:300]}" if lines else "its log is empty"
