"""Finding the resident services by name from any process, with a time-out on every call.

A service is a Dask actor whose future is published under a fixed name, so it outlives the flow that made it.
A handle may be re-created at any time; calls carry ids, so a caller may look the service up again and repeat.
Not excluded: a call whose reply is lost may have been carried out; the methods are idempotent by their ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Client, get_client, get_worker

from configs.errors import NoReply, ServiceUnavailable

SCHEDULER = "joynexus-scheduler"
TRAINING = "joynexus-training"
INFERENCE = "joynexus-inference"
ENVIRONMENTS = "joynexus-environments"
METRICS = "joynexus-metrics"
MIRROR = "joynexus-mirror"
NAMES = (SCHEDULER, TRAINING, INFERENCE, ENVIRONMENTS, METRICS, MIRROR)


class Service:
    """A named service; attribute access gives its async methods, each bounded by `timeout_s`."""

    def __init__(self, name: str, actor: Any, timeout_s: float) -> None:
        self.name = name
        self._actor = actor
        self._timeout_s = timeout_s

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                # Before Python 3.12 `wait_for` loses a cancellation that comes at the same time as the reply.
                async with asyncio.timeout(self._timeout_s):
                    return await getattr(self._actor, method)(*args, **kwargs)
            except TimeoutError:
                raise NoReply(
                    f"{self.name}.{method}: no reply in {self._timeout_s:g} s; possible: it hangs or is overloaded; "
                    "see `joynexus status` and the log of its worker"
                ) from None
            except (OSError, RuntimeError) as error:
                if isinstance(error, OSError) or "Worker holding Actor was lost" in str(error):
                    raise ServiceUnavailable(
                        f"{self.name}.{method}: its worker was lost ({error}); look the service up again and repeat"
                    ) from None
                raise

        return call


async def connect(dask_scheduler: str) -> Client:
    """A client that talks to workers directly; it becomes the default, which actor handles bind to.

    Raises:
        ServiceUnavailable: if nothing answers at that address.
    """
    try:
        return await Client(dask_scheduler, asynchronous=True, direct_to_workers=True, timeout=10)
    except (OSError, TimeoutError) as error:
        raise ServiceUnavailable(
            f"dask_scheduler: nothing answers at {dask_scheduler} ({error}); start the platform with `joynexus up`"
        ) from None


async def service(name: str, client: Client, *, timeout_s: float = 600.0) -> Service:
    """The service published under `name`.

    Raises:
        ServiceUnavailable: if none is published or its worker is gone.
    """
    try:
        future = await client.get_dataset(name)
        async with asyncio.timeout(10):
            actor = await future
    except KeyError:
        raise ServiceUnavailable(
            f"service: {name!r} is not published; the flow `platform` starts it; see `joynexus status`"
        ) from None
    except (TimeoutError, OSError, RuntimeError, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and not future.cancelled():
            raise
        raise ServiceUnavailable(
            f"service: {name!r} was lost with its worker; the flow `platform` restarts it"
        ) from None
    return Service(name, actor, timeout_s)


async def peer(name: str, *, timeout_s: float = 600.0) -> Service:
    """A service as seen from inside another one's worker.

    Raises:
        ServiceUnavailable: as `service`.
    """
    get_worker()  # raises outside a worker, where `service` is meant
    return await service(name, get_client(), timeout_s=timeout_s)


async def reachable(name: str, client: Client) -> Service | None:
    """The service if it answers a `ping` within ten seconds, else None."""
    try:
        found = await service(name, client, timeout_s=10)
        await found.ping()
    except ServiceUnavailable:
        return None
    return found
