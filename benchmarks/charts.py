"""Pictures beside a benchmark's figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure


def bars(path: Path, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, title: str) -> None:
    """Grouped bars, each with its value above it.

    Args:
        path: PNG file.
        groups: names under the bars.
        series: {name: a value a group}.
        unit: what the values are.
        title: above the picture.
    """
    figure = Figure(figsize=(1.6 + 1.5 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        axes.bar_label(axes.bar(places, values, width, label=name), fmt="{:,.4g}", fontsize=8)
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def lines(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    title: str,
    *,
    marked: bool = True,
    overlaid: Collection[str] = (),
) -> None:
    """Curves {name: (xs, ys)} in one picture, each point `marked` by a dot; those `overlaid` are dotted and black."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"]
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        above = name in overlaid
        axes.plot(
            xs,
            ys,
            marker="o" if marked else None,
            markersize=3,
            color="black" if above else colours(number),
            linestyle=(0, (1, 4)) if above else "-",
            linewidth=1.2,
            label=name,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
