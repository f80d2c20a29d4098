"""Camera pictures to the patches SigLIP's vision tower reads (PaliGemma), vectorised over a whole batch.

Equal to transformers' `SiglipImageProcessorPil` to the bit: rescaling and normalising an 8-bit value is one of
256 × 3 results, which the library's own processor fills into a table once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from configs.errors import SpecError, refusal
from kernels.pictures import Pictures


class SiglipPictures(Pictures):
    """Patchifier of one base: SigLIP's pictures have one size, since its positions are a table.

    Args:
        processor: the checkpoint's own image processor.
        patch: side of a patch in pixels.
        height: canonical picture height in pixels.
        width: canonical picture width in pixels.

    Raises:
        SpecError: if the processor would change pictures of that size, or patches do not fill it.
    """

    def __init__(self, processor: SiglipImageProcessorPil, patch: int, height: int, width: int) -> None:
        super().__init__(height, width)
        kept = (processor.size["height"], processor.size["width"])
        if kept != (height, width) or height % patch or width % patch:
            possible = f"{kept}, the checkpoint's, in patches of {patch}"
            raise SpecError(
                refusal("image_height, image_width", (height, width), possible, "change the base model's preset")
            )
        self.patch = patch
        self.grid = (height // patch, width // patch)
        self.tokens = self.grid[0] * self.grid[1]
        self._table = _value_table(processor)  # float32 [3, 256]

    def patches(self, images: np.ndarray) -> Tensor:
        """Normalised patches, row by row.

        Args:
            images: uint8 [I, height, width, 3].

        Returns:
            float32 [I, P, 3 × patch × patch].
        """
        rows, columns = self.grid
        blocks = images.reshape(len(images), rows, self.patch, columns, self.patch, 3)
        blocks = np.ascontiguousarray(blocks.transpose(0, 1, 3, 5, 2, 4))  # [I, rows, columns, 3, patch, patch]
        values = np.empty(blocks.shape, np.float32)
        for channel in range(3):
            values[:, :, :, channel] = self._table[channel].take(blocks[:, :, :, channel])
        return torch.from_numpy(values.reshape(len(images), self.tokens, -1))

    def planes(self, patches: Tensor) -> Tensor:
        """The pictures that `patches` took apart, [I, 3, height, width], as the library's vision tower takes them."""
        rows, columns = self.grid
        blocks = patches.reshape(-1, rows, columns, 3, self.patch, self.patch)
        return blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, self.height, self.width)


def _value_table(processor: SiglipImageProcessorPil) -> np.ndarray:
    """float32 [3, 256]: what each 8-bit value of each channel becomes."""
    picture = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    out = processor.preprocess([picture], do_resize=False, return_tensors="np")["pixel_values"]
    return np.asarray(out, np.float32).reshape(3, 256)
