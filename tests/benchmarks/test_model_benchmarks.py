"""The benchmarks of base models and modules: their figures by hand numbers, and the full-size way at a small size."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import adapter_swap, group_batching, prefix_reuse, sizes
from benchmarks.timing import interval
from configs.errors import SpecError


def test_the_interval_is_that_of_order_statistics() -> None:
    """Fourth and twelfth of 15: the binomial leaves 1.8 % below the fourth, and 5.9 % below the fifth."""
    assert interval([float(i) for i in range(15, 0, -1)]) == (4.0, 12.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([7.0]) == (7.0, 7.0)


def test_a_points_ratios_are_taken_round_by_round() -> None:
    """A round that is slow in both ways changes neither ratio."""
    seconds = {
        "grouped": [0.1, 1.0, 0.1],
        "serial": [0.2, 2.0, 0.3],
        "grouped_base": [0.11, 1.0, 0.09],
        "plain_base": [0.1, 1.0, 0.1],
    }
    found = group_batching.figures(seconds)
    assert found == pytest.approx(
        {
            "grouped_ms": 100.0,
            "serial_ms": 300.0,
            "speedup": 2.0,
            "low": 2.0,
            "high": 3.0,
            "grouped_over_plain": 1.0,
            "over_plain_low": 0.9,
            "over_plain_high": 1.1,
        }
    )


def test_base_and_module_are_the_whole() -> None:
    seconds = {
        "grouped": [0.5, 0.7, 0.6],
        "grouped_in_base": [0.4, 0.4, 0.4],
        "serial": [1.0, 1.0, 1.0],
        "serial_in_base": [0.75, 0.8, 0.7],
    }
    assert group_batching.split(seconds) == pytest.approx(
        {"grouped_base_ms": 400, "grouped_module_ms": 200, "serial_base_ms": 750, "serial_module_ms": 250}
    )


def test_a_point_counts_by_the_end_of_its_interval() -> None:
    """The worst median belongs to a point of which nothing is sure."""
    points = [
        {"speedup": 0.9, "high": 1.2, "grouped_over_plain": 1.3, "over_plain_low": 0.95},
        {"speedup": 1.1, "high": 1.15, "grouped_over_plain": 1.05, "over_plain_low": 1.02},
    ]
    assert group_batching.extremes(points) == {
        "min_speedup": 1.15,
        "min_median_speedup": 0.9,
        "max_grouped_over_plain": 1.02,
        "max_median_grouped_over_plain": 1.3,
    }


def test_a_swap_is_the_sum_of_its_legs() -> None:
    seconds = {"before": [0.01, 0.02, 0.03], "export": [0.1] * 3, "publish": [0.2, 0.3, 0.4], "first": [0.05] * 3}
    found = adapter_swap.figures(seconds)
    assert found["swap_ms"] == pytest.approx(450)
    assert (found["swap_low"], found["swap_high"]) == pytest.approx((350, 550))
    assert (found["before_ms"], found["before_low"], found["before_high"]) == pytest.approx((20, 10, 30))


def test_full_size_is_refused_on_a_cpu() -> None:
    with pytest.raises(SpecError, match="--device: got 'cpu'; possible: cuda with --size full; pass --device cuda"):
        sizes.check(argparse.Namespace(size="full", device="cpu"))
    sizes.check(argparse.Namespace(size="full", device="cuda"))


def test_full_size_is_published_size() -> None:
    """A base of either family in bfloat16, modules at their defaults."""
    for bases in (sizes.random_bases("full", "cuda").values(), prefix_reuse.plan("full", "cuda").bases):
        assert [(b.name, b.dtype, b.device) for b in bases] == [
            ("qwen3-vl-4b", "bfloat16", "cuda"),
            ("paligemma-2b", "bfloat16", "cuda"),
        ]
    for chosen in (group_batching.plan("full", "cuda"), prefix_reuse.plan("full", "cuda")):
        assert (chosen.modules["gr00t"].layers, chosen.modules["pi"].mlp_width) == (16, 4096)
        assert list(chosen.modules) == ["oft", "gr00t", "pi"]
    assert adapter_swap.plan("full", "cuda").modules["lora"].rank == 32


def test_group_batching_runs_as_at_full_size(tmp_path: Path) -> None:
    """So small that its figures mean nothing; the pictures are drawn."""
    chosen = group_batching.plan("mini", "cpu")
    bases = {"paligemma-mini": chosen.bases["paligemma-mini"]}
    chosen = replace(chosen, bases=bases, tenants=(8,), local_batches=(1, 4), rounds=1, steps=2)
    found = group_batching.run(chosen)
    assert len(found.rows) == 3 * 2
    assert {"min_speedup", "max_grouped_over_plain", "speedup_8x1", "max_curve_difference"} < found.summary.keys()
    assert {len(losses) for losses in found.series.values()} == {2}
    group_batching.draw(found, tmp_path / "out.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.png", "out_curves.png", "out_split.png"]


def test_prefix_reuse_runs_as_at_full_size(tmp_path: Path) -> None:
    """What is kept of a mini base is found again: a second epoch is faster without its forward."""
    chosen = prefix_reuse.plan("mini", "cpu")
    chosen = replace(chosen, bases=chosen.bases[:1], turns=1, samples=32, microbatch=16)
    found = prefix_reuse.run(chosen)
    assert [(row["module"], row["task"], row["features"]) for row in found.rows] == [
        (module, task, way)
        for module, task in (("oft", "sft"), ("oft", "rl"), ("gr00t", "sft"), ("pi", "sft"))
        for way in ("anew", "kept")
    ]
    assert found.rows[0]["bytes"] == 8 * 64 * 4  # N action tokens of width D, float32
    assert found.summary["sft_speedup"] > 1
    prefix_reuse.draw(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


def test_adapter_swap_runs_as_at_full_size(tmp_path: Path) -> None:
    """Each kind of module; the payload is its parameters in float32. That versions follow is checked within."""
    chosen = adapter_swap.plan("mini", "cpu")
    found = adapter_swap.run(replace(chosen, bases=chosen.bases[:1], rounds=1))
    assert [row["module"] for row in found.rows] == ["oft small", "oft", "gr00t", "pi", "lora"]
    assert all(row["bytes"] == 4 * row["parameters"] > 0 for row in found.rows)
    # The head of 16: norm 2 · 512; twice first 520 · 16 + 16, block 32 + 16 · 16 + 16, norm 32; last to 56 and to 1.
    two = 2 * (520 * 16 + 16 + 304 + 32) + (16 * 56 + 56) + (16 + 1)
    assert found.rows[0]["parameters"] == 1024 + two + 7
    adapter_swap.draw(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0
