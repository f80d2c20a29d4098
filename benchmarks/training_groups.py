"""Supervised jobs of several tenants trained as a group against one after another, with all that a job costs.

Timed, in turns, on the same samples and from the same slots: the calls of `train_job` on the training service in this
process, from the first call to the last reply (reading and checking partitions, copies of slots, base forwards, losses,
backward passes, optimizer steps; no checkpoints). Grouped: all tenants' calls at one time with their group. Serial: one
call after another. Features are not kept, as in a first epoch. Left out: leasing, the flow around the calls.

`max_curve_difference` is the largest difference of a job's mean loss between the two ways, over all points: 0 says that
a group trains what each would train alone (the paper's Figure 12, by the real service).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report, training_jobs
from benchmarks.charts import lines
from configs import presets
from configs.algorithm import AdamSpec, SftSpec
from configs.backend import BackendConfig
from configs.home import Home
from configs.model import ActionModuleSpec, Gr00tSpec, LoraSpec, OftSpec, PiSpec
from configs.workload import OutputsSpec, ResourcesSpec
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore

TENANTS = (2, 4, 8)
MICROBATCHES = (1, 4)
BATCHES = 4  # steps of a job
HORIZON, STATE, ACTION = 8, 8, 7
WIDTHS: dict[str, Any] = {"horizon": HORIZON, "action_width": ACTION, "state_width": STATE, "proprioception": "head"}
MODULES: dict[str, ActionModuleSpec] = {
    "oft": OftSpec(hidden_width=256, **WIDTHS),
    "gr00t": Gr00tSpec(hidden_width=128, layers=4, heads=4, head_width=32, future_tokens=8, **WIDTHS),
    "pi": PiSpec(hidden_width=128, mlp_width=512, heads=4, **WIDTHS),
    "lora": LoraSpec(rank=8, alpha=16.0, hidden_width=256, **WIDTHS),
}
WAYS = ("serial", "grouped")


def _backend(tenant: str, module: ActionModuleSpec, microbatch: int) -> BackendConfig:
    sft = SftSpec(
        jobs=1000, batches_per_job=BATCHES, microbatch_size=microbatch, optimizer=AdamSpec(learning_rate=1e-3)
    )
    return training_jobs.backend(
        tenant,
        module,
        sft,
        BATCHES * microbatch,
        resources=ResourcesSpec(reuse_features="never"),
        outputs=OutputsSpec(checkpoint_every_jobs=1_000_000),
    )


def _samples(config: BackendConfig, seed: int) -> dict[str, Any]:
    """Pictures and states at random; actions follow from the states, so that losses fall."""
    rng = np.random.default_rng(seed)
    n = config.sample_count
    state = rng.normal(size=(n, STATE)).astype(np.float32)
    law = np.random.default_rng(0).normal(size=(STATE, HORIZON * ACTION)) / np.sqrt(STATE)
    return {
        "image.base": rng.integers(0, 256, (n, 64, 64, 3), dtype=np.uint8),
        "proprioception": state,
        "action": np.tanh(state @ law).reshape(n, HORIZON, ACTION).astype(np.float32),
        "action_is_pad": np.zeros((n, HORIZON), bool),
    }


async def _turn(
    service: TrainingModelService, store: PartitionStore, way: str, configs: list[BackendConfig], turn: int
) -> tuple[float, list[float]]:
    """Seconds of one job of each tenant, and their losses."""
    jobs = [training_jobs.put(store, c, _samples(c, 100 * turn + i), turn) for i, c in enumerate(configs)]
    begun = time.perf_counter()
    if way == "grouped":
        group = [job["job_id"] for job in jobs]
        ends = await asyncio.gather(*(service.train_job(job, group) for job in jobs))
    else:
        ends = [await service.train_job(job) for job in jobs]
    took = time.perf_counter() - begun
    for job in jobs:
        store.clear(job["partition_id"])
    return took, [end["metrics"]["loss"] for end in ends]


async def _measure(folder: Path, arguments: argparse.Namespace, found: report.Report) -> None:
    base = presets.base_model("tiny-qwen3-vl")
    service = TrainingModelService(str(folder), [base.model_dump(mode="json")], 2 * max(TENANTS))
    store = PartitionStore(Home(folder).partitions)
    apart = 0.0
    for kind, module in MODULES.items():
        for microbatch in MICROBATCHES:
            for count in TENANTS:
                tenants = {
                    way: [_backend(f"{kind}{microbatch}-{way}-{i}of{count}", module, microbatch) for i in range(count)]
                    for way in WAYS
                }
                for config in (c for of_way in tenants.values() for c in of_way):
                    place = str(folder / config.policy.tenant)
                    await service.open_slot(config.model_dump(mode="json"), place, fresh=True)
                taken: dict[str, list[float]] = {way: [] for way in WAYS}
                losses: dict[str, list[list[float]]] = {way: [] for way in WAYS}
                for turn in range(arguments.turns + 1):  # the first warms up
                    for way in WAYS if turn % 2 else reversed(WAYS):
                        seconds, of_jobs = await _turn(service, store, way, tenants[way], turn)
                        taken[way].append(seconds)
                        losses[way].append(of_jobs)
                for config in (c for of_way in tenants.values() for c in of_way):
                    await service.close_slot(config.policy.tenant)
                ratios = [s / g for s, g in zip(taken["serial"][1:], taken["grouped"][1:], strict=True)]
                apart = max(apart, float(np.abs(np.subtract(losses["serial"], losses["grouped"])).max()))
                samples = count * BATCHES * microbatch
                found.add(
                    module=kind,
                    microbatch=microbatch,
                    tenants=count,
                    **{f"{way}_samples_per_second": samples / statistics.median(taken[way][1:]) for way in WAYS},
                    speedup=statistics.median(ratios),
                    lowest=min(ratios),
                    highest=max(ratios),
                )
    found.summary["max_curve_difference"] = apart
    found.summary["min_speedup"] = min(row["speedup"] for row in found.rows)
    for kind in MODULES:
        (row,) = [r for r in found.rows if (r["module"], r["microbatch"], r["tenants"]) == (kind, 1, max(TENANTS))]
        found.summary[f"{kind}_speedup_8x1"] = row["speedup"]


def measure(arguments: argparse.Namespace) -> report.Report:
    """Both ways in turns, a point a module, microbatch and number of tenants."""
    torch.set_num_threads(1)
    found = report.Report(aims={"max_curve_difference": ("<=", 0.0)})
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        asyncio.run(_measure(Path(folder), arguments, found))
    return found


def draw(found: report.Report, path: Path) -> None:
    """Speed-up over tenants, a curve a module and microbatch."""
    curves = {}
    for kind in MODULES:
        for microbatch in MICROBATCHES:
            points = [r for r in found.rows if (r["module"], r["microbatch"]) == (kind, microbatch)]
            curves[f"{kind}, microbatch {microbatch}"] = (
                [p["tenants"] for p in points],
                [p["speedup"] for p in points],
            )
    lines(path, curves, "tenants", "serial over grouped seconds", "Training jobs as a group against one after another")


if __name__ == "__main__":
    report.main(
        "Supervised jobs of several tenants: trained as a group against one after another",
        measure,
        options=[("turns", 5, "timings of a point, each way")],
        draw=draw,
    )
