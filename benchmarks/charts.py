"""Pictures beside a benchmark's figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch


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


def stacked(
    path: Path, groups: Sequence[str], stacks: Mapping[str, Mapping[str, Sequence[float]]], unit: str, title: str
) -> None:
    """A panel a group on a scale of its own, in it a bar a stack, made of its parts from the bottom up.

    Args:
        path: PNG file.
        groups: names above the panels.
        stacks: {bar: {part: a value a group}}; parts of one name have one colour.
        unit: what the values are.
        title: above the picture.
    """
    figure = Figure(figsize=(1.2 + 1.9 * len(groups), 3.8), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    parts = list(dict.fromkeys(part for bar in stacks.values() for part in bar))
    colours = colormaps["tab10"]
    for place, (group, axes) in enumerate(zip(groups, panels, strict=True)):
        for x, bar in enumerate(stacks.values()):
            height = 0.0
            for part, values in bar.items():
                axes.bar(x, values[place], 0.7, bottom=height, color=colours(parts.index(part)))
                height += values[place]
            label = f"{height:,.0f}" if height >= 100 else f"{height:.3g}"
            axes.text(x, height, label, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(stacks)), list(stacks), fontsize=8)
        axes.set_title(group, fontsize=9)
        axes.tick_params(axis="y", labelsize=7)
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(unit)
    figure.suptitle(title, fontsize=11)
    handles = [Patch(color=colours(i), label=part) for i, part in enumerate(parts)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(parts), fontsize=8, frameon=False)
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
