"""The platform as a whole: up, down and status on real processes, and what happens when parts of it are killed."""

from __future__ import annotations

from configs.home import Home
from configs.platform import PlatformAddresses
from joynexus import processes


def test_up_is_idempotent_and_names_the_same_addresses(platform: PlatformAddresses, home: Home) -> None:
    """A second `up` finds everything as it is: same addresses, same processes."""
    before = [row.pid for row in processes.status(home)]
    lines: list[str] = []
    assert processes.ensure_up(home, progress=lines.append) == platform
    assert lines == ["already up"]
    assert [row.pid for row in processes.status(home)] == before
