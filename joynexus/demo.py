"""`joynexus demo`: four tenants at once on one resident base model, as in the paper's section 5.1 at laptop size.

Collects demonstrations, runs the four workloads together, evaluates them on held-out seeds, and writes a table,
`report.json` and `timeline.png`. Nothing here is special to the demo but its choice of workloads: they go through the
same deployments that a person starts from Prefect's page.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
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
from joynexus import processes, tables
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from joynexus.timeline import draw_timeline
from services import lookup
from services.busy import busy_seconds
from storage.partitions import PartitionStore

FOLDER = PROJECT_ROOT / "runs" / "demo"
WORKLOADS = ("push", "pick", "reach", "demos")
_POLL_S = 1.0


@dataclass
class _Tenant:
    """A workload on its way: what was declared, its flow run, and what was last seen of it."""

    workload: WorkloadSpec
    flow_run_id: str = ""
    state: str = "SCHEDULED"
    message: str = ""

    @property
    def name(self) -> str:
        return self.workload.tenant.name

    @property
    def environment(self) -> str:
        evaluation = self.workload.evaluation
        return self.workload.environment or (evaluation.environment if evaluation else "—")


def run_demo(home: Home | None, *, keep: bool, without_renderer: bool) -> int:
    """Run the demo in a home of its own under runs/demo; returns the exit code.

    Args:
        home: the home that the user named, or None for a fresh one.
        keep: leave the platform and its pages up.
        without_renderer: Reach-v0 in place of the ManiSkill environments.

    Raises:
        SpecError: if there is no renderer and `without_renderer` was not asked for.
    """
    console = tables.console()
    if not without_renderer:
        from services.environments import renderer

        if (missing := renderer.check()) is not None:
            raise SpecError(f"renderer: {missing}; or run `joynexus demo --without-renderer`")
    begun = time.time()
    home = Home(FOLDER / "home")
    processes.down(home)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        addresses = processes.ensure_up(home, "laptop", lambda line: console.print(f"  {line}", highlight=False))
        report = asyncio.run(_run(home, addresses, console, without_renderer, begun))
    except BaseException:
        processes.down(home)
        raise
    _print_report(console, report, without_renderer)
    if keep:
        processes.open_mlflow_page(home)
        tables.print_pages(home)
        console.print("The platform stays up; end it with `joynexus --home runs/demo/home down`.")
    else:
        processes.down(home)
    return 0 if all(t["jobs"]["completed"] for t in report["tenants"].values()) else 1


def demo_workloads(without_renderer: bool) -> list[WorkloadSpec]:
    """The four workloads; without a renderer the ManiSkill ones take Reach-v0 and its widths."""
    workloads = [presets.workload(name) for name in WORKLOADS]
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
        changed.append(workload.model_copy(update=update))
    return changed


async def _run(
    home: Home, addresses: PlatformAddresses, console: Console, without_renderer: bool, begun: float
) -> dict[str, Any]:
    tenants = [_Tenant(workload) for workload in demo_workloads(without_renderer)]
    async with PrefectApi(addresses.prefect_api_url) as api, await lookup.connect(addresses.dask_scheduler) as client:
        await _collect(api, tenants, console, without_renderer)
        started = time.time()
        for tenant in tenants:
            parameters = {"workload": tenant.workload.model_dump(mode="json")}
            tenant.flow_run_id = await api.start(tenant.workload.task, parameters, name=tenant.workload.policy_key)
        await _follow(tenants, api, client, console, started)
        failed = [t for t in tenants if t.state != "COMPLETED"]
        if failed:
            lines = "; ".join(f"{t.name} {t.state.lower()} ({t.message.splitlines()[0][:300]})" for t in failed)
            raise JoyNexusError(f"demo: {lines}; see the flow runs' logs under {home.logs}")
        return await _report(home, tenants, api, client, begun, started)


async def _collect(api: PrefectApi, tenants: list[_Tenant], console: Console, without_renderer: bool) -> None:
    for tenant in tenants:
        if tenant.workload.data is None:
            continue
        request = CollectRequest(
            dataset=tenant.workload.data.dataset, environment="reach" if without_renderer else "pushcube"
        )
        begun = time.time()
        run_id = await api.start("collect", {"request": request.model_dump(mode="json")}, name=request.dataset)
        console.print(f"  collecting {request.episodes} demonstrations in {request.environment} …", highlight=False)
        with console.status(f"collecting {request.episodes} demonstrations in {request.environment} …") as status:
            while (run := await api.run(run_id))["state_type"] not in TERMINAL_STATES:
                status.update(
                    f"collecting {request.episodes} demonstrations in {request.environment} "
                    f"({time.time() - begun:.0f} s)"
                )
                await asyncio.sleep(_POLL_S)
        if run["state_type"] != "COMPLETED":
            message = (run.get("state") or {}).get("message") or run["state_type"]
            raise JoyNexusError(f"demo: the demonstrations were not collected: {message}")
        console.print(
            f"  {request.episodes} demonstrations of {request.environment} in {time.time() - begun:.0f} s",
            highlight=False,
        )


async def _follow(tenants: list[_Tenant], api: PrefectApi, client: Any, console: Console, started: float) -> None:
    with Live(console=console, refresh_per_second=2) as live:
        last = 0.0
        while True:
            for tenant in tenants:
                if tenant.state not in TERMINAL_STATES:
                    run = await api.run(tenant.flow_run_id)
                    tenant.state = run["state_type"]
                    tenant.message = (run.get("state") or {}).get("message") or ""
            counts, active = await _seen(client)
            live.update(_progress_table(tenants, counts, active, time.time() - started))
            if not console.is_terminal and time.time() - last > 20:
                last = time.time()
                console.print(_progress_line(tenants, counts, active, time.time() - started), highlight=False)
            if all(t.state in TERMINAL_STATES for t in tenants):
                return
            await asyncio.sleep(_POLL_S)


async def _seen(client: Any) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Jobs by policy key and state, and what each tenant's environments are at."""
    try:
        scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=20)
        inference = await lookup.service(lookup.INFERENCE, client, timeout_s=20)
        snapshot, status = await scheduler.snapshot(), await inference.status()
    except JoyNexusError:
        return {}, {}
    active = {a["tenant"]: f"{a['kind']} {a['done']}/{a['of']} at version {a['version']}" for a in status["active"]}
    return {key: policy["counts"] for key, policy in snapshot["policies"].items()}, active


def _progress_table(
    tenants: list[_Tenant], counts: dict[str, dict[str, int]], active: dict[str, str], seconds: float
) -> Table:
    table = Table(title=f"four tenants on one base model, {seconds:.0f} s")
    for column in ("tenant", "task", "environment", "jobs", "flow run", "environments at"):
        table.add_column(column)
    for tenant in tenants:
        own = counts.get(tenant.workload.policy_key, {})
        jobs = f"{own.get('completed', 0)}/{tenant.workload.algorithm.jobs}"
        waiting = ", ".join(f"{n} {s}" for s, n in own.items() if n and s not in ("completed",))
        table.add_row(
            tenant.name,
            tenant.workload.task,
            tenant.environment,
            f"{jobs} {waiting}".strip(),
            tenant.state.lower(),
            active.get(tenant.name, ""),
        )
    return table


def _progress_line(
    tenants: list[_Tenant], counts: dict[str, dict[str, int]], active: dict[str, str], seconds: float
) -> str:
    parts = []
    for tenant in tenants:
        done = counts.get(tenant.workload.policy_key, {}).get("completed", 0)
        doing = active.get(tenant.name, tenant.state.lower())
        parts.append(f"{tenant.name} {done}/{tenant.workload.algorithm.jobs} ({doing})")
    return f"  {seconds:4.0f} s  " + "  ".join(parts)


async def _report(
    home: Home, tenants: list[_Tenant], api: PrefectApi, client: Any, begun: float, started: float
) -> dict[str, Any]:
    ended = time.time()
    training = await lookup.service(lookup.TRAINING, client, timeout_s=60)
    inference = await lookup.service(lookup.INFERENCE, client, timeout_s=60)
    mirror = await lookup.service(lookup.MIRROR, client, timeout_s=120)
    intervals = {"training": await training.busy(started), "inference": await inference.busy(started)}
    seconds = {
        "training": (await training.status())["busy_seconds"],
        "inference": (await inference.status())["busy_seconds"],
    }
    await mirror.caught_up(timeout_s=60)
    await asyncio.to_thread(draw_timeline, FOLDER / "timeline.png", intervals, started, ended)
    report = {
        "wall_seconds": round(ended - begun, 1),
        "tenants": {t.name: _tenant_report(home, t, seconds["training"], seconds["inference"]) for t in tenants},
        "partitions_left": len(PartitionStore(home.partitions).list()),
        "flow_runs": await job_run_counts(api),
        "utilisation": {
            name: round(busy_seconds(found, started, ended) / (ended - started), 3) for name, found in intervals.items()
        },
    }
    (FOLDER / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _tenant_report(
    home: Home, tenant: _Tenant, training: dict[str, float], inference: dict[str, float]
) -> dict[str, Any]:
    path: Path = home.tenant(tenant.name) / "workloads" / tenant.flow_run_id / "report.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    fields = ("task", "environment", "jobs", "policy_version", "success_before", "success_after")
    report = {name: found[name] for name in fields}
    if found["success_blanked"] is not None:
        report["success_blanked"] = found["success_blanked"]
    return {
        **report,
        "episodes": found["episodes"],
        "adapter": found["adapter"] and {k: found["adapter"][k] for k in ("name", "version")},
        "train_seconds": round(training.get(tenant.name, 0.0), 2),
        "inference_seconds": round(inference.get(tenant.name, 0.0), 2),
    }


async def job_run_counts(api: PrefectApi) -> dict[str, int]:
    """Flow runs of training jobs by Prefect's state name."""
    counts: dict[str, int] = {}
    offset = 0
    while rows := await api.runs_with_tag("joynexus-job", offset=offset):
        for row in rows:
            counts[row["state_name"]] = counts.get(row["state_name"], 0) + 1
        offset += len(rows)
    return counts


def _print_report(console: Console, report: dict[str, Any], without_renderer: bool) -> None:
    title = f"four tenants, one resident base model: {report['wall_seconds']:.0f} s"
    if without_renderer:
        title += " (without renderer: Reach-v0 in place of the ManiSkill environments)"
    table = Table(title=title)
    for column in ("tenant", "task", "environment", "jobs done/failed/dropped", "version", "success before → after"):
        table.add_column(column)
    for column in ("blanked", "train s", "infer s", "adapter"):
        table.add_column(column)
    for name, t in report["tenants"].items():
        jobs = t["jobs"]
        blanked = t.get("success_blanked")
        table.add_row(
            name,
            t["task"],
            t["environment"],
            f"{jobs['completed']}/{jobs['failed']}/{jobs['dropped']}",
            str(t["policy_version"]),
            f"{t['success_before']:.0%} → {t['success_after']:.0%}",
            "" if blanked is None else f"{blanked:.0%}",
            f"{t['train_seconds']:.1f}",
            f"{t['inference_seconds']:.1f}",
            f"{t['adapter']['name']} v{t['adapter']['version']}",
        )
    console.print(table)
    used = ", ".join(f"{name} {share:.0%}" for name, share in report["utilisation"].items())
    runs = ", ".join(f"{n} {state}" for state, n in sorted(report["flow_runs"].items()))
    console.print(f"utilisation: {used}; job flow runs: {runs}; partitions left: {report['partitions_left']}")
    console.print(f"report: {FOLDER / 'report.json'}, picture: {FOLDER / 'timeline.png'}", soft_wrap=True)
