"""Flow `evaluate`: read-only evaluation of serving policies or registered adapters, target after target."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow, get_run_logger

from configs.requests import EvaluateRequest
from tasks.artifacts import publish_evaluation, publish_films
from tasks.connection import platform_connection
from tasks.evaluation import release_target, resolve_target, run_evaluation


@flow(name="evaluate", flow_run_name="evaluate {request.environment}")
async def evaluate(request: EvaluateRequest) -> list[dict[str, Any]]:
    """At each interval take the next target, resolve its version once and run episodes under it.

    No partition, no optimizer step and no new version results.
    """
    logger = get_run_logger()
    results = []
    rounds = request.rounds or len(request.targets)
    async with platform_connection() as platform:
        for number in range(rounds):
            if number and request.interval_s:
                await asyncio.sleep(request.interval_s)
            target = await resolve_target(platform, request.targets[number % len(request.targets)])
            try:
                result = await run_evaluation(platform, request, target)
            finally:
                await release_target(platform, target)
            logger.info(
                "%s at version %d: %d of %d episodes succeeded",
                result["target"],
                result["policy_version"],
                result["successes"],
                result["episodes"],
            )
            results.append(result)
        await publish_evaluation(results)
        await publish_films(platform, results)
    return results
