"""Installation: the scripts behind `make`, without installing anything."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])

# Stands for an interpreter: makes an environment out of itself and logs what pip would have installed.
STUB = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python 3.11.9" ;;
    *version_info*|*ensurepip*) exit 0 ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *find_spec*) exit 1 ;;
    "-c ") exit 0 ;;
    *) echo "$*" >> "$LOG" ;;
esac
"""


def executable(path: Path, text: str) -> Path:
    """A script at `path`."""
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the set-up reads, in a folder of their own."""
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def set_up(checkout: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run the set-up with this interpreter."""
    environment = {**os.environ, "PYTHON": str(python), "LOG": str(checkout / "log")}
    return subprocess.run(
        ["scripts/setup.sh"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    """As a clone brings them."""
    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def test_constraints_pin_what_the_tests_passed_on() -> None:
    """Plain pins only: torch without a build's name, no torchvision, no path, no address."""
    lines = (ROOT / "constraints.txt").read_text().split()
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+(\.post\d+)?", line) for line in lines), lines
    assert not [line for line in lines if line.startswith("torchvision")]


def test_every_dependency_is_pinned() -> None:
    """What pyproject.toml asks for stands in constraints.txt."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    normal = {
        re.split(r"==", line)[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    names = {re.split(r"[=<>~ \[]", name)[0].lower().replace("_", "-") for name in asked}
    assert names - normal == set()


def test_torch_comes_first_and_a_second_set_up_does_nothing(checkout: Path) -> None:
    """Then nothing is installed until what it depends on changes."""
    python = executable(checkout / "python", STUB)
    assert set_up(checkout, python).returncode == 0
    first = (checkout / "log").read_text().splitlines()
    assert len(first) == 2
    assert first[0].endswith("install --quiet --quiet --constraint constraints.txt torch==2.13.0")
    assert first[1].endswith("install --quiet --quiet --constraint constraints.txt --editable .[dev]")
    again = set_up(checkout, python)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (checkout / "log").read_text().splitlines() == first
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert set_up(checkout, python).returncode == 0
    assert len((checkout / "log").read_text().splitlines()) == 4


def test_an_old_python_is_refused_in_one_line(checkout: Path) -> None:
    """What was found, what is possible, what to do."""
    old = "#!/usr/bin/env bash\n[[ $1 == --version ]] && echo 'Python 3.9.2' && exit 0\nexit 1\n"
    python = executable(checkout / "python3.9", old)
    done = set_up(checkout, python)
    assert done.returncode == 1
    assert done.stderr == (
        f"python: got 'Python 3.9.2' from '{python}'; possible: 3.11 or later; "
        "install it, or set PYTHON=/path/to/python\n"
    )
    assert not (checkout / ".venv").exists()


def test_make_demo_passes_its_switches_on() -> None:
    """WITHOUT_RENDERER leaves the renderer's set-up out and tells the command."""
    with_renderer = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    assert "scripts/renderer.sh" in with_renderer.stdout
    assert with_renderer.stdout.rstrip().endswith("joynexus demo")
    without = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo", "WITHOUT_RENDERER=1", "KEEP=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert "scripts/renderer.sh" not in without.stdout
    assert "joynexus demo --without-renderer --keep" in without.stdout


def test_ci_runs_lint_types_and_the_suite_last() -> None:
    """`.ci/run` needs no person, and pytest's closing line ends its output."""
    text = (ROOT / ".ci" / "run").read_text()
    assert "exec </dev/null" in text
    assert text.index("make --no-print-directory lint") < text.index("make --no-print-directory test")
    makefile = (ROOT / "Makefile").read_text()
    for command in ("ruff check", "ruff format --check", "mypy", "-m pytest"):
        assert command in makefile
