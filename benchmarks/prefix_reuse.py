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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report, sizes, training_jobs
from benchmarks.charts import bars
from benchmarks.timing import timed_async
from configs import presets
from configs.algorithm import AdamSpec, PpoSpec, SftSpec
from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT, Home
from configs.model import ActionModuleSpec, BaseModelSpec, Gr00tSpec, OftSpec, PiSpec
from configs.workload import OutputsSpec, ResourcesSpec
from kernels import backbones
from services.rollout import FEATURE
from services.training_model import TrainingModelService
from storage.partitions import PartitionStore

STATE, ACTION = 25, 4
_WIDTHS: dict[str, Any] = {"action_width": ACTION, "state_width": STATE, "proprioception": "head"}
_TINY_MODULES: dict[str, ActionModuleSpec] = {
    "oft": OftSpec(horizon=2, hidden_width=256, **_WIDTHS),
    "gr00t": Gr00tSpec(horizon=8, hidden_width=64, layers=2, heads=2, head_width=32, future_tokens=8, **_WIDTHS),
    "pi": PiSpec(horizon=8, hidden_width=64, mlp_width=128, heads=2, **_WIDTHS),
}


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        bases: to train on, one after another.
        modules: {kind: module}.
        turns: epochs timed each way.
        samples: of an epoch.
        microbatch: samples of a step.
        max_feature_bytes: bound of a tenant's store; it must hold 1,000 samples for any to be kept.
    """

    bases: Sequence[BaseModelSpec]
    modules: Mapping[str, ActionModuleSpec]
    turns: int
    samples: int
    microbatch: int
    max_feature_bytes: int


def plan(size: str, device: str) -> Plan:
    """Of `--size`; with `full` fewer samples and turns, sized for ten minutes on one GPU."""
    if size == "tiny":
        base = presets.base_model("tiny-qwen3-vl").model_copy(update={"device": device})
        return Plan([base], _TINY_MODULES, 5, 512, 64, 8 << 30)
    modules = sizes.modules(size, horizon=8, action_width=ACTION, state_width=STATE)
    modules.pop("lora")  # trains inside the base: nothing of its features is kept
    return Plan(list(sizes.random_bases(size, device).values()), modules, 3, 128, 32, 64 << 30)


def _backend(
    base: BaseModelSpec, module: ActionModuleSpec, task: str, way: str, samples: int, microbatch: int
) -> BackendConfig:
    adam = AdamSpec(learning_rate=1e-3 if base.dtype == "float32" else 1e-5)  # large modules stay finite
    sft = SftSpec(jobs=1000, batches_per_job=samples // microbatch, microbatch_size=microbatch, optimizer=adam)
    ppo = PpoSpec(jobs=1000, num_envs=8, rollout_steps=samples // 8, microbatch_size=microbatch, optimizer=adam)
    return training_jobs.backend(
        f"{module.kind}-{task}-{way}",
        module,
        sft if task == "sft" else ppo,
        samples,
        base=base,
        resources=ResourcesSpec(reuse_features="own" if way == "kept" else "never"),
        outputs=OutputsSpec(checkpoint_every_jobs=1000),
    )


def _samples(config: BackendConfig) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    n, horizon = config.sample_count, config.policy.action_module.horizon
    base = config.policy.base_model
    images = rng.integers(0, 256, (n, base.image_height, base.image_width, 3), dtype=np.uint8)
    data: dict[str, Any] = {
        "image.base": images,
        "proprioception": rng.normal(size=(n, STATE)).astype(np.float32),
        "action": rng.normal(size=(n, horizon, ACTION)).astype(np.float32),
    }
    if config.task == "sft":
        return {**data, "action_is_pad": np.zeros((n, horizon), bool)}
    if config.features_travel:
        del data["image.base"]
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
    took, _ = await timed_async(service.train_job(job))
    store.clear(job["partition_id"])
    return took


def _feature_bytes(base: BaseModelSpec, modules: Mapping[str, ActionModuleSpec]) -> dict[str, int]:
    """{kind: bytes of a sample's features}, of one forward each."""
    backbone = backbones.load(base, PROJECT_ROOT)
    picture = np.zeros((1, base.image_height, base.image_width, 3), np.uint8)
    prefix = backbone.prepare({"images": {"base": picture}, "instructions": [training_jobs.INSTRUCTION]}, ["base"])
    return {kind: backbone.encode(prefix, module.reads).num_bytes for kind, module in modules.items()}


async def _measure(folder: Path, base: BaseModelSpec, chosen: Plan, found: report.Report) -> None:
    sizes_of = _feature_bytes(base, chosen.modules)
    service = TrainingModelService(str(folder), [base.model_dump(mode="json")], 16, chosen.max_feature_bytes)
    store = PartitionStore(Home(folder).partitions)
    for kind, module in chosen.modules.items():
        for task in ("sft", "rl") if module.learns_by_rl else ("sft",):
            ways = {
                way: _backend(base, module, task, way, chosen.samples, chosen.microbatch) for way in ("anew", "kept")
            }
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for config in ways.values():
                tenant = str(folder / config.policy.tenant)
                await service.open_slot(config.model_dump(mode="json"), tenant, fresh=True)
            for turn in range(chosen.turns + 1):  # the first fills the store and warms up
                for way, config in ways.items():
                    taken[way].append(await _seconds(service, store, config, _samples(config), turn))
            for way, config in ways.items():
                await service.close_slot(config.policy.tenant)
                seconds = taken[way][1:]
                found.add(
                    base=base.name,
                    module=kind,
                    task=task,
                    features=way,
                    samples_per_second=chosen.samples / statistics.median(seconds),
                    seconds=statistics.median(seconds),
                    lowest=min(seconds),
                    highest=max(seconds),
                    bytes=sizes_of[kind],
                )
            pairs = zip(taken["anew"][1:], taken["kept"][1:], strict=True)
            name = f"{task}_speedup" if kind == "oft" else f"{kind}_{task}_speedup"
            name = name if len(chosen.bases) == 1 else f"{base.name}_{name}"
            found.summary[name] = statistics.median(anew / kept for anew, kept in pairs)


def measure(arguments: argparse.Namespace) -> report.Report:
    """What the command line asks for."""
    torch.set_num_threads(1)
    sizes.check(arguments)
    given = {name: getattr(arguments, name) for name in ("turns", "samples", "microbatch") if getattr(arguments, name)}
    found = run(replace(plan(arguments.size, arguments.device), **given))
    found.aims = {"sft_speedup": (">=", 3.0), "rl_speedup": (">=", 1.5)}
    return found


def run(chosen: Plan) -> report.Report:
    """Both ways in turns, for each base, module and task."""
    found = report.Report()
    for base in chosen.bases:
        with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
            asyncio.run(_measure(Path(folder), base, chosen, found))
    return found


def draw(found: report.Report, path: Path) -> None:
    """Samples per second of each module and task, both ways; each base in a picture of its own."""
    bases = list(dict.fromkeys(row["base"] for row in found.rows))
    for base in bases:
        rows = [row for row in found.rows if row["base"] == base]
        groups = list(dict.fromkeys(f"{row['module']} {row['task']}" for row in rows))
        series = {
            label: [row["samples_per_second"] for row in rows if row["features"] == way]
            for way, label in (("anew", "base forward each time"), ("kept", "features kept"))
        }
        own = path if base == bases[0] else path.with_name(f"{path.stem}_{base}.png")
        bars(own, groups, series, "training samples a second", f"What the frozen base computed once, {base}")


if __name__ == "__main__":
    report.main(
        "Training samples per second with and without what the frozen base computed before",
        measure,
        options=[
            *sizes.OPTIONS,
            ("turns", 0, "epochs timed each way; 0 takes the size's: 5, with full and mini 3"),
            ("samples", 0, "samples of an epoch; 0 takes the size's: 512, with full and mini 128"),
            ("microbatch", 0, "samples of a step; 0 takes the size's: 64, with full and mini 32"),
        ],
        draw=draw,
    )
