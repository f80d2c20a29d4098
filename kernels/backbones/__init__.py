"""Base model families: one dict from the declared literal to the class that loads it."""

from __future__ import annotations

from pathlib import Path

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec
from kernels import random_bases
from kernels.backbones.base import ACTION_TOKENS, Backbone
from kernels.backbones.paligemma import PaliGemmaBackbone
from kernels.backbones.qwen3_vl import Qwen3VlBackbone

__all__ = ["ACTION_TOKENS", "FAMILIES", "Backbone", "PaliGemmaBackbone", "Qwen3VlBackbone", "load"]

FAMILIES: dict[str, type[Backbone]] = {
    "paligemma": PaliGemmaBackbone,
    "qwen3-vl": Qwen3VlBackbone,
}


def load(spec: BaseModelSpec, root: Path) -> Backbone:
    """The base model of a preset, from the hub, an absolute folder, or a folder relative to `root`; or random weights.

    Raises:
        SpecError: if there is no such checkpoint or family, it does not fit the preset, or its device is not here.
    """
    if spec.family not in FAMILIES:
        raise SpecError(refusal("family", spec.family, ", ".join(sorted(FAMILIES)), "choose one"))
    if spec.source.startswith(random_bases.PREFIX):
        return FAMILIES[spec.family].random(spec, seed=0)
    return FAMILIES[spec.family].from_pretrained(spec, root)
