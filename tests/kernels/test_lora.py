"""Adapters of several tenants inside one base: each tenant's numbers and gradients are those it has alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from configs import presets
from configs.algorithm import AdamSpec, PpoSpec, SftSpec
from configs.errors import Conflict, SpecError
from configs.model import BaseModelSpec, LoraSpec, LoraTarget, OftSpec
from kernels import action_modules
from kernels.action_modules import ActionModule
from kernels.backbones import Backbone
from kernels.features import PrefixBatch, VLAFeature
from kernels.group_batching import group, split
from kernels.lora import GroupedLora, LoraWeights
from kernels.updates import Optimizer, new_optimizer
from tests.kernels.conftest import observation
from tests.kernels.whole_updates import ppo_update, sft_update

BASE = presets.base_model("tiny-qwen3-vl")
ALL: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(seed: int, rank: int = 4, targets: Sequence[LoraTarget] = ALL) -> LoraWeights:
    """An adapter in the middle of its training: B is not 0 any more."""
    weights = LoraWeights(BASE, rank, 8.0, targets, torch.Generator().manual_seed(seed))
    filled = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for pair in weights.pairs.values():
            pair.lora_B.weight.normal_(0.0, 0.1, generator=filled)
    return weights


def action_tokens(backbone: Backbone, prefix: PrefixBatch, weights: LoraWeights | None = None) -> torch.Tensor:
    """[B, N, D], all rows through one adapter or none."""
    adapters = [] if weights is None else [(slice(0, prefix.rows), weights)]
    return backbone.encode(prefix, adapters=adapters).action_tokens


def prefixes(backbone: Backbone, rows: Sequence[int]) -> list[PrefixBatch]:
    return [backbone.prepare(observation(n, seed), ["base"]) for seed, n in enumerate(rows)]


def test_one_linear_with_two_adapters_by_hand() -> None:
    """W = 2I, x = (1, 2). First tenant: A = (1, 1), B = (1, 0)ᵀ, alpha 3, r 1: (2, 4) + 3·3·(1, 0) = (11, 4).

    Second: A = (0, 1), B = (1, −1)ᵀ, alpha ½: (2, 4) + ½·2·(1, −1) = (3, 3). The row between them: (2, 4).
    """
    base = BASE.model_copy(
        update={"num_layers": 1, "hidden_width": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_width": 2}
    )
    model, attention = nn.Module(), nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].self_attn = attention
    attention.q_proj = linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = 2 * torch.eye(2)
    grouped = GroupedLora(model)
    one = LoraWeights(base, 1, 3.0, ("q_proj",), torch.Generator())
    two = LoraWeights(base, 1, 0.5, ("q_proj",), torch.Generator())
    values = ((one, (1.0, 1.0), (1.0, 0.0)), (two, (0.0, 1.0), (1.0, -1.0)))
    for weights, a, b in values:
        pair = weights.pairs["language_model.layers.0.self_attn.q_proj"]
        pair.lora_A.weight.data = torch.tensor([a])
        pair.lora_B.weight.data = torch.tensor([b]).T
    x = torch.tensor([1.0, 2.0]).expand(3, 1, 2)
    with grouped.applied([(slice(2, 3), two), (slice(0, 1), one)], 3):
        assert linear(x)[:, 0].tolist() == [[11.0, 4.0], [2.0, 4.0], [3.0, 3.0]]
    assert linear(x)[:, 0].tolist() == [[2.0, 4.0]] * 3


@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 2, 3, 5), (8, 1, 16), (7, 9)])
def test_grouped_equals_alone_to_the_bit(backbone: Backbone, rows: tuple[int, ...]) -> None:
    """Other ranks, other targets, and a tenant without an adapter in the middle."""
    owned: list[LoraWeights | None] = [adapter(0), None, adapter(1, 16, ("q_proj", "v_proj")), adapter(2, 1)]
    alone = prefixes(backbone, rows)
    grouped, slices = group(alone)
    adapters = [(s, w) for s, w in zip(slices, owned, strict=False) if w is not None]
    features = split(backbone.encode(grouped, adapters=adapters), slices)
    for prefix, weights, feature in zip(alone, owned, features, strict=False):
        assert torch.equal(action_tokens(backbone, prefix, weights), feature.action_tokens)
        if weights is not None:  # or equality would say nothing
            assert (feature.action_tokens - action_tokens(backbone, prefix)).abs().max() > 0.01


def test_a_row_alone_equals_the_same_row_of_a_batch(backbone: Backbone) -> None:
    weights, batch = adapter(0), backbone.prepare(observation(40, 7), ["base"])
    whole = action_tokens(backbone, batch, weights)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 12), slice(39, 40)):
        assert torch.equal(action_tokens(backbone, batch[rows], weights), whole[rows])


def test_an_untrained_adapter_leaves_the_bases_bits(backbone: Backbone) -> None:
    prefix = backbone.prepare(observation(3, 1), ["base"])
    fresh = LoraWeights(BASE, 4, 8.0, ALL, torch.Generator().manual_seed(0))
    assert torch.equal(action_tokens(backbone, prefix, fresh), action_tokens(backbone, prefix))


def test_all_parts_of_a_feature_are_the_adapted_ones(backbone: Backbone) -> None:
    """Rows 0 and 1 of 3 are adapted: their tokens and second layer's values change, row 2's do not."""
    prefix = backbone.prepare(observation(3, 1), ["base"])
    parts = frozenset({"action_tokens", "tokens", "cache"})
    plain = backbone.encode(prefix, parts)
    adapted = backbone.encode(prefix, parts, [(slice(0, 2), adapter(0))])
    for one, other in (
        (plain.action_tokens, adapted.action_tokens),
        (plain.tokens, adapted.tokens),
        (plain.cache.values[1], adapted.cache.values[1]),
    ):
        assert (one - other)[:2].flatten(1).abs().amax(dim=1).min() > 0.01
        assert torch.equal(one[2], other[2])


def gradients(weights: LoraWeights) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in weights.named_parameters()}


def test_gradients_of_a_tenant_in_a_group_equal_those_alone_and_the_base_gets_none(backbone: Backbone) -> None:
    """One shared forward, one backward of all losses; other losses of the others change nothing. Exactly 0 apart."""
    alone = prefixes(backbone, (3, 2, 4))
    owned = [adapter(0), None, adapter(1, 8)]
    expected = []
    for prefix, weights in zip(alone, owned, strict=True):
        if weights is not None:
            single = copy.deepcopy(weights)
            feature = backbone.features(prefix, adapters=[(slice(0, prefix.rows), single)])
            feature.action_tokens.square().sum().backward()
            expected.append(gradients(single))
    grouped, slices = group(alone)
    adapters = [(s, w) for s, w in zip(slices, owned, strict=True) if w is not None]
    feature = backbone.features(grouped, adapters=adapters)
    torch.autograd.backward([feature.action_tokens[s].square().sum() for s, _ in adapters])
    for (_, weights), alone_gradients in zip(adapters, expected, strict=True):
        for name, gradient in gradients(weights).items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(gradient, alone_gradients[name]), name
    assert not any(p.requires_grad or p.grad is not None for p in backbone.model.parameters())


def test_nan_in_one_tenants_adapter_leaves_its_neighbours_bits_and_gradients(backbone: Backbone) -> None:
    alone = prefixes(backbone, (2, 2, 2))
    grouped, slices = group(alone)
    results = []
    for ill in (False, True):
        good, bad = adapter(0), adapter(1)
        if ill:
            with torch.no_grad():
                next(bad.parameters()).fill_(float("nan"))
        feature = backbone.features(grouped, adapters=[(slices[0], good), (slices[1], bad)])
        losses = [feature.action_tokens[s].square().sum() for s in slices[:2]]
        torch.autograd.backward(losses)
        results.append((feature.action_tokens.detach(), gradients(good)))
        assert bool(feature.action_tokens[slices[1]].isnan().all()) == ill
    (quiet, quiet_gradients), (beside, beside_gradients) = results
    for s in (slices[0], slices[2]):
        assert torch.equal(quiet[s], beside[s])
    assert all(torch.equal(beside_gradients[name], gradient) for name, gradient in quiet_gradients.items())


def test_threads_with_other_adapters_do_not_see_each_others(backbone: Backbone) -> None:
    """Three threads share the base at once, one of them without an adapter; after them nothing is left on it."""
    prefix = backbone.prepare(observation(2, 3), ["base"])
    owned = [adapter(0), adapter(1), None]
    expected = [action_tokens(backbone, prefix, weights) for weights in owned]
    assert not torch.equal(expected[0], expected[1])
    wrong: list[int] = []
    together = threading.Barrier(3)

    def work(i: int) -> None:
        together.wait()
        for _ in range(10):
            if not torch.equal(action_tokens(backbone, prefix, owned[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(action_tokens(backbone, prefix), expected[2])


def test_a_failed_forward_leaves_no_adapter_behind(backbone: Backbone) -> None:
    prefix = backbone.prepare(observation(2, 3), ["base"])
    expected = action_tokens(backbone, prefix)
    with pytest.raises(RuntimeError, match="stop"), backbone.lora.applied([(slice(0, 2), adapter(0))], 2):
        raise RuntimeError("stop")
    assert torch.equal(action_tokens(backbone, prefix), expected)


def test_what_does_not_fit_is_refused(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = backbone.prepare(observation(3, 1), ["base"])
    weights = adapter(0)
    for wrong in (
        [(slice(0, 2), weights), (slice(1, 3), weights)],
        [(slice(0, 4), weights)],
        [(slice(1, 1), weights)],
        [(slice(0, 3, 2), weights)],
    ):
        with pytest.raises(Conflict, match=r"adapters: got .*; possible: consecutive rows of 0 … 3, each with one"):
            backbone.encode(prefix, adapters=wrong)
    other = LoraWeights(BASE.model_copy(update={"mlp_width": 512}), 4, 8.0, ALL, torch.Generator())
    with pytest.raises(SpecError, match=r"mlp.gate_proj: got \(128, 512\); possible: \(128, 256\), the base's"):
        backbone.encode(prefix, adapters=[(slice(0, 3), other)])
    monkeypatch.setattr(backbone, "lora", None)
    with pytest.raises(SpecError, match=r"action_module.kind: got 'lora'; possible: modules that leave the base"):
        backbone.encode(prefix, adapters=[(slice(0, 3), weights)])


def test_the_initial_values_are_pefts(backbone: Backbone) -> None:
    """Uniform within 1/√inputs (variance 1/(3·inputs)), B zero; one seed, one adapter; the global generator rests."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    weights = LoraWeights(BASE, 64, 8.0, ALL, torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1), expected)
    for pair in weights.pairs.values():
        a, inputs = pair.lora_A.weight.detach(), pair.lora_A.in_features
        assert inputs**-0.5 * 0.99 < a.abs().max() <= inputs**-0.5
        assert a.var().item() == pytest.approx(1 / (3 * inputs), rel=0.05)
        assert not pair.lora_B.weight.any()
    again = LoraWeights(BASE, 64, 8.0, ALL, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(weights.parameters(), again.parameters(), strict=True))


def test_an_adapters_names_and_widths_are_the_bases(backbone: Backbone) -> None:
    """The declared widths are held against the model itself."""
    weights = LoraWeights(BASE, 4, 8.0, ALL, torch.Generator())
    found = {
        name: (module.in_features, module.out_features)
        for name, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("language_model.") and name.rpartition(".")[2] in ALL
    }
    assert {p: (m.lora_A.in_features, m.lora_B.out_features) for p, m in weights.pairs.items()} == found
    assert len(found) == 2 * 7


def test_a_base_with_adapters_has_the_same_names_and_bytes(backbone: Backbone) -> None:
    assert not any("lora" in name for name in backbone.model.state_dict())
    before = backbone.num_bytes
    backbone.encode(backbone.prepare(observation(1, 1), ["base"]), adapters=[(slice(0, 1), adapter(0))])
    assert backbone.num_bytes == before == sum(p.numel() * 4 for p in backbone.model.parameters())


def test_targets_are_distinct_and_have_one_order() -> None:
    declared = {"horizon": 1, "action_width": 1, "state_width": 1, "proprioception": "none"}
    spec = LoraSpec(**declared, target_modules=("v_proj", "q_proj"))
    assert spec.target_modules == ("q_proj", "v_proj")
    with pytest.raises(ValueError, match=r"got \['q_proj', 'q_proj'\]; possible: each name once"):
        LoraSpec(**declared, target_modules=("q_proj", "q_proj"))


# The module: training and serving


LORA = LoraSpec(horizon=2, action_width=2, state_width=2, proprioception="none", rank=4, alpha=8, hidden_width=32)
ROWS = 8
OFT = OftSpec(**LORA.model_dump(include=set(OftSpec.model_fields) - {"kind"}))


class Job:
    """8 samples of one tenant over the shared base, and how often it asked for features."""

    def __init__(self, backbone: Backbone, module: ActionModule) -> None:
        self.backbone, self.module = backbone, module
        self.prefix = backbone.prepare(observation(ROWS, 5), ["base"])
        self.state = torch.zeros(ROWS, 2)
        self.action = torch.randn(ROWS, 2, 2, generator=torch.Generator().manual_seed(6))
        self.asked: list[list[int]] = []

    def encode(self, rows: slice | torch.Tensor) -> VLAFeature:
        index = torch.arange(ROWS)[rows].tolist()
        self.asked.append(index)
        prefix = group([self.prefix[i : i + 1] for i in index])[0]
        adapters = [] if self.module.adapter is None else [(slice(0, prefix.rows), self.module.adapter)]
        return self.backbone.features(prefix, adapters=adapters)

    def sft(self, optimizer: Optimizer, microbatch_size: int, passes: int) -> float:
        """The mean loss over the steps."""
        return sft_update(
            self.module,
            optimizer,
            self.encode,
            proprioception=self.state,
            action=self.action,
            is_pad=torch.zeros(ROWS, 2, dtype=torch.bool),
            microbatch_size=microbatch_size,
            passes=passes,
            generator=torch.Generator().manual_seed(1),
        )["loss"]


def sft_spec(learning_rate: float) -> SftSpec:
    adam = AdamSpec(learning_rate=learning_rate)
    return SftSpec(jobs=1, batches_per_job=1, microbatch_size=4, cosine=False, optimizer=adam)


def build(spec: LoraSpec | OftSpec = LORA, base: BaseModelSpec = BASE) -> ActionModule:
    return action_modules.build(spec, base, seed=3)


def test_supervised_training_moves_the_adapter_and_lowers_the_loss(backbone: Backbone) -> None:
    """With a head that stays as it is, so that it is the adapter that learns."""
    module = build()
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith("adapter."))
    job, optimizer = Job(backbone, module), new_optimizer(module, sft_spec(3e-3))
    first = job.sft(optimizer, 8, 1)
    for _ in range(2):
        last = job.sft(optimizer, 8, 10)
    assert last < 0.6 * first
    assert all(pair.lora_B.weight.abs().max() > 0 for pair in module.adapter.pairs.values())


def test_a_module_with_an_adapter_is_encoded_anew_in_each_pass(backbone: Backbone) -> None:
    """2 microbatches of 4 × 3 passes: 6 base forwards with the adapter, 2 without."""
    for spec, forwards in ((LORA, 6), (OFT, 2)):
        module = build(spec)
        job = Job(backbone, module)
        job.sft(new_optimizer(module, sft_spec(1e-3)), 4, 3)
        assert len(job.asked) == forwards
        passes = [job.asked[i] + job.asked[i + 1] for i in range(0, forwards, 2)]
        assert [sorted(rows) for rows in passes] == [list(range(8))] * (forwards // 2)


@pytest.mark.parametrize(("learning_rate", "moved"), [(0.0, False), (1e-2, True)])
def test_ppo_trains_the_adapter_by_microbatch(backbone: Backbone, learning_rate: float, moved: bool) -> None:
    """What was collected by grouped inference is scored in training: ratio 1 as long as nothing moved."""
    module = build()
    with torch.no_grad():
        for pair in module.adapter.pairs.values():
            pair.lora_B.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    job = Job(backbone, module)
    with torch.no_grad():
        decision = module.act(job.encode(slice(0, ROWS)), job.state, torch.Generator().manual_seed(0))
    job.asked.clear()
    before = action_modules.export_parameters(module)
    metrics = ppo_update(
        module,
        new_optimizer(module, sft_spec(learning_rate)),
        job.encode,
        PpoSpec(jobs=1, num_envs=2, rollout_steps=4, epochs=2, microbatch_size=4, optimizer=sft_spec(0.0).optimizer),
        torch.Generator().manual_seed(0),
        proprioception=job.state,
        trace=decision.trace,
        log_prob=decision.log_prob,
        advantage=torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(3)),
        returns=torch.zeros(ROWS),
        valid=torch.ones(ROWS, 2, dtype=torch.bool),
    )
    assert [len(rows) for rows in job.asked] == [4] * 4
    changed = {n for n, a in action_modules.export_parameters(module).items() if (a != before[n]).any()}
    assert any(name.startswith("adapter.") for name in changed) == moved
    assert (metrics["approx_kl"] > 1e-4) == moved


def test_lora_and_oft_tenants_in_one_forward_act_as_they_do_alone(backbone: Backbone) -> None:
    modules = [
        build(LORA),
        build(OFT),
        build(LORA.model_copy(update={"rank": 8})),
    ]
    for module in modules:
        if module.adapter is not None:
            with torch.no_grad():
                for pair in module.adapter.pairs.values():
                    pair.lora_B.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    alone = prefixes(backbone, (2, 1, 3))
    grouped, slices = group(alone)
    adapters = [(s, m.adapter) for s, m in zip(slices, modules, strict=True) if m.adapter is not None]
    features = split(backbone.encode(grouped, adapters=adapters), slices)
    for prefix, module, feature in zip(alone, modules, features, strict=True):
        own = [] if module.adapter is None else [(slice(0, prefix.rows), module.adapter)]
        single = module.act(backbone.encode(prefix, adapters=own), None, None)
        assert torch.equal(module.act(feature, None, None).action, single.action)


def test_a_payload_of_a_lora_module_holds_the_adapter(backbone: Backbone) -> None:
    one, other = build(), action_modules.build(LORA, BASE, seed=4)
    payload = action_modules.export_parameters(one)
    assert "adapter.language_model.layers.1.self_attn.o_proj.lora_A.weight" in payload
    action_modules.load_parameters(other, payload)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    copied = copy.deepcopy(one)  # what a training slot does: the copy's adapter is its own, and one with its tree
    with torch.no_grad():
        for p in copied.adapter.parameters():
            p.zero_()
    assert all(not pair.lora_A.weight.any() for pair in copied.adapter.pairs.values())
    assert all(pair.lora_A.weight.any() for pair in one.adapter.pairs.values())
