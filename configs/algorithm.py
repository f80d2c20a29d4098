"""Learning algorithms: every field is used by the algorithm that declares it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from configs import seeds
from configs.errors import refusal
from configs.spec import ChoiceInForms, Spec

MAX_ROLLOUTS = 2_000
"""Completion target of RL at most. As many jobs again may be lost before a workload is given up, and all of their
rollouts have environment seeds of their own (`seeds.ROLLOUTS_PER_SEED`)."""
MAX_DELAY = 16
"""Jobs that rollouts may run ahead of training by declaration: so many versions are kept for a tenant at most."""


class AdamSpec(Spec):
    """AdamW and gradient clipping."""

    learning_rate: float = Field(ge=0, description="Step size; 0 freezes the weights.")
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")


class OfflineSpec(Spec):
    """What learning from recorded data has in common, whatever the loss."""

    collects: ClassVar[bool] = False
    kind: str
    jobs: int = Field(gt=0, description="Training jobs in all (the completion target).")
    batches_per_job: int = Field(gt=0, description="Microbatches of one job.")
    passes: int = Field(
        default=1,
        gt=0,
        le=64,
        description="Passes over a job's samples, the later ones shuffled; a frozen base sees each sample once a job.",
    )
    microbatch_size: int = Field(gt=0, description="Samples of one optimizer step.")
    optimizer: AdamSpec
    cosine: bool = Field(default=True, description="Decay the learning rate to 0 over all steps by half a cosine.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seeds initial weights and sample order.")

    @property
    def sample_count(self) -> int:
        """Samples of one training job."""
        return self.batches_per_job * self.microbatch_size

    @property
    def decay_steps(self) -> int | None:
        """Optimizer steps over which the learning rate falls to 0; None: it is constant."""
        return self.jobs * self.batches_per_job * self.passes if self.cosine else None

    def single_step(self, samples: int) -> Self:
        """The same algorithm with one microbatch of `samples`, seen once."""
        return self.model_copy(update={"microbatch_size": samples, "passes": 1})


class SftSpec(OfflineSpec):
    """Supervised fine-tuning on demonstrations: L1 on normalised chunks, or flow matching in modules of that kind."""

    kind: Literal["sft"] = "sft"


class AwrSpec(OfflineSpec):
    """Advantage-weighted regression on recorded rewards (Peng et al. 2019): each action counts exp(advantage / β).

    By the action, not by the chunk: there is no ratio whose granularity could be declared.

    Offline RL: task `rl` with `data`, a dataset that holds rewards, in place of `environment`. A critic learns the
    returns beside it; the advantage is the return less what the critic says. Modules that denoise weigh their
    flow-matching error in the log-probability's place.
    """

    kind: Literal["awr"] = "awr"
    gamma: float = Field(default=0.99, gt=0, le=1, description="Discount of one action.")
    temperature: float = Field(default=1.0, gt=0, description="β: small imitates the best only, large all alike.")
    weight_cap: float = Field(default=20.0, gt=0, description="The greatest weight.")


class RolloutSpec(Spec):
    """What learning from rollouts has in common, whatever the estimator and the loss."""

    collects: ClassVar[bool] = True
    kind: str
    jobs: int = Field(gt=0, le=MAX_ROLLOUTS, description="Rollouts, each one training job (the completion target).")
    num_envs: int = Field(gt=0, le=4096, description="Environments stepped together.")
    rollout_steps: int = Field(
        gt=0, description="Chunks each environment executes a rollout; samples = num_envs × this."
    )
    microbatch_size: int = Field(gt=0, description="Samples of one optimizer step.")
    log_prob_granularity: Literal["action", "chunk"] = Field(
        default="action", description="Log-probability per action of the chunk (stable) or per whole chunk."
    )
    entropy_coef: float = Field(default=0.0, ge=0)
    optimizer: AdamSpec
    cosine: bool = Field(
        default=False, description="Decay the learning rate to 0 over all jobs' steps by half a cosine."
    )
    max_policy_staleness: int = Field(
        default=128, ge=0, description="Jobs whose policy is older than this many microbatch updates are dropped."
    )
    delay: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DELAY,
        description="d: rollout k acts with the version that job k − 1 − d made, which is bit-reproducible; null: with "
        "the one that is current when it begins.",
    )
    lockstep: bool = Field(default=False, description="Another spelling of delay 0.")
    seed: int = Field(
        default=0,
        ge=0,
        le=seeds.ALGORITHM_SEEDS[-1],
        description="Seeds initial weights, action noise, sample order and environments.",
    )

    @property
    def sample_count(self) -> int:
        """Samples of one training job."""
        return self.num_envs * self.rollout_steps

    @property
    def decay_steps(self) -> int | None:
        """Optimizer steps over which the learning rate falls to 0; None: it is constant."""
        return self.jobs * self.updates_per_job if self.cosine else None

    @property
    def recomputes(self) -> bool:
        """Whether the actor's log-probabilities and values are computed before the advantages."""
        return False

    @property
    def asks_critic(self) -> bool:
        """Whether values are estimated from and learned."""
        return True

    @property
    def episodes_per_start(self) -> int:
        """Episodes that begin alike, to be compared."""
        return 1

    @property
    @abstractmethod
    def estimation(self) -> tuple[str, dict[str, Any]]:
        """The advantage estimator's kind and its settings, as `kernels.advantages.ESTIMATORS` names and takes them."""

    def single_step(self, samples: int) -> Self:
        """The same algorithm with one microbatch of `samples`, seen once."""
        return self.model_copy(update={"microbatch_size": samples})

    @property
    def rollout_delay(self) -> int | None:
        """Jobs that rollouts run ahead of training by declaration; None: as many as the bounds admit."""
        return 0 if self.lockstep else self.delay

    @property
    def updates_per_job(self) -> int:
        """Optimizer steps of one job at most."""
        return math.ceil(self.num_envs * self.rollout_steps / self.microbatch_size)

    @model_validator(mode="after")
    def _delayed_jobs_are_not_stale(self) -> Self:
        if self.lockstep and self.delay not in (None, 0):
            raise ValueError(refusal("delay", self.delay, "0 or null with lockstep", "leave lockstep out"))
        bound, updates = self.max_policy_staleness, self.updates_per_job
        if (self.rollout_delay or 0) * updates > bound:
            possible = f"up to {bound // updates} with max_policy_staleness {bound} and {updates} updates a job"
            remedy = "every job would be dropped: lower it or raise max_policy_staleness"
            raise ValueError(refusal("delay", self.delay, possible, remedy))
        return self


class ClippedSpec(RolloutSpec):
    """What algorithms with a clipped probability ratio have in common."""

    epochs: int = Field(default=4, gt=0, le=64, description="Passes over a job's samples.")
    clip_coef: float = Field(default=0.2, gt=0, description="Ratios are clipped to 1 − this and, by default, 1 + this.")
    clip_high: float | None = Field(default=None, gt=0, description="Ratios are clipped to 1 + this; null: clip_coef.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Floor of the objective, in advantages, where they are negative; null: none."
    )
    actor_forward: bool = Field(default=False, description="Recompute log-probabilities and values by the actor first.")

    @property
    def updates_per_job(self) -> int:
        """Optimizer steps of one job at most."""
        return self.epochs * super().updates_per_job

    @property
    def recomputes(self) -> bool:
        """Whether the actor's log-probabilities and values are computed before the advantages."""
        return self.actor_forward

    def single_step(self, samples: int) -> Self:
        """The same algorithm with one microbatch of `samples`, seen once."""
        return self.model_copy(update={"microbatch_size": samples, "epochs": 1})


class GaeSpec(Spec):
    """Generalised advantage estimation; its decay is the workload's `gae_lambda`."""

    kind: Literal["gae"] = "gae"


class NStepSpec(Spec):
    """Rewards of n decisions, then the critic."""

    kind: Literal["n_step"] = "n_step"
    n_steps: int = Field(gt=0, description="Decisions (chunks, not actions) whose reward is counted.")
    value_baseline: bool = Field(default=True, description="Take the critic's value off the return.")


class MonteCarloSpec(Spec):
    """Rewards up to the episode's end; the critic only where the end was not seen."""

    kind: Literal["monte_carlo"] = "monte_carlo"
    value_baseline: bool = Field(default=True, description="Take the critic's value off the return.")


class KlSpec(Spec):
    """A penalty on the distance from the policy that acted, or from the one that the workload began with."""

    coef: float = Field(gt=0)
    # Not k1: its gradient has mean 0 whatever the distance, so as a penalty it only adds noise.
    estimator: Literal["k2", "k3"] = Field(default="k3", description="How one sample estimates the distance.")
    reference: Literal["behaviour", "reference"] = Field(
        default="behaviour", description="The policy that acted, or the one that the workload began with."
    )


class DecoupledSpec(Spec):
    """Ratios against the actor at the job's begin, weighted by how likely it finds what the older policy did."""

    weight_cap: float = Field(default=5.0, ge=1, description="The greatest weight of an element.")


class PpoSpec(ClippedSpec):
    """Proximal policy optimisation of a stochastic policy with a value head."""

    kind: Literal["ppo"] = "ppo"
    gamma: float = Field(default=0.99, gt=0, le=1, description="Discount of one action.")
    estimator: Annotated[GaeSpec | NStepSpec | MonteCarloSpec, Field(discriminator="kind"), ChoiceInForms] = Field(
        default_factory=GaeSpec, description="How advantages and returns are estimated."
    )
    gae_lambda: float | None = Field(
        default=0.95, ge=0, le=1, description="Decay of one decision; null with another estimator than gae."
    )
    value_coef: float = Field(default=0.5, ge=0)
    value_clip: float | None = Field(
        default=None, gt=0, description="How far a job may move a value before it gains nothing by it; null: any."
    )
    kl: KlSpec | None = Field(default=None, description="Stay near another policy; null: no penalty.")
    decoupled: DecoupledSpec | None = Field(
        default=None, description="Correct for policies older than the actor; needs actor_forward. Null: no correction."
    )

    @property
    def estimation(self) -> tuple[str, dict[str, Any]]:
        """The advantage estimator's kind and its settings, as `kernels.advantages.ESTIMATORS` names and takes them."""
        settings = _settings(self.estimator) | {"gamma": self.gamma}
        return self.estimator.kind, settings | ({} if self.gae_lambda is None else {"gae_lambda": self.gae_lambda})

    @model_validator(mode="before")
    @classmethod
    def _decay_of_gae_only(cls, data: Any) -> Any:
        """The declared decay is gae's default alone; elsewhere what is left out is none."""
        estimator = data.get("estimator") if isinstance(data, dict) else None
        kind = estimator.get("kind") if isinstance(estimator, dict) else getattr(estimator, "kind", "gae")
        return data if kind == "gae" else {"gae_lambda": None, **data}

    @model_validator(mode="after")
    def _fields_are_used(self) -> PpoSpec:
        if (self.gae_lambda is None) != (self.estimator.kind != "gae"):
            possible = "a number with estimator 'gae', null with others"
            raise ValueError(refusal("gae_lambda", self.gae_lambda, possible, f"estimator is {self.estimator.kind!r}"))
        if self.decoupled is not None and not self.actor_forward:
            remedy = "set it: the actor's log-probabilities are what ratios are taken against"
            raise ValueError(refusal("actor_forward", False, "true with decoupled", remedy))
        if self.value_clip is not None and self.value_coef == 0:
            raise ValueError(refusal("value_clip", self.value_clip, "null with value_coef 0", "leave it out"))
        return self


class GroupMeanSpec(Spec):
    """Against the mean of the whole group (GRPO)."""

    kind: Literal["group_mean"] = "group_mean"
    scale: Literal["std", "none"] = Field(
        default="std", description="Divide by the group's deviation, or not (Dr. GRPO)."
    )


class LeaveOneOutSpec(Spec):
    """Against the mean of the others of the group (RLOO)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class GroupKlSpec(KlSpec):
    """The same penalty, on the distance from the policy that the workload began with unless said otherwise."""

    reference: Literal["behaviour", "reference"] = Field(
        default="reference", description="The policy that acted, or the one that the workload began with."
    )


class GrpoSpec(ClippedSpec):
    """Group relative policy optimisation: episodes against others from the same start; no value head.

    Episodes that did not end within the rollout carry no loss.
    """

    kind: Literal["grpo"] = "grpo"
    gamma: float = Field(
        default=1.0, gt=0, le=1, description="Discount of one action in an episode's outcome; 1: none."
    )
    group_size: int = Field(ge=2, description="Episodes from one start; one alone would have nothing to compare with.")
    baseline: Annotated[GroupMeanSpec | LeaveOneOutSpec, Field(discriminator="kind"), ChoiceInForms] = Field(
        default_factory=GroupMeanSpec, description="What an episode's outcome is compared with."
    )
    keep_return: tuple[float, float] | None = Field(
        default=None,
        description="Groups whose mean outcome is beyond these bounds carry no loss (DAPO); null keeps all.",
    )
    kl: GroupKlSpec | None = Field(default=None, description="Stay near another policy; null: no penalty.")

    @property
    def asks_critic(self) -> bool:
        """Whether values are estimated from and learned."""
        return False

    @property
    def episodes_per_start(self) -> int:
        """Episodes that begin alike, to be compared."""
        return self.group_size

    @property
    def estimation(self) -> tuple[str, dict[str, Any]]:
        """The advantage estimator's kind and its settings, as `kernels.advantages.ESTIMATORS` names and takes them."""
        return self.baseline.kind, _settings(self.baseline) | {"keep_return": self.keep_return, "gamma": self.gamma}

    @model_validator(mode="after")
    def _bounds_in_order(self) -> GrpoSpec:
        if self.keep_return is not None and self.keep_return[0] > self.keep_return[1]:
            raise ValueError(refusal("keep_return", self.keep_return, "the lower bound first", "swap them"))
        return self


class ReinforceSpec(RolloutSpec):
    """REINFORCE with the critic as a baseline: one pass over each rollout."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=0.99, gt=0, le=1, description="Discount of one action.")
    estimator: Annotated[NStepSpec | MonteCarloSpec, Field(discriminator="kind"), ChoiceInForms] = Field(
        default_factory=MonteCarloSpec, description="How returns are estimated, and whether the critic is taken off."
    )
    value_coef: float = Field(default=0.5, ge=0)
    standardise: bool = Field(default=True, description="Zero mean and unit deviation of a job's advantages.")
    kl: KlSpec | None = Field(default=None, description="Stay near another policy; null: no penalty.")

    @property
    def estimation(self) -> tuple[str, dict[str, Any]]:
        """The advantage estimator's kind and its settings, as `kernels.advantages.ESTIMATORS` names and takes them."""
        return self.estimator.kind, _settings(self.estimator) | {"gamma": self.gamma}


def _settings(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(exclude={"kind"})


RolloutAlgorithm = PpoSpec | GrpoSpec | ReinforceSpec
AlgorithmSpec = Annotated[SftSpec | AwrSpec | RolloutAlgorithm, Field(discriminator="kind"), ChoiceInForms]
KINDS_OF_TASK: dict[str, tuple[str, ...]] = {"sft": ("sft",), "rl": ("awr", "grpo", "ppo", "reinforce")}
"""{task: kinds of algorithm}."""
