"""Collecting demonstrations: expert episodes from environment hosts into a LeRobot dataset.

An episode is a function of its seed, so a collection that was killed goes on where it was: what had ended lies on disk
(`storage.episode_spool`), under a name that says what it was made from, and the dataset is the same to the bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from configs import presets
from configs.environment import EnvironmentSpec
from configs.errors import Conflict, EnvironmentFault, JoyNexusError, refusal
from configs.requests import SEEDS_PER_EPISODE, CollectRequest
from configs.signature import digest
from services.environment_client import SessionClient
from services.recording import Episode, write_dataset
from storage.atomic import replace_folder, sweep
from storage.dataset_names import claimed, clean
from storage.episode_spool import EpisodeSpool
from tasks.connection import Platform

logger = logging.getLogger(__name__)
_EXPERT = "services.environments.experts"
_VECTORS = ("proprioception", "actions", "executed", "reward")


@task(task_run_name="collect {request.dataset}", cache_policy=NO_CACHE)
async def collect_demonstrations(platform: Platform, request: CollectRequest) -> dict[str, Any]:
    """Write `request.episodes` episodes of consecutive seeds, in the order of their seeds.

    Of demonstrations only those that succeeded; what was executed is kept with its rewards, however it ended.

    Raises:
        Conflict: if a dataset of that name exists and `replace` is not asked for, or is being written.
        UnknownObject, SpecError: if nobody demonstrates this environment, or not in its control mode.
        EnvironmentFault: if the expert fails too often.
    """
    from services.environments.experts import expert_for  # with gymnasium, which nothing else here needs

    spec = presets.environment(request.environment)
    expert_for(spec.id, spec.control_mode)
    folder = platform.home.datasets / request.dataset
    if folder.exists() and not request.replace:
        raise Conflict(refusal("dataset", request.dataset, "a new name", "choose one, or set replace"))
    with claimed(platform.home.datasets, request.dataset) as building:
        environments = await platform.environments()
        opened = await environments.open(
            {
                "environment": spec.model_dump(mode="json"),
                "num_envs": request.hosts,
                "hosts": request.hosts,
                "tenant_id": "demonstrations",
                "images": True,
                "request_id": f"collect-{task_run.id}",
            }
        )
        session = SessionClient.direct(opened)
        made_from = _made_from(spec, request, opened["versions"])
        spool = EpisodeSpool(building / f"{request.dataset}.{made_from[:32]}.collected")
        if left := await asyncio.to_thread(clean, building, request.dataset, spool.folder):
            logger.info("left by writers that ended early, and removed: %s", ", ".join(left))
        try:
            kept, tried = await _collected(session, request, spec, spool)
        except EnvironmentFault as error:
            await environments.report_fault(opened["session_id"], str(error))
            raise
        finally:
            session.disconnect()
            with contextlib.suppress(JoyNexusError):  # else the session ends when it has been idle for long
                await environments.close(opened["session_id"])
        # An old dataset stays until the new one is whole.
        writing = building / f"{request.dataset}.new" if request.replace else folder
        frames = await asyncio.to_thread(_write, writing, spool, kept, request, spec, opened["versions"])
        if writing != folder:
            await asyncio.to_thread(replace_folder, writing, folder)
        await asyncio.to_thread(shutil.rmtree, spool.folder, ignore_errors=True)
    return {"dataset": request.dataset, "episodes": request.episodes, "frames": frames, "tried": tried}


async def sweep_interrupted(platform: Platform, older_than_s: float) -> int:
    """Remove what writers of datasets left unfinished so long ago; returns how many."""
    return await asyncio.to_thread(sweep, platform.home.datasets, older_than_s)


def _made_from(spec: EnvironmentSpec, request: CollectRequest, versions: dict[str, str]) -> str:
    """What an episode follows from beside its seed: how many are asked for and on how many hosts is none of it."""
    found = importlib.util.find_spec(_EXPERT)
    assert found is not None
    assert found.origin is not None
    return digest(
        {
            "environment": spec.model_dump(mode="json"),
            "action_noise": request.action_noise,
            "versions": versions,
            "expert": hashlib.sha256(Path(found.origin).read_bytes()).hexdigest(),
        }
    )


async def _collected(
    session: SessionClient, request: CollectRequest, spec: EnvironmentSpec, spool: EpisodeSpool
) -> tuple[list[int], int]:
    """Seeds of the episodes to keep, which are in `spool`, and how many were tried; those that are there count as done.

    Raises:
        EnvironmentFault: if the expert fails too often.
    """

    async def keep(seed: int, episode: dict[str, Any]) -> None:
        arrays = {f"image.{name}": stack for name, stack in episode["images"].items()}
        arrays |= {name: np.asarray(episode[name], np.float32) for name in _VECTORS}
        facts = {"seed": seed, "success": bool(episode["success"]), "instruction": episode["instruction"]}
        await asyncio.to_thread(spool.put, seed, arrays, facts)

    kept: list[int] = []
    tried = 0
    while len(kept) < request.episodes:
        if tried >= request.episodes * SEEDS_PER_EPISODE:
            raise EnvironmentFault(
                f"expert: {len(kept)} successes in {tried} episodes of {spec.name!r}; possible: one in "
                f"{SEEDS_PER_EPISODE} or better; lower action_noise"
            )
        wanted = min(4 * request.hosts, max(request.hosts, request.episodes - len(kept)))
        first = request.first_seed + tried
        seeds = range(first, first + wanted)
        done = await asyncio.to_thread(lambda asked: {seed: spool.facts(seed) for seed in asked}, seeds)
        missing = [seed for seed in seeds if done[seed] is None]
        if missing:
            await session.each_expert_episode(missing, request.action_noise, keep)
            done |= await asyncio.to_thread(lambda asked: {seed: spool.facts(seed) for seed in asked}, missing)
        tried += wanted
        kept += [seed for seed, facts in done.items() if facts and (facts["success"] or request.record == "executed")]
    return kept[: request.episodes], tried


def _write(
    root: Path,
    spool: EpisodeSpool,
    seeds: list[int],
    request: CollectRequest,
    spec: EnvironmentSpec,
    versions: dict[str, str],
) -> int:
    """Write the episodes of these seeds as a new dataset; how many frames it has."""
    executed = request.record == "executed"
    frames = 0

    def episodes() -> Iterator[Episode]:
        nonlocal frames
        for arrays, facts in map(spool.get, seeds):
            frames += len(arrays["actions"])
            yield {**arrays, "action": arrays["executed" if executed else "actions"]}, facts

    provenance = {"source": "expert", "request": request.model_dump(mode="json"), "versions": versions}
    write_dataset(root, episodes(), spec, provenance, rewards=executed)
    return frames
