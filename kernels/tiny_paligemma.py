"""The small PaliGemma base: its configuration, its tokenizer trained offline, its image processor.

About half a million parameters at width 128. The model class is transformers' own, so a published checkpoint and this
one are loaded, prompted and run by the same code. Nothing here reads or writes a file.
"""

from __future__ import annotations

import json
import string
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, PaliGemmaConfig, PaliGemmaForConditionalGeneration
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec
from kernels.tiny_qwen3_vl import corpus

VOCABULARY = 640  # more than `corpus()` fills: each of its words is one token
PATCH = 16
VISION_WIDTH = 64
LOCATION_MARKS = tuple(f"<loc{i:04}>" for i in range(64))  # a preset's num_action_tokens is 64 at most
_CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def tokenizer() -> GemmaTokenizer:
    """Gemma's BPE with byte fallback and PaliGemma's marks, trained on `corpus()`; deterministic."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    # Gemma's merges never join two digits or a line break with what stands beside it; here the training text is cut.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1 - len(LOCATION_MARKS),
        special_tokens=[*_CONTROL, *_BYTES],
        initial_alphabet=sorted({*string.printable.strip(), "▁", "\n"}),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    trained = json.loads(core.to_str())["model"]
    merges: Any = [tuple(pair) for pair in trained["merges"]]
    words = GemmaTokenizer(
        vocab=trained["vocab"],
        merges=merges,
        extra_special_tokens=[AddedToken("<image>", special=True, normalized=False)],
    )
    words.add_tokens(list(LOCATION_MARKS))  # ordinary words, as in the published vocabulary
    return words


def image_processor(spec: BaseModelSpec) -> SiglipImageProcessorPil:
    """SigLIP's normalisation (mean and deviation 0.5) at the preset's size."""
    return SiglipImageProcessorPil(
        size={"height": spec.image_height, "width": spec.image_width},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        image_seq_length=(spec.image_height // PATCH) * (spec.image_width // PATCH),
    )


def config(spec: BaseModelSpec, words: GemmaTokenizer) -> PaliGemmaConfig:
    """The spec's text layers and two vision layers.

    Raises:
        SpecError: if the width is no multiple of a head's, or pictures are not square.
    """
    width = spec.hidden_width
    if width % (spec.num_key_value_heads * spec.head_width):
        possible = f"multiples of {spec.num_key_value_heads} key/value heads of {spec.head_width}"
        raise SpecError(refusal("hidden_width", width, possible, "change the preset"))
    if spec.image_height != spec.image_width or spec.image_height % PATCH:
        possible = f"squares of multiples of {PATCH}"
        size = (spec.image_height, spec.image_width)
        raise SpecError(refusal("image_height, image_width", size, possible, "change the preset"))
    image_token = words.convert_tokens_to_ids("<image>")
    assert isinstance(image_token, int)
    return PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": width // spec.head_width,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_width,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
            "initializer_range": round(width**-0.5, 4),  # the library's 0.02 is made for widths in the thousands
            "pad_token_id": words.pad_token_id,
            "bos_token_id": words.bos_token_id,
            "eos_token_id": words.eos_token_id,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_WIDTH,
            "intermediate_size": 2 * VISION_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": spec.image_height,
            "patch_size": PATCH,
            "hidden_act": "gelu",  # its tanh form, which Gemma insists on, costs four times as much on a CPU
            "vision_use_head": False,
        },
        image_token_index=image_token,
        vocab_size=VOCABULARY,
        projection_dim=width,
        hidden_size=width,
    )


def random_model(spec: BaseModelSpec, words: GemmaTokenizer, seed: int) -> PaliGemmaForConditionalGeneration:
    """A model with random weights, the same for the same seed.

    transformers initialises from torch's global generator, which is seeded and put back: not for two threads at once.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaliGemmaForConditionalGeneration(config(spec, words)).to(getattr(torch, spec.dtype))
