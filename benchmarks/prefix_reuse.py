"""Training samples per second with and without what the frozen base computed before.

Timed, in turns: the call of `train_job` on the training service in this process (the partition's reading and checks,
the copy of the slot, features, steps, the checkpoint), on the same samples each time. Of SFT the epochs after the first
with the store of features against those without it; of RL an update on features that travelled with the rollout against
one on its pictures. Left out: writing partitions, the flow around the call. `bytes` are those of a sample's features.
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
from benchmarks.charts import bars
from configs import presets
from configs.algorithm import AdamSpec, PpoSpec, SftSpec
from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT, Home
from configs.model import ActionModuleSpec, Gr00tSpec, OftSpec, PiSpec
from configs.workload import OutputsSpec, ResourcesSpec
from kernels import action_modules, backbones
from services.rollout import FEATURE
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore

STATE, ACTION = 25, 4
WIDTHS: dict[str, Any] = {"action_width": ACTION, "state_width": STATE, "proprioception": "head"}
MODULES: dict[str, ActionModuleSpec] = {
    "oft": OftSpec(horizon=2, hidden_width=256, **WIDTHS),
    "gr00t": Gr00tSpec(horizon=8, hidden_width=64, layers=2, heads=2, head_width=32, future_tokens=8, **WIDTHS),
    "pi": PiSpec(horizon=8, hidden_width=64, mlp_width=128, heads=2, **WIDTHS),
}


def _backend(module: ActionModuleSpec, task: str, way: str, samples: int, microbatch: int) -> BackendConfig:
    adam = AdamSpec(learning_rate=1e-3)
    sft = SftSpec(jobs=1000, batches_per_job=samples // microbatch, microbatch_size=microbatch, optimizer=adam)
    ppo = PpoSpec(jobs=1000, num_envs=8, rollout_steps=samples // 8, microbatch_size=microbatch, optimizer=adam)
    return training_jobs.backend(
        f"{module.kind}-{task}-{way}",
        module,
        sft if task == "sft" else ppo,
        samples,
        resources=ResourcesSpec(reuse_features="own" if way == "kept" else "never"),
        outputs=OutputsSpec(checkpoint_every_jobs=1000),
    )


def _samples(config: BackendConfig) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    n, horizon = config.sample_count, config.policy.action_module.horizon
    images = rng.integers(0, 256, (n, 64, 64, 3), dtype=np.uint8)
    data: dict[str, Any] = {
        "image.base": images,
        "proprioception": rng.normal(size=(n, STATE)).astype(np.float32),
        "action": rng.normal(size=(n, horizon, ACTION)).astype(np.float32),
    }
    if config.task == "sft":
        return {**data, "action_is_pad": np.zeros((n, horizon), bool)}
    if config.features_travel:
        del data["image.base"]
        base = config.policy.base_model
        data[FEATURE] = rng.normal(size=(n, base.num_action_tokens, base.hidden_width)).astype(np.float32)
    return data | {
        "log_prob": rng.normal(size=(n, horizon)).astype(np.float32),
        "value": rng.normal(size=n).astype(np.float32),
        "reward": rng.normal(size=(n, horizon)).astype(np.float32),
        "valid": np.ones((n, horizon), bool),
        "terminated": np.zeros((n, horizon), bool),
        "truncated": np.zeros((n, horizon), bool),
        "next_value": rng.normal(size=n).astype(np.float32),
        "bootstrap_value": np.zeros(n, np.float32),
        "sample_valid": np.ones(n, bool),
        "done": np.zeros(n, bool),
    }


async def _seconds(
    service: TrainingModelService, store: PartitionStore, config: BackendConfig, data: dict[str, Any], turn: int
) -> float:
    """Of one `train_job` on a new partition of the same samples."""
    job = training_jobs.put(store, config, data, turn)
    if config.task == "rl":
        await service.compute_advantages(job)
    begun = time.perf_counter()
    await service.train_job(job)
    took = time.perf_counter() - begun
    store.clear(job["partition_id"])
    return took


async def _measure(folder: Path, arguments: argparse.Namespace, found: report.Report) -> None:
    base = presets.base_model("tiny-qwen3-vl")
    service = TrainingModelService(str(folder), [base.model_dump(mode="json")], 16, max_feature_bytes=8 << 30)
    store = PartitionStore(Home(folder).partitions)
    backbone = backbones.load(base, PROJECT_ROOT)
    for kind, module in MODULES.items():
        if kind not in action_modules.MODULES:
            continue
        seen = {"images": {"base": np.zeros((1, 64, 64, 3), np.uint8)}, "instructions": [training_jobs.INSTRUCTION]}
        reads = action_modules.build(module, base, 0).reads
        size = backbone.encode(backbone.prepare(seen, ["base"]), reads).num_bytes
        for task in ("sft", "rl") if module.learns_by_rl else ("sft",):
            ways = {
                way: _backend(module, task, way, arguments.samples, arguments.microbatch) for way in ("anew", "kept")
            }
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for config in ways.values():
                tenant = str(folder / config.policy.tenant)
                await service.open_slot(config.model_dump(mode="json"), tenant, fresh=True)
            for turn in range(arguments.turns + 1):  # the first fills the store and warms up
                for way, config in ways.items():
                    taken[way].append(await _seconds(service, store, config, _samples(config), turn))
            for way, seconds in taken.items():
                median = statistics.median(seconds[1:])
                found.add(
                    module=kind,
                    task=task,
                    features=way,
                    samples_per_second=arguments.samples / median,
                    seconds=median,
                    lowest=min(seconds[1:]),
                    highest=max(seconds[1:]),
                    bytes=size,
                )
            pairs = zip(taken["anew"][1:], taken["kept"][1:], strict=True)
            name = f"{task}_speedup" if kind == "oft" else f"{kind}_{task}_speedup"
            found.summary[name] = statistics.median(anew / kept for anew, kept in pairs)


def measure(arguments: argparse.Namespace) -> report.Report:
    """Both ways in turns, for each module and task."""
    torch.set_num_threads(1)
    found = report.Report(aims={"sft_speedup": (">=", 3.0), "rl_speedup": (">=", 1.5)})
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        asyncio.run(_measure(Path(folder), arguments, found))
    return found


def draw(found: report.Report, path: Path) -> None:
    """Samples per second of each module and task, both ways."""
    groups = list(dict.fromkeys(f"{row['module']} {row['task']}" for row in found.rows))
    series = {
        label: [row["samples_per_second"] for row in found.rows if row["features"] == way]
        for way, label in (("anew", "base forward each time"), ("kept", "features kept"))
    }
    bars(path, groups, series, "training samples a second", "What the frozen base computed once")


if __name__ == "__main__":
    report.main(
        "Training samples per second with and without what the frozen base computed before",
        measure,
        options=[
            ("turns", 5, "epochs timed each way"),
            ("samples", 512, "samples of an epoch"),
            ("microbatch", 64, "samples of a step"),
        ],
        draw=draw,
    )
