"""The `joynexus` command: arguments in, one of the verbs below, an exit code out.

0: done; 1: done, but some workload did not complete; 2: refused, with one line that says why; 130: interrupted.
Verbs import what they need when they are called; none of them imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.errors import JoyNexusError
from configs.home import Home
from joynexus import environment_server


def _up(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import processes, tables

    processes.ensure_up(home, arguments.cluster, lambda line: print(f"  {line}", flush=True))
    tables.print_pages(home)
    return 0


def _down(_arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import processes

    was_up = processes.down(home, lambda line: print(f"  {line}", flush=True))
    print("down" if was_up else f"nothing runs under {home.root}")
    return 0


def _pages(_arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import processes, tables

    processes.open_mlflow_page(home)
    tables.print_pages(home)
    return 0


def _status(_arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import tables

    return tables.print_status(home)


def _run(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus.following import run_workloads

    return run_workloads(arguments.specs, home, arguments.cluster)


def _pretrain(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus.following import run_pretraining

    return run_pretraining(arguments.request, home)


def _jobs(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import tables

    return tables.print_jobs(home, arguments.tenant, arguments.story, arguments.limit)


def _tenants(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import tables

    if arguments.close:
        return tables.close_tenant(home, arguments.close)
    return tables.print_tenants(home)


def _adapters(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import tables

    if arguments.export:
        return tables.export_adapter(home, *arguments.export)
    return tables.print_adapters(home)


def _export(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import tables

    return tables.export_episodes(home, arguments.source, arguments.folder.expanduser().resolve())


def _compile(arguments: argparse.Namespace, home: Home) -> int:
    import yaml

    from configs import presets
    from services.admission import admit

    workload = presets.workload_file(arguments.spec)
    config = admit(workload, home, presets.cluster(arguments.cluster))
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
    return 0


def _env(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus import environments

    if arguments.act == "install":
        return environments.install(arguments.name)
    if arguments.act == "check":
        return environments.check(arguments.name, home)
    if arguments.act == "measure":
        return environments.measure(arguments.name, home, arguments.episodes, arguments.noise)
    return environments.print_environments(home)


def _demo(arguments: argparse.Namespace, home: Home) -> int:
    from joynexus.demo import run_demo

    named = home if arguments.home else None  # $JOYNEXUS_HOME is where one works; a demo goes there only if told to
    return run_demo(named, keep=arguments.keep, without_renderer=arguments.without_renderer)


def parser() -> argparse.ArgumentParser:
    """The command's grammar."""
    top = argparse.ArgumentParser(
        prog="joynexus", description="Multi-tenant post-training of vision-language-action models."
    )
    top.add_argument("--home", type=Path, help="folder of the installation (default: $JOYNEXUS_HOME or ~/.joynexus)")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Callable[[argparse.Namespace, Home], int], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    def cluster(made: argparse.ArgumentParser) -> None:
        made.add_argument("--cluster", default="laptop", help="cluster preset (default: laptop)")

    cluster(verb("up", _up, "Start the platform, or find it up already."))
    verb("down", _down, "End everything of the platform.")
    verb("pages", _pages, "Open MLflow's page, which takes memory and so is not up before, and print all pages.")
    verb("status", _status, "Show processes, pages, and why nothing runs.")
    run = verb("run", _run, "Run workloads and follow them to their end.")
    run.add_argument("specs", nargs="+", type=Path, metavar="SPEC.yaml", help="workload; several run together")
    cluster(run)
    pretrain = verb("pretrain", _pretrain, "Pretrain a small base model on the running platform and follow it.")
    pretrain.add_argument(
        "request", nargs="?", type=Path, metavar="REQUEST.yaml", help="name, seed, steps, scenes; each has a default"
    )
    jobs = verb("jobs", _jobs, "List training jobs.")
    jobs.add_argument("--tenant", help="only this tenant's")
    jobs.add_argument("--story", metavar="JOB", help="tell all that happened to one job")
    jobs.add_argument("--limit", type=int, default=50, help="newest jobs shown (default: 50)")
    tenants = verb("tenants", _tenants, "List tenants, their policies and counts of jobs.")
    tenants.add_argument("--close", metavar="TENANT", help="end its jobs, slots and sessions; its output folder stays")
    adapters = verb("adapters", _adapters, "List registered adapters.")
    adapters.add_argument(
        "--export",
        nargs=2,
        metavar=("ADAPTER", "FOLDER"),
        help="write one of kind lora, models:/NAME@ALIAS or models:/NAME/VERSION, as the files that PEFT reads",
    )
    export = verb(
        "export",
        _export,
        "Take episodes out: of a rollout whose job is not trained yet, of a recorded evaluation or of a collected "
        "dataset; as a LeRobot dataset with rewards, and an mp4 an episode.",
    )
    export.add_argument("source", metavar="JOB|PARTITION|DATASET", help="`joynexus jobs` lists jobs")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="new folder: lerobot/ and films/")
    compile_ = verb("compile", _compile, "Show the backend configuration that a workload becomes; start nothing.")
    compile_.add_argument("spec", type=Path, metavar="SPEC.yaml")
    cluster(compile_)
    env = verb("env", _env, "List, install, try or measure simulators; no platform is needed.")
    acts = env.add_subparsers(dest="act", required=True, metavar="ACT")
    for act, text in (
        ("list", "Show every environment preset and what it lacks on this machine."),
        ("install", "Install the packages of a preset or requirements file into a virtual environment of their own."),
        ("check", "Reset, step and render a preset's environment; say in words what is missing or wrong."),
        ("measure", "Print a preset's state and action blocks, measured over random and expert episodes."),
    ):
        made = acts.add_parser(act, help=text, description=text)
        if act != "list":
            made.add_argument("name", metavar="NAME")
        if act == "measure":
            made.add_argument("--episodes", type=int, default=40, help="how many (default: 40)")
            made.add_argument("--noise", type=float, default=0.2, help="of the expert's actions, if any (default: 0.2)")
    environment_server.add_verbs(acts)
    demo = verb(
        "demo",
        _demo,
        "Four tenants train together on one base model and are evaluated; in a fresh installation under runs/demo, or "
        "in the one that --home names.",
    )
    demo.add_argument("--keep", action="store_true", help="leave the Prefect, MLflow and Dask pages up")
    demo.add_argument(
        "--without-renderer", action="store_true", help="Reach-v0 in place of the tenants that need a Vulkan device"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit code; see the module's docstring.
    """
    given = parser().parse_args(arguments)
    home = Home(given.home.expanduser().resolve()) if given.home else Home.from_environment()
    try:
        return int(given.run(given, home))
    except JoyNexusError as error:
        print(f"joynexus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, for instance `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
