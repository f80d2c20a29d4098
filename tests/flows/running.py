"""Running deployments on the session's platform and reading what came of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from distributed import Client

from configs import presets
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.requests import CollectRequest
from configs.workload import WorkloadSpec
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from services import lookup


@dataclass
class Running:
    """Connections to the session's platform."""

    api: PrefectApi
    client: Client
    home: Home

    async def service(self, name: str) -> lookup.Service:
        """A resident service."""
        return await lookup.service(name, self.client, timeout_s=120)

    async def start(self, workload: WorkloadSpec) -> str:
        """Start a workload's flow run."""
        parameters = {"workload": workload.model_dump(mode="json")}
        return await self.api.start(workload.task, parameters, name=workload.policy_key)

    async def ended(self, run_id: str) -> dict[str, Any]:
        """The flow run once it has ended; the server is asked twice a second, it has no way to tell."""
        while (run := await self.api.run(run_id))["state_type"] not in TERMINAL_STATES:
            await asyncio.sleep(0.5)
        return run

    async def until(self, run_id: str, holds: Callable[[], Awaitable[Any]]) -> Any:
        """What `holds` gives once that is something; the run must not have ended before."""
        while not (found := await holds()):
            run = await self.api.run(run_id)
            assert run["state_type"] not in TERMINAL_STATES, (run.get("state") or {}).get("message")
            await asyncio.sleep(0.2)
        return found

    async def completed(self, run_id: str) -> dict[str, Any]:
        """As `ended`, and it must have completed."""
        run = await self.ended(run_id)
        assert run["state_type"] == "COMPLETED", (run.get("state") or {}).get("message")
        return run

    async def closed(self, *tenants: str) -> None:
        """Give back the tenants' slots: the session's platform has sixteen for all tests."""
        for tenant in tenants:
            await (await self.service(lookup.TRAINING)).close_slot(tenant)
            await (await self.service(lookup.INFERENCE)).close_policy(tenant)

    def report(self, workload: WorkloadSpec, run_id: str) -> dict[str, Any]:
        """What the workload's output folder says."""
        path = self.home.tenant(workload.tenant.name) / "workloads" / run_id / "report.json"
        return dict(json.loads(path.read_text(encoding="utf-8")))


@asynccontextmanager
async def running(platform: PlatformAddresses, home: Home) -> AsyncIterator[Running]:
    """Connect."""
    async with PrefectApi(platform.prefect_api_url) as api, await lookup.connect(platform.dask_scheduler) as client:
        yield Running(api, client, home)


async def collect(platform: PlatformAddresses, home: Home, dataset: str, **how: Any) -> None:
    """A few demonstrations of Reach-v0, by the flow."""
    async with running(platform, home) as here:
        request = CollectRequest(dataset=dataset, environment="reach", episodes=6, hosts=1, **how)
        await here.completed(await here.api.start("collect", {"request": request.model_dump(mode="json")}))


def workload(preset: str, tenant: str, **algorithm: Any) -> WorkloadSpec:
    """A preset's workload under another tenant's name, with changes to its algorithm; evaluation is left out."""
    found = presets.workload(preset)
    return found.model_copy(
        update={
            "tenant": found.tenant.model_copy(update={"name": tenant}),
            "algorithm": found.algorithm.model_copy(update=algorithm),
            "evaluation": None,
        }
    )
