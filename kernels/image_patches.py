"""Camera pictures to the flat patches Qwen3-VL's vision tower reads, vectorised over a whole batch.

Equal to transformers' `Qwen2VLImageProcessorPil` to the bit: rescaling and normalising an 8-bit value is one of
256 × 3 results, which the library's own processor fills into a table once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from configs.errors import SpecError, refusal
from kernels.pictures import Pictures


class ImagePatches(Pictures):
    """Patchifier of one base: fixed picture size, patch size and normalisation.

    Args:
        processor: the checkpoint's own image processor.
        height: canonical picture height in pixels; other sizes are resized (bicubic) to it.
        width: canonical picture width in pixels.

    Raises:
        SpecError: if the canonical size is not one the processor leaves as it is.
    """

    def __init__(self, processor: Qwen2VLImageProcessorPil, height: int, width: int) -> None:
        self.patch = int(processor.patch_size)
        self.merge = int(processor.merge_size)
        self.temporal = int(processor.temporal_patch_size)
        factor = self.patch * self.merge
        kept = smart_resize(
            height, width, factor, min_pixels=processor.size["shortest_edge"], max_pixels=processor.size["longest_edge"]
        )
        if kept != (height, width):
            raise SpecError(
                refusal(
                    "image_height, image_width",
                    (height, width),
                    f"multiples of {factor} within the processor's pixel bounds, for instance {kept}",
                    "change the base model's preset",
                )
            )
        super().__init__(height, width)
        self.grid = (height // self.patch, width // self.patch)
        self.tokens = (self.grid[0] // self.merge) * (self.grid[1] // self.merge)
        self._table = _value_table(processor)  # float32 [3, 256]

    def patches(self, images: np.ndarray) -> Tensor:
        """Normalised patches in the vision tower's order (merge block by merge block).

        Args:
            images: uint8 [I, height, width, 3].

        Returns:
            float32 [I, P, 3 × temporal × patch × patch].
        """
        count, m, p = len(images), self.merge, self.patch
        rows, columns = self.grid
        blocks = images.reshape(count, rows // m, m, p, columns // m, m, p, 3)
        blocks = np.ascontiguousarray(blocks.transpose(0, 1, 4, 2, 5, 7, 3, 6))  # [I, gh, gw, mh, mw, 3, p, p]
        blocks = blocks.reshape(count, rows * columns, 3, p * p)
        # A still picture fills every frame of a temporal patch.
        values = np.empty((count, rows * columns, 3, self.temporal, p * p), np.float32)
        for channel in range(3):
            values[:, :, channel] = self._table[channel].take(blocks[:, :, channel])[:, :, None]
        return torch.from_numpy(values.reshape(count, rows * columns, -1))


def _value_table(processor: Qwen2VLImageProcessorPil) -> np.ndarray:
    """float32 [3, 256]: what each 8-bit value of each channel becomes."""
    p, m = processor.patch_size, processor.merge_size
    side = p * m
    per_image = side * side
    count = -(-256 // per_image)
    flat = np.arange(count * per_image).astype(np.uint8)
    table = np.empty((3, 256), np.float32)
    for values in flat.reshape(count, side, side):
        picture = np.repeat(values[:, :, None], 3, axis=2)
        out = processor.preprocess([picture], do_resize=False, return_tensors="np")["pixel_values"]
        out = out.reshape(m, m, 3, processor.temporal_patch_size, p, p)[:, :, :, 0]
        source = values.reshape(m, p, m, p).transpose(0, 2, 1, 3)
        for channel in range(3):
            table[channel, source] = out[:, :, channel]
    return table
