"""The grounding objective on pictures whose one bright square is the thing to find."""

from __future__ import annotations

import numpy as np

from configs import presets
from kernels.backbones import Qwen3VlBackbone
from kernels.pretraining import GroundingTrainer, Scenes, frozen_features, position_errors


def squares(count: int, seed: int) -> Scenes:
    """A white 16-pixel square at x, y on grey; positions in units of 64 pixels."""
    random = np.random.default_rng(seed)
    corner = random.integers(0, 48, (count, 2))
    images = np.full((count, 64, 64, 3), 60, np.uint8)
    for image, (x, y) in zip(images, corner, strict=True):
        image[y : y + 16, x : x + 16] = 255
    positions = np.concatenate([(corner + 8) / 64, np.zeros((count, 1))], axis=1).astype(np.float32)
    return Scenes({"top": images}, "find the square", positions, ("square",))


def train(steps: int) -> tuple[GroundingTrainer, list[float]]:
    base = Qwen3VlBackbone.random(presets.base_model("tiny-qwen3-vl").model_copy(update={"hidden_width": 64}), seed=0)
    trainer = GroundingTrainer(
        base, {"squares": squares(64, 0)}, seed=0, steps=steps, batch_size=16, learning_rate=2e-3
    )
    losses = [trainer.step() for _ in range(steps)]
    trainer.freeze()
    return trainer, losses


def test_it_learns_repeats_itself_and_leaves_the_base_frozen() -> None:
    trainer, losses = train(30)
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    assert set(trainer.errors("squares", squares(20, 1))) == {"square"}
    assert not any(p.requires_grad for p in trainer.backbone.model.parameters())
    assert frozen_features(trainer.backbone, squares(5, 2)).shape == (5, 4 * 64)
    again, same = train(4)
    other, repeated = train(4)
    assert same == repeated
    for one, two in zip(again.backbone.model.parameters(), other.backbone.model.parameters(), strict=True):
        assert np.array_equal(one.numpy(), two.numpy())


def test_position_errors_by_hand() -> None:
    """3-4-5: one scene is off by 5, the other by 0; the second thing by 1 each."""
    true = np.zeros((2, 6), np.float32)
    read = np.array([[3, 4, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]], np.float32)
    assert position_errors(read, true, ("cube", "goal")) == {"cube": 2.5, "goal": 1.0}
