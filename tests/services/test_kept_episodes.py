"""Evaluations and rollouts over real hosts, and what is kept of them: films in MLflow, a dataset, an export."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import presets
from services import lookup
from services.environment_loops import EnvironmentLoops, kept_films
from services.environment_service import EnvironmentService
from services.metrics import MetricsService
from services.rollout import Observation, Prediction
from services.rollout_export import export_rollout
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore
from storage.registry import mlflow_client
from tests.mlflow_database import migrated_database
from tests.services import policies

REACH = presets.environment("reach")


async def to_the_right(observation: Observation) -> Prediction:
    """Two steps towards the red disc where that lies to the right, farther than the environment moves; else none."""
    rows = len(observation["instructions"])
    action = np.zeros((rows, 2, 2), np.float32)
    for row, (picture, place) in enumerate(
        zip(observation["images"]["top"].astype(int), observation["proprioception"], strict=True)
    ):
        y, x = np.nonzero((picture[..., 0] > 180) & (picture[..., 1] < 100))
        goal = (x.mean() + 0.5) / 32 - 1, 1 - (y.mean() + 0.5) / 32
        if goal[0] > 0:
            action[row] = (np.float32(goal) - place) / 0.2
    return Prediction(action / 2, action, np.zeros((rows, 2), np.float32), np.zeros(rows, np.float32))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The resident services, found in this process as a worker finds them."""
    services: dict[str, Any] = {}

    async def peer(name: str, **_: Any) -> Any:
        return services[name]

    monkeypatch.setattr(lookup, "peer", peer)
    return services


def test_an_evaluation_is_filmed_and_recorded_and_comes_out_as_without(tmp_path: Path, hosts: dict[str, Any]) -> None:
    (tmp_path / "mlflow").mkdir()
    uri = migrated_database(tmp_path / "mlflow")
    config = policies.policy("ada", horizon=2)

    async def main() -> None:
        hosts[lookup.ENVIRONMENTS] = EnvironmentService(2)
        hosts[lookup.METRICS] = metrics = MetricsService(uri, str(tmp_path / "mlflow" / "artifacts"), 60)
        loops = EnvironmentLoops(tmp_path / "partitions", 128, tmp_path / "datasets")
        how: dict[str, Any] = {"episodes": 10, "first_seed": 40_000, "num_envs": 3, "hosts": 2, "blanked": False}
        try:
            plain, nothing = await loops.evaluate("ada", REACH, to_the_right, config, 7, run_id="plain", **how)
            kept, films = await loops.evaluate(
                "ada",
                REACH,
                to_the_right,
                config,
                7,
                run_id="kept",
                filmed=True,
                record="kept",
                provenance={"source": "evaluation", "flow_run": "run-1"},
                **how,
            )
            assert (plain, nothing) == (kept, {})
            first = {ok: min(n for n, success in kept.success.items() if success == ok) for ok in (True, False)}
            assert {name: number for name, (number, _) in films.items()} == {
                "success": first[True],
                "failure": first[False],
            }
            run = await metrics.open_run("ada", "evaluation", {})
            linked = await kept_films(run, "reach-version-7", films)
            assert [film["artifact"] for film in linked] == [
                f"films/reach-version-7-{name}-seed-{number}.mp4" for name, (number, _) in films.items()
            ]
            client = mlflow_client(uri)
            assert {entry.path for entry in client.list_artifacts(run, "films")} == {f["artifact"] for f in linked}
            fetched = Path(client.download_artifacts(run, linked[0]["artifact"], str(tmp_path)))
            assert fetched.read_bytes() == films["success"][1]
            assert await kept_films("gone", "reach", films) == [], "an evaluation stands without its films"
        finally:
            await hosts[lookup.ENVIRONMENTS].shutdown()
            await metrics.close()
        dataset = LeRobotDataset(tmp_path / "datasets" / "kept")
        assert (dataset.num_episodes, len(dataset)) == (10, sum(kept.length.values()))
        told = dataset.provenance
        assert [entry["success"] for entry in told["episodes"]] == [kept.success[n] for n in range(10)]
        assert [entry["seed"] for entry in told["episodes"]] == list(range(40_000, 40_010))
        assert (told["policy_version"], told["flow_run"], told["environment"]["name"]) == (7, "run-1", "reach")
        assert "gymnasium" in told["versions"]
        assert np.abs(dataset.action).max() == 1.0, "as they were executed"

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_rollout_is_exported_from_its_partition(tmp_path: Path, hosts: dict[str, Any]) -> None:
    found = policies.backend("ada", "rl", horizon=2)
    resources = found.resources.model_copy(update={"reuse_features": "never"})
    backend = found.model_copy(update={"resources": resources})
    job = policies.job(backend) | {"flow_run_id": "run-1", "metadata": {"rollout": 0}, "behavior_policy_version": 3}

    async def main() -> None:
        hosts[lookup.ENVIRONMENTS] = EnvironmentService(1)
        loops = EnvironmentLoops(tmp_path / "partitions", 128, tmp_path / "datasets")
        try:
            summary = await loops.rollout(backend, job, 3, to_the_right, to_the_right)
            assert await loops.written(job["partition_id"]) == summary
        finally:
            await hosts[lookup.ENVIRONMENTS].shutdown()
        store = PartitionStore(tmp_path / "partitions")
        episodes = export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")
        dataset = LeRobotDataset(tmp_path / "out" / "lerobot")
        told = dataset.provenance
        ended = [entry for entry in told["episodes"] if entry["ended"]]
        assert len(ended) == summary["episodes"]
        assert sum(entry["success"] for entry in ended) == summary["successes"]
        assert (len(dataset), episodes) == (summary["samples"], dataset.num_episodes)
        assert (told["policy_version"], told["actions_a_frame"], dataset.action_width) == (3, 2, 4)
        assert told["versions"]["python"] == platform.python_version()
        assert np.abs(dataset.action).max() <= 1.0, "as they were executed"
        assert dataset.reward is not None
        for (start, stop), entry in zip(dataset.episode_ranges.tolist(), told["episodes"], strict=True):
            assert dataset.reward[start:stop].sum() == pytest.approx(entry["return"], abs=1e-5)

    asyncio.run(asyncio.wait_for(main(), 200))
