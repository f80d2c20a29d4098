"""`joynexus up | down | status` from Python: bring one platform up, find it, end it.

The work is done by a detached supervisor (`joynexus.supervisor`); what stands here runs in the caller's process
and leaves nothing behind there. All three are safe to repeat, and two homes never meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs import presets
from configs.errors import Conflict, ServiceUnavailable, refusal
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses, addresses, read_state
from joynexus.children import python
from joynexus.guard import sweep
from joynexus.supervisor import lock

__all__ = ["ProcessRow", "addresses", "down", "ensure_up", "is_up", "open_mlflow_page", "status"]

_END_WITHIN_S = 60.0


@dataclass(frozen=True)
class ProcessRow:
    """One line of `joynexus status`."""

    name: str
    pid: int | None
    state: str
    restarts: int
    memory_mb: float | None
    log: str


def is_up(home: Home) -> bool:
    """Whether a supervisor lives under `home` and has everything ready."""
    state = read_state(home)
    return state is not None and state["phase"] == "ready" and _supervisor_lives(home)


def ensure_up(
    home: Home, cluster: str = "laptop", progress: Callable[[str], None] = lambda _line: None
) -> PlatformAddresses:
    """Bring the platform up and return when every part is ready; at once if it is up already.

    Args:
        home: The installation; its folder is created.
        cluster: Cluster preset.
        progress: Called with a line for each part that became ready.

    Raises:
        SpecError: if the preset is unknown or wrong; nothing is started.
        Conflict: if this home is up with another preset.
        ServiceUnavailable: if a part does not come up; what had started is ended again.
    """
    presets.cluster(cluster)
    for folder in (home.root, home.logs, home.prefect, home.mlflow, home.partitions, home.tenants, home.datasets):
        folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(home):
        if _supervisor_lives(home):
            return _already_up(home, cluster, progress)
        _sweep_leftovers(home)
        _rotate_logs(home.logs)
        _start_supervisor(home, cluster, progress)
        return addresses(home)


def down(home: Home, progress: Callable[[str], None] = lambda _line: None) -> bool:
    """End everything of the platform under `home`; returns whether something had run."""
    state = read_state(home)
    if state is None or not home.root.is_dir():
        return False
    lives = _supervisor_lives(home)
    if lives:
        supervisor = _process(state["supervisor"])
        guard = _process(state["guard"]) if state["guard"] else None
        progress("ending flow runs, workers and servers")
        for process, patience_s in ((supervisor, _END_WITHIN_S), (guard, 15.0)):
            if process is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is supervisor:
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(patience_s)
                except psutil.TimeoutExpired:
                    process.kill()
    killed = sweep(state["mark"])
    home.state.unlink(missing_ok=True)
    return lives or killed > 0


def status(home: Home) -> list[ProcessRow]:
    """The platform's processes; empty where nothing was started."""
    state = read_state(home)
    if state is None:
        return []
    lives = _supervisor_lives(home)
    rows = [_row("supervisor", state["supervisor"], lives, 0, home.logs / "supervisor.log", state["phase"])]
    for name, child in state["processes"].items():
        word = "ready" if child["ready"] else "starting"
        rows.append(_row(name, child["pid"], lives and child["pid"] is not None, child["restarts"], child["log"], word))
    return rows


def lock_hint(home: Home) -> str | None:
    """A hint at Postgres if Prefect's sqlite was too busy; None if it was not."""
    try:
        log = (home.logs / "prefect-server.log").read_text(errors="replace")
    except FileNotFoundError:
        return None
    times = log.count("\nsqlite3.OperationalError: database is locked")
    if not times:
        return None
    return (
        f"prefect: its sqlite was locked {times} times; possible: fewer runs at once, or a Prefect server on Postgres; "
        "name one as prefect_api_url in the cluster preset"
    )


def open_mlflow_page(home: Home, timeout_s: float = 120.0) -> str:
    """Have the supervisor start MLflow's page and return its address when it answers.

    Raises:
        ServiceUnavailable: if no platform is up or the page does not answer in time.
    """
    state = read_state(home)
    if state is None or not is_up(home):
        raise ServiceUnavailable("mlflow: the platform is not up; possible: one that is; run `joynexus up`")
    os.kill(state["supervisor"], signal.SIGUSR1)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is None:
            break
        if state["processes"].get("mlflow-page", {}).get("ready"):
            return str(state["pages"]["mlflow"])
        time.sleep(0.2)
    raise ServiceUnavailable(f"mlflow: its page does not answer; possible: see {home.logs / 'mlflow-page.log'}")


def _start_supervisor(home: Home, cluster: str, progress: Callable[[str], None]) -> None:
    reader, writer = os.pipe()
    with (home.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            python("joynexus.supervisor", str(home.root), cluster, str(writer)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=PROJECT_ROOT,
            pass_fds=(writer,),
            start_new_session=True,
        )
    os.close(writer)
    try:
        if _follow(reader, progress):
            return
    except BaseException:  # a fault that it reported, or a person's Ctrl-C: what had started is ended either way
        process.terminate()
        process.wait(_END_WITHIN_S)
        raise
    raise ServiceUnavailable(f"supervisor: it ended while starting; possible: see {home.logs / 'supervisor.log'}")


def _follow(reader: int, progress: Callable[[str], None]) -> bool:
    """Pass the supervisor's progress on; True when it is ready, False when it died without a word.

    Raises:
        ServiceUnavailable: if it gave up.
    """
    # The pipe ends with the supervisor's last word or with its life, whichever comes first.
    with os.fdopen(reader) as lines:
        for text in lines:
            line: dict[str, Any] = json.loads(text)
            if "step" in line:
                progress(line["step"])
            elif "error" in line:
                raise ServiceUnavailable(line["error"])
            elif line.get("ready"):
                return True
    return False


def _already_up(home: Home, cluster: str, progress: Callable[[str], None]) -> PlatformAddresses:
    found = addresses(home)
    if found.cluster != cluster:
        raise Conflict(
            refusal("cluster", cluster, f"{found.cluster!r}, which is up", "use it, or run `joynexus down` first")
        )
    # A former `up` was interrupted while its supervisor went on: wait for what it waited for.
    deadline = time.monotonic() + 300
    while not is_up(home):
        if not _supervisor_lives(home) or time.monotonic() > deadline:
            raise ServiceUnavailable(f"supervisor: it did not get ready; possible: see {home.logs / 'supervisor.log'}")
        time.sleep(0.2)
    progress("already up")
    return found


@contextlib.contextmanager
def _one_at_a_time(home: Home) -> Iterator[None]:
    with (home.root / "up.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _supervisor_lives(home: Home) -> bool:
    if not home.root.is_dir():
        return False
    held = lock(home)
    if held is None:
        return True
    held.close()
    return False


def _sweep_leftovers(home: Home) -> None:
    """What a platform left whose supervisor and guard were killed together."""
    state = read_state(home)
    if state is not None:
        sweep(state["mark"])
        home.state.unlink(missing_ok=True)


def _rotate_logs(folder: Path) -> None:
    for log in folder.glob("*.log"):
        os.replace(log, log.with_suffix(".log.1"))


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _row(name: str, pid: int | None, lives: bool, restarts: int, log: str | Path, state: str) -> ProcessRow:
    process = _process(pid) if lives and pid is not None else None
    if process is None:
        return ProcessRow(name, None, "dead", restarts, None, str(log))
    memory = process.memory_info().rss
    for below in process.children(recursive=True) if name != "supervisor" else []:
        with contextlib.suppress(psutil.Error):
            memory += below.memory_info().rss
    return ProcessRow(name, pid, state, restarts, memory / 2**20, str(log))
