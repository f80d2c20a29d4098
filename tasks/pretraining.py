"""Pretraining the small base, in a thread of the flow's own process: no resident service is touched."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.cache_policies import NO_CACHE

from configs.home import Home
from configs.requests import PretrainRequest
from services.pretraining import pretrain


@task(task_run_name="pretrain {request.name}", cache_policy=NO_CACHE)
async def pretrain_base(request: PretrainRequest) -> dict[str, Any]:
    """Write the checkpoint folder under the home's models; returns the report."""
    logger = get_run_logger()
    bar = await acreate_progress_artifact(progress=0.0, key="pretraining", description="share of pretraining done")
    loop = asyncio.get_running_loop()
    said: list[tuple[str, int]] = []

    def progress(what: str, share: float) -> None:
        tenth = (what, int(share * 10))
        if tenth not in said:
            said.append(tenth)
            logger.info("%s: %.0f %%", what, 100 * share)
            asyncio.run_coroutine_threadsafe(aupdate_progress_artifact(bar, progress=100 * share), loop)

    folder = Home.from_environment().models / request.name
    return await asyncio.to_thread(pretrain, folder, request.seed, request.steps, request.scenes, progress)
