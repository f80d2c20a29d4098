"""Episodes on their way into a dataset: whole or not there, read back to the bit, and names with one writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.errors import Conflict, DataFault
from configs.home import PROJECT_ROOT
from storage.dataset_names import claimed, clean
from storage.episode_spool import EpisodeSpool

PICTURES = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
STATE = np.array([[0.1, -0.0], [np.float32(1e-40), 3.0], [1.0, 2.0]], np.float32)


def test_an_episode_comes_back_to_the_bit(tmp_path: Path) -> None:
    spool = EpisodeSpool(tmp_path / "spool")
    assert spool.facts(4) is None
    spool.put(4, {"image.top": PICTURES, "state": STATE[:, ::-1]}, {"seed": 4, "success": True, "told": "grüß"})
    arrays, facts = EpisodeSpool(tmp_path / "spool").get(4)
    assert facts == spool.facts(4) == {"seed": 4, "success": True, "told": "grüß"}
    assert arrays["image.top"].tobytes() == PICTURES.tobytes()
    assert arrays["state"].tobytes() == np.ascontiguousarray(STATE[:, ::-1]).tobytes()
    assert (arrays["state"].dtype, arrays["image.top"].dtype) == (np.float32, np.uint8)
    assert [p.name for p in (tmp_path / "spool").iterdir()] == ["4.episode"]


@pytest.mark.parametrize("length", [0, 10, 200])
def test_a_torn_episode_is_as_none(tmp_path: Path, length: int) -> None:
    spool = EpisodeSpool(tmp_path)
    spool.put(1, {"x": PICTURES}, {"seed": 1})
    file = tmp_path / "1.episode"
    file.write_bytes(file.read_bytes()[:length])
    assert spool.facts(1) is None
    assert not file.exists(), "so that it is made anew"


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    spool = EpisodeSpool(tmp_path)
    spool.put(1, {"x": PICTURES}, {"seed": 1})
    file = tmp_path / "1.episode"
    content = bytearray(file.read_bytes())
    content[120] ^= 255
    file.write_bytes(content)
    with pytest.raises(DataFault, match=r"episode 1 in .*: it is torn"):
        spool.get(1)


def test_a_claim_is_one_writers_and_ends_with_its_process(tmp_path: Path) -> None:
    """Another process that is killed inside its claim; what it left is found and cleaned, what is kept stays."""
    code = (
        "import sys, time; from pathlib import Path; from storage.dataset_names import claimed\n"
        f"with claimed(Path({str(tmp_path)!r}), 'mine') as at:\n"
        "    (at / 'mine.abc').mkdir(); (at / 'mine.kept').mkdir(); (at / 'mine2.abc').mkdir()\n"
        "    (at / '.writing' / 'mine.new.abc').mkdir(parents=True)\n"
        "    print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT_ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(Conflict, match="got 'mine'; possible: a name that nobody is writing"):
            claimed(tmp_path, "mine").__enter__()
        with claimed(tmp_path, "other"):
            pass
        other.kill()
    with claimed(tmp_path, "mine") as building:
        assert clean(building, "mine", building / "mine.kept") == ["mine.new.abc", "mine.abc"]
        assert {p.name for p in building.iterdir() if p.is_dir()} == {"mine.kept", "mine2.abc", ".writing"}
