"""Samples of one or several datasets in the order of training, decoded ahead by other threads.

Both decoders (pictures and video) let go of Python's lock while they work, so threads use the other cores. What is held
at one time is bounded, whatever the size of the datasets: the batches ahead, and what each dataset keeps
(`cache_bytes`). A shuffle of all frames would read a whole row group for every frame where a dataset is larger than
that; its order is shuffled by windows that fit instead (`sample_order.ShuffledOrder`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from configs.errors import SpecError, refusal
from storage.lerobot_dataset import LeRobotDataset
from storage.sample_order import Mixture, ShuffledOrder

_PIECE = 32
"""Frames of one camera that a thread decodes at a time."""


@dataclass(frozen=True)
class Source:
    """A dataset of the mixture.

    Attributes:
        dataset: opened; its `cache_bytes` bounds what is kept of its pictures.
        weight: its share, against the others'.
    """

    dataset: LeRobotDataset
    weight: float = 1.0


def order_of(dataset: LeRobotDataset, seed: int) -> ShuffledOrder:
    """Shuffled by windows whose encoded pictures fit into what the dataset keeps; by all its frames if they all do."""
    starts = [start for _, _, start in dataset.row_groups]
    stretches = tuple(zip(starts, [*starts[1:], len(dataset)], strict=True))
    window = len(dataset) * dataset.cache_bytes // max(dataset.encoded_bytes, 1)
    return ShuffledOrder(stretches, max(int(window), 1), seed)


class _Batch:
    """One batch that is being decoded."""

    def __init__(
        self, vectors: dict[str, Any], images: dict[str, NDArray[np.uint8]], pieces: Sequence[Future[None]]
    ) -> None:
        self._vectors = vectors
        self._images = images
        self._pieces = pieces

    def result(self) -> dict[str, Any]:
        for piece in self._pieces:
            piece.result()
        return {"images": self._images, **self._vectors}

    def cancel(self) -> None:
        for piece in self._pieces:
            piece.cancel()


class DemonstrationStream:
    """Batches by number, those that come next decoded meanwhile. One caller at a time."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        samples: int,
        horizon: int,
        seed: int,
        gamma: float | None = None,
        workers: int = 2,
        ahead: int = 1,
    ) -> None:
        """Nothing is decoded before the first batch is asked for.

        Args:
            sources: datasets of one interface: the same cameras, sizes and widths.
            samples: n, of a batch.
            horizon: H, actions a chunk.
            seed: of the order.
            gamma: with it batches have `return`, and every dataset needs rewards.
            workers: threads that decode.
            ahead: batches that are decoded before they are asked for, at most.

        Raises:
            SpecError: datasets that do not fit together, or numbers out of range.
            DataFault: rewards are asked for and not there.
        """
        for field, value, least in (("samples", samples, 1), ("workers", workers, 1), ("ahead", ahead, 0)):
            if value < least:
                raise SpecError(refusal(field, value, f"{least} or more", "correct it"))
        self._datasets = [source.dataset for source in sources]
        _refuse_others(self._datasets)
        self._mixture = Mixture(tuple(source.weight for source in sources), seed)
        self._mixture.shares()
        self._orders = [order_of(dataset, seed) for dataset in self._datasets]
        self._returns = None if gamma is None else [dataset.returns(gamma) for dataset in self._datasets]
        self._samples = samples
        self._horizon = horizon
        self._ahead = ahead
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._begun: OrderedDict[int, _Batch] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def batch(self, number: int) -> dict[str, Any]:
        """Batch `number`, from 0: samples n × number to n × (number + 1) − 1 of the order.

        Returns:
            images {camera: uint8 [n, h, w, 3]}, proprioception float32 [n, S], action float32 [n, H, A] (both raw),
            action_is_pad bool [n, H], instructions (n texts), and with gamma return float32 [n]. They are the caller's.

        Raises:
            DataFault: pictures that cannot be read.
        """
        for begun in [n for n in self._begun if not number <= n <= number + self._ahead]:
            self._begun.pop(begun).cancel()
        for wanted in range(number, number + self._ahead + 1):
            if wanted not in self._begun:
                self._begun[wanted] = self._begin(wanted)
        return self._begun.pop(number).result()

    def close(self) -> None:
        """End the threads, and close the datasets' video files."""
        self._begun.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for dataset in self._datasets:
            dataset.close()

    def _begin(self, number: int) -> _Batch:
        sources, positions = self._mixture.at(number * self._samples, self._samples)
        vectors: dict[str, Any] = {}
        images = {
            name: np.empty((self._samples, *size, 3), np.uint8) for name, size in self._datasets[0].cameras.items()
        }
        instructions = [""] * self._samples
        pieces: list[Future[None]] = []
        for source, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
            chosen = np.flatnonzero(sources == source)
            if not len(chosen):
                continue
            frames = order.at(int(positions[chosen[0]]), len(chosen))  # a dataset's positions follow one another
            found = dataset.vectors(frames, self._horizon)
            for row, text in zip(chosen.tolist(), found["instructions"], strict=True):
                instructions[row] = text
            if self._returns is not None:
                found["return"] = self._returns[source][frames]
            for key in ("proprioception", "action", "action_is_pad", *(["return"] if self._returns else [])):
                kept = vectors.setdefault(key, np.empty((self._samples, *found[key].shape[1:]), found[key].dtype))
                kept[chosen] = found[key]
            # In the order of their frames, so that seldom two threads read the same row group.
            by_frame = np.argsort(frames, kind="stable")
            for camera, into in images.items():
                for at in range(0, len(frames), _PIECE):
                    rows = by_frame[at : at + _PIECE]
                    pieces.append(self._threads.submit(_fill, into, chosen[rows], dataset, camera, frames[rows]))
        return _Batch({**vectors, "instructions": instructions}, images, pieces)


def _fill(
    into: NDArray[np.uint8], rows: NDArray[np.int64], dataset: LeRobotDataset, camera: str, frames: NDArray[np.int64]
) -> None:
    into[rows] = dataset.pictures(camera, frames)


def _refuse_others(datasets: Sequence[LeRobotDataset]) -> None:
    """Datasets that are mixed show and do the same."""
    if not datasets:
        raise SpecError(refusal("datasets", 0, "1 or more", "name one"))
    first = datasets[0]
    wanted = (first.cameras, first.state_width, first.action_width)
    for dataset in datasets[1:]:
        found = (dataset.cameras, dataset.state_width, dataset.action_width)
        if found != wanted:
            raise SpecError(
                refusal(
                    f"cameras, state and action of dataset {dataset.root.name}",
                    found,
                    f"{wanted}, those of {first.root.name}",
                    "bind its columns to them (data.columns) or leave it out",
                )
            )
