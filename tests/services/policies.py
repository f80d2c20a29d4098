"""Declarations and observations for tests of the model services: small, distinguishable, on the real tiny base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from configs import presets
from configs.algorithm import AdamSpec, GrpoSpec, PpoSpec, ReinforceSpec, RolloutAlgorithm, SftSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.environment import CameraSpec, StatisticsSpec
from configs.model import MODULE_SPECS, BaseModelSpec
from configs.signature import prefix_key, schema_signature
from configs.workload import LimitsSpec, OutputsSpec, ResourcesSpec
from storage.partitions import PartitionStore

BASE = presets.base_model("tiny-qwen3-vl")
BASES = [BASE.model_dump(mode="json")]
SMALL: dict[str, dict[str, Any]] = {
    "oft": {"hidden_width": 32, "residual_blocks": 1},
    "gr00t": {"hidden_width": 32, "layers": 2, "heads": 2, "head_width": 16, "future_tokens": 4},
    "pi": {"hidden_width": 32, "mlp_width": 64, "heads": 2},
    "pi05": {"hidden_width": 32, "mlp_width": 64, "heads": 2, "version": "pi05", "proprioception": "prompt"},
    "lora": {
        "hidden_width": 32,
        "residual_blocks": 1,
        "rank": 4,
        "alpha": 8.0,
        "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    },
}
"""Every kind of module, and of the kind `pi` both versions."""
FLOWS: dict[str, dict[str, Any]] = {
    name: {"kind": name, "value_width": 16, "value_blocks": 1} for name in ("flow_sde", "flow_noise")
}


def policy(
    tenant: str,
    *,
    state_width: int = 2,
    action_width: int = 2,
    horizon: int = 1,
    seed: int = 0,
    cameras: tuple[str, ...] = ("top",),
    base: BaseModelSpec = BASE,
    kind: str = "oft",
    flow: dict[str, Any] | None = None,
) -> PolicyConfig:
    """A tenant's interface; `flow` declares how a module that denoises acts at random."""
    spec = base
    widths = {"horizon": horizon, "action_width": action_width, "state_width": state_width}
    module = MODULE_SPECS["pi" if kind == "pi05" else kind].model_validate(
        {"proprioception": "head"} | SMALL[kind] | widths | ({} if flow is None else {"policy": flow})
    )
    shown = tuple(CameraSpec(name=n, height=spec.image_height, width=spec.image_width) for n in cameras)
    return PolicyConfig(
        tenant=tenant,
        base_model=spec,
        action_module=module,
        cameras=shown,
        state=StatisticsSpec(mean=(0.0,) * state_width, std=(1.0,) * state_width),
        action=StatisticsSpec(mean=(0.5,) * action_width, std=(2.0,) * action_width),
        seed=seed,
        schema_signature=schema_signature(spec, module, shown, light_visuals=False),
    )


def backend(
    tenant: str, task: str = "sft", *, learning_rate: float = 1e-2, seed: int = 0, passes: int = 1, **interface: Any
) -> BackendConfig:
    """A workload as compiled; SFT makes 2 steps of 4 samples a job, PPO 2 epochs over 2 × 4 samples."""
    adam = AdamSpec(learning_rate=learning_rate)
    sft = SftSpec(jobs=4, batches_per_job=2, microbatch_size=4, passes=passes, optimizer=adam, seed=seed)
    ppo = PpoSpec(jobs=4, num_envs=2, rollout_steps=4, epochs=2, microbatch_size=4, optimizer=adam, seed=seed)
    declared = policy(tenant, seed=seed, **interface)
    return BackendConfig(
        policy_key=f"{tenant}.{task}",
        task="sft" if task == "sft" else "rl",
        policy=declared,
        prefix_key=prefix_key(declared.base_model),
        algorithm=sft if task == "sft" else ppo,
        sample_count=8,
        environment=presets.environment("reach") if task == "rl" else None,
        evaluation=None,
        evaluation_environment=None,
        limits=LimitsSpec(),
        resources=ResourcesSpec(),
        outputs=OutputsSpec(),
    )


ROLLOUT_SPECS: dict[str, type[RolloutAlgorithm]] = {"ppo": PpoSpec, "grpo": GrpoSpec, "reinforce": ReinforceSpec}


def rollouts(tenant: str, kind: str, *, module: str = "oft", **fields: Any) -> BackendConfig:
    """An RL workload of some algorithm on 4 chunks of 2 environments, all 8 samples in one microbatch."""
    found = backend(tenant, "rl", kind=module)
    common: dict[str, Any] = {"jobs": 4, "num_envs": 2, "rollout_steps": 4, "microbatch_size": 8}
    common["optimizer"] = {"learning_rate": 1e-2}
    algorithm = ROLLOUT_SPECS[kind].model_validate(common | fields)
    return found.model_copy(update={"algorithm": algorithm})


def observation(rows: int, seed: int, *, state_width: int = 2, cameras: tuple[str, ...] = ("top",)) -> dict[str, Any]:
    """Noise pictures that differ row by row and seed by seed."""
    rng = np.random.default_rng(seed)
    return {
        "images": {name: rng.integers(0, 256, (rows, 64, 64, 3), dtype=np.uint8) for name in cameras},
        "proprioception": rng.normal(size=(rows, state_width)).astype(np.float32),
        "instructions": ["reach the red target"] * rows,
    }


def job(config: BackendConfig, number: int = 0) -> dict[str, Any]:
    """A leased descriptor."""
    return {
        "job_id": f"{config.policy.tenant}-{number}",
        "created_seq": number,
        "partition_id": f"{config.policy.tenant}-{number}",
        "policy_key": config.policy_key,
        "tenant_id": config.policy.tenant,
        "task_type": config.task,
        "sample_count": config.sample_count,
        "behavior_policy_version": None,
        "metadata": {"schema_signature": config.policy.schema_signature},
    }


def put_demonstrations(
    root: Path,
    config: BackendConfig,
    number: int = 0,
    *,
    seed: int = 0,
    nan: bool = False,
    described: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write an SFT partition of 8 samples; returns its job, which is `described` where there is one already."""
    module = config.policy.action_module
    seen = observation(8, seed, state_width=module.state_width)
    action = np.random.default_rng(seed + 1).normal(size=(8, module.horizon, module.action_width)).astype(np.float32)
    if nan:
        action[3] = np.nan
    described = described or job(config, number)
    PartitionStore(root).put(
        described["partition_id"],
        {
            "image.top": seen["images"]["top"],
            "proprioception": seen["proprioception"],
            "action": action,
            "action_is_pad": np.zeros(action.shape[:2], bool),
        },
        tenant_id=config.policy.tenant,
        schema_signature=config.policy.schema_signature,
        policy_version=None,
        chunk=4,
        instructions=["reach the red target"],
    )
    return described
