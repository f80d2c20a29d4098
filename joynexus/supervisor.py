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
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from distributed import Client, Event

from configs import presets
from configs.cluster import ClusterSpec
from configs.errors import JoyNexusError, ServiceUnavailable
from configs.home import PROJECT_ROOT, Home
from configs.platform import READY_EVENT, ROLES, PlatformAddresses, write_state
from joynexus.children import Child, free_ports, python, thread_environment
from joynexus.guard import MARK
from joynexus.prefect_api import WORK_POOL, PrefectApi

logger = logging.getLogger(__name__)

RESIDENT_FLOWS = ("platform", "train", "preprocess")
_WATCH_S = 5.0
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
        self._children: dict[str, Child] = {}
        names = ("prefect-server", "dask-scheduler", "dask-page", "mlflow-page")
        self._ports = dict(zip(names, free_ports(cluster.host, len(names)), strict=True))
        self._page_open = False
        self._guard: subprocess.Popen[bytes] | None = None

    # Addresses: those of the preset where something exists already, else of what is started here.

    @property
    def addresses(self) -> PlatformAddresses:
        """What clients are told."""
        host = self._cluster.host
        return PlatformAddresses(
            home=str(self._home.root),
            cluster=self._cluster.name,
            prefect_api_url=self._cluster.prefect_api_url or f"http://{host}:{self._ports['prefect-server']}/api",
            dask_scheduler=self._cluster.dask_scheduler or f"tcp://{host}:{self._ports['dask-scheduler']}",
            mlflow_uri=self._cluster.mlflow_uri or self._home.mlflow_uri,
        )

    def _environment(self, threads: int = 1) -> dict[str, str]:
        quiet = {
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_CLI_COLORS": "false",
            "PREFECT_HOME": str(self._home.prefect),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # Prefect's clients ask again when sqlite was locked; logged, so that `joynexus status` can count it.
            "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true",
            "PYTHONUNBUFFERED": "1",
            # A proxy must not stand between processes of one machine.
            "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), self._cluster.host, "localhost"))),
        }
        return {**os.environ, **quiet, **self.addresses.export(), **thread_environment(threads), MARK: self._mark}

    def _write_state(self) -> None:
        address = self.addresses
        write_state(
            self._home,
            {
                "phase": self._phase,
                "supervisor": os.getpid(),
                "guard": self._guard.pid if self._guard else None,
                "mark": self._mark,
                "started": self._started,
                "addresses": address.asdict(),
                "pages": {
                    "prefect": address.prefect_api_url.removesuffix("/api"),
                    "dask": None
                    if self._cluster.dask_scheduler
                    else f"http://{self._cluster.host}:{self._ports['dask-page']}/status",
                    "mlflow": f"http://{self._cluster.host}:{self._ports['mlflow-page']}" if self._page_open else None,
                },
                "processes": {name: child.describe() for name, child in self._children.items()},
            },
        )

    def _say(self, **line: Any) -> None:
        logger.info("progress: %s", line)
        # Nobody listens any more when `joynexus up` was interrupted; the platform comes up all the same.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._progress.write(json.dumps(line) + "\n")
            self._progress.flush()

    def _port(self, name: str) -> str:
        """The part's port for its next start: the same for good once it was ready, else another at each try."""
        child = self._children.get(name)
        if child is not None and child.failed_starts:
            (self._ports[name],) = free_ports(self._cluster.host, 1)
        return str(self._ports[name])

    def _child(self, name: str, command: Any, check: Any, *, threads: int = 1) -> Child:
        child = Child(
            name,
            command,
            self._environment(threads),
            self._home.logs / f"{name}.log",
            check,
            on_change=self._write_state,
            cwd=PROJECT_ROOT,
        )
        self._children[name] = child
        return child

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
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._registry(), self._prefect(), self._dask()):
                    group.create_task(part)
        except ExceptionGroup as several:  # the first fault; the others were cancelled because of it
            raise several.exceptions[0] from None
        await self._empty_pool()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._deploy())
                group.create_task(self._prefect_worker())
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        await self._resident_flows()

    async def _registry(self) -> None:
        """Create and migrate MLflow's database before anyone opens it: two at once fail in the migration."""
        code = "import sys; from storage.registry import create_and_migrate; create_and_migrate(sys.argv[1])"
        await self._once("mlflow-migration", [sys.executable, "-c", code, self.addresses.mlflow_uri])
        self._say(step=f"MLflow registry at {self.addresses.mlflow_uri}")

    async def _prefect(self) -> None:
        if self._cluster.prefect_api_url is None:
            server = self._child(
                "prefect-server",
                lambda: python(
                    "prefect",
                    *("server", "start", "--host", self._cluster.host, "--port", self._port("prefect-server")),
                ),
                self._prefect_healthy,
            )
            await server.start()
        elif not await self._prefect_healthy():
            raise ServiceUnavailable(
                f"prefect_api_url: got {self.addresses.prefect_api_url!r}; possible: a server that answers; "
                "start it, or remove the field from the cluster preset"
            )
        self._say(step=f"Prefect at {self.addresses.prefect_api_url.removesuffix('/api')}")

    async def _prefect_healthy(self) -> bool:
        async with PrefectApi(self.addresses.prefect_api_url) as api:
            return await api.healthy()

    async def _dask(self) -> None:
        host = self._cluster.host
        if self._cluster.dask_scheduler is None:
            scheduler = self._child(
                "dask-scheduler",
                lambda: python(
                    "distributed.cli.dask_scheduler",
                    *("--host", host, "--port", self._port("dask-scheduler")),
                    *("--dashboard-address", f"{host}:{self._ports['dask-page']}"),
                ),
                self._dask_answers,
            )
            await scheduler.start()
        elif not await self._dask_answers():
            raise ServiceUnavailable(
                f"dask_scheduler: got {self.addresses.dask_scheduler!r}; possible: a scheduler that answers; "
                "start it, or remove the field from the cluster preset"
            )
        self._say(step=f"Dask scheduler at {self.addresses.dask_scheduler}")
        present = await self._worker_names()
        missing = [role for role in ROLES if role not in present]
        await asyncio.gather(*(self._dask_worker(role) for role in missing))
        self._say(step=f"Dask workers {', '.join(ROLES)}")

    async def _dask_worker(self, role: str) -> None:
        local = self._home.root / "dask" / role
        local.mkdir(parents=True, exist_ok=True)

        async def registered() -> bool:
            return role in await self._worker_names()

        threads = self._cluster.torch_threads if role in ("training", "inference") else 1
        worker = self._child(
            f"dask-{role}",
            lambda: python(
                "distributed.cli.dask_worker",
                self.addresses.dask_scheduler,
                *("--name", role, "--nthreads", "1", "--memory-limit", "0", "--nanny"),
                # Even without a dashboard a worker serves its health page, on all addresses unless told otherwise.
                *("--no-dashboard", "--dashboard-address", f"{self._cluster.host}:0"),
                *("--host", self._cluster.host, "--local-directory", str(local), "--death-timeout", "60"),
            ),
            registered,
            threads=threads,
        )
        await worker.start()

    async def _dask_answers(self) -> bool:
        return await self._identity() is not None

    async def _worker_names(self) -> list[str]:
        identity = await self._identity()
        return [str(worker["name"]) for worker in identity["workers"].values()] if identity else []

    async def _identity(self) -> dict[str, Any] | None:
        from distributed.core import rpc

        try:
            async with rpc(self.addresses.dask_scheduler, timeout=2) as scheduler:
                return dict(await asyncio.wait_for(scheduler.identity(), 5))
        except (OSError, TimeoutError):
            return None

    async def _empty_pool(self) -> None:
        async with PrefectApi(self.addresses.prefect_api_url) as api:
            await api.ensure_work_pool()
            if self._cluster.prefect_api_url is None:
                # Our server has no live worker yet, so a run that its database still calls open died with the
                # former platform.
                for run in await api.open_runs():
                    await api.end(run["id"], "CRASHED", "the platform that ran it is gone")

    async def _deploy(self) -> None:
        await self._once("deploy", python("prefect", "--no-prompt", "deploy", "--all"))
        self._say(step="deployments of all flows")

    async def _prefect_worker(self) -> None:
        async def online() -> bool:
            async with PrefectApi(self.addresses.prefect_api_url) as api:
                try:
                    return name in await api.workers_online()
                except ServiceUnavailable:
                    return False

        name = f"joynexus-{self._mark[:8]}"
        worker = self._child(
            "prefect-worker",
            lambda: python("prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", name),
            online,
        )
        await worker.start()
        self._say(step="Prefect worker")

    async def _resident_flows(self) -> None:
        await self._ensure_flow("platform", {"cluster": self._cluster.name})
        await self._services_ready()
        self._say(step="services")
        for flow in RESIDENT_FLOWS[1:]:
            await self._ensure_flow(flow, {})
        self._say(step=f"flows {', '.join(RESIDENT_FLOWS)}")

    async def _ensure_flow(self, flow: str, parameters: dict[str, Any]) -> None:
        async with PrefectApi(self.addresses.prefect_api_url) as api:
            if not await api.open_runs(flow):
                await api.start(flow, parameters)
                logger.info("started the flow %s", flow)

    async def _services_ready(self) -> None:
        """Wait for the event that the platform flow sets; end early if that flow ended."""
        async with Client(self.addresses.dask_scheduler, asynchronous=True, timeout=10) as client:
            ready = asyncio.ensure_future(Event(READY_EVENT, client=client).wait())
            deadline = time.monotonic() + _SERVICES_WITHIN_S
            try:
                while not ready.done():
                    await asyncio.wait({ready}, timeout=1)
                    async with PrefectApi(self.addresses.prefect_api_url) as api:
                        gone = not ready.done() and not await api.open_runs("platform")
                    if gone or time.monotonic() > deadline:
                        why = "its run ended" if gone else f"no service in {_SERVICES_WITHIN_S:g} s"
                        raise ServiceUnavailable(
                            f"platform: {why}; possible: see {self._home.logs / 'prefect-worker.log'} and the "
                            f"run on {self.addresses.prefect_api_url.removesuffix('/api')}"
                        )
            finally:
                ready.cancel()

    async def _once(self, name: str, command: list[str]) -> None:
        """Run a command to its end.

        Raises:
            ServiceUnavailable: if it fails; the log is named.
        """
        log = self._home.logs / f"{name}.log"
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=PROJECT_ROOT,
                env=self._environment(),
                start_new_session=True,
            )
            code = await process.wait()
        if code != 0:
            raise ServiceUnavailable(
                f"{name}: ended with code {code}; possible: see {log}; mend it, then run `joynexus up`"
            )

    async def _watch(self) -> None:
        """Until told to stop: resident flows that ended are started again (children keep themselves)."""
        delay_s = _WATCH_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)
                return
            try:
                for flow in RESIDENT_FLOWS:
                    await self._ensure_flow(flow, {"cluster": self._cluster.name} if flow == "platform" else {})
                delay_s = _WATCH_S
            except JoyNexusError as error:  # Prefect is being restarted; its own keeper does that
                logger.warning("resident flows: %s", error)
                delay_s = min(2 * delay_s, 60.0)

    async def _open_page(self) -> None:
        """Start MLflow's page, asked for by SIGUSR1: it costs memory that only a person looking at it needs."""
        if self._page_open:
            return
        self._page_open = True
        page = self._child(
            "mlflow-page",
            lambda: python(
                "mlflow",
                *("server", "--backend-store-uri", self.addresses.mlflow_uri),
                *("--host", self._cluster.host, "--port", self._port("mlflow-page"), "--workers", "1"),
            ),
            self._page_answers,
        )
        try:
            await page.start()
        except ServiceUnavailable as error:
            logger.warning("%s", error)

    async def _page_answers(self) -> bool:
        async with PrefectApi(
            f"http://{self._cluster.host}:{self._ports['mlflow-page']}"
        ) as page:  # MLflow has /health too
            return await page.healthy()

    async def _end(self) -> None:
        """End in the reverse order; flow runs first, so that none sees its services vanish."""
        self._phase = "stopping"
        self._write_state()
        worker = self._children.pop("prefect-worker", None)
        if worker is not None:
            await worker.stop(grace_s=5)
            with contextlib.suppress(JoyNexusError):
                async with PrefectApi(self.addresses.prefect_api_url, timeout_s=5) as api:
                    for run in await api.open_runs():
                        await api.end(run["id"], "CANCELLED", "`joynexus down`")
        server = self._children.pop("prefect-server", None)
        dask_workers = [child for name, child in self._children.items() if name != "dask-scheduler"]
        await asyncio.gather(*(child.stop() for child in dask_workers), *([server.stop()] if server else []))
        if "dask-scheduler" in self._children:
            await self._children["dask-scheduler"].stop()
        self._home.state.unlink(missing_ok=True)
        # The guard sees the pipe close at this process's end and kills whatever still carries the mark.


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
