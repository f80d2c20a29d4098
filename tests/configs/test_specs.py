"""Declarations: strict, with one line a fault; presets that load; seeds that never meet."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest

from configs import presets, seeds
from configs.algorithm import MAX_ROLLOUTS
from configs.environment import EnvironmentSpec
from configs.errors import SpecError
from configs.model import MODULE_SPECS, LoraTarget
from configs.requests import CollectRequest, EvaluateRequest
from configs.spec import Spec, parse
from configs.workload import EvaluationSpec, LimitsSpec, ResourcesSpec, WorkloadSpec

AWR = {"kind": "awr", "jobs": 1, "batches_per_job": 1, "microbatch_size": 1, "optimizer": {"learning_rate": 0.1}}


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
        if kind == "workloads" and found.start == "continue":  # it goes on with the slot of another's tenant
            assert found.tenant.name in presets.names(kind)
        else:
            assert (found.tenant.name if kind == "workloads" else found.name) == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prioritty": 3}, "w: prioritty: unknown key; possible: action_module, algorithm, "),
        ({"tenant": {"name": "../x"}}, "w: tenant.name: got '../x'; possible: 1 to 63 letters, digits"),
        ({"tenant": {}}, "w: tenant.name: missing; it is required; add it"),
        ({"task": "sft"}, "algorithm.kind: got 'ppo' for task 'sft'; possible: 'sft'; change one"),
        ({"environment": None}, "environment: task 'rl' needs environment and takes no data"),
        ({"algorithm": AWR}, "data: algorithm 'awr' needs data and takes no environment; set data, remove environment"),
        ({"algorithm": AWR, "task": "sft"}, "algorithm.kind: got 'awr' for task 'sft'; possible: 'sft'; change one"),
        ({"algorithm": {"kind": "ppo", "gama": 1.0}}, "gama: unknown key; possible: "),
        ({"action_module": {"kind": "oft", "horizon": 0}}, "action_module.horizon: got 0; "),
        ({"action_module": {"horizon": 1}}, "action_module.kind: missing; possible: gr00t, lora, oft, pi; choose one"),
        (
            {"action_module": {"kind": "act"}},
            "action_module.kind: got 'act'; possible: gr00t, lora, oft, pi; choose one",
        ),
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
    possible = "libero-10, libero-90, libero-goal, libero-object, libero-object-small, libero-spatial, pickcube, "
    possible += "pushcube, pushcube-progress, reach"
    with pytest.raises(SpecError, match=f"environment: got 'reech'; possible: {possible}; choose one"):
        presets.environment("reech")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"camera_keys": {"side": "render()"}}, "camera_keys: got ['side']; possible: top; correct it"),
        ({"state_range": [0, 3]}, "state_range: got [0, 3]; possible: two numbers 2 apart, the state_width; make them"),
        ({"requirements": "../libero.txt"}, "requirements: got '../libero.txt'"),
        ({"options": {"sizes": [1, 2]}}, "options.sizes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_an_environment_is_made_with_fits_it(changes: dict[str, Any], message: str) -> None:
    environment = presets.environment("reach").model_dump(mode="json") | changes
    with pytest.raises(SpecError) as caught:
        parse(EnvironmentSpec, environment, where="environment")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "changes", "message"),
    [
        ("reach", "gymnasium", {"control_mode": "pd_ee_delta_pos"}, "possible: None with kind gymnasium; used by mani"),
        ("reach", "gymnasium", {"light_visuals": True}, "False with kind gymnasium; used by libero and maniskill;"),
        ("reach", "gymnasium_vector", {"show_goal": True}, "show_goal: got True; possible: False with kind gymnas"),
        ("reach", "gymnasium", {"backend": "gpu"}, "backend: got 'gpu'; possible: 'cpu' with kind gymnasium; used by"),
        ("pushcube", "maniskill", {"state_key": "agent"}, "state_key: got 'agent'; possible: None with kind manis"),
        ("pushcube", "maniskill", {"camera_keys": {"base": "x"}}, "used by gymnasium and gymnasium_vector; "),
        ("libero-goal", "libero", {"control_mode": "osc"}, "control_mode: got 'osc'; possible: None with kind libe"),
        ("reach", "python", {"options": {"size": 3}}, "options: got {'size': 3}; possible: {} with kind python; use"),
        ("reach", "python", {"state_range": [0, 2]}, "state_range: got (0, 2); possible: None with kind python; u"),
    ],
)
def test_a_field_that_the_kind_does_not_use_is_refused(
    name: str, kind: str, changes: dict[str, Any], message: str
) -> None:
    environment = presets.environment(name).model_dump(mode="json") | {"kind": kind}
    if kind == "python":
        environment |= {"id": "mypackage.arm:make", "own": {"folder": "toys"}}
    parse(EnvironmentSpec, environment, where="environment")
    with pytest.raises(SpecError) as caught:
        parse(EnvironmentSpec, environment | changes, where="environment")
    assert message in str(caught.value)


@pytest.mark.parametrize("turned", [["side"], ["top", "top"]])
def test_turned_cameras_are_cameras_of_the_environment(turned: list[str]) -> None:
    environment = presets.environment("reach").model_dump(mode="json") | {"turned_cameras": turned}
    with pytest.raises(SpecError, match=r"turned_cameras: got \[.*\]; possible: top, each once; correct it"):
        parse(EnvironmentSpec, environment, where="environment")


def test_ranges_of_seeds_never_meet() -> None:
    ranges = (seeds.EVALUATION, seeds.DEMONSTRATIONS, seeds.PRETRAINING, seeds.TRAINING)
    for a, b in combinations(ranges, 2):
        assert max(a.start, b.start) >= min(a.stop, b.stop)


def test_training_seeds_differ_by_seed_rollout_and_episode_and_stay_in_their_range() -> None:
    found = {seeds.training_seed(s, r, e) for s in range(3) for r in (0, 1, 4095) for e in (0, 1, 4095)}
    assert len(found) == 27
    assert all(seed in seeds.TRAINING for seed in found)


def test_training_seeds_never_wrap_so_what_would_leave_their_range_is_refused() -> None:
    """127 · 4096 · 4096 = 2 130 706 432 of the 2 137 483 648 training seeds are given out, a part to each seed."""
    assert range(127) == seeds.ALGORITHM_SEEDS
    assert seeds.training_seed(0, 0, 0) == 10_000_000
    assert seeds.training_seed(0, 0, 1) == 10_000_001
    assert seeds.training_seed(0, 1, 0) == 10_004_096
    assert seeds.training_seed(1, 0, 0) == 26_777_216
    assert seeds.training_seed(126, 4095, 4095) == 10_000_000 + 2_130_706_432 - 1
    assert seeds.training_seed(127, 0, 2_137_483_648 - 2_130_706_432 - 1) == 2**31 - 1
    with pytest.raises(SpecError, match=r"algorithm.seed: got '128 in rollout 0, episode 0'; possible: seeds 0 to 126"):
        seeds.training_seed(128, 0, 0)
    with pytest.raises(SpecError, match=r"algorithm\.seed: got .* episode -1"):
        seeds.training_seed(0, 0, -1)


def test_groups_begin_alike_side_by_side_and_are_no_other_groups() -> None:
    """Eight environments in groups of four: environments 0–3 and 4–7, episode after episode; rollout 2 of seed 1."""
    numbers = [[e + k * 8 for e in range(8)] for k in range(3)]
    first = 10_000_000 + (4_096 + 2) * 4_096
    found = [[seeds.group_seed(1, 2, n, 4) - first for n in row] for row in numbers]
    assert found == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 4 + [5] * 4]
    ids = [[seeds.group_id(2, n, 4) - 2 * 2**32 for n in row] for row in numbers]
    assert ids == found
    assert [seeds.group_seed(1, 2, n, 1) for n in range(9)] == [seeds.training_seed(1, 2, n) for n in range(9)]


def test_groups_of_different_rollouts_never_meet_and_stay_in_the_training_range() -> None:
    """More episodes than a rollout has seeds: 5000 groups of two of each of three rollouts are 15000 ids. Their seeds
    stay training's, and those of the first 4096 groups are the rollout's own."""
    rollouts = (0, 1, seeds.ROLLOUTS_PER_SEED - 2)
    assert len({seeds.group_id(r, n, 2) for r in rollouts for n in range(10_000)}) == 15_000
    assert max(seeds.group_id(r, 10_000, 2) for r in rollouts) < 2**63
    assert all(seeds.group_seed(0, r, n, 2) in seeds.TRAINING for r in rollouts for n in range(0, 10_000, 7))
    own = {seeds.group_seed(0, r, n, 2) for r in rollouts for n in range(2 * seeds.EPISODES_PER_ROLLOUT)}
    assert len(own) == 3 * seeds.EPISODES_PER_ROLLOUT
    with pytest.raises(SpecError, match="group_size: got 0; possible: 1 or more"):
        seeds.group_seed(0, 0, 0, 0)
    with pytest.raises(SpecError, match=r"algorithm\.seed: got .* episode -1"):
        seeds.group_seed(0, 0, -1, 4)


def test_as_many_rollouts_as_a_workload_can_make_have_seeds_of_their_own() -> None:
    """Its target, as many again that were lost, and those in flight: fewer than a seed has rollouts."""
    in_flight: Any = next(m.le for m in LimitsSpec.model_fields["max_in_flight_jobs"].metadata if hasattr(m, "le"))
    assert 2 * MAX_ROLLOUTS + 1 + in_flight < seeds.ROLLOUTS_PER_SEED


EVALUATE = {"targets": ["t"], "environment": "reach"}
HELD_OUT = {"environment": "reach"}
COLLECT = {"dataset": "d"}


@pytest.mark.parametrize(
    ("cls", "given", "count", "allowed"),
    [
        (EvaluateRequest, {**EVALUATE, "episodes": 1}, 1, seeds.EVALUATION),
        (EvaluateRequest, {**EVALUATE, "episodes": 1000}, 1000, seeds.EVALUATION),
        (EvaluationSpec, {**HELD_OUT, "episodes": 40}, 40, seeds.EVALUATION),
        # Three tries an episode, and what all hosts take at once: 3 · 150 + 4 · 2; 3 · 100 000 + 4 · 8.
        (CollectRequest, COLLECT, 458, seeds.DEMONSTRATIONS),
        (CollectRequest, {**COLLECT, "episodes": 100_000, "hosts": 8}, 300_032, seeds.DEMONSTRATIONS),
    ],
)
def test_chosen_seeds_are_held_to_their_range(
    cls: type[Spec], given: dict[str, Any], count: int, allowed: range
) -> None:
    """The first and the last possible are taken, one beyond is refused, also far beyond and on either side."""
    for first_seed in (allowed.start, allowed.stop - count):
        spec: Any = parse(cls, {**given, "first_seed": first_seed}, where="r")
        assert spec.first_seed == first_seed
    with pytest.raises(SpecError) as caught:
        parse(cls, {**given, "first_seed": allowed.stop - count + 1}, where="r")
    message = str(caught.value)
    if count > 1:
        assert (
            f"first_seed: got {allowed.stop - count + 1}; possible: {allowed.start} to {allowed.stop - count} ("
            in message
        )
    assert "\n" not in message
    for first_seed in (allowed.start - 1, allowed.stop, seeds.PRETRAINING.start, seeds.TRAINING.start, 2**31):
        with pytest.raises(SpecError, match=f"first_seed: got {first_seed}"):
            parse(cls, {**given, "first_seed": first_seed}, where="r")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 127}, "seed: got 127; Input should be less than or equal to 126"),
        ({"jobs": 2001}, "jobs: got 2001; Input should be less than or equal to 2000"),
    ],
)
def test_rl_is_held_to_the_seeds_of_training(changes: dict[str, Any], message: str) -> None:
    algorithm = reach()["algorithm"]
    parse(WorkloadSpec, reach(algorithm=algorithm | {"seed": 126, "jobs": 2000}), where="w")
    with pytest.raises(SpecError, match=message):
        parse(WorkloadSpec, reach(algorithm=algorithm | changes), where="w")


def test_an_evaluation_that_a_workload_may_declare_may_be_requested() -> None:
    """`flows/workload.py` turns the one into the other: at the largest figures of all fields they share."""
    most = parse(
        EvaluationSpec,
        {"environment": "reach", "episodes": 1000, "first_seed": 99_000, "num_envs": 64},
        where="evaluation",
    )
    hosts: Any = next(m.le for m in ResourcesSpec.model_fields["environment_hosts"].metadata if hasattr(m, "le"))
    EvaluateRequest(
        targets=("t",),
        environment=most.environment,
        episodes=most.episodes,
        first_seed=most.first_seed,
        num_envs=most.num_envs,
        hosts=hosts,
    )


def test_what_is_recorded_is_bounded_shown_and_of_one_round() -> None:
    """500 episodes at most, in a workload as in a request."""
    declared: dict[str, Any] = {"environment": "reach", "episodes": 500, "first_seed": 0, "record": "kept"}
    parse(EvaluationSpec, declared, where="e")
    request = declared | {"targets": ["a"]}
    parse(EvaluateRequest, request, where="r")
    for cls, fields in ((EvaluationSpec, declared), (EvaluateRequest, request)):
        with pytest.raises(SpecError, match="record: got 501 episodes; possible: up to 500; evaluate fewer"):
            parse(cls, fields | {"episodes": 501}, where="x")
    for changes in ({"blanked": True}, {"targets": ["a", "b"]}, {"rounds": 2}):
        with pytest.raises(SpecError, match="possible: one round that shows pictures; leave record out"):
            parse(EvaluateRequest, request | changes, where="x")


def test_sizes_left_out_are_the_published_ones() -> None:
    """StarVLA's QwenOFT and QwenGR00T on Qwen3-VL-4B, openpi's gemma_300m, OpenVLA-OFT's LoRA."""
    widths = {"horizon": 8, "action_width": 7, "state_width": 7, "proprioception": "head"}
    published: dict[str, dict[str, Any]] = {
        "oft": {"hidden_width": 2 * presets.base_model("qwen3-vl-4b").hidden_width, "residual_blocks": 2},
        "gr00t": {
            "hidden_width": 1024,
            "layers": 16,
            "heads": 12,
            "head_width": 64,
            "future_tokens": 32,
            "denoising_steps": 4,
            "time_buckets": 1000,
            "beta_alpha": 1.5,
            "beta_beta": 1.0,
            "time_scale": 0.999,
            "repeated_steps": 8,
        },
        # Its depth, key/value heads and their width are those of the base: 18, 1 and 256 of PaliGemma.
        "pi": {"hidden_width": 1024, "mlp_width": 4096, "heads": 8, "denoising_steps": 10},
        "lora": {"rank": 32, "alpha": 16.0, "target_modules": get_args(LoraTarget)},
    }
    assert published.keys() == MODULE_SPECS.keys()
    for kind, sizes in published.items():
        spec = MODULE_SPECS[kind].model_validate(widths)
        assert {name: getattr(spec, name) for name in sizes} == sizes, kind
    base = presets.base_model("paligemma-2b")
    assert (base.num_layers, base.num_key_value_heads, base.head_width) == (18, 1, 256)


def test_the_gpu_cluster_keeps_the_large_base_resident() -> None:
    cluster = presets.cluster("gpu")
    assert cluster.base_models == ("qwen3-vl-4b",)
    assert presets.base_model("qwen3-vl-4b").device == "cuda"
