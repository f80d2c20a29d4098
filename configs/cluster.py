"""Cluster presets: which processes one installation runs and how wide they are."""

from __future__ import annotations

from pydantic import Field

from configs.spec import Name, Spec

HELD_BYTES = 1 << 30
"""Of features, where a cluster declares no other bound."""


class InferenceBatchingSpec(Spec):
    """The paper's B and T, and what decodes together."""

    max_batch_size: int = Field(default=128, gt=0, description="B, samples of one base forward at most.")
    batch_timeout_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="T, longest wait for company. While a forward runs the next batch fills anyway.",
    )
    max_stack_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="Copies of action modules that decode together because they are alike, at most; 0: each alone.",
    )


class TrainingGroupSpec(Spec):
    """Supervised jobs of several tenants that share the base's forwards."""

    max_jobs: int = Field(default=4, gt=0, description="Jobs trained together at most; 1: each alone.")
    max_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Of all members together, at most: their pictures, and the copies of policies and optimizers that "
        "they are trained on.",
    )
    beside_rl: bool = Field(
        default=False, description="Also while an RL workload runs, whose jobs then wait for a whole group."
    )


class ClusterSpec(Spec):
    """Processes and bounds of one installation."""

    name: Name
    base_models: tuple[Name, ...] = Field(min_length=1, description="Base models resident in both model services.")
    torch_threads: int = Field(default=1, gt=0, description="Torch threads of each model role, set before torch loads.")
    host: str = Field(default="127.0.0.1", description="Address that servers bind to.")
    dask_scheduler: str | None = Field(
        default=None, description="Address of an existing Dask scheduler; None: start one."
    )
    prefect_api_url: str | None = Field(
        default=None, description="URL of an existing Prefect API; None: start a server."
    )
    mlflow_uri: str | None = Field(default=None, description="MLflow URI; None: a sqlite file under the home folder.")
    batching: InferenceBatchingSpec = InferenceBatchingSpec()
    training_groups: TrainingGroupSpec = TrainingGroupSpec()
    max_slots: int = Field(default=16, gt=0, description="Tenant slots of a model service.")
    max_pinned_versions: int = Field(
        default=4, gt=0, description="Serving versions kept a tenant beside the current one."
    )
    max_feature_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="What the base computed of demonstrations, kept for later epochs, a tenant at most; 0: nothing.",
    )
    max_update_feature_bytes: int = Field(
        default=HELD_BYTES,
        ge=0,
        description="What the base computed of one job's samples, held while they are trained on, at most (about twice "
        "that while it is computed); of a larger job each microbatch's is computed when its turn comes.",
    )
    max_job_bytes: int = Field(
        default=1 << 30,
        gt=0,
        description="Pictures of one training job at most; while it is collected or read a service holds about thrice.",
    )
    max_active_rollouts: int = Field(default=3, gt=0, description="Rollouts at one time over all tenants.")
    max_environment_hosts: int = Field(default=8, gt=0, description="Simulator processes at one time.")
    lease_s: float = Field(default=60.0, gt=0, description="A job's lease runs out after this without renewal.")
    call_timeout_s: float = Field(default=600.0, gt=0, description="A service call that takes longer is an error.")
