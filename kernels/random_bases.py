"""Randomly initialised bases of any size, full ones included, built where they will run; for measurements.

A base model's preset names one by `source: random:NAME`. The preset gives the language layers; what else a checkpoint's
config.json says (vision tower, vocabulary) is declared here, since without a checkpoint nobody else says it. Tokenizer
and image processor are made here too, so nothing is downloaded: prompts are as long as with the small vocabulary.

Sources: config.json of Qwen/Qwen3-VL-4B-Instruct and of google/paligemma-3b-pt-224 (the published values; the
defaults of transformers' configuration classes are those of other sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GemmaTokenizer,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec
from kernels import tiny_paligemma, tiny_qwen3_vl

PREFIX = "random:"
"""What a preset's `source` begins with; the rest is a name of `UNREAD`."""


@dataclass(frozen=True)
class Unread:
    """What a checkpoint of a preset's sizes says beyond the preset.

    Attributes:
        family: of the presets that it goes with.
        vocabulary: embeddings of the language model.
        vision: the vision tower, by the names of transformers' configuration.
        least_pixels: Qwen3-VL: smaller pictures are enlarged by the image processor.
    """

    family: str
    vocabulary: int
    vision: Mapping[str, Any]
    least_pixels: int = 0


UNREAD: dict[str, Unread] = {
    "qwen3-vl-4b": Unread(
        "qwen3-vl",
        vocabulary=151_936,
        vision={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
            "hidden_act": "gelu_pytorch_tanh",
        },
        least_pixels=65_536,
    ),
    "paligemma-2b": Unread(
        "paligemma",
        vocabulary=257_216,
        vision={
            "num_hidden_layers": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "patch_size": 14,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    # As the two above in everything but size: what is run on a GPU at full size can be tried on a CPU.
    "qwen3-vl-mini": Unread(
        "qwen3-vl",
        vocabulary=1024,
        vision={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
            "hidden_act": "gelu_pytorch_tanh",
        },
        least_pixels=4096,
    ),
    "paligemma-mini": Unread(
        "paligemma",
        vocabulary=1024,
        vision={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "patch_size": 14,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
}


def unread(spec: BaseModelSpec) -> Unread | None:
    """What `spec` leaves to its checkpoint, if it names one that is none; None for every other source.

    Raises:
        SpecError: if nothing of that name is declared for the family.
    """
    if not spec.source.startswith(PREFIX):
        return None
    known = sorted(PREFIX + name for name, rest in UNREAD.items() if rest.family == spec.family)
    if spec.source not in known:
        raise SpecError(refusal("source", spec.source, ", ".join(known), f"correct preset {spec.name}"))
    return UNREAD[spec.source.removeprefix(PREFIX)]


def qwen3_vl_config(spec: BaseModelSpec, rest: Unread, words: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """The spec's text layers, the rest's vision tower and vocabulary."""
    half = spec.head_width // 2
    side = 5 * half // 16  # published: 24, 20 and 20 of 64
    return Qwen3VLConfig(
        text_config={
            "vocab_size": rest.vocabulary,
            "hidden_size": spec.hidden_width,
            "intermediate_size": spec.mlp_width,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_width,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": spec.rope_theta,
                "mrope_section": [half - 2 * side, side, side],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={**rest.vision, "out_hidden_size": spec.hidden_width},
        image_token_id=_token(words, "<|image_pad|>"),
        video_token_id=_token(words, "<|video_pad|>"),
        vision_start_token_id=_token(words, "<|vision_start|>"),
        vision_end_token_id=_token(words, "<|vision_end|>"),
        tie_word_embeddings=True,
    )


def paligemma_config(spec: BaseModelSpec, rest: Unread, words: GemmaTokenizer) -> PaliGemmaConfig:
    """The spec's text layers, the rest's vision tower and vocabulary."""
    return PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": rest.vocabulary,
            "hidden_size": spec.hidden_width,
            "intermediate_size": spec.mlp_width,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_width,
            "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
            "pad_token_id": words.pad_token_id,
            "bos_token_id": words.bos_token_id,
            "eos_token_id": words.eos_token_id,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": spec.image_height,
            "vision_use_head": False,
            **rest.vision,
        },
        image_token_index=_token(words, "<image>"),
        vocab_size=rest.vocabulary,
        projection_dim=spec.hidden_width,
        hidden_size=spec.hidden_width,
    )


def _token(words: PreTrainedTokenizerBase, mark: str) -> int:
    found = words.convert_tokens_to_ids(mark)
    assert isinstance(found, int)
    return found


def qwen3_vl(spec: BaseModelSpec, rest: Unread, seed: int) -> tuple[Any, Any, Any]:
    """Model, tokenizer, image processor."""
    words = tiny_qwen3_vl.tokenizer()
    processor = Qwen2VLImageProcessorPil(
        patch_size=rest.vision["patch_size"],
        temporal_patch_size=rest.vision["temporal_patch_size"],
        merge_size=rest.vision["spatial_merge_size"],
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        size={"shortest_edge": rest.least_pixels, "longest_edge": 16_777_216},
    )
    return built(Qwen3VLForConditionalGeneration, qwen3_vl_config(spec, rest, words), spec, seed), words, processor


def paligemma(spec: BaseModelSpec, rest: Unread, seed: int) -> tuple[Any, Any, Any]:
    """Model, tokenizer, image processor."""
    words = tiny_paligemma.tokenizer()
    patch = rest.vision["patch_size"]
    processor = SiglipImageProcessorPil(
        size={"height": spec.image_height, "width": spec.image_width},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        image_seq_length=(spec.image_height // patch) * (spec.image_width // patch),
    )
    return built(PaliGemmaForConditionalGeneration, paligemma_config(spec, rest, words), spec, seed), words, processor


def built(model_class: Any, config: PreTrainedConfig, spec: BaseModelSpec, seed: int) -> Any:
    """The model with random weights, the same for the same seed and kind of device.

    Each weight is made on the spec's device in the spec's dtype, so that the host's memory holds none of them and the
    device's each once. torch's global generators are seeded and put back: not for two threads at once.
    """
    own = [torch.cuda.current_device()] if spec.device == "cuda" else []
    with torch.random.fork_rng(devices=own), torch.device(spec.device):
        torch.manual_seed(seed)
        return model_class._from_config(config, dtype=getattr(torch, spec.dtype))
