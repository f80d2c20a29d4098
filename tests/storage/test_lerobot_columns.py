"""Columns bound by declared names: cameras, state and action of datasets that call them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import presets
from configs.data import ColumnsSpec
from configs.errors import DataFault, SpecError
from storage.demonstrations import LeRobotDataset
from storage.lerobot_columns import as_recorded, bound
from storage.resizing import resized
from tests.storage.lerobot_folders import CAMERAS, TOTAL, number, write

OWN = {
    "cameras": {
        "eye": {"key": "observation.images.base", "height": 16, "width": 64},
        "hand": {"key": "observation.images.wrist"},
    },
    "state": "action",
    "action": "observation.state",
}


def vector(width: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [width], "names": None}


def picture(height: int, width: int) -> dict[str, Any]:
    return {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channel"]}


def test_cameras_state_and_action_by_declared_names(tmp_path: Path) -> None:
    """Sizes are unified, vectors are those that were named, and statistics are theirs."""
    root = write(tmp_path / "d")
    plain, found = LeRobotDataset(root), LeRobotDataset(root, ColumnsSpec.model_validate(OWN))
    assert found.cameras == {"eye": (16, 64), "hand": (16, 64)}
    assert (found.state_width, found.action_width) == (2, 3)
    assert found.state_statistics == plain.action_statistics
    assert found.action_statistics == plain.state_statistics
    sample = found.sample(np.arange(TOTAL), horizon=1)
    assert [number(frame) for frame in sample["images"]["eye"]] == list(range(TOTAL))
    np.testing.assert_array_equal(sample["proprioception"], plain.action)
    np.testing.assert_array_equal(sample["action"][:, 0], plain.state)
    recorded = plain.sample(np.arange(TOTAL), horizon=1)["images"]["base"]
    np.testing.assert_array_equal(sample["images"]["eye"], resized(recorded, (16, 64)))


@pytest.mark.parametrize("codec", [None, "libx264"])
def test_one_camera_of_two(tmp_path: Path, codec: str | None) -> None:
    columns = ColumnsSpec.model_validate({"cameras": {"hand": {"key": "observation.images.wrist"}}})
    found = LeRobotDataset(write(tmp_path / "d", video_codec=codec), columns)
    assert found.cameras == {"hand": CAMERAS["wrist"]}
    assert [number(frame) for frame in found.sample([3, 0], 1)["images"]["hand"]] == [19, 16]


def test_the_resize_is_pillows_bilinear() -> None:
    """Halving with antialiasing: a triangle filter of four pixels with weights 1, 3, 3, 1 over 8."""
    row = np.array([0, 0, 0, 80, 80, 80, 80, 80], np.uint8)
    frame = np.repeat(row[None, :, None], 2, axis=0).repeat(3, axis=2)
    found = resized(frame[None], (2, 4))[0, 0, :, 0]
    # pixels 2 and 3 of the result: (0 + 0 + 3·80·… ) by hand
    assert found[1] == round((0 * 1 + 0 * 3 + 80 * 3 + 80 * 1) / 8)
    assert found[2] == round((80 * 1 + 80 * 3 + 80 * 3 + 80 * 1) / 8)
    wanted = np.asarray(Image.fromarray(frame).resize((4, 2), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(resized(frame[None], (2, 4))[0], wanted)
    assert resized(frame[None], (2, 8))[0] is not None
    np.testing.assert_array_equal(resized(frame[None], (2, 8))[0], frame)


def test_all_that_does_not_fit_is_told_at_once_with_names_sizes_and_widths() -> None:
    features = {"image": picture(256, 200), "state": vector(8), "actions": vector(7), "depth": vector(1)}
    declared = ColumnsSpec.model_validate(
        {
            "cameras": {"top": {"key": "observation.images.image"}, "wrist": {"key": "wrist_image"}},
            "state": "observation.state",
            "action": "actions",
            "action_width": 6,
        }
    )
    with pytest.raises(SpecError) as caught:
        bound(features, declared, "libero")
    assert str(caught.value).split("; ") == [
        "data.columns.cameras.top.key: got 'observation.images.image'",
        "possible: image (256 × 200) of dataset libero",
        "bind cameras by name",
        "data.columns.cameras.wrist.key: got 'wrist_image'",
        "possible: image (256 × 200) of dataset libero",
        "bind cameras by name",
        "data.columns.state: got 'observation.state'",
        "possible: state (width 8), actions (width 7), depth (width 1) of dataset libero",
        "name one of its vectors",
        "data.columns.action_width: got 6",
        "possible: 7, the width of actions in dataset libero",
        "declare that",
    ]


def test_other_names_without_a_declaration_are_refused_with_what_is_there() -> None:
    features = {"image": picture(8, 8), "state": vector(8), "actions": vector(7)}
    with pytest.raises(DataFault, match=r"got 'image, state, actions'; possible: a vector observation\.state; declare"):
        as_recorded(features, "d")
    with pytest.raises(DataFault, match="cameras of dataset d: got 'state'; possible: features of dtype 'image'"):
        as_recorded({"state": vector(8)}, "d")
    with pytest.raises(DataFault, match=r"camera of dataset d: got 'observation\.image'; possible: letters, digits"):
        as_recorded({"observation.image": picture(8, 8)}, "d")


# As published: huggingface.co/datasets/HuggingFaceVLA/libero, openpi's convert_libero_data_to_lerobot.py,
# fywang/calvin-task-ABC-D-lerobot, and the arrays of mees/calvin's own files.
PUBLISHED = {
    "libero": {
        "observation.images.image": picture(256, 256),
        "observation.images.image2": picture(256, 256),
        "observation.state": vector(8),
        "action": vector(7),
    },
    "libero-openpi": {
        "image": picture(256, 256),
        "wrist_image": picture(256, 256),
        "state": vector(8),
        "actions": vector(7),
    },
    "calvin": {
        "observation.images.top": picture(200, 200),
        "observation.images.wrist": picture(84, 84),
        "observation.state": vector(15),
        "action": vector(7),
    },
    "calvin-relative": {
        "rgb_static": {**picture(3, 200), "shape": [3, 200, 200]},
        "rgb_gripper": {**picture(3, 84), "shape": [3, 84, 84]},
        "robot_obs": {**vector(15), "dtype": "float64"},
        "actions": {**vector(7), "dtype": "float64"},
        "rel_actions": {**vector(7), "dtype": "float64"},
    },
}
PUBLISHED["calvin-absolute"] = PUBLISHED["calvin-relative"]


def test_every_preset_fits_what_was_published() -> None:
    assert presets.names("columns") == sorted(PUBLISHED)
    for name, features in PUBLISHED.items():
        found = bound(features, presets.columns(name), name)
        assert (found.state_width, found.action_width) == (8 if "libero" in name else 15, 7)
        sizes = [camera.size for camera in found.cameras]
        assert sizes == ([(256, 256)] * 2 if "libero" in name else [(200, 200), (84, 84)])
    assert bound(PUBLISHED["calvin-absolute"], presets.columns("calvin-absolute"), "d").action == "actions"
    assert bound(PUBLISHED["calvin-relative"], presets.columns("calvin-relative"), "d").action == "rel_actions"


def test_a_preset_refuses_a_dataset_of_another_kind() -> None:
    with pytest.raises(SpecError, match=r"data.columns.cameras.wrist.key: got 'observation.images.image2'"):
        bound(PUBLISHED["calvin"], presets.columns("libero"), "d")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cameras": {}}, "at least 1"),
        ({"cameras": {"a b": {"key": "x"}}}, "a b"),
        ({"cameras": {"a": {"key": "x", "height": 8}}}, "both or neither"),
        ({"cameras": {"a": {"key": "x"}, "b": {"key": "x"}}}, "each once"),
        ({"cameras": {"a": {"key": "x"}}, "reward": "r"}, "reward"),
    ],
)
def test_declarations_that_say_nothing_are_refused(columns: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ColumnsSpec.model_validate(columns)


@pytest.mark.parametrize("codec", [None, "libx264"])
def test_pictures_are_turned_where_that_is_declared(tmp_path: Path, codec: str | None) -> None:
    """Once, whether they are decoded now or kept from before; and the dataset says so."""
    root = write(tmp_path / "d", video_codec=codec)
    columns = {"cameras": {"eye": {"key": "observation.images.base", "turned": True}}}
    plain, found = LeRobotDataset(root), LeRobotDataset(root, ColumnsSpec.model_validate(columns))
    wanted = plain.pictures("base", range(TOTAL))[:, ::-1, ::-1]
    for _ in range(2):
        np.testing.assert_array_equal(found.pictures("eye", range(TOTAL)), wanted)
    assert not np.array_equal(wanted, wanted[:, ::-1, ::-1])
    assert (plain.turned_cameras, found.turned_cameras) == (None, ("eye",))


def test_sizes_given_by_camera_go_before_the_columns_and_unknown_ones_are_no_fault(tmp_path: Path) -> None:
    found = LeRobotDataset(write(tmp_path / "d"), ColumnsSpec.model_validate(OWN), sizes={"eye": (8, 8), "x": (1, 1)})
    assert found.cameras == {"eye": (8, 8), "hand": (16, 64)}
    assert found.pictures("eye", [0]).shape == (1, 8, 8, 3)
