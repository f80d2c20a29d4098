"""Parameters of the flows that are not workloads: evaluation on its own, collection, pretraining."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from configs import seeds
from configs.spec import Name, Spec
from configs.workload import MOST_RECORDED, require_recordable

SEEDS_PER_EPISODE = 3
SEEDS_PER_HOST = 4
"""The expert may fail: collecting gives up after three seeds an episode asked for, and takes four a host at once."""


class EvaluateRequest(Spec):
    """Evaluate policies without touching them."""

    targets: tuple[str, ...] = Field(
        min_length=1,
        description="Serving tenants by name, or adapters as models:/NAME@champion or models:/NAME/VERSION.",
    )
    environment: Name = Field(description="Environment preset.")
    episodes: int = Field(default=20, gt=0, le=1000, description="Episodes, one a seed.")
    first_seed: int = Field(
        default=50_000,
        ge=seeds.EVALUATION.start,
        lt=seeds.EVALUATION.stop,
        description=f"First of the consecutive seeds; first_seed + episodes is at most {seeds.EVALUATION.stop}.",
    )
    num_envs: int = Field(default=4, gt=0, le=64, description="Environments stepped together.")
    hosts: int = Field(default=1, gt=0, le=16, description="Simulator processes side by side.")
    blanked: bool = Field(default=False, description="Show the policy black pictures.")
    sampled: bool = Field(
        default=False,
        description="Sample actions as in training instead of a Gaussian's mean, or what a flow makes of its first "
        "noise alone; seeded by first_seed.",
    )
    rounds: int | None = Field(
        default=None, gt=0, description="Evaluations in all, taking targets in turn; None: one each."
    )
    interval_s: float = Field(default=0.0, ge=0, description="Pause between rounds in seconds.")
    films: bool = Field(
        default=True, description="Keep a short film of the first success and of the first failure in MLflow."
    )
    mlflow_run: str | None = Field(
        default=None, description="Run that the films go to; None: one of its own, with the result, a target."
    )
    record: Name | None = Field(
        default=None,
        description=f"Write all episodes as a new dataset of this name: one target, one round, at most "
        f"{MOST_RECORDED} episodes, no black pictures. Every step is rendered then.",
    )

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        seeds.require_within(seeds.EVALUATION, self.first_seed, self.episodes, "episodes")
        return self

    @model_validator(mode="after")
    def _recorded_once(self) -> Self:
        if self.record is None:
            return self
        require_recordable(self.episodes)
        if (self.rounds or len(self.targets)) != 1 or self.blanked:
            given = f"{self.record!r} with {self.rounds or len(self.targets)} rounds and blanked {self.blanked}"
            raise ValueError(f"record: got {given}; possible: one round that shows pictures; leave record out")
        return self


class CollectRequest(Spec):
    """Collect demonstrations from the scripted expert."""

    dataset: Name = Field(description="Name of the dataset to write.")
    environment: Name = Field(default="pushcube", description="Environment preset.")
    episodes: int = Field(default=150, gt=0, le=100_000, description="Episodes to keep.")
    action_noise: float = Field(default=0.3, ge=0, le=2, description="Std of the noise added to executed actions.")
    first_seed: int = Field(
        default=seeds.DEMONSTRATIONS.start,
        ge=seeds.DEMONSTRATIONS.start,
        lt=seeds.DEMONSTRATIONS.stop,
        description=f"First of the consecutive seeds; first_seed + {SEEDS_PER_EPISODE} × episodes + "
        f"{SEEDS_PER_HOST} × hosts is at most {seeds.DEMONSTRATIONS.stop}.",
    )
    record: Literal["expert", "executed"] = Field(
        default="expert",
        description="The expert's own action, of successful episodes; or the one that was executed, with its reward, "
        "of all episodes: what offline RL learns from.",
    )
    hosts: int = Field(default=2, gt=0, le=8, description="Simulator processes side by side.")
    replace: bool = Field(default=False, description="Replace a dataset of this name.")

    @model_validator(mode="after")
    def _kept_from_other_work(self) -> Self:
        most = SEEDS_PER_EPISODE * self.episodes + SEEDS_PER_HOST * self.hosts
        terms = f"{SEEDS_PER_EPISODE} × episodes + {SEEDS_PER_HOST} × hosts"
        seeds.require_within(seeds.DEMONSTRATIONS, self.first_seed, most, terms)
        return self


class ExportRequest(Spec):
    """Take out what was rolled out, evaluated or collected."""

    source: str = Field(
        min_length=1,
        description="Id of a training job or of its partition, while it is not trained; or the name of a dataset, such "
        "as a recorded evaluation's.",
    )
    folder: str = Field(
        min_length=1, description="Absolute path of a new folder: lerobot/ (a dataset) and films/ (an mp4 an episode)."
    )

    @model_validator(mode="after")
    def _a_whole_path(self) -> Self:
        if not Path(self.folder).is_absolute():
            raise ValueError(f"folder: got {self.folder!r}; possible: an absolute path; write it in full")
        return self


class PretrainRequest(Spec):
    """Pretrain the tiny base to ground objects, goals and grippers."""

    name: Name = Field(default="tiny-qwen3-vl-repeat", description="Folder under the home's models that is written.")
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(default=2000, gt=0, description="Optimizer steps.")
    # An episode gives several scenes of one seed, so a million stays far within the seeds of pretraining.
    scenes: int = Field(
        default=20_000, gt=0, le=1_000_000, description="Rendered scenes; the repository's base saw so many."
    )
