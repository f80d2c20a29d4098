"""The shared, frozen base model and what of it is visible to action modules."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from configs.spec import ChoiceInForms, Name, Spec


class BaseModelSpec(Spec):
    """A vision-language backbone that stays resident and frozen, shared by all tenants that name it."""

    name: Name = Field(description="Name under which workloads ask for this base model.")
    family: Literal["qwen3-vl", "paligemma"] = Field(
        description="Which of transformers' model classes it is loaded as."
    )
    source: str = Field(
        description="Hub id, absolute folder, folder relative to the project's root, or random:NAME for random weights."
    )
    revision: str | None = Field(default=None, description="Hub revision; None for a local folder.")
    dtype: Literal["float32", "bfloat16"] = Field(description="Precision of the resident weights.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the resident weights live.")
    feature_tap: Literal["last_after_norm", "last_before_norm"] = Field(
        default="last_after_norm",
        description="Which hidden states leave the base: the last layer's, after or before the final norm.",
    )
    hidden_width: int = Field(gt=0, description="Width D of a hidden state; must equal the checkpoint's.")
    num_layers: int = Field(gt=0, description="Layers of the language model; must equal the checkpoint's.")
    num_key_value_heads: int = Field(gt=0, description="Key/value heads of a layer; must equal the checkpoint's.")
    num_attention_heads: int = Field(gt=0, description="Query heads of a layer; must equal the checkpoint's.")
    head_width: int = Field(gt=0, description="Width of one attention head; must equal the checkpoint's.")
    mlp_width: int = Field(gt=0, description="Inner width of a layer's MLP; must equal the checkpoint's.")
    rope_theta: float = Field(gt=0, description="Base of the rotary frequencies; must equal the checkpoint's.")
    num_action_tokens: int = Field(gt=0, le=64, description="N action tokens appended to each prompt.")
    image_height: int = Field(gt=0, multiple_of=2, description="Canonical camera height in pixels.")
    image_width: int = Field(gt=0, multiple_of=2, description="Canonical camera width in pixels.")
    max_cameras: int = Field(default=4, gt=0, description="Most cameras one observation may have.")
    length_bucket: int = Field(default=16, gt=0, description="Token sequences are padded to a multiple of this.")
    max_length: int = Field(default=512, gt=0, description="Longest padded token sequence.")


Part = Literal["action_tokens", "tokens", "cache"]
"""What an action module may read of a base's forward; see `kernels.features.VLAFeature`."""


class _ModuleSpec(Spec):
    """What every action module declares.

    Attributes:
        inside_base: whether parameters of it lie inside the base, so that features change with each of its updates.
        not_decoding: fields that decoding from given features does not depend on: initial values and what training
            draws, what lies inside the base.
    """

    inside_base: ClassVar[bool] = False
    not_decoding: ClassVar[frozenset[str]] = frozenset()

    horizon: int = Field(gt=0, le=64, description="H, actions in a chunk.")
    action_width: int = Field(gt=0, description="A, width of one action; must equal the environment's or dataset's.")
    state_width: int = Field(gt=0, description="S, width of proprioception; must equal the environment's or dataset's.")
    proprioception: Literal["head", "prompt", "none"] = Field(
        description="Where normalised proprioception enters: the head, the prompt as text bins, or nowhere."
    )

    @property
    @abstractmethod
    def reads(self) -> frozenset[Part]:
        """Parts of the base's features that it decodes from; the forward computes them for it."""

    @property
    @abstractmethod
    def trace(self) -> tuple[str, ...]:
        """What of a decision has to be kept for scoring it later: fields of a rollout's partition.

        Empty where the module gives no log-probabilities and values, so that it does not learn by RL.
        """

    @property
    def learns_by_rl(self) -> bool:
        """Whether it gives log-probabilities and values."""
        return bool(self.trace)

    @property
    def learns_deviation(self) -> bool:
        """Whether parameters decide how widely it acts about its mean, so that an entropy bonus has a gradient."""
        return self.learns_by_rl

    @property
    def architecture(self) -> str:
        """All that decides how a chunk is decoded, parameters apart; modules of one on one base decode together."""
        return self.model_dump_json(exclude=set(self.not_decoding))


class _OftHeadSpec(_ModuleSpec):
    """An OFT-style head's own fields; `hidden_width` by default that of a small one."""

    not_decoding: ClassVar[frozenset[str]] = frozenset({"initial_log_std", "final_layer_scale"})

    hidden_width: int = Field(default=256, gt=0, description="Width of the MLP.")
    residual_blocks: int = Field(default=2, ge=0, description="Residual blocks of the MLP.")
    initial_log_std: float = Field(default=-0.7, ge=-5, le=2, description="RL: initial state-independent log-std.")
    final_layer_scale: float = Field(
        default=1.0, gt=0, description="Factor on the initial last layer; small values start RL near zero actions."
    )

    @property
    def reads(self) -> frozenset[Part]:
        """Its N action tokens."""
        return frozenset({"action_tokens"})

    @property
    def trace(self) -> tuple[str, ...]:
        """The action, of a Gaussian."""
        return ("action",)


class OftSpec(_OftHeadSpec):
    """OFT-style head: hidden states at N action tokens, an MLP with residual blocks, a chunk of actions.

    Defaults are those published (StarVLA's QwenOFT on Qwen3-VL-4B: two blocks, twice as wide as the base).
    """

    kind: Literal["oft"] = "oft"
    hidden_width: int = Field(default=5120, gt=0, description="Width of the MLP; published is twice the base's.")


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _distinct(targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
    """In the order of `LoraTarget`, since the schema signature tells orders apart and the adapter does not."""
    if len(set(targets)) < len(targets):
        raise ValueError(f"got {list(targets)}; possible: each name once; remove what is there twice")
    return tuple(name for name in get_args(LoraTarget) if name in targets)


class LoraSpec(_OftHeadSpec):
    """Low-rank adapter (LoRA, PEFT's form) inside the base's language layers, read by a small OFT-style head.

    Rank, alpha and targets by default as OpenVLA's and OpenVLA-OFT's fine-tuning has them (32, 16, all linears;
    openpi has 16 and 16 in attention and MLP); the head is a small one, and dropout is not offered.
    """

    inside_base: ClassVar[bool] = True
    not_decoding: ClassVar[frozenset[str]] = _OftHeadSpec.not_decoding | {"rank", "alpha", "target_modules"}

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=32, gt=0, le=256, description="r, the width between the two factors.")
    alpha: float = Field(default=16.0, gt=0, description="What the adapter adds is multiplied by alpha / rank.")
    target_modules: Annotated[tuple[LoraTarget, ...], AfterValidator(_distinct)] = Field(
        default=get_args(LoraTarget),
        min_length=1,
        description="Linears that get an adapter, in every language layer.",
    )


class _FlowPolicySpec(Spec):
    """The value head that every stochastic flow policy has: an MLP on the base's N action tokens and the state."""

    learned_deviation: ClassVar[bool]
    value_width: int = Field(default=256, gt=0, description="Width of the value head's MLP.")
    value_blocks: int = Field(default=2, ge=0, description="Its residual blocks.")


class FlowSdeSpec(_FlowPolicySpec):
    """One denoising step a chunk, chosen at random, is stochastic, with the flow's marginals (π_RL, Flow-GRPO)."""

    learned_deviation: ClassVar[bool] = False
    kind: Literal["flow_sde"] = "flow_sde"
    noise_level: float = Field(
        default=0.5, gt=0, le=4, description="a of the deviation a · √(t / (1 − t)), t from 1 (noise) to 0 (action)."
    )


class FlowNoiseSpec(_FlowPolicySpec):
    """Every denoising step is stochastic, with a learned deviation (π_RL)."""

    learned_deviation: ClassVar[bool] = True
    kind: Literal["flow_noise"] = "flow_noise"
    least_deviation: float = Field(default=0.05, gt=0, description="Of one step, in normalised action units.")
    most_deviation: float = Field(default=0.3, gt=0, description="Likewise; the learned one lies between.")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.most_deviation <= self.least_deviation:
            raise ValueError(
                f"got most_deviation {self.most_deviation} with least_deviation {self.least_deviation}; "
                "possible: more than that; change one"
            )
        return self


FlowPolicySpec = Annotated[FlowSdeSpec | FlowNoiseSpec, Field(discriminator="kind")]


class _FlowModuleSpec(_ModuleSpec):
    """What modules that denoise a chunk share."""

    denoising_part: ClassVar[Part]
    denoising_steps: int = Field(default=4, gt=0, le=64, description="K, Euler steps from noise to a chunk.")
    policy: FlowPolicySpec | None = Field(
        default=None, description="How it acts at random and is scored, for RL; None: supervised fine-tuning alone."
    )

    @property
    def reads(self) -> frozenset[Part]:
        """What it denoises from, and the action tokens for its value head."""
        own = frozenset({self.denoising_part})
        return own if self.policy is None else own | {"action_tokens"}

    @property
    def trace(self) -> tuple[str, ...]:
        """The stored part of the denoising chain, and where one step is stochastic, which."""
        if self.policy is None:
            return ()
        return ("chain", "denoising_step") if self.policy.kind == "flow_sde" else ("chain",)

    @property
    def learns_deviation(self) -> bool:
        """Of Flow-Noise alone: the deviation of Flow-SDE is a function of the denoising step."""
        return self.policy is not None and self.policy.learned_deviation


class Gr00tSpec(_FlowModuleSpec):
    """GR00T-style head: a diffusion transformer denoises a chunk by flow matching, attending to all prefix tokens.

    Defaults are those published (StarVLA's QwenGR00T: DiT-B, after GR00T N1.5).
    """

    denoising_part: ClassVar[Part] = "tokens"
    not_decoding: ClassVar[frozenset[str]] = frozenset({"beta_alpha", "beta_beta", "time_scale", "repeated_steps"})

    kind: Literal["gr00t"] = "gr00t"
    hidden_width: int = Field(
        default=1024, gt=0, description="Width inside state encoder and action decoder, and between."
    )
    layers: int = Field(default=16, gt=0, description="Blocks; even ones attend to the prefix, odd ones to themselves.")
    heads: int = Field(default=12, gt=0, description="Attention heads.")
    head_width: int = Field(
        default=64, gt=0, multiple_of=16, description="Width of one head; heads × this is the blocks' width."
    )
    future_tokens: int = Field(default=32, ge=0, description="Learned tokens beside state and actions.")
    time_buckets: int = Field(default=1000, gt=0, description="Times are rounded down to so many before embedding.")
    beta_alpha: float = Field(default=1.5, gt=0, description="Training times: (1 − Beta(alpha, beta)) · time_scale.")
    beta_beta: float = Field(default=1.0, gt=0)
    time_scale: float = Field(default=0.999, gt=0, le=1, description="Largest training time; 0 is noise, 1 the action.")
    repeated_steps: int = Field(default=8, gt=0, le=64, description="Noises and times drawn a sample and step.")
    embodiments: int = Field(default=1, gt=0, le=256, description="Sets of state and action layers, one a robot.")
    embodiment: int = Field(default=0, ge=0, description="Which of them this tenant uses.")

    @model_validator(mode="after")
    def _embodiment_exists(self) -> Self:
        if self.embodiment >= self.embodiments:
            raise ValueError(
                f"got embodiment {self.embodiment} with embodiments {self.embodiments}; "
                f"possible: 0 … {self.embodiments - 1}; change one"
            )
        return self


class PiSpec(_FlowModuleSpec):
    """π-style head: an action expert goes on from the base's keys and values, layer by layer.

    Defaults are those published (openpi: gemma_300m action expert, 10 Euler steps).
    """

    denoising_part: ClassVar[Part] = "cache"
    not_decoding: ClassVar[frozenset[str]] = frozenset({"beta_alpha", "beta_beta"})

    kind: Literal["pi"] = "pi"
    version: Literal["pi0", "pi05"] = Field(
        default="pi0",
        description="pi0: state token, time by an MLP; pi05: time by adaptive norms, state in the prompt.",
    )
    hidden_width: int = Field(default=1024, gt=0, multiple_of=2, description="Width of the expert.")
    mlp_width: int = Field(default=4096, gt=0, description="Width of the expert's MLPs.")
    heads: int = Field(default=8, gt=0, description="Query heads; a multiple of the base's key/value heads.")
    denoising_steps: int = Field(default=10, gt=0, le=64, description="K, Euler steps from noise to a chunk.")
    beta_alpha: float = Field(default=1.5, gt=0, description="Training times: Beta(alpha, beta), scaled.")
    beta_beta: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _state_where_the_version_has_it(self) -> Self:
        where = "head" if self.version == "pi0" else "prompt"
        if self.proprioception not in (where, "none"):
            raise ValueError(
                f"proprioception: got {self.proprioception!r}; possible: {where}, none for {self.version}; choose one"
            )
        return self


MODULE_SPECS: dict[str, type[_ModuleSpec]] = {"oft": OftSpec, "gr00t": Gr00tSpec, "pi": PiSpec, "lora": LoraSpec}
"""Specs by kind; the classes that are built from them are in `kernels.action_modules.MODULES`."""

ActionModuleSpec = Annotated[OftSpec | Gr00tSpec | PiSpec | LoraSpec, Field(discriminator="kind"), ChoiceInForms]


class TrainableSpec(Spec):
    """Which parameters a tenant trains; the base is never among them here."""

    parameterisation: Literal["action_module"] = Field(
        default="action_module", description="Train the tenant's action module; the base stays frozen."
    )
