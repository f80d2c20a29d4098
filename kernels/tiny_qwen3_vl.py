"""The small Qwen3-VL base: its configuration, its tokenizer trained offline, its image processor.

About 1.3 million parameters at width 128. The model class is transformers' own, so a published checkpoint and this
one are loaded, prompted and run by the same code. Nothing here reads or writes a file.
"""

from __future__ import annotations

import itertools

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec

VOCABULARY = 512
PATCH = 8
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen's own pre-tokenizer: digits stand alone, so a number costs as many tokens as it has digits.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VERBS = ("push", "pick up", "reach", "place", "lift", "move", "grasp", "stack", "open", "close", "pull", "turn", "put")
_COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple")
_THINGS = ("cube", "ball", "target", "goal", "drawer", "door", "bowl", "block", "cup", "plate", "button", "peg")
_PLACES = (
    "to the target",
    "to the goal position",
    "on the table",
    "into the box",
    "to the left",
    "to the right",
    "with the gripper",
    "and hold it at the",
    "and keep it in the",
    "and release it over the",
)


def corpus() -> list[str]:
    """Sentences in the manner of robot instructions; the tokenizer's training text, always the same."""
    sentences = [
        f"{verb} the {thing} {place} {colour} {other}"
        for verb, thing, place, (colour, other) in itertools.product(
            _VERBS, _THINGS, _PLACES, zip(itertools.cycle(_COLOURS), _THINGS, strict=False)
        )
    ]
    return ["user\n", "assistant\n", "what should the robot do?", " state: 012 128 255", *sentences]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens, trained on `corpus()`; deterministic."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[m for m in SPECIAL_TOKENS if m not in ("<|im_end|>", "<|endoftext|>")],
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Qwen3-VL's normalisation (mean and deviation 0.5) at patch 8; still pictures fill one frame."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=1,
        merge_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        size={"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 512 * 512},
    )


def config(spec: BaseModelSpec, words: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """The spec's text layers and two vision layers of its width.

    Raises:
        SpecError: if the width is no multiple of a head's.
    """
    width = spec.hidden_width
    if width % (spec.num_key_value_heads * spec.head_width):
        possible = f"multiples of {spec.num_key_value_heads} key/value heads of {spec.head_width}"
        raise SpecError(refusal("hidden_width", width, possible, "change the preset"))
    heads = width // spec.head_width
    # The library's 0.02 is made for widths in the thousands; at 128 the base sat on a plateau twice as long.
    spread = round(width**-0.5, 4)

    def token(mark: str) -> int:
        found = words.convert_tokens_to_ids(mark)
        assert isinstance(found, int)
        return found

    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": spec.mlp_width,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_width,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": spec.rope_theta,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "bos_token_id": None,
            "tie_word_embeddings": True,
            "initializer_range": spread,
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": heads,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "out_hidden_size": width,
            "num_position_embeddings": (max(spec.image_height, spec.image_width) // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
            "initializer_range": spread,
            "hidden_act": "gelu",  # its tanh form costs four times as much on a CPU
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def random_model(spec: BaseModelSpec, words: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """A model with random weights, the same for the same seed.

    transformers initialises from torch's global generator, which is seeded and put back: not for two threads at once.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config(spec, words)).to(getattr(torch, spec.dtype))
