"""The parts of one platform: for each its command line, environment, port and readiness check.

When a part starts and when it ends is the supervisor's business (`joynexus.supervisor`); how it is kept alive is
`joynexus.children`'s.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.core import rpc

from configs.cluster import ClusterSpec
from configs.errors import ServiceUnavailable
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses
from joynexus.children import Child, free_ports, python, thread_environment
from joynexus.guard import MARK
from joynexus.prefect_api import WORK_POOL, PrefectApi

_PORTS = ("prefect-server", "dask-scheduler", "dask-page", "mlflow-page")


class Parts:
    """What one platform consists of.

    Attributes:
        children: {name: all and only the parts that were asked for here}, in the order of their start.
    """

    def __init__(self, home: Home, cluster: ClusterSpec, mark: str, on_change: Callable[[], None]) -> None:
        self.children: dict[str, Child] = {}
        self._home = home
        self._cluster = cluster
        self._mark = mark
        self._on_change = on_change
        self._ports = dict(zip(_PORTS, free_ports(cluster.host, len(_PORTS)), strict=True))

    @property
    def addresses(self) -> PlatformAddresses:
        """Those of the preset where something exists already, else of what is started here."""
        host = self._cluster.host
        return PlatformAddresses(
            home=str(self._home.root),
            cluster=self._cluster.name,
            prefect_api_url=self._cluster.prefect_api_url or f"http://{host}:{self._ports['prefect-server']}/api",
            dask_scheduler=self._cluster.dask_scheduler or f"tcp://{host}:{self._ports['dask-scheduler']}",
            mlflow_uri=self._cluster.mlflow_uri or self._home.mlflow_uri,
        )

    @property
    def pages(self) -> dict[str, str | None]:
        """Addresses for a browser; None where there is no page, or not yet."""
        host = self._cluster.host
        started_dask = self._cluster.dask_scheduler is None
        return {
            "prefect": self.addresses.prefect_api_url.removesuffix("/api"),
            "dask": f"http://{host}:{self._ports['dask-page']}/status" if started_dask else None,
            "mlflow": f"http://{host}:{self._ports['mlflow-page']}" if "mlflow-page" in self.children else None,
        }

    @property
    def mlflow_address(self) -> str:
        """Where MLflow's page is, or will be once it is opened: links are written before that."""
        uri = self._cluster.mlflow_uri
        if uri is not None and uri.startswith("http"):
            return uri.rstrip("/")
        return f"http://{self._cluster.host}:{self._ports['mlflow-page']}"

    def environment(self, threads: int = 1) -> dict[str, str]:
        """Environment of a part whose numerical libraries may use so many threads."""
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

    def prefect_server(self) -> Child:
        """Prefect's server on its sqlite under the home."""
        host = self._cluster.host
        return self._child(
            "prefect-server",
            lambda: python(
                "joynexus.prefect_server", "server", "start", "--host", host, "--port", self._port("prefect-server")
            ),
            self.prefect_answers,
        )

    def prefect_worker(self, name: str) -> Child:
        """The process worker that starts flow runs; each is a process below it."""

        async def online() -> bool:
            async with PrefectApi(self.addresses.prefect_api_url) as api:
                try:
                    return name in await api.workers_online()
                except ServiceUnavailable:
                    return False

        command = python("prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", name)
        return self._child("prefect-worker", lambda: command, online)

    def dask_scheduler(self) -> Child:
        """Dask's scheduler and its page."""
        host = self._cluster.host
        return self._child(
            "dask-scheduler",
            lambda: python(
                "distributed.cli.dask_scheduler",
                *("--host", host, "--port", self._port("dask-scheduler")),
                *("--dashboard-address", f"{host}:{self._port('dask-page')}"),
            ),
            self.dask_answers,
        )

    def dask_worker(self, role: str) -> Child:
        """The Dask worker of a role, named after it, with a nanny that restarts its process."""
        host = self._cluster.host
        local = self._home.root / "dask" / role
        local.mkdir(parents=True, exist_ok=True)

        async def registered() -> bool:
            return role in await self.dask_workers()

        return self._child(
            f"dask-{role}",
            lambda: python(
                "distributed.cli.dask_worker",
                self.addresses.dask_scheduler,
                *("--name", role, "--nthreads", "1", "--memory-limit", "0", "--nanny", "--host", host),
                # Even without a dashboard a worker serves its health page, on all addresses unless told otherwise.
                *("--no-dashboard", "--dashboard-address", f"{host}:0"),
                *("--local-directory", str(local), "--death-timeout", "60"),
            ),
            registered,
            threads=self._cluster.torch_threads if role in ("training", "inference") else 1,
        )

    def mlflow_page(self) -> Child:
        """MLflow's page on the same database; it reads, the metrics service writes."""
        host = self._cluster.host

        async def answers() -> bool:
            async with PrefectApi(f"http://{host}:{self._ports['mlflow-page']}") as page:  # MLflow has /health too
                return await page.healthy()

        return self._child(
            "mlflow-page",
            lambda: python(
                "mlflow",
                *("server", "--backend-store-uri", self.addresses.mlflow_uri),
                *("--host", host, "--port", self._port("mlflow-page"), "--workers", "1"),
            ),
            answers,
        )

    async def prefect_answers(self) -> bool:
        """Whether Prefect's health endpoint answers."""
        async with PrefectApi(self.addresses.prefect_api_url) as api:
            return await api.healthy()

    async def dask_answers(self) -> bool:
        """Whether the Dask scheduler answers."""
        return await self._identity() is not None

    async def dask_workers(self) -> list[str]:
        """Names of the registered Dask workers."""
        identity = await self._identity()
        return [str(worker["name"]) for worker in identity["workers"].values()] if identity else []

    async def once(self, name: str, command: list[str]) -> None:
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
                env=self.environment(),
                start_new_session=True,
            )
            code = await process.wait()
        if code != 0:
            raise ServiceUnavailable(f"{name}: ended with code {code}; possible: see {log}; mend it, then repeat")

    async def _identity(self) -> dict[str, Any] | None:
        try:
            async with rpc(self.addresses.dask_scheduler, timeout=2) as scheduler:
                return dict(await asyncio.wait_for(scheduler.identity(), 5))
        except (OSError, TimeoutError):
            return None

    def _port(self, name: str) -> str:
        """The part's port for its next start: the same for good once it was ready, else another at each try."""
        child = self.children.get(name)
        if child is not None and child.failed_starts:
            (self._ports[name],) = free_ports(self._cluster.host, 1)
        return str(self._ports[name])

    def _child(
        self, name: str, command: Callable[[], list[str]], check: Callable[[], Awaitable[bool]], *, threads: int = 1
    ) -> Child:
        child = Child(
            name,
            command,
            lambda: self.environment(threads),
            self._home.logs / f"{name}.log",
            check,
            on_change=self._on_change,
            cwd=PROJECT_ROOT,
        )
        self.children[name] = child
        return child
