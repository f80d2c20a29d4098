"""What a flow holds while it runs: a Dask client by address, the services by name, the installation's folders."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from distributed import Client

from configs import presets
from configs.cluster import ClusterSpec
from configs.errors import NoReply
from configs.home import Home
from configs.platform import PlatformAddresses, addresses
from services import lookup

logger = logging.getLogger(__name__)

LONGEST_CALLS = 36
"""With ten minutes a call a rollout or an evaluation may take six hours."""


class Platform:
    """A connection to the running platform; services are looked up once and again after `forget`."""

    def __init__(self, addresses: PlatformAddresses, client: Client, cluster: ClusterSpec, home: Home) -> None:
        self.addresses = addresses
        self.client = client
        self.cluster = cluster
        self.home = home
        self._services: dict[str, lookup.Service] = {}

    async def service(self, name: str) -> lookup.Service:
        """The service `name`.

        Raises:
            ServiceUnavailable: if it is not published or lost.
        """
        if name not in self._services:
            self._services[name] = await lookup.service(name, self.client, timeout_s=self.cluster.call_timeout_s)
        return self._services[name]

    async def patiently(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call that may take longer than `call_timeout_s`: repeated while its service answers a ping.

        For methods that join a call under way by its id; another one would be carried out twice.

        Raises:
            NoReply: the service is silent to a ping too, or it was asked `LONGEST_CALLS` times.
        """
        for left in reversed(range(LONGEST_CALLS)):
            found = await self.service(name)
            try:
                return await getattr(found, method)(*args, **kwargs)
            except NoReply as late:
                self.forget()
                if not left or await lookup.reachable(name, self.client) is None:
                    raise
                logger.info("%s; it answers, so it is asked again", late)
        raise AssertionError("the last call returns or raises")

    def forget(self) -> None:
        """Look services up again at the next use; for callers that saw ServiceUnavailable."""
        self._services.clear()

    async def scheduler(self) -> lookup.Service:
        """The Training Scheduler."""
        return await self.service(lookup.SCHEDULER)

    async def training(self) -> lookup.Service:
        """The Training Model Service."""
        return await self.service(lookup.TRAINING)

    async def inference(self) -> lookup.Service:
        """The Inference Model Service."""
        return await self.service(lookup.INFERENCE)

    async def environments(self) -> lookup.Service:
        """The Environment Service."""
        return await self.service(lookup.ENVIRONMENTS)

    async def metrics(self) -> lookup.Service:
        """The Metrics Service."""
        return await self.service(lookup.METRICS)


@asynccontextmanager
async def platform_connection(home: Home | None = None) -> AsyncIterator[Platform]:
    """Connect to the platform under `home` (None: that of `JOYNEXUS_HOME`).

    Raises:
        ServiceUnavailable: if none runs there.
    """
    home = home or Home.from_environment()
    found = addresses(home)
    client = await lookup.connect(found.dask_scheduler)
    try:
        yield Platform(found, client, presets.cluster(found.cluster), home)
    finally:
        await client.close()
