"""The resident, frozen Qwen3-VL base: observations to prefixes, prefixes to features.

transformers' model classes do the arithmetic. What depends only on shapes (rotary positions, interpolation of the
position table, segment bounds) is computed once a shape and handed in, and the equal-sized pictures of a batch
attend in one call instead of one each; results equal the library's own call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerBase, Qwen3VLModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from configs.errors import SpecError, TenantFault, refusal
from configs.model import BaseModelSpec
from kernels import tiny_qwen3_vl
from kernels.features import PrefixBatch, VLAFeature
from kernels.image_patches import ImagePatches
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


class Backbone:
    """One base model in memory, in evaluation mode, with its tokenizer and image processor.

    Its parameters are frozen; `pretraining` alone unfreezes a base, before it is served. Calls change no state but
    caches of shapes and prompts, so threads may share it.

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
        self.model: Any = model.requires_grad_(False).eval()
        width = int(self.model.get_input_embeddings().weight.shape[1])
        if width != spec.hidden_width:
            raise SpecError(
                refusal("hidden_width", spec.hidden_width, f"{width}, the checkpoint's", f"correct preset {spec.name}")
            )
        self.spec = spec
        self.tokenizer = tokenizer
        self.processor = processor
        self.patches = ImagePatches(processor, spec.image_height, spec.image_width)
        rows, columns = self.patches.grid
        merge = self.patches.merge
        self.prompts = PromptBuilder(tokenizer, spec, self.patches.tokens, (rows // merge, columns // merge))
        self.model.to(spec.device)
        self.model.visual.set_attn_implementation(EQUAL_PICTURES)
        self._picture_shape = lru_cache(maxsize=256)(self._compute_picture_shape)

    @classmethod
    def from_pretrained(cls, spec: BaseModelSpec, root: Path) -> Backbone:
        """Load a checkpoint by hub id, absolute folder, or folder relative to `root` (the project's root).

        Raises:
            SpecError: if there is no such checkpoint, it does not fit the preset, or the preset's device is not here.
        """
        if spec.device == "cuda" and not torch.cuda.is_available():
            remedy = "start a cluster whose base models are for the CPU, or install the driver and torch's CUDA build"
            raise SpecError(refusal("device", spec.device, "cpu, since torch sees no GPU here", remedy))
        folder = Path(spec.source) if Path(spec.source).is_absolute() else root / spec.source
        source = str(folder) if folder.is_dir() else spec.source
        transformers_logging.disable_progress_bar()  # a service's log is no terminal
        where: dict[str, Any] = {"revision": spec.revision} if spec.revision is not None else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
            processor = Qwen2VLImageProcessorPil.from_pretrained(source, **where)
            model = Qwen3VLModel.from_pretrained(source, dtype=getattr(torch, spec.dtype), **where)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            possible = "a hub id, or a folder with config.json, tokenizer.json and safetensors"
            raise SpecError(refusal("source", spec.source, possible, f"correct the preset ({reason})")) from error
        return cls(spec, model, tokenizer, processor)

    @classmethod
    def random(cls, spec: BaseModelSpec, seed: int) -> Backbone:
        """A small base with random weights (the pictures mean nothing to it); the same for the same seed."""
        tokenizer = tiny_qwen3_vl.tokenizer()
        model = tiny_qwen3_vl.random_model(spec, tokenizer, seed).model
        return cls(spec, model, tokenizer, tiny_qwen3_vl.image_processor())

    def prepare(
        self, observation: dict[str, Any], cameras: Sequence[str], proprioception_text: Sequence[str] | None = None
    ) -> PrefixBatch:
        """Tokenise and patchify an observation batch.

        Args:
            observation: {"images": {camera: uint8 [B, h, w, 3]}, "instructions": B strings, …}; not changed.
            cameras: names that the tenant declared. Pictures enter in the order of sorted names, since the schema
                signature does not tell orders apart.
            proprioception_text: B strings for tenants whose state enters the prompt.

        Returns:
            B rows, padded to the bucket of the longest.

        Raises:
            TenantFault: on an unknown or missing camera, unequal counts, wrong picture arrays, a prompt too long.
        """
        images, instructions = observation["images"], list(observation["instructions"])
        self._check_cameras(images, cameras)
        names = sorted(cameras)
        rows = len(instructions)
        counts = {f"images.{name}": len(images[name]) for name in names}
        if proprioception_text is not None:
            counts["proprioception"] = len(proprioception_text)
        if rows == 0 or set(counts.values()) != {rows}:
            raise TenantFault(
                refusal("instructions", rows, f"one a row, at least one; rows are {counts}", "send equally many of all")
            )
        pictures = np.stack([self.patches.canonical(np.asarray(images[name]), name) for name in names], axis=1)
        pixels = self.patches.patches(pictures.reshape(rows * len(names), *pictures.shape[2:]))
        texts = proprioception_text if proprioception_text is not None else [None] * rows
        prompts = [self.prompts.build(i, len(names), t) for i, t in zip(instructions, texts, strict=True)]
        length = self.prompts.bucket(max(len(p.ids) for p in prompts))
        ids = np.full((rows, length), self.prompts.pad_token_id, np.int64)
        positions = np.zeros((3, rows, length), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)] = prompt.ids
            positions[:, row, : len(prompt.ids)] = prompt.positions
        starts = np.array([p.action_start for p in prompts], np.int64)
        action_index = starts[:, None] + np.arange(self.spec.num_action_tokens)
        return PrefixBatch(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            torch.from_numpy(action_index),
            pixels,
            (len(names),) * rows,
        )

    def _check_cameras(self, images: dict[str, Any], cameras: Sequence[str]) -> None:
        known = f"exactly {sorted(cameras)}"
        for name in sorted(set(images) - set(cameras)):
            raise TenantFault(refusal("images", name, known, "remove this camera or declare it"))
        for name in sorted(set(cameras) - set(images)):
            raise TenantFault(refusal("images", sorted(images), known, f"send camera {name!r} too"))
        if not 0 < len(set(cameras)) == len(cameras) <= self.spec.max_cameras:
            possible = f"1 to {self.spec.max_cameras} different names on base {self.spec.name!r}"
            raise TenantFault(refusal("cameras", list(cameras), possible, "declare such cameras"))

    def encode(self, prefix: PrefixBatch) -> VLAFeature:
        """Features of a batch, without gradients; rows do not depend on their company."""
        with torch.no_grad():
            return self.features(prefix)

    def features(self, prefix: PrefixBatch) -> VLAFeature:
        """As `encode`, in the caller's gradient mode."""
        hidden = self._last_hidden_state(prefix)
        index = prefix.action_index.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        return VLAFeature(hidden.gather(1, index).float())

    def _last_hidden_state(self, prefix: PrefixBatch) -> Tensor:
        """[B, L, D] after the final norm. The towers are called apart: nothing is kept on the shared model."""
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
        out = self.model.language_model(
            inputs_embeds=embeddings,
            position_ids=prefix.position_ids.to(device),
            attention_mask=None,
            visual_pos_masks=mask,
            deepstack_visual_embeds=vision.deepstack_features,
            use_cache=False,
        )
        return out.last_hidden_state

    def _compute_picture_shape(self, pictures: int) -> _PictureShape:
        visual = self.model.visual
        rows, columns = self.patches.grid
        grid_thw = torch.tensor([[1, rows, columns]])
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.patches.merge,
        )
        used = (weights != 0).any(dim=0)  # where picture and table have one grid, one of four neighbours counts
        positions = get_vision_position_ids(grid_thw, self.patches.merge)
        device = self.model.device
        return _PictureShape(
            grid_thw.repeat(pictures, 1).to(device),
            indices[:, used].repeat(pictures, 1).to(device),
            weights[:, used].repeat(pictures, 1).to(device),
            positions.repeat(pictures, 1).to(device),
            torch.tensor([0, pictures * rows * columns], dtype=torch.int32, device=device),
        )
