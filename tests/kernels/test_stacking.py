"""Stacks of action modules: every tenant's decision is, to the bit, the one that its module makes alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from configs.errors import Conflict
from configs.model import ActionModuleSpec
from kernels import action_modules
from kernels.action_modules import ActionModule, Decision, stacking
from kernels.action_modules.pi_expert import RmsNorm
from kernels.action_modules.stacking import Layout
from kernels.features import VLAFeature, concatenated
from tests.kernels.test_action_modules import BASE, SPECS, inputs

VARIANTS: dict[str, ActionModuleSpec] = SPECS | {
    "oft, one number": SPECS["oft"].model_copy(update={"horizon": 1, "action_width": 1, "proprioception": "none"}),
    "pi05": SPECS["pi"].model_copy(update={"version": "pi05", "proprioception": "prompt"}),
}


def tenants(spec: ActionModuleSpec, count: int) -> list[ActionModule]:
    """Modules that differ in all parameters, also those that begin at zero or one."""
    modules = [action_modules.build(spec, BASE, seed).requires_grad_(False) for seed in range(count)]
    for seed, module in enumerate(modules):
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return modules


def seen_by(counts: Sequence[int]) -> list[tuple[VLAFeature, Tensor]]:
    return [inputs(rows, seed=t) for t, rows in enumerate(counts)]


def together(
    modules: Sequence[ActionModule],
    seen: Sequence[tuple[VLAFeature, Tensor]],
    generators: Sequence[torch.Generator | None],
) -> list[Decision]:
    """What a stack decides, a decision a tenant."""
    counts = tuple(feature.rows for feature, _ in seen)
    layout = Layout(counts)
    drawn = [m.draw(n, g) for m, n, g in zip(modules, counts, generators, strict=True)]
    noise = {name: torch.cat([own[name] for own in drawn])[layout.spread] for name in drawn[0]}
    feature, state = concatenated([f for f, _ in seen]), torch.cat([s for _, s in seen])
    decided = stacking.stack(modules).decode(feature[layout.spread], state[layout.spread], noise)
    return [
        Decision(
            *(None if x is None else x[rows] for x in (decided.action, decided.log_prob, decided.value)),
            {name: kept[rows] for name, kept in decided.trace.items()},
        )
        for rows in layout.kept.split(counts)
    ]


def assert_same_bits(one: Decision, other: Decision) -> None:
    for name in ("action", "log_prob", "value"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), tuple(range(1, 10)), (8, 8, 8, 8)], ids=str)
@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_every_tenant_gets_its_own_bits(kind: str, counts: tuple[int, ...]) -> None:
    """Rows 1 to 9 a tenant; every other one draws by a generator of its own."""
    modules, seen = tenants(VARIANTS[kind], len(counts)), seen_by(counts)

    def generators() -> list[torch.Generator | None]:
        return [None if t % 2 else torch.Generator().manual_seed(t) for t in range(len(counts))]

    alone = [m.act(f, s, g) for m, (f, s), g in zip(modules, seen, generators(), strict=True)]
    for found, expected in zip(together(modules, seen, generators()), alone, strict=True):
        assert_same_bits(found, expected)
    others = modules[1].act(*seen[0], generators()[0])
    assert not torch.equal(others.action, alone[0].action), "with another tenant's parameters it decides otherwise"


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_nan_in_one_tenants_parameters_or_inputs_is_not_anothers(kind: str) -> None:
    modules, seen = tenants(VARIANTS[kind], 4), seen_by((2, 3, 1, 2))
    quiet = together(modules, seen, [None] * 4)
    for parameter in modules[1].parameters():
        parameter.fill_(float("nan"))
    feature, state = seen[2]
    nan = feature.map(lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t)
    found = together(modules, [*seen[:2], (nan, torch.full_like(state, float("nan"))), seen[3]], [None] * 4)
    assert found[1].action.isnan().all()
    assert found[2].action.isnan().all()
    for tenant in (0, 3):
        assert_same_bits(found[tenant], quiet[tenant])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 1), (2, 3), (7, 24), (64, 48)])
def test_a_stacked_linear_has_the_numbers_and_the_bits_of_each(inputs: int, outputs: int, bias: bool) -> None:
    """Three tenants with 5 rows of 2 tokens each: 10 rows a tenant, padded to 16."""
    torch.manual_seed(0)
    linears = [nn.Linear(inputs, outputs, bias).requires_grad_(False) for _ in range(3)]
    x = torch.randn(15, 2, inputs)
    found = stacking.StackedLinear(linears)(x)
    assert found.shape == (15, 2, outputs)
    for linear, rows, own in zip(linears, x.split(5), found.split(5), strict=True):
        exact = rows.double() @ linear.weight.double().T + (0 if linear.bias is None else linear.bias.double())
        torch.testing.assert_close(own.double(), exact, atol=1e-5, rtol=1e-5)
        assert torch.equal(own, action_modules.base.rowwise(linear, rows))


def test_stacked_norms_have_the_bits_of_each() -> None:
    torch.manual_seed(0)
    norms, rms = [nn.LayerNorm(48) for _ in range(3)], [RmsNorm(48) for _ in range(3)]
    for norm in (*norms, *rms):
        for parameter in norm.requires_grad_(False).parameters():
            parameter.normal_()
    x = 3 * torch.randn(15, 48) + 1
    for norm, rows, own in zip(norms, x.split(5), stacking.StackedLayerNorm(norms)(x).split(5), strict=True):
        assert torch.equal(own, norm(rows))
    tokens = x.unsqueeze(1).expand(-1, 2, -1)
    found, gate = stacking.StackedRmsNorm(rms)(tokens, None)
    assert gate is None
    for one, rows, own in zip(rms, tokens.split(5), found.split(5), strict=True):
        assert torch.equal(own, one(rows, None)[0])


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_where_batched_operations_have_other_bits_the_tenants_take_turns(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor whose library computes batched products otherwise: forced, since this one may not be."""
    modules, seen = tenants(VARIANTS[kind], 3), seen_by((2, 1, 5))
    monkeypatch.setattr(stacking, "product_is_exact", lambda *_: False)
    monkeypatch.setattr(stacking, "norm_is_exact", lambda *_: False)
    for name in ("_products", "_norms"):
        monkeypatch.setattr(stacking, name, None)  # not called
    for module, (feature, state), found in zip(modules, seen, together(modules, seen, [None] * 3), strict=True):
        assert_same_bits(found, module.act(feature, state, None))


@pytest.mark.parametrize("shape", [(64, 1, True, 16), (5, 24, True, 16), (2, 2, False, 16), (128, 64, True, 48)])
def test_the_comparison_tells_whether_bits_differ(shape: tuple[int, int, bool, int]) -> None:
    inputs, outputs, bias, rows = shape
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(4, rows, inputs, generator=generator), torch.randn(4, outputs, inputs, generator=generator)
    b = torch.randn(4, outputs, generator=generator) if bias else None
    batched = torch.bmm(x, weight.transpose(1, 2)) if b is None else torch.baddbmm(b[:, None], x, weight.mT)
    own = torch.stack([F.linear(x[t], weight[t], None if b is None else b[t]) for t in range(4)])
    assert stacking.product_is_exact(*shape) == torch.equal(batched, own)


def test_what_cannot_be_stacked_is_refused() -> None:
    one = action_modules.build(SPECS["oft"], BASE, 0)
    wider = action_modules.build(SPECS["oft"].model_copy(update={"hidden_width": 40}), BASE, 0)
    longer = action_modules.build(
        SPECS["oft"], BASE.model_copy(update={"num_action_tokens": BASE.num_action_tokens + 1}), 0
    )
    with pytest.raises(Conflict, match="modules: got 1; possible: at least 2"):
        stacking.stack([one])
    for other in (wider, longer, action_modules.build(SPECS["lora"], BASE, 0)):
        with pytest.raises(Conflict, match="modules: got '2 kinds'; possible: modules of one class, architecture, "):
            stacking.stack([one, other])


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_the_architecture_is_every_field_that_decoding_depends_on(kind: str) -> None:
    """Modules that differ in all other fields, within their bounds, decode together as they do alone."""
    spec = SPECS[kind]
    assert spec.not_decoding < set(type(spec).model_fields)
    other_values: dict[str, object] = {
        "initial_log_std": 0.5,
        "final_layer_scale": 0.25,
        "rank": 2,
        "alpha": 3.0,
        "target_modules": ("k_proj",),
        "beta_alpha": 2.5,
        "beta_beta": 1.5,
        "time_scale": 0.5,
        "repeated_steps": 2,
    }
    other = spec.model_copy(update={name: other_values[name] for name in spec.not_decoding})
    assert other.architecture == spec.architecture
    modules = [action_modules.build(spec, BASE, 0), action_modules.build(other, BASE, 1)]
    seen = seen_by((2, 3))
    for module, (feature, state), found in zip(modules, seen, together(modules, seen, [None] * 2), strict=True):
        assert_same_bits(found, module.act(feature, state, None))
    told = json.loads(spec.architecture)
    assert told == {name: value for name, value in spec.model_dump(mode="json").items() if name in told}
    assert told.keys() == set(type(spec).model_fields) - spec.not_decoding


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_a_stack_holds_copies_of_what_decodes_and_nothing_else(kind: str) -> None:
    """Not the adapter, which works inside the base, nor another robot's layers."""
    modules = tenants(VARIANTS[kind], 3)
    stacked = stacking.stack(modules)
    names = dict(stacked.named_parameters())
    left_out = {n for n, _ in modules[0].named_parameters() if n.startswith(("adapter.", "embodiments.0."))}
    assert names.keys() == {n for n, _ in modules[0].named_parameters()} - left_out
    assert bool(left_out) == (VARIANTS[kind].kind in ("lora", "gr00t"))
    for name, parameter in names.items():
        assert torch.equal(parameter, torch.stack([m.get_parameter(name) for m in modules]))
        assert not parameter.requires_grad
    own = sum(4 * p.numel() for n, p in modules[0].named_parameters() if n in names)
    assert stacked.num_bytes == stacking.stacked_bytes(modules) == 3 * own
    before = {n: p.clone() for n, p in modules[0].named_parameters()}
    for parameter in stacked.parameters():
        parameter.zero_()
    assert all(torch.equal(p, before[n]) for n, p in modules[0].named_parameters())
    assert modules[0].tenants == 1
    assert type(modules[0]) is type(stacked)


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_a_stack_on_a_gpu_takes_what_is_on_the_cpu_and_answers_there(kind: str) -> None:
    """Without a GPU: torch's fake tensors have no numbers, but refuse an operation over two devices like real ones."""
    known, _ = inputs(6)
    modules = tenants(VARIANTS[kind], 3)
    with FakeTensorMode(), torch.no_grad():
        for module in modules:
            for part in module.modules():
                for name, p in part.named_parameters(recurse=False):
                    there = torch.empty(p.shape, device="cuda")
                    part.register_parameter(name, nn.Parameter(there, requires_grad=False))
        stacked = stacking.stack(modules)
        assert stacked.device.type == "cuda"
        feature = known.map(lambda part: torch.empty(part.shape, dtype=part.dtype, device="cuda"))
        decision = stacked.decode(feature, torch.empty(6, 5), modules[0].draw(6, None))
        found = [x for x in (decision.action, decision.log_prob, decision.value) if x is not None]
        assert {x.device.type for x in found} == {"cpu"}


def test_where_the_rows_lie() -> None:
    """Two rows, one and three: three each, filled up by the last of a tenant's own."""
    layout = Layout((2, 1, 3))
    assert (layout.rows, layout.padded) == (3, 9)
    assert layout.spread.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert layout.kept.tolist() == [0, 1, 3, 6, 7, 8]
    assert layout.spread[layout.kept].tolist() == [0, 1, 2, 3, 4, 5]


RULE: list[tuple[str, str, tuple[int, ...], bool]] = [
    ("gr00t", "cpu", (1, 1), True),
    ("pi", "cpu", (8, 8), True),
    ("oft", "cpu", (4, 4, 4), False),
    ("oft", "cpu", (4, 4, 4, 4), True),
    ("lora", "cpu", (1, 1, 1), False),
    ("lora", "cpu", (1, 1, 1, 1), True),
    ("oft", "cuda:0", (1, 1), True),
    ("gr00t", "cpu", (5,), False),
    ("gr00t", "cuda", (5,), False),
    ("gr00t", "cpu", (5, 1, 4), True),  # 15 rows for 10
    ("gr00t", "cpu", (5, 1, 3), False),  # 15 rows for 9
]


@pytest.mark.parametrize(("kind", "device", "counts", "used"), RULE)
def test_the_rule_of_when_a_stack_is_faster(kind: str, device: str, counts: tuple[int, ...], used: bool) -> None:
    assert stacking.is_faster(kind, device, counts) is used


def test_the_rule_knows_every_kind() -> None:
    assert stacking.FASTER_FROM.keys() == action_modules.MODULES.keys()
