"""Qwen3-VL: equal to the library's own processing and call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs import presets
from configs.errors import SpecError
from kernels import tiny_qwen3_vl
from kernels.backbones import Backbone
from kernels.image_patches import ImagePatches
from tests.kernels.conftest import observation


@pytest.mark.parametrize(("temporal", "patch"), [(1, 8), (2, 8), (2, 16)])
def test_patches_equal_the_librarys_image_processor_to_the_bit(temporal: int, patch: int) -> None:
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        temporal_patch_size=temporal,
        merge_size=2,
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.6, 0.7],
        size={"shortest_edge": 32 * 32, "longest_edge": 1 << 20},
    )
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8)
    theirs = processor.preprocess(list(images), return_tensors="np")
    ours = ImagePatches(processor, 64, 96).patches(images).numpy()
    np.testing.assert_array_equal(ours.reshape(theirs["pixel_values"].shape), theirs["pixel_values"])
    assert theirs["image_grid_thw"].tolist() == [[1, 64 // patch, 96 // patch]] * 3


def test_a_canonical_size_that_the_processor_would_change_is_refused() -> None:
    with pytest.raises(SpecError, match=r"image_height, image_width: got \(60, 64\); possible: multiples of 16"):
        ImagePatches(tiny_qwen3_vl.image_processor(), 60, 64)


def test_the_large_bases_pictures_are_of_a_size_that_its_processor_keeps() -> None:
    """Qwen3-VL's published processor: 65,536 pixels at least, patches of 16, merged by twos; 8 × 8 tokens a picture."""
    published = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65_536, "longest_edge": 16_777_216},
    )
    base = presets.base_model("qwen3-vl-4b")
    assert ImagePatches(published, base.image_height, base.image_width).tokens == 64
    with pytest.raises(SpecError, match="image_height, image_width"):
        ImagePatches(published, 224, 224)


def test_features_equal_the_librarys_own_call(backbone: Backbone) -> None:
    """Positions, picture attention and padding as the library has them; two cameras, rows of unequal length."""
    seen = observation(3, 1, ("left", "right"))
    seen["instructions"] = ["push", "push the cube to the target", "reach"]
    prefix = backbone.prepare(seen, ["left", "right"])
    is_picture = (prefix.input_ids == backbone.prompts.image_token_id).int()
    present = (prefix.input_ids != backbone.prompts.pad_token_id).long()
    grid = torch.tensor([[1, 8, 8]] * 6)
    positions, _ = backbone.model.get_rope_index(prefix.input_ids, is_picture, grid, attention_mask=present)
    assert torch.equal(positions * present, prefix.position_ids * present)
    ours = backbone.encode(prefix).action_tokens
    backbone.model.visual.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            hidden = backbone.model(
                input_ids=prefix.input_ids,
                attention_mask=present,
                pixel_values=prefix.pixels.flatten(0, 1),
                image_grid_thw=grid,
                mm_token_type_ids=is_picture,
                use_cache=False,
            ).last_hidden_state
    finally:
        backbone.model.visual.set_attn_implementation("joynexus_equal_pictures")
        backbone.model.rope_deltas = None  # the library's call keeps them on the model; ours must not
    theirs = torch.stack([row[index] for row, index in zip(hidden, prefix.action_index, strict=True)])
    # A mask in place of the causal flag takes another attention kernel: rounding, not meaning.
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_action_tokens_are_qwens_grounding_marks(backbone: Backbone) -> None:
    prefix = backbone.prepare(observation(1, 0), ["base"])
    words = backbone.tokenizer.convert_ids_to_tokens(prefix.input_ids[0, prefix.action_index[0]].tolist())
    assert words == ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"]
