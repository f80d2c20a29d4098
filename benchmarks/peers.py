"""What the overhead benchmarks compare with: loops a person would write for one tenant in one process.

They use PyTorch, kernels/ and the environments themselves (a simulator has to be made by somebody); no service, no
scheduler, no partition, no protocol, and the same thread settings as the platform's roles.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from configs import presets
from configs.algorithm import SftSpec
from configs.backend import PolicyConfig
from configs.home import PROJECT_ROOT
from kernels import action_modules, backbones
from kernels.normalisation import Normaliser
from services.environments.adapter import make_adapter


class PlainPolicy:
    """One tenant's policy in this process: the base, an action module, and statistics."""

    def __init__(self, config: PolicyConfig) -> None:
        self.backbone = backbones.load(config.base_model, PROJECT_ROOT)
        self.module = action_modules.build(config.action_module, config.base_model, config.seed)
        self.cameras = [camera.name for camera in config.cameras]
        self.state = Normaliser.from_statistics(config.state)
        self.action = Normaliser.from_statistics(config.action)

    def act(
        self, observation: dict[str, Any], generator: torch.Generator | None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions in the environment's units, float32 [B, H, A], and what an update would need of them.

        Sampled by `generator`; None takes the mean.
        """
        feature = self.backbone.encode(self.backbone.prepare(observation, self.cameras))
        proprioception = torch.from_numpy(self.state.normalise(observation["proprioception"]))
        decision = self.module.act(feature, proprioception, generator)
        assert decision.log_prob is not None
        assert decision.value is not None
        kept = {
            "action": decision.action.numpy(),
            "log_prob": decision.log_prob.numpy(),
            "value": decision.value.numpy(),
        }
        return self.action.unnormalise(kept["action"]), kept


class PlainCollection:
    """A bare collection loop over one process's environments, with same-step automatic reset.

    It ends with what PPO's update needs beside the transitions: the values of the last and of all final observations.
    """

    def __init__(self, config: PolicyConfig, environment: str, num_envs: int) -> None:
        spec = presets.environment(environment)
        self._policy = PlainPolicy(config)
        self._environments = make_adapter(spec.model_dump(mode="json"), num_envs)
        self._instructions = [spec.instruction] * num_envs
        self._num_envs = num_envs
        self._generator = torch.Generator().manual_seed(0)
        self._seed = 10_000_000

    def close(self) -> None:
        """Release the simulator."""
        self._environments.close()

    def run(self, steps: int) -> float:
        """Collect `steps` steps in each environment from a reset on; environment steps per second."""
        everyone = list(range(self._num_envs))
        kept: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        begun = time.perf_counter()
        self._environments.reset(everyone, self._seeds(self._num_envs))
        observation = self._observe(everyone)
        for _ in range(steps):
            actions, of_policy = self._policy.act(observation, self._generator)
            result = self._environments.step(everyone, np.clip(actions[:, 0], -1, 1))
            kept.append({**observation, **of_policy, "reward": result.reward, "terminated": result.terminated})
            over = [e for e in everyone if result.terminated[e] or result.truncated[e]]
            if over:
                cut = [e for e in over if not result.terminated[e]]
                after += [self._observe(cut)] if cut else []
                self._environments.reset(over, self._seeds(len(over)))
            observation = self._observe(everyone)
        self._policy.act(_concatenated([observation, *after]), None)
        return self._num_envs * steps / (time.perf_counter() - begun)

    def _seeds(self, count: int) -> list[int]:
        self._seed += count
        return list(range(self._seed - count, self._seed))

    def _observe(self, rows: list[int]) -> dict[str, Any]:
        return {
            "images": self._environments.render(rows),
            "proprioception": self._environments.proprioception(rows),
            "instructions": self._instructions[: len(rows)],
        }


def _concatenated(observations: list[dict[str, Any]]) -> dict[str, Any]:
    cameras = observations[0]["images"]
    return {
        "images": {name: np.concatenate([o["images"][name] for o in observations]) for name in cameras},
        "proprioception": np.concatenate([o["proprioception"] for o in observations]),
        "instructions": [text for o in observations for text in o["instructions"]],
    }


def plain_sft(policy: PlainPolicy, spec: SftSpec, data: dict[str, Any]) -> float:
    """Supervised steps over a job's samples in a plain PyTorch loop; seconds.

    Args:
        policy: trained in place.
        spec: microbatch size and optimizer.
        data: {"image.<camera>": uint8 [n, h, w, 3], "proprioception", "action" f32 [n, H, A], "action_is_pad",
            "instructions"}.
    """
    begun = time.perf_counter()
    module = policy.module.train()
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=spec.optimizer.learning_rate,
        weight_decay=spec.optimizer.weight_decay,
        foreach=False,
    )
    for start in range(0, len(data["action"]), spec.microbatch_size):
        rows = slice(start, start + spec.microbatch_size)
        images = {camera: data[f"image.{camera}"][rows] for camera in policy.cameras}
        state = policy.state.normalise(data["proprioception"][rows])
        observation = {"images": images, "proprioception": state, "instructions": data["instructions"][rows]}
        feature = policy.backbone.encode(policy.backbone.prepare(observation, policy.cameras))
        target = torch.from_numpy(policy.action.normalise(data["action"][rows]))
        is_pad = torch.from_numpy(data["action_is_pad"][rows])
        count = float((~is_pad).sum()) * target.shape[2]
        loss = module.imitation_loss(feature, torch.from_numpy(state), target, is_pad, count, None)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.optimizer.max_grad_norm)
        optimizer.step()
        loss.item()
    return time.perf_counter() - begun
