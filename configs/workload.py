"""`WorkloadSpec`: all that a tenant declares of one piece of work."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from configs import seeds
from configs.algorithm import KINDS_OF_TASK, AlgorithmSpec
from configs.data import DataSpec
from configs.model import ActionModuleSpec, TrainableSpec
from configs.spec import Name, Spec
from configs.transforms import TransformsSpec


class TenantSpec(Spec):
    """Whose work it is."""

    name: Name = Field(description="The tenant; one policy slot a tenant.")


MOST_RECORDED = 500
"""Episodes of an evaluation that is recorded, at most."""


def require_recordable(episodes: int) -> None:
    """Check that an evaluation of so many episodes may be recorded; for validators of declarations.

    Raises:
        ValueError: naming what bounds it.
    """
    if episodes > MOST_RECORDED:
        raise ValueError(f"record: got {episodes} episodes; possible: up to {MOST_RECORDED}; evaluate fewer")


class EvaluationSpec(Spec):
    """Read-only evaluation of the policy on held-out seeds."""

    environment: Name = Field(description="Environment preset to evaluate in.")
    episodes: int = Field(gt=0, le=1000, description="Episodes, one a seed.")
    first_seed: int = Field(
        ge=seeds.EVALUATION.start,
        lt=seeds.EVALUATION.stop,
        description="Seeds are first_seed … first_seed + episodes − 1; none of them is used for anything else.",
    )
    num_envs: int = Field(default=4, gt=0, le=64, description="Environments stepped together.")
    before: bool = Field(default=True, description="Evaluate the untrained policy too.")
    blanked: bool = Field(default=False, description="Afterwards evaluate once more with black pictures.")
    sampled: bool = Field(
        default=False,
        description="Sample actions as in training instead of a Gaussian's mean, or what a flow makes of its first "
        "noise alone; seeded by first_seed.",
    )
    every_jobs: int | None = Field(
        default=None, gt=0, description="Register and evaluate a version after so many completed jobs; None: never."
    )

    films: bool = Field(
        default=True, description="Keep a short film of the first success and of the first failure beside the metrics."
    )
    record: Name | None = Field(
        default=None,
        description=f"Write the episodes of the evaluation at the end, at most {MOST_RECORDED}, as a new dataset of "
        "this name. Every step is rendered then.",
    )

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        seeds.require_within(seeds.EVALUATION, self.first_seed, self.episodes, "episodes")
        return self

    @model_validator(mode="after")
    def _recordable(self) -> Self:
        if self.record is not None:
            require_recordable(self.episodes)
        return self


class LimitsSpec(Spec):
    """What bounds this workload in the Training Scheduler."""

    priority: int = Field(default=0, ge=-100, le=100, description="Higher is leased first; RL precedes SFT at a tie.")
    max_in_flight_jobs: int = Field(
        default=2,
        gt=0,
        le=64,
        description="Jobs reserved and not terminal (prefetch depth); 1 + delay if one is declared.",
    )
    max_active_rollouts: int = Field(
        default=1, gt=0, le=16, description="Rollouts of this tenant at one time; 1 where nothing is rolled out."
    )


class ResourcesSpec(Spec):
    """Processes this workload asks for."""

    environment_hosts: int = Field(default=1, gt=0, le=16, description="Simulator processes side by side.")
    reuse_features: Literal["own", "shared", "never"] = Field(
        default="own",
        description="Keep what the frozen base computed of rollouts, and of demonstrations for later epochs: for this "
        "tenant alone, or shared with all that say so.",
    )


class OutputsSpec(Spec):
    """What is kept."""

    checkpoint_every_jobs: int = Field(default=1, gt=0, description="Save parameters and optimizer so often.")
    register_every_jobs: int | None = Field(
        default=None, gt=0, description="Register an adapter version so often; None: at the end only."
    )
    register_adapter: bool = Field(default=True, description="Register the final adapter in MLflow.")


class WorkloadSpec(Spec):
    """One workload: who, on which base model, what is trained, from what, how, and what is kept."""

    tenant: TenantSpec
    task: Literal["sft", "rl"] = Field(description="Supervised fine-tuning or reinforcement learning.")
    base_model: Name = Field(description="Base model preset; it must be resident on the platform.")
    action_module: ActionModuleSpec
    trainable: TrainableSpec = TrainableSpec()
    start: Literal["fresh", "continue"] = Field(
        default="fresh", description="New weights at version 0, or those that the tenant's slot has."
    )
    start_from: str | None = Field(
        default=None,
        description="Absolute path of a folder with PEFT's adapter_config.json and adapter_model.safetensors: what a "
        "fresh adapter of kind lora begins with. None: A at random and B zero.",
    )
    transforms: TransformsSpec = TransformsSpec()
    data: DataSpec | None = Field(default=None, description="SFT and offline RL (awr): the datasets. Else none.")
    environment: Name | None = Field(default=None, description="RL by rollouts: environment preset. Else none.")
    algorithm: AlgorithmSpec
    evaluation: EvaluationSpec | None = None
    limits: LimitsSpec = LimitsSpec()
    resources: ResourcesSpec = ResourcesSpec()
    outputs: OutputsSpec = OutputsSpec()

    @property
    def policy_key(self) -> str:
        """`<tenant>.<task>`, the unit of bounds and the registered model's name."""
        return f"{self.tenant.name}.{self.task}"

    @model_validator(mode="after")
    def _an_adapter_to_start_from_has_a_place(self) -> Self:
        if self.start_from is None:
            return self
        if self.action_module.kind != "lora" or self.start != "fresh":
            raise ValueError(
                f"start_from: got {self.start_from!r} with start {self.start!r} and action_module.kind "
                f"{self.action_module.kind!r}; possible: 'fresh' and 'lora'; leave it out or change them"
            )
        if not Path(self.start_from).is_absolute() or ".." in Path(self.start_from).parts:
            raise ValueError(
                f"start_from: got {self.start_from!r}; possible: an absolute path without '..'; write it in full"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_the_task(self) -> Self:
        wanted = KINDS_OF_TASK[self.task]
        if self.algorithm.kind not in wanted:
            possible = ", ".join(map(repr, wanted))
            raise ValueError(
                f"algorithm.kind: got {self.algorithm.kind!r} for task {self.task!r}; possible: {possible}; change one"
            )
        which = f"task {self.task!r}" if self.task == "sft" or self.algorithm.collects else "algorithm 'awr'"
        if not self.algorithm.collects and (self.data is None or self.environment is not None):
            raise ValueError(f"data: {which} needs data and takes no environment; set data, remove environment")
        if self.algorithm.collects and (self.environment is None or self.data is not None):
            raise ValueError(f"environment: {which} needs environment and takes no data; set environment, remove data")
        # By its value: a declaration that was written out in full names all fields.
        rollouts = self.limits.max_active_rollouts
        if not self.algorithm.collects and rollouts > 1:
            raise ValueError(
                f"limits.max_active_rollouts: got {rollouts}; possible: 1 with {which}, which rolls nothing out; "
                "leave it out"
            )
        return self
