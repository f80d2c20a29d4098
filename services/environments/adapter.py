"""What every simulator looks like to an environment host: several environments addressed by index.

An adapter steps, resets and renders; which environments are active, early ends of chunks, automatic resets and
final observations are the business of `services.environments.batch`, once for all simulators.

Legend: n selected environments, A action width, S state width.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from configs.errors import SpecError, refusal


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step of n environments gave; arrays have shape [n]."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray


class Adapter(Protocol):
    """Environments of one kind in this process. All returned arrays are copies: later calls do not change them."""

    action_low: np.ndarray
    """float32 [A]; actions are clipped to the bounds by the caller."""
    action_high: np.ndarray
    versions: dict[str, str]
    """Package versions that the simulation depends on."""

    def resize(self, num_envs: int) -> None:
        """Hold environments 0 … num_envs-1; those that exist are kept."""

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Start an episode in each; its initial state is a function of its seed alone."""

    def step(self, indices: Sequence[int], actions: np.ndarray) -> StepResult:
        """Apply actions float32 [n, A], one a listed environment; the others stay as they are or are not used again
        before their next reset."""

    def proprioception(self, indices: Sequence[int]) -> np.ndarray:
        """float32 [n, S], no object poses."""

    def render(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """uint8 [n, h, w, 3] of each declared camera."""

    def instructions(self, indices: Sequence[int]) -> list[str]:
        """What each environment's robot is told now."""

    def scene_positions(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Privileged positions: `object`, `goal`, `gripper`, each float32 [n, 3]."""

    def close(self) -> None:
        """Release the simulator."""


def one_line(error: Exception) -> str:
    """What an error of a simulator, or of a tenant's own code, says, fit for a refusal."""
    return " ".join(str(error).split())[:300]


def action_bounds(spec: Mapping[str, Any], space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest action, each float32 [A], of `space`: a Box [A] with finite bounds, low below high.

    Raises:
        SpecError: it is something else.
    """
    width, bounds = spec["action_width"], [getattr(space, end, None) for end in ("low", "high")]
    low, high = (np.asarray(() if bound is None else bound) for bound in bounds)
    if low.shape != (width,) or high.shape != (width,):
        boxed = low.ndim == 1 and not any(bound is None for bound in bounds)
        remedy = "correct it" if boxed else "wrap the environment so that its actions are a Box [A]"
        if boxed and spec["control_mode"] is not None:
            remedy += f", or control_mode, which is {spec['control_mode']}"
        raise SpecError(refusal("action_width", width, f"the action space of {spec['id']}: {space}", remedy))
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        remedy = "give each action its bounds, policies are clipped to them"
        raise SpecError(refusal("action_space", space, "finite bounds, low below high", remedy))
    return low.astype(np.float32), high.astype(np.float32)


def keyword_arguments(spec: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What a simulator's factory is called with: `fixed`, and the declared `options` beside it.

    Raises:
        SpecError: if an option is one of the fixed ones.
    """
    if taken := sorted(set(fixed) & set(spec["options"])):
        raise SpecError(refusal("options", taken, f"other arguments of {spec['id']}", "remove them"))
    return {**fixed, **spec["options"]}


_MODULES = {
    "gymnasium": "gymnasium_adapter:GymnasiumAdapter",
    "gymnasium_vector": "vector_adapter:GymnasiumVectorAdapter",
    "libero": "libero:LiberoAdapter",
    "maniskill": "maniskill:make_adapter",
    "python": "python_adapter:PythonAdapter",
}


def make_adapter(spec: Mapping[str, Any], num_envs: int) -> Adapter:
    """The adapter for `spec` (an `EnvironmentSpec` as plain data) with environments 0 … num_envs-1.

    Raises:
        SpecError: if the simulator, the id or a width is not what the declaration says.
    """
    if spec["kind"] not in _MODULES:
        raise SpecError(refusal("kind", spec["kind"], ", ".join(sorted(_MODULES)), "choose one"))
    module, name = _MODULES[spec["kind"]].split(":")
    # Imported here: a simulator's dependencies are loaded only by hosts that run it.
    adapter: Adapter = getattr(importlib.import_module(f"services.environments.{module}"), name)(spec)
    adapter.resize(num_envs)
    return adapter
