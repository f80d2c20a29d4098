"""One random base of each family for all kernel tests: weights mean nothing here, bits do."""

from __future__ import annotations

import numpy as np
import pytest

from configs import presets
from kernels.backbones import FAMILIES, Backbone, Qwen3VlBackbone

TINY = {"paligemma": "tiny-paligemma", "qwen3-vl": "tiny-qwen3-vl"}
"""The small preset of each family."""


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Qwen3VlBackbone.random(presets.base_model("tiny-qwen3-vl"), seed=0)


@pytest.fixture(scope="session", params=sorted(TINY))
def base(request: pytest.FixtureRequest) -> Backbone:
    """The small base of each family in turn."""
    return FAMILIES[request.param].random(presets.base_model(TINY[request.param]), seed=0)


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
