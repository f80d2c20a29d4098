"""`joynexus run`: admit workloads all or none, start their flow runs, follow them to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs import presets
from configs.backend import BackendConfig
from configs.errors import Conflict, JoyNexusError, SpecError, refusal
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.workload import WorkloadSpec
from joynexus import processes, tables
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from services import lookup
from services.admission import admit_all

_POLL_S = 1.0


@dataclass
class Followed:
    """One workload's flow run and what was last seen of it."""

    config: BackendConfig
    flow_run_id: str
    state: str = "SCHEDULED"
    message: str = ""


def read_workloads(paths: Sequence[Path]) -> list[WorkloadSpec]:
    """The workloads in `paths`.

    Raises:
        SpecError: with the faults of all files.
    """
    workloads, faults = [], []
    for path in paths:
        try:
            workloads.append(presets.workload_file(path))
        except SpecError as error:
            faults.append(str(error))
    if faults:
        raise SpecError("; ".join(faults))
    return workloads


def run_workloads(paths: Sequence[Path], home: Home, cluster: str) -> int:
    """Run the workloads together; nothing is started if one of them is refused.

    Returns:
        0 if all completed, else 1.

    Raises:
        SpecError: if a workload is wrong or two have the same tenant.
        Conflict: if one of the policies is at work already.
    """
    workloads = read_workloads(paths)
    configs = admit_all(workloads, home, presets.cluster(cluster))
    console = tables.console()
    addresses = processes.ensure_up(home, cluster, lambda line: console.print(f"  {line}", highlight=False))
    followed = asyncio.run(_run(workloads, configs, addresses, console))
    tables.print_ends([(f.config.policy_key, f.state, f.message) for f in followed])
    return 0 if all(f.state == "COMPLETED" for f in followed) else 1


async def start(workloads: Sequence[WorkloadSpec], api: PrefectApi) -> list[str]:
    """Start a flow run for each workload; returns their ids.

    Raises:
        Conflict: if a policy of them is at work already; nothing is started.
    """
    working = {
        f"{run['parameters']['workload']['tenant']['name']}.{task}"
        for task in ("sft", "rl")
        for run in await api.open_runs(task)
        if isinstance(run.get("parameters", {}).get("workload"), dict)
    }
    for workload in workloads:
        if workload.policy_key in working:
            raise Conflict(
                refusal(
                    "tenant.name",
                    workload.tenant.name,
                    f"a tenant without a running {workload.task} workload",
                    "wait for its end, cancel its flow run, or rename the tenant",
                )
            )
    return [await api.start(w.task, {"workload": w.model_dump(mode="json")}, name=w.policy_key) for w in workloads]


async def _run(
    workloads: Sequence[WorkloadSpec], configs: Sequence[BackendConfig], addresses: PlatformAddresses, console: Console
) -> list[Followed]:
    async with PrefectApi(addresses.prefect_api_url) as api:
        ids = await start(workloads, api)
        followed = [Followed(config, flow_run_id) for config, flow_run_id in zip(configs, ids, strict=True)]
        await _follow(followed, api, addresses, console)
    return followed


async def _follow(
    followed: Sequence[Followed], api: PrefectApi, addresses: PlatformAddresses, console: Console
) -> None:
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    async with await lookup.connect(addresses.dask_scheduler) as client:
        with Progress(*columns, console=console) as progress:
            bars = [
                progress.add_task(f.config.policy_key, total=f.config.algorithm.jobs, state="waiting") for f in followed
            ]
            while True:
                counts = await _counts(client)
                for one, bar in zip(followed, bars, strict=True):
                    if one.state not in TERMINAL_STATES:
                        run = await api.run(one.flow_run_id)
                        one.state = run["state_type"]
                        one.message = (run.get("state") or {}).get("message") or ""
                    own = counts.get(one.config.policy_key, {})
                    text = ", ".join(f"{n} {state}" for state, n in own.items() if n and state != "completed")
                    progress.update(
                        bar, completed=own.get("completed", 0), state=f"{one.state.capitalize()} {text}".strip()
                    )
                if all(one.state in TERMINAL_STATES for one in followed):
                    return
                await asyncio.sleep(_POLL_S)


async def _counts(client: Any) -> dict[str, dict[str, int]]:
    """Jobs by policy key and state; empty while the scheduler is being replaced."""
    try:
        scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=10)
        snapshot = await scheduler.snapshot()
    except JoyNexusError:
        return {}
    return {key: policy["counts"] for key, policy in snapshot["policies"].items()}
