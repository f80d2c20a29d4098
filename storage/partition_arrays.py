"""One array of a partition: how it is chunked and compressed, and the proof that all of it is there when read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from configs.errors import DataFault

# Rows narrower than this go into one chunk: their whole column is small, and files cost more than bytes.
_WIDE_ROW_BYTES = 1024


def write_array(group: zarr.Group, name: str, array: NDArray[Any], chunk: int) -> None:
    """Write `array` [n, ...] whole, `chunk` rows a chunk if its rows are wide."""
    n = len(array)
    row_bytes = array.nbytes // n
    rows = min(n, chunk) if row_bytes >= _WIDE_ROW_BYTES else n
    stored = group.create_array(
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
    stored[...] = array


def read_rows(folder: Path, name: str, count: int, start: int, stop: int, whole_up_to: int) -> NDArray[Any]:
    """All `count` rows if they take no more than `whole_up_to` bytes, else rows [start, stop).

    Raises:
        DataFault: the array or one of its chunks is missing or torn, or it has another number of rows.
    """
    where = f"field {name} in {folder.name}"
    try:
        array = zarr.open_array(folder / name, mode="r", zarr_format=3)
        if array.shape[0] != count:
            raise DataFault(f"{where}: {array.shape[0]} rows where {count} were written; collect anew")
        lost = array.nchunks - array.nchunks_initialized
        if lost:
            raise DataFault(f"{where}: {lost} of {array.nchunks} chunks are missing; collect anew")
        return np.asarray(array[...] if array.nbytes <= whole_up_to else array[start:stop])
    except DataFault:
        raise
    except FileNotFoundError:
        raise DataFault(f"{where}: the array is missing; collect anew") from None
    except (ValueError, RuntimeError, OSError) as error:
        raise DataFault(f"{where}: a chunk is torn ({error}); collect anew") from error
