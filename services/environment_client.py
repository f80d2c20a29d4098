"""Drives the environments of one session, spread over several hosts, side by side.

Used by the EnvironmentService itself and, for the price of no actor call per step, directly by whoever steps
environments (`SessionClient.direct`): the service gives out the hosts' addresses and stays the owner of the
processes, so a fault seen here must be told to its `report_fault`.

Legend: B environments of the session, H horizon, A action width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import EnvironmentFault, TenantFault, refusal
from services.environment_protocol import HostClient, longest_s

_CHUNK_FIELDS = ("reward", "valid", "terminated", "truncated", "success")


class SessionClient:
    """One session's environments as one batch.

    Args:
        opened: what `EnvironmentService.open` returned.
        clients: one client a host, in order of `opened["hosts"]`.
    """

    def __init__(self, opened: Mapping[str, Any], clients: Sequence[HostClient]) -> None:
        self.session_id: str = opened["session_id"]
        self.num_envs: int = opened["num_envs"]
        self.versions: dict[str, str] = opened["versions"]
        self.action_bounds = tuple(np.array(opened[name], np.float32) for name in ("action_low", "action_high"))
        self._bounds: tuple[float, int] = opened["step_timeout_s"], opened["max_episode_steps"]
        self._slices = [slice(host["start"], host["stop"]) for host in opened["hosts"]]
        self._clients = list(clients)

    @classmethod
    def direct(cls, opened: Mapping[str, Any]) -> SessionClient:
        """A client with connections of its own, made at the first call (in the event loop of that call)."""
        return cls(
            opened,
            [
                HostClient(host["address"], token=host["token"], name=f"{opened['session_id']}, host {number}")
                for number, host in enumerate(opened["hosts"])
            ],
        )

    async def reset(self, seeds: Sequence[int | None]) -> dict[str, Any]:
        """Start an episode in each environment (None: leave it idle) and return all observations.

        Raises:
            TenantFault: not one seed an environment.
            EnvironmentFault: a host failed or was too slow.
        """
        self._check_length("seeds", seeds)
        parts = await self._all(lambda c, s: self._ask(c, "reset", seeds=list(seeds[s])))
        return _concatenate(parts)

    async def batch_step(
        self, actions: np.ndarray, next_seeds: Sequence[int | None], *, every_step: bool = False
    ) -> dict[str, Any]:
        """Execute a chunk; see `services.environments.batch.EnvironmentBatch.batch_step` for the result.

        Args:
            actions: float32 [B, H, A] in environment units.
            next_seeds: B seeds for environments whose episode ends now; None leaves such a one idle.
            every_step: also return what was seen before each action.

        Raises:
            TenantFault: wrong shape or values.
            EnvironmentFault: a host failed or was too slow.
        """
        self._check_length("actions", actions)
        self._check_length("next_seeds", next_seeds)
        more = {"every_step": True} if every_step else {}
        parts = await self._all(
            lambda c, s: self._ask(c, "batch_step", actions=actions[s], next_seeds=list(next_seeds[s]), **more)
        )
        if len(parts) == 1:
            return parts[0]
        result: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in _CHUNK_FIELDS}
        result["observation"] = _concatenate([part["observation"] for part in parts])
        result["final_observation"] = _concatenate([part["final_observation"] for part in parts])
        offsets = [part["final_rows"] + s.start for part, s in zip(parts, self._slices, strict=True)]
        result["final_rows"] = np.concatenate(offsets)
        if every_step:
            result["seen"] = _concatenate([{"instructions": [], **part["seen"]} for part in parts])
        result["busy_s"] = max(part["busy_s"] for part in parts)
        return result

    async def step(self, actions: np.ndarray, next_seeds: Sequence[int | None]) -> dict[str, Any]:
        """`batch_step` of one action float32 [B, A] each."""
        return await self.batch_step(actions[:, None, :], next_seeds)

    async def scene_positions(self) -> dict[str, np.ndarray]:
        """Privileged `object`, `goal`, `gripper`, each float32 [B, 3]; for pretraining and experts only."""
        parts = await self._all(lambda c, _: self._ask(c, "scene_positions"))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    async def expert_episodes(self, seeds: Sequence[int], noise: float) -> list[dict[str, Any]]:
        """One episode of the scripted expert a seed, in the order of `seeds`, hosts side by side.

        See `EnvironmentBatch.expert_episode` for what an episode holds. Environments of the session must be reset
        before they are stepped again.
        """
        episodes: dict[int, dict[str, Any]] = {}

        async def keep(seed: int, episode: dict[str, Any]) -> None:
            episodes[seed] = episode

        await self.each_expert_episode(seeds, noise, keep)
        return [episodes[seed] for seed in seeds]

    async def each_expert_episode(
        self, seeds: Sequence[int], noise: float, keep: Callable[[int, dict[str, Any]], Awaitable[None]]
    ) -> None:
        """As `expert_episodes`, handing each over (seed, episode) as soon as it has ended, whichever that is."""
        waiting = iter(seeds)

        async def work(client: HostClient, _slice: slice) -> None:
            for seed in waiting:
                await keep(seed, await self._ask(client, "expert_episode", seed=int(seed), noise=noise))

        await self._all(work)

    def disconnect(self) -> None:
        """Close the connections; the session itself is closed by the service."""
        for client in self._clients:
            client.close()

    async def _ask(self, client: HostClient, op: str, **fields: Any) -> Any:
        return await client.call(op, longest_s(op, fields, *self._bounds), **fields)

    async def _all(self, call: Callable[[HostClient, slice], Awaitable[Any]]) -> list[Any]:
        """`call` on every host at once; all have ended before the first fault is raised."""
        if len(self._clients) == 1:
            return [await call(self._clients[0], self._slices[0])]
        parts = await asyncio.gather(*map(call, self._clients, self._slices), return_exceptions=True)
        faults = [part for part in parts if isinstance(part, BaseException)]
        if faults:
            raise next((f for f in faults if isinstance(f, EnvironmentFault)), faults[0])
        return parts

    def _check_length(self, field: str, values: Any) -> None:
        if len(values) != self.num_envs:
            raise TenantFault(
                refusal(field, f"{len(values)} rows", f"{self.num_envs}, one an environment", "send as many")
            )


def _concatenate(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    return {
        "images": {name: np.concatenate([p["images"][name] for p in parts]) for name in parts[0]["images"]},
        "proprioception": np.concatenate([p["proprioception"] for p in parts]),
        "instructions": [text for p in parts for text in p["instructions"]],
    }
