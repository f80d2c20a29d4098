"""What `--size` means: base models and action modules that benchmarks run with.

`tiny` is a CPU's: each benchmark says itself what it runs. `full` is for a GPU: bases of published size in bfloat16
with random weights, made on the device without a download, and modules at their published default sizes. `mini` takes
the same way as `full` with everything small, to try on a CPU what a GPU will run; its figures mean nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

from configs import presets
from configs.errors import SpecError, refusal
from configs.model import ActionModuleSpec, BaseModelSpec, Gr00tSpec, LoraSpec, OftSpec, PiSpec
from kernels.random_bases import PREFIX

SIZES = ("tiny", "mini", "full")
DEVICES = ("cpu", "cuda")
OPTIONS: list[tuple[str, Any, str]] = [
    ("size", SIZES, "of bases and modules"),
    ("device", DEVICES, "where base models and modules are"),
]
"""Command-line options of the benchmarks that run at several sizes."""

_MINI: dict[str, dict[str, Any]] = {
    "qwen3-vl-4b": {
        "name": "qwen3-vl-mini",
        "num_layers": 4,
        "num_key_value_heads": 2,
        "image_height": 64,
        "image_width": 64,
    },
    "paligemma-2b": {"name": "paligemma-mini", "num_layers": 3, "image_height": 56, "image_width": 56},
}
_MINI_WIDTHS: dict[str, Any] = {
    "hidden_width": 64,
    "num_attention_heads": 4,
    "head_width": 32,
    "mlp_width": 128,
    "length_bucket": 16,
}


def check(arguments: argparse.Namespace) -> None:
    """Hold size and device against one another.

    Raises:
        SpecError: for full size on a CPU.
    """
    if arguments.size == "full" and arguments.device == "cpu":
        remedy = "pass --device cuda, or --size mini to try it without one"
        raise SpecError(refusal("--device", "cpu", "cuda with --size full", remedy))


def random_bases(size: str, device: str) -> dict[str, BaseModelSpec]:
    """{name: base} of `full` or `mini`, one a family."""
    found = {}
    for preset, changes in _MINI.items():
        spec = presets.base_model(preset)
        if size == "mini":
            spec = spec.model_copy(update={**changes, **_MINI_WIDTHS})
        found[spec.name] = spec.model_copy(update={"source": PREFIX + spec.name, "device": device})
    return found


def modules(size: str, **widths: Any) -> dict[str, ActionModuleSpec]:
    """{kind: module} of `full` (default sizes) or `mini`, for these `horizon`, `action_width` and `state_width`."""
    widths["proprioception"] = "head"
    if size == "full":
        return {
            "oft": OftSpec(**widths),
            "gr00t": Gr00tSpec(**widths),
            "pi": PiSpec(**widths),
            "lora": LoraSpec(**widths),
        }
    return {
        "oft": OftSpec(hidden_width=32, **widths),
        "gr00t": Gr00tSpec(hidden_width=32, layers=2, heads=2, head_width=32, future_tokens=4, **widths),
        "pi": PiSpec(hidden_width=32, mlp_width=64, heads=4, **widths),
        "lora": LoraSpec(hidden_width=32, rank=4, **widths),
    }
