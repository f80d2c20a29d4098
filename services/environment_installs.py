"""Interpreters of simulators that are not to share the platform's: found, and installed by `joynexus env install`.

A preset names a requirements file beside the presets; packages whose own declared dependencies nobody needs stand in a
second one, `NAME.no-deps.txt`, which is installed after it by `--no-deps`. The virtual environment lies in
`$JOYNEXUS_ENVIRONMENTS`, else in the user's cache folder (`~/.cache/joynexus/environments`), where every installation
of this user finds it:

    NAME-<16 digits of a digest of both files, the Python version and the machine>/
        bin/python, …
        joynexus.stamp      written last: without it there is no installation, whatever else lies there
    NAME-<…>.lock           held while one installs
    NAME-<…>.log            what pip said last

Another content of the files is another folder, so hosts that run go on with what they began with.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs import presets
from configs.errors import JoyNexusError, SpecError, refusal

STAMP = "joynexus.stamp"
HOST_NEEDS = ("gymnasium", "numpy", "msgpack")
"""What `services.environment_host` imports beside the standard library and the simulator."""


def root() -> Path:
    """Where the virtual environments lie; not made here."""
    named = os.environ.get("JOYNEXUS_ENVIRONMENTS")
    if named:
        return Path(named).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "joynexus" / "environments"


def known() -> list[str]:
    """Names of the requirements files, sorted."""
    return sorted(p.stem for p in (presets.FOLDER / "environments").glob("*.txt") if not p.stem.endswith(".no-deps"))


def folder(requirements: str) -> Path:
    """Where the virtual environment of this file lies, or would lie.

    Raises:
        SpecError: no such file beside the presets.
    """
    key = hashlib.sha256()
    for path in _files(requirements):
        key.update(path.read_bytes() + b"\0")
    key.update(f"{platform.python_version()} {sys.platform} {platform.machine()} {sys.base_prefix}".encode())
    return root() / f"{Path(requirements).stem}-{key.hexdigest()[:16]}"


def missing(requirements: str | None) -> str | None:
    """None where a host can be started; else one line that says what to install."""
    if requirements is None or (folder(requirements) / STAMP).exists():
        return None
    return refusal("requirements", requirements, "one that is installed here", remedy(requirements))


def remedy(requirements: str) -> str:
    """What a person does who lacks them."""
    return f"run `joynexus env install {Path(requirements).stem}`"


def interpreter(requirements: str | None) -> str:
    """Path of the Python that hosts environments with these requirements; the platform's own for None.

    Raises:
        SpecError: they are not installed, or there is no such file.
    """
    if requirements is None:
        return sys.executable
    if (message := missing(requirements)) is not None:
        raise SpecError(message)
    return str(folder(requirements) / "bin" / "python")


def requirements_of(name: str) -> str | None:
    """The requirements file that `name` means: a preset's, or the file `name`.txt itself; None for a preset of none.

    Raises:
        SpecError: neither is known.
    """
    if name in known():
        return f"{name}.txt"
    if name not in presets.names("environments"):
        possible = ", ".join([*known(), *presets.names("environments")])
        raise SpecError(refusal("name", name, possible, "choose one"))
    return presets.environment(name).requirements


def install(requirements: str, progress: Callable[[str], None]) -> Path:
    """Build the virtual environment, whole or not at all, unless it is there; the folder.

    Processes that ask for the same one at a time wait for each other. One that is killed half-way leaves a folder
    without its stamp, which the next one begins anew.

    Raises:
        SpecError: no such file, or the folder cannot be made.
        JoyNexusError: pip failed; with its last line and the log's path.
    """
    made = folder(requirements)
    with _only_one(made, progress):
        if (made / STAMP).exists():
            return made
        progress(f"installing {requirements} into {made} (some minutes)")
        shutil.rmtree(made, ignore_errors=True)
        log = made.with_name(f"{made.name}.log")
        try:
            with log.open("wb") as output:
                _build(made, requirements, lambda *command: _run(command, log, output))
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return made


def _build(made: Path, requirements: str, run: Callable[..., None]) -> None:
    # The platform's pip serves, which saves a copy of it; bytecode is compiled where it is imported.
    run(sys.executable, "-m", "venv", "--without-pip", made)
    python = made / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input", "install")
    plain, *without_dependencies = _files(requirements)
    run(*pip, "--no-compile", "--requirement", plain)
    for path in without_dependencies:
        run(*pip, "--no-compile", "--no-deps", "--requirement", path)
    run(python, "-c", f"import {', '.join(HOST_NEEDS)}")
    (made / STAMP).write_text(f"{requirements}\n", encoding="utf-8")


def _run(command: tuple[str | Path, ...], log: Path, output: object) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        # Packages that somebody put on the path would pass for installed.
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
    )
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "nothing")
        raise JoyNexusError(f"install: {Path(command[0]).name} ended with {done.returncode} ({said[:300]}); see {log}")


def _files(requirements: str) -> list[Path]:
    """The file, and the one of packages without their dependencies where there is one."""
    where = presets.FOLDER / "environments"
    path = where / requirements
    if not path.is_file():
        possible = ", ".join(f"{name}.txt" for name in known())
        raise SpecError(refusal("requirements", requirements, possible, f"choose one or add it to {where}"))
    second = where / f"{path.stem}.no-deps.txt"
    return [path, second] if second.is_file() else [path]


@contextmanager
def _only_one(made: Path, progress: Callable[[str], None]) -> Iterator[None]:
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        lock = made.with_name(f"{made.name}.lock").open("w")
    except OSError as error:
        raise SpecError(
            refusal("JOYNEXUS_ENVIRONMENTS", str(made.parent), "a folder that can be written", f"set it ({error})")
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process installs into {made}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
