"""Registering a tenant's adapter as a version in MLflow's registry."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.connection import Platform
from tasks.tenants import OpenedTenant


@task(task_run_name="register {tenant.backend.policy_key}", cache_policy=NO_CACHE)
async def register_adapter(
    platform: Platform, tenant: OpenedTenant, job_tag: str, evaluation: dict[str, Any] | None
) -> dict[str, Any]:
    """Register the tenant's current parameters; the best evaluated version becomes `champion`.

    Args:
        platform: the connection.
        tenant: whose adapter.
        job_tag: names the registration, so that repeating it finds the version it made.
        evaluation: result of the evaluation of exactly this policy version, or None.
    """
    training, metrics = await platform.training(), await platform.metrics()
    saved = await training.save(tenant.name, tenant.backend.policy_key)
    metric = None if evaluation is None else float(evaluation["success_rate"])
    registered: dict[str, Any] = await metrics.register_adapter(
        name=tenant.backend.policy_key,
        checkpoint=str(tenant.folder / "checkpoints"),
        version=saved["version"],
        job_tag=job_tag,
        run_id=tenant.mlflow_run,
        metric=metric,
    )
    return registered
