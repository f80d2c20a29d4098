"""Flow `rl`: a tenant's reinforcement learning. It produces rollouts, which `preprocess` and `train` consume; or, for
offline RL, batches of a dataset with rewards, which `train` consumes."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow, get_run_logger

from configs.algorithm import RolloutSpec
from configs.errors import AdmissionRefused, EnvironmentFault, SpecError, refusal
from configs.workload import WorkloadSpec
from flows.sft import produce_demonstrations
from flows.workload import run_workload
from tasks.connection import Platform
from tasks.jobs import DelayedVersions, reserve, rollout
from tasks.tenants import OpenedTenant

_WAIT_S = 30.0
_FAULTS_IN_A_ROW = 3
_NO_ROOM_S = 5.0  # hosts and queue rows are other tenants'; nobody tells when they come free


@flow(name="rl", flow_run_name="rl {workload.tenant.name}")
async def rl(workload: WorkloadSpec) -> dict[str, Any]:
    """Train a tenant's policy in its environment or on its dataset, evaluate it and register its adapter."""
    if workload.task != "rl":
        raise SpecError(refusal("task", workload.task, "rl", "start the flow `sft` for demonstrations"))
    return await run_workload(workload, produce_rollouts if workload.algorithm.collects else produce_demonstrations)


async def produce_rollouts(platform: Platform, tenant: OpenedTenant, flow_run_id: str) -> None:
    """Reserve, roll out, mark; the next rollout does not wait for training.

    With a declared delay it waits for the one job whose version it is to act with.

    Raises:
        EnvironmentFault: after three rollouts in a row failed by their environment.
    """
    logger = get_run_logger()
    backend, algorithm = tenant.backend, tenant.backend.algorithm
    assert isinstance(algorithm, RolloutSpec)
    scheduler, inference = await platform.scheduler(), await platform.inference()
    version = await inference.current_version(tenant.name)
    delayed = None if backend.rollout_delay is None else DelayedVersions(backend.rollout_delay, version)
    number, faults = tenant.first_number, 0
    while True:
        if delayed is not None:  # before admission: a turn that is not used at once is lost
            version = await delayed.next(platform)
        if not await scheduler.wait_admission(backend.policy_key, timeout_s=_WAIT_S):
            continue
        if delayed is None:  # after it, so that the version is as new as can be
            version = await inference.current_version(tenant.name)
        reply = await reserve(
            scheduler, tenant, number, request_id=f"{flow_run_id}-{number}", flow_run_id=flow_run_id, version=version
        )
        if reply["job"] is None:
            if reply.get("final"):
                return
            continue
        number += 1
        if delayed is not None:
            delayed.reserved(reply["job"]["job_id"])
        try:
            await rollout(platform, tenant, reply["job"])
            faults = 0
        except AdmissionRefused as error:
            logger.warning("rollout %d found no room, another one is tried: %s", number, error)
            await asyncio.sleep(_NO_ROOM_S)
        except EnvironmentFault as error:
            faults += 1
            logger.warning("rollout %d failed (%d in a row): %s", number, faults, error)
            if faults >= _FAULTS_IN_A_ROW:
                raise
