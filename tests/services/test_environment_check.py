"""Any gymnasium environment by its id: what is declared of it, and what the check says of one that breaks the contract.

LIBERO's check is in test_environment_libero.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from configs.environment import EnvironmentSpec
from configs.errors import SpecError
from services.environment_check import Finding, check
from services.environments.adapter import make_adapter
from services.environments.batch import EnvironmentBatch
from tests.services.environment_specs import toy

GOALS = {"state_key": "observation", "state_range": (1, 3), "camera_keys": {"front": "eye"}}
TWO = [{"name": name, "height": 4, "width": 6} for name in ("front", "side")]


def found(spec: dict[str, Any]) -> list[Finding]:
    async def main() -> list[Finding]:
        return [finding async for finding in check(EnvironmentSpec.model_validate(spec), 4)]

    return asyncio.run(asyncio.wait_for(main(), 120))


def faults(spec: dict[str, Any]) -> dict[str, str]:
    return {finding.what: finding.fault for finding in found(spec) if finding.fault is not None}


def test_state_and_pictures_are_where_they_are_declared_to_be() -> None:
    spec = toy("Goals-v0", **GOALS)
    batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=True)
    batch.reset([5, 6])
    seen = batch.batch_step(np.zeros((2, 2, 1), np.float32), [None, None])["observation"]
    np.testing.assert_array_equal(seen["proprioception"], [[5, 2], [6, 2]])  # the 2nd and 3rd of its four values
    np.testing.assert_array_equal(seen["images"]["front"], np.full((2, 4, 6, 3), 102, np.uint8))


def test_two_cameras_may_be_an_entry_and_what_is_rendered() -> None:
    spec = toy("Goals-v0", **GOALS | {"camera_keys": {"front": "eye", "side": "render()"}, "cameras": TWO})
    batch = EnvironmentBatch(spec, make_adapter(spec, 1), 1, images=True)
    images = batch.reset([5])["images"]
    assert (images["front"] == 100).all()
    assert (images["side"] == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"state_key": None},
            "state_key: got None; possible: desired_goal (2,), eye (4, 6, 3), observation (4,); name the one that is",
        ),
        ({"state_range": None}, "state_width: got 2; possible: 4, the values that tests.services.faulty_environments:"),
        ({"state_range": (3, 5)}, "state_range: got [3, 5]; possible: within the 4 of tests.services.faulty_environm"),
        ({"state_key": "eye"}, "state_key: got 'eye'; possible: a vector, not the state's shape (4, 6, 3); name a "),
        ({"camera_keys": {"front": "top"}}, "camera_keys.front: got 'top'; possible: desired_goal (2,), eye (4, 6, 3)"),
        ({"options": {"depth": True}}, "cameras.front: got 'eye that gives float32'; possible: a picture of uint8 "),
        ({"cameras": TWO, "camera_keys": {}}, "camera_keys.front: got None; possible: desired_goal (2,), eye (4, 6, "),
        (
            {"cameras": [{"name": "front", "height": 8, "width": 8}]},
            "cameras.front: got (8, 8, 3); possible: the picture's shape (4, 6, 3); correct height and width, or ",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(changes: dict[str, Any], message: str) -> None:
    spec = toy("Goals-v0", **GOALS | changes)
    batch = EnvironmentBatch(spec, make_adapter(spec, 1), 1, images=True)
    with pytest.raises(SpecError) as caught:
        batch.reset([1])
    assert str(caught.value).startswith(message)


def test_a_flat_observation_has_no_entries() -> None:
    spec = toy(state_key="observation")
    with pytest.raises(SpecError, match="state_key: got 'observation'; possible: none; leave it out"):
        EnvironmentBatch(spec, make_adapter(spec, 1), 1, images=True).reset([1])


def test_actions_that_are_no_box_are_to_be_wrapped() -> None:
    spec = toy(id="CartPole-v1")
    with pytest.raises(SpecError, match=r"action_width: got 1; possible: .* Discrete\(2\); wrap the environment so"):
        make_adapter(spec, 1)


def test_the_check_finds_nothing_wrong_with_the_toy_but_that_it_is_one_colour() -> None:
    assert faults(toy()) == {
        "camera front: 4 × 6, 1 colours": "cameras.front: got 'one colour'; possible: a picture; check the camera and "
        "the renderer"
    }
    *_, last = found(toy(max_episode_steps=3))
    assert last.what.startswith("an episode of random actions was t")


def test_an_environment_that_says_nothing_of_success_is_told_to() -> None:
    said = faults(toy("Goals-v0", **GOALS))
    assert said["what steps report"] == (
        "step's info: got []; possible: success or is_success; put one there; without it every episode counts as a "
        "failure"
    )


def test_an_environment_that_breaks_the_contract_hears_all_of_it() -> None:
    said = faults(toy("Restless-v0"))
    assert said["the same seed begins the same episode"].startswith("reset: got two initial observations for seed 4; ")
    assert "let reset(seed=…) alone decide" in said["the same seed begins the same episode"]
    (reward,) = [fault for what, fault in said.items() if what.startswith("steps of ")]
    assert reward == "reward: got one that is not finite; possible: finite; mend it"
    assert said["actions change what is observed"].startswith("step: got the same observation after 10 random actions")


def test_a_simulator_that_raises_is_told_in_its_own_words() -> None:
    (fault,) = faults(toy(id="tests.services.faulty_environments:Nowhere-v0")).values()
    assert fault.startswith("id: got 'tests.services.faulty_environments:Nowhere-v0'; possible: a registered gymnasium")


def test_what_is_not_installed_is_told_with_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOYNEXUS_ENVIRONMENTS", str(tmp_path))
    (only,) = found(toy(requirements="libero.txt"))
    assert only == Finding(
        "interpreter",
        "requirements: got 'libero.txt'; possible: one that is installed here; run `joynexus env install libero`",
    )
