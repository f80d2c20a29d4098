"""Placing the resident services on the Dask workers of their roles."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed import Client
from prefect import task
from prefect.cache_policies import NO_CACHE

from configs import presets
from configs.errors import ServiceUnavailable
from services import lookup
from services.environment_service import EnvironmentService
from services.inference_model import InferenceModelService
from services.metrics import MetricsService
from services.mirror import PrefectMirror
from services.training_model import TrainingModelService
from services.training_scheduler import TrainingScheduler
from tasks.connection import Platform

logger = logging.getLogger(__name__)
_PLACE_WITHIN_S = 180.0

ACTORS: dict[str, type] = {
    lookup.SCHEDULER: TrainingScheduler,
    lookup.METRICS: MetricsService,
    lookup.ENVIRONMENTS: EnvironmentService,
    lookup.INFERENCE: InferenceModelService,
    lookup.TRAINING: TrainingModelService,
    lookup.MIRROR: PrefectMirror,
}


def declarations(platform: Platform) -> dict[str, tuple[str, dict[str, Any]]]:
    """{service name: (role, constructor arguments)}, in the order in which they are placed."""
    cluster, home = platform.cluster, str(platform.home.root)
    bases = [presets.base_model(name).model_dump(mode="json") for name in cluster.base_models]
    return {
        lookup.SCHEDULER: (
            "control",
            {"journal_path": str(platform.home.journal), "max_active_rollouts": cluster.max_active_rollouts},
        ),
        lookup.METRICS: (
            "control",
            {"uri": platform.addresses.mlflow_uri, "artifact_root": str(platform.home.mlflow / "artifacts")},
        ),
        lookup.ENVIRONMENTS: ("environments", {"max_hosts": cluster.max_environment_hosts, "home": home}),
        lookup.INFERENCE: (
            "inference",
            {
                "home": home,
                "base_models": bases,
                "batching": cluster.batching.model_dump(mode="json"),
                "max_slots": cluster.max_slots,
                "max_pinned_versions": cluster.max_pinned_versions,
            },
        ),
        lookup.TRAINING: (
            "training",
            {
                "home": home,
                "base_models": bases,
                "max_slots": cluster.max_slots,
                "max_feature_bytes": cluster.max_feature_bytes,
                "max_update_feature_bytes": cluster.max_update_feature_bytes,
            },
        ),
        lookup.MIRROR: ("control", {"prefect_api_url": platform.addresses.prefect_api_url}),
    }


async def worker_address(client: Client, role: str) -> str:
    """Address of the Dask worker that `joynexus up` named after its role.

    Raises:
        ServiceUnavailable: if it is not there.
    """
    assert client.scheduler is not None  # connected
    identity = await client.scheduler.identity(n_workers=-1)
    by_name = {str(worker["name"]): address for address, worker in identity["workers"].items()}
    if role not in by_name:
        raise ServiceUnavailable(
            f"worker: {role!r} is not registered; there are {sorted(by_name)}; see its log under the home's logs"
        )
    return by_name[role]


@task(task_run_name="place {name}", cache_policy=NO_CACHE)
async def place_service(platform: Platform, name: str) -> str:
    """Have the service `name` live on its role's worker: keep the one that answers, else make it and publish it."""
    client = platform.client
    if await lookup.reachable(name, client) is not None:
        return "kept"
    role, arguments = declarations(platform)[name]
    address = await worker_address(client, role)
    future = client.submit(
        ACTORS[name], **arguments, actor=True, pure=False, workers=[address], key=f"{name}-{id(arguments)}"
    )
    try:
        await asyncio.wait_for(_done(future), _PLACE_WITHIN_S)
    except TimeoutError:
        raise ServiceUnavailable(
            f"{name}: not ready within {_PLACE_WITHIN_S:g} s on worker {role!r}; see that worker's log"
        ) from None
    await client.publish_dataset(future, name=name, override=True)
    logger.info("%s placed on worker %s", name, role)
    return "placed"


async def _done(future: Any) -> None:
    await future
