"""One base model's requests, grouped into shared forwards, one at a time; the next batch fills meanwhile.

The decision which requests form the next forward is services/inference_queue.py's; this is its clock and its thread.
The way from a request to its forward and back passes the event loop as seldom as possible: a lone tenant's step waits
for each of these passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from configs.cluster import InferenceBatchingSpec
from configs.errors import AdmissionRefused, JoyNexusError, refusal
from services.inference_queue import InferenceQueue, Waiting

logger = logging.getLogger(__name__)

MAX_WAITING_ROWS = 16_384

Rq = TypeVar("Rq")
Rs = TypeVar("Rs")
_Entry = tuple[Rq, "asyncio.Future[Rs]", float]  # request, its result, when it came (seconds of the loop's clock)


class GroupBatcher(Generic[Rq, Rs]):
    """Requests in, results out; used within one event loop.

    Args:
        name: the base model, for messages.
        forward: answers the requests of one batch, in order; a result that is an exception is its request's alone.
        batching: B and T.
        executor: where forwards run, one after another.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Sequence[Rq]], Sequence[Rs | JoyNexusError]],
        batching: InferenceBatchingSpec,
        executor: Executor,
    ) -> None:
        self._name = name
        self._forward = forward
        self._timeout_s = batching.batch_timeout_s
        self._executor = executor
        self._queue: InferenceQueue[_Entry[Rq, Rs]] = InferenceQueue(batching.max_batch_size, MAX_WAITING_ROWS)
        self._planned: asyncio.Handle | None = None
        self._computing = False

    @property
    def waiting_rows(self) -> int:
        """Rows of requests that no forward has taken yet."""
        return self._queue.waiting_rows

    async def submit(self, prefix_key: str, rows: int, request: Rq) -> Rs:
        """The result of `request`, whose `rows` samples may share a forward with others of the same key.

        Raises:
            AdmissionRefused: too many rows wait.
            JoyNexusError: the request's own fault, or the shared forward failed.
        """
        if self._queue.full(rows):
            raise AdmissionRefused(
                refusal("observations", f"{rows} rows", f"{MAX_WAITING_ROWS} waiting rows", "send again later")
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Rs] = loop.create_future()
        self._queue.push(Waiting(prefix_key, rows, (request, future, loop.time())))
        self._plan()
        return await future

    def _plan(self) -> None:
        """Start the next forward when its batch is complete or its oldest request has waited T; not beside another."""
        if self._computing or not len(self._queue):
            return
        if self._planned is not None:
            self._planned.cancel()
        loop = asyncio.get_running_loop()
        left = self._queue.oldest[2] + self._timeout_s - loop.time()
        if left <= 0 or self._queue.complete():
            # Not at once: what arrives in this same turn of the loop goes along.
            self._planned = loop.call_soon(self._start)
        else:
            self._planned = loop.call_later(left, self._start)

    def _start(self) -> None:
        self._planned = None
        live = [entry for entry in self._queue.take() if not entry[1].done()]
        if not live:
            self._plan()
            return
        self._computing = True
        running = asyncio.get_running_loop().run_in_executor(self._executor, self._forward, [e[0] for e in live])
        running.add_done_callback(lambda done: self._resolve(live, done))

    def _resolve(self, taken: Sequence[_Entry[Rq, Rs]], done: asyncio.Future[Sequence[Rs | JoyNexusError]]) -> None:
        self._computing = False
        self._plan()  # first: the compute thread is idle
        results: Sequence[Rs | JoyNexusError]
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            logger.error("a shared forward of %d requests on %s failed", len(taken), self._name, exc_info=error)
            results = [
                JoyNexusError(f"inference: the shared forward failed ({error}); send the request again") for _ in taken
            ]
        else:
            results = done.result()
        for (_, future, _), result in zip(taken, results, strict=True):
            if future.done():
                continue
            if isinstance(result, JoyNexusError):
                future.set_exception(result)
            else:
                future.set_result(result)
