"""A platform of a benchmark's own: real processes under a temporary home, gone when it ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.home import Home
from configs.platform import PlatformAddresses
from joynexus import processes


@contextmanager
def temporary_platform(cluster: str = "laptop") -> Iterator[tuple[Home, PlatformAddresses]]:
    """Home and addresses of a platform of this cluster preset; `JOYNEXUS_HOME` of this process names the home."""
    with tempfile.TemporaryDirectory(prefix="joynexus-bench-") as folder:
        home = Home(Path(folder))
        os.environ["JOYNEXUS_HOME"] = folder
        addresses = processes.ensure_up(home, cluster)
        try:
            yield home, addresses
        finally:
            processes.down(home)
