"""Flow `export`: a rollout's, an evaluation's or a dataset's episodes as a LeRobot dataset and as films."""

from __future__ import annotations

from typing import Any

from prefect import flow

from configs.home import Home
from configs.requests import ExportRequest
from tasks.export import export_episodes


@flow(name="export", flow_run_name="export {request.source}")
async def export(request: ExportRequest) -> dict[str, Any]:
    """Write `lerobot/` and `films/` below a new folder on the machine of the flow's process.

    Returns:
        {"source", "folder", "episodes"}.
    """
    return await export_episodes(Home.from_environment(), request)
