"""The torch side of training: one tenant's action module, optimizers, random state and version.

`trained` never changes the slot it is called on: it trains a copy and returns it, so that an exception, or a crash
before the checkpoint is written, leaves the tenant at the version it had.
Not to be confused with services/serving.py, the serving side without optimizer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm import PpoSpec, SftSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.errors import Conflict, TenantFault, refusal
from kernels import action_modules
from kernels.advantages import ESTIMATORS
from kernels.backbones import Backbone
from kernels.features import VLAFeature, concatenated
from kernels.updates import Optimizer, new_optimizer, ppo_update, sft_update
from services.feature_store import SHARED, FeatureStore, KeptFeatures
from services.interface import Interface
from services.rollout import FEATURE
from storage.checkpoints import CheckpointStore

ENCODE_ROWS = 32
"""Rows of one base forward in training at most; it bounds the forward's memory, whatever a job or microbatch holds."""

ADVANTAGE_FIELDS = (
    "reward",
    "valid",
    "terminated",
    "truncated",
    "value",
    "bootstrap_value",
    "next_value",
    "sample_valid",
)


class PolicySlot:
    """One tenant's training state.

    Attributes:
        config: the tenant's model-facing interface.
        module: the action module.
        version: microbatch updates so far.
        optimizers: {policy_key: optimizer}; SFT and RL of one tenant share the module and its version.
        generator: shuffles microbatches.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.module = action_modules.build(config.action_module, config.base_model, config.seed)
        self.version = 0
        self.optimizers: dict[str, Optimizer] = {}
        self.generator = torch.Generator().manual_seed(config.seed)
        self._interface = Interface(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        tensors: list[Tensor] = list(self.module.parameters())
        for optimizer in self.optimizers.values():
            tensors += [v for s in optimizer.adam.state.values() for v in s.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def ensure_optimizer(self, policy_key: str, algorithm: SftSpec | PpoSpec) -> None:
        """A new workload of this policy starts with a fresh optimizer."""
        self.optimizers[policy_key] = new_optimizer(self.module, algorithm)

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters by name."""
        return action_modules.export_parameters(self.module)

    def _copy(self) -> PolicySlot:
        other = copy.copy(self)
        # One deepcopy of both, so that the copied optimizers hold the copied module's parameters.
        other.module, other.optimizers = copy.deepcopy((self.module, self.optimizers))
        other.generator = torch.Generator()
        other.generator.set_state(self.generator.get_state())
        return other

    def trained(
        self,
        backbone: Backbone,
        backend: BackendConfig,
        data: Mapping[str, Any],
        *,
        single_step: bool = False,
        store: FeatureStore | None = None,
    ) -> tuple[PolicySlot, dict[str, Any]]:
        """A copy of the slot after training on a job's samples, and what happened.

        Args:
            backbone: the frozen base.
            backend: the workload.
            data: fields of the partition, and "instructions", one a row.
            single_step: take the samples as one microbatch and pass over them once.
            store: demonstrations' features of earlier epochs; used where the workload lets them be kept.

        Returns:
            The copy and {"version", "optimizer_steps", "metrics", "seconds"}.

        Raises:
            TenantFault: if the tenant's numbers are not finite.
        """
        begun = time.perf_counter()
        slot, algorithm = self._copy(), backend.algorithm
        optimizer = slot.optimizers[backend.policy_key]
        before = optimizer.steps
        if single_step:
            once = {"epochs": 1} if isinstance(algorithm, PpoSpec) else {"passes": 1}
            algorithm = algorithm.model_copy(update={"microbatch_size": len(data["action"]), **once})
        if isinstance(algorithm, SftSpec):
            kept = None if store is None else self._kept(store, backend)
            metrics = slot._sft(backbone, optimizer, algorithm, data, kept)
        else:
            metrics = slot._ppo(backbone, optimizer, algorithm, data)
        if not all(torch.isfinite(p).all() for p in slot.module.parameters()):
            raise TenantFault(
                f"parameters: tenant {self.config.tenant!r} got NaN or infinity after version {self.version}; "
                "possible: finite numbers; lower the learning rate"
            )
        steps = optimizer.steps - before
        slot.version += steps
        return slot, {
            "version": slot.version,
            "optimizer_steps": steps,
            "metrics": metrics,
            "seconds": time.perf_counter() - begun,
            "checkpoint": None,
        }

    def evaluated(self, backbone: Backbone, backend: BackendConfig, data: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """`actor_log_prob` [n, H] and `actor_value` [n] of the partition's actions under the current parameters."""
        del backend  # any RL algorithm asks for the same two columns
        self.module.eval()
        with torch.no_grad():
            proprioception = torch.from_numpy(self._interface.proprioception(data["proprioception"]))
            scored = self.module.evaluate(
                self._features(backbone, data, slice(0, len(data["action"]))),
                proprioception,
                torch.from_numpy(data["action"]),
            )
        return {"actor_log_prob": scored.log_prob.numpy(), "actor_value": scored.value.numpy()}

    def _sft(
        self,
        backbone: Backbone,
        optimizer: Optimizer,
        spec: SftSpec,
        data: Mapping[str, Any],
        kept: KeptFeatures | None,
    ) -> dict[str, float]:
        action = np.asarray(data["action"], np.float32)
        if not np.isfinite(action[~data["action_is_pad"]]).all():
            raise TenantFault(
                refusal("action", "NaN or infinity", f"finite numbers for {self.config.tenant!r}", "mend it")
            )
        return sft_update(
            self.module,
            optimizer,
            lambda rows: self._features(backbone, data, rows, kept),
            proprioception=torch.from_numpy(self._interface.proprioception(data["proprioception"])),
            action=torch.from_numpy(self._interface.action.normalise(action)),
            is_pad=torch.from_numpy(np.asarray(data["action_is_pad"], bool)),
            microbatch_size=spec.microbatch_size,
            passes=spec.passes,
            generator=self.generator,
        )

    def _ppo(
        self, backbone: Backbone, optimizer: Optimizer, spec: PpoSpec, data: Mapping[str, Any]
    ) -> dict[str, float]:
        valid = np.asarray(data["valid"], bool) & np.asarray(data["sample_valid"], bool)[:, None]
        log_prob, value = _estimated_from(spec)
        return ppo_update(
            self.module,
            optimizer,
            lambda rows: self._features(backbone, data, rows),
            spec,
            self.generator,
            proprioception=torch.from_numpy(self._interface.proprioception(data["proprioception"])),
            action=torch.from_numpy(data["action"]),
            log_prob=torch.from_numpy(data[log_prob]),
            advantage=torch.from_numpy(data["advantage"]),
            returns=torch.from_numpy(data["return"]),
            valid=torch.from_numpy(valid),
            old_value=torch.from_numpy(data[value]),
            behaviour_log_prob=torch.from_numpy(data["log_prob"]) if _asks_for_behaviour(spec) else None,
        )

    def _features(
        self,
        backbone: Backbone,
        data: Mapping[str, Any],
        rows: slice | Tensor,
        kept: KeptFeatures | None = None,
    ) -> VLAFeature:
        """Of these rows: what came with the partition or was kept, else the base's forward; of a module with an adapter
        in the caller's gradient mode, through the base."""
        index = np.arange(len(data["action"]))[rows if isinstance(rows, slice) else rows.numpy()]
        if FEATURE in data:
            return VLAFeature(torch.from_numpy(np.asarray(data[FEATURE], np.float32)[index]))
        # Rows of one padded length at a time: what is computed of a row does not depend on its neighbours' prompts.
        texts = self._interface.state_texts(self._interface.proprioception(data["proprioception"][index]))
        instructions = [data["instructions"][i] for i in index]
        lengths = np.array(backbone.lengths(instructions, len(self._interface.cameras), texts))
        places, parts = np.argsort(lengths, kind="stable"), []
        for length in np.unique(lengths):
            of_length = places[lengths[places] == length]
            for chunk in np.split(of_length, range(ENCODE_ROWS, len(of_length), ENCODE_ROWS)):
                seen = _observation(data, index[chunk])
                if kept is None:
                    parts.append(self._encode(backbone, seen))
                    continue
                of_chunk = None if texts is None else [texts[i] for i in chunk]
                encode = partial(self._encode, backbone)
                parts.append(kept.features(backbone.spec, self.module.reads, seen, of_chunk, int(length), encode))
        found = concatenated(parts)
        return found if (places[1:] > places[:-1]).all() else found[torch.from_numpy(np.argsort(places))]

    def _encode(self, backbone: Backbone, observation: Mapping[str, Any]) -> VLAFeature:
        prefix, _ = self._interface.prepare(backbone, observation)
        if (adapter := self.module.adapter) is None:
            return backbone.encode(prefix, self.module.reads)
        return backbone.features(prefix, self.module.reads, [(slice(0, prefix.rows), adapter)])

    def _kept(self, store: FeatureStore, backend: BackendConfig) -> KeptFeatures | None:
        """The scope of the store that the workload uses; None where features may not be kept."""
        reuse = backend.resources.reuse_features
        if reuse == "never" or self.config.action_module.inside_base:
            return None
        return KeptFeatures(store, SHARED if reuse == "shared" else self.config.tenant)

    # checkpoints

    def save(self, folder: Path, policy_key: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write parameters, this policy's optimizer and the random state under the workload's folder."""
        optimizer = self.optimizers[policy_key]
        arrays = {"generator": self.generator.get_state().numpy(), "steps": np.array(optimizer.steps, np.int64)}
        names = dict(self.module.named_parameters())
        for name, parameter in names.items():
            for key, value in optimizer.adam.state.get(parameter, {}).items():
                arrays[f"adam.{key}.{name}"] = value.detach().cpu().numpy().copy()
        reference = CheckpointStore(folder / "checkpoints").save(
            version=self.version, params=self.parameters(), optimizer=arrays, manifest=manifest
        )
        return {"version": self.version, "digest": reference.digest, "path": str(reference.path)}

    @classmethod
    def restored(cls, backend: BackendConfig, folder: Path, version: int | None, with_optimizer: bool) -> PolicySlot:
        """The slot as a checkpoint has it.

        Raises:
            UnknownObject, DataFault: see `CheckpointStore.load`.
            Conflict: it was trained with another interface.
        """
        checkpoint = CheckpointStore(folder / "checkpoints").load(version, with_optimizer=with_optimizer)
        wanted, found = backend.policy.schema_signature, checkpoint.manifest["schema_signature"]
        if found != wanted:
            where = f"schema_signature of the checkpoint of version {checkpoint.version}"
            raise Conflict(refusal(where, found[:12], wanted[:12], "restore it into the interface it was trained with"))
        slot = cls(backend.policy)
        slot.version = int(checkpoint.version)
        action_modules.load_parameters(slot.module, checkpoint.params)
        slot.ensure_optimizer(backend.policy_key, backend.algorithm)
        if checkpoint.optimizer is not None:
            optimizer = slot.optimizers[backend.policy_key]
            slot.generator.set_state(torch.from_numpy(checkpoint.optimizer["generator"].copy()))
            optimizer.steps = int(checkpoint.optimizer["steps"])
            for name, parameter in slot.module.named_parameters():
                state = {
                    # The moments live where the parameter does, Adam's step counter on the CPU.
                    key: torch.from_numpy(checkpoint.optimizer[f"adam.{key}.{name}"].copy()).to(
                        "cpu" if key == "step" else parameter.device
                    )
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"adam.{key}.{name}" in checkpoint.optimizer
                }
                if state:
                    optimizer.adam.state[parameter] = state
        return slot


def _observation(data: Mapping[str, Any], rows: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """What was seen in some rows of a partition's fields."""
    return {
        "images": {n.removeprefix("image."): a[rows] for n, a in data.items() if n.startswith("image.")},
        "proprioception": data["proprioception"][rows],
        "instructions": [data["instructions"][i] for i in rows],
    }


def training_fields(backend: BackendConfig) -> list[str]:
    """Fields of a partition that the workload's update reads."""
    images = _seen(backend)
    if isinstance(backend.algorithm, SftSpec):
        return [*images, "proprioception", "action", "action_is_pad"]
    names = dict.fromkeys(_estimated_from(backend.algorithm))
    if _asks_for_behaviour(backend.algorithm):
        names["log_prob"] = None
    return [*images, "proprioception", "action", *names, "advantage", "return", "valid", "sample_valid"]


def _estimated_from(algorithm: PpoSpec) -> tuple[str, str]:
    """Fields of log-probabilities and values under the policy that the job begins from: recomputed, or as it acted."""
    return ("actor_log_prob", "actor_value") if algorithm.actor_forward else ("log_prob", "value")


def _asks_for_behaviour(algorithm: PpoSpec) -> bool:
    """Whether the loss also reads what the policy that acted found likely."""
    return algorithm.decoupled is not None or algorithm.kl is not None


def forward_fields(backend: BackendConfig) -> list[str]:
    """Fields that the actor forward reads."""
    return [*_seen(backend), "proprioception", "action"]


def _seen(backend: BackendConfig) -> list[str]:
    """Fields that tell what was seen: pictures, or what the base computed of them."""
    return [FEATURE] if backend.features_travel else [f"image.{camera.name}" for camera in backend.policy.cameras]


def advantage_fields(backend: BackendConfig) -> list[str]:
    """Fields that the advantage stage reads."""
    assert isinstance(backend.algorithm, PpoSpec)
    return [*ADVANTAGE_FIELDS, *(["actor_value"] if backend.algorithm.actor_forward else [])]


def advantages(data: Mapping[str, np.ndarray], algorithm: PpoSpec) -> dict[str, np.ndarray]:
    """Derived columns `advantage` [n, H] and `return` [n]; recomputed values take the behaviour's place if there.

    The values of what follows a row (`next_value`, `bootstrap_value`) stay the behaviour policy's where they lie
    outside the partition; inside they are the next row's.
    """
    fields = dict(data)
    if algorithm.actor_forward:
        fields["value"] = data["actor_value"]
        following = np.concatenate(
            [data["actor_value"][algorithm.num_envs :], data["next_value"][-algorithm.num_envs :]]
        )
        fields["next_value"] = following.astype(np.float32)
    settings = algorithm.estimator.model_dump(exclude={"kind"})
    if algorithm.estimator.kind == "gae":
        settings["gae_lambda"] = algorithm.gae_lambda
    return ESTIMATORS[algorithm.estimator.kind](fields, num_envs=algorithm.num_envs, gamma=algorithm.gamma, **settings)
