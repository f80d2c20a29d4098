"""What `rl_throughput` compares with: PPO on Reach-v0 in one file, as a person would write it for one policy.

It stands on PyTorch and kernels/ alone (the frozen base, the action module, the statistics): no service, scheduler,
partition or flow. What is worth doing it does: environments are stepped together in a child process, over a pipe;
bookkeeping is done while they step; the frozen base sees each observation once, and the update reads the features of
the rollout; values of all final observations come from one forward; nothing is copied that need not be. One action a
decision (horizon 1).

Legend: E environments, T steps, n = T × E samples (row = t × E + e), A action width.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor, nn

from configs.algorithm import PpoSpec
from configs.backend import PolicyConfig
from configs.home import PROJECT_ROOT
from kernels import action_modules, backbones
from kernels.action_modules import ActionModule
from kernels.features import VLAFeature, concatenated
from kernels.normalisation import Normaliser
from services.environments.reach import MAX_EPISODE_STEPS, ReachEnv

_FIRST_SEED = 10_000_000


def simulate(pipe: Connection, num_envs: int, step_s: float, first_seed: int) -> None:
    """The child process: answers {"reset": True} and actions float32 [E, A] until the pipe closes.

    Args:
        pipe: to the learner.
        num_envs: E.
        step_s: what a step of all environments sleeps before.
        first_seed: of the first episode; each further one takes the next number.
    """
    envs = [ReachEnv() for _ in range(num_envs)]
    for env in envs:
        env.draws_each_step = False
    states = np.zeros((num_envs, 2), np.float32)
    lengths = np.zeros(num_envs, int)
    seed = first_seed

    def begin(row: int) -> None:
        nonlocal seed
        states[row] = envs[row].reset(seed=seed)[0]["proprioception"]
        lengths[row] = 0
        seed += 1

    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if isinstance(asked, dict):
            for row in range(num_envs):
                begin(row)
            pipe.send((np.stack([env.render() for env in envs]), states))
            continue
        if step_s:
            time.sleep(step_s)
        reward = np.zeros(num_envs, np.float32)
        terminated, truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        final: list[tuple[int, np.ndarray, np.ndarray]] = []
        for row, env in enumerate(envs):
            observation, reward[row], terminated[row], _, _ = env.step(asked[row])
            states[row] = observation["proprioception"]
            lengths[row] += 1
            truncated[row] = lengths[row] >= MAX_EPISODE_STEPS
            if truncated[row] and not terminated[row]:
                final.append((row, env.render(), states[row].copy()))
            if terminated[row] or truncated[row]:
                begin(row)
        pipe.send((np.stack([env.render() for env in envs]), states, reward, terminated, truncated, final))


class SingleFilePpo:
    """One policy, its environments and its optimizer.

    Args:
        config: base model, action module, camera, statistics and seed.
        algorithm: hyper-parameters; terms beyond clipped PPO with gae are not read.
        instruction: what the robot is told.
        step_s: see `simulate`.

    Attributes:
        seconds: {"collect", "estimate", "update"} of the last iteration.
    """

    def __init__(self, config: PolicyConfig, algorithm: PpoSpec, instruction: str, step_s: float = 0.0) -> None:
        self._backbone = backbones.load(config.base_model, PROJECT_ROOT)
        self.module = action_modules.build(config.action_module, config.base_model, config.seed)
        self._algorithm = algorithm
        self._camera = config.cameras[0].name
        self._state, self._action = Normaliser.from_statistics(config.state), Normaliser.from_statistics(config.action)
        self._optimizer = new_optimizer(self.module, algorithm)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._instruction = instruction
        self.seconds: dict[str, float] = {}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, algorithm.num_envs, step_s, _FIRST_SEED)
        self._child = context.Process(target=simulate, args=arguments, daemon=True)
        self._child.start()
        theirs.close()

    def close(self) -> None:
        """End the child process."""
        self._pipe.close()
        self._child.join(10)

    def iteration(self) -> float:
        """Collect, estimate, update; environment steps per second of all three."""
        begun = time.perf_counter()
        feature, data, after = self._collect()
        collected = time.perf_counter()
        algorithm = self._algorithm
        assert algorithm.gae_lambda is not None
        advantage, returns = estimate(**data, **after, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
        estimated = time.perf_counter()
        kept = {name: torch.from_numpy(data[name].reshape(-1, *data[name].shape[2:])) for name in _LEARNED_FROM}
        kept |= {"advantage": torch.from_numpy(advantage), "returns": torch.from_numpy(returns)}
        update(self.module, self._optimizer, algorithm, self._generator, feature, **kept)
        ended = time.perf_counter()
        self.seconds = {"collect": collected - begun, "estimate": estimated - collected, "update": ended - estimated}
        return algorithm.num_envs * algorithm.rollout_steps / (ended - begun)

    def _collect(self) -> tuple[VLAFeature, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Features [n, …]; what is known of each step [T, E, …]; values of what is seen beside the rows' own."""
        features: list[VLAFeature] = []
        columns: dict[str, list[np.ndarray]] = {}
        finals: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._pipe.send({"reset": True})
        images, states = self._pipe.recv()
        for t in range(self._algorithm.rollout_steps):
            feature, state = self._encode(images, states)
            decision = self.module.act(feature, state, self._generator)
            self._pipe.send(self._action.unnormalise(decision.action.numpy())[:, 0])
            assert decision.log_prob is not None
            assert decision.value is not None
            features.append(feature)
            known = {"state": state, "action": decision.action, "log_prob": decision.log_prob, "value": decision.value}
            images, states, reward, terminated, truncated, ended = self._pipe.recv()
            stepped = {"reward": reward, "terminated": terminated, "truncated": truncated}
            for name, value in ({k: v.numpy() for k, v in known.items()} | stepped).items():
                columns.setdefault(name, []).append(value)
            first = t * self._algorithm.num_envs
            finals += [(first + row, image, place) for row, image, place in ended]
        data = {name: np.stack(parts) for name, parts in columns.items()}
        images = np.concatenate([images, *(image[None] for _, image, _ in finals)])
        states = np.concatenate([states, *(place[None] for _, _, place in finals)])
        value = self.module.act(*self._encode(images, states), None).value
        assert value is not None
        num_envs = self._algorithm.num_envs
        bootstrap = np.zeros(data["value"].size, np.float32)
        bootstrap[[row for row, _, _ in finals]] = value[num_envs:].numpy()
        after = {"last_value": value[:num_envs].numpy(), "bootstrap": bootstrap.reshape(data["value"].shape)}
        return concatenated(features), data, after

    def _encode(self, images: np.ndarray, states: np.ndarray) -> tuple[VLAFeature, Tensor]:
        """Features of the frozen base and normalised proprioception, B rows each."""
        observation = {
            "images": {self._camera: images},
            "proprioception": states,
            "instructions": [self._instruction] * len(images),
        }
        feature = self._backbone.encode(self._backbone.prepare(observation, [self._camera]))
        return feature, torch.from_numpy(self._state.normalise(states))


_LEARNED_FROM = ("state", "action", "log_prob")


def new_optimizer(module: ActionModule, algorithm: PpoSpec) -> torch.optim.AdamW:
    """AdamW at a constant learning rate."""
    spec = algorithm.optimizer
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay, foreach=False)


def estimate(
    *,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    bootstrap: np.ndarray,
    gamma: float,
    gae_lambda: float,
    **_: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, standardised, and returns, float32 [n]; arguments [T, E], but `last_value` [E].

    After a truncated step stands `bootstrap`, the value of the final observation; after a terminated one nothing.
    """
    following = np.concatenate([value[1:], last_value[None]])
    following = np.where(terminated, 0.0, np.where(truncated, bootstrap, following))
    delta = reward + gamma * following - value
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantage, later = np.zeros_like(delta), np.zeros(reward.shape[1])
    for t in reversed(range(len(delta))):
        later = advantage[t] = delta[t] + decay[t] * later
    returns = (advantage + value).reshape(-1).astype(np.float32)
    flat = advantage.reshape(-1)
    return ((flat - flat.mean()) / (flat.std() + 1e-8)).astype(np.float32), returns


def update(
    module: ActionModule,
    optimizer: torch.optim.AdamW,
    algorithm: PpoSpec,
    generator: torch.Generator,
    feature: VLAFeature,
    *,
    state: Tensor,
    action: Tensor,
    log_prob: Tensor,
    advantage: Tensor,
    returns: Tensor,
) -> float:
    """Epochs of shuffled microbatches; the mean loss.

    Args:
        module: trained in place.
        optimizer: of the module.
        algorithm: hyper-parameters.
        generator: shuffles.
        feature: of the frozen base, n rows.
        state: normalised, float32 [n, S].
        action: as sampled, float32 [n, 1, A].
        log_prob: of them, float32 [n, 1].
        advantage: standardised, float32 [n].
        returns: float32 [n].
    """
    module.train()
    parameters = list(module.parameters())
    losses = []
    for _ in range(algorithm.epochs):
        for rows in torch.randperm(len(returns), generator=generator).split(algorithm.microbatch_size):
            scored = module.evaluate(feature[rows], state[rows], {"action": action[rows]})
            assert scored.value is not None
            ratio = (scored.log_prob - log_prob[rows]).exp()[:, 0]
            clipped = ratio.clamp(1 - algorithm.clip_coef, 1 + algorithm.clip_coef)
            policy_loss = -torch.minimum(ratio * advantage[rows], clipped * advantage[rows]).mean()
            value_loss = 0.5 * (scored.value - returns[rows]).square().mean()
            loss = policy_loss + algorithm.value_coef * value_loss - algorithm.entropy_coef * scored.entropy.mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, algorithm.optimizer.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)
