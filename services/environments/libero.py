"""Adapter for LIBERO (the package `hf-libero` on robosuite 1.4): every task of its five suites, by suite and number.

The id is `SUITE/NUMBER`, the number counted from 0 in the suite's own order: libero_object, libero_spatial,
libero_goal and libero_10 have 10 tasks each, libero_90 has 90. A task brings its instruction; the declared one has to
be it. As in LIBERO's own evaluations an episode begins in one of the task's fixed initial states (50 of most), after
10 steps in which the arm rests and the objects come to lie. Which one: the seed modulo their number; so disjoint ranges
of seeds still share initial states. With `options: {initial_states: sampled}` the scene is drawn from the task's
regions by the seed instead.

Cameras are LIBERO's: `agentview`, `wrist` (its robot0_eye_in_hand) and others of the scene by their own names; their
pictures are handed out as LIBERO does, which is upside down (declare them in `turned_cameras`). Proprioception, 8:
position of the end effector (m), its orientation as axis × angle (rad), both finger joints (m). Actions, 7, each in
[-1, 1]: displacement and rotation of the end effector, gripper (-1 open, 1 closed). Success terminates and is the
reward.

Scene files (meshes, textures) are not in the package: they lie in the folder that `JOYNEXUS_LIBERO_ASSETS` names, or
the package downloads them into `~/.cache/libero` when it first needs them.

With `light_visuals` the robot is shown by its collision hulls, which takes a third off a picture's time.

The library rebuilds its scene at every reset, 3 s of CPU. Here it is built once an environment and put back, 25 ms:
the library's `hard_reset=False`, and what that leaves of the episode before (see `_Task.reset`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from configs.errors import EnvironmentFault, SpecError, refusal
from services.environments import mujoco_renderer
from services.environments.adapter import StepResult

SUITES = ("libero_10", "libero_90", "libero_goal", "libero_object", "libero_spatial")
ASSETS = "JOYNEXUS_LIBERO_ASSETS"
STATE_WIDTH, ACTION_WIDTH = 8, 7
_SETTLING_STEPS = 10
_REST = np.array([0, 0, 0, 0, 0, 0, -1.0])
_CAMERAS = {"wrist": "robot0_eye_in_hand"}
_SEEN = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_PLACEMENT_SEED = 0
"""Of what a fixed initial state does not hold: where fixtures stand. LIBERO's evaluations take the same."""


class LiberoAdapter:
    """Separate environments of one task in one process, each with a scene and an OpenGL context of its own.

    Raises:
        SpecError: no such task, or a declared width, camera, option or instruction that is not LIBERO's.
        EnvironmentFault: a package, the renderer or scene files are missing; the message says what to do.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        options = dict(spec["options"])
        self._sampled = _option(options, "initial_states", ("fixed", "sampled")) == "sampled"
        mujoco_renderer.select(_option(options, "renderer", tuple(mujoco_renderer.LIBRARIES)))
        if options:
            raise SpecError(refusal("options", sorted(options), "initial_states, renderer", "remove the others"))
        for field, wanted in (("state_width", STATE_WIDTH), ("action_width", ACTION_WIDTH)):
            if spec[field] != wanted:
                raise SpecError(refusal(field, spec[field], f"{wanted} with LIBERO", "correct it"))
        if (missing := mujoco_renderer.missing()) is not None:
            raise EnvironmentFault(missing)
        self._files = TaskFiles(spec["id"])
        if spec["instruction"] != self._files.instruction:
            given, possible = spec["instruction"], repr(self._files.instruction)
            raise SpecError(refusal("instruction", given, f"{possible}, that of {spec['id']}", "correct it"))
        self._tasks = [_Task(spec, self._files)]
        low, high = self._tasks[0].env.action_spec
        self.action_low, self.action_high = low.astype(np.float32), high.astype(np.float32)
        names = ("hf-libero", "robosuite", "mujoco", "numpy")
        self.versions = {name: importlib.metadata.version(name) for name in names}

    def resize(self, num_envs: int) -> None:
        """Hold environments 0 … num_envs-1; those that exist are kept, the first one always."""
        while len(self._tasks) < num_envs:
            self._tasks.append(_Task(self._spec, self._files))
        while len(self._tasks) > max(num_envs, 1):
            self._tasks.pop().close()

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each, by its seed."""
        for index, seed in zip(indices, seeds, strict=True):
            if self._sampled:
                self._tasks[index].reset(seed % 2**32, None)
            else:
                states = self._files.initial_states
                self._tasks[index].reset(_PLACEMENT_SEED, states[seed % len(states)])

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A]."""
        success = np.array([self._tasks[i].step(a) for i, a in zip(indices, actions, strict=True)], bool)
        limit = np.array([self._tasks[i].steps >= self._spec["max_episode_steps"] for i in indices], bool)
        return StepResult(success.astype(np.float32), success, limit, success)

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S]."""
        return np.stack([self._tasks[index].proprioception() for index in indices])

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""
        rows = [self._tasks[index].render() for index in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """The task's."""
        return [self._files.instruction] * len(indices)

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions of the task's first object, of its last one and of the gripper, each float32 [n, 3]."""
        rows = [self._tasks[index].scene_positions() for index in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def close(self) -> None:
        """Release all scenes."""
        while self._tasks:
            self._tasks.pop().close()


class TaskFiles:
    """What the package has of one task: its definition, its initial states, its instruction."""

    def __init__(self, task_id: str) -> None:
        folder = library()
        suite, slash, number = task_id.partition("/")
        tasks = _task_names(folder).get(suite) if suite in SUITES else None
        if tasks is None or not slash:
            raise SpecError(refusal("id", task_id, f"SUITE/NUMBER with {', '.join(SUITES)}", "correct it"))
        if not (number.isascii() and number.isdigit() and int(number) < len(tasks)):
            raise SpecError(refusal("id", task_id, f"{suite}/0 to {suite}/{len(tasks) - 1}", "choose one"))
        name = tasks[int(number)]
        self.definition = folder / "bddl_files" / suite / f"{name}.bddl"
        self.instruction = instruction_of(name)
        self._states = folder / "init_files" / suite / f"{name}.pruned_init"

    @property
    def initial_states(self) -> np.ndarray:
        """float64 [states, values]: time, positions and velocities of the simulator's state."""
        if not hasattr(self, "_read"):
            self._read = read_states(self._states)
        return self._read


def scene_files() -> Path | None:
    """The folder of scene files that is named or was downloaded; None where the package has still to download them.

    Raises:
        EnvironmentFault: the named folder does not have them.
    """
    if named := os.environ.get(ASSETS):
        if not (Path(named) / "scenes").is_dir():
            raise EnvironmentFault(refusal(ASSETS, named, "a folder of LIBERO's scene files", "correct it"))
        return Path(named).resolve()
    downloaded = Path.home() / ".cache" / "libero" / "assets"
    return downloaded if (downloaded / "scenes").is_dir() else None


def library() -> Path:
    """Folder of the package, which is not imported for it.

    Raises:
        EnvironmentFault: it is not installed under this interpreter.
    """
    found = importlib.util.find_spec("libero")
    if found is None or not found.submodule_search_locations:
        possible = "an interpreter that has hf-libero"
        remedy = "let the preset say `requirements: libero.txt` and run `joynexus env install libero`"
        raise EnvironmentFault(refusal("libero", sys.executable, possible, remedy))
    return Path(next(iter(found.submodule_search_locations))) / "libero"


def _task_names(folder: Path) -> Mapping[str, Sequence[str]]:
    """Names of the tasks of each suite, in order. The file by itself: the package around it imports torch."""
    path = folder / "benchmark" / "libero_suite_task_map.py"
    found = importlib.util.spec_from_file_location("libero_suite_task_map", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    names: Mapping[str, Sequence[str]] = module.libero_task_map
    return names


def instruction_of(name: str) -> str:
    """A task's instruction out of its name, as LIBERO's evaluations and datasets have it."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickled array and nothing that could be more than that."""

    _KNOWN = {
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array") from None


def read_states(path: Path) -> np.ndarray:
    """The array in a file that `torch.save` wrote, without torch.

    Raises:
        EnvironmentFault: it holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            states = _ArraysOnly(io.BytesIO(archive.read(name))).load()
    except (OSError, StopIteration, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise EnvironmentFault(
            refusal("initial states", str(path), "an array", f"install hf-libero anew ({error})")
        ) from None
    return np.asarray(states, np.float64)


class _Task:
    """One built scene."""

    def __init__(self, spec: Mapping[str, Any], files: TaskFiles) -> None:
        make, self._axis_angle = _imported()
        self._cameras = {
            c["name"]: (_CAMERAS.get(c["name"], c["name"]), c["height"], c["width"]) for c in spec["cameras"]
        }
        self.steps = 0
        with _scene_files(spec["id"]), contextlib.redirect_stdout(sys.stderr):
            # Pictures are rendered here, when somebody gets them; the library would in every step.
            self._made = make(
                bddl_file_name=str(files.definition), use_camera_obs=False, hard_reset=False, ignore_done=True
            )
        self.env: Any = self._made.env
        known = [name for name in self.env.sim.model.camera_names if name is not None]
        for name, (camera, _, _) in self._cameras.items():
            if camera not in known:
                names = ", ".join(sorted({"wrist", *known} - {"robot0_eye_in_hand"}))
                self.close()
                raise SpecError(refusal("cameras", name, names, f"name a camera of {spec['id']}"))
        if spec["light_visuals"]:
            _show_hulls(self.env.sim.model._model)
        for observable in self.env._observables.values():
            if observable.name not in _SEEN:  # the others would be computed in every step
                observable.set_enabled(False)
                observable.set_active(False)
        self._observe_the_scene()
        self._seen: Mapping[str, np.ndarray] = self.env._get_observations(force_update=True)  # of one that is idle

    def _observe_the_scene(self) -> None:
        """Let pictures show what the library's would: it observes in the first of a control step's 25 substeps, so
        those rendered after the step would be 48 ms ahead of the state beside them, and of datasets."""
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        sim = self.env.sim
        model, now = sim.model._model, sim.data._data
        seen = mujoco.MjData(model)

        @sensor(modality="scene")
        def scene(_cache: dict[str, Any]) -> float:
            mujoco.mj_copyData(seen, model, now)
            return 0.0

        self.env.add_observable(Observable(name="scene", sensor=scene, sampling_rate=self.env.control_freq))
        sim._render_context_offscreen.data = SimpleNamespace(_data=seen)

    def reset(self, seed: int, state: np.ndarray | None) -> None:
        """Begin an episode: in `state`, with what it does not hold drawn by `seed`, or all of it drawn."""
        # The library draws from numpy's global generator.
        np.random.seed(seed)
        for robot in self.env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # all else is new or put back by its own reset
        self._seen = self._made.reset()
        if state is not None:
            if len(state) != len(self._made.get_sim_state()):
                given, possible = f"{len(state)} values", f"{len(self._made.get_sim_state())}, as the scene has"
                remedy = "install the versions of libero.txt and scene files that belong to them"
                raise EnvironmentFault(refusal("initial states", given, possible, remedy))
            self._seen = self._made.set_init_state(state)
        for _ in range(_SETTLING_STEPS):
            self.step(_REST)
        self.steps = 0

    def step(self, action: np.ndarray) -> bool:
        """Apply one action [7]; whether the task is solved now."""
        self._seen, _, solved, _ = self._made.step(np.asarray(action, np.float64))
        self.steps += 1
        return bool(solved)

    def proprioception(self) -> np.ndarray:
        """float32 [8]."""
        position, quaternion, fingers = (self._seen[name] for name in _SEEN)
        return np.concatenate([position, self._axis_angle(np.array(quaternion)), fingers]).astype(np.float32)

    def render(self) -> dict[str, np.ndarray]:
        """uint8 [h, w, 3] of each camera."""
        sim = self.env.sim
        sim._render_context_offscreen.gl_ctx.make_current()  # another environment's may be
        return {
            name: np.array(sim.render(camera_name=camera, height=height, width=width))
            for name, (camera, height, width) in self._cameras.items()
        }

    def scene_positions(self) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [3]."""
        bodies = [name for name in self.env.obj_of_interest if name in self.env.obj_body_id]
        if not bodies:
            raise EnvironmentFault(
                "scene_positions: this task names no object of interest with a body; collect demonstrations elsewhere"
            )
        data, robot = self.env.sim.data, self.env.robots[0]
        places = [data.body_xpos[self.env.obj_body_id[name]] for name in bodies]
        found = {"object": places[0], "goal": places[-1], "gripper": data.site_xpos[robot.eef_site_id]}
        return {name: np.array(place, np.float32) for name, place in found.items()}

    def close(self) -> None:
        """Release the scene."""
        self._made.close()


def _show_hulls(model: Any) -> None:
    """Let the robot's collision geometry be seen in place of its visual meshes, half of a scene's triangles: group 1
    of a MuJoCo model is rendered here and group 0 is not."""
    import mujoco

    for geom, body in enumerate(model.geom_bodyid):
        name = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, body) or ""
        if name.startswith(("robot0_", "gripper0_")) and model.geom_group[geom] in (0, 1):
            model.geom_group[geom] = 1 - model.geom_group[geom]


def _imported() -> tuple[Any, Any]:
    """The library's `ControlEnv` and robosuite's quaternion (x y z w) to axis × angle."""
    if "libero.libero" not in sys.modules:
        os.environ["LIBERO_CONFIG_PATH"] = str(_config_folder(library()))
        import libero.libero

        if (found := scene_files()) is not None:
            libero.libero._assets_path_cache = str(found)
    from libero.libero.envs.env_wrapper import ControlEnv
    from robosuite.utils.transform_utils import quat2axisangle

    return ControlEnv, quat2axisangle


def _config_folder(package: Path) -> Path:
    """A folder with the file that says where the package has its parts; without it the package's import asks on
    standard input. It lies in the interpreter's own folder, since hosts are killed and clean up nothing."""
    parts = {"benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files"}
    parts |= {"datasets": "datasets", "assets": "assets"}
    text = "".join(f"{key}: {package / name}\n" for key, name in parts.items())
    path = Path(sys.prefix) / "share" / "libero" / "config.yaml"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return path.parent


@contextlib.contextmanager
def _scene_files(task_id: str) -> Iterator[None]:
    """Say in words what is missing of the scene files, whatever the library raises of it."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        if not isinstance(error, FileNotFoundError) and "open" not in line.lower():
            raise
        named = os.environ.get(ASSETS) or "not set"
        possible = f"a folder with all scene files of {task_id}"
        raise EnvironmentFault(refusal(ASSETS, named, possible, f"set it or complete the folder ({line})")) from None


def _option(options: dict[str, Any], name: str, possible: tuple[str, ...]) -> str | None:
    """Take an option out of those given; None where it is not there."""
    value = options.pop(name, None)
    if value is not None and value not in possible:
        raise SpecError(refusal(f"options.{name}", value, ", ".join(possible), "choose one"))
    return value
