"""Random bases: the full-size ones have the published number of parameters, the small ones run the same way."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sizes import random_bases as random_specs
from configs import presets
from configs.errors import SpecError
from configs.home import PROJECT_ROOT
from configs.model import BaseModelSpec
from kernels import backbones
from kernels.backbones import FAMILIES, Backbone
from kernels.group_batching import group, split
from tests.kernels.conftest import observation
from tests.kernels.test_backbones import ALL, tensors

MINI = random_specs("mini", "cpu")


def abstract(name: str) -> Backbone:
    """The full-size base without any weight."""
    spec = random_specs("full", "cuda")[name].model_copy(update={"device": "meta"})
    return FAMILIES[spec.family].random(spec, seed=0)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_qwen3_vl_4b_has_the_published_number_of_parameters() -> None:
    """4,437,815,808 in the published checkpoint, whose embeddings are tied; layer by layer as its config.json says."""
    base = abstract("qwen3-vl-4b")
    attention = 2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560 + 2 * 128
    text = 151_936 * 2560 + 36 * (attention + 3 * 2560 * 9728 + 2 * 2560) + 2560
    block = 1024 * 3072 + 3072 + 1024 * 1024 + 1024 + 1024 * 4096 + 4096 + 4096 * 1024 + 1024 + 4 * 1024
    merger = 4096 * 4096 + 4096 + 4096 * 2560 + 2560
    patches = 3 * 2 * 16 * 16 * 1024 + 1024 + 2304 * 1024
    vision = patches + 24 * block + (merger + 2 * 1024) + 3 * (merger + 2 * 4096)
    assert (count(base.model.language_model), count(base.model.visual)) == (text, vision)
    assert count(base.model) == text + vision == 4_437_815_808
    assert base.pictures.tokens == 64


def test_paligemma_3b_has_the_published_number_of_parameters() -> None:
    """2,923,466,480 in the published checkpoint, whose embeddings are tied; layer by layer as its config.json says."""
    base = abstract("paligemma-2b")
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 16_384 + 2 * 2048
    text = 257_216 * 2048 + 18 * layer + 2048
    block = 4 * (1152 * 1152 + 1152) + 1152 * 4304 + 4304 + 4304 * 1152 + 1152 + 4 * 1152
    vision = 3 * 14 * 14 * 1152 + 1152 + 256 * 1152 + 27 * block + 2 * 1152
    assert (count(base.model.language_model), count(base.model.vision_tower)) == (text, vision)
    assert count(base.model) == text + vision + 1152 * 2048 + 2048 == 2_923_466_480
    assert base.pictures.tokens == 256


@pytest.mark.parametrize("name", ["qwen3-vl-4b", "paligemma-2b"])
def test_full_size_weights_are_bfloat16_and_nothing_is_on_the_host(name: str) -> None:
    base = abstract(name)
    assert {parameter.dtype for parameter in base.model.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in (*base.model.parameters(), *base.model.buffers())} == {"meta"}


@pytest.mark.parametrize("spec", MINI.values(), ids=MINI)
def test_a_random_base_is_loaded_by_its_name_and_is_the_same_each_time(spec: BaseModelSpec) -> None:
    state = torch.get_rng_state()
    one, two = (backbones.load(spec, PROJECT_ROOT) for _ in range(2))
    other = FAMILIES[spec.family].random(spec, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = dict(one.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in two.model.named_parameters())
    changed = [name for name, weight in other.model.named_parameters() if not torch.equal(weight, weights[name])]
    drawn = [name for name, weight in weights.items() if weight.std() > 0]
    assert changed == drawn
    assert any("language_model" in name for name in drawn)
    assert any("vis" in name for name in drawn)


@pytest.mark.parametrize("spec", MINI.values(), ids=MINI)
def test_rotary_frequencies_stay_float32(spec: BaseModelSpec) -> None:
    """As in a loaded checkpoint; bfloat16 has three digits, and positions go to the thousands."""
    base = FAMILIES[spec.family].random(spec, seed=0)
    inv_freq = base.model.language_model.rotary_emb.inv_freq
    exponents = torch.arange(0, spec.head_width, 2, dtype=torch.float64) / spec.head_width
    torch.testing.assert_close(inv_freq.double(), spec.rope_theta**-exponents, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", MINI.values(), ids=MINI)
def test_its_features_are_finite_and_grouped_like_any_bases(spec: BaseModelSpec) -> None:
    """bfloat16's bound, not bits: two rows in one forward, and each with a picture of its own."""
    base = FAMILIES[spec.family].random(spec, seed=0)
    alone = [base.prepare(observation(1, seed), ["base"]) for seed in (1, 2)]
    grouped, slices = group(alone)
    found = split(base.encode(grouped, ALL), slices)
    assert all(feature.finite_rows().all() for feature in found)
    assert not torch.equal(found[0].action_tokens, found[1].action_tokens)
    for prefix, feature in zip(alone, found, strict=True):
        for ours, theirs in zip(tensors(feature), tensors(base.encode(prefix, ALL)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_a_name_that_nothing_is_declared_of_is_refused() -> None:
    spec = presets.base_model("qwen3-vl-4b").model_copy(update={"device": "cpu"})
    for source in ("random:qwen3-vl-5b", "random:paligemma-2b"):
        with pytest.raises(
            SpecError, match=r"source: got 'random:.*'; possible: random:qwen3-vl-4b, random:qwen3-vl-m"
        ):
            backbones.load(spec.model_copy(update={"source": source}), PROJECT_ROOT)
