"""Arrays of a partition in Zarr: how they are chunked and compressed, and the proof that all is there when read.

Every call makes one trip to Zarr's event loop for all its arrays: array by array it takes twice the CPU and several
times as long. Zarr writes into memory, and its files are then written in one go: its store for folders hands each of
some thirty small files to a thread, which takes twice as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr.api.asynchronous as zarr_async
from numpy.typing import NDArray
from zarr import AsyncGroup
from zarr.core.buffer import Buffer
from zarr.core.sync import sync  # Zarr's own way from threads to its loop; its public calls are this, one by one
from zarr.storage import MemoryStore

from configs.errors import DataFault

# Rows narrower than this go into one chunk: their whole column is small, and files cost more than bytes.
_WIDE_ROW_BYTES = 1024


class EncodedFields:
    """Arrays [n, ...] as Zarr will store them, in memory: what is known early is encoded while the rest is computed.

    Attributes:
        arrays: what was added.
        chunk: rows a chunk where rows are wide.
    """

    def __init__(self, chunk: int) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.chunk = chunk
        self._files: dict[str, Buffer] = {}

    def add(self, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any] | None = None) -> None:
        """Encode further arrays, and the group's attributes where they are given."""
        sync(
            _write_group(MemoryStore(self._files), None if attributes is None else dict(attributes), arrays, self.chunk)
        )
        self.arrays.update(arrays)

    def write(self, folder: Path) -> None:
        """Write what was encoded."""
        made: set[Path] = set()
        for key, contents in self._files.items():
            path = folder / key
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            path.write_bytes(contents.as_buffer_like())


def encode_fields(arrays: Mapping[str, NDArray[Any]], chunk: int) -> EncodedFields:
    """Some of a partition's fields, for `PartitionStore.put`."""
    encoded = EncodedFields(chunk)
    encoded.add(arrays)
    return encoded


def write_group(folder: Path, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], chunk: int) -> None:
    """Create a Zarr group in `folder` and write `arrays` [n, ...] whole, `chunk` rows a chunk where rows are wide."""
    encoded = EncodedFields(chunk)
    encoded.add(arrays, attributes)
    encoded.write(folder)


def read_arrays(
    folders: Mapping[str, Path], count: int, start: int, stop: int, whole_up_to: int
) -> dict[str, NDArray[Any]]:
    """The arrays {name: group's folder}: all `count` rows of those of up to `whole_up_to` bytes, else [start, stop).

    Raises:
        DataFault: an array or one of its chunks is missing or torn, or it has another number of rows.
    """
    return sync(_read_arrays(folders, count, start, stop, whole_up_to))


async def _write_group(
    store: MemoryStore, attributes: dict[str, Any] | None, arrays: Mapping[str, NDArray[Any]], chunk: int
) -> None:
    group = await zarr_async.open_group(store=store, mode="a", zarr_format=3)
    if attributes is not None:
        await group.update_attributes(attributes)
    writes = (_write_array(group, name, array, chunk) for name, array in arrays.items())
    await asyncio.gather(*writes)


async def _write_array(group: AsyncGroup, name: str, array: NDArray[Any], chunk: int) -> None:
    n = len(array)
    rows = min(n, chunk) if array.nbytes // n >= _WIDE_ROW_BYTES else n
    stored = await group.create_array(
        name,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(rows, *array.shape[1:]),
        # Pictures shrink thirtyfold (rendered ones), numbers hardly at all.
        compressors="auto" if array.dtype == np.uint8 and array.ndim > 2 else None,
        # NaN shows where a chunk of floats is gone; and every chunk is written, also one that equals the fill value
        # (by default it is left out, and then a lost chunk and a chunk of zeros look the same).
        fill_value=np.nan if array.dtype.kind == "f" else None,
        config={"write_empty_chunks": True},
    )
    await stored.setitem(Ellipsis, array)


async def _read_arrays(
    folders: Mapping[str, Path], count: int, start: int, stop: int, whole_up_to: int
) -> dict[str, NDArray[Any]]:
    read = (_read_array(folder, name, count, start, stop, whole_up_to) for name, folder in folders.items())
    return dict(zip(folders, await asyncio.gather(*read), strict=True))


async def _read_array(folder: Path, name: str, count: int, start: int, stop: int, whole_up_to: int) -> NDArray[Any]:
    where = f"field {name} in {folder.name}"
    try:
        array = await zarr_async.open_array(store=folder / name, mode="r", zarr_format=3)
        if array.shape[0] != count:
            raise DataFault(f"{where}: {array.shape[0]} rows where {count} were written; collect anew")
        lost = array.nchunks - await array.nchunks_initialized()
        if lost:
            raise DataFault(f"{where}: {lost} of {array.nchunks} chunks are missing; collect anew")
        rows = Ellipsis if array.nbytes <= whole_up_to else slice(start, stop)
        return np.asarray(await array.getitem(rows))
    except FileNotFoundError:
        raise DataFault(f"{where}: the array is missing; collect anew") from None
    except (ValueError, RuntimeError, OSError) as error:
        raise DataFault(f"{where}: a chunk is torn ({error}); collect anew") from error
