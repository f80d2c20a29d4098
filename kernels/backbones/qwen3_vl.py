"""The resident, frozen Qwen3-VL base: observations to prefixes, prefixes to features.

transformers' model classes do the arithmetic. What depends only on shapes (rotary positions, interpolation of the
position table, segment bounds) is computed once a shape and handed in, and the equal-sized pictures of a batch
attend in one call instead of one each; results equal the library's own call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedTokenizerBase, Qwen3VLModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from configs.model import BaseModelSpec
from kernels import random_bases, tiny_qwen3_vl
from kernels.backbones.base import Backbone
from kernels.backbones.taps import position_after_prefix, prefix_cache
from kernels.features import PrefixBatch, PrefixCache
from kernels.image_patches import ImagePatches
from kernels.qwen3_vl_prompts import Qwen3VlPrompts

EQUAL_PICTURES = "joynexus_equal_pictures"


def _equal_pictures_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pictures: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within each of `pictures` equal segments of [1, heads, pictures × P, width], in one call."""

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(2, (pictures, -1))[0].transpose(0, 1)

    out, _ = sdpa_attention_forward(module, apart(query), apart(key), apart(value), attention_mask, **kwargs)
    return out.flatten(0, 1)[None], None


AttentionInterface.register(EQUAL_PICTURES, _equal_pictures_attention)


@dataclass(frozen=True, eq=False)
class _PictureShape:
    """What the vision tower needs to know of I pictures of one size, apart from their pixels."""

    grid_thw: Tensor
    interp_indices: Tensor
    interp_weights: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor


class Qwen3VlBackbone(Backbone):
    """A Qwen3-VL of any size.

    Args:
        spec: the base model's preset.
        model: transformers' Qwen3-VL without language-model head.
        tokenizer: of the same checkpoint.
        processor: of the same checkpoint.

    Raises:
        SpecError: if the checkpoint does not fit the preset.
    """

    model_class = Qwen3VLModel
    processor_class = Qwen2VLImageProcessorPil
    pictures: ImagePatches

    def __init__(
        self,
        spec: BaseModelSpec,
        model: Qwen3VLModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: Qwen2VLImageProcessorPil,
    ) -> None:
        super().__init__(spec, model, tokenizer, processor)
        self.pictures = ImagePatches(processor, spec.image_height, spec.image_width)
        rows, columns = self.pictures.grid
        merge = self.pictures.merge
        self.prompts = Qwen3VlPrompts(tokenizer, spec, self.pictures.tokens, (rows // merge, columns // merge))
        self.model.visual.set_attn_implementation(EQUAL_PICTURES)
        self._picture_shape = lru_cache(maxsize=256)(self._compute_picture_shape)

    @classmethod
    def random_checkpoint(cls, spec: BaseModelSpec, seed: int) -> tuple[Any, Any, Any]:
        """See `Backbone`."""
        if (rest := random_bases.unread(spec)) is not None:
            return random_bases.qwen3_vl(spec, rest, seed)
        tokenizer = tiny_qwen3_vl.tokenizer()
        return tiny_qwen3_vl.random_model(spec, tokenizer, seed), tokenizer, tiny_qwen3_vl.image_processor()

    def _forward(self, prefix: PrefixBatch, *, with_cache: bool) -> tuple[Tensor, PrefixCache | None]:
        """See `Backbone`. The towers are called apart: the library's own call keeps state on the model."""
        device = self.model.device
        ids = prefix.input_ids.to(device)
        pictures = len(prefix.pixels)
        shape = self._picture_shape(pictures)
        vision = self.model.visual(
            prefix.pixels.to(device, self.model.dtype).flatten(0, 1),
            grid_thw=shape.grid_thw,
            interp_indices=shape.interp_indices,
            interp_weights=shape.interp_weights,
            position_ids=shape.position_ids,
            cu_seqlens=shape.cu_seqlens,
            pictures=pictures,
        )
        embeddings = self.model.get_input_embeddings()(ids)
        mask = ids == self.prompts.image_token_id
        embeddings = embeddings.masked_scatter(mask[..., None], vision.pooler_output.to(embeddings.dtype))
        # No attention mask: padding is on the right, where causal attention hides it from every row.
        kept = DynamicCache(config=self.model.config.text_config) if with_cache else None
        with self._tap.taken() as taken:
            out = self.model.language_model(
                inputs_embeds=embeddings,
                position_ids=prefix.position_ids.to(device),
                attention_mask=None,
                visual_pos_masks=mask,
                deepstack_visual_embeds=vision.deepstack_features,
                cache=kept,
                use_cache=with_cache,
            )
        hidden = taken[0] if taken else out.last_hidden_state
        return hidden, None if kept is None else prefix_cache(kept, position_after_prefix(prefix))

    def _compute_picture_shape(self, pictures: int) -> _PictureShape:
        visual = self.model.visual
        rows, columns = self.pictures.grid
        grid_thw = torch.tensor([[1, rows, columns]])
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.pictures.merge,
        )
        used = (weights != 0).any(dim=0)  # where picture and table have one grid, one of four neighbours counts
        positions = get_vision_position_ids(grid_thw, self.pictures.merge)
        device = self.model.device
        return _PictureShape(
            grid_thw.repeat(pictures, 1).to(device),
            indices[:, used].repeat(pictures, 1).to(device),
            weights[:, used].repeat(pictures, 1).to(device),
            positions.repeat(pictures, 1).to(device),
            torch.tensor([0, pictures * rows * columns], dtype=torch.int32, device=device),
        )
