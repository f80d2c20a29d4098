"""Adapters as versions in MLflow's model registry: a tenant's payload, its manifest, and tags to find it by.

A version of `<tenant>.<task>` points at a folder of `artifact_root` with `params.safetensors` and `manifest.json`
(storage.payload). Tags say which job made it (`job`), what it is (`payload_digest`, `policy_version`,
`schema_signature`, `base_model`, ...) and how it did (`evaluation.<metric>`). It is a raw version: there is no pyfunc
flavour, so `mlflow.pyfunc.load_model` does not apply; `resolve` reads it.

One process writes the sqlite file, and `create_and_migrate` must have run before others open it: several processes that
open a fresh file together fail in its migration. Artifacts are written by path, so readers share that folder.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from numpy.typing import NDArray

from configs.errors import Conflict, SpecError, UnknownObject, refusal
from storage.atomic import checked_id, new_folder
from storage.payload import encode, read_digest, read_payload, write_payload

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION = "champion"
JOB_TAG = "job"
DIGEST_TAG = "payload_digest"
EVALUATION_PREFIX = "evaluation."
_REFERENCE = re.compile(r"^models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>[0-9]+))$")
_RESERVED = (JOB_TAG, DIGEST_TAG)


@dataclass(frozen=True)
class AdapterVersion:
    """One registered version, without its parameters."""

    name: str
    version: int
    aliases: tuple[str, ...]
    tags: dict[str, str]

    def evaluation(self, metric: str) -> float | None:
        """The evaluation result `metric`, or None if it was not evaluated."""
        value = self.tags.get(EVALUATION_PREFIX + metric)
        return None if value is None else float(value)


Versions = list[AdapterVersion]  # named here: inside the class `list` is a method


@dataclass(frozen=True)
class ResolvedAdapter:
    """A version pinned by number, with its parameters: whoever holds it is not moved by a later alias."""

    name: str
    version: int
    params: dict[str, NDArray[Any]]
    manifest: dict[str, Any]
    tags: dict[str, str]


def mlflow_client(uri: str) -> MlflowClient:
    """A client of `uri` for tracking and registry.

    MLflow is imported here, since that takes 2 s and not every importer of this module needs it.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def create_and_migrate(uri: str) -> None:
    """Create MLflow's database if it is a sqlite file, and bring its tables up to date; one process, before others."""
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    mlflow_client(uri).search_experiments(max_results=1)


class AdapterRegistry:
    """Registered adapters of one MLflow. Thread-safe within its process, which should be the only writer."""

    def __init__(self, uri: str, artifact_root: Path) -> None:
        self._client = mlflow_client(uri)
        self._artifact_root = Path(artifact_root)
        self._lock = threading.Lock()  # between the search for a job's version and its creation

    def register(
        self,
        name: str,
        params: Mapping[str, NDArray[Any]],
        manifest: Mapping[str, Any],
        tags: Mapping[str, str],
        job_tag: str,
    ) -> int:
        """Register a version; the same job's again returns the version it got the first time.

        Args:
            name: `<tenant>.<task>`.
            params: The payload, never the base.
            manifest: JSON kept beside it.
            tags: Searchable text, for instance policy_version, schema_signature, base_model.
            job_tag: Which act of registering this is, for instance a job id.

        Returns:
            The version's number.

        Raises:
            Conflict: the job registered other contents before.
            SpecError: a name or tag that does not fit.
        """
        checked_id(name, "adapter name")
        for tag in tags:
            if tag in _RESERVED or tag.startswith(EVALUATION_PREFIX):
                raise SpecError(refusal("tags", tag, "names of your own", "it is set by the registry; leave it out"))
        files, digest = encode({"params": params}, manifest)
        with self._lock:
            existing = self._search(name, {JOB_TAG: job_tag})
            if existing:
                if existing[0].tags.get(DIGEST_TAG) != digest:
                    raise Conflict(
                        refusal(
                            f"job of adapter {name}",
                            job_tag,
                            f"the contents of version {existing[0].version}",
                            "register other contents under another job",
                        )
                    )
                return existing[0].version
            folder = self._artifact_root / name / digest[:32]
            try:
                with new_folder(folder, f"artifact of adapter {name}") as building:
                    write_payload(building, files)
            except Conflict:
                # Equal contents: of a former attempt that ended before the version was made, or of another job.
                if read_digest(folder) != digest:
                    raise
            self._ensure_model(name)
            made = self._client.create_model_version(
                name, source=folder.as_uri(), tags={**tags, JOB_TAG: job_tag, DIGEST_TAG: digest}
            )
        return int(made.version)

    def record_evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Tag a version with evaluation results.

        Raises:
            UnknownObject: there is no such version.
            SpecError: a result that is no finite number.
        """
        self._version(name, version)
        for metric, value in metrics.items():
            if not math.isfinite(value):
                raise SpecError(
                    refusal(f"evaluation {metric} of {name}/{version}", value, "a finite number", "leave it out")
                )
            self._client.set_model_version_tag(name, str(version), EVALUATION_PREFIX + metric, repr(float(value)))

    def champion_if_best(self, name: str, version: int, metric: str, value: float) -> int:
        """Record `metric` of a version and put the alias `champion` on the best of all evaluated versions.

        The higher, the better; of equal ones the oldest keeps it. Done twice it changes nothing.

        Returns:
            The champion's number.
        """
        self.record_evaluation(name, version, {metric: value})
        with self._lock:
            rated = [(found, v) for v in self._search(name) if (found := v.evaluation(metric)) is not None]
            best = min(rated, key=lambda pair: (-pair[0], pair[1].version))[1]
            if CHAMPION not in best.aliases:
                self._client.set_registered_model_alias(name, CHAMPION, str(best.version))
        return best.version

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Let `alias` point at a version (it leaves the one it was on)."""
        self._version(name, version)
        self._client.set_registered_model_alias(name, alias, str(version))

    def resolve(self, reference: str) -> ResolvedAdapter:
        """Read the version that `models:/name@alias` or `models:/name/3` names at this moment.

        Raises:
            SpecError: a reference of another form.
            UnknownObject: no such adapter, alias or version; the known ones are listed.
            DataFault: its files are missing or torn.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise SpecError(refusal("adapter", reference, "models:/NAME@ALIAS or models:/NAME/VERSION", "write it so"))
        name, alias = match["name"], match["alias"]
        if alias is None:
            return self._read(self._version(name, int(match["version"])))
        from mlflow.exceptions import MlflowException

        try:
            return self._read(self._client.get_model_version_by_alias(name, alias))
        except MlflowException:
            versions = self._search(name)
            aliases = sorted({a for v in versions for a in v.aliases})
            if not versions:
                raise self._unknown(name) from None
            known = ", ".join(aliases) or "none"
            raise UnknownObject(
                refusal(f"alias of adapter {name}", alias, known, "evaluate it, or name a version")
            ) from None

    def list(self, name: str | None = None) -> Versions:
        """Registered versions (of one adapter, or all), by name and number."""
        names = [name] if name is not None else sorted(m.name for m in _pages(self._client.search_registered_models))
        return [version for known in names for version in self._search(known)]

    def _read(self, found: ModelVersion) -> ResolvedAdapter:
        payload = read_payload(Path(url2pathname(urlsplit(str(found.source)).path)), ("params",))
        return ResolvedAdapter(
            found.name, int(found.version), payload.groups["params"], payload.manifest, dict(found.tags)
        )

    def _version(self, name: str, version: int) -> ModelVersion:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_model_version(name, str(version))
        except MlflowException:
            known = [str(v.version) for v in self._search(name)]
            if not known:
                raise self._unknown(name) from None
            raise UnknownObject(
                refusal(f"version of adapter {name}", version, ", ".join(known[-8:]), "choose one of these")
            ) from None

    def _unknown(self, name: str) -> UnknownObject:
        known = ", ".join(sorted({v.name for v in self.list()})) or "none"
        return UnknownObject(refusal("adapter", name, known, "register it first"))

    def _ensure_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_registered_model(name)
        except MlflowException:
            self._client.create_registered_model(name)

    def _search(self, name: str, tags: Mapping[str, str] | None = None) -> Versions:
        quoted = [f"name = '{_quotable(name)}'"]
        quoted += [f"tags.`{key}` = '{_quotable(value)}'" for key, value in (tags or {}).items()]
        # Aliases are kept with the registered model, and a search for versions does not bring them along.
        aliases: dict[int, set[str]] = {}
        for model in self._client.search_registered_models(quoted[0]):
            for alias, version in model.aliases.items():
                aliases.setdefault(int(version), set()).add(alias)
        found = _pages(self._client.search_model_versions, " and ".join(quoted))
        versions = [
            AdapterVersion(v.name, int(v.version), tuple(sorted(aliases.get(int(v.version), ()))), dict(v.tags))
            for v in found
        ]
        return sorted(versions, key=lambda v: v.version)


def _pages(search: Callable[..., Any], query: str | None = None) -> list[Any]:
    page = search(query)
    found = list(page)
    while page.token:
        page = search(query, page_token=page.token)
        found += page
    return found


def _quotable(text: str) -> str:
    if "'" in text or "`" in text:
        raise SpecError(refusal("adapter tag or name", text, "text without quotes", "rename it"))
    return text
