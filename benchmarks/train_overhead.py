"""`train_job` against a plain PyTorch loop: the same samples, base, action module, optimizer and thread settings.

Timed, in turns: (a) the call of `train_job` on the resident actor in another process, from the call to its reply: the
partition's reading and checks, the copy of the slot, features, steps, the checkpoint; (b) `benchmarks.peers.plain_sft`
on the same arrays in memory. Left out: writing the partition, the flow around the call.
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
from distributed import LocalCluster

from benchmarks import report, training_jobs
from benchmarks.peers import PlainPolicy, plain_sft
from configs.algorithm import AdamSpec, SftSpec
from configs.backend import BackendConfig
from configs.home import Home
from configs.model import OftSpec
from services import lookup
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore

STATE, ACTION, HORIZON = 25, 4, 2


def _config(batches: int, microbatch: int) -> BackendConfig:
    module = OftSpec(horizon=HORIZON, action_width=ACTION, state_width=STATE, hidden_width=256, proprioception="head")
    sft = SftSpec(
        jobs=1000,
        batches_per_job=batches,
        microbatch_size=microbatch,
        optimizer=AdamSpec(learning_rate=1e-3),
        cosine=False,
    )
    return training_jobs.backend("bench", module, sft, batches * microbatch)


def _samples(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "image.base": rng.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8),
        "proprioception": rng.normal(size=(count, STATE)).astype(np.float32),
        "action": rng.normal(size=(count, HORIZON, ACTION)).astype(np.float32),
        "action_is_pad": np.zeros((count, HORIZON), bool),
    }


async def _both(config: BackendConfig, folder: Path, turns: int) -> tuple[list[float], list[float]]:
    home = Home(folder)
    data = _samples(config.sample_count)
    store = PartitionStore(home.partitions)
    plain = PlainPolicy(config.policy)
    ours, bare = [], []
    assert isinstance(config.algorithm, SftSpec)
    async with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, asynchronous=True, dashboard_address=None, memory_limit=0
        ) as cluster,
        await lookup.connect(cluster.scheduler_address) as client,
    ):
        bases = [config.policy.base_model.model_dump(mode="json")]
        actor: Any = await client.submit(TrainingModelService, str(folder), bases, 1, actor=True)
        await actor.open_slot(config.model_dump(mode="json"), str(folder / "tenant"), fresh=True)
        for turn in range(turns + 1):
            job = training_jobs.put(store, config, data, turn)
            begun = time.perf_counter()
            await actor.train_job(job)
            ours.append(time.perf_counter() - begun)
            bare.append(
                plain_sft(
                    plain, config.algorithm, {**data, "instructions": [training_jobs.INSTRUCTION] * len(data["action"])}
                )
            )
            store.clear(job["partition_id"])
    return ours[1:], bare[1:]  # the first of each warms up


def measure(arguments: argparse.Namespace) -> report.Report:
    """Both ways in turns."""
    found = report.Report(aims={"ratio": (">=", 0.95)})
    config = _config(arguments.batches, arguments.microbatch)
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        ours, bare = asyncio.run(_both(config, Path(folder), arguments.turns))
    for way, seconds in (("plain loop", bare), ("train_job", ours)):
        found.add(
            way=way,
            samples=config.sample_count,
            microbatch=arguments.microbatch,
            seconds=statistics.median(seconds),
            lowest=min(seconds),
            highest=max(seconds),
            samples_per_second=config.sample_count / statistics.median(seconds),
        )
    # Neighbours in time are compared, so that a machine that slows down does so for both.
    found.summary["ratio"] = statistics.median(b / o for o, b in zip(ours, bare, strict=True))
    return found


if __name__ == "__main__":
    report.main(
        "A training job of 1,600 samples: train_job on the resident actor against a plain PyTorch loop",
        measure,
        options=[
            ("turns", 7, "jobs timed"),
            ("batches", 25, "optimizer steps a job"),
            ("microbatch", 64, "samples of a step"),
        ],
    )
