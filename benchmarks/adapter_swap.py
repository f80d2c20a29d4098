"""From a trained policy version to the first prediction with it, by module size.

Timed, round after round: `export` (`export_params` of the training service: the parameters as arrays), `publish`
(`load_weights` of the inference service: checks, a module built and filled), `first` (the first `predict` after it:
preparation, queue, base, module). Before each round one optimizer step (`train_batch`, not timed) makes the new
version, and the same observation is predicted with the old one: `before`, what a prediction takes without a swap. Each
prediction must name the version that it should come from. Both services run in this process, each with a base of its
own as on a cluster; left out is the way between their processes, which carries `bytes`.

Milliseconds are medians with the 95 % interval of the median (order statistics); `swap` is the sum of a round's three.
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
from benchmarks.charts import stacked
from benchmarks.timing import interval, timed_async
from configs import presets
from configs.algorithm import AdamSpec, SftSpec
from configs.backend import BackendConfig
from configs.cluster import InferenceBatchingSpec
from configs.model import ActionModuleSpec, BaseModelSpec, Gr00tSpec, LoraSpec, OftSpec, PiSpec
from services.inference_model import InferenceModelService
from services.training_model import TrainingModelService

HORIZON, ACTION, STATE = 8, 7, 8
_WIDTHS: dict[str, Any] = {"horizon": HORIZON, "action_width": ACTION, "state_width": STATE, "proprioception": "head"}
LEGS = ("before", "export", "publish", "first")


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        bases: that modules are swapped on, one after another.
        modules: {name in the report: module}.
        rounds: swaps timed of each module.
        rows: of the observation and of the optimizer step.
    """

    bases: Sequence[BaseModelSpec]
    modules: Mapping[str, ActionModuleSpec]
    rounds: int
    rows: int = 1


def plan(size: str, device: str) -> Plan:
    """Of `--size`; with `tiny` the modules' small and default sizes, with `full` the default ones and a small head."""
    if size == "tiny":
        small: dict[str, ActionModuleSpec] = {
            "oft small": OftSpec(hidden_width=256, **_WIDTHS),
            "gr00t small": Gr00tSpec(
                hidden_width=128, layers=4, heads=4, head_width=32, future_tokens=8, repeated_steps=1, **_WIDTHS
            ),
            "pi small": PiSpec(hidden_width=128, mlp_width=512, heads=4, **_WIDTHS),
        }
        default: dict[str, ActionModuleSpec] = {
            "oft": OftSpec(**_WIDTHS),
            "lora": LoraSpec(**_WIDTHS),
            "pi": PiSpec(**_WIDTHS),
            "gr00t": Gr00tSpec(**_WIDTHS),
        }
        base = presets.base_model("tiny-qwen3-vl").model_copy(update={"device": device})
        return Plan([base], small | default, 9)
    modules = sizes.modules(size, horizon=HORIZON, action_width=ACTION, state_width=STATE)
    modules = {"oft small": OftSpec(hidden_width=16, residual_blocks=1, **_WIDTHS), **modules}
    return Plan(list(sizes.random_bases(size, device).values()), modules, 9)


def _config(base: BaseModelSpec, name: str, module: ActionModuleSpec, rows: int) -> BackendConfig:
    sft = SftSpec(jobs=1, batches_per_job=1, microbatch_size=rows, optimizer=AdamSpec(learning_rate=1e-5), cosine=False)
    return training_jobs.backend(name.replace(" ", "-"), module, sft, rows, base=base)


def _observation(base: BaseModelSpec, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "images": {"base": rng.integers(0, 256, (rows, base.image_height, base.image_width, 3), dtype=np.uint8)},
        "proprioception": rng.normal(size=(rows, STATE)).astype(np.float32),
        "instructions": [training_jobs.INSTRUCTION] * rows,
    }


async def swaps(
    training: TrainingModelService, inference: InferenceModelService, config: BackendConfig, folder: Path, rounds: int
) -> tuple[dict[str, list[float]], int, int]:
    """Seconds of each leg, a value a round (one more round warms up); the payload's parameters and bytes.

    Raises:
        RuntimeError: if a prediction does not name the version that it should come from.
    """
    tenant, rows = config.policy.tenant, config.sample_count
    seen = _observation(config.policy.base_model, rows)
    batch = {
        "image.base": seen["images"]["base"],
        "proprioception": seen["proprioception"],
        "instructions": seen["instructions"],
        "action": np.zeros((rows, HORIZON, ACTION), np.float32),
        "action_is_pad": np.zeros((rows, HORIZON), bool),
    }
    await training.open_slot(config.model_dump(mode="json"), str(folder / tenant), fresh=True)
    await inference.open_policy(config.policy.model_dump(mode="json"), fresh=True)
    seconds: dict[str, list[float]] = {leg: [] for leg in LEGS}
    for turn in range(rounds + 1):
        trained = await training.train_batch(tenant, config.policy_key, batch)
        before, old = await timed_async(inference.predict(seen, tenant))
        export, payload = await timed_async(training.export_params(tenant))
        publish, _ = await timed_async(inference.load_weights(**payload))
        first, new = await timed_async(inference.predict(seen, tenant))
        versions = (old["policy_version"], payload["version"], new["policy_version"])
        if versions != (turn, turn + 1, trained["version"]):
            raise RuntimeError(f"versions {versions} of {tenant!r} in round {turn}: not the old, the new, the new one")
        if turn:
            for leg, took in zip(LEGS, (before, export, publish, first), strict=True):
                seconds[leg].append(took)
    await training.close_slot(tenant)
    await inference.close_policy(tenant)
    tensors = payload["tensors"].values()
    return seconds, sum(t.size for t in tensors), sum(t.nbytes for t in tensors)


def figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians and intervals in milliseconds of what `swaps` timed."""
    whole = [sum(legs) for legs in zip(*(seconds[leg] for leg in LEGS[1:]), strict=True)]
    found = {}
    for name, values in {**seconds, "swap": whole}.items():
        found[f"{name}_ms"] = 1e3 * statistics.median(values)
        if name in ("before", "swap"):
            found[f"{name}_low"], found[f"{name}_high"] = (1e3 * end for end in interval(values))
    return found


async def _measure(folder: Path, base: BaseModelSpec, chosen: Plan, found: report.Report) -> None:
    bases = [base.model_dump(mode="json")]
    training = TrainingModelService(str(folder), bases, 1)
    inference = InferenceModelService(str(folder), bases, InferenceBatchingSpec().model_dump(mode="json"), 1, 1)
    for name, module in chosen.modules.items():
        config = _config(base, name, module, chosen.rows)
        seconds, parameters, size = await swaps(training, inference, config, folder, chosen.rounds)
        row = figures(seconds)
        found.add(base=base.name, module=name, parameters=parameters, bytes=size, **row)
        found.summary[f"{base.name}_{name.replace(' ', '_')}_swap_ms"] = row["swap_ms"]


def measure(arguments: argparse.Namespace) -> report.Report:
    """What the command line asks for."""
    torch.set_num_threads(1)
    sizes.check(arguments)
    chosen = plan(arguments.size, arguments.device)
    return run(replace(chosen, rounds=arguments.rounds or chosen.rounds))


def run(chosen: Plan) -> report.Report:
    """Each module on each base."""
    found = report.Report()
    for base in chosen.bases:
        with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
            asyncio.run(_measure(Path(folder), base, chosen, found))
    return found


def draw(found: report.Report, path: Path) -> None:
    """A swap's legs beside a prediction without one; each base in a picture of its own."""
    bases = list(dict.fromkeys(row["base"] for row in found.rows))
    for base in bases:
        rows = [row for row in found.rows if row["base"] == base]
        stacked(
            path if base == bases[0] else path.with_name(f"{path.stem}_{base}.png"),
            [f"{row['module']}, {row['bytes'] / 1e6:,.3g} MB" for row in rows],
            {
                "no swap": {"prediction": [row["before_ms"] for row in rows]},
                "swap": {
                    "prediction": [row["first_ms"] for row in rows],
                    "publish": [row["publish_ms"] for row in rows],
                    "export": [row["export_ms"] for row in rows],
                },
            },
            "ms",
            f"From a trained version to the first prediction with it, {base}",
        )


if __name__ == "__main__":
    report.main(
        "Export, publish and first prediction of a new policy version",
        measure,
        options=[
            *sizes.OPTIONS,
            ("rounds", 0, "swaps timed of each module; 0 takes the size's: 9"),
        ],
        draw=draw,
    )
