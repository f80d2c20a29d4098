"""Evaluation of a policy under one version, read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from configs import presets
from configs.errors import SpecError, refusal
from configs.requests import EvaluateRequest
from services import lookup
from tasks.connection import Platform

ADAPTER_PREFIX = "models:/"


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
    """Run the episodes; the service pins the version from the first step to the last."""
    result: dict[str, Any] = await platform.patiently(
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
        run_id=f"evaluation-{task_run.id}",
    )
    return {"target": target.adapter or target.serving, "environment": request.environment, **result}


@task(task_run_name="release {target.serving}", cache_policy=NO_CACHE)
async def release_target(platform: Platform, target: Target) -> None:
    """Close what `resolve_target` opened."""
    if target.temporary:
        await (await platform.inference()).close_policy(target.serving)
