"""The actors that the platform flow places."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from distributed import Client

from configs import presets
from configs.home import Home
from configs.platform import PlatformAddresses
from services import lookup
from tasks.connection import Platform
from tasks.services import ACTORS, declarations


@pytest.mark.parametrize("actor", ACTORS.values(), ids=lambda actor: actor.__name__)
def test_every_service_has_a_ping(actor: type) -> None:
    """`lookup.reachable` calls it; without one the platform flow would put a living service away."""
    assert inspect.iscoroutinefunction(actor.ping)  # type: ignore[attr-defined]


def test_services_are_made_with_arguments_that_they_take_and_the_bounds_of_the_cluster(tmp_path: Path) -> None:
    """Their constructors' signatures; the training service's bounds as a preset declares them."""
    cluster = presets.cluster("gpu").model_copy(update={"max_feature_bytes": 11, "max_update_feature_bytes": 12})
    addresses = PlatformAddresses(str(tmp_path), "gpu", "http://127.0.0.1:1/api", "tcp://127.0.0.1:1", "sqlite://")
    client = Client.__new__(Client)  # nobody is asked
    found = declarations(Platform(addresses, client, cluster, Home(tmp_path)))
    assert found.keys() == ACTORS.keys()
    for name, (_, arguments) in found.items():
        inspect.signature(ACTORS[name]).bind(**arguments)
    _, arguments = found[lookup.TRAINING]
    assert (arguments["max_feature_bytes"], arguments["max_update_feature_bytes"]) == (11, 12)
