"""Parameters as files: safetensors beside a manifest that names each file's digest, so that a torn one is noticed.

Encoding and decoding are pure; `write_payload` fills a folder that its caller makes visible at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from configs.errors import DataFault, SpecError, refusal
from configs.signature import canonical_json, digest
from storage.atomic import write_synced

MANIFEST = "manifest.json"
FORMAT = 1

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Payload:
    """Groups of named arrays and what their writer said of them."""

    groups: dict[str, dict[str, NDArray[Any]]]  # {group: {name: array}}; only the groups that were asked for
    stored: tuple[str, ...]  # all groups that were saved
    manifest: dict[str, Any]
    digest: str  # of the whole: equal digests mean equal contents


def encode(groups: Mapping[str, Arrays], manifest: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """Files by name (one safetensors a group, and the manifest) and the digest of the whole.

    Raises:
        SpecError: the manifest is no JSON, or an array is of objects.
    """
    files = {}
    for group, arrays in groups.items():
        converted = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for name, array in converted.items():
            if array.dtype.kind not in "biuf":
                raise SpecError(refusal(f"{group}.{name}", str(array.dtype), "numbers or booleans", "convert it"))
        # ascontiguousarray makes a scalar 1-d; the shape is part of what must come back
        files[f"{group}.safetensors"] = save({n: a.reshape(np.shape(arrays[n])) for n, a in converted.items()})
    described = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    try:
        whole = {"format": FORMAT, "files": described, "manifest": json.loads(canonical_json(dict(manifest)))}
    except (TypeError, ValueError) as error:
        raise SpecError(f"manifest: not JSON ({error}); give text, finite numbers, lists and mappings") from error
    return {**files, MANIFEST: json.dumps(whole, indent=2, sort_keys=True).encode()}, digest(whole)


def write_payload(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write encoded files into `folder`, each on the disk when this returns."""
    for name, content in files.items():
        write_synced(folder / name, content)


def read_digest(folder: Path) -> str:
    """The digest of the payload in `folder`, from its manifest alone."""
    return digest(_read_manifest(folder))


def read_payload(folder: Path, groups: tuple[str, ...] | None = None) -> Payload:
    """Read and verify `groups` (None: all that were saved).

    Raises:
        DataFault: a file is missing or torn, or a group was not saved.
    """
    whole = _read_manifest(folder)
    stored = tuple(sorted(name.removesuffix(".safetensors") for name in whole["files"]))
    read = {group: _read_group(folder, group, whole["files"]) for group in (stored if groups is None else groups)}
    return Payload(groups=read, stored=stored, manifest=whole["manifest"], digest=digest(whole))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        whole = json.loads(path.read_bytes())
        if whole["format"] != FORMAT or not isinstance(whole["files"], dict) or not isinstance(whole["manifest"], dict):
            raise ValueError(f"not a manifest of format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFault(f"{folder.name}: {MANIFEST} cannot be read ({error}); use another version") from error
    return whole


def _read_group(folder: Path, group: str, files: dict[str, Any]) -> dict[str, NDArray[Any]]:
    name = f"{group}.safetensors"
    if name not in files:
        saved = ", ".join(sorted(n.removesuffix(".safetensors") for n in files))
        raise DataFault(
            refusal(f"part of {folder.name}", group, saved, "it was not saved; do without, or save it first")
        )
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise DataFault(f"{folder.name}/{name}: missing ({error}); use another version") from error
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise DataFault(
            f"{folder.name}/{name}: torn: {len(content)} bytes are not the {files[name]['bytes']} that its manifest "
            "names; use another version"
        )
    try:
        return load(content)
    except SafetensorError as error:
        raise DataFault(f"{folder.name}/{name}: not safetensors ({error}); use another version") from error
