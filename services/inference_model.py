"""InferenceModelService: the resident actor that answers observations with actions, many tenants to one forward.

Requests wait in arrival order; one batching task a base model takes the largest FIFO-compatible prefix up to
`max_batch_size` samples or `batch_timeout_s`, runs one base forward in the compute thread and resolves each request
with its tenant's own action module. `rollout` and `evaluate` are environment loops composed over the same queue, so
their requests group with everybody's. No torch at import: flow processes import this module to unpickle the handle.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs import seeds as seed_ranges
from configs.backend import BackendConfig, PolicyConfig
from configs.cluster import InferenceBatchingSpec
from configs.environment import EnvironmentSpec
from configs.errors import AdmissionRefused, Conflict, EnvironmentFault, JoyNexusError, UnknownObject, refusal
from configs.home import Home
from configs.model import BaseModelSpec
from configs.signature import prefix_key
from services import lookup
from services.busy import BusyLog
from services.environment_client import SessionClient
from services.inference_queue import InferenceQueue, Waiting
from services.rollout import Observation, Policy, Prediction, Progress, collect_rollout, run_episodes

if TYPE_CHECKING:
    from services.serving import Request, ServingPolicies, ServingPolicy

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_WAITING_ROWS = 16_384
_PREPARED_AT_ONCE_BYTES = 512 * 1024  # of pictures: half a millisecond, less than handing them to a thread costs


class InferenceModelService:
    """Serving states of many tenants over resident base models.

    Args:
        home: folder of the installation.
        base_models: `BaseModelSpec`s as JSON, to keep resident.
        batching: an `InferenceBatchingSpec` as JSON (the paper's B and T).
        max_slots: tenants at one time.
        max_pinned_versions: versions kept a tenant beside the current one.
    """

    def __init__(
        self,
        home: str,
        base_models: list[dict[str, Any]],
        batching: dict[str, Any],
        max_slots: int,
        max_pinned_versions: int,
    ) -> None:
        from services.resident_models import load_base_models
        from storage.partitions import PartitionStore

        self._home = Home(Path(home))
        self._bases = load_base_models([BaseModelSpec.model_validate(spec) for spec in base_models])
        self._batching = InferenceBatchingSpec.model_validate(batching)
        self._max_slots = max_slots
        self._max_pinned = max_pinned_versions
        self._tenants: dict[str, ServingPolicies] = {}
        self._queues: dict[str, InferenceQueue[tuple[Request, asyncio.Future[Prediction]]]] = {}  # {base model: queue}
        self._arrivals: dict[str, asyncio.Event] = {}
        self._batchers: dict[str, asyncio.Task[None]] = {}
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="infer-compute")
        self._prepare = ThreadPoolExecutor(1, thread_name_prefix="infer-prepare")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="infer-files")
        self._partitions = PartitionStore(self._home.partitions)
        self._busy = BusyLog()
        self._rollouts: dict[str, asyncio.Task[dict[str, Any]]] = {}  # {job_id: collection under way}
        self._active: dict[str, dict[str, Any]] = {}  # {run id: progress of a rollout or evaluation}
        self._batches = self._batched_requests = self._batched_rows = 0

    async def ping(self) -> str:
        """Answer "ok"; the event loop is alive."""
        return "ok"

    async def status(self) -> dict[str, Any]:
        """Serving versions, pins, the queue, running rollouts and evaluations, and batching figures."""
        return {
            "base_models": {name: base.num_bytes for name, base in self._bases.items()},
            "tenants": {t: {"version": p.current.version, "pinned": p.pinned} for t, p in self._tenants.items()},
            "waiting_rows": sum(q.waiting_rows for q in self._queues.values()),
            "active": list(self._active.values()),
            "batches": self._batches,
            "requests": self._batched_requests,
            "rows": self._batched_rows,
            "busy_seconds": self._busy.seconds(),
        }

    async def busy(self, since: float) -> list[list[object]]:
        """Compute intervals that ended after `since`; see `BusyLog.intervals`."""
        return self._busy.intervals(since)

    # serving states

    async def open_policy(
        self, config: dict[str, Any], *, fresh: bool, version: int = 0, tensors: dict[str, np.ndarray] | None = None
    ) -> dict[str, Any]:
        """Create a tenant's serving state (seeded initial weights unless `tensors` are given), or join the one it has.

        Raises:
            Conflict: if it has another schema signature and `fresh` is not asked for.
            AdmissionRefused: if all slots are taken.
        """
        from services.serving import ServingPolicies, ServingPolicy

        policy_config = PolicyConfig.model_validate(config)
        tenant = policy_config.tenant
        self._base(policy_config.base_model.name)
        present = self._tenants.get(tenant)
        if present is not None and not fresh:
            if present.current.config.schema_signature != policy_config.schema_signature:
                raise Conflict(
                    refusal(
                        "action_module", tenant, "the interface its slot has", "start fresh or use another tenant name"
                    )
                )
            return {"version": present.current.version}
        if present is None and len(self._tenants) >= self._max_slots:
            raise AdmissionRefused(
                refusal("tenant.name", tenant, f"{self._max_slots} slots, all taken", "close a tenant that is done")
            )
        policy = await self._run(self._prepare, ServingPolicy, policy_config, version, tensors)
        self._tenants[tenant] = ServingPolicies(policy, self._max_pinned)
        return {"version": version}

    async def open_adapter(self, reference: str) -> dict[str, Any]:
        """Resolve `models:/NAME@ALIAS` or `models:/NAME/VERSION` once and serve that version under a name of its own.

        Returns:
            {"serving": name to predict or evaluate with, "adapter": `models:/NAME/VERSION`, "policy_version"}; each
            opening needs one `close_policy(serving)`.
        """
        metrics = await lookup.peer(lookup.METRICS, timeout_s=120)
        found = await metrics.resolve(reference)
        version = int(found.manifest["policy_version"])
        serving = f"adapter-{found.name.replace('.', '-')}-{found.version}-{secrets.token_hex(3)}"
        config = PolicyConfig.model_validate(found.manifest["policy"]).model_copy(update={"tenant": serving})
        await self.open_policy(config.model_dump(mode="json"), fresh=True, version=version, tensors=found.params)
        return {"serving": serving, "adapter": f"models:/{found.name}/{found.version}", "policy_version": version}

    async def close_policy(self, tenant_id: str) -> None:
        """Forget a tenant's serving state. Closing twice is harmless."""
        self._tenants.pop(tenant_id, None)

    async def load_weights(
        self, tenant_id: str, schema_signature: str, version: int, tensors: dict[str, np.ndarray]
    ) -> int:
        """Serve `version` from the next accepted request on; those under way keep the version they were accepted with.

        Raises:
            Conflict: for another schema signature, or a version older than the current one.
            TenantFault: if the tensors do not fit.
        """
        from services.serving import ServingPolicy

        policies = self._policies(tenant_id)
        config = policies.current.config
        if config.schema_signature != schema_signature:
            raise Conflict(
                refusal(
                    "schema_signature",
                    schema_signature[:12],
                    config.schema_signature[:12],
                    "publish to the tenant's own slot",
                )
            )
        policy = await self._run(self._prepare, ServingPolicy, config, version, tensors)
        policies.load(policy)
        return version

    async def current_version(self, tenant_id: str) -> int:
        """The version that a request without one gets."""
        return self._policies(tenant_id).current.version

    async def pin(self, tenant_id: str, version: int | None = None) -> int:
        """Keep a version (None: the current one) until `release`; returns it."""
        return self._policies(tenant_id).pin(version).version

    async def release(self, tenant_id: str, version: int) -> None:
        """Undo one `pin`."""
        if tenant_id in self._tenants:
            self._tenants[tenant_id].release(version)

    # the Inference Queue

    async def predict(
        self, observations: Observation, tenant_id: str, policy_version: int | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        """Actions for an observation batch.

        Args:
            observations: {"images": {camera: uint8 [B, h, w, 3]}, "proprioception": f32 [B, S], "instructions": [B]}.
            tenant_id: whose policy answers.
            policy_version: a served version; None takes the current one.
            seed: draws action noise; None takes the mean action.

        Returns:
            {"action", "environment_action" [B, H, A], "log_prob" [B, H], "value" [B], "policy_version"}.
        """
        policy = self._policies(tenant_id).find(policy_version)
        prediction = await self._bound(policy, None if seed is None else _generator(seed))(observations)
        return {**vars(prediction), "policy_version": policy.version}

    def _bound(self, policy: ServingPolicy, generator: Any) -> Policy:
        """`policy` as a function of observations; its requests go through the queue of its base."""

        async def answer(observation: Observation) -> Prediction:
            from services.serving import Request

            base = self._base(policy.config.base_model.name)
            if sum(image.nbytes for image in observation["images"].values()) <= _PREPARED_AT_ONCE_BYTES:
                prefix, proprioception = policy.prepare(base.backbone, observation)
            else:
                prefix, proprioception = await self._run(self._prepare, policy.prepare, base.backbone, observation)
            request = Request(policy, prefix, proprioception, generator)
            return await self._enqueue(policy.config.base_model.name, request)

        return answer

    async def _enqueue(self, base_name: str, request: Request) -> Prediction:
        queue = self._queue(base_name)
        if queue.full(request.prefix.rows):
            raise AdmissionRefused(
                refusal(
                    "observations",
                    f"{request.prefix.rows} rows",
                    f"{_MAX_WAITING_ROWS} waiting rows",
                    "send again later",
                )
            )
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        key = prefix_key(request.policy.config.base_model, request.prefix.length)
        queue.push(Waiting(key, request.prefix.rows, (request, future)))
        self._arrivals[base_name].set()
        return await future

    def _queue(self, base_name: str) -> InferenceQueue[tuple[Request, asyncio.Future[Prediction]]]:
        if base_name not in self._queues:
            self._queues[base_name] = InferenceQueue(self._batching.max_batch_size, _MAX_WAITING_ROWS)
            self._arrivals[base_name] = asyncio.Event()
            self._batchers[base_name] = asyncio.get_running_loop().create_task(self._batch_forever(base_name))
        return self._queues[base_name]

    async def _batch_forever(self, base_name: str) -> None:
        queue, arrival = self._queues[base_name], self._arrivals[base_name]
        loop = asyncio.get_running_loop()
        while True:
            await arrival.wait()
            deadline = loop.time() + self._batching.batch_timeout_s
            while not queue.complete() and (left := deadline - loop.time()) > 0:
                arrival.clear()
                try:
                    await asyncio.wait_for(arrival.wait(), left)
                except TimeoutError:
                    break
            taken = queue.take()
            if len(queue):
                arrival.set()
            else:
                arrival.clear()
            live = [(request, future) for request, future in taken if not future.done()]
            if live:
                await self._resolve(base_name, live)

    async def _resolve(self, base_name: str, taken: list[tuple[Request, asyncio.Future[Prediction]]]) -> None:
        try:
            results = await self._run(self._compute, self._forward, base_name, [request for request, _ in taken])
        except Exception as error:
            logger.exception("a shared forward of %d requests on %s failed", len(taken), base_name)
            results = [JoyNexusError(f"inference: the shared forward failed ({error}); send the request again")] * len(
                taken
            )
        for (_, future), result in zip(taken, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _forward(self, base_name: str, requests: list[Request]) -> list[Any]:
        from services.serving import forward

        rows: dict[str, int] = {}
        for request in requests:
            tenant = request.policy.config.tenant
            rows[tenant] = rows.get(tenant, 0) + request.prefix.rows
        self._batches += 1
        self._batched_requests += len(requests)
        self._batched_rows += sum(rows.values())
        with self._busy.record("forward", rows):
            return forward(self._bases[base_name].backbone, requests)

    # environment loops

    async def rollout(self, config: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
        """Collect a reserved job's partition under its behaviour policy version and write it.

        Args:
            config: the tenant's `BackendConfig` as JSON.
            job: the reserved descriptor; its `created_seq` among the tenant's rollouts is in metadata "rollout".

        Returns:
            {"samples", "valid_transitions", "policy_version", "episodes", "successes", "success_rate", …}.

        Raises:
            EnvironmentFault, TenantFault, Conflict: nothing is written then.
        """
        job_id = job["job_id"]
        if job_id not in self._rollouts:
            # A caller whose reply was lost asks again while the first collection still runs: it joins that one.
            self._rollouts[job_id] = asyncio.get_running_loop().create_task(self._rollout(config, job))
            self._rollouts[job_id].add_done_callback(lambda _: self._rollouts.pop(job_id, None))
        return await asyncio.shield(self._rollouts[job_id])

    async def _rollout(self, config: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
        backend = BackendConfig.model_validate(config)
        algorithm, tenant = backend.algorithm, backend.policy.tenant
        assert algorithm.kind == "ppo"
        assert backend.environment is not None
        if job["partition_id"] in await self._run(self._files, self._partitions.list):
            # The same job's rollout was done before and its reply lost: done once.
            return {**dict((await self._run(self._files, self._partitions.attributes, job["partition_id"])).labels)}
        number = int(job["metadata"]["rollout"])
        policies = self._policies(tenant)
        policy = policies.pin(job["behavior_policy_version"])
        try:
            async with self._session(
                backend.environment,
                algorithm.num_envs,
                backend.resources.environment_hosts,
                tenant,
                job["job_id"],
                True,
            ) as session:
                with self._progress(job["job_id"], tenant, "rollout", policy.version) as progress:
                    data, instructions, episodes = await collect_rollout(
                        self._bound(policy, _generator(seed_ranges.training_seed(algorithm.seed, number, 0))),
                        self._bound(policy, None),
                        session,
                        num_envs=algorithm.num_envs,
                        steps=algorithm.rollout_steps,
                        seed_of_episode=lambda n: seed_ranges.training_seed(algorithm.seed, number, n),
                        progress=progress,
                        values_at_a_time=self._batching.max_batch_size,
                    )
        finally:
            policies.release(policy.version)
        summary: dict[str, Any] = {
            "samples": len(data["value"]),
            "valid_transitions": int(data["valid"].sum()),
            "policy_version": policy.version,
            **episodes.summary(),
        }
        await self._run(self._files, self._write, backend, job, data, instructions, summary)
        return summary

    async def evaluate(
        self,
        tenant_id: str,
        environment: dict[str, Any],
        *,
        episodes: int,
        first_seed: int,
        num_envs: int,
        hosts: int,
        blanked: bool = False,
        sampled: bool = False,
        policy_version: int | None = None,
        run_id: str,
    ) -> dict[str, Any]:
        """Run episodes under one version, pinned from the first step to the last.

        `sampled` draws actions as in training, seeded by `first_seed`; else the mean is taken.

        Returns:
            {"policy_version", "episodes", "successes", "success_rate", "mean_return", "mean_length", "outcomes"}.
        """
        spec = EnvironmentSpec.model_validate(environment)
        policies = self._policies(tenant_id)
        policy = policies.pin(policy_version)
        try:
            bound = self._bound(policy, _generator(first_seed) if sampled else None)
            async with self._session(spec, num_envs, hosts, tenant_id, run_id, not blanked) as session:
                with self._progress(run_id, tenant_id, "evaluation", policy.version) as progress:
                    result = await run_episodes(
                        _blanked(bound, policy.config) if blanked else bound,
                        session,
                        num_envs=num_envs,
                        seeds=range(first_seed, first_seed + episodes),
                        progress=progress,
                    )
        finally:
            policies.release(policy.version)
        outcomes = [result.success[n] for n in range(episodes)]
        return {"policy_version": policy.version, **result.summary(), "outcomes": outcomes}

    @asynccontextmanager
    async def _session(
        self, spec: EnvironmentSpec, num_envs: int, hosts: int, tenant: str, run_id: str, images: bool
    ) -> AsyncIterator[SessionClient]:
        """A session that this service steps over the hosts' own sockets; the Environment Service owns the processes."""
        environments = await lookup.peer(lookup.ENVIRONMENTS)
        opened = await environments.open(
            {
                "environment": spec.model_dump(mode="json"),
                "num_envs": num_envs,
                "hosts": min(hosts, num_envs),
                "tenant_id": tenant,
                "images": images,
                "request_id": f"{run_id}-{secrets.token_hex(4)}",
            }
        )
        session = SessionClient.direct(opened)
        try:
            yield session
        except EnvironmentFault as error:
            await environments.report_fault(opened["session_id"], str(error))
            raise
        finally:
            session.disconnect()
            await environments.close(opened["session_id"])

    def _progress(self, run_id: str, tenant: str, kind: str, version: int) -> _Progress:
        return _Progress(self._active, run_id, {"tenant": tenant, "kind": kind, "version": version, "done": 0, "of": 0})

    def _write(
        self,
        backend: BackendConfig,
        job: dict[str, Any],
        data: dict[str, np.ndarray],
        instructions: list[str],
        summary: dict[str, Any],
    ) -> None:
        distinct = sorted(set(instructions))
        if len(distinct) > 1:
            index = {text: i for i, text in enumerate(distinct)}
            data = {**data, "instruction_index": np.array([index[i] for i in instructions], np.int32)}
        self._partitions.put(
            job["partition_id"],
            data,
            tenant_id=backend.policy.tenant,
            schema_signature=backend.policy.schema_signature,
            policy_version=job["behavior_policy_version"],
            chunk=backend.algorithm.microbatch_size,
            instructions=distinct,
            labels=summary,
        )

    # lookups

    def _policies(self, tenant: str) -> ServingPolicies:
        try:
            return self._tenants[tenant]
        except KeyError:
            known = ", ".join(sorted(self._tenants)) or "none is open"
            raise UnknownObject(refusal("tenant_id", tenant, known, "open the tenant first")) from None

    def _base(self, name: str) -> Any:
        try:
            return self._bases[name]
        except KeyError:
            raise UnknownObject(
                refusal("base_model", name, ", ".join(sorted(self._bases)), "use a resident one")
            ) from None

    @staticmethod
    async def _run(executor: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


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


def _generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)
