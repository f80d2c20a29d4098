"""What holds a policy back: its distance from another one.

The entropy bonus needs no function of its own: modules give their entropy, `kernels.losses.elements` sums it.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(π ‖ π_ref) of each element from one sample of π.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with r = π_ref(a) / π(a):
    k1 = −log r, unbiased, of either sign; k2 = ½ (log r)², biased, low variance; k3 = (r − 1) − log r, unbiased, ≥ 0,
    the one of GRPO (Shao et al. 2024, equation 4). As a loss k1 is of no use: its gradient is that of log π(a), whose
    mean is 0 whatever the distance.

    Args:
        log_ratio: log π(a) − log π_ref(a), with gradient, float32 [B, H] (an action's) or [B] (a chunk's); 0 where
            masked (the estimate then is 0).
        estimator: which of the three.

    Returns:
        float32, of log_ratio's shape.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return ((-log_ratio).exp() - 1) + log_ratio
