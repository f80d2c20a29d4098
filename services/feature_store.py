"""What the frozen base computed, kept for the next epoch: content-addressed, bounded, a tenant's own or shared.

A sample's key is a digest of everything that its features depend on, so another picture, prompt, base or padded length
is another entry, and what is found equals what a forward would give to the bit (float32 on a CPU, where a row does not
depend on its company). A full store keeps what it has: samples come in shuffled epochs, and making room for the newest
would throw each entry away just before it is wanted again. A scope goes with the last tenant that uses it, so all
scopes together hold at most `max_bytes` for each open tenant and once more for those that share.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from configs.backend import BackendConfig
from configs.model import BaseModelSpec, Part
from configs.signature import prefix_key
from kernels.features import VLAFeature, concatenated

SHARED = ""  # a scope no tenant's name can be
LEAST_SAMPLES = 1000


def scope_of(backend: BackendConfig) -> str | None:
    """The scope that a workload's features are kept in and found in: its tenant's own, or that of all that share.

    None where none are kept: for rollouts, whose features travel with them, where the workload says so, and where the
    module changes the base. Whatever is learned from a dataset, its samples come again.
    """
    reuse = backend.resources.reuse_features
    if reuse == "never" or backend.policy.action_module.inside_base or backend.algorithm.collects:
        return None
    return SHARED if reuse == "shared" else backend.policy.tenant


class FeatureStore:
    """Features of single samples in memory, by scope; thread-safe.

    Args:
        max_bytes: of each scope. One tenant's samples take nothing from another's room.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[str, dict[bytes, VLAFeature]] = {}  # {scope: {key: feature of one row}}
        self._bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def worth(self, num_bytes: int) -> bool:
        """Whether samples of that size are kept: a scope must hold `LEAST_SAMPLES` of them.

        Fewer would spare too few forwards for what it costs to look for each sample: action tokens are kept always, a
        large base's prefix tokens with a larger store, its keys and values never.
        """
        return num_bytes * LEAST_SAMPLES <= self._max_bytes

    def get(self, scope: str, key: bytes) -> VLAFeature | None:
        """The feature [1, …] of a sample, or None."""
        with self._lock:
            return self._rows.get(scope, {}).get(key)

    def put(self, scope: str, key: bytes, row: VLAFeature) -> bool:
        """Keep the feature [1, …] of a sample; False if there is no room. It must not be changed afterwards."""
        with self._lock:
            rows = self._rows.setdefault(scope, {})
            if key in rows:
                return True
            used = self._bytes.get(scope, 0) + row.num_bytes
            if used > self._max_bytes:
                return False
            rows[key], self._bytes[scope] = row, used
            return True

    def clear(self, scope: str) -> None:
        """Forget a scope."""
        with self._lock:
            self._rows.pop(scope, None)
            self._bytes.pop(scope, None)

    def retain(self, scopes: Collection[str | None]) -> None:
        """Forget all scopes but these."""
        with self._lock:
            for scope in self._rows.keys() - set(scopes):
                del self._rows[scope]
                self._bytes.pop(scope, None)

    def num_bytes(self) -> dict[str, int]:
        """{scope: bytes kept}."""
        with self._lock:
            return dict(self._bytes)


class KeptFeatures:
    """One scope of a store, asked before the base is."""

    def __init__(self, store: FeatureStore, scope: str) -> None:
        self._store = store
        self._scope = scope

    def look_up(
        self,
        base: BaseModelSpec,
        parts: Collection[Part],
        observation: Mapping[str, Any],
        state_texts: Sequence[str] | None,
        length: int,
    ) -> LookedUp:
        """Which rows of an observation batch are there.

        Args:
            base: that the others will be asked of.
            parts: of the features.
            observation: rows of one padded length; see `sample_keys`.
            state_texts: see `sample_keys`.
            length: the rows' padded length.
        """
        rows = len(observation["instructions"])
        if not self._store.worth(sample_bytes(base, parts, length)):
            return LookedUp([None] * rows, None)
        keys = sample_keys(prefix_key(base, length), parts, observation, state_texts)
        found = [self._store.get(self._scope, key) for key in keys]
        return LookedUp(found, lambda row, feature: self._store.put(self._scope, keys[row], feature))


@dataclass(frozen=True, eq=False)
class LookedUp:
    """Rows of an observation batch, some of them found.

    Attributes:
        found: a feature [1, …] a row, or None.
        keep: takes a row and its feature; None where features of that size are not kept.
    """

    found: Sequence[VLAFeature | None]
    keep: Callable[[int, VLAFeature], bool] | None

    @property
    def missing(self) -> list[int]:
        """Rows that the base has to be asked for."""
        return [i for i, row in enumerate(self.found) if row is None]

    def complete(self, fresh: VLAFeature | None) -> VLAFeature:
        """The whole batch's feature, once the missing rows' are there; they are kept."""
        if self.keep is None:
            assert fresh is not None
            return fresh
        rows = list(self.found)
        if fresh is not None:
            fresh = fresh.map(lambda tensor: tensor.cpu())  # the host's memory: a module takes features from any device
            for place, i in enumerate(self.missing):
                rows[i] = fresh[place : place + 1]
                self.keep(i, fresh[place : place + 1].map(torch.clone))  # a view would keep the batch in memory
        return concatenated([row for row in rows if row is not None])


def sample_bytes(base: BaseModelSpec, parts: Collection[Part], length: int) -> int:
    """Bytes of a sample's features with a prefix of `length` tokens; float32 whatever the base's dtype."""
    numbers = {
        "action_tokens": base.num_action_tokens * base.hidden_width,
        "tokens": length * base.hidden_width,
        "cache": 2 * length * base.num_layers * base.num_key_value_heads * base.head_width,
    }
    return 4 * sum(numbers[part] for part in parts)


def sample_keys(
    prefix_key: str, parts: Collection[Part], observation: Mapping[str, Any], state_texts: Sequence[str] | None
) -> list[bytes]:
    """A digest a row of all that its features depend on.

    Args:
        prefix_key: of the base and the padded length, see `configs.signature.prefix_key`.
        parts: of the features.
        observation: {"images": {camera: uint8 [B, h, w, 3]}, "instructions": B strings}.
        state_texts: B strings, where proprioception enters the prompt.
    """
    images = [(name, np.ascontiguousarray(image)) for name, image in sorted(observation["images"].items())]
    start = hashlib.blake2b(digest_size=16)
    # Lengths stand before what varies in length, so that no two inputs share one text.
    for field in (prefix_key, *sorted(parts), *(f"{name} {image.shape[1:]}" for name, image in images)):
        start.update(_framed(field.encode()))
    keys = []
    for row, instruction in enumerate(observation["instructions"]):
        found = start.copy()
        found.update(_framed(instruction.encode()))
        found.update(_framed(b"" if state_texts is None else b"state" + state_texts[row].encode()))
        for _, image in images:
            found.update(image[row].data)
        keys.append(found.digest())
    return keys


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content
