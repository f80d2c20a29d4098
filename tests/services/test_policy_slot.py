"""One tenant's training on samples that differ in the length of their prompts, for every action module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import Conflict
from configs.home import PROJECT_ROOT
from kernels import backbones
from kernels.backbones import Backbone
from services.busy import BusyLog
from services.feature_store import FeatureStore
from services.policy_slot import PolicySlot
from services.training_group import Member, Trained, train_alone
from tests.services.policies import BASE, SMALL, backend, observation

SHORT, LONG = "push", "push the red cube to the green target on the table and then move the gripper back to the left"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def samples(count: int) -> dict[str, Any]:
    """Every third prompt is long."""
    seen = observation(count, 1)
    return {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": [LONG if i % 3 == 1 else SHORT for i in range(count)],
        "action": np.random.default_rng(2).normal(size=(count, 1, 2)).astype(np.float32),
        "action_is_pad": np.zeros((count, 1), bool),
    }


def slot_of(config: Any) -> PolicySlot:
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    return slot


def trained_alone(
    backbone: Backbone, slot: PolicySlot, config: Any, data: dict[str, Any], store: FeatureStore | None = None
) -> Trained:
    return train_alone(backbone, Member(slot, config, data), store, BusyLog())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_prompts_of_several_lengths_and_a_last_row_alone_are_trained_on(backbone: Backbone, kind: str) -> None:
    """37 samples in microbatches of 4, twice over: chunks of 32 rows, both lengths in each, one row at the end."""
    config = backend("a", kind=kind, passes=2)
    assert len(set(backbone.lengths([SHORT, LONG], 1))) == 2
    slot = slot_of(config)
    trained, result = trained_alone(backbone, slot, config, samples(37))
    assert result["optimizer_steps"] == 2 * 10
    assert np.isfinite(result["metrics"]["loss"])
    assert trained.version == 20


@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"lora"}))
def test_a_samples_features_are_its_own_whatever_its_neighbours_prompts(backbone: Backbone, kind: str) -> None:
    """In order, each row's real part equal to the bit to that of the row alone; so it is from the store, too."""
    config = backend("a", kind=kind)
    slot, data = slot_of(config), samples(8)
    together = slot._features(backbone, data, slice(0, 8))
    for row in range(8):
        alone = slot._features(backbone, data, torch.tensor([row]))
        for mine, ours in zip(alone.tensors(), together[row : row + 1].tensors(), strict=True):
            real = ours if mine.shape == ours.shape else ours[tuple(slice(0, n) for n in mine.shape)]
            assert torch.equal(mine, real)


@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"lora"}))
def test_kept_features_give_the_same_parameters(backbone: Backbone, kind: str) -> None:
    """Two jobs over the same samples, with a store and without."""
    config, data, store = backend("a", kind=kind, passes=2), samples(8), FeatureStore(64 << 20)
    ends = []
    for use in (store, None):
        slot = slot_of(config)
        for _ in range(2):
            slot, _ = trained_alone(backbone, slot, config, data, use)
        ends.append(slot.parameters())
    assert store.num_bytes()["a"] > 0
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_another_interface_is_not_restored(backbone: Backbone, tmp_path: Any) -> None:
    """Alpha is in no parameter: names, shapes and dtypes are the same."""
    config = backend("a", kind="lora")
    trained, _ = trained_alone(backbone, slot_of(config), config, samples(8))
    manifest = {"schema_signature": config.policy.schema_signature}
    trained.save(tmp_path, config.policy_key, manifest)
    assert PolicySlot.restored(config, tmp_path, None, True).version == 2
    other = config.model_copy(update={"policy": config.policy.model_copy(update={"schema_signature": "f" * 64})})
    with pytest.raises(Conflict, match="schema_signature of the checkpoint of version 2"):
        PolicySlot.restored(other, tmp_path, None, True)
