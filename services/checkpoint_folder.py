"""A checkpoint's folder as the small bases are saved: whole or not at all, and never over somebody else's."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.errors import Conflict, refusal


def check(folder: Path, report_name: str, kind: str) -> None:
    """Whether `folder` may be written: it is not there, empty, or holds a report of that name.

    Args:
        folder: to be written.
        report_name: of the file that marks our own.
        kind: what ours is, in words.

    Raises:
        Conflict: if it holds something else.
    """
    if folder.exists() and not (folder / report_name).exists() and any(folder.iterdir()):
        raise Conflict(
            refusal("out_folder", str(folder), f"a new folder or an earlier {kind}", "choose another or remove it")
        )


def save(folder: Path, parts: Iterable[Any], report_name: str, report: dict[str, Any]) -> None:
    """Write beside the target, then swap, so that whoever loads it finds an old or a new one and nothing half.

    Args:
        folder: becomes the checkpoint.
        parts: model, tokenizer and image processor of transformers.
        report_name: of the report's file.
        report: how it was made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    written, former = folder.with_name(f".{folder.name}.{mark}"), folder.with_name(f".{folder.name}.{mark}.former")
    try:
        written.mkdir()
        for part in parts:
            part.save_pretrained(written)
        (written / report_name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for file in written.iterdir():
            os.chmod(file, 0o644)  # the weights' writer makes them private to one user
        if folder.exists():
            folder.rename(former)
        written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
