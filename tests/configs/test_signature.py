"""Digests that must not change between processes, machines and Python versions."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from configs import presets
from configs.environment import CameraSpec
from configs.model import BaseModelSpec, OftSpec
from configs.signature import canonical_json, digest, prefix_key, schema_signature

BASE = presets.base_model("tiny-qwen3-vl")
MODULE = OftSpec(horizon=2, action_width=4, state_width=25, hidden_width=256, proprioception="head")
TOP, WRIST = (CameraSpec(name=name, height=64, width=64) for name in ("top", "wrist"))


def signature(**changes: object) -> str:
    given = {"base": BASE, "action_module": MODULE, "cameras": (TOP, WRIST), "light_visuals": False} | changes
    return schema_signature(given.pop("base"), given.pop("action_module"), given.pop("cameras"), **given)  # type: ignore[arg-type]


def test_canonical_json_is_one_text_for_equal_values() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5]}'
    assert digest({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_another_process_with_another_hash_seed_gives_the_same_signature() -> None:
    code = "from tests.configs.test_signature import signature; import json; print(json.dumps(signature()))"
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert json.loads(found.stdout) == signature()


def test_the_signature_is_this_one_on_every_machine_and_python() -> None:
    """Written down: partitions, checkpoints and adapters carry it, so a change of it turns all stored ones away."""
    base = BaseModelSpec(
        name="base",
        family="qwen3-vl",
        source="models/base",
        dtype="float32",
        hidden_width=128,
        num_layers=2,
        num_key_value_heads=2,
        num_attention_heads=4,
        head_width=32,
        mlp_width=256,
        rope_theta=10000.0,
        num_action_tokens=4,
        image_height=64,
        image_width=64,
    )
    assert signature(base=base) == "648a1fe82943cdee97599d2920d0a9449050804e680f0faa0c9417e9b68b9ac0"


def test_cameras_are_bound_by_name_not_by_order() -> None:
    assert signature(cameras=(WRIST, TOP)) == signature()


@pytest.mark.parametrize(
    "changes",
    [
        {"cameras": (TOP,)},
        {"cameras": (TOP, WRIST.model_copy(update={"height": 32}))},
        {"action_module": MODULE.model_copy(update={"horizon": 3})},
        {"action_module": MODULE.model_copy(update={"proprioception": "prompt"})},
        {"base": BASE.model_copy(update={"dtype": "bfloat16"})},
        {"base": BASE.model_copy(update={"num_action_tokens": 8})},
        {"light_visuals": True},
        {"turned_cameras": ("wrist",)},
    ],
    ids=str,
)
def test_every_part_of_the_interface_is_in_the_signature(changes: dict[str, object]) -> None:
    assert signature(**changes) != signature()


def test_turned_cameras_are_told_apart_by_name_and_not_by_order_and_none_changes_nothing() -> None:
    both = signature(turned_cameras=("wrist", "top"))
    assert both == signature(turned_cameras=("top", "wrist"))
    assert len({signature(), both, signature(turned_cameras=("top",)), signature(turned_cameras=("wrist",))}) == 4
    assert signature(turned_cameras=()) == signature()


def test_requests_share_a_prefix_key_whatever_their_cameras_and_widths() -> None:
    """It knows the base and the length bucket; not where the base runs."""
    assert prefix_key(BASE, 48) == prefix_key(BASE.model_copy(update={"device": "cuda"}), 48)
    assert (
        len({prefix_key(BASE, 48), prefix_key(BASE, 64), prefix_key(BASE.model_copy(update={"source": "x"}), 48)}) == 3
    )
