"""The random base in the repository is the one its command makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from configs import presets
from configs.errors import Conflict
from configs.home import PROJECT_ROOT
from services import tiny_base


def test_rebuilding_gives_the_committed_base(tmp_path: Path) -> None:
    committed = PROJECT_ROOT / presets.base_model("tiny-paligemma").source
    report = json.loads((committed / tiny_base.REPORT).read_text())
    tiny_base.write(report["base_model"], tmp_path / "base", report["seed"])
    names = sorted(file.name for file in committed.iterdir())
    assert sorted(file.name for file in (tmp_path / "base").iterdir()) == names
    theirs, ours = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (committed, tmp_path / "base")
    )
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(theirs[name], ours[name])] == []
    for name in ("tokenizer.json", "preprocessor_config.json"):
        assert (committed / name).read_text() == (tmp_path / "base" / name).read_text()


def test_it_replaces_its_own_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    for seed in (1, 2):
        tiny_base.write("tiny-paligemma", folder, seed)
    assert json.loads((folder / tiny_base.REPORT).read_text()) == {"base_model": "tiny-paligemma", "seed": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["base"]
    (folder / tiny_base.REPORT).unlink()
    with pytest.raises(Conflict, match=r"out_folder: got .*base.* possible: a new folder or an earlier random base"):
        tiny_base.write("tiny-paligemma", folder, 3)
