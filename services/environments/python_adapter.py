"""Adapter for a tenant's own environment: what `package.module:factory`, called without arguments, returns.

The code lies in the registered folder, `spec["own"]["path"]`; modules that are found elsewhere first are refused, so
that nobody's environment is another one by accident. The contract is
`services.environments.contract`'s: tried when the session opens, and checked at every call.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from configs.errors import SpecError, refusal
from services.environments.adapter import one_line
from services.environments.contract import CheckedEnvironment
from services.environments.gymnasium_adapter import GymnasiumAdapter

logger = logging.getLogger(__name__)


class PythonAdapter(GymnasiumAdapter):
    """Separate environments of one factory, stepped one after another."""

    _tried = False

    def _make(self) -> Any:
        entry_point = self._spec["id"]
        factory = load_factory(entry_point, Path(self._spec["own"]["path"]).resolve())
        try:
            made = factory()
        except Exception as error:
            # A boundary: a tenant's factory raises anything.
            logger.exception("%s was called", entry_point)
            given = f"{type(error).__name__}: {one_line(error)}"
            raise SpecError(
                refusal("id", f"{entry_point}()", "an environment", f"mend the factory ({given})")
            ) from None
        env = CheckedEnvironment(self._spec, made)
        if not self._tried:
            env.begin()
            self._tried = True
        return env


def load_factory(entry_point: str, folder: Path) -> Any:
    """The callable that `package.module:factory` names in `folder`, which is on the module search path.

    Raises:
        SpecError: if the module cannot be imported, comes from elsewhere, or has no such callable.
    """
    module_name, name = entry_point.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A boundary: importing runs a tenant's code.
        logger.exception("%s was imported", module_name)
        given = f"{type(error).__name__}: {one_line(error)}"
        raise SpecError(refusal("id", entry_point, f"a module in {folder}", f"mend it ({given})")) from None
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).resolve().is_relative_to(folder):
        remedy = f"rename the package: {module_name!r} is {file or 'no file'}"
        raise SpecError(refusal("id", entry_point, f"a module in {folder}", remedy))
    factory = getattr(module, name, None)
    if not callable(factory):
        known = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise SpecError(refusal("id", entry_point, known, f"name a function of {module_name}"))
    return factory
