"""Several tenants' supervised jobs in step: one base forward for all, then losses, backward passes and steps apart.

Source: JoyNexus, section 5.2. A tenant's numbers are those it has alone: rows do not meet in the base, and module,
optimizer, generator and samples are its own. A tenant that faults or has no more samples leaves, the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from configs.algorithm import SftSpec
from configs.backend import BackendConfig
from configs.cluster import HELD_BYTES
from configs.errors import JoyNexusError
from kernels.backbones import Backbone
from kernels.features import VLAFeature
from kernels.updates import SftUpdate
from services.busy import BusyLog
from services.feature_store import FeatureStore
from services.gathering import Resolve
from services.policy_slot import PolicySlot
from services.training_features import ENCODE_ROWS, answered

Trained = tuple[PolicySlot, dict[str, Any]]
"""A copy of the slot after the job, and {"version", "optimizer_steps", "metrics", "seconds", "checkpoint"}."""
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """One tenant's job in a group.

    Attributes:
        slot: as it was before; never changed.
        backend: the workload.
        data: fields of the partition, and "instructions", one a row.
        feature_bytes: what may be held of its features, see `services.job_features`.
        seconds: of compute so far: its own, and its rows' part of shared forwards.
    """

    slot: PolicySlot
    backend: BackendConfig
    data: dict[str, Any]
    feature_bytes: int = HELD_BYTES
    seconds: float = field(default=0.0, init=False)

    @property
    def tenant(self) -> str:
        """Whose job it is."""
        return self.backend.policy.tenant

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the block's time as this tenant's."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun


Ended = Callable[[Member, Trained | JoyNexusError], None]


class _Running:
    """A member whose update is under way on a copy of its slot."""

    def __init__(self, backbone: Backbone, member: Member, store: FeatureStore | None) -> None:
        algorithm, key = member.backend.algorithm, member.backend.policy_key
        assert isinstance(algorithm, SftSpec)
        self.member = member
        self.slot = member.slot.copied()
        self.job = self.slot.job_features(backbone, member.data, member.feature_bytes)
        self.update: SftUpdate = self.slot.sft_update(key, algorithm, member.data, keeps=self.job.holds)
        self.kept = None if store is None else self.slot.kept(store, member.backend)
        self.feature: VLAFeature | None = None
        self.loss: Tensor | None = None

    @property
    def rows(self) -> int:
        """Of the present step."""
        rows = self.update.rows
        return rows.stop - rows.start if isinstance(rows, slice) else 0 if rows is None else len(rows)

    def take(self, found: VLAFeature) -> None:
        """The present rows' features are there. Those of shuffled passes are as long as if they had been kept."""
        self.feature = found if isinstance(self.update.rows, slice) else self.job.padded(found)

    @property
    def inside_base(self) -> bool:
        """Whether its gradients run through the base."""
        return self.slot.module.adapter is not None

    def result(self) -> Trained:
        """After the last step."""
        member, metrics = self.member, self.update.metrics()
        return self.slot, self.slot.advanced(member.slot, member.backend.policy_key, metrics, member.seconds)


def train_members(
    backbone: Backbone, members: Sequence[tuple[Member, Resolve[Trained]]], store: FeatureStore | None, busy: BusyLog
) -> None:
    """Carry out the members' jobs together and resolve each, whatever happens.

    Args:
        backbone: the frozen base of all of them.
        members: supervised, of different tenants.
        store: demonstrations' features of earlier epochs, used where a workload lets them be kept.
        busy: told of the compute, each tenant's share of it in microseconds.
    """
    left = dict(members)
    shares: dict[str, int] = {}

    def ended(member: Member, outcome: Trained | Exception) -> None:
        left.pop(member)(outcome)

    try:
        with busy.record("train", shares):
            try:
                train_together(backbone, list(left), store, ended)
            finally:  # each pays for its own compute
                shares.update({member.tenant: max(round(member.seconds * 1e6), 1) for member, _ in members})
    except Exception as error:
        # A boundary between tenants: whose fault it is shows when each is trained alone, from the slot as it was.
        if len(members) == 1:
            for resolve in left.values():
                resolve(error)
            return
        logger.exception("%d jobs together; each is trained alone", len(members))
        for member, resolve in list(left.items()):
            member.seconds = 0.0
            train_members(backbone, [(member, resolve)], store, busy)


def train_alone(backbone: Backbone, member: Member, store: FeatureStore | None, busy: BusyLog) -> Trained:
    """One job by itself, reinforcement learning or supervised.

    Raises:
        TenantFault: if the tenant's numbers are not finite.
    """
    if not isinstance(member.backend.algorithm, SftSpec):
        with busy.record("train", {member.tenant: 1}):
            return member.slot.trained(backbone, member.backend, member.data, member.feature_bytes, store)
    outcomes: list[Trained | Exception] = []
    train_members(backbone, [(member, outcomes.append)], store, busy)
    (outcome,) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def train_together(backbone: Backbone, members: Sequence[Member], store: FeatureStore | None, ended: Ended) -> None:
    """Carry out the members' jobs, a microbatch of each at a time; `ended` is told of each that is done or at fault."""
    running: list[_Running] = []
    for member in members:
        with _own_fault(member, ended), member.spending():
            running.append(_Running(backbone, member, store))
    while running:
        learned = [one for bundle in _bundles(running) for one in _losses_and_gradients(backbone, bundle, ended)]
        running = []
        for one in learned:
            with _own_fault(one.member, ended):
                with one.member.spending():
                    one.update.finish()
                if one.update.rows is not None:
                    running.append(one)
                else:
                    ended(one.member, one.result())


def _bundles(running: Sequence[_Running]) -> list[list[_Running]]:
    """Who goes through the base at one time: all whose features are frozen; of the others, whose graphs through the
    base stay in memory until their backward pass, as many as `ENCODE_ROWS` rows allow, at least one."""
    frozen = [one for one in running if not one.inside_base]
    bundles, filled = [frozen] if frozen else [], ENCODE_ROWS
    for one in running:
        if one.inside_base:
            if filled + one.rows > ENCODE_ROWS:
                bundles.append([])
                filled = 0
            bundles[-1].append(one)
            filled += one.rows
    return bundles


def _losses_and_gradients(backbone: Backbone, bundle: Sequence[_Running], ended: Ended) -> list[_Running]:
    """Those of the bundle whose gradients are there; the others' fault has ended them."""
    _find_features(backbone, bundle, ended)
    for one in bundle:
        if one.feature is not None:
            with _own_fault(one.member, ended), one.member.spending():
                one.loss = one.update.loss(one.feature)
    learned = [one for one in bundle if one.loss is not None]
    _backward(learned)
    for one in bundle:
        one.feature = one.loss = None
    return learned


@contextmanager
def _own_fault(member: Member, ended: Ended) -> Iterator[None]:
    try:
        yield
    except JoyNexusError as fault:
        ended(member, fault)


def _find_features(backbone: Backbone, running: Sequence[_Running], ended: Ended) -> None:
    """Give those whose features can be had the features of their present rows; the others' fault has ended them."""
    asking, asks = [], []
    for one in running:
        with _own_fault(one.member, ended), one.member.spending():
            one.feature = one.update.kept
            if one.feature is None:
                assert one.update.rows is not None
                asks.append(one.slot.ask(backbone, one.member.data, one.update.rows, one.kept))
                asking.append(one)
    begun = time.perf_counter()
    found = answered(backbone, asks)
    seconds, rows = time.perf_counter() - begun, [sum(batch.rows for batch in a.batches) for a in asks]
    for one, feature, mine in zip(asking, found, rows, strict=True):
        one.member.seconds += seconds * mine / (sum(rows) or 1)
        if isinstance(feature, JoyNexusError):
            ended(one.member, feature)
        else:
            one.take(feature)


def _backward(learning: Sequence[_Running]) -> None:
    """Backward passes of a bundle; those through the base go through its graph together, once."""
    if not any(one.inside_base for one in learning):
        for one in learning:
            assert one.loss is not None
            with one.member.spending():
                one.loss.backward()
        return
    begun = time.perf_counter()
    torch.autograd.backward([one.loss for one in learning if one.loss is not None])
    seconds = time.perf_counter() - begun
    for one in learning:
        one.member.seconds += seconds / len(learning)
