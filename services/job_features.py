"""What the frozen base says of one job's samples while they are scored or trained on, within a bound of bytes.

A job that fits is encoded once and held. Of a larger one each microbatch is encoded when its turn comes, in every epoch
anew: more forwards, but memory does not grow with the job. Both give a row the same bits (float32 on a CPU): what is
computed of it does not depend on its company, and its prefix is padded to the length of the job's longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.action_modules import ActionModule, Evaluation, Trace
from kernels.action_modules.base import padded_rows
from kernels.backbones import Backbone
from kernels.features import VLAFeature, lengthened
from kernels.updates import Encode
from services.feature_store import sample_bytes
from services.interface import Interface
from services.rollout import FEATURE
from services.training_features import ENCODE_ROWS


class JobFeatures:
    """An `Encode` over all rows of one job, for one module.

    Args:
        encode: computes those of some rows.
        backbone: that it asks.
        interface: the tenant's.
        module: whose features they are. Those of one with an adapter change with it and are never held.
        data: fields of the partition, and "instructions", one a row.
        max_bytes: that may be held.

    Attributes:
        rows: n, of the job.
        holds: whether a call encodes all of them, for all later ones.

    Raises:
        TenantFault: if a prompt is too long.
    """

    def __init__(
        self,
        encode: Encode,
        backbone: Backbone,
        interface: Interface,
        module: ActionModule,
        data: Mapping[str, Any],
        max_bytes: int,
    ) -> None:
        self.rows = len(data["proprioception"])
        self._encode = encode
        self._length = 0
        if FEATURE not in data and module.reads != {"action_tokens"}:
            texts = interface.state_texts(interface.proprioception(data["proprioception"]))
            self._length = max(backbone.lengths(data["instructions"], len(interface.cameras), texts))
        a_row = sample_bytes(backbone.spec, module.reads, self._length)
        self.holds = module.adapter is None and self.rows * a_row <= max_bytes
        self._at_once = max(max_bytes // a_row // ENCODE_ROWS, 1) * ENCODE_ROWS
        self._held: VLAFeature | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of what is held now."""
        return 0 if self._held is None else self._held.num_bytes

    def __call__(self, rows: slice | Tensor) -> VLAFeature:
        """Features of these rows."""
        if not self.holds:
            return self.padded(self._encode(rows))
        if self._held is None:
            self._held = self._encode(slice(0, self.rows))
        return self._held[rows]

    def padded(self, feature: VLAFeature) -> VLAFeature:
        """`feature` of some rows as long as it is among all of the job's."""
        return lengthened(feature, self._length)

    def slices(self) -> Iterator[slice]:
        """All rows in consecutive parts: one where all are held, else as many rows as the bound allows, at least those
        of one forward."""
        size = self.rows if self.holds else self._at_once
        for start in range(0, self.rows, size):
            yield slice(start, min(start + size, self.rows))


def scored(module: ActionModule, features: JobFeatures, proprioception: Tensor, trace: Trace) -> Evaluation:
    """What `module` says of a job's decisions, without gradient.

    Rows are padded to blocks, so that a row's bits do not depend on how many are scored at once.

    Args:
        module: in evaluation mode.
        features: of the job.
        proprioception: normalised, float32 [n, S].
        trace: of the decisions, [n, …] each.
    """
    parts = []
    with torch.no_grad():
        for rows in features.slices():
            padded = {name: padded_rows(kept[rows]) for name, kept in trace.items()}
            found = module.evaluate(features(rows).map(padded_rows), padded_rows(proprioception[rows]), padded)
            count = rows.stop - rows.start
            parts.append(Evaluation(found.log_prob[:count], found.entropy[:count], found.value[:count]))
    return Evaluation(*(torch.cat([getattr(p, name) for p in parts]) for name in ("log_prob", "entropy", "value")))
