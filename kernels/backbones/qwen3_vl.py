"""The resident, frozen Qwen3-VL base: observations to prefixes, prefixes to features.

transformers' model classes do the arithmetic. What depends only on shapes (rotary positions, interpolation of the
position table, segment bounds) is computed once a shape and handed in, and the equal-sized pictures of a batch
attend in one call instead of one each; results equal the library's own call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase, Qwen3VLModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from configs.model import BaseModelSpec
from kernels import tiny_qwen3_vl
from kernels.backbones.base import Backbone, check_device, unreadable
from kernels.backbones.taps import FinalNormTap, prefix_cache
from kernels.features import PrefixBatch, PrefixCache
from kernels.image_patches import ImagePatches
from kernels.lora import GroupedLora
from kernels.prompts import PromptBuilder

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
    """A Qwen3-VL of any size. Its parameters are frozen; `pretraining` alone unfreezes a base, before it is served.

    Args:
        spec: the base model's preset.
        model: transformers' Qwen3-VL without language-model head.
        tokenizer: of the same checkpoint.
        processor: of the same checkpoint.

    Raises:
        SpecError: if the checkpoint does not fit the preset.
    """

    def __init__(
        self,
        spec: BaseModelSpec,
        model: Qwen3VLModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: Qwen2VLImageProcessorPil,
    ) -> None:
        self.spec = spec
        self.model: Any = model.requires_grad_(False).eval()
        text = self.model.config.text_config
        self._check_checkpoint(
            {
                "hidden_width": text.hidden_size,
                "num_layers": text.num_hidden_layers,
                "num_key_value_heads": text.num_key_value_heads,
                "num_attention_heads": text.num_attention_heads,
                "head_width": text.head_dim,
                "mlp_width": text.intermediate_size,
                "rope_theta": text.rope_parameters["rope_theta"],
            }
        )
        self.tokenizer = tokenizer
        self.processor = processor
        self.pictures: ImagePatches = ImagePatches(processor, spec.image_height, spec.image_width)
        rows, columns = self.pictures.grid
        merge = self.pictures.merge
        self.prompts: PromptBuilder = PromptBuilder(
            tokenizer, spec, self.pictures.tokens, (rows // merge, columns // merge)
        )
        self.lora = GroupedLora(self.model.language_model)
        self._tap = FinalNormTap(self.model.language_model.norm, spec.feature_tap)
        self.model.to(spec.device)
        self.model.visual.set_attn_implementation(EQUAL_PICTURES)
        self._picture_shape = lru_cache(maxsize=256)(self._compute_picture_shape)

    @classmethod
    def from_pretrained(cls, spec: BaseModelSpec, root: Path) -> Qwen3VlBackbone:
        """Load a checkpoint by hub id, absolute folder, or folder relative to `root` (the project's root).

        Raises:
            SpecError: if there is no such checkpoint, it does not fit the preset, or the preset's device is not here.
        """
        check_device(spec)
        folder = Path(spec.source) if Path(spec.source).is_absolute() else root / spec.source
        source = str(folder) if folder.is_dir() else spec.source
        transformers_logging.disable_progress_bar()  # a service's log is no terminal
        where: dict[str, Any] = {"revision": spec.revision} if spec.revision is not None else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
            processor = Qwen2VLImageProcessorPil.from_pretrained(source, **where)
            model = Qwen3VLModel.from_pretrained(source, dtype=getattr(torch, spec.dtype), **where)
        except (OSError, ValueError) as error:
            raise unreadable(spec, error) from error
        return cls(spec, model, tokenizer, processor)

    @classmethod
    def random(cls, spec: BaseModelSpec, seed: int) -> Qwen3VlBackbone:
        """A small base with random weights (the pictures mean nothing to it); the same for the same seed."""
        tokenizer = tiny_qwen3_vl.tokenizer()
        model = tiny_qwen3_vl.random_model(spec, tokenizer, seed).model
        return cls(spec, model, tokenizer, tiny_qwen3_vl.image_processor())

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
                past_key_values=kept,
                use_cache=with_cache,
            )
        return taken[0] if taken else out.last_hidden_state, None if kept is None else self._cache(kept, prefix)

    def _cache(self, kept: DynamicCache, prefix: PrefixBatch) -> PrefixCache:
        # An action token's positions are one number; the first one follows the prefix.
        position = prefix.position_ids[0].gather(1, prefix.action_index[:, :1])[:, 0]
        return prefix_cache(kept, position)

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
