"""A platform of a benchmark's own: real processes under a temporary home, gone when it ends."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from configs.home import Home
from configs.platform import PlatformAddresses
from joynexus import processes


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def temporary_platform(cluster: str = "laptop") -> Iterator[tuple[Home, PlatformAddresses]]:
    """Home and addresses of a platform of this cluster preset; `JOYNEXUS_HOME` of this process names the home."""
    signal.signal(signal.SIGTERM, _end)  # else its processes would outlive a benchmark that is told to end
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        home = Home(Path(folder))
        os.environ["JOYNEXUS_HOME"] = folder
        addresses = processes.ensure_up(home, cluster)
        try:
            yield home, addresses
        finally:
            processes.down(home)
