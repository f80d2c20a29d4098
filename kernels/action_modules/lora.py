"""A low-rank adapter inside the base's language layers, with an OFT-style head on what comes out of them.

Source: LoRA (Hu et al. 2021) as PEFT has it, trained together with a head as OpenVLA-OFT's fine-tuning does. The
adapter works where the base is run, see `kernels.lora`; here are its parameters and the head.
"""

from __future__ import annotations

import torch

from configs.model import BaseModelSpec, LoraSpec
from kernels.action_modules.oft import OftModule
from kernels.lora import LoraWeights


class LoraModule(OftModule):
    """An OFT-style head whose features come from a base that the tenant has adapted.

    Args:
        spec: of adapter and head.
        base: that it adapts.
        generator: draws the initial parameters, the head's before the adapter's.
    """

    def __init__(self, spec: LoraSpec, base: BaseModelSpec, generator: torch.Generator) -> None:
        super().__init__(spec, base.hidden_width, base.num_action_tokens, generator)
        self.adapter = LoraWeights(base, spec.rank, spec.alpha, spec.target_modules, generator)

    @classmethod
    def build(cls, spec: LoraSpec, base: BaseModelSpec, seed: int) -> LoraModule:  # type: ignore[override]
        """The registry's signature."""
        return cls(spec, base, torch.Generator().manual_seed(seed))
