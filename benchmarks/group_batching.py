"""One base forward for several tenants against a forward each: the forward stage of training, as in the paper's 5.2.

Timed, in turns: a base forward, then every tenant's action module from features to its loss (with the graph that a
backward pass would need). Grouped: one forward of all tenants' rows, split. Serial: tenant after tenant. Plain: one
tenant with as many rows as all of them. Left out: pictures to patches, backward passes, optimizer steps.

A point's speed-up is the median over its rounds of serial over grouped seconds, with the 95 % interval of the median
(order statistics). `min_speedup` is the smallest upper end of these intervals, since a point counts as slower than
serial only if its whole interval is; `min_median_speedup` the smallest median.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.charts import lines
from configs import presets
from configs.model import ActionModuleSpec, BaseModelSpec, Gr00tSpec, OftSpec, PiSpec
from kernels import action_modules, group_batching
from kernels.action_modules import ActionModule
from kernels.backbones import Backbone, Qwen3VlBackbone
from kernels.features import PrefixBatch, VLAFeature
from kernels.losses import sft_valid_count

TENANTS = (2, 4, 6, 8)
LOCAL_BATCHES = (1, 2, 4, 8)
HORIZON, ACTION, STATE = 8, 7, 8
INSTRUCTION = "push the cube to the target"
_WIDTHS: dict[str, Any] = {"horizon": HORIZON, "action_width": ACTION, "state_width": STATE, "proprioception": "head"}
MODULES: dict[str, ActionModuleSpec] = {
    "oft": OftSpec(hidden_width=256, **_WIDTHS),
    "gr00t": Gr00tSpec(
        hidden_width=128, layers=4, heads=4, head_width=32, future_tokens=8, repeated_steps=1, **_WIDTHS
    ),
    "pi": PiSpec(hidden_width=128, mlp_width=512, heads=4, **_WIDTHS),
}
BASES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "hidden_width": 256,
        "num_layers": 6,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_width": 64,
        "mlp_width": 512,
    },
}
"""Sizes of randomly initialised bases, as changes of the preset `tiny-qwen3-vl`."""


@dataclass(frozen=True, eq=False)
class Tenant:
    """One tenant's module and the rows of its microbatch."""

    module: ActionModule
    prefix: PrefixBatch
    proprioception: Tensor
    action: Tensor

    def loss(self, feature: VLAFeature) -> Tensor:
        """Forward of the action module."""
        is_pad = torch.zeros(self.action.shape[:2], dtype=torch.bool)
        count = sft_valid_count(is_pad, self.action.shape[2])
        generator = torch.Generator().manual_seed(0)
        return self.module.imitation_loss(feature, self.proprioception, self.action, is_pad, count, generator)


def _tenant(backbone: Backbone, spec: BaseModelSpec, module: ActionModuleSpec, rows: int, seed: int) -> Tenant:
    rng = np.random.default_rng(seed)
    seen = {
        "images": {"base": rng.integers(0, 256, (rows, spec.image_height, spec.image_width, 3), dtype=np.uint8)},
        "instructions": [INSTRUCTION] * rows,
    }
    return Tenant(
        action_modules.build(module, spec, seed),
        backbone.prepare(seen, ["base"]),
        torch.from_numpy(rng.normal(size=(rows, STATE)).astype(np.float32)),
        torch.from_numpy(rng.normal(size=(rows, HORIZON, ACTION)).astype(np.float32)),
    )


def _finish() -> None:
    """Wait for what a GPU was given to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _grouped(backbone: Backbone, tenants: Sequence[Tenant]) -> float:
    """Seconds of the base; the modules run after it."""
    begun = time.perf_counter()
    parts = tenants[0].module.reads
    batch, slices = group_batching.group([t.prefix for t in tenants])
    features = group_batching.split(backbone.encode(batch, parts), slices)
    _finish()
    base = time.perf_counter() - begun
    for tenant, feature in zip(tenants, features, strict=True):
        tenant.loss(feature)
    return base


def _serial(backbone: Backbone, tenants: Sequence[Tenant]) -> float:
    """Seconds of the base, all its forwards."""
    base = 0.0
    for tenant in tenants:
        begun = time.perf_counter()
        feature = backbone.encode(tenant.prefix, tenant.module.reads)
        _finish()
        base += time.perf_counter() - begun
        tenant.loss(feature)
    return base


def _timed(call: Callable[[], float]) -> tuple[float, float]:
    """(seconds in all, seconds of the base)."""
    _finish()
    begun = time.perf_counter()
    base = call()
    _finish()
    return time.perf_counter() - begun, base


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics (normal approximation of the binomial)."""
    ordered, n = sorted(values), len(values)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = math.floor((n - 1) / 2 - reach), math.ceil((n - 1) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, n - 1)]


def _point(
    backbone: Backbone, spec: BaseModelSpec, kind: str, count: int, rows: int, rounds: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The row of one point, and its seconds."""
    module = MODULES[kind]
    tenants = [_tenant(backbone, spec, module, rows, seed) for seed in range(count)]
    alone = _tenant(backbone, spec, module, rows * count, 99)
    reads, prefixes = tenants[0].module.reads, [t.prefix for t in tenants]

    def grouped_base() -> float:
        batch, slices = group_batching.group(prefixes)
        group_batching.split(backbone.encode(batch, reads), slices)
        return 0.0

    def plain_base() -> float:
        backbone.encode(alone.prefix, reads)
        return 0.0

    ways: dict[str, Callable[[], float]] = {
        "grouped": lambda: _grouped(backbone, tenants),
        "serial": lambda: _serial(backbone, tenants),
        "grouped_base": grouped_base,
        "plain_base": plain_base,
    }
    seconds: dict[str, list[float]] = {way: [] for way in (*ways, "grouped_in_base", "serial_in_base")}
    for turn in range(rounds + 1):
        for way in sorted(ways, reverse=bool(turn % 2)):  # in turns, and nobody always first
            took, base = _timed(ways[way])
            if turn:  # the first warms up
                seconds[way].append(took)
                if way in ("grouped", "serial"):
                    seconds[f"{way}_in_base"].append(base)
    ratios = [s / g for s, g in zip(seconds["serial"], seconds["grouped"], strict=True)]
    over_plain = [g / p for g, p in zip(seconds["grouped_base"], seconds["plain_base"], strict=True)]
    low, high = interval(ratios)
    row = {
        "module": kind,
        "tenants": count,
        "local_batch": rows,
        "grouped_ms": 1e3 * statistics.median(seconds["grouped"]),
        "serial_ms": 1e3 * statistics.median(seconds["serial"]),
        "speedup": statistics.median(ratios),
        "low": low,
        "high": high,
        "grouped_over_plain": statistics.median(over_plain),
    }
    return row, seconds


@dataclass(frozen=True)
class Schema:
    """A tenant's published interface: cameras (name, height, width), state and action widths, an instruction."""

    cameras: tuple[tuple[str, int, int], ...]
    state: int
    action: int
    instruction: str


# Key names and widths as the datasets publish them; the pictures and numbers here are generated.
LIBERO = Schema((("image", 128, 128), ("wrist_image", 128, 128)), 8, 7, "put the black bowl on the plate")
CALVIN = Schema((("rgb_gripper", 84, 84), ("rgb_static", 200, 200)), 15, 7, "push the red block to the left")
STREAMS = {"libero 1": LIBERO, "libero 2": LIBERO, "calvin 1": CALVIN, "calvin 2": CALVIN}
_SAMPLES, _ROWS, _LEARNING_RATE = 64, 4, 1e-3


class _Learner:
    """One tenant of Figure 12: a pi module, its optimizer, and a stream whose actions follow from its states."""

    def __init__(self, spec: BaseModelSpec, schema: Schema, seed: int) -> None:
        widths = {"horizon": HORIZON, "action_width": schema.action, "state_width": schema.state}
        module = PiSpec(hidden_width=128, mlp_width=512, heads=4, proprioception="head", **widths)
        rng = np.random.default_rng(seed)
        self.schema = schema
        self.module = action_modules.build(module, spec, seed)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=_LEARNING_RATE, foreach=False)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []
        self._images = {
            name: rng.integers(0, 256, (_SAMPLES, h, w, 3), dtype=np.uint8) for name, h, w in schema.cameras
        }
        self._state = rng.normal(size=(_SAMPLES, schema.state)).astype(np.float32)
        law = rng.normal(size=(schema.state, HORIZON * schema.action)) / math.sqrt(schema.state)
        self._action = np.tanh(self._state @ law).reshape(_SAMPLES, HORIZON, schema.action).astype(np.float32)

    def rows(self, step: int) -> slice:
        start = step * _ROWS % _SAMPLES
        return slice(start, start + _ROWS)

    def prefix(self, backbone: Backbone, step: int) -> PrefixBatch:
        rows = self.rows(step)
        images = {name: image[rows] for name, image in self._images.items()}
        seen = {"images": images, "instructions": [self.schema.instruction] * _ROWS}
        return backbone.prepare(seen, list(images))

    def update(self, feature: VLAFeature, step: int) -> None:
        rows = self.rows(step)
        action, is_pad = torch.from_numpy(self._action[rows]), torch.zeros(_ROWS, HORIZON, dtype=torch.bool)
        count = sft_valid_count(is_pad, action.shape[2])
        state = torch.from_numpy(self._state[rows])
        loss = self.module.imitation_loss(feature, state, action, is_pad, count, self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def curves(backbone: Backbone, steps: int, *, grouped: bool) -> dict[str, list[float]]:
    """Losses of four pi tenants, two of either schema, one base forward a step or one each (the paper's Figure 12)."""
    learners = {name: _Learner(backbone.spec, schema, seed) for seed, (name, schema) in enumerate(STREAMS.items())}
    for step in range(steps):
        prefixes = [learner.prefix(backbone, step) for learner in learners.values()]
        if grouped:
            batch, slices = group_batching.group(prefixes)
            features = group_batching.split(backbone.encode(batch, {"cache"}), slices)
        else:
            features = [backbone.encode(prefix, {"cache"}) for prefix in prefixes]
        for learner, feature in zip(learners.values(), features, strict=True):
            learner.update(feature, step)
    return {name: learner.losses for name, learner in learners.items()}


def measure(arguments: argparse.Namespace) -> report.Report:
    """All points of each base size and module."""
    torch.set_num_threads(1)
    found = report.Report(
        aims={
            "min_speedup": (">=", 0.97),
            "max_grouped_over_plain": ("<=", 1.10),
            "max_curve_difference": ("<=", 0.0),
        }
    )
    preset = presets.base_model("tiny-qwen3-vl")
    for size, changes in BASES.items():
        spec = preset.model_copy(update={**changes, "device": arguments.device})
        backbone = Qwen3VlBackbone.random(spec, seed=0)
        for kind in MODULES:
            for count in TENANTS:
                for rows in LOCAL_BATCHES:
                    row, seconds = _point(backbone, spec, kind, count, rows, arguments.rounds)
                    found.add(base=size, **row)
                    if (count, rows) == (8, 4):
                        for way in ("grouped", "serial"):
                            share = statistics.median(seconds[f"{way}_in_base"]) / statistics.median(seconds[way])
                            found.summary[f"{size}_{kind}_{way}_base_share"] = share
    tiny = Qwen3VlBackbone.random(preset.model_copy(update={"device": arguments.device}), seed=0)
    both = [curves(tiny, arguments.steps, grouped=grouped) for grouped in (True, False)]
    found.series = {
        f"{way} {name}": c for way, of in zip(("grouped", "serial"), both, strict=True) for name, c in of.items()
    }
    found.summary["max_curve_difference"] = max(
        abs(g - s) for name in STREAMS for g, s in zip(both[0][name], both[1][name], strict=True)
    )
    for name, losses in both[0].items():
        found.summary[f"loss_{name.replace(' ', '_')}_last_over_first"] = statistics.mean(
            losses[-16:]
        ) / statistics.mean(losses[:16])
    points = found.rows
    found.summary |= {
        "min_speedup": min(row["high"] for row in points),
        "min_median_speedup": min(row["speedup"] for row in points),
        "max_grouped_over_plain": max(row["grouped_over_plain"] for row in points),
    }
    for size in BASES:
        for kind in MODULES:
            (row,) = [
                r for r in points if (r["base"], r["module"], r["tenants"], r["local_batch"]) == (size, kind, 8, 1)
            ]
            found.summary[f"{size}_{kind}_speedup_8x1"] = row["speedup"]
    found.summary["speedup_8x1"] = statistics.median(
        value for name, value in found.summary.items() if name.endswith("_speedup_8x1")
    )
    return found


def draw(found: report.Report, path: Path) -> None:
    """Speed-up over tenants at local batch 1 and 8, a curve a base size and module."""
    speedups = {}
    for size in BASES:
        for kind in MODULES:
            for rows in (LOCAL_BATCHES[0], LOCAL_BATCHES[-1]):
                points = [r for r in found.rows if (r["base"], r["module"], r["local_batch"]) == (size, kind, rows)]
                speedups[f"{kind} {size} base, batch {rows}"] = (
                    [p["tenants"] for p in points],
                    [p["speedup"] for p in points],
                )
    lines(path, speedups, "tenants", "serial over grouped seconds", "Grouped against serial forward stage")
    smooth = {
        name: (list(range(len(losses) - 15)), np.convolve(losses, np.ones(16) / 16, "valid").tolist())
        for name, losses in found.series.items()
    }
    lines(
        path.with_name(f"{path.stem}_curves.png"),
        smooth,
        "step",
        "loss, mean of 16 steps",
        "Four pi tenants, grouped and serial (the curves lie on one another)",
        marked=False,
        overlaid=[name for name in smooth if name.startswith("serial")],
    )


if __name__ == "__main__":
    report.main(
        "The forward stage of several tenants' microbatches: one base forward for all against one each",
        measure,
        options=[
            ("rounds", 15, "timings of a point"),
            ("steps", 200, "optimizer steps of the loss curves"),
            ("device", "cpu", "where base and modules are: cpu or cuda"),
        ],
        draw=draw,
    )
