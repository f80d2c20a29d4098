"""Folders that appear whole or not at all: built under a temporary name, renamed once, removed on any failure.

POSIX file systems only; an object store has no rename and needs a commit marker written last instead.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from configs.errors import Conflict, SpecError, refusal

WRITING = ".writing"  # holds folders under construction; a leading dot keeps it out of every listing
_ID = re.compile(r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$")
_MAX_ID = 200


def checked_id(value: str, field: str) -> str:
    """Return `value` if it can name one folder inside a store: no path, no leading dot, at most 200 characters.

    Raises:
        SpecError: otherwise.
    """
    if len(value) > _MAX_ID or not _ID.fullmatch(value):
        raise SpecError(
            refusal(field, value, f"1 to {_MAX_ID} letters, digits, '_', '-' and single dots", "use a name, not a path")
        )
    return value


@contextmanager
def new_folder(final: Path, what: str, *, synced: bool = True) -> Iterator[Path]:
    """A folder to fill; it becomes `final` when the block ends without error.

    Two writers may build at one time: the rename decides, and the later one is refused. A writer that was killed
    leaves its folder under `.writing`, where no reader looks (`sweep` removes it). `synced` waits until the new name is
    on the disk, which what can be made again after a power cut does not need.

    Raises:
        Conflict: `final` exists, before the block or at its end.
    """
    _refuse_existing(final, what)
    building = final.parent / WRITING / f"{final.name}.{uuid.uuid4().hex}"
    building.mkdir(parents=True)
    try:
        yield building
        try:
            os.rename(building, final)  # unlike shutil.move this never moves *into* an existing folder
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _refuse_existing(final, what)
            raise
        if synced:
            _sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def remove_folder(folder: Path, executor: Executor | None = None) -> bool:
    """Remove `folder` so that no reader sees half of it; False if it was not there.

    With an executor its name is free on return, and the executor deletes the files; what a kill leaves of them lies
    under `.writing` (`sweep`).
    """
    leaving = _set_aside(folder)
    if leaving is None:
        return False
    if executor is None:
        shutil.rmtree(leaving, ignore_errors=True)
    else:
        executor.submit(shutil.rmtree, leaving, ignore_errors=True)
    return True


def replace_folder(new: Path, final: Path) -> None:
    """`new`, whole, takes the place of `final`, which may be there or not.

    Of several that replace one at a time the last wins. A kill between the two renames leaves the name free and both
    folders whole under `.writing`.
    """
    while True:
        leaving = _set_aside(final)
        try:
            os.rename(new, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another one was faster: it is replaced too
                if leaving is not None:
                    os.rename(leaving, final)
                    leaving = None
                raise
        finally:
            if leaving is not None:
                shutil.rmtree(leaving, ignore_errors=True)


def _set_aside(folder: Path) -> Path | None:
    """Rename `folder` to where no reader looks; None if it was not there."""
    leaving = folder.parent / WRITING / f"{folder.name}.{uuid.uuid4().hex}.removed"
    leaving.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(folder, leaving)
    except FileNotFoundError:
        return None
    return leaving


def sweep(parent: Path, older_than_s: float = 0.0) -> int:
    """Remove what killed writers left under `parent`; returns how many.

    A writer that is at work is not told from a dead one but by the time since its folder was last added to.
    """
    before = time.time() - older_than_s
    entries = list((parent / WRITING).glob("*")) if (parent / WRITING).is_dir() else []
    left = [folder for folder in entries if older_than_s == 0 or _modified(folder) <= before]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return len(left)


def _modified(folder: Path) -> float:
    """When the folder was last added to; for ever from now on if it is gone, since its writer has just renamed it."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _refuse_existing(final: Path, what: str) -> None:
    if final.exists():
        raise Conflict(
            refusal(what, final.name, "a name that is not taken", "it was written before and stays as it is")
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
