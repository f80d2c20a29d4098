"""Low-rank adapters of several tenants inside the language layers of one shared base.

Source: LoRA (Hu et al. 2021): a linear's output W x becomes W x + (alpha / r) B A x. Names, initial values and files
are those of PEFT. The base's product is computed once for all rows of a batch, the low-rank parts for each tenant's
rows apart, so that a tenant's numbers and gradients are those it has alone.

Legend: B rows, L padded token length, r rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import Conflict, SpecError, refusal
from configs.model import BaseModelSpec, LoraTarget
from kernels.peft_adapters import LANGUAGE_MODEL, adapted_linears, exported, fitted


class LowRank(nn.Module):
    """What an adapter adds to one linear: scaling · B A x."""

    def __init__(self, inputs: int, outputs: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, inputs] to [B, L, outputs], in the factors' precision."""
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling


class LoraWeights(nn.Module):
    """One tenant's adapter: A [r, inputs] and B [outputs, r] float32 of each targeted linear.

    Parameters are named as PEFT names them below its own prefix, for instance
    `language_model.layers.0.self_attn.q_proj.lora_A.weight`. At first A is PEFT's kaiming uniform with a = √5 (within
    1/√inputs) and B is 0: the base as it is.

    Args:
        base: that it adapts.
        rank: r.
        alpha: the scaling is alpha / r.
        targets: linears that get a pair, in every language layer.
        generator: draws A.
    """

    def __init__(
        self, base: BaseModelSpec, rank: int, alpha: float, targets: Collection[LoraTarget], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self.targets = tuple(name for name in get_args(LoraTarget) if name in targets)
        self.pairs: dict[str, LowRank] = {}  # {path of a linear: its pair}, the same modules as in the tree below self
        # Without storage, as `OftModule`: torch's global random state is neither read nor moved.
        with torch.device("meta"):
            for path, (inputs, outputs) in adapted_linears(base, self.targets).items():
                self.pairs[path] = LowRank(inputs, outputs, rank, alpha / rank)
                _place(self, path, self.pairs[path])
        self.to_empty(device="cpu")
        for pair in self.pairs.values():
            nn.init.kaiming_uniform_(pair.lora_A.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(pair.lora_B.weight)


Adapters: TypeAlias = Sequence[tuple[slice, LoraWeights]]
"""Consecutive rows of a batch and the adapter that they use."""


def _place(root: nn.Module, path: str, leaf: nn.Module) -> None:
    """Register `leaf` at a dotted path, since a module's own names have no dots."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, leaf)


class GroupedLora:
    """Makes a base's linears add what the adapters of the present call say, and nothing where there is no adapter.

    The hooks are there from the start and change neither weights, nor their names, nor their bytes. Which adapters are
    active belongs to the calling thread and to one block, so that threads may share the base.

    Args:
        language_model: the base's language layers.
    """

    def __init__(self, language_model: nn.Module) -> None:
        self._calls = threading.local()
        self._shapes: dict[str, tuple[int, int]] = {}
        for name, module in language_model.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in get_args(LoraTarget):
                path = f"{LANGUAGE_MODEL}.{name}"
                self._shapes[path] = (module.in_features, module.out_features)
                module.register_forward_hook(partial(self._add, path))

    @contextmanager
    def applied(self, adapters: Adapters, rows: int) -> Iterator[None]:
        """A block for one forward of the calling thread over B = `rows`.

        Raises:
            SpecError: if an adapter does not fit the base.
            Conflict: if the adapters' rows overlap or are not among the B.
        """
        for _, weights in adapters:
            self._check_fit(weights)
        self._calls.segments = _segments(adapters, rows)
        try:
            yield
        finally:
            del self._calls.segments

    def _check_fit(self, weights: LoraWeights) -> None:
        for path, pair in weights.pairs.items():
            shape = (pair.lora_A.in_features, pair.lora_B.out_features)
            if self._shapes.get(path) != shape:
                possible = f"{self._shapes.get(path)}, the base's (inputs, outputs)"
                raise SpecError(refusal(f"adapter.{path}", shape, possible, "use the base that it was made for"))

    def _add(self, path: str, _linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        segments: list[tuple[int, LoraWeights | None]] | None = getattr(self._calls, "segments", None)
        if segments is None or not any(w is not None and path in w.pairs for _, w in segments):
            return None
        # Split and joined rather than written into slices: gradients then cost the same whatever the number of
        # tenants, and the rows of others are copied, so that neither they nor their gradients meet a tenant's NaN.
        sizes = [size for size, _ in segments]
        parts = []
        for (_, weights), x, out in zip(segments, inputs[0].split(sizes), output.split(sizes), strict=True):
            pair = None if weights is None else weights.pairs.get(path)
            parts.append(out if pair is None else (out + pair(x)).to(out.dtype))
        return torch.cat(parts)


def _segments(adapters: Adapters, rows: int) -> list[tuple[int, LoraWeights | None]]:
    """(number of rows, their adapter), in row order and without gaps."""
    segments: list[tuple[int, LoraWeights | None]] = []
    done = 0
    for wanted, weights in sorted(adapters, key=lambda adapter: adapter[0].indices(rows)[0]):
        start, stop, step = wanted.indices(rows)
        if step != 1 or not done <= start < stop or wanted.stop not in (None, stop):
            possible = f"consecutive rows of 0 … {rows}, each with one adapter at most"
            raise Conflict(refusal("adapters", [s for s, _ in adapters], possible, "pass the slices of group()"))
        if start > done:
            segments.append((start - done, None))
        segments.append((stop - start, weights))
        done = stop
    return [*segments, (rows - done, None)] if done < rows else segments


# PEFT's files


def to_peft(weights: LoraWeights, base: BaseModelSpec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors by PEFT's names (copies) and the fields of its `LoraConfig`; see `kernels.peft_adapters.exported`."""
    tensors = {name: p.detach().cpu().numpy().copy() for name, p in weights.named_parameters()}
    return exported(tensors, base, rank=weights.rank, alpha=weights.alpha)


def load_peft(weights: LoraWeights, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Copy an adapter that PEFT wrote into `weights`.

    Raises:
        SpecError: see `kernels.peft_adapters.fitted`; nothing is changed then.
    """
    shapes = {name: tuple(p.shape) for name, p in weights.named_parameters()}
    found = fitted(tensors, config, shapes, rank=weights.rank, alpha=weights.alpha, targets=weights.targets)
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            parameter.copy_(torch.from_numpy(found[name]))
