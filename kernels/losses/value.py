"""The critic: its loss, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.losses.masks import masked_sum


def value_loss(
    value: Tensor,
    returns: Tensor,
    row_valid: Tensor,
    rows: float,
    *,
    old_value: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """Half the squared error, summed over valid rows / `rows`.

    With `clip` as in OpenAI's PPO2 and cleanrl: the greater of the errors of V and of V held within ± clip of what it
    was, so that a step gains nothing by moving it farther.

    Args:
        value: float32 [B], with gradient.
        returns: float32 [B].
        row_valid: bool [B].
        rows: valid ones of the whole optimizer step.
        old_value: float32 [B], when the data was collected; read with `clip` only.
        clip: None: off.
    """
    zero = torch.zeros_like(value)
    value, target = torch.where(row_valid, value, zero), torch.where(row_valid, returns, zero)
    error = (value - target).square()
    if clip is not None and old_value is not None:
        old = torch.where(row_valid, old_value, zero)
        held = old + (value - old).clamp(-clip, clip)
        error = torch.maximum(error, (held - target).square())
    return masked_sum(0.5 * error, row_valid) / max(rows, 1.0)


def explained_variance(value: Tensor, returns: Tensor, row_valid: Tensor) -> float:
    """1 − Var(returns − value) / Var(returns) over valid rows: 1 perfect, 0 no better than a constant, below worse.

    Args:
        value: float32 [n].
        returns: float32 [n].
        row_valid: bool [n].

    Returns:
        0 where the returns do not vary (one row, none, or all equal).
    """
    target = returns[row_valid].double()
    if len(target) == 0 or target.max() == target.min():
        return 0.0
    left = target - value[row_valid].double()
    return float(1 - left.var(correction=0) / target.var(correction=0))
