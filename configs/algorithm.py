"""Learning algorithms: every field is used by the algorithm that declares it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs import seeds
from configs.spec import ChoiceInForms, Spec

MAX_ROLLOUTS = 2_000
"""Completion target of RL at most. As many jobs again may be lost before a workload is given up, and all of their
rollouts have environment seeds of their own (`seeds.ROLLOUTS_PER_SEED`)."""


class AdamSpec(Spec):
    """AdamW and gradient clipping."""

    learning_rate: float = Field(ge=0, description="Step size; 0 freezes the weights.")
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")


class SftSpec(Spec):
    """Supervised fine-tuning on demonstrations: L1 on normalised chunks, or flow matching in modules of that kind."""

    kind: Literal["sft"] = "sft"
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


class PpoSpec(Spec):
    """Proximal policy optimisation of a Gaussian policy with a value head."""

    kind: Literal["ppo"] = "ppo"
    jobs: int = Field(gt=0, le=MAX_ROLLOUTS, description="Rollouts, each one training job (the completion target).")
    num_envs: int = Field(gt=0, le=4096, description="Environments stepped together.")
    rollout_steps: int = Field(
        gt=0, description="Chunks each environment executes a rollout; samples = num_envs × this."
    )
    gamma: float = Field(default=0.99, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_coef: float = Field(default=0.2, gt=0)
    value_coef: float = Field(default=0.5, ge=0)
    entropy_coef: float = Field(default=0.0, ge=0)
    epochs: int = Field(default=4, gt=0, le=64, description="Passes over a job's samples.")
    microbatch_size: int = Field(gt=0, description="Samples of one optimizer step.")
    log_prob_granularity: Literal["action", "chunk"] = Field(
        default="action", description="Ratio per action of the chunk (stable) or per whole chunk."
    )
    optimizer: AdamSpec
    actor_forward: bool = Field(default=False, description="Recompute log-probabilities and values by the actor first.")
    max_policy_staleness: int = Field(
        default=128, ge=0, description="Jobs whose policy is older than this many microbatch updates are dropped."
    )
    lockstep: bool = Field(default=False, description="Collect only after the previous job ended: bit-reproducible.")
    seed: int = Field(
        default=0,
        ge=0,
        le=seeds.ALGORITHM_SEEDS[-1],
        description="Seeds initial weights, action noise, sample order and environments.",
    )


AlgorithmSpec = Annotated[SftSpec | PpoSpec, Field(discriminator="kind"), ChoiceInForms]
