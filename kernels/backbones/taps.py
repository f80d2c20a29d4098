"""What leaves a base beside its last hidden state: the states before the final norm, the keys and values.

The shared model's modules are never changed by a call: where a hook is needed it is there from the start, and what it
takes belongs to the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from kernels.features import PrefixBatch, PrefixCache


class FinalNormTap:
    """Takes the final norm's input where that is the tap.

    Args:
        norm: the final norm of the language model.
        tap: a preset's `feature_tap`.
    """

    def __init__(self, norm: nn.Module, tap: str) -> None:
        self._calls = threading.local()
        if tap == "last_before_norm":
            norm.register_forward_pre_hook(self._take)

    @contextmanager
    def taken(self) -> Iterator[list[Tensor]]:
        """A block for one forward of the calling thread; the norm's input is in the list then, if it is the tap."""
        taken: list[Tensor] = []
        self._calls.taken = taken
        try:
            yield taken
        finally:
            del self._calls.taken

    def _take(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if (taken := getattr(self._calls, "taken", None)) is not None:
            taken.append(inputs[0])


def prefix_cache(kept: DynamicCache, position: Tensor) -> PrefixCache:
    """Keys and values of all layers, float32; see `PrefixCache`."""
    layers: list[Any] = list(kept.layers)  # of full attention all of them, which hold keys and values
    keys, values = (tuple(getattr(layer, kind).float() for layer in layers) for kind in ("keys", "values"))
    return PrefixCache(keys, values, position.to(keys[0].device))


def position_after_prefix(prefix: PrefixBatch) -> Tensor:
    """int64 [B], the first action token's position, which is one number in every family."""
    return prefix.position_ids[0].gather(1, prefix.action_index[:, :1])[:, 0]
