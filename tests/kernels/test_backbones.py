"""What every base family promises: bound by name, frozen, and a row's bits its own whatever company it is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from configs import presets
from configs.errors import SpecError, TenantFault
from configs.home import PROJECT_ROOT
from configs.model import BaseModelSpec, Part
from kernels import backbones, tiny_paligemma, tiny_qwen3_vl
from kernels.backbones import FAMILIES, Backbone
from kernels.features import VLAFeature
from kernels.group_batching import group, split
from tests.kernels.conftest import TINY, observation, pictures

ALL: tuple[Part, ...] = get_args(Part)


def tensors(feature: VLAFeature) -> list[Tensor]:
    """All parts; each real value of them, padding left out."""
    found = []
    for tensor in feature.tensors():
        if tensor.shape[1:2] == feature.mask.shape[1:]:
            found.append(tensor[feature.mask])  # tokens, mask: [B, L, …]
        elif tensor.ndim == 4:
            found.append(tensor.transpose(1, 2)[feature.mask])  # keys, values: [B, K, L, width]
        else:
            found.append(tensor)
    return found


def equal(one: VLAFeature, other: VLAFeature) -> bool:
    """Whether two features of the same rows are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_families_are_those_that_a_preset_may_name() -> None:
    literal = set(get_args(BaseModelSpec.model_fields["family"].annotation))
    assert set(FAMILIES) == set(TINY) == literal


def test_parts_have_the_documented_shapes(base: Backbone) -> None:
    seen = observation(3, 1, ("left", "right"))
    seen["instructions"] = ["push", "push the cube to the target", "reach it"]
    prefix = base.prepare(seen, ["left", "right"])
    feature = base.encode(prefix, ALL)
    spec, length = base.spec, prefix.length
    assert feature.action_tokens.shape == (3, spec.num_action_tokens, spec.hidden_width)
    assert feature.tokens.shape == (3, length, spec.hidden_width)
    shapes = {t.shape for t in (*feature.cache.keys, *feature.cache.values)}
    assert shapes == {(3, spec.num_key_value_heads, length, spec.head_width)}
    assert len(feature.cache.keys) == len(feature.cache.values) == spec.num_layers
    floats = (feature.action_tokens, feature.tokens, *feature.cache.keys, *feature.cache.values)
    assert {t.dtype for t in floats} == {torch.float32}
    assert feature.mask.shape == (3, length)
    starts = prefix.action_index[:, 0].tolist()
    assert len(set(starts)) == 3  # prompts of three lengths
    assert feature.mask.tolist() == [[i < start for i in range(length)] for start in starts]
    following = [int(prefix.position_ids[:, row, :start].max()) + 1 for row, start in enumerate(starts)]
    assert feature.cache.position.tolist() == following
    for row, start in enumerate(starts):
        there = slice(start, start + spec.num_action_tokens)
        assert torch.equal(feature.tokens[row, there], feature.action_tokens[row])


def test_only_the_wanted_parts_are_there_and_they_equal_those_of_all(base: Backbone) -> None:
    prefix = base.prepare(observation(2, 1), ["base"])
    whole = base.encode(prefix, ALL)
    for part in ALL:
        alone = base.encode(prefix, [part])
        assert [name for name in ALL if getattr(alone, name) is not None] == [part]
        assert (alone.mask is None) == (part == "action_tokens")
        assert all(torch.equal(a, b) for a, b in zip(alone.tensors(), whole.only([part]).tensors(), strict=True))


def test_a_row_alone_equals_the_same_row_of_a_batch(base: Backbone) -> None:
    batch = base.prepare(observation(40, 7), ["base"])
    whole = base.encode(batch, ALL)
    for count in (1, 2, 3, 4, 5, 8, 16, 31):
        for start in (0, 40 - count):
            rows = slice(start, start + count)
            assert equal(base.encode(batch[rows], ALL), whole[rows]), rows


def test_grouped_equals_alone_across_prompts_and_camera_counts(base: Backbone) -> None:
    """A long instruction with one camera shares a bucket, and so a forward, with a short one with two."""
    one = base.prepare(observation(3, 1, text="push the cube " * 5), ["base"])
    two = base.prepare(observation(2, 2, ("left", "right"), "push the cube"), ["left", "right"])
    assert one.length == two.length
    assert len({*one.action_index[:, 0].tolist(), *two.action_index[:, 0].tolist()}) == 2
    for order in ([one, two], [two, one], [two, one, two], [one] * 7 + [two] * 5):
        grouped, slices = group(order)
        for prefix, feature in zip(order, split(base.encode(grouped, ALL), slices), strict=True):
            assert equal(base.encode(prefix, ALL), feature)


def test_what_is_not_finite_in_one_row_leaves_the_others_bits(base: Backbone) -> None:
    prefix = base.prepare(observation(3, 1, ("left", "right")), ["left", "right"])
    spoilt = prefix.pixels.clone()
    spoilt[2] = torch.nan  # the second row's first picture
    beside = base.encode(replace(prefix, pixels=spoilt), ALL)
    assert beside.finite_rows().tolist() == [True, False, True]
    whole = base.encode(prefix, ALL)
    kept = torch.tensor([0, 2])
    assert equal(beside[kept], whole[kept])


def test_action_tokens_stand_last_before_the_padding(base: Backbone) -> None:
    prefix = base.prepare(observation(2, 0), ["base"])
    assert prefix.length % base.spec.length_bucket == 0
    steps = prefix.action_index - prefix.action_index[:, :1]
    assert steps.tolist() == [list(range(base.spec.num_action_tokens))] * 2
    last = prefix.action_index[0, -1]
    assert prefix.length == base.prompts.bucket(int(last) + 1)
    assert (prefix.input_ids[:, last + 1 :] == base.prompts.pad_token_id).all()
    assert (prefix.input_ids[:, : last + 1] != base.prompts.pad_token_id).all()


def test_gradients_reach_what_trains_inside_the_base(base: Backbone) -> None:
    """`features` is for tenants with adapters in the language layers; `encode` is not."""
    prefix = base.prepare(observation(2, 1), ["base"])
    weight = base.model.language_model.layers[0].self_attn.v_proj.weight
    weight.requires_grad_(True)
    try:
        base.features(prefix).action_tokens.square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0
        assert not base.encode(prefix, ALL).action_tokens.requires_grad
    finally:
        weight.requires_grad_(False)
        weight.grad = None


def test_padding_is_seen_by_nothing(base: Backbone) -> None:
    prefix = base.prepare(observation(2, 0), ["base"])
    end = int(prefix.action_index[0, -1]) + 1
    assert end < prefix.length
    other = prefix.input_ids.clone()
    other[:, end:] = int(prefix.input_ids[0, end - base.spec.num_action_tokens - 1])
    positions = prefix.position_ids.clone()
    positions[:, :, end:] = 7
    changed = replace(prefix, input_ids=other, position_ids=positions)
    assert equal(base.encode(prefix, ALL), base.encode(changed, ALL))


def test_a_longer_bucket_changes_nothing_but_rounding(base: Backbone) -> None:
    short = observation(1, 3)
    longer = {
        "images": {"base": np.concatenate([short["images"]["base"], pictures(1, 9)])},
        "instructions": [*short["instructions"], "push the cube " * 8],
    }
    alone, company = base.prepare(short, ["base"]), base.prepare(longer, ["base"])
    assert company.length > alone.length
    one, other = base.encode(alone, ALL), base.encode(company, ALL)[:1]
    for a, b in zip(tensors(one), tensors(other), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_tenants_text_cannot_place_pictures_or_action_tokens(base: Backbone) -> None:
    """Whatever mark a prompt of this family holds, written out in an instruction."""
    plain = base.prepare(observation(1, 0), ["base"])
    added = {token: mark for mark, token in base.tokenizer.get_added_vocab().items()}
    marks = sorted({added[token] for token in plain.input_ids[0].tolist() if token in added})
    assert len(marks) >= base.spec.num_action_tokens + 2  # a picture's placeholder, what opens a prompt
    sly = base.prepare(observation(1, 0, text="push " + "".join(marks)), ["base"])
    assert sly.action_index[0, 0] > plain.action_index[0, 0] + len(marks)
    for mark in marks:
        token = base.tokenizer.convert_tokens_to_ids(mark)
        if token != base.prompts.pad_token_id:
            assert (sly.input_ids == token).sum() == (plain.input_ids == token).sum(), mark
    end = int(sly.action_index[0, -1]) + 1
    assert (sly.input_ids[:, :end] != base.prompts.pad_token_id).all()


def test_cameras_are_bound_by_name_whatever_their_order(base: Backbone) -> None:
    seen = observation(2, 0, ("wrist", "base"))
    turned = {**seen, "images": dict(reversed(seen["images"].items()))}
    one = base.encode(base.prepare(seen, ["wrist", "base"])).action_tokens
    other = base.encode(base.prepare(turned, ["base", "wrist"])).action_tokens
    assert torch.equal(one, other)
    swapped = {**seen, "images": {"wrist": seen["images"]["base"], "base": seen["images"]["wrist"]}}
    assert not torch.equal(one, base.encode(base.prepare(swapped, ["base", "wrist"])).action_tokens)


def test_another_picture_size_is_resized(base: Backbone) -> None:
    seen = observation(2, 0)
    expected = base.prepare(seen, ["base"]).pixels.shape
    seen["images"]["base"] = pictures(2, 0, size=96)
    assert base.prepare(seen, ["base"]).pixels.shape == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": {"top": pictures(2, 0)}}, r"images: got 'top'; possible: exactly \['base'\]"),
        ({"images": {}}, r"images: got \[\]; possible: exactly \['base'\]; send camera 'base' too"),
        ({"images": {"base": pictures(3, 0)}}, r"instructions: got 2; possible: one a row"),
        ({"images": {"base": pictures(2, 0).astype(np.float32)}}, r"images.base: got 'float32 \(2, 64, 64, 3\)'"),
        ({"images": {"base": pictures(2, 0)[..., 0]}}, r"images.base: got 'uint8 \(2, 64, 64\)'"),
        ({"instructions": []}, r"instructions: got 0; possible: one a row, at least one"),
        ({"instructions": ["cube " * 600] * 2}, r"instruction: got 'a prompt of \d+ tokens .*at most 512 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(base: Backbone, change: dict, message: str) -> None:
    with pytest.raises(TenantFault, match=message):
        base.prepare({**observation(2, 0), **change}, ["base"])


def test_more_cameras_than_the_base_takes_are_refused(base: Backbone) -> None:
    names = tuple("abcde")
    with pytest.raises(TenantFault, match=r"cameras: got .* possible: 1 to 4 different names"):
        base.prepare(observation(1, 0, names), names)


def test_proprioception_text_enters_the_prompt(base: Backbone) -> None:
    seen = observation(2, 0)
    seen["images"]["base"][1] = seen["images"]["base"][0]
    feature = base.encode(base.prepare(seen, ["base"], ["000 128", "255 128"])).action_tokens
    assert not torch.equal(feature[0], feature[1])
    one, other = (base.prompts.build("push the cube", 1, text) for text in ("000 128", "255 001"))
    assert len(one.ids) == len(other.ids)


def test_the_base_is_frozen_and_calls_leave_it_as_it_was(base: Backbone) -> None:
    def state() -> dict[str, Any]:
        return {f"{name}.{key}": value for name, m in base.model.named_modules() for key, value in vars(m).items()}

    base.encode(base.prepare(observation(1, 0), ["base"]), ALL)  # the library puts its own hooks in at the first call
    weights, before = {name: p.clone() for name, p in base.model.named_parameters()}, state()
    feature = base.encode(base.prepare(observation(2, 0), ["base"]), ALL)
    assert not any(t.requires_grad for t in feature.tensors())
    assert not any(p.requires_grad for p in base.model.parameters())
    assert not base.model.training
    assert all(torch.equal(p, weights[name]) for name, p in base.model.named_parameters())
    after = state()
    assert before.keys() == after.keys()
    assert [name for name, value in after.items() if value is not before[name]] == []


def test_after_the_norm_is_the_norm_of_before_it(base: Backbone) -> None:
    """RMS norm worked out in float64; Gemma's weight counts from one."""
    before, after = (
        type(base).random(base.spec.model_copy(update={"feature_tap": tap}), seed=0)
        for tap in ("last_before_norm", "last_after_norm")
    )
    weight = torch.linspace(-0.5, 1.5, base.spec.hidden_width)
    for each in (before, after):
        each.model.language_model.norm.weight.copy_(weight)
    prefix = base.prepare(observation(2, 0), ["base"])
    x = before.encode(prefix, ALL).tokens.double()
    factor = weight.double() + (1 if base.spec.family == "paligemma" else 0)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor
    torch.testing.assert_close(normed.float(), after.encode(prefix, ALL).tokens, atol=1e-5, rtol=1e-5)
    taken = before.encode(prefix)
    assert torch.equal(taken.action_tokens, before.encode(prefix, ALL).action_tokens)


def save(folder: Path, family: str, seed: int) -> BaseModelSpec:
    """The small base as a checkpoint; a preset that names it."""
    spec = presets.base_model(TINY[family])
    for part in FAMILIES[family].random_checkpoint(spec, seed):
        part.save_pretrained(folder)
    return spec.model_copy(update={"source": folder.name})


@pytest.mark.parametrize("family", TINY)
def test_saved_and_loaded_through_from_pretrained_it_is_the_same(tmp_path: Path, family: str) -> None:
    spec = save(tmp_path / "base", family, seed=5)
    loaded = backbones.load(spec, root=tmp_path)
    made = FAMILIES[family].random(spec, seed=5)
    assert type(loaded) is type(made)
    for name, p in loaded.model.named_parameters():
        assert torch.equal(p, made.model.get_parameter(name)), name
    seen = observation(2, 1, text="reach the red target, naïvely: 0.25")
    one, other = made.prepare(seen, ["base"]), loaded.prepare(seen, ["base"])
    assert torch.equal(one.input_ids, other.input_ids)
    assert equal(made.encode(one, ALL), loaded.encode(other, ALL))


@pytest.mark.parametrize("family", TINY)
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path, family: str) -> None:
    """The library would draw them at random and say so in its log alone."""
    spec = save(tmp_path / "base", family, seed=5)
    file = tmp_path / "base" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    gone = [name for name in weights if "layers.1.mlp" in name and "language_model" in name]
    assert len(gone) == 3
    kept = {name: tensor for name, tensor in weights.items() if name not in gone}
    safetensors.torch.save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(SpecError, match=r"source: got 'base without .*layers\.1\.mlp.* and 2 others'"):
        backbones.load(spec, root=tmp_path)


@pytest.mark.parametrize("family", TINY)
def test_the_base_in_the_repository_loads_and_is_small(family: str) -> None:
    spec = presets.base_model(TINY[family])
    loaded = backbones.load(spec, root=PROJECT_ROOT)
    assert 400_000 < sum(p.numel() for p in loaded.model.parameters()) < 1_500_000
    folder = PROJECT_ROOT / spec.source
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 * 2**20


@pytest.mark.parametrize("family", TINY)
def test_a_missing_checkpoint_is_refused(tmp_path: Path, family: str) -> None:
    spec = presets.base_model(TINY[family])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"source: got .*empty.* possible: a hub id, or a folder with config.json"):
        backbones.load(spec.model_copy(update={"source": str(tmp_path / "empty")}), root=tmp_path)


@pytest.mark.parametrize("family", TINY)
def test_a_checkpoint_of_another_family_is_refused(family: str) -> None:
    """Before the library builds what it takes for the right model, at its default size."""
    other = presets.base_model(TINY[next(name for name in TINY if name != family)])
    spec = presets.base_model(TINY[family]).model_copy(update={"source": other.source})
    kind = other.family.replace("-", "_")
    with pytest.raises(SpecError, match=f"family: got '{family}'; possible: that of {kind}, the checkpoint's"):
        backbones.load(spec, root=PROJECT_ROOT)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("field", ["hidden_width", "num_layers", "num_key_value_heads", "head_width", "rope_theta"])
def test_a_preset_that_says_otherwise_than_its_checkpoint_is_refused(family: str, field: str) -> None:
    spec = presets.base_model(TINY[family])
    right = getattr(spec, field)
    with pytest.raises(SpecError, match=rf"{field}: got {2 * right}; possible: {right}, the checkpoint's"):
        backbones.load(spec.model_copy(update={field: 2 * right}), root=PROJECT_ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["qwen3-vl-4b", "paligemma-2b"])
def test_a_base_for_a_gpu_is_refused_where_there_is_none(name: str) -> None:
    """Before anything is fetched."""
    with pytest.raises(SpecError, match="device: got 'cuda'; possible: cpu, since torch sees no GPU here; start"):
        backbones.load(presets.base_model(name), root=PROJECT_ROOT)


@pytest.mark.parametrize("family", TINY)
def test_a_base_in_bfloat16_gives_float32_features_close_to_those_in_float32(family: str) -> None:
    """The large bases' precision, tried on the small ones."""
    spec = presets.base_model(TINY[family])
    exact, rounded = (
        backbones.load(spec.model_copy(update={"dtype": dtype}), root=PROJECT_ROOT) for dtype in ("float32", "bfloat16")
    )
    seen = observation(3, 1)
    one, other = (base.encode(base.prepare(seen, ["base"]), ALL) for base in (exact, rounded))
    assert rounded.model.dtype == torch.bfloat16
    assert {t.dtype for t in (other.action_tokens, other.tokens, *other.cache.keys)} == {torch.float32}
    assert (one.action_tokens - other.action_tokens).abs().max() < 0.02 * one.action_tokens.abs().max()


@pytest.mark.parametrize("tiny", [tiny_paligemma, tiny_qwen3_vl])
def test_the_tokenizer_is_trained_alike_each_time(tiny: Any) -> None:
    one, other = tiny.tokenizer(), tiny.tokenizer()
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    text = "Push the cube — 25 cm, naïve 立方体"
    assert one.decode(one(text, add_special_tokens=False)["input_ids"]) == text
    assert len(one) <= tiny.VOCABULARY


@pytest.mark.parametrize("family", TINY)
def test_random_weights_leave_the_global_generator_alone(family: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    FAMILIES[family].random(presets.base_model(TINY[family]), seed=1)
    assert torch.equal(torch.rand(1), expected)
