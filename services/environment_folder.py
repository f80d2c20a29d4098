"""The folder of one service's hosts, with their sockets and logs, and the removal of those that killed services left.

Paths of sockets are limited to 107 bytes, so it lies among the temporary files and not under the home folder. Its
service holds a lock on `owner.lock` inside for as long as it lives, however it ends: a folder whose lock is free is
nobody's, and the next service of the same user removes it. It gets its name only when the lock is held.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "joynexus-hosts-"
_LOCK = "owner.lock"


class HostFolder:
    """A new folder, and the lock that says that it is in use. Left-overs of killed services are removed first.

    Attributes:
        path: of the folder, readable by this user alone.
    """

    def __init__(self, among: Path | None = None) -> None:
        """Make it in `among`, by default the folder of temporary files."""
        among = among or Path(tempfile.gettempdir())
        for removed in sweep(among):
            logger.info("%s was left by a service that is gone; removed", removed)
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=among))
        # Not inherited by the hosts, which may outlive this process by a moment.
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(among / made.name.removeprefix("."))

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(among: Path) -> list[Path]:
    """Remove this user's host folders whose service is gone; what was removed."""
    return [path for path in sorted(among.glob(f"{PREFIX}*")) if _ours(path) and _removed(path)]


def _ours(path: Path) -> bool:
    """Everybody may write among temporary files: a link, or another user's folder, is left alone."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _removed(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # without a lock nobody can tell whose it is
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
