"""Verbs on training jobs: reserve, roll out, build, lease, compute, train; each resolves a service and calls it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import PrefectClient
from prefect.exceptions import ObjectNotFound

from configs.algorithm import AwrSpec, OfflineSpec, RolloutSpec
from configs.backend import BackendConfig
from configs.errors import Conflict, JoyNexusError, LeaseLost, ServiceUnavailable
from services import lookup
from services.lookup import Service
from services.scheduler_records import COMPLETED, JOB_ID_PREFIX, TERMINAL, delayed_version
from storage.demonstration_stream import DemonstrationStream, Source
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore, indexed_instructions
from tasks.connection import Platform
from tasks.leases import leased, renewed
from tasks.tenants import OpenedTenant

logger = logging.getLogger(__name__)
DOMAIN = "vla"
EVALUATION_PREFIX = "evaluation-"
"""Begins the owner of an evaluation's session; then come the ids of the flow run at the root and of the task run."""
_WAIT_S = 30.0
_REASON = 2000  # characters of a reason that a descriptor keeps
KEPT_PICTURE_BYTES = 1 << 30
"""Of pictures that a workload's datasets keep together for later epochs."""
_DECODING_THREADS = min(os.cpu_count() or 1, 8)
_BATCHES_AHEAD = 2
_DELETING = ThreadPoolExecutor(1, thread_name_prefix="deleting")


def renewed_lease(platform: Platform, job: dict[str, Any]) -> AbstractAsyncContextManager[None]:
    """Renew the lease of `job` while the block runs; a lost one is found by the next verb that carries its token."""
    return renewed(
        platform, lambda scheduler: scheduler.renew(job["job_id"], job["lease_token"], platform.cluster.lease_s)
    )


async def clear_partition(platform: Platform, partition_id: str) -> bool:
    """Remove a partition; False if it was gone, which is harmless.

    Nobody waits for its many files to be deleted.
    """
    store = PartitionStore(platform.home.partitions)
    return await asyncio.to_thread(store.clear, partition_id, _DELETING)


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


async def close_leftover_sessions(platform: Platform) -> list[str]:
    """Close the sessions of rollouts and evaluations that nobody waits for: their job, or their flow run, has ended.

    Returns:
        Ids of the sessions that were closed.
    """
    environments = await platform.environments()
    owners = sorted({str(session["owner"]) for session in await environments.sessions()})
    jobs = [owner for owner in owners if owner.startswith(JOB_ID_PREFIX)]
    evaluations = [owner for owner in owners if owner.startswith(EVALUATION_PREFIX)]
    kept = set(await (await platform.scheduler()).unfinished(jobs)) if jobs else set()
    over = [job for job in jobs if job not in kept]
    if evaluations:
        async with PrefectClient(platform.addresses.prefect_api_url) as prefect:
            over += [owner for owner in evaluations if await _has_ended(prefect, owner)]
    if not over:
        return []
    closed: list[str] = await environments.close_owned(over)
    return closed


async def _has_ended(prefect: PrefectClient, evaluation: str) -> bool:
    """Whether the flow run that an evaluation belongs to has ended, or is not known (any more)."""
    try:
        run_id = UUID(evaluation.removeprefix(EVALUATION_PREFIX)[:36])
        run = await prefect.read_flow_run(run_id)
    except (ValueError, ObjectNotFound):
        return True
    return run.state is not None and run.state.is_final()


async def sweep_half_written(platform: Platform, older_than_s: float) -> int:
    """Remove partitions that killed writers left unfinished so long ago; returns how many."""
    return await asyncio.to_thread(PartitionStore(platform.home.partitions).sweep, older_than_s)


@asynccontextmanager
async def carried_out(platform: Platform, job: dict[str, Any]) -> AsyncIterator[None]:
    """Whatever the block raises ends this job alone: it becomes failed with the reason, and its partition is cleared.

    A leased job whose service was lost is given back instead: the fault is not the job's.

    Raises:
        JoyNexusError: the block's error, one of ours; a fault of another kind is wrapped, its traceback in the log.
    """
    try:
        yield
    except ServiceUnavailable as error:
        if job.get("lease_token") is None:
            await _fail(platform, job, error)
        else:
            platform.forget()
            with contextlib.suppress(JoyNexusError):  # else its lease runs out
                scheduler = await platform.scheduler()
                await scheduler.release(job["job_id"], job["lease_token"], str(error)[:_REASON])
        raise
    except JoyNexusError as error:
        await _fail(platform, job, error)
        raise
    except Exception as error:
        # A boundary between tenants: one's fault, of whatever kind, must not end the flow that serves all of them.
        logger.exception("%s of %s", job["job_id"], job["policy_key"])
        await _fail(platform, job, error)
        raise JoyNexusError(
            f"{job['job_id']} of {job['policy_key']}: {type(error).__name__}: {error}; see the log for its traceback"
        ) from error


async def _fail(platform: Platform, job: dict[str, Any], error: BaseException) -> None:
    """Keep the descriptor as failed with the reason, clear the partition; neither if the job is another's now."""
    scheduler = await platform.scheduler()
    try:
        await scheduler.fail(job["job_id"], f"{type(error).__name__}: {error}"[:_REASON], job.get("lease_token"))
    except (LeaseLost, Conflict) as gone:
        logger.info("%s", gone)
        return
    await clear_partition(platform, job["partition_id"])


class DelayedVersions:
    """Which version each rollout of a run acts with, where a delay is declared; see `delayed_version`."""

    def __init__(self, delay: int, initial: int) -> None:
        """`initial` is the version before the first job."""
        self._delay, self._initial = delay, initial
        self._job_ids: list[str] = []
        self._made: list[int | None] = []  # a job that has ended, in order: its version, None where it made none

    def reserved(self, job_id: str) -> None:
        """The next rollout has this job."""
        self._job_ids.append(job_id)

    async def next(self, platform: Platform) -> int:
        """The next rollout's version, once the job that decides it has ended."""
        number = len(self._job_ids)
        while len(self._made) < number - self._delay:
            scheduler = await platform.scheduler()
            job = await scheduler.wait_ended(self._job_ids[len(self._made)], timeout_s=_WAIT_S)
            if job["state"] in TERMINAL:
                self._made.append(int(job["metadata"]["version"]) if job["state"] == COMPLETED else None)
        return delayed_version(number, self._delay, self._made, self._initial)


async def reserve(
    scheduler: Service,
    tenant: OpenedTenant,
    number: int,
    *,
    request_id: str | None,
    flow_run_id: str,
    version: int | None = None,
) -> dict[str, Any]:
    """Ask for the tenant's next job; the scheduler's reply.

    Args:
        scheduler: the Training Scheduler.
        tenant: whose job it is.
        number: of the rollout, or of the batch of recorded data.
        request_id: the same one gives the same job.
        flow_run_id: the run that holds the policy.
        version: that a rollout will act with; None for recorded data.
    """
    backend, algorithm = tenant.backend, tenant.backend.algorithm
    rolls_out = isinstance(algorithm, RolloutSpec)
    reply: dict[str, Any] = await scheduler.reserve(
        request_id=request_id,
        policy_key=backend.policy_key,
        sample_count=backend.sample_count,
        behavior_policy_version=version,
        max_policy_staleness=algorithm.max_policy_staleness if isinstance(algorithm, RolloutSpec) else None,
        metadata={
            "schema_signature": backend.policy.schema_signature,
            "mlflow_run": tenant.mlflow_run,
            "rollout" if rolls_out else "batch": number,
        },
        producer_role="rollout" if rolls_out else "sft",
        consumer_role="actor",
        flow_run_id=flow_run_id,
    )
    return reply


@task(task_run_name="rollout {job[job_id]}", cache_policy=NO_CACHE)
async def rollout(platform: Platform, tenant: OpenedTenant, job: dict[str, Any]) -> dict[str, Any]:
    """Have the inference service collect the reserved job's partition; the job's next stage then waits for a worker."""
    async with carried_out(platform, job):
        summary: dict[str, Any] = await platform.patiently(lookup.INFERENCE, "rollout", tenant.config, job)
    algorithm = tenant.backend.algorithm
    assert isinstance(algorithm, RolloutSpec)
    state = "needs_actor_forward" if algorithm.recomputes else "needs_advantages"
    if not await _hand_on(platform, job, state, {"rollout_summary": summary}):
        return summary
    curves = {
        f"rollout/{k}": float(summary[k]) for k in ("success_rate", "mean_return", "episodes", "valid_transitions")
    }
    await _log_curves(platform, tenant.mlflow_run, curves, int(job["metadata"]["rollout"]))
    return summary


async def _hand_on(platform: Platform, job: dict[str, Any], state: str, metadata: dict[str, Any] | None = None) -> bool:
    """The producer's part is done; False, its partition cleared, if the job was dropped meanwhile."""
    scheduler = await platform.scheduler()
    try:
        await scheduler.mark(job["job_id"], state, metadata=metadata)
    except (Conflict, LeaseLost) as gone:
        logger.warning("%s", gone)
        await clear_partition(platform, job["partition_id"])
        return False
    return True


async def _log_curves(platform: Platform, run: str, curves: dict[str, float], step: int) -> None:
    """Learning curves; what they tell of is done whether or not they can be written."""
    try:
        metrics = await platform.metrics()
        await metrics.log(run, curves, step=step)
    except JoyNexusError as error:  # the workload was closed meanwhile, or the service is being restarted
        logger.warning("learning curves of run %s at step %d were not written: %s", run, step, error)


@task(task_run_name="demonstrations {job[job_id]}", cache_policy=NO_CACHE)
async def build_sft_batch(
    platform: Platform, tenant: OpenedTenant, stream: DemonstrationStream, job: dict[str, Any]
) -> None:
    """Write the partition of a reserved job from demonstrations, with returns where RL learns from them; mark it."""
    async with carried_out(platform, job):
        await asyncio.to_thread(_put_demonstrations, platform, tenant, stream, job)
    await _hand_on(platform, job, "ready")


def demonstrations(backend: BackendConfig) -> DemonstrationStream:
    """The workload's samples in their order, its datasets opened for them; a job's are the batch of the job's number.

    Raises:
        UnknownObject, DataFault, SpecError: a dataset is not what it was when the workload was admitted.
    """
    algorithm, transforms = backend.algorithm, backend.policy.transforms
    assert isinstance(algorithm, OfflineSpec)
    cache_bytes = KEPT_PICTURE_BYTES // len(backend.datasets)
    opened = [
        Source(LeRobotDataset(Path(d.path), d.columns, sizes=transforms.sizes, cache_bytes=cache_bytes), d.weight)
        for d in backend.datasets
    ]
    return DemonstrationStream(
        opened,
        samples=backend.sample_count,
        horizon=backend.policy.action_module.horizon,
        seed=algorithm.seed,
        gamma=algorithm.gamma if isinstance(algorithm, AwrSpec) else None,
        workers=_DECODING_THREADS,
        ahead=_BATCHES_AHEAD,
    )


def _put_demonstrations(
    platform: Platform, tenant: OpenedTenant, stream: DemonstrationStream, job: dict[str, Any]
) -> None:
    backend, algorithm = tenant.backend, tenant.backend.algorithm
    assert isinstance(algorithm, OfflineSpec)
    sample = stream.batch(int(job["metadata"]["batch"]))
    distinct, index = indexed_instructions(sample["instructions"])
    data = {f"image.{name}": image for name, image in sample["images"].items()}
    data |= {k: v for k, v in sample.items() if k not in ("images", "instructions")}
    PartitionStore(platform.home.partitions).put(
        job["partition_id"],
        data | index,
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
    """Have the training service attach advantages and returns; what became of groups joins the job's metadata."""
    await _stage(platform, job, "compute_advantages", "ready")


async def _stage(platform: Platform, job: dict[str, Any], verb: str, next_state: str) -> None:
    async with carried_out(platform, job), renewed_lease(platform, job):
        training = await platform.training()
        found: dict[str, Any] = await getattr(training, verb)(job)
    metadata = {"group_counts": found["group_counts"]} if found.get("group_counts") else None
    scheduler = await platform.scheduler()
    await scheduler.mark(job["job_id"], next_state, job["lease_token"], metadata)


@task(task_run_name="train {job[job_id]}", cache_policy=NO_CACHE)
async def train_job(platform: Platform, job: dict[str, Any], group: Sequence[str] = ()) -> dict[str, Any]:
    """Have the training service consume the leased job; RL parameters are published before the job completes.

    A job that had nothing to learn from completes all the same, with `nothing_to_learn` in its metadata: it made no
    version, so there is nothing to publish.

    Args:
        platform: the connection.
        job: the leased descriptor.
        group: ids of the jobs, this one among them, that are trained together; each by a task of its own.
    """
    async with carried_out(platform, job), renewed_lease(platform, job):
        # Not `patiently`: a job that hangs would hold up the others' training for hours.
        training = await platform.training()
        result: dict[str, Any] = await training.train_job(job, list(group))
        if job["task_type"] == "rl" and not result["nothing_to_learn"]:
            await training.publish(job["tenant_id"])
    # Before the job completes: with the last one the workload ends, and its run takes no more points.
    curves = {f"train/{k}": float(v) for k, v in result["metrics"].items()}
    curves["train/policy_version"] = float(result["version"])
    await asyncio.gather(
        _log_curves(platform, job["metadata"]["mlflow_run"], curves, int(result["version"])),
        clear_partition(platform, job["partition_id"]),
    )
    metadata = {k: result[k] for k in ("version", "optimizer_steps", "metrics", "seconds", "nothing_to_learn")}
    if len(group) > 1:
        metadata["trained_with"] = [job_id for job_id in group if job_id != job["job_id"]]
    scheduler = await platform.scheduler()
    await scheduler.complete(job["job_id"], job["lease_token"], metadata)
    if result["register"]:
        await training.register_adapter(job["tenant_id"], job["policy_key"], job["job_id"])
    return result


async def lease_company(
    platform: Platform, job: dict[str, Any], holder: str, at_most: int | None
) -> list[dict[str, Any]]:
    """Lease the jobs that come next and may be trained together with the leased `job`.

    Args:
        platform: whose cluster says how many there may be.
        job: the first of the group; supervised, or it stays alone.
        holder: who leased it.
        at_most: jobs in all, `job` among them; None: as many as the cluster allows.

    Returns:
        Their descriptors; what was leased before a service was lost is among them.
    """
    cluster, found = platform.cluster, [job]
    bound = min(cluster.training_groups.max_jobs, at_most or cluster.training_groups.max_jobs)
    try:
        while job["task_type"] == "sft" and len(found) < bound:
            beside = await leased(
                platform,
                "lease_beside",
                job_ids=[member["job_id"] for member in found],
                consumer_role=job["consumer_role"],
                domains=[job["domain"]],
                holder=holder,
                max_bytes=cluster.training_groups.max_bytes,
                beside_rl=cluster.training_groups.beside_rl,
            )
            if beside is None:
                break
            found.append(beside)
    except JoyNexusError as error:
        logger.warning("%d jobs without further company: %s", len(found), error)
    return found[1:]


async def drop_if_stale(platform: Platform, job: dict[str, Any]) -> bool:
    """Drop the leased job and clear its partition if it lies further behind the actor than its bound allows."""
    training, scheduler = await platform.training(), await platform.scheduler()
    version = (await training.versions()).get(job["tenant_id"], 0)
    stale = bool((await scheduler.drop_if_stale(job["job_id"], job["lease_token"], version))["stale"])
    if stale:
        await clear_partition(platform, job["partition_id"])
    return stale
