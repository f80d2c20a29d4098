"""The backend configuration that a workload is compiled to: every default resolved, every name looked up."""

from __future__ import annotations

from typing import Literal

from configs.algorithm import AlgorithmSpec, RolloutSpec
from configs.data import ColumnsSpec
from configs.environment import CameraSpec, EnvironmentSpec, StatisticsSpec
from configs.model import ActionModuleSpec, BaseModelSpec, TrainableSpec
from configs.spec import Spec
from configs.transforms import TransformsSpec
from configs.workload import EvaluationSpec, LimitsSpec, OutputsSpec, ResourcesSpec


class PolicyConfig(Spec):
    """What a model service needs to hold one tenant's policy: the model-facing interface and its statistics."""

    tenant: str
    base_model: BaseModelSpec
    action_module: ActionModuleSpec
    cameras: tuple[CameraSpec, ...]
    turned_cameras: tuple[str, ...] | None = None  # None: learned from recorded pictures that nothing is said of
    instruction: str | None = None
    state: StatisticsSpec
    action: StatisticsSpec  # of what the policy gives, so after `transforms.delta_action`
    transforms: TransformsSpec = TransformsSpec()
    seed: int
    schema_signature: str


class DatasetConfig(Spec):
    """One dataset that a workload learns from."""

    path: str
    columns: ColumnsSpec | None = None  # None: LeRobot's own names
    weight: float = 1.0


class BackendConfig(Spec):
    """One admitted workload as the services see it."""

    policy_key: str
    task: Literal["sft", "rl"]
    domain: Literal["vla"] = "vla"
    policy: PolicyConfig
    trainable: TrainableSpec = TrainableSpec()
    start: Literal["fresh", "continue"] = "fresh"
    start_from: str | None = None
    prefix_key: str
    algorithm: AlgorithmSpec
    sample_count: int
    environment: EnvironmentSpec | None
    datasets: tuple[DatasetConfig, ...] = ()
    evaluation: EvaluationSpec | None
    evaluation_environment: EnvironmentSpec | None
    limits: LimitsSpec
    resources: ResourcesSpec
    outputs: OutputsSpec

    @property
    def features_travel(self) -> bool:
        """Whether a rollout's partition holds the features that its actions came from, in the pictures' place.

        The base is frozen and looks at pictures as they are, so an update needs no forward of it. Tokens and caches of
        the whole prefix would be larger than the pictures by far.
        """
        module = self.policy.action_module
        small = module.reads == {"action_tokens"} and not module.inside_base
        return self.algorithm.collects and small and self.resources.reuse_features != "never"

    @property
    def rollout_delay(self) -> int | None:
        """See `RolloutSpec.rollout_delay`; None where nothing is rolled out."""
        return self.algorithm.rollout_delay if isinstance(self.algorithm, RolloutSpec) else None

    def scheduler_policy(self, copy_bytes: int = 0) -> dict[str, object]:
        """The bounds that the Training Scheduler keeps for this policy.

        Jobs of recorded data move as SFT's, whatever is learned from them: no rollout, no stage before training, never
        stale. Several tenants' are trained together where they are supervised.

        Args:
            copy_bytes: of what a job is trained on, known once the slot is open.
        """
        delay = self.rollout_delay
        # Rollouts keep pictures as the environment shows them.
        cameras = self.policy.cameras if self.environment is None else self.environment.cameras
        return {
            "policy_key": self.policy_key,
            "tenant_id": self.policy.tenant,
            "task_type": "rl" if self.algorithm.collects else "sft",
            "domain": self.domain,
            "priority": self.limits.priority,
            # A declared delay is the bound itself: the rollout, and the jobs that it is ahead of.
            "max_in_flight": self.limits.max_in_flight_jobs if delay is None else delay + 1,
            "in_order": delay is not None,
            "completion_target": self.algorithm.jobs,
            "max_active_rollouts": self.limits.max_active_rollouts if self.algorithm.collects else None,
            "base_model": None if self.task == "rl" else self.policy.base_model.name,
            "job_bytes": copy_bytes + self.sample_count * sum(3 * c.height * c.width for c in cameras),
        }
