"""LoRA adapters in the files that PEFT writes and reads.

Layout of a folder:

    adapter_config.json           fields of PEFT's LoraConfig
    adapter_model.safetensors     {"base_model.model.<path of a linear>.lora_A.weight": [r, inputs], …}

PEFT reads these two and nothing else, so other files may lie beside them. Weights of PEFT's older form
(`adapter_model.bin`, a pickle) are never opened.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from configs.errors import DataFault, refusal
from storage.atomic import new_folder, write_synced

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
MOST_CONFIG, MOST_TENSORS = 1 << 20, 4 << 30
"""Bytes that are read at most; the largest adapters of a base of several billion parameters have one or two GiB."""

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}


def write_adapter(
    folder: Path,
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    *,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write an adapter; the folder appears whole or not at all.

    Args:
        folder: that does not exist yet.
        tensors: by PEFT's names.
        config: fields of its `LoraConfig`.
        beside: contents of further files, by name.

    Raises:
        Conflict: the folder exists.
        DataFault: it cannot be written there.
    """
    files = {CONFIG: encode_object(config), TENSORS: encode_tensors(tensors), **(beside or {})}
    try:
        with new_folder(folder, "adapter") as building:
            for name, content in files.items():
                write_synced(building / name, content)
    except OSError as error:
        raise DataFault(
            refusal(str(folder), str(error), "a new folder in one that can be written", "choose another place")
        ) from error


def encode_tensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """A safetensors file as PEFT writes it."""
    return save({name: np.ascontiguousarray(a) for name, a in tensors.items()}, metadata={"format": "pt"})


def encode_object(value: Mapping[str, Any]) -> bytes:
    """A JSON file that a person can read."""
    return json.dumps(dict(value), indent=2, sort_keys=True).encode()


def read_adapter(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Tensors, float32 whatever floating-point type they are stored in, and the configuration.

    Raises:
        DataFault: a file is missing, no regular file, too large, or cannot be read.
    """
    content = {name: _read(folder / name, most) for name, most in ((CONFIG, MOST_CONFIG), (TENSORS, MOST_TENSORS))}
    try:
        config = json.loads(content[CONFIG])
        stored = deserialize(content[TENSORS])
    except (ValueError, RecursionError, SafetensorError) as error:
        raise DataFault(
            refusal(str(folder), str(error), f"{CONFIG} and {TENSORS}", "save the adapter again")
        ) from error
    if not isinstance(config, dict):
        raise DataFault(refusal(f"{folder}/{CONFIG}", type(config).__name__, "an object", "save the adapter again"))
    return {name: _float32(folder, name, tensor) for name, tensor in stored}, config


def _read(path: Path, most: int) -> bytes:
    """The whole file. Not waiting: a pipe under that name would hold its reader up for ever."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                given = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
                raise DataFault(refusal(str(path), given, f"a file of at most {most} bytes", "save the adapter again"))
            return file.read(most)
    except OSError as error:
        raise DataFault(
            refusal(str(path), str(error), f"{CONFIG} and {TENSORS}", "save the adapter with PEFT's safetensors")
        ) from error


def _float32(folder: Path, name: str, tensor: Mapping[str, Any]) -> NDArray[np.float32]:
    raw, dtype = bytes(tensor["data"]), tensor["dtype"]
    if dtype == "BF16":  # the upper half of a float32, which numpy has no name for
        flat: NDArray[np.float32] = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _DTYPES:
        flat = np.frombuffer(raw, _DTYPES[dtype]).astype(np.float32)
    else:
        possible = f"BF16, {', '.join(sorted(_DTYPES))}"
        raise DataFault(refusal(f"{folder}/{TENSORS}.{name}", dtype, possible, "save the adapter in one of these"))
    try:
        return flat.reshape(tensor["shape"])
    except ValueError as error:  # no elements along one dimension, too many along another
        raise DataFault(
            refusal(f"{folder}/{TENSORS}.{name}", tensor["shape"], f"{len(flat)} numbers", "save the adapter again")
        ) from error
