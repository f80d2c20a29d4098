"""The shared, frozen base model and what of it is visible to action modules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.spec import Name, Spec


class BaseModelSpec(Spec):
    """A vision-language backbone that stays resident and frozen, shared by all tenants that name it."""

    name: Name = Field(description="Name under which workloads ask for this base model.")
    family: Literal["qwen3-vl"] = Field(description="Which of transformers' model classes it is loaded as.")
    source: str = Field(description="Hub id, absolute folder, or folder relative to the project's root.")
    revision: str | None = Field(default=None, description="Hub revision; None for a local folder.")
    dtype: Literal["float32", "bfloat16"] = Field(description="Precision of the resident weights.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the resident weights live.")
    feature_tap: Literal["last_after_norm"] = Field(
        default="last_after_norm", description="Which hidden states leave the base: last layer, after the final norm."
    )
    hidden_width: int = Field(gt=0, description="Width D of a hidden state; must equal the checkpoint's.")
    num_action_tokens: int = Field(gt=0, le=64, description="N action tokens appended to each prompt.")
    image_height: int = Field(gt=0, multiple_of=2, description="Canonical camera height in pixels.")
    image_width: int = Field(gt=0, multiple_of=2, description="Canonical camera width in pixels.")
    max_cameras: int = Field(default=4, gt=0, description="Most cameras one observation may have.")
    length_bucket: int = Field(default=16, gt=0, description="Token sequences are padded to a multiple of this.")
    max_length: int = Field(default=512, gt=0, description="Longest padded token sequence.")


class OftSpec(Spec):
    """OFT-style head: hidden states at N action tokens, an MLP with residual blocks, a chunk of actions."""

    kind: Literal["oft"] = "oft"
    horizon: int = Field(gt=0, le=64, description="H, actions in a chunk.")
    action_width: int = Field(gt=0, description="A, width of one action; must equal the environment's or dataset's.")
    state_width: int = Field(gt=0, description="S, width of proprioception; must equal the environment's or dataset's.")
    hidden_width: int = Field(default=256, gt=0, description="Width of the MLP.")
    residual_blocks: int = Field(default=2, ge=0, description="Residual blocks of the MLP.")
    proprioception: Literal["head", "prompt", "none"] = Field(
        description="Where normalised proprioception enters: the head, the prompt as text bins, or nowhere."
    )
    initial_log_std: float = Field(default=-0.7, ge=-5, le=2, description="RL: initial state-independent log-std.")
    final_layer_scale: float = Field(
        default=1.0, gt=0, description="Factor on the initial last layer; small values start RL near zero actions."
    )


ActionModuleSpec = OftSpec


class TrainableSpec(Spec):
    """Which parameters a tenant trains; the base is never among them here."""

    parameterisation: Literal["action_module"] = Field(
        default="action_module", description="Train the tenant's action module; the base stays frozen."
    )
