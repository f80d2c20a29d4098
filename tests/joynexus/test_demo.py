"""`joynexus demo`: its workloads are admitted, its report says what it is to say and finds what is not as it is to be.

The demo itself is `make demo`; what it runs on is tested in tests/flows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from configs import presets
from configs.errors import JoyNexusError, ServiceUnavailable
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.workload import WorkloadSpec
from joynexus import demo, demo_report, processes
from joynexus.timeline import draw_timeline, merged
from services.admission import admit
from services.scheduler_events import DropIfStale
from services.scheduler_snapshot import snapshot
from storage.demonstrations import LeRobotWriter
from tests.services.scheduler_cases import Bench

RUN = "run-1"


def demonstrations(home: Home, name: str, environment: str) -> None:
    """Two frames with the environment's cameras and widths."""
    spec = presets.environment(environment)
    cameras = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    widths = {"state_width": spec.state_width, "action_width": spec.action_width}
    with LeRobotWriter(home.datasets / name, fps=20, cameras=cameras, **widths) as writer:
        writer.add_episode(
            {camera: np.zeros((2, *size, 3), np.uint8) for camera, size in cameras.items()},
            np.zeros((2, spec.state_width), np.float32),
            np.zeros((2, spec.action_width), np.float32),
            spec.instruction,
        )


# Workloads


@pytest.mark.parametrize(
    ("without_renderer", "environments"),
    [
        (False, {"push": "pushcube", "pick": "pickcube", "reach": "reach", "demos": "pushcube"}),
        (True, dict.fromkeys(demo.WORKLOADS, "reach")),
    ],
)
def test_workloads_are_admitted(tmp_path: Path, without_renderer: bool, environments: dict[str, str]) -> None:
    """Both ways fit their environments and the demonstrations that are named after theirs."""
    home, cluster = Home(tmp_path), presets.cluster("laptop")
    workloads = demo.demo_workloads(without_renderer)
    assert {w.tenant.name: demo.DemoTenant(w).environment for w in workloads} == environments
    (dataset,) = [w.data.dataset for w in workloads if w.data is not None]
    assert dataset == f"{environments['demos']}-demonstrations"
    demonstrations(home, dataset, environments["demos"])
    for workload in workloads:
        backend = admit(workload, home, cluster)
        used = [backend.environment, backend.evaluation_environment]
        assert {e.name for e in used if e is not None} == {environments[workload.tenant.name]}
        if workload.task == "rl":
            assert backend.sample_count >= demo_report.LEAST_VALID_TRANSITIONS
            assert workload.algorithm.jobs >= demo_report.LEAST_UPDATES


def test_where_libero_is_installed_it_takes_the_place_of_a_tenant() -> None:
    names = [w.tenant.name for w in demo.demo_workloads(False, with_libero=True)]
    assert names == ["push", "libero", "reach", "demos"]
    (workload,) = [w for w in demo.demo_workloads(False, with_libero=True) if w.environment == "libero-object-small"]
    assert workload.algorithm.num_envs * workload.algorithm.rollout_steps >= demo_report.LEAST_VALID_TRANSITIONS
    assert workload.algorithm.jobs >= demo_report.LEAST_UPDATES


# Where it runs


@pytest.mark.parametrize("named", [True, False])
def test_a_named_home_keeps_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """The installation is the named one and loses nothing; the demo's own starts empty, as does what it reports."""
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "runs")
    home = Home(tmp_path / "named" if named else tmp_path / "runs" / "home")
    home.datasets.mkdir(parents=True)
    (home.datasets / "mine").touch()
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / demo.REPORT).touch()
    asked: list[Home] = []

    def fails(home: Home, *_: object) -> PlatformAddresses:
        asked.append(home)
        raise ServiceUnavailable("no port is free")

    monkeypatch.setattr(processes, "ensure_up", fails)
    with pytest.raises(JoyNexusError, match="no port is free"):
        demo.run_demo(home if named else None, keep=False, without_renderer=True)
    assert asked == [home]
    assert (home.datasets / "mine").exists() == named
    assert not (tmp_path / "runs" / demo.REPORT).exists()


# The report


def job(created: int, **changes: Any) -> dict[str, Any]:
    """A completed RL job as the scheduler describes it: one of a series of updates of 12 steps each."""
    metadata = {
        "rollout": created - 1,
        "rollout_summary": {"valid_transitions": 144, "episodes": 3},
        "version": 12 * created,
        "metrics": {"loss": 0.1, "grad_norm": 0.5 * created},
    }
    found = {
        "job_id": f"job-{created:08d}",
        "flow_run_id": RUN,
        "state": "completed",
        "behavior_policy_version": 12 * (created - 1),
        "train_seq": created,
        "metadata": metadata,
    }
    return (
        found
        | {k: v for k, v in changes.items() if k in found}
        | {"metadata": metadata | {k: v for k, v in changes.items() if k not in found}}
    )


def test_updates_of_a_workload() -> None:
    """In the order of training; other runs' jobs and those that did not complete are none of its updates."""
    jobs = [
        job(3, metrics={}),
        job(1),
        job(2, flow_run_id="another"),
        job(4, state="failed", train_seq=None),
        job(5, state="dropped", train_seq=None),
    ]
    assert demo_report.rl_updates(jobs, RUN) == [
        {"valid_transitions": 144, "grad_norm": 0.5, "behavior_policy_version": 0, "version": 12},
        {"valid_transitions": 144, "grad_norm": None, "behavior_policy_version": 24, "version": 36},
    ]


def tenant(home: Home, workload: WorkloadSpec, **changes: Any) -> demo.DemoTenant:
    """A tenant whose workload left its report in its output folder."""
    made = demo.DemoTenant(workload, flow_run_id=RUN)
    folder = home.tenant(made.name) / "workloads" / RUN
    folder.mkdir(parents=True)
    blanked = workload.evaluation is not None and workload.evaluation.blanked
    found = {
        "tenant": made.name,
        "task": workload.task,
        "environment": made.environment,
        "jobs": {"completed": 6, "failed": 0, "dropped": 3},
        "stale_jobs": 2,
        "policy_version": 72,
        "success_before": 0.0,
        "success_after": 0.9,
        "success_blanked": 0.25 if blanked else None,
        "episodes": 16,
        "adapter": {"name": workload.policy_key, "version": 1, "policy_version": 72},
        "policy_key": workload.policy_key,
    }
    (folder / "report.json").write_text(json.dumps(found | changes))
    return made


def report(home: Home, **changes: Any) -> dict[str, Any]:
    """A report of the four tenants, all of whose RL jobs are those of `job`."""
    seconds = {"training": {"push": 1.234, "demos": 2.0}, "inference": {"push": 3.0}}
    intervals = {"training": [[0.0, 4.0, {"push": 1}, "train"]], "inference": [[6.0, 12.0, {"push": 1}, "forward"]]}
    jobs = [job(n) for n in range(1, 7)]
    tenants = [tenant(home, workload, **changes) for workload in demo.demo_workloads(False)]
    return {
        "wall_seconds": 20.0,
        "tenants": {t.name: demo_report.tenant_report(home, t.workload, t.flow_run_id, seconds, jobs) for t in tenants},
        **demo_report.installation_report(home, {"Completed": 24}, intervals, 0.0, 10.0),
    }


def test_report_has_its_keys(tmp_path: Path) -> None:
    """Those that were promised, and the updates of RL tenants."""
    found = report(Home(tmp_path))
    assert list(found) == ["wall_seconds", "tenants", "partitions_left", "flow_runs", "utilisation"]
    assert list(found["tenants"]) == ["push", "pick", "reach", "demos"]
    common = {"task", "environment", "jobs", "stale_jobs", "policy_version", "success_before", "success_after"}
    common |= {"episodes", "adapter", "train_seconds", "inference_seconds"}
    for name, of_tenant in found["tenants"].items():
        own = {"success_blanked"} if name == "demos" else {"updates"}
        assert set(of_tenant) == common | own, name
        assert set(of_tenant["jobs"]) == {"completed", "failed", "dropped"}
        assert set(of_tenant["adapter"]) == {"name", "version"}
    assert found["tenants"]["push"]["train_seconds"] == 1.23
    assert found["tenants"]["pick"]["inference_seconds"] == 0.0
    assert set(found["tenants"]["push"]["updates"][0]) == {
        "valid_transitions",
        "grad_norm",
        "behavior_policy_version",
        "version",
    }
    assert found["partitions_left"] == 0
    assert found["flow_runs"] == {"Completed": 24}
    # 4 of 10 s; of the second interval 4 s lie before the end.
    assert found["utilisation"] == {"training": 0.4, "inference": 0.4}


def test_a_good_report_has_no_fault(tmp_path: Path) -> None:
    """Six updates of 144 transitions, each under the version that the one before it made."""
    assert demo_report.report_faults(report(Home(tmp_path)), demo.demo_workloads(False)) == []


def test_asynchronous_tenants_may_lag_behind(tmp_path: Path) -> None:
    """`reach` has two jobs in flight: its rollouts act under versions that are not the newest."""
    found = report(Home(tmp_path))
    for update in found["tenants"]["reach"]["updates"][1:]:
        update["behavior_policy_version"] -= 12
    assert demo_report.report_faults(found, demo.demo_workloads(False)) == []


REMEDY = "; see the logs and run the demo again"


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (
            lambda tenants: tenants["demos"]["jobs"].update(completed=0),
            "tenants.demos.jobs.completed: got 0; possible: 1 or more",
        ),
        (
            lambda tenants: tenants["reach"]["updates"].pop(),
            "tenants.reach.updates: got 5; possible: 6 or more",
        ),
        (
            lambda tenants: tenants["pick"]["updates"][2].update(valid_transitions=127),
            "tenants.pick.updates.2.valid_transitions: got 127; possible: 128 or more",
        ),
        (
            lambda tenants: tenants["push"]["updates"][0].update(grad_norm=0.0),
            "tenants.push.updates.0.grad_norm: got 0.0; possible: more than 0",
        ),
        (
            lambda tenants: tenants["push"]["updates"][0].update(grad_norm=None),
            "tenants.push.updates.0.grad_norm: got None; possible: more than 0",
        ),
        (
            lambda tenants: tenants["push"]["updates"][1].update(behavior_policy_version=0),
            "tenants.push.updates.1.behavior_policy_version: got 0; possible: 12, the newest at that time",
        ),
        (
            lambda tenants: tenants["reach"].update(success_after=0.88),
            "tenants.reach.success_after: got 0.88; possible: 0.9 or more",
        ),
        (
            lambda tenants: tenants["reach"].update(success_before=0.5),
            "tenants.reach.success_before: got 0.5; possible: 0.3 or less",
        ),
        (
            lambda tenants: tenants["demos"].update(success_after=0.825),
            "tenants.demos.success_after: got 0.825; possible: 0.85 or more",
        ),
        (
            lambda tenants: tenants["demos"].update(success_blanked=0.5),
            "tenants.demos.success_blanked: got 0.5; possible: 0.45 or less, half of what it sees",
        ),
    ],
)
def test_a_fault_of_the_report_is_one_line(tmp_path: Path, harm: Callable[[dict[str, Any]], object], line: str) -> None:
    """It names the field of report.json."""
    found = report(Home(tmp_path))
    harm(found["tenants"])
    found["flow_runs"]["Completed"] = sum(t["jobs"]["completed"] for t in found["tenants"].values())
    assert demo_report.report_faults(found, demo.demo_workloads(False)) == [line + REMEDY]


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        ({"partitions_left": 2}, "partitions_left: got 2; possible: 0"),
        ({"flow_runs": {"Completed": 23, "Running": 1}}, "flow_runs.Completed: got 23; possible: 24, the scheduler's"),
    ],
)
def test_a_fault_of_the_installation_is_one_line(tmp_path: Path, harm: dict[str, Any], line: str) -> None:
    found = report(Home(tmp_path)) | harm
    assert demo_report.report_faults(found, demo.demo_workloads(False)) == [line + REMEDY]


def test_in_another_environment_nothing_is_said_of_what_is_learned(tmp_path: Path) -> None:
    """Without a renderer `demos` learns from demonstrations of Reach-v0."""
    found = report(Home(tmp_path))
    found["tenants"]["demos"].update(success_after=0.2)
    assert demo_report.report_faults(found, demo.demo_workloads(True)) == []


# What is shown


def shown(found: dict[str, Any], without_renderer: bool) -> str:
    """The printed table."""
    console = Console(file=io.StringIO(), width=200)
    demo_report.print_report(console, found, without_renderer)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_says_that_there_was_no_renderer(tmp_path: Path) -> None:
    """In its title; with a renderer it does not."""
    found = report(Home(tmp_path))
    words = "(without renderer: Reach-v0 in place of the ManiSkill environments)"
    assert words in shown(found, True)
    assert "renderer" not in shown(found, False)


def test_table_shows_what_was_reached(tmp_path: Path) -> None:
    """One row a tenant; stale ones beside all dropped jobs, blanked pictures where they were shown."""
    (row,) = [line for line in shown(report(Home(tmp_path)), False).splitlines() if " demos " in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["demos", "sft", "pushcube", "6/0/3 (2)", "72", "0% → 90%", "25%", "2.0", "0.0", "demos.sft v1"]


def test_progress_counts_stale_jobs_beside_those_that_are_done() -> None:
    """From the scheduler's own snapshot: one job completed, one dropped for its age, one by a person; one reserved.
    A tenant whose workload is not registered yet has none."""
    bench = Bench()
    bench.register("push")
    bench.complete(*leased(bench))
    job_id, token = leased(bench)
    bench.do(DropIfStale(bench.now, job_id, token, 11))
    bench.drop(bench.reserve(), reason="cancelled in Prefect")
    bench.reserve()
    policies = snapshot(bench.state)["policies"]
    tenants = [demo.DemoTenant(workload) for workload in demo.demo_workloads(False)[:2]]
    console = Console(file=io.StringIO(), width=200)
    console.print(demo._progress_table(tenants, policies, {}, 7.0))
    assert isinstance(console.file, io.StringIO)
    push, pick = (line for line in console.file.getvalue().splitlines() if "pushcube" in line or "pickcube" in line)
    assert "1/6 1 reserved, 2 dropped (1 stale)" in push
    assert "0/6 " in pick
    line = demo._progress_line(tenants, policies, {"push": "rollout 3/8 at version 2"}, 7.0)
    assert line.split("  ")[-2:] == ["push 1/6, 1 stale (rollout 3/8 at version 2)", "pick 0/6 (scheduled)"]


def leased(bench: Bench) -> tuple[str, int]:
    """A job that a trainer has taken."""
    bench.ready_rl()
    job = bench.lease()
    assert job is not None
    return job["job_id"], job["lease_token"]


def test_table_has_a_dash_for_what_there_is_not(tmp_path: Path) -> None:
    """A workload without evaluation and adapter."""
    found = report(Home(tmp_path), success_before=None, success_after=None, adapter=None)
    (row,) = [line for line in shown(found, False).splitlines() if " push " in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert (cells[5], cells[-1]) == ("- → -", "-")


@pytest.mark.parametrize("services", [("training", "inference"), ("training",)])
def test_timeline_is_drawn(tmp_path: Path, services: tuple[str, ...]) -> None:
    """A bar in each tenant's colour, the second tenant's forward among them."""
    path = tmp_path / demo.TIMELINE
    found = [[100.0, 104.0, {"a": 1}, "train"], [104.0, 108.0, {"a": 1, "b": 3}, "train"]]
    draw_timeline(path, dict.fromkeys(services, found), start=100.0, end=110.0)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    a, b = ((pixels == colour).all(axis=1).sum() for colour in ([0x2A, 0x7F, 0xB8], [0xD9, 0x5F, 0x0E]))
    # a is busy for 8 of 10 seconds, b for 4.
    assert b > 1_000
    assert a / b == pytest.approx(2.0, rel=0.05)


def test_short_gaps_are_closed() -> None:
    """Forwards that follow each other within the gap are one bar; one inside another changes nothing."""
    assert merged([(3.0, 4.0), (0.0, 1.0), (1.05, 2.0), (1.1, 1.2)], 0.1) == [(0.0, 2.0), (3.0, 4.0)]
