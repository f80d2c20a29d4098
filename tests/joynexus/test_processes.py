"""The platform as a whole: up, down and status on real processes, and what happens when parts of it are killed."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from configs import presets
from configs.errors import Conflict, ServiceUnavailable
from configs.home import Home
from configs.platform import ROLES, PlatformAddresses, addresses, read_state, write_state
from joynexus import processes
from joynexus.children import Child, python
from joynexus.guard import MARK, members, sweep
from joynexus.prefect_api import PrefectApi
from joynexus.supervisor import Supervisor


def until(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for what other processes do; fails with the condition's name."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)


slow = pytest.mark.timeout(900)  # a whole platform starts; minutes on a crowded machine


def pid(home: Home, name: str) -> int:
    """Process id of a part of the platform."""
    (found,) = [row.pid for row in processes.status(home) if row.name == name]
    assert found is not None
    return found


# The session's platform, which these tests leave as it is.


def test_up_is_idempotent_and_names_the_same_addresses(platform: PlatformAddresses, home: Home) -> None:
    """A second `up` finds everything as it is: same addresses, same processes."""
    before = [row.pid for row in processes.status(home)]
    lines: list[str] = []
    assert processes.ensure_up(home, progress=lines.append) == platform
    assert lines == ["already up"]
    assert [row.pid for row in processes.status(home)] == before


def test_up_with_another_preset_is_refused(
    platform: PlatformAddresses, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running platform is not turned into another one."""
    laptop = presets.cluster("laptop")
    monkeypatch.setattr(presets, "cluster", lambda name: laptop.model_copy(update={"name": name}))
    with pytest.raises(Conflict, match=r"^cluster: got 'desk'; possible: 'laptop', which is up; use it, or run"):
        processes.ensure_up(home, "desk")


def test_every_part_is_ready_and_listens_on_this_machine_only(platform: PlatformAddresses, home: Home) -> None:
    """Status knows each part; no socket of any process is bound to another address than the loopback."""
    rows = {row.name: row for row in processes.status(home)}
    wanted = {"supervisor", "prefect-server", "prefect-worker", "dask-scheduler", *(f"dask-{role}" for role in ROLES)}
    assert wanted <= set(rows)
    assert all(row.state == "ready" and row.restarts == 0 for row in rows.values()), rows
    assert all(Path(row.log).is_file() for row in rows.values())
    state = read_state(home)
    assert state is not None
    listening = [
        connection.laddr.ip
        for process in members(state["mark"])
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_pages_answer(platform: PlatformAddresses, home: Home) -> None:
    """Prefect's and Dask's pages are there."""
    state = read_state(home)
    assert state is not None
    with httpx.Client(trust_env=False, timeout=30, follow_redirects=True) as client:
        for page in ("prefect", "dask"):
            assert client.get(state["pages"][page]).status_code == 200, page


def test_threads_are_set_before_torch_is_imported(platform: PlatformAddresses, home: Home) -> None:
    """Each Dask worker process carries its role's thread limits from its first instruction."""
    for role in ROLES:
        nanny = psutil.Process(pid(home, f"dask-{role}"))
        for process in (nanny, *nanny.children(recursive=True)):
            environment = process.environ()
            assert {environment[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}


def test_nothing_reports_to_others(platform: PlatformAddresses, home: Home) -> None:
    """Prefect's analytics are off in all of its processes."""
    for name in ("prefect-server", "prefect-worker"):
        environment = psutil.Process(pid(home, name)).environ()
        assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        assert environment["DO_NOT_TRACK"] == "1"


def test_existing_servers_are_used_by_their_addresses(platform: PlatformAddresses, tmp_path: Path) -> None:
    """With addresses in the preset nothing of the kind is started; all role workers are there already."""
    cluster = presets.cluster("laptop").model_copy(
        update={"prefect_api_url": platform.prefect_api_url, "dask_scheduler": platform.dask_scheduler}
    )
    supervisor = Supervisor(Home(tmp_path), cluster, io.StringIO())

    async def use() -> None:
        await supervisor.prefect()
        await supervisor.dask()

    asyncio.run(use())
    assert supervisor.parts.children == {}
    assert supervisor.parts.addresses.dask_scheduler == platform.dask_scheduler
    assert supervisor.parts.addresses.prefect_api_url == platform.prefect_api_url


@pytest.mark.parametrize(
    ("field", "address", "part"),
    [
        ("prefect_api_url", "http://127.0.0.1:9/api", "prefect"),
        ("dask_scheduler", "tcp://127.0.0.1:9", "dask"),
    ],
)
def test_an_address_where_nothing_answers_is_named(tmp_path: Path, field: str, address: str, part: str) -> None:
    """The field, the address and the way out."""
    cluster = presets.cluster("laptop").model_copy(update={field: address})
    supervisor = Supervisor(Home(tmp_path), cluster, io.StringIO())
    with pytest.raises(
        ServiceUnavailable, match=f"^{field}: got '{address}'; possible: a .* that answers; start it, or"
    ):
        asyncio.run(getattr(supervisor, part)())


# A second platform beside the session's, which the tests below may harm; they run in this order.


@pytest.fixture(scope="module")
def second(platform: PlatformAddresses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Another installation on the same machine at the same time."""
    home = Home(tmp_path_factory.mktemp("second"))
    processes.ensure_up(home)
    yield home
    processes.down(home)


@slow
def test_two_installations_run_side_by_side(platform: PlatformAddresses, home: Home, second: Home) -> None:
    """Nothing is shared: addresses, folders and processes are all different."""
    one, two = platform.asdict(), addresses(second).asdict()
    assert {name for name in one if one[name] == two[name]} == {"cluster"}
    assert not {r.pid for r in processes.status(home)} & {r.pid for r in processes.status(second)}


@slow
def test_mlflows_page_opens_when_asked_for(second: Home) -> None:
    """It is not there before, answers when the call returns, and opening it twice opens it once."""
    state = read_state(second)
    assert state is not None
    assert state["pages"]["mlflow"] is None
    url = processes.open_mlflow_page(second)
    assert httpx.get(url, trust_env=False, timeout=60, follow_redirects=True).status_code == 200
    assert processes.open_mlflow_page(second) == url


@slow
@pytest.mark.parametrize("name", ["prefect-worker", "prefect-server"])
def test_a_killed_prefect_process_comes_back(second: Home, name: str) -> None:
    """The supervisor starts it again under the same address, and says how often it did."""
    former, address = pid(second, name), addresses(second).prefect_api_url
    os.killpg(former, signal.SIGKILL)

    def back() -> bool:
        (row,) = [row for row in processes.status(second) if row.name == name]
        return row.pid not in (None, former) and row.state == "ready" and row.restarts == 1

    until(back, within_s=120)
    assert addresses(second).prefect_api_url == address

    async def healthy() -> bool:
        async with PrefectApi(address) as api:
            return await api.healthy()

    assert asyncio.run(healthy())


@slow
def test_down_ends_everything(second: Home, platform: PlatformAddresses, home: Home) -> None:
    """No process, no state, no address is left; the other installation goes on."""
    found = addresses(second)
    state = read_state(second)
    assert state is not None
    assert len(members(state["mark"])) > 8
    assert processes.down(second)
    assert members(state["mark"]) == []
    assert not any(psutil.pid_exists(state[name]) for name in ("supervisor", "guard"))
    assert read_state(second) is None
    with pytest.raises(ServiceUnavailable, match="run `joynexus up`"):
        addresses(second)
    assert not processes.down(second)
    assert not asyncio.run(PrefectApi(found.prefect_api_url).healthy())
    assert processes.is_up(home)


# Starts that do not come to their end.


def test_a_killed_supervisor_takes_everything_along(tmp_path: Path) -> None:
    """`kill -9` of the supervisor: `up` says so, and the guard ends all that had started."""
    home = Home(tmp_path)
    seen: dict[str, Any] = {}

    def kill(step: str) -> None:
        if step.startswith("Dask workers"):
            seen.update(read_state(home) or {})
            seen["members"] = len(members(seen["mark"]))
            os.kill(seen["supervisor"], signal.SIGKILL)

    with pytest.raises(
        ServiceUnavailable, match=r"^supervisor: it ended while starting; possible: see .*supervisor\.log"
    ):
        processes.ensure_up(home, progress=kill)
    assert seen["members"] > 8  # the servers, four nannies with their workers
    until(lambda: not members(seen["mark"]) and not psutil.pid_exists(seen["guard"]), within_s=60)
    assert not processes.is_up(home)
    assert {row.state for row in processes.status(home)} == {"dead"}


def test_an_interrupted_up_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C while it starts: what had started is ended before `up` returns."""
    home = Home(tmp_path)
    marks: list[str] = []

    def interrupt(_step: str) -> None:
        state = read_state(home)
        assert state is not None
        marks.append(state["mark"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.ensure_up(home, progress=interrupt)
    assert read_state(home) is None
    until(lambda: not members(marks[0]), within_s=30)


# Parts on their own.


def test_a_child_that_never_starts_is_given_up_with_its_last_line(tmp_path: Path) -> None:
    """Three early ends, then one message that names the log and quotes it."""

    async def never() -> bool:
        return False

    async def start() -> None:
        child = Child(
            "broken",
            lambda: python("nosuchmodule"),
            lambda: os.environ,
            tmp_path / "broken.log",
            never,
            on_change=lambda: None,
            cwd=tmp_path,
        )
        await child.start()

    with pytest.raises(
        ServiceUnavailable, match=r"^broken: ended with code 1; possible: see .*broken\.log; .*nosuchmodule"
    ):
        asyncio.run(start())


def test_sweep_ends_marked_processes_and_no_others() -> None:
    """The mark in the environment decides, also over a session of its own."""

    marked, other = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}, start_new_session=True)
        for mark in ("test-marked", "test-other")
    )
    try:
        assert sweep("test-marked") == 1
        assert marked.wait(10) is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_state_is_replaced_at_once(tmp_path: Path) -> None:
    """What is read is always one of the states that were written; no partial file stays."""
    home = Home(tmp_path)
    for number in range(3):
        write_state(home, {"number": number})
        assert read_state(home) == {"number": number}
    assert [p.name for p in tmp_path.iterdir()] == ["platform.json"]


def test_lock_hint_names_postgres(tmp_path: Path) -> None:
    """Two locked writes in Prefect's log become one hint."""
    home = Home(tmp_path)
    assert processes.lock_hint(home) is None
    home.logs.mkdir()
    (home.logs / "prefect-server.log").write_text("x\n" + 2 * "sqlite3.OperationalError: database is locked\n")
    hint = processes.lock_hint(home)
    assert hint is not None
    assert hint.startswith("prefect: its sqlite was locked 2 times")
    assert "Postgres" in hint
