"""Episodes taken out: of a rollout's partition or of a dataset, as a LeRobot dataset and as an mp4 an episode.

    <folder>/lerobot/    the dataset, with rewards; meta/joynexus.json says whence, and seed and outcome of each episode
    <folder>/films/      episode-000000-seed-20000-success.mp4 …, all cameras side by side

A frame of a rollout is a decision. Where a policy decides on chunks of several actions, its `action` is the whole chunk
of H × A numbers and its reward the chunk's: the pictures between were never rendered. Recorded evaluations have every
step.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs import seeds as seed_ranges
from configs.algorithm import RolloutSpec
from configs.backend import BackendConfig
from configs.errors import DataFault, SpecError, UnknownObject, refusal
from services.environment_loops import VERSIONS
from services.films import side_by_side, write_film
from services.recording import Episode, total_reward, write_dataset
from services.rollout import EXECUTED, FEATURE
from storage.atomic import WRITING, new_folder
from storage.demonstrations import LeRobotDataset
from storage.partitions import PartitionAttributes, PartitionStore

DATASET, FILMS = "lerobot", "films"
_STAGE = "export"


def export_rollout(
    store: PartitionStore, partition_id: str, job: dict[str, Any], backend: BackendConfig, folder: Path
) -> int:
    """Write a rollout's episodes below a new `folder`; returns how many.

    Args:
        store: the partitions.
        partition_id: which.
        job: its descriptor.
        backend: what its workload was compiled to.
        folder: must not exist.

    Raises:
        UnknownObject: the partition is gone.
        SpecError: it holds no pictures, or no policy collected it.
        Conflict: the folder exists.
    """
    attributes = store.attributes(partition_id)
    _check_exportable(attributes)
    assert backend.environment is not None
    assert isinstance(backend.algorithm, RolloutSpec)
    horizon = attributes.fields[EXECUTED].shape[1]
    provenance = {
        "source": "rollout",
        "job": job["job_id"],
        "partition": partition_id,
        "flow_run": job["flow_run_id"],
        "policy_key": backend.policy_key,
        "policy_version": attributes.policy_version,
        "schema_signature": attributes.schema_signature,
        "rollout": int(job["metadata"]["rollout"]),
        "algorithm_seed": backend.algorithm.seed,
        "actions_a_frame": horizon,
        "environment": backend.environment.model_dump(mode="json"),
        "versions": json.loads(str(attributes.labels.get(VERSIONS, "{}"))),
    }
    with _new_folder(folder) as building:
        episodes = rollout_episodes(store, attributes, backend.algorithm, int(job["metadata"]["rollout"]))
        count = write_dataset(building / DATASET, episodes, backend.environment, provenance, actions_a_frame=horizon)
        _finish(building)
    return count


def export_dataset(dataset: Path, folder: Path) -> int:
    """Copy a dataset below a new `folder` and film its episodes; returns how many.

    Raises:
        DataFault: it cannot be read.
        Conflict: the folder exists.
    """
    if links := [path.relative_to(dataset) for path in dataset.rglob("*") if path.is_symlink()]:
        # What they lead to is not the dataset's, perhaps not even its reader's to hand out.
        raise DataFault(refusal(f"files of dataset {dataset.name}", str(links[0]), "files, no links", "copy it anew"))
    with _new_folder(folder) as building:
        shutil.copytree(dataset, building / DATASET)
        return _finish(building)


def rollout_episodes(
    store: PartitionStore, attributes: PartitionAttributes, algorithm: RolloutSpec, rollout: int
) -> Iterator[Episode]:
    """The episodes of a rollout in order of their numbers (environment e's k-th is e + k × num_envs).

    Those that the rollout's end cut are among them, with `ended` false. For arrays and facts see `write_dataset`.
    """
    fields = [
        name
        for name in attributes.fields
        if name.startswith("image.")
        or name in ("proprioception", EXECUTED, "reward", "valid", "done", "success", "instruction_index")
    ]
    store.reset_cursor(attributes.partition_id, _STAGE)
    count = attributes.sample_count
    meta = store.get_meta(attributes.partition_id, task_name=_STAGE, data_fields=fields, batch_size=count)
    assert meta is not None
    data = store.get_data(meta)
    store.reset_cursor(attributes.partition_id, _STAGE)
    told = attributes.row_instructions(count, data.get("instruction_index"))
    num_envs, size = algorithm.num_envs, algorithm.episodes_per_start
    found: dict[int, NDArray[np.intp]] = {}  # {episode: its rows}
    for e in range(num_envs):
        rows = np.arange(e, count, num_envs)
        ends = np.flatnonzero(data["done"][rows]) + 1
        for k, part in enumerate(np.split(rows, ends)):
            if len(part):
                found[e + k * num_envs] = part
    for number, rows in sorted(found.items()):
        valid = data["valid"][rows]
        actions = np.where(valid[..., None], data[EXECUTED][rows], np.float32(0))
        arrays = {
            **{name: data[name][rows] for name in fields if name.startswith("image.")},
            "proprioception": data["proprioception"][rows],
            "action": actions.reshape(len(rows), -1),
            "reward": np.where(valid, data["reward"][rows], 0).sum(axis=1).astype(np.float32),
        }
        yield (
            arrays,
            {
                "seed": seed_ranges.group_seed(algorithm.seed, rollout, number, size),
                "success": bool(data["done"][rows[-1]] and data["success"][rows[-1]]),
                "ended": bool(data["done"][rows[-1]]),
                "instruction": told[int(rows[0])],
                "return": total_reward(arrays["reward"]),
            },
        )


def _check_exportable(attributes: PartitionAttributes) -> None:
    where = f"partition {attributes.partition_id}"
    if attributes.policy_version is None:
        raise SpecError(
            refusal(where, "samples of a dataset", "a rollout's partition", "export the dataset that they come from")
        )
    if FEATURE in attributes.fields:
        raise SpecError(
            refusal(
                where,
                "features in place of pictures",
                "a partition with pictures",
                "declare resources.reuse_features: never, or evaluate with `record`",
            )
        )
    if EXECUTED not in attributes.fields:
        known = ", ".join(attributes.fields)
        raise SpecError(refusal(where, known, f"a partition with the field {EXECUTED}", "roll out again"))


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    try:
        with new_folder(folder, "folder") as building:
            yield building
    finally:
        with contextlib.suppress(OSError):  # another one builds beside us
            (folder.parent / WRITING).rmdir()


def _finish(building: Path) -> int:
    """Film the episodes of the dataset that is there; how many there are."""
    with contextlib.suppress(OSError):
        (building / WRITING).rmdir()
    dataset = LeRobotDataset(building / DATASET)
    with contextlib.closing(dataset):
        told = _told(dataset)
        (building / FILMS).mkdir()
        for number, (start, stop) in enumerate(dataset.episode_ranges.tolist()):
            pictures = dataset.sample(np.arange(start, stop), 1)["images"]
            name = f"episode-{number:06d}"
            if number in told:
                seed, success = told[number]
                name += f"-seed-{seed}-{'success' if success else 'failure'}"
            film = building / FILMS / f"{name}.mp4"
            write_film(film, side_by_side(list(pictures.values())), max(round(dataset.fps), 1))
        return dataset.num_episodes


def _told(dataset: LeRobotDataset) -> dict[int, tuple[int, bool]]:
    """{episode: (seed, success)}, where its provenance says so; what others wrote there is left alone."""
    episodes = dataset.provenance.get("episodes")
    found = enumerate(episodes if isinstance(episodes, list) else [])
    return {
        number: (facts["seed"], facts["success"])
        for number, facts in found
        if isinstance(facts, dict) and isinstance(facts.get("seed"), int) and isinstance(facts.get("success"), bool)
    }


def partition_of(store: PartitionStore, source: str, datasets: Path) -> str:
    """The partition that `source` names by its own id or its job's.

    Raises:
        UnknownObject: there is none (any more); what there is gets listed.
    """
    known = store.list()
    for partition_id in known:
        if source in (partition_id, partition_id.split(".", 1)[0]):
            return partition_id
    names = sorted(p.name for p in datasets.glob("[!.]*") if p.is_dir()) if datasets.is_dir() else []
    possible = f"partitions {', '.join(known[:8]) or 'none'}; datasets {', '.join(names[:8]) or 'none'}"
    raise UnknownObject(refusal("source", source, possible, "a partition is cleared when its job has been trained"))
