"""`joynexus demo`: four tenants at once on one resident base model, as in the paper's section 5.1 at laptop size.

Collects demonstrations, runs the four workloads together, evaluates them on held-out seeds, and writes a table,
`report.json` and `timeline.png`. Nothing here is special to the demo but its choice of workloads: they go through the
same deployments that a person starts from Prefect's page. At its end it checks that what it reports is what it is to
show: updates of enough samples and with gradients, each rollout under the version that the update before it made.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from configs import presets
from configs.errors import JoyNexusError, SpecError
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses
from configs.requests import CollectRequest
from configs.workload import WorkloadSpec
from joynexus import following, processes, tables
from joynexus.demo_report import Seconds, installation_report, print_report, report_faults, tenant_report
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from joynexus.timeline import draw_timeline
from services import lookup

FOLDER = PROJECT_ROOT / "runs" / "demo"
REPORT = "report.json"
TIMELINE = "timeline.png"
WORKLOADS = ("push", "pick", "reach", "demos")
IN_PLACE_OF_PICK = "libero"
"""The workload that trains in LIBERO, as the paper's does, where that is installed."""
_POLL_S = 1.0


@dataclass
class DemoTenant:
    """A workload on its way: what was declared, its flow run, and what was last seen of it."""

    workload: WorkloadSpec
    flow_run_id: str = ""
    state: str = "SCHEDULED"
    message: str = ""

    @property
    def name(self) -> str:
        return self.workload.tenant.name

    @property
    def first_line(self) -> str:
        """Of the message of its flow run's state."""
        return self.message.partition("\n")[0]

    @property
    def environment(self) -> str:
        evaluation = self.workload.evaluation
        return self.workload.environment or (evaluation.environment if evaluation else "—")


def run_demo(home: Home | None, *, keep: bool, without_renderer: bool) -> int:
    """Run the demo; its report and picture come to runs/demo, wherever the installation lies.

    Args:
        home: the installation to run in. Nothing in it is removed, a platform that is up there is used and stays up,
            and demonstrations that it has are not collected again. None: a fresh one under runs/demo.
        keep: leave the platform and its pages up.
        without_renderer: Reach-v0 in place of the ManiSkill environments.

    Returns:
        0, or 1 if the report is not what the demo is to show; each fault is then printed in a line.

    Raises:
        SpecError: if there is no renderer and `without_renderer` was not asked for.
        Conflict: if the installation's platform has another cluster preset, or one of the tenants is at work there.
        JoyNexusError: if a workload did not complete.
    """
    console = tables.console()
    if not without_renderer:
        from services.environments import renderer

        if (missing := renderer.check()) is not None:
            raise SpecError(f"renderer: {missing}; or run `joynexus demo --without-renderer`")
    begun = time.time()
    if home is None:
        home = Home(FOLDER / "home")
        processes.down(home)
        shutil.rmtree(home.root, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, TIMELINE):  # those of an earlier demo say nothing about this one
        (FOLDER / name).unlink(missing_ok=True)
    was_up = processes.is_up(home)
    workloads = demo_workloads(without_renderer, with_libero=not without_renderer and libero_is_here())
    try:
        addresses = processes.ensure_up(home, "laptop", lambda line: console.print(f"  {line}", highlight=False))
        report = asyncio.run(_run(home, addresses, workloads, console, begun))
    except BaseException:
        if not was_up:
            processes.down(home)
        raise
    console.print()  # a live table leaves its last line open where there is no terminal
    print_report(console, report, without_renderer)
    console.print(f"report: {FOLDER / REPORT}, picture: {FOLDER / TIMELINE}", soft_wrap=True)
    faults = report_faults(report, workloads)
    for fault in faults:
        console.print(f"  {fault}", highlight=False, markup=False, soft_wrap=True)
    if keep:
        processes.open_mlflow_page(home)
        tables.print_pages(home)
    if keep or was_up:
        console.print(f"The platform stays up; end it with `joynexus --home {home.root} down`.", soft_wrap=True)
    else:
        processes.down(home)
    return 1 if faults else 0


def libero_is_here() -> bool:
    """Whether LIBERO is installed and has its scene files: `joynexus env check libero-object` says what it lacks."""
    from services import environment_installs
    from services.environments import libero, mujoco_renderer

    if environment_installs.missing("libero.txt") is not None or mujoco_renderer.missing() is not None:
        return False
    return libero.scene_files() is not None


def demo_workloads(without_renderer: bool, *, with_libero: bool = False) -> list[WorkloadSpec]:
    """The four workloads; without a renderer the ManiSkill ones take Reach-v0, its widths and its demonstrations."""
    names = [IN_PLACE_OF_PICK if with_libero and name == "pick" else name for name in WORKLOADS]
    workloads = [presets.workload(name) for name in names]
    if not without_renderer:
        return workloads
    reach = presets.workload("reach")
    assert reach.evaluation is not None
    changed = []
    for workload in workloads:
        if workload.environment == "reach":
            changed.append(workload)
            continue
        widths = {name: getattr(reach.action_module, name) for name in ("state_width", "action_width")}
        update: dict[str, Any] = {"action_module": workload.action_module.model_copy(update=widths)}
        if workload.evaluation is not None:
            update["evaluation"] = workload.evaluation.model_copy(update={"environment": "reach"})
        if workload.environment is not None:
            update["environment"] = "reach"
        if workload.data is not None:
            update["data"] = workload.data.model_copy(update={"dataset": "reach-demonstrations"})
        changed.append(workload.model_copy(update=update))
    return changed


async def _run(
    home: Home, addresses: PlatformAddresses, workloads: Sequence[WorkloadSpec], console: Console, begun: float
) -> dict[str, Any]:
    tenants = [DemoTenant(workload) for workload in workloads]
    async with PrefectApi(addresses.prefect_api_url) as api, await lookup.connect(addresses.dask_scheduler) as client:
        await _collect(home, api, tenants, console)
        started, before = time.time(), await _compute_seconds(client)
        for tenant, flow_run_id in zip(tenants, await following.start(workloads, api), strict=True):
            tenant.flow_run_id = flow_run_id
        await _follow(tenants, api, client, console, started)
        failed = [t for t in tenants if t.state != "COMPLETED"]
        if failed:
            lines = "; ".join(f"{t.name} {t.state.lower()} ({t.first_line[:300]})" for t in failed)
            raise JoyNexusError(f"demo: {lines}; see the flow runs' logs under {home.logs}")
        return await _report(home, tenants, api, client, before, begun, started)


async def _collect(home: Home, api: PrefectApi, tenants: Sequence[DemoTenant], console: Console) -> None:
    for tenant in tenants:
        if tenant.workload.data is None:
            continue
        assert tenant.workload.data.dataset is not None  # the preset's
        request = CollectRequest(dataset=tenant.workload.data.dataset, environment=tenant.environment)
        if (home.datasets / request.dataset).exists():
            # Only in an installation that the user named: what lies there may be theirs.
            console.print(f"  {request.dataset} is there and used as it is", highlight=False)
            continue
        begun, what = time.time(), f"collecting {request.episodes} demonstrations in {request.environment}"
        run_id = await api.start("collect", {"request": request.model_dump(mode="json")}, name=request.dataset)
        console.print(f"  {what} …", highlight=False)
        with console.status(f"{what} …") as status:
            while (run := await api.run(run_id))["state_type"] not in TERMINAL_STATES:
                status.update(f"{what} ({time.time() - begun:.0f} s)")
                await asyncio.sleep(_POLL_S)
        if run["state_type"] != "COMPLETED":
            message = (run.get("state") or {}).get("message") or run["state_type"]
            raise JoyNexusError(f"demo: the demonstrations were not collected: {message}")
        console.print(
            f"  {request.episodes} demonstrations of {request.environment} in {time.time() - begun:.0f} s",
            highlight=False,
        )


async def _compute_seconds(client: Any) -> Seconds:
    """Compute seconds of each tenant since the services started."""
    training = await lookup.service(lookup.TRAINING, client, timeout_s=60)
    inference = await lookup.service(lookup.INFERENCE, client, timeout_s=60)
    return {
        "training": (await training.status())["busy_seconds"],
        "inference": (await inference.status())["busy_seconds"],
    }


async def _follow(tenants: list[DemoTenant], api: PrefectApi, client: Any, console: Console, started: float) -> None:
    with Live(console=console, refresh_per_second=2) as live:
        last = 0.0
        while True:
            for tenant in tenants:
                if tenant.state not in TERMINAL_STATES:
                    run = await api.run(tenant.flow_run_id)
                    tenant.state = run["state_type"]
                    tenant.message = (run.get("state") or {}).get("message") or ""
            policies, active = await _seen(client)
            live.update(_progress_table(tenants, policies, active, time.time() - started))
            if not console.is_terminal and time.time() - last > 20:
                last = time.time()
                console.print(_progress_line(tenants, policies, active, time.time() - started), highlight=False)
            if all(t.state in TERMINAL_STATES for t in tenants):
                return
            await asyncio.sleep(_POLL_S)


async def _seen(client: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The scheduler's snapshot by policy key, and what each tenant's environments are at."""
    try:
        scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=20)
        inference = await lookup.service(lookup.INFERENCE, client, timeout_s=20)
        snapshot, status = await scheduler.snapshot(), await inference.status()
    except JoyNexusError:
        return {}, {}
    active = {a["tenant"]: f"{a['kind']} {a['done']}/{a['of']} at version {a['version']}" for a in status["active"]}
    return dict(snapshot["policies"]), active


def _progress_table(
    tenants: list[DemoTenant], policies: dict[str, dict[str, Any]], active: dict[str, str], seconds: float
) -> Table:
    table = Table(title=f"four tenants on one base model, {seconds:.0f} s")
    for column in ("tenant", "task", "environment", "jobs", "flow run", "environments at"):
        table.add_column(column)
    for tenant in tenants:
        own = policies.get(tenant.workload.policy_key)
        jobs = f"{own['completed'] if own else 0}/{tenant.workload.algorithm.jobs}"
        table.add_row(
            tenant.name,
            tenant.workload.task,
            tenant.environment,
            f"{jobs} {tables.not_completed(own) if own else ''}".strip(),
            tenant.state.lower(),
            active.get(tenant.name, ""),
        )
    return table


def _progress_line(
    tenants: list[DemoTenant], policies: dict[str, dict[str, Any]], active: dict[str, str], seconds: float
) -> str:
    parts = []
    for tenant in tenants:
        own = policies.get(tenant.workload.policy_key, {"completed": 0, "stale": 0})
        jobs = f"{own['completed']}/{tenant.workload.algorithm.jobs}"
        stale = f", {own['stale']} stale" if own["stale"] else ""
        parts.append(f"{tenant.name} {jobs}{stale} ({active.get(tenant.name, tenant.state.lower())})")
    return f"  {seconds:4.0f} s  " + "  ".join(parts)


async def _report(
    home: Home,
    tenants: Sequence[DemoTenant],
    api: PrefectApi,
    client: Any,
    before: Seconds,
    begun: float,
    started: float,
) -> dict[str, Any]:
    ended = time.time()
    scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=60)
    training = await lookup.service(lookup.TRAINING, client, timeout_s=60)
    inference = await lookup.service(lookup.INFERENCE, client, timeout_s=60)
    mirror = await lookup.service(lookup.MIRROR, client, timeout_s=120)
    intervals = {"training": await training.busy(started), "inference": await inference.busy(started)}
    seconds = {
        service: {name: spent - before[service].get(name, 0.0) for name, spent in found.items()}
        for service, found in (await _compute_seconds(client)).items()
    }
    jobs = [job for t in tenants for job in await scheduler.jobs(policy_key=t.workload.policy_key)]
    await mirror.caught_up(timeout_s=60)
    await asyncio.to_thread(draw_timeline, FOLDER / TIMELINE, intervals, started, ended)
    report = {
        "wall_seconds": round(ended - begun, 1),
        "tenants": {t.name: tenant_report(home, t.workload, t.flow_run_id, seconds, jobs) for t in tenants},
        **installation_report(home, await job_run_counts(api), intervals, started, ended),
    }
    (FOLDER / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


async def job_run_counts(api: PrefectApi) -> dict[str, int]:
    """Flow runs of training jobs by Prefect's state name."""
    counts: dict[str, int] = {}
    offset = 0
    while rows := await api.runs_with_tag("joynexus-job", offset=offset):
        for row in rows:
            counts[row["state_name"]] = counts.get(row["state_name"], 0) + 1
        offset += len(rows)
    return counts
