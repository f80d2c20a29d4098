"""PEFT's adapter files: whole or not at all, float32 whatever the precision on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import Conflict, DataFault
from storage.peft_files import read_adapter, write_adapter


def test_what_was_written_is_read_by_safetensors_and_by_us(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((3, 2), np.float32).T}
    write_adapter(tmp_path / "one", tensors, {"r": 2})
    theirs = load_file(tmp_path / "one" / "adapter_model.safetensors")
    ours, config = read_adapter(tmp_path / "one")
    assert config == {"r": 2}
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, array in tensors.items():
        assert np.array_equal(theirs[name].numpy(), array)
        assert np.array_equal(ours[name], array)
    with pytest.raises(Conflict, match="adapter: got 'one'; possible: a name that is not taken"):
        write_adapter(tmp_path / "one", tensors, {"r": 2})


def test_further_files_lie_beside_and_change_nothing_of_what_is_read(tmp_path: Path) -> None:
    tensors = {"a": np.ones((2, 3), np.float32)}
    write_adapter(tmp_path / "one", tensors, {"r": 2}, beside={"notes.txt": b"mine"})
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "notes.txt",
    ]
    ours, config = read_adapter(tmp_path / "one")
    assert (config, list(ours)) == ({"r": 2}, ["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_precision_is_read_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Written by safetensors' torch half, and converted by torch."""
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"a": values}, str(tmp_path / "adapter_model.safetensors"))
    (tmp_path / "adapter_config.json").write_text("{}")
    read, _ = read_adapter(tmp_path)
    assert read["a"].dtype == np.float32
    assert np.array_equal(read["a"], values.float().numpy())


def test_what_cannot_be_read_says_what_is_wanted(tmp_path: Path) -> None:
    wanted = r"possible: adapter_config.json and adapter_model.safetensors; "
    with pytest.raises(DataFault, match=f"No such file.*{wanted}"):
        read_adapter(tmp_path)
    write_adapter(tmp_path / "torn", {"a": np.zeros(4, np.float32)}, {})
    tensors = tmp_path / "torn" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(DataFault, match=wanted):
        read_adapter(tmp_path / "torn")
    tensors.unlink()
    save_file({"a": torch.zeros(2, dtype=torch.int32)}, str(tensors))
    with pytest.raises(DataFault, match=r"adapter_model.safetensors.a: got 'I32'; possible: BF16, F16, F32, F64; "):
        read_adapter(tmp_path / "torn")
    (tmp_path / "torn" / "adapter_config.json").write_text("[]")
    with pytest.raises(DataFault, match=r"adapter_config.json: got 'list'; possible: an object; "):
        read_adapter(tmp_path / "torn")


def test_hostile_files_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nesting without end, numbers that are not there, a pipe that nobody writes to, a file that never ends."""
    folder = tmp_path / "adapter"
    write_adapter(folder, {"a": np.zeros((2, 3), np.float32)}, {"r": 1})
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good = {path: path.read_bytes() for path in (config, tensors)}

    def refused(path: Path, content: bytes | None, match: str) -> None:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        else:
            os.mkfifo(path)
        with pytest.raises(DataFault, match=match):
            read_adapter(folder)
        path.unlink()
        path.write_bytes(good[path])

    refused(config, b"[" * 200_000, "adapter_config.json and adapter_model.safetensors; save the adapter again")
    refused(config, None, "adapter_config.json: got 'no regular file'; possible: a file of at most 1048576 bytes")
    refused(tensors, None, "adapter_model.safetensors: got 'no regular file'")
    header = b'{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'
    refused(tensors, len(header).to_bytes(8, "little") + header, "adapter")
    tensors.unlink()
    tensors.symlink_to("/dev/zero")
    with pytest.raises(DataFault, match=r"adapter_model\.safetensors: got 'no regular file'"):
        read_adapter(folder)
    monkeypatch.setattr("storage.peft_files.MOST_CONFIG", 4)
    with pytest.raises(DataFault, match=r"adapter_config.json: got '\d+ bytes'; possible: a file of at most 4 bytes"):
        read_adapter(folder)


def test_a_place_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataFault, match="possible: a new folder in one that can be written"):
        write_adapter(tmp_path / "file" / "adapter", {"a": np.zeros(1, np.float32)}, {})
