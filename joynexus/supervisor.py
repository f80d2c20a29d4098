"""The supervisor: the detached process behind `joynexus up` that starts, watches and ends one platform.

Run as `python -m joynexus.supervisor HOME CLUSTER FD`: it writes progress to file descriptor FD as JSON lines,
`{"step": text}` … `{"ready": true}` or `{"error": text}`, then closes it and stays.

    registry (MLflow's sqlite) ┐
    Prefect server ────────────┼─ deployments ─ Prefect worker ─ platform ─ train, preprocess
    Dask scheduler ─ 4 workers ┘

It holds an exclusive lock on HOME/supervisor.lock for its whole life: whoever can take that lock knows that no
supervisor lives. It imports neither torch nor Prefect.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil
from distributed import Client, Event

from configs import presets
from configs.cluster import ClusterSpec
from configs.errors import JoyNexusError, ServiceUnavailable
from configs.home import PROJECT_ROOT, Home
from configs.platform import READY_EVENT, ROLES, write_state
from joynexus.children import python
from joynexus.parts import Parts
from joynexus.prefect_api import PrefectApi, superseded

logger = logging.getLogger(__name__)

RESIDENT_FLOWS = ("platform", "train", "preprocess")
_WATCH_S = 5.0
_LONGEST_WAIT_S = 60.0
_SERVICES_WITHIN_S = 600.0  # on a crowded machine; a platform run that ended is noticed at once


class Supervisor:
    """Starts one platform in order, keeps it, ends it."""

    def __init__(self, home: Home, cluster: ClusterSpec, progress: TextIO) -> None:
        self._home = home
        self._cluster = cluster
        self._progress = progress
        self._mark = uuid.uuid4().hex
        self._started = time.time()
        self._phase = "starting"
        self._stop = asyncio.Event()
        self._guard: subprocess.Popen[bytes] | None = None
        self.parts = Parts(home, cluster, self._mark, self._write_state)

    def _write_state(self) -> None:
        write_state(
            self._home,
            {
                "phase": self._phase,
                "supervisor": os.getpid(),
                "guard": self._guard.pid if self._guard else None,
                "mark": self._mark,
                "started": self._started,
                "addresses": self.parts.addresses.asdict(),
                "pages": self.parts.pages,
                "mlflow_page": self.parts.mlflow_address,
                "processes": {name: child.describe() for name, child in self.parts.children.items()},
            },
        )

    def _say(self, **line: Any) -> None:
        logger.info("progress: %s", line)
        # Nobody listens any more when `joynexus up` was interrupted; the platform comes up all the same.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._progress.write(json.dumps(line) + "\n")
            self._progress.flush()

    async def run(self) -> int:
        """Bring all up, watch until told to stop, end all; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR1, lambda: loop.create_task(self._open_page()))
        self._guard = subprocess.Popen(
            python("joynexus.guard", self._mark), stdin=subprocess.PIPE, start_new_session=True, cwd=PROJECT_ROOT
        )
        self._write_state()
        code = 0
        bring_up = asyncio.create_task(self._bring_up())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({bring_up, stop}, return_when=asyncio.FIRST_COMPLETED)
            if bring_up.done():
                await bring_up
                self._phase = "ready"
                self._write_state()
                self._say(ready=True)
                self._progress.close()
                await self._watch()
        except JoyNexusError as error:
            self._say(error=str(error))
            code = 1
        finally:
            bring_up.cancel()
            await asyncio.gather(bring_up, return_exceptions=True)
            await self._end()
        return code

    async def _bring_up(self) -> None:
        await _together(self._registry(), self.prefect(), self.dask())
        await self._empty_pool()
        await _together(self._deploy(), self._prefect_worker())
        await self._resident_flows()

    async def _registry(self) -> None:
        """Create and migrate MLflow's database before anyone opens it: two at once fail in the migration."""
        uri = self.parts.addresses.mlflow_uri
        code = "import sys; from storage.registry import create_and_migrate; create_and_migrate(sys.argv[1])"
        await self.parts.once("mlflow-migration", [sys.executable, "-c", code, uri])
        self._say(step=f"MLflow registry at {uri}")

    async def prefect(self) -> None:
        """A Prefect server that answers: the preset's, or one of our own.

        Raises:
            ServiceUnavailable: if there is none.
        """
        url = self._cluster.prefect_api_url
        if url is None:
            await self.parts.prefect_server().start()
        elif not await self.parts.prefect_answers():
            raise ServiceUnavailable(
                f"prefect_api_url: got {url!r}; possible: a server that answers; "
                "start it, or remove the field from the cluster preset"
            )
        self._say(step=f"Prefect at {self.parts.pages['prefect']}")

    async def dask(self) -> None:
        """A Dask scheduler that answers, with a worker a role: those that are there, and our own for the rest.

        Raises:
            ServiceUnavailable: if there is none.
        """
        address = self._cluster.dask_scheduler
        if address is None:
            await self.parts.dask_scheduler().start()
        elif not await self.parts.dask_answers():
            raise ServiceUnavailable(
                f"dask_scheduler: got {address!r}; possible: a scheduler that answers; "
                "start it, or remove the field from the cluster preset"
            )
        self._say(step=f"Dask scheduler at {self.parts.addresses.dask_scheduler}")
        present = await self.parts.dask_workers()
        await _together(*(self.parts.dask_worker(role).start() for role in ROLES if role not in present))
        self._say(step=f"Dask workers {', '.join(ROLES)}")

    async def _empty_pool(self) -> None:
        """What waits in the pool before there is a worker: drop what is out of date."""
        async with PrefectApi(self.parts.addresses.prefect_api_url) as api:
            await api.ensure_work_pool()
            for run in superseded(await api.open_runs(scheduled_by_clock=True), datetime.now(UTC)):
                await api.end(run["id"], "CANCELLED", "a later one is due as well")
            if self._cluster.prefect_api_url is None:
                # Our server has no live worker yet, so a run that its database still calls open died with the
                # former platform.
                for run in await api.open_runs():
                    await api.end(run["id"], "CRASHED", "the platform that ran it is gone")

    async def _deploy(self) -> None:
        await self.parts.once("deploy", python("prefect", "--no-prompt", "deploy", "--all"))
        self._say(step="deployments of all flows")

    async def _prefect_worker(self) -> None:
        await self.parts.prefect_worker(f"joynexus-{self._mark[:8]}").start()
        self._say(step="Prefect worker")

    async def _resident_flows(self) -> None:
        await self._ensure_flow("platform")
        await self._services_ready()
        self._say(step="services")
        for flow in RESIDENT_FLOWS[1:]:
            await self._ensure_flow(flow)
        self._say(step=f"flows {', '.join(RESIDENT_FLOWS)}")

    async def _ensure_flow(self, flow: str) -> bool:
        """Start the flow if no run of it is open; returns whether it had to be."""
        async with PrefectApi(self.parts.addresses.prefect_api_url) as api:
            if await api.open_runs(flow):
                return False
            await api.start(flow, {"cluster": self._cluster.name} if flow == "platform" else {})
        logger.info("started the flow %s", flow)
        return True

    async def _services_ready(self) -> None:
        """Wait for the event that the platform flow sets; end early if that flow ended."""
        addresses = self.parts.addresses
        async with Client(addresses.dask_scheduler, asynchronous=True, timeout=10) as client:
            ready = asyncio.ensure_future(Event(READY_EVENT, client=client).wait())
            deadline = time.monotonic() + _SERVICES_WITHIN_S
            try:
                while not ready.done():
                    await asyncio.wait({ready}, timeout=1)
                    async with PrefectApi(addresses.prefect_api_url) as api:
                        gone = not ready.done() and not await api.open_runs("platform")
                    if gone or time.monotonic() > deadline:
                        why = "its run ended" if gone else f"no service in {_SERVICES_WITHIN_S:g} s"
                        raise ServiceUnavailable(
                            f"platform: {why}; possible: see {self._home.logs / 'prefect-worker.log'}; "
                            "mend what it names, then run `joynexus up`"
                        )
            finally:
                ready.cancel()

    async def _watch(self) -> None:
        """Until told to stop: resident flows that ended are started again (children keep themselves)."""
        delay_s = _WATCH_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)
                return
            try:
                await self._end_dead_runs()
                restarted = [flow for flow in RESIDENT_FLOWS if await self._ensure_flow(flow)]
            except JoyNexusError as error:  # Prefect is being restarted; its own keeper does that
                logger.warning("resident flows: %s", error)
                restarted = list(RESIDENT_FLOWS)
            # A flow that ends again and again must not take the machine from those that work.
            delay_s = min(2 * delay_s, _LONGEST_WAIT_S) if restarted else _WATCH_S

    async def _end_dead_runs(self) -> None:
        """Runs whose process is gone become Crashed; Prefect's worker sees to its own, but not to its forerunner's."""
        async with PrefectApi(self.parts.addresses.prefect_api_url) as api:
            for run in await api.open_runs():
                host, _, pid = (run["infrastructure_pid"] or "").rpartition(":")
                if run["state_type"] == "RUNNING" and host == socket.gethostname() and not psutil.pid_exists(int(pid)):
                    await api.end(run["id"], "CRASHED", "its process is gone")

    async def _open_page(self) -> None:
        """Start MLflow's page, asked for by SIGUSR1: it costs memory that only a person looking at it needs."""
        if "mlflow-page" in self.parts.children:
            return
        try:
            await self.parts.mlflow_page().start()
        except ServiceUnavailable as error:
            logger.warning("%s", error)

    async def _end(self) -> None:
        """End in the reverse order; flow runs first, so that none sees its services vanish."""
        self._phase = "stopping"
        self._write_state()
        children = self.parts.children
        if worker := children.pop("prefect-worker", None):
            await worker.stop(grace_s=5)
            with contextlib.suppress(JoyNexusError):
                async with PrefectApi(self.parts.addresses.prefect_api_url, timeout_s=5) as api:
                    for run in await api.open_runs():
                        await api.end(run["id"], "CANCELLED", "`joynexus down`")
        scheduler = children.pop("dask-scheduler", None)
        await asyncio.gather(*(child.stop() for child in children.values()))
        if scheduler is not None:
            await scheduler.stop()
        self._home.state.unlink(missing_ok=True)
        # The guard sees the pipe close at this process's end and kills whatever still carries the mark.


async def _together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run side by side; the first fault cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


def lock(home: Home) -> TextIO | None:
    """The supervisor's lock, held while the returned file is open; None if a supervisor lives."""
    handle = (home.root / "supervisor.lock").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def main(arguments: list[str]) -> int:
    """Entry of the detached process."""
    home, cluster, descriptor = Home(Path(arguments[0])), presets.cluster(arguments[1]), int(arguments[2])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    progress = os.fdopen(descriptor, "w")
    held = lock(home)
    if held is None:
        progress.write(json.dumps({"error": "supervisor: another one lives under this home; run `joynexus status`"}))
        return 1
    return asyncio.run(Supervisor(home, cluster, progress).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
