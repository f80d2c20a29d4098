"""The few REST calls that the command line and the supervisor make of Prefect.

Plain HTTP on purpose: importing Prefect's client costs about two seconds, which every `joynexus` command would
pay.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import httpx

from configs.errors import ServiceUnavailable, UnknownObject

WORK_POOL = "joynexus"
OPEN_STATES = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
_RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
TERMINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


class PrefectApi:
    """Prefect's REST interface at `url` (ending in `/api`); use as an async context manager."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        self.url = url
        # Addresses are on this machine or named by the preset: a proxy from the environment is never meant.
        # Certificates are loaded only where they are needed; it takes longer than most of our calls.
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/", timeout=timeout_s, trust_env=False, verify=url.startswith("https")
        )

    async def __aenter__(self) -> PrefectApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def healthy(self) -> bool:
        """Whether the health endpoint answers."""
        try:
            return (await self._http.get("health", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _call(self, method: str, path: str, body: Any = None, allow: Iterable[int] = ()) -> Any:
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.HTTPError as error:
                raise ServiceUnavailable(
                    f"prefect_api_url: {self.url} does not answer ({type(error).__name__}); "
                    "possible: a running Prefect server; see `joynexus status`"
                ) from None
            # 503 is Prefect's word for "sqlite was locked, ask again"; all our calls may be repeated.
            if response.status_code != 503 or delay_s is None:
                break
            await asyncio.sleep(delay_s)
        if response.status_code in allow:
            return None
        if response.status_code >= 400:
            raise ServiceUnavailable(
                f"prefect: {method} {path} was answered {response.status_code}: {response.text[:300]}"
            )
        return response.json() if response.content else None

    async def ensure_work_pool(self, name: str = WORK_POOL) -> None:
        """Create the process work pool; one that exists stays as it is."""
        await self._call("POST", "work_pools/", {"name": name, "type": "process"}, allow=(409,))

    async def workers_online(self, pool: str = WORK_POOL) -> list[str]:
        """Names of the pool's live workers."""
        rows = await self._call("POST", f"work_pools/{pool}/workers/filter", {}, allow=(404,))
        return [row["name"] for row in rows or [] if row["status"] == "ONLINE"]

    async def deployment(self, flow: str) -> dict[str, Any]:
        """The deployment `flow/flow`.

        Raises:
            UnknownObject: if it was not deployed.
        """
        found = await self._call("GET", f"deployments/name/{flow}/{flow}", allow=(404,))
        if found is None:
            raise UnknownObject(f"deployment: {flow}/{flow} is not on this server; run `prefect deploy --all`")
        return dict(found)

    async def deployment_id(self, flow: str) -> str:
        """Its id."""
        return str((await self.deployment(flow))["id"])

    async def start(self, flow: str, parameters: dict[str, Any], name: str | None = None) -> str:
        """Start a run of the deployment `flow/flow` now; returns the flow run's id."""
        # The key makes a repeated call return the run that the first one made.
        body: dict[str, Any] = {
            "parameters": parameters,
            "state": {"type": "SCHEDULED"},
            "idempotency_key": uuid.uuid4().hex,
        }
        if name is not None:
            body["name"] = name
        deployment = await self.deployment_id(flow)
        return str((await self._call("POST", f"deployments/{deployment}/create_flow_run", body))["id"])

    async def run(self, flow_run_id: str) -> dict[str, Any]:
        """One flow run."""
        return dict(await self._call("GET", f"flow_runs/{flow_run_id}"))

    async def open_runs(self, flow: str | None = None, *, scheduled_by_clock: bool = False) -> list[dict[str, Any]]:
        """Runs of our work pool that have not ended; those a schedule made for later only where asked."""
        body: dict[str, Any] = {
            "work_pools": {"name": {"any_": [WORK_POOL]}},
            "flow_runs": {"state": {"type": {"any_": list(OPEN_STATES)}}},
            "limit": 200,
        }
        if flow is not None:
            body["deployments"] = {"name": {"any_": [flow]}}
        rows = await self._call("POST", "flow_runs/filter", body)
        return [r for r in rows if scheduled_by_clock or not (r["auto_scheduled"] and r["state_type"] == "SCHEDULED")]

    async def runs_with_tag(self, tag: str, *, offset: int = 0) -> list[dict[str, Any]]:
        """Up to 200 flow runs that carry `tag`, from `offset` on, in a fixed order."""
        body = {"flow_runs": {"tags": {"all_": [tag]}}, "sort": "ID_DESC", "limit": 200, "offset": offset}
        return list(await self._call("POST", "flow_runs/filter", body))

    async def children(self, flow_run_id: str) -> list[dict[str, Any]]:
        """Flow runs, at most 200, whose parent task run belongs to that flow run."""
        body = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run_id]}}, "limit": 200}
        return list(await self._call("POST", "flow_runs/filter", body))

    async def cancel(self, flow_run_id: str) -> None:
        """Ask the run's worker to cancel it, as the button on its page does."""
        await self._call("POST", f"flow_runs/{flow_run_id}/set_state", {"state": {"type": "CANCELLING"}})

    async def end(self, flow_run_id: str, state: str, message: str) -> None:
        """Force the run into a terminal state."""
        body = {"state": {"type": state, "name": state.capitalize(), "message": message}, "force": True}
        await self._call("POST", f"flow_runs/{flow_run_id}/set_state", body)


def superseded(runs: Iterable[dict[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """Runs that a schedule made for a time now past while nobody could start them, without each deployment's latest.

    A worker that was away would start all of them at once; of a periodic evaluation only the latest says anything.
    """
    due: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run["auto_scheduled"] and run["state_type"] == "SCHEDULED" and _due(run) <= now:
            due.setdefault(run["deployment_id"], []).append(run)
    return [run for of_one in due.values() for run in sorted(of_one, key=_due)[:-1]]


def _due(run: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(run["expected_start_time"].replace("Z", "+00:00"))
