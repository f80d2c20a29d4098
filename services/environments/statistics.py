"""Measures a preset's statistics: `python -m services.environments.statistics pushcube --episodes 40`.

Half of the frames come from the scripted expert with action noise, half from uniformly random actions, both from
seeds of their own; what is printed goes into the preset's YAML. Nothing is rendered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs import seeds
from services.environments.adapter import Adapter, make_adapter
from services.environments.batch import EnvironmentBatch

_SEED = seeds.PRETRAINING.stop - 1_000_000
"""First seed used here: pretraining's last million, which no training, demonstration or evaluation shares."""
LEAST_STD = 0.01
"""Deviations are not given smaller than this."""


def measure(spec: Mapping[str, Any], episodes: int, noise: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and standard deviation of `state` [S] and executed `action` [A] of the environment `spec`."""
    adapter = make_adapter(spec, 1)
    try:
        return _measure(spec, adapter, episodes, noise)
    finally:
        adapter.close()


def _measure(
    spec: Mapping[str, Any], adapter: Adapter, episodes: int, noise: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    batch = EnvironmentBatch(spec, adapter, 1, images=False)
    random = np.random.default_rng(_SEED)
    states, actions = [], []
    for episode in range(episodes):
        shown = batch.expert_episode(_SEED + episode, noise)
        states.append(shown["proprioception"])
        actions.append(shown["executed"])
        # As many random steps as the expert made, so that neither outweighs the other.
        observation = batch.reset([_SEED + episodes + episode])
        for _ in range(len(shown["actions"])):
            action = random.uniform(adapter.action_low, adapter.action_high).astype(np.float32)
            states.append(observation["proprioception"])
            actions.append(action[None])
            after = _SEED + int(random.integers(500_000, 1_000_000))
            observation = batch.batch_step(action[None, None], [after])["observation"]
    state, action = np.concatenate(states).astype(np.float64), np.concatenate(actions).astype(np.float64)
    # A pose that hardly ever changes would otherwise turn its smallest change into many deviations.
    return {
        "state": (state.mean(0), np.maximum(state.std(0), LEAST_STD)),
        "action": (action.mean(0), np.maximum(action.std(0), LEAST_STD)),
    }


def main() -> None:
    """Command line."""
    from configs import presets

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.2)
    options = parser.parse_args()
    spec = presets.environment(options.environment).model_dump(mode="json")
    for name, (mean, std) in measure(spec, options.episodes, options.noise).items():
        lines = (
            f"  {label}: [{', '.join(f'{v:.4g}' for v in values)}]" for label, values in (("mean", mean), ("std", std))
        )
        sys.stdout.write("\n".join([f"{name}:", *lines]) + "\n")


if __name__ == "__main__":
    main()
