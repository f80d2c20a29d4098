"""Full durable job lifecycles a second, through the scheduler actor and in one process.

What is timed: SFT lifecycles (reserve, mark ready, lease, complete: four moves, each with its story) with
`synchronous=FULL`; every reply comes after the commit of what it says.

- `actor`: concurrent clients of a real Dask actor in a worker process of its own. Two halves a client, as in the
  flows: a producer (mark the last job ready and reserve the next one in one `apply`) and a trainer (complete the last
  job and lease the next one in one `apply`). The row `actor, a call a verb` makes the four calls one by one.
- `one process`: the same object without Dask, on one event loop, with concurrent coroutines: state machine, group
  commit and journal. A call a verb.
- `depth`: one process again, with so many ready jobs queued before; the cost ratio is their seconds a lifecycle
  over those at 100, medians over alternating rounds.

Left out: partitions, training, the mirror. The best of the repeats counts for throughput, since anything else that
runs on the machine only takes away.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from benchmarks.report import Report, main
from services.training_scheduler import TrainingScheduler, raise_error

LEASE_S = 60.0
BOUND = 1_000_000
FEW = 100
CHUNK = 500  # commands of one `apply` while the queue is filled

Send = Callable[[list[dict[str, Any]]], Awaitable[list[Any]]]


def policies(tenants: int) -> list[dict[str, Any]]:
    """Commands that register SFT policies without effective bounds."""
    return [
        {
            "verb": "register_policy",
            "policy": {
                "policy_key": f"tenant{index}.sft",
                "tenant_id": f"tenant{index}",
                "task_type": "sft",
                "domain": "vla",
                "priority": 0,
                "max_in_flight": BOUND,
                "completion_target": None,
                "max_active_rollouts": None,
            },
        }
        for index in range(tenants)
    ]


def reserve(index: int, request_id: str) -> dict[str, Any]:
    """A reservation as a producer sends it."""
    return {
        "verb": "reserve",
        "request_id": request_id,
        "policy_key": f"tenant{index}.sft",
        "sample_count": 256,
        "behavior_policy_version": None,
        "max_policy_staleness": None,
        "metadata": {"schema_signature": "0" * 64},
        "producer_role": "sft",
    }


def ready(job_id: str) -> dict[str, Any]:
    """The producer's second word."""
    return {"verb": "mark", "job_id": job_id, "state": "ready"}


def lease(holder: str) -> dict[str, Any]:
    """A trainer asks for work."""
    return {"verb": "lease_next", "consumer_role": "actor", "domains": ["vla"], "holder": holder, "lease_s": LEASE_S}


def complete(job: dict[str, Any]) -> dict[str, Any]:
    """A trainer's last word."""
    return {
        "verb": "complete",
        "job_id": job["job_id"],
        "lease_token": job["lease_token"],
        "metadata": {"policy_version": 8, "loss": 0.25},
    }


def together(actor: Any) -> Send:
    """All commands in one call."""

    async def send(commands: list[dict[str, Any]]) -> list[Any]:
        return [raise_error(result) for result in await actor.apply(commands)]

    return send


def one_by_one(actor: Any) -> Send:
    """A call a command, each to the method of its name."""

    async def send(commands: list[dict[str, Any]]) -> list[Any]:
        return [
            await getattr(actor, command["verb"])(**{key: value for key, value in command.items() if key != "verb"})
            for command in commands
        ]

    return send


async def lifecycles(actor: Any, send: Send, clients: int, each: int, label: str) -> float:
    """Seconds that `clients` producers and as many trainers need for clients × each lifecycles.

    Args:
        actor: the scheduler or a handle of it.
        send: carries out commands, one call or several.
        clients: producers, and trainers.
        each: jobs of one producer.
        label: makes the request ids of this run its own.
    """
    untaken = clients * each

    async def producer(index: int) -> None:
        commands: list[dict[str, Any]] = []
        for number in range(each):
            *_, reply = await send([*commands, reserve(index, f"{label}-{index}-{number}")])
            commands = [ready(reply["job"]["job_id"])]
        await send(commands)

    async def trainer(index: int) -> None:
        nonlocal untaken
        commands: list[dict[str, Any]] = []
        while untaken > 0:
            untaken -= 1
            while True:
                *_, reply = await send([*commands, lease(f"trainer{index}")])
                commands = []
                if reply["job"] is not None:
                    break
                await actor.wait_for_ready("actor", ["vla"], LEASE_S)
            commands = [complete(reply["job"])]
        await send(commands)

    started = time.perf_counter()
    await asyncio.gather(*map(producer, range(clients)), *map(trainer, range(clients)))
    return time.perf_counter() - started


async def through_dask(folder: Path, report: Report, clients: int, jobs: int, repeats: int) -> None:
    """Lifecycles through an actor in a worker process."""
    async with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        path = str(folder / "actor.sqlite")
        actor = await client.submit(TrainingScheduler, path, BOUND, actor=True, pure=False)
        await actor.apply(policies(clients))
        rates: dict[str, list[float]] = {"actor": [], "actor, a call a verb": []}
        for repeat in range(repeats):
            for way, send in zip(rates, (together(actor), one_by_one(actor)), strict=True):
                seconds = await lifecycles(actor, send, clients, jobs // clients, f"{way}-{repeat}")
                rates[way].append(jobs // clients * clients / seconds)
        for way, found in rates.items():
            _row(report, way, clients, found)
        report.summary["actor_lifecycles_per_second"] = max(rates["actor"])


async def in_process(folder: Path, report: Report, clients: int, jobs: int, repeats: int) -> None:
    """Lifecycles on the same object without Dask."""
    actor = TrainingScheduler(str(folder / "process.sqlite"), BOUND)
    await actor.apply(policies(clients))
    found = []
    for repeat in range(repeats):
        seconds = await lifecycles(actor, one_by_one(actor), clients, jobs // clients, f"process-{repeat}")
        found.append(jobs // clients * clients / seconds)
    await actor.close()
    _row(report, "one process", clients, found)
    report.summary["lifecycles_per_second"] = max(found)


async def at_depths(folder: Path, report: Report, clients: int, jobs: int, repeats: int, many: int) -> None:
    """Seconds a lifecycle with few and with many ready jobs queued."""
    actors = {}
    for depth in (FEW, many):
        actors[depth] = actor = TrainingScheduler(str(folder / f"depth{depth}.sqlite"), BOUND)
        await actor.apply(policies(clients))
        for start in range(0, depth, CHUNK):
            numbers = range(start, min(start + CHUNK, depth))
            replies = await together(actor)([reserve(number % clients, f"fill-{number}") for number in numbers])
            await together(actor)([ready(reply["job"]["job_id"]) for reply in replies])
    seconds: dict[int, list[float]] = {depth: [] for depth in actors}
    for repeat in range(repeats):  # alternating, so that what else the machine does falls on both
        for depth, actor in actors.items():
            took = await lifecycles(actor, one_by_one(actor), clients, jobs // clients, f"depth-{repeat}")
            seconds[depth].append(took / (jobs // clients * clients))
    for depth, actor in actors.items():
        assert (await actor.counts())["ready"] == depth
        _row(report, f"depth {depth:,}", clients, [1 / took for took in seconds[depth]])
        await actor.close()
    report.summary["cost_ratio_100k"] = statistics.median(seconds[many]) / statistics.median(seconds[FEW])


def measure(options: argparse.Namespace) -> Report:
    """All three, one after another."""
    report = Report(
        aims={
            "actor_lifecycles_per_second": (">=", 500),
            "lifecycles_per_second": (">=", 2000),
            "cost_ratio_100k": ("<=", 1.5),
        }
    )

    async def all_three(folder: Path) -> None:
        sizes = options.clients, options.jobs, options.repeats
        await through_dask(folder, report, *sizes)
        await in_process(folder, report, *sizes)
        await at_depths(folder, report, *sizes, options.depth)

    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        asyncio.run(all_three(Path(folder)))
    return report


def _row(report: Report, way: str, clients: int, rates: list[float]) -> None:
    report.add(
        way=way,
        clients=2 * clients,
        lifecycles_per_s=max(rates),
        median_per_s=statistics.median(rates),
        lowest_per_s=min(rates),
        moves_per_s=4 * max(rates),
    )


if __name__ == "__main__":
    main(
        "Durable job lifecycles: reserve, ready, lease, complete (SQLite, synchronous=FULL)",
        measure,
        options=(
            ("clients", 32, "producers, and as many trainers"),
            ("jobs", 2000, "lifecycles of one run"),
            ("repeats", 3, "runs of each"),
            ("depth", 100_000, "ready jobs of the deep queue; the summary's figure is for 100,000"),
            ("folder", "", "where the journals lie; empty: the system's temporary folder"),
        ),
    )
