"""The Training Queue's data plane: one Zarr group a partition, written once, read by stages in order.

Layout of `root`:

    <partition_id>/                      appears by one rename; a half-written one is never visible
        zarr.json                        attributes: format, tags, sample count, chunk, fields with shape and dtype
        tags/                            int64 [n, 3]: tenant digest, schema digest, policy version (-1: none) a sample
        <field>/                         [n, ...]; chunk = microbatch for wide rows, one chunk for narrow ones
        derived/<task_name>/<epoch>/     columns that a stage computed, all its rows at once, by one rename
    .writing/                            under construction or on its way out; no reader looks here

What this does not do: it holds no job state (that is the Training Scheduler's), and a cursor lives in the store object
that made it, so a stage that starts anew after a crash starts at row 0. It needs a file system with rename.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from configs.errors import Conflict, DataFault, SpecError, TenantFault, UnknownObject, refusal
from storage.atomic import checked_id, new_folder, remove_folder, sweep
from storage.partition_arrays import read_rows, write_array

FORMAT = 1
NO_VERSION = -1  # policy version tag of samples that no policy produced (demonstrations)
_RESERVED = ("tags", "derived")

Label = str | int | float | bool | None


@dataclass(frozen=True)
class FieldInfo:
    """Shape and dtype of one field as its writer declared it."""

    shape: tuple[int, ...]  # [n, ...]
    dtype: str


@dataclass(frozen=True)
class PartitionAttributes:
    """What a partition says of itself; the tags hold for every sample of it."""

    partition_id: str
    tenant_id: str
    schema_signature: str
    policy_version: int | None  # of the policy that collected the data; None: no policy did
    sample_count: int
    chunk: int
    instructions: tuple[str, ...]
    labels: dict[str, Label]  # what a producer wants its consumer to know, for instance num_envs
    fields: dict[str, FieldInfo]

    def row_instructions(self, count: int, index: NDArray[np.int32] | None = None) -> list[str]:
        """The instruction of each of `count` rows; `index` [count]: field `instruction_index`."""
        if index is None:
            return [self.instructions[0]] * count
        return [self.instructions[int(i)] for i in index]


@dataclass(frozen=True)
class SampleMetadata:
    """Names rows [start, stop) of a partition, the fields to read and the tags that each row must carry."""

    partition_id: str
    task_name: str
    fields: tuple[str, ...]
    start: int
    stop: int
    sample_count: int
    tenant_id: str
    schema_signature: str
    policy_version: int | None
    derived_epoch: int | None

    @property
    def size(self) -> int:
        """Rows named."""
        return self.stop - self.start


class PartitionStore:
    """Partitions under one folder. Thread-safe; several processes may read, and each partition has one writer."""

    def __init__(self, root: Path, *, read_ahead_bytes: int = 1 << 30) -> None:
        """`read_ahead_bytes`: fields up to this size are read whole once a stage and sliced in memory."""
        self._root = Path(root)
        self._read_ahead_bytes = read_ahead_bytes
        self._lock = threading.Lock()
        self._attributes: dict[str, tuple[int, PartitionAttributes]] = {}  # {partition_id: (inode, attributes)}
        self._cursors: dict[tuple[str, str], int] = {}  # {(partition_id, task_name): next row}
        self._loaded: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}  # {(partition_id, task_name): {field: rows}}
        self._derived: dict[tuple[str, str], _DerivedBuffer] = {}  # {(partition_id, task_name): rows so far}

    def put(
        self,
        partition_id: str,
        data: Mapping[str, NDArray[Any]],
        *,
        tenant_id: str,
        schema_signature: str,
        policy_version: int | None,
        chunk: int,
        instructions: Sequence[str] = (),
        labels: Mapping[str, Label] | None = None,
    ) -> PartitionAttributes:
        """Write a new partition; it becomes visible whole, when the last byte is written.

        Args:
            partition_id: Made by the Training Scheduler; never used twice.
            data: Fields [n, ...] of numbers or booleans, equal n.
            tenant_id: Whose samples they are.
            schema_signature: The tenant's whole interface (configs.signature).
            policy_version: Of the policy that collected them; None for demonstrations.
            chunk: Rows of a consumer's microbatch.
            instructions: One for all rows, or several with an int field `instruction_index` [n].
            labels: Small facts for the consumer.

        Raises:
            Conflict: the partition exists (a second writer).
            SpecError: a field's name, shape or dtype does not fit.
        """
        checked_id(partition_id, "partition_id")
        arrays = {name: np.asarray(value) for name, value in data.items()}
        count = _checked_fields(partition_id, arrays)
        if chunk < 1:
            raise SpecError(refusal("chunk", chunk, "1 or more", "give the consumer's microbatch size"))
        _check_instructions(partition_id, arrays, instructions)
        attributes = PartitionAttributes(
            partition_id=partition_id,
            tenant_id=tenant_id,
            schema_signature=schema_signature,
            policy_version=policy_version,
            sample_count=count,
            chunk=chunk,
            instructions=tuple(instructions),
            labels=dict(labels or {}),
            fields={name: FieldInfo(tuple(a.shape), a.dtype.str) for name, a in arrays.items()},
        )
        with new_folder(self._root / partition_id, "partition_id") as folder:
            group = zarr.create_group(folder, attributes={"format": FORMAT, **asdict(attributes)})
            write_array(group, "tags", _tags(attributes, count), chunk)
            for name, array in arrays.items():
                write_array(group, name, array, chunk)
        return attributes

    def attributes(self, partition_id: str) -> PartitionAttributes:
        """What the partition says of itself.

        Raises:
            UnknownObject: there is no such partition (never written, not yet whole, or cleared).
            DataFault: its attributes cannot be read.
        """
        folder = self._root / checked_id(partition_id, "partition_id")
        try:
            inode = folder.stat().st_ino
        except FileNotFoundError:
            known = ", ".join(self.list()[:8]) or "none"
            raise UnknownObject(
                refusal("partition_id", partition_id, known, "it was never written or is cleared")
            ) from None
        # A folder never changes once it is there, so its attributes are read once; the inode tells it from another
        # folder of that name, should a partition be cleared and written again by other processes.
        cached = self._attributes.get(partition_id)
        if cached is None or cached[0] != inode:
            cached = self._attributes[partition_id] = (inode, _read_attributes(folder, partition_id))
        return cached[1]

    def get_meta(
        self,
        partition_id: str,
        *,
        task_name: str,
        data_fields: Sequence[str],
        batch_size: int,
        tenant_id: str | None = None,
        schema_signature: str | None = None,
        derived_epoch: int | None = None,
    ) -> SampleMetadata | None:
        """The next at most `batch_size` rows for the stage `task_name`, or None at the end; moves its cursor.

        Args:
            partition_id: The partition.
            task_name: The consuming stage; each has a cursor of its own.
            data_fields: Fields and derived columns that `get_data` shall read.
            batch_size: Rows wanted.
            tenant_id: Whose samples the caller expects; checked here and for each sample in `get_data`.
            schema_signature: The signature the caller expects; checked likewise.
            derived_epoch: Read derived columns of the newest epoch up to this one; None: the newest.

        Raises:
            UnknownObject: no such partition or field.
            DataFault: the partition is another tenant's or schema's.
        """
        if batch_size < 1:
            raise SpecError(refusal("batch_size", batch_size, "1 or more", "ask for at least one row"))
        checked_id(task_name, "task_name")
        attributes = self.attributes(partition_id)
        known = sorted({*attributes.fields, *self._derived_columns(partition_id, derived_epoch)})
        for name in data_fields:
            if name not in known:
                raise UnknownObject(
                    refusal(f"data_fields of partition {partition_id}", name, ", ".join(known), "choose among these")
                )
        for field, wanted in (("tenant_id", tenant_id), ("schema_signature", schema_signature)):
            found = getattr(attributes, field)
            if wanted is not None and wanted != found:
                raise DataFault(
                    refusal(f"{field} of partition {partition_id}", found, repr(wanted), "do not train on it")
                )
        key = (partition_id, task_name)
        with self._lock:
            start = self._cursors.get(key, 0)
            stop = min(start + batch_size, attributes.sample_count)
            if start >= stop:
                self._loaded.pop(key, None)
                return None
            self._cursors[key] = stop
        return SampleMetadata(
            partition_id=partition_id,
            task_name=task_name,
            fields=tuple(data_fields),
            start=start,
            stop=stop,
            sample_count=attributes.sample_count,
            tenant_id=attributes.tenant_id,
            schema_signature=attributes.schema_signature,
            policy_version=attributes.policy_version,
            derived_epoch=derived_epoch,
        )

    def get_data(self, meta: SampleMetadata) -> dict[str, NDArray[Any]]:
        """The rows and fields that `meta` names, as copies [stop - start, ...].

        Raises:
            DataFault: a chunk is missing or torn, or a sample's tags are not those of `meta`.
            UnknownObject: the partition was cleared.
        """
        attributes = self.attributes(meta.partition_id)
        wanted = _tags(replace(attributes, **{k: getattr(meta, k) for k in _TAGGED}), meta.size)
        tags = self._rows(attributes, meta, "tags")
        if not np.array_equal(tags, wanted):
            row = meta.start + int(np.argmax((tags != wanted).any(axis=1)))
            raise DataFault(
                f"tags of partition {meta.partition_id}: sample {row} is not of tenant {meta.tenant_id!r}, schema "
                f"{meta.schema_signature[:12]!r}, policy version {meta.policy_version}; the microbatch is not used"
            )
        return {name: self._rows(attributes, meta, name) for name in meta.fields}

    def put_derived(
        self, meta: SampleMetadata, data: Mapping[str, NDArray[Any]], *, epoch: int | None = None
    ) -> int | None:
        """Add derived columns for the rows of `meta`; kept in memory until all rows are there, then written at once.

        A stage that starts again calls `reset_cursor` first, which forgets what it had buffered. Its columns go to an
        epoch of their own, so that of two holders of one lease neither writes into the other's.

        Args:
            meta: Rows and stage, from `get_meta`.
            data: Columns [meta.size, ...], the same ones in each call.
            epoch: The lease's number, growing; None takes the next free one.

        Returns:
            The epoch when this call completed and wrote the columns, else None.

        Raises:
            Conflict: rows were put twice, or the epoch exists with other contents.
            SpecError: columns do not fit `meta`, or are fields of the partition.
        """
        attributes = self.attributes(meta.partition_id)
        arrays = {name: np.asarray(value) for name, value in data.items()}
        count = _checked_fields(meta.partition_id, arrays)
        taken = sorted(set(arrays) & set(attributes.fields))
        if count != meta.size or taken:
            raise SpecError(
                refusal(
                    f"derived columns of partition {meta.partition_id}",
                    f"{count} rows of {sorted(arrays)}",
                    f"{meta.size} rows, no name of {taken or sorted(attributes.fields)}",
                    "give one row a sample under new names",
                )
            )
        key = (meta.partition_id, meta.task_name)
        with self._lock:
            buffer = self._derived.setdefault(key, _DerivedBuffer(meta.sample_count))
            buffer.add(meta, arrays)
            if not buffer.complete:
                return None
            del self._derived[key]
        return self._write_derived(meta, buffer.columns, attributes.chunk, epoch)

    def reset_cursor(self, partition_id: str, task_name: str) -> None:
        """Start the stage at row 0 again and forget what it had read or buffered."""
        with self._lock:
            for kept in (self._cursors, self._loaded, self._derived):
                kept.pop((partition_id, task_name), None)  # type: ignore[attr-defined]

    def clear(self, partition_id: str) -> bool:
        """Remove the partition; False if there was none (clearing twice is no error)."""
        checked_id(partition_id, "partition_id")
        with self._lock:
            self._attributes.pop(partition_id, None)
            for kept in (self._cursors, self._loaded, self._derived):
                for key in [k for k in kept if k[0] == partition_id]:
                    del kept[key]  # type: ignore[attr-defined]
        return remove_folder(self._root / partition_id)

    def list(self) -> list[str]:
        """Ids of all partitions, sorted."""
        if not self._root.is_dir():
            return []
        return sorted(p.name for p in self._root.iterdir() if p.is_dir() and not p.name.startswith("."))

    def sweep(self) -> int:
        """Remove what killed writers left behind; only while no writer is active. Returns how many."""
        return sweep(self._root)

    def _rows(self, attributes: PartitionAttributes, meta: SampleMetadata, name: str) -> NDArray[Any]:
        key = (meta.partition_id, meta.task_name)
        with self._lock:
            whole = self._loaded.get(key, {}).get(name)
        if whole is None:
            folder = self._root / meta.partition_id
            if name not in attributes.fields and name not in _RESERVED:
                found = self._derived_columns(meta.partition_id, meta.derived_epoch).get(name)
                if found is None:
                    raise UnknownObject(
                        refusal(f"partition {meta.partition_id}", name, "its fields", "derive it first")
                    )
                folder = found
            rows = read_rows(folder, name, attributes.sample_count, meta.start, meta.stop, self._read_ahead_bytes)
            declared = attributes.fields.get(name)
            if declared is not None and (rows.shape[1:] != declared.shape[1:] or rows.dtype.str != declared.dtype):
                raise DataFault(
                    f"field {name} of partition {meta.partition_id}: {rows.dtype.str}{list(rows.shape)} does not fit "
                    f"the declared {declared.dtype}{list(declared.shape)}; collect anew"
                )
            if len(rows) != attributes.sample_count:
                return rows  # too large to keep
            whole = rows
            with self._lock:
                self._loaded.setdefault(key, {})[name] = whole
        return whole[meta.start : meta.stop].copy()

    def _derived_columns(self, partition_id: str, up_to: int | None) -> dict[str, Path]:
        """{column: folder of the newest epoch, of those up to `up_to`, that has it}."""
        found: dict[str, tuple[int, Path]] = {}
        for folder in (self._root / partition_id / "derived").glob("*/*"):
            if not folder.name.isdigit() or (up_to is not None and int(folder.name) > up_to):
                continue
            for column in folder.iterdir():
                if column.is_dir() and int(folder.name) >= found.get(column.name, (-1, folder))[0]:
                    found[column.name] = (int(folder.name), folder)
        return {name: folder for name, (_, folder) in found.items()}

    def _write_derived(
        self, meta: SampleMetadata, columns: dict[str, NDArray[Any]], chunk: int, epoch: int | None
    ) -> int:
        stage = self._root / meta.partition_id / "derived" / meta.task_name
        if epoch is None:
            epoch = max((int(p.name) for p in stage.glob("[0-9]*")), default=-1) + 1
        target = stage / str(epoch)
        if target.is_dir():
            self._refuse_other_contents(target, meta, columns)
            return epoch
        with new_folder(target, f"derived epoch of partition {meta.partition_id}") as folder:
            group = zarr.create_group(
                folder, attributes={"format": FORMAT, "task_name": meta.task_name, "epoch": epoch}
            )
            for name, column in columns.items():
                write_array(group, name, column, chunk)
        return epoch

    def _refuse_other_contents(self, target: Path, meta: SampleMetadata, columns: dict[str, NDArray[Any]]) -> None:
        n = meta.sample_count
        same = sorted(p.name for p in target.iterdir() if p.is_dir()) == sorted(columns) and all(
            read_rows(target, name, n, 0, n, self._read_ahead_bytes).tobytes() == column.tobytes()
            for name, column in columns.items()
        )
        if not same:
            raise Conflict(
                refusal(
                    f"derived epoch of partition {meta.partition_id}, stage {meta.task_name}",
                    int(target.name),
                    "the same contents or another epoch",
                    "lease the stage again",
                )
            )


_TAGGED = ("tenant_id", "schema_signature", "policy_version")


class _DerivedBuffer:
    """Columns of one stage as they come in, row range by row range."""

    def __init__(self, count: int) -> None:
        self._filled = np.zeros(count, dtype=bool)
        self.columns: dict[str, NDArray[Any]] = {}

    @property
    def complete(self) -> bool:
        return bool(self._filled.all())

    def add(self, meta: SampleMetadata, arrays: dict[str, NDArray[Any]]) -> None:
        where = f"derived columns of partition {meta.partition_id}, stage {meta.task_name}"
        rows = slice(meta.start, meta.stop)
        if self._filled[rows].any():
            raise Conflict(
                refusal(where, f"rows {meta.start} to {meta.stop} twice", "each row once", "reset the cursor")
            )
        shapes = {name: (a.shape[1:], a.dtype.str) for name, a in arrays.items()}
        if not self.columns:
            n = len(self._filled)
            self.columns = {name: np.empty((n, *a.shape[1:]), dtype=a.dtype) for name, a in arrays.items()}
        first = {name: (a.shape[1:], a.dtype.str) for name, a in self.columns.items()}
        if shapes != first:
            raise SpecError(refusal(where, shapes, f"{first} as before", "give the same columns for all rows"))
        for name, array in arrays.items():
            self.columns[name][rows] = array
        self._filled[rows] = True


def _checked_fields(partition_id: str, arrays: Mapping[str, NDArray[Any]]) -> int:
    """The common row count of `arrays`."""
    where = f"fields of partition {partition_id}"
    if not arrays:
        raise SpecError(refusal(where, {}, "one field or more", "give data"))
    for name, array in arrays.items():
        checked_id(name, f"field name in partition {partition_id}")
        if name in _RESERVED:
            raise SpecError(refusal(where, name, f"names other than {', '.join(_RESERVED)}", "rename it"))
        if array.ndim < 1 or array.dtype.kind not in "biuf":
            raise SpecError(
                refusal(
                    where, f"{name}: {array.dtype}{list(array.shape)}", "numbers or booleans [n, ...]", "convert it"
                )
            )
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or not next(iter(counts.values())):
        raise SpecError(refusal(where, counts, "the same count of at least 1 row in each", "give one row a sample"))
    return next(iter(counts.values()))


def _check_instructions(partition_id: str, arrays: Mapping[str, NDArray[Any]], instructions: Sequence[str]) -> None:
    index = arrays.get("instruction_index")
    where = f"instruction_index of partition {partition_id}"
    if len(instructions) > 1 and index is None:
        raise SpecError(refusal(where, None, f"0 to {len(instructions) - 1} a row", "say which row has which"))
    if index is not None and (
        index.dtype.kind not in "iu" or index.ndim != 1 or index.min() < 0 or index.max() >= len(instructions)
    ):
        raise TenantFault(
            refusal(where, f"{index.min()} to {index.max()}", f"0 to {len(instructions) - 1}", "correct the index")
        )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _tags(attributes: PartitionAttributes, count: int) -> NDArray[np.int64]:
    version = NO_VERSION if attributes.policy_version is None else attributes.policy_version
    row = [_digest(attributes.tenant_id), _digest(attributes.schema_signature), version]
    return np.tile(np.array(row, dtype=np.int64), (count, 1))


def _read_attributes(folder: Path, partition_id: str) -> PartitionAttributes:
    try:
        stored = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        if stored.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        stored["instructions"] = tuple(stored["instructions"])
        stored["fields"] = {k: FieldInfo(tuple(v["shape"]), v["dtype"]) for k, v in stored["fields"].items()}
        return PartitionAttributes(**stored)
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise DataFault(f"partition {partition_id}: its attributes cannot be read ({error}); collect anew") from error
