"""Short films of an evaluation: of the first success and the first failure by number of episode.

A film shows what the policy saw when it decided, one frame a chunk, and where the episode ended; so it takes no
rendering of its own. All cameras stand side by side, with the instruction and the step below them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from configs.environment import CameraSpec
from services.rollout import Observation
from storage.video import VideoWriter

FILM_BYTES = 256 << 20
"""Of pictures kept at one time by an evaluation, at most; longer episodes are kept at every second, fourth, … frame."""
FRAMES_A_SECOND = 10
_LAST_SHOWN = 10  # frames for which the end stands still
_LEAST_HEIGHT = 256  # in pixels; smaller pictures are shown at a whole multiple of their size
_LINE = 20  # pixels of the line of text
_FONT = 14

Pictures = Mapping[str, NDArray[np.uint8]]


@dataclass
class Reel:
    """What one episode showed.

    Attributes:
        number: of the episode.
        instruction: what the robot was told.
        frames: (actions executed before it, pictures by camera, uint8 [h, w, 3] each), the last one the episode's end.
    """

    number: int
    instruction: str
    frames: list[tuple[int, dict[str, NDArray[np.uint8]]]] = field(default_factory=list)
    actions: int = 0
    _shown: int = 0
    _every: int = 1

    def add(self, pictures: Pictures, at_most: int) -> None:
        """Keep a frame; where `at_most` are kept already every second one of them goes, and of those that come."""
        if self._shown % self._every == 0 and len(self.frames) >= at_most:
            del self.frames[1::2]
            self._every *= 2
        if self._shown % self._every == 0:
            self.end(pictures)
        self._shown += 1

    def end(self, pictures: Pictures) -> None:
        """Keep a frame, whatever there is."""
        self.frames.append((self.actions, {name: picture.copy() for name, picture in pictures.items()}))


class Films:
    """Keeps the pictures of episodes that may still be the first success or the first failure.

    A `Watcher`. The pictures of at most `num_envs + 2` episodes are in memory.
    """

    every_step = False

    def __init__(self, num_envs: int, cameras: Sequence[CameraSpec], most_bytes: int = FILM_BYTES) -> None:
        frame_bytes = sum(3 * camera.height * camera.width for camera in cameras)
        self._at_most = max(2, most_bytes // ((num_envs + 2) * frame_bytes) - 1)
        self._cameras = [camera.name for camera in cameras]
        self._running: dict[int, Reel] = {}  # {environment: what its episode showed so far}
        self._first: dict[bool, Reel] = {}  # {succeeded: the first such episode so far}

    @property
    def reels(self) -> dict[str, Reel]:
        """Of the first `success` and the first `failure`, where there was one."""
        return {name: self._first[ok] for name, ok in (("success", True), ("failure", False)) if ok in self._first}

    async def keep(
        self, observation: Observation, actions: np.ndarray, step: dict[str, Any], number: Mapping[int, int]
    ) -> None:
        """See `Watcher`."""
        final = {int(e): k for k, e in enumerate(step["final_rows"])}
        for e, episode in number.items():
            if not any(ok not in self._first or episode < self._first[ok].number for ok in (True, False)):
                self._running.pop(e, None)
                continue
            reel = self._running.setdefault(e, Reel(episode, observation["instructions"][e]))
            reel.add({name: observation["images"][name][e] for name in self._cameras}, self._at_most)
            reel.actions += int(step["valid"][e].sum())
            if e in final:
                reel.end({name: step["final_observation"]["images"][name][final[e]] for name in self._cameras})
                del self._running[e]
                succeeded = bool(step["success"][e])
                if succeeded not in self._first or episode < self._first[succeeded].number:
                    self._first[succeeded] = reel


def film(reel: Reel) -> bytes:
    """The mp4 file (H.264) of a reel."""
    frames = [_page(pictures, f"{actions}: {reel.instruction}") for actions, pictures in reel.frames]
    frames += [frames[-1]] * _LAST_SHOWN
    with tempfile.TemporaryDirectory(prefix="joynexus-film-") as folder:
        path = Path(folder) / "film.mp4"
        write_film(path, np.stack(frames), FRAMES_A_SECOND)
        return path.read_bytes()


def write_film(path: Path, frames: NDArray[np.uint8], fps: int) -> None:
    """Write frames uint8 [T, h, w, 3]; an odd height or width gets a black line more, since H.264 has none."""
    _, height, width, _ = frames.shape
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    with VideoWriter(path, fps=fps, height=padded.shape[1], width=padded.shape[2]) as writer:
        writer.add(padded)


def side_by_side(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Pictures uint8 [..., h, w, 3] in one row, black below the lower ones."""
    height = max(picture.shape[-3] for picture in pictures)
    level = [
        np.pad(picture, [*((0, 0),) * (picture.ndim - 3), (0, height - picture.shape[-3]), (0, 0), (0, 0)])
        for picture in pictures
    ]
    return np.concatenate(level, axis=-2)


def _page(pictures: Pictures, text: str) -> NDArray[np.uint8]:
    """All cameras, enlarged, over a line of text."""
    row = side_by_side(list(pictures.values()))
    times = -(-_LEAST_HEIGHT // row.shape[0])
    row = row.repeat(times, axis=0).repeat(times, axis=1)
    line = Image.new("RGB", (row.shape[1], _LINE))
    ImageDraw.Draw(line).text((4, 2), text, fill="white", font=ImageFont.load_default(_FONT))
    return np.concatenate([row, np.asarray(line)])
