"""The EnvironmentService actor: sessions of simulated environments over hosts in child processes.

A session belongs to one tenant and has B environments, spread over one or more hosts of its own. A call that is not
answered in the environment's `step_timeout_s` times its steps, or a simulator that fails, ends *that* session: its host
is killed and replaced, all others go on. Whoever steps often drives the hosts directly (`SessionClient.direct(opened)`)
and tells faults to `report_fault`; the service stays the owner of the processes.

A session is leased: one that nobody uses or renews for `lease_s`, and to which no direct connection is open, is closed,
since its client is dead. Who pauses for longer renews it (`services.environment_lease.renewed_session`).

Methods are async and run on the worker's event loop; simulators compute in their own processes. This module
imports no torch: flow processes import it to unpickle the actor's handle.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs import presets
from configs.environment import SessionRequest
from configs.errors import Conflict, EnvironmentFault, UnknownObject, refusal
from configs.home import Home
from configs.signature import canonical_json, digest
from configs.spec import parse
from services import environment_installs
from services.environment_client import SessionClient
from services.environment_launch import Launch, prepared
from services.environment_pool import PLAIN, HostPool
from services.environment_protocol import longest_s
from services.environment_remote import RemoteHosts
from services.environments import renderer

logger = logging.getLogger(__name__)

_REMEMBERED = 1000
"""Ended sessions whose end can still be told."""

_PING_S = 30.0
"""A host that does nothing else answers within this."""

T = TypeVar("T")


@dataclass(eq=False)
class _Session:
    """An open session. `hosts[i]` runs the environments that `opened["hosts"][i]` names."""

    request: SessionRequest
    opened: dict[str, Any]
    hosts: list[Any]  # HostProcess, or RemoteHost
    client: SessionClient
    pool: Any  # of its hosts
    key: str
    configurations: list[dict[str, Any]]
    launch: Launch
    last_use: float
    calls: int = 0
    active: int = 0


class EnvironmentService:
    """Sessions with reset, step, batch_step and close.

    Args:
        max_hosts: simulator processes at one time; further sessions queue.
        max_idle_hosts: warm hosts kept for later sessions.
        sessions_per_host: sessions after which a host process is replaced.
        start_timeout_s: longest start of a host.
        lease_s: a session neither used nor renewed for so long is closed.
        home: the installation's folder, where folders of tenants' own environments are registered.
    """

    def __init__(
        self,
        max_hosts: int,
        *,
        max_idle_hosts: int = 4,
        sessions_per_host: int = 30,
        start_timeout_s: float = 300.0,
        lease_s: float = 60.0,
        home: str | None = None,
    ) -> None:
        self._pool = HostPool(
            max_hosts,
            max_idle=max_idle_hosts,
            sessions_per_host=sessions_per_host,
            start_timeout_s=start_timeout_s,
        )
        self._remote = RemoteHosts(start_timeout_s=start_timeout_s)
        self._home = None if home is None else Home(Path(home))
        self._lease_s = lease_s
        self._sessions: dict[str, _Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # session_id: why it ended, the newest last
        # request_id: (digest of the request, the opening); kept until the session has ended and is forgotten
        self._requests: dict[str, tuple[str, asyncio.Task[dict[str, Any]]]] = {}
        self._opening: dict[str, tuple[SessionRequest, asyncio.Task[Any]]] = {}
        self._reaper: asyncio.Task[None] | None = None
        self._checks: dict[str, asyncio.Task[None]] = {}  # session_id: whether its client is alive

    async def ping(self) -> str:
        """Answer "ok"; the event loop is alive."""
        return "ok"

    async def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a session; queue while others use the hosts.

        Args:
            request: a `SessionRequest` as plain data. The same `request_id` gives the same session.

        Returns:
            `session_id`, `tenant_id`, `hosts` (`address` and `token` for direct connections, `start`, `stop` of its
            environments), `num_envs`, `images`, `instruction`, `cameras`, `state_width`, `action_width`,
            `action_low`, `action_high`, `max_episode_steps`, `step_timeout_s`, `lease_s`, `versions`.

        Raises:
            SpecError: the request or the environment's declaration is wrong.
            AdmissionRefused: too many hosts, or none came free within `wait_s`.
            EnvironmentFault: a host did not start, or no server of a remote environment answers.
            Conflict: the `request_id` was used with other contents, or its session was closed. One that failed is
                opened anew under its id: nothing of it is repeated, the caller begins with a reset.
            UnknownObject: the session was closed while it waited for hosts.
        """
        wanted = parse(SessionRequest, request, where="session")
        contents = digest(wanted.model_dump(mode="json"))
        known = self._requests.get(wanted.request_id)
        if known is None or (known[0] == contents and self._failed(known[1])):
            task = asyncio.get_running_loop().create_task(self._open(wanted))
            self._requests[wanted.request_id] = (contents, task)
        else:
            if known[0] != contents:
                raise Conflict(
                    refusal("request_id", wanted.request_id, "the same contents as before", "use a new request_id")
                )
            task = known[1]
        try:
            # Shielded: the opening goes on although one of those who wait for it is gone.
            opened = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller was, and not the opening
            self._requests.pop(wanted.request_id, None)
            raise UnknownObject(
                f"session: {wanted.request_id!r} of {wanted.tenant_id} was closed while it waited for hosts; open a "
                "new one"
            ) from None
        except Exception:
            # Whatever it was is raised again. A refused opening may be asked for again under the same id.
            if task.done() and self._requests.get(wanted.request_id) == (contents, task):
                del self._requests[wanted.request_id]
            raise
        if opened["session_id"] in self._ended:
            raise Conflict(
                f"request_id: {wanted.request_id!r} opened {opened['session_id']}, which has ended "
                f"({self._ended[opened['session_id']]}); use a new request_id"
            )
        return opened

    async def _open(self, request: SessionRequest) -> dict[str, Any]:
        session_id = f"env-{secrets.token_hex(6)}"
        opening = asyncio.current_task()
        assert opening is not None
        self._opening[session_id] = request, opening  # from here on whoever closes its owner's sessions ends it
        try:
            pool, spec, launch = await self._prepared(request)
            # What a tenant's own code keeps from one session to the next is for that tenant alone.
            own = {} if request.environment.own is None else {"tenant_id": request.tenant_id}
            key = canonical_json({"spec": spec, "images": request.images, "interpreter": launch.interpreter, **own})
            edges = [request.num_envs * i // request.hosts for i in range(request.hosts + 1)]
            parts = list(itertools.pairwise(edges))
            whose = {"tenant_id": request.tenant_id} if pool is self._remote else {}
            configurations = [
                {"spec": spec, "num_envs": stop - start, "images": request.images, **whose}
                | {"session_token": secrets.token_hex(16)}
                for start, stop in parts
            ]
            hosts, replies = await pool.acquire(key, configurations, wait_s=request.wait_s, launch=launch)
        finally:
            del self._opening[session_id]
        opened = {
            "session_id": session_id,
            "tenant_id": request.tenant_id,
            "hosts": [
                {"address": host.address, "token": sent["session_token"], "start": start, "stop": stop}
                for host, sent, (start, stop) in zip(hosts, configurations, parts, strict=True)
            ],
            "num_envs": request.num_envs,
            "images": request.images,
            "lease_s": self._lease_s,
            **{name: spec[name] for name in ("instruction", "cameras", "state_width", "action_width")},
            **{name: spec[name] for name in ("max_episode_steps", "step_timeout_s")},
            **replies[0],
        }
        client = SessionClient(opened, [host.control for host in hosts])
        self._sessions[session_id] = _Session(
            request, opened, hosts, client, pool, key, configurations, launch, last_use=time.monotonic()
        )
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.get_running_loop().create_task(self._reap())
        return opened

    async def _prepared(self, request: SessionRequest) -> tuple[Any, dict[str, Any], Launch]:
        """Where its hosts come from, what they are configured with, and how they are started."""
        if request.environment.remote is not None:
            return self._remote, request.environment.model_dump(mode="json"), PLAIN
        asked = (request.environment, self._home)
        # A container engine may take its time to answer.
        slow = request.environment.own is not None
        return self._pool, *(await asyncio.to_thread(prepared, *asked) if slow else prepared(*asked))

    async def renew(self, session_id: str) -> None:
        """Keep a session for another `lease_s`.

        Raises:
            UnknownObject, EnvironmentFault: it was closed, or has failed.
        """
        if session_id not in self._sessions:
            raise self._unknown(session_id)
        self._sessions[session_id].last_use = time.monotonic()

    async def reset(self, session_id: str, seeds: list[int | None]) -> dict[str, Any]:
        """Start an episode in each environment by its seed; see `SessionClient.reset`."""
        return await self._call(session_id, lambda client: client.reset(seeds))

    async def batch_step(self, session_id: str, actions: np.ndarray, next_seeds: list[int | None]) -> dict[str, Any]:
        """Execute a chunk float32 [B, H, A] of environment units; see `SessionClient.batch_step`."""
        return await self._call(session_id, lambda client: client.batch_step(actions, next_seeds))

    async def step(self, session_id: str, actions: np.ndarray, next_seeds: list[int | None]) -> dict[str, Any]:
        """Execute one action float32 [B, A] each; see `SessionClient.batch_step`."""
        return await self._call(session_id, lambda client: client.step(actions, next_seeds))

    async def scene_positions(self, session_id: str) -> dict[str, np.ndarray]:
        """Privileged positions; see `SessionClient.scene_positions`."""
        return await self._call(session_id, lambda client: client.scene_positions())

    async def expert_episodes(self, session_id: str, seeds: list[int], noise: float) -> list[dict[str, Any]]:
        """Demonstrations of the scripted expert; see `SessionClient.expert_episodes`."""
        return await self._call(session_id, lambda client: client.expert_episodes(seeds, noise))

    async def report_fault(self, session_id: str, reason: str) -> None:
        """End a session whose direct client met a fault: its hosts are replaced. Harmless if repeated."""
        session = self._sessions.get(session_id)
        if session is not None:
            await self._fail(session_id, session, reason)
        elif session_id not in self._ended:
            raise self._unknown(session_id)

    async def close(self, session_id: str) -> None:
        """Close a session; its hosts stay warm for the next. Harmless if repeated.

        Raises:
            UnknownObject: no such session was ever here.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            if session_id not in self._ended:
                raise self._unknown(session_id)
            return
        self._end(session_id, "closed")
        # A host in the middle of a call is not waited for: its next user would have to.
        await asyncio.gather(*(session.pool.release(host, healthy=session.active == 0) for host in session.hosts))

    async def close_tenant(self, tenant_id: str) -> list[str]:
        """Close all sessions of a tenant, waiting ones too; the ids of those that were open."""
        return await self._close_all(lambda request: request.tenant_id == tenant_id)

    async def close_owned(self, owners: list[str]) -> list[str]:
        """Close the sessions of jobs or runs that have ended, waiting ones too; the ids of those that were open."""
        return await self._close_all(lambda request: request.owner in owners)

    async def _close_all(self, chosen: Callable[[SessionRequest], bool]) -> list[str]:
        for request, opening in list(self._opening.values()):
            if chosen(request):
                opening.cancel()
        found = [name for name, session in self._sessions.items() if chosen(session.request)]
        await asyncio.gather(*(self.close(name) for name in found))
        return found

    async def sessions(self) -> list[dict[str, Any]]:
        """Open and waiting sessions: whose, of what, on which processes, how much used; why it waits."""
        now = time.monotonic()
        usage = self._pool.usage()
        rows = [
            {
                "session_id": name,
                "tenant_id": session.request.tenant_id,
                "owner": session.request.owner,
                "environment": session.request.environment.name,
                "num_envs": session.request.num_envs,
                "state": "open",
                "pids": [host.pid for host in session.hosts if host.pid is not None],
                "calls": session.calls,
                "idle_s": round(now - session.last_use, 3),
                "reason": None,
            }
            for name, session in self._sessions.items()
        ]
        rows += [
            {
                "session_id": name,
                "tenant_id": request.tenant_id,
                "owner": request.owner,
                "environment": request.environment.name,
                "num_envs": request.num_envs,
                "state": "opening",
                "pids": [],
                "calls": 0,
                "idle_s": 0.0,
                "reason": f"needs {request.hosts} hosts; {usage['in_use']} of {usage['max']} are in use or starting"
                if request.environment.remote is None
                else f"needs {request.hosts} hosts; {self._remote.reason(request.environment.remote.address)}",
            }
            for name, (request, _) in self._opening.items()
        ]
        return rows

    async def capabilities(self) -> dict[str, Any]:
        """What can be hosted here: `environments` (presets), `kinds` (None, or why that kind cannot run), `hosts`."""
        return {
            "environments": presets.names("environments"),
            "kinds": {
                "gymnasium": None,
                "gymnasium_vector": None,
                "libero": environment_installs.missing("libero.txt"),
                "maniskill": renderer.check(),
                "python": None,
            },
            "hosts": self._pool.usage(),
        }

    async def shutdown(self) -> None:
        """End every session and host."""
        for task in (self._reaper, *self._checks.values()):
            if task is not None:
                task.cancel()
        for session_id in list(self._sessions):
            del self._sessions[session_id]
            self._end(session_id, "the service was shut down")
        await self._remote.close()
        await self._pool.close()

    async def _call(self, session_id: str, call: Callable[[SessionClient], Awaitable[T]]) -> T:
        session = self._sessions.get(session_id)
        if session is None:
            raise self._unknown(session_id)
        session.calls += 1
        session.active += 1
        try:
            return await call(session.client)
        except EnvironmentFault as error:
            await self._fail(session_id, session, str(error))
            raise
        finally:
            session.active -= 1
            session.last_use = time.monotonic()

    async def _fail(self, session_id: str, session: _Session, reason: str) -> None:
        if self._sessions.pop(session_id, None) is None:
            return
        self._end(session_id, f"failed: {reason}")
        for host in session.hosts:
            logger.warning(
                "session %s of %s failed: %s; host %d (pid %s) is replaced; it last wrote:\n%s",
                *(session_id, session.request.tenant_id, reason, host.number, host.pid, host.log_tail()),
            )
        # All of its hosts: the others may be in the middle of the same step.
        await asyncio.gather(*(session.pool.release(host, healthy=False) for host in session.hosts))
        for configuration in session.configurations:
            # Its token is never given out: the replacement belongs to nobody until it is configured again.
            renamed = {**configuration, "session_token": secrets.token_hex(16)}
            session.pool.replace(session.key, renamed, session.launch)

    def _end(self, session_id: str, reason: str) -> None:
        self._ended[session_id] = reason
        while len(self._ended) > _REMEMBERED:
            forgotten, _ = self._ended.popitem(last=False)
            for request_id, (_, task) in list(self._requests.items()):
                if task.done() and not task.exception() and task.result()["session_id"] == forgotten:
                    del self._requests[request_id]

    def _failed(self, opening: asyncio.Task[dict[str, Any]]) -> bool:
        """Whether the session that came of it has failed."""
        if not opening.done() or opening.cancelled() or opening.exception() is not None:
            return False
        return self._ended.get(opening.result()["session_id"], "").startswith("failed")

    def _unknown(self, session_id: str) -> UnknownObject | EnvironmentFault:
        if session_id in self._ended:
            reason = self._ended[session_id]
            if reason.startswith("failed"):
                return EnvironmentFault(f"session_id: {session_id} {reason}")
            return UnknownObject(f"session_id: {session_id} was {reason}; open a new one")
        known = ", ".join(sorted(self._sessions)) or "none"
        return UnknownObject(refusal("session_id", session_id, known, "open one first"))

    async def _reap(self) -> None:
        """Close sessions whose client is dead; each is looked at apart, since a host may be slow to answer."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for session_id, session in self._sessions.items():
                if self._expired(session) and session_id not in self._checks:
                    check = asyncio.get_running_loop().create_task(self._close_dead(session_id, session))
                    self._checks[session_id] = check
                    check.add_done_callback(lambda _, name=session_id: self._checks.pop(name, None))  # type: ignore[misc]

    def _expired(self, session: _Session) -> bool:
        return not session.active and time.monotonic() - session.last_use >= self._lease_s

    async def _close_dead(self, session_id: str, session: _Session) -> None:
        # Direct calls pass the service by; the hosts know of them, and answer when the present one is done.
        bounds = (session.opened[name] for name in ("step_timeout_s", "max_episode_steps"))
        wait_s = longest_s("expert_episode", {}, *bounds) + _PING_S
        try:
            seen = await asyncio.gather(*(host.control.call("ping", wait_s) for host in session.hosts))
        except EnvironmentFault as error:
            await self._fail(session_id, session, str(error))
            return
        if any(s["connections"] or s["idle_s"] < self._lease_s for s in seen):
            return
        if self._expired(session) and self._sessions.get(session_id) is session:
            logger.warning("session %s of %s expired", session_id, session.request.tenant_id)
            del self._sessions[session_id]
            self._end(session_id, f"closed: not used or renewed for {self._lease_s:g} s")
            await asyncio.gather(*(session.pool.release(host, healthy=True) for host in session.hosts))
