"""The rooms of the project: imports go down only, and what must stay light stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room: the rooms it may import from. A room may always import from itself.
MAY_IMPORT = {
    "joynexus": {"flows", "tasks", "services", "storage", "configs"},
    "flows": {"tasks", "services", "storage", "configs"},
    "tasks": {"services", "storage", "configs"},
    "services": {"kernels", "storage", "configs"},
    "kernels": {"configs"},
    "storage": {"configs"},
    "configs": set(),
}
# What a room is kept free of, at any place of its files.
NEVER = {
    "kernels": {"dask", "distributed", "prefect", "zarr", "mlflow", "time", "datetime"},
    "storage": {"torch", "dask", "distributed", "prefect"},
    "configs": {"torch", "dask", "distributed", "prefect", "zarr", "mlflow", "numpy", "transformers"},
}


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of all absolute imports of a file, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the room"
            found.append((node.lineno, node.module or ""))
    return found


def files(room: str) -> list[Path]:
    """Python files of a room."""
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_down_only(room: str) -> None:
    """Each room imports from itself and from those below it."""
    upwards = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for line, name in imports(path)
        if (top := name.partition(".")[0]) in MAY_IMPORT and top != room and top not in MAY_IMPORT[room]
    ]
    assert upwards == []


@pytest.mark.parametrize("room", NEVER)
def test_rooms_stay_free_of_what_is_not_theirs(room: str) -> None:
    """Kernels know no orchestration and no clock, storage no torch, declarations nothing heavy."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for line, name in imports(path)
        if name.partition(".")[0] in NEVER[room]
    ]
    assert wrong == []


def test_every_room_has_tests_and_an_init() -> None:
    """A room is a package, and its tests are found at its name."""
    for room in MAY_IMPORT:
        assert (ROOT / room / "__init__.py").is_file()
        assert list((ROOT / "tests" / room).glob("test_*.py")), f"tests/{room} has no test"


def loaded(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    heavy = ("torch", "transformers", "mlflow", "mani_skill", "sapien")
    check = f"import sys; print(*[m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_flows_and_command_import_no_torch() -> None:
    """A flow process starts in about a second only without torch; the same for every `joynexus` command."""
    flows = "\n".join(f"import flows.{path.stem}" for path in files("flows") if path.stem != "__init__")
    command = "\n".join(f"import joynexus.{path.stem}" for path in files("joynexus") if path.stem != "__init__")
    assert loaded(f"{flows}\n{command}") == []


def test_importing_the_command_imports_almost_nothing() -> None:
    """`joynexus --help` answers at once: no Dask, no Prefect."""
    code = "import sys, joynexus.command; assert not {'distributed', 'prefect', 'pandas'} & set(sys.modules), 'heavy'"
    assert loaded(code) == []
