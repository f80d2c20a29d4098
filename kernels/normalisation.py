"""Normalisation of states and actions: the same numbers and the same code in training and in serving.

A dimension whose deviation (or range) is practically zero is only shifted: divided by it, a reading 1e-3 off would
become 2e5, and multiplied by it on the way out, nothing would come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.environment import StatisticsSpec
from configs.errors import TenantFault, refusal
from configs.transforms import STATISTICS, Scaling

# In the dimension's own unit (metres, radians, …), or of its mean where that is above 1.
CONSTANT_BELOW = 1e-4
STATE_BINS = 256
# Normalised values to either side that have bins of their own: three deviations, or the range itself.
STATE_BINS_REACH: dict[Scaling, float] = {"mean_std": 3.0, "quantiles": 1.0, "min_max": 1.0}


class Normaliser:
    """Affine map of one vector: normalise, (x - shift) / scale, and its inverse. Nothing is clipped.

    Args:
        shift: [W], what becomes 0.
        scale: [W], not negative, what becomes 1 away from that.
        exempt: dimensions left as they are (grippers, for instance).

    Raises:
        TenantFault: if the statistics are not finite, negative or of unequal width, or an exempt one is not there.
    """

    def __init__(
        self, shift: Sequence[float] | np.ndarray, scale: Sequence[float] | np.ndarray, exempt: Sequence[int] = ()
    ) -> None:
        middle, reach = np.asarray(shift, np.float64), np.asarray(scale, np.float64)
        if middle.ndim != 1 or middle.shape != reach.shape:
            raise TenantFault(
                refusal("statistics", (middle.shape, reach.shape), "two vectors of one width", "give both a dimension")
            )
        if not (np.isfinite(middle).all() and np.isfinite(reach).all() and (reach >= 0).all()):
            possible = "finite numbers, deviations and ranges ≥ 0"
            raise TenantFault(refusal("statistics", (middle.tolist(), reach.tolist()), possible, "compute them again"))
        if not all(0 <= d < len(middle) for d in exempt):
            raise TenantFault(refusal("exempt", list(exempt), f"dimensions 0 … {len(middle) - 1}", "name such"))
        constant = reach < CONSTANT_BELOW * np.maximum(1.0, np.abs(middle))
        divisor = np.where(constant, 1.0, reach)
        middle = middle.copy()
        middle[list(exempt)], divisor[list(exempt)] = 0.0, 1.0
        self.width = len(middle)
        self._shift, self._scale = middle.astype(np.float32), divisor.astype(np.float32)

    @classmethod
    def from_statistics(
        cls, statistics: StatisticsSpec, exempt: Sequence[int] = (), scaling: Scaling = "mean_std"
    ) -> Normaliser:
        """From a preset's or a dataset's statistics: mean and deviation to 0 and 1, or two bounds to -1 and 1.

        Raises:
            TenantFault: if they lack what the scaling asks for; nothing is made up.
        """
        if scaling == "mean_std":
            return cls(statistics.mean, statistics.std, exempt)
        names = STATISTICS[scaling]
        low, high = (getattr(statistics, name) for name in names)
        if low is None or high is None:
            raise TenantFault(
                refusal(
                    "statistics", f"no {' and '.join(names)}", f"those that scaling {scaling!r} asks for", "add them"
                )
            )
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        return cls((low + high) / 2, (high - low) / 2, exempt)

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


def state_text(normalised: np.ndarray, scaling: Scaling = "mean_std") -> list[str]:
    """Normalised proprioception as text for the prompt: one bin of 0 … 255 a dimension over `STATE_BINS_REACH`.

    Bins have three digits each, so that a prompt's length does not depend on the state.

    Args:
        normalised: float32 [B, S], finite.
        scaling: by which it was normalised.

    Returns:
        B strings such as "012 128 255".

    Raises:
        TenantFault: on NaN or infinity.
    """
    require_finite("proprioception", normalised)
    reach = STATE_BINS_REACH[scaling]
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
