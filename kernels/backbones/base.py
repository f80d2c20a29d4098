"""What every base model family is: observations to prefixes, prefixes to features.

A new family is one file with a subclass, one line in `kernels.backbones.FAMILIES`, and passes
tests/kernels/test_backbones.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from configs.errors import SpecError, TenantFault, refusal
from configs.model import BaseModelSpec, Part
from kernels.backbones.taps import FinalNormTap
from kernels.features import PrefixBatch, PrefixCache, VLAFeature
from kernels.lora import Adapters, GroupedLora
from kernels.pictures import Pictures
from kernels.prompts import PromptBuilder

ACTION_TOKENS: frozenset[Part] = frozenset({"action_tokens"})


class Backbone(ABC):
    """One base model in memory, frozen, in evaluation mode, with its tokenizer and image processor.

    Calls change no state but caches of shapes and prompts, so threads may share it. Its parameters are frozen;
    `pretraining` alone unfreezes a base, before it is served.

    Args:
        spec: the base model's preset.
        model: transformers' model without language-model head.
        tokenizer: of the same checkpoint.
        processor: the same checkpoint's image processor.

    Attributes:
        model_class, processor_class: what transformers loads a checkpoint of the family as.
        pictures, prompts: how observations enter; a subclass makes them.
        lora: what adds tenants' adapters inside the language layers.

    Raises:
        SpecError: if the checkpoint does not fit the preset.
    """

    model_class: ClassVar[Any]
    processor_class: ClassVar[Any]
    pictures: Pictures
    prompts: PromptBuilder

    def __init__(self, spec: BaseModelSpec, model: Any, tokenizer: PreTrainedTokenizerBase, processor: Any) -> None:
        self.spec = spec
        self.model: Any = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.processor = processor
        self._check_language_model()
        self._tap = FinalNormTap(self.model.language_model.norm, spec.feature_tap)
        self.lora = GroupedLora(self.model.language_model)
        self.model.to(spec.device)

    @classmethod
    def from_pretrained(cls, spec: BaseModelSpec, root: Path) -> Self:
        """Load a checkpoint by hub id, absolute folder, or folder relative to `root` (the project's root).

        Raises:
            SpecError: if there is no such checkpoint, it lacks weights or does not fit the preset, or the preset's
                device is not here.
        """
        check_device(spec)
        folder = Path(spec.source) if Path(spec.source).is_absolute() else root / spec.source
        source = str(folder) if folder.is_dir() else spec.source
        transformers_logging.disable_progress_bar()  # a service's log is no terminal
        where: dict[str, Any] = {"revision": spec.revision} if spec.revision is not None else {}
        try:
            kind = PreTrainedConfig.get_config_dict(source, **where)[0].get("model_type")
            if kind not in (None, cls.model_class.config_class.model_type):
                # The library would build its default model, of any size, and wonder at the weights.
                remedy = f"correct preset {spec.name}"
                raise SpecError(refusal("family", spec.family, f"that of {kind}, the checkpoint's", remedy))
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
            processor = cls.processor_class.from_pretrained(source, **where)
            model, loading = cls.model_class.from_pretrained(
                source, dtype=getattr(torch, spec.dtype), output_loading_info=True, **where
            )
        except (OSError, ValueError) as error:
            raise unreadable(spec, error) from error
        if missing := sorted(loading["missing_keys"]):  # the library would leave them random
            possible = f"a checkpoint of family {spec.family} with all weights"
            found = f"{spec.source} without {missing[0]} and {len(missing) - 1} others"
            raise SpecError(refusal("source", found, possible, "correct the preset"))
        return cls(spec, model, tokenizer, processor)

    @classmethod
    def random(cls, spec: BaseModelSpec, seed: int) -> Self:
        """A base with random weights (the pictures mean nothing to it); the same for the same seed.

        A small one, unless the preset's source names a declared vision tower, see `kernels.random_bases`.

        Raises:
            SpecError: if it names another one, or the preset's device is not here.
        """
        check_device(spec)
        model, tokenizer, processor = cls.random_checkpoint(spec, seed)
        return cls(spec, model.model, tokenizer, processor)

    @classmethod
    @abstractmethod
    def random_checkpoint(cls, spec: BaseModelSpec, seed: int) -> tuple[Any, Any, Any]:
        """What the folder of a base with random weights holds: transformers' model, tokenizer, image processor.

        The model has its language-model head, as published ones do; without it it is the one of `random`.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum(t.numel() * t.element_size() for t in self.model.state_dict().values())

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
        pictures = np.stack([self.pictures.canonical(np.asarray(images[name]), name) for name in names], axis=1)
        pixels = self.pictures.patches(pictures.reshape(rows * len(names), *pictures.shape[2:]))
        texts = proprioception_text if proprioception_text is not None else [None] * rows
        prompts = [self.prompts.build(i, len(names), t) for i, t in zip(instructions, texts, strict=True)]
        length = self.prompts.bucket(max(len(p.ids) for p in prompts))
        ids = np.full((rows, length), self.prompts.pad_token_id, np.int64)
        positions = np.zeros((len(prompts[0].positions), rows, length), np.int64)
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

    def lengths(
        self, instructions: Sequence[str], cameras: int, proprioception_text: Sequence[str] | None = None
    ) -> list[int]:
        """The bucket of each row's prompt alone; `prepare` pads a batch to the longest.

        Raises:
            TenantFault: if a prompt is too long.
        """
        texts = proprioception_text if proprioception_text is not None else [None] * len(instructions)
        prompts = (self.prompts.build(i, cameras, t) for i, t in zip(instructions, texts, strict=True))
        return [self.prompts.bucket(len(prompt.ids)) for prompt in prompts]

    def _check_cameras(self, images: dict[str, Any], cameras: Sequence[str]) -> None:
        known = f"exactly {sorted(cameras)}"
        for name in sorted(set(images) - set(cameras)):
            raise TenantFault(refusal("images", name, known, "remove this camera or declare it"))
        for name in sorted(set(cameras) - set(images)):
            raise TenantFault(refusal("images", sorted(images), known, f"send camera {name!r} too"))
        if not 0 < len(set(cameras)) == len(cameras) <= self.spec.max_cameras:
            possible = f"1 to {self.spec.max_cameras} different names on base {self.spec.name!r}"
            raise TenantFault(refusal("cameras", list(cameras), possible, "declare such cameras"))

    def encode(
        self, prefix: PrefixBatch, parts: Collection[Part] = ACTION_TOKENS, adapters: Adapters = ()
    ) -> VLAFeature:
        """The wanted parts of a batch's features, without gradients; rows do not depend on their company.

        Args:
            prefix: B rows.
            parts: what of the forward is wanted.
            adapters: (rows, adapter) of tenants that change the language layers for their own rows; the other rows
                are the base's.

        Raises:
            SpecError: if the family takes no adapters, or one does not fit the base.
            Conflict: if rows overlap or are not there.
        """
        with torch.no_grad():
            return self.features(prefix, parts, adapters)

    def features(
        self, prefix: PrefixBatch, parts: Collection[Part] = ACTION_TOKENS, adapters: Adapters = ()
    ) -> VLAFeature:
        """As `encode`, in the caller's gradient mode."""
        with self._adapted(adapters, prefix.rows):
            hidden, cache = self._forward(prefix, with_cache="cache" in parts)
        found: dict[str, Any] = {}
        if "action_tokens" in parts:
            index = prefix.action_index.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
            found["action_tokens"] = hidden.gather(1, index).float()
        if "tokens" in parts:
            found["tokens"] = hidden.float()
        if "cache" in parts:
            found["cache"] = cache
        if set(parts) - ACTION_TOKENS:
            found["mask"] = prefix.mask.to(hidden.device)
        return VLAFeature(**found)

    def _adapted(self, adapters: Adapters, rows: int) -> AbstractContextManager[None]:
        if not adapters:
            return nullcontext()
        if self.lora is None:
            possible = f"modules that leave the base as it is, since family {self.spec.family!r} takes no adapters"
            raise SpecError(refusal("action_module.kind", "lora", possible, "choose another module or base"))
        return self.lora.applied(adapters, rows)

    @abstractmethod
    def _forward(self, prefix: PrefixBatch, *, with_cache: bool) -> tuple[Tensor, PrefixCache | None]:
        """Hidden states [B, L, D] at the tap, and the cache if it is wanted. Nothing is kept on the shared model."""

    def _check_language_model(self) -> None:
        """Hold what the checkpoint says of its language model against the preset.

        Raises:
            SpecError: for the first that differs.
        """
        text = self.model.config.text_config
        found = {
            "hidden_width": text.hidden_size,
            "num_layers": text.num_hidden_layers,
            "num_key_value_heads": text.num_key_value_heads,
            "num_attention_heads": text.num_attention_heads,
            "head_width": text.head_dim,
            "mlp_width": text.intermediate_size,
            "rope_theta": text.rope_parameters["rope_theta"],
        }
        for field, value in found.items():
            if getattr(self.spec, field) != value:
                remedy = f"correct preset {self.spec.name}"
                raise SpecError(refusal(field, getattr(self.spec, field), f"{value}, the checkpoint's", remedy))


def check_device(spec: BaseModelSpec) -> None:
    """Whether the preset's device is here.

    Raises:
        SpecError: otherwise.
    """
    if spec.device == "cuda" and not torch.cuda.is_available():
        remedy = "start a cluster whose base models are for the CPU, or install the driver and torch's CUDA build"
        raise SpecError(refusal("device", spec.device, "cpu, since torch sees no GPU here", remedy))


def unreadable(spec: BaseModelSpec, error: Exception) -> SpecError:
    """What a checkpoint that cannot be read says to a person."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    possible = "a hub id, or a folder with config.json, tokenizer.json and safetensors"
    return SpecError(refusal("source", spec.source, possible, f"correct the preset ({reason})"))
