"""A job's features held whole or encoded at each microbatch's turn: the same bits, within the bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import AwrSpec
from configs.backend import BackendConfig
from configs.home import PROJECT_ROOT
from kernels import backbones
from kernels.backbones import Backbone
from services import serving
from services.busy import BusyLog
from services.feature_store import sample_bytes
from services.policy_slot import PolicySlot
from services.policy_stacks import PolicyStacks
from services.rollout import Prediction
from services.serving import Request, ServingPolicy
from services.training_features import ENCODE_ROWS
from services.training_group import Member, Trained, train_alone
from tests.services.policies import BASE, FLOWS, backend, observation

ROWS, HORIZON = 33, 2
SHORT, LONG = "push", "push the red cube to the green target on the table and then move the gripper back to the left"
WHOLE = 1 << 30
KINDS = [("oft", None), ("gr00t", "flow_noise"), ("pi", "flow_sde"), ("pi05", "flow_sde")]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def declared(kind: str, flow: str | None, task: str = "rl", **settings: Any) -> BackendConfig:
    """In microbatches of 8, the last one of a single row."""
    found = backend("a", task, kind=kind, horizon=HORIZON, flow=None if flow is None else FLOWS[flow], **settings)
    return found.model_copy(update={"algorithm": found.algorithm.model_copy(update={"microbatch_size": 8})})


def seen() -> dict[str, Any]:
    """Every third prompt is longer: its prefix is padded to another length."""
    return observation(ROWS, 3) | {"instructions": [LONG if i % 3 == 1 else SHORT for i in range(ROWS)]}


def rollout(backbone: Backbone, config: BackendConfig) -> dict[str, Any]:
    """Pictures and what the serving side did with them, as an RL partition holds it."""
    policy, shown, generator = ServingPolicy(config.policy, 0, None), seen(), np.random.default_rng(5)
    prefix, state, proprioception = policy.prepare(backbone, shown)
    request = Request(policy, prefix, state, proprioception, torch.Generator().manual_seed(7))
    (prediction,) = serving.forward(backbone, [request], PolicyStacks(0))
    assert isinstance(prediction, Prediction)
    return {
        "image.top": shown["images"]["top"],
        "proprioception": shown["proprioception"],
        "instructions": shown["instructions"],
        "action": prediction.action,
        "log_prob": prediction.log_prob,
        "value": prediction.value,
        "advantage": generator.normal(size=(ROWS, HORIZON)).astype(np.float32),
        "return": generator.normal(size=ROWS).astype(np.float32),
        "valid": np.ones((ROWS, HORIZON), bool),
        "terminated": np.zeros((ROWS, HORIZON), bool),
        "truncated": np.zeros((ROWS, HORIZON), bool),
        "sample_valid": np.ones(ROWS, bool),
        **prediction.trace,
    }


def demonstrations() -> dict[str, Any]:
    shown, generator = seen(), np.random.default_rng(6)
    return {
        "image.top": shown["images"]["top"],
        "proprioception": shown["proprioception"],
        "instructions": shown["instructions"],
        "action": generator.normal(size=(ROWS, HORIZON, 2)).astype(np.float32),
        "action_is_pad": np.zeros((ROWS, HORIZON), bool),
        "return": generator.normal(size=ROWS).astype(np.float32),
    }


def slot_of(config: BackendConfig) -> PolicySlot:
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    return slot


def a_row(backbone: Backbone, slot: PolicySlot) -> int:
    """Bytes of a sample's features, of the longer prompt."""
    texts = slot._interface.state_texts(slot._interface.proprioception(seen()["proprioception"]))
    length = max(backbone.lengths(seen()["instructions"], 1, texts))
    return sample_bytes(backbone.spec, slot.module.reads, length)


def trained(backbone: Backbone, config: BackendConfig, data: dict[str, Any], feature_bytes: int) -> Trained:
    return train_alone(backbone, Member(slot_of(config), config, data, feature_bytes), None, BusyLog())


def assert_same(one: Trained, two: Trained) -> None:
    assert one[1]["metrics"] == two[1]["metrics"]
    assert one[1]["optimizer_steps"] == two[1]["optimizer_steps"] > 0
    ours, theirs = one[0].parameters(), two[0].parameters()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


class Encoded:
    """How many rows the base has encoded."""

    def __init__(self, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        encode = backbone.encode

        def counted(prefix: Any, *args: Any, **kwargs: Any) -> Any:
            self.rows += prefix.rows
            return encode(prefix, *args, **kwargs)

        monkeypatch.setattr(backbone, "encode", counted)

    def taken(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


@pytest.mark.parametrize(("kind", "flow"), KINDS)
def test_an_update_has_the_same_bits_whether_its_features_are_held_or_encoded_in_turn(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, kind: str, flow: str | None
) -> None:
    """33 samples of two prompt lengths, twice over. All are encoded once where they are held, and once an epoch where
    there is room for all but one."""
    config = declared(kind, flow)
    data, encoded = rollout(backbone, config), Encoded(backbone, monkeypatch)
    room = ROWS * a_row(backbone, slot_of(config))
    held = trained(backbone, config, data, room)
    assert encoded.taken() == ROWS
    in_turn = trained(backbone, config, data, room - 1)
    assert encoded.taken() == 2 * ROWS
    assert_same(held, in_turn)


@pytest.mark.parametrize(("kind", "flow"), KINDS)
def test_actions_are_scored_with_the_same_bits_in_slices_of_rows(
    backbone: Backbone, kind: str, flow: str | None
) -> None:
    """At once, and in 32 and 1; both as the serving side found it when it acted on all of them."""
    config = declared(kind, flow)
    slot, data = slot_of(config), rollout(backbone, config)
    whole = slot.evaluated(backbone, config, data, WHOLE)
    assert [(s.start, s.stop) for s in slot.job_features(backbone, data, WHOLE).slices()] == [(0, ROWS)]
    assert [(s.start, s.stop) for s in slot.job_features(backbone, data, 0).slices()] == [(0, 32), (32, ROWS)]
    for name, part in slot.evaluated(backbone, config, data, 0).items():
        assert np.array_equal(part, whole[name]), name
    np.testing.assert_allclose(whole["actor_log_prob"], data["log_prob"], rtol=1e-4, atol=1e-4)


def test_slices_hold_as_many_rows_as_the_bound_allows_in_whole_forwards(backbone: Backbone) -> None:
    """Room for 31, 63 and 64 rows of 200: slices of 32, as one forward has, 32 and 64."""
    config = declared("pi", "flow_sde")
    slot, data = slot_of(config), rollout(backbone, config)
    data = {name: [LONG] * 200 if name == "instructions" else np.repeat(a, 7, axis=0)[:200] for name, a in data.items()}
    for rows, size in ((ENCODE_ROWS - 1, 32), (63, 32), (64, 64)):
        features = slot.job_features(backbone, data, rows * a_row(backbone, slot))
        slices = list(features.slices())
        assert [s.start for s in slices] == list(range(0, 200, size))
        assert slices[-1].stop == 200


def test_what_is_held_stays_within_the_bound(backbone: Backbone) -> None:
    """Nothing beyond it; below it what the rows are counted at, and their masks and positions."""
    config = declared("pi", "flow_sde")
    slot, data = slot_of(config), rollout(backbone, config)
    room = ROWS * a_row(backbone, slot)
    beyond, within = (slot.job_features(backbone, data, bound) for bound in (room - 1, room))
    for features in (beyond, within):
        assert features(torch.tensor([3, 1])).rows == 2
    assert beyond.num_bytes == 0
    assert room <= within.num_bytes < 1.01 * room


@pytest.mark.parametrize("kind", ["gr00t", "pi05", "lora"])
def test_shuffled_passes_over_demonstrations_have_the_same_bits(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Features of the first pass are kept for the second, or not; those of an adapter's module never are."""
    config = declared(kind, None, "sft", passes=2)
    encoded = Encoded(backbone, monkeypatch)
    kept = trained(backbone, config, demonstrations(), WHOLE)
    assert encoded.taken() == (0 if kind == "lora" else ROWS)
    in_turn = trained(backbone, config, demonstrations(), 0)
    assert encoded.taken() == (0 if kind == "lora" else 2 * ROWS)
    assert_same(kept, in_turn)


def test_offline_rl_has_the_same_bits(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over 33 recorded samples."""
    settings = {"jobs": 2, "batches_per_job": 1, "microbatch_size": 8, "passes": 2, "cosine": False}
    algorithm = AwrSpec.model_validate({"optimizer": {"learning_rate": 1e-2}} | settings)
    config = declared("oft", None).model_copy(update={"algorithm": algorithm, "environment": None})
    encoded = Encoded(backbone, monkeypatch)
    held = trained(backbone, config, demonstrations(), WHOLE)
    assert encoded.taken() == ROWS
    in_turn = trained(backbone, config, demonstrations(), 0)
    assert encoded.taken() == 2 * ROWS
    assert_same(held, in_turn)


@pytest.mark.parametrize("kind", ["gr00t", "pi"])
def test_rows_encoded_in_turn_are_as_long_as_among_all_of_the_job(backbone: Backbone, kind: str) -> None:
    """Two rows of the shorter prompt, not in order: filled up behind it as beside the longer one."""
    slot = slot_of(declared(kind, "flow_sde"))
    held, in_turn = (slot.job_features(backbone, demonstrations(), bound) for bound in (WHOLE, 0))
    rows = torch.tensor([3, 0])
    for one, two in zip(held(rows).tensors(), in_turn(rows).tensors(), strict=True):
        assert torch.equal(one, two)
