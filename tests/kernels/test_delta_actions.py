"""Actions as differences to the state that their chunk begins in: by hand, and back."""

from __future__ import annotations

import numpy as np

from kernels.delta_actions import to_absolute, to_deltas

CHUNK = np.array([[[1.0, 5.0, 0.25], [2.0, 7.0, -1.0]]], np.float32)  # [1, 2, 3]
STATE = np.array([[0.5, 4.0, 9.0]], np.float32)


def test_all_steps_of_a_chunk_are_taken_against_its_first_state_and_a_gripper_is_left() -> None:
    found = to_deltas(CHUNK, STATE, (0, 1), (0, 1))
    np.testing.assert_array_equal(found, [[[0.5, 1.0, 0.25], [1.5, 3.0, -1.0]]])
    np.testing.assert_array_equal(CHUNK[0, 0], [1.0, 5.0, 0.25])  # a copy


def test_the_states_dimensions_may_be_others() -> None:
    """Action dimension 1 against state dimension 2: 5 − 9, 7 − 9."""
    found = to_deltas(CHUNK, STATE, (1,), (2,))
    np.testing.assert_array_equal(found, [[[1.0, -4.0, 0.25], [2.0, -2.0, -1.0]]])


def test_back_is_what_it_was() -> None:
    rng = np.random.default_rng(0)
    action, state = rng.normal(size=(5, 4, 7)).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
    there = to_deltas(action, state, (0, 3, 6), (8, 0, 2))
    np.testing.assert_allclose(to_absolute(there, state, (0, 3, 6), (8, 0, 2)), action, atol=1e-6)
    assert not np.array_equal(there, action)
    assert to_deltas(action, state, (), ()) is action
