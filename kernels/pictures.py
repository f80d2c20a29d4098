"""What camera pictures are to every family: any size comes in, one canonical size goes on to the vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from PIL import Image
from torch import Tensor

from configs.errors import TenantFault, refusal


class Pictures(ABC):
    """Camera pictures to what a family's vision tower reads.

    Args:
        height: canonical picture height in pixels; other sizes are resized (bicubic) to it.
        width: canonical picture width in pixels.
    """

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width

    def canonical(self, images: np.ndarray, camera: str) -> np.ndarray:
        """uint8 [B, h, w, 3] of any size to uint8 [B, height, width, 3].

        Raises:
            TenantFault: if the array is no batch of 8-bit RGB pictures.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape[1:3]:
            raise TenantFault(
                refusal(f"images.{camera}", f"{images.dtype} {images.shape}", "uint8 [B, h, w, 3]", "send RGB pictures")
            )
        if images.shape[1:3] == (self.height, self.width):
            return images
        resized = [
            np.asarray(Image.fromarray(i).resize((self.width, self.height), Image.Resampling.BICUBIC)) for i in images
        ]
        return np.stack(resized) if resized else np.zeros((0, self.height, self.width, 3), np.uint8)

    @abstractmethod
    def patches(self, images: np.ndarray) -> Tensor:
        """float32 [I, P, patch values] of canonical pictures uint8 [I, height, width, 3]."""
