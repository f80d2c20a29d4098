"""Action modules of one architecture decoded as a stack against one after another, in inference.

Timed, in turns: from the base's features of all tenants' rows to chunks on the CPU, with a noise each. Stacked: one
`decode` of all rows. One by one: every tenant's module on its own rows. Left out: the base's forward, drawing the
noise, and making the stack, which is done once for many decisions (`stack_ms` of a row, with the bytes of its copies).

A point's speed-up is the median over its rounds of one-by-one over stacked seconds, with the 95 % interval of the
median (order statistics). `used` says whether the rule (`kernels.action_modules.stacking.is_faster`) stacks there;
`min_speedup_where_used` is the smallest upper end of the intervals of those points, since a point counts as slower only
if its whole interval is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.charts import lines
from benchmarks.group_batching import STATE, TINY_MODULES, interval
from configs import presets
from configs.model import BaseModelSpec
from kernels import action_modules
from kernels.action_modules import stacking
from kernels.features import PrefixCache, VLAFeature

TENANTS = (2, 4, 8)
ROWS = (1, 4, 8)
LENGTH = 64


def _feature(base: BaseModelSpec, rows: int, generator: torch.Generator) -> VLAFeature:
    """Random numbers of all parts; prefixes of 49 to 64 tokens."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator).to(base.device)

    keys, values = (
        tuple(drawn(base.num_key_value_heads, LENGTH, base.head_width) for _ in range(base.num_layers))
        for _ in range(2)
    )
    position = LENGTH - torch.arange(rows) % 16
    mask = torch.arange(LENGTH) < position[:, None]
    cache = PrefixCache(keys, values, position.to(base.device))
    tokens = drawn(base.num_action_tokens, base.hidden_width), drawn(LENGTH, base.hidden_width)
    return VLAFeature(*tokens, cache, mask.to(base.device))


def _timed(call: Callable[[], object]) -> float:
    """Seconds, until a GPU is done too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _point(base: BaseModelSpec, kind: str, tenants: int, rows: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    spec = TINY_MODULES[kind]
    modules = [action_modules.build(spec, base, seed).requires_grad_(False) for seed in range(tenants)]
    stacked = stacking.stack(modules)
    feature = _feature(base, tenants * rows, generator).only(modules[0].reads)
    state = torch.randn(tenants * rows, STATE, generator=generator)
    noise = modules[0].draw(tenants * rows, generator)
    owned = [slice(t * rows, (t + 1) * rows) for t in range(tenants)]

    def together() -> None:
        stacked.decode(feature, state, noise)

    def one_by_one() -> None:
        for module, own in zip(modules, owned, strict=True):
            module.decode(feature[own], state[own], {name: drawn[own] for name, drawn in noise.items()})

    ways: dict[str, Callable[[], None]] = {"stacked": together, "one_by_one": one_by_one}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 2):
        for way in sorted(ways, reverse=bool(turn % 2)):  # in turns, and nobody always first
            took = _timed(ways[way])
            if turn > 1:  # the first ones warm up
                seconds[way].append(took)
    ratios = [o / s for o, s in zip(seconds["one_by_one"], seconds["stacked"], strict=True)]
    low, high = interval(ratios)
    return {
        "module": kind,
        "tenants": tenants,
        "rows": rows,
        "stacked_ms": 1e3 * statistics.median(seconds["stacked"]),
        "one_by_one_ms": 1e3 * statistics.median(seconds["one_by_one"]),
        "speedup": statistics.median(ratios),
        "low": low,
        "high": high,
        "used": stacking.is_faster(spec.kind, base.device, (rows,) * tenants),
        "stack_bytes": stacked.num_bytes,
        "stack_ms": 1e3 * _timed(lambda: stacking.stack(modules)),
    }


def measure(arguments: argparse.Namespace) -> report.Report:
    """All points of each module."""
    torch.set_num_threads(1)
    found = report.Report(aims={"min_speedup_where_used": (">=", 1.0)})
    base = presets.base_model("tiny-qwen3-vl").model_copy(update={"device": arguments.device})
    for kind in TINY_MODULES:
        for tenants in TENANTS:
            for rows in ROWS:
                found.add(**_point(base, kind, tenants, rows, arguments.rounds))
    for kind in TINY_MODULES:
        own = [row for row in found.rows if row["module"] == kind]
        found.summary[f"{kind}_speedup_8x1"] = next(r["speedup"] for r in own if (r["tenants"], r["rows"]) == (8, 1))
        found.summary[f"{kind}_min_speedup"] = min(row["speedup"] for row in own)
    used = [row["high"] for row in found.rows if row["used"]]
    if used:
        found.summary["min_speedup_where_used"] = min(used)
    return found


def draw(found: report.Report, path: Path) -> None:
    """Speed-up over tenants, a curve a module and number of rows."""
    curves = {}
    for kind in TINY_MODULES:
        for rows in ROWS:
            points = [r for r in found.rows if (r["module"], r["rows"]) == (kind, rows)]
            curves[f"{kind}, {rows} row{'s' if rows > 1 else ''}"] = (
                [p["tenants"] for p in points],
                [p["speedup"] for p in points],
            )
    lines(path, curves, "tenants", "one by one over stacked seconds", "Decoding stacked against one by one")


if __name__ == "__main__":
    report.main(
        "Decoding of several tenants' action modules: stacked against one by one",
        measure,
        options=[("rounds", 15, "timings of a point"), ("device", "cpu", "where the modules are: cpu or cuda")],
        draw=draw,
    )
