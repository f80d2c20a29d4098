"""Makes a small base with random weights and saves it as a checkpoint like any other.

    python -m services.tiny_base tiny-paligemma [--folder FOLDER] [--seed SEED]

For families whose small base is not pretrained (`services.pretraining` makes the one that is).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from configs import presets
from configs.home import PROJECT_ROOT
from services import checkpoint_folder

REPORT = "tiny_base.json"


def write(name: str, folder: Path, seed: int) -> None:
    """Save the random base of a preset; the same seed gives the same weights.

    Args:
        name: preset that gives family, widths and picture size.
        folder: becomes the checkpoint; must not exist or be an earlier one of ours, which is then replaced.
        seed: of the weights.

    Raises:
        Conflict: if `folder` holds something else.
        SpecError: if there is no such preset, or it cannot be a small base.
    """
    from kernels.backbones import FAMILIES  # torch, which a command's help does not need

    spec = presets.base_model(name)
    checkpoint_folder.check(folder, REPORT, "random base")
    parts = FAMILIES[spec.family].random_checkpoint(spec, seed)
    checkpoint_folder.save(folder, parts, REPORT, {"base_model": name, "seed": seed})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="services.tiny_base", description="Save a small base with random weights.")
    parser.add_argument("name", help="preset of the base model")
    parser.add_argument("--folder", type=Path, help="where to; by default the preset's source")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = given.folder or PROJECT_ROOT / presets.base_model(given.name).source
    write(given.name, folder, given.seed)


if __name__ == "__main__":
    main()
