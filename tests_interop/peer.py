"""Writes and reads datasets with the real lerobot, in its own interpreter; knows nothing of this project.

    python peer.py PLAN.json

The plan is a list of steps, carried out in order: {"do": "write", "root", "episodes", "fps", "videos", "names"} makes a
dataset of an .npz with images_I_CAMERA, state_I, action_I and tasks; {"do": "read", "root", "out", "horizon"} writes
what each frame holds to an .npz.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset


def write(step: dict[str, Any]) -> None:
    """Record episodes as lerobot's users do: frame by frame."""
    given = np.load(step["episodes"])
    names: dict[str, str] = step["names"]  # {camera, "state" or "action": its column}
    cameras = [name for name in names if name not in ("state", "action")]
    features: dict[str, Any] = {
        names[camera]: {
            "dtype": "video" if step["videos"] else "image",
            "shape": given[f"images_0_{camera}"].shape[1:],
            "names": ["height", "width", "channels"],
        }
        for camera in cameras
    }
    for vector in ("state", "action"):
        width = given[f"{vector}_0"].shape[1]
        shown = [f"{vector}_{i}" for i in range(width)]
        features[names[vector]] = {"dtype": "float32", "shape": (width,), "names": shown}
    dataset = LeRobotDataset.create(
        "peer/written", step["fps"], features, root=step["root"], use_videos=step["videos"], robot_type="none"
    )
    task_apart = "task" in inspect.signature(dataset.add_frame).parameters  # 0.3.2
    for number, task in enumerate(given["tasks"].tolist()):
        for t in range(len(given[f"state_{number}"])):
            frame = {names[camera]: given[f"images_{number}_{camera}"][t] for camera in cameras}
            frame |= {names[vector]: given[f"{vector}_{number}"][t] for vector in ("state", "action")}
            if task_apart:
                dataset.add_frame(frame, task=task)
            else:
                dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()


def read(step: dict[str, Any]) -> None:
    """Every frame as lerobot gives it, with a chunk of actions."""
    plain = LeRobotDataset("peer/read", root=step["root"])
    action = step.get("action", "action")
    offsets = [i / plain.fps for i in range(step["horizon"])]
    chunked = LeRobotDataset("peer/read", root=step["root"], delta_timestamps={action: offsets})
    cameras = list(plain.meta.camera_keys)
    vectors = [
        key
        for key, feature in plain.features.items()
        if feature["dtype"] not in ("image", "video") and key not in cameras
    ]
    rows: dict[str, list[Any]] = {key: [] for key in (*cameras, *vectors, "task", "chunk", "is_pad")}
    for index in range(len(plain)):
        item = plain[index]
        for camera in cameras:
            picture = item[camera].numpy().transpose(1, 2, 0)  # float32 in [0, 1], channels first
            rows[camera].append(np.rint(picture * 255).astype(np.uint8))
        for key in vectors:
            rows[key].append(np.asarray(item[key]))
        rows["task"].append(item["task"])
        with_chunk = chunked[index]
        rows["chunk"].append(with_chunk[action].numpy())
        rows["is_pad"].append(with_chunk[f"{action}_is_pad"].numpy())
    found = {key: np.stack(values) for key, values in rows.items()}
    for key, stats in plain.meta.stats.items():
        found |= {f"stats/{key}/{name}": np.asarray(value) for name, value in stats.items()}
    found["bounds"] = np.array([bounds(plain, i) for i in range(plain.num_episodes)])
    np.savez(step["out"], **found)


def bounds(dataset: LeRobotDataset, episode: int) -> tuple[int, int]:
    """First frame of an episode, and the one after its last."""
    if hasattr(dataset, "episode_data_index"):  # 0.3.2
        index = dataset.episode_data_index
        return int(index["from"][episode]), int(index["to"][episode])
    row = dataset.meta.episodes[episode]
    return int(row["dataset_from_index"]), int(row["dataset_to_index"])


if __name__ == "__main__":
    for step in json.loads(Path(sys.argv[1]).read_text()):
        {"write": write, "read": read}[step["do"]](step)
