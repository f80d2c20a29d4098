"""YAML presets: read by name, validated strictly, listed when the name is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from configs.cluster import ClusterSpec
from configs.data import ColumnsSpec
from configs.environment import EnvironmentSpec
from configs.errors import SpecError, refusal
from configs.model import BaseModelSpec
from configs.spec import checked_name, parse
from configs.workload import WorkloadSpec

FOLDER = Path(__file__).resolve().parent / "presets"
S = TypeVar("S", bound=BaseModel)


def read_yaml(path: Path) -> Any:
    """The parsed file.

    Raises:
        SpecError: if it is missing or not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise SpecError(refusal("file", str(path), "an existing YAML file", "check the path")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise SpecError(f"file: {str(path)!r} is not YAML ({line}); correct it") from None


def names(folder: str) -> list[str]:
    """Known preset names of one kind, sorted."""
    return sorted(path.stem for path in (FOLDER / folder).glob("*.yaml"))


def _load(folder: str, cls: type[S], name: str, field: str) -> S:
    known = names(folder)
    if name not in known:
        raise SpecError(refusal(field, name, ", ".join(known), f"choose one or add configs/presets/{folder}/NAME.yaml"))
    return parse(cls, read_yaml(FOLDER / folder / f"{checked_name(name)}.yaml"), where=f"{folder}/{name}.yaml")


def base_model(name: str) -> BaseModelSpec:
    """The base model preset `name`."""
    return _load("models", BaseModelSpec, name, "base_model")


def environment(name: str, field: str = "environment") -> EnvironmentSpec:
    """The environment preset `name`."""
    return _load("environments", EnvironmentSpec, name, field)


def cluster(name: str) -> ClusterSpec:
    """The cluster preset `name`."""
    return _load("clusters", ClusterSpec, name, "cluster")


def columns(name: str) -> ColumnsSpec:
    """The preset `name` of a published dataset's columns."""
    return _load("columns", ColumnsSpec, name, "data.preset")


def workload(name: str) -> WorkloadSpec:
    """The workload preset `name`."""
    return _load("workloads", WorkloadSpec, name, "workload")


def workload_file(path: Path) -> WorkloadSpec:
    """The workload that a person wrote in `path`."""
    return parse(WorkloadSpec, read_yaml(path), where=path.name)
