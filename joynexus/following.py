"""`joynexus run` and `joynexus pretrain`: read what is asked for, start its flow runs, follow them to their end.

Workloads are admitted all or none.
"""

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
from configs.errors import Conflict, JoyNexusError, ServiceUnavailable, SpecError, refusal
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.requests import PretrainRequest
from configs.spec import parse
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


def read_pretraining(path: Path | None) -> PretrainRequest:
    """The request in `path`; without a file all of its defaults.

    Raises:
        SpecError: with all faults of the file.
    """
    return PretrainRequest() if path is None else parse(PretrainRequest, presets.read_yaml(path), where=path.name)


def run_pretraining(path: Path | None, home: Home) -> int:
    """Pretrain a base model on the running platform; says where it lies and how to use it.

    Returns:
        0 if it completed, else 1.

    Raises:
        SpecError: if the request is wrong.
        ServiceUnavailable: if no platform is up under `home`.
    """
    request = read_pretraining(path)
    if not processes.is_up(home):
        raise ServiceUnavailable(
            f"platform: nothing runs under {str(home.root)!r}; possible: a home whose platform is up; run `joynexus up`"
        )
    state, message = asyncio.run(_pretrain(request, processes.addresses(home), tables.console()))
    tables.print_pretraining(home, request, state, message)
    return 0 if state == "COMPLETED" else 1


async def _pretrain(request: PretrainRequest, addresses: PlatformAddresses, console: Console) -> tuple[str, str]:
    """The flow run's last state and its message."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    async with PrefectApi(addresses.prefect_api_url) as api:
        run_id = await api.start("pretrain", {"request": request.model_dump(mode="json")}, name=request.name)
        page = f"{addresses.prefect_api_url.removesuffix('/api')}/runs/flow-run/{run_id}"
        console.print(f"  its progress: {page}", highlight=False, soft_wrap=True)
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(f"pretrain {request.name}", total=None, state="waiting")
            while True:
                run = await api.run(run_id)
                state = str(run["state_type"])
                progress.update(bar, state=state.capitalize())
                if state in TERMINAL_STATES:
                    return state, (run.get("state") or {}).get("message") or ""
                await asyncio.sleep(_POLL_S)


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
                policies = await _policies(client)
                for one, bar in zip(followed, bars, strict=True):
                    if one.state not in TERMINAL_STATES:
                        run = await api.run(one.flow_run_id)
                        one.state = run["state_type"]
                        one.message = (run.get("state") or {}).get("message") or ""
                    own = policies.get(one.config.policy_key)
                    text = tables.not_completed(own) if own else ""
                    completed = own["completed"] if own else 0
                    progress.update(bar, completed=completed, state=f"{one.state.capitalize()} {text}".strip())
                if all(one.state in TERMINAL_STATES for one in followed):
                    return
                await asyncio.sleep(_POLL_S)


async def _policies(client: Any) -> dict[str, dict[str, Any]]:
    """The scheduler's snapshot by policy key; empty while it is being replaced."""
    try:
        scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=10)
        snapshot = await scheduler.snapshot()
    except JoyNexusError:
        return {}
    return dict(snapshot["policies"])
