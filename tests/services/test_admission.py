"""Admission: what a workload becomes, and every way in which it can ask for what the platform has not."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from configs import environment_folders, presets
from configs.cluster import ClusterSpec
from configs.errors import SpecError
from configs.home import Home
from configs.model import LoraTarget
from configs.requests import CollectRequest
from configs.spec import parse
from configs.transforms import TransformsSpec
from configs.workload import EvaluationSpec, WorkloadSpec
from joynexus.environments import here
from kernels.peft_adapters import adapter_shapes, exported
from services.admission import admit, admit_all
from services.environments import renderer
from storage.demonstrations import LeRobotWriter
from storage.peft_files import write_adapter

LAPTOP = presets.cluster("laptop")


@pytest.fixture(autouse=True)
def _a_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, the user names a Vulkan driver."""
    monkeypatch.setenv("VK_ICD_FILENAMES", "/usr/share/vulkan/icd.d/some.json")


@pytest.fixture
def without_renderer(_a_renderer: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a driver named by the user nor one that can be found."""
    monkeypatch.delenv("VK_ICD_FILENAMES")
    monkeypatch.setenv("JOYNEXUS_ENVIRONMENTS", str(tmp_path))  # nor another simulator
    monkeypatch.setattr(renderer, "_DRIVER_FOLDERS", (tmp_path,))
    monkeypatch.setattr(renderer, "SWIFTSHADER_PATHS", ())


@pytest.fixture
def more_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Presets beside the shipped ones: Reach-v0 with larger pictures, with two cameras, with another camera, and with
    its camera turned."""
    folder = tmp_path / "presets"
    shutil.copytree(presets.FOLDER, folder)
    reach = presets.environment("reach").model_dump(mode="json")
    top = reach["cameras"][0]
    for name, changes in {
        "reach-large": {"cameras": [{**top, "height": 96, "width": 96}]},
        "reach-two": {"cameras": [top, {**top, "name": "side"}]},
        "reach-side": {"cameras": [{**top, "name": "side"}]},
        "reach-turned": {"turned_cameras": ["top"]},
    }.items():
        text = yaml.safe_dump(reach | {"name": name} | changes)
        (folder / "environments" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(presets, "FOLDER", folder)


def workload(name: str = "reach", **by_path: Any) -> WorkloadSpec:
    """A shipped workload with values at dotted paths replaced (`__` for the dot)."""
    spec = copy.deepcopy(presets.workload(name).model_dump(mode="json"))
    for path, value in by_path.items():
        *parents, last = path.split("__")
        at = spec
        for parent in parents:
            at = at[parent]
        at[last] = value
    return parse(WorkloadSpec, spec, where="w")


def refused(spec: WorkloadSpec, home: Path, cluster: ClusterSpec = LAPTOP) -> list[str]:
    """The faults that `spec` is refused with, without the tenant before them."""
    with pytest.raises(SpecError) as caught:
        admit(spec, Home(home), cluster)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{spec.tenant.name}: ")
    fields = (
        "base_model",
        "environment",
        "data.",
        "action_module.",
        "cameras",
        "evaluation.",
        "resources.",
        "transforms.",
        "algorithm.",
        "start_from",
    )
    faults = message.removeprefix(f"{spec.tenant.name}: ").split("; ")
    starts = [i for i, part in enumerate(faults) if part.startswith(fields) and ": got " in part]
    return ["; ".join(faults[i:j]) for i, j in zip(starts, [*starts[1:], len(faults)], strict=True)]


def test_a_compiled_workload_carries_all_that_it_declared(tmp_path: Path) -> None:
    spec = workload(start="continue", evaluation__sampled=True)
    config = admit(spec, Home(tmp_path), LAPTOP)
    compiled = config.model_dump(mode="json")
    for field in ("trainable", "start", "start_from", "algorithm", "evaluation", "limits", "resources", "outputs"):
        assert compiled[field] == spec.model_dump(mode="json")[field], field
    assert config.trainable.parameterisation == "action_module"
    assert admit(workload(), Home(tmp_path), LAPTOP).start == "fresh"
    assert config.policy.instruction == "reach the red target"
    assert config.sample_count == 8 * 64


def test_a_job_that_fills_the_services_memory_is_refused(tmp_path: Path) -> None:
    """64 × 64 × 3 = 12,288 bytes a sample: 1 GiB holds 87,381 of them; 8 × 10,923 = 87,384 are three too many."""
    spec = workload(algorithm__rollout_steps=10_923)
    (fault,) = refused(spec, tmp_path)
    assert "algorithm.num_envs × rollout_steps: got '87384 samples of 12288 bytes'" in fault
    assert "up to 87381 (1073741824 bytes a job)" in fault
    admit(workload(algorithm__rollout_steps=10_922), Home(tmp_path), LAPTOP)


@pytest.mark.usefixtures("without_renderer")
@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (workload("push", evaluation=None), "environment: got 'pushcube'"),
        (workload("push", environment="reach"), "evaluation.environment: got 'pushcube'"),
    ],
    ids=["training", "evaluation"],
)
def test_maniskill_without_a_renderer_is_refused(spec: WorkloadSpec, field: str, tmp_path: Path) -> None:
    (fault,) = [line for line in refused(spec, tmp_path) if "without a renderer" in line]
    assert fault.startswith(f"{field}; possible: without a renderer reach; choose one of these or install one (")
    assert "apt-get install chromium-common" in fault


@pytest.mark.usefixtures("without_renderer")
def test_a_renderer_is_asked_for_only_by_maniskill_and_only_where_this_machine_renders(tmp_path: Path) -> None:
    admit(workload(), Home(tmp_path), LAPTOP)
    elsewhere = LAPTOP.model_copy(update={"dask_scheduler": "tcp://10.0.0.7:8786"})
    admit(workload("push"), Home(tmp_path), elsewhere)


def test_more_hosts_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    small = LAPTOP.model_copy(update={"max_environment_hosts": 2})
    admit(workload(resources__environment_hosts=2), Home(tmp_path), small)
    assert refused(workload(resources__environment_hosts=3), tmp_path, small) == [
        "resources.environment_hosts: got 3; possible: up to 2, the max_environment_hosts of 'laptop'; ask for fewer "
        "hosts"
    ]


def test_more_hosts_than_environments_are_refused(tmp_path: Path) -> None:
    """Hosts of RL and of its evaluation are counted apart: the larger of the two bounds them."""
    roomy = LAPTOP.model_copy(update={"max_environment_hosts": 16})
    admit(workload(resources__environment_hosts=8), Home(tmp_path), roomy)
    assert refused(workload(resources__environment_hosts=9), tmp_path, roomy) == [
        "resources.environment_hosts: got 9; possible: up to 8 with algorithm.num_envs 8 and evaluation.num_envs 8; "
        "ask for fewer hosts or more environments: a host steps at least one"
    ]
    alone = workload(resources__environment_hosts=9, evaluation=None)
    assert "up to 8 with algorithm.num_envs 8; ask" in refused(alone, tmp_path, roomy)[0]
    admit(workload(resources__environment_hosts=9, evaluation__num_envs=9), Home(tmp_path), roomy)


@pytest.mark.usefixtures("more_environments")
@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ("reach-two", "side 64×64, top 64×64"),
        ("reach-side", "side 64×64"),
    ],
)
def test_an_evaluation_that_shows_other_pictures_than_training_is_refused(
    environment: str, shown: str, tmp_path: Path
) -> None:
    """A camera too many or too few is refused by the base, mid-way."""
    assert refused(workload(evaluation__environment=environment), tmp_path) == [
        f"evaluation.environment: got '{environment} (cameras {shown})'; possible: cameras top 64×64, those of "
        "environment 'reach'; choose one that fits"
    ]


@pytest.mark.usefixtures("more_environments")
def test_pictures_of_another_size_are_refused_unless_one_size_is_declared_for_both(tmp_path: Path) -> None:
    """Larger ones would be resized unseen."""
    assert refused(workload(evaluation__environment="reach-large"), tmp_path) == [
        "evaluation.environment: got 'reach-large (cameras top 96×96)'; possible: cameras top 64×64, those of "
        "environment 'reach'; choose one that fits, or one size for both (transforms.cameras)"
    ]
    one_size = {"cameras": {"top": {"height": 48, "width": 64}}}
    found = admit(workload(evaluation__environment="reach-large", transforms=one_size), Home(tmp_path), LAPTOP)
    assert [(c.name, c.height, c.width) for c in found.policy.cameras] == [("top", 48, 64)]
    assert found.policy.schema_signature != admit(workload(), Home(tmp_path), LAPTOP).policy.schema_signature


@pytest.mark.usefixtures("more_environments")
def test_what_learns_from_turned_pictures_is_another_interface_and_evaluated_on_such_alone(tmp_path: Path) -> None:
    upright = admit(workload(), Home(tmp_path), LAPTOP).policy
    turned = admit(
        workload(environment="reach-turned", evaluation__environment="reach-turned"), Home(tmp_path), LAPTOP
    ).policy
    assert (upright.turned_cameras, turned.turned_cameras) == ((), ("top",))
    assert upright.schema_signature != turned.schema_signature
    assert refused(workload(evaluation__environment="reach-turned"), tmp_path) == [
        "evaluation.environment: got 'reach-turned (turned cameras top)'; possible: turned cameras none, those of "
        "environment 'reach'; choose one that shows pictures as they were learned from"
    ]
    assert refused(workload(environment="reach-turned"), tmp_path) == [
        "evaluation.environment: got 'reach (turned cameras none)'; possible: turned cameras top, those of "
        "environment 'reach-turned'; choose one that shows pictures as they were learned from"
    ]


@pytest.mark.usefixtures("more_environments")
@pytest.mark.parametrize("recorded", [None, [], ["top"]])
def test_recorded_pictures_are_turned_as_their_dataset_says_or_as_where_they_are_evaluated(
    tmp_path: Path, recorded: list[str] | None
) -> None:
    """What others recorded says nothing, and is evaluated where it looks the same: there it was turned or not."""
    provenance = {} if recorded is None else {"turned_cameras": recorded}
    widths = {"cameras": {"top": (64, 64)}, "state_width": 2, "action_width": 2}
    with LeRobotWriter(tmp_path / "data", fps=10, rewards=True, provenance=provenance, **widths) as writer:
        picture, vectors = np.zeros((3, 64, 64, 3), np.uint8), np.arange(6, dtype=np.float32).reshape(3, 2)
        writer.add_episode({"top": picture}, vectors, vectors, "reach", np.ones(3, np.float32))
    offline = {"environment": None, "data": {"dataset": str(tmp_path / "data")}, "algorithm": AWR}
    for environment, shown in (("reach", []), ("reach-turned", ["top"])):
        spec = workload(**offline, evaluation__environment=environment)
        if recorded not in (None, shown):
            (fault,) = refused(spec, tmp_path)
            assert fault.startswith(f"evaluation.environment: got '{environment} (turned cameras ")
            continue
        found = admit(spec, Home(tmp_path), LAPTOP).policy
        same = admit(workload(environment=environment, evaluation=None), Home(tmp_path), LAPTOP).policy
        assert found.turned_cameras == same.turned_cameras == tuple(shown)
        assert found.schema_signature == same.schema_signature
    alone = admit(workload(**offline, evaluation=None), Home(tmp_path), LAPTOP).policy
    assert alone.turned_cameras == (None if recorded is None else tuple(recorded))


def test_an_evaluation_of_other_widths_is_refused(tmp_path: Path) -> None:
    faults = refused(workload(evaluation__environment="pushcube"), tmp_path)
    assert faults == [
        "evaluation.environment: got 'pushcube (state_width 25)'; possible: state_width 2; choose one that fits",
        "evaluation.environment: got 'pushcube (action_width 4)'; possible: action_width 2; choose one that fits",
        "evaluation.environment: got 'pushcube (cameras base 64×64)'; possible: cameras top 64×64, those of "
        "environment 'reach'; choose one that fits",
    ]


def test_a_dataset_that_is_there_is_not_recorded_over(tmp_path: Path) -> None:
    """Told before anything is trained, not by the evaluation at the end."""
    (tmp_path / "datasets" / "taken").mkdir(parents=True)
    admit(workload(evaluation__record="free"), Home(tmp_path), LAPTOP)
    assert refused(workload(evaluation__record="taken"), tmp_path) == [
        "evaluation.record: got 'taken'; possible: the name of a dataset that is not there yet; choose another name"
    ]


@pytest.mark.usefixtures("more_environments")
def test_more_cameras_than_the_base_takes_are_refused_and_other_sizes_are_not(tmp_path: Path) -> None:
    one_camera = LAPTOP.model_copy(update={"base_models": ("one-camera",)})
    base = presets.base_model("tiny-qwen3-vl").model_dump(mode="json") | {"name": "one-camera", "max_cameras": 1}
    (presets.FOLDER / "models" / "one-camera.yaml").write_text(yaml.safe_dump(base))
    spec = workload(base_model="one-camera", environment="reach-two", evaluation=None)
    assert refused(spec, tmp_path, one_camera) == [
        "cameras: got \"2 (of environment 'reach-two')\"; possible: at most 1 for 'one-camera'; use fewer cameras"
    ]
    admit(workload(environment="reach-large", evaluation=None), Home(tmp_path), LAPTOP)  # resized to the base's size


def test_all_faults_are_told_at_once_also_behind_what_could_not_be_looked_up(tmp_path: Path) -> None:
    spec = workload(
        "demos",
        base_model="gpt",
        evaluation__environment="reach",
        evaluation__num_envs=4,
        resources__environment_hosts=9,
    )
    assert [fault.split(":")[0] for fault in refused(spec, tmp_path)] == [
        "base_model",  # not resident
        "data.dataset",  # not there
        "evaluation.environment",  # state width
        "evaluation.environment",  # action width
        "resources.environment_hosts",  # more than the cluster's
        "resources.environment_hosts",  # more than environments
    ]
    unknown = workload(environment="moon", evaluation__environment="mars")
    assert [fault.split(";")[0] for fault in refused(unknown, tmp_path)] == [
        "environment: got 'moon'",
        "evaluation.environment: got 'mars'",
    ]


def test_several_workloads_are_admitted_all_or_none_with_the_faults_of_all(tmp_path: Path) -> None:
    good = workload(tenant__name="good")
    assert [c.policy_key for c in admit_all([good, workload()], Home(tmp_path), LAPTOP)] == ["good.rl", "reach.rl"]
    with pytest.raises(SpecError) as caught:
        admit_all([good, good, workload(environment="moon"), workload("demos")], Home(tmp_path), LAPTOP)
    message = str(caught.value)
    assert message.startswith("tenant.name: got 'good'; possible: each tenant once in a run; rename one of the tenants")
    assert "reach: environment: got 'moon'" in message
    assert "demos: data.dataset: got 'pushcube-demonstrations'" in message


def test_a_module_that_does_not_learn_by_rl_is_refused_there(tmp_path: Path) -> None:
    flow = {"kind": "gr00t", "horizon": 1, "action_width": 2, "state_width": 2, "proprioception": "head"}
    (fault,) = refused(workload(action_module=flow), tmp_path)
    assert fault == (
        "action_module.policy: got None; possible: flow_sde, flow_noise for 'gr00t' with task 'rl'; declare one, "
        "in the supervised workload before it too"
    )


def test_an_entropy_bonus_without_a_gradient_is_refused(tmp_path: Path) -> None:
    """The deviation of Flow-SDE has no parameters; those of Flow-Noise and of a Gaussian have."""
    (fault,) = refused(workload("reach-flow", algorithm__entropy_coef=0.01), tmp_path)
    assert fault == (
        "algorithm.entropy_coef: got 0.01; possible: 0 with the policy of 'gr00t', whose deviation is not learned: "
        "its entropy is a constant; leave it out, or declare policy flow_noise"
    )
    assert presets.workload("reach-flow").algorithm.entropy_coef == 0
    noise = workload("reach-flow", algorithm__entropy_coef=0.01, action_module__policy={"kind": "flow_noise"})
    for spec in (noise, workload("reach", algorithm__entropy_coef=0.01)):
        assert admit(spec, Home(tmp_path), LAPTOP).algorithm.entropy_coef == 0.01


def test_an_experts_heads_are_held_against_the_bases(tmp_path: Path) -> None:
    """The tiny Qwen3-VL has two key/value heads, the tiny PaliGemma one."""
    pi = {"kind": "pi", "horizon": 1, "action_width": 2, "state_width": 2, "proprioception": "head", "heads": 3}
    (fault, *_) = [f for f in refused(workload(action_module=pi), tmp_path) if "heads" in f]
    assert fault == (
        "action_module.heads: got 3; possible: multiples of 2, the key/value heads of 'tiny-qwen3-vl'; change them"
    )
    assert not [f for f in refused(workload(action_module=pi, base_model="tiny-paligemma"), tmp_path) if "heads" in f]


def test_a_module_inside_the_base_shares_no_features(tmp_path: Path) -> None:
    lora = {"kind": "lora", "horizon": 1, "action_width": 2, "state_width": 2, "proprioception": "head"}
    admit(workload(action_module=lora), Home(tmp_path), LAPTOP)
    (fault,) = refused(workload(action_module=lora, resources__reuse_features="shared"), tmp_path)
    assert fault.startswith("resources.reuse_features: got 'shared'; possible: own or never with module 'lora'; ")


LORA = {"kind": "lora", "horizon": 1, "action_width": 2, "state_width": 2, "proprioception": "head"}


def an_adapter(folder: Path, rank: int = 4, alpha: int = 8, targets: tuple[LoraTarget, ...] = ("q_proj",)) -> str:
    """PEFT's files of a random adapter of the tiny base."""
    base = presets.base_model("tiny-qwen3-vl")
    rng = np.random.default_rng(0)
    own = {n: rng.normal(size=s).astype(np.float32) for n, s in adapter_shapes(base, rank, targets).items()}
    write_adapter(folder, *exported(own, base, rank=rank, alpha=alpha))
    return str(folder)


def test_an_adapter_to_start_from_must_be_the_declared_one(tmp_path: Path) -> None:
    path = an_adapter(tmp_path / "given")
    declared = LORA | {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}
    assert admit(workload(action_module=declared, start_from=path), Home(tmp_path), LAPTOP).start_from == path
    for changes, fault in (
        ({"rank": 8}, "start_from: action_module.rank: got 8; possible: 4, the file's; declare what it has"),
        ({"alpha": 9}, "start_from: action_module.alpha: got 9.0; possible: 8.0, the file's; declare what it has"),
        ({"target_modules": ["k_proj"]}, "start_from: action_module.target_modules: got ['k_proj']; possible: ['q_pr"),
    ):
        (told,) = refused(workload(action_module=declared | changes, start_from=path), tmp_path)
        assert told.startswith(fault)
    (told,) = refused(workload(action_module=declared, start_from=str(tmp_path / "none")), tmp_path)
    assert told.startswith(f"start_from: {tmp_path}/none/adapter_config.json: got ")
    assert told.endswith("adapter_config.json and adapter_model.safetensors; save the adapter with PEFT's safetensors")


def test_a_pickle_is_no_adapter_to_start_from(tmp_path: Path) -> None:
    """PEFT's older form of the weights is not looked at."""
    folder = Path(an_adapter(tmp_path / "given"))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    declared = LORA | {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}
    (told,) = refused(workload(action_module=declared, start_from=str(folder)), tmp_path)
    assert "adapter_model.safetensors" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": "/x"}, "start_from: got '/x' with start 'fresh' and action_module.kind 'oft'; possible: 'fre"),
        ({"start_from": "/x", "action_module": LORA, "start": "continue"}, "with start 'continue' and action_module.k"),
        ({"start_from": "x", "action_module": LORA}, "start_from: got 'x'; possible: an absolute path without '..'"),
        ({"start_from": "/a/../x", "action_module": LORA}, "start_from: got '/a/../x'; possible: an absolute path wi"),
    ],
)
def test_where_there_is_no_place_for_an_adapter_none_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        workload(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_that_could_not_be_compared_are_refused(tmp_path: Path) -> None:
    """64 environments in groups of 6; 4 chunks of four steps where an episode may take 20."""
    assert refused(workload("reach-grpo", algorithm__group_size=6), tmp_path) == [
        "algorithm.group_size: got 6; possible: 2, 4, 8, 16, 32, 64 with num_envs 64, which it divides; "
        "change one: the episodes of a group run in environments side by side"
    ]
    (fault,) = refused(workload("reach-grpo", algorithm__rollout_steps=4), tmp_path)
    assert fault.startswith("algorithm.rollout_steps: got 4; possible: 5 or more with kind 'grpo' (20 steps an episode")
    by_ones = workload("reach-grpo", algorithm__rollout_steps=20, action_module__horizon=1)
    assert admit(by_ones, Home(tmp_path), LAPTOP).sample_count == 1280


def test_every_algorithm_that_collects_is_admitted_with_modules_that_learn_by_rl(tmp_path: Path) -> None:
    for name, kind, module in (("reach-grpo", "grpo", "oft"), ("reach-flow", "ppo", "gr00t")):
        config = admit(workload(name), Home(tmp_path), LAPTOP)
        assert (config.algorithm.kind, config.policy.action_module.kind) == (kind, module)


AWR = {"kind": "awr", "jobs": 2, "batches_per_job": 2, "microbatch_size": 8, "optimizer": {"learning_rate": 0.001}}
WIDTHS = {"horizon": 1, "action_width": 2, "state_width": 2, "proprioception": "head", "hidden_width": 64}
GR00T = WIDTHS | {"kind": "gr00t", "layers": 2, "heads": 2, "head_width": 32, "future_tokens": 4}
PI = WIDTHS | {"kind": "pi", "mlp_width": 128, "heads": 4}


def recorded(folder: Path, *, rewards: bool = True) -> str:
    """A dataset of one episode of three steps; its path."""
    widths = {"cameras": {"top": (64, 64)}, "state_width": 2, "action_width": 2}
    with LeRobotWriter(folder, fps=10, rewards=rewards, **widths) as writer:
        picture, vectors = np.zeros((3, 64, 64, 3), np.uint8), np.arange(6, dtype=np.float32).reshape(3, 2)
        writer.add_episode({"top": picture}, vectors, vectors, "reach", np.ones(3, np.float32) if rewards else None)
    return str(folder)


@pytest.mark.parametrize("rewards", [True, False])
def test_offline_rl_takes_a_dataset_that_holds_rewards(tmp_path: Path, rewards: bool) -> None:
    """As jobs of recorded data it has no rollouts, and its jobs are trained alone."""
    dataset = recorded(tmp_path / "data", rewards=rewards)
    offline = {"environment": None, "data": {"dataset": dataset}, "algorithm": AWR}
    spec = workload(**offline)
    if not rewards:
        (fault,) = refused(spec, tmp_path)
        assert fault.startswith("data.dataset: got \"dataset '")
        assert "without rewards\"; possible: datasets with a column next.reward for algorithm 'awr'" in fault
        return
    config = admit(spec, Home(tmp_path), LAPTOP)
    policy = config.scheduler_policy()
    assert (config.policy_key, config.sample_count, config.datasets[0].path) == ("reach.rl", 16, str(tmp_path / "data"))
    assert (policy["task_type"], policy["max_active_rollouts"], policy["base_model"]) == ("sft", None, None)
    assert (config.features_travel, config.environment) == (False, None)


def test_the_offline_preset_takes_the_dataset_that_was_collected_for_it(tmp_path: Path) -> None:
    """Refused for want of that dataset alone, or of its rewards, until what was executed lies under its name."""
    home, spec = Home(tmp_path), workload("reach-offline")
    (fault,) = refused(spec, tmp_path)
    assert fault.startswith("data.dataset: got 'reach-executed'; possible: no dataset yet; collect it first")
    assert spec.evaluation is not None
    request = CollectRequest(
        dataset="reach-executed", environment=spec.evaluation.environment, record="executed", action_noise=2.0
    )
    for rewards in (False, True):
        recorded(home.datasets / request.dataset, rewards=rewards)
        if not rewards:
            (fault,) = refused(spec, tmp_path)
            assert "possible: datasets with a column next.reward" in fault
            shutil.rmtree(home.datasets / request.dataset)
    config = admit(spec, home, LAPTOP)
    assert (config.policy_key, config.algorithm.kind, config.sample_count) == ("reach-offline.rl", "awr", 768)


def test_rollouts_at_one_time_are_bounded_only_where_there_are_any(tmp_path: Path) -> None:
    """Offline RL and fine-tuning roll nothing out; what they were written out with before still reads."""
    offline = {"environment": None, "data": {"dataset": str(tmp_path)}, "algorithm": AWR}
    for name, which, changes in (("reach", "algorithm 'awr'", offline), ("demos", "task 'sft'", {})):
        assert workload(name, **changes).limits.max_active_rollouts == 1
        with pytest.raises(SpecError) as caught:
            workload(name, **changes, limits__max_active_rollouts=2)
        assert str(caught.value).endswith(
            f"limits.max_active_rollouts: got 2; possible: 1 with {which}, which rolls nothing out; leave it out"
        )
    assert workload("reach", limits__max_active_rollouts=2).limits.max_active_rollouts == 2


@pytest.mark.parametrize("module", [GR00T, PI], ids=lambda module: module["kind"])
def test_offline_rl_takes_modules_that_denoise_where_a_policy_gives_them_a_critic(
    tmp_path: Path, module: dict[str, Any]
) -> None:
    """As RL by rollouts does; the refusal says which policies there are."""
    offline = {"environment": None, "data": {"dataset": recorded(tmp_path / "data")}, "algorithm": AWR}
    for policy in ({"kind": "flow_sde"}, {"kind": "flow_noise"}):
        config = admit(workload(action_module=module | {"policy": policy}, **offline), Home(tmp_path), LAPTOP)
        assert (config.algorithm.kind, config.policy.action_module.kind) == ("awr", module["kind"])
        assert config.policy.action_module.policy.kind == policy["kind"]
    assert refused(workload(action_module=module, **offline), tmp_path) == [
        f"action_module.policy: got None; possible: flow_sde, flow_noise for {module['kind']!r} with task 'rl'; "
        "declare one, in the supervised workload before it too"
    ]


def published(folder: Path) -> str:
    """A dataset with the columns and widths of LIBERO as LeRobot publishes it, at a quarter of its size; its path."""
    widths = {"cameras": {"image": (64, 64), "image2": (32, 64)}, "state_width": 8, "action_width": 7}
    with LeRobotWriter(folder, fps=10, version="v2.1", **widths) as writer:
        pictures = {name: np.zeros((2, h, w, 3), np.uint8) for name, (h, w) in widths["cameras"].items()}
        writer.add_episode(pictures, np.ones((2, 8), np.float32), np.ones((2, 7), np.float32), "put it there")
    return str(folder)


WIDE = {"state_width": 8, "action_width": 7}
LIBERO_WIDTHS = {"kind": "oft", "horizon": 1, "action_width": 7, "state_width": 8, "proprioception": "head"}


def supervised(data: dict[str, Any], **module: Any) -> WorkloadSpec:
    changes = {"data": data, "action_module": LIBERO_WIDTHS | module, "evaluation": None}
    return workload("demos", **changes)


def test_columns_of_a_dataset_are_bound_by_preset_or_as_declared(tmp_path: Path) -> None:
    """The policy knows cameras by the declared names and sizes; what is read by is compiled with it."""
    path, home = published(tmp_path / "data"), Home(tmp_path)
    config = admit(supervised({"dataset": path, "preset": "libero"}), home, LAPTOP)
    assert [(c.name, c.height, c.width) for c in config.policy.cameras] == [
        ("agentview", 64, 64),
        ("wrist", 32, 64),
    ]
    assert [d.columns for d in config.datasets] == [presets.columns("libero")]
    own = {"cameras": {"eye": {"key": "observation.images.image2", "height": 48, "width": 48}}}
    config = admit(supervised({"dataset": path, "columns": own}), home, LAPTOP)
    assert [(c.name, c.height, c.width) for c in config.policy.cameras] == [("eye", 48, 48)]
    plain = admit(supervised({"dataset": path}), home, LAPTOP)
    assert [c.name for c in plain.policy.cameras] == ["image", "image2"]
    assert [(d.path, d.columns, d.weight) for d in plain.datasets] == [(path, None, 1.0)]
    assert plain.policy.schema_signature != config.policy.schema_signature


def test_cameras_that_are_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    path = published(tmp_path / "data")
    (first, second, third) = refused(supervised({"dataset": path, "preset": "calvin"}), tmp_path)
    there = "observation.images.image (64 × 64), observation.images.image2 (32 × 64) of dataset data"
    for fault, name in ((first, "top"), (second, "wrist")):
        assert fault == (
            f"data.columns.cameras.{name}.key: got 'observation.images.{name}'; possible: {there}; bind cameras by name"
        )
    assert third.startswith("data.columns.state_width: got 15; possible: 8, the width of observation.state in dataset")
    (fault,) = refused(supervised({"dataset": path, "preset": "bridge"}), tmp_path)
    assert fault.startswith("data.preset: got 'bridge'; possible: calvin, calvin-absolute, calvin-relative, libero, ")


def test_widths_that_are_not_the_datasets_are_refused_at_admission(tmp_path: Path) -> None:
    path = published(tmp_path / "data")
    faults = refused(supervised({"dataset": path, "preset": "libero"}, action_width=6, state_width=15), tmp_path)
    assert [fault.split(" (of")[0] for fault in faults] == [
        "action_module.state_width: got 15; possible: 8",
        "action_module.action_width: got 6; possible: 7",
    ]


def test_a_preset_and_columns_of_ones_own_exclude_each_other() -> None:
    own = {"cameras": {"eye": {"key": "observation.images.image2"}}}
    with pytest.raises(SpecError, match="preset: got 'libero' beside columns; possible: one of them; remove one"):
        supervised({"dataset": "d", "preset": "libero", "columns": own})


def test_pictures_larger_than_a_policy_takes_are_refused_unless_they_are_resized(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with LeRobotWriter(path, fps=10, cameras={"top": (8, 1280)}, state_width=8, action_width=7) as writer:
        vectors = {"state": np.ones((1, 8), np.float32), "action": np.ones((1, 7), np.float32)}
        writer.add_episode({"top": np.zeros((1, 8, 1280, 3), np.uint8)}, **vectors, task="go")
    (fault,) = refused(supervised({"dataset": str(path)}), tmp_path)
    assert fault.startswith("data.columns.cameras: got 'top (8 × 1280)'; possible: up to 1024 pixels a side; declare a")
    smaller = {"cameras": {"top": {"key": "observation.images.top", "height": 64, "width": 64}}}
    admit(supervised({"dataset": str(path), "columns": smaller}), Home(tmp_path), LAPTOP)


def test_a_simulator_that_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOYNEXUS_ENVIRONMENTS", str(tmp_path))
    spec = presets.workload("libero")
    with pytest.raises(SpecError) as caught:
        admit(spec, Home(tmp_path), LAPTOP)
    for field in ("environment", "evaluation.environment"):
        given = f"{field}: got 'libero-object-small'; possible: one that is installed here; "
        assert given + "run `joynexus env install libero`" in str(caught.value)


@pytest.mark.parametrize("field", ["environment", "evaluation.environment"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("far", "token_variable: 'JOYNEXUS_NO_TOKEN' holds 0 characters; possible: 16 characters or more"),
        ("mine", "own.folder: got 'toys'; possible: none is registered; run `joynexus env register NAME FOLDER`"),
    ],
)
def test_an_environment_elsewhere_or_of_ones_own_is_asked_for_its_token_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str, field: str
) -> None:
    folder = tmp_path / "presets"
    shutil.copytree(presets.FOLDER, folder)
    reach = presets.environment("reach").model_dump(mode="json")
    own = {"kind": "python", "id": "mypackage.arm:make", "own": {"folder": "toys"}}
    remote = {"remote": {"address": "127.0.0.1:1", "token_variable": "JOYNEXUS_NO_TOKEN"}}
    for preset, changes in (("mine", own), ("far", remote)):
        (folder / "environments" / f"{preset}.yaml").write_text(yaml.safe_dump(reach | {"name": preset} | changes))
    monkeypatch.setattr(presets, "FOLDER", folder)
    monkeypatch.delenv("JOYNEXUS_NO_TOKEN", raising=False)
    spec = workload(**{field.replace(".", "__"): name})
    home = Home(tmp_path / "home")
    with pytest.raises(SpecError) as caught:
        admit(spec, home, LAPTOP)
    assert f"{field}: {name}: {reason}" in str(caught.value)
    environment = presets.environment(name)
    assert here(environment, home).startswith(reason)
    monkeypatch.setenv("JOYNEXUS_NO_TOKEN", "a-token-of-some-length")
    environment_folders.register(home, "toys", tmp_path)
    admit(spec, home, LAPTOP)
    assert here(environment, home).startswith("ready" if name == "mine" else "at 127.0.0.1:1; ")


def mixture(folder: Path, **second: Any) -> dict[str, Any]:
    """Two datasets of LIBERO's widths, the second of which is drawn three times as often; what is learned from."""
    one = published(folder / "one")
    two = published(folder / "two")
    return {
        "mixture": [{"dataset": one, "preset": "libero"}, {"dataset": two, "preset": "libero", "weight": 3} | second]
    }


def test_several_datasets_are_one_interface_with_statistics_by_weight(tmp_path: Path) -> None:
    """All states are 1 in the one and 5 in the other, drawn three times as often: mean 4, variance ¼·9 + ¾·1 = 3."""
    data = mixture(tmp_path)
    with LeRobotWriter(tmp_path / "five", fps=10, cameras={"image": (64, 64), "image2": (32, 64)}, **WIDE) as writer:
        pictures = {"image": np.zeros((1, 64, 64, 3), np.uint8), "image2": np.zeros((1, 32, 64, 3), np.uint8)}
        writer.add_episode(pictures, np.full((1, 8), 5, np.float32), np.full((1, 7), 5, np.float32), "go")
    data["mixture"][1]["dataset"] = str(tmp_path / "five")
    found = admit(supervised(data), Home(tmp_path), LAPTOP)
    assert [(Path(d.path).name, d.weight) for d in found.datasets] == [("one", 1.0), ("five", 3.0)]
    for statistics, width in ((found.policy.state, 8), (found.policy.action, 7)):
        np.testing.assert_allclose(statistics.mean, [4.0] * width)
        np.testing.assert_allclose(np.square(statistics.std), [3.0] * width)
        assert (statistics.min, statistics.max) == ((1.0,) * width, (5.0,) * width)


def test_datasets_that_show_or_do_something_else_are_not_mixed(tmp_path: Path) -> None:
    small = {"agentview": {"key": "observation.images.image", "height": 8, "width": 8}}
    data = mixture(tmp_path, preset=None, columns={"cameras": small})
    (fault,) = refused(supervised(data), tmp_path)
    assert fault.startswith(
        "data.mixture: dataset two, cameras: got {'agentview': (8, 8)}; possible: {'agentview': (64, 64), "
    )
    (fault,) = refused(supervised(mixture(tmp_path / "b", dataset=str(tmp_path / "three"))), tmp_path)
    assert fault.startswith("data.dataset: got ")
    one_size = {"cameras": {"agentview": {"height": 8, "width": 8}, "wrist": {"height": 8, "width": 8}}}
    wanted = [("agentview", 8, 8), ("wrist", 8, 8)]
    two = {"cameras": {"agentview": {"key": "observation.images.image"}, "wrist": {"key": "observation.images.image2"}}}
    spec = supervised(mixture(tmp_path / "c", preset=None, columns=two)).model_copy(
        update={"transforms": TransformsSpec.model_validate(one_size)}
    )
    found = admit(spec, Home(tmp_path), LAPTOP)
    assert [(c.name, c.height, c.width) for c in found.policy.cameras] == wanted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "dataset: got None with a mixture of 0; possible: one of the two"),
        ({"dataset": "d", "mixture": [{"dataset": "e"}]}, "dataset: got 'd' with a mixture of 1"),
        ({"mixture": [{"dataset": "e"}], "preset": "libero"}, "mixture: got preset or columns beside it"),
        ({"mixture": [{"dataset": "e", "weight": 0}]}, "mixture.0.weight"),
    ],
)
def test_one_dataset_or_several_is_declared(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        supervised(data)


def test_statistics_are_those_after_the_declared_transform(tmp_path: Path) -> None:
    """Actions 3, 5, 9 from states 1, 2, 4 with a chunk of two: 3−1, 5−1, 5−2, 9−2, 9−4 (the last one's second is
    padding), of which the mean is 21 / 5; the exempt dimension is as it was."""
    with LeRobotWriter(tmp_path / "data", fps=10, cameras={"image": (8, 8)}, state_width=1, action_width=2) as writer:
        action = np.array([[3, 1], [5, 1], [9, 0]], np.float32)
        writer.add_episode(
            {"image": np.zeros((3, 8, 8, 3), np.uint8)}, np.array([[1], [2], [4]], np.float32), action, "go"
        )
    spec = supervised({"dataset": str(tmp_path / "data")}, horizon=2, action_width=2, state_width=1)
    declared = {"delta_action": [0], "exempt_action": [1], "scaling": "min_max"}
    spec = spec.model_copy(update={"transforms": TransformsSpec.model_validate(declared)})
    found = admit(spec, Home(tmp_path), LAPTOP).policy
    np.testing.assert_allclose(found.action.mean, [21 / 5, 3 / 5])
    assert (found.action.min, found.action.max) == ((2.0, 0.0), (7.0, 1.0))
    assert (found.state.min, found.state.max) == ((1.0,), (4.0,))
    assert found.transforms == spec.transforms


def test_transforms_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    wrong = {
        "cameras": {"eye": {"height": 8, "width": 8}},
        "exempt_action": [2],
        "delta_action": [0],
        "delta_state": [5],
    }
    faults = refused(workload(transforms={**wrong, "scaling": "quantiles"}), tmp_path)
    assert faults == [
        "transforms.cameras: got 'eye'; possible: top (of environment 'reach'); bind cameras by name",
        "transforms.exempt_action: got [2]; possible: 0 … 1, dimensions of the action of environment 'reach'; "
        "name such",
        "transforms.delta_state: got [5]; possible: 0 … 1, dimensions of the state of environment 'reach'; name such",
        "transforms.scaling: got 'quantiles'; possible: one for which environment 'reach' has statistics; add "
        "state.q01 and q99 to its preset, or choose mean_std",
        "transforms.scaling: got 'quantiles'; possible: one for which environment 'reach' has statistics; add "
        "action.q01 and q99 to its preset, or choose mean_std",
        "transforms.delta_action: got [0]; possible: none with a fresh policy: environment 'reach' has statistics of "
        "absolute actions; fine-tune first, then `start: continue`",
    ]
    goes_on = {"delta_action": [0], "scaling": "quantiles"}
    admit(workload(transforms=goes_on, start="continue"), Home(tmp_path), LAPTOP)


def test_published_libero_is_evaluated_in_libero_under_one_declared_size(tmp_path: Path) -> None:
    """The presets of datasets and of environments call cameras alike; recorded pictures are a quarter as large here."""
    one_size = {"cameras": {name: {"height": 64, "width": 64} for name in ("agentview", "wrist")}}
    for columns in ("libero", None):
        data = {"dataset": published(tmp_path / str(columns)), "preset": columns}
        spec = supervised(data).model_copy(
            update={
                "evaluation": EvaluationSpec(environment="libero-object", episodes=2, first_seed=30_000),
                "transforms": TransformsSpec.model_validate(one_size if columns else {}),
            }
        )
        try:
            admit(spec, Home(tmp_path), LAPTOP)
            faults = ""
        except SpecError as error:  # where LIBERO is not installed it says so
            faults = str(error)
        assert ("cameras" in faults) == (columns is None), faults
