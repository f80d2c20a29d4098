"""The partition store: whole or not at all, one writer, one cursor a stage, tags a sample, derived columns at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

import storage.partition_arrays
from configs.errors import Conflict, DataFault, SpecError, TenantFault, UnknownObject
from storage.partitions import EncodedFields, PartitionStore, encode_fields

ID = "job1.vla.push.rl"
TAGS = {"tenant_id": "push", "schema_signature": "ab" * 32, "policy_version": 3}


def sample_data(n: int = 10) -> dict[str, np.ndarray]:
    """Fields with a different value in each row; zeros where a lost chunk would go unnoticed."""
    rows = np.arange(n)
    return {
        "image.top": np.tile(rows[:, None, None, None], (1, 32, 32, 3)).astype(np.uint8),
        "proprioception": np.stack([rows, -rows], axis=1).astype(np.float32),
        "action": np.zeros((n, 4, 2), dtype=np.float32),
        "valid": np.tile(rows[:, None] % 2 == 0, (1, 4)),
    }


@pytest.fixture
def store(tmp_path: Path) -> PartitionStore:
    """An empty store."""
    return PartitionStore(tmp_path / "partitions")


def put(store: PartitionStore, partition_id: str = ID, n: int = 10, **changes: object) -> None:
    """Write a partition of `n` rows in chunks of 4."""
    store.put(partition_id, sample_data(n), **{**TAGS, "chunk": 4, "instructions": ["push it"], **changes})


def read_all(store: PartitionStore, fields: list[str], task: str = "train", batch_size: int = 4) -> list[dict]:
    """Every microbatch that the stage still gets."""
    batches = []
    while (meta := store.get_meta(ID, task_name=task, data_fields=fields, batch_size=batch_size)) is not None:
        batches.append(store.get_data(meta))
    return batches


def test_round_trip_in_microbatches(store: PartitionStore) -> None:
    """10 rows by 4 come as 4, 4 and 2, in order, equal to what was put, dtype included."""
    put(store)
    data = sample_data()
    batches = read_all(store, list(data))
    assert [len(b["action"]) for b in batches] == [4, 4, 2]
    for name, wanted in data.items():
        found = np.concatenate([b[name] for b in batches])
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("read_ahead_bytes", [0, 1 << 30])
def test_slices_equal_whole_reads(tmp_path: Path, read_ahead_bytes: int) -> None:
    """Fields too large to keep in memory are read slice by slice, with the same rows."""
    store = PartitionStore(tmp_path, read_ahead_bytes=read_ahead_bytes)
    put(store)
    found = np.concatenate([b["image.top"] for b in read_all(store, ["image.top"], batch_size=3)])
    np.testing.assert_array_equal(found, sample_data()["image.top"])


def test_attributes(store: PartitionStore) -> None:
    """What a partition says of itself is what its writer said, read from another store object."""
    put(store, labels={"num_envs": 2})
    found = PartitionStore(store._root).attributes(ID)
    assert (found.tenant_id, found.schema_signature, found.policy_version) == ("push", "ab" * 32, 3)
    assert (found.sample_count, found.chunk, found.labels) == (10, 4, {"num_envs": 2})
    assert found.fields["action"].shape == (10, 4, 2)
    assert found.row_instructions(2) == ["push it", "push it"]


def test_instructions_by_index(store: PartitionStore) -> None:
    """Several instructions need an index a row, and the index must point at one of them."""
    data = {"action": np.zeros((3, 1, 1), np.float32)}
    tags = {**TAGS, "policy_version": None, "chunk": 2, "instructions": ["push", "pick"]}
    with pytest.raises(SpecError, match="instruction_index"):
        store.put(ID, data, **tags)
    with pytest.raises(TenantFault, match="0 to 1"):
        store.put(ID, {**data, "instruction_index": np.array([0, 1, 2], np.int32)}, **tags)
    store.put(ID, {**data, "instruction_index": np.array([0, 1, 1], np.int32)}, **tags)
    index = read_all(store, ["instruction_index"])[0]["instruction_index"]
    assert store.attributes(ID).row_instructions(3, index) == ["push", "pick", "pick"]


def test_fields_encoded_beforehand_read_like_the_others(store: PartitionStore) -> None:
    """A partition put in two parts equals one put whole: attributes, fields, tags."""
    data = sample_data(10)
    early = {name: data[name] for name in list(data)[:2]}
    late = {name: data[name] for name in list(data)[2:]}
    whole = store.put("job0.vla.push.rl", data, **TAGS, chunk=4)
    parts = store.put(ID, late, encoded=encode_fields(early, 4), **TAGS, chunk=4)
    assert parts.fields == whole.fields
    assert parts.sample_count == whole.sample_count
    for read, expected in zip(read_all(store, list(data)), np.array_split(np.arange(10), [4, 8]), strict=True):
        for name in data:
            np.testing.assert_array_equal(read[name], data[name][expected])


def test_fields_encoded_beforehand_are_held_against_the_rest(store: PartitionStore) -> None:
    data = {"action": np.zeros((3, 1, 1), np.float32)}
    with pytest.raises(SpecError, match="action twice"):
        store.put(ID, data, encoded=encode_fields(data, 2), **TAGS, chunk=2)
    with pytest.raises(SpecError, match="chunk of partition"):
        store.put(ID, {"value": np.zeros(3, np.float32)}, encoded=encode_fields(data, 3), **TAGS, chunk=2)
    with pytest.raises(SpecError, match="same count"):
        store.put(ID, {"value": np.zeros(4, np.float32)}, encoded=encode_fields(data, 2), **TAGS, chunk=2)
    assert store.list() == []


def test_second_writer_is_refused(store: PartitionStore) -> None:
    """The first partition of an id stays as it is."""
    put(store)
    with pytest.raises(Conflict, match=r"partition_id: got 'job1\.vla\.push\.rl'"):
        put(store, n=3)
    assert store.attributes(ID).sample_count == 10
    assert list((store._root / ".writing").iterdir()) == []


def test_later_of_two_writers_at_once_is_refused(store: PartitionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see no partition when they begin; the rename decides, and the loser leaves nothing behind."""
    write = EncodedFields.write

    def overtaken(self: EncodedFields, folder: Path) -> None:
        monkeypatch.setattr(EncodedFields, "write", write)
        put(PartitionStore(store._root), n=7)
        write(self, folder)

    monkeypatch.setattr(EncodedFields, "write", overtaken)
    with pytest.raises(Conflict):
        put(store)
    assert store.attributes(ID).sample_count == 7
    assert list((store._root / ".writing").iterdir()) == []


def _die_at_write(root: Path, writes: int) -> None:
    write_array, left = storage.partition_arrays._write_array, [writes]

    async def dying(*args: object) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        await write_array(*args)

    storage.partition_arrays._write_array = dying
    put(PartitionStore(root))


@pytest.mark.parametrize("writes", [0, 2, 4])
def test_half_written_partition_is_never_visible(store: PartitionStore, writes: int) -> None:
    """A writer killed before the first, between, or before the last of its arrays leaves nothing a reader can find."""
    process = multiprocessing.get_context("spawn").Process(target=_die_at_write, args=(store._root, writes))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert store.list() == []
    with pytest.raises(UnknownObject):
        store.attributes(ID)
    put(store)  # its successor is not hindered
    assert store.list() == [ID]
    assert store.sweep() == 1


def test_failed_write_leaves_nothing(store: PartitionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while writing removes what was there."""

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EncodedFields, "write", full)
    with pytest.raises(OSError, match="No space"):
        put(store)
    assert store.list() == []
    assert list((store._root / ".writing").iterdir()) == []


@pytest.mark.parametrize("field", ["image.top", "action"])
def test_missing_chunk_is_an_error(store: PartitionStore, field: str) -> None:
    """`action` is all zeros: a lost chunk must not read as zeros."""
    put(store)
    next(p for p in (store._root / ID / field / "c").rglob("*") if p.is_file()).unlink()
    meta = store.get_meta(ID, task_name="train", data_fields=[field], batch_size=10)
    with pytest.raises(DataFault, match=rf"field {field} .* chunks are missing"):
        store.get_data(meta)


@pytest.mark.parametrize("field", ["image.top", "action"])
def test_torn_chunk_is_an_error(store: PartitionStore, field: str) -> None:
    """A truncated chunk is not read, compressed or not."""
    put(store)
    chunk = next(p for p in (store._root / ID / field / "c").rglob("*") if p.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-7])
    meta = store.get_meta(ID, task_name="train", data_fields=[field], batch_size=10)
    with pytest.raises(DataFault, match=rf"field {field} .* torn"):
        store.get_data(meta)


def test_missing_array_and_attributes_are_errors(store: PartitionStore) -> None:
    """A field that is gone, and attributes that cannot be read."""
    put(store)
    meta = store.get_meta(ID, task_name="train", data_fields=["valid"], batch_size=10)
    os.rename(store._root / ID / "valid", store._root / ID / "other")
    with pytest.raises(DataFault, match="the array is missing"):
        store.get_data(meta)
    (store._root / ID / "zarr.json").write_text("{")
    with pytest.raises(DataFault, match="attributes cannot be read"):
        PartitionStore(store._root).attributes(ID)


def test_each_stage_has_its_own_cursor(store: PartitionStore) -> None:
    """Two stages each see all rows once; a reset starts one of them anew."""
    put(store)
    assert len(read_all(store, ["valid"], task="advantages")) == 3
    assert len(read_all(store, ["valid"], task="train")) == 3
    assert read_all(store, ["valid"], task="train") == []
    store.reset_cursor(ID, "train")
    assert len(read_all(store, ["valid"], task="train")) == 3
    assert read_all(store, ["valid"], task="advantages") == []


@pytest.mark.parametrize("column", [0, 1, 2])
def test_tags_of_each_sample_are_validated(store: PartitionStore, column: int) -> None:
    """One sample of another tenant, schema or version spoils its microbatch only."""
    put(store)
    group = zarr.open_group(store._root / ID, mode="r+")
    tags = group["tags"][...]
    tags[5, column] += 1
    group["tags"][...] = tags
    metas = [store.get_meta(ID, task_name="train", data_fields=["action"], batch_size=4) for _ in range(3)]
    assert len(store.get_data(metas[0])["action"]) == 4
    with pytest.raises(DataFault, match="sample 5 is not of tenant 'push'"):
        store.get_data(metas[1])
    assert len(store.get_data(metas[2])["action"]) == 2


def test_caller_names_whose_samples_it_expects(store: PartitionStore) -> None:
    """A job of one tenant cannot be given another tenant's partition."""
    put(store)
    ask = {"task_name": "train", "data_fields": ["action"], "batch_size": 4}
    with pytest.raises(DataFault, match="tenant_id of partition"):
        store.get_meta(ID, **ask, tenant_id="pick")
    with pytest.raises(DataFault, match="schema_signature of partition"):
        store.get_meta(ID, **ask, schema_signature="cd" * 32)
    assert store.get_meta(ID, **ask, tenant_id="push", schema_signature="ab" * 32).start == 0


def test_metadata_travels(store: PartitionStore) -> None:
    """Sample metadata made in one process names the same rows in another."""
    put(store)
    store.get_meta(ID, task_name="train", data_fields=["proprioception"], batch_size=4)
    meta = pickle.loads(
        pickle.dumps(store.get_meta(ID, task_name="train", data_fields=["proprioception"], batch_size=4))
    )
    rows = PartitionStore(store._root).get_data(meta)["proprioception"]
    np.testing.assert_array_equal(rows, [[4, -4], [5, -5], [6, -6], [7, -7]])


def test_reads_are_copies(store: PartitionStore) -> None:
    """What a consumer does to its microbatch does not reach the next reader."""
    put(store)
    meta = store.get_meta(ID, task_name="train", data_fields=["proprioception"], batch_size=4)
    store.get_data(meta)["proprioception"][:] = 99
    assert store.get_data(meta)["proprioception"].max() == 3


def test_nothing_is_kept_after_the_last_row(store: PartitionStore) -> None:
    """A stage's arrays stay in memory only between its microbatches, whoever clears the partition."""
    put(store)
    put(store, "other")
    meta = store.get_meta(ID, task_name="train", data_fields=["action"], batch_size=10)
    store.get_data(meta)
    assert store._loaded == {}
    read_all(store, ["action"], task="advantages")
    assert store._loaded == {}
    meta = store.get_meta(ID, task_name="left", data_fields=["action"], batch_size=4)
    store.get_data(meta)
    assert set(store._loaded) == {(ID, "left")}
    PartitionStore(store._root).clear(ID)
    store.attributes("other")
    assert (store._loaded, store._cursors) == ({}, {})


def test_derived_columns_join_when_all_rows_are_there(store: PartitionStore) -> None:
    """No column is visible until its last row is; then it reads like any field."""
    put(store)
    for start in (0, 4, 8):
        with pytest.raises(UnknownObject, match="advantage"):
            store.get_meta(ID, task_name="train", data_fields=["advantage"], batch_size=10)
        meta = store.get_meta(ID, task_name="advantages", data_fields=["action"], batch_size=4)
        rows = np.arange(meta.start, meta.stop, dtype=np.float32)[:, None]
        assert meta.start == start
        assert store.put_derived(meta, {"advantage": rows, "return": -rows}) == (0 if start == 8 else None)
    batch = read_all(store, ["advantage", "return", "action"], batch_size=10)[0]
    np.testing.assert_array_equal(batch["advantage"][:, 0], np.arange(10))
    np.testing.assert_array_equal(batch["return"][:, 0], -np.arange(10))


def test_stage_that_starts_again_writes_its_own_epoch(store: PartitionStore) -> None:
    """The newest epoch is read; a named bound hides what a late holder wrote; equal contents are written once."""
    put(store)

    def derive(value: float, epoch: int | None) -> int | None:
        store.reset_cursor(ID, "advantages")
        meta = store.get_meta(ID, task_name="advantages", data_fields=["action"], batch_size=10)
        return store.put_derived(meta, {"advantage": np.full((10, 4), value, np.float32)}, epoch=epoch)

    def read(task: str, bound: int | None = None) -> float:
        ask = {"data_fields": ["advantage"], "batch_size": 10, "derived_epoch": bound}
        return float(store.get_data(store.get_meta(ID, task_name=task, **ask))["advantage"][0, 0])

    assert derive(1.0, 5) == 5
    assert derive(1.0, 5) == 5  # sent twice, done once
    with pytest.raises(Conflict, match="derived epoch"):
        derive(2.0, 5)
    assert derive(3.0, None) == 6
    assert read("train") == 3.0
    assert read("train_bounded", 5) == 1.0


def test_two_stages_derive_different_columns(store: PartitionStore) -> None:
    """Columns of the actor's forward and of the advantages stand side by side."""
    put(store)
    for task, column in (("actor_forward", "actor_value"), ("advantages", "advantage")):
        meta = store.get_meta(ID, task_name=task, data_fields=["action"], batch_size=10)
        store.put_derived(meta, {column: np.ones(10, np.float32)})
    assert set(read_all(store, ["actor_value", "advantage"], batch_size=10)[0]) == {"actor_value", "advantage"}


def test_derived_faults(store: PartitionStore) -> None:
    """Rows twice, a field's name, a wrong count, other columns than before."""
    put(store)
    meta = store.get_meta(ID, task_name="advantages", data_fields=["action"], batch_size=4)
    store.put_derived(meta, {"advantage": np.zeros(4, np.float32)})
    with pytest.raises(Conflict, match="twice"):
        store.put_derived(meta, {"advantage": np.zeros(4, np.float32)})
    with pytest.raises(SpecError, match="new names"):
        store.put_derived(meta, {"action": np.zeros(4, np.float32)})
    with pytest.raises(SpecError, match="4 rows"):
        store.put_derived(meta, {"advantage": np.zeros(5, np.float32)})
    meta = store.get_meta(ID, task_name="advantages", data_fields=["action"], batch_size=4)
    with pytest.raises(SpecError, match="same columns"):
        store.put_derived(meta, {"advantage": np.zeros((4, 2), np.float32)})


def test_clear_is_idempotent(store: PartitionStore) -> None:
    """Clearing twice, or what never was, is no error; afterwards nothing of it is known."""
    put(store)
    meta = store.get_meta(ID, task_name="train", data_fields=["action"], batch_size=4)
    store.get_data(meta)
    assert store.clear(ID) is True
    assert store.clear(ID) is False
    assert store.clear("never.was") is False
    with pytest.raises(UnknownObject, match="cleared"):
        store.get_data(meta)


def test_what_is_cleared_by_an_executor_is_gone_before_its_files_are(store: PartitionStore, tmp_path: Path) -> None:
    """The name is free at once; a kill before the executor gets there leaves what `sweep` removes."""
    let_go = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(let_go.wait)
        put(store)
        assert store.clear(ID, executor) is True
        assert store.list() == []
        assert store.clear(ID, executor) is False
        put(store)  # of the same name
        assert len(list((tmp_path / "partitions" / ".writing").iterdir())) == 1
        let_go.set()
    assert list((tmp_path / "partitions" / ".writing").iterdir()) == []
    assert store.list() == [ID]


@pytest.mark.parametrize("partition_id", ["", "..", "../x", "a/b", "/etc", ".hidden", "a..b", "a b", "x" * 201])
def test_ids_are_no_paths(store: PartitionStore, partition_id: str) -> None:
    """No id leads out of the store."""
    for call in (lambda: put(store, partition_id), lambda: store.clear(partition_id)):
        with pytest.raises(SpecError, match="partition_id"):
            call()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "one field or more"),
        ({"a": np.zeros(0)}, "at least 1 row"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "same count"),
        ({"a": np.float32(1)}, "numbers or booleans"),
        ({"a": np.array([object()])}, "numbers or booleans"),
        ({"a": np.array(["text"])}, "numbers or booleans"),
        ({"tags": np.zeros(2)}, "names other than"),
        ({"../a": np.zeros(2)}, "field name"),
    ],
)
def test_data_that_does_not_fit(store: PartitionStore, data: dict, message: str) -> None:
    """Refused before anything is written (objects would need pickle)."""
    with pytest.raises(SpecError, match=message):
        store.put(ID, data, **TAGS, chunk=4)
    assert store.list() == []


def test_unknown_names_list_the_known(store: PartitionStore) -> None:
    """An unknown partition or field is answered with those that exist."""
    put(store)
    with pytest.raises(UnknownObject, match=r"got 'other'; possible: job1\.vla\.push\.rl"):
        store.attributes("other")
    with pytest.raises(UnknownObject, match=r"got 'reward'; possible: action, image\.top, proprioception, valid"):
        store.get_meta(ID, task_name="train", data_fields=["reward"], batch_size=4)


class PartitionMachine(RuleBasedStateMachine):
    """Random puts, reads and clears against a plain dictionary."""

    partitions: Bundle = Bundle("partitions")

    @initialize()
    def start(self) -> None:
        """An empty store and an empty model."""
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = PartitionStore(Path(self.folder.name))
        self.model: dict[str, np.ndarray] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.made = 0

    @rule(target=partitions, n=st.integers(1, 7), chunk=st.integers(1, 4))
    def put(self, n: int, chunk: int) -> str:
        """A new partition."""
        partition_id, self.made = f"p{self.made}", self.made + 1
        self.model[partition_id] = np.random.default_rng(self.made).normal(size=(n, 2)).astype(np.float32)
        self.store.put(partition_id, {"x": self.model[partition_id]}, **TAGS, chunk=chunk)
        return partition_id

    @rule(partition_id=partitions, task=st.sampled_from(["a", "b"]), size=st.integers(1, 5))
    def read(self, partition_id: str, task: str, size: int) -> None:
        """The next rows of a stage are those after its last."""
        start = self.cursors.get((partition_id, task), 0)
        wanted = self.model[partition_id][start : start + size]
        meta = self.store.get_meta(partition_id, task_name=task, data_fields=["x"], batch_size=size)
        assert (meta is None) == (len(wanted) == 0)
        if meta is not None:
            np.testing.assert_array_equal(self.store.get_data(meta)["x"], wanted)
            self.cursors[partition_id, task] = start + len(wanted)

    @rule(partition_id=partitions, task=st.sampled_from(["a", "b"]))
    def reset(self, partition_id: str, task: str) -> None:
        """A stage starts again."""
        self.store.reset_cursor(partition_id, task)
        self.cursors.pop((partition_id, task), None)

    @rule(partition_id=consumes(partitions))
    def clear(self, partition_id: str) -> None:
        """It is gone, and the others are not."""
        assert self.store.clear(partition_id)
        del self.model[partition_id]
        assert self.store.list() == sorted(self.model)

    def teardown(self) -> None:
        """Remove the folder."""
        self.folder.cleanup()


PartitionMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestPartitionMachine = PartitionMachine.TestCase
