"""Flow `collect`: demonstrations from the scripted expert, written as a LeRobot dataset."""

from __future__ import annotations

from typing import Any

from prefect import flow

from configs.requests import CollectRequest
from tasks.collection import collect_demonstrations
from tasks.connection import platform_connection


@flow(name="collect", flow_run_name="collect {request.dataset}")
async def collect(request: CollectRequest) -> dict[str, Any]:
    """Run the expert in environment hosts side by side and keep its successful episodes.

    Returns:
        {"dataset", "episodes", "frames", "tried"}.
    """
    async with platform_connection() as platform:
        return await collect_demonstrations(platform, request)
