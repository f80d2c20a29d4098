"""TrainingModelService: the resident actor that updates tenants' slots on one shared, frozen base model.

A thin asynchronous shell: compute runs in one executor thread (one torch thread a role), file access in another,
so the event loop answers while a job trains. One lock a slot orders `train_job`, `train_batch` and `restore`.
A job trains a *copy* of the slot; the copy takes the slot's place only after its checkpoint is written, so an
exception anywhere leaves the tenant at the version it had. No torch at import: flow processes import this module
to unpickle the handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.algorithm import SftSpec
from configs.backend import BackendConfig
from configs.cluster import HELD_BYTES
from configs.errors import Conflict, SpecError, TenantFault, UnknownObject, refusal
from configs.home import Home
from configs.model import BaseModelSpec
from services import lookup
from services.busy import BusyLog
from services.gathering import Gathering, Resolve
from services.resident import resident

if TYPE_CHECKING:
    import numpy as np

    from kernels.backbones import Backbone
    from services.policy_slot import PolicySlot
    from services.training_group import Member, Trained
    from storage.partitions import SampleMetadata

logger = logging.getLogger(__name__)
T = TypeVar("T")
_REMEMBERED_JOBS = 4_096
_GATHER_S = 5.0  # a group's members are called within milliseconds and read their partitions in one or two seconds


class TrainingModelService:
    """Slots of many tenants over resident base models.

    Args:
        home: folder of the installation.
        base_models: `BaseModelSpec`s as JSON, to keep resident.
        max_slots: tenants at one time.
        max_feature_bytes: what the base computed of a tenant's demonstrations and is kept, at most.
        max_update_feature_bytes: what the base computed of one job and is held while it is trained, at most.
    """

    def __init__(
        self,
        home: str,
        base_models: list[dict[str, Any]],
        max_slots: int,
        max_feature_bytes: int = 0,
        max_update_feature_bytes: int = HELD_BYTES,
    ) -> None:
        from services.feature_store import FeatureStore
        from services.resident_models import load_base_models
        from storage.partitions import PartitionStore

        self._home = Home(Path(home))
        self._bases = load_base_models([BaseModelSpec.model_validate(spec) for spec in base_models])
        self._max_slots = max_slots
        self._kept = FeatureStore(max_feature_bytes)
        self._held_bytes = max_update_feature_bytes
        self._slots: dict[str, PolicySlot] = {}
        self._configs: dict[str, BackendConfig] = {}  # {policy_key: configuration}
        self._folders: dict[str, Path] = {}  # {policy_key: output folder of the workload}
        self._last_job: dict[str, str] = {}  # {policy_key: job whose result the slot holds}
        self._jobs_trained: dict[str, int] = {}  # {policy_key: jobs since its workload was opened}
        self._locks: dict[str, asyncio.Lock] = {}  # {tenant: lock}; one order of updates a slot
        self._done: OrderedDict[str, dict[str, Any]] = OrderedDict()  # {job_id: result}; a re-sent job is done once
        self._gathering: Gathering[Member, Trained] = Gathering(self._start_group, _GATHER_S)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="train-compute")
        self._files = ThreadPoolExecutor(2, thread_name_prefix="train-files")
        self._partitions = PartitionStore(self._home.partitions)
        self._busy = BusyLog()

    async def ping(self) -> str:
        """Answer "ok"; the event loop is alive."""
        return "ok"

    async def status(self) -> dict[str, Any]:
        """Slots with their versions and bytes, the base models' bytes (counted once) and busy seconds."""
        return {
            "base_models": {name: base.num_bytes for name, base in self._bases.items()},
            "slots": {t: {"version": s.version, "bytes": s.num_bytes} for t, s in self._slots.items()},
            "max_slots": self._max_slots,
            "feature_bytes": self._kept.num_bytes(),
            "busy_seconds": self._busy.seconds(),
        }

    async def busy(self, since: float) -> list[list[object]]:
        """Compute intervals that ended after `since`; see `BusyLog.intervals`."""
        return self._busy.intervals(since)

    async def open_slot(self, config: dict[str, Any], folder: str, *, fresh: bool) -> dict[str, Any]:
        """Create the tenant's slot, or join the one it has.

        Args:
            config: a `BackendConfig` as JSON.
            folder: output folder of this workload.
            fresh: start from new weights at version 0 instead of those the slot has.

        Returns:
            {"version", "bytes", "copy_bytes", "next_number", "policy"}: of the slot, and of what a job is trained on;
            "next_number" of the batch or rollout that comes next in the workload's order; "policy" is the
            `PolicyConfig` that the slot has. One that is joined keeps its own, with the statistics that its weights
            were learned under, whatever data or environment this workload has.

        Raises:
            Conflict: if the tenant's slot has another schema signature and `fresh` is not asked for, or the resident
                base is not the declared one.
            UnknownObject: if no such base is resident.
            TenantFault: if all slots are taken.
            DataFault, SpecError: if the adapter that it is to start from cannot be read or is not the declared one.
        """
        backend = BackendConfig.model_validate(config)
        tenant = backend.policy.tenant
        resident(self._bases, backend.policy.base_model)
        async with self._lock(tenant):
            slot = None if fresh else self._slots.get(tenant)
            if slot is not None and slot.config.schema_signature != backend.policy.schema_signature:
                raise Conflict(
                    refusal(
                        "action_module", tenant, "the interface its slot has", "start fresh or use another tenant name"
                    )
                )
            if slot is None and tenant not in self._slots and len(self._slots) >= self._max_slots:
                raise TenantFault(
                    refusal("tenant.name", tenant, f"{self._max_slots} slots, all taken", "close a tenant that is done")
                )
            if slot is None:
                start = await self._run(self._files, self._read_start, backend)
                slot = await self._run(self._compute, self._new_slot, backend, start)
                self._kept.clear(tenant)
            backend = backend.model_copy(update={"policy": slot.config})
            slot.ensure_optimizer(backend.policy_key, backend.algorithm)
            self._slots[tenant] = slot
            self._configs[backend.policy_key] = backend
            self._folders[backend.policy_key] = Path(folder)
            self._jobs_trained[backend.policy_key] = 0
            self._last_job.pop(backend.policy_key, None)
            self._forget_unused_features()
            return {
                "version": slot.version,
                "bytes": slot.num_bytes,
                "copy_bytes": slot.copy_bytes,
                "next_number": slot.next_numbers.get(backend.policy_key, 0),
                "policy": slot.config.model_dump(mode="json"),
            }

    async def close_slot(self, tenant_id: str) -> None:
        """Forget the tenant's runtime state; its output folder stays. Closing twice is harmless."""
        async with self._lock(tenant_id):
            self._slots.pop(tenant_id, None)
            for key in [k for k, c in self._configs.items() if c.policy.tenant == tenant_id]:
                del self._configs[key], self._folders[key]
            self._forget_unused_features()

    async def versions(self) -> dict[str, int]:
        """Current policy version of each tenant."""
        return {tenant: slot.version for tenant, slot in self._slots.items()}

    async def train_job(self, job: dict[str, Any], group: Sequence[str] = ()) -> dict[str, Any]:
        """Consume a leased job's partition as consecutive microbatches; commit a checkpoint, then the slot.

        Args:
            job: the descriptor.
            group: ids of jobs, this one among them, whose calls come at the same time: supervised jobs on one base
                share its forwards. The result is that of the job alone.

        Returns:
            {"version", "optimizer_steps", "metrics", "seconds", "checkpoint", "register", "nothing_to_learn"}: whether
            the workload's cadence asks for an adapter version now, and whether the job made no step, so that the
            version is the one before and nothing was written; the same again for a job done before. What became of
            groups, if the job's metadata says so, is among the metrics.

        Raises:
            TenantFault: if the tenant's numbers are not finite; the slot stays as it was.
            DataFault: if the partition is missing, torn, or another tenant's.
        """
        from services.policy_slot import training_fields
        from services.training_group import Member

        job_id, together = job["job_id"], tuple(group) or (job["job_id"],)
        if job_id not in together:
            possible = "the ids of a group with the job's own"
            raise SpecError(refusal("group", list(group), possible, f"add {job_id}"))
        tenant, joined = job["tenant_id"], False
        try:
            if (done := self._done.get(job_id)) is not None:
                return done
            backend = self._config(job["policy_key"])
            async with self._lock(tenant):
                if (done := self._done.get(job_id)) is not None:
                    return done
                slot = self._slot(tenant)
                _, data = await self._run(self._files, self._read, job, "train", training_fields(backend))
                member = Member(slot, backend, data, self._held_bytes)
                if isinstance(backend.algorithm, SftSpec):
                    joined = True
                    trained, result = await self._gathering.join(together, job_id, member)
                else:
                    trained, result = await self._run(self._compute, self._train, member)
                result["metrics"] |= {k: float(v) for k, v in job["metadata"].get("group_counts", {}).items()}
                await self._commit(job, backend, trained, result)
        finally:
            if not joined:
                self._gathering.give_up(together, job_id)
        logger.info("job %s of tenant %s: version %d", job_id, tenant, result["version"])
        return result

    async def _commit(
        self, job: dict[str, Any], backend: BackendConfig, trained: PolicySlot, result: dict[str, Any]
    ) -> None:
        """Write the checkpoint, then let the trained copy take the slot's place; without a step there is neither."""
        result["nothing_to_learn"] = result["optimizer_steps"] == 0
        numbered = [job["metadata"][name] for name in ("rollout", "batch") if name in job["metadata"]]
        for slot in (trained, self._slot(backend.policy.tenant)):  # the latter stays where there was no step
            known = slot.next_numbers.get(backend.policy_key, 0)
            slot.next_numbers[backend.policy_key] = max([known, *(int(number) + 1 for number in numbered)])
        trained_jobs = self._jobs_trained.get(backend.policy_key, 0) + 1
        if trained_jobs % backend.outputs.checkpoint_every_jobs == 0 and not result["nothing_to_learn"]:
            folder = self._folders[job["policy_key"]]
            manifest = self._manifest(job["job_id"], backend, trained)
            result["checkpoint"] = await self._run(self._files, trained.save, folder, backend.policy_key, manifest)
        if not result["nothing_to_learn"]:
            self._slots[backend.policy.tenant] = trained
            self._last_job[backend.policy_key] = job["job_id"]
        self._jobs_trained[backend.policy_key] = trained_jobs
        every = backend.outputs.register_every_jobs
        result["register"] = every is not None and trained_jobs % every == 0
        self._done[job["job_id"]] = result
        while len(self._done) > _REMEMBERED_JOBS:
            self._done.popitem(last=False)

    def _start_group(self, members: list[tuple[Member, Resolve[Trained]]]) -> None:
        """Have the compute thread train members of one base together."""
        by_base: dict[str, list[tuple[Member, Resolve[Trained]]]] = {}
        for member, resolve in members:
            by_base.setdefault(member.backend.policy.base_model.name, []).append((member, resolve))
        for of_base in by_base.values():
            self._compute.submit(self._train_group, of_base)

    async def train_batch(self, tenant_id: str, policy_key: str, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """One optimizer step on a slot with fields in memory (those of a partition), for custom algorithms.

        Raises:
            TenantFault: if the numbers are not finite.
        """
        backend = self._config(policy_key)
        async with self._lock(tenant_id):
            trained, result = await self._run(self._compute, self._train_once, self._slot(tenant_id), backend, batch)
            self._slots[tenant_id] = trained
        return result

    async def actor_forward(self, job: dict[str, Any]) -> dict[str, Any]:
        """Attach `actor_log_prob` [n, H] and `actor_value` [n] of the behaviour actions under the resident actor, and
        `actor_version` [n], its version."""
        from services.policy_slot import forward_fields

        tenant, backend = job["tenant_id"], self._config(job["policy_key"])
        async with self._lock(tenant):
            slot = self._slot(tenant)
            meta, data = await self._run(self._files, self._read, job, "actor_forward", forward_fields(backend))
            derived = await self._run(self._compute, self._evaluate, slot, backend, data)
            await self._run(self._files, self._derive, meta, derived)
        return {"version": slot.version, "samples": meta.size}

    async def compute_advantages(self, job: dict[str, Any]) -> dict[str, Any]:
        """Attach `advantage` [n, H] and `return` [n] or `loss_mask` [n, H] to an RL partition.

        Returns:
            {"samples", "group_counts"}: the latter of `kernels.advantages.group_counts`, empty where none are compared.
        """
        from services.policy_slot import advantage_fields, advantages, compared

        backend = self._config(job["policy_key"])
        stage = "compute_advantages_and_returns"
        meta, data = await self._run(self._files, self._read, job, stage, advantage_fields(backend))
        derived = await self._run(self._compute, advantages, data, backend.algorithm)
        counts = await self._run(self._compute, compared, data, backend.algorithm)
        await self._run(self._files, self._derive, meta, derived)
        return {"samples": meta.size, "group_counts": counts}

    async def export_params(self, tenant_id: str) -> dict[str, Any]:
        """The tenant's payload: {"tenant_id", "schema_signature", "version", "tensors"}; never the base."""
        slot = self._slot(tenant_id)
        return {
            "tenant_id": tenant_id,
            "schema_signature": slot.config.schema_signature,
            "version": slot.version,
            "tensors": slot.parameters(),
        }

    async def publish(self, tenant_id: str) -> int:
        """Send the tenant's current parameters to the Inference Model Service; returns the version sent."""
        payload = await self.export_params(tenant_id)
        inference = await lookup.peer(lookup.INFERENCE, timeout_s=60)
        await inference.load_weights(**payload)
        return int(payload["version"])

    async def register_adapter(self, tenant_id: str, policy_key: str, job_tag: str) -> dict[str, Any]:
        """Register the tenant's current parameters in MLflow, once a `job_tag`; returns name and versions."""
        backend = self._config(policy_key)
        async with self._lock(tenant_id):
            slot = self._slot(tenant_id)
            params, manifest = slot.parameters(), self._manifest(self._last_job.get(policy_key), backend, slot)
        tags = {
            "tenant": tenant_id,
            "policy_version": str(manifest["policy_version"]),
            "schema_signature": backend.policy.schema_signature,
            "base_model": backend.policy.base_model.name,
        }
        metrics = await lookup.peer(lookup.METRICS, timeout_s=120)
        version = await metrics.register_adapter(policy_key, params, manifest, tags, job_tag)
        return {"name": policy_key, "version": version, "policy_version": manifest["policy_version"]}

    async def save(self, tenant_id: str, policy_key: str) -> dict[str, Any]:
        """Write a checkpoint (parameters, optimizer, random state) of the current version now."""
        backend = self._config(policy_key)
        async with self._lock(tenant_id):
            slot = self._slot(tenant_id)
            # The same job's manifest as in `train_job`: saving what is saved already changes nothing.
            manifest = self._manifest(self._last_job.get(policy_key), backend, slot)
            return await self._run(self._files, slot.save, self._folders[policy_key], policy_key, manifest)

    async def restore(
        self, tenant_id: str, policy_key: str, *, folder: str, version: int | None, with_optimizer: bool
    ) -> int:
        """Take parameters (and optimizer and random state) from a checkpoint; returns its version.

        Raises:
            DataFault: if there is none, it is torn, or `with_optimizer` is asked of one saved without.
        """
        from services.policy_slot import PolicySlot

        backend = self._config(policy_key)
        async with self._lock(tenant_id):
            slot = await self._run(self._files, PolicySlot.restored, backend, Path(folder), version, with_optimizer)
            self._slots[tenant_id] = slot
            self._adopt(slot)
        return slot.version

    def _adopt(self, slot: PolicySlot) -> None:
        """Every workload of the tenant goes on with the statistics that the slot's weights were learned under."""
        for key, backend in self._configs.items():
            if backend.policy.tenant == slot.config.tenant:
                self._configs[key] = backend.model_copy(update={"policy": slot.config})

    def _forget_unused_features(self) -> None:
        """What was kept for workloads that are no longer open goes; what is shared goes with the last that shares."""
        from services.feature_store import scope_of

        self._kept.retain([scope_of(config) for config in self._configs.values()])

    # what runs in the executors

    def _read_start(self, backend: BackendConfig) -> tuple[dict[str, Any], dict[str, Any]] | None:
        from storage.peft_files import read_adapter

        return None if backend.start_from is None else read_adapter(Path(backend.start_from))

    def _new_slot(self, backend: BackendConfig, start: tuple[dict[str, Any], dict[str, Any]] | None) -> PolicySlot:
        from services.policy_slot import PolicySlot

        slot = PolicySlot(backend.policy)
        if start is not None:
            slot.start_from(*start)
        return slot

    def _read(self, job: dict[str, Any], task_name: str, fields: list[str]) -> tuple[SampleMetadata, dict[str, Any]]:
        """All samples of the job's partition for one stage, checked against the job's tags, with row instructions."""
        partition, store = job["partition_id"], self._partitions
        # A job may be leased again after its holder was lost: its stage starts from the first sample.
        store.reset_cursor(partition, task_name)
        attributes = store.attributes(partition)
        several = len(attributes.instructions) > 1
        meta = store.get_meta(
            partition,
            task_name=task_name,
            data_fields=[*fields, *(["instruction_index"] if several else [])],
            batch_size=attributes.sample_count,
            tenant_id=job["tenant_id"],
            schema_signature=job["metadata"]["schema_signature"],
        )
        assert meta is not None  # a partition has at least one sample, and the cursor is at the first
        data: dict[str, Any] = store.get_data(meta)
        if task_name == "train":
            store.reset_cursor(partition, task_name)  # nothing more is read: let go of the arrays
        data["instructions"] = attributes.row_instructions(meta.size, data.pop("instruction_index", None))
        return meta, data

    def _derive(self, meta: SampleMetadata, derived: dict[str, np.ndarray]) -> None:
        self._partitions.put_derived(meta, derived)
        self._partitions.reset_cursor(meta.partition_id, meta.task_name)

    def _train(self, member: Member) -> Trained:
        from services.training_group import train_alone

        return train_alone(self._backbone(member.backend), member, self._kept, self._busy)

    def _train_group(self, members: Sequence[tuple[Member, Resolve[Trained]]]) -> None:
        from services.training_group import train_members

        train_members(self._backbone(members[0][0].backend), members, self._kept, self._busy)

    def _train_once(self, slot: PolicySlot, backend: BackendConfig, batch: dict[str, np.ndarray]) -> Trained:
        from services.training_group import Member, train_alone

        single = backend.algorithm.single_step(len(batch["proprioception"]))
        member = Member(slot, backend.model_copy(update={"algorithm": single}), batch, self._held_bytes)
        return train_alone(self._backbone(backend), member, None, self._busy)

    def _evaluate(self, slot: PolicySlot, backend: BackendConfig, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with self._busy.record("actor_forward", {backend.policy.tenant: 1}):
            return slot.evaluated(self._backbone(backend), backend, data, self._held_bytes)

    # lookups

    def _backbone(self, backend: BackendConfig) -> Backbone:
        return self._bases[backend.policy.base_model.name].backbone

    def _lock(self, tenant: str) -> asyncio.Lock:
        return self._locks.setdefault(tenant, asyncio.Lock())

    def _slot(self, tenant: str) -> PolicySlot:
        try:
            return self._slots[tenant]
        except KeyError:
            known = ", ".join(sorted(self._slots)) or "none is open"
            raise UnknownObject(refusal("tenant_id", tenant, known, "open the tenant first")) from None

    def _config(self, policy_key: str) -> BackendConfig:
        try:
            return self._configs[policy_key]
        except KeyError:
            known = ", ".join(sorted(self._configs)) or "none is open"
            raise UnknownObject(refusal("policy_key", policy_key, known, "open the tenant first")) from None

    def _manifest(self, job_id: str | None, backend: BackendConfig, slot: PolicySlot) -> dict[str, Any]:
        return {
            "tenant_id": backend.policy.tenant,
            "policy_key": backend.policy_key,
            "policy_version": slot.version,
            "job_id": job_id,
            "schema_signature": backend.policy.schema_signature,
            "next_number": slot.next_numbers.get(backend.policy_key, 0),
            "policy": backend.policy.model_dump(mode="json"),
        }

    @staticmethod
    async def _run(executor: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
