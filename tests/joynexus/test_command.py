"""The `joynexus` command: bad input gets one line that names the field, and nothing is started."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs import presets
from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses
from configs.requests import PretrainRequest
from joynexus import following, tables
from joynexus.command import main
from services import environment_installs, lookup
from tests.flows.running import running

REACH: dict[str, Any] = presets.read_yaml(presets.FOLDER / "workloads" / "reach.yaml")


def changed(**by_path: Any) -> dict[str, Any]:
    """The workload `reach` with values at dotted paths replaced (`__` for the dot); `...` removes the key."""
    spec = copy.deepcopy(REACH)
    for path, value in by_path.items():
        *parents, last = path.split("__")
        at = spec
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return spec


def write(folder: Path, name: str, spec: Any) -> Path:
    """`spec` as a YAML file."""
    path = folder / name
    path.write_text(spec if isinstance(spec, str) else yaml.safe_dump(spec), encoding="utf-8")
    return path


# What is wrong, the field the message must name, and what else it must say.
BAD = {
    "unknown key": (changed(colour="red"), "colour: unknown key", "possible: action_module"),
    "unknown key inside": (changed(algorithm__gama=0.9), "algorithm", "gama"),
    "missing field": (changed(task=...), "task: missing", "add it"),
    "not a mapping": ("- 1\n- 2\n", "spec.yaml: got list", "WorkloadSpec"),
    "not YAML": ("tenant: {name: [", "file:", "is not YAML"),
    "state width": (changed(action_module__state_width=3), "action_module.state_width: got 3", "possible: 2"),
    "action width": (changed(action_module__action_width=7), "action_module.action_width: got 7", "possible: 2"),
    "unknown environment": (changed(environment="moon"), "environment: got 'moon'", "reach"),
    "unknown evaluation environment": (
        changed(evaluation__environment="moon"),
        "evaluation.environment: got 'moon'",
        "reach",
    ),
    "unknown base model": (changed(base_model="gpt"), "base_model: got 'gpt'", "tiny-qwen3-vl"),
    "a path as the tenant's name": (changed(tenant__name="../other"), "tenant.name: got '../other'", "no path"),
    "an absolute path as the tenant's name": (changed(tenant__name="/etc"), "tenant.name: got '/etc'", "no path"),
    "algorithm of the other task": (changed(task="sft"), "algorithm.kind: got 'ppo'", "'sft'"),
    "number out of bounds": (changed(algorithm__gamma=1.5), "algorithm", "1.5"),
    "text for a number": (changed(algorithm__jobs="many"), "algorithm", "many"),
    "unknown action module": (changed(action_module__kind="diffusion"), "action_module", "oft"),
    "missing dataset": (
        {
            **changed(task="sft", environment=...),
            "data": {"dataset": "nothing"},
            "algorithm": {
                "kind": "sft",
                "jobs": 1,
                "batches_per_job": 1,
                "microbatch_size": 1,
                "optimizer": {"learning_rate": 0.1},
            },
        },
        "data.dataset: got 'nothing'",
        "no dataset yet",
    ),
}


@pytest.fixture
def idle_home(tmp_path: Path) -> Path:
    """A home in which nothing was ever started."""
    return tmp_path / "home"


@pytest.mark.parametrize("verb", ["compile", "run"])
@pytest.mark.parametrize("case", BAD)
def test_bad_workload_gets_one_line_and_starts_nothing(
    case: str, verb: str, idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault is refused with exit code 2, one line on stderr naming the field, no traceback, no home made."""
    spec, field, also = BAD[case]
    path = write(tmp_path, "spec.yaml", spec)
    assert main(["--home", str(idle_home), verb, str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("joynexus: ")
    assert err.count("\n") == 1
    assert field in err
    assert also in err
    assert not idle_home.exists()


def test_missing_file_is_named(idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist is the field `file`."""
    missing = tmp_path / "absent.yaml"
    assert main(["--home", str(idle_home), "run", str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"joynexus: file: got {str(missing)!r}; possible: an existing YAML file; check the path\n"
    )


def test_one_wrong_file_among_several_stops_all(
    idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files are read first, and the faults of all are told at once."""
    good = write(tmp_path, "good.yaml", REACH)
    one = write(tmp_path, "one.yaml", changed(colour="red"))
    two = write(tmp_path, "two.yaml", changed(task="sing"))
    assert main(["--home", str(idle_home), "run", str(good), str(one), str(two)]) == 2
    err = capsys.readouterr().err
    assert "one.yaml: colour" in err
    assert "two.yaml: task: got 'sing'" in err
    assert not idle_home.exists()


def test_two_tenants_of_one_name_are_refused(
    idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their slots, folders and adapters would be one."""
    paths = [str(write(tmp_path, f"{n}.yaml", REACH)) for n in range(2)]
    assert main(["--home", str(idle_home), "run", *paths]) == 2
    assert "tenant.name: got 'reach'" in capsys.readouterr().err
    assert not idle_home.exists()


def test_unknown_cluster_is_refused_before_anything(idle_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`up` reads its preset first."""
    assert main(["--home", str(idle_home), "up", "--cluster", "moon"]) == 2
    assert "cluster: got 'moon'; possible: gpu, laptop" in capsys.readouterr().err
    assert not idle_home.exists()


@pytest.mark.parametrize("verb", ["jobs", "tenants", "adapters", "adapters --export models:/a.sft/1 out", "pages"])
def test_questions_without_a_platform_say_how_to_start_one(
    verb: str, idle_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2."""
    assert main(["--home", str(idle_home), *verb.split()]) == 2
    assert "run `joynexus up`" in capsys.readouterr().err


def test_exporting_what_is_not_there_says_what_is(
    idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, nothing written; a path is no name."""
    for source, said in (
        ("job-1", "source: got 'job-1'; possible: partitions none; datasets none; a partition is cleared when its job"),
        ("../datasets", "source: got '../datasets'; possible: 1 to 200 letters"),
    ):
        assert main(["--home", str(idle_home), "export", source, str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_status_and_down_without_a_platform(idle_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs: `status` says so with exit code 1, `down` has nothing to do."""
    assert main(["--home", str(idle_home), "status"]) == 1
    assert main(["--home", str(idle_home), "down"]) == 0
    assert capsys.readouterr().out.count("nothing runs under") == 2


def test_compile_shows_the_backend_configuration(
    idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text twice, and it reads back as the configuration the services get."""
    path = write(tmp_path, "spec.yaml", REACH)
    assert main(["--home", str(idle_home), "compile", str(path)]) == 0
    first = capsys.readouterr().out
    assert main(["--home", str(idle_home), "compile", str(path)]) == 0
    assert capsys.readouterr().out == first
    config = BackendConfig.model_validate(yaml.safe_load(first))
    assert config.policy_key == "reach.rl"
    assert config.environment is not None
    assert config.environment.id == "Reach-v0"
    assert len(config.policy.schema_signature) == 64


def test_every_shipped_workload_is_admitted_or_lacks_only_its_dataset(
    idle_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The presets of the demo fit their environments; `demos` is refused only until its dataset was collected."""
    monkeypatch.setenv("VK_ICD_FILENAMES", "/a/renderer")  # also on a machine that has none
    monkeypatch.setattr(environment_installs, "missing", lambda requirements: None)  # and no simulators
    for name in presets.names("workloads"):
        code = main(["--home", str(idle_home), "compile", str(presets.FOLDER / "workloads" / f"{name}.yaml")])
        err = capsys.readouterr().err
        assert code == 0 or (err.startswith(f"joynexus: {name}: data.dataset: got ") and err.count(": got ") == 1), err


def test_as_a_process_it_prints_no_traceback(tmp_path: Path) -> None:
    """What a person sees who mistypes a path."""
    done = subprocess.run(
        [sys.executable, "-m", "joynexus.command", "--home", str(tmp_path / "home"), "run", "absent.yaml"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("joynexus: file: got 'absent.yaml'")
    assert len(done.stderr.splitlines()) == 1


def test_reading_workloads_keeps_the_order(tmp_path: Path) -> None:
    """Flow runs start in the order in which the files were named."""
    paths = [write(tmp_path, f"{name}.yaml", changed(tenant__name=name)) for name in ("b", "a", "c")]
    assert [w.tenant.name for w in following.read_workloads(paths)] == ["b", "a", "c"]


def test_questions_of_a_running_platform(platform: PlatformAddresses, capsys: pytest.CaptureFixture[str]) -> None:
    """`status`, `jobs`, `tenants` and `adapters` answer with their tables."""
    for verb, word in (
        ("status", "dask-training"),
        ("status", "memory of training: base models tiny-qwen3-vl 5.3 MB, tiny-paligemma"),
        ("status", "memory of inference: base models tiny-qwen3-vl 5.3 MB, tiny-paligemma"),
        ("jobs", "behavior version"),
        ("tenants", "policy version"),
        ("adapters", "aliases"),
    ):
        assert main(["--home", platform.home, verb]) == 0, verb
        assert word in capsys.readouterr().out.replace("\n", " "), verb


def test_a_workload_is_run_and_its_tenant_closed_once(
    platform: PlatformAddresses, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Followed to its end; closing leaves the output folder and takes slot and serving state; twice is refused."""
    small = {"jobs": 2, "num_envs": 4, "rollout_steps": 8, "epochs": 1, "microbatch_size": 16}
    spec = changed(tenant__name="by-command", evaluation=..., **{f"algorithm__{k}": v for k, v in small.items()})
    reports = "workloads/*/report.json"
    before = set(home.tenant("by-command").glob(reports))
    assert main(["--home", platform.home, "run", str(write(tmp_path, "spec.yaml", spec))]) == 0
    out = capsys.readouterr().out
    assert "by-command.rl" in out
    assert "Completed" in out
    (report,) = set(home.tenant("by-command").glob(reports)) - before
    assert json.loads(report.read_text())["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}

    async def known() -> list[bool]:
        async with running(platform, home) as here:
            versions = await (await here.service(lookup.TRAINING)).versions()
            serving = (await (await here.service(lookup.INFERENCE)).status())["tenants"]
            return ["by-command" in versions, "by-command" in serving]

    assert asyncio.run(known()) == [True, True]
    close = ["--home", platform.home, "tenants", "--close", "by-command"]
    assert main(close) == 0
    assert capsys.readouterr().out == (
        f"by-command is closed; 0 jobs were dropped; its folder is {home.tenant('by-command')}\n"
    )
    assert asyncio.run(known()) == [False, False]
    assert report.is_file()
    assert list(report.parent.glob("checkpoints/*"))
    assert main(close) == 2
    err = capsys.readouterr().err
    assert err.startswith("joynexus: tenant: got 'by-command'; possible: ")
    assert err.endswith("; see `joynexus tenants`\n")
    assert err.count("\n") == 1


# `pretrain`


@pytest.mark.parametrize(
    ("request_", "field", "also"),
    [
        ({"colour": "red"}, "request.yaml: colour: unknown key", "possible: name, scenes, seed, steps"),
        ({"steps": 0}, "request.yaml: steps: got 0", "greater than 0"),
        ({"name": "../other"}, "request.yaml: name: got '../other'", "no path"),
        ("", "request.yaml: got NoneType", "PretrainRequest"),
    ],
)
def test_a_bad_request_to_pretrain_gets_one_line(
    request_: Any, field: str, also: str, idle_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a platform is asked for."""
    path = write(tmp_path, "request.yaml", request_)
    assert main(["--home", str(idle_home), "pretrain", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"joynexus: {field}")
    assert also in err
    assert err.count("\n") == 1
    assert not idle_home.exists()


def test_pretrain_without_a_platform_says_how_to_start_one(idle_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs on one that is up."""
    assert main(["--home", str(idle_home), "pretrain"]) == 2
    assert capsys.readouterr().err == (
        f"joynexus: platform: nothing runs under {str(idle_home)!r}; possible: a home whose platform is up; "
        "run `joynexus up`\n"
    )


def test_pretrain_takes_its_defaults_and_what_a_file_says(tmp_path: Path) -> None:
    """Without a file all defaults, with one those of what it leaves out."""
    assert following.read_pretraining(None) == PretrainRequest()
    path = write(tmp_path, "request.yaml", {"steps": 5})
    assert following.read_pretraining(path) == PretrainRequest(steps=5)


def test_pretrain_tells_why_its_flow_run_failed(
    platform: PlatformAddresses, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with something else in it is not replaced; the line names it, the exit code is 1."""
    taken = home.models / "taken"
    taken.mkdir(parents=True, exist_ok=True)
    (taken / "notes.txt").write_text("mine")
    assert main(["--home", platform.home, "pretrain", str(write(tmp_path, "request.yaml", {"name": "taken"}))]) == 1
    assert f"out_folder: got {str(taken)!r}" in capsys.readouterr().out
    assert (taken / "notes.txt").read_text() == "mine"


def test_pretrain_tells_where_its_model_lies_and_how_to_use_it(
    platform: PlatformAddresses, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors on unseen scenes from the checkpoint's own report, then the steps to a workload on it."""
    folder = home.models / "repeat"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pretraining.json").write_bytes((PROJECT_ROOT / "models/tiny-qwen3-vl/pretraining.json").read_bytes())
    tables.print_pretraining(home, PretrainRequest(name="repeat"), "COMPLETED", "")
    out = capsys.readouterr().out
    assert "pushcube" in out
    assert "0.0077" in out  # of 0.00767…
    assert f"model: {folder}" in out
    assert f"source: {folder}" in out
    assert "base_models of configs/presets/clusters/laptop.yaml" in out
    assert "`base_model: repeat`" in out


# `demo`


@pytest.mark.parametrize(("before_the_verb", "named"), [(["--home", "here"], True), ([], False)])
def test_demo_goes_where_home_says(
    before_the_verb: list[str], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--home` into a fresh installation of its own, also where JOYNEXUS_HOME names one."""
    from joynexus import demo

    asked = {}

    def run_demo(home: Home | None, *, keep: bool, without_renderer: bool) -> int:
        asked.update(home=home, keep=keep, without_renderer=without_renderer)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert main([*before_the_verb, "demo", "--without-renderer"]) == 0
    wanted = Home(tmp_path / "here") if named else None
    assert asked == {"home": wanted, "keep": False, "without_renderer": True}
