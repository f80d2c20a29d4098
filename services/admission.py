"""Admission: a workload against what the platform can do, and the backend configuration it becomes.

Every fault is reported at once, each naming its field, before anything is started or written. What could not be looked
up (base model, environment, dataset) is a fault itself, and the checks that do not need it are made all the same.
A prompt's length is not among the checks: it takes the base's tokenizer, and flow processes import neither torch nor
transformers; a prompt too long fails the first request or job that has it, with a message of the same form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from configs import presets
from configs.algorithm import RolloutSpec
from configs.backend import BackendConfig, DatasetConfig, PolicyConfig
from configs.cluster import ClusterSpec
from configs.environment import CameraSpec, EnvironmentSpec, StatisticsSpec
from configs.errors import DataFault, SpecError, refusal
from configs.home import Home
from configs.model import ActionModuleSpec, BaseModelSpec, LoraSpec, PiSpec
from configs.signature import prefix_key, schema_signature
from configs.workload import WorkloadSpec
from kernels.peft_adapters import adapter_shapes, fitted
from services import environment_installs, environment_launch
from services.admission_of_data import dataset_path, declared_columns, open_sources
from services.admission_of_rl import faults_of_data, faults_of_module
from services.admission_of_transforms import faults_of_statistics, faults_of_transforms, sized
from services.environments import renderer
from services.training_statistics import training_statistics
from storage.dataset_names import refuse_existing
from storage.peft_files import read_adapter

T = TypeVar("T")


class _Faults:
    """Collects faults so that a person mends them all in one go."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, field: str, given: object, possible: str, remedy: str) -> None:
        self.lines.append(refusal(field, given, possible, remedy))

    def kept(self, look_up: Callable[[], T]) -> T | None:
        """What `look_up` finds, or None with its refusal kept."""
        try:
            return look_up()
        except SpecError as error:
            self.lines.append(str(error))
            return None

    def raise_if_any(self, where: str) -> None:
        if self.lines:
            raise SpecError(f"{where}: " + "; ".join(self.lines))


@dataclass(frozen=True)
class TrainingInterface:
    """What a workload's policy sees and does where it is trained.

    Attributes:
        widths: of {"state", "action"}.
        statistics: of the state, and of the action as the policy is to give it. Those of datasets may take a while.
        source: where this was read, in words for messages.
        turned_cameras: those whose pictures were turned, sorted; None where a dataset does not say so.
        environment: of rollouts; None for a dataset.
        rewards: whether that can be learned from, by RL.
    """

    cameras: tuple[CameraSpec, ...]
    widths: Mapping[str, int]
    statistics: Callable[[], tuple[StatisticsSpec, StatisticsSpec]]
    source: str
    turned_cameras: tuple[str, ...] | None = None
    environment: EnvironmentSpec | None = None
    rewards: bool = True


def training_interface(workload: WorkloadSpec, home: Home) -> TrainingInterface:
    """Cameras, state and action of what the workload trains from.

    Raises:
        SpecError: if there is no such environment or dataset.
    """
    if workload.environment is not None:
        env = presets.environment(workload.environment)
        turned = tuple(sorted(env.turned_cameras))
        widths = {"state": env.state_width, "action": env.action_width}
        known = (env.state, env.action)
        return TrainingInterface(env.cameras, widths, lambda: known, f"environment {env.name!r}", turned, env)
    assert workload.data is not None  # WorkloadSpec's own rule
    sources = open_sources(workload, home)
    dataset = sources[0].dataset
    names = " and ".join(repr(d.dataset) for d in workload.data.datasets)
    turns = [source.dataset.turned_cameras for source in sources if source.dataset.turned_cameras is not None]
    return TrainingInterface(
        tuple(CameraSpec(name=n, height=h, width=w) for n, (h, w) in sorted(dataset.cameras.items())),
        {"state": dataset.state_width, "action": dataset.action_width},
        partial(training_statistics, sources, workload.transforms, workload.action_module.horizon),
        f"dataset {names}",
        turns[0] if turns else None,
        rewards=all(source.dataset.reward is not None for source in sources),
    )


def admit(workload: WorkloadSpec, home: Home, cluster: ClusterSpec) -> BackendConfig:
    """Compile a workload, or refuse it.

    Raises:
        SpecError: one line with all faults.
    """
    faults = _Faults()
    base = _resident_base(faults, workload, cluster)
    training = faults.kept(lambda: training_interface(workload, home))
    evaluated_in = None
    if workload.evaluation is not None:
        name = workload.evaluation.environment
        evaluated_in = faults.kept(lambda: presets.environment(name, "evaluation.environment"))
    if training is not None:
        _check_widths(faults, workload, training)
        for fault in faults_of_transforms(workload, training.cameras, training.widths, training.source):
            faults.add(*fault)
        for fault in [] if training.environment is None else faults_of_statistics(workload, training.environment):
            faults.add(*fault)
        _check_job_bytes(faults, workload, training, base, cluster)
        if training.environment is not None:
            _check_simulator(faults, "environment", training.environment, cluster, home)
        for fault in faults_of_data(workload, training.environment, training.source, rewards=training.rewards):
            faults.add(*fault)
    for fault in faults_of_module(workload):
        faults.add(*fault)
    _check_reuse(faults, workload)
    if base is not None:
        _check_heads(faults, base, workload.action_module)
        faults.kept(partial(_check_start_from, workload, base))
    if base is not None and training is not None:
        _check_cameras(faults, base, training)
    if evaluated_in is not None:
        _check_evaluation(faults, workload, evaluated_in)
        if workload.evaluation is not None and workload.evaluation.record is not None:
            faults.kept(partial(refuse_existing, home.datasets, workload.evaluation.record, "evaluation.record"))
        _check_simulator(faults, "evaluation.environment", evaluated_in, cluster, home)
        if training is not None:
            _check_evaluation_cameras(faults, workload, training, evaluated_in)
    _check_hosts(faults, workload, cluster)
    faults.raise_if_any(workload.tenant.name)
    assert base is not None  # else there was a fault
    assert training is not None
    try:
        state, action = training.statistics()
    except DataFault as error:
        raise SpecError(f"{workload.tenant.name}: data: {error}") from None
    environment, algorithm = training.environment, workload.algorithm
    seen_in = environment or evaluated_in
    light = seen_in is not None and seen_in.light_visuals
    turned, cameras = training.turned_cameras, sized(training.cameras, workload.transforms)
    if turned is None and evaluated_in is not None:  # it is to see there what was recorded
        turned = tuple(sorted(evaluated_in.turned_cameras))
    return BackendConfig(
        policy_key=workload.policy_key,
        task=workload.task,
        policy=PolicyConfig(
            tenant=workload.tenant.name,
            base_model=base,
            action_module=workload.action_module,
            cameras=cameras,
            turned_cameras=turned,
            instruction=environment.instruction if environment else None,
            state=state,
            action=action,
            transforms=workload.transforms,
            seed=algorithm.seed,
            schema_signature=schema_signature(
                base,
                workload.action_module,
                cameras,
                light_visuals=light,
                turned_cameras=turned or (),
                transforms=workload.transforms,
            ),
        ),
        trainable=workload.trainable,
        start=workload.start,
        start_from=workload.start_from,
        prefix_key=prefix_key(base),
        algorithm=algorithm,
        sample_count=algorithm.sample_count,
        environment=environment,
        datasets=tuple(
            DatasetConfig(path=str(dataset_path(d.dataset, home)), columns=declared_columns(d), weight=d.weight)
            for d in (workload.data.datasets if workload.data else ())
        ),
        evaluation=workload.evaluation,
        evaluation_environment=evaluated_in,
        limits=workload.limits,
        resources=workload.resources,
        outputs=workload.outputs,
    )


def admit_all(workloads: Sequence[WorkloadSpec], home: Home, cluster: ClusterSpec) -> list[BackendConfig]:
    """Compile several workloads that are to run together; all or none.

    Raises:
        SpecError: with the faults of all; also if two of them have the same tenant's name.
    """
    faults = _Faults()
    for name in [name for name, n in Counter(w.tenant.name for w in workloads).items() if n > 1]:
        faults.add("tenant.name", name, "each tenant once in a run", "rename one of the tenants")
    configs = [faults.kept(partial(admit, workload, home, cluster)) for workload in workloads]
    if faults.lines:
        raise SpecError("; ".join(faults.lines))
    return [config for config in configs if config is not None]


def _resident_base(faults: _Faults, workload: WorkloadSpec, cluster: ClusterSpec) -> BaseModelSpec | None:
    if workload.base_model not in cluster.base_models:
        faults.add(
            "base_model",
            workload.base_model,
            ", ".join(cluster.base_models),
            f"choose one resident on {cluster.name!r}",
        )
        return None
    return faults.kept(lambda: presets.base_model(workload.base_model))


def _check_start_from(workload: WorkloadSpec, base: BaseModelSpec) -> None:
    """The adapter that a fresh slot is to begin with, against the module that the workload declares.

    Raises:
        SpecError: if its files cannot be read, or it is another adapter than declared.
    """
    if workload.start_from is None:
        return
    module = workload.action_module
    assert isinstance(module, LoraSpec)  # WorkloadSpec's own rule
    try:
        tensors, config = read_adapter(Path(workload.start_from))
        shapes = adapter_shapes(base, module.rank, module.target_modules)
        fitted(tensors, config, shapes, rank=module.rank, alpha=module.alpha, targets=module.target_modules)
    except (DataFault, SpecError) as error:
        raise SpecError(f"start_from: {error}") from None


def _check_reuse(faults: _Faults, workload: WorkloadSpec) -> None:
    if workload.action_module.inside_base and workload.resources.reuse_features == "shared":
        faults.add(
            "resources.reuse_features",
            "shared",
            f"own or never with module {workload.action_module.kind!r}",
            "change it: its features change with each of its updates, and none are kept",
        )


def _check_widths(faults: _Faults, workload: WorkloadSpec, training: TrainingInterface) -> None:
    module = workload.action_module
    for role, given in (("state", module.state_width), ("action", module.action_width)):
        if given != training.widths[role]:
            possible = f"{training.widths[role]} (of {training.source})"
            faults.add(f"action_module.{role}_width", given, possible, "declare that width")


def _check_job_bytes(
    faults: _Faults,
    workload: WorkloadSpec,
    training: TrainingInterface,
    base: BaseModelSpec | None,
    cluster: ClusterSpec,
) -> None:
    """One tenant's job must not fill the memory that all share: its pictures, or the features in their place."""
    pictures = sum(3 * camera.height * camera.width for camera in training.cameras)
    features = 4 * base.num_action_tokens * base.hidden_width if base is not None and workload.algorithm.collects else 0
    a_sample = max(pictures, features)
    samples = workload.algorithm.sample_count
    if a_sample * samples > cluster.max_job_bytes:
        terms = "num_envs × rollout_steps" if workload.algorithm.collects else "batches_per_job × microbatch_size"
        faults.add(
            f"algorithm.{terms}",
            f"{samples} samples of {a_sample} bytes",
            f"up to {cluster.max_job_bytes // a_sample} ({cluster.max_job_bytes} bytes a job)",
            "make the job smaller and take more of them",
        )


def _check_cameras(faults: _Faults, base: BaseModelSpec, training: TrainingInterface) -> None:
    count = len(training.cameras)
    if count > base.max_cameras:
        faults.add(
            "cameras",
            f"{count} (of {training.source})",
            f"at most {base.max_cameras} for {base.name!r}",
            "use fewer cameras",
        )


def _check_heads(faults: _Faults, base: BaseModelSpec, module: ActionModuleSpec) -> None:
    """An expert's query heads go in groups, one a key/value head of the base."""
    if isinstance(module, PiSpec) and module.heads % base.num_key_value_heads:
        faults.add(
            "action_module.heads",
            module.heads,
            f"multiples of {base.num_key_value_heads}, the key/value heads of {base.name!r}",
            "change them",
        )


def _check_evaluation(faults: _Faults, workload: WorkloadSpec, environment: EnvironmentSpec) -> None:
    module = workload.action_module
    for field, given, wanted in (
        ("state_width", environment.state_width, module.state_width),
        ("action_width", environment.action_width, module.action_width),
    ):
        if given != wanted:
            faults.add(
                "evaluation.environment",
                f"{environment.name} ({field} {given})",
                f"{field} {wanted}",
                "choose one that fits",
            )


def _check_evaluation_cameras(
    faults: _Faults, workload: WorkloadSpec, training: TrainingInterface, environment: EnvironmentSpec
) -> None:
    """Exactly the cameras of training: the base refuses a picture too many as it refuses one too few."""
    shown, learned = (sized(cameras, workload.transforms) for cameras in (environment.cameras, training.cameras))
    if _sizes(shown) != _sizes(learned):
        resizable = {camera.name for camera in shown} == {camera.name for camera in learned}
        faults.add(
            "evaluation.environment",
            f"{environment.name} (cameras {_sizes(shown)})",
            f"cameras {_sizes(learned)}, those of {training.source}",
            "choose one that fits" + (", or one size for both (transforms.cameras)" if resizable else ""),
        )
    if training.turned_cameras is not None and set(environment.turned_cameras) != set(training.turned_cameras):
        faults.add(
            "evaluation.environment",
            f"{environment.name} (turned cameras {_names(environment.turned_cameras)})",
            f"turned cameras {_names(training.turned_cameras)}, those of {training.source}",
            "choose one that shows pictures as they were learned from",
        )


def _names(cameras: Collection[str]) -> str:
    return ", ".join(sorted(cameras)) or "none"


def _sizes(cameras: Sequence[CameraSpec]) -> str:
    return ", ".join(sorted(f"{c.name} {c.height}×{c.width}" for c in cameras))


def _check_simulator(
    faults: _Faults, field: str, environment: EnvironmentSpec, cluster: ClusterSpec, home: Home
) -> None:
    if cluster.dask_scheduler is not None:
        return  # where the Dask workers are another's, this machine hosts no simulator and holds no token
    if environment.remote is not None or environment.own is not None:
        if (why := environment_launch.lacking(environment, home)) is not None:
            faults.lines.append(f"{field}: {environment.name}: {why}")
        return
    lacking = environment.requirements
    if lacking is not None and environment_installs.missing(lacking) is not None:
        faults.add(field, environment.name, "one that is installed here", environment_installs.remedy(lacking))
    if environment.kind == "maniskill" and (missing := renderer.check()) is not None:  # a few looks at files
        known = [presets.environment(name) for name in presets.names("environments")]
        others = [e.name for e in known if e.kind != "maniskill" and not environment_installs.missing(e.requirements)]
        possible = f"without a renderer {', '.join(others)}"
        faults.add(field, environment.name, possible, f"choose one of these or install one ({missing})")


def _check_hosts(faults: _Faults, workload: WorkloadSpec, cluster: ClusterSpec) -> None:
    field, hosts = "resources.environment_hosts", workload.resources.environment_hosts
    if hosts > cluster.max_environment_hosts:
        faults.add(
            field,
            hosts,
            f"up to {cluster.max_environment_hosts}, the max_environment_hosts of {cluster.name!r}",
            "ask for fewer hosts",
        )
    num_envs = {}
    if isinstance(workload.algorithm, RolloutSpec):
        num_envs["algorithm.num_envs"] = workload.algorithm.num_envs
    if workload.evaluation is not None:
        num_envs["evaluation.num_envs"] = workload.evaluation.num_envs
    if num_envs and hosts > max(num_envs.values()):
        given = " and ".join(f"{name} {count}" for name, count in num_envs.items())
        faults.add(
            field,
            hosts,
            f"up to {max(num_envs.values())} with {given}",
            "ask for fewer hosts or more environments: a host steps at least one",
        )
