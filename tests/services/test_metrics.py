"""The metrics service: points in batches and in order, failures retried, runs and registering done once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

import services.metrics
from configs.errors import Conflict, SpecError, UnknownObject
from services.metrics import MetricsService
from storage.registry import mlflow_client
from tests.mlflow_database import migrated_database

PARAMS = {"learning_rate": 1e-3, "base_model": "tiny-qwen3-vl"}
PAYLOAD = {"w": np.arange(4, dtype=np.float32)}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for this file; tests use tenants of their own names."""
    return migrated_database(tmp_path_factory.mktemp("mlflow"))


def serve(uri: str, tmp_path: Path, story: Callable[[MetricsService], Awaitable[None]], interval_s: float = 60) -> None:
    """Run `story` against a service whose timer does not interfere unless asked to."""

    async def run() -> None:
        service = MetricsService(uri, str(tmp_path / "mlflow" / "artifacts"), interval_s)
        try:
            await story(service)
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_points_are_buffered_and_written_in_batches(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 points make three calls; none is lost, doubled or out of order."""

    async def story(service: MetricsService) -> None:
        calls: list[int] = []
        write = service._write
        monkeypatch.setattr(service, "_write", lambda run, points: (calls.append(len(points)), write(run, points)))
        run = await service.open_run("push", "rl", PARAMS)
        for step in range(1250):
            await service.log(run, {"loss": step / 2, "reward": -step}, step)
        assert (await service.status())["buffered"] == 2500
        assert await service.history(run, "loss") == []
        await service.flush()
        assert calls == [1000, 1000, 500]
        assert await service.history(run, "loss") == [(step, step / 2) for step in range(1250)]
        assert await service.status() == {"buffered": 0, "written": 2500, "dropped": 0, "last_error": None}

    serve(uri, tmp_path, story)


def test_written_by_itself(uri: str, tmp_path: Path) -> None:
    """Without a flush, points appear after the interval."""

    async def story(service: MetricsService) -> None:
        run = await service.open_run("self", "rl", PARAMS)
        written = asyncio.Event()
        write = service._write

        def seen(run_id: str, points: list) -> None:
            write(run_id, points)
            loop.call_soon_threadsafe(written.set)

        loop = asyncio.get_running_loop()
        service._write = seen
        await service.log(run, {"loss": 1.0}, 0)
        await asyncio.wait_for(written.wait(), 30)
        assert await service.history(run, "loss") == [(0, 1.0)]

    serve(uri, tmp_path, story, interval_s=0.05)


def test_failed_write_is_tried_again(uri: str, tmp_path: Path) -> None:
    """A locked database loses nothing: the next round writes what stayed and what came meanwhile."""

    async def story(service: MetricsService) -> None:
        run = await service.open_run("retry", "rl", PARAMS)
        write, loop, failed, done = service._write, asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        failures = [OSError("database is locked")]

        def flaky(run_id: str, points: list) -> None:
            if failures:
                loop.call_soon_threadsafe(failed.set)
                raise failures.pop()
            write(run_id, points)
            loop.call_soon_threadsafe(done.set)

        service._write = flaky
        await service.log(run, {"loss": 1.0}, 0)
        await asyncio.wait_for(failed.wait(), 30)
        await service.log(run, {"loss": 2.0}, 1)
        await asyncio.wait_for(done.wait(), 30)
        await service.flush()
        assert await service.history(run, "loss") == [(0, 1.0), (1, 2.0)]
        assert (await service.status())["last_error"] is None

    serve(uri, tmp_path, story, interval_s=0.05)


def test_one_runs_failure_hinders_no_others_points(uri: str, tmp_path: Path) -> None:
    """A run deleted by hand takes no points any more; the others' are written, and their runs close."""

    async def story(service: MetricsService) -> None:
        gone = await service.open_run("gone", "rl", PARAMS)
        stays = await service.open_run("stays", "rl", PARAMS)
        await service._run(lambda: service._tracking().delete_run(gone))
        await service.log(gone, {"loss": 1.0}, 0)
        await service.log(stays, {"loss": 2.0}, 0)
        with pytest.raises(Exception, match="deleted"):
            await service.flush()
        assert await service.history(stays, "loss") == [(0, 2.0)]
        await service.log(stays, {"loss": 3.0}, 1)
        await service.close_run(stays)
        assert await service.history(stays, "loss") == [(0, 2.0), (1, 3.0)]
        assert (await service.status())["buffered"] == 1
        with pytest.raises(UnknownObject):
            await service.close_run(gone)  # MLflow ends no deleted run
        assert (await service.status())["buffered"] == 0

    serve(uri, tmp_path, story)


def test_buffer_is_bounded(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While MLflow cannot be written the oldest points go, and it is said how many."""

    async def story(service: MetricsService) -> None:
        monkeypatch.setattr(services.metrics, "_MAX_BUFFERED", 3)
        for step in range(5):
            service._buffer["run"].append(("loss", float(step), 0, step))
        service._drop_oldest()
        assert [p[3] for p in service._buffer["run"]] == [2, 3, 4]
        assert (await service.status())["dropped"] == 2
        service._buffer.clear()

    serve(uri, tmp_path, story)


def test_nan_is_recorded(uri: str, tmp_path: Path) -> None:
    """A tenant's loss that is no number shows in its curve and hinders nobody's."""

    async def story(service: MetricsService) -> None:
        mine = await service.open_run("nan", "rl", PARAMS)
        other = await service.open_run("other", "rl", PARAMS)
        await service.log(mine, {"loss": math.nan}, 0)
        await service.log(other, {"loss": 1.0}, 0)
        await service.flush()
        assert math.isnan((await service.history(mine, "loss"))[0][1])
        assert await service.history(other, "loss") == [(0, 1.0)]

    serve(uri, tmp_path, story)


def test_runs_are_opened_once_a_request(uri: str, tmp_path: Path) -> None:
    """Sent again: the same run, also by a successor of the service; other parameters: refused; no id: a new run."""

    async def story(service: MetricsService) -> None:
        first = await service.open_run("once", "rl", PARAMS, request_id="flow1")
        assert await service.open_run("once", "rl", PARAMS, request_id="flow1") == first
        again = MetricsService(uri, str(tmp_path / "mlflow" / "artifacts"))
        assert await again.open_run("once", "rl", PARAMS, request_id="flow1") == first
        await again.close()
        with pytest.raises(Conflict, match="got 'flow1'; possible: its first parameters"):
            await service.open_run("once", "rl", {"learning_rate": 1}, request_id="flow1")
        assert await service.open_run("once", "rl", PARAMS) != await service.open_run("once", "rl", PARAMS)
        run = service._tracking().get_run(first)
        assert run.data.params == {"learning_rate": "0.001", "base_model": "tiny-qwen3-vl"}

    serve(uri, tmp_path, story)


def test_closing_writes_and_ends(uri: str, tmp_path: Path) -> None:
    """Closing twice is no error; late points and unknown runs are refused."""

    async def story(service: MetricsService) -> None:
        run = await service.open_run("close", "rl", PARAMS)
        await service.log(run, {"loss": 1.0}, 0)
        await service.close_run(run, "FAILED")
        await service.close_run(run, "FINISHED")
        assert service._tracking().get_run(run).info.status == "FAILED"
        assert await service.history(run, "loss") == [(0, 1.0)]
        with pytest.raises(Conflict, match="late results are discarded"):
            await service.log(run, {"loss": 2.0}, 1)
        with pytest.raises(UnknownObject, match="run: got"):
            await service.close_run("0" * 32)

    serve(uri, tmp_path, story)


def test_adapters_through_the_service(uri: str, tmp_path: Path) -> None:
    """Registered at the same time by two callers, evaluated, listed and resolved."""

    async def story(service: MetricsService) -> None:
        call = ("adapter.rl", PAYLOAD, {"horizon": 4}, {"policy_version": "3"}, "job1")
        assert await asyncio.gather(service.register_adapter(*call), service.register_adapter(*call)) == [1, 1]
        await service.record_evaluation("adapter.rl", 1, {"success_before": 0.1})
        assert await service.champion_if_best("adapter.rl", 1, "success", 0.75) == 1
        (listed,) = await service.list_adapters("adapter.rl")
        assert (listed["version"], listed["aliases"]) == (1, ["champion"])
        assert listed["tags"]["evaluation.success"] == "0.75"
        found = await service.resolve("models:/adapter.rl@champion")
        np.testing.assert_array_equal(found.params["w"], PAYLOAD["w"])

    serve(uri, tmp_path, story)


def test_as_an_actor(uri: str, tmp_path: Path) -> None:
    """Over TCP, as from another process: arrays, replies and errors survive the journey."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        actor = client.submit(MetricsService, uri, str(tmp_path / "a"), actor=True, pure=False).result()
        assert actor.ping().result() == "ok"
        run = actor.open_run("actor", "sft", PARAMS).result()
        actor.log(run, {"loss": 0.5}, 1).result()
        actor.flush().result()
        assert [tuple(p) for p in actor.history(run, "loss").result()] == [(1, 0.5)]
        assert actor.register_adapter("actor.sft", PAYLOAD, {}, {}, "job1").result() == 1
        np.testing.assert_array_equal(actor.resolve("models:/actor.sft/1").result().params["w"], PAYLOAD["w"])
        with pytest.raises(UnknownObject, match="possible: 1"):
            actor.resolve("models:/actor.sft/2").result()


def test_a_runs_files_lie_in_its_folder_and_nowhere_else(uri: str, tmp_path: Path) -> None:
    async def story(service: MetricsService) -> None:
        run = await service.open_run("filmed", "evaluation", {})
        await service.keep_file(run, "films/first.mp4", b"once")
        await service.keep_file(run, "films/first.mp4", b"twice")
        (kept,) = (tmp_path / "mlflow" / "runs").rglob("first.mp4")
        assert kept.relative_to(tmp_path / "mlflow" / "runs").parts[-3:] == ("artifacts", "films", "first.mp4")
        assert kept.read_bytes() == b"twice"
        for path in ("../first.mp4", "films/../../x", "/etc/x", "films//x"):
            with pytest.raises(SpecError, match="artifact path"):
                await service.keep_file(run, path, b"no")
        with pytest.raises(UnknownObject, match="run: got 'gone'"):
            await service.keep_file("gone", "films/first.mp4", b"no")
        experiment = mlflow_client(uri).get_experiment_by_name("filmed.evaluation")
        assert experiment is not None
        assert await service.experiment_of(run) == experiment.experiment_id

    serve(uri, tmp_path, story)
