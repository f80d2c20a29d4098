"""Declared transforms and a mixture of datasets on a real platform: an adapter brings them to where it is served."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np

from configs.data import DataSpec
from configs.home import Home
from configs.platform import PlatformAddresses
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


def test_an_adapter_of_mixed_datasets_and_delta_actions_unnormalises_by_itself(
    platform: PlatformAddresses, home: Home, dataset: str
) -> None:
    """Trained on pictures of one size and shown those of another; its actions by hand from what its manifest says."""

    async def main() -> None:
        shutil.copytree(home.datasets / dataset, home.datasets / "again-mixed")
        async with running(platform, home) as here:
            run = await here.start(mixed(dataset))
            await here.completed(run)
            assert here.report(mixed(dataset), run)["jobs"] == {"completed": 2, "failed": 0, "dropped": 0}
            found = await (await here.service(lookup.METRICS)).resolve("models:/mixed.sft@champion")
            declared = found.manifest["policy"]
            assert declared["transforms"]["delta_action"] == [0]
            assert [(c["height"], c["width"]) for c in declared["cameras"]] == [(48, 48)]
            inference = await here.service(lookup.INFERENCE)
            opened = await inference.open_adapter("models:/mixed.sft@champion")
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
            assert PartitionStore(home.partitions).list() == []

    asyncio.run(main())
