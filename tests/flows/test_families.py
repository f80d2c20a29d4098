"""Tenants of every action module, on two resident base models at once, through the whole way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

from configs import presets
from configs.backend import PolicyConfig
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses
from configs.requests import EvaluateRequest
from configs.workload import EvaluationSpec, WorkloadSpec
from joynexus.command import main
from kernels import action_modules, backbones
from kernels.backbones import Backbone
from services import lookup, serving
from services.policy_stacks import PolicyStacks
from services.serving import Request, ServingPolicy
from storage.partitions import PartitionStore
from storage.registry import ResolvedAdapter
from tasks.connection import platform_connection
from tasks.tenants import close_tenant, open_tenant
from tests.flows.running import running, workload
from tests.services import policies

HELD_OUT = EvaluationSpec(environment="reach", episodes=4, first_seed=45_000, num_envs=4, before=False)
WIDTHS: dict[str, Any] = {"horizon": 2, "action_width": 2, "state_width": 2, "proprioception": "head"}
MODULES: dict[str, dict[str, Any]] = {
    "gr00t": {"kind": "gr00t", "hidden_width": 32, "layers": 2, "heads": 2, "head_width": 16, "future_tokens": 4},
    "pi": {"kind": "pi", "hidden_width": 32, "mlp_width": 64, "heads": 2},
    "lora": {"kind": "lora", "rank": 4, "alpha": 8.0, "hidden_width": 32, "residual_blocks": 1},
}


def spec(preset: str, tenant: str, kind: str, base: str, dataset: str | None = None, **algorithm: Any) -> WorkloadSpec:
    """A short workload of `preset` with another action module on another base."""
    found = workload(preset, tenant, **algorithm)
    return WorkloadSpec.model_validate(
        found.model_dump(mode="json")
        | {"action_module": MODULES[kind] | WIDTHS, "base_model": base, "evaluation": HELD_OUT.model_dump(mode="json")}
        | ({"data": {"dataset": dataset}} if found.data else {})
    )


def workloads(dataset: str) -> dict[str, WorkloadSpec]:
    """gr00t by SFT and LoRA by RL on one base, pi and LoRA by SFT on another; and one that is refused."""
    short = {"jobs": 2, "batches_per_job": 2, "microbatch_size": 8}
    rollouts = {"jobs": 2, "num_envs": 2, "rollout_steps": 8, "microbatch_size": 8, "epochs": 1}
    specs = [
        spec("demos", "flowing", "gr00t", "tiny-qwen3-vl", dataset, **short),
        spec("demos", "caching", "pi", "tiny-paligemma", dataset, **short),
        spec("demos", "adapting", "lora", "tiny-paligemma", dataset, **short),
        spec("reach", "exploring", "lora", "tiny-qwen3-vl", **rollouts),
        spec("reach", "hopeful", "gr00t", "tiny-qwen3-vl", jobs=1),
    ]
    return {one.tenant.name: one for one in specs}


@pytest.fixture(scope="module")
def ends(platform: PlatformAddresses, home: Home, dataset: str) -> Iterator[dict[str, dict[str, Any]]]:
    """{tenant: its flow run once it has ended}, of all workloads at once."""

    async def main() -> dict[str, dict[str, Any]]:
        async with running(platform, home) as here:
            runs = {tenant: await here.start(one) for tenant, one in workloads(dataset).items()}
            return {tenant: await here.ended(run) for tenant, run in runs.items()}

    async def close() -> None:
        async with running(platform, home) as here:
            await here.closed(*workloads(dataset))

    yield asyncio.run(main())
    asyncio.run(close())


def test_tenants_of_all_families_train_are_evaluated_and_served_from_the_registry(
    platform: PlatformAddresses, home: Home, dataset: str, ends: dict[str, dict[str, Any]]
) -> None:
    specs = {tenant: one for tenant, one in workloads(dataset).items() if tenant != "hopeful"}

    async def main() -> None:
        async with running(platform, home) as here:
            for tenant, one in specs.items():
                assert ends[tenant]["state_type"] == "COMPLETED", ends[tenant]["state"]
                report = here.report(one, ends[tenant]["id"])
                assert report["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}
                assert report["policy_version"] > 0
                assert report["adapter"]["name"] == one.policy_key
            request = EvaluateRequest(
                targets=tuple(f"models:/{one.policy_key}@champion" for one in specs.values()),
                environment="reach",
                episodes=2,
                first_seed=46_000,
                num_envs=2,
            )
            await here.completed(await here.api.start("evaluate", {"request": request.model_dump(mode="json")}))
            status = await (await here.service(lookup.TRAINING)).status()
            assert set(status["base_models"]) == {"tiny-qwen3-vl", "tiny-paligemma"}
            assert PartitionStore(home.partitions).list() == []

    asyncio.run(main())


@pytest.mark.usefixtures("ends")
def test_an_adapter_leaves_as_pefts_files_and_comes_back_as_another_tenants_start(
    platform: PlatformAddresses, home: Home, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained, registered, exported by the command, loaded by PEFT with the outputs of the version; and a workload that
    starts from the folder serves and trains those A and B at version 0."""
    trained = workloads(dataset)["exploring"]
    folder = tmp_path / "exported"
    again = trained.model_copy(
        update={"tenant": trained.tenant.model_copy(update={"name": "coming"}), "start_from": str(folder)}
    )

    async def resolved() -> ResolvedAdapter:
        async with running(platform, home) as here:
            metrics = await here.service(lookup.METRICS)
            found: ResolvedAdapter = await metrics.resolve("models:/exploring.rl@champion")
            return found

    found = asyncio.run(resolved())
    assert main(["--home", platform.home, "adapters", "--export", "models:/exploring.rl@champion", str(folder)]) == 0
    assert capsys.readouterr().out == f"models:/exploring.rl/{found.version} is in {folder}\n"
    assert main(["--home", platform.home, "adapters", "--export", "models:/nobody.rl@champion", "x"]) == 2
    assert capsys.readouterr().err.startswith("joynexus: adapter: got 'nobody.rl'; possible: ")

    config = PolicyConfig.model_validate(found.manifest["policy"])
    seen = policies.observation(3, 1)
    module = action_modules.build(config.action_module, config.base_model, 1)
    action_modules.load_parameters(module, found.params)
    ours, theirs = (backbones.load(config.base_model, PROJECT_ROOT) for _ in range(2))
    peft.PeftModel.from_pretrained(theirs.model, str(folder))
    served, loaded = (
        base.encode(base.prepare(seen, ["top"]), adapters=adapters).action_tokens
        for base, adapters in ((ours, [(slice(0, 3), module.adapter)]), (theirs, ()))
    )
    assert (served - loaded).abs().max() <= 1e-6

    async def start_again() -> tuple[dict[str, Any], dict[str, Any]]:
        async with platform_connection(home) as here:
            await open_tenant.fn(here, again, "coming-back")
            try:
                known = (await (await here.scheduler()).snapshot())["policies"]["coming.rl"]
                slot = (await (await here.training()).status())["slots"]["coming"]["bytes"]
                samples = 16 * 3 * 64 * 64
                assert known["job_bytes"] - samples > 4 * slot, "parameters, gradients, two moments and counters"
                payload = await (await here.training()).export_params("coming")
                return payload, await (await here.inference()).predict(seen, "coming")
            finally:
                await close_tenant(here, "coming")

    payload, answer = asyncio.run(start_again())
    assert (payload["version"], answer["policy_version"]) == (0, 0)
    inside = {n: a for n, a in payload["tensors"].items() if n.startswith("adapter.")}
    assert all(np.array_equal(array, found.params[name]) for name, array in inside.items())
    (alone,) = serving.forward(
        ours, [_request(ServingPolicy(config, 0, payload["tensors"]), ours, seen)], PolicyStacks(0)
    )
    np.testing.assert_array_equal(answer["action"], alone.action)


def _request(policy: ServingPolicy, backbone: Backbone, seen: dict[str, Any]) -> Request:
    prefix, state, proprioception = policy.prepare(backbone, seen)
    return Request(policy, prefix, state, proprioception, None)


def test_only_modules_that_give_log_probabilities_learn_by_rl(ends: dict[str, dict[str, Any]]) -> None:
    """Refused at admission, in the workload's flow run."""
    assert ends["hopeful"]["state_type"] == "FAILED"
    expected = "action_module.policy: got None; possible: flow_sde, flow_noise for 'gr00t' with task 'rl'"
    assert expected in ends["hopeful"]["state"]["message"]


def test_the_preset_workloads_of_other_modules_are_admitted() -> None:
    for name, kind in (("demos-gr00t", "gr00t"), ("demos-pi", "pi"), ("demos-lora", "lora")):
        assert presets.workload(name).action_module.kind == kind
