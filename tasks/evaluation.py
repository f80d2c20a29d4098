"""Evaluation of a policy under one version, read-only."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run, task_run

from configs import presets
from configs.errors import JoyNexusError, SpecError, refusal
from configs.requests import EvaluateRequest
from services import lookup
from services.metrics import RunStatus
from tasks.connection import Platform
from tasks.jobs import EVALUATION_PREFIX

logger = logging.getLogger(__name__)
ADAPTER_PREFIX = "models:/"
CURVES = ("success_rate", "mean_return", "mean_length")
"""Of an evaluation's result, what MLflow shows."""


@dataclass(frozen=True)
class Target:
    """What is evaluated: a serving name, the version to pin (None: the current one), and the adapter behind it."""

    serving: str
    version: int | None
    adapter: str | None = None
    temporary: bool = False


@task(task_run_name="resolve {target}", cache_policy=NO_CACHE)
async def resolve_target(platform: Platform, target: str) -> Target:
    """A tenant's serving policy by name, or an adapter by `models:/…`, resolved once to a version and loaded.

    Raises:
        SpecError, UnknownObject: if there is no such tenant or adapter.
    """
    inference = await platform.inference()
    if not target.startswith(ADAPTER_PREFIX):
        if "/" in target or ":" in target:
            raise SpecError(refusal("targets", target, "a tenant's name or models:/NAME@ALIAS", "use one of them"))
        return Target(target, None)
    opened = await inference.open_adapter(target)
    return Target(opened["serving"], opened["policy_version"], opened["adapter"], temporary=True)


@task(task_run_name="evaluate {target.serving}", cache_policy=NO_CACHE)
async def run_evaluation(platform: Platform, request: EvaluateRequest, target: Target) -> dict[str, Any]:
    """Run the episodes; the service pins the version from the first step to the last.

    Where no MLflow run is named that holds the result, one of its own does, of experiment `<tenant>.evaluation`.
    """
    run = request.mlflow_run or await _open_run(platform, request, target)
    status: RunStatus = "FAILED"
    try:
        result = await _run(platform, request, target, run)
        status = "FINISHED"
    finally:
        if run is not None and request.mlflow_run is None:
            await _close_run(platform, run, status, result if status == "FINISHED" else None)
    return result


async def _run(platform: Platform, request: EvaluateRequest, target: Target, run: str | None) -> dict[str, Any]:
    provenance = {
        "source": "evaluation",
        "target": target.adapter or target.serving,
        "request": request.model_dump(mode="json"),
        "flow_run": str(flow_run.id),
    }
    owner = f"{EVALUATION_PREFIX}{flow_run.root_flow_run_id}-{task_run.id}"
    asked = platform.patiently(
        lookup.INFERENCE,
        "evaluate",
        target.serving,
        presets.environment(request.environment).model_dump(mode="json"),
        episodes=request.episodes,
        first_seed=request.first_seed,
        num_envs=min(request.num_envs, request.episodes),
        hosts=request.hosts,
        blanked=request.blanked,
        sampled=request.sampled,
        policy_version=target.version,
        run_id=owner,
        films_to=run if request.films else None,
        record=request.record,
        provenance=provenance,
    )
    try:
        result: dict[str, Any] = await asked
    except asyncio.CancelledError:
        await asyncio.shield(_close_sessions(platform, owner))
        raise
    return {"target": target.adapter or target.serving, "environment": request.environment, "mlflow_run": run, **result}


async def _close_sessions(platform: Platform, owner: str) -> None:
    """End an evaluation that nobody waits for any more: without its session it does not go on."""
    try:
        await (await platform.environments()).close_owned([owner])
    except JoyNexusError as error:
        logger.warning("sessions of %s were not closed: %s", owner, error)


async def _open_run(platform: Platform, request: EvaluateRequest, target: Target) -> str | None:
    """A run for one evaluation; None where MLflow cannot be written, which is no reason not to evaluate."""
    tenant = re.split(r"[./@]", (target.adapter or target.serving).removeprefix(ADAPTER_PREFIX))[0]
    names = ("environment", "episodes", "first_seed", "blanked", "sampled")
    parameters = {"target": target.adapter or target.serving, **{name: getattr(request, name) for name in names}}
    try:
        metrics = await platform.metrics()
        opened: str = await metrics.open_run(tenant, "evaluation", parameters, request_id=str(task_run.id))
    except JoyNexusError as error:
        logger.warning("the evaluation of %s has no MLflow run: %s", target.serving, error)
        return None
    return opened


async def _close_run(platform: Platform, run: str, status: RunStatus, result: dict[str, Any] | None) -> None:
    try:
        metrics = await platform.metrics()
        if result is not None:
            curves = {f"evaluation/{name}": float(result[name]) for name in CURVES}
            await metrics.log(run, curves, step=result["policy_version"])
        await metrics.close_run(run, status)
    except JoyNexusError as error:
        logger.warning("MLflow run %s was not closed: %s", run, error)


@task(task_run_name="release {target.serving}", cache_policy=NO_CACHE)
async def release_target(platform: Platform, target: Target) -> None:
    """Close what `resolve_target` opened."""
    if target.temporary:
        await (await platform.inference()).close_policy(target.serving)
