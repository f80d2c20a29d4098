"""What the scheduler's events must hold before anything is changed: fields that can be written down, in their range."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from configs.errors import SpecError, refusal
from services.scheduler_events import Event


def check_plain(event: Event) -> None:
    """Refuse what could not be written down later, when it would be too late.

    Raises:
        SpecError: if a field is not plain JSON (an array's number, a lone surrogate, an integer over 64 bits).
    """
    try:
        orjson.dumps(vars(event))
    except TypeError as error:
        raise SpecError(refusal(type(event).__name__, str(error), "plain JSON values", "convert them")) from None


def checked_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of `metadata` as the journal gives it back (NaN and infinity become null, tuples lists).

    Raises:
        SpecError: if it is no mapping.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise SpecError(refusal("metadata", type(metadata).__name__, "a mapping", "send one"))
    return orjson.loads(orjson.dumps(metadata)) if metadata else {}


def digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(contents, option=orjson.OPT_SORT_KEYS)).hexdigest()


def checked_lease(lease_s: float) -> None:
    if not 0 < lease_s < float("inf"):
        raise SpecError(refusal("lease_s", lease_s, "seconds above 0", "correct it"))


def checked_reason(reason: str) -> None:
    if not reason:
        raise SpecError(refusal("reason", reason, "a sentence", "say why"))
