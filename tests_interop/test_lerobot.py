"""The real lerobot opens what is written here, and here opens what it writes: 0.3.2 for v2.1, 0.4.4 for v3.0.

Run by `make test-interop`. One process a version does all its steps, since it takes long to start.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import ColumnsSpec
from storage.demonstrations import LeRobotDataset
from tests.storage.lerobot_folders import CAMERAS, FPS, LENGTHS, OFFSET, TASKS, TOTAL, episodes, number, write

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-interop"
PEERS = {"v2.1": "0.3.2", "v3.0": "0.4.4"}
CODECS = {"images": None, "h264": "libx264", "av1": "libsvtav1"}
HORIZON = 3
OWN_NAMES = {"base": "image", "wrist": "wrist_image", "state": "state", "action": "actions"}  # as openpi's datasets
THEIR_NAMES = {
    **{camera: f"observation.images.{camera}" for camera in CAMERAS},
    "state": "observation.state",
    "action": "action",
}
COLUMNS = ColumnsSpec(
    cameras={camera: {"key": OWN_NAMES[camera]} for camera in CAMERAS}, state="state", action="actions"
)
EDGES = np.cumsum([0, *LENGTHS])


@dataclass
class Exchanged:
    """Where one version's datasets lie, and what lerobot read."""

    version: str
    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        return dict(np.load(self.folder / f"{name}.npz"))


@pytest.fixture(scope="module", params=sorted(PEERS))
def exchanged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchanged:
    """Datasets written here, in all codecs, and datasets written there; each read by lerobot."""
    version, folder = request.param, tmp_path_factory.mktemp("interop")
    given: dict[str, Any] = {"tasks": np.array(TASKS)}
    for i, episode in enumerate(episodes()):
        given |= {f"images_{i}_{camera}": frames for camera, frames in episode["images"].items()}
        given |= {f"state_{i}": episode["state"], f"action_{i}": episode["action"]}
    np.savez(folder / "episodes.npz", **given)
    plan = []
    for name, codec in CODECS.items():
        root = write(folder / f"ours-{name}", version=version, video_codec=codec)
        plan.append({"do": "read", "root": str(root)})
    for name, videos, names in (("images", False, OWN_NAMES), ("videos", True, THEIR_NAMES)):
        root = folder / f"theirs-{name}"
        plan.append({"do": "write", "root": str(root), "videos": videos, "fps": FPS, "names": names})
        plan.append({"do": "read", "root": str(root), "action": names["action"]})
    for step in plan:
        step |= {"horizon": HORIZON, "out": f"{step['root']}.npz", "episodes": str(folder / "episodes.npz")}
    (folder / "plan.json").write_text(json.dumps(plan))
    environment = os.environ | {
        "PYTHONPATH": str(VENV / f"lerobot=={PEERS[version]}"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hugging-face"),
        "OMP_NUM_THREADS": "1",
        "SVT_LOG": "1",  # errors alone
    }
    command = [str(VENV / "bin/python"), str(ROOT / "tests_interop/peer.py"), str(folder / "plan.json")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return Exchanged(version, folder)


@pytest.mark.parametrize("codec", CODECS)
def test_lerobot_reads_what_is_written_here(exchanged: Exchanged, codec: str) -> None:
    """Frames, states, actions, tasks, bounds, and chunks that end with their episode."""
    theirs = exchanged.read(f"ours-{codec}")
    ours = LeRobotDataset(exchanged.folder / f"ours-{codec}")
    every = np.arange(TOTAL)
    sample = ours.sample(every, HORIZON)
    given = episodes()
    for camera in CAMERAS:
        frames = theirs[f"observation.images.{camera}"]
        assert [number(frame) for frame in frames] == (every + OFFSET[camera]).tolist()
        if CODECS[codec] is None:
            np.testing.assert_array_equal(frames, np.concatenate([e["images"][camera] for e in given]))
        # Two builds of FFmpeg turn the same planes into RGB.
        assert np.abs(frames.astype(int) - sample["images"][camera]).max() <= 3
    np.testing.assert_array_equal(theirs["observation.state"], np.concatenate([e["state"] for e in given]))
    np.testing.assert_array_equal(theirs["action"], np.concatenate([e["action"] for e in given]))
    np.testing.assert_array_equal(theirs["chunk"], sample["action"])
    np.testing.assert_array_equal(theirs["is_pad"], sample["action_is_pad"])
    assert theirs["task"].tolist() == np.repeat(TASKS, LENGTHS).tolist() == sample["instructions"]
    assert theirs["bounds"].tolist() == ours.episode_ranges.tolist() == np.stack([EDGES[:-1], EDGES[1:]], 1).tolist()
    assert theirs["index"].ravel().tolist() == every.tolist()
    for key in ("observation.state", "action"):
        for stat in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(theirs[f"stats/{key}/{stat}"], ours.stats[key][stat], rtol=1e-6)


@pytest.mark.parametrize("kind", ["images", "videos"])
def test_what_lerobot_writes_is_read_here(exchanged: Exchanged, kind: str) -> None:
    """As lerobot reads it itself; image columns under names of their own, bound by declaration."""
    names = OWN_NAMES if kind == "images" else THEIR_NAMES
    theirs = exchanged.read(f"theirs-{kind}")
    root = exchanged.folder / f"theirs-{kind}"
    ours = LeRobotDataset(root, COLUMNS if kind == "images" else None)
    sample = ours.sample(np.arange(TOTAL), HORIZON)
    assert json.loads((root / "meta/info.json").read_text())["codebase_version"] == exchanged.version
    assert ours.cameras == CAMERAS
    for camera in CAMERAS:
        frames = sample["images"][camera]
        assert [number(frame) for frame in frames] == [i + OFFSET[camera] for i in range(TOTAL)]
        assert np.abs(frames.astype(int) - theirs[names[camera]]).max() <= (0 if kind == "images" else 3)
    np.testing.assert_array_equal(sample["proprioception"], theirs[names["state"]])
    np.testing.assert_array_equal(sample["action"], theirs["chunk"])
    np.testing.assert_array_equal(sample["action_is_pad"], theirs["is_pad"])
    assert sample["instructions"] == theirs["task"].tolist() == np.repeat(TASKS, LENGTHS).tolist()
    assert ours.episode_ranges.tolist() == theirs["bounds"].tolist()
    for role, spec in (("state", ours.state_statistics), ("action", ours.action_statistics)):
        np.testing.assert_allclose(spec.mean, theirs[f"stats/{names[role]}/mean"], rtol=1e-6)
        np.testing.assert_allclose(spec.std, theirs[f"stats/{names[role]}/std"], rtol=1e-6)
