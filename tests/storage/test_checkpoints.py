"""Checkpoints: round trip to the bit with optimizer, torn files noticed, one content a version, killed writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import storage.checkpoints
from configs.errors import Conflict, DataFault, SpecError, UnknownObject
from storage.checkpoints import CheckpointStore, arrays_equal

PARAMS = {
    "head.weight": np.array([[1.5, -0.0], [np.nan, np.inf]], dtype=np.float32),
    "log_std": np.array(-0.7, dtype=np.float32),
    "steps": np.array([2**62 + 1], dtype=np.int64),
}
OPTIMIZER = {
    "head.weight.exp_avg": np.full((2, 2), 1e-30, dtype=np.float32),
    "rng": np.arange(256, dtype=np.uint8),
}
MANIFEST = {"tenant_id": "push", "schema_signature": "ab" * 32, "learning_rate": 0.1}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty store."""
    return CheckpointStore(tmp_path / "checkpoints" / "rl")


def save(store: CheckpointStore, version: int = 1, **changes: object) -> storage.checkpoints.CheckpointRef:
    """Save the example."""
    return store.save(**{"version": version, "params": PARAMS, "optimizer": OPTIMIZER, "manifest": MANIFEST, **changes})


def test_round_trip_to_the_bit(store: CheckpointStore) -> None:
    """NaN, negative zero, scalars, large integers and the optimizer's state come back as they were."""
    ref = save(store)
    found = CheckpointStore(store._root).load(with_optimizer=True)
    assert arrays_equal(found.params, PARAMS)
    assert arrays_equal(found.optimizer, OPTIMIZER)
    assert found.manifest == MANIFEST
    assert (found.version, found.digest) == (1, ref.digest)
    assert found.params["log_std"].shape == ()


def test_without_optimizer(store: CheckpointStore) -> None:
    """It is read only when asked for; asking where none was saved fails with a message."""
    save(store, 1)
    save(store, 2, optimizer=None)
    assert store.load(1).optimizer is None
    assert store.load(2).optimizer is None
    with pytest.raises(DataFault, match="got 'optimizer'; possible: params; it was not saved"):
        store.load(2, with_optimizer=True)


def test_newest_is_the_default(store: CheckpointStore) -> None:
    """Versions are ordered as numbers; gaps are fine."""
    for version in (9, 10, 2):
        save(store, version, params={"x": np.array([version])})
    assert store.versions() == [2, 9, 10]
    assert int(store.load().params["x"][0]) == 10
    assert int(store.load(9).params["x"][0]) == 9


def test_unknown_version_lists_the_known(store: CheckpointStore) -> None:
    """With none saved, and with others saved."""
    with pytest.raises(UnknownObject, match="got None; possible: none"):
        store.load()
    save(store, 3)
    with pytest.raises(UnknownObject, match="got 4; possible: 3"):
        store.load(4)


def test_saved_again(store: CheckpointStore) -> None:
    """The same contents are done once; other contents under one version are refused and change nothing."""
    ref = save(store)
    assert save(store) == ref
    assert save(store, manifest=dict(reversed(MANIFEST.items()))) == ref
    for other in ({"params": {"x": np.zeros(1)}}, {"optimizer": None}, {"manifest": {}}):
        with pytest.raises(Conflict, match="saved before with other contents"):
            save(store, **other)
    assert arrays_equal(store.load(with_optimizer=True).params, PARAMS)


@pytest.mark.parametrize("name", ["params.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_torn_file_is_noticed(store: CheckpointStore, name: str, harm: str) -> None:
    """A cut, altered or missing file is an error, never other numbers."""
    path = Path(save(store).path) / name
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(bytes(content if harm == "flip" else content[:-4]))
    with pytest.raises(DataFault, match=f"00000001/{name}: (torn|missing)"):
        store.load(with_optimizer=True)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": 99, "files": {}, "manifest": {}})])
def test_unreadable_manifest(store: CheckpointStore, text: str) -> None:
    """A torn manifest, or one of another format."""
    (Path(save(store).path) / "manifest.json").write_text(text)
    with pytest.raises(DataFault, match=r"manifest\.json cannot be read"):
        store.load()


def _die_while_saving(root: Path) -> None:
    write_payload = storage.checkpoints.write_payload

    def dying(folder: Path, files: dict[str, bytes]) -> None:
        write_payload(folder, dict(list(files.items())[:1]))
        os.kill(os.getpid(), signal.SIGKILL)

    storage.checkpoints.write_payload = dying
    save(CheckpointStore(root), 2)


def test_killed_writer_leaves_the_former_version(store: CheckpointStore) -> None:
    """The newest whole version stays the newest; the same version can then be saved."""
    save(store, 1)
    process = multiprocessing.get_context("spawn").Process(target=_die_while_saving, args=(store._root,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert store.versions() == [1]
    assert store.load().version == 1
    save(store, 2)
    assert store.load().version == 2
    assert store.sweep() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": -1}, "0 or more"),
        ({"manifest": {"x": float("nan")}}, "manifest: not JSON"),
        ({"manifest": {"x": object()}}, "manifest: not JSON"),
        ({"params": {"x": np.array(["text"])}}, "numbers or booleans"),
    ],
)
def test_contents_that_cannot_be_stored(store: CheckpointStore, changes: dict, message: str) -> None:
    """Refused before anything is written."""
    with pytest.raises(SpecError, match=message):
        save(store, **changes)
    assert store.versions() == []


def test_names_are_no_paths(store: CheckpointStore) -> None:
    """A name leads nowhere else."""
    with pytest.raises(ValueError, match="no path"):
        save(store, name="../other")


def test_remove(store: CheckpointStore) -> None:
    """Removing twice is no error; other names are untouched."""
    save(store, 1)
    save(store, 1, name="copy")
    assert store.remove(1)
    assert not store.remove(1)
    assert (store.versions(), store.versions("copy")) == ([], [1])
