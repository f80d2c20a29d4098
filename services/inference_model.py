"""InferenceModelService: the resident actor that answers observations with actions, many tenants to one forward.

Requests wait in arrival order; of each base model the largest FIFO-compatible prefix up to `max_batch_size` samples or
`batch_timeout_s` shares one base forward in the compute thread, and each request is resolved with its tenant's own
action module. `rollout` and `evaluate` are environment loops composed over the same queue, so
their requests group with everybody's. No torch at import: flow processes import this module to unpickle the handle.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs import seeds as seed_ranges
from configs.backend import BackendConfig, PolicyConfig
from configs.cluster import InferenceBatchingSpec
from configs.environment import EnvironmentSpec
from configs.errors import AdmissionRefused, Conflict, JoyNexusError, UnknownObject, refusal
from configs.home import Home
from configs.model import BaseModelSpec
from configs.signature import prefix_key
from services import lookup
from services.busy import BusyLog
from services.group_batcher import GroupBatcher
from services.resident import resident
from services.rollout import Observation, Policy, Prediction

if TYPE_CHECKING:
    from services.serving import Request, ServingPolicies, ServingPolicy

logger = logging.getLogger(__name__)
T = TypeVar("T")
_REMEMBERED_LOOPS = 100
_PREPARED_AT_ONCE_BYTES = 512 * 1024  # of pictures: half a millisecond, less than handing them to a thread costs


class InferenceModelService:
    """Serving states of many tenants over resident base models.

    Args:
        home: folder of the installation.
        base_models: `BaseModelSpec`s as JSON, to keep resident.
        batching: an `InferenceBatchingSpec` as JSON.
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
        from services.environment_loops import EnvironmentLoops
        from services.policy_stacks import PolicyStacks
        from services.resident_models import load_base_models

        self._bases = load_base_models([BaseModelSpec.model_validate(spec) for spec in base_models])
        self._batching = InferenceBatchingSpec.model_validate(batching)
        self._max_slots = max_slots
        self._max_pinned = max_pinned_versions
        self._tenants: dict[str, ServingPolicies] = {}
        self._stacks = PolicyStacks(self._batching.max_stack_bytes)
        self._batchers: dict[str, GroupBatcher[Request, Prediction]] = {}  # {base model: its queue}
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="infer-compute")
        self._prepare = ThreadPoolExecutor(1, thread_name_prefix="infer-prepare")
        folders = Home(Path(home))
        self._loops = EnvironmentLoops(folders.partitions, self._batching.max_batch_size, folders.datasets)
        self._busy = BusyLog()
        self._loops_of: OrderedDict[str, asyncio.Task[dict[str, Any]]] = OrderedDict()  # {id: rollout or evaluation}
        self._batches = self._batched_requests = self._batched_rows = 0

    async def ping(self) -> str:
        """Answer "ok"; the event loop is alive."""
        return "ok"

    async def status(self) -> dict[str, Any]:
        """Serving versions, pins and bytes, the queue, loops under way, bytes of stacks, batching figures."""
        return {
            "base_models": {name: base.num_bytes for name, base in self._bases.items()},
            "tenants": {
                t: {"version": p.current.version, "pinned": p.pinned, "bytes": p.num_bytes}
                for t, p in self._tenants.items()
            },
            "max_slots": self._max_slots,
            "stack_bytes": self._stacks.num_bytes,
            "waiting_rows": sum(b.waiting_rows for b in self._batchers.values()),
            "active": self._loops.active,
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
        self,
        config: dict[str, Any],
        *,
        fresh: bool,
        version: int = 0,
        tensors: dict[str, np.ndarray] | None = None,
        delay: int = 0,
    ) -> dict[str, Any]:
        """Create a tenant's serving state (seeded initial weights unless `tensors` are given), or join the one it has.

        `delay` versions before the current one stay served, two at least.

        Raises:
            Conflict: if it has another schema signature and `fresh` is not asked for.
            AdmissionRefused: if all slots are taken.
        """
        from services.serving import ServingPolicies, ServingPolicy

        policy_config = PolicyConfig.model_validate(config)
        tenant = policy_config.tenant
        resident(self._bases, policy_config.base_model)
        present = self._tenants.get(tenant)
        if present is not None and not fresh:
            if present.current.config.schema_signature != policy_config.schema_signature:
                raise Conflict(
                    refusal(
                        "action_module", tenant, "the interface its slot has", "start fresh or use another tenant name"
                    )
                )
            present.allow(delay)
            return {"version": present.current.version}
        if present is None and len(self._tenants) >= self._max_slots:
            raise AdmissionRefused(
                refusal("tenant.name", tenant, f"{self._max_slots} slots, all taken", "close a tenant that is done")
            )
        policy = await self._run(self._prepare, ServingPolicy, policy_config, version, tensors)
        self._tenants[tenant] = ServingPolicies(policy, self._max_pinned, delay)
        self._stacks.forget_unserved()
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
        self._stacks.forget_unserved()

    async def load_weights(
        self, tenant_id: str, schema_signature: str, version: int, tensors: dict[str, np.ndarray]
    ) -> int:
        """Serve `version` from the next accepted request on; those under way keep the version they were accepted with.

        Raises:
            Conflict: for another schema signature, or a version older than the current one.
            TenantFault: if the tensors do not fit.
        """
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
        policy = await self._run(self._prepare, policies.current.following, version, tensors)
        policies.load(policy)
        self._stacks.forget_unserved()
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
            self._stacks.forget_unserved()

    # the Inference Queue

    async def predict(
        self,
        observations: Observation,
        tenant_id: str,
        policy_version: int | None = None,
        seed: int | None = None,
        exploring: bool = True,
    ) -> dict[str, Any]:
        """Actions for an observation batch.

        Args:
            observations: {"images": {camera: uint8 [B, h, w, 3]}, "proprioception": f32 [B, S], "instructions": [B]}.
            tenant_id: whose policy answers.
            policy_version: a served version; None takes the current one.
            seed: draws action noise; None asks for the same action each time.
            exploring: of a seed, all noise that the policy learns by; else only the one that a flow begins from.

        Returns:
            {"action", "environment_action" [B, H, A], "policy_version"}, and of a module that learns by RL "log_prob"
            [B, H] and "value" [B].
        """
        policy = self._policies(tenant_id).find(policy_version)
        generator = None if seed is None else _generator(seed)
        prediction = await self._bound(policy, generator, exploring=exploring)(observations)
        names = ("action", "environment_action", "log_prob", "value")
        answer = {name: value for name in names if (value := getattr(prediction, name)) is not None}
        return {**answer, "policy_version": policy.version}

    def _bound(
        self, policy: ServingPolicy, generator: Any, *, keep_feature: bool = False, exploring: bool = True
    ) -> Policy:
        """`policy` as a function of observations; its requests go through the queue of its base."""

        async def answer(observation: Observation) -> Prediction:
            from services.serving import Request

            base = self._bases[policy.config.base_model.name]
            if sum(image.nbytes for image in observation["images"].values()) <= _PREPARED_AT_ONCE_BYTES:
                prepared = policy.prepare(base.backbone, observation)
            else:
                prepared = await self._run(self._prepare, policy.prepare, base.backbone, observation)
            prefix = prepared[0]
            key = prefix_key(policy.config.base_model, prefix.length)
            batcher = self._batcher(policy.config.base_model.name)
            request = Request(policy, *prepared, generator, keep_feature, exploring)
            return await batcher.submit(key, prefix.rows, request)

        return answer

    def _batcher(self, base_name: str) -> GroupBatcher[Request, Prediction]:
        if base_name not in self._batchers:
            self._batchers[base_name] = GroupBatcher(
                base_name, partial(self._forward, base_name), self._batching, self._compute
            )
        return self._batchers[base_name]

    def _forward(self, base_name: str, requests: Sequence[Request]) -> Sequence[Prediction | JoyNexusError]:
        from services.serving import forward

        rows: dict[str, int] = {}
        for request in requests:
            tenant = request.policy.config.tenant
            rows[tenant] = rows.get(tenant, 0) + request.prefix.rows
        self._batches += 1
        self._batched_requests += len(requests)
        self._batched_rows += sum(rows.values())
        with self._busy.record("forward", rows):
            return forward(self._bases[base_name].backbone, requests, self._stacks)

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
        return await self._joined(f"rollout {job['job_id']}", lambda: self._rollout(config, job))

    async def _joined(self, key: str, begin: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
        """A caller whose reply was lost asks again: it joins the loop that still runs, or gets what that one gave."""
        if key not in self._loops_of:
            self._loops_of[key] = asyncio.get_running_loop().create_task(begin())
            ended = [k for k, task in self._loops_of.items() if task.done()]
            for forgotten in ended[: max(len(ended) - _REMEMBERED_LOOPS, 0)]:
                del self._loops_of[forgotten]
        task = self._loops_of[key]
        try:
            return await asyncio.shield(task)
        except Exception:
            if task.done() and self._loops_of.get(key) is task:
                del self._loops_of[key]  # what failed may be tried again
            raise

    async def _rollout(self, config: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
        backend = BackendConfig.model_validate(config)
        done = await self._loops.written(job["partition_id"])
        if done is not None:  # the same job's rollout was done before and its reply lost: done once
            return done
        tenant, seed = backend.policy.tenant, backend.algorithm.seed
        policies = self._policies(tenant)
        policy = policies.pin(job["behavior_policy_version"])
        try:
            sampled = self._bound(
                policy,
                _generator(seed_ranges.training_seed(seed, int(job["metadata"]["rollout"]), 0)),
                keep_feature=backend.features_travel,
            )
            return await self._loops.rollout(backend, job, policy.version, sampled, self._bound(policy, None))
        finally:
            policies.release(policy.version)

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
        films_to: str | None = None,
        record: str | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run episodes under one version, pinned from the first step to the last.

        `sampled` draws actions as in training; else a Gaussian's mean is taken, and a flow's chunks follow from noise
        that is drawn for each. `first_seed` seeds either. A second call with the `run_id` of one under way joins it.
        A short film of the first success and of the first failure goes into the MLflow run `films_to`; `record` names a
        dataset that all episodes are written to, with `provenance`. Neither changes an action or a result.

        Returns:
            {"policy_version", "episodes", "successes", "success_rate", "mean_return", "mean_length", "outcomes",
            "films": [{"outcome", "seed", "artifact"}, …], "recorded": the dataset's name or None}.
        """
        from services.environment_loops import kept_films

        spec = EnvironmentSpec.model_validate(environment)

        async def evaluation() -> dict[str, Any]:
            policies = self._policies(tenant_id)
            policy = policies.pin(policy_version)
            try:
                result, films = await self._loops.evaluate(
                    tenant_id,
                    spec,
                    self._bound(policy, _generator(first_seed), exploring=sampled),
                    policy.config,
                    policy.version,
                    episodes=episodes,
                    first_seed=first_seed,
                    num_envs=num_envs,
                    hosts=hosts,
                    blanked=blanked,
                    run_id=run_id,
                    filmed=films_to is not None,
                    record=record,
                    provenance=provenance,
                )
            finally:
                policies.release(policy.version)
            outcomes = [result.success[n] for n in range(episodes)]
            numbered = {outcome: (first_seed + number, mp4) for outcome, (number, mp4) in films.items()}
            kept = await kept_films(films_to, f"{spec.name}-version-{policy.version}", numbered) if films_to else []
            return {
                "policy_version": policy.version,
                **result.summary(),
                "outcomes": outcomes,
                "films": kept,
                "recorded": record,
            }

        return await self._joined(f"evaluation {tenant_id} {run_id}", evaluation)

    # lookups

    def _policies(self, tenant: str) -> ServingPolicies:
        try:
            return self._tenants[tenant]
        except KeyError:
            known = ", ".join(sorted(self._tenants)) or "none is open"
            raise UnknownObject(refusal("tenant_id", tenant, known, "open the tenant first")) from None

    @staticmethod
    async def _run(executor: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


def _generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)
