"""A picture of who used the training and the inference service when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = ("#2a7fb8", "#d95f0e", "#31a354", "#8856a7", "#c51b8a", "#636363")
_MERGE_S = 0.05


def merged(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans in order, those closer than `gap` seconds joined, so that thousands of forwards stay legible."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start - out[-1][1] <= gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def draw_timeline(path: Path, intervals: Mapping[str, list[list[Any]]], start: float, end: float) -> None:
    """Write a PNG: a panel a service, a row a tenant, seconds from `start` on the axis.

    Args:
        path: file to write.
        intervals: {service: [[start, end, {tenant: rows}, kind], …]} in epoch seconds.
        start: left edge.
        end: right edge.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tenants = sorted({tenant for found in intervals.values() for i in found for tenant in i[2]})
    colour = {tenant: _COLOURS[n % len(_COLOURS)] for n, tenant in enumerate(tenants)}
    height = 1.2 + 2.2 * len(intervals)
    figure, grid = pyplot.subplots(len(intervals), 1, figsize=(12, height), sharex=True, squeeze=False)
    panels = grid[:, 0]
    for panel, (service, found) in zip(panels, intervals.items(), strict=True):
        for row, tenant in enumerate(tenants):
            spans = [(float(i[0]) - start, float(i[1]) - start) for i in found if tenant in i[2]]
            bars = [(s, max(e - s, 1e-3)) for s, e in merged(spans, _MERGE_S)]
            panel.broken_barh(bars, (row - 0.4, 0.8), color=colour[tenant], linewidth=0)
        panel.set_yticks(range(len(tenants)), tenants)
        panel.set_ylim(len(tenants) - 0.4, -0.6)
        panel.set_title(f"{service} service", loc="left", fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlim(0, end - start)
    panels[-1].set_xlabel("seconds since the four tenants started")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
