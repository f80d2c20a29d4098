"""Admission: a workload against what the platform can do, and the backend configuration it becomes.

Every fault is reported at once, each naming its field, before anything is started or written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from configs import presets, seeds
from configs.algorithm import PpoSpec, SftSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.cluster import ClusterSpec
from configs.environment import CameraSpec, EnvironmentSpec, StatisticsSpec
from configs.errors import DataFault, SpecError, refusal
from configs.home import Home
from configs.model import BaseModelSpec
from configs.signature import prefix_key, schema_signature
from configs.workload import WorkloadSpec
from storage.demonstrations import LeRobotDataset


class _Faults:
    """Collects faults so that a person mends them all in one go."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, field: str, given: object, possible: str, remedy: str) -> None:
        self.lines.append(refusal(field, given, possible, remedy))

    def raise_if_any(self, where: str) -> None:
        if self.lines:
            raise SpecError(f"{where}: " + "; ".join(self.lines))


def dataset_path(dataset: str, home: Home) -> Path:
    """Folder of a dataset: an absolute path as it is, a name under the home's datasets."""
    path = Path(dataset)
    return path if path.is_absolute() else home.datasets / dataset


def open_dataset(dataset: str, home: Home) -> LeRobotDataset:
    """The dataset that a workload names.

    Raises:
        SpecError: if the name is a relative path, or no LeRobot dataset lies there.
    """
    if not Path(dataset).is_absolute() and (len(Path(dataset).parts) != 1 or dataset in ("..", ".")):
        raise SpecError(refusal("data.dataset", dataset, "a dataset's name or an absolute path", "use one of them"))
    path = dataset_path(dataset, home)
    if not (path / "meta" / "info.json").is_file():
        known = sorted(p.name for p in home.datasets.glob("*") if (p / "meta" / "info.json").is_file())
        raise SpecError(
            refusal(
                "data.dataset",
                dataset,
                ", ".join(known) or "no dataset yet",
                "collect it first (flow `collect`) or name its folder",
            )
        )
    try:
        return LeRobotDataset(path)
    except DataFault as error:
        raise SpecError(f"data.dataset: {error}") from None


def training_interface(
    workload: WorkloadSpec, home: Home
) -> tuple[tuple[CameraSpec, ...], StatisticsSpec, StatisticsSpec, EnvironmentSpec | None]:
    """Cameras, state and action statistics, and the environment (RL) of what the workload trains from."""
    if workload.environment is not None:
        env = presets.environment(workload.environment)
        return env.cameras, env.state, env.action, env
    assert workload.data is not None  # WorkloadSpec's own rule
    dataset = open_dataset(workload.data.dataset, home)
    cameras = tuple(CameraSpec(name=n, height=h, width=w) for n, (h, w) in sorted(dataset.cameras.items()))
    return cameras, dataset.statistics("observation.state"), dataset.statistics("action"), None


def admit(workload: WorkloadSpec, home: Home, cluster: ClusterSpec) -> BackendConfig:
    """Compile a workload, or refuse it.

    Raises:
        SpecError: one line with all faults.
    """
    faults = _Faults()
    if workload.base_model not in cluster.base_models:
        faults.add(
            "base_model",
            workload.base_model,
            ", ".join(cluster.base_models),
            f"choose one resident on {cluster.name!r}",
        )
        faults.raise_if_any(workload.tenant.name)
    base = presets.base_model(workload.base_model)
    cameras, state, action, environment = training_interface(workload, home)
    source = (
        f"environment {workload.environment!r}"
        if environment
        else f"dataset {workload.data and workload.data.dataset!r}"
    )
    _check_widths(faults, workload, state, action, source)
    _check_cameras(faults, base, cameras, source)
    evaluation_environment = None
    if workload.evaluation is not None:
        evaluation_environment = presets.environment(workload.evaluation.environment, "evaluation.environment")
        _check_evaluation(faults, workload, cameras, evaluation_environment)
    seen_in = environment or evaluation_environment
    light = seen_in is not None and seen_in.light_visuals
    faults.raise_if_any(workload.tenant.name)
    algorithm = workload.algorithm
    instruction = environment.instruction if environment else None
    signature = schema_signature(base, workload.action_module, cameras, light_visuals=light)
    return BackendConfig(
        policy_key=workload.policy_key,
        task=workload.task,
        policy=PolicyConfig(
            tenant=workload.tenant.name,
            base_model=base,
            action_module=workload.action_module,
            cameras=cameras,
            instruction=instruction,
            state=state,
            action=action,
            seed=algorithm.seed,
            schema_signature=signature,
        ),
        prefix_key=prefix_key(base),
        algorithm=algorithm,
        sample_count=sample_count(algorithm),
        environment=environment,
        dataset=str(dataset_path(workload.data.dataset, home)) if workload.data else None,
        evaluation=workload.evaluation,
        evaluation_environment=evaluation_environment,
        limits=workload.limits,
        resources=workload.resources,
        outputs=workload.outputs,
    )


def admit_all(workloads: Sequence[WorkloadSpec], home: Home, cluster: ClusterSpec) -> list[BackendConfig]:
    """Compile several workloads that are to run together; all or none.

    Raises:
        SpecError: also if two of them have the same tenant's name.
    """
    twice = [name for name, n in Counter(w.tenant.name for w in workloads).items() if n > 1]
    if twice:
        raise SpecError(refusal("tenant.name", twice[0], "each tenant once in a run", "rename one of the tenants"))
    return [admit(workload, home, cluster) for workload in workloads]


def sample_count(algorithm: SftSpec | PpoSpec) -> int:
    """Samples of one training job."""
    if isinstance(algorithm, SftSpec):
        return algorithm.batches_per_job * algorithm.microbatch_size
    return algorithm.num_envs * algorithm.rollout_steps


def _check_widths(
    faults: _Faults, workload: WorkloadSpec, state: StatisticsSpec, action: StatisticsSpec, source: str
) -> None:
    module = workload.action_module
    for field, given, stats in (
        ("action_module.state_width", module.state_width, state),
        ("action_module.action_width", module.action_width, action),
    ):
        if given != len(stats.mean):
            faults.add(field, given, f"{len(stats.mean)} (of {source})", "declare that width")


def _check_cameras(faults: _Faults, base: BaseModelSpec, cameras: Sequence[CameraSpec], source: str) -> None:
    if len(cameras) > base.max_cameras:
        faults.add("cameras", len(cameras), f"at most {base.max_cameras} for {base.name!r}", "use fewer cameras")
    for camera in cameras:
        if (camera.height, camera.width) != (base.image_height, base.image_width):
            faults.add(
                f"cameras.{camera.name}",
                f"{camera.height}×{camera.width} (of {source})",
                f"{base.image_height}×{base.image_width} for {base.name!r}",
                "render or record at that size",
            )


def _check_evaluation(
    faults: _Faults, workload: WorkloadSpec, cameras: Sequence[CameraSpec], environment: EnvironmentSpec
) -> None:
    evaluation = workload.evaluation
    assert evaluation is not None
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
    known = sorted(c.name for c in environment.cameras)
    for camera in cameras:
        if camera.name not in known:
            faults.add(
                "evaluation.environment",
                environment.name,
                f"cameras {known} lack {camera.name!r}",
                "choose one that has it",
            )
    last = evaluation.first_seed + evaluation.episodes
    if last > seeds.EVALUATION.stop:
        faults.add(
            "evaluation.first_seed",
            evaluation.first_seed,
            f"first_seed + episodes ≤ {seeds.EVALUATION.stop}",
            "lower seeds are held out from training, demonstrations and pretraining",
        )
