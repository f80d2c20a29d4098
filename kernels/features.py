"""The shared boundary around the frozen base: what goes into one forward and what comes out of it.

Legend: B rows, I images of all rows together, L padded token length, P patches of one image, N action tokens,
D base width. Rows of one batch may show different numbers of cameras; images lie flat, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import Conflict, refusal
from configs.model import Part


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class PrefixBatch:
    """Canonical input of one base forward.

    Attributes:
        input_ids: int64 [B, L], padded on the right, so that causal attention keeps padding out of every row.
        position_ids: int64 [3, B, L], temporal, height and width positions of Qwen's rotary embedding; [1, B, L] in
            families whose positions are one number.
        action_index: int64 [B, N], where in its row each action token stands.
        pixels: float32 [I, P, patch values], in row order and within a row in camera order.
        images_per_row: images of each row, B integers that sum to I.
    """

    input_ids: Tensor
    position_ids: Tensor
    action_index: Tensor
    pixels: Tensor
    images_per_row: tuple[int, ...]

    @property
    def rows(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    @property
    def mask(self) -> Tensor:
        """bool [B, L], True at pictures and text: what stands before the action tokens."""
        return torch.arange(self.length)[None] < self.action_index[:, :1]

    @property
    def length(self) -> int:
        """L, a multiple of the base's bucket; batches of equal length may share a forward."""
        return int(self.input_ids.shape[1])

    def __getitem__(self, rows: slice) -> PrefixBatch:
        """The consecutive rows `rows` with their images (step 1)."""
        start, stop, step = rows.indices(self.rows)
        if step != 1:
            raise ValueError(f"rows: got step {step}; possible: 1; take consecutive rows")
        first = sum(self.images_per_row[:start])
        counts = self.images_per_row[start:stop]
        return PrefixBatch(
            self.input_ids[start:stop],
            self.position_ids[:, start:stop],
            self.action_index[start:stop],
            self.pixels[first : first + sum(counts)],
            counts,
        )


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """Keys and values of the prefix in every layer, for modules that go on where the base ended.

    Attributes:
        keys, values: float32 [B, K, L, head width] a layer (K key/value heads), keys after rotation.
        position: int64 [B], the rotary position that follows a row's prefix.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    position: Tensor


@dataclass(frozen=True, eq=False)
class VLAFeature:
    """What the base says about each row; the action modules read nothing else of it.

    A part that no module of a batch reads is None. Where rows of several lengths meet, `mask` tells what of `tokens`
    and `cache` is real; a module's result must not depend on the rest.

    Attributes:
        action_tokens: float32 [B, N, D], hidden states at the N action tokens, at the base's tap.
        tokens: float32 [B, L, D], hidden states of the prefix (pictures and text), at the base's tap.
        cache: keys and values of the same L positions.
        mask: bool [B, L], True at the prefix's real tokens: neither padding nor the action tokens that follow it.
            None where neither `tokens` nor `cache` is there.
    """

    action_tokens: Tensor | None = None
    tokens: Tensor | None = None
    cache: PrefixCache | None = None
    mask: Tensor | None = None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.tensors()[0])

    def tensors(self) -> list[Tensor]:
        """Every tensor that is there, [B, …] each."""
        cached = () if self.cache is None else (*self.cache.keys, *self.cache.values, self.cache.position)
        parts = (self.action_tokens, self.tokens, *cached, self.mask)
        return [part for part in parts if part is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def map(self, function: Callable[[Tensor], Tensor]) -> VLAFeature:
        """`function` of every tensor that is there."""
        return _merged([self], lambda tensors: function(tensors[0]))

    def only(self, parts: Collection[Part]) -> VLAFeature:
        """These parts, the others left out.

        Raises:
            Conflict: if one of them is not there.
        """
        missing = [part for part in parts if getattr(self, part) is None]
        if missing:
            there = ", ".join(p for p in get_args(Part) if getattr(self, p) is not None) or "none"
            raise Conflict(refusal("feature", ", ".join(missing), there, "encode with the parts that the module reads"))
        kept = {part: getattr(self, part) for part in parts}
        return VLAFeature(**kept, mask=self.mask if set(parts) - {"action_tokens"} else None)

    def __getitem__(self, rows: slice | Tensor) -> VLAFeature:
        """Some of the rows."""
        return self.map(lambda tensor: tensor[rows])

    def finite_rows(self) -> Tensor:
        """bool [B], rows without NaN or infinity."""
        finite = [torch.isfinite(t).flatten(1).all(dim=1) for t in self.tensors() if t.is_floating_point()]
        return torch.stack(finite).all(dim=0)


def concatenated(features: Sequence[VLAFeature]) -> VLAFeature:
    """Rows of several features of the same parts, one after another, padded on the right to the longest prefix."""
    lengths = {len(f.mask[0]) for f in features if f.mask is not None}
    if len(lengths) > 1:
        features = [lengthened(f, max(lengths)) for f in features]
    return _merged(features, torch.cat)


def lengthened(feature: VLAFeature, length: int) -> VLAFeature:
    """The same with zeros behind the prefix up to `length`, where the mask is False; as it is where none is read."""
    if feature.mask is None or feature.mask.shape[1] == length:
        return feature
    more = length - feature.mask.shape[1]
    cache = feature.cache
    if cache is not None:
        keys, values = (tuple(F.pad(x, (0, 0, 0, more)) for x in layers) for layers in (cache.keys, cache.values))
        cache = PrefixCache(keys, values, cache.position)
    tokens = None if feature.tokens is None else F.pad(feature.tokens, (0, 0, 0, more))
    return VLAFeature(feature.action_tokens, tokens, cache, F.pad(feature.mask, (0, more)))


def _merged(features: Sequence[VLAFeature], merge: Callable[[list[Tensor]], Tensor]) -> VLAFeature:
    first, caches = features[0], [f.cache for f in features if f.cache is not None]
    parts: dict[str, Any] = {}
    for name in ("action_tokens", "tokens", "mask"):
        if getattr(first, name) is not None:
            parts[name] = merge([getattr(f, name) for f in features])
    if not caches:
        return VLAFeature(**parts)
    keys, values = (
        tuple(merge(list(of_layer)) for of_layer in zip(*(getattr(c, kind) for c in caches), strict=True))
        for kind in ("keys", "values")
    )
    return VLAFeature(**parts, cache=PrefixCache(keys, values, merge([c.position for c in caches])))
