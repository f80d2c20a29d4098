"""Adapters against PEFT itself: its files, its outputs, its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from configs import presets
from configs.algorithm import AdamSpec, SftSpec
from configs.errors import SpecError
from configs.model import LoraSpec, LoraTarget, OftSpec
from kernels import action_modules
from kernels.backbones import Backbone, PaliGemmaBackbone, Qwen3VlBackbone
from kernels.lora import LoraWeights, load_peft, to_peft
from kernels.peft_adapters import peft_settings
from kernels.updates import new_optimizer
from storage.peft_files import read_adapter, write_adapter
from tests.kernels.conftest import observation
from tests.kernels.whole_updates import sft_update

BASE = presets.base_model("tiny-qwen3-vl")
TARGETS: tuple[LoraTarget, ...] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def filled(weights: torch.nn.Module, seed: int) -> None:
    """Random B, as in the middle of a training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in weights.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.1, generator=generator)


def adapter(seed: int = 0, rank: int = 4, alpha: float = 6.0) -> LoraWeights:
    weights = LoraWeights(BASE, rank, alpha, TARGETS, torch.Generator().manual_seed(seed))
    filled(weights, 100 + seed)
    return weights


def second_base() -> Qwen3VlBackbone:
    """The shared base once more, for PEFT to put its own layers into."""
    return Qwen3VlBackbone.random(BASE, seed=0)


def tokens(backbone: Backbone, weights: LoraWeights | None = None) -> torch.Tensor:
    prefix = backbone.prepare(observation(5, 4), ["base"])
    return backbone.encode(prefix, adapters=[] if weights is None else [(slice(0, 5), weights)]).action_tokens


def test_an_exported_adapter_loads_with_peft_and_gives_the_same_outputs(backbone: Backbone, tmp_path: Path) -> None:
    weights = adapter()
    write_adapter(tmp_path / "adapter", *to_peft(weights, BASE))
    theirs = second_base()
    loaded = peft.PeftModel.from_pretrained(theirs.model, str(tmp_path / "adapter"))
    layers = [m for m in loaded.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert len(layers) == 2 * len(TARGETS)
    ours = tokens(backbone, weights)
    assert (ours - tokens(theirs)).abs().max() <= 1e-6
    assert (ours - tokens(backbone)).abs().max() > 0.01  # so much does the adapter change


def test_adapters_of_the_other_family_go_both_ways_too(tmp_path: Path) -> None:
    """PaliGemma: ours into PEFT, and what PEFT then saves back to us."""
    base = presets.base_model("tiny-paligemma")
    ours, theirs = (PaliGemmaBackbone.random(base, seed=0) for _ in range(2))
    weights, again = (LoraWeights(base, 4, 6.0, TARGETS, torch.Generator().manual_seed(n)) for n in (0, 1))
    filled(weights, 100)
    write_adapter(tmp_path / "ours", *to_peft(weights, base))
    loaded = peft.PeftModel.from_pretrained(theirs.model, str(tmp_path / "ours"))
    assert (tokens(ours, weights) - tokens(theirs)).abs().max() <= 1e-6
    assert (tokens(ours, weights) - tokens(ours)).abs().max() > 0.01
    loaded.save_pretrained(str(tmp_path / "theirs"))
    load_peft(again, *read_adapter(tmp_path / "theirs"))
    assert all(torch.equal(a, b) for a, b in zip(weights.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*language_model.*\.(k_proj|gate_proj)"])
def test_an_adapter_that_peft_wrote_loads_and_gives_the_same_outputs(
    backbone: Backbone, tmp_path: Path, targets: list[str] | str
) -> None:
    theirs = second_base()
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=0.1)
    trained = peft.get_peft_model(theirs.model, config).eval()
    filled(trained, 7)
    trained.save_pretrained(str(tmp_path))
    tensors, fields = read_adapter(tmp_path)
    rank, alpha, found = peft_settings(tensors, fields)
    assert (rank, alpha) == (3, 5.0)
    assert found == (("q_proj", "v_proj") if isinstance(targets, list) else ("k_proj", "gate_proj"))
    weights = LoraWeights(BASE, rank, alpha, found, torch.Generator())
    load_peft(weights, tensors, fields)
    ours = tokens(backbone, weights)
    assert (ours - tokens(theirs)).abs().max() <= 1e-6
    assert (ours - tokens(backbone)).abs().max() > 0.01


def test_an_adapter_of_the_model_with_its_language_head_loads_too() -> None:
    """PEFT around `Qwen3VLForConditionalGeneration` names the same linears below `model.`."""
    weights, other = adapter(), adapter(1)
    tensors, config = to_peft(weights, BASE)
    longer = {n.replace("base_model.model.", "base_model.model.model."): a for n, a in tensors.items()}
    load_peft(other, longer, config)
    assert all(torch.equal(a, b) for a, b in zip(weights.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, r"adapter_config.peft_type: got 'LOHA'; possible: 'LORA'; "),
        ({"use_rslora": True}, r"adapter_config.use_rslora: got True; possible: off or empty; "),
        ({"use_dora": True}, r"adapter_config.use_dora: got True; possible: off or empty; "),
        ({"bias": "lora_only"}, r"adapter_config.bias: got 'lora_only'; possible: 'none'; "),
        ({"lora_bias": True}, r"adapter_config.lora_bias: got True; possible: off or empty; "),
        ({"modules_to_save": ["lm_head"]}, r"adapter_config.modules_to_save: got \['lm_head'\]; possible: off"),
        ({"rank_pattern": {"q_proj": 2}}, r"adapter_config.rank_pattern: got .*; possible: off or empty; "),
        ({"alpha_pattern": {"q_proj": 2}}, r"adapter_config.alpha_pattern: got .*; possible: off or empty; "),
        ({"layers_to_transform": [1]}, r"adapter_config.layers_to_transform: got \[1\]; possible: off or empty; "),
        ({"init_lora_weights": "pissa"}, r"adapter_config.init_lora_weights: got 'pissa'; possible: true, false"),
        ({"what_comes_next": {"on": 1}}, r"adapter_config.what_comes_next: got .*; possible: off or empty; "),
        ({"r": None}, r"adapter_config.r: got None; possible: a whole number up to 1e\+06; "),
        ({"r": True}, r"adapter_config.r: got True; possible: a whole number"),
        ({"r": 8.9}, r"adapter_config.r: got 8.9; possible: a whole number"),
        ({"r": float("nan")}, r"adapter_config.r: got nan; "),
        ({"r": float("inf")}, r"adapter_config.r: got inf; "),
        ({"lora_alpha": 10**400}, r"adapter_config.lora_alpha: got 10{400}; possible: a number"),
        ({"lora_alpha": float("nan")}, r"adapter_config.lora_alpha: got nan; "),
        ({"r": 8}, r"action_module.rank: got 4; possible: 8, the file's; "),
        ({"lora_alpha": 9}, r"action_module.alpha: got 6.0; possible: 9.0, the file's; "),
    ],
)
def test_settings_that_would_change_the_outputs_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors, config = to_peft(adapter(), BASE)
    with pytest.raises(SpecError, match=message) as refused:
        load_peft(adapter(1), tensors, {**config, **changes})
    assert "\n" not in str(refused.value)


def test_tensors_of_other_places_are_refused_and_change_nothing() -> None:
    tensors, config = to_peft(adapter(), BASE)
    weights = adapter(1)
    before = {name: p.clone() for name, p in weights.named_parameters()}
    first = "base_model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    value = tensors[first]
    rest = {name: a for name, a in tensors.items() if name != first}
    for wrong, message in (
        ({**tensors, "base_model.model.visual.blocks.0.attn.qkv.lora_A.weight": value}, "adapter_model: got .*visual"),
        ({**tensors, first.replace("q_proj", "q_norm"): value}, "adapter_model: got .*q_norm"),
        ({**tensors, first.replace("lora_A.weight", "lora_magnitude_vector"): value}, "adapter_model: got .*magnitude"),
        ({**tensors, first.replace("q_proj", "k_proj"): value}, r"action_module.target_modules: got \['q_proj', 'v_"),
        (
            {**tensors, first.replace("layers.0", "layers.2"): value},
            r"layers.2.*: got \(4, 128\); possible: shape N",
        ),
        ({**tensors, first.replace("model.language", "model.model.language"): value}, "possible: each linear once; "),
        ({**tensors, first: value * np.inf}, "q_proj.lora_A.weight: got 'NaN or infinity'; possible: finite numbers"),
        (rest, r"layers.0.self_attn.q_proj.lora_A.weight: got None; possible: shape \(4, 128\)"),
        ({**tensors, first: value[:, :64]}, r"q_proj.lora_A.weight: got \(4, 64\); possible: shape \(4, 128\)"),
    ):
        with pytest.raises(SpecError, match=message):
            load_peft(weights, wrong, config)
    assert all(torch.equal(p, before[name]) for name, p in weights.named_parameters())


def test_what_peft_leaves_off_by_default_is_what_is_taken() -> None:
    """Every field that the installed PEFT writes for plain LoRA is known or off."""
    fields = json.loads(json.dumps({**peft.LoraConfig(r=4, lora_alpha=6).to_dict(), "peft_type": "LORA"}))
    load_peft(adapter(1), to_peft(adapter(), BASE)[0], fields)


def test_two_supervised_steps_equal_a_plain_peft_loop(backbone: Backbone) -> None:
    """PEFT's layers in a base of its own, torch's AdamW and clipping, the mean of |difference| by hand."""
    head = OftSpec(horizon=2, action_width=2, state_width=2, proprioception="none", hidden_width=32)
    spec = LoraSpec(**head.model_dump(exclude={"kind"}), rank=4, alpha=6, target_modules=TARGETS)
    module = action_modules.build(spec, BASE, seed=3)
    filled(module.adapter, 5)
    rows, rate = 8, 1e-3
    action = torch.randn(rows, 2, 2, generator=torch.Generator().manual_seed(6))

    theirs = second_base()
    wrapped = peft.get_peft_model(
        theirs.model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=f".*language_model.*({'|'.join(TARGETS)})")
    )
    peft.set_peft_model_state_dict(
        wrapped, {n: torch.from_numpy(a) for n, a in to_peft(module.adapter, BASE)[0].items()}
    )
    policy = action_modules.build(head, BASE, seed=3)
    policy.load_state_dict({n: p for n, p in module.state_dict().items() if not n.startswith("adapter.")})
    prefix = theirs.prepare(observation(rows, 5), ["base"])
    trained = [*policy.parameters(), *(p for p in wrapped.parameters() if p.requires_grad)]
    adam = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
    for start in (0, 4):
        some = slice(start, start + 4)
        loss = (policy.mean(theirs.features(prefix[some]), None) - action[some]).abs().mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()

    optimizer = AdamSpec(learning_rate=rate, weight_decay=0.01, max_grad_norm=1.0)
    before = action_modules.export_parameters(module)
    sft_update(
        module,
        new_optimizer(module, SftSpec(jobs=1, batches_per_job=2, microbatch_size=4, cosine=False, optimizer=optimizer)),
        lambda rows: backbone.features(prefix[rows], adapters=[(slice(0, 4), module.adapter)]),
        proprioception=torch.zeros(rows, 2),
        action=action,
        is_pad=torch.zeros(rows, 2, dtype=torch.bool),
        microbatch_size=4,
    )
    expected = peft.get_peft_model_state_dict(wrapped)
    for name, array in to_peft(module.adapter, BASE)[0].items():
        assert np.abs(array - before[f"adapter.{name.removeprefix('base_model.model.')}"]).max() > rate, name
        assert np.abs(array - expected[name].numpy()).max() < 0.02 * rate, name
    for name, parameter in policy.named_parameters():
        assert (parameter - module.get_parameter(name)).abs().max() < 0.02 * rate, name
