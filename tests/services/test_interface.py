"""A tenant's interface: what is learned from and what is executed are each other's inverse, under every transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.environment import StatisticsSpec
from configs.errors import TenantFault
from configs.transforms import TransformsSpec
from services.interface import Interface
from storage.resizing import resized
from tests.services.policies import policy

RANGES = {"min": (-1.0,) * 3, "max": (3.0,) * 3, "q01": (0.0,) * 3, "q99": (2.0,) * 3}


def interface(**transforms: Any) -> Interface:
    config = policy("a", state_width=4, action_width=3, horizon=2)
    action = StatisticsSpec(mean=(1.0,) * 3, std=(2.0,) * 3, **RANGES)
    state = StatisticsSpec(mean=(0.0,) * 4, std=(1.0,) * 4, q01=(-1.0,) * 4, q99=(1.0,) * 4)
    declared = TransformsSpec.model_validate(transforms)
    return Interface(config.model_copy(update={"transforms": declared, "action": action, "state": state}))


def test_deltas_gripper_and_quantiles_by_hand() -> None:
    """Dimension 0 against state 3: 1.5 − 0.5 = 1 is the middle of 0 … 2, so 0; dimension 2 is exempt."""
    found = interface(scaling="quantiles", exempt_action=(2,), delta_action=(0,), delta_state=(3,))
    action = np.array([[[1.5, 2.0, -1.0], [2.5, 1.0, 1.0]]], np.float32)
    state = np.array([[9.0, 9.0, 9.0, 0.5]], np.float32)
    learned = found.policy_action(action, state)
    np.testing.assert_allclose(learned, [[[0.0, 1.0, -1.0], [1.0, 0.0, 1.0]]])
    np.testing.assert_allclose(found.environment_action(learned, state), action)


@pytest.mark.parametrize(
    "transforms",
    [
        {},
        {"scaling": "quantiles", "exempt_action": [2]},
        {"delta_action": [0, 1]},
        {"scaling": "quantiles", "delta_action": [1, 2], "delta_state": [3, 0], "exempt_state": [1]},
    ],
)
def test_what_is_executed_is_the_inverse_of_what_is_learned(transforms: dict[str, Any]) -> None:
    rng, found = np.random.default_rng(0), interface(**transforms)
    action, state = rng.normal(size=(6, 2, 3)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)
    learned = found.policy_action(action, state)
    assert not np.allclose(learned, action)
    np.testing.assert_allclose(found.environment_action(learned, state), action, atol=1e-5)


def test_pictures_are_resized_where_that_is_declared_and_others_are_not() -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (2, 48, 64, 3), dtype=np.uint8)
    seen = interface(cameras={"top": {"height": 24, "width": 32}})._pictures({"top": pictures, "side": pictures})
    np.testing.assert_array_equal(seen["top"], resized(pictures, (24, 32)))
    assert seen["side"] is pictures
    listed = interface(cameras={"top": {"height": 24, "width": 32}})._pictures({"top": list(pictures)})
    np.testing.assert_array_equal(listed["top"], seen["top"])


def test_statistics_that_the_scaling_asks_for_are_not_made_up() -> None:
    with pytest.raises(TenantFault, match="statistics: got 'no min and max'"):
        interface(scaling="min_max")  # the state has none
