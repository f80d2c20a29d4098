"""What every benchmark shares: the command line, the printed table and the JSON file.

`python -m benchmarks.NAME --json FILE` prints the rows and writes
{"machine": {...}, "rows": [{...}], "summary": {KEY: figure}}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.errors import SpecError, refusal
from joynexus.children import MEMORY

LIBRARIES = ("numpy", "torch", "zarr", "distributed", "prefect", "mlflow", "transformers")


@dataclass
class Report:
    """What one benchmark found.

    `rows` are for reading (columns may differ), `summary` holds the named figures that are compared, and `aims`
    what they should reach: {key: (">=" or "<=", bound)}; `series` are curves, for the JSON file and its picture.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    aims: dict[str, tuple[str, float]] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **row: Any) -> None:
        """Append a row."""
        self.rows.append(row)


def machine() -> dict[str, Any]:
    """Where the figures were taken. `load_1m` well above 0 at the start means that others used the machine too."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": versions,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def device_name(device: str) -> str:
    """The card's name, or `cpu`.

    Raises:
        SpecError: if torch sees no such device.
    """
    import torch  # the benchmarks without a device do without it

    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        raise SpecError(refusal("--device", device, "cpu, since torch sees no GPU here", "run it where there is one"))
    return torch.cuda.get_device_name()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text; a column a key, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [all(isinstance(row.get(column, 0), int | float) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def main(
    title: str,
    measure: Callable[[argparse.Namespace], Report],
    *,
    options: Sequence[tuple[str, Any, str]] = (),
    draw: Callable[[Report, Path], None] | None = None,
) -> None:
    """Parse the command line, measure, print and write.

    Args:
        title: what is timed, the first line printed.
        measure: makes the report; gets the parsed options.
        options: (name, default, help) of a benchmark's own options, each of its default's type; a tuple offers a choice
            and has the default first. Where one is `device`, the report's machine says which it is.
        draw: makes a picture of the report in a PNG file, which lies beside the JSON file.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, default=None, help="write machine, rows and summary to this file")
    for name, default, text in options:
        choices = default if isinstance(default, tuple) else None
        first = choices[0] if choices else default
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(first), choices=choices, default=first, help=f"{text} ({first})"
        )
    arguments = parser.parse_args()
    _take_the_platforms_memory_settings()
    where = machine()
    if "device" in arguments:
        where["device"] = device_name(arguments.device)
    report = measure(arguments)
    print(title)
    print(table(report.rows))
    print()
    print(table(_against_aims(report)))
    if arguments.json is not None:
        write(arguments.json, where, report)
        if draw is not None:
            draw(report, arguments.json.with_suffix(".png"))


def _take_the_platforms_memory_settings() -> None:
    """Start this command anew under them: the C library reads them once, and both sides of a ratio must have them."""
    if not MEMORY.keys() <= os.environ.keys():
        os.environ.update(MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def write(path: Path, where: Mapping[str, Any], report: Report) -> None:
    """Write the JSON file.

    Raises:
        SpecError: if its folder does not exist.
    """
    if not path.parent.is_dir():
        raise SpecError(refusal("--json", str(path), "a file in an existing folder", f"make {path.parent}"))
    body = {"machine": dict(where), "rows": report.rows, "summary": report.summary}
    if report.series:
        body["series"] = report.series
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _against_aims(report: Report) -> list[dict[str, Any]]:
    found = []
    for key, value in report.summary.items():
        sign, bound = report.aims.get(key, ("", 0.0))
        met = {">=": value >= bound, "<=": value <= bound, "": None}[sign]
        aim = f"{sign} {_text(bound)}" if sign else ""
        found.append({"summary": key, "value": value, "aim": aim, "met": {True: "yes", False: "no", None: ""}[met]})
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or sys.platform
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
