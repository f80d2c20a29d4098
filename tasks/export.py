"""Taking episodes out of the installation; the platform is asked only where a rollout's job has to be known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.backend import BackendConfig
from configs.errors import DataFault, UnknownObject, refusal
from configs.home import Home
from configs.requests import ExportRequest
from services.rollout_export import export_dataset, export_rollout, partition_of
from storage.atomic import checked_id
from storage.partitions import PartitionStore
from tasks.connection import platform_connection


async def export(home: Home, request: ExportRequest) -> dict[str, Any]:
    """Write the episodes below a new folder; whole or not at all.

    Returns:
        {"source", "folder", "episodes"}.

    Raises:
        UnknownObject: there is no such job, partition or dataset (any more).
        SpecError: a rollout without pictures, or samples that no policy collected.
        Conflict: the folder exists.
    """
    folder, source = Path(request.folder), checked_id(request.source, "source")
    if (home.datasets / source).is_dir():
        episodes = await asyncio.to_thread(export_dataset, home.datasets / source, folder)
        return {"source": source, "folder": str(folder), "episodes": episodes}
    store = PartitionStore(home.partitions)
    partition_id = partition_of(store, source, home.datasets)
    async with platform_connection(home) as platform:
        job = await (await platform.scheduler()).job(partition_id.split(".", 1)[0])
    kept = home.tenant(job["tenant_id"]) / "workloads" / job["flow_run_id"] / "backend.json"
    backend = BackendConfig.model_validate(json.loads(kept.read_text(encoding="utf-8")))
    try:
        episodes = await asyncio.to_thread(export_rollout, store, partition_id, job, backend, folder)
    except (DataFault, FileNotFoundError):
        if partition_id in store.list():
            raise
        possible = "a job that is not trained yet"
        raise UnknownObject(refusal("source", source, possible, "its partition was cleared meanwhile")) from None
    return {"source": partition_id, "folder": str(folder), "episodes": episodes}


@task(task_run_name="export {request.source}", cache_policy=NO_CACHE)
async def export_episodes(home: Home, request: ExportRequest) -> dict[str, Any]:
    """`export` as a task."""
    return await export(home, request)
