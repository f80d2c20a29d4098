"""Episodes taken out of a rollout's partition and of a dataset: which rows, in what order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import seeds
from configs.backend import BackendConfig
from configs.errors import Conflict, DataFault, SpecError, UnknownObject
from services.environment_loops import VERSIONS
from services.rollout_export import export_dataset, export_rollout, partition_of
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionStore
from storage.video import VideoReader
from tests.services import policies

STEPS, ENVS = 4, 2
"""Environment 0: an episode of 3 steps that succeeds, and 1 step of the next; environment 1: one that is cut."""
DONE = np.array([[0, 0], [0, 0], [1, 0], [0, 0]], bool)


def rollout(root: Path, **changes: Any) -> tuple[PartitionStore, dict[str, Any], BackendConfig, dict[str, np.ndarray]]:
    """A partition of 4 chunks of 2 environments, its job, its workload and its fields."""
    backend = policies.rollouts("ada", "ppo")
    horizon = backend.policy.action_module.horizon
    n = STEPS * ENVS
    random = np.random.default_rng(0)
    valid = np.ones((n, horizon), bool)
    valid[4, 1:] = False  # the chunk in which environment 0's episode ends
    data = {
        "image.top": random.integers(0, 256, (n, 64, 64, 3), dtype=np.uint8),
        "proprioception": random.normal(size=(n, 2)).astype(np.float32),
        "executed": random.uniform(-1, 1, (n, horizon, 2)).astype(np.float32),
        "reward": random.normal(size=(n, horizon)).astype(np.float32),
        "valid": valid,
        "done": DONE.reshape(-1),
        "success": DONE.reshape(-1),
        "instruction_index": np.array([0, 1] * STEPS, np.int32),
    }
    data = {name: value for name, value in {**data, **changes}.items() if value is not None}
    job = policies.job(backend) | {"flow_run_id": "run-1", "metadata": {"rollout": 5}}
    store = PartitionStore(root / "partitions")
    store.put(
        job["partition_id"],
        data,
        tenant_id="ada",
        schema_signature=backend.policy.schema_signature,
        policy_version=9,
        chunk=4,
        instructions=["go left", "go right"],
        labels={"episodes": 1, VERSIONS: '{"gymnasium": "1.4.0"}'},
    )
    return store, job, backend, data


def test_a_rollouts_episodes_are_told_apart_and_keep_what_was_executed(tmp_path: Path) -> None:
    """Episodes 0 (rows 0, 2, 4), 1 (rows 1, 3, 5, 7, cut) and 2 (row 6, cut), numbered as their seeds are."""
    store, job, backend, data = rollout(tmp_path)
    horizon = backend.policy.action_module.horizon
    out = tmp_path / "out"
    assert export_rollout(store, job["partition_id"], job, backend, out) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "partitions"]
    assert sorted(p.name for p in out.iterdir()) == ["films", "lerobot"]
    dataset = LeRobotDataset(out / "lerobot")
    assert dataset.fps == round(20 / horizon)
    rows = [0, 2, 4, 1, 3, 5, 7, 6]
    assert dataset.episode_ranges.tolist() == [[0, 3], [3, 7], [7, 8]]
    read = dataset.sample(np.arange(8), 1)
    np.testing.assert_array_equal(read["images"]["top"], data["image.top"][rows])
    np.testing.assert_array_equal(read["proprioception"], data["proprioception"][rows])
    assert read["instructions"] == ["go left"] * 3 + ["go right"] * 4 + ["go left"]
    executed, reward = data["executed"].copy(), data["reward"].copy()
    executed[4, 1:], reward[4, 1:] = 0, 0  # behind the end
    np.testing.assert_array_equal(read["action"][:, 0], executed.reshape(8, -1)[rows])
    np.testing.assert_allclose(dataset.reward, reward.astype(np.float64).sum(axis=1)[rows], rtol=1e-6)
    told = dataset.provenance
    assert [(e["success"], e["ended"]) for e in told["episodes"]] == [(True, True), (False, False), (False, False)]
    wanted = [seeds.training_seed(backend.algorithm.seed, 5, number) for number in range(3)]
    assert [e["seed"] for e in told["episodes"]] == wanted
    facts = ("source", "job", "policy_version", "flow_run", "actions_a_frame")
    assert [told[name] for name in facts] == ["rollout", "ada-0", 9, "run-1", horizon]
    assert told["versions"] == {"gymnasium": "1.4.0"}
    films = sorted((out / "films").iterdir())
    assert [film.name for film in films] == [
        f"episode-{i:06d}-seed-{seed}-{'success' if i == 0 else 'failure'}.mp4" for i, seed in enumerate(wanted)
    ]
    video = VideoReader(films[1])
    assert (len(video), video.size) == (4, (64, 64))
    video.close()
    with pytest.raises(Conflict, match="folder: got 'out'"):
        export_rollout(store, job["partition_id"], job, backend, out)


def test_what_holds_no_pictures_is_refused_with_the_way_to_keep_them(tmp_path: Path) -> None:
    kept = {"image.top": None, "feature.action_tokens": np.zeros((8, 4, 8), np.float32)}
    store, job, backend, _ = rollout(tmp_path, **kept)
    with pytest.raises(SpecError, match=r"partition ada-0: got 'features .*declare resources.reuse_features: never"):
        export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_batch_of_demonstrations_is_no_rollout(tmp_path: Path) -> None:
    backend = policies.backend("bob")
    job = policies.put_demonstrations(tmp_path / "partitions", backend)
    store = PartitionStore(tmp_path / "partitions")
    with pytest.raises(SpecError, match="got 'samples of a dataset'; possible: a rollout's partition; export the"):
        export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")


def test_a_partition_is_found_by_its_job_and_what_there_is_gets_listed(tmp_path: Path) -> None:
    store, job, _, _ = rollout(tmp_path)
    (tmp_path / "datasets" / "reach").mkdir(parents=True)
    (tmp_path / "datasets" / ".writing").mkdir()
    assert partition_of(store, job["job_id"], tmp_path / "datasets") == job["partition_id"]
    with pytest.raises(UnknownObject, match="source: got 'gone'; possible: partitions ada-0; datasets reach; a part"):
        partition_of(store, "gone", tmp_path / "datasets")


def test_a_dataset_is_copied_and_filmed(tmp_path: Path) -> None:
    store, job, backend, _ = rollout(tmp_path)
    export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")
    assert export_dataset(tmp_path / "out" / "lerobot", tmp_path / "again") == 3
    for part in ("lerobot", "films"):
        first, second = (
            {p.relative_to(at): p.read_bytes() for p in at.rglob("*") if p.is_file()}
            for at in (tmp_path / "out" / part, tmp_path / "again" / part)
        )
        assert first == second


def test_a_dataset_with_links_is_not_copied(tmp_path: Path) -> None:
    """What they lead to would be handed out."""
    store, job, backend, _ = rollout(tmp_path)
    export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")
    (tmp_path / "secret.txt").write_text("theirs")
    (tmp_path / "out/lerobot/meta/leak").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DataFault, match="files of dataset lerobot: got 'meta/leak'; possible: files, no links"):
        export_dataset(tmp_path / "out" / "lerobot", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("episodes", [3, [3], [{"seed": 1}], [{"seed": "../../evil", "success": True}]])
def test_what_others_say_of_episodes_is_no_part_of_a_path(tmp_path: Path, episodes: object) -> None:
    store, job, backend, _ = rollout(tmp_path)
    export_rollout(store, job["partition_id"], job, backend, tmp_path / "out")
    told = tmp_path / "out/lerobot/meta/joynexus.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"episodes": episodes}))
    export_dataset(tmp_path / "out" / "lerobot", tmp_path / "again")
    films = [path.name for path in sorted((tmp_path / "again" / "films").iterdir())]
    assert films == ["episode-000000.mp4", "episode-000001.mp4", "episode-000002.mp4"]
