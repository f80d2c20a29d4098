"""The one way in which pictures are resized: bilinear with antialiasing, each side by itself (no padding, no cropping).

Pillow's `Resampling.BILINEAR`: in reducing, the triangle filter is as wide as the reduction, so that no pixel is left
out. Training and serving must see the same pixels, so nothing else in this project resizes recorded or rendered frames.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

INTERPOLATION = Image.Resampling.BILINEAR


def resized(frames: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Frames uint8 [T, h, w, 3] as [T, H, W, 3] with `size` (H, W); the very same where they have it."""
    height, width = size
    if frames.shape[1:3] == (height, width):
        return frames
    found = np.empty((len(frames), height, width, 3), np.uint8)
    for i, frame in enumerate(frames):
        found[i] = np.asarray(Image.fromarray(frame).resize((width, height), INTERPOLATION))
    return found
