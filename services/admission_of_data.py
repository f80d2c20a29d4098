"""Admission of recorded data: the dataset that a workload names, its columns bound as declared, opened or refused."""

from __future__ import annotations

from pathlib import Path

from configs import presets
from configs.data import ColumnsSpec, MixedDatasetSpec
from configs.environment import LARGEST_CAMERA
from configs.errors import DataFault, SpecError, refusal
from configs.home import Home
from configs.transforms import TransformsSpec
from configs.workload import WorkloadSpec
from storage.demonstration_stream import Source
from storage.demonstrations import LeRobotDataset
from storage.sample_order import Mixture


def dataset_path(dataset: str, home: Home) -> Path:
    """Folder of a dataset: an absolute path as it is, a name under the home's datasets."""
    path = Path(dataset)
    return path if path.is_absolute() else home.datasets / dataset


def declared_columns(declared: MixedDatasetSpec) -> ColumnsSpec | None:
    """Columns of a dataset, by preset or as they are declared; None: LeRobot's own names.

    Raises:
        SpecError: if there is no such preset.
    """
    return declared.columns if declared.preset is None else presets.columns(declared.preset)


def open_sources(workload: WorkloadSpec, home: Home) -> list[Source]:
    """The datasets that a workload names, with their weights, their pictures in the declared sizes.

    Raises:
        SpecError: with all faults: of a dataset that is refused, or that shows or does something else than the first.
    """
    assert workload.data is not None
    faults, found = [], []
    for declared in workload.data.datasets:
        try:
            columns = declared_columns(declared)
            found.append(Source(open_dataset(declared.dataset, home, columns, workload.transforms), declared.weight))
        except SpecError as error:
            faults.append(str(error))
    faults += [fault for source in found[1:] for fault in _differences(source.dataset, found[0].dataset)]
    try:
        Mixture(tuple(declared.weight for declared in workload.data.datasets), workload.algorithm.seed).shares()
    except SpecError as error:
        faults.append(f"data.mixture: {error}")
    if faults:
        raise SpecError("; ".join(faults))
    return found


def _differences(dataset: LeRobotDataset, first: LeRobotDataset) -> list[str]:
    """Why a dataset cannot be mixed with the first one."""
    where = f"data.mixture: dataset {dataset.root.name}"
    faults = []
    for what, given, wanted in (
        ("cameras", dict(sorted(dataset.cameras.items())), dict(sorted(first.cameras.items()))),
        ("state width", dataset.state_width, first.state_width),
        ("action width", dataset.action_width, first.action_width),
    ):
        if given != wanted:
            remedy = "bind its columns so (columns), declare sizes (transforms.cameras), or leave it out"
            faults.append(refusal(f"{where}, {what}", given, f"{wanted}, as {first.root.name} has", remedy))
    turned = dataset.turned_cameras, first.turned_cameras
    if None not in turned and turned[0] != turned[1]:
        faults.append(
            refusal(
                f"{where}, turned cameras",
                list(turned[0] or ()),
                f"{list(turned[1] or ())}, as {first.root.name} has",
                "turn them where they are read (columns.cameras.NAME.turned)",
            )
        )
    return faults


def open_dataset(
    dataset: str, home: Home, columns: ColumnsSpec | None = None, transforms: TransformsSpec | None = None
) -> LeRobotDataset:
    """The dataset that a workload names, its columns bound and its pictures sized as declared.

    Raises:
        SpecError: if the name is a relative path, no LeRobot dataset lies there, it has not those columns, or a camera
            is too large.
    """
    if not Path(dataset).is_absolute() and (len(Path(dataset).parts) != 1 or dataset in ("..", ".")):
        raise SpecError(refusal("data.dataset", dataset, "a dataset's name or an absolute path", "use one of them"))
    path = dataset_path(dataset, home)
    try:
        there = (path / "meta" / "info.json").is_file()
    except OSError as error:
        raise SpecError(
            refusal("data.dataset", dataset, "a folder that can be read", f"correct it ({error})")
        ) from None
    if not there:
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
        found = LeRobotDataset(path, columns, sizes=None if transforms is None else transforms.sizes)
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
