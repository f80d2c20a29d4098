"""The inference scheduler's decision, without a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference_queue import InferenceQueue, Waiting


def _queue(max_batch_size: int, *requests: tuple[str, int]) -> InferenceQueue[int]:
    queue: InferenceQueue[int] = InferenceQueue(max_batch_size, max_waiting_rows=1000)
    for number, (key, rows) in enumerate(requests):
        queue.push(Waiting(key, rows, number))
    return queue


def test_the_largest_compatible_prefix_is_taken_in_arrival_order() -> None:
    """3 + 4 rows fit into 8, the next 2 do not."""
    queue = _queue(8, ("a", 3), ("a", 4), ("a", 2))
    assert queue.take() == [0, 1]
    assert queue.take() == [2]


def test_an_incompatible_request_ends_the_prefix_and_is_not_overtaken() -> None:
    queue = _queue(8, ("a", 1), ("b", 1), ("a", 1))
    assert [queue.take(), queue.take(), queue.take()] == [[0], [1], [2]]


def test_a_request_larger_than_the_batch_forms_one_of_its_own() -> None:
    queue = _queue(4, ("a", 9), ("a", 1))
    assert queue.take() == [0]


def test_waiting_ends_when_company_can_no_longer_come() -> None:
    """Full, or followed by one that does not fit: waiting longer cannot enlarge the prefix."""
    assert not _queue(8, ("a", 3)).complete()
    assert _queue(8, ("a", 8)).complete()
    assert _queue(8, ("a", 3), ("b", 1)).complete()
    assert _queue(8, ("a", 5), ("a", 4)).complete()


def test_rows_waiting_are_bounded() -> None:
    queue = _queue(8, ("a", 990))
    assert queue.full(11)
    assert not queue.full(10)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), min_size=1, max_size=30), st.integers(1, 16))
def test_batches_keep_order_lose_nobody_and_respect_both_limits(requests: list[tuple[str, int]], size: int) -> None:
    queue = _queue(size, *requests)
    taken = []
    while len(queue):
        batch = queue.take()
        assert len({requests[i][0] for i in batch}) == 1
        assert len(batch) == 1 or sum(requests[i][1] for i in batch) <= size
        taken += batch
    assert taken == list(range(len(requests)))
    assert queue.waiting_rows == 0
