"""The peer of `dataset_read`: LeRobot's own dataset in torch's DataLoader, under an interpreter that has `lerobot`.

`PYTHON benchmarks/lerobot_loader.py ROOT HORIZON BATCH WORKERS`

Stands alone, since nothing of ours is installed there. A line on standard input with a number of batches reads so many
and answers with a line of JSON: {"seconds", "samples"}; the end of the input ends it. The first line that it writes
says that it is ready and which versions it has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any


def batches(root: str, horizon: int, batch: int, workers: int) -> Iterator[dict[str, Any]]:
    """Shuffled batches without end; worker processes live on from one epoch to the next."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    torch.set_num_threads(1)
    fps = json.loads(Path(root, "meta", "info.json").read_text())["fps"]
    chunk = {"action": [i / fps for i in range(horizon)]}
    dataset = LeRobotDataset("benchmark/local", root=root, delta_timestamps=chunk)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )
    while True:
        yield from loader


def main() -> None:
    """Answer until the input ends."""
    root, horizon, batch, workers = sys.argv[1], *(int(value) for value in sys.argv[2:5])
    found = batches(root, horizon, batch, workers)
    next(found)  # worker processes are up
    versions = {name: metadata.version(name) for name in ("lerobot", "torch", "torchcodec", "datasets")}
    print(json.dumps({"ready": versions}), flush=True)
    for line in sys.stdin:
        count, begun = int(line), time.perf_counter()
        samples = 0
        for _ in range(count):
            sample = next(found)
            assert tuple(sample["action"].shape[1:2]) == (horizon,)
            samples += len(sample["index"])
        print(json.dumps({"seconds": time.perf_counter() - begun, "samples": samples}), flush=True)


if __name__ == "__main__":
    main()
