"""Jobs trained together: parameters equal to the bit to those of each alone, and one's fault is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import TenantFault
from configs.home import PROJECT_ROOT
from configs.workload import ResourcesSpec
from kernels import action_modules, backbones
from kernels.backbones import Backbone
from services.busy import BusyLog
from services.feature_store import FeatureStore
from services.policy_slot import PolicySlot
from services.training_features import ENCODE_ROWS
from services.training_group import Member, Trained, train_alone, train_members
from tests.services.policies import BASE, SMALL, backend, observation

KINDS = sorted(SMALL)
PROMPTS = ("push", "push the red cube to the green target on the table and then move the gripper back to the left")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def member(tenant: str, kind: str, *, count: int = 8, seed: int = 0, passes: int = 1, **data: Any) -> Member:
    """A tenant's job on samples of its own, prompts of two lengths among them."""
    config = backend(tenant, kind=kind, seed=seed, passes=passes)
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    seen = observation(count, seed)
    samples = {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": [PROMPTS[(i + seed) % 3 == 1] for i in range(count)],
        "action": np.random.default_rng(seed + 1).normal(size=(count, 1, 2)).astype(np.float32),
        "action_is_pad": np.zeros((count, 1), bool),
    }
    return Member(slot, config, samples | data)


def together(
    backbone: Backbone, members: list[Member], store: FeatureStore | None = None, busy: BusyLog | None = None
) -> dict[str, Trained | Exception]:
    found: dict[str, Trained | Exception] = {}
    pairs = [(m, lambda outcome, name=m.tenant: found.update({name: outcome})) for m in members]
    train_members(backbone, pairs, store, busy or BusyLog())
    return found


def assert_as_alone(backbone: Backbone, of: Member, outcome: Trained | Exception) -> None:
    assert isinstance(outcome, tuple), outcome
    alone, report = train_alone(backbone, of, None, BusyLog())
    slot, mine = outcome
    assert mine["metrics"] == report["metrics"]
    assert (mine["version"], mine["optimizer_steps"]) == (report["version"], report["optimizer_steps"])
    ours, theirs = slot.parameters(), alone.parameters()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(slot.generator.get_state(), alone.generator.get_state())
    key = of.backend.policy_key
    states = [list(s.optimizers[key].adam.state.values()) for s in (slot, alone)]
    for a, b in zip(*states, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_every_kind_at_once_with_unequal_jobs_equals_each_alone(backbone: Backbone) -> None:
    """Two tenants a kind, jobs of 8 and 13 samples by 4 (2 and 4 steps), one of them over two passes."""
    members = [
        member(f"{kind}-{n}", kind, count=count, seed=n, passes=passes)
        for kind in KINDS
        for n, count, passes in ((1, 8, 1), (2, 13, 2))
    ]
    found = together(backbone, members)
    assert set(found) == {m.tenant for m in members}
    for one in members:
        assert one.slot.version == 0, "the slot itself is never trained"
        assert_as_alone(backbone, one, found[one.tenant])


class Counting:
    """The base, and how many rows each of its forwards had."""

    def __init__(self, backbone: Backbone) -> None:
        self.rows: list[int] = []
        self._forward = backbone._forward

    def __call__(self, prefix: Any, **options: Any) -> Any:
        self.rows.append(prefix.rows)
        return self._forward(prefix, **options)


def test_the_members_rows_share_forwards_up_to_their_bound(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four frozen tenants with one prompt and microbatches of 4 make forwards of 16; adapters have their own; nine
    tenants' 36 rows are two forwards."""
    counting = Counting(backbone)
    monkeypatch.setattr(backbone, "_forward", counting)
    one_prompt = {"instructions": [PROMPTS[0]] * 8}
    kinds = ("oft", "gr00t", "pi", "oft", "lora", "lora")
    found = together(backbone, [member(f"t{i}", kind, seed=i, **one_prompt) for i, kind in enumerate(kinds)])
    assert not any(isinstance(outcome, Exception) for outcome in found.values())
    assert counting.rows == [16, 8] * 2
    counting.rows.clear()
    together(backbone, [member(f"t{i}", "oft", seed=i, **one_prompt) for i in range(9)])
    assert counting.rows == [ENCODE_ROWS, 4] * 2


def test_graphs_through_the_base_are_bounded(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine adapters' 36 rows: 32 forwards' graphs at most wait for their backward pass, the last 4 follow after it."""
    told: list[str] = []
    counting = Counting(backbone)
    monkeypatch.setattr(backbone, "_forward", lambda *a, **k: (told.append("forward"), counting(*a, **k))[1])
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: (told.append("backward"), backward(*a, **k))[1])
    members = [member(f"t{i}", "lora", seed=i, count=4, instructions=[PROMPTS[0]] * 4) for i in range(9)]
    found = together(backbone, members)
    assert counting.rows == [ENCODE_ROWS, 4]
    assert told == ["forward", "backward"] * 2
    monkeypatch.undo()
    for one in members:
        assert_as_alone(backbone, one, found[one.tenant])


def test_an_error_after_some_have_ended_leaves_what_they_gave(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short job ends; then another's module raises an error of its own kind; the third is trained alone, whole."""
    short, broken, long = member("short", "oft", count=4), member("broken", "oft", count=8), member("long", "pi")
    steps: list[int] = []
    loss = action_modules.OftModule.imitation_loss

    def second_time_bad(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if len(arguments[2]) == 4 and self.spec == broken.slot.module.spec and len(steps) >= 2:
            raise ArithmeticError("of a kind that nobody foresaw")
        steps.append(1)
        return loss(self, *arguments, **options)

    monkeypatch.setattr(action_modules.OftModule, "imitation_loss", second_time_bad)
    found = together(backbone, [short, broken, long])
    monkeypatch.undo()
    assert isinstance(found["broken"], ArithmeticError)
    for one in (short, long):
        assert_as_alone(backbone, one, found[one.tenant])


@pytest.mark.parametrize("kind", KINDS)
def test_a_members_fault_changes_nobody_elses_bits(backbone: Backbone, kind: str) -> None:
    """A NaN action, a NaN state, and parameters that explode, among good neighbours of every kind."""
    bad_state = observation(8, 5)["proprioception"]
    bad_state[5] = np.nan  # in the second microbatch
    bad_action = np.full((8, 1, 2), np.nan, np.float32)
    bad = [
        member("bad-action", kind, action=bad_action),
        member("bad-state", kind, proprioception=bad_state),
        member("exploding", kind),
    ]
    with torch.no_grad():
        next(iter(bad[2].slot.module.parameters())).fill_(float("inf"))
    good = [member(f"good-{k}", k, seed=3) for k in KINDS]
    found = together(backbone, [bad[0], good[0], bad[1], *good[1:], bad[2]])
    for one in bad:
        assert isinstance(found[one.tenant], TenantFault), one.tenant
    for one in good:
        assert_as_alone(backbone, one, found[one.tenant])


def test_an_error_of_another_kind_has_each_trained_alone(backbone: Backbone) -> None:
    """A module whose loss raises torch's own error is found by training one after another."""
    broken = member("broken", "oft", action_is_pad=np.zeros((8, 2), bool))  # a mask that fits no action
    good = [member(f"good-{k}", k, seed=2) for k in KINDS]
    found = together(backbone, [good[0], broken, *good[1:]])
    assert isinstance(found["broken"], Exception)
    for one in good:
        assert_as_alone(backbone, one, found[one.tenant])


def test_kept_features_serve_a_group_as_they_serve_one(backbone: Backbone) -> None:
    """Two epochs with a store: the second asks the base for the adapter's rows alone; the bits are those without."""
    store, slots = FeatureStore(64 << 20), {}
    for _ in range(2):
        members = [member(f"t-{kind}", kind, seed=4) for kind in KINDS]
        for one in members:
            one.slot = slots.get(one.tenant, one.slot)
        found = together(backbone, members, store)
        for one in members:
            assert_as_alone(backbone, one, found[one.tenant])
            slots[one.tenant] = found[one.tenant][0]
    assert {scope for scope, used in store.num_bytes().items() if used} == {
        f"t-{kind}" for kind in KINDS if kind != "lora"
    }


def test_those_that_share_their_features_find_each_others(backbone: Backbone) -> None:
    members = [member(tenant, "oft", seed=6) for tenant in ("a", "b")]
    for one in members:
        one.backend = one.backend.model_copy(update={"resources": ResourcesSpec(reuse_features="shared")})
    store = FeatureStore(64 << 20)
    found = together(backbone, members, store)
    for one in members:
        assert_as_alone(backbone, one, found[one.tenant])
    assert len(store.num_bytes()) == 1


def test_each_pays_for_its_own_compute(backbone: Backbone) -> None:
    """One interval; the shares are the members' seconds, the longer job's are more, and they add up to it."""
    busy = BusyLog()
    members = [member("short", "oft", count=4), member("long", "oft", count=32, seed=1)]
    together(backbone, members, busy=busy)
    ((start, end, shares, kind),) = busy.intervals(0.0)
    assert kind == "train"
    assert shares == {m.tenant: round(m.seconds * 1e6) for m in members}
    assert shares["long"] > shares["short"]
    assert sum(busy.seconds().values()) == pytest.approx(float(end) - float(start))
    assert sum(m.seconds for m in members) <= float(end) - float(start)
