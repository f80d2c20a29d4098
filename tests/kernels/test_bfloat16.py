"""Grouped against alone where bits are not promised: a base in bfloat16, on the CPU and on a GPU, every module.

The bound is that of `kernels.group_batching`, for max |grouped − alone| / max |alone| of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs import presets
from configs.home import PROJECT_ROOT
from configs.model import ActionModuleSpec, Gr00tSpec, LoraSpec, OftSpec, PiSpec
from kernels import action_modules, backbones
from kernels.action_modules import ActionModule
from kernels.backbones import Backbone
from kernels.features import PrefixBatch, VLAFeature
from kernels.group_batching import group, split
from tests.kernels.conftest import TINY, observation

BOUND = 0.05
WIDTHS = {"horizon": 4, "action_width": 3, "state_width": 5}
SPECS: tuple[ActionModuleSpec, ...] = (
    OftSpec(**WIDTHS, proprioception="head", hidden_width=32),
    Gr00tSpec(**WIDTHS, proprioception="head", hidden_width=32, layers=2, heads=2, head_width=16, future_tokens=4),
    PiSpec(**WIDTHS, proprioception="head", hidden_width=32, mlp_width=64, heads=2),
    PiSpec(**WIDTHS, proprioception="none", hidden_width=32, mlp_width=64, heads=2, version="pi05"),
    LoraSpec(**WIDTHS, proprioception="head", hidden_width=32, rank=4, alpha=8),
)
ROWS = ((1, 2, 3, 5, 8), (8, 1, 1, 16, 2), (7, 5, 3, 2, 31))  # of one tenant a module


@cache
def resident(family: str, device: str) -> tuple[Backbone, list[ActionModule]]:
    """The shipped small base in bfloat16, and a module of each kind in float32, as in the middle of a training."""
    spec = presets.base_model(TINY[family]).model_copy(update={"dtype": "bfloat16", "device": device})
    modules = [action_modules.build(declared, spec, seed) for seed, declared in enumerate(SPECS)]
    for seed, module in enumerate(modules):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "lora_B" in name or "modulation" in name:  # they begin at zero, and what is behind them with them
                    p.copy_(torch.empty(p.shape).normal_(0, 0.1, generator=generator))
    return backbones.load(spec, PROJECT_ROOT), modules


def alone(backbone: Backbone, module: ActionModule, prefix: PrefixBatch) -> VLAFeature:
    adapters = [] if module.adapter is None else [(slice(0, prefix.rows), module.adapter)]
    return backbone.encode(prefix, module.reads, adapters)


def apart(one: VLAFeature, other: VLAFeature, module: ActionModule) -> tuple[float, float]:
    """How far features, and the actions from them, are apart."""
    state = torch.randn(one.rows, 5, generator=torch.Generator().manual_seed(one.rows))
    pairs = [(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True) if a.is_floating_point()]
    actions = tuple(module.act(feature, state, None).action for feature in (one, other))
    return max(_relative(a, b) for a, b in pairs), _relative(*actions)


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def check_grouped(family: str, device: str) -> None:
    backbone, modules = resident(family, device)
    for rows in ROWS:
        prefixes = [backbone.prepare(observation(n, 10 * i + n), ["base"]) for i, n in enumerate(rows)]
        grouped, slices = group(prefixes)
        adapters = [(s, m.adapter) for s, m in zip(slices, modules, strict=True) if m.adapter is not None]
        encoded = backbone.encode(grouped, {part for m in modules for part in m.reads}, adapters)
        features = split(encoded, slices, [m.reads for m in modules])
        for module, prefix, feature in zip(modules, prefixes, features, strict=True):
            found = apart(feature, alone(backbone, module, prefix), module)
            assert max(found) <= BOUND, (module.spec.kind, rows, found)


@pytest.mark.parametrize("family", TINY)
def test_grouped_is_within_the_bound_of_alone_on_the_cpu(family: str) -> None:
    """Five tenants, one of each kind, in one forward."""
    check_grouped(family, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("family", TINY)
def test_grouped_is_within_the_bound_of_alone_on_a_gpu(family: str) -> None:
    """The same there."""
    check_grouped(family, "cuda")


@contextmanager
def linears_in_float64() -> Iterator[None]:
    """Every product as it is, rounded once: no kernel gives exactly that."""
    own = nn.Linear.forward

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return F.linear(input.double(), self.weight.double(), bias).to(input.dtype)

    nn.Linear.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = own  # type: ignore[method-assign]


def attention_by_definition() -> AbstractContextManager[None]:
    """Products, softmax, products: scores rounded to bfloat16 between them."""
    made: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return made


@pytest.mark.parametrize("rounding", [linears_in_float64, attention_by_definition])
@pytest.mark.parametrize("family", TINY)
def test_a_kernel_that_rounds_otherwise_is_within_the_bound_and_another_picture_is_not(
    family: str, rounding: Callable[[], AbstractContextManager[None]]
) -> None:
    """What a library may do for another number of rows moves features by more than nothing and less than the bound;
    a neighbour's picture in a row's place moves them further."""
    backbone, modules = resident(family, "cpu")
    for module in modules:
        for rows in (5, 16):
            prefix, other = (backbone.prepare(observation(rows, seed), ["base"]) for seed in (rows, 50))
            mine = alone(backbone, module, prefix)
            with rounding():
                moved = alone(backbone, module, prefix)
            found = apart(moved, mine, module)
            assert 0 < max(found) <= BOUND, (module.spec.kind, rows, found)
            assert apart(alone(backbone, module, other), mine, module)[0] > 2 * BOUND
