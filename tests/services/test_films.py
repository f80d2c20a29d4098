"""Films and recordings of an evaluation: which episodes, which pictures, and that nothing else is changed by them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import presets
from configs.environment import CameraSpec
from configs.errors import Conflict, SpecError
from services.environments.adapter import make_adapter
from services.environments.batch import EnvironmentBatch
from services.films import Films, Reel, film, side_by_side, write_film
from services.recording import Recorder, check_recordable, recording, write_dataset
from services.rollout import Episodes, Observation, Prediction, Watcher, run_episodes
from storage.demonstrations import LeRobotDataset
from storage.episode_spool import EpisodeSpool
from storage.video import VideoReader
from tests.services.environment_specs import preset
from tests.services.in_process import InProcess

REACH = presets.environment("reach")
BOUNDS = (np.full(2, -1, np.float32), np.full(2, 1, np.float32))


def session(num_envs: int) -> InProcess:
    return InProcess(EnvironmentBatch(preset("reach"), make_adapter(preset("reach"), num_envs), num_envs, images=True))


def walker(seen: list[np.ndarray]) -> Any:
    """Chunks of three actions drawn anew at each decision, so that who is asked together shows in every action."""
    random = np.random.default_rng(3)

    async def answer(observation: Observation) -> Prediction:
        seen.append(observation["images"]["top"])
        rows = len(observation["instructions"])
        action = random.uniform(-1.5, 1.5, (rows, 3, 2)).astype(np.float32)
        return Prediction(action, action, None, None)

    return answer


def run(seen: list[np.ndarray], *watchers: Watcher, num_envs: int = 3, seeds: Sequence[int] = range(8)) -> Episodes:
    return asyncio.run(
        run_episodes(
            walker(seen),
            session(num_envs),
            num_envs=num_envs,
            seeds=seeds,
            progress=lambda _a, _b: None,
            watchers=watchers,
        )
    )


def scripted(outcomes: Sequence[tuple[int, bool, int]], num_envs: int, **how: Any) -> Films:
    """Films of one-camera episodes given as (number, succeeded, chunks), environment e having the numbers e, e + E, …

    A picture's pixels are all 10 × number + chunk.
    """
    films = Films(num_envs, [CameraSpec(name="top", height=2, width=2)], **how)
    waiting = {e: [o for o in outcomes if o[0] % num_envs == e] for e in range(num_envs)}
    at = dict.fromkeys(range(num_envs), 0)

    def picture(number: int, chunk: int) -> np.ndarray:
        return np.full((2, 2, 3), 10 * number + chunk, np.uint8)

    async def main() -> None:
        while any(waiting.values()):
            now = {e: queue[0] for e, queue in waiting.items() if queue}
            shown = [picture(now[e][0], at[e]) if e in now else picture(0, 0) for e in range(num_envs)]
            ended = [e for e in now if at[e] + 1 == now[e][2]]
            step = {
                "valid": np.ones((num_envs, 2), bool),
                "success": np.array([e in ended and now[e][1] for e in range(num_envs)]),
                "final_rows": np.array(ended, np.int64),
                "final_observation": {
                    "images": {"top": np.array([picture(now[e][0], at[e] + 1) for e in ended]).reshape(-1, 2, 2, 3)}
                },
            }
            observation = {"images": {"top": np.array(shown)}, "instructions": ["go"] * num_envs}
            await films.keep(observation, np.zeros((num_envs, 2, 1)), step, {e: o[0] for e, o in now.items()})
            for e in now:
                at[e] += 1
            for e in ended:
                waiting[e].pop(0)
                at[e] = 0

    asyncio.run(main())
    return films


def pixels(reel: Reel) -> list[int]:
    return [int(pictures["top"][0, 0, 0]) for _, pictures in reel.frames]


def test_the_first_success_and_failure_by_number_are_filmed_whoever_ends_first() -> None:
    """Environment 0: episode 0 fails after 4 chunks, then 2 succeeds; environment 1: 1 and 3 succeed at once."""
    films = scripted([(0, False, 4), (2, True, 1), (1, True, 2), (3, False, 1), (5, False, 1)], 2)
    assert {name: reel.number for name, reel in films.reels.items()} == {"success": 1, "failure": 0}
    # Each decision's picture and the true end, not the next episode's first; two actions a chunk lie between.
    assert pixels(films.reels["success"]) == [10, 11, 12]
    assert [actions for actions, _ in films.reels["failure"].frames] == [0, 2, 4, 6, 8]
    assert pixels(films.reels["failure"]) == [0, 1, 2, 3, 4]


def test_without_a_failure_there_is_no_film_of_one() -> None:
    films = scripted([(0, True, 1), (1, True, 1)], 2)
    assert list(films.reels) == ["success"]


def test_pictures_of_a_long_episode_are_thinned_to_the_bound() -> None:
    """12 bytes a picture, three episodes' worth: 6 frames each less the end's. 9 chunks keep every second."""
    films = scripted([(0, False, 9)], 1, most_bytes=3 * 12 * 6)
    assert pixels(films.reels["failure"]) == [0, 2, 4, 6, 8, 9]
    assert len(films.reels["failure"].frames) <= 6


def test_a_film_is_an_mp4_of_all_cameras_with_its_text_and_its_end_stands(tmp_path: Path) -> None:
    """4 × 6 and 2 × 2 pixels enlarged 64 times make 512 × 256, and 20 lines of text below."""
    reel = Reel(3, "move")
    for shade in (40, 200):
        reel.end({"left": np.full((4, 6, 3), shade, np.uint8), "right": np.full((2, 2, 3), 90, np.uint8)})
    path = tmp_path / "x.mp4"
    path.write_bytes(film(reel))
    video = VideoReader(path)
    assert (len(video), video.size, video.fps) == (2 + 10, (256 + 20, 512), 10)
    first, last = video.read(np.array([0, 11]))
    for frame, shade in ((first, 40), (last, 200)):
        assert abs(frame[:256, :384].mean() - shade) < 4
        assert abs(frame[:100, 400:500].mean() - 90) < 4
        assert frame[160:240, 400:500].mean() < 10, "nothing below the lower camera"
    assert first[256:].max() > 200, "white text"
    assert first[256:].mean() < 60
    video.close()


def test_odd_sizes_are_padded(tmp_path: Path) -> None:
    frames = side_by_side([np.full((3, 5, 3, 3), 100, np.uint8), np.full((3, 3, 2, 3), 200, np.uint8)])
    assert frames.shape == (3, 5, 5, 3)
    write_film(tmp_path / "f.mp4", frames, 5)
    video = VideoReader(tmp_path / "f.mp4")
    assert (len(video), video.size) == (3, (6, 6))
    video.close()


def test_watching_changes_neither_what_is_seen_nor_what_comes_out(tmp_path: Path) -> None:
    """Eight episodes over three environments by chunks of three: the same pictures at each decision, the same ends."""
    plain: list[np.ndarray] = []
    watched: list[np.ndarray] = []
    before = run(plain)
    after = run(watched, Films(3, REACH.cameras), Recorder(EpisodeSpool(tmp_path), BOUNDS, range(8)))
    assert before == after
    assert len(plain) == len(watched)
    assert all(np.array_equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_recorded_evaluation_is_a_dataset_of_every_step(tmp_path: Path) -> None:
    """Its rows replayed an action at a time in another environment: the same pictures, states, rewards to the bit."""
    seeds = range(40, 47)
    with recording(tmp_path, "kept") as spool:
        found = run([], Recorder(spool, BOUNDS, seeds), seeds=seeds)
        told = {"source": "test", "policy_version": 7}
        count = write_dataset(tmp_path / "kept", map(spool.get, range(len(seeds))), REACH, told)
    assert list((tmp_path / ".writing").iterdir()) == []
    dataset = LeRobotDataset(tmp_path / "kept")
    assert count == dataset.num_episodes == 7
    assert (dataset.fps, dataset.provenance["policy_version"]) == (20, 7)
    assert dataset.reward is not None
    again = session(1)
    for number, (start, stop) in enumerate(dataset.episode_ranges.tolist()):
        facts = dataset.provenance["episodes"][number]
        assert facts["seed"] == seeds[number]
        assert facts["success"] == found.success[number]
        assert facts["return"] == pytest.approx(found.total_reward[number], abs=1e-6)
        assert stop - start == found.length[number]
        rows = dataset.sample(np.arange(start, stop), 1)
        assert np.abs(rows["action"]).max() <= 1.0, "as the environment executed them"
        observation = asyncio.run(again.reset([seeds[number]]))
        for t in range(stop - start):
            np.testing.assert_array_equal(rows["images"]["top"][t], observation["images"]["top"][0])
            np.testing.assert_array_equal(rows["proprioception"][t], observation["proprioception"][0])
            step = asyncio.run(again.batch_step(rows["action"][t][None], [None]))
            assert dataset.reward[start + t] == step["reward"][0, 0]
            observation = step["observation"]
        assert bool((step["terminated"] | step["truncated"])[0, 0])


def test_a_recording_that_fails_leaves_nothing_and_one_at_a_time_may_write(tmp_path: Path) -> None:
    left = tmp_path / ".writing" / "kept.dead"
    left.mkdir(parents=True)
    try:
        with recording(tmp_path, "kept") as spool:
            assert not left.exists(), "of a writer that was killed"
            spool.put(0, {"x": np.zeros(2)}, {})
            with pytest.raises(Conflict, match="dataset: got 'kept'; possible: a name that nobody is writing"):
                recording(tmp_path, "kept").__enter__()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not (tmp_path / "kept").exists()
    assert list((tmp_path / ".writing").iterdir()) == []
    (tmp_path / "kept").mkdir()
    with pytest.raises(SpecError, match="record: got 'kept'; possible: the name of a dataset that is not there yet"):
        recording(tmp_path, "kept").__enter__()


def test_episodes_too_large_to_be_recorded_side_by_side_are_refused() -> None:
    """1,000 steps of 1024² RGB are 3,000 MiB an episode."""
    large = REACH.model_copy(
        update={"max_episode_steps": 100, "cameras": (CameraSpec(name="top", height=1024, width=1024),)}
    )
    check_recordable(large, 3)
    with pytest.raises(SpecError, match="record, num_envs: got 4; possible: up to 3 environments of 300 MiB an"):
        check_recordable(large, 4)
