"""Declared transforms and a mixture of datasets on a real platform: an adapter brings them to where it is served, and
an evaluation of it that is cancelled leaves nothing behind."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest

from configs.data import DataSpec
from configs.home import Home
from configs.platform import PlatformAddresses
from configs.requests import EvaluateRequest
from configs.transforms import TransformsSpec
from configs.workload import EvaluationSpec, WorkloadSpec
from services import lookup
from storage.partitions import PartitionStore
from tests.flows.running import running
from tests.flows.test_workloads import sft

TRANSFORMS = {
    "cameras": {"top": {"height": 48, "width": 48}},
    "scaling": "quantiles",
    "delta_action": [0],
    "delta_state": [1],
    "exempt_action": [1],
}


def mixed(dataset: str) -> WorkloadSpec:
    mixture = {"mixture": [{"dataset": dataset}, {"dataset": "again-mixed", "weight": 2}]}
    return sft("mixed", dataset).model_copy(
        update={
            "data": DataSpec.model_validate(mixture),
            "transforms": TransformsSpec.model_validate(TRANSFORMS),
            "evaluation": EvaluationSpec(environment="reach", episodes=4, first_seed=40_000, num_envs=4),
        }
    )


@pytest.fixture(scope="module")
def adapter(platform: PlatformAddresses, home: Home, dataset: str) -> str:
    """A registered adapter of both datasets."""

    async def main() -> None:
        shutil.copytree(home.datasets / dataset, home.datasets / "again-mixed")
        async with running(platform, home) as here:
            run = await here.start(mixed(dataset))
            await here.completed(run)
            assert here.report(mixed(dataset), run)["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}
            assert PartitionStore(home.partitions).list() == []
            await here.closed("mixed")

    asyncio.run(main())
    return "models:/mixed.sft@champion"


def test_an_adapter_of_mixed_datasets_and_delta_actions_unnormalises_by_itself(
    platform: PlatformAddresses, home: Home, adapter: str
) -> None:
    """Trained on pictures of one size and shown those of another; its actions by hand from what its manifest says."""

    async def main() -> None:
        async with running(platform, home) as here:
            found = await (await here.service(lookup.METRICS)).resolve(adapter)
            declared = found.manifest["policy"]
            assert declared["transforms"]["delta_action"] == [0]
            assert [(c["height"], c["width"]) for c in declared["cameras"]] == [(48, 48)]
            inference = await here.service(lookup.INFERENCE)
            opened = await inference.open_adapter(adapter)
            state = np.array([[0.25, -0.5], [0.75, 0.125]], np.float32)
            observation = {
                "images": {"top": np.full((2, 64, 64, 3), 90, np.uint8)},
                "proprioception": state,
                "instructions": ["reach the green square"] * 2,
            }
            answer = await inference.predict(observation, opened["serving"])
            await inference.close_policy(opened["serving"])
            low, high = (np.array(declared["action"][name]) for name in ("q01", "q99"))
            given, wanted = answer["action"], answer["action"].copy()
            wanted[..., 0] = (given[..., 0] + 1) / 2 * (high[0] - low[0]) + low[0] + state[:, None, 1]
            np.testing.assert_allclose(answer["environment_action"], wanted, atol=1e-5)
            assert np.abs(wanted - given).max() > 0.1

    asyncio.run(main())


def test_an_evaluation_that_is_cancelled_closes_its_session(
    platform: PlatformAddresses, home: Home, adapter: str
) -> None:
    async def main() -> None:
        async with running(platform, home) as here:
            request = EvaluateRequest(targets=(adapter,), environment="reach", episodes=1000, first_seed=40_000)
            run = await here.api.start("evaluate", {"request": request.model_dump(mode="json")})
            environments = await here.service(lookup.ENVIRONMENTS)

            async def sessions() -> list[str]:
                found = await environments.sessions()
                return [s["tenant_id"] for s in found if s["tenant_id"].startswith("adapter-mixed")]

            await here.until(run, sessions)
            await here.api.cancel(run)
            assert (await here.ended(run))["state_type"] == "CANCELLED"
            async with asyncio.timeout(60):
                while await sessions():
                    await asyncio.sleep(0.1)

    asyncio.run(main())
