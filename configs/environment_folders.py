"""Folders with tenants' own environments, registered by the operator under names: declarations name, never point.

Kept as JSON in the home folder: {name: absolute path}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from configs.errors import SpecError, refusal
from configs.home import Home
from configs.spec import checked_name


def registered(home: Home) -> dict[str, Path]:
    """Folders by name.

    Raises:
        SpecError: if the file is not what `register` wrote.
    """
    try:
        found = json.loads(home.environment_folders.read_text(encoding="utf-8"))
        return {checked_name(name): Path(folder) for name, folder in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        line = " ".join(str(error).split())[:300]
        raise SpecError(
            f"{home.environment_folders}: not a list of folders by name ({line}); mend or remove it"
        ) from None


def register(home: Home, name: str, folder: Path) -> Path:
    """Give `folder` a name; a name that there is gets the new folder. The folder in full.

    Raises:
        SpecError: if the name cannot be one or the folder is not there.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise SpecError(f"name: {error}") from None
    full = folder.expanduser().resolve()
    if not full.is_dir():
        raise SpecError(refusal("folder", str(folder), "an existing folder", "check the path"))
    known = {**registered(home), name: full}
    path = home.environment_folders
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({n: str(f) for n, f in known.items()}, indent=2, sort_keys=True) + "\n")
    partial.replace(path)
    return full


def folder_of(home: Home | None, name: str) -> Path:
    """The folder of that name.

    Raises:
        SpecError: if none is registered under it, or it is gone.
    """
    known = registered(home) if home is not None else {}
    if name not in known:
        names = ", ".join(sorted(known)) or "none is registered"
        raise SpecError(refusal("own.folder", name, names, "run `joynexus env register NAME FOLDER`"))
    if not known[name].is_dir():
        raise SpecError(
            refusal("own.folder", name, "a folder that exists", f"{known[name]} is gone; register it again")
        )
    return known[name]
