"""The REST calls on a real server, and which scheduled runs are out of date."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from configs.errors import ServiceUnavailable, UnknownObject
from configs.platform import PlatformAddresses
from joynexus.prefect_api import PrefectApi, superseded


def run(name: str, deployment: str, at: str, state: str = "SCHEDULED", by_clock: bool = True) -> dict[str, Any]:
    """A flow run as the API describes it."""
    return {
        "id": name,
        "deployment_id": deployment,
        "expected_start_time": f"2026-11-30T{at}:00Z",
        "state_type": state,
        "auto_scheduled": by_clock,
    }


def test_of_a_piled_up_schedule_only_the_latest_is_left() -> None:
    """At 12:00 `a` has 10:00, 10:30 and 11:00 behind it, of which 11:00 stays; the others are not touched."""
    runs = [
        run("a2", "a", "10:30"),
        run("a1", "a", "10:00"),
        run("a3", "a", "11:00"),
        run("a4 is to come", "a", "12:30"),
        run("b1", "b", "09:00"),
        run("a person's", "a", "08:00", by_clock=False),
        run("at work", "a", "09:30", state="RUNNING"),
    ]
    found = superseded(runs, datetime(2026, 11, 30, 12, 0, tzinfo=UTC))
    assert [r["id"] for r in found] == ["a1", "a2"]


def test_nothing_is_superseded_by_what_is_still_to_come() -> None:
    """One run due, one later: both stay."""
    runs = [run("a1", "a", "11:30"), run("a2", "a", "12:30")]
    assert superseded(runs, datetime(2026, 11, 30, 12, 0, tzinfo=UTC)) == []


def test_no_server_is_one_message() -> None:
    """The address and where to look."""

    async def ask() -> None:
        async with PrefectApi("http://127.0.0.1:9/api") as api:
            await api.open_runs()

    with pytest.raises(
        ServiceUnavailable, match=r"^prefect_api_url: http://127.0.0.1:9/api does not answer \(ConnectError"
    ):
        asyncio.run(ask())
    assert not asyncio.run(PrefectApi("http://127.0.0.1:9/api").healthy())


def test_unknown_deployment_is_named(platform: PlatformAddresses) -> None:
    """What is missing and how to bring it."""

    async def ask() -> None:
        async with PrefectApi(platform.prefect_api_url) as api:
            await api.start("nosuchflow", {})

    with pytest.raises(UnknownObject, match="deployment: nosuchflow/nosuchflow is not on this server"):
        asyncio.run(ask())


def test_resident_flows_are_open_and_the_worker_is_online(platform: PlatformAddresses) -> None:
    """What `joynexus up` promises, as Prefect sees it."""

    async def ask() -> tuple[dict[str, int], list[str]]:
        async with PrefectApi(platform.prefect_api_url) as api:
            await api.ensure_work_pool()  # it exists: nothing happens
            flows = {flow: len(await api.open_runs(flow)) for flow in ("platform", "train", "preprocess")}
            return flows, await api.workers_online()

    flows, workers = asyncio.run(ask())
    assert flows == {"platform": 1, "train": 1, "preprocess": 1}
    assert len(workers) == 1
