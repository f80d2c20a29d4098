"""Base models resident in a model service's worker: loaded once, frozen, shared by all its tenants."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from configs.home import PROJECT_ROOT
from configs.model import BaseModelSpec
from kernels import backbones
from kernels.backbones import Backbone


@dataclass(frozen=True, eq=False)
class ResidentBase:
    """One base model in memory."""

    spec: BaseModelSpec
    backbone: Backbone
    num_bytes: int


def load_base_models(specs: Sequence[BaseModelSpec]) -> dict[str, ResidentBase]:
    """Load each base once; {name: resident base}."""
    bases = {}
    for spec in specs:
        backbone = backbones.load(spec, PROJECT_ROOT)
        bases[spec.name] = ResidentBase(spec, backbone, backbone.num_bytes)
    # What is loaded by now stays for good: the garbage collector need not walk through it in the middle of a forward.
    gc.collect()
    gc.freeze()
    return bases
