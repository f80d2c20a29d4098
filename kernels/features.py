"""The shared boundary around the frozen base: what goes into one forward and what comes out of it.

Legend: B rows, I images of all rows together, L padded token length, P patches of one image, N action tokens,
D base width. Rows of one batch may show different numbers of cameras; images lie flat, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class PrefixBatch:
    """Canonical input of one base forward.

    Attributes:
        input_ids: int64 [B, L], padded on the right, so that causal attention keeps padding out of every row.
        position_ids: int64 [3, B, L], temporal, height and width positions of Qwen's rotary embedding.
        action_index: int64 [B, N], where in its row each action token stands.
        pixels: float32 [I, P, patch values], in row order and within a row in camera order.
        images_per_row: images of each row, B integers that sum to I.
    """

    input_ids: Tensor
    position_ids: Tensor
    action_index: Tensor
    pixels: Tensor
    images_per_row: tuple[int, ...]

    @property
    def rows(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    @property
    def length(self) -> int:
        """L, a multiple of the base's bucket; batches of equal length may share a forward."""
        return int(self.input_ids.shape[1])

    def __getitem__(self, rows: slice) -> PrefixBatch:
        """The consecutive rows `rows` with their images (step 1)."""
        start, stop, step = rows.indices(self.rows)
        if step != 1:
            raise ValueError(f"rows: got step {step}; possible: 1; take consecutive rows")
        first = sum(self.images_per_row[:start])
        counts = self.images_per_row[start:stop]
        return PrefixBatch(
            self.input_ids[start:stop],
            self.position_ids[:, start:stop],
            self.action_index[start:stop],
            self.pixels[first : first + sum(counts)],
            counts,
        )


@dataclass(frozen=True, eq=False)
class VLAFeature:
    """What the base says about each row; the action modules read nothing else of it.

    Attributes:
        action_tokens: float32 [B, N, D], hidden states at the action tokens, last layer after the final norm.
    """

    action_tokens: Tensor

    @property
    def rows(self) -> int:
        """B."""
        return int(self.action_tokens.shape[0])

    def __getitem__(self, rows: slice | Tensor) -> VLAFeature:
        """Some of the rows."""
        return VLAFeature(self.action_tokens[rows])

    def finite_rows(self) -> Tensor:
        """bool [B], rows without NaN or infinity."""
        return torch.isfinite(self.action_tokens).flatten(1).all(dim=1)
