"""Registering a tenant's adapter as a version in MLflow's registry."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.connection import Platform
from tasks.tenants import OpenedTenant

SUCCESS = "success_rate"


@task(task_run_name="register {tenant.backend.policy_key}", cache_policy=NO_CACHE)
async def register_adapter(
    platform: Platform, tenant: OpenedTenant, job_tag: str, evaluation: dict[str, Any] | None
) -> dict[str, Any]:
    """Register the tenant's current parameters; the best evaluated version becomes `champion`.

    Args:
        platform: the connection.
        tenant: whose adapter.
        job_tag: names the registration, so that repeating it finds the version it made.
        evaluation: result of an evaluation; it counts only if it was of exactly this policy version.
    """
    training, metrics = await platform.training(), await platform.metrics()
    await training.save(tenant.name, tenant.backend.policy_key)
    registered: dict[str, Any] = await training.register_adapter(tenant.name, tenant.backend.policy_key, job_tag)
    if evaluation is not None and evaluation["policy_version"] == registered["policy_version"]:
        name, version = registered["name"], registered["version"]
        champion = await metrics.champion_if_best(name, version, SUCCESS, float(evaluation["success_rate"]))
        registered["champion"] = champion == version
    return registered
