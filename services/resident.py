"""Which resident base serves a declared one; no torch, so that flow processes may import what uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from configs.errors import Conflict, UnknownObject, refusal
from configs.model import BaseModelSpec
from configs.signature import base_identity


class HasSpec(Protocol):
    """A base in memory."""

    @property
    def spec(self) -> BaseModelSpec:
        """What it was loaded as."""


B = TypeVar("B", bound=HasSpec)


def resident(bases: Mapping[str, B], wanted: BaseModelSpec) -> B:
    """The base of that name, if it is the one that was declared: another tap or revision gives other features.

    Raises:
        UnknownObject: none of that name is resident.
        Conflict: it was loaded from another declaration.
    """
    if wanted.name not in bases:
        raise UnknownObject(refusal("base_model", wanted.name, ", ".join(sorted(bases)), "use a resident one"))
    found, declared = base_identity(bases[wanted.name].spec), base_identity(wanted)
    for field in found:
        if found[field] != declared[field]:
            where = f"base_model {wanted.name!r}, {field}"
            raise Conflict(refusal(where, declared[field], f"{found[field]!r}, what is resident", "train or load anew"))
    return bases[wanted.name]
