"""The environment loops of the inference worker: sessions are opened, stepped over the hosts' own sockets, and closed.

The Environment Service owns the processes; the loops themselves are services/rollout.py's. Whose policy answers, at
which version, is the caller's business.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs import seeds as seed_ranges
from configs.algorithm import RolloutSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.environment import EnvironmentSpec
from configs.errors import EnvironmentFault, JoyNexusError, SpecError, UnknownObject, refusal
from services import lookup
from services.admission_of_transforms import sized
from services.environment_client import SessionClient
from services.environment_lease import renewed_session
from services.films import Films, film
from services.recording import Recorder, check_recordable, recording, write_dataset
from services.rollout import (
    EXECUTED,
    Episodes,
    Observation,
    Policy,
    Prediction,
    Progress,
    Watcher,
    collect_rollout,
    run_episodes,
)
from storage.episode_spool import EpisodeSpool
from storage.partitions import EncodedFields, PartitionStore, encode_fields, indexed_instructions

logger = logging.getLogger(__name__)
T = TypeVar("T")
VERSIONS = "environment_versions"
"""Label of a rollout's partition: the simulator's versions as JSON."""


class EnvironmentLoops:
    """Rollouts into partitions, and evaluations.

    Args:
        partitions: folder of the partitions.
        values_at_a_time: rows of one value request at most.
        datasets: folder of the datasets that evaluations may be recorded in.
    """

    def __init__(self, partitions: Path, values_at_a_time: int, datasets: Path) -> None:
        self._partitions = PartitionStore(partitions)
        self._datasets = datasets
        self._values_at_a_time = values_at_a_time
        self._files = ThreadPoolExecutor(1, thread_name_prefix="infer-files")
        self._active: dict[str, dict[str, Any]] = {}  # {run id: progress of a rollout or evaluation}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> list[dict[str, Any]]:
        """Loops under way: tenant, kind, version, done, of."""
        return list(self._active.values())

    async def written(self, partition_id: str) -> dict[str, Any] | None:
        """What `rollout` returned when it wrote the partition, or None."""
        try:
            labels = (await self._run(self._partitions.attributes, partition_id)).labels
            return {name: value for name, value in labels.items() if name != VERSIONS}
        except UnknownObject:
            return None

    async def rollout(
        self, backend: BackendConfig, job: dict[str, Any], version: int, act: Policy, values: Policy
    ) -> dict[str, Any]:
        """Collect a reserved job's partition and write it.

        Args:
            backend: the tenant's.
            job: the reserved descriptor.
            version: of the behaviour policy.
            act: the behaviour policy, sampled.
            values: the same version's values, without sampling.

        Returns:
            {"samples", "valid_transitions", "policy_version", "episodes", "successes", "success_rate", …}.
        """
        algorithm, tenant = backend.algorithm, backend.policy.tenant
        assert isinstance(algorithm, RolloutSpec)
        assert backend.environment is not None
        number, size = int(job["metadata"]["rollout"]), algorithm.episodes_per_start
        num_envs, hosts = algorithm.num_envs, backend.resources.environment_hosts
        async with self._session(backend.environment, num_envs, hosts, tenant, job["job_id"], True) as session:
            with self._progress(job["job_id"], tenant, "rollout", version) as progress:
                collected = await collect_rollout(
                    act,
                    session,
                    num_envs=num_envs,
                    steps=algorithm.rollout_steps,
                    seed_of_episode=lambda n: seed_ranges.group_seed(algorithm.seed, number, n, size),
                    group_of_episode=None if size == 1 else lambda n: seed_ranges.group_id(number, n, size),
                    progress=progress,
                )
        collected.data[EXECUTED] = np.clip(collected.data[EXECUTED], *session.action_bounds)
        # What is whole is encoded beside the last forwards, which only a critic's estimates need.
        encoded, rest = await asyncio.gather(
            self._run(encode_fields, collected.data, algorithm.microbatch_size),
            collected.values_after(values, self._values_at_a_time) if algorithm.asks_critic else _nothing(),
        )
        summary: dict[str, Any] = {
            "samples": len(collected.data["value"]),
            "valid_transitions": int(collected.data["valid"].sum()),
            "policy_version": version,
            **collected.episodes.summary(),
        }
        labels = {**summary, VERSIONS: json.dumps(session.versions, sort_keys=True)}
        await self._run(self._write, backend, job, encoded, rest, collected.instructions, labels)
        return summary

    async def evaluate(
        self,
        tenant: str,
        spec: EnvironmentSpec,
        act: Policy,
        config: PolicyConfig,
        version: int,
        *,
        episodes: int,
        first_seed: int,
        num_envs: int,
        hosts: int,
        blanked: bool,
        run_id: str,
        filmed: bool = False,
        record: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> tuple[Episodes, dict[str, tuple[int, bytes]]]:
        """Run an episode for each of `episodes` seeds; `blanked` shows the policy black pictures.

        `filmed` makes a film of the first success and of the first failure; `record` names the dataset that all
        episodes are written to, and `provenance` is what that says of where it comes from. Nothing is rendered where
        the policy is shown black pictures, so nothing is filmed there either.

        Returns:
            The episodes, and {"success" or "failure": (its number, an mp4 file)}.

        Raises:
            SpecError: if the environment shows pictures turned otherwise than those that the policy learned from,
                episodes are too large to be recorded side by side, or there is a dataset of that name.
            Conflict: another one is writing it.
        """
        _check_pictures(spec, config)
        seeds = range(first_seed, first_seed + episodes)
        films = Films(num_envs, spec.cameras) if filmed and not blanked else None
        watchers: list[Watcher] = [] if films is None else [films]
        spool: EpisodeSpool | None = None
        with ExitStack() as stack:
            if record is not None:
                check_recordable(spec, num_envs)
                spool = stack.enter_context(recording(self._datasets, record))
            async with self._session(spec, num_envs, hosts, tenant, run_id, not blanked) as session:
                if spool is not None:
                    watchers.append(Recorder(spool, session.action_bounds, seeds))
                with self._progress(run_id, tenant, "evaluation", version) as progress:
                    found = await run_episodes(
                        _blanked(act, config) if blanked else act,
                        session,
                        num_envs=num_envs,
                        seeds=seeds,
                        progress=progress,
                        watchers=watchers,
                    )
            if spool is not None and record is not None:
                told = {
                    **(provenance or {}),
                    "policy_version": version,
                    "environment": spec.model_dump(mode="json"),
                    "versions": session.versions,
                }
                in_order = map(spool.get, range(episodes))
                await asyncio.to_thread(write_dataset, self._datasets / record, in_order, spec, told)
        reels = films.reels if films is not None else {}
        return found, {outcome: (reel.number, await asyncio.to_thread(film, reel)) for outcome, reel in reels.items()}

    @asynccontextmanager
    async def _session(
        self, spec: EnvironmentSpec, num_envs: int, hosts: int, tenant: str, run_id: str, images: bool
    ) -> AsyncIterator[SessionClient]:
        """A session of this worker's own; its end is told to the service, and nobody waits for that."""
        # Looked up for each session: a service that was placed anew has other hosts.
        environments = await lookup.peer(lookup.ENVIRONMENTS)
        opened = await environments.open(
            {
                "environment": spec.model_dump(mode="json"),
                "num_envs": num_envs,
                "hosts": min(hosts, num_envs),
                "tenant_id": tenant,
                "images": images,
                "owner": run_id,
                "request_id": f"{run_id}-{secrets.token_hex(4)}",
            }
        )
        session = SessionClient.direct(opened)
        try:
            async with renewed_session(environments, opened):
                yield session
        except EnvironmentFault as error:
            await _tell(environments, "report_fault", opened["session_id"], str(error))
            raise
        finally:
            session.disconnect()
            self._in_background(_tell(environments, "close", opened["session_id"]))

    def _in_background(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _progress(self, run_id: str, tenant: str, kind: str, version: int) -> _Progress:
        return _Progress(self._active, run_id, {"tenant": tenant, "kind": kind, "version": version, "done": 0, "of": 0})

    def _write(
        self,
        backend: BackendConfig,
        job: dict[str, Any],
        encoded: EncodedFields,
        rest: dict[str, np.ndarray],
        instructions: list[str],
        labels: dict[str, Any],
    ) -> None:
        distinct, index = indexed_instructions(instructions)
        self._partitions.put(
            job["partition_id"],
            {**rest, **index},
            encoded=encoded,
            tenant_id=backend.policy.tenant,
            schema_signature=backend.policy.schema_signature,
            policy_version=job["behavior_policy_version"],
            chunk=backend.algorithm.microbatch_size,
            instructions=distinct,
            labels=labels,
        )

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *args)


async def kept_films(run: str, stem: str, films: Mapping[str, tuple[int, bytes]]) -> list[dict[str, Any]]:
    """Put films {outcome: (seed, mp4)} beside the metrics of an MLflow run; what cannot be kept costs no evaluation.

    Returns:
        {"outcome", "seed", "artifact": its path within the run} of each that is there.
    """
    kept: list[dict[str, Any]] = []
    for outcome, (seed, content) in films.items():
        name = f"films/{stem}-{outcome}-seed-{seed}.mp4"
        try:
            await (await lookup.peer(lookup.METRICS, timeout_s=60)).keep_file(run, name, content)
        except JoyNexusError as error:
            logger.warning("%s of run %s was not kept: %s", name, run, error)
        else:
            kept.append({"outcome": outcome, "seed": seed, "artifact": name})
    return kept


def _check_pictures(spec: EnvironmentSpec, config: PolicyConfig) -> None:
    """Cameras are bound by name, and names do not say which way up their pictures are, nor how large.

    Raises:
        SpecError: if the environment turns other cameras than the policy learned with, or shows other sizes than it
            learned from and no resize is declared.
    """
    learned = config.turned_cameras
    if learned is not None and set(spec.turned_cameras) != set(learned):
        shown, wanted = (", ".join(sorted(names)) or "none" for names in (spec.turned_cameras, learned))
        possible = f"turned cameras {wanted}, as {config.tenant!r} learned with"
        raise SpecError(refusal("environment", f"{spec.name} (turned cameras {shown})", possible, "choose another one"))
    seen, known = (
        {c.name: f"{c.height} × {c.width}" for c in cameras}
        for cameras in (sized(spec.cameras, config.transforms), config.cameras)
    )
    if seen != known:
        possible = f"{known}, as {config.tenant!r} learned from"
        remedy = "choose another one, or declare transforms.cameras where it is trained"
        raise SpecError(refusal("environment", f"{spec.name} (cameras {seen})", possible, remedy))


async def _nothing() -> dict[str, np.ndarray]:
    return {}


async def _tell(environments: lookup.Service, method: str, *args: str) -> None:
    """Word to the service about a session; without it the session ends when it has been idle for long."""
    try:
        await getattr(environments, method)(*args)
    except JoyNexusError as error:
        logger.warning("%s of session %s: %s", method, args[0], error)


class _Progress:
    """Keeps an entry of `active` while a loop runs; calling it updates done and of."""

    def __init__(self, active: dict[str, dict[str, Any]], run_id: str, entry: dict[str, Any]) -> None:
        self._active, self._run_id, self._entry = active, run_id, entry

    def __enter__(self) -> Progress:
        self._active[self._run_id] = self._entry
        return self

    def __call__(self, done: int, of: int) -> None:
        self._entry |= {"done": done, "of": of}

    def __exit__(self, *_: object) -> None:
        self._active.pop(self._run_id, None)


def _blanked(policy: Policy, config: PolicyConfig) -> Policy:
    """`policy` shown black pictures of the declared size, whatever the session returned."""

    async def answer(observation: Observation) -> Prediction:
        rows = len(observation["instructions"])
        black = {c.name: np.zeros((rows, c.height, c.width, 3), np.uint8) for c in config.cameras}
        return await policy({**observation, "images": black})

    return answer
