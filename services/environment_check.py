"""What `joynexus env check NAME` looks at: a preset's environment, without a platform: in a
host of its own, or at the server that it names.

Found out from outside, through the protocol that a session uses, so one list serves every simulator: it starts, its
observations are as declared, the seed alone decides how an episode begins, steps and pictures are of use, episodes
end. What an adapter finds wrong itself (a width, a camera, a missing library) is told in the adapter's own words.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.environment import EnvironmentSpec
from configs.errors import JoyNexusError, refusal
from configs.home import Home
from services.environment_launch import Launch, prepared
from services.environment_pool import PLAIN, HostPool
from services.environment_protocol import HostClient, longest_s
from services.environment_remote import RemoteHosts

START_TIMEOUT_S = 600.0
_STEPS = 10
_END_WITHIN_S = 30.0
"""An episode is run to its declared end only if its steps promise to take no longer."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fault` is None, or one line that says what is wrong and what to change."""

    what: str
    fault: str | None = None


async def check(spec: EnvironmentSpec, seed: int = 0, home: Home | None = None) -> AsyncIterator[Finding]:
    """Findings as they are made; after a fault that leaves nothing to look at, no more come.

    Args:
        spec: what is tried; a remote one at its server, with its token.
        seed: of the episodes.
        home: of folders with tenants' own environments.
    """
    try:
        pool, launch, configuration = await one_host(spec, home, "check", images=True)
    except JoyNexusError as error:
        yield Finding("interpreter", str(error))
        return
    what = "simulator" if spec.remote is None else f"server {spec.remote.address}"
    if spec.remote is None:
        yield Finding(f"interpreter: {launch.interpreter}")
    try:
        began = time.monotonic()
        hosts, replies = await pool.acquire("check", [configuration], wait_s=0, launch=launch)
        if spec.remote is not None:
            yield Finding(f"{what} knows the token and takes a session")
        versions = ", ".join(f"{name} {version}" for name, version in replies[0]["versions"].items())
        yield Finding(f"started in {time.monotonic() - began:.1f} s: {versions}")
        looked = _Looked(hosts[0].control, spec, replies[0], seed)
        for look in (looked.at_resets, looked.at_pictures, looked.at_steps, looked.at_the_end, looked.at_remarks):
            async for finding in look():
                yield finding
    except JoyNexusError as error:
        yield Finding(what, str(error))
    finally:
        await pool.close()


async def one_host(
    spec: EnvironmentSpec, home: Home | None, tenant_id: str, *, images: bool
) -> tuple[Any, Launch, dict[str, Any]]:
    """A pool for a single host of one environment without a platform, here or at the server that `spec` names; how
    the host is started, and what it is configured with.

    Raises:
        JoyNexusError: it cannot be started here.
    """
    configuration = {"num_envs": 1, "images": images, "session_token": secrets.token_hex(16)}
    if spec.remote is not None:
        pool: Any = RemoteHosts(start_timeout_s=START_TIMEOUT_S)
        return pool, PLAIN, {**configuration, "spec": spec.model_dump(mode="json"), "tenant_id": tenant_id}
    plain, launch = await asyncio.to_thread(prepared, spec, home)
    pool = HostPool(1, max_idle=0, sessions_per_host=1, start_timeout_s=START_TIMEOUT_S)
    return pool, launch, {**configuration, "spec": plain}


class _Looked:
    """The looks at one host, in order; each may use what the one before left."""

    def __init__(self, client: HostClient, spec: EnvironmentSpec, configured: dict[str, Any], seed: int) -> None:
        self._client = client
        self._spec = spec
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._low, self._high = (np.array(configured[f"action_{end}"], np.float32) for end in ("low", "high"))
        self._observation: dict[str, Any] = {}
        self._step_s = 0.0

    async def at_resets(self) -> AsyncIterator[Finding]:
        """The seed alone decides, and what was handed out stays as it is."""
        began = time.monotonic()
        first = await self._reset(self._seed)
        took = time.monotonic() - began
        state = first["proprioception"]
        yield Finding(
            f"reset in {took:.2f} s: state of {state.shape[1]}, instruction {first['instructions'][0]!r}",
            None if np.isfinite(state).all() else f"state: got {state[0].tolist()}; possible: finite numbers; mend it",
        )
        await self._step(self._actions(3))
        again = await self._reset(self._seed)
        yield Finding(
            "the same seed begins the same episode",
            None
            if _alike(first, again)
            else f"reset: got two initial observations for seed {self._seed}; possible: one; let reset(seed=…) alone "
            f"decide in {self._spec.id}, after whatever happened before",
        )
        other = await self._reset(self._seed + 1)
        if _alike(first, other):
            yield Finding("every seed begins the same episode")
        self._observation = other

    async def at_pictures(self) -> AsyncIterator[Finding]:
        """Each camera shows something."""
        for camera in self._spec.cameras:
            picture = self._observation["images"][camera.name][0]
            colours = len(np.unique(picture.reshape(-1, 3), axis=0))
            turned = ", turned by 180°" if camera.name in self._spec.turned_cameras else ""
            yield Finding(
                f"camera {camera.name}: {camera.height} × {camera.width}, {colours} colours{turned}",
                None
                if colours > 1
                else refusal(f"cameras.{camera.name}", "one colour", "a picture", "check the camera and the renderer"),
            )

    async def at_steps(self) -> AsyncIterator[Finding]:
        """Random actions within the bounds; an episode that ends begins anew."""
        began, rewards, moved = time.monotonic(), [], False
        before = self._observation
        for step in range(_STEPS):
            result = await self._step(self._actions(1), self._seed + 2 + step)
            rewards += result["reward"][result["valid"]].tolist()
            # An episode's end shows another one's beginning.
            moved = moved or (not len(result["final_rows"]) and not _alike(before, result["observation"]))
            before = result["observation"]
        self._step_s = (time.monotonic() - began) / _STEPS
        yield Finding(
            f"steps of {self._step_s:.3f} s, pictures included; rewards {min(rewards):g} to {max(rewards):g}",
            None if np.isfinite(rewards).all() else "reward: got one that is not finite; possible: finite; mend it",
        )
        yield Finding(
            "actions change what is observed",
            None
            if moved
            else f"step: got the same observation after {_STEPS} random actions; possible: another; "
            f"check state_key, state_range and control_mode of {self._spec.name}",
        )

    async def at_the_end(self) -> AsyncIterator[Finding]:
        """An episode ends at the declared number of steps or before."""
        steps = self._spec.max_episode_steps
        if steps * self._step_s > _END_WITHIN_S:
            yield Finding(f"an episode's end, {steps} steps away, was not waited for")
            return
        await self._reset(self._seed)
        result = await self._step(self._actions(steps))
        made, ended = int(result["valid"].sum()), len(result["final_rows"]) == 1
        how = "terminated" if result["terminated"].any() else "truncated"
        yield Finding(
            f"an episode of random actions was {how} after {made} steps" if ended else "an episode's end",
            None if ended else refusal("max_episode_steps", f"no end after {made}", f"one by {steps}", "end it there"),
        )

    async def at_remarks(self) -> AsyncIterator[Finding]:
        """What the adapter noticed of the environment meanwhile."""
        for fault in await self._ask("remarks"):
            yield Finding("what steps report", fault)

    def _actions(self, steps: int) -> np.ndarray:
        return self._random.uniform(self._low, self._high, (1, steps, len(self._low))).astype(np.float32)

    async def _reset(self, seed: int) -> dict[str, Any]:
        return dict(await self._ask("reset", seeds=[seed]))

    async def _step(self, actions: np.ndarray, next_seed: int | None = None) -> dict[str, Any]:
        return dict(await self._ask("batch_step", actions=actions, next_seeds=[next_seed]))

    async def _ask(self, op: str, **fields: Any) -> Any:
        longest = longest_s(op, fields, self._spec.step_timeout_s, self._spec.max_episode_steps)
        return await self._client.call(op, longest, **fields)


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    pictures = all(np.array_equal(a["images"][name], b["images"][name]) for name in a["images"])
    return pictures and np.array_equal(a["proprioception"], b["proprioception"])
