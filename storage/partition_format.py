"""What a partition says of itself and of each sample, and what its writer must hold; no I/O but one attributes file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Conflict, DataFault, SpecError, TenantFault, refusal
from storage.atomic import checked_id

FORMAT = 1
NO_VERSION = -1  # policy version tag of samples that no policy produced (demonstrations)
TAGS = "tags"
DERIVED = "derived"
_RESERVED = (TAGS, DERIVED)

Arrays = Mapping[str, NDArray[Any]]
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

    def row_instructions(self, count: int, index: NDArray[np.integer[Any]] | None = None) -> list[str]:
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

    @property
    def whole(self) -> bool:
        """Whether these are all rows of the partition."""
        return self.size == self.sample_count


class DerivedBuffer:
    """Columns of one stage as they come in, row range by row range."""

    def __init__(self, count: int) -> None:
        self._filled = np.zeros(count, dtype=bool)
        self.columns: dict[str, NDArray[Any]] = {}

    @property
    def complete(self) -> bool:
        """Whether every row is there."""
        return bool(self._filled.all())

    def add(self, meta: SampleMetadata, arrays: Arrays) -> None:
        """Take in the rows of `meta`.

        Raises:
            Conflict: one of the rows was there.
            SpecError: other columns than before.
        """
        where = f"derived columns of partition {meta.partition_id}, stage {meta.task_name}"
        rows = slice(meta.start, meta.stop)
        if self._filled[rows].any():
            raise Conflict(
                refusal(where, f"rows {meta.start} to {meta.stop} twice", "each row once", "reset the cursor")
            )
        if not self.columns:
            n = len(self._filled)
            self.columns = {name: np.empty((n, *a.shape[1:]), dtype=a.dtype) for name, a in arrays.items()}
        given = {name: (a.shape[1:], a.dtype.str) for name, a in arrays.items()}
        first = {name: (a.shape[1:], a.dtype.str) for name, a in self.columns.items()}
        if given != first:
            raise SpecError(refusal(where, given, f"{first} as before", "give the same columns for all rows"))
        for name, array in arrays.items():
            self.columns[name][rows] = array
        self._filled[rows] = True


def tags(tenant_id: str, schema_signature: str, policy_version: int | None, count: int) -> NDArray[np.int64]:
    """The tags of `count` samples, int64 [count, 3]: digests of tenant and schema, and the policy version."""
    version = NO_VERSION if policy_version is None else policy_version
    return np.tile(np.array([_digest(tenant_id), _digest(schema_signature), version], dtype=np.int64), (count, 1))


def check_tags(found: NDArray[np.int64], meta: SampleMetadata) -> None:
    """Hold the tags of the rows of `meta` against what `meta` says.

    Raises:
        DataFault: a sample is another tenant's, schema's or version's.
    """
    wanted = tags(meta.tenant_id, meta.schema_signature, meta.policy_version, meta.size)
    if not np.array_equal(found, wanted):
        row = meta.start + int(np.argmax((found != wanted).any(axis=1)))
        raise DataFault(
            f"tags of partition {meta.partition_id}: sample {row} is not of tenant {meta.tenant_id!r}, schema "
            f"{meta.schema_signature[:12]!r}, policy version {meta.policy_version}; the microbatch is not used"
        )


def check_rows(rows: NDArray[Any], declared: FieldInfo, where: str) -> None:
    """Hold what was read against what its writer declared.

    Raises:
        DataFault: another shape or dtype.
    """
    if rows.shape[1:] != declared.shape[1:] or rows.dtype.str != declared.dtype:
        raise DataFault(
            f"{where}: {rows.dtype.str}{list(rows.shape)} does not fit the declared {declared.dtype}"
            f"{list(declared.shape)}; collect anew"
        )


def checked_fields(partition_id: str, arrays: Arrays) -> int:
    """The common row count n of `arrays` [n, ...].

    Raises:
        SpecError: a name, shape or dtype that cannot be stored.
    """
    where = f"fields of partition {partition_id}"
    if not arrays:
        raise SpecError(refusal(where, {}, "one field or more", "give data"))
    for name, array in arrays.items():
        checked_id(name, f"field name in partition {partition_id}")
        if name in _RESERVED:
            raise SpecError(refusal(where, name, f"names other than {', '.join(_RESERVED)}", "rename it"))
        if array.ndim < 1 or array.dtype.kind not in "biuf":  # objects would need pickle
            raise SpecError(
                refusal(
                    where, f"{name}: {array.dtype}{list(array.shape)}", "numbers or booleans [n, ...]", "convert it"
                )
            )
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or not next(iter(counts.values())):
        raise SpecError(refusal(where, counts, "the same count of at least 1 row in each", "give one row a sample"))
    return next(iter(counts.values()))


def check_encoded(partition_id: str, rest: Arrays, encoded: Arrays, chunk: int, encoded_chunk: int) -> None:
    """Hold fields that were encoded before against those that come with them.

    Raises:
        SpecError: a field is in both, or the chunks differ.
    """
    where = f"fields of partition {partition_id}"
    twice = sorted(set(rest) & set(encoded))
    if twice:
        raise SpecError(refusal(where, f"{', '.join(twice)} twice", "each field once", "leave it out of one of them"))
    if encoded and chunk != encoded_chunk:
        where = f"chunk of partition {partition_id}"
        raise SpecError(refusal(where, chunk, str(encoded_chunk), "encode with the same"))


def indexed_instructions(of_rows: Sequence[str]) -> tuple[list[str], dict[str, NDArray[np.int32]]]:
    """The instructions of rows as a partition holds them: the distinct ones, and the field that points into them.

    There is no field where all rows have one instruction; `PartitionAttributes.row_instructions` is the way back.
    """
    distinct = sorted(set(of_rows))
    if len(distinct) <= 1:
        return distinct, {}
    place = {text: i for i, text in enumerate(distinct)}
    return distinct, {"instruction_index": np.array([place[text] for text in of_rows], np.int32)}


def check_instructions(partition_id: str, arrays: Arrays, instructions: Sequence[str]) -> None:
    """Hold the field `instruction_index` against the instructions it points into.

    Raises:
        SpecError: there are several instructions and no index.
        TenantFault: an index out of range.
    """
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


def encode_attributes(attributes: PartitionAttributes) -> dict[str, Any]:
    """As JSON for the group."""
    return {"format": FORMAT, **asdict(attributes)}


def read_attributes(folder: Path, partition_id: str) -> PartitionAttributes:
    """The attributes of the Zarr group in `folder`.

    Raises:
        DataFault: they are missing, torn or of another format.
    """
    try:
        stored = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        if stored.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        stored["instructions"] = tuple(stored["instructions"])
        stored["fields"] = {k: FieldInfo(tuple(v["shape"]), v["dtype"]) for k, v in stored["fields"].items()}
        return PartitionAttributes(**stored)
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise DataFault(f"partition {partition_id}: its attributes cannot be read ({error}); collect anew") from error


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
