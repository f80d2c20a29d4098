"""The learning benchmark's figures by hand, and that its workloads are the presets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import learning
from benchmarks.learning import TASKS, Curve, Learner
from configs import presets
from configs.algorithm import RolloutSpec
from configs.home import Home
from services.admission import admit_all
from storage.demonstrations import LeRobotWriter

CURVES = {curve.preset: curve for curves in TASKS.values() for curve in curves.values()}.values()


def test_an_evaluation_stands_at_the_steps_that_its_version_was_learned_from() -> None:
    """Jobs of 10, 10 and 5 steps made versions 4, 4 (nothing to learn) and 6; 2 is what it began with."""
    jobs = [(4, 10), (4, 10), (6, 5)]
    assert learning.at_steps(jobs, [(2, 0.1), (4, 0.5), (6, 0.7)]) == [(0, 0.1), (20, 0.5), (25, 0.7)]
    assert learning.at_steps(jobs, [(6, 0.6), (2, 0.1), (6, 0.7)]) == [(0, 0.1), (25, 0.7)]


def test_each_curve_has_a_task_of_its_own() -> None:
    assert list(TASKS) == ["reach", "reach-ppo", "reach-grpo", "reach-flow", "push", "pick"]
    assert [list(TASKS[name]) for name in ("reach-ppo", "reach-grpo")] == [["PPO"], ["GRPO"]]


def test_means_and_gains_by_hand(tmp_path: Path) -> None:
    """Last points 0.8 and 1: mean 0.9. Returns gain 4 and 5, and end 2 apart: twice the spread at least."""
    success = Curve("reach", 8, 100, aim=0.95)
    returns = Curve("pick-return", 10, 50, metric="mean_return")
    learners = [
        Learner("a", success, 0, [(0, 0.0), (10, 0.8)]),
        Learner("a", success, 1, [(0, 0.1), (10, 1.0)]),
        Learner("b", returns, 0, [(0, 2.0), (10, 6.0)]),
        Learner("b", returns, 1, [(0, 3.0), (10, 8.0)]),
    ]
    found = learning.report_of(learners)
    expected = {"a last": 0.9, "a least": 0.8, "a first": 0.05, "b last": 7, "b least": 6, "b first": 2.5}
    assert found.summary == pytest.approx(expected | {"b gain over spread": 2})
    assert found.aims == {"a last": (">=", 0.95), "b gain over spread": (">=", 1.0)}
    row = {"curve": "a", "seed": 1, "metric": "success_rate", "steps": 10, "first": 0.1, "last": 1.0}
    assert found.rows[1] == row
    learning.draw(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.preset)
def test_the_workloads_are_the_presets_in_lock_step(curve: Curve, tmp_path: Path) -> None:
    preset = presets.workload(curve.preset)
    found = learning.workload(Learner("", curve, 2, []))
    assert isinstance(found.algorithm, RolloutSpec)
    jobs = curve.jobs or preset.algorithm.jobs
    assert found.algorithm == preset.algorithm.model_copy(update={"jobs": jobs, "delay": 0, "seed": 2, "cosine": True})
    assert (found.action_module, found.environment, found.start) == (
        preset.action_module,
        preset.environment,
        preset.start,
    )
    assert found.evaluation is not None
    assert (found.evaluation.episodes, found.evaluation.every_jobs) == (curve.episodes, curve.every)
    (backend,) = admit_all([found], Home(tmp_path), presets.cluster("laptop"))
    assert backend.policy.seed == 2
    if curve.first is not None:
        first = learning.first_workload(Learner("", curve, 2, []))
        assert first.action_module == found.action_module, "it goes on with the slot of the first"
        assert (first.tenant, first.algorithm.seed) == (found.tenant, 2)
        assert curve.demonstrations > 0
        assert first.data is not None
        cameras = {camera.name: (camera.height, camera.width) for camera in backend.policy.cameras}
        widths = {"state_width": found.action_module.state_width, "action_width": found.action_module.action_width}
        with LeRobotWriter(tmp_path / "datasets" / first.data.dataset, fps=20, cameras=cameras, **widths) as writer:
            seen = {name: np.zeros((2, *size, 3), np.uint8) for name, size in cameras.items()}
            rows = [np.zeros((2, width), np.float32) for width in widths.values()]
            writer.add_episode(seen, *rows, "push the cube to the target")
        (before,) = admit_all([first], Home(tmp_path), presets.cluster("laptop"))
        assert before.policy.schema_signature == backend.policy.schema_signature
