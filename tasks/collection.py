"""Collecting demonstrations: expert episodes from environment hosts into a LeRobot dataset."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from configs import presets
from configs.errors import Conflict, EnvironmentFault, JoyNexusError, refusal
from configs.requests import SEEDS_PER_EPISODE, CollectRequest
from services.environment_client import SessionClient
from storage.atomic import WRITING, replace_folder
from storage.demonstrations import LeRobotWriter
from tasks.connection import Platform

FPS = 20


@task(task_run_name="collect {request.dataset}", cache_policy=NO_CACHE)
async def collect_demonstrations(platform: Platform, request: CollectRequest) -> dict[str, Any]:
    """Write `request.episodes` episodes of consecutive seeds, in the order of their seeds.

    Of demonstrations only those that succeeded; what was executed is kept with its rewards, however it ended.

    Raises:
        Conflict: if a dataset of that name exists and `replace` is not asked for.
        EnvironmentFault: if the expert fails too often.
    """
    spec = presets.environment(request.environment)
    folder = platform.home.datasets / request.dataset
    if folder.exists() and not request.replace:
        raise Conflict(refusal("dataset", request.dataset, "a new name", "choose one, or set replace"))
    # An old dataset stays until the new one is whole.
    writing = platform.home.datasets / WRITING / f"{request.dataset}.{task_run.id}" if request.replace else folder
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
    writer = LeRobotWriter(
        writing,
        fps=FPS,
        cameras={c.name: (c.height, c.width) for c in spec.cameras},
        state_width=spec.state_width,
        action_width=spec.action_width,
        robot_type=spec.id,
        rewards=request.record == "executed",
        provenance={
            "request": request.model_dump(mode="json"),
            "versions": opened["versions"],
            "turned_cameras": sorted(spec.turned_cameras),
        },
    )
    tried = frames = 0
    try:
        with writer:
            while writer.episodes < request.episodes:
                if tried >= request.episodes * SEEDS_PER_EPISODE:
                    raise EnvironmentFault(
                        f"expert: {writer.episodes} successes in {tried} episodes of {spec.name!r}; possible: one in "
                        f"{SEEDS_PER_EPISODE} or better; lower action_noise"
                    )
                wanted = min(4 * request.hosts, max(request.hosts, request.episodes - writer.episodes))
                first = request.first_seed + tried
                episodes = await session.expert_episodes(range(first, first + wanted), request.action_noise)
                tried += wanted
                for episode in episodes:
                    if (episode["success"] or request.record == "executed") and writer.episodes < request.episodes:
                        await asyncio.to_thread(_add, writer, episode, spec.instruction, request.record)
                        frames += len(episode["actions"])
        if writing != folder:
            await asyncio.to_thread(replace_folder, writing, folder)
    except EnvironmentFault as error:
        await environments.report_fault(opened["session_id"], str(error))
        raise
    finally:
        session.disconnect()
        with contextlib.suppress(JoyNexusError):  # else the session ends when it has been idle for long
            await environments.close(opened["session_id"])
    return {"dataset": request.dataset, "episodes": request.episodes, "frames": frames, "tried": tried}


def _add(writer: LeRobotWriter, episode: dict[str, Any], instruction: str, record: str) -> None:
    executed = record == "executed"
    writer.add_episode(
        episode["images"],
        np.asarray(episode["proprioception"], np.float32),
        np.asarray(episode["executed" if executed else "actions"], np.float32),
        instruction,
        np.asarray(episode["reward"], np.float32) if executed else None,
    )
