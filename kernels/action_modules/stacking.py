"""Action modules of several tenants as one: where their architecture is the same, they decode together.

A stack runs the forward code of the modules that it is made of, on rows of one tenant after another (the same number
each, see `Layout`). Only the leaves that hold parameters are others: those of all tenants lie behind one another, and
a linear layer is one batched product (`torch.baddbmm`) of [T, rows, inputs] with [T, outputs, inputs], rows padded to
`ROW_BLOCK` within each tenant.

Per tenant, a stack's float32 results on a CPU are those of its module alone to the bit, so that whether one is used
changes nobody's result. The batched operations promise that only as far as the library's kernels agree, which depend
on processor, shape and row count; so each shape is compared once with the operation that a module alone calls, and
where they differ (a linear of one output, for instance) the leaf takes the tenants one after another. No operation
mixes rows of different tenants, so NaN in one's parameters or inputs is not another's. On a GPU results may differ from
those alone as they do between batch sizes.

Stacks are for decoding: they have no gradients, and hold copies.

Legend as in `base`; T tenants, R rows of each, W any width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import Conflict, refusal
from kernels.action_modules.base import ROW_BLOCK, ActionModule, RowSequential
from kernels.action_modules.pi_expert import RmsNorm, normed

M = TypeVar("M", bound=nn.Module)


def stack(modules: Sequence[ActionModule]) -> ActionModule:
    """One module that decodes for all of these, in their order; its `decode` takes T · R rows.

    Args:
        modules: at least two of one architecture (`ActionModuleSpec.architecture`), on one device.

    Raises:
        Conflict: if there are fewer, or architectures, parameters or devices differ.
    """
    first = modules[0]
    if len(modules) < 2:
        raise Conflict(refusal("modules", len(modules), "at least 2", "decode with the module itself"))
    kinds = {(type(m), m.spec.architecture, m.device, _shapes(m)) for m in modules}
    if len(kinds) > 1:
        possible = "modules of one class, architecture, device and base"
        raise Conflict(refusal("modules", f"{len(kinds)} kinds", possible, "stack those that are alike"))
    with torch.no_grad():
        stacked = _stacked(modules, first.undecoded)
    stacked.adapter = None
    stacked.tenants = len(modules)
    return stacked


def stacked_bytes(modules: Sequence[ActionModule]) -> int:
    """Bytes that a stack of these would hold."""
    first, names = modules[0], dict(_shapes(modules[0]))
    return len(modules) * sum(p.numel() * p.element_size() for n, p in first.named_parameters() if n in names)


def _shapes(module: ActionModule) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((n, p.shape) for n, p in module.named_parameters() if not _below(n, module.undecoded))


def _below(name: str, parts: frozenset[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _stacked(parts: Sequence[M], left_out: frozenset[str], path: str = "") -> M:
    """The parts' tree again with stacked leaves; code and settings are the first one's."""
    first = parts[0]
    for kind, leaf in LEAVES.items():
        if isinstance(first, kind):
            return leaf(parts)  # type: ignore[return-value] # called as the one whose place it takes
    twin = copy.copy(first)
    twin._parameters = {name: _together(parts, name) for name in first._parameters}
    twin._modules = {}
    for name, child in first._modules.items():
        below = f"{path}{name}"
        if below in left_out:
            twin._modules[name] = nn.Module()  # the others keep their places in a list
        elif child is not None:
            twin._modules[name] = _stacked([part.get_submodule(name) for part in parts], left_out, f"{below}.")
        else:
            twin._modules[name] = None
    return twin


def _together(parts: Sequence[nn.Module], name: str) -> nn.Parameter:
    return nn.Parameter(torch.stack([part.get_parameter(name) for part in parts]), requires_grad=False)


class StackedLinear(nn.Module):
    """T linear layers on T parts of the rows."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = _together(parts, "weight")  # [T, outputs, inputs]
        self.bias = None if parts[0].bias is None else _together(parts, "bias")  # [T, outputs]

    def forward(self, x: Tensor) -> Tensor:
        """[T · R, …, inputs] to [T · R, …, outputs]."""
        tenants, outputs, inputs = self.weight.shape
        own = x.reshape(tenants, -1, inputs)
        rows = own.shape[1]
        own = F.pad(own, (0, 0, 0, -rows % ROW_BLOCK))
        exact = x.device.type != "cpu" or product_is_exact(inputs, outputs, self.bias is not None, own.shape[1])
        product = _products if exact else _product_by_product
        return product(own, self.weight, self.bias).narrow(1, 0, rows).reshape(*x.shape[:-1], outputs)


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, R, inputs] to [T, R, outputs]."""
    turned = weight.transpose(1, 2)
    return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)


def _product_by_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, by the very calls of T layers alone."""
    biases = [None] * len(x) if bias is None else list(bias)
    return torch.stack([F.linear(*each) for each in zip(x, weight, biases, strict=True)])


class StackedLayerNorm(nn.Module):
    """T layer norms on T parts of the rows."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        assert isinstance(parts[0], nn.LayerNorm)
        self.eps = parts[0].eps
        self.weight = _together(parts, "weight")  # [T, W]
        self.bias = _together(parts, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[T · R, W] to [T · R, W]."""
        own = x.reshape(len(self.weight), -1, x.shape[-1])
        exact = x.device.type != "cpu" or norm_is_exact(own.shape[-1], self.eps)
        norm = _norms if exact else _norm_by_norm
        return norm(own, self.weight, self.bias, self.eps).reshape(x.shape)


def _norms(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """[T, R, W] to [T, R, W]."""
    return torch.addcmul(bias.unsqueeze(1), F.layer_norm(x, x.shape[-1:], eps=eps), weight.unsqueeze(1))


def _norm_by_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same, by the very calls of T norms alone."""
    each = zip(x, weight, bias, strict=True)
    return torch.stack([F.layer_norm(of_one, w.shape, w, b, eps) for of_one, w, b in each])


class StackedRmsNorm(nn.Module):
    """T of Gemma's norms on T parts of the rows."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = _together(parts, "weight")  # [T, W]

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[T · R, S, W] to [T · R, S, W] and no gate."""
        del condition
        own = normed(x).reshape(len(self.weight), -1, x.shape[-1])
        return (own * (1 + self.weight).unsqueeze(1)).reshape(x.shape), None


def _sequence(parts: Sequence[nn.Module]) -> nn.Sequential:
    """Of stacked layers, which pad for themselves."""
    return nn.Sequential(*(_stacked(each, frozenset()) for each in zip(*(p.children() for p in parts), strict=True)))


LEAVES: dict[type[nn.Module], Callable[[Sequence[nn.Module]], nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.LayerNorm: StackedLayerNorm,
    RmsNorm: StackedRmsNorm,
    RowSequential: _sequence,
}
"""What takes the place of T modules; the parameters of any other lie behind one another, see `ActionModule.own`."""


@cache
def product_is_exact(inputs: int, outputs: int, bias: bool, rows: int) -> bool:
    """Whether the batched product has the bits of linear layers alone, here and at this many rows of each."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(2, n, inputs, generator=generator) for n in (rows, outputs))
    b = torch.randn(2, outputs, generator=generator) if bias else None
    return torch.equal(_products(x, weight, b), _product_by_product(x, weight, b))


@cache
def norm_is_exact(width: int, eps: float) -> bool:
    """Whether norms whose weights are applied apart have the bits of layer norms alone, here."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(2, n, width, generator=generator) for n in (ROW_BLOCK, 1, 1))
    of_norms = x, weight[:, 0], bias[:, 0], eps
    return torch.equal(_norms(*of_norms), _norm_by_norm(*of_norms))


@dataclass(frozen=True)
class Layout:
    """Where the rows of T tenants lie in a stack: every tenant's are filled up to R by its own last one.

    Attributes:
        counts: rows of each tenant, at least 1.
    """

    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """R."""
        return max(self.counts)

    @property
    def padded(self) -> int:
        """T · R."""
        return len(self.counts) * self.rows

    @cached_property
    def spread(self) -> Tensor:
        """int64 [T · R]: which of the tenants' rows, one tenant after another, stands at each place of the stack."""
        starts = [sum(self.counts[:t]) for t in range(len(self.counts))]
        return torch.tensor(
            [s + min(r, n - 1) for s, n in zip(starts, self.counts, strict=True) for r in range(self.rows)]
        )

    @cached_property
    def kept(self) -> Tensor:
        """int64 [sum of counts]: at which place of the stack each of the tenants' rows stands."""
        return torch.tensor([t * self.rows + r for t, n in enumerate(self.counts) for r in range(n)])


FASTER_FROM = {"oft": 4, "lora": 4, "gr00t": 2, "pi": 2}
"""{kind: tenants from which a stack was faster on a CPU at every number of rows measured, see docs/benchmarks.md}.

An oft head is a few large products, which two tenants do not speed up.
"""
FASTER_FROM_ON_GPU = 2
"""Tenants, for every kind; not measured: there a decision of small modules is mostly the time to start its kernels."""
MOST_PADDING = 1.5
"""Times as many rows as there are, at most: those that fill up a stack cost what others do, and the gain is small."""


def is_faster(kind: str, device: str, counts: Sequence[int]) -> bool:
    """Whether tenants with so many rows each should decode as a stack rather than one after another.

    Args:
        kind: of their action modules, one of `FASTER_FROM`.
        device: where the modules are, as torch names it.
        counts: rows of each tenant, at least 1.
    """
    fewest = FASTER_FROM[kind] if torch.device(device).type == "cpu" else FASTER_FROM_ON_GPU
    return len(counts) >= fewest and Layout(tuple(counts)).padded <= MOST_PADDING * sum(counts)
