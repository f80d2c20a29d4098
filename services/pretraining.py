"""Makes the small base: renders scenes, trains it to ground them, saves it as a checkpoint like any other.

Blocking; a flow calls `pretrain` in a thread. torch is imported inside, since flow processes import this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import presets, seeds
from services import checkpoint_folder
from services.environment_service import EnvironmentService
from services.environments import renderer
from services.grounding_scenes import FRAMES_AN_EPISODE, THINGS, render_scenes

if TYPE_CHECKING:
    from kernels.pretraining import Scenes

logger = logging.getLogger(__name__)

REPORT = "pretraining.json"
ENVIRONMENTS = ("pushcube", "pickcube", "reach")
NUM_ENVS = 4
HELD_OUT = 0.1
SHARES = {"maniskill": 1, "gymnasium": 3}
"""Scenes of an environment of each kind, in relation: what costs nothing to draw gives more."""
FIRST_RENDER_TIMEOUT_S = 600.0
"""A software renderer takes 14 s for its first picture alone, and minutes on a crowded machine."""

Progress = Callable[[str, float], None]
"""Told what is being done and which share of it is done (0 … 1)."""


def pretrain(
    out_folder: Path,
    seed: int,
    steps: int,
    scenes: int,
    progress: Progress = lambda _what, _share: None,
    *,
    base_model: str = "tiny-qwen3-vl",
    environments: tuple[str, ...] = ENVIRONMENTS,
) -> dict[str, Any]:
    """Pretrain a small base from random weights; the same arguments give the same weights (at equal thread counts).

    Without a renderer, environments that need one are left out, and the report names those that were used.

    Args:
        out_folder: becomes the checkpoint; must not exist or be an earlier one of ours, which is then replaced.
        seed: of weights, heads and sample order.
        steps: optimizer steps.
        scenes: rendered scenes in all; a tenth of each environment's, in episodes of their own, is held out.
        progress: called now and then.
        base_model: preset that gives widths and picture size.
        environments: presets whose scenes are learnt.

    Returns:
        The report, also saved as `pretraining.json`: seed, steps, scenes, loss, and by environment the mean position
        error of each thing on unseen scenes in the environment's unit (metres; table half-widths for Reach-v0).

    Raises:
        Conflict: if `out_folder` holds something else.
    """
    checkpoint_folder.check(out_folder, REPORT, "pretraining")
    used = [name for name in environments if presets.environment(name).kind != "maniskill" or not renderer.check()]
    rendered = asyncio.run(_render(_counts(used, scenes), progress))
    train, held_out = {}, {}
    for name, whole in rendered.items():
        train[name], held_out[name] = _split(whole)
    return train_base(out_folder, train, held_out, seed=seed, steps=steps, progress=progress, base_model=base_model)


def train_base(
    out_folder: Path,
    train: dict[str, Scenes],
    held_out: dict[str, Scenes],
    *,
    seed: int,
    steps: int,
    progress: Progress,
    base_model: str,
) -> dict[str, Any]:
    """The second half of `pretrain`, on scenes that are there already."""
    import torch

    from kernels import tiny_qwen3_vl
    from kernels.backbones import Qwen3VlBackbone
    from kernels.pretraining import GroundingTrainer

    spec = presets.base_model(base_model)
    tokenizer = tiny_qwen3_vl.tokenizer()
    model = tiny_qwen3_vl.random_model(spec, tokenizer, seed)
    # Padding is seen by nothing, so training may leave it out.
    unpadded = spec.model_copy(update={"length_bucket": 1})
    backbone = Qwen3VlBackbone(unpadded, model.model, tokenizer, tiny_qwen3_vl.image_processor())
    trainer = GroundingTrainer(backbone, train, seed=seed, steps=steps)
    losses = []
    for step in range(steps):
        losses.append(trainer.step())
        if step % 25 == 24 or step == steps - 1:
            recent = losses[-25:]
            logger.info("pretraining step %d of %d: loss %.4f", step + 1, steps, sum(recent) / len(recent))
            progress("training", (step + 1) / steps)
        if (step + 1) % max(steps // 4, 1) == 0:
            errors = {name: trainer.errors(name, s) for name, s in held_out.items()}
            logger.info("after %d steps, mean position errors on unseen scenes: %s", step + 1, errors)
    trainer.freeze()
    report = {
        "base_model": base_model,
        "seed": seed,
        "steps": steps,
        "torch_threads": torch.get_num_threads(),  # sums of two threads differ from one's in the last bits
        "scenes": {name: len(s) for name, s in train.items()},
        "held_out_scenes": {name: len(s) for name, s in held_out.items()},
        "loss": sum(losses[-50:]) / len(losses[-50:]),
        "held_out_error": {name: trainer.errors(name, s) for name, s in held_out.items()},
    }
    checkpoint_folder.save(out_folder, (model, backbone.tokenizer, backbone.processor), REPORT, report)
    return report


def _counts(names: list[str], scenes: int) -> dict[str, int]:
    """How many of `scenes` each environment gives: by its share, in whole rounds of episodes, at least two."""
    shares = {name: SHARES[presets.environment(name).kind] for name in names}
    round_size = NUM_ENVS * FRAMES_AN_EPISODE
    rounds = {name: -(-scenes * share // (sum(shares.values()) * round_size)) for name, share in shares.items()}
    return {name: max(2, count) * round_size for name, count in rounds.items()}


async def _render(counts: dict[str, int], progress: Progress) -> dict[str, dict[str, Any]]:
    """Scenes of all environments, side by side, each in a host process of its own."""
    service = EnvironmentService(len(counts))
    done = 0

    def advance(frames: int) -> None:
        nonlocal done
        done += frames
        progress("rendering", done / sum(counts.values()))

    async def one(name: str, count: int) -> dict[str, Any]:
        spec = presets.environment(name)
        spec = spec.model_copy(update={"step_timeout_s": max(spec.step_timeout_s, FIRST_RENDER_TIMEOUT_S)})
        first = seeds.PRETRAINING.start
        return await render_scenes(service, spec, count=count, first_seed=first, num_envs=NUM_ENVS, advance=advance)

    try:
        results = await asyncio.gather(*(one(name, count) for name, count in counts.items()))
    finally:
        await service.shutdown()
    return dict(zip(counts, results, strict=True))


def _split(rendered: dict[str, Any]) -> tuple[Scenes, Scenes]:
    """Training and held-out scenes; no episode is in both."""
    from kernels.pretraining import Scenes

    round_size = NUM_ENVS * FRAMES_AN_EPISODE
    rounds = len(rendered["positions"]) // round_size
    kept = (rounds - max(1, round(rounds * HELD_OUT))) * round_size

    def part(rows: slice) -> Scenes:
        images = {name: stack[rows] for name, stack in rendered["images"].items()}
        return Scenes(images, rendered["instruction"], rendered["positions"][rows], THINGS)

    return part(slice(0, kept)), part(slice(kept, None))
