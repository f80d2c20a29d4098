"""The actors that the platform flow places."""

from __future__ import annotations

import inspect

import pytest

from tasks.services import ACTORS


@pytest.mark.parametrize("actor", ACTORS.values(), ids=lambda actor: actor.__name__)
def test_every_service_has_a_ping(actor: type) -> None:
    """`lookup.reachable` calls it; without one the platform flow would put a living service away."""
    assert inspect.iscoroutinefunction(actor.ping)  # type: ignore[attr-defined]
