"""Verbs on training jobs: reserve, roll out, build, lease, compute, train; each resolves a service and calls it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.algorithm import PpoSpec, SftSpec
from configs.errors import JoyNexusError, LeaseLost
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore
from storage.sample_order import sample_indices
from tasks.connection import Platform
from tasks.tenants import OpenedTenant

logger = logging.getLogger(__name__)
DOMAIN = "vla"


@asynccontextmanager
async def renewed_lease(platform: Platform, job: dict[str, Any]) -> AsyncIterator[None]:
    """Renew the lease of `job` at a fifth of its duration while the block runs.

    A lost lease is found by the next verb that carries its token; the block's result is then discarded there.
    """
    scheduler, lease_s = await platform.scheduler(), platform.cluster.lease_s

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_s / 5)
            await scheduler.renew(job["job_id"], job["lease_token"], lease_s)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError, JoyNexusError):
            await renewing


async def clear_partition(platform: Platform, partition_id: str) -> bool:
    """Remove a partition; False if it was gone, which is harmless."""
    return await asyncio.to_thread(PartitionStore(platform.home.partitions).clear, partition_id)


async def clear_leftovers(platform: Platform) -> list[str]:
    """Clear partitions whose job has ended or is not known: their producer wrote them late, or was killed meanwhile.

    A job is reserved before its partition is written, and ended for good, so what is listed first and not unfinished
    then is nobody's any more.

    Returns:
        Ids of the partitions that were cleared.
    """
    found = await asyncio.to_thread(PartitionStore(platform.home.partitions).list)
    job_ids = {partition_id: partition_id.split(".", 1)[0] for partition_id in found}
    kept = set(await (await platform.scheduler()).unfinished(sorted(set(job_ids.values())))) if found else set()
    leftovers = [partition_id for partition_id, job_id in job_ids.items() if job_id not in kept]
    return [partition_id for partition_id in leftovers if await clear_partition(platform, partition_id)]


async def give_up(platform: Platform, job: dict[str, Any], error: BaseException) -> None:
    """A stage failed: clear the partition, keep the descriptor as failed with the reason."""
    await clear_partition(platform, job["partition_id"])
    scheduler = await platform.scheduler()
    reason = f"{type(error).__name__}: {error}"[:2000]
    with contextlib.suppress(LeaseLost):
        await scheduler.fail(job["job_id"], reason, job.get("lease_token"))


@task(task_run_name="rollout {job[job_id]}", cache_policy=NO_CACHE)
async def rollout(platform: Platform, tenant: OpenedTenant, job: dict[str, Any]) -> dict[str, Any]:
    """Have the inference service collect the reserved job's partition; the job's next stage then waits for a worker."""
    inference, scheduler = await platform.inference(), await platform.scheduler()
    try:
        summary: dict[str, Any] = await inference.rollout(tenant.config, job)
    except JoyNexusError as error:
        await give_up(platform, job, error)
        raise
    algorithm = tenant.backend.algorithm
    assert isinstance(algorithm, PpoSpec)
    state = "needs_actor_forward" if algorithm.actor_forward else "needs_advantages"
    await scheduler.mark(job["job_id"], state, metadata={"rollout_summary": summary})
    metrics = await platform.metrics()
    curves = {
        f"rollout/{k}": float(summary[k]) for k in ("success_rate", "mean_return", "episodes", "valid_transitions")
    }
    await metrics.log(tenant.mlflow_run, curves, step=int(job["metadata"]["rollout"]))
    return summary


@task(task_run_name="demonstrations {job[job_id]}", cache_policy=NO_CACHE)
async def build_sft_batch(
    platform: Platform, tenant: OpenedTenant, dataset: LeRobotDataset, job: dict[str, Any]
) -> None:
    """Write the demonstration partition of a reserved job and mark it ready."""
    scheduler = await platform.scheduler()
    try:
        await asyncio.to_thread(_put_demonstrations, platform, tenant, dataset, job)
    except JoyNexusError as error:
        await give_up(platform, job, error)
        raise
    await scheduler.mark(job["job_id"], "ready")


def _put_demonstrations(platform: Platform, tenant: OpenedTenant, dataset: LeRobotDataset, job: dict[str, Any]) -> None:
    backend, algorithm = tenant.backend, tenant.backend.algorithm
    assert isinstance(algorithm, SftSpec)
    start = int(job["metadata"]["batch"]) * job["sample_count"]
    indices = sample_indices(len(dataset), start, job["sample_count"], algorithm.seed)
    sample = dataset.sample(indices, backend.policy.action_module.horizon)
    distinct = sorted(set(sample["instructions"]))
    data = {f"image.{name}": image for name, image in sample["images"].items()}
    data |= {name: sample[name] for name in ("proprioception", "action", "action_is_pad")}
    if len(distinct) > 1:
        import numpy as np

        place = {text: i for i, text in enumerate(distinct)}
        data["instruction_index"] = np.array([place[i] for i in sample["instructions"]], np.int32)
    PartitionStore(platform.home.partitions).put(
        job["partition_id"],
        data,
        tenant_id=backend.policy.tenant,
        schema_signature=backend.policy.schema_signature,
        policy_version=None,
        chunk=algorithm.microbatch_size,
        instructions=distinct,
    )


@task(task_run_name="actor forward {job[job_id]}", cache_policy=NO_CACHE)
async def actor_forward(platform: Platform, job: dict[str, Any]) -> None:
    """Have the training service attach log-probabilities and values under the resident actor."""
    await _stage(platform, job, "actor_forward", "needs_advantages")


@task(task_run_name="advantages {job[job_id]}", cache_policy=NO_CACHE)
async def compute_advantages(platform: Platform, job: dict[str, Any]) -> None:
    """Have the training service attach advantages and returns."""
    await _stage(platform, job, "compute_advantages", "ready")


async def _stage(platform: Platform, job: dict[str, Any], verb: str, next_state: str) -> None:
    training, scheduler = await platform.training(), await platform.scheduler()
    try:
        async with renewed_lease(platform, job):
            await getattr(training, verb)(job)
    except JoyNexusError as error:
        await give_up(platform, job, error)
        raise
    await scheduler.mark(job["job_id"], next_state, job["lease_token"])


@task(task_run_name="train {job[job_id]}", cache_policy=NO_CACHE)
async def train_job(platform: Platform, job: dict[str, Any]) -> dict[str, Any]:
    """Have the training service consume the leased job; RL parameters are published before the job completes."""
    training, scheduler = await platform.training(), await platform.scheduler()
    try:
        async with renewed_lease(platform, job):
            result: dict[str, Any] = await training.train_job(job)
            if job["task_type"] == "rl":
                await training.publish(job["tenant_id"])
    except JoyNexusError as error:
        await give_up(platform, job, error)
        raise
    await clear_partition(platform, job["partition_id"])
    metadata = {k: result[k] for k in ("version", "optimizer_steps", "metrics", "seconds")}
    await scheduler.complete(job["job_id"], job["lease_token"], metadata)
    metrics = await platform.metrics()
    curves = {f"train/{k}": float(v) for k, v in result["metrics"].items()}
    curves["train/policy_version"] = float(result["version"])
    await metrics.log(job["metadata"]["mlflow_run"], curves, step=int(result["version"]))
    if result["register"]:
        await training.register_adapter(job["tenant_id"], job["policy_key"], job["job_id"])
    return result


async def drop_stale(platform: Platform, job: dict[str, Any], reason: str) -> None:
    """Clear a stale job's partition, then drop it."""
    await clear_partition(platform, job["partition_id"])
    scheduler = await platform.scheduler()
    await scheduler.drop(job["job_id"], reason, job["lease_token"])
