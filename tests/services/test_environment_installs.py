"""Interpreters of simulators: installed whole or not at all, found by what their files say; and what hosts import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from configs import presets
from configs.errors import JoyNexusError, SpecError
from configs.home import PROJECT_ROOT
from services import environment_installs as installs
from services.environment_installs import STAMP, folder, install, interpreter, missing

QUIET = lambda line: None  # noqa: E731


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Presets with a requirements file `toy.txt` that asks for nothing, and an empty folder of interpreters."""
    where = tmp_path / "presets"
    shutil.copytree(presets.FOLDER, where)
    monkeypatch.setattr(presets, "FOLDER", where)
    monkeypatch.setenv("JOYNEXUS_ENVIRONMENTS", str(tmp_path / "made"))
    monkeypatch.setattr(installs, "HOST_NEEDS", ("json",))
    (where / "environments" / "toy.txt").write_text("# nothing\n")
    return where / "environments"


def test_what_is_installed_is_an_interpreter_of_its_own_and_is_installed_once(files: Path) -> None:
    with pytest.raises(SpecError, match=r"requirements: got 'toy.txt'; .*; run `joynexus env install toy`"):
        interpreter("toy.txt")
    told: list[str] = []
    made = install("toy.txt", told.append)
    assert len(told) == 1
    assert made.parent == files.parent.parent / "made"
    python = interpreter("toy.txt")
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert prefix.stdout.strip() == str(made)
    assert install("toy.txt", told.append) == made
    assert len(told) == 1
    # Other contents are another interpreter, and the former stays for the hosts that run under it.
    (files / "toy.no-deps.txt").write_text("# nothing either\n")
    assert folder("toy.txt") != made
    assert missing("toy.txt") is not None
    assert (made / STAMP).exists()


def test_an_installation_that_fails_leaves_nothing_and_says_where_to_look(files: Path) -> None:
    (files / "toy.txt").write_text(f"{files / 'no-such-package.whl'}\n")
    with pytest.raises(
        JoyNexusError, match=r"install: python.* ended with 1 \(ERROR: .*no-such-package.*\); see .*\.log"
    ):
        install("toy.txt", QUIET)
    assert not folder("toy.txt").exists()
    assert missing("toy.txt") is not None


def test_what_a_killed_installation_left_is_begun_anew(files: Path) -> None:
    half = folder("toy.txt")
    (half / "bin").mkdir(parents=True)
    (half / "bin" / "python").write_text("half of one")
    assert missing("toy.txt") is not None
    subprocess.run([str(install("toy.txt", QUIET) / "bin" / "python"), "-c", ""], check=True)


def test_two_at_a_time_install_once(files: Path) -> None:
    told: list[str] = []
    both = [threading.Thread(target=install, args=("toy.txt", told.append)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
    assert [line.split()[0] for line in told].count("installing") == 1
    assert missing("toy.txt") is None


def test_an_interpreter_without_what_hosts_need_is_no_installation(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installs, "HOST_NEEDS", ("msgpack",))
    with pytest.raises(JoyNexusError, match="No module named 'msgpack'"):
        install("toy.txt", QUIET)
    assert not folder("toy.txt").exists()


def test_names_are_of_presets_or_of_files(files: Path) -> None:
    assert installs.requirements_of("libero") == installs.requirements_of("libero-goal") == "libero.txt"
    assert installs.requirements_of("reach") is None
    assert interpreter(None) == sys.executable
    with pytest.raises(SpecError, match=r"name: got 'moon'; possible: libero, toy, libero-10, .*; choose one"):
        installs.requirements_of("moon")
    with pytest.raises(SpecError, match=r"requirements: got 'moon.txt'; possible: libero.txt, toy.txt; choose one or"):
        folder("moon.txt")


BLOCKER = """
import importlib.abc, sys

allowed = set(sys.stdlib_module_names) | {"services", "configs", "tests", "gymnasium", "numpy", "msgpack"}
allowed |= {"cloudpickle", "farama_notifications", "typing_extensions"}  # what those three need

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
"""


def test_a_host_needs_gymnasium_numpy_and_msgpack_alone() -> None:
    """All that it imports for itself and for adapters of no simulator, and an episode of Reach-v0 besides."""
    code = f"""{BLOCKER}
import numpy as np
import services.environment_host
import services.environment_protocol
from services.environments import libero, mujoco_renderer, observations, vector_adapter

host = services.environment_host.Host()
spec = {presets.environment("reach").model_dump(mode="json")!r}
host.handle("configure", {{"spec": spec, "num_envs": 2, "images": True, "session_token": "t"}})
seen = host.handle("reset", {{"seeds": [1, 2]}})
assert seen["images"]["top"].shape == (2, 64, 64, 3)
assert host.handle("expert_episode", {{"seed": 3, "noise": 0.0}})["success"]
print(*(m for m in ("pydantic", "torch", "yaml") if m in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
