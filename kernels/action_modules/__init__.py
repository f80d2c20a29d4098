"""Action modules by kind: one dict from the declared literal to the class that is built from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.errors import SpecError, refusal
from configs.model import ActionModuleSpec, BaseModelSpec
from kernels.action_modules.base import (
    ActionModule,
    Decision,
    Evaluation,
    Noise,
    Regression,
    Trace,
    export_parameters,
    load_parameters,
)
from kernels.action_modules.gr00t import Gr00tModule
from kernels.action_modules.lora import LoraModule
from kernels.action_modules.oft import OftModule
from kernels.action_modules.pi import PiModule

__all__ = [
    "MODULES",
    "ActionModule",
    "Decision",
    "Evaluation",
    "Gr00tModule",
    "LoraModule",
    "Noise",
    "OftModule",
    "PiModule",
    "Regression",
    "Trace",
    "build",
    "export_parameters",
    "load_parameters",
]

MODULES: dict[str, Callable[[Any, BaseModelSpec, int], ActionModule]] = {  # each takes the spec of its kind
    "gr00t": Gr00tModule.build,
    "oft": OftModule.build,
    "pi": PiModule.build,
    "lora": LoraModule.build,
}


def build(spec: ActionModuleSpec, base: BaseModelSpec, seed: int) -> ActionModule:
    """A new module for that base, on its device, with initial parameters drawn from `seed` (the same on all devices).

    Raises:
        SpecError: if no module of that kind is registered.
    """
    if spec.kind not in MODULES:
        raise SpecError(refusal("action_module.kind", spec.kind, ", ".join(sorted(MODULES)), "choose one"))
    return MODULES[spec.kind](spec, base, seed).to(base.device)
