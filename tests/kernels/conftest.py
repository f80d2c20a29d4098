"""One random base for all kernel tests: weights mean nothing here, bits do."""

from __future__ import annotations

import numpy as np
import pytest

from configs import presets
from kernels.backbones import Backbone, Qwen3VlBackbone


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Qwen3VlBackbone.random(presets.base_model("tiny-qwen3-vl"), seed=0)


def pictures(rows: int, seed: int, size: int = 64) -> np.ndarray:
    """uint8 [rows, size, size, 3] of noise: no two are alike."""
    return np.random.default_rng(seed).integers(0, 256, (rows, size, size, 3), dtype=np.uint8)


def observation(rows: int, seed: int, cameras: tuple[str, ...] = ("base",), text: str = "push the cube") -> dict:
    """An observation batch; every camera of every row shows another picture."""
    return {
        "images": {name: pictures(rows, 100 * seed + i) for i, name in enumerate(cameras)},
        "proprioception": np.zeros((rows, 2), np.float32),
        "instructions": [text] * rows,
    }
