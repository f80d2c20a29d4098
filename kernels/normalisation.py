"""Normalisation of states and actions: the same numbers and the same code in training and in serving.

A dimension whose deviation is practically zero is only shifted: divided by it, a reading 1e-3 off would become
2e5, and multiplied by it on the way out, nothing would come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.environment import StatisticsSpec
from configs.errors import TenantFault, refusal

# In the dimension's own unit (metres, radians, …), or of its mean where that is above 1.
CONSTANT_BELOW = 1e-4
STATE_BINS = 256
STATE_BINS_REACH = 3.0  # standard deviations to either side


class Normaliser:
    """Affine map of one vector: normalise and its inverse.

    Args:
        mean: [W].
        std: [W], not negative.
        exempt: dimensions left as they are (grippers, for instance).

    Raises:
        TenantFault: if the statistics are not finite, negative or of unequal width, or an exempt one is not there.
    """

    def __init__(
        self, mean: Sequence[float] | np.ndarray, std: Sequence[float] | np.ndarray, exempt: Sequence[int] = ()
    ) -> None:
        shift, deviation = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        if shift.ndim != 1 or shift.shape != deviation.shape:
            raise TenantFault(
                refusal(
                    "statistics", (shift.shape, deviation.shape), "mean and std of one width", "give one a dimension"
                )
            )
        if not (np.isfinite(shift).all() and np.isfinite(deviation).all() and (deviation >= 0).all()):
            raise TenantFault(refusal("statistics", (mean, std), "finite means, deviations ≥ 0", "compute them again"))
        if not all(0 <= d < len(shift) for d in exempt):
            raise TenantFault(refusal("exempt", list(exempt), f"dimensions 0 … {len(shift) - 1}", "name such"))
        constant = deviation < CONSTANT_BELOW * np.maximum(1.0, np.abs(shift))
        scale = np.where(constant, 1.0, deviation)
        shift = shift.copy()
        shift[list(exempt)], scale[list(exempt)] = 0.0, 1.0
        self.width = len(shift)
        self._shift, self._scale = shift.astype(np.float32), scale.astype(np.float32)

    @classmethod
    def from_statistics(cls, statistics: StatisticsSpec, exempt: Sequence[int] = ()) -> Normaliser:
        """From a preset's or a dataset's statistics."""
        return cls(statistics.mean, statistics.std, exempt)

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Raw to normalised, float32 [..., W]; the argument is not changed.

        Raises:
            TenantFault: if the width is another.
        """
        return (self._checked(x) - self._shift) / self._scale

    def unnormalise(self, x: np.ndarray) -> np.ndarray:
        """Normalised to raw, float32 [..., W]; the inverse of `normalise`."""
        return self._checked(x) * self._scale + self._shift

    def _checked(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float32)
        if x.ndim == 0 or x.shape[-1] != self.width:
            raise TenantFault(refusal("width", x.shape, f"[..., {self.width}]", "send vectors of the declared width"))
        return x


def state_text(normalised: np.ndarray) -> list[str]:
    """Normalised proprioception as text for the prompt: one bin of 0 … 255 a dimension over ±3 deviations.

    Bins have three digits each, so that a prompt's length does not depend on the state.

    Args:
        normalised: float32 [B, S], finite.

    Returns:
        B strings such as "012 128 255".

    Raises:
        TenantFault: on NaN or infinity.
    """
    require_finite("proprioception", normalised)
    reach = STATE_BINS_REACH
    unit = (np.clip(normalised, -reach, reach) + reach) / (2 * reach)
    bins = np.minimum((unit * STATE_BINS).astype(np.int64), STATE_BINS - 1)
    return [" ".join(f"{b:03d}" for b in row) for row in bins]


def require_finite(field: str, x: np.ndarray) -> None:
    """Refuse NaN and infinity.

    Raises:
        TenantFault: naming the field and the first rows at fault.
    """
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1) if len(x) else np.ones(0, bool)
    if not finite.all():
        rows = np.flatnonzero(~finite)
        raise TenantFault(
            refusal(field, f"NaN or infinity in rows {rows[:8].tolist()}", "finite numbers", "correct the observation")
        )
