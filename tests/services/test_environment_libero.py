"""LIBERO for real, under its own interpreter, by its presets and through the environment service."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from configs import presets
from configs.errors import EnvironmentFault, SpecError
from configs.home import PROJECT_ROOT, Home
from joynexus.command import main
from kernels import backbones
from services import serving
from services.admission import admit
from services.environment_client import SessionClient
from services.environment_service import EnvironmentService
from services.policy_stacks import PolicyStacks
from services.rollout import Observation, Prediction, run_episodes
from services.serving import Request, ServingPolicy
from tests.services.environment_specs import preset

TASK = "pick_up_the_alphabet_soup_and_place_it_in_the_basket"
Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def run(libero: str) -> Iterator[Run]:
    """One event loop for the service's whole life."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 300))


@pytest.fixture(scope="module")
def service(run: Run) -> Iterator[EnvironmentService]:
    """Hosts stay warm between tests; a process is replaced after 30 sessions."""
    made = EnvironmentService(4)  # that of a test that failed may stay open
    yield made
    run(made.shutdown())


def request(name: str, spec: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    environment = spec or preset("libero-object")
    return {"environment": environment, "num_envs": 2, "tenant_id": "ada", "request_id": name} | changes


@pytest.fixture(scope="module")
def session(run: Run, service: EnvironmentService) -> Iterator[SessionClient]:
    """Two environments of libero_object/0, with pictures."""
    opened = run(service.open(request("pictures")))
    yield SessionClient.direct(opened)
    run(service.close(opened["session_id"]))


def under(python: str, code: str) -> Any:
    """What `code`, run by LIBERO's interpreter with the project on its path, prints as JSON in its last line."""
    done = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def actions(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (2, steps, 7)).astype(np.float32)


def test_observations_are_as_declared_and_as_libero_gives_them(
    run: Run, session: SessionClient, libero: str, tmp_path: Path
) -> None:
    """The 13th fixed initial state and four random actions after it, beside LIBERO's own environment driven by its own
    means: the same states, and its pictures turned by 180°."""
    first = run(session.reset([12, 3]))
    assert first["instructions"] == [TASK.replace("_", " ")] * 2
    assert {name: stack.shape for name, stack in first["images"].items()} == {
        "agentview": (2, 128, 128, 3),
        "wrist": (2, 128, 128, 3),
    }
    moved = [first, *(run(session.step(actions(4)[:, t], [None, None]))["observation"] for t in range(4))]
    out = tmp_path / "libero.npz"
    np.savez(out, actions=actions(4)[0])
    script = PROJECT_ROOT / "tests" / "services" / "libero_itself.py"
    command = [libero, str(script), "libero_object", TASK, "12", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    # Axis × angle as in LIBERO's datasets, whose angle goes to 2π: x y z / |x y z| · 2 arccos w.
    xyz, w = found["robot0_eef_quat"][:, :3], found["robot0_eef_quat"][:, 3:]
    rotation = xyz / np.linalg.norm(xyz, axis=1, keepdims=True) * 2 * np.arccos(w)
    turns = Rotation.from_quat(found["robot0_eef_quat"]).inv() * Rotation.from_rotvec(rotation)
    np.testing.assert_allclose(turns.magnitude(), 0, atol=1e-6)
    states = np.concatenate([found["robot0_eef_pos"], rotation, found["robot0_gripper_qpos"]], axis=1)
    np.testing.assert_allclose([seen["proprioception"][0] for seen in moved], states, atol=1e-6)
    assert np.abs(states[-1] - states[0]).max() > 1e-3
    for ours, theirs in (("agentview", "agentview_image"), ("wrist", "robot0_eye_in_hand_image")):
        pictures = np.stack([seen["images"][ours][0] for seen in moved]).astype(int)
        wanted = found[theirs][:, ::-1, ::-1]
        np.testing.assert_array_equal(pictures, wanted)
        assert np.mean(pictures != pictures[:, ::-1, ::-1]) > 0.5


def test_the_seed_alone_decides_which_fixed_initial_state_it_is(run: Run, session: SessionClient) -> None:
    """50 states: seeds 7 and 57 begin alike, 8 does not; whatever happened before, wherever in the batch."""
    alike = run(session.reset([7, 57]))
    after = run(session.batch_step(np.repeat(actions(3)[:1], 2, axis=0), [8, None]))
    again = run(session.reset([8, 7]))
    repeated = run(session.batch_step(np.repeat(actions(3)[:1], 2, axis=0), [None, None]))
    for name, stack in {**alike["images"], "proprioception": alike["proprioception"]}.items():
        other = again["images"].get(name, again["proprioception"])
        np.testing.assert_array_equal(stack[0], stack[1])
        np.testing.assert_array_equal(other[1], stack[0])
        assert (other[0] != stack[0]).any()
    np.testing.assert_array_equal(
        after["observation"]["proprioception"][1], repeated["observation"]["proprioception"][1]
    )
    for stack, other in zip(
        after["observation"]["images"].values(), repeated["observation"]["images"].values(), strict=True
    ):
        np.testing.assert_array_equal(stack[1], other[1])


async def towards(
    session: SessionClient, target: Callable[[dict[str, np.ndarray]], np.ndarray], gripper: float, n: int
):
    """Move environment 0's hand to where `target` says, for at most n steps, all of them where it is to stay; the last
    step's result."""
    for _ in range(n):
        places = {name: rows[0] for name, rows in (await session.scene_positions()).items()}
        away = target(places) - places["gripper"]
        action = np.zeros((2, 7), np.float32)
        action[0, :3], action[0, 6] = np.clip(away / 0.05, -1, 1), gripper
        result = await session.step(action, [9, None])
        if result["success"][0] or 0 < np.abs(away).max() < 0.008:
            break
    return result


def test_success_is_the_simulators(run: Run, service: EnvironmentService) -> None:
    """A scripted grasp of the soup, let fall into the basket: no step succeeds before, and that step ends the episode
    with reward 1; the next one begins by its seed."""

    async def solve() -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        opened = await service.open(
            request("solve", preset("libero-object-small", max_episode_steps=300), images=False)
        )
        session = SessionClient.direct(opened)
        await session.reset([0, None])
        up = np.array([0, 0, 0.15])
        ways = [
            (lambda p: p["object"] + [0, 0, 0.1], -1.0, 40),
            (lambda p: p["object"], -1.0, 40),
            (lambda p: p["gripper"], 1.0, 10),
            (lambda p: p["object"] + up, 1.0, 12),
            (lambda p: p["goal"] + 2 * up, 1.0, 60),
            (lambda p: p["gripper"], -1.0, 25),
        ]
        results = [await towards(session, *way) for way in ways]
        fresh = await session.reset([9, None])
        await service.close(opened["session_id"])
        return results[:-1], results[-1], fresh

    before, last, fresh = run(solve())
    assert not any(result["success"].any() or result["terminated"].any() for result in before)
    assert last["success"][0]
    assert last["terminated"][0, 0]
    assert last["reward"][0, 0] == 1.0
    np.testing.assert_array_equal(last["final_rows"], [0])
    np.testing.assert_array_equal(last["observation"]["proprioception"][0], fresh["proprioception"][0])


def test_a_policy_is_evaluated_in_it(run: Run, service: EnvironmentService, tmp_path: Path) -> None:
    """The demo's workload, untrained: a served policy sees the preset's pictures and acts to each episode's end."""
    workload = presets.workload("libero")
    config = admit(workload, Home(tmp_path), presets.cluster("laptop")).policy
    backbone = backbones.load(config.base_model, PROJECT_ROOT)
    served = ServingPolicy(config, 0, None)
    rows: list[int] = []

    async def act(observation: Observation) -> Prediction:
        rows.append(len(observation["instructions"]))
        asked = Request(served, *served.prepare(backbone, observation), None, False, False)
        (answer,) = serving.forward(backbone, [asked], PolicyStacks(0))
        assert isinstance(answer, Prediction), answer
        return answer

    async def evaluate() -> Any:
        opened = await service.open(request("evaluate", preset("libero-object-small", max_episode_steps=5)))
        session = SessionClient.direct(opened)
        seeds = range(25_000, 25_003)
        found = await run_episodes(act, session, num_envs=2, seeds=seeds, progress=lambda _done, _of: None)
        await service.close(opened["session_id"])
        return found

    assert run(evaluate()).summary() == {
        "episodes": 3,
        "successes": 0,
        "success_rate": 0.0,
        "mean_return": 0.0,
        "mean_length": 5.0,
    }
    assert rows == [2] * 5 + [1] * 5


def test_forty_sessions_in_a_row(run: Run, service: EnvironmentService) -> None:
    """More than some simulators bear in one process: the process is replaced on the way."""

    async def cycles() -> tuple[list[np.ndarray], set[int]]:
        states, pids = [], set()
        for number in range(40):
            opened = await service.open(request(f"cycle {number}", num_envs=1, images=False))
            pids |= {pid for row in await service.sessions() for pid in row["pids"] if row["num_envs"] == 1}
            states.append((await service.reset(opened["session_id"], [5]))["proprioception"])
            await service.step(opened["session_id"], actions(1)[:1, 0], [None])
            await service.close(opened["session_id"])
        return states, pids

    states, pids = run(cycles())
    assert len(pids) == 2
    for state in states:
        np.testing.assert_array_equal(state, states[0])


def test_the_host_of_another_interpreter_dies_alone(run: Run, service: EnvironmentService) -> None:
    """A wrong task is refused in the adapter's words, and the sessions beside it go on."""
    for changes, message in (
        ({"id": "libero_object/10"}, r"id: got 'libero_object/10'; possible: libero_object/0 to libero_object/9;"),
        ({"instruction": "tidy up"}, r"instruction: got 'tidy up'; possible: 'pick up the alphabet soup and place "),
    ):
        with pytest.raises(SpecError, match=message):
            run(service.open(request(message, preset("libero-object", **changes))))


def test_every_task_of_every_suite_has_its_own_words_and_states(libero: str) -> None:
    """130 tasks by suite and number: instructions as LIBERO's own benchmark gives them, 50 initial states of most.

    Its benchmark imports torch, for files that are not read here; a module of that name stands in for it.
    """
    found = under(
        libero,
        """
import json, os, sys, types
from services.environments import libero
sys.modules["torch"] = types.ModuleType("torch")
libero._imported()
from libero.libero import benchmark
rows = []
for suite in libero.SUITES:
    theirs = benchmark.get_benchmark(suite)()
    for number in range(theirs.n_tasks):
        files, task = libero.TaskFiles(f"{suite}/{number}"), theirs.get_task(number)
        same = files.definition.name == task.bddl_file and files.definition.is_file()
        rows.append([suite, files.instruction, task.language, list(files.initial_states.shape), same])
print(json.dumps(rows))
""",
    )
    assert len(found) == 130
    assert {suite for suite, *_ in found} == {f"libero_{n}" for n in ("10", "90", "goal", "object", "spatial")}
    assert all(ours == theirs and same for _, ours, theirs, _, same in found)
    assert sum(shape[0] == 50 for *_, shape, _ in found) > 100
    assert all(shape[0] > 0 and shape[1] > 30 for *_, shape, _ in found)


def test_what_is_wrong_or_missing_is_said_in_words(libero: str, tmp_path: Path) -> None:
    spec = preset("libero-goal")
    cases = {
        "id: got 'libero_moon/1'; possible: SUITE/NUMBER with libero_10, libero_90, ": {"id": "libero_moon/1"},
        "id: got 'libero_goal/x'; possible: libero_goal/0 to libero_goal/9; choose one": {"id": "libero_goal/x"},
        "state_width: got 9; possible: 8 with LIBERO; correct it": {"state_width": 9},
        "options.initial_states: got 'any'; possible: fixed, sampled; ": {"options": {"initial_states": "any"}},
        "options: got ['horizon']; possible: initial_states, renderer; ": {"options": {"horizon": 3}},
        "cameras: got 'top'; possible: agentview, ": {"cameras": [{"name": "top", "height": 64, "width": 64}]},
        "JOYNEXUS_LIBERO_ASSETS: got ": {},
    }
    # The last of them finds its scene files gone.
    found = under(
        libero,
        f"""
import json, os
from services.environments.adapter import make_adapter
from configs.errors import JoyNexusError
said = []
for changes in {list(cases.values())!r}:
    if not changes:
        import libero.libero
        libero.libero._assets_path_cache = {str(tmp_path)!r}
    try:
        make_adapter({spec!r} | changes, 1)
    except JoyNexusError as error:
        said.append(str(error))
print(json.dumps(said))
""",
    )
    for said, expected in zip(found, cases, strict=True):
        assert said.startswith(expected)
    assert "a folder with all scene files of libero_goal/0" in found[-1]


def test_sampled_initial_states_are_a_function_of_the_seed_and_of_more_than_fifty(
    run: Run, service: EnvironmentService
) -> None:
    """Seeds 7 and 57 differ now, by where the objects stand; the same seed begins alike."""

    async def positions(seeds: list[int]) -> np.ndarray:
        opened = await service.open(request(f"sampled {seeds}", spec, images=False))
        await service.reset(opened["session_id"], seeds)
        found = await service.scene_positions(opened["session_id"])
        await service.close(opened["session_id"])
        return np.concatenate([found["object"], found["goal"]], axis=1)

    spec = preset("libero-object-small", options={"initial_states": "sampled"})
    first, again = run(positions([7, 57])), run(positions([57, 7]))
    np.testing.assert_array_equal(first, again[::-1])
    assert np.abs(first[0] - first[1]).max() > 1e-4


def test_the_check_tries_it_and_says_that_it_is_ready(libero: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "libero-object-small"]) == 0
    said = capsys.readouterr().out
    for line in (
        f"ok   interpreter: {libero}",
        "ok   started in ",
        f"state of 8, instruction '{TASK.replace('_', ' ')}'",
        "ok   the same seed begins the same episode",
        "ok   camera agentview: 64 × 64, ",
        "ok   actions change what is observed",
        "ok   an episode of random actions was truncated after 40 steps",
        "libero-object-small: ready",
    ):
        assert line in said
    assert "FAIL" not in said


def test_another_simulator_under_an_interpreter_of_its_own(libero: str, run: Run, service: EnvironmentService) -> None:
    """Gymnasium's own MuJoCo arm by id: the state is part of a flat observation, the picture what `render()` gives."""
    spec = preset(
        "reach",
        id="Reacher-v5",
        requirements="libero.txt",
        cameras=[{"name": "above", "height": 48, "width": 64}],
        options={"width": 64, "height": 48},
        state_width=4,
        state_range=(0, 4),
        state={"mean": [0] * 4, "std": [1] * 4},
        max_episode_steps=10,
    )

    async def episode() -> tuple[Any, Any]:
        opened = await service.open(request("reacher", spec))
        assert opened["versions"]["gymnasium"] == "1.4.0"
        first = await service.reset(opened["session_id"], [1, 2])
        last = await service.batch_step(opened["session_id"], np.full((2, 10, 2), 0.5, np.float32), [None, None])
        await service.close(opened["session_id"])
        return first, last

    first, last = run(episode())
    # Cosines and sines of two joints' angles: each pair lies on the unit circle.
    np.testing.assert_allclose(np.hypot(first["proprioception"][:, :2], first["proprioception"][:, 2:]), 1, atol=1e-6)
    assert first["images"]["above"].shape == (2, 48, 64, 3)
    assert (first["images"]["above"] != last["final_observation"]["images"]["above"]).any()
    assert last["truncated"][:, -1].all()


def test_a_hosts_death_ends_its_session_alone(run: Run, service: EnvironmentService, session: SessionClient) -> None:
    async def killed() -> None:
        opened = await service.open(request("killed", num_envs=1, images=False))
        (row,) = [row for row in await service.sessions() if row["session_id"] == opened["session_id"]]
        os.kill(row["pids"][0], 9)
        with pytest.raises(EnvironmentFault, match="its session ends"):
            await service.reset(opened["session_id"], [1])

    run(killed())
    assert run(session.reset([1, 2]))["proprioception"].shape == (2, 8)
