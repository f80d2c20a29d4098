"""What PEFT calls a low-rank adapter's tensors and settings, and what of them fits a base; arrays only, no torch.

Source: PEFT's `LoraConfig` and the names that `save_pretrained` gives. Own names are those of `kernels.lora`, for
instance `language_model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec, LoraTarget

LANGUAGE_MODEL = "language_model"
"""Where transformers' vision-language models keep their language layers; the first word of an adapter's names."""

_PREFIX = "base_model.model."
# A causal model around the base puts "model." before its paths.
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(?:model\.)?({LANGUAGE_MODEL}\.layers\.\d+\.\w+\.(\w+)\.lora_[AB]\.weight)")
_MOST = 1e6  # of rank and alpha
_READ = {"peft_type", "r", "lora_alpha", "bias", "init_lora_weights"}
# Whatever these say, the adapter's outputs are the same: where it is from, and how it was trained or selected.
# What was trained on is told by the tensors themselves.
_NO_MATTER = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}


def adapted_linears(base: BaseModelSpec, targets: Collection[LoraTarget]) -> dict[str, tuple[int, int]]:
    """{path of a linear in the base: (inputs, outputs)}, layer by layer."""
    queries, keys = base.num_attention_heads * base.head_width, base.num_key_value_heads * base.head_width
    width, inner = base.hidden_width, base.mlp_width
    shapes: dict[LoraTarget, tuple[str, int, int]] = {
        "q_proj": ("self_attn", width, queries),
        "k_proj": ("self_attn", width, keys),
        "v_proj": ("self_attn", width, keys),
        "o_proj": ("self_attn", queries, width),
        "gate_proj": ("mlp", width, inner),
        "up_proj": ("mlp", width, inner),
        "down_proj": ("mlp", inner, width),
    }
    return {
        f"{LANGUAGE_MODEL}.layers.{layer}.{part}.{name}": (inputs, outputs)
        for layer in range(base.num_layers)
        for name, (part, inputs, outputs) in shapes.items()
        if name in targets
    }


def adapter_shapes(base: BaseModelSpec, rank: int, targets: Collection[LoraTarget]) -> dict[str, tuple[int, ...]]:
    """{own name: shape} of A [r, inputs] and B [outputs, r] of each targeted linear."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, (inputs, outputs) in adapted_linears(base, targets).items():
        shapes |= {f"{path}.lora_A.weight": (rank, inputs), f"{path}.lora_B.weight": (outputs, rank)}
    return shapes


def exported(
    parameters: Mapping[str, NDArray[Any]], base: BaseModelSpec, *, rank: int, alpha: float
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Tensors by PEFT's names and the fields of its `LoraConfig`, for transformers' model of the base.

    Args:
        parameters: A and B by own names.
        base: that they adapt.
        rank: r.
        alpha: the scaling is alpha / r.
    """
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base.source,
        "revision": base.revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        # Whole paths: a bare name would be found in some vision towers too.
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in parameters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    return {_PREFIX + name: array for name, array in parameters.items()}, config


def peft_settings(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> tuple[int, float, tuple[LoraTarget, ...]]:
    """Rank, alpha and targets of an adapter that PEFT wrote; `LoraSpec`'s fields of those names fit it.

    Raises:
        SpecError: if it uses what is not supported here, so that its outputs would be other ones.
    """
    if config.get("peft_type") != "LORA":
        raise SpecError(refusal("adapter_config.peft_type", config.get("peft_type"), "'LORA'", "train a LoRA adapter"))
    if config.get("bias", "none") != "none":
        raise SpecError(refusal("adapter_config.bias", config["bias"], "'none'", "train it without biases"))
    start = config.get("init_lora_weights", True)
    if start not in (True, False, "gaussian", "orthogonal"):
        possible = "true, false, 'gaussian' or 'orthogonal', which leave the base's weights as they are"
        raise SpecError(refusal("adapter_config.init_lora_weights", start, possible, "convert it to plain LoRA first"))
    for field in sorted(config.keys() - _READ - _NO_MATTER):
        if config[field]:  # whatever a later PEFT adds is off where it is None, False or empty
            raise SpecError(
                refusal(f"adapter_config.{field}", config[field], "off or empty", "train plain LoRA of one rank")
            )
    for field, kinds, possible in (("r", int, "a whole number"), ("lora_alpha", int | float, "a number")):
        given = config.get(field)
        # JSON of Python may hold NaN, infinity and numbers of any length; True is an int.
        if isinstance(given, bool) or not isinstance(given, kinds) or not 0 < given <= _MOST:
            raise SpecError(
                refusal(f"adapter_config.{field}", given, f"{possible} up to {_MOST:g}", "save it with PEFT")
            )
    targets = set()
    for name in sorted(tensors):
        found = _TENSOR.fullmatch(name)
        if found is None or found[2] not in get_args(LoraTarget):
            possible = f"{_PREFIX}{LANGUAGE_MODEL}.layers.N.….lora_A.weight of {', '.join(get_args(LoraTarget))}"
            raise SpecError(refusal("adapter_model", name, possible, "adapt linears of the language layers only"))
        targets.add(cast(LoraTarget, found[2]))
    return int(config["r"]), float(config["lora_alpha"]), tuple(t for t in get_args(LoraTarget) if t in targets)


def fitted(
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rank: int,
    alpha: float,
    targets: Collection[LoraTarget],
) -> dict[str, NDArray[np.float32]]:
    """An adapter that PEFT wrote, by own names and in float32.

    Args:
        tensors: by PEFT's names.
        config: fields of its `LoraConfig`.
        shapes: by own names, what is wanted; see `adapter_shapes`.
        rank: as it was declared here.
        alpha: likewise.
        targets: likewise.

    Raises:
        SpecError: if it uses what is not supported here, rank, alpha, targets, layers or shapes are not those that
            are wanted, or a number is not finite.
    """
    of_file = peft_settings(tensors, config)
    wanted = [name for name in get_args(LoraTarget) if name in targets]
    for field, given, own in (
        ("rank", of_file[0], rank),
        ("alpha", of_file[1], alpha),
        ("target_modules", list(of_file[2]), wanted),
    ):
        if given != own:
            raise SpecError(refusal(f"action_module.{field}", own, f"{given!r}, the file's", "declare what it has"))
    named: dict[str, NDArray[Any]] = {}
    for name, value in tensors.items():
        own_name = cast(re.Match[str], _TENSOR.fullmatch(name))[1]
        if own_name in named:  # with and without "model.": which of the two would count is not for us to choose
            raise SpecError(refusal("adapter_model", name, "each linear once", "save the adapter again"))
        named[own_name] = value
    for name in sorted(shapes.keys() | named.keys()):
        shape = tuple(named[name].shape) if name in named else None
        if shape != shapes.get(name):
            possible = f"shape {shapes.get(name)}"
            raise SpecError(refusal(f"adapter_model.{name}", shape, possible, "use the base that it was made for"))
        if not np.isfinite(named[name]).all():
            raise SpecError(refusal(f"adapter_model.{name}", "NaN or infinity", "finite numbers", "train it again"))
    return {name: np.ascontiguousarray(named[name], dtype=np.float32) for name in shapes}
