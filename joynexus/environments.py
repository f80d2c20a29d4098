"""`joynexus env`: simulators on this machine, listed, installed, tried, measured; without a platform."""

from __future__ import annotations

import asyncio

from configs import presets
from configs.environment import EnvironmentSpec
from configs.errors import SpecError, refusal
from configs.home import Home
from joynexus import tables
from services import environment_installs
from services.environment_launch import lacking


def here(spec: EnvironmentSpec, home: Home) -> str:
    """What an environment lacks on this machine, or `ready`; a remote one is not connected to."""
    lacks = lacking(spec, home)
    return lacks or ("ready" if spec.remote is None else f"at {spec.remote.address}; `joynexus env check` tries it")


def print_environments(home: Home) -> int:
    """A line an environment preset: what it is, and what it lacks here."""
    from rich.table import Table

    table = Table()
    for column in ("environment", "kind", "id", "here"):
        table.add_column(column)
    for name in presets.names("environments"):
        spec = presets.environment(name)
        table.add_row(name, spec.kind, spec.id, here(spec, home))
    tables.console().print(table)
    return 0


def install(name: str) -> int:
    """Install what a preset or requirements file asks for; 0.

    Raises:
        SpecError: there is nothing of that name, or nothing to install.
        JoyNexusError: pip failed.
    """
    requirements = environment_installs.requirements_of(name)
    if requirements is None:
        with_files = [n for n in presets.names("environments") if presets.environment(n).requirements is not None]
        possible = ", ".join([*environment_installs.known(), *with_files])
        raise SpecError(refusal("name", name, possible, "nothing else is to be installed for this one"))
    made = environment_installs.install(requirements, lambda line: print(line, flush=True))
    print(f"installed: {made}")
    return 0


def measure(name: str, home: Home, episodes: int, noise: float) -> int:
    """Print the `state` and `action` blocks of a preset, measured; 0.

    Raises:
        SpecError: there is no such preset, or fewer than one episode is asked for.
        JoyNexusError: its environment cannot be started or failed.
    """
    import yaml

    from services.environment_measure import measure as measured

    spec = presets.environment(name, "name")
    if episodes < 1:
        raise SpecError(refusal("--episodes", episodes, "1 or more", "ask for some"))
    if not 0 <= noise < float("inf"):
        raise SpecError(refusal("--noise", noise, "0 or more", "give a standard deviation"))
    found = asyncio.run(measured(spec, episodes, noise, home))
    for field, statistics in found.items():
        rounded = {
            name: [float(f"{value:.6g}") for value in values] for name, values in statistics.model_dump().items()
        }
        print(yaml.safe_dump({field: rounded}, default_flow_style=None, sort_keys=False, width=110), end="")
    return 0


def check(name: str, home: Home) -> int:
    """Try a preset's environment; a line a finding; 0, or 1 if anything is missing or wrong."""
    from services.environment_check import check as findings

    spec = presets.environment(name, "name")

    async def run() -> int:
        faults = 0
        async for finding in findings(spec, home=home):
            faults += finding.fault is not None
            mark, text = (
                ("ok  ", finding.what) if finding.fault is None else ("FAIL", f"{finding.what}: {finding.fault}")
            )
            print(f"{mark} {text}", flush=True)
        return faults

    faults = asyncio.run(run())
    print(f"{name}: ready" if not faults else f"{name}: {faults} to mend")
    return 1 if faults else 0
