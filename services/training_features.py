"""What an update asks of the frozen base, and one forward for what several tenants ask at one time.

An `Ask` is made of rows of one tenant's samples: what travelled with the partition or is kept needs no forward, the
rest becomes batches of one padded length. `answered` puts batches of equal length together, whoever asked for them:
what is computed of a row does not depend on its company (float32 on a CPU to the bit), so nobody's features change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.errors import JoyNexusError
from configs.model import Part
from kernels import group_batching
from kernels.action_modules import ActionModule
from kernels.backbones import Backbone
from kernels.features import PrefixBatch, VLAFeature, concatenated
from kernels.lora import LoraWeights
from services.feature_store import KeptFeatures, LookedUp
from services.interface import Interface
from services.rollout import FEATURE, rows_of

ENCODE_ROWS = 32
"""Rows of one base forward in training at most; it bounds the forward's memory, whatever a job or microbatch holds.

Where gradients run through the base, those of a whole microbatch are kept: the tenant's own choice."""


_Place = tuple[int, int]  # an ask, and one of its batches


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one tenant that one forward may hold.

    Attributes:
        rows: at most `ENCODE_ROWS`.
        length: padded, of each.
        prepare: makes the batch; not before its forward, since pictures as patches are many times their bytes.
    """

    rows: int
    length: int
    prepare: Callable[[], PrefixBatch]


Found = Sequence[VLAFeature]
"""Features of an ask's batches, in their order."""


@dataclass(frozen=True, eq=False)
class Ask:
    """What one tenant's step needs of the base.

    Attributes:
        batches: may be none.
        reads: parts that the module reads.
        adapter: of the module; its features come in the caller's gradient mode.
        finish: the step's feature, made of those of `batches`.
    """

    batches: Sequence[Batch]
    reads: Collection[Part]
    adapter: LoraWeights | None
    finish: Callable[[Found], VLAFeature]


def ask(
    backbone: Backbone,
    interface: Interface,
    module: ActionModule,
    data: Mapping[str, Any],
    rows: slice | Tensor,
    kept: KeptFeatures | None = None,
) -> Ask:
    """What the features of some of a partition's rows take.

    Args:
        backbone: that will be asked.
        interface: the tenant's.
        module: whose features they are.
        data: fields of the partition, and "instructions", one a row.
        rows: consecutive ones, or by index.
        kept: features of earlier epochs, for workloads that keep them.

    Raises:
        TenantFault: if a prompt is too long.
    """
    index = np.arange(len(data["proprioception"]))[rows if isinstance(rows, slice) else rows.numpy()]
    if FEATURE in data:
        travelled = VLAFeature(torch.from_numpy(np.asarray(data[FEATURE], np.float32)[index]))
        return Ask((), module.reads, module.adapter, lambda _: travelled)
    # Rows of one padded length at a time: what is computed of a row does not depend on its neighbours' prompts.
    texts = interface.state_texts(interface.proprioception(data["proprioception"][index]))
    instructions = [data["instructions"][i] for i in index]
    lengths = np.array(backbone.lengths(instructions, len(interface.cameras), texts))
    places = np.argsort(lengths, kind="stable")
    batches: list[Batch] = []
    parts: list[Callable[[Found], VLAFeature]] = []
    for length in np.unique(lengths).tolist():
        of_length = places[lengths[places] == length]
        for chunk in np.split(of_length, range(ENCODE_ROWS, len(of_length), ENCODE_ROWS)):
            observation, known = _observation(data, index[chunk]), None
            if kept is not None:
                of_chunk = None if texts is None else [texts[i] for i in chunk]
                known = kept.look_up(backbone.spec, module.reads, observation, of_chunk, length)
                observation = rows_of(observation, known.missing)
            parts.append(partial(_part, known, len(batches)))
            if missing := len(observation["instructions"]):
                batches.append(Batch(missing, length, partial(_prepared, interface, backbone, observation)))
            else:
                parts[-1] = partial(_part, known, None)

    def finish(found: Found) -> VLAFeature:
        whole = concatenated([part(found) for part in parts])
        return whole if (places[1:] > places[:-1]).all() else whole[torch.from_numpy(np.argsort(places))]

    return Ask(batches, module.reads, module.adapter, finish)


def _part(known: LookedUp | None, place: int | None, found: Found) -> VLAFeature:
    """The feature of one chunk, with the batch that was asked for at `place`, if any."""
    fresh = None if place is None else found[place]
    if known is not None:
        return known.complete(fresh)
    assert fresh is not None
    return fresh


def _prepared(interface: Interface, backbone: Backbone, observation: Mapping[str, Any]) -> PrefixBatch:
    return interface.prepare(backbone, observation)[0]


def answered(backbone: Backbone, asks: Sequence[Ask]) -> list[VLAFeature | JoyNexusError]:
    """The features that were asked for, with as few base forwards as `ENCODE_ROWS` allows; a tenant's fault is its own.

    Frozen features and those of modules with an adapter are computed apart: the former without the graph that the
    latter need.
    """
    found: dict[_Place, VLAFeature] = {}
    faults: dict[int, JoyNexusError] = {}
    for places in _forwards(asks):
        prepared: dict[_Place, PrefixBatch] = {}
        for i, k in places:
            try:
                prepared[i, k] = asks[i].batches[k].prepare()
            except JoyNexusError as fault:
                faults[i] = fault
        if prepared:
            features = _forward(backbone, [asks[i] for i, _ in prepared], list(prepared.values()))
            found.update(zip(prepared, features, strict=True))
    return [
        faults[i] if i in faults else asked.finish([found[i, k] for k in range(len(asked.batches))])
        for i, asked in enumerate(asks)
    ]


def _forward(backbone: Backbone, asks: Sequence[Ask], prefixes: Sequence[PrefixBatch]) -> list[VLAFeature]:
    """One base forward for a batch of each of some asks."""
    grouped, slices = group_batching.group(prefixes)
    reads = [asked.reads for asked in asks]
    parts = frozenset(part for wanted in reads for part in wanted)
    adapters = [(rows, asked.adapter) for rows, asked in zip(slices, asks, strict=True) if asked.adapter is not None]
    feature = backbone.features(grouped, parts, adapters) if adapters else backbone.encode(grouped, parts)
    return [feature] if len(asks) == 1 else group_batching.split(feature, slices, reads)


def _forwards(asks: Sequence[Ask]) -> list[list[_Place]]:
    """What goes into one forward each: batches of one length, all of asks with adapters or none, bounded rows."""
    forwards: list[list[_Place]] = []
    filling: dict[tuple[int, bool], tuple[list[_Place], int]] = {}  # {what is equal: (forward, its rows)}
    for i, asked in enumerate(asks):
        for k, batch in enumerate(asked.batches):
            key = (batch.length, asked.adapter is not None)
            places, rows = filling.get(key, ([], 0))
            if not places or rows + batch.rows > ENCODE_ROWS:
                places, rows = [], 0
                forwards.append(places)
            places.append((i, k))
            filling[key] = (places, rows + batch.rows)
    return forwards


def _observation(data: Mapping[str, Any], rows: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """What was seen in some rows of a partition's fields."""
    return {
        "images": {n.removeprefix("image."): a[rows] for n, a in data.items() if n.startswith("image.")},
        "proprioception": data["proprioception"][rows],
        "instructions": [data["instructions"][i] for i in rows],
    }
