"""Imitation of demonstrated action chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.losses.masks import masked_sum


def sft_l1(
    predicted: Tensor,
    target: Tensor,
    is_pad: Tensor,
    valid_count: float,
    dimension_mask: Tensor | None = None,
) -> Tensor:
    """L1 distance of normalised action chunks.

    Args:
        predicted: float32 [B, H, A].
        target: float32 [B, H, A], normalised.
        is_pad: bool [B, H], True past the episode's end; such actions carry no loss.
        valid_count: scalars (actions × dimensions) that count in the whole optimizer step, see `sft_valid_count`.
        dimension_mask: bool [A], False at padded action dimensions; None: all count.

    Returns:
        Scalar: sum over valid elements / valid_count.
    """
    mask = ~is_pad[..., None].expand_as(target)
    if dimension_mask is not None:
        mask = mask & dimension_mask
    zero = torch.zeros_like(target)
    distance = (torch.where(mask, predicted, zero) - torch.where(mask, target, zero)).abs()
    return masked_sum(distance, mask) / max(valid_count, 1.0)


def sft_valid_count(is_pad: Tensor, action_width: int) -> float:
    """Scalars that carry loss, of a batch with `action_width` real dimensions."""
    return float((~is_pad).sum()) * action_width
