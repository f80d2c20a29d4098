"""The Training Queue's data plane: one Zarr group a partition, written once, read by stages in order.

Layout of `root`:

    <partition_id>/                      appears by one rename; a half-written one is never visible
        zarr.json                        attributes: format, tags, sample count, chunk, fields with shape and dtype
        tags/                            int64 [n, 3]: tenant digest, schema digest, policy version (-1: none) a sample
        <field>/                         [n, ...]; chunk = microbatch for wide rows, one chunk for narrow ones
        derived/<task_name>/<epoch>/     columns that a stage computed, all its rows at once, by one rename
    .writing/                            under construction or on its way out; no reader looks here

What this does not do: it holds no job state (that is the Training Scheduler's), and a cursor lives in the store object
that made it, so a stage that starts anew after a crash starts at row 0. It needs a file system with rename. It survives
any process, but does not wait for the disk: after a power cut experience is collected anew.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Conflict, DataFault, SpecError, UnknownObject, refusal
from storage.atomic import checked_id, new_folder, remove_folder, sweep
from storage.partition_arrays import EncodedFields, encode_fields, read_arrays, write_group
from storage.partition_format import (
    DERIVED,
    FORMAT,
    TAGS,
    Arrays,
    DerivedBuffer,
    FieldInfo,
    Label,
    PartitionAttributes,
    SampleMetadata,
    check_encoded,
    check_instructions,
    check_rows,
    check_tags,
    checked_fields,
    encode_attributes,
    indexed_instructions,
    read_attributes,
    tags,
)

__all__ = [
    "EncodedFields",
    "FieldInfo",
    "Label",
    "PartitionAttributes",
    "PartitionStore",
    "SampleMetadata",
    "encode_fields",
    "indexed_instructions",
]

_Stage = tuple[str, str]  # (partition_id, task_name)


class PartitionStore:
    """Partitions under one folder. Thread-safe; several processes may read, and each partition has one writer."""

    def __init__(self, root: Path, *, read_ahead_bytes: int = 1 << 30) -> None:
        """`read_ahead_bytes`: fields up to this size are read whole once a stage and sliced in memory."""
        self._root = Path(root)
        self._read_ahead_bytes = read_ahead_bytes
        self._lock = threading.Lock()
        self._attributes: dict[str, tuple[int, PartitionAttributes]] = {}  # {partition_id: (inode, attributes)}
        self._cursors: dict[_Stage, int] = {}  # next row
        self._loaded: dict[_Stage, dict[str, NDArray[Any]]] = {}  # {stage: {field: all rows}}
        self._derived: dict[_Stage, DerivedBuffer] = {}  # rows so far

    def put(
        self,
        partition_id: str,
        data: Arrays,
        *,
        tenant_id: str,
        schema_signature: str,
        policy_version: int | None,
        chunk: int,
        instructions: Sequence[str] = (),
        labels: Mapping[str, Label] | None = None,
        encoded: EncodedFields | None = None,
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
            encoded: Further fields, encoded before (`encode_fields`) with the same `chunk`; used up.

        Raises:
            Conflict: the partition exists (a second writer).
            SpecError: a field's name, shape or dtype does not fit, or it is given twice.
        """
        checked_id(partition_id, "partition_id")
        rest = {name: np.asarray(value) for name, value in data.items()}
        encoded = EncodedFields(chunk) if encoded is None else encoded
        check_encoded(partition_id, rest, encoded.arrays, chunk, encoded.chunk)
        arrays = {**encoded.arrays, **rest}
        count = checked_fields(partition_id, arrays)
        if chunk < 1:
            raise SpecError(refusal("chunk", chunk, "1 or more", "give the consumer's microbatch size"))
        check_instructions(partition_id, arrays, instructions)
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
        of_samples = {TAGS: tags(tenant_id, schema_signature, policy_version, count)}
        with new_folder(self._root / partition_id, "partition_id", synced=False) as folder:
            encoded.add({**of_samples, **rest}, encode_attributes(attributes))
            encoded.write(folder)
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
            message = refusal("partition_id", partition_id, known, "it was never written or is cleared")
            raise UnknownObject(message) from None
        # A folder never changes once it is there, so its attributes are read once; the inode tells it from another
        # folder of that name, should a partition be cleared and written again by other processes.
        cached = self._attributes.get(partition_id)
        if cached is None or cached[0] != inode:
            for known in [k for k in list(self._attributes) if not (self._root / k).is_dir()]:
                self._forget(known)  # cleared by another process
            cached = self._attributes[partition_id] = (inode, read_attributes(folder, partition_id))
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
                where = f"data_fields of partition {partition_id}"
                raise UnknownObject(refusal(where, name, ", ".join(known), "choose among these"))
        for field, wanted in (("tenant_id", tenant_id), ("schema_signature", schema_signature)):
            found = getattr(attributes, field)
            if wanted is not None and wanted != found:
                raise DataFault(
                    refusal(f"{field} of partition {partition_id}", found, repr(wanted), "do not train on it")
                )
        with self._lock:
            start = self._cursors.get((partition_id, task_name), 0)
            stop = min(start + batch_size, attributes.sample_count)
            if start >= stop:
                return None
            self._cursors[partition_id, task_name] = stop
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
        """The rows and fields that `meta` names [stop - start, ...]; they are the caller's to change.

        Raises:
            DataFault: a chunk is missing or torn, or a sample's tags are not those of `meta`.
            UnknownObject: the partition was cleared.
        """
        attributes, count = self.attributes(meta.partition_id), meta.sample_count
        stage = (meta.partition_id, meta.task_name)
        with self._lock:
            loaded = dict(self._loaded.get(stage, {}))
        missing = {name: self._folder_of(attributes, meta, name) for name in (TAGS, *meta.fields) if name not in loaded}
        read = read_arrays(missing, count, meta.start, meta.stop, self._read_ahead_bytes)
        for name, rows in read.items():
            if name in attributes.fields:
                check_rows(rows, attributes.fields[name], f"field {name} of partition {meta.partition_id}")
        if meta.whole:
            result = {**loaded, **read}
        else:
            # Fields too large to be read ahead came as the rows asked for; the others are kept for the next microbatch,
            # which is why they are copied here.
            ahead = {name: rows for name, rows in read.items() if len(rows) == count}
            self._keep(stage, ahead, done=meta.stop == count)
            result = {**read, **{k: v[meta.start : meta.stop].copy() for k, v in {**loaded, **ahead}.items()}}
        check_tags(result[TAGS], meta)
        return {name: result[name] for name in meta.fields}

    def put_derived(self, meta: SampleMetadata, data: Arrays, *, epoch: int | None = None) -> int | None:
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
        count = checked_fields(meta.partition_id, arrays)
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
        stage = (meta.partition_id, meta.task_name)
        with self._lock:
            buffer = self._derived.setdefault(stage, DerivedBuffer(meta.sample_count))
            buffer.add(meta, arrays)
            if not buffer.complete:
                return None
            del self._derived[stage]
        return self._write_derived(meta, buffer.columns, attributes.chunk, epoch)

    def reset_cursor(self, partition_id: str, task_name: str) -> None:
        """Start the stage at row 0 again and forget what it had read or buffered."""
        self._forget(partition_id, task_name)

    def clear(self, partition_id: str, executor: Executor | None = None) -> bool:
        """Remove the partition; False if there was none (clearing twice is no error).

        With an executor it is gone on return, and the executor deletes its files.
        """
        checked_id(partition_id, "partition_id")
        self._forget(partition_id)
        return remove_folder(self._root / partition_id, executor)

    def list(self) -> list[str]:
        """Ids of all partitions, sorted."""
        if not self._root.is_dir():
            return []
        return sorted(p.name for p in self._root.iterdir() if p.is_dir() and not p.name.startswith("."))

    def sweep(self, older_than_s: float = 0.0) -> int:
        """Remove what killed writers left behind so long ago (0: only while no writer is active); returns how many."""
        return sweep(self._root, older_than_s)

    def _folder_of(self, attributes: PartitionAttributes, meta: SampleMetadata, name: str) -> Path:
        """The group that holds the array `name`."""
        if name == TAGS or name in attributes.fields:
            return self._root / meta.partition_id
        found = self._derived_columns(meta.partition_id, meta.derived_epoch).get(name)
        if found is None:
            raise UnknownObject(refusal(f"partition {meta.partition_id}", name, "its fields", "derive it first"))
        return found

    def _keep(self, stage: _Stage, rows: dict[str, NDArray[Any]], *, done: bool) -> None:
        """Keep whole arrays for the stage's next microbatch; after its last one none is needed."""
        with self._lock:
            if done:
                self._loaded.pop(stage, None)
            elif rows:
                self._loaded.setdefault(stage, {}).update(rows)

    def _forget(self, partition_id: str, task_name: str | None = None) -> None:
        """Drop what is in memory of one stage, or of the whole partition."""
        with self._lock:
            if task_name is None:
                self._attributes.pop(partition_id, None)
            stages = [*self._cursors, *self._loaded, *self._derived]
            for stage in [s for s in stages if s[0] == partition_id and task_name in (None, s[1])]:
                self._cursors.pop(stage, None)
                self._loaded.pop(stage, None)
                self._derived.pop(stage, None)

    def _derived_columns(self, partition_id: str, up_to: int | None) -> dict[str, Path]:
        """{column: folder of the newest epoch, of those up to `up_to`, that has it}."""
        found: dict[str, tuple[int, Path]] = {}
        for folder in (self._root / partition_id / DERIVED).glob("*/*"):
            if not folder.name.isdigit() or (up_to is not None and int(folder.name) > up_to):
                continue
            for column in folder.iterdir():
                if column.is_dir() and int(folder.name) >= found.get(column.name, (-1, folder))[0]:
                    found[column.name] = (int(folder.name), folder)
        return {name: folder for name, (_, folder) in found.items()}

    def _write_derived(
        self, meta: SampleMetadata, columns: dict[str, NDArray[Any]], chunk: int, epoch: int | None
    ) -> int:
        of_stage = self._root / meta.partition_id / DERIVED / meta.task_name
        if epoch is None:
            epoch = max((int(p.name) for p in of_stage.glob("[0-9]*")), default=-1) + 1
        target = of_stage / str(epoch)
        if target.is_dir():
            self._refuse_other_contents(target, meta, columns)
            return epoch
        with new_folder(target, f"derived epoch of partition {meta.partition_id}", synced=False) as folder:
            write_group(folder, {"format": FORMAT, "task_name": meta.task_name, "epoch": epoch}, columns, chunk)
        return epoch

    def _refuse_other_contents(self, target: Path, meta: SampleMetadata, columns: dict[str, NDArray[Any]]) -> None:
        same = sorted(p.name for p in target.iterdir() if p.is_dir()) == sorted(columns)
        if same:
            count = meta.sample_count
            found = read_arrays(dict.fromkeys(columns, target), count, 0, count, self._read_ahead_bytes)
            same = all(found[name].tobytes() == column.tobytes() for name, column in columns.items())
        if not same:
            where = f"derived epoch of partition {meta.partition_id}, stage {meta.task_name}"
            possible = "the same contents or another epoch"
            raise Conflict(refusal(where, int(target.name), possible, "lease the stage again"))
