"""The torch side of inference: one tenant's action module at one version, and a grouped forward over many.

Not to be confused with services/policy_slot.py, the training side with optimizer and random state.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.backend import PolicyConfig
from configs.errors import Conflict, JoyNexusError, TenantFault, refusal
from kernels import action_modules, group_batching
from kernels.action_modules import ActionModule, Decision
from kernels.backbones import Backbone
from kernels.features import PrefixBatch, VLAFeature
from services import shared_decoding
from services.interface import Interface
from services.policy_stacks import PolicyStacks
from services.rollout import Prediction

_RECENT = 2


class ServingPolicy:
    """An action module in evaluation mode at one version; never changed after construction."""

    def __init__(self, config: PolicyConfig, version: int, tensors: Mapping[str, np.ndarray] | None) -> None:
        """`tensors` None keeps the seeded initial weights, those that training starts from.

        Raises:
            Conflict: if names, shapes or dtypes of `tensors` do not fit the declared action module.
            TenantFault: if a number is not finite.
        """
        module = action_modules.build(config.action_module, config.base_model, config.seed)
        self._fill(config, version, module, tensors)

    def following(self, version: int, tensors: Mapping[str, np.ndarray]) -> ServingPolicy:
        """The same policy at another version; a copy, since to draw initial weights again takes longer by far.

        Raises:
            Conflict, TenantFault: as the constructor.
        """
        policy = object.__new__(ServingPolicy)
        policy._fill(self.config, version, copy.deepcopy(self.module), tensors)
        return policy

    def _fill(
        self, config: PolicyConfig, version: int, module: ActionModule, tensors: Mapping[str, np.ndarray] | None
    ) -> None:
        self.config = config
        self.version = version
        if tensors is not None:
            for name, value in tensors.items():
                if not np.isfinite(value).all():
                    raise TenantFault(
                        refusal(f"named_tensors.{name}", "NaN or infinity", "finite numbers", "do not publish it")
                    )
            action_modules.load_parameters(module, tensors)
        self.module = module.eval().requires_grad_(False)
        self.architecture = config.action_module.architecture
        self.interface = Interface(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters."""
        return self.module.num_bytes

    def prepare(self, backbone: Backbone, observation: Mapping[str, Any]) -> tuple[PrefixBatch, np.ndarray, Tensor]:
        """See `Interface.prepare`."""
        return self.interface.prepare(backbone, observation)


@dataclass(eq=False)
class Request:
    """One observation batch on its way through a shared forward.

    Attributes:
        policy: the serving policy, fixed when the request was accepted; a later load changes nothing here.
        state: proprioception as it came, float32 [B, S].
        generator: draws the action noise of this request's session; None takes the mean.
        keep_feature: answer with the base's action tokens too.
        exploring: see `ActionModule.draw`.
    """

    policy: ServingPolicy
    prefix: PrefixBatch
    state: np.ndarray
    proprioception: Tensor
    generator: torch.Generator | None
    keep_feature: bool = False
    exploring: bool = True


def forward(backbone: Backbone, requests: Sequence[Request], stacks: PolicyStacks) -> list[Prediction | JoyNexusError]:
    """One base forward for all requests, with the adapters of those that have one, then their action modules.

    What decodes together is `services.shared_decoding`'s. A tenant's fault is its own result; the others' bits are
    those of a forward without it.
    """
    grouped, slices = group_batching.group([r.prefix for r in requests])
    parts = frozenset(part for request in requests for part in request.policy.module.reads)
    modules = [request.policy.module for request in requests]
    adapters = [(s, m.adapter) for s, m in zip(slices, modules, strict=True) if m.adapter is not None]
    feature = backbone.encode(grouped, parts, adapters)
    decisions = shared_decoding.decode(requests, feature, slices, stacks)
    return [
        decision if isinstance(decision, JoyNexusError) else _prediction(request, decision, feature, rows)
        for request, decision, rows in zip(requests, decisions, slices, strict=True)
    ]


def _prediction(request: Request, decision: Decision, feature: VLAFeature, rows: slice) -> Prediction | TenantFault:
    policy = request.policy
    finite = torch.isfinite(decision.action).all()
    if not (finite and (decision.value is None or torch.isfinite(decision.value).all())):
        return TenantFault(
            f"prediction: tenant {policy.config.tenant!r} at version {policy.version} gave NaN or infinity; possible: "
            "finite actions; restore an earlier version or lower the learning rate"
        )
    action, kept = decision.action.numpy(), None
    if request.keep_feature and "action_tokens" in policy.module.reads:
        assert feature.action_tokens is not None
        kept = feature.action_tokens[rows].clone()  # a view would keep all tenants' features
    return Prediction(
        action=action,
        environment_action=policy.interface.environment_action(action, request.state),
        log_prob=None if decision.log_prob is None else decision.log_prob.numpy(),
        value=None if decision.value is None else decision.value.numpy(),
        feature=None if kept is None else kept.cpu().numpy(),
        trace={name: part.numpy() for name, part in decision.trace.items() if name != "action"},
    )


class ServingPolicies:
    """The versions that one tenant serves: the current one, some before it, and pinned ones kept until released.

    Two before it, or as many as the declared delay of its rollouts asks for: jobs that rollout k is ahead of may have
    made one version each since the one that it acts with.

    Every request takes a `ServingPolicy` object once, so it is answered by the old or the new version, never a mix.
    """

    def __init__(self, current: ServingPolicy, max_pinned: int, delay: int = 0) -> None:
        self._current = current
        self._pinned: dict[int, tuple[ServingPolicy, int]] = {}  # {version: (policy, holders)}
        # The versions just before the current one: a producer reads a version, reserves a job, and only then pins it.
        self._recent: deque[ServingPolicy] = deque(maxlen=max(_RECENT, delay))
        self._max_pinned = max_pinned

    @property
    def current(self) -> ServingPolicy:
        """What a request without a version gets."""
        return self._current

    @property
    def pinned(self) -> dict[int, int]:
        """{version: holders}."""
        return {version: holders for version, (_, holders) in self._pinned.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all versions that are kept."""
        kept = {id(p): p for p in (self._current, *self._recent, *(p for p, _ in self._pinned.values()))}
        return sum(policy.num_bytes for policy in kept.values())

    def allow(self, delay: int) -> None:
        """Keep as many versions from now on, and no fewer than another workload of the tenant asked for."""
        self._recent = deque(self._recent, maxlen=max(self._recent.maxlen or 0, delay))

    def load(self, policy: ServingPolicy) -> None:
        """Make `policy` current.

        Raises:
            Conflict: if it is older than the current one; a late publish must not turn the clock back.
        """
        if policy.version < self._current.version:
            raise Conflict(
                refusal(
                    "version", policy.version, f"{self._current.version} or newer", "publish the newest version only"
                )
            )
        if policy.version > self._current.version:
            self._recent.append(self._current)
        self._current = policy

    def pin(self, version: int | None) -> ServingPolicy:
        """Keep a version (None: the current one) until `release`; each pin needs one release.

        Raises:
            Conflict: if it is neither current nor pinned, or too many versions are pinned.
        """
        policy, holders = self._pinned.get(
            version if version is not None else self._current.version, (self.find(version), 0)
        )
        if holders == 0 and len(self._pinned) >= self._max_pinned:
            raise Conflict(
                refusal(
                    "version",
                    policy.version,
                    f"at most {self._max_pinned} pinned ({sorted(self._pinned)})",
                    "release one",
                )
            )
        self._pinned[policy.version] = (policy, holders + 1)
        return policy

    def release(self, version: int) -> None:
        """Undo one pin; the version is evicted with its last holder unless it is current."""
        policy, holders = self._pinned.get(version, (self._current, 0))
        if holders > 1:
            self._pinned[version] = (policy, holders - 1)
        else:
            self._pinned.pop(version, None)

    def find(self, version: int | None) -> ServingPolicy:
        """The policy of a version (None: the current one).

        Raises:
            Conflict: if that version is not served (any more); another one is never given in its place.
        """
        if version is None or version == self._current.version:
            return self._current
        if version in self._pinned:
            return self._pinned[version][0]
        for recent in self._recent:
            if recent.version == version:
                return recent
        known = sorted({self._current.version, *self._pinned, *(p.version for p in self._recent)})
        raise Conflict(
            refusal(
                "policy_version", version, f"{known} for tenant {self._current.config.tenant!r}", "take one of these"
            )
        )
