"""Conformance: what every simulator does behind `EnvironmentBatch`, whichever adapter it is."""

import numpy as np
import pytest

from configs.environment import EnvironmentSpec
from configs.errors import EnvironmentFault, SpecError, TenantFault
from services.environments import renderer
from services.environments.adapter import make_adapter
from services.environments.batch import EnvironmentBatch
from tests.services.environment_specs import preset, toy

needs_renderer = pytest.mark.skipif(renderer.check() is not None, reason=str(renderer.check()))
SPECS = {
    "toy": toy(),
    "toy-vector": toy(kind="gymnasium_vector"),
    "reach": preset("reach"),
    "pushcube": preset("pushcube"),
    "pickcube": preset("pickcube"),
}
ALL = ["toy", "toy-vector", "reach", *(pytest.param(name, marks=needs_renderer) for name in ("pushcube", "pickcube"))]


@pytest.fixture(scope="module", params=ALL)
def case(request):
    """(spec, adapter with three environments), built once for all tests of one simulator."""
    spec = SPECS[request.param]
    adapter = make_adapter(spec, 3)
    yield spec, adapter
    adapter.close()


def _batch(case, *, images=True):
    spec, adapter = case
    return EnvironmentBatch(spec, adapter, 3, images=images)


def _actions(spec, steps, seed=0):
    # Below 0.5 in the first dimension: that would end the toy's episode.
    return np.random.default_rng(seed).uniform(-0.25, 0.4, (3, steps, spec["action_width"])).astype(np.float32)


def _assert_equal(a, b, rows=slice(None)):
    np.testing.assert_array_equal(a["proprioception"][rows], b["proprioception"][rows])
    for name in a["images"]:
        np.testing.assert_array_equal(a["images"][name][rows], b["images"][name][rows])


def test_observations_are_as_declared(case):
    spec, adapter = case
    observation = _batch(case).reset([1, 2, 3])
    assert observation["proprioception"].dtype == np.float32
    assert observation["proprioception"].shape == (3, spec["state_width"])
    assert set(observation["images"]) == {c["name"] for c in spec["cameras"]}
    for camera in spec["cameras"]:
        image = observation["images"][camera["name"]]
        assert (image.dtype, image.shape) == (np.uint8, (3, camera["height"], camera["width"], 3))
    assert len(observation["instructions"]) == 3
    assert adapter.action_low.shape == adapter.action_high.shape == (spec["action_width"],)
    assert all(isinstance(version, str) for version in adapter.versions.values())


def test_the_seed_alone_decides_whatever_happened_before(case):
    spec, _ = case
    batch = _batch(case)
    first = batch.reset([11, 12, 13])
    after = batch.batch_step(_actions(spec, 3), [None] * 3)
    batch.reset([99, 98, 97])
    batch.batch_step(_actions(spec, 2, seed=5), [None] * 3)
    again = batch.reset([11, 12, 13])
    _assert_equal(first, again)
    repeated = batch.batch_step(_actions(spec, 3), [None] * 3)
    _assert_equal(after["observation"], repeated["observation"])
    np.testing.assert_array_equal(after["reward"], repeated["reward"])
    # Neither does the place in the batch matter, nor who else is there.
    turned = batch.reset([13, None, 11])
    np.testing.assert_array_equal(turned["proprioception"][[0, 2]], first["proprioception"][[2, 0]])
    fresh = make_adapter(spec, 1)
    alone = EnvironmentBatch(spec, fresh, 1, images=True)
    _assert_equal(alone.reset([11]), first, rows=slice(0, 1))
    alone_after = alone.batch_step(_actions(spec, 3)[:1], [None])
    _assert_equal(alone_after["observation"], after["observation"], rows=slice(0, 1))
    fresh.close()


def test_a_chunk_equals_its_steps(case):
    spec, _ = case
    batch = _batch(case)
    actions = _actions(spec, 3)
    batch.reset([1, 2, 3])
    chunk = batch.batch_step(actions, [None] * 3)
    batch.reset([1, 2, 3])
    steps = [batch.batch_step(actions[:, t : t + 1], [None] * 3) for t in range(3)]
    _assert_equal(chunk["observation"], steps[-1]["observation"])
    np.testing.assert_array_equal(chunk["reward"], np.concatenate([s["reward"] for s in steps], axis=1))
    assert chunk["valid"].all()
    assert (chunk["reward"].dtype, chunk["reward"].shape) == (np.float32, (3, 3))


def test_what_was_seen_before_each_action_of_a_chunk_is_handed_out_where_it_is_wanted(case):
    """As step by step, nothing behind an episode's end, and the chunk gives what it gives without."""
    spec, _ = case
    batch, actions = _batch(case), _actions(spec, 4)
    left = spec["max_episode_steps"] - 2
    still = np.zeros((3, left, spec["action_width"]), np.float32)
    results = []
    for every_step in (False, True):
        batch.reset([1, 2, None])
        batch.batch_step(still, [None] * 3)
        results.append(batch.batch_step(actions, [101, None, None], every_step))
    plain, watched = results
    assert "seen" not in plain
    for name in ("reward", "valid", "success", "final_rows"):
        np.testing.assert_array_equal(plain[name], watched[name])
    _assert_equal(plain["observation"], watched["observation"])
    _assert_equal(plain["final_observation"], watched["final_observation"])
    np.testing.assert_array_equal(watched["valid"], [[True, True, False, False]] * 2 + [[False] * 4])
    batch.reset([1, 2, None])
    before = batch.batch_step(still, [None] * 3)["observation"]
    between = batch.batch_step(actions[:, :1], [None] * 3)["observation"]
    for h, stepped in enumerate((before, between)):
        seen = {
            "images": {name: stack[:, h] for name, stack in watched["seen"]["images"].items()},
            "proprioception": watched["seen"]["proprioception"][:, h],
        }
        _assert_equal(seen, stepped, rows=[0, 1])
    assert not watched["seen"]["proprioception"][:, 2:].any()
    assert not watched["seen"]["proprioception"][2].any()


def test_truncation_masks_what_follows_and_hands_out_the_true_last_observation(case):
    spec, _ = case
    limit = spec["max_episode_steps"]
    still = np.zeros((3, limit - 1, spec["action_width"]), np.float32)
    batch = _batch(case)
    batch.reset([1, 2, 3])
    batch.batch_step(still, [None] * 3)
    last = batch.batch_step(np.zeros((3, 4, spec["action_width"]), np.float32), [101, None, 103])
    # One step was left, then three of the chunk's four actions are not executed.
    np.testing.assert_array_equal(last["valid"], [[True, False, False, False]] * 3)
    np.testing.assert_array_equal(last["truncated"], [[True, False, False, False]] * 3)
    assert not last["terminated"].any()
    assert not last["success"].any()
    assert (last["reward"][:, 1:] == 0).all()
    np.testing.assert_array_equal(last["final_rows"], [0, 1, 2])
    # Environments 0 and 2 went on with their next seeds, 1 is idle and repeats its last observation.
    fresh = _batch(case).reset([101, 2, 103])
    _assert_equal(last["observation"], fresh, rows=[0, 2])
    np.testing.assert_array_equal(
        last["observation"]["proprioception"][1], last["final_observation"]["proprioception"][1]
    )
    assert (last["final_observation"]["proprioception"] != fresh["proprioception"]).any()


def test_one_seed_given_to_several_environments_begins_them_alike(case):
    """What groups that are compared with each other begin from; afterwards each goes its own way."""
    spec, _ = case
    batch = _batch(case)
    alike = batch.reset([7, 7, 7])
    _assert_equal(alike, batch.reset([8, 7, 9]), rows=[1])
    for row in (1, 2):
        np.testing.assert_array_equal(alike["proprioception"][row], alike["proprioception"][0])
        for pictures in alike["images"].values():
            np.testing.assert_array_equal(pictures[row], pictures[0])
    # One of them alone begins anew, in the middle of the others' episodes.
    limit = spec["max_episode_steps"]
    batch.reset([8, 9, 7])
    batch.batch_step(np.zeros((3, limit - 1, spec["action_width"]), np.float32), [None] * 3)
    again = batch.batch_step(np.zeros((3, 1, spec["action_width"]), np.float32), [None, 7, None])
    _assert_equal(again["observation"], alike, rows=[1])


def test_an_idle_environment_is_not_stepped(case):
    spec, _ = case
    batch = _batch(case)
    before = batch.reset([1, None, 3])
    after = batch.batch_step(_actions(spec, 2), [None] * 3)
    np.testing.assert_array_equal(after["valid"], [[True, True], [False, False], [True, True]])
    _assert_equal(after["observation"], before, rows=[1])


def test_what_is_handed_out_does_not_change_later(case):
    spec, _ = case
    batch = _batch(case)
    observation = batch.reset([1, 2, 3])
    kept = {
        "proprioception": observation["proprioception"].copy(),
        "images": {k: v.copy() for k, v in observation["images"].items()},
    }
    batch.batch_step(_actions(spec, 2), [None] * 3)
    batch.reset([7, 8, 9])
    _assert_equal(observation, kept)


def test_without_images_nothing_is_rendered(case, monkeypatch):
    spec, adapter = case
    monkeypatch.setattr(adapter, "render", lambda indices: pytest.fail("rendered"))
    batch = _batch(case, images=False)
    assert batch.reset([1, 2, 3])["images"] == {}
    assert batch.batch_step(_actions(spec, 1), [None] * 3)["observation"]["images"] == {}


def test_actions_are_clipped_at_the_environment_and_nan_is_the_tenants(case):
    spec, _ = case
    batch = _batch(case)
    batch.reset([1, 2, 3])
    far = batch.batch_step(np.full((3, 1, spec["action_width"]), -1.0, np.float32), [None] * 3)
    batch.reset([1, 2, 3])
    farther = batch.batch_step(np.full((3, 1, spec["action_width"]), -50.0, np.float32), [None] * 3)
    _assert_equal(far["observation"], farther["observation"])
    with pytest.raises(TenantFault, match="actions: got a value that is not finite"):
        batch.batch_step(np.full((3, 1, spec["action_width"]), np.nan, np.float32), [None] * 3)
    with pytest.raises(TenantFault, match=rf"possible: '?\[3, H, {spec['action_width']}\]"):
        batch.batch_step(np.zeros((3, 1, 17), np.float32), [None] * 3)
    with pytest.raises(TenantFault, match="next_seeds: got '2 values'"):
        batch.batch_step(np.zeros((3, 1, spec["action_width"]), np.float32), [None] * 2)


def test_an_episode_that_ends_in_a_chunk_by_success_has_terminated():
    # The toy succeeds where action[0] > 0.5: environment 0 in the second of three steps, 1 never, 2 at once.
    batch = EnvironmentBatch(SPECS["toy"], make_adapter(SPECS["toy"], 3), 3, images=True)
    batch.reset([10, 20, 30])
    actions = np.array([[[0], [1], [1]], [[0], [0], [0]], [[1], [0], [0]]], np.float32)
    result = batch.batch_step(actions, [11, 21, 31])
    np.testing.assert_array_equal(result["valid"], [[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(result["terminated"], [[0, 1, 0], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(result["reward"], [[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(result["success"], [True, False, True])
    assert not result["truncated"].any()
    np.testing.assert_array_equal(result["final_rows"], [0, 2])
    np.testing.assert_array_equal(result["final_observation"]["proprioception"], [[10, 2], [30, 1]])
    np.testing.assert_array_equal(result["final_observation"]["images"]["front"][:, 0, 0, 0], [2, 1])
    np.testing.assert_array_equal(result["observation"]["proprioception"], [[11, 0], [20, 3], [31, 0]])
    assert result["observation"]["instructions"] == ["count from 11", "count from 20", "count from 31"]
    assert result["final_observation"]["instructions"] == ["count from 10", "count from 30"]


def test_success_in_the_last_allowed_step_is_termination():
    batch = EnvironmentBatch(SPECS["toy"], make_adapter(SPECS["toy"], 1), 1, images=False)
    batch.reset([1])
    result = batch.batch_step(np.array([[[0], [0], [0], [0], [1]]], np.float32), [None])
    assert result["terminated"][0, 4]
    assert not result["truncated"].any()


@pytest.mark.parametrize(
    ("name", "noise", "least"),
    [
        ("reach", 0.0, 20),
        ("reach", 0.3, 20),
        *(pytest.param("pushcube", noise, 5, marks=needs_renderer) for noise in (0.0, 0.2)),
        # Noise throws the cube out of the fingers now and then: it is approached and taken again.
        *(pytest.param("pickcube", noise, 5, marks=needs_renderer) for noise in (0.0, 0.3)),
    ],
)
def test_the_expert_solves_it(name, noise, least):
    spec = SPECS[name]
    adapter = make_adapter(spec, 1)
    batch = EnvironmentBatch(spec, adapter, 1, images=False)
    episodes = [batch.expert_episode(seed, noise) for seed in range(least)]
    assert sum(e["success"] for e in episodes) == least
    assert np.mean([len(e["actions"]) for e in episodes]) < 0.6 * spec["max_episode_steps"]
    for episode in episodes:
        steps = len(episode["actions"])
        assert len(episode["proprioception"]) == len(episode["executed"]) == len(episode["reward"]) == steps
    again = batch.expert_episode(3, noise)
    np.testing.assert_array_equal(again["executed"], episodes[3]["executed"])
    adapter.close()


def test_a_random_policy_seldom_reaches_and_positions_are_in_the_picture():
    spec = SPECS["reach"]
    batch = EnvironmentBatch(spec, make_adapter(spec, 8), 8, images=True)
    random = np.random.default_rng(0)
    ended = succeeded = 0
    observation = batch.reset(list(range(8)))
    for _ in range(12):
        chunk = random.uniform(-1, 1, (8, 20, 2)).astype(np.float32)
        result = batch.batch_step(chunk, [int(s) for s in random.integers(1 << 31, size=8)])
        ended, succeeded = ended + len(result["final_rows"]), succeeded + int(result["success"].sum())
    assert ended == 96  # every episode ends within 20 steps
    assert succeeded / ended < 0.3
    # The red disc's centre of mass is where the privileged position says: within half a pixel of 1/32.
    observation = batch.reset(list(range(8)))
    goal = batch.scene_positions()["goal"]
    for image, place in zip(observation["images"]["top"].astype(int), goal, strict=True):
        red = (image[..., 0] > 180) & (image[..., 1] < 100)
        rows, columns = np.nonzero(red)
        seen = (columns.mean() + 0.5) / 32 - 1, 1 - (rows.mean() + 0.5) / 32
        np.testing.assert_allclose(seen, place[:2], atol=1 / 64)


def test_a_camera_is_turned_once_wherever_its_picture_goes():
    """First, final and following observations and demonstrations of Reach-v0: each pixel (i, j) is at (63−i, 63−j)."""
    found = []
    for turned in ((), ("top",)):
        spec = preset("reach", turned_cameras=turned, max_episode_steps=2)
        batch = EnvironmentBatch(spec, make_adapter(spec, 2), 2, images=True)
        pictures = [batch.reset([1, 2])["images"]["top"]]
        for _ in range(2):
            step = batch.batch_step(np.full((2, 1, 2), 0.5, np.float32), [3, None])
            pictures += [step["observation"]["images"]["top"], step["final_observation"]["images"]["top"]]
        found.append([*pictures, batch.expert_episode(4, 0.0)["images"]["top"]])
    assert [len(pictures) for pictures in found[0]] == [2, 2, 0, 2, 2, 2]
    for plain, turned in zip(*found, strict=True):
        np.testing.assert_array_equal(turned, np.rot90(plain, 2, axes=(1, 2)))
    assert (found[0][0] != found[1][0]).any()


def test_reward_may_be_success_or_progress_alone():
    """Reach-v0 by its expert, two episodes in a row, a step a chunk: its own reward r is progress plus 1 on arrival.

    `success`: 0 but in the step that arrives. `progress`: r less the r of the step before, from 0 in each episode.
    """
    found = {}
    for reward in ("environment", "success", "progress"):
        spec = preset("reach", reward=reward)
        batch = EnvironmentBatch(spec, make_adapter(spec, 1), 1, images=False)
        episodes = [batch.expert_episode(seed, 0.0) for seed in (4, 5)]
        batch.reset([4])
        steps = [
            batch.batch_step(action[None, None], [following])["reward"][0, 0]
            for episode, following in zip(episodes, (5, None), strict=True)
            for action in episode["executed"]
        ]
        np.testing.assert_array_equal(steps, np.concatenate([episode["reward"] for episode in episodes]))
        found[reward] = [episode["reward"] for episode in episodes]
    for own, success, progress in zip(*found.values(), strict=True):
        assert len(own) > 2
        assert (own > 0).all()
        np.testing.assert_array_equal(success, [0.0] * (len(own) - 1) + [1.0])
        np.testing.assert_array_equal(progress, own - np.append(np.float32(0), own[:-1]))


@needs_renderer
def test_light_visuals_change_the_picture_and_not_the_physics():
    light, full = SPECS["pushcube"], preset("pushcube", light_visuals=False)
    results = []
    for spec in (light, full):
        adapter = make_adapter(spec, 1)
        batch = EnvironmentBatch(spec, adapter, 1, images=True)
        batch.reset([4])
        results.append(batch.batch_step(_actions(spec, 4)[:1], [None])["observation"])
        adapter.close()
    np.testing.assert_array_equal(results[0]["proprioception"], results[1]["proprioception"])
    assert (results[0]["images"]["base"] != results[1]["images"]["base"]).any()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (toy(action_width=3, action={"mean": [0, 0, 0], "std": [1, 1, 1]}), "action_width: got 3"),
        (toy("Boundless-v0"), "action_space: got Box(-inf, inf, (1,), float32); possible: finite bounds, low below"),
        (
            toy("Boundless-v0", kind="gymnasium_vector"),
            "action_space: got Box(-inf, inf, (1,), float32); possible: finite bounds, low below high",
        ),
        (preset("reach", id="Nowhere-v0"), "id: got 'Nowhere-v0'; possible: a registered gymnasium id"),
        (
            preset("reach", kind="mujoco"),
            "kind: got 'mujoco'; possible: gymnasium, gymnasium_vector, libero, maniskill",
        ),
        (preset("reach", options={"size": 3}), "options: got {'size': 3}; possible: arguments that Reach-v0 takes; "),
        (preset("reach", options={"render_mode": "human"}), "options: got ['render_mode']; possible: other arguments"),
    ],
)
def test_a_wrong_declaration_is_refused_by_field(spec, message):
    with pytest.raises(SpecError) as caught:
        make_adapter(spec, 1)
    assert str(caught.value).startswith(message)


@needs_renderer
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "PushSphere-v9"}, "id: got 'PushSphere-v9'; possible: a registered ManiSkill task"),
        ({"backend": "gpu"}, "backend: got 'gpu'; possible: cpu, since this machine has no CUDA device"),
        ({"cameras": [{"name": "wrist", "height": 64, "width": 64}]}, "cameras: got 'wrist'; possible: base"),
        ({"state_width": 7}, "state_width: got 7; possible: 25"),
        ({"control_mode": "by_hand"}, "control_mode: got 'by_hand'; possible: pd_joint_delta_pos, pd_joint_pos, "),
        ({"options": {"robot": 1}}, "options: got {'robot': 1}; possible: arguments of PushCube-v1; correct them"),
        ({"options": {"num_envs": 2}}, "options: got ['num_envs']; possible: other arguments of PushCube-v1"),
    ],
)
def test_a_wrong_maniskill_declaration_is_refused_by_field(changes, message):
    import torch

    if changes.get("backend") == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SpecError) as caught:
        make_adapter(preset("pushcube", **changes), 1)
    assert str(caught.value).startswith(message)


@needs_renderer
@pytest.mark.parametrize(
    ("changes", "low", "terms"),
    [
        # Another task with other cameras' sizes and joint control: its dense reward, 0 to 1.
        ({"id": "StackCube-v1", "control_mode": "pd_joint_delta_pos", "action_width": 8}, -1.0, "normalized_dense"),
        # No arm and so no tool: two joints' positions and velocities.
        ({"id": "MS-CartpoleBalance-v1", "state_width": 4, "action_width": 1}, -1.0, "normalized_dense"),
    ],
    ids=lambda value: value["id"] if isinstance(value, dict) else "",
)
def test_any_maniskill_task_runs_as_it_is_declared(changes, low, terms):
    from services.environments.maniskill import REGISTERED_ENVS, reward_mode

    spec = preset("pushcube", control_mode=None, light_visuals=False, instruction="do it") | changes
    spec["max_episode_steps"] = 4
    adapter = make_adapter(spec, 1)
    batch = EnvironmentBatch(spec, adapter, 1, images=True)
    first = batch.reset([3])
    assert first["instructions"] == ["do it"]
    assert len(np.unique(first["images"]["base"])) > 2
    result = batch.batch_step(np.full((1, 4, spec["action_width"]), 0.3, np.float32), [None])
    assert (adapter.action_low[0], reward_mode(REGISTERED_ENVS[spec["id"]].cls)) == (low, terms)
    assert (result["reward"] >= 0).all()
    assert (result["reward"] <= 1).all()
    assert result["truncated"][0, 3]
    assert (result["final_observation"]["proprioception"] != first["proprioception"]).any()
    adapter.close()


@needs_renderer
def test_a_task_of_success_alone_is_rewarded_by_it():
    from services.environments.maniskill import REGISTERED_ENVS, reward_mode

    assert reward_mode(REGISTERED_ENVS["PlugCharger-v1"].cls) == "sparse"
    assert reward_mode(REGISTERED_ENVS["Empty-v1"].cls) == "none"


def test_positions_that_an_environment_does_not_offer_are_a_fault():
    adapter = make_adapter(SPECS["toy"], 1)
    with pytest.raises(EnvironmentFault, match=r"scene_positions: .* offers none"):
        adapter.scene_positions([0])


@needs_renderer
def test_an_episode_in_a_fresh_scene_is_a_function_of_its_seed_alone():
    """Contacts included: the expert pushes the cube. In a scene that is kept the same episode was seen to end 1e-2 off,
    depending on the ones before."""
    spec = preset("pushcube", fresh_scenes=True)
    adapter = make_adapter(spec, 1)
    plain = make_adapter({**spec, "fresh_scenes": False}, 1)
    try:
        batch = EnvironmentBatch(spec, adapter, 1, images=True)
        first = batch.expert_episode(5, 0.3)
        for seed in (5, 6, 5):
            episode = batch.expert_episode(seed, 0.3)
            if seed == 5:
                np.testing.assert_array_equal(episode["proprioception"], first["proprioception"])
                np.testing.assert_array_equal(episode["images"]["base"], first["images"]["base"])
        # It looks as a scene that was kept: light visuals, no goal markers.
        kept = EnvironmentBatch(spec, plain, 1, images=True).reset([5])
        np.testing.assert_array_equal(first["images"]["base"][0], kept["images"]["base"][0])
    finally:
        adapter.close()
        plain.close()


def test_fresh_scenes_are_maniskills_on_the_cpu():
    with pytest.raises(ValueError, match=r"fresh_scenes: got True; possible: False with kind gymnasium; used by"):
        EnvironmentSpec.model_validate(preset("reach", fresh_scenes=True))
