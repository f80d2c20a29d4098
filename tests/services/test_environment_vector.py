"""Conformance of auto-reset styles: the transitions that count are the same, whoever resets, and worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from configs.errors import EnvironmentFault, SpecError
from kernels.advantages import gae
from services.environments import renderer
from services.environments.adapter import make_adapter
from services.environments.autoreset import final_rows, succeeded
from services.environments.batch import EnvironmentBatch
from services.rollout import Collected, Observation, Prediction, collect_rollout
from tests.services.counting_environments import STYLES
from tests.services.environment_specs import preset, toy
from tests.services.in_process import InProcess

needs_renderer = pytest.mark.skipif(renderer.check() is not None, reason=str(renderer.check()))
HORIZON, STEPS, ENVS = 3, 3, 2


def counting(style: str, **changes: Any) -> dict[str, Any]:
    """The declaration of a counting environment; style "" is the single one."""
    spec = toy(kind="gymnasium_vector" if style else "gymnasium", **changes)
    return spec | {"id": f"tests.services.counting_environments:Counting{style}-v0"}


@pytest.fixture(params=["", *STYLES])
def batch(request: pytest.FixtureRequest) -> Iterator[EnvironmentBatch]:
    spec = counting(request.param)
    adapter = make_adapter(spec, ENVS)
    yield EnvironmentBatch(spec, adapter, ENVS, images=True)
    adapter.close()


async def value_is_seed_and_step(observation: Observation) -> Prediction:
    """V = 100 × seed + step."""
    seed, step = observation["proprioception"].T
    action = np.zeros((len(seed), HORIZON, 1), np.float32)
    return Prediction(action, action, np.zeros(action.shape[:2], np.float32), (100 * seed + step).astype(np.float32))


def collect(batch: EnvironmentBatch) -> tuple[dict[str, np.ndarray], Collected, list[dict[str, Any]]]:
    session = InProcess(batch)

    async def main() -> tuple[dict[str, np.ndarray], Collected]:
        collected = await collect_rollout(
            value_is_seed_and_step,
            session,
            num_envs=ENVS,
            steps=STEPS,
            seed_of_episode=lambda n: n,
            progress=lambda _done, _of: None,
        )
        return {**collected.data, **await collected.values_after(value_is_seed_and_step)}, collected

    data, collected = asyncio.run(main())
    return data, collected, session.steps


def test_every_style_gives_the_same_valid_transitions(batch: EnvironmentBatch) -> None:
    """Environment 0 runs the seeds 0 (2 steps, truncated), 2 (4, truncated), 4; environment 1 the seeds 1 (3,
    terminated), 3 (2, terminated), 5 (4, goes on).

    Chunks end with their episode (row 1), one before (rows 0 and 3) or two before (row 4); in the next-step style the
    reset transition is then masked or does not happen. A reset that nobody seeded would show as seed −1.
    """
    data, collected, steps = collect(batch)
    # Rows are t-major: (t0 e0), (t0 e1), (t1 e0), …
    np.testing.assert_array_equal(data["proprioception"], [[0, 0], [1, 0], [2, 0], [3, 0], [2, 3], [5, 0]])
    np.testing.assert_array_equal(data["image.front"][:, 0, 0, 0], [0, 0, 0, 0, 3, 0])
    np.testing.assert_array_equal(data["valid"], [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(data["reward"], [[1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 0], [4, 0, 0], [1, 2, 3]])
    np.testing.assert_array_equal(
        data["terminated"], [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    )
    np.testing.assert_array_equal(data["truncated"], [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    assert data["valid"].shape == (STEPS * ENVS, HORIZON)  # sample_count is environments × steps whatever is valid
    assert data["sample_valid"].all()
    # Final observations: what the ended episode saw last, pictures too, not what came after it.
    finals = [step["final_observation"]["proprioception"].tolist() for step in steps]
    assert finals == [[[0, 2], [1, 3]], [[3, 2]], [[2, 4]]]
    assert [step["final_rows"].tolist() for step in steps] == [[0, 1], [1], [0]]
    pictures = [step["final_observation"]["images"]["front"][:, 0, 0, 0].tolist() for step in steps]
    assert pictures == [[2, 3], [2], [4]]
    np.testing.assert_array_equal(steps[-1]["observation"]["proprioception"], [[4, 0], [5, 3]])
    assert collected.episodes.success == {0: False, 1: True, 2: False, 3: True}
    assert collected.episodes.total_reward == {0: 3, 1: 6, 2: 10, 3: 3}
    # Each its own instruction, a final observation that of its own episode.
    assert collected.instructions == [f"count from {seed}" for seed in (0, 1, 2, 3, 2, 5)]
    assert steps[0]["final_observation"]["instructions"] == ["count from 0", "count from 1"]


def test_every_style_gives_the_same_advantages(batch: EnvironmentBatch) -> None:
    """γ = λ = ½, V = 100 × seed + step; R sums ½^h r_h over valid h, the next value counts ½^(valid actions).

    (0,0): R 1+1=2, bootstrap V(0,2)=2: A = 2 + ¼·2 − 0 = 2.5. (1,0): R 1+1+¾=2.75, terminated: A = 2.75 − 100.
    (3,0): R 2, terminated: A = 2 − 300. (2,3): R 4, bootstrap V(2,4)=204: A = 4 + ½·204 − 203 = −97.
    (2,0): R 2.75, next V(2,3)=203: A = 2.75 + ⅛·203 − 200 + ⅛·½·(−97) = −177.9375.
    (5,0): R 2.75, next V(5,3)=503: A = 2.75 + ⅛·503 − 500 = −434.375.
    """
    data, _, _ = collect(batch)
    found = gae(data, num_envs=ENVS, gamma=0.5, gae_lambda=0.5)
    expected = np.array([2.5, -97.25, -177.9375, -298, -97, -434.375], np.float32)
    np.testing.assert_array_equal(found["advantage"], expected[:, None] * data["valid"])
    np.testing.assert_array_equal(found["return"], np.add(expected, [0, 100, 200, 300, 203, 500]))


def test_single_steps_have_no_reset_transition_at_all(batch: EnvironmentBatch) -> None:
    """With chunks of one action the next-step style's reset would be a row of its own; a reset of that row by its
    next seed comes before, so every row is a sample: seed 3 (2 steps) ends in the second, 5 goes on in the third."""
    batch.reset([3, 4])
    zeros = np.zeros((2, 1, 1), np.float32)
    steps = [batch.batch_step(zeros, [5, 9]) for _ in range(3)]
    assert all(step["valid"].all() for step in steps)
    assert [step["reward"][0, 0] for step in steps] == [1, 2, 1]
    assert [step["observation"]["proprioception"].tolist() for step in steps] == [
        [[3, 1], [4, 1]],
        [[5, 0], [4, 2]],
        [[5, 1], [9, 0]],
    ]


def test_the_initial_state_follows_its_seed_whoever_ended_and_idle_rows_stay(batch: EnvironmentBatch) -> None:
    """Row 0 becomes idle after seed 3 and repeats (3, 2), through as many resets as its filler episodes make."""
    batch.reset([3, 5])
    zeros = np.zeros((2, 4, 1), np.float32)
    seen = [batch.batch_step(zeros, [None, seed]) for seed in (7, 11, 14)]
    assert [step["observation"]["proprioception"].tolist() for step in seen] == [
        [[3, 2], [7, 0]],
        [[3, 2], [11, 0]],
        [[3, 2], [14, 0]],
    ]
    assert [step["valid"][0].any() for step in seen] == [True, False, False]
    assert seen[1]["valid"][1].tolist() == [True, True, True, False]  # 7 % 3 + 2 = 3 steps
    # Back in the middle of row 1's episode: both as if nothing had been.
    assert batch.reset([20, 21])["proprioception"].tolist() == [[20, 0], [21, 0]]


def test_what_was_handed_out_stays_as_it_was(batch: EnvironmentBatch) -> None:
    observation = batch.reset([0, 1])
    step = batch.batch_step(np.zeros((2, 2, 1), np.float32), [6, 7])
    final = step["final_observation"]
    for seeds in ([8, 9], [10, 11]):
        batch.batch_step(np.zeros((2, 4, 1), np.float32), seeds)
    assert observation["proprioception"].tolist() == [[0, 0], [1, 0]]
    assert final["proprioception"].tolist() == [[0, 2]]
    assert step["observation"]["proprioception"].tolist() == [[6, 0], [1, 2]]
    assert (final["images"]["front"][0, 0, 0, 0], step["observation"]["images"]["front"][1, 0, 0, 0]) == (2, 2)


@pytest.mark.parametrize("style", list(STYLES))
def test_rows_that_the_adapter_gives_are_copies(style: str) -> None:
    """Without a batch around it, which copies once more; seed 0 ends in the second step, whose final row is kept."""
    adapter = make_adapter(counting(style), 2)
    adapter.reset([0, 1], [0, 1])
    states, pictures = [adapter.proprioception([0, 1])], [adapter.render([0, 1])["front"]]
    for _ in range(2):
        adapter.step([0, 1], np.zeros((2, 1), np.float32))
        states.append(adapter.proprioception([0, 1]))
        pictures.append(adapter.render([0, 1])["front"])
    adapter.reset([0], [9])
    adapter.step([0, 1], np.zeros((2, 1), np.float32))
    assert [rows.tolist() for rows in states] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]], [[0, 2], [1, 2]]]
    assert [rows[:, 0, 0, 0].tolist() for rows in pictures] == [[0, 0], [1, 1], [2, 2]]
    assert adapter.proprioception([0, 1]).tolist() == [[9, 1], [1, 3]]
    adapter.close()


@pytest.mark.parametrize("style", ["SameStep", "NextStep", "Disabled", "ManiSkill"])
def test_the_declared_limit_truncates_where_the_environment_does_not(style: str) -> None:
    """Seed 5 lasts 4 steps of its own; at most 3 are declared: truncated there, and its final observation is (5, 3)."""
    spec = counting(style, max_episode_steps=3)
    batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=False)
    batch.reset([5, 1])
    step = batch.batch_step(np.zeros((2, 4, 1), np.float32), [8, 9])
    assert step["truncated"].tolist() == [[False, False, True, False], [False] * 4]
    assert step["terminated"].tolist() == [[False] * 4, [False, False, True, False]]
    assert step["final_observation"]["proprioception"].tolist() == [[5, 3], [1, 3]]
    assert step["observation"]["proprioception"].tolist() == [[8, 0], [9, 0]]


def test_terminations_that_maniskill_ignores_leave_the_declared_limit() -> None:
    """Seed 1 would terminate after 3 steps; success is told there, and the episode goes on to the fifth."""
    spec = counting("ManiSkillWithoutTerminations")
    batch = EnvironmentBatch(spec, make_adapter(spec, 1), 1, images=False)
    batch.reset([1])
    step = batch.batch_step(np.zeros((1, 6, 1), np.float32), [3])
    assert not step["terminated"].any()
    assert step["truncated"].tolist() == [[False, False, False, False, True, False]]
    assert step["success"].tolist() == [True]
    assert step["final_observation"]["proprioception"].tolist() == [[1, 5]]


def test_pictures_by_render_are_those_of_the_final_step() -> None:
    spec = counting("FlatNextStep")
    batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=True)
    batch.reset([0, 1])
    step = batch.batch_step(np.zeros((2, 2, 1), np.float32), [6, 7])
    assert step["final_observation"]["images"]["front"][:, 0, 0, 0].tolist() == [2]
    assert step["observation"]["images"]["front"][:, 0, 0, 0].tolist() == [0, 2]


def test_pictures_by_render_and_a_reset_in_the_same_step_do_not_go_together() -> None:
    spec = counting("FlatSameStep")
    batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=True)
    with pytest.raises(SpecError, match=r"cameras: got 'front'; possible: none; put pictures into the observations"):
        batch.reset([0, 1])


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("NoStyle", "metadata['autoreset_mode']: got None; possible: AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP"),
        ("UnknownStyle", "metadata['autoreset_mode']: got 'Sometimes'; possible: AutoresetMode.NEXT_STEP"),
        ("OneSeed", "reset, step: got 'TypeError: seed has to be an integer'; possible: reset(seed=[one an environmen"),
        ("MaskIgnored", 'reset: got "other rows\' observations changed by a reset of row 0"; possible: reset(seed=[on'),
        ("SeedsIgnored", "reset: got 'two initial observations for one seed'; possible: reset(seed=[one an environme"),
        ("RowDecides", "reset: got 'two initial observations for one seed'; possible: reset(seed=[one an environment"),
        ("ColumnOfRewards", "step's reward: got (2, 1); possible: shape (2,); mend tests.services.counting_environm"),
        ("Single", "id: got 'Counting of no number of environments'; possible: a gymnasium.vector.VectorEnv of the 2"),
        ("Bare", "id: got 'tests.services.counting_environments:CountingBare-v0'; possible: a factory of num_envs, "),
        ("Missing", "id: got 'tests.services.counting_environments:CountingMissing-v0'; possible: a registered gym"),
    ],
)
def test_what_a_vector_environment_does_not_do_is_refused_in_words(style: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_adapter(counting(style), 2)
    assert str(caught.value).startswith(message)


def _objects(*values: Any) -> np.ndarray:
    return np.array([*values, None], dtype=object)[:-1]


STATE, ENDED = np.array([4.0, 2.0], np.float32), np.array([False, True])


@pytest.mark.parametrize(
    "infos",
    [
        # gymnasium 1: objects, and a dict of arrays with masks; the auto-reset's own infos beside them.
        {
            "final_obs": _objects(None, STATE),
            "final_info": {"success": ENDED, "_success": ENDED},
            "success": np.array([True, False]),
            "_success": np.array([True, True]),
        },
        # gymnasium before 1: objects both.
        {
            "final_observation": _objects(None, STATE),
            "final_info": _objects(None, {"success": True}),
            "success": np.array([True, False]),
        },
        # ManiSkill: whole batches; what is not in final_info is of the reset.
        {
            "final_observation": np.stack([STATE + 9, STATE]),
            "final_info": {"success": np.array([True, True])},
            "_final_info": ENDED,
            "success": np.array([True, False]),
        },
        {"final_observation": np.stack([STATE + 9, STATE]), "final_info": {"is_success": np.array([True, True])}},
    ],
)
def test_final_observations_and_successes_are_found_in_every_form(infos: dict[str, Any]) -> None:
    """Row 1 ended with success at (4, 2), and the environment it is reset to has none; row 0 goes on and succeeds."""
    found = final_rows(infos, [1], "It-v0")
    assert {row: value.tolist() for row, value in found.items()} == {1: [4, 2]}
    found[1][:] = 0
    assert STATE.tolist() == [4, 2]
    assert (succeeded(infos, 0), succeeded(infos, 1)) == (True, True)


def test_no_word_of_success_is_none() -> None:
    assert not succeeded({}, 0)
    assert not succeeded({"final_info": _objects(None)}, 0)
    assert not succeeded({"success": np.array([True]), "_success": np.array([False])}, 0)


def test_what_was_refused_once_is_refused_again_by_a_host_that_stays() -> None:
    """One row cannot show that the mask is ignored; two can, each time they are asked for."""
    adapter = make_adapter(counting("MaskIgnored"), 1)
    for _ in range(2):
        with pytest.raises(SpecError, match="other rows' observations changed"):
            adapter.resize(2)


def test_a_missing_final_observation_is_the_environments_fault() -> None:
    spec = counting("NoFinalObservation")
    batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=False)
    batch.reset([0, 1])
    with pytest.raises(EnvironmentFault, match=r"info\['final_obs'\]: got 'none for row 0, whose episode ended'"):
        batch.batch_step(np.zeros((2, 2, 1), np.float32), [6, 7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_width": 3, "action": {"mean": [0] * 3, "std": [1] * 3}}, "action_width: got 3; possible: the action"),
        (
            {"state_width": 3},
            "state_width: got 3; possible: 2, the values that tests.",
        ),
        ({"options": {"num_envs": 3}}, "options: got ['num_envs']; possible: other arguments of tests.services."),
    ],
)
def test_a_wrong_declaration_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_adapter(counting("NextStep", **changes), 2)
    assert str(caught.value).startswith(message)


@needs_renderer
@pytest.mark.parametrize("auto_reset", [True, False])
def test_maniskills_own_wrapper_gives_what_the_task_gives(auto_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PushCube behind `ManiSkillVectorEnv`: rewards and ends to the bit as stepped by us, over an automatic reset."""
    import gymnasium

    from services.environments import maniskill

    ours = preset("pushcube", max_episode_steps=3)

    def make(num_envs: int, max_episode_steps: int, render_mode: str) -> Any:
        from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

        with maniskill._render_device():
            env = gymnasium.make(
                ours["id"],
                num_envs=num_envs,
                max_episode_steps=max_episode_steps,
                obs_mode="state",
                reward_mode="normalized_dense",
                control_mode=ours["control_mode"],
                sim_backend="physx_cpu",
                reconfiguration_freq=0,
            )
        return ManiSkillVectorEnv(env, auto_reset=auto_reset)

    name = f"PushCubeVector{auto_reset}-v0"
    monkeypatch.setitem(gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, vector_entry_point=make))
    width = 35  # qpos 9, qvel 9, tool pose 7, goal 3, object pose 7
    theirs = ours | {
        "kind": "gymnasium_vector",
        "id": name,
        "state_width": width,
        "state": {"mean": [0.0] * width, "std": [1.0] * width},
    }
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 1, 2, ours["action_width"])).astype(np.float32)
    found = []
    for spec in (ours, theirs):
        adapter = make_adapter(spec, 1)
        batch = EnvironmentBatch(spec, adapter, 1, images=False)
        seen = [batch.reset([4])["proprioception"]]
        steps = [batch.batch_step(chunk, [5 + t]) for t, chunk in enumerate(actions)]
        seen += [step["observation"]["proprioception"] for step in steps]
        found.append((steps, np.concatenate(seen)))
        adapter.close()
    (single, ours_seen), (vector, theirs_seen) = found
    for name in ("reward", "valid", "terminated", "truncated"):
        np.testing.assert_array_equal(
            np.concatenate([s[name] for s in single]), np.concatenate([s[name] for s in vector])
        )
    # Three steps an episode in chunks of two: the second chunk of each is cut.
    assert np.concatenate([s["valid"] for s in vector]).tolist() == [[True, True], [True, False]] * 2
    np.testing.assert_array_equal(ours_seen[:, :18], theirs_seen[:, :18])
    finals = [s["final_observation"]["proprioception"][:, :18] for s in (single[1], vector[1])]
    np.testing.assert_array_equal(*finals)
    assert (finals[1] != theirs_seen[2, :18]).any()
