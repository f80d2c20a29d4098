"""Flow `sft`: a tenant's supervised fine-tuning. It produces demonstration batches; `train` consumes them."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from configs.errors import SpecError, refusal
from configs.workload import WorkloadSpec
from flows.workload import run_workload
from tasks.connection import Platform
from tasks.jobs import build_sft_batch, demonstrations, reserve
from tasks.tenants import OpenedTenant

_WAIT_S = 30.0


@flow(name="sft", flow_run_name="sft {workload.tenant.name}")
async def sft(workload: WorkloadSpec) -> dict[str, Any]:
    """Fine-tune a tenant's policy on its demonstrations, evaluate it and register its adapter."""
    if workload.task != "sft":
        raise SpecError(refusal("task", workload.task, "sft", "start the flow `rl` for an environment"))
    return await run_workload(workload, produce_demonstrations)


async def produce_demonstrations(platform: Platform, tenant: OpenedTenant, flow_run_id: str) -> None:
    """Reserve, write the partition, mark ready; prefetch up to the policy's in-flight bound."""
    backend = tenant.backend
    with await asyncio.to_thread(demonstrations, backend) as stream:
        scheduler = await platform.scheduler()
        number = tenant.first_number
        while True:
            reply = await reserve(
                scheduler, tenant, number, request_id=f"{flow_run_id}-{number}", flow_run_id=flow_run_id
            )
            if reply["job"] is None:
                if reply.get("final"):
                    return
                await scheduler.wait_admission(backend.policy_key, timeout_s=_WAIT_S)
                continue
            number += 1
            await build_sft_batch(platform, tenant, stream, reply["job"])
