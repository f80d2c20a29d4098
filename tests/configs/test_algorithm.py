"""Algorithms' settings: what is declared is used, what would not be is refused, what was declared before still is."""

from __future__ import annotations

from typing import Any

import pytest

from configs.algorithm import AwrSpec, GrpoSpec, PpoSpec, ReinforceSpec, SftSpec
from configs.errors import SpecError
from configs.spec import Spec, parse

ROLLOUT = {"jobs": 1, "num_envs": 2, "rollout_steps": 3, "microbatch_size": 6, "optimizer": {"learning_rate": 1e-3}}
OFFLINE = {"jobs": 1, "batches_per_job": 2, "microbatch_size": 6, "optimizer": {"learning_rate": 1e-3}}
GIVEN: dict[type[Spec], dict[str, Any]] = {
    PpoSpec: ROLLOUT,
    GrpoSpec: ROLLOUT | {"group_size": 4},
    ReinforceSpec: ROLLOUT,
    SftSpec: OFFLINE,
    AwrSpec: OFFLINE,
}


@pytest.mark.parametrize("cls", GIVEN)
def test_what_is_written_out_reads_back_the_same(cls: type[Spec]) -> None:
    spec = parse(cls, GIVEN[cls], where="a")
    assert parse(cls, spec.model_dump(mode="json"), where="a") == spec


def test_a_workload_that_names_no_estimator_is_gae_with_its_decay() -> None:
    """As declared before estimators could be chosen."""
    spec = parse(PpoSpec, ROLLOUT | {"gae_lambda": 0.6}, where="a")
    assert (spec.estimator.kind, spec.gae_lambda) == ("gae", 0.6)
    assert parse(PpoSpec, ROLLOUT, where="a").gae_lambda == 0.95
    off = (spec.clip_high, spec.dual_clip, spec.value_clip, spec.kl, spec.decoupled)
    assert off == (None,) * 5


def test_another_estimator_has_no_decay_and_reads_back_the_same() -> None:
    spec = parse(PpoSpec, ROLLOUT | {"estimator": {"kind": "n_step", "n_steps": 5}}, where="a")
    assert spec.gae_lambda is None
    assert parse(PpoSpec, spec.model_dump(mode="json"), where="a") == spec


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (PpoSpec, {"estimator": {"kind": "monte_carlo"}, "gae_lambda": 0.9}, "gae_lambda: got 0.9; possible: a number"),
        (PpoSpec, {"gae_lambda": None}, "gae_lambda: got None; possible: a number with estimator 'gae'"),
        (PpoSpec, {"estimator": {"kind": "gae", "n_steps": 3}}, "estimator.n_steps: unknown key"),
        (PpoSpec, {"estimator": {"kind": "n_step"}}, "estimator.n_steps: missing"),
        (PpoSpec, {"estimator": {"kind": "td"}}, "estimator.kind: got 'td'; possible: gae, monte_carlo, n_step"),
        (PpoSpec, {"decoupled": {}}, "actor_forward: got False; possible: true with decoupled"),
        (PpoSpec, {"value_clip": 0.2, "value_coef": 0.0}, "value_clip: got 0.2; possible: null with value_coef 0"),
        (PpoSpec, {"dual_clip": 1.0}, "dual_clip: got 1.0; "),
        (PpoSpec, {"kl": {"coef": 0.1, "estimator": "k1"}}, "kl.estimator: got 'k1'; "),
        (PpoSpec, {"kl": {"coef": 0.1, "reference": "proximal"}}, "kl.reference: got 'proximal'; "),
        (PpoSpec, {"lockstep": True, "delay": 1}, "delay: got 1; possible: 0 or null with lockstep"),
        # 6 samples in one microbatch, 4 epochs: 4 updates a job; 3 jobs behind are 12 updates.
        (
            PpoSpec,
            {"delay": 3, "max_policy_staleness": 11},
            "delay: got 3; possible: up to 2 with max_policy_staleness 11 and 4 updates a job; every job",
        ),
        (ReinforceSpec, {"delay": 2, "max_policy_staleness": 1}, "delay: got 2; possible: up to 1 with "),
        (PpoSpec, {"delay": 17}, "delay: got 17; "),
        (PpoSpec, {"delay": -1}, "delay: got -1; "),
        (PpoSpec, {"group_size": 4}, "group_size: unknown key"),
        (GrpoSpec, {"value_coef": 0.5}, "value_coef: unknown key"),
        (GrpoSpec, {"gae_lambda": 0.9}, "gae_lambda: unknown key"),
        (GrpoSpec, {"group_size": 1}, "group_size: got 1; "),
        (GrpoSpec, {"baseline": {"kind": "leave_one_out", "scale": "std"}}, "baseline.scale: unknown key"),
        (GrpoSpec, {"keep_return": [0.9, 0.1]}, "keep_return: got (0.9, 0.1); possible: the lower bound first"),
        (ReinforceSpec, {"clip_coef": 0.2}, "clip_coef: unknown key"),
        (ReinforceSpec, {"epochs": 2}, "epochs: unknown key"),
        (ReinforceSpec, {"estimator": {"kind": "gae"}}, "estimator.kind: got 'gae'; possible: monte_carlo, n_step"),
        (AwrSpec, {"num_envs": 2}, "num_envs: unknown key"),
        (AwrSpec, {"temperature": 0}, "temperature: got 0; "),
        (SftSpec, {"temperature": 1.0}, "temperature: unknown key"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_not_be_used_is_refused_in_one_line(cls: type[Spec], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(cls, GIVEN[cls] | changes, where="a")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_distance_is_from_the_policy_that_acted_and_in_grpo_from_the_one_at_the_begin() -> None:
    """As declared before the policy could be chosen; each may name the other one."""
    for cls, usual, other in (
        (PpoSpec, "behaviour", "reference"),
        (ReinforceSpec, "behaviour", "reference"),
        (GrpoSpec, "reference", "behaviour"),
    ):
        left_out = parse(cls, GIVEN[cls] | {"kl": {"coef": 0.1}}, where="a")
        named = parse(cls, GIVEN[cls] | {"kl": {"coef": 0.1, "reference": other}}, where="a")
        assert (left_out.kl.reference, named.kl.reference) == (usual, other)


def test_lockstep_is_delay_0_and_a_delay_within_the_bound_is_admitted() -> None:
    """7 samples in microbatches of 2 are 4, twice: 8 updates a job, 16 behind at delay 2."""
    given = ROLLOUT | {"num_envs": 7, "rollout_steps": 1, "microbatch_size": 2, "epochs": 2}
    spec = parse(PpoSpec, given | {"delay": 2, "max_policy_staleness": 16}, where="a")
    assert (spec.updates_per_job, spec.rollout_delay) == (8, 2)
    assert parse(PpoSpec, given | {"lockstep": True}, where="a").rollout_delay == 0
    assert parse(PpoSpec, given, where="a").rollout_delay is None
