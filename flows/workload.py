"""What the tenant's flows share: open, evaluate, produce until the target is met, evaluate again, register, close."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run

from configs.errors import JoyNexusError, LeaseLost
from configs.requests import EvaluateRequest
from configs.workload import WorkloadSpec
from flows.evaluate import evaluate
from tasks.adapters import record_evaluation, register_adapter
from tasks.artifacts import publish_workload_report
from tasks.connection import Platform, platform_connection
from tasks.evaluation import CURVES
from tasks.tenants import OpenedTenant, close_workload, kept_policy, open_tenant, write_json

Producer = Callable[[Platform, OpenedTenant, str], Coroutine[Any, Any, None]]
_WAIT_S = 5.0
_CADENCE_WAIT_S = 0.5  # between two looks at how many jobs have completed


async def run_workload(workload: WorkloadSpec, produce: Producer) -> dict[str, Any]:
    """Run one tenant's workload from admission to the registered adapter.

    Returns:
        The report that also stands in the workload's output folder: jobs by outcome, version, evaluations, adapter.

    Raises:
        JoyNexusError: if too many jobs failed to reach the completion target; the reason names the last failure.
    """
    run_id = str(flow_run.id)
    async with platform_connection() as platform:
        tenant = await open_tenant(platform, workload, run_id)
        ended, reason = "FAILED", "the workload failed"
        try:
            async with kept_policy(platform, tenant.backend.policy_key, run_id):
                report = await _run(platform, tenant, produce, run_id)
            ended, reason = "FINISHED", "the workload is done"
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            ended, reason = "KILLED", "the workload was cancelled"
            raise
        finally:
            await asyncio.shield(close_workload(platform, tenant, run_id, reason, ended))
        write_json(tenant.folder / "report.json", report)
        await publish_workload_report(report)
        return report


async def _run(platform: Platform, tenant: OpenedTenant, produce: Producer, run_id: str) -> dict[str, Any]:
    evaluation, name = tenant.backend.evaluation, tenant.name
    wanted = evaluation is not None and evaluation.before
    # Of recorded data nothing is published before the end: version 0 serves meanwhile.
    overlap = wanted and not tenant.backend.algorithm.collects
    before = await _evaluate(platform, tenant) if wanted and not overlap else None
    async with asyncio.TaskGroup() as group:
        evaluating = group.create_task(_evaluate(platform, tenant)) if overlap else None
        producing = group.create_task(produce(platform, tenant, run_id))
        idle = group.create_task(_until_idle(platform, tenant, run_id))
        await idle
        producing.cancel()  # it waits for an admission that will not come
        if evaluating is not None:
            before = await evaluating
    counts = idle.result()
    completed = await _completed(platform, tenant, run_id)
    training = await platform.training()
    await _still_ours(platform, tenant, run_id)
    version = await training.publish(name)
    await training.save(name, tenant.backend.policy_key)
    after = await _evaluate(platform, tenant, record=evaluation.record) if evaluation else None
    blanked = await _evaluate(platform, tenant, blanked=True) if evaluation and evaluation.blanked else None
    adapter = None
    await _still_ours(platform, tenant, run_id)
    if tenant.backend.outputs.register_adapter:
        adapter = await register_adapter(platform, tenant, run_id)
        if after is not None:
            adapter["champion"] = await record_evaluation(platform, adapter, after)
    return {
        "tenant": name,
        "task": tenant.backend.task,
        "environment": (tenant.backend.environment or tenant.backend.evaluation_environment or _Nothing).name,
        "jobs": {state: counts.get(state, 0) for state in ("completed", "failed", "dropped")},
        "stale_jobs": counts["stale"],
        **completed,
        "policy_version": version,
        "success_before": before and before["success_rate"],
        "success_after": after and after["success_rate"],
        "success_blanked": blanked and blanked["success_rate"],
        "episodes": sum(e["episodes"] for e in (before, after, blanked) if e),
        "adapter": adapter,
        "policy_key": tenant.backend.policy_key,
    }


class _Nothing:
    """Stands for no environment at all."""

    name = None


async def _until_idle(platform: Platform, tenant: OpenedTenant, run_id: str) -> dict[str, int]:
    """Counts by outcome once the completion target is met and nothing is in flight.

    At the evaluation's cadence the parameters of that moment become a version, which is evaluated while training goes
    on: the result is that version's, whatever is current by then.

    Raises:
        JoyNexusError: if the policy was closed, or more jobs failed or were dropped than the target asks for; it will
            not be met then.
    """
    scheduler, evaluation = await platform.scheduler(), tenant.backend.evaluation
    key, target = tenant.backend.policy_key, tenant.backend.algorithm.jobs
    every = evaluation.every_jobs if evaluation else None
    wait_s = _WAIT_S if every is None else _CADENCE_WAIT_S
    evaluated = 0
    while True:
        counts: dict[str, Any] = await scheduler.wait_policy_idle(key, timeout_s=wait_s)
        if counts["closed"] is not None or counts["holder"] != run_id:
            raise LeaseLost(f"{key} was closed: {counts['closed'] or 'another run of it began since'}")
        if counts["idle"]:
            return counts
        if every is not None and counts["completed"] // every > evaluated:
            evaluated = counts["completed"] // every
            registered = await register_adapter(platform, tenant, f"{run_id}-{evaluated}")
            reference = f"models:/{registered['name']}/{registered['version']}"
            try:
                await record_evaluation(platform, registered, await _evaluate(platform, tenant, target=reference))
            except JoyNexusError as error:  # training goes on, and the next one may find room
                get_run_logger().warning("%s was not evaluated: %s", reference, error)
        lost = counts.get("failed", 0) + counts.get("dropped", 0)
        if lost > max(3, target):
            jobs = await scheduler.jobs(policy_key=key, states=["failed", "dropped"], limit=1)
            raise JoyNexusError(
                f"{key}: {lost} jobs were lost against a target of {target}; the last: {jobs[0]['reason']}"
            )


async def _completed(platform: Platform, tenant: OpenedTenant, run_id: str) -> dict[str, Any]:
    """Of this run's completed jobs that the scheduler still remembers: how many had nothing to learn from, and what
    became of all the groups whose episodes were compared (none of other algorithms)."""
    jobs = await (await platform.scheduler()).jobs(policy_key=tenant.backend.policy_key, states=["completed"])
    found = [job["metadata"] for job in jobs if job["flow_run_id"] == run_id]
    counts: Counter[str] = Counter()
    for metadata in found:
        counts.update(metadata.get("group_counts", {}))
    return {
        "nothing_to_learn": sum(metadata.get("nothing_to_learn", False) for metadata in found),
        "group_counts": dict(counts),
    }


async def _still_ours(platform: Platform, tenant: OpenedTenant, run_id: str) -> None:
    """What follows acts on the tenant's slot, which another run may have taken over meanwhile.

    Raises:
        LeaseLost: if the policy was closed or is another run's.
    """
    await (await platform.scheduler()).keep_policy(tenant.backend.policy_key, run_id)


async def _evaluate(
    platform: Platform,
    tenant: OpenedTenant,
    *,
    blanked: bool = False,
    target: str | None = None,
    record: str | None = None,
) -> dict[str, Any]:
    evaluation = tenant.backend.evaluation
    assert evaluation is not None
    results = await evaluate(
        EvaluateRequest(
            targets=(target or tenant.name,),
            environment=evaluation.environment,
            episodes=evaluation.episodes,
            first_seed=evaluation.first_seed,
            num_envs=evaluation.num_envs,
            hosts=tenant.backend.resources.environment_hosts,
            blanked=blanked,
            sampled=evaluation.sampled,
            films=evaluation.films,
            mlflow_run=tenant.mlflow_run,
            record=record,
        )
    )
    result = results[0]
    metrics = await platform.metrics()
    prefix = "evaluation_blanked" if blanked else "evaluation"
    curves = {f"{prefix}/{name}": float(result[name]) for name in CURVES}
    await metrics.log(tenant.mlflow_run, curves, step=result["policy_version"])
    return result
