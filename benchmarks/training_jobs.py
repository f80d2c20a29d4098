"""Training jobs that benchmarks make by hand: a backend configuration, and a partition with its leased descriptor."""

from __future__ import annotations

from typing import Any, Literal

from configs import presets
from configs.algorithm import PpoSpec, SftSpec
from configs.backend import BackendConfig, PolicyConfig
from configs.environment import CameraSpec, StatisticsSpec
from configs.model import ActionModuleSpec, BaseModelSpec
from configs.signature import prefix_key, schema_signature
from configs.workload import LimitsSpec, OutputsSpec, ResourcesSpec
from storage.partitions import PartitionStore

INSTRUCTION = "push the cube to the target"


def backend(
    tenant: str,
    module: ActionModuleSpec,
    algorithm: SftSpec | PpoSpec,
    sample_count: int,
    *,
    base: BaseModelSpec | None = None,
    resources: ResourcesSpec | None = None,
    outputs: OutputsSpec | None = None,
) -> BackendConfig:
    """A tenant on `base` (the tiny one) with one camera `base` and statistics that change nothing."""
    base = base or presets.base_model("tiny-qwen3-vl")
    cameras = (CameraSpec(name="base", height=base.image_height, width=base.image_width),)
    state, action = module.state_width, module.action_width
    policy = PolicyConfig(
        tenant=tenant,
        base_model=base,
        action_module=module,
        cameras=cameras,
        state=StatisticsSpec(mean=(0.0,) * state, std=(1.0,) * state),
        action=StatisticsSpec(mean=(0.0,) * action, std=(1.0,) * action),
        seed=0,
        schema_signature=schema_signature(base, module, cameras, light_visuals=False),
    )
    task: Literal["sft", "rl"] = "sft" if isinstance(algorithm, SftSpec) else "rl"
    return BackendConfig(
        policy_key=f"{tenant}.{task}",
        task=task,
        policy=policy,
        prefix_key=prefix_key(base),
        algorithm=algorithm,
        sample_count=sample_count,
        environment=None if task == "sft" else presets.environment("pushcube"),
        evaluation=None,
        evaluation_environment=None,
        limits=LimitsSpec(),
        resources=resources or ResourcesSpec(),
        outputs=outputs or OutputsSpec(),
    )


def put(store: PartitionStore, config: BackendConfig, data: dict[str, Any], number: int) -> dict[str, Any]:
    """Write the partition of a tenant's `number`-th job; returns its descriptor as if it were leased."""
    name = f"{config.policy.tenant}-{number}"
    store.put(
        name,
        data,
        tenant_id=config.policy.tenant,
        schema_signature=config.policy.schema_signature,
        policy_version=None,
        chunk=config.algorithm.microbatch_size,
        instructions=[INSTRUCTION],
    )
    return {
        "job_id": name,
        "created_seq": number,
        "partition_id": name,
        "policy_key": config.policy_key,
        "tenant_id": config.policy.tenant,
        "task_type": config.task,
        "metadata": {"schema_signature": config.policy.schema_signature},
    }
