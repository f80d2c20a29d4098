"""Seconds of a call, and the interval of their median."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def finish() -> None:
    """Wait for what a GPU was given to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """(seconds until the call and what it gave a GPU to do are done, its result)."""
    finish()
    begun = time.perf_counter()
    result = call()
    finish()
    return time.perf_counter() - begun, result


async def timed_async(call: Awaitable[T]) -> tuple[float, T]:
    """As `timed`, of something to wait for."""
    finish()
    begun = time.perf_counter()
    result = await call
    finish()
    return time.perf_counter() - begun, result


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics (normal approximation of the binomial).

    Of fewer than six values it is the smallest and the largest, which cover the median less often than that.
    """
    ordered, n = sorted(values), len(values)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = math.floor((n - 1) / 2 - reach), math.ceil((n - 1) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, n - 1)]
