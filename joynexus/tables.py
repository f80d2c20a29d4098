"""What the verbs of `joynexus` print: tables in the words of the services that answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed import Client
from rich import box
from rich.console import Console
from rich.table import Table

from configs.errors import JoyNexusError
from configs.home import Home
from configs.platform import addresses, read_state
from configs.requests import PretrainRequest
from joynexus import processes
from services import lookup
from services.scheduler_records import POLICY_STALE

_TERMINAL = ("completed", "failed", "dropped")


def ask(home: Home, question: Callable[[Client], Awaitable[Any]]) -> Any:
    """Run `question` with a client of the platform under `home`.

    Raises:
        ServiceUnavailable: if nothing runs there.
    """

    async def answer() -> Any:
        async with await lookup.connect(addresses(home).dask_scheduler) as client:
            return await question(client)

    return asyncio.run(answer())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table; None shows as a dash."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        # Words stay whole; the last column, which holds sentences and paths, takes what is left.
        made.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        made.add_row(*("–" if cell is None else str(cell) for cell in row))
    return made


def console() -> Console:
    """As wide as the terminal; wide enough for whole lines where the output goes to a file or a pipe."""
    made = Console()
    return made if made.is_terminal else Console(width=160)


def print_pages(home: Home) -> None:
    """Addresses of the pages that a person may open."""
    out = console()
    state = read_state(home)
    for name, url in (state["pages"] if state else {}).items():
        if url:
            out.print(f"  {name:<8} {url}", highlight=False, soft_wrap=True)


def print_status(home: Home) -> int:
    """Processes, pages, and what waits for what; 1 if something is dead or nothing runs."""
    out = console()
    rows = processes.status(home)
    if not rows:
        out.print(f"nothing runs under {home.root}", highlight=False)
        return 1
    out.print(
        table(
            f"processes of {home.root}",
            ("process", "pid", "state", "restarts", "MB", "log"),
            [(r.name, r.pid, r.state, r.restarts, r.memory_mb and round(r.memory_mb), r.log) for r in rows],
        )
    )
    print_pages(home)
    if hint := processes.lock_hint(home):
        out.print(hint, soft_wrap=True)
    try:
        _print_waiting(out, ask(home, _snapshot))
        training = ask(home, lambda client: _call(client, lookup.TRAINING, "status"))
        inference = ask(home, lambda client: _call(client, lookup.INFERENCE, "status"))
        _print_memory(out, training, inference)
        _print_sessions(out, ask(home, lambda client: _call(client, lookup.ENVIRONMENTS, "sessions")))
    except JoyNexusError as error:
        out.print(str(error), soft_wrap=True)
        return 1
    return 0 if all(row.state != "dead" for row in rows) else 1


def not_completed(policy: Mapping[str, Any]) -> str:
    """A policy's other jobs by state, and of the dropped ones how many were stale: "1 leased, 2 dropped (1 stale)".

    Args:
        policy: of the scheduler's snapshot.
    """
    stale = f" ({policy['stale']} stale)" if policy["stale"] else ""
    counts = {state: count for state, count in policy["counts"].items() if count and state != "completed"}
    return ", ".join(f"{count} {state}{stale if state == 'dropped' else ''}" for state, count in counts.items())


def _print_memory(out: Console, training: dict[str, Any], inference: dict[str, Any]) -> None:
    """What the model services hold: each base once, whatever the number of tenants, and what is theirs."""

    def megabytes(count: float) -> str:
        return f"{count / 1e6:.1f} MB"

    slots = [slot["bytes"] for slot in training["slots"].values()]
    served = [tenant["bytes"] for tenant in inference["tenants"].values()]
    kept = f"features kept {megabytes(sum(training['feature_bytes'].values()))}"
    stacks = f"stacks of modules that decode together {megabytes(inference['stack_bytes'])}"
    for name, status, own, more in (("training", training, slots, kept), ("inference", inference, served, stacks)):
        bases = ", ".join(f"{base} {megabytes(count)}" for base, count in status["base_models"].items())
        out.print(
            f"memory of {name}: base models {bases}; {len(own)} of {status['max_slots']} slots "
            f"{megabytes(sum(own))}; {more}",
            highlight=False,
            soft_wrap=True,
        )


def _print_sessions(out: Console, sessions: Sequence[Mapping[str, Any]]) -> None:
    """Environment sessions: how many are open, and why each other one waits."""
    waiting = [row for row in sessions if row["reason"]]
    count = f"environment sessions: {len(sessions) - len(waiting)} open, {len(waiting)} waiting"
    out.print(count, highlight=False)
    for row in waiting:
        line = f"  {row['tenant_id']}, {row['num_envs']} of {row['environment']}: {row['reason']}"
        out.print(line, highlight=False, soft_wrap=True)


def _print_waiting(out: Console, snapshot: dict[str, Any]) -> None:
    totals = ", ".join(f"{count} {state}" for state, count in snapshot["totals"].items() if count)
    out.print(f"jobs: {totals or 'none yet'}", highlight=False)
    for key, policy in snapshot["policies"].items():
        if policy["stale"]:
            line = f"  {key}: {policy['stale']} of {policy['dropped']} dropped jobs were stale"
            out.print(line, highlight=False, soft_wrap=True)
        if not policy["idle"] and policy["closed"] is None:
            for why in filter(None, (policy["admission"], policy["training"])):
                out.print(f"  {key}: {why}", highlight=False, soft_wrap=True)


def print_jobs(home: Home, tenant: str | None, story: str | None, limit: int) -> int:
    """The newest jobs, or all moves of one."""
    if story is not None:
        moves = ask(home, lambda client: _call(client, lookup.SCHEDULER, "story", story))
        told = [(_clock(m["timestamp"]), m["from"], m["state"], m["holder"], m["reason"]) for m in moves]
        console().print(table(f"job {story}", ("time", "from", "to", "holder", "reason"), told))
        return 0
    jobs = ask(home, lambda client: _call(client, lookup.SCHEDULER, "jobs"))
    chosen = [job for job in jobs if tenant in (None, job["tenant_id"])][-limit:] if limit > 0 else []
    columns = ("job", "policy", "state", "samples", "behavior version", "priority", "updated", "reason")
    rows = [
        (
            job["job_id"],
            job["policy_key"],
            job["state"],
            job["sample_count"],
            job["behavior_policy_version"],
            job["priority"],
            _clock(job["updated_at"]),
            job["reason"],
        )
        for job in chosen
    ]
    console().print(table("training jobs", columns, rows))
    stale = sum(job["state"] == "dropped" and job["reason"].startswith(POLICY_STALE) for job in chosen)
    console().print(f"dropped as stale: {stale} of these {len(chosen)}", highlight=False)
    return 0


def print_tenants(home: Home) -> int:
    """Policies by key: counts, bounds, version, and why they wait."""

    async def question(client: Client) -> tuple[dict[str, Any], dict[str, int]]:
        snapshot = await _snapshot(client)
        return snapshot, await _call(client, lookup.TRAINING, "versions")

    snapshot, versions = ask(home, question)
    rows = [
        (
            policy["tenant_id"],
            policy["task_type"],
            versions.get(policy["tenant_id"]),
            policy["priority"],
            *(policy["counts"][state] for state in _TERMINAL),
            policy["stale"],
            policy["open"],
            policy["completion_target"],
            _condition(policy),
        )
        for policy in snapshot["policies"].values()
    ]
    columns = ("tenant", "task", "policy version", "priority", *_TERMINAL, "stale", "open", "target", "now")
    console().print(table("tenants", columns, rows))
    return 0


def close_tenant(home: Home, name: str) -> int:
    """End all that a tenant has at run time.

    Raises:
        UnknownObject: if it has nothing there (any more).
    """
    from tasks.connection import platform_connection
    from tasks.tenants import close_tenant

    async def close() -> list[str]:
        async with platform_connection(home) as platform:
            return await close_tenant(platform, name)

    dropped = asyncio.run(close())
    text = f"{name} is closed; {len(dropped)} jobs were dropped; its folder is {home.tenant(name)}"
    console().print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def _condition(policy: dict[str, Any]) -> str:
    if policy["closed"] is not None:
        return f"closed: {policy['closed']}"
    if policy["idle"]:
        return "done"
    return policy["training"] or policy["admission"] or "at work"


def print_adapters(home: Home) -> int:
    """Registered adapters with aliases and what they were evaluated at."""
    adapters = ask(home, lambda client: _call(client, lookup.METRICS, "list_adapters"))
    rows = [
        (
            a["name"],
            a["version"],
            ", ".join(a["aliases"]),
            a["tags"].get("policy_version"),
            a["tags"].get("base_model"),
            a["tags"].get("evaluation.success_rate"),
        )
        for a in adapters
    ]
    columns = ("adapter", "version", "aliases", "policy version", "base model", "success")
    console().print(table("adapters", columns, rows))
    return 0


def export_adapter(home: Home, reference: str, folder: str) -> int:
    """Write a registered adapter of kind lora as the files that PEFT reads.

    Raises:
        SpecError: if it is of another kind.
        UnknownObject: if there is no such adapter.
        Conflict: if the folder exists.
    """
    from services.adapter_export import export_peft

    found = ask(home, lambda client: _call(client, lookup.METRICS, "resolve", reference))
    path = Path(folder).expanduser().resolve()
    export_peft(found, path)
    text = f"models:/{found.name}/{found.version} is in {path}"
    console().print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def export_episodes(home: Home, source: str, folder: Path) -> int:
    """Write a rollout's or a dataset's episodes as a LeRobot dataset and as films.

    Raises:
        UnknownObject: there is no such job, partition or dataset (any more).
        SpecError: a rollout without pictures, or data that no policy collected.
        Conflict: the folder exists.
    """
    from configs.requests import ExportRequest
    from tasks.export import export

    request = ExportRequest(source=source, folder=str(folder))
    done = asyncio.run(export(home, request))
    text = f"{done['episodes']} episodes of {done['source']} are in {done['folder']}"
    console().print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def print_pretraining(home: Home, request: PretrainRequest, state: str, message: str) -> None:
    """How a pretraining ended; where its model lies, how well it grounds and how to use it, if it completed."""
    out = console()
    if state != "COMPLETED":
        out.print(f"pretrain {request.name}: {state.lower()}: {message}", highlight=False, markup=False, soft_wrap=True)
        return
    folder = home.models / request.name
    report = json.loads((folder / "pretraining.json").read_text(encoding="utf-8"))
    errors = [
        (environment, thing, f"{error:.4f}", report["held_out_scenes"][environment])
        for environment, of_things in report["held_out_error"].items()
        for thing, error in of_things.items()
    ]
    out.print(
        table(
            "mean position errors (metres; Reach-v0: table half-widths)",
            ("environment", "of", "error", "unseen scenes"),
            errors,
        )
    )
    for line in (
        f"model: {folder}",
        "to use it:",
        f"  1. copy configs/presets/models/{report['base_model']}.yaml to configs/presets/models/{request.name}.yaml; "
        f"set there `name: {request.name}` and `source: {folder}`",
        f"  2. add {request.name} to base_models of configs/presets/clusters/{addresses(home).cluster}.yaml",
        "  3. restart the platform (`joynexus down`, `joynexus up`)",
        f"  4. write `base_model: {request.name}` in workloads",
    ):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def print_ends(ends: Sequence[tuple[str, str, str]]) -> None:
    """How workloads ended: policy key, flow-run state, message."""
    rows = [(key, state.capitalize(), message) for key, state, message in ends]
    console().print(table("workloads", ("policy", "ended", "message"), rows))


async def _snapshot(client: Client) -> dict[str, Any]:
    return dict(await _call(client, lookup.SCHEDULER, "snapshot"))


async def _call(client: Client, name: str, method: str, *arguments: Any) -> Any:
    service = await lookup.service(name, client, timeout_s=30)
    return await getattr(service, method)(*arguments)


def _clock(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp).strftime("%H:%M:%S")
