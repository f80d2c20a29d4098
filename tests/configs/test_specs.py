"""Declarations: strict, with one line a fault; presets that load; seeds that never meet."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from configs import presets, seeds
from configs.errors import SpecError
from configs.spec import parse
from configs.workload import WorkloadSpec


def reach(**changes: Any) -> dict[str, Any]:
    return presets.workload("reach").model_dump(mode="json") | changes


@pytest.mark.parametrize("kind", ["models", "environments", "workloads", "clusters"])
def test_every_preset_loads_under_its_own_name(kind: str) -> None:
    load = {
        "models": presets.base_model,
        "environments": presets.environment,
        "workloads": presets.workload,
        "clusters": presets.cluster,
    }[kind]
    assert presets.names(kind)
    for name in presets.names(kind):
        found: Any = load(name)
        assert (found.tenant.name if kind == "workloads" else found.name) == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prioritty": 3}, "w: prioritty: unknown key; possible: action_module, algorithm, "),
        ({"tenant": {"name": "../x"}}, "w: tenant.name: got '../x'; possible: 1 to 63 letters, digits"),
        ({"tenant": {}}, "w: tenant.name: missing; it is required; add it"),
        ({"task": "sft"}, "algorithm.kind: got 'ppo' for task 'sft'; possible: 'sft'; change one"),
        ({"environment": None}, "environment: task 'rl' needs environment and takes no data"),
        ({"algorithm": {"kind": "ppo", "gama": 1.0}}, "gama: unknown key; possible: "),
        ({"action_module": {"horizon": 0}}, "action_module.horizon: got 0; "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_fault_is_one_line_that_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(WorkloadSpec, reach(**changes), where="w")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse(WorkloadSpec, reach(tenant={"name": "a b"}, typo=1), where="w")
    assert "tenant.name" in str(caught.value)
    assert "typo" in str(caught.value)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="environment: got 'reech'; possible: pickcube, pushcube, reach; choose one"):
        presets.environment("reech")


def test_ranges_of_seeds_never_meet() -> None:
    ranges = (seeds.EVALUATION, seeds.DEMONSTRATIONS, seeds.PRETRAINING, seeds.TRAINING)
    for a, b in combinations(ranges, 2):
        assert max(a.start, b.start) >= min(a.stop, b.stop)


def test_training_seeds_differ_by_seed_rollout_and_episode_and_stay_in_their_range() -> None:
    found = {seeds.training_seed(s, r, e) for s in range(3) for r in (0, 1, 4095) for e in (0, 1, 4095)}
    assert len(found) == 27
    assert all(seed in seeds.TRAINING for seed in found)
    assert seeds.training_seed(10**9, 4095, 4095) in seeds.TRAINING
