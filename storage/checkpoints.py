"""A tenant's training state by version: parameters, optimizer state and a manifest, whole or not at all.

Layout of `root`:

    <name>/<version, 8 digits>/
        manifest.json            digests of the files and what the writer said (tenant, schema, counters, ...)
        params.safetensors       what inference needs
        optimizer.safetensors    what only training needs (moments, step counts, RNG state); may be absent
    <name>/.writing/             under construction; no reader looks here
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Conflict, SpecError, UnknownObject, refusal
from configs.spec import checked_name
from storage.atomic import new_folder, remove_folder, sweep
from storage.payload import encode, read_digest, read_payload, write_payload


@dataclass(frozen=True)
class CheckpointRef:
    """Where a checkpoint lies and what it is: equal digests mean equal contents."""

    name: str
    version: int
    path: str
    digest: str
    with_optimizer: bool


@dataclass(frozen=True)
class Checkpoint:
    """What was saved under a version; `optimizer` is None where it was not asked for."""

    version: int
    params: dict[str, NDArray[Any]]
    optimizer: dict[str, NDArray[Any]] | None
    manifest: dict[str, Any]
    digest: str


class CheckpointStore:
    """Checkpoints under one folder, for instance a tenant's `checkpoints/<task>`."""

    def __init__(self, root: Path) -> None:
        self._root = Path(root)

    def save(
        self,
        *,
        version: int,
        params: Mapping[str, NDArray[Any]],
        optimizer: Mapping[str, NDArray[Any]] | None,
        manifest: Mapping[str, Any],
        name: str = "policy",
    ) -> CheckpointRef:
        """Write a checkpoint; all of it is on the disk when this returns. Saving the same again changes nothing.

        Raises:
            Conflict: the version exists with other contents.
            SpecError: a negative version, or contents that cannot be stored.
        """
        folder = self._folder(name, version)
        groups: dict[str, Mapping[str, NDArray[Any]]] = {"params": params}
        if optimizer is not None:
            groups["optimizer"] = optimizer
        files, digest = encode(groups, manifest)
        ref = CheckpointRef(name, version, str(folder), digest, optimizer is not None)
        try:
            with new_folder(folder, f"version of checkpoint {name}") as building:
                write_payload(building, files)
        except Conflict:
            if read_digest(folder) != digest:
                raise Conflict(
                    refusal(
                        f"version of checkpoint {name}",
                        version,
                        "the same contents or a new version",
                        "it was saved before with other contents and stays as it is",
                    )
                ) from None
        return ref

    def load(self, version: int | None = None, *, with_optimizer: bool = False, name: str = "policy") -> Checkpoint:
        """Read and verify a checkpoint.

        Args:
            version: None is the newest.
            with_optimizer: Read the optimizer state too.
            name: Under which it was saved.

        Raises:
            UnknownObject: there is no such version; the known ones are listed.
            DataFault: a file is missing or torn, or optimizer state is asked for and none was saved.
        """
        known = self.versions(name)
        if not known or (version is not None and version not in known):
            listed = ", ".join(map(str, known[-8:])) or "none"
            raise UnknownObject(refusal(f"version of checkpoint {name}", version, listed, "save it first"))
        chosen = known[-1] if version is None else version
        wanted = ("params", "optimizer") if with_optimizer else ("params",)
        payload = read_payload(self._folder(name, chosen), wanted)
        return Checkpoint(
            version=chosen,
            params=payload.groups["params"],
            optimizer=payload.groups.get("optimizer"),
            manifest=payload.manifest,
            digest=payload.digest,
        )

    def versions(self, name: str = "policy") -> list[int]:
        """Versions that are there whole, ascending."""
        folder = self._root / checked_name(name)
        return sorted(int(p.name) for p in folder.glob("[0-9]*") if p.is_dir()) if folder.is_dir() else []

    def remove(self, version: int, name: str = "policy") -> bool:
        """Remove a version; False if there was none."""
        return remove_folder(self._folder(name, version))

    def sweep(self, name: str = "policy") -> int:
        """Remove what killed writers left behind; only while no writer is active. Returns how many."""
        return sweep(self._root / checked_name(name))

    def _folder(self, name: str, version: int) -> Path:
        if version < 0:
            raise SpecError(refusal(f"version of checkpoint {name}", version, "0 or more", "count updates from 0"))
        return self._root / checked_name(name) / f"{version:08d}"


def arrays_equal(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> bool:
    """Whether two payloads are the same to the bit (names, dtypes, shapes, bytes; NaN equals itself)."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and np.asarray(a[k]).tobytes() == b[k].tobytes()
        for k in a
    )
