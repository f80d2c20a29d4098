"""The resident, frozen PaliGemma base: observations to prefixes, prefixes to features.

transformers' model classes do the arithmetic. Attention is PaliGemma's own over the prefix: pictures and text see one
another in both directions. The action tokens that follow see the prefix and one another; nothing of the prefix sees
them, and nothing sees padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PaliGemmaModel, PreTrainedTokenizerBase
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec
from kernels import random_bases, tiny_paligemma
from kernels.backbones.base import Backbone
from kernels.backbones.taps import position_after_prefix, prefix_cache
from kernels.features import PrefixBatch, PrefixCache
from kernels.paligemma_prompts import PaliGemmaPrompts
from kernels.siglip_pictures import SiglipPictures


class PaliGemmaBackbone(Backbone):
    """A PaliGemma of any size (SigLIP and a Gemma whose layers all attend in full).

    Args:
        spec: the base model's preset.
        model: transformers' PaliGemma without language-model head.
        tokenizer: of the same checkpoint.
        processor: of the same checkpoint.

    Raises:
        SpecError: if the checkpoint does not fit the preset.
    """

    model_class = PaliGemmaModel
    processor_class = SiglipImageProcessorPil
    pictures: SiglipPictures

    def __init__(
        self,
        spec: BaseModelSpec,
        model: PaliGemmaModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: SiglipImageProcessorPil,
    ) -> None:
        super().__init__(spec, model, tokenizer, processor)
        vision, text = self.model.config.vision_config, self.model.config.text_config
        if text.model_type != "gemma":
            possible = "gemma: PaliGemma 2's layers look through a window and squash their scores"
            raise SpecError(refusal("source", f"a language model {text.model_type}", possible, "choose a PaliGemma 1"))
        size = (spec.image_height, spec.image_width)
        if size != (vision.image_size, vision.image_size):
            possible = f"{(vision.image_size, vision.image_size)}, the checkpoint's"
            raise SpecError(refusal("image_height, image_width", size, possible, f"correct preset {spec.name}"))
        self.pictures = SiglipPictures(processor, vision.patch_size, spec.image_height, spec.image_width)
        self.prompts = PaliGemmaPrompts(tokenizer, spec, self.pictures.tokens)

    @classmethod
    def random_checkpoint(cls, spec: BaseModelSpec, seed: int) -> tuple[Any, Any, Any]:
        """See `Backbone`."""
        if (rest := random_bases.unread(spec)) is not None:
            return random_bases.paligemma(spec, rest, seed)
        tokenizer = tiny_paligemma.tokenizer()
        return tiny_paligemma.random_model(spec, tokenizer, seed), tokenizer, tiny_paligemma.image_processor(spec)

    def _forward(self, prefix: PrefixBatch, *, with_cache: bool) -> tuple[Tensor, PrefixCache | None]:
        """See `Backbone`. The parts are called apart: the library's own call has no place for action tokens."""
        device = self.model.device
        ids = prefix.input_ids.to(device)
        is_picture = ids == self.prompts.image_token_id
        planes = self.pictures.planes(prefix.pixels.to(device, self.model.dtype))
        seen = self.model.multi_modal_projector(self.model.vision_tower(planes).last_hidden_state)
        # Some checkpoints have no embedding for the placeholder. Text is scaled within the embedding, pictures are not.
        embeddings = self.model.get_input_embeddings()(ids.masked_fill(is_picture, self.prompts.pad_token_id))
        embeddings = embeddings.masked_scatter(is_picture[..., None], seen.to(embeddings.dtype))
        kept = DynamicCache(config=self.model.config.text_config) if with_cache else None
        with self._tap.taken() as taken:
            out = self.model.language_model(
                inputs_embeds=embeddings,
                position_ids=prefix.position_ids[0].to(device),
                attention_mask=visible(prefix.mask.to(device), prefix.action_index.to(device)),
                cache=kept,
                use_cache=with_cache,
            )
        hidden = taken[0] if taken else out.last_hidden_state
        return hidden, None if kept is None else prefix_cache(kept, position_after_prefix(prefix))


def visible(mask: Tensor, action_index: Tensor) -> Tensor:
    """Which position (last) a position (last but one) sees.

    All see the prefix, padding too (it is read by nobody, but a softmax over nothing would be NaN); action tokens see
    the action tokens as well.

    Args:
        mask: bool [B, L], True at the prefix.
        action_index: int64 [B, N], where the action tokens stand.

    Returns:
        bool [B, 1, L, L].
    """
    acts = torch.zeros_like(mask).scatter(1, action_index, True)
    return (mask[:, None] | (acts[:, :, None] & acts[:, None]))[:, None]
