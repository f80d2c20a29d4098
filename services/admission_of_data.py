"""Admission of recorded data: the dataset that a workload names, its columns bound as declared, opened or refused."""

from __future__ import annotations

from pathlib import Path

from configs import presets
from configs.data import ColumnsSpec
from configs.environment import LARGEST_CAMERA
from configs.errors import DataFault, SpecError, refusal
from configs.home import Home
from configs.workload import WorkloadSpec
from storage.demonstrations import LeRobotDataset


def dataset_path(dataset: str, home: Home) -> Path:
    """Folder of a dataset: an absolute path as it is, a name under the home's datasets."""
    path = Path(dataset)
    return path if path.is_absolute() else home.datasets / dataset


def declared_columns(workload: WorkloadSpec) -> ColumnsSpec | None:
    """Columns of the workload's dataset, by preset or as it declares them; None: LeRobot's own names.

    Raises:
        SpecError: if there is no such preset.
    """
    data = workload.data
    if data is None:
        return None
    return data.columns if data.preset is None else presets.columns(data.preset)


def open_dataset(dataset: str, home: Home, columns: ColumnsSpec | None = None) -> LeRobotDataset:
    """The dataset that a workload names, its columns bound as declared.

    Raises:
        SpecError: if the name is a relative path, no LeRobot dataset lies there, it has not those columns, or a camera
            is too large.
    """
    if not Path(dataset).is_absolute() and (len(Path(dataset).parts) != 1 or dataset in ("..", ".")):
        raise SpecError(refusal("data.dataset", dataset, "a dataset's name or an absolute path", "use one of them"))
    path = dataset_path(dataset, home)
    if not (path / "meta" / "info.json").is_file():
        known = sorted(p.name for p in home.datasets.glob("*") if (p / "meta" / "info.json").is_file())
        raise SpecError(
            refusal(
                "data.dataset",
                dataset,
                ", ".join(known) or "no dataset yet",
                "collect it first (flow `collect`) or name its folder",
            )
        )
    try:
        found = LeRobotDataset(path, columns)
    except DataFault as error:
        raise SpecError(f"data.dataset: {error}") from None
    _refuse_large(found)
    return found


def _refuse_large(dataset: LeRobotDataset) -> None:
    """Raises SpecError for cameras larger than a policy's may be."""
    large = {name: size for name, size in dataset.cameras.items() if max(size) > LARGEST_CAMERA}
    if large:
        shown = ", ".join(f"{name} ({h} × {w})" for name, (h, w) in large.items())
        raise SpecError(
            refusal(
                "data.columns.cameras",
                shown,
                f"up to {LARGEST_CAMERA} pixels a side",
                "declare a height and width that they are resized to",
            )
        )
