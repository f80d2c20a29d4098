"""Addresses of servers; environment hosts, which have no pydantic, know them too."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})", re.ASCII)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        ValueError: if it is not one.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError(f"got {address!r}; possible: host:port, such as 10.0.0.7:7400; correct it")
    return found["host"], int(found["port"])
