"""Registering a tenant's adapter as a version in MLflow's registry."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.connection import Platform
from tasks.tenants import OpenedTenant

SUCCESS = "success_rate"


@task(task_run_name="register {tenant.backend.policy_key}", cache_policy=NO_CACHE)
async def register_adapter(platform: Platform, tenant: OpenedTenant, job_tag: str) -> dict[str, Any]:
    """Register the tenant's current parameters.

    Args:
        platform: the connection.
        tenant: whose adapter.
        job_tag: names the registration, so that repeating it finds the version it made.

    Returns:
        {"name", "version", "policy_version"}.
    """
    training = await platform.training()
    registered: dict[str, Any] = await training.register_adapter(tenant.name, tenant.backend.policy_key, job_tag)
    return registered


async def record_evaluation(platform: Platform, registered: dict[str, Any], evaluation: dict[str, Any]) -> bool:
    """Tag a registered version with its evaluation; the best one of its name becomes `champion`: whether this is it.

    An evaluation of another policy version says nothing about this one and is not recorded.
    """
    if evaluation["policy_version"] != registered["policy_version"]:
        return False
    metrics = await platform.metrics()
    version = registered["version"]
    champion = await metrics.champion_if_best(registered["name"], version, SUCCESS, float(evaluation["success_rate"]))
    return bool(champion == version)
