"""What the demo reports: the contents of `report.json`, what of them is not as it should be, and the printed table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs import presets
from configs.errors import refusal
from configs.home import Home
from configs.workload import WorkloadSpec
from services.busy import busy_seconds
from storage.partitions import PartitionStore

LEAST_UPDATES = 6
LEAST_VALID_TRANSITIONS = 128
LEAST_SUCCESS = {"reach": 0.9, "demos": 34 / 40}
"""What these tenants learn in the environments that they are declared for."""
MOST_BEFORE = {"reach": 0.3, "demos": 6 / 40}
MOST_BLANKED = 0.5
"""Share of the success that may be left when the pictures are black."""

_REMEDY = "see the logs and run the demo again"

Intervals = Mapping[str, list[list[Any]]]
"""{service: [[start, end, {tenant: rows}, kind], …]} in epoch seconds."""
Seconds = Mapping[str, Mapping[str, float]]
"""{service: {tenant: compute seconds}}."""


def installation_report(
    home: Home, flow_runs: Mapping[str, int], intervals: Intervals, started: float, ended: float
) -> dict[str, Any]:
    """What `report.json` says of the whole installation: partitions, flow runs of jobs, use of the services."""
    return {
        "partitions_left": len(PartitionStore(home.partitions).list()),
        "flow_runs": dict(flow_runs),
        "utilisation": {
            name: round(busy_seconds(found, started, ended) / (ended - started), 3) for name, found in intervals.items()
        },
    }


def tenant_report(
    home: Home, workload: WorkloadSpec, flow_run_id: str, seconds: Seconds, jobs: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """What `report.json` says of a tenant: the report in its workload's folder, compute seconds, RL's updates."""
    path: Path = home.tenant(workload.tenant.name) / "workloads" / flow_run_id / "report.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    fields = ("task", "environment", "jobs", "stale_jobs", "policy_version", "success_before", "success_after")
    report = {name: found[name] for name in fields}
    if found["success_blanked"] is not None:
        report["success_blanked"] = found["success_blanked"]
    report |= {
        "episodes": found["episodes"],
        "adapter": found["adapter"] and {k: found["adapter"][k] for k in ("name", "version")},
        "train_seconds": round(seconds["training"].get(workload.tenant.name, 0.0), 2),
        "inference_seconds": round(seconds["inference"].get(workload.tenant.name, 0.0), 2),
    }
    if workload.task == "rl":
        report["updates"] = rl_updates(jobs, flow_run_id)
    return report


def rl_updates(jobs: Iterable[Mapping[str, Any]], flow_run_id: str) -> list[dict[str, Any]]:
    """Updates of an RL workload in the order in which they were trained.

    Args:
        jobs: the scheduler's descriptors; those not completed or of another flow run are left out.
        flow_run_id: the workload's flow run.

    Returns:
        Of each, how many transitions were valid, the mean norm of its gradients before clipping (None where it made
        no step), and the policy's versions that collected its rollout and that came of it.
    """
    own = [job for job in jobs if job["flow_run_id"] == flow_run_id and job["state"] == "completed"]
    return [
        {
            "valid_transitions": job["metadata"]["rollout_summary"]["valid_transitions"],
            "grad_norm": job["metadata"]["metrics"].get("grad_norm"),
            "behavior_policy_version": job["behavior_policy_version"],
            "version": job["metadata"]["version"],
        }
        for job in sorted(own, key=lambda job: int(job["train_seq"]))
    ]


def report_faults(report: Mapping[str, Any], workloads: Iterable[WorkloadSpec]) -> list[str]:
    """What of the report is not what the demo is to show, one line each, naming the field of `report.json`.

    Every tenant completes jobs, each of them a flow run of Prefect's in the state Completed, and leaves no partition.
    An RL tenant makes enough updates, all of them on enough valid transitions and with a gradient; where one job at a
    time is in flight, each rollout acts under the version the update before it made. What is to be learned, in the
    environments of `LEAST_SUCCESS`, is learned, and not without the pictures.
    """
    workloads = list(workloads)
    faults = []
    completed = sum(report["tenants"][w.tenant.name]["jobs"]["completed"] for w in workloads)
    wrong: list[tuple[str, object, str]] = []
    if report["flow_runs"].get("Completed", 0) != completed:
        wrong.append(("flow_runs.Completed", report["flow_runs"].get("Completed", 0), f"{completed}, the scheduler's"))
    if report["partitions_left"]:
        wrong.append(("partitions_left", report["partitions_left"], "0"))
    faults += [refusal(field, given, possible, _REMEDY) for field, given, possible in wrong]
    for workload in workloads:
        found = report["tenants"][workload.tenant.name]
        wrong = []
        if not found["jobs"]["completed"]:
            wrong.append(("jobs.completed", found["jobs"]["completed"], "1 or more"))
        if workload.task == "rl":
            wrong += _update_faults(found["updates"], one_at_a_time=workload.limits.max_in_flight_jobs == 1)
        if workload == presets.workload(workload.tenant.name):  # in its own environment
            wrong += _learning_faults(workload.tenant.name, found)
        faults += [
            refusal(f"tenants.{workload.tenant.name}.{field}", given, possible, _REMEDY)
            for field, given, possible in wrong
        ]
    return faults


def _learning_faults(tenant: str, found: Mapping[str, Any]) -> list[tuple[str, object, str]]:
    """Field, what was given and what is possible of each fault."""
    if tenant not in LEAST_SUCCESS:
        return []
    faults: list[tuple[str, object, str]] = []
    before, after, least = found["success_before"], found["success_after"], LEAST_SUCCESS[tenant]
    if before is None or before > MOST_BEFORE[tenant]:
        faults.append(("success_before", before, f"{MOST_BEFORE[tenant]:g} or less"))
    if after is None or after < least:
        faults.append(("success_after", after, f"{least:g} or more"))
    blanked = found.get("success_blanked")
    if blanked is not None and after is not None and blanked > MOST_BLANKED * after:
        faults.append(("success_blanked", blanked, f"{MOST_BLANKED * after:g} or less, half of what it sees"))
    return faults


def _update_faults(updates: Sequence[Mapping[str, Any]], *, one_at_a_time: bool) -> list[tuple[str, object, str]]:
    """Field, what was given and what is possible of each fault."""
    faults: list[tuple[str, object, str]] = []
    if len(updates) < LEAST_UPDATES:
        faults.append(("updates", len(updates), f"{LEAST_UPDATES} or more"))
    newest = 0  # the demo's workloads start fresh
    for i, update in enumerate(updates):
        valid, norm, acted = (update[name] for name in ("valid_transitions", "grad_norm", "behavior_policy_version"))
        if valid < LEAST_VALID_TRANSITIONS:
            faults.append((f"updates.{i}.valid_transitions", valid, f"{LEAST_VALID_TRANSITIONS} or more"))
        if not norm:
            faults.append((f"updates.{i}.grad_norm", norm, "more than 0"))
        if one_at_a_time and acted != newest:
            faults.append((f"updates.{i}.behavior_policy_version", acted, f"{newest}, the newest at that time"))
        newest = update["version"]
    return faults


def print_report(console: Console, report: Mapping[str, Any], without_renderer: bool) -> None:
    """The table at the demo's end, and where the report and the picture lie."""
    title = f"four tenants, one resident base model: {report['wall_seconds']:.0f} s"
    if without_renderer:
        title += " (without renderer: Reach-v0 in place of the ManiSkill environments)"
    table = Table(title=title)
    for column in ("tenant", "task", "environment", "jobs done/failed/dropped (stale)", "version"):
        table.add_column(column)
    for column in ("success before → after", "blanked", "train s", "infer s", "adapter"):
        table.add_column(column)
    for name, t in report["tenants"].items():
        jobs, adapter = t["jobs"], t["adapter"]
        table.add_row(
            name,
            t["task"],
            t["environment"],
            f"{jobs['completed']}/{jobs['failed']}/{jobs['dropped']} ({t['stale_jobs']})",
            str(t["policy_version"]),
            f"{_share(t['success_before'])} → {_share(t['success_after'])}",
            _share(t["success_blanked"]) if "success_blanked" in t else "",
            f"{t['train_seconds']:.1f}",
            f"{t['inference_seconds']:.1f}",
            "-" if adapter is None else f"{adapter['name']} v{adapter['version']}",
        )
    console.print(table)
    used = ", ".join(f"{name} {share:.0%}" for name, share in report["utilisation"].items())
    runs = ", ".join(f"{n} {state}" for state, n in sorted(report["flow_runs"].items()))
    console.print(f"utilisation: {used}; job flow runs: {runs}; partitions left: {report['partitions_left']}")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
