"""Who may write a dataset of a name: one writer at a time, whose death frees it and leaves nothing behind."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import Conflict, SpecError, refusal
from configs.spec import checked_name
from storage.atomic import WRITING

_CLAIMS = ".claims"


@contextmanager
def claimed(datasets: Path, name: str) -> Iterator[Path]:
    """The folder in which a writer of dataset `name` may work, until the block ends; below `datasets`, unseen.

    The claim is a lock of the operating system, so it ends with its process, however that ends. Claims across machines
    hold where the file system carries such locks.

    Raises:
        Conflict: another writer of that name is at work.
    """
    building = datasets / WRITING
    for folder in (building, datasets / _CLAIMS):
        folder.mkdir(parents=True, exist_ok=True)
    # The empty file stays: were it removed, two could hold a lock each, on the former file and on the new one.
    with open(datasets / _CLAIMS / checked_name(name), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                refusal("dataset", name, "a name that nobody is writing", "wait for the other one, or choose another")
            ) from None
        yield building


def refuse_existing(datasets: Path, name: str, field: str) -> None:
    """Hold the name of a dataset to be written against those that are there.

    Raises:
        SpecError: it is taken.
    """
    if (datasets / name).exists():
        raise SpecError(refusal(field, name, "the name of a dataset that is not there yet", "choose another name"))


def clean(building: Path, name: str, keep: Path | None = None) -> list[str]:
    """Remove what dead writers of dataset `name` left in `building`, but for `keep`; only under a claim.

    Returns:
        Names of what was removed.
    """
    # A name has no dot, so what begins with it and one is its own. Writers of a replacement build one level deeper.
    found = [path for at in (building, building / WRITING) for path in at.glob(f"{name}.*")]
    left = sorted(path for path in found if path.is_dir() and path != keep)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]
