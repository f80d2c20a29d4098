"""Columns of a LeRobot dataset's data files as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray


def matrix(column: pa.ChunkedArray, width: int) -> NDArray[Any]:
    """A column of scalars or of equally long lists as [rows, width].

    Raises:
        ValueError: rows of another width, or without a value.
    """
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    rows = len(array)
    if array.null_count:
        raise ValueError(f"{array.null_count} rows without a value")
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = pc.list_value_length(array)
        if rows and pc.min_max(lengths).as_py() != {"min": width, "max": width}:
            raise ValueError(f"rows of other widths than {width}")
        array = array.flatten()
    if array.null_count or not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise ValueError(f"{array.type} with {array.null_count} missing, where numbers are wanted")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, width)


def picture_bytes(group: pq.RowGroupMetaData, prefixes: tuple[str, ...]) -> int:
    """Of the columns whose path begins so, not compressed."""
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema.startswith(prefixes))
