"""Adapters for ManiSkill: one `gym.make` an environment on the CPU, its batched simulation where CUDA exists.

Observations are made here, not by ManiSkill: it renders in every step, while only frames that somebody gets are
rendered here. Proprioception is qpos, qvel and, where the robot has one, the pose of the tool centre point (metres,
quaternion w x y z), which makes 25 for the Panda arm; object poses are not part of it. Success terminates an episode.
The reward is the densest that the task offers. `options` are further arguments of its `gymnasium.make`.

A camera of the declaration is ManiSkill's sensor of that name, with or without `_camera` behind it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from configs.errors import EnvironmentFault, SpecError, refusal
from services.environments import renderer
from services.environments.adapter import Adapter, StepResult, action_bounds, keyword_arguments, one_line

# Before sapien is imported, by anyone: Vulkan reads its driver list once.
renderer.select()

import gymnasium  # noqa: E402
import sapien  # noqa: E402
import torch  # noqa: E402
from mani_skill.envs import sapien_env  # noqa: E402
from mani_skill.envs.sapien_env import BaseEnv  # noqa: E402
from mani_skill.envs.utils.system.backend import BackendInfo  # noqa: E402
from mani_skill.render import ShaderConfig  # noqa: E402
from mani_skill.sensors import camera  # noqa: E402
from mani_skill.utils.registration import REGISTERED_ENVS  # noqa: E402

from services.environments import light_visuals, shader_pack  # noqa: E402


def make_adapter(spec: Mapping[str, Any]) -> Adapter:
    """The adapter of the declared backend.

    Raises:
        SpecError: no such task, no CUDA device for backend `gpu`, or a declared width that is not the robot's.
        EnvironmentFault: no device here can render.
    """
    if spec["id"] not in REGISTERED_ENVS:
        raise SpecError(refusal("id", spec["id"], "a registered ManiSkill task, such as PushCube-v1", "correct it"))
    if spec["backend"] == "gpu":
        from services.environments.maniskill_gpu import ManiSkillGpuAdapter

        return ManiSkillGpuAdapter(spec)
    return ManiSkillCpuAdapter(spec)


class ManiSkillTask:
    """One built ManiSkill environment with `num_envs` sub-scenes, and what both adapters read from it."""

    def __init__(self, spec: Mapping[str, Any], num_envs: int) -> None:
        self._spec = spec
        sizes = {c["name"]: {"height": c["height"], "width": c["width"]} for c in spec["cameras"]}
        self.env: Any = self._make(num_envs, next(iter(sizes.values())))
        self._sensors = {name: self._sensor(name) for name in sizes}
        if len({tuple(size.values()) for size in sizes.values()}) > 1:
            # Sizes of their own are given by sensor name, and those are known only once it was built.
            self.env.close()
            self.env = self._make(num_envs, {self._sensors[name]: size for name, size in sizes.items()})
        self._dress()
        try:
            self.low, self.high = action_bounds(spec, self.env.single_action_space)
        except SpecError:
            self.env.close()
            raise
        width = self.proprioception().shape[1]
        if width != spec["state_width"]:
            self.env.close()
            raise SpecError(refusal("state_width", spec["state_width"], f"{width} for {spec['id']}", "correct it"))

    def _dress(self) -> None:
        """What is seen of a scene that was just built."""
        for uid in set(self.env._sensors) - set(self._sensors.values()):
            del self.env._sensors[uid]  # not declared, so not rendered either
        if not self._spec["show_goal"]:
            for hidden in self.env._hidden_objects:
                hidden.hide_visual()
        if self._spec["light_visuals"]:
            light_visuals.apply(self.env)

    def reset(self, seed: int) -> None:
        """Begin an episode; in a scene of its own where that is declared."""
        if not self._spec["fresh_scenes"]:
            self.env.reset(seed=seed)
            return
        with _render_device():
            self.env.reset(seed=seed, options={"reconfigure": True})
        self._dress()

    def _make(self, num_envs: int, sizes: Mapping[str, Any]) -> Any:
        env_id, options = self._spec["id"], self._spec["options"]
        fixed = {
            "num_envs": num_envs,
            # The cameras are built, but no step renders them.
            "obs_mode": "none",
            "reward_mode": reward_mode(REGISTERED_ENVS[env_id].cls),
            "control_mode": self._spec["control_mode"],
            "sensor_configs": {"shader_pack": "minimal", **sizes},
            "human_render_camera_configs": {"shader_pack": "minimal"},  # never rendered; saves another pack
            "sim_backend": "physx_cuda" if self._spec["backend"] == "gpu" else "physx_cpu",
            "reconfiguration_freq": 0,
        }
        given = keyword_arguments(self._spec, fixed)
        with _render_device():
            try:
                return gymnasium.make(env_id, **given).unwrapped
            except TypeError as error:
                remedy = f"correct them ({one_line(error)})"
                raise SpecError(refusal("options", options, f"arguments of {env_id}", remedy)) from None
            except EOFError:
                # It asks on standard input whether to download what the task shows.
                remedy = f"run `python -m mani_skill.utils.download_asset {env_id}`"
                raise EnvironmentFault(
                    refusal("id", env_id, "a task whose files are on this machine", remedy)
                ) from None
            except AssertionError:
                if fixed["control_mode"] is None:
                    raise
                known: Any = gymnasium.make(env_id, **given | {"control_mode": None}).unwrapped
                modes = ", ".join(known.agent.supported_control_modes)
                known.close()
                raise SpecError(
                    refusal("control_mode", fixed["control_mode"], modes, "choose one, or none for the first")
                ) from None

    def _sensor(self, camera: str) -> str:
        known = self.env._sensors
        for uid in (camera, f"{camera}_camera"):
            if uid in known:
                return uid
        names = ", ".join(sorted(name.removesuffix("_camera") for name in known))
        self.env.close()
        raise SpecError(refusal("cameras", camera, names, f"name a camera of {self._spec['id']}"))

    def proprioception(self) -> np.ndarray:
        """float32 [num_envs, S]."""
        robot, tool = self.env.agent.robot, getattr(self.env.agent, "tcp", None)
        parts = (robot.get_qpos(), robot.get_qvel(), *(() if tool is None else (tool.pose.raw_pose,)))
        return torch.cat(parts, dim=1).float().cpu().numpy().copy()

    def render(self) -> dict[str, np.ndarray]:
        """uint8 [num_envs, h, w, 3] of each declared camera."""
        self.env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        for sensor in self.env._sensors.values():
            sensor.capture()
        return {
            name: self.env._sensors[uid]
            .get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
            .cpu()
            .numpy()
            .copy()
            for name, uid in self._sensors.items()
        }

    def step(self, actions: np.ndarray) -> StepResult:
        """Apply actions float32 [num_envs, A]."""
        _, reward, terminated, _, info = self.env.step(torch.from_numpy(actions).to(self.env.device))
        success = info["success"] if "success" in info else torch.zeros_like(terminated)
        truncated = self.env.elapsed_steps >= self._spec["max_episode_steps"]
        flags = (_numpy(flag).astype(bool) for flag in (terminated, truncated, success))
        return StepResult(_numpy(reward).astype(np.float32), *flags)

    def scene_positions(self) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [num_envs, 3], in metres.

        Raises:
            EnvironmentFault: if the task does not name its object and goal as the table-top tasks do.
        """
        item = next((getattr(self.env, n) for n in ("cube", "obj") if hasattr(self.env, n)), None)
        goal = next((getattr(self.env, n) for n in ("goal_site", "goal_region") if hasattr(self.env, n)), None)
        if item is None or goal is None or getattr(self.env.agent, "tcp", None) is None:
            raise EnvironmentFault(
                f"scene_positions: {self._spec['id']} has no actor named cube or obj and goal_site or goal_region, or "
                "its robot no tool; add its names to services/environments/maniskill.py"
            )
        places = {"object": item.pose.p, "goal": goal.pose.p, "gripper": self.env.agent.tcp.pose.p}
        return {name: _numpy(place).astype(np.float32) for name, place in places.items()}

    def close(self) -> None:
        """Release the scene."""
        self.env.close()


class ManiSkillCpuAdapter:
    """Separate environments in one process, each its own `gym.make` (physics on the CPU is one scene at a time)."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._tasks = [ManiSkillTask(spec, 1)]
        self.action_low, self.action_high = self._tasks[0].low, self._tasks[0].high
        self.versions = versions()

    def resize(self, num_envs: int) -> None:
        """Hold environments 0 … num_envs-1; those that exist are kept, the first one always."""
        while len(self._tasks) < num_envs:
            self._tasks.append(ManiSkillTask(self._spec, 1))
        while len(self._tasks) > max(num_envs, 1):
            self._tasks.pop().close()

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each, by its seed."""
        for index, seed in zip(indices, seeds, strict=True):
            self._tasks[index].reset(int(seed))

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A]."""
        results = [self._tasks[index].step(actions[row : row + 1]) for row, index in enumerate(indices)]
        return StepResult(
            *(
                np.concatenate([getattr(result, name) for result in results])
                for name in ("reward", "terminated", "truncated", "success")
            )
        )

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S]."""
        return np.concatenate([self._tasks[index].proprioception() for index in indices])

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""
        return _stack([self._tasks[index].render() for index in indices])

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """The declared instruction."""
        return [self._spec["instruction"]] * len(indices)

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions, each float32 [n, 3]."""
        return _stack([self._tasks[index].scene_positions() for index in indices])

    def close(self) -> None:
        """Release all scenes."""
        while self._tasks:
            self._tasks.pop().close()


def reward_mode(task: type[BaseEnv]) -> str:
    """The densest of the rewards that a task has; some list a mode whose function they do not have."""
    functions = {"normalized_dense": "compute_normalized_dense_reward", "dense": "compute_dense_reward"}
    for mode in ("normalized_dense", "dense", "sparse"):
        function = functions.get(mode, "")
        if mode in task.SUPPORTED_REWARD_MODES and getattr(task, function, mode) is not getattr(
            BaseEnv, function, None
        ):
            return mode
    return "none"


def versions() -> dict[str, str]:
    """Versions of what the simulation depends on."""
    names = ("mani_skill", "sapien", "gymnasium", "numpy", "torch")
    return {name: importlib.metadata.version(name) for name in names}


def _numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _stack(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def _render_device() -> Iterator[None]:
    """Let ManiSkill render on the device that can, with the shader pack whose first picture is quick.

    Its `render_backend` is a string split at ":", which cannot name SwiftShader's `pci:0000:00:00.0`.
    """
    device = renderer.device()
    if device is None:
        raise EnvironmentFault(renderer.check() or "renderer: no Vulkan device here can render; check its driver")
    parse, set_pack = sapien_env.parse_sim_and_render_backend, camera.set_shader_pack
    pack = shader_pack.without_environment_map()

    def with_device(sim_backend: str, _render_backend: str) -> BackendInfo:
        # "cpu" can always be parsed; the device it gives is replaced.
        info: BackendInfo = parse(sim_backend, "cpu")
        info.render_device = device
        info.render_backend = "sapien_cuda" if device.is_cuda() else str(device)
        return info

    def with_pack(config: ShaderConfig) -> None:
        set_pack(config)
        if config.shader_pack == "minimal":
            sapien.render.set_camera_shader_dir(pack)

    sapien_env.parse_sim_and_render_backend, camera.set_shader_pack = with_device, with_pack
    try:
        yield
    finally:
        sapien_env.parse_sim_and_render_backend, camera.set_shader_pack = parse, set_pack
