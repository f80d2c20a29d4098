"""Opening and closing a tenant's workload across the services, and its output folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.backend import BackendConfig, PolicyConfig
from configs.errors import Conflict, ServiceUnavailable, UnknownObject, refusal
from configs.workload import WorkloadSpec
from services.admission import admit
from services.lookup import Service
from storage.partitions import PartitionStore
from tasks.connection import Platform
from tasks.leases import renewed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedTenant:
    """A tenant whose workload runs: its configuration, output folder and MLflow run.

    Attributes:
        first_number: of its batches or rollouts; one that continues goes on in the order of its samples or seeds.
    """

    backend: BackendConfig
    folder: Path
    mlflow_run: str
    first_number: int = 0

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.backend.policy.tenant

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the services take it."""
        return self.backend.model_dump(mode="json")


def write_json(path: Path, value: object) -> None:
    """Replace `path` at once by `value` as JSON."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


@task(task_run_name="open tenant {workload.tenant.name}", cache_policy=NO_CACHE)
async def open_tenant(platform: Platform, workload: WorkloadSpec, run_id: str) -> OpenedTenant:
    """Admit a workload and give it its slots, bounds, output folder and MLflow run.

    Raises:
        SpecError: if the workload is refused; nothing was started.
        Conflict: if a workload of this policy is running.
    """
    backend = await asyncio.to_thread(admit, workload, platform.home, platform.cluster)
    scheduler = await platform.scheduler()
    # First of all: it refuses a second workload of this policy before the first one's slots are touched.
    await scheduler.register_policy(backend.scheduler_policy(), holder=run_id, lease_s=platform.cluster.lease_s)
    try:
        async with kept_policy(platform, backend.policy_key, run_id):
            await _refuse_fresh_beside_another(scheduler, workload, backend.policy_key)
            folder = platform.home.tenant(workload.tenant.name) / "workloads" / run_id
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "workload.yaml").write_text(yaml.safe_dump(workload.model_dump(mode="json"), sort_keys=False))
            fresh = workload.start == "fresh"
            training, inference, metrics = (
                await platform.training(),
                await platform.inference(),
                await platform.metrics(),
            )
            slot = await training.open_slot(backend.model_dump(mode="json"), str(folder), fresh=fresh)
            # Who goes on with a slot goes on with its statistics: its weights were learned under them.
            backend = backend.model_copy(update={"policy": PolicyConfig.model_validate(slot["policy"])})
            write_json(folder / "backend.json", backend.model_dump(mode="json"))
            known = backend.scheduler_policy(slot["copy_bytes"])
            await scheduler.register_policy(known, holder=run_id, lease_s=platform.cluster.lease_s)
            # Both services draw the same first weights from the seed; what was read from files is handed over.
            started = await training.export_params(workload.tenant.name) if workload.start_from else None
            await inference.open_policy(
                slot["policy"],
                fresh=fresh,
                tensors=started and started["tensors"],
                delay=backend.rollout_delay or 0,
            )
            if slot["version"] > 0:
                await training.publish(workload.tenant.name)
            parameters = {
                "base_model": workload.base_model,
                "action_module": workload.action_module.kind,
                "schema_signature": backend.policy.schema_signature,
                **({"start_from": workload.start_from} if workload.start_from else {}),
                **{
                    f"algorithm.{k}": v
                    for k, v in workload.algorithm.model_dump(mode="json").items()
                    if k != "optimizer"
                },
                **{f"optimizer.{k}": v for k, v in workload.algorithm.optimizer.model_dump(mode="json").items()},
            }
            run = await metrics.open_run(workload.tenant.name, workload.task, parameters, request_id=run_id)
    except BaseException:
        await scheduler.close_policy(backend.policy_key, "the workload could not be opened", run_id)
        raise
    return OpenedTenant(backend, folder, run, slot["next_number"])


async def _refuse_fresh_beside_another(scheduler: Service, workload: WorkloadSpec, policy_key: str) -> None:
    """SFT and RL of a tenant share its slot: one must not replace it while the other trains.

    Raises:
        Conflict: if `start` is fresh and another policy of the tenant is active.
    """
    policies = (await scheduler.snapshot())["policies"]
    others = [
        key
        for key, policy in policies.items()
        if policy["tenant_id"] == workload.tenant.name and key != policy_key and policy["closed"] is None
    ]
    if workload.start == "fresh" and others:
        raise Conflict(
            refusal("start", "fresh", f"continue, while {others[0]} trains the same slot", "continue or wait")
        )


def kept_policy(platform: Platform, policy_key: str, run_id: str) -> AbstractAsyncContextManager[None]:
    """Give the scheduler signs while the block runs; without them (this process was killed) it closes the policy."""
    return renewed(platform, lambda scheduler: scheduler.keep_policy(policy_key, run_id))


async def close_tenant(platform: Platform, name: str) -> list[str]:
    """End all that a tenant has at run time: jobs, slots, serving state, sessions. Its output folder stays.

    Returns:
        Ids of the jobs that were dropped.

    Raises:
        UnknownObject: if it has nothing there (any more).
    """
    scheduler, training = await platform.scheduler(), await platform.training()
    inference, environments = await platform.inference(), await platform.environments()
    # The scheduler remembers policies that were closed.
    policies = {
        key: policy["tenant_id"]
        for key, policy in (await scheduler.snapshot())["policies"].items()
        if policy["closed"] is None
    }
    known = {*policies.values(), *(await training.versions()), *(await inference.status())["tenants"]}
    if name not in known:
        raise UnknownObject(
            refusal("tenant", name, ", ".join(sorted(known)) or "none is open", "see `joynexus tenants`")
        )
    dropped: list[str] = []
    for key in (key for key, tenant in policies.items() if tenant == name):
        dropped += await _close_policy(platform, key, "the tenant was closed")
    await environments.close_tenant(name)
    await training.close_slot(name)
    await inference.close_policy(name)
    return dropped


async def _close_policy(platform: Platform, policy_key: str, reason: str, holder: str | None = None) -> list[str]:
    """Drop what is left of a policy's jobs, clear their partitions and close the sessions of their rollouts."""
    scheduler = await platform.scheduler()
    dropped: list[str] = await scheduler.close_policy(policy_key, reason, holder)
    if dropped:
        with contextlib.suppress(ServiceUnavailable):  # its hosts are gone with it
            await (await platform.environments()).close_owned(dropped)
    store = PartitionStore(platform.home.partitions)
    for job_id in dropped:
        job = await scheduler.job(job_id)
        await asyncio.to_thread(store.clear, job["partition_id"])
    return dropped


@task(task_run_name="close workload of {tenant.name}", cache_policy=NO_CACHE)
async def close_workload(platform: Platform, tenant: OpenedTenant, run_id: str, reason: str, status: str) -> list[str]:
    """End a workload: whatever is left of its jobs is dropped and their partitions cleared; the slot keeps serving.

    What another run registered under the same policy since is not touched.
    """
    dropped = await _close_policy(platform, tenant.backend.policy_key, reason, run_id)
    metrics = await platform.metrics()
    try:
        await metrics.close_run(tenant.mlflow_run, status)
    except UnknownObject as gone:  # deleted by hand; what the workload trained is there all the same
        logger.warning("%s", gone)
    return dropped
