"""The torch side of training: one tenant's action module, optimizers, random state and version.

A job trains a copy of the slot, never the slot itself, so that an exception, or a crash before the checkpoint is
written, leaves the tenant at the version it had.
Not to be confused with services/serving.py, the serving side without optimizer.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.algorithm import AlgorithmSpec, AwrSpec, RolloutAlgorithm, RolloutSpec, SftSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.cluster import HELD_BYTES
from configs.errors import Conflict, JoyNexusError, TenantFault, refusal
from kernels import action_modules
from kernels.action_modules import ActionModule, Evaluation
from kernels.advantage_weighted import awr_update
from kernels.advantages import ESTIMATORS, executed, group_counts
from kernels.backbones import Backbone
from kernels.features import VLAFeature
from kernels.lora import load_peft
from kernels.policy_gradient import policy_gradient_update, update_settings
from kernels.updates import Optimizer, SftUpdate, new_optimizer
from services.feature_store import FeatureStore, KeptFeatures, scope_of
from services.interface import Interface
from services.job_features import JobFeatures, scored
from services.rollout import FEATURE
from services.training_features import Ask, answered, ask
from storage.checkpoints import CheckpointStore

ADVANTAGE_FIELDS = ("reward", "valid", "terminated", "truncated", "sample_valid")
CRITIC_FIELDS = ("value", "bootstrap_value", "next_value")
REFERENCE = "reference."
"""Begins the names of the reference policy's parameters beside those of the optimizer in a checkpoint."""


class PolicySlot:
    """One tenant's training state.

    Attributes:
        config: the tenant's model-facing interface.
        module: the action module.
        version: microbatch updates so far.
        optimizers: {policy_key: optimizer}; SFT and RL of one tenant share the module and its version.
        generator: shuffles microbatches.
        references: {policy_key: the policy that the workload began with}, where its loss holds the policy near that.
        next_numbers: {policy_key: number of the batch or rollout after those trained on}; who continues begins there.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.module = action_modules.build(config.action_module, config.base_model, config.seed)
        self.version = 0
        self.optimizers: dict[str, Optimizer] = {}
        self.generator = torch.Generator().manual_seed(config.seed)
        self.references: dict[str, ActionModule] = {}
        self.next_numbers: dict[str, int] = {}
        self._interface = Interface(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters, of those of reference policies, and of optimizer state."""
        modules = [self.module, *self.references.values()]
        tensors: list[Tensor] = [p for module in modules for p in module.parameters()]
        for optimizer in self.optimizers.values():
            tensors += [v for s in optimizer.adam.state.values() for v in s.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def copy_bytes(self) -> int:
        """Bytes of what `copied` makes for a job, as large as it may grow there: parameters, their gradients, and of
        each optimizer two moments and a counter."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in trained)
        return self.module.num_bytes + size + len(self.optimizers) * (2 * size + 4 * len(trained))

    def ensure_optimizer(self, policy_key: str, algorithm: AlgorithmSpec) -> None:
        """A new workload of this policy starts with a fresh optimizer, and from the policy that it finds."""
        self.optimizers[policy_key] = new_optimizer(self.module, algorithm)
        self.references.pop(policy_key, None)
        if isinstance(algorithm, RolloutSpec) and _compared_with(algorithm) == "reference":
            self.references[policy_key] = copy.deepcopy(self.module).requires_grad_(False).eval()

    def start_from(self, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
        """Begin with an adapter that PEFT wrote; the head stays as it was drawn.

        Raises:
            SpecError: if it is not the adapter that the module declares.
        """
        assert self.module.adapter is not None  # WorkloadSpec's own rule
        load_peft(self.module.adapter, tensors, config)

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters by name."""
        return action_modules.export_parameters(self.module)

    def copied(self) -> PolicySlot:
        """A slot to train on; nothing of it is shared with this one but what never changes."""
        other = copy.copy(self)
        # One deepcopy of both, so that the copied optimizers hold the copied module's parameters.
        other.module, other.optimizers = copy.deepcopy((self.module, self.optimizers))
        other.generator = torch.Generator()
        other.generator.set_state(self.generator.get_state())
        other.next_numbers = dict(self.next_numbers)
        return other

    def trained(
        self,
        backbone: Backbone,
        backend: BackendConfig,
        data: Mapping[str, Any],
        feature_bytes: int,
        store: FeatureStore | None = None,
    ) -> tuple[PolicySlot, dict[str, Any]]:
        """A copy of the slot after a job of RL, and what happened; of SFT see `services.training_group`.

        A job that has nothing to learn from makes no step: version and random state stay, and the metrics say so.

        Args:
            backbone: the frozen base.
            backend: the workload.
            data: fields of the partition, and "instructions", one a row.
            feature_bytes: what may be held of its features, see `JobFeatures`.
            store: demonstrations' features of earlier epochs, used where the workload lets them be kept.

        Returns:
            The copy and {"version", "optimizer_steps", "metrics", "seconds", "checkpoint"}.

        Raises:
            TenantFault: if the tenant's numbers are not finite.
        """
        begun, algorithm = time.perf_counter(), backend.algorithm
        slot = self.copied()
        if isinstance(algorithm, AwrSpec):
            kept = None if store is None else slot.kept(store, backend)
            features = slot.job_features(backbone, data, feature_bytes, kept=kept)
            metrics = slot._advantage_weighted(features, backend.policy_key, algorithm, data)
        else:
            assert isinstance(algorithm, RolloutSpec)
            metrics = slot._policy_gradient(backbone, backend, algorithm, data, feature_bytes)
        return slot, slot.advanced(self, backend.policy_key, metrics, time.perf_counter() - begun)

    def advanced(
        self, before: PolicySlot, policy_key: str, metrics: dict[str, float], seconds: float
    ) -> dict[str, Any]:
        """Move the version by the steps made since `before`, and say what happened.

        Raises:
            TenantFault: if a parameter is not finite.
        """
        # Else the last gradients stay in memory until the next job.
        self.optimizers[policy_key].adam.zero_grad(set_to_none=True)
        if not all(torch.isfinite(p).all() for p in self.module.parameters()):
            raise TenantFault(
                f"parameters: tenant {self.config.tenant!r} got NaN or infinity after version {self.version}; "
                "possible: finite numbers; lower the learning rate"
            )
        steps = self.optimizers[policy_key].steps - before.optimizers[policy_key].steps
        self.version += steps
        return {
            "version": self.version,
            "optimizer_steps": steps,
            "metrics": metrics,
            "seconds": seconds,
            "checkpoint": None,
        }

    def evaluated(
        self, backbone: Backbone, backend: BackendConfig, data: Mapping[str, Any], feature_bytes: int = HELD_BYTES
    ) -> dict[str, np.ndarray]:
        """Of the partition's actions under the current parameters: `actor_log_prob` float32 [n, H] and `actor_value`
        float32 [n]; and `actor_version` int64 [n], which these parameters are."""
        del backend  # any RL algorithm asks for the same columns
        found = self._scored(self.module.eval(), backbone, data, feature_bytes)
        return {
            "actor_log_prob": found.log_prob.numpy(),
            "actor_value": found.value.numpy(),
            "actor_version": np.full(len(found.value), self.version, np.int64),
        }

    def _scored(self, module: ActionModule, backbone: Backbone, data: Mapping[str, Any], max_bytes: int) -> Evaluation:
        """What `module`, of this tenant's interface, says of the partition's actions; without gradient."""
        features = self.job_features(backbone, data, max_bytes, module)
        proprioception = torch.from_numpy(self._interface.proprioception(data["proprioception"]))
        return scored(module, features, proprioception, self._trace(data))

    def sft_update(self, policy_key: str, spec: SftSpec, data: Mapping[str, Any], *, keeps: bool) -> SftUpdate:
        """The supervised update of this slot, in place, on a job's samples; `keeps` their features between passes.

        Raises:
            TenantFault: if an action that counts is not finite.
        """
        return SftUpdate(
            self.module,
            self.optimizers[policy_key],
            proprioception=torch.from_numpy(self._interface.proprioception(data["proprioception"])),
            action=self._recorded_action(data),
            is_pad=torch.from_numpy(np.asarray(data["action_is_pad"], bool)),
            microbatch_size=spec.microbatch_size,
            passes=spec.passes,
            keeps=keeps,
            generator=self.generator,
        )

    def _recorded_action(self, data: Mapping[str, Any]) -> Tensor:
        """Normalised, float32 [n, H, A].

        Raises:
            TenantFault: if an action that counts is not finite.
        """
        action = np.asarray(data["action"], np.float32)
        if not np.isfinite(action[~data["action_is_pad"]]).all():
            raise TenantFault(
                refusal("action", "NaN or infinity", f"finite numbers for {self.config.tenant!r}", "mend it")
            )
        return torch.from_numpy(self._interface.policy_action(action, data["proprioception"]))

    def _advantage_weighted(
        self, features: JobFeatures, policy_key: str, algorithm: AwrSpec, data: Mapping[str, Any]
    ) -> dict[str, float]:
        return awr_update(
            self.module,
            self.optimizers[policy_key],
            features,
            algorithm,
            self.generator,
            proprioception=torch.from_numpy(self._interface.proprioception(data["proprioception"])),
            action=self._recorded_action(data),
            valid=torch.from_numpy(~np.asarray(data["action_is_pad"], bool)),
            returns=torch.from_numpy(data["return"]),
        )

    def _policy_gradient(
        self,
        backbone: Backbone,
        backend: BackendConfig,
        algorithm: RolloutAlgorithm,
        data: Mapping[str, Any],
        feature_bytes: int,
    ) -> dict[str, float]:
        policy_key = backend.policy_key
        log_prob, value = _estimated_from(algorithm)
        if algorithm.recomputes and (data["actor_version"] != self.version).any():
            # Another job trained the slot since, or a checkpoint was restored: this is another actor.
            data = {**data, **self.evaluated(backbone, backend, data, feature_bytes)}
        # The actions that advantages were estimated of; without a critic those of episodes that were compared, too.
        valid = executed(data) if algorithm.asks_critic else np.asarray(data["loss_mask"], bool)
        settings, reference = update_settings(algorithm), self.references.get(policy_key)
        compared = None if reference is None else self._scored(reference, backbone, data, feature_bytes).log_prob
        return policy_gradient_update(
            self.module,
            self.optimizers[policy_key],
            self.job_features(backbone, data, feature_bytes),
            settings.coefficients,
            self.generator,
            epochs=settings.epochs,
            microbatch_size=algorithm.microbatch_size,
            standardised=settings.standardised,
            proprioception=torch.from_numpy(self._interface.proprioception(data["proprioception"])),
            trace=self._trace(data),
            log_prob=torch.from_numpy(data[log_prob]),
            advantage=torch.from_numpy(data["advantage"]),
            valid=torch.from_numpy(valid),
            returns=torch.from_numpy(data["return"]) if algorithm.asks_critic else None,
            old_value=torch.from_numpy(data[value]) if algorithm.asks_critic else None,
            behaviour_log_prob=torch.from_numpy(data["log_prob"]) if _asks_for_behaviour(algorithm) else None,
            reference_log_prob=compared,
        )

    def _trace(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(data[name]) for name in self.config.action_module.trace}

    def _features(
        self,
        backbone: Backbone,
        data: Mapping[str, Any],
        rows: slice | Tensor,
        module: ActionModule | None = None,
        kept: KeptFeatures | None = None,
    ) -> VLAFeature:
        """Of these rows, for the slot's module or another; of one with an adapter in the caller's gradient mode."""
        (found,) = answered(backbone, [ask(backbone, self._interface, module or self.module, data, rows, kept)])
        if isinstance(found, JoyNexusError):
            raise found
        return found

    def job_features(
        self,
        backbone: Backbone,
        data: Mapping[str, Any],
        max_bytes: int,
        module: ActionModule | None = None,
        kept: KeptFeatures | None = None,
    ) -> JobFeatures:
        """Of all rows, for the slot's module or another; `kept` ones of earlier epochs are not computed again."""
        module = module or self.module
        encode = functools.partial(self._features, backbone, data, module=module, kept=kept)
        return JobFeatures(encode, backbone, self._interface, module, data, max_bytes)

    def ask(
        self, backbone: Backbone, data: Mapping[str, Any], rows: slice | Tensor, kept: KeptFeatures | None = None
    ) -> Ask:
        """See `training_features.ask`."""
        return ask(backbone, self._interface, self.module, data, rows, kept)

    def kept(self, store: FeatureStore, backend: BackendConfig) -> KeptFeatures | None:
        """The scope of the store that the workload uses; None where features may not be kept."""
        scope = scope_of(backend)
        return None if scope is None else KeptFeatures(store, scope)

    # checkpoints

    def save(self, folder: Path, policy_key: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write parameters, this policy's optimizer and the random state under the workload's folder."""
        optimizer = self.optimizers[policy_key]
        arrays = {"generator": self.generator.get_state().numpy(), "steps": np.array(optimizer.steps, np.int64)}
        for name, parameter in self.module.named_parameters():
            for key, value in optimizer.adam.state.get(parameter, {}).items():
                arrays[f"adam.{key}.{name}"] = value.detach().cpu().numpy().copy()
        if (begun := self.references.get(policy_key)) is not None:
            arrays |= {REFERENCE + name: array for name, array in action_modules.export_parameters(begun).items()}
        reference = CheckpointStore(folder / "checkpoints").save(
            version=self.version, params=self.parameters(), optimizer=arrays, manifest=manifest
        )
        return {"version": self.version, "digest": reference.digest, "path": str(reference.path)}

    @classmethod
    def restored(cls, backend: BackendConfig, folder: Path, version: int | None, with_optimizer: bool) -> PolicySlot:
        """The slot as a checkpoint has it, with the statistics that its parameters were learned under.

        Raises:
            UnknownObject, DataFault: see `CheckpointStore.load`.
            Conflict: it was trained with another interface.
        """
        checkpoint = CheckpointStore(folder / "checkpoints").load(version, with_optimizer=with_optimizer)
        wanted, found = backend.policy.schema_signature, checkpoint.manifest["schema_signature"]
        if found != wanted:
            where = f"schema_signature of the checkpoint of version {checkpoint.version}"
            raise Conflict(refusal(where, found[:12], wanted[:12], "restore it into the interface it was trained with"))
        slot = cls(PolicyConfig.model_validate(checkpoint.manifest["policy"]))
        slot.version = int(checkpoint.version)
        slot.next_numbers[backend.policy_key] = int(checkpoint.manifest.get("next_number", 0))  # absent in older ones
        action_modules.load_parameters(slot.module, checkpoint.params)
        slot.ensure_optimizer(backend.policy_key, backend.algorithm)
        if checkpoint.optimizer is not None:
            optimizer = slot.optimizers[backend.policy_key]
            slot.generator.set_state(torch.from_numpy(checkpoint.optimizer["generator"].copy()))
            optimizer.steps = int(checkpoint.optimizer["steps"])
            begun = {n.removeprefix(REFERENCE): a for n, a in checkpoint.optimizer.items() if n.startswith(REFERENCE)}
            if begun and backend.policy_key in slot.references:
                action_modules.load_parameters(slot.references[backend.policy_key], begun)
            for name, parameter in slot.module.named_parameters():
                state = {
                    key: torch.from_numpy(checkpoint.optimizer[f"adam.{key}.{name}"].copy()).to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"adam.{key}.{name}" in checkpoint.optimizer
                }
                if state:
                    optimizer.adam.state[parameter] = state
        return slot


def training_fields(backend: BackendConfig) -> list[str]:
    """Fields of a partition that the workload's update reads."""
    images = _seen(backend)
    algorithm = backend.algorithm
    if not isinstance(algorithm, RolloutSpec):
        returns = ["return"] if isinstance(algorithm, AwrSpec) else []
        return [*images, "proprioception", "action", "action_is_pad", *returns]
    log_prob, value = _estimated_from(algorithm)
    names = dict.fromkeys([log_prob, value] if algorithm.asks_critic else [log_prob])
    if algorithm.recomputes:
        names["actor_version"] = None
    if _asks_for_behaviour(algorithm):
        names["log_prob"] = None
    of_critic = ["advantage", "return", "valid", "terminated", "truncated", "sample_valid"]
    derived = of_critic if algorithm.asks_critic else ["advantage", "loss_mask"]
    return [*images, "proprioception", *backend.policy.action_module.trace, *names, *derived]


def _estimated_from(algorithm: RolloutAlgorithm) -> tuple[str, str]:
    """Fields of log-probabilities and values under the policy that the job begins from: recomputed, or as it acted."""
    return ("actor_log_prob", "actor_value") if algorithm.recomputes else ("log_prob", "value")


def _compared_with(algorithm: RolloutAlgorithm) -> str | None:
    """The policy that the loss holds the present one near to; None: none."""
    coefficients = update_settings(algorithm).coefficients
    return None if coefficients.kl_coef is None else coefficients.kl_reference


def _asks_for_behaviour(algorithm: RolloutAlgorithm) -> bool:
    """Whether the loss also reads what the policy that acted found likely."""
    weighted = update_settings(algorithm).coefficients.behaviour_weight_cap is not None
    return weighted or _compared_with(algorithm) == "behaviour"


def forward_fields(backend: BackendConfig) -> list[str]:
    """Fields that the actor forward reads."""
    return [*_seen(backend), "proprioception", *backend.policy.action_module.trace]


def _seen(backend: BackendConfig) -> list[str]:
    """Fields that tell what was seen: pictures, or what the base computed of them."""
    return [FEATURE] if backend.features_travel else [f"image.{camera.name}" for camera in backend.policy.cameras]


def advantage_fields(backend: BackendConfig) -> list[str]:
    """Fields that the advantage stage reads."""
    algorithm = backend.algorithm
    assert isinstance(algorithm, RolloutSpec)
    if not algorithm.asks_critic:
        return [*ADVANTAGE_FIELDS, "group"]
    return [*ADVANTAGE_FIELDS, *CRITIC_FIELDS, *(["actor_value"] if algorithm.recomputes else [])]


def advantages(data: Mapping[str, np.ndarray], algorithm: RolloutAlgorithm) -> dict[str, np.ndarray]:
    """Derived columns: `advantage` [n, H], and `return` [n] or, where groups are compared, `loss_mask` [n, H].

    Recomputed values take the behaviour's place if there. The values of what follows a row (`next_value`,
    `bootstrap_value`) stay the behaviour policy's where they lie outside the partition; inside they are the next row's.
    """
    fields = dict(data)
    if algorithm.recomputes and algorithm.asks_critic:
        fields["value"] = data["actor_value"]
        following = np.concatenate(
            [data["actor_value"][algorithm.num_envs :], data["next_value"][-algorithm.num_envs :]]
        )
        fields["next_value"] = following.astype(np.float32)
    kind, settings = algorithm.estimation
    return ESTIMATORS[kind](fields, num_envs=algorithm.num_envs, **settings)


def compared(data: Mapping[str, np.ndarray], algorithm: RolloutAlgorithm) -> dict[str, int]:
    """What became of the groups whose episodes are compared, see `group_counts`; empty where none are."""
    if algorithm.asks_critic:
        return {}
    settings = {name: algorithm.estimation[1][name] for name in ("keep_return", "gamma")}
    return group_counts(data, num_envs=algorithm.num_envs, **settings)
