"""The pi head: equal to transformers' π0, to hand numbers and to float64 arithmetic of its own; it learns a chunk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration

from configs import presets
from configs.errors import SpecError
from configs.model import BaseModelSpec, PiSpec
from configs.spec import parse
from kernels import action_modules
from kernels.action_modules import PiModule, export_parameters
from kernels.action_modules.pi_expert import AdaptiveRmsNorm, Expert, RmsNorm, rotated, rotation, sincos_embedding
from kernels.backbones import Backbone
from kernels.features import PrefixCache, VLAFeature
from kernels.flow_matching import sample_beta
from tests.kernels.conftest import observation

BASE = presets.base_model("tiny-qwen3-vl")
SMALL: dict[str, Any] = {"horizon": 5, "action_width": 3, "state_width": 4, "hidden_width": 32, "mlp_width": 64}


def spec(version: str = "pi0", **changes: Any) -> PiSpec:
    where = "head" if version == "pi0" else "prompt"
    heads = 2 * BASE.num_key_value_heads
    return PiSpec(**{**SMALL, "version": version, "proprioception": where, "heads": heads, **changes})


def feature(rows: int, length: int = 48, seed: int = 0, base: BaseModelSpec = BASE) -> VLAFeature:
    """A random cache; rows end at different places, the first at the very end."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, base.num_key_value_heads, length, base.head_width)
    layers = [torch.randn(shape, generator=generator) for _ in range(2 * base.num_layers)]
    real = length - torch.arange(rows) % 7
    cache = PrefixCache(tuple(layers[::2]), tuple(layers[1::2]), real + 3)
    return VLAFeature(cache=cache, mask=torch.arange(length) < real[:, None])


def stirred(module: PiModule, seed: int = 1) -> PiModule:
    """With every parameter away from its start, also those that start at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return module


def drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_velocity_equals_transformers_pi0() -> None:
    """Its expert and projections copied; prefixes of unequal lengths, keys and values of its own language model."""
    text = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **text, **heads},
            "vision_config": {"model_type": "siglip_vision_model", **vision, "image_size": 28, "patch_size": 14},
            "projection_dim": 32,
            "image_token_id": 63,
        },
        dit_config={"model_type": "gemma", **text, **heads, "hidden_size": 24},
        chunk_size=5,
        max_state_dim=4,
        max_action_dim=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs: Any = PI0ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for p in theirs.parameters():
                p.add_(0.1 * torch.randn_like(p))
    base = BASE.model_copy(
        update={"num_layers": 2, "num_key_value_heads": 2, "head_width": 16, "rope_theta": 10_000.0, "hidden_width": 32}
    )
    ours = PiModule(spec(hidden_width=24, mlp_width=48, heads=4), base)
    ours.load_state_dict(_renamed(theirs), strict=True)

    mask = torch.arange(9) < torch.tensor([9, 6, 7])[:, None]
    x_t, state, time = drawn(3, 5, 3), drawn(3, 4, seed=6), torch.tensor([1.0, 0.5, 0.03])
    with torch.no_grad():
        cache: DynamicCache = theirs.model.vlm(
            inputs_embeds=drawn(3, 9, 32, seed=7),
            attention_mask=mask.long(),
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros(3, 9),
            use_cache=True,
        ).cache
        prefix = PrefixCache(
            tuple(layer.keys for layer in cache.layers), tuple(layer.values for layer in cache.layers), mask.sum(dim=1)
        )
        velocity = ours.velocity(VLAFeature(cache=prefix, mask=mask), state, x_t, time)
        expected = theirs(state=state, noise=x_t, timestep=time, attention_mask=mask.long(), cache=cache).logits
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(velocity, expected, atol=1e-5, rtol=0)


def _renamed(theirs: Any) -> dict[str, Tensor]:
    """Their expert's and projections' parameters under our names; its embedding table is not used."""
    names = {
        "model.dit.layers": "expert.layers",
        "model.dit.norm": "expert.norm",
        "embed_action_time.action_in_proj": "action_in",
        "embed_action_time.state_proj": "state_in",
        "embed_action_time.action_time_mlp_in": "time_in",
        "embed_action_time.action_time_mlp_out": "time_out",
        "action_out_proj": "action_out",
        "self_attn.q_proj": "query",
        "self_attn.k_proj": "key",
        "self_attn.v_proj": "value",
        "self_attn.o_proj": "out",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    found = {}
    for name, value in theirs.state_dict().items():
        if name.startswith("model.vlm") or "embed_tokens" in name:
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = value
    return found


def test_time_embedding_by_hand() -> None:
    """Width 6: periods 0.004, 0.004 · 1000^½ and 4. At t = 1 the first has made 250 turns and the last a quarter."""
    middle = 2 * math.pi / (0.004 * math.sqrt(1000))
    expected = [
        [0, 0, 0, 1, 1, 1],
        [0, math.sin(middle), 1, 1, math.cos(middle), 0],
        [1, math.sin(0.001 * middle), math.sin(math.pi / 2000), 0, math.cos(0.001 * middle), math.cos(math.pi / 2000)],
    ]
    found = sincos_embedding(torch.tensor([0.0, 1.0, 0.001], dtype=torch.float64), 6)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_euler_steps_go_from_one_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Velocity x_t · t: with four steps at t = 1, ¾, ½, ¼, x is multiplied by each 1 − t/4."""
    module = PiModule(spec(denoising_steps=4), BASE)
    monkeypatch.setattr(module, "_velocity", lambda _context, x_t, time: (x_t * time.float()[:, None, None], x_t))
    noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    action = module.act(feature(1), drawn(1, 4), torch.Generator().manual_seed(3)).action
    torch.testing.assert_close(action[0], noise * (3 / 4) * (13 / 16) * (7 / 8) * (15 / 16), atol=1e-6, rtol=0)


@pytest.mark.parametrize("version", ["pi0", "pi05"])
def test_what_stands_behind_the_mask_changes_no_bit(version: str) -> None:
    module, known, state = stirred(PiModule(spec(version), BASE)), feature(8), drawn(8, 4)
    expected = module.act(known, state, None).action
    assert known.cache is not None
    assert known.mask is not None
    hidden = ~known.mask[:, None, :, None]
    for junk in (math.nan, math.inf, 1e30):
        layers = [tuple(x.masked_fill(hidden, junk) for x in kind) for kind in (known.cache.keys, known.cache.values)]
        dirty = VLAFeature(cache=PrefixCache(layers[0], layers[1], known.cache.position), mask=known.mask)
        assert torch.equal(module.act(dirty, state, None).action, expected)
        loss = module.imitation_loss(dirty, state, drawn(8, 5, 3), torch.zeros(8, 5, dtype=torch.bool), 120.0, None)
        module.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    everything = VLAFeature(cache=known.cache, mask=torch.ones_like(known.mask))
    assert not torch.equal(module.act(everything, state, None).action[1:], expected[1:])  # the mask is what hides


def test_a_prefix_padded_further_gives_the_same_chunk() -> None:
    module, known, state = stirred(PiModule(spec(), BASE)), feature(8), drawn(8, 4)
    assert known.cache is not None
    assert known.mask is not None
    keys, values = (
        tuple(torch.cat([x, torch.full_like(x[:, :, :32], 7.0)], dim=2) for x in kind)
        for kind in (known.cache.keys, known.cache.values)
    )
    mask = torch.cat([known.mask, torch.zeros(8, 32, dtype=torch.bool)], dim=1)
    longer = VLAFeature(cache=PrefixCache(keys, values, known.cache.position), mask=mask)
    torch.testing.assert_close(
        module.act(longer, state, None).action, module.act(known, state, None).action, atol=3e-6, rtol=0
    )


@pytest.mark.parametrize("version", ["pi0", "pi05"])
def test_a_rows_bits_do_not_depend_on_its_company(version: str) -> None:
    module, known, state = stirred(PiModule(spec(version), BASE)), feature(40), drawn(40, 4)
    whole = module.act(known, state, None).action
    for start, stop in ((0, 1), (3, 5), (7, 24), (39, 40), (1, 40)):
        assert torch.equal(module.act(known[start:stop], state[start:stop], None).action, whole[start:stop])


def test_who_sees_whom() -> None:
    """The state token sees no action, every action sees all others and the state."""
    module, known, state = stirred(PiModule(spec(), BASE)), feature(1), drawn(1, 4)
    seen: list[Tensor] = []
    handle = module.expert.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    x_t, time = drawn(1, 5, 3), torch.tensor([0.5])
    with torch.no_grad():
        module.velocity(known, state, x_t, time)
        x_t[0, 4] += 1
        module.velocity(known, state, x_t, time)
        module.velocity(known, state + 1, x_t, time)
    handle.remove()
    assert seen[0].shape == (6, 32)
    assert torch.equal(seen[0][0], seen[1][0])
    assert all(not torch.equal(seen[0][i], seen[1][i]) for i in range(1, 6))
    assert all(not torch.equal(seen[1][i], seen[2][i]) for i in range(6))


def test_the_bases_keys_are_rotated_as_ours(backbone: Backbone) -> None:
    """A text token's key in layer 0, computed from its embedding in float64 and rotated by hand, is the cache's."""
    prefix = backbone.prepare(observation(2, seed=0), ["base"])
    encoded = backbone.encode(prefix, {"cache"})
    assert encoded.cache is not None
    layer = backbone.model.language_model.layers[0]
    token = int(prefix.action_index[0, 0]) - 2
    position = int(prefix.position_ids[0, 0, token])
    assert prefix.position_ids[:, 0, token].tolist() == [position] * 3
    assert int(encoded.cache.position[0]) == position + 2
    x = layer.input_layernorm(backbone.model.get_input_embeddings()(prefix.input_ids[:1, token]))
    key = layer.self_attn.k_norm(layer.self_attn.k_proj(x).view(-1, BASE.head_width)).double()
    half = BASE.head_width // 2
    by_hand = key.clone()
    for i in range(half):
        angle = position / BASE.rope_theta ** (2 * i / BASE.head_width)
        by_hand[:, i] = key[:, i] * math.cos(angle) - key[:, i + half] * math.sin(angle)
        by_hand[:, i + half] = key[:, i + half] * math.cos(angle) + key[:, i] * math.sin(angle)
    torch.testing.assert_close(encoded.cache.keys[0][0, :, token].double(), by_hand, atol=1e-5, rtol=0)
    ours = rotated(key.float()[None, :, None], rotation(torch.tensor([[position]]), BASE.head_width, BASE.rope_theta))
    torch.testing.assert_close(ours[0, :, 0].double(), by_hand, atol=1e-5, rtol=0)
    assert (by_hand - key).abs().max() > 0.1


def test_a_row_of_the_tiny_base_is_decoded_as_in_its_own_company(backbone: Backbone) -> None:
    module = stirred(PiModule(spec(), BASE))
    prefix = backbone.prepare(observation(3, seed=1), ["base"])
    state = drawn(3, 4)
    whole = module.act(backbone.encode(prefix, module.reads), state, None).action
    assert torch.equal(module.act(backbone.encode(prefix[1:2], module.reads), state[1:2], None).action, whole[1:2])
    assert not torch.allclose(whole[0], whole[1], atol=1e-4)  # the pictures differ


@pytest.mark.parametrize("version", ["pi0", "pi05"])
def test_it_learns_eight_chunks(version: str) -> None:
    """With time or velocity the wrong way round it would lead away from them; chunks of zeros are 0.75 off."""
    module = PiModule(spec(version, horizon=3, action_width=2), BASE)
    known, state, action = feature(8, length=16), drawn(8, 4), drawn(8, 3, 2).clamp(-1.5, 1.5)
    many = torch.arange(8).repeat(8)
    features, states, actions = known[many], state[many], action[many]
    is_pad = torch.zeros(64, 3, dtype=torch.bool)
    optimizer = torch.optim.AdamW(module.parameters(), lr=6e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    steps = 300
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = module.imitation_loss(features, states, actions, is_pad, 384.0, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for seed in (1, 2):
        found = module.act(known, state, torch.Generator().manual_seed(seed)).action
        assert (found - action).abs().mean() < 0.1
    assert (module.act(known, state, None).action - action).abs().mean() < 0.1


def test_loss_by_hand_and_its_counts() -> None:
    """A last layer of zeros predicts velocity 0: the loss is the mean square of noise − action where it counts."""
    module = PiModule(spec(), BASE)
    with torch.no_grad():
        module.action_out.weight.zero_()
    known, state, action = feature(4), drawn(4, 4), drawn(4, 5, 3)
    is_pad = torch.zeros(4, 5, dtype=torch.bool)
    is_pad[1, 2:] = True
    action[1, 2:] = math.nan
    generator, total = torch.Generator().manual_seed(9), 0.0
    for row in range(4):
        noise = torch.randn(5, 3, generator=generator)
        sample_beta(1.5, 1.0, 1, generator)
        total += float((noise - action[row])[~is_pad[row]].double().square().sum())
    whole = module.imitation_loss(known, state, action, is_pad, 51.0, torch.Generator().manual_seed(9))
    assert whole.item() == pytest.approx(total / 51, rel=1e-5)
    whole.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    generator = torch.Generator().manual_seed(9)
    parts = [
        module.imitation_loss(known[rows], state[rows], action[rows], is_pad[rows], 51.0, generator).item()
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-5)


def test_x_t_lies_between_noise_and_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the expert's answer replaced by what it was given: t · noise + (1 − t) · action, t the time it is told."""
    module, seen = PiModule(spec(), BASE), []

    def velocity(_feature: VLAFeature, _state: Tensor, x_t: Tensor, time: Tensor) -> Tensor:
        seen.append((x_t, time))
        return x_t

    monkeypatch.setattr(module, "velocity", velocity)
    action = drawn(6, 5, 3)
    module.imitation_loss(
        feature(6), drawn(6, 4), action, torch.zeros(6, 5, dtype=torch.bool), 90.0, torch.Generator().manual_seed(2)
    )
    x_t, time = seen[0]
    generator = torch.Generator().manual_seed(2)
    for row in range(6):
        noise = torch.randn(5, 3, generator=generator)
        sample_beta(1.5, 1.0, 1, generator)
        t = float(time[row])
        torch.testing.assert_close(x_t[row], t * noise + (1 - t) * action[row], atol=1e-6, rtol=0)


def test_training_times_are_a_beta_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beta(1.5, 1) · 0.999 + 0.001: mean 0.6004, variance 1.5 / (2.5² · 3.5) · 0.999²; more near noise than near 0."""
    module, seen, rows = PiModule(spec(), BASE), [], 20_000

    def velocity(_feature: VLAFeature, _state: Tensor, x_t: Tensor, time: Tensor) -> Tensor:
        seen.append(time)
        return x_t

    monkeypatch.setattr(module, "velocity", velocity)
    is_pad = torch.zeros(rows, 5, dtype=torch.bool)
    module.imitation_loss(feature(1), None, torch.zeros(rows, 5, 3), is_pad, 1.0, torch.Generator().manual_seed(0))
    (times,) = seen
    assert times.min() >= 0.001
    assert times.max() <= 1
    assert float(times.mean()) == pytest.approx(0.6004, abs=0.006)
    assert float(times.var()) == pytest.approx(1.5 / (2.5**2 * 3.5) * 0.999**2, rel=0.03)
    assert float((times > 0.5005).double().mean()) == pytest.approx(1 - 0.5**1.5, abs=0.01)


def test_adaptive_norms_start_as_plain_ones_with_closed_gates() -> None:
    norm, plain = AdaptiveRmsNorm(6), RmsNorm(6)
    norm.initialise()
    plain.initialise()
    x, condition = drawn(2, 3, 6), drawn(2, 6, seed=6)
    normed, gate = norm(x, condition)
    exact = x.double() / (x.double().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(normed.double(), exact, atol=1e-6, rtol=0)
    assert torch.equal(normed, plain(x, None)[0])
    assert gate is not None
    assert torch.equal(gate, torch.zeros(2, 1, 6))
    with torch.no_grad():  # scale 1, shift 2, gate 3 by the biases alone
        norm.modulation.bias.copy_(torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(6))
    normed, gate = norm(x, condition)
    torch.testing.assert_close(normed.double(), exact * 2 + 2, atol=1e-5, rtol=0)
    assert torch.equal(gate, torch.full((2, 1, 6), 3.0))


def test_pi05_hears_the_time_only_after_a_step() -> None:
    module, known = PiModule(spec("pi05"), BASE), feature(2)
    x_t, early, late = drawn(2, 5, 3), torch.tensor([0.1, 0.1]), torch.tensor([0.9, 0.9])
    with torch.no_grad():
        assert torch.equal(module.velocity(known, None, x_t, early), module.velocity(known, None, x_t, late))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        module.imitation_loss(known, None, x_t, torch.zeros(2, 5, dtype=torch.bool), 30.0, None).backward()
        optimizer.step()
    with torch.no_grad():
        assert not torch.allclose(
            module.velocity(known, None, x_t, early), module.velocity(known, None, x_t, late), atol=1e-3
        )


@pytest.mark.parametrize("version", ["pi0", "pi05"])
def test_every_parameter_trains(version: str) -> None:
    module = stirred(PiModule(spec(version), BASE))
    module.imitation_loss(feature(4), drawn(4, 4), drawn(4, 5, 3), torch.zeros(4, 5).bool(), 60.0, None).backward()
    assert {name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().max() > 0} == set()


def test_the_published_expert_has_311_million_parameters() -> None:
    """Gemma's 300m beside PaliGemma: 18 × (2 · 1024 · 2048 + 2 · 1024 · 256 + 3 · 1024 · 4096 + 2 · 1024) + 1024.

    π0.5 has 37 norms of 1024 · 3072 + 3072 instead of 37 of 1024.
    """
    published = PiSpec(horizon=50, action_width=32, state_width=32, proprioception="head")
    counts = {}
    for adaptive in (False, True):
        with torch.device("meta"):
            expert = Expert(
                layers=18,
                width=published.hidden_width,
                mlp_width=published.mlp_width,
                heads=published.heads,
                kv_heads=1,
                head_width=256,
                theta=10_000.0,
                adaptive=adaptive,
            )
        counts[adaptive] = sum(p.numel() for p in expert.parameters())
    assert counts[False] == 311_464_960
    assert counts[True] == 311_464_960 + 37 * (1024 * 3072 + 3072 - 1024) == 427_932_672


@pytest.mark.parametrize(
    ("version", "where", "possible"), [("pi0", "prompt", "head, none"), ("pi05", "head", "prompt, none")]
)
def test_a_state_where_the_version_has_none_is_refused(version: str, where: str, possible: str) -> None:
    with pytest.raises(SpecError, match=rf"proprioception: got '{where}'; possible: {possible} for {version}"):
        parse(PiSpec, {**SMALL, "version": version, "proprioception": where}, where="here")


def test_heads_that_are_no_multiple_of_the_bases_are_refused() -> None:
    base = BASE.model_copy(update={"num_key_value_heads": 2})
    with pytest.raises(SpecError, match=r"action_module\.heads: got 3; possible: multiples of 2"):
        action_modules.build(spec(heads=3), base, seed=0)


def test_without_proprioception_there_is_no_state_token() -> None:
    module, known = PiModule(spec(proprioception="none"), BASE), feature(2)
    assert not any(name.startswith("state_in") for name in export_parameters(module))
    assert torch.equal(module.act(known, None, None).action, module.act(known, drawn(2, 4), None).action)
