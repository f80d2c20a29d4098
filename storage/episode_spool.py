"""Episodes on disk on their way into a dataset: each a file that is there whole or not at all, found by its number.

They come in any order and are read back one at a time, so that a dataset of any size is written in order of episodes
with the pictures of one in memory; and whoever was killed on the way goes on with what is there.
"""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from configs.errors import DataFault

_FACTS = "facts.json"
_SUFFIX = ".episode"


class EpisodeSpool:
    """A folder of episodes; several threads may put, each its own numbers."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made with the first episode."""
        self.folder = Path(folder)

    def put(self, number: int, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Keep an episode, in place of one of the same number; `facts` are JSON."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{number}.{uuid.uuid4().hex}.partial"
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
                for name, array in arrays.items():
                    buffer = io.BytesIO()
                    npy.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
                    file.writestr(f"{name}.npy", buffer.getbuffer())
                file.writestr(_FACTS, json.dumps(dict(facts), allow_nan=False))
            os.replace(partial, self._path(number))
        finally:
            partial.unlink(missing_ok=True)

    def facts(self, number: int) -> dict[str, Any] | None:
        """What was said of an episode; None where there is none, or a torn one, which is as none."""
        try:
            with zipfile.ZipFile(self._path(number)) as file:
                return dict(json.loads(file.read(_FACTS)))
        except FileNotFoundError:
            return None
        except (zipfile.BadZipFile, KeyError, ValueError, zlib.error, EOFError):
            self._path(number).unlink(missing_ok=True)
            return None

    def get(self, number: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """An episode's arrays and facts.

        Raises:
            DataFault: it is torn; it is removed, so that who starts again makes it anew.
        """
        try:
            with zipfile.ZipFile(self._path(number)) as file:
                arrays = {
                    name.removesuffix(".npy"): npy.read_array(io.BytesIO(file.read(name)), allow_pickle=False)
                    for name in file.namelist()
                    if name != _FACTS
                }
                return arrays, dict(json.loads(file.read(_FACTS)))
        except (zipfile.BadZipFile, KeyError, ValueError, zlib.error, EOFError) as error:
            self._path(number).unlink(missing_ok=True)
            raise DataFault(f"episode {number} in {self.folder.name}: it is torn ({error}); start again") from error

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_SUFFIX}"
