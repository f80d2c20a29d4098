"""The adapter registry: versions with payload, manifest and tags; a job registers once; the best is champion."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from configs.errors import Conflict, DataFault, SpecError, UnknownObject
from storage.checkpoints import arrays_equal
from storage.registry import AdapterRegistry, create_and_migrate
from tests.mlflow_database import migrated_database

PARAMS = {"head.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "log_std": np.float32([-0.7])}
MANIFEST = {"action_module": {"kind": "oft"}, "horizon": 4}
TAGS = {"policy_version": "12", "schema_signature": "ab" * 32, "base_model": "tiny-qwen3-vl"}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for this file. Tests use adapters of their own names."""
    return migrated_database(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def registry(uri: str, tmp_path: Path) -> AdapterRegistry:
    """A registry on the shared database with an artifact folder of its own."""
    return AdapterRegistry(uri, tmp_path / "artifacts")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An adapter name no other test uses."""
    return re.sub(r"\W", "_", request.node.name.removeprefix("test_"))[:60].strip("_") + ".rl"


def register(registry: AdapterRegistry, name: str, job: str = "job1", **changes: object) -> int:
    """Register the example."""
    return registry.register(name, **{"params": PARAMS, "manifest": MANIFEST, "tags": TAGS, "job_tag": job, **changes})


def test_round_trip(registry: AdapterRegistry, uri: str, name: str) -> None:
    """Another process's registry reads the same bits, manifest and tags."""
    version = register(registry, name)
    found = AdapterRegistry(uri, registry._artifact_root).resolve(f"models:/{name}/{version}")
    assert (found.name, found.version, found.manifest) == (name, 1, MANIFEST)
    assert arrays_equal(found.params, PARAMS)
    assert TAGS.items() <= found.tags.items()
    assert found.tags["job"] == "job1"


def test_a_folder_with_spaces_and_signs_is_read(uri: str, tmp_path: Path, name: str) -> None:
    """MLflow keeps a location as a URL, in which they are escaped."""
    registry = AdapterRegistry(uri, tmp_path / "my robots #1 100%" / "artifacts")
    version = register(registry, name)
    assert arrays_equal(registry.resolve(f"models:/{name}/{version}").params, PARAMS)


def test_create_and_migrate_twice(uri: str) -> None:
    """It may run at every start."""
    create_and_migrate(uri)


def test_a_job_registers_once(registry: AdapterRegistry, name: str) -> None:
    """The same job again is the same version; another job with equal contents is another version."""
    assert register(registry, name) == 1
    assert register(registry, name) == 1
    assert register(registry, name, "job2") == 2
    assert [v.version for v in registry.list(name)] == [1, 2]


def test_a_job_with_other_contents_is_refused(registry: AdapterRegistry, name: str) -> None:
    """And nothing is registered."""
    register(registry, name)
    with pytest.raises(Conflict, match="got 'job1'; possible: the contents of version 1"):
        register(registry, name, params={"x": np.zeros(1)})
    assert len(registry.list(name)) == 1


def test_interrupted_between_artifact_and_version(
    registry: AdapterRegistry, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were written and the version was not made: the next attempt makes it."""

    def lost(*_args: object, **_kwargs: object) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(registry._client, "create_model_version", lost)
        with pytest.raises(OSError, match="gone"):
            register(registry, name)
    assert registry.list(name) == []
    assert register(registry, name) == 1
    assert arrays_equal(registry.resolve(f"models:/{name}/1").params, PARAMS)


def test_champion_is_the_best_evaluated(registry: AdapterRegistry, name: str) -> None:
    """0.5, then 0.4 (stays), 0.5 (a tie stays), 0.9 (moves); an unevaluated version is never champion."""
    versions = [register(registry, name, f"job{i}", manifest={"i": i}) for i in range(5)]
    with pytest.raises(UnknownObject, match=r"alias of adapter .*: got 'champion'; possible: none"):
        registry.resolve(f"models:/{name}@champion")
    results = [(versions[0], 0.5, 1), (versions[1], 0.4, 1), (versions[2], 0.5, 1), (versions[3], 0.9, 4)]
    for version, value, champion in results:
        assert registry.champion_if_best(name, version, "success", value) == champion
        assert registry.champion_if_best(name, version, "success", value) == champion
        assert registry.resolve(f"models:/{name}@champion").version == champion
    listed = registry.list(name)
    assert [v.aliases for v in listed] == [(), (), (), ("champion",), ()]
    assert [v.evaluation("success") for v in listed] == [0.5, 0.4, 0.5, 0.9, None]


def test_a_worse_second_evaluation_moves_the_alias(registry: AdapterRegistry, name: str) -> None:
    """The alias follows what is known of each version now."""
    for i, value in enumerate((0.8, 0.6)):
        registry.champion_if_best(name, register(registry, name, f"job{i}"), "success", value)
    assert registry.champion_if_best(name, 1, "success", 0.2) == 2


def test_resolving_pins_the_version(registry: AdapterRegistry, name: str) -> None:
    """What was resolved once stays what it was when the alias moves on."""
    register(registry, name, "job0", manifest={"i": 0})
    register(registry, name, "job1", manifest={"i": 1})
    registry.champion_if_best(name, 1, "success", 0.1)
    held = registry.resolve(f"models:/{name}@champion")
    registry.champion_if_best(name, 2, "success", 0.2)
    assert (held.version, held.manifest) == (1, {"i": 0})
    assert registry.resolve(f"models:/{name}@champion").manifest == {"i": 1}


def test_other_aliases(registry: AdapterRegistry, name: str) -> None:
    """An alias is on one version at a time."""
    register(registry, name, "job0")
    register(registry, name, "job1")
    registry.set_alias(name, "serving", 1)
    registry.set_alias(name, "serving", 2)
    assert [v.aliases for v in registry.list(name)] == [(), ("serving",)]


def test_unknown_names_list_the_known(registry: AdapterRegistry, name: str) -> None:
    """Adapter, version and alias."""
    register(registry, name)
    registry.set_alias(name, "serving", 1)
    with pytest.raises(UnknownObject, match=rf"adapter: got 'nobody\.rl'; possible: .*{name}"):
        registry.resolve("models:/nobody.rl/1")
    with pytest.raises(UnknownObject, match="adapter: got 'nobody"):
        registry.resolve("models:/nobody.rl@champion")
    with pytest.raises(UnknownObject, match="got 7; possible: 1"):
        registry.resolve(f"models:/{name}/7")
    with pytest.raises(UnknownObject, match="got 'best'; possible: serving"):
        registry.resolve(f"models:/{name}@best")
    with pytest.raises(UnknownObject, match="got 7; possible: 1"):
        registry.champion_if_best(name, 7, "success", 1.0)


@pytest.mark.parametrize("reference", ["", "push.rl", "models:/push.rl", "models:/a/b/c", "runs:/x", "models:/a@b/1"])
def test_references_of_another_form(registry: AdapterRegistry, reference: str) -> None:
    """One message says how they look."""
    with pytest.raises(SpecError, match="possible: models:/NAME@ALIAS or models:/NAME/VERSION"):
        registry.resolve(reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, "use a name, not a path"),
        ({"name": "a/b"}, "use a name, not a path"),
        ({"tags": {"job": "x"}}, "it is set by the registry"),
        ({"tags": {"evaluation.success": "1"}}, "it is set by the registry"),
        ({"job_tag": "it's"}, "text without quotes"),
    ],
)
def test_what_cannot_be_registered(registry: AdapterRegistry, changes: dict, message: str) -> None:
    """Refused before anything is written."""
    call = {"name": "x.rl", "params": PARAMS, "manifest": MANIFEST, "tags": TAGS, "job_tag": "job", **changes}
    with pytest.raises(SpecError, match=message):
        registry.register(**call)
    assert not registry._artifact_root.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_results_are_numbers(registry: AdapterRegistry, name: str, value: float) -> None:
    """A version whose evaluation failed does not become champion."""
    register(registry, name)
    with pytest.raises(SpecError, match="a finite number"):
        registry.champion_if_best(name, 1, "success", value)


def test_torn_artifact(registry: AdapterRegistry, name: str) -> None:
    """It is an error, never other parameters."""
    register(registry, name)
    path = next((registry._artifact_root / name).glob("*/params.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFault, match=r"params\.safetensors: torn"):
        registry.resolve(f"models:/{name}/1")
