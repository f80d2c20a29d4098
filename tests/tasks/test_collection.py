"""Collecting demonstrations with real hosts: interrupted and gone on with, side by side, and leftovers of the dead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from configs import presets
from configs.errors import Conflict, JoyNexusError
from configs.home import Home
from configs.requests import CollectRequest
from services.environment_client import SessionClient
from services.environment_service import EnvironmentService
from storage.dataset_names import claimed
from storage.demonstrations import LeRobotDataset
from storage.episode_spool import EpisodeSpool
from tasks.collection import collect_demonstrations

EPISODES = 7


class Killed(BaseException):
    """Ends a collection as a signal would: no handler of errors takes it."""


def collect(root: Path, **how: Any) -> dict[str, Any]:
    """Collect Reach-v0 under `root`, with an environment service of its own."""
    asked = {"dataset": "reach", "environment": "reach", "episodes": EPISODES, "hosts": 2, "action_noise": 0.5, **how}

    async def main() -> dict[str, Any]:
        service = EnvironmentService(2)

        async def environments() -> EnvironmentService:
            return service

        try:
            platform: Any = SimpleNamespace(home=Home(root), environments=environments)
            return dict(await collect_demonstrations.fn(platform, CollectRequest.model_validate(asked)))
        finally:
            await service.shutdown()

    return asyncio.run(main())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    root = tmp_path_factory.mktemp("undisturbed")
    return collect(root), contents(root / "datasets" / "reach")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that were asked of hosts."""
    seeds: list[int] = []
    asked_for = SessionClient.each_expert_episode

    async def noted(self: SessionClient, wanted: Sequence[int], noise: float, keep: Any) -> None:
        seeds.extend(wanted)
        await asked_for(self, wanted, noise, keep)

    monkeypatch.setattr(SessionClient, "each_expert_episode", noted)
    return seeds


def kill_after(monkeypatch: pytest.MonkeyPatch, kept: int, root: Path, **how: Any) -> None:
    """Collect until so many episodes are on disk."""
    put, left = EpisodeSpool.put, threading.Semaphore(kept)

    def counted(self: EpisodeSpool, *args: Any) -> None:
        if not left.acquire(blocking=False):  # hosts' episodes are put by several threads
            raise Killed
        put(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(EpisodeSpool, "put", counted)
        with pytest.raises(Killed):
            collect(root, **how)


def test_a_killed_collection_goes_on_where_it_was_and_ends_the_same_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: tuple[dict[str, Any], dict[str, bytes]],
    simulated: list[int],
) -> None:
    report, files = undisturbed
    kill_after(monkeypatch, 5, tmp_path)
    datasets = tmp_path / "datasets"
    assert not (datasets / "reach").exists()
    dead = datasets / ".writing" / "reach.0123abcd"
    dead.mkdir()
    simulated.clear()
    assert collect(tmp_path) == report
    assert len(simulated) == len(set(simulated)) == report["tried"] - 5
    assert contents(datasets / "reach") == files
    assert list((datasets / ".writing").iterdir()) == []


def test_what_was_collected_otherwise_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[int]
) -> None:
    """Another noise makes other episodes of the same seeds."""
    kill_after(monkeypatch, 2, tmp_path, episodes=2, action_noise=2.0)
    simulated.clear()
    report = collect(tmp_path, episodes=2)
    assert len(simulated) == report["tried"]


def test_one_host_gives_what_two_give(tmp_path: Path, undisturbed: tuple[dict[str, Any], dict[str, bytes]]) -> None:
    """But for what the provenance says of the request."""
    collect(tmp_path, hosts=1)
    alone = contents(tmp_path / "datasets" / "reach")
    provenance = "meta/joynexus.json"
    assert {k: v for k, v in alone.items() if k != provenance} == {
        k: v for k, v in undisturbed[1].items() if k != provenance
    }
    told = LeRobotDataset(tmp_path / "datasets" / "reach").provenance["episodes"]
    assert [entry["success"] for entry in told] == [True] * EPISODES
    assert [entry["seed"] for entry in told] == sorted(entry["seed"] for entry in told)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("libero-goal", {}, "expert: got 'libero_goal/"),
        ("pushcube", {"control_mode": "pd_joint_pos"}, "control_mode: got 'pd_joint_pos'; possible: pd_ee_delta_pos,"),
    ],
)
def test_what_no_expert_demonstrates_is_refused_before_a_host_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "presets"
    (folder / "environments").mkdir(parents=True)
    spec = presets.environment(name).model_dump(mode="json") | {"name": "asked"} | changes
    (folder / "environments" / "asked.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setattr(presets, "FOLDER", folder)
    platform: Any = SimpleNamespace(home=Home(tmp_path))  # without services
    request = CollectRequest(dataset="asked", environment="asked", episodes=1)
    with pytest.raises(JoyNexusError) as caught:
        asyncio.run(collect_demonstrations.fn(platform, request))
    assert str(caught.value).startswith(message)


def test_two_collections_of_one_name_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    with claimed(tmp_path / "datasets", "reach"), pytest.raises(Conflict, match="a name that nobody is writing"):
        collect(tmp_path)
