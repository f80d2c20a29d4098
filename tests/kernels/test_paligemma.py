"""PaliGemma: its prompt, pictures and prefix equal the library's own; the action tokens follow without being seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import DynamicCache, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from configs import presets
from configs.errors import SpecError
from kernels import backbones, tiny_paligemma, tiny_qwen3_vl
from kernels.backbones import PaliGemmaBackbone
from kernels.backbones.paligemma import visible
from kernels.features import PrefixBatch
from kernels.paligemma_prompts import PaliGemmaPrompts
from kernels.siglip_pictures import SiglipPictures
from tests.kernels.conftest import observation, pictures

SPEC = presets.base_model("tiny-paligemma")
PARTS = ("action_tokens", "tokens", "cache")


@pytest.fixture(scope="module")
def gemma() -> PaliGemmaBackbone:
    return PaliGemmaBackbone.random(SPEC, seed=0)


def unequal(base: PaliGemmaBackbone) -> PrefixBatch:
    """Two cameras, rows of unequal length."""
    seen = observation(3, 1, ("left", "right"))
    seen["instructions"] = ["push", "push the cube to the target", "reach it"]
    return base.prepare(seen, ["left", "right"])


@pytest.mark.parametrize("size", [64, 96, 50])
def test_pictures_equal_the_librarys_image_processor_to_the_bit(size: int) -> None:
    processor = SiglipImageProcessorPil(
        size={"height": 64, "width": 64}, image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    images = pictures(3, 0, size)
    theirs = processor.preprocess(list(images), return_tensors="np")["pixel_values"]
    ours = SiglipPictures(processor, 16, 64, 64)
    patches = ours.patches(ours.canonical(images, "base"))
    assert patches.shape == (3, 16, 3 * 16 * 16)
    np.testing.assert_array_equal(ours.planes(patches).numpy(), theirs)
    np.testing.assert_array_equal(patches[1, 6].numpy(), theirs[1, :, 16:32, 32:48].ravel())  # row 1, column 2


def test_pictures_of_another_size_than_the_checkpoints_are_refused() -> None:
    """Published: 224² in patches of 14, 16 × 16 tokens a picture."""
    published, base = SiglipImageProcessorPil(), presets.base_model("paligemma-2b")
    assert SiglipPictures(published, 14, base.image_height, base.image_width).tokens == 256
    for patch, size in ((14, (256, 256)), (14, (224, 448)), (15, (224, 224))):
        with pytest.raises(SpecError, match=r"image_height, image_width: got \(.*\); possible: \(224, 224\), the"):
            SiglipPictures(published, patch, *size)


def test_a_preset_whose_pictures_the_positions_do_not_fill_is_refused() -> None:
    model, words, _ = PaliGemmaBackbone.random_checkpoint(SPEC, 0)
    wide = SPEC.model_copy(update={"image_height": 128, "image_width": 128})
    with pytest.raises(SpecError, match=r"got \(128, 128\); possible: \(64, 64\), the checkpoint's"):
        PaliGemmaBackbone(wide, model.model, words, tiny_paligemma.image_processor(wide))
    for size in ((64, 128), (72, 72)):
        with pytest.raises(SpecError, match=r"image_height, image_width: got .* possible: squares of multiples of 16"):
            tiny_paligemma.config(SPEC.model_copy(update={"image_height": size[0], "image_width": size[1]}), words)


def test_paligemma_2_is_refused() -> None:
    """Its attention is another one, which nothing here would notice."""
    model, words, processor = PaliGemmaBackbone.random_checkpoint(SPEC, 0)
    model.config.text_config.model_type = "gemma2"
    with pytest.raises(SpecError, match=r"source: got 'a language model gemma2'; possible: gemma: .*; choose"):
        PaliGemmaBackbone(SPEC, model.model, words, processor)


@pytest.mark.parametrize("cameras", [1, 2])
@pytest.mark.parametrize("text", ["push the cube to the target", "naïve: 0.25", ""])
def test_prompts_equal_the_librarys_own_up_to_the_action_tokens(
    gemma: PaliGemmaBackbone, cameras: int, text: str
) -> None:
    library = PaliGemmaProcessor(tiny_paligemma.image_processor(SPEC), tiny_paligemma.tokenizer())
    theirs = library(images=[list(pictures(cameras, 0))], text=["<image>" * cameras + text])
    ours = gemma.prompts.build(text, cameras, None)
    assert ours.ids[: ours.action_start].tolist() == theirs["input_ids"][0]
    words = gemma.tokenizer.convert_ids_to_tokens(ours.ids[ours.action_start :].tolist())
    assert words == ["<loc0000>", "<loc0001>", "<loc0002>", "<loc0003>"]
    with_state = gemma.prompts.build(text, cameras, "012 255")
    theirs = library(images=[list(pictures(cameras, 0))], text=["<image>" * cameras + text + " state:012 255"])
    assert with_state.ids[: with_state.action_start].tolist() == theirs["input_ids"][0]


def test_location_marks_in_a_text_are_letters() -> None:
    """PaliGemma's vocabulary has them as ordinary words, which no option of the tokenizer splits."""
    words = tiny_paligemma.tokenizer()
    before = words.backend_tokenizer.to_str()
    marks = words.convert_tokens_to_ids(["<loc0003>", "<image>", "<bos>"])
    told = words("<loc0003><image><bos>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [mark in told for mark in marks] == [True, False, False]
    prompts = PaliGemmaPrompts(words, SPEC, 16)
    plain, sly = (prompts.build(text, 1, None).ids for text in ("push", "push <loc0003><loc0063><image><bos>"))
    for mark in [*marks, *words.convert_tokens_to_ids(list(tiny_paligemma.LOCATION_MARKS))]:
        assert (sly == mark).sum() == (plain == mark).sum()
    assert "<loc0003><loc0063><image><bos>" in words.decode(sly)
    assert words.backend_tokenizer.to_str() == before


def test_another_familys_tokenizer_is_refused() -> None:
    with pytest.raises(SpecError, match="tokenizer: got '<image>'; possible: a tokenizer of the PaliGemma family"):
        PaliGemmaPrompts(tiny_qwen3_vl.tokenizer(), SPEC, 16)


def test_the_prefix_equals_the_librarys_own_call(gemma: PaliGemmaBackbone) -> None:
    """Of the prompt without action tokens: scaling, positions from one, both directions, padding; features and cache.

    Another length takes other blocks in the attention kernel: rounding, not meaning.
    """
    prefix = unequal(gemma)
    ours = gemma.encode(prefix, PARTS)
    for row, start in enumerate(prefix.action_index[:, 0].tolist()):
        cache = DynamicCache(config=gemma.model.config.text_config)
        with torch.no_grad():
            theirs = gemma.model(
                input_ids=prefix.input_ids[row : row + 1, :start],
                pixel_values=gemma.pictures.planes(prefix.pixels[2 * row : 2 * row + 2]),
                attention_mask=torch.ones(1, start, dtype=torch.long),
                token_type_ids=torch.zeros(1, start, dtype=torch.long),
                cache=cache,
                use_cache=True,
            )
        torch.testing.assert_close(ours.tokens[row, :start], theirs.last_hidden_state[0], atol=1e-5, rtol=1e-5)
        for layer in range(SPEC.num_layers):
            theirs_kept = cache.layers[layer]
            key, value = ours.cache.keys[layer][row, :, :start], ours.cache.values[layer][row, :, :start]
            torch.testing.assert_close(key, theirs_kept.keys[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(value, theirs_kept.values[0], atol=1e-5, rtol=1e-5)


def test_action_tokens_equal_a_second_call_on_the_prefixs_cache(gemma: PaliGemmaBackbone) -> None:
    """The library's language model run on the prefix alone, then on the action tokens, which see all of both."""
    prefix = unequal(gemma)
    ours = gemma.encode(prefix, PARTS)
    count = SPEC.num_action_tokens
    for row, start in enumerate(prefix.action_index[:, 0].tolist()):
        cache = DynamicCache(config=gemma.model.config.text_config)
        for layer in range(SPEC.num_layers):
            kept = ours.cache.keys[layer], ours.cache.values[layer]
            cache.update(*(t[row : row + 1, :, :start] for t in kept), layer)
        with torch.no_grad():
            hidden = gemma.model.language_model(
                input_ids=prefix.input_ids[row : row + 1, start : start + count],
                position_ids=ours.cache.position[row] + torch.arange(count)[None],
                attention_mask=torch.ones(1, 1, count, start + count, dtype=torch.bool),
                cache=cache,
            ).last_hidden_state
        torch.testing.assert_close(ours.action_tokens[row], hidden[0], atol=1e-5, rtol=1e-5)


def test_who_sees_whom() -> None:
    """Two rows of six: three of prefix, two action tokens, one of padding; one of prefix, two, three."""
    mask = torch.tensor([[True] * 3 + [False] * 3, [True] + [False] * 5])
    first = ["111000", "111000", "111000", "111110", "111110", "111000"]
    second = ["100000", "111000", "111000", "100000", "100000", "100000"]
    expected = torch.tensor([[[[int(seen) for seen in line] for line in row]] for row in (first, second)]).bool()
    assert torch.equal(visible(mask, torch.tensor([[3, 4], [1, 2]])), expected)


def changed(prefix: PrefixBatch, index: int, token: int) -> PrefixBatch:
    """Another token at one place of every row."""
    ids = prefix.input_ids.clone()
    assert (ids[:, index] != token).all()
    ids[:, index] = token
    return replace(prefix, input_ids=ids)


def real(base: PaliGemmaBackbone, prefix: PrefixBatch) -> list[Tensor]:
    """Features, keys and values of the prefix."""
    feature = base.encode(prefix, PARTS)
    cached = [t.transpose(1, 2)[feature.mask] for t in (*feature.cache.keys, *feature.cache.values)]
    return [feature.tokens[feature.mask], *cached]


def test_action_tokens_change_nothing_of_the_prefix_to_the_bit(gemma: PaliGemmaBackbone) -> None:
    prefix = gemma.prepare(observation(2, 1), ["base"])
    start = int(prefix.action_index[0, 0])
    other = changed(prefix, start + 3, gemma.tokenizer.convert_tokens_to_ids("<loc0060>"))
    for one, two in zip(real(gemma, prefix), real(gemma, other), strict=True):
        assert torch.equal(one, two)
    # … but the first action token sees the last one.
    difference = gemma.encode(prefix).action_tokens - gemma.encode(other).action_tokens
    assert (difference[:, 0].abs().amax(dim=-1) > 1e-3).all()


def test_the_prefix_is_seen_in_both_directions(gemma: PaliGemmaBackbone) -> None:
    """The last word changes the first picture token's features."""
    prefix = gemma.prepare(observation(2, 1), ["base"])
    last = int(prefix.action_index[0, 0]) - 2  # a line break stands between
    other = changed(prefix, last, gemma.tokenizer.convert_tokens_to_ids("▁ball"))
    difference = gemma.encode(prefix, ["tokens"]).tokens - gemma.encode(other, ["tokens"]).tokens
    assert (difference[:, 0].abs().amax(dim=-1) > 1e-3).all()


def test_a_checkpoint_in_the_published_layout_loads(tmp_path: Path) -> None:
    """google/paligemma-3b-pt-224 names its weights as transformers did in 2024, without the tied head."""
    model, words, processor = PaliGemmaBackbone.random_checkpoint(SPEC, seed=5)
    for part in (model, words, processor):
        part.save_pretrained(tmp_path)
    weights = {}
    for name, tensor in model.model.state_dict().items():
        tower, _, rest = name.partition(".")
        inner = {"language_model": "model.", "vision_tower": "vision_model."}.get(tower, "")
        weights[f"{tower}.{inner}{rest}"] = tensor.contiguous()
    assert "language_model.model.embed_tokens.weight" in weights
    assert "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight" in weights
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = backbones.load(SPEC.model_copy(update={"source": str(tmp_path)}), root=tmp_path)
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name)), name
