"""What is kept of the frozen base's work: whose it is, how much, and what tells two samples apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from configs import presets
from configs.algorithm import AwrSpec
from configs.backend import BackendConfig
from configs.errors import SpecError
from configs.spec import parse
from configs.workload import ResourcesSpec, WorkloadSpec
from kernels.features import VLAFeature
from services.feature_store import SHARED, FeatureStore, sample_bytes, sample_keys, scope_of
from tests.services.policies import backend

KEY = b"k" * 16


def row(value: float) -> VLAFeature:
    """4 × 2 float32: 32 bytes."""
    return VLAFeature(torch.full((1, 4, 2), value))


def test_what_is_put_is_found_in_its_scope_alone() -> None:
    store = FeatureStore(1000)
    assert store.put("a", KEY, row(1.0))
    found = store.get("a", KEY)
    assert found is not None
    assert found.action_tokens is not None
    assert found.action_tokens.unique().tolist() == [1.0]
    assert store.get("b", KEY) is None


def test_each_scope_has_room_of_its_own_and_what_is_there_stays() -> None:
    """100 bytes hold three rows of 32; a fourth is turned away, whatever came first, and `b` has its own 100."""
    store = FeatureStore(100)
    keys = [bytes([i]) * 16 for i in range(4)]
    assert [store.put("a", key, row(float(i))) for i, key in enumerate(keys)] == [True, True, True, False]
    assert [store.get("a", key) is not None for key in keys] == [True, True, True, False]
    assert store.put("a", keys[0], row(9.0)), "it is there already"
    assert store.put("b", keys[3], row(3.0))
    assert store.num_bytes() == {"a": 96, "b": 32}
    store.clear("a")
    assert store.num_bytes() == {"b": 32}
    assert store.put("a", keys[3], row(3.0))


def test_only_scopes_in_use_are_retained() -> None:
    store = FeatureStore(1000)
    for scope in ("a", "b", SHARED):
        store.put(scope, KEY, row(1.0))
    store.retain([SHARED, None, "b", "c"])
    assert store.num_bytes() == {"b": 32, SHARED: 32}
    assert store.get("a", KEY) is None
    assert store.get(SHARED, KEY) is not None


def offline(tenant: str) -> BackendConfig:
    """A workload of AWR on a dataset."""
    fields = {"jobs": 1, "batches_per_job": 1, "microbatch_size": 8, "optimizer": {"learning_rate": 1e-2}}
    return backend(tenant, "rl").model_copy(
        update={"algorithm": AwrSpec.model_validate(fields), "environment": None, "dataset": "/data"}
    )


@pytest.mark.parametrize(
    ("kind", "task", "how", "scope"),
    [
        ("oft", "sft", "own", "t"),
        ("oft", "sft", "shared", SHARED),
        ("oft", "sft", "never", None),
        ("oft", "rl", "own", None),
        ("oft", "awr", "own", "t"),
        ("oft", "awr", "never", None),
        ("lora", "sft", "own", None),
    ],
)
def test_a_workload_has_the_scope_that_it_declares(kind: str, task: str, how: Any, scope: str | None) -> None:
    config = offline("t") if task == "awr" else backend("t", task, kind=kind)
    config = config.model_copy(update={"resources": ResourcesSpec(reuse_features=how)})
    assert scope_of(config) == scope


def test_no_tenants_name_is_the_shared_scope() -> None:
    with pytest.raises(SpecError, match=r"tenant.name: got ''"):
        parse(WorkloadSpec, presets.workload("demos").model_dump(mode="json") | {"tenant": {"name": SHARED}}, where="w")


TOP = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)


def test_samples_of_which_a_store_holds_few_are_not_kept() -> None:
    """A thousand of 4 × 128 float32 action tokens are 2,048,000 bytes."""
    base = presets.base_model("tiny-qwen3-vl")
    assert sample_bytes(base, {"action_tokens"}, 32) == 4 * 128 * 4
    assert sample_bytes(base, {"tokens"}, 32) == 32 * 128 * 4
    assert sample_bytes(base, {"cache"}, 32) == 2 * 32 * 2 * 2 * 32 * 4
    store = FeatureStore(2_048_000)
    assert store.worth(2048)
    assert not store.worth(2049)
    assert not FeatureStore(0).worth(1)


def observation(**changes: Any) -> dict[str, Any]:
    return {"images": {"top": TOP}, "instructions": ["push", "pick"]} | changes


def test_equal_samples_have_equal_keys_wherever_they_stand() -> None:
    seen = observation()
    turned = {"images": {"top": seen["images"]["top"][::-1]}, "instructions": ["pick", "push"]}
    keys = sample_keys("base", {"action_tokens"}, seen, None)
    assert keys == sample_keys("base", {"action_tokens"}, turned, None)[::-1]
    assert len(set(keys)) == 2


@pytest.mark.parametrize(
    "changed",
    [
        sample_keys("base 2", {"action_tokens"}, observation(), None),
        sample_keys("base", {"action_tokens", "tokens"}, observation(), None),
        sample_keys("base", {"action_tokens"}, observation(instructions=["pull", "lift"]), None),
        sample_keys("base", {"action_tokens"}, observation(), ["", ""]),
        sample_keys("base", {"action_tokens"}, observation(), ["1", "2"]),
        sample_keys("base", {"action_tokens"}, observation(images={"side": TOP}), None),
        sample_keys(
            "base",
            {"action_tokens"},
            observation(images={"top": observation()["images"]["top"].reshape(2, 4, 16, 3)}),
            None,
        ),
        sample_keys("base", {"action_tokens"}, observation(images={"top": observation()["images"]["top"] ^ 1}), None),
    ],
    ids=["base", "parts", "instruction", "empty state", "state", "camera", "shape", "pixels"],
)
def test_whatever_features_depend_on_makes_another_key(changed: list[bytes]) -> None:
    assert not set(changed) & set(sample_keys("base", {"action_tokens"}, observation(), None))


def test_words_do_not_run_into_one_another() -> None:
    """`ab` with state `c` is not `a` with state `bc`."""
    image = observation()["images"]["top"][:1]
    one, other = (
        sample_keys("base", {"action_tokens"}, {"images": {"top": image}, "instructions": [text]}, [state])
        for text, state in (("ab", "c"), ("a", "bc"))
    )
    assert one != other
