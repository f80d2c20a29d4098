"""Statistics of a preset, measured through a host: against the same episodes counted by hand, and as a preset takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.environment import EnvironmentSpec
from joynexus.command import main
from services.environment_measure import FIRST_SEED, LEAST_STD, measure
from tests.services.environment_specs import preset, toy


def test_random_episodes_are_measured_where_there_is_no_expert() -> None:
    """Counter's state is (seed modulo 1000, step); an action above 0.5, or the fifth step, ends an episode."""
    spec = EnvironmentSpec.model_validate(toy())
    found = asyncio.run(measure(spec, 4, 0.2))
    random, states, actions = np.random.default_rng(FIRST_SEED), [], []
    for seed in range(FIRST_SEED + 4, FIRST_SEED + 8):
        for step, action in enumerate(random.uniform(-1, 1, 5).astype(np.float32).astype(float)):
            states.append((seed % 1000, step))
            actions.append([action])
            if action > 0.5:
                break
    assert len(actions) < 20  # one at least ended early
    for name, rows in (("state", np.array(states, float)), ("action", np.array(actions))):
        statistics = found[name]
        np.testing.assert_allclose(statistics.mean, rows.mean(0), rtol=1e-9)
        np.testing.assert_allclose(statistics.std, np.maximum(rows.std(0), LEAST_STD), rtol=1e-9)
        np.testing.assert_array_equal(statistics.min, rows.min(0))
        np.testing.assert_array_equal(statistics.max, rows.max(0))
        np.testing.assert_array_equal(statistics.q01, np.sort(rows, 0)[0])  # 1 % of fewer than 100 is the least
        np.testing.assert_array_equal(statistics.q99, np.sort(rows, 0)[-1])


def test_reach_is_measured_into_what_its_preset_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Near the shipped numbers, which more episodes gave."""
    assert main(["--home", str(tmp_path), "env", "measure", "reach", "--episodes", "12"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    spec, shipped = (EnvironmentSpec.model_validate(preset("reach", **blocks)) for blocks in (found, {}))
    for measured, known in ((spec.state, shipped.state), (spec.action, shipped.action)):
        assert measured.min is not None
        np.testing.assert_allclose(measured.mean, known.mean, atol=0.5 * np.max(known.std))
        np.testing.assert_allclose(measured.std, known.std, rtol=0.4)
        ordered = np.array([measured.min, measured.q01, measured.q99, measured.max])
        assert (np.diff(ordered, axis=0) >= 0).all()
    assert list(found["action"]) == ["mean", "std", "min", "max", "q01", "q99"]
    assert main(["env", "measure", "reach", "--episodes", "0"]) == 2
