"""PrefectMirror: each training job as a flow run, child of its workload's run, seconds behind the scheduler at most.

It reads the scheduler's changes, coalesces them (services/mirror_state.py) and writes Prefect's REST API at a capped
rate; nothing here is on a job's path. While Prefect is away the changes coalesce and are written when it is back.
Runs are made with the job's id as idempotency key, so a mirror that starts anew finds them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httpx

from configs.errors import JoyNexusError
from services import lookup
from services.mirror_state import Entry, MirrorState, prefect_state

logger = logging.getLogger(__name__)

FLOW_NAME = "training-job"
_MAX_WRITES_PER_S = 40.0
_RETRY_S = 0.25
_WATCH_CANCELLED_S = 3.0


class PrefectMirror:
    """Asynchronous, rate-capped and coalesced writer of job states.

    Args:
        prefect_api_url: for instance http://127.0.0.1:4200/api.
    """

    def __init__(self, prefect_api_url: str) -> None:
        self._url = prefect_api_url
        self._state = MirrorState()
        self._seq = 0
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http: httpx.AsyncClient | None = None
        self._flow_id: str | None = None
        self._parents: dict[str, str | None] = {}  # {workload's flow run: its task run that the jobs hang from}
        self._writes = 0
        self._last_error: str | None = None

    async def ping(self) -> str:
        """Answer "ok" and see that the loops run."""
        if any(task.done() for task in self._tasks):
            for task in self._tasks:
                if task.done() and not task.cancelled() and task.exception():
                    logger.error("the mirror's loop ended: %s", task.exception())
                task.cancel()
            self._tasks = []
        if not self._tasks:
            self._http = self._http or httpx.AsyncClient(base_url=self._url, timeout=30, trust_env=False)
            self._tasks = [
                asyncio.create_task(loop)
                for loop in (self._read_changes(), self._write_runs(), self._watch_cancelled())
            ]
        return "ok"

    async def status(self) -> dict[str, Any]:
        """How far behind the mirror is, what it wrote, and what went wrong last."""
        return {
            "seq": self._seq,
            "pending": len(self._state.pending),
            "lag_s": self._state.lag_s(time.time()),
            "writes": self._writes,
            "last_error": self._last_error,
        }

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until all of the scheduler's changes so far are written."""
        scheduler = await lookup.peer(lookup.SCHEDULER)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            newer = await scheduler.changes_since(seq=self._seq, limit=1, timeout_s=0.0)
            if not newer["changes"] and not self._state.pending and self._state.lag_s(time.time()) == 0.0:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _read_changes(self) -> None:
        while True:
            try:
                scheduler = await lookup.peer(lookup.SCHEDULER, timeout_s=60)
                reply = await scheduler.changes_since(seq=self._seq, limit=500, timeout_s=10.0)
            except JoyNexusError as error:
                self._last_error = str(error)
                await asyncio.sleep(_RETRY_S)
                continue
            for change in reply["changes"]:
                self._state.change(change)
            self._seq = reply["seq"]
            if reply["changes"]:
                self._arrived.set()

    async def _write_runs(self) -> None:
        while True:
            entry = self._state.next()
            if entry is None:
                self._arrived.clear()
                if not self._state.pending:
                    await self._arrived.wait()
                continue
            begun = time.monotonic()
            state = entry.job["state"]
            try:
                await self._write(entry)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self._note(error)
                self._state.touch(entry.job["job_id"], entry.job["timestamp"])
                await asyncio.sleep(_RETRY_S)
                continue
            except BaseException:
                self._state.touch(entry.job["job_id"], entry.job["timestamp"])  # for the loop that comes after this one
                raise
            self._writes += 1
            self._state.written(entry, state)
            await asyncio.sleep(max(0.0, 1 / _MAX_WRITES_PER_S - (time.monotonic() - begun)))

    def _note(self, error: Exception) -> None:
        """Remember what went wrong, and log it when it is something new."""
        detail = error.response.text[:500] if isinstance(error, httpx.HTTPStatusError) else ""
        said = f"{type(error).__name__}: {error} {detail}".strip()
        if said != self._last_error:
            logger.warning("the mirror could not write: %s", said)
        self._last_error = said

    async def _write(self, entry: Entry) -> None:
        if entry.run_id is None:
            run = await self._create(entry)
            entry.run_id = run["id"]
            # A run found by its key, from before this mirror started, may stand in another state.
            if (run["state"] or {}).get("type") == entry.state()["type"]:
                return
        await self._post(f"/flow_runs/{entry.run_id}/set_state", {"state": entry.state(), "force": True})

    async def _create(self, entry: Entry) -> dict[str, Any]:
        if self._flow_id is None:
            self._flow_id = (await self._post("/flows/", {"name": FLOW_NAME}))["id"]
        job = entry.job
        body = {
            "name": job["job_id"],
            "flow_id": self._flow_id,
            "state": entry.state(),
            "tags": entry.tags(),
            "idempotency_key": job["job_id"],
            "parameters": {"policy_key": job["policy_key"]},
            "parent_task_run_id": await self._parent(job.get("flow_run_id")),
        }
        return await self._post("/flow_runs/", body)

    async def _parent(self, flow_run_id: str | None) -> str | None:
        """The task run of the workload's run that stands for its jobs; made once."""
        if flow_run_id is None:
            return None
        if flow_run_id not in self._parents:
            body = {
                "name": "training jobs",
                "flow_run_id": flow_run_id,
                "task_key": "training-jobs",
                "dynamic_key": "training-jobs",
                "state": {"type": "COMPLETED", "name": "Completed", "message": "the jobs are this run's subflow runs"},
            }
            try:
                self._parents[flow_run_id] = (await self._post("/task_runs/", body))["id"]
            except httpx.HTTPStatusError as error:
                if error.response.is_server_error:
                    raise  # a locked database: the whole write is tried again
                # The workload was not started through Prefect (a client with an id of its own): no parent then.
                logger.info("jobs of %s have no parent run: %s", flow_run_id, error)
                self._parents[flow_run_id] = None
        return self._parents[flow_run_id]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        assert self._http is not None
        reply = await self._http.post(path, json=body)
        reply.raise_for_status()
        return reply.json() if reply.content else None

    async def _watch_cancelled(self) -> None:
        """A person cancelled a job's run: cancel the job where it still can be, else write the truth again."""
        while True:
            await asyncio.sleep(_WATCH_CANCELLED_S)
            mine = {e.run_id: e for e in self._state.entries.values() if e.run_id and not e.terminal}
            if not mine:
                continue
            wanted = {
                "flow_runs": {
                    "id": {"any_": list(mine)},
                    "state": {"type": {"any_": ["CANCELLING", "CANCELLED"]}},
                }
            }
            try:
                runs = await self._post("/flow_runs/filter", wanted)
            except (httpx.HTTPError, ValueError) as error:
                self._last_error = f"{type(error).__name__}: {error}"
                continue
            for run in runs:
                entry = mine[run["id"]]
                if prefect_state(entry.job["state"])[0] == "CANCELLED":
                    continue
                await self._cancel(entry)

    async def _cancel(self, entry: Entry) -> None:
        job_id = entry.job["job_id"]
        try:
            scheduler = await lookup.peer(lookup.SCHEDULER, timeout_s=60)
            await scheduler.drop(job_id, "cancelled in Prefect")
        except JoyNexusError as error:
            logger.info("job %s was not cancelled: %s", job_id, error)
            self._state.touch(job_id, time.time())
            self._arrived.set()
