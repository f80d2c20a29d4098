"""Chunks of actions as differences to the state that they begin in, and back.

All H actions of a chunk are taken against the one state that the policy saw, so an executed chunk needs no other.
Source: openpi, transforms.py (DeltaActions, AbsoluteActions); there the state's dimensions are the action's.
Legend: H action horizon, A action width, S state width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def to_deltas(action: np.ndarray, state: np.ndarray, dimensions: Sequence[int], of_state: Sequence[int]) -> np.ndarray:
    """Absolute to relative, float32 [n, H, A]; the argument is not changed.

    Args:
        action: float32 [n, H, A].
        state: float32 [n, S], raw.
        dimensions: those of the action that become differences; the others stay.
        of_state: the state's dimension for each of them.
    """
    return _moved(action, -state[:, list(of_state)], dimensions)


def to_absolute(
    action: np.ndarray, state: np.ndarray, dimensions: Sequence[int], of_state: Sequence[int]
) -> np.ndarray:
    """The inverse of `to_deltas`, but for rounding."""
    return _moved(action, state[:, list(of_state)], dimensions)


def _moved(action: np.ndarray, by: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    if not dimensions:
        return action
    moved = np.array(action, np.float32)
    moved[..., list(dimensions)] += by[:, None]
    return moved
