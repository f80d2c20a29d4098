"""The metrics service: the one writer of MLflow's database, for learning curves and for the adapter registry.

Points are buffered and written in batches once a second (a single `log_metric` costs as much as a small batch); calls
return before that. What can still be lost: with this process killed, the last second's points. Registering is written
before the call returns, and done once a job.

MLflow is used in one executor thread, so that its blocking calls are in order and the worker's event loop stays free.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from configs.errors import Conflict, UnknownObject, refusal
from configs.signature import digest
from storage.atomic import checked_id

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from numpy.typing import NDArray

    from storage.registry import AdapterRegistry, ResolvedAdapter

logger = logging.getLogger(__name__)

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
_BATCH = 1000  # most points MLflow takes in one call
_MAX_BUFFERED = 200_000  # points kept while MLflow cannot be written; older ones are then dropped, and counted
_REQUEST_TAG = "joynexus.request"
_PARAMETERS_TAG = "joynexus.parameters"

T = TypeVar("T")
Point = tuple[str, float, int, int]  # key, value, milliseconds, step


class MetricsService:
    """Dask actor. All methods are async and take and give plain values (adapters' parameters: numpy arrays)."""

    def __init__(self, uri: str, artifact_root: str, flush_interval_s: float = 1.0) -> None:
        """`uri`: a database that `create_and_migrate` has prepared; `artifact_root`: folder of the adapters' files."""
        self._uri = uri
        self._artifact_root = Path(artifact_root)
        self._flush_interval_s = flush_interval_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._client: MlflowClient | None = None  # made in the executor: importing MLflow takes seconds
        self._registry: AdapterRegistry | None = None
        self._buffer: dict[str, list[Point]] = defaultdict(list)  # {run_id: points not yet written}
        self._closed: set[str] = set()  # runs that ended; they take no more points
        self._written = self._dropped = 0
        self._last_error: str | None = None
        self._flushing = asyncio.Lock()
        self._flusher: asyncio.Task[None] | None = None

    async def ping(self) -> str:
        """Answer "ok"; the event loop is alive."""
        return "ok"

    async def status(self) -> dict[str, Any]:
        """Points buffered, written and dropped, and why the last write failed (None: it did not)."""
        return {
            "buffered": sum(map(len, self._buffer.values())),
            "written": self._written,
            "dropped": self._dropped,
            "last_error": self._last_error,
        }

    async def open_run(
        self, tenant: str, task: str, params: Mapping[str, Any], *, request_id: str | None = None
    ) -> str:
        """Begin a run of experiment `<tenant>.<task>`; the same request again gets the same run.

        Raises:
            Conflict: the request was made before with other parameters.
        """
        return await self._run(self._open_run, f"{tenant}.{task}", dict(params), request_id)

    async def log(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Add one point a metric at `step`; written within a second or two.

        Raises:
            Conflict: the run was closed.
        """
        if run_id in self._closed:
            raise Conflict(refusal("run", run_id, "a run that is open", "open another; late results are discarded"))
        now = int(time.time() * 1000)
        self._buffer[run_id] += [(key, float(value), now, step) for key, value in metrics.items()]
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_for_ever())

    async def flush(self) -> None:
        """Write what is buffered; after a failure that run's points stay, the others' are written, and it is raised."""
        failure: Exception | None = None
        for run_id in list(self._buffer):
            try:
                await self._flush_run(run_id)
            except Exception as error:  # noqa: BLE001 - raised below; MLflow raises sqlite's errors and its own
                failure = error
        if failure is not None:
            raise failure
        self._last_error = None

    async def _flush_run(self, run_id: str) -> None:
        async with self._flushing:  # two flushes at one time would write the same points twice
            while points := self._buffer.get(run_id, [])[:_BATCH]:
                await self._run(self._write, run_id, points)
                # only now: a failed write leaves its points; what `log` appended meanwhile stands behind them
                del self._buffer[run_id][: len(points)]
                self._written += len(points)
            self._buffer.pop(run_id, None)

    async def keep_file(self, run_id: str, path: str, content: bytes) -> None:
        """Keep a file among the run's artifacts, in place of one of the same path.

        Raises:
            SpecError: a path that leads elsewhere.
            UnknownObject: there is no such run.
        """
        await self._run(self._keep_file, run_id, path, content)

    async def experiment_of(self, run_id: str) -> str:
        """Id of the experiment that a run is of, which addresses of MLflow's page name.

        Raises:
            UnknownObject: there is no such run.
        """
        return await self._run(lambda: str(self._found(run_id).info.experiment_id))

    async def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric as far as it is written, by step."""
        points = await self._run(lambda: self._tracking().get_metric_history(run_id, metric))
        return sorted((p.step, p.value) for p in points)

    async def close_run(self, run_id: str, status: RunStatus = "FINISHED") -> None:
        """Write the run's points and end it; closing twice changes nothing.

        Raises:
            UnknownObject: there is no such run.
        """
        if run_id in self._closed:
            return
        try:
            await self._flush_run(run_id)
        except Exception as error:  # noqa: BLE001 - MLflow raises sqlite's errors and its own
            # What the workload did is done; a run that was deleted by hand takes no points any more.
            lost = self._buffer.pop(run_id, [])
            self._dropped += len(lost)
            logger.warning("%d points of run %s were not written before it was closed: %s", len(lost), run_id, error)
        await self._run(self._terminate, run_id, status)
        self._closed.add(run_id)

    async def register_adapter(
        self,
        name: str,
        params: Mapping[str, NDArray[Any]],
        manifest: Mapping[str, Any],
        tags: Mapping[str, str],
        job_tag: str,
    ) -> int:
        """Register an adapter version, once a job; see `AdapterRegistry.register`."""
        return await self._run(lambda: self._adapters().register(name, params, manifest, tags, job_tag))

    async def champion_if_best(self, name: str, version: int, metric: str, value: float) -> int:
        """Record an evaluation result; returns the champion's version. See `AdapterRegistry.champion_if_best`."""
        return await self._run(lambda: self._adapters().champion_if_best(name, version, metric, value))

    async def record_evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Tag a version with evaluation results."""
        await self._run(lambda: self._adapters().record_evaluation(name, version, metrics))

    async def resolve(self, reference: str) -> ResolvedAdapter:
        """The version that `models:/name@alias` or `models:/name/3` names now, with its parameters."""
        return await self._run(lambda: self._adapters().resolve(reference))

    async def list_adapters(self, name: str | None = None) -> list[dict[str, Any]]:
        """Registered versions: {"name", "version", "aliases", "tags"} each."""
        found = await self._run(lambda: self._adapters().list(name))
        return [{"name": v.name, "version": v.version, "aliases": list(v.aliases), "tags": v.tags} for v in found]

    async def close(self) -> None:
        """Write what is buffered and stop; the actor takes no more calls after this."""
        if self._flusher is not None:
            self._flusher.cancel()
        await self.flush()
        self._executor.shutdown(wait=False)

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
            except Exception as error:  # noqa: BLE001 - MLflow raises sqlite's and its own; the next round tries again
                self._last_error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                logger.warning("points stay buffered, the next flush tries again: %s", self._last_error)
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        excess = sum(map(len, self._buffer.values())) - _MAX_BUFFERED
        for points in self._buffer.values():
            taken = max(0, min(excess, len(points)))
            del points[:taken]
            excess -= taken
            self._dropped += taken

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    # in the executor

    def _tracking(self) -> MlflowClient:
        from storage.registry import mlflow_client

        if self._client is None:
            self._client = mlflow_client(self._uri)
        return self._client

    def _adapters(self) -> AdapterRegistry:
        from storage.registry import AdapterRegistry

        if self._registry is None:
            self._registry = AdapterRegistry(self._uri, self._artifact_root)
        return self._registry

    def _open_run(self, experiment: str, params: dict[str, Any], request_id: str | None) -> str:
        from mlflow.entities import Param

        client = self._tracking()
        found = client.get_experiment_by_name(experiment)
        location = (self._artifact_root.parent / "runs" / experiment).as_uri()
        experiment_id = found.experiment_id if found else client.create_experiment(experiment, location)
        made_from = digest({key: str(value) for key, value in params.items()})
        if request_id is not None:
            for run in client.search_runs([experiment_id], f"tags.`{_REQUEST_TAG}` = '{request_id}'"):
                if run.data.tags.get(_PARAMETERS_TAG) != made_from:
                    raise Conflict(
                        refusal(f"request of {experiment}", request_id, "its first parameters", "use a new request id")
                    )
                return str(run.info.run_id)
        tags = {_PARAMETERS_TAG: made_from, **({_REQUEST_TAG: request_id} if request_id is not None else {})}
        run_id = str(client.create_run(experiment_id, tags=tags).info.run_id)
        client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
        return run_id

    def _write(self, run_id: str, points: list[Point]) -> None:
        from mlflow.entities import Metric

        self._tracking().log_batch(run_id, metrics=[Metric(*point) for point in points])

    def _found(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return self._tracking().get_run(run_id)
        except MlflowException:
            raise UnknownObject(refusal("run", run_id, "a run that open_run made", "open it first")) from None

    def _keep_file(self, run_id: str, path: str, content: bytes) -> None:
        *folders, name = (checked_id(part, "artifact path") for part in path.split("/"))
        self._found(run_id)
        with tempfile.TemporaryDirectory(prefix="joynexus-artifact-") as folder:
            (Path(folder) / name).write_bytes(content)
            self._tracking().log_artifact(run_id, str(Path(folder) / name), "/".join(folders) or None)

    def _terminate(self, run_id: str, status: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._tracking().set_terminated(run_id, status)
        except MlflowException:
            raise UnknownObject(refusal("run", run_id, "a run that open_run made", "open it first")) from None
