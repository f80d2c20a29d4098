"""A registered adapter as files: PEFT's, and beside them all else that the version holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from configs.backend import PolicyConfig
from configs.errors import Conflict, SpecError
from configs.home import PROJECT_ROOT
from kernels import action_modules, backbones
from kernels.backbones import Backbone
from services.adapter_export import export_peft
from storage.registry import ResolvedAdapter
from tests.services.policies import observation, policy


def registered(kind: str, seed: int = 0) -> ResolvedAdapter:
    """A version whose parameters are all random, as in the middle of a training."""
    config: PolicyConfig = policy("a", kind=kind)
    rng = np.random.default_rng(seed)
    built = action_modules.build(config.action_module, config.base_model, seed)
    params: dict[str, Any] = {
        name: rng.normal(0, 0.1, p.shape).astype(np.float32) for name, p in built.named_parameters()
    }
    manifest = {"policy": config.model_dump(mode="json"), "policy_version": 7}
    return ResolvedAdapter("a.sft", 3, params, manifest, {"job": "one"})


def tokens(backbone: Backbone, **adapters: Any) -> torch.Tensor:
    return backbone.encode(backbone.prepare(observation(5, 1), ["top"]), **adapters).action_tokens


def test_peft_loads_an_exported_version_and_gives_the_outputs_that_are_served(tmp_path: Path) -> None:
    found = registered("lora")
    export_peft(found, tmp_path / "out")
    config = policy("a", kind="lora")
    module = action_modules.build(config.action_module, config.base_model, 1)
    action_modules.load_parameters(module, found.params)
    ours, theirs = (backbones.load(config.base_model, PROJECT_ROOT) for _ in range(2))
    served = tokens(ours, adapters=[(slice(0, 5), module.adapter)])
    loaded = peft.PeftModel.from_pretrained(theirs.model, str(tmp_path / "out"))
    assert len([m for m in loaded.modules() if isinstance(m, peft.tuners.lora.Linear)]) == len(module.adapter.pairs)
    assert (served - tokens(theirs)).abs().max() <= 1e-6
    assert (served - tokens(ours)).abs().max() > 0.01  # so much does the adapter change


def test_nothing_of_a_version_is_lost(tmp_path: Path) -> None:
    """PEFT's tensors and the head's together are the parameters; the manifest tells what they are of."""
    found = registered("lora")
    export_peft(found, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    inside = load_file(tmp_path / "out" / "adapter_model.safetensors")
    back = {f"adapter.{name.removeprefix('base_model.model.')}": array for name, array in inside.items()}
    back |= load_file(tmp_path / "out" / "head.safetensors")
    assert back.keys() == found.params.keys()
    assert all(np.array_equal(array, found.params[name]) for name, array in back.items())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == {**found.manifest, "adapter": "models:/a.sft/3", "tags": {"job": "one"}}


def test_other_modules_and_folders_that_are_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        export_peft(registered("gr00t"), tmp_path / "out")
    assert str(refused.value) == (
        "adapter: got 'models:/a.sft/3 of kind gr00t'; possible: an adapter of kind lora: PEFT has no files for other "
        "modules; see `joynexus adapters`"
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(Conflict, match="adapter: got 'out'; possible: a name that is not taken"):
        export_peft(registered("lora"), tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
