"""Errors of every room, sorted by consequence: who sees them and what happens next.

Each carries one line that names the field or object, what was given, what is possible and what to do.
All of them take a single message and survive pickling, since most cross a Dask actor.
"""

from __future__ import annotations


class JoyNexusError(Exception):
    """Base of all errors raised on purpose; the message is fit for a tenant, the log has the traceback."""


class SpecError(JoyNexusError):
    """Before anything starts: a declaration is wrong. The person who wrote it reads the message and mends it."""


class AdmissionRefused(JoyNexusError):
    """Not now: a bound is reached. The producer waits and tries again; nothing failed."""


class UnknownObject(JoyNexusError):
    """A tenant, job, partition, session, version or model of that name is not here; the known ones are listed."""


class Conflict(JoyNexusError):
    """The same id with other contents, a second writer, or a transition that the state forbids."""


class LeaseLost(JoyNexusError):
    """The caller no longer holds the lease (expired or re-leased); it must discard its result."""


class TenantFault(JoyNexusError):
    """The tenant's own data or numbers are at fault (NaN, wrong camera, wrong width); only its job fails."""


class EnvironmentFault(JoyNexusError):
    """A simulator crashed, hung or broke the contract; that session fails and its host is replaced."""


class DataFault(JoyNexusError):
    """Stored data is missing, torn or does not fit its manifest; nothing is read as if it were whole."""


class ServiceUnavailable(JoyNexusError):
    """A resident service is not there (yet, or any more); the caller may look it up again and retry by id."""


class NoReply(ServiceUnavailable):
    """A service did not answer in time; it may be at work still, so a call that joins by its id may be repeated."""


_LONGEST = 1000  # characters of what was given in a message


def refusal(field: str, given: object, possible: str, remedy: str) -> str:
    """One line in the form every message has: the field, what was given, what is possible, what to do."""
    text = repr(given)
    if len(text) > _LONGEST:  # of a hostile file or request, perhaps
        text = f"{text[:_LONGEST]}… ({len(text)} characters)"
    return f"{field}: got {text}; possible: {possible}; {remedy}"
