"""Where an environment's hosts run when they are not plain children of the environment worker: elsewhere, or confined.

A secret is never part of a declaration: it names the file or the variable that holds it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from configs.addresses import parse_address
from configs.errors import SpecError, refusal
from configs.spec import Name, Spec

ENTRY_POINT = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_VARIABLE = r"^[A-Z][A-Z0-9_]{0,62}$"
_IMAGE = r"^[a-z0-9][A-Za-z0-9._/:@-]{0,254}$"
_TOKEN_BYTES = range(16, 4097)


def _address(address: str) -> str:
    parse_address(address)
    return address


class RemoteSpec(Spec):
    """A server, started by `joynexus env serve`, that runs the environment elsewhere."""

    address: Annotated[str, AfterValidator(_address)] = Field(description="host:port of the server.")
    token_file: str | None = Field(
        default=None, description="Absolute path of a file that holds the server's token and that only its owner reads."
    )
    token_variable: str | None = Field(
        default=None, pattern=_VARIABLE, description="Environment variable of the platform that holds the token."
    )
    connect_timeout_s: float = Field(
        default=30.0, ge=0, le=600, description="How long a server that does not answer is tried, with longer pauses."
    )

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if (self.token_file is None) == (self.token_variable is None):
            raise ValueError(
                f"token_file: got {self.token_file!r} with token_variable {self.token_variable!r}; possible: one of "
                "the two; name where the token is"
            )
        if self.token_file is not None and not Path(self.token_file).is_absolute():
            raise ValueError(f"token_file: got {self.token_file!r}; possible: an absolute path; write it in full")
        return self

    def token(self) -> str:
        """The secret itself; see `read_token`."""
        return read_token(self.token_file, self.token_variable)


class OwnSpec(Spec):
    """A tenant's own environment: the folder with its code, and what its process may use."""

    folder: Name = Field(description="Folder that the operator registered with `joynexus env register`.")
    memory_mb: int = Field(
        default=4096,
        ge=256,
        description="Of a process: its address space (RLIMIT_AS), so what it maps counts too. Of a container: memory.",
    )
    cpu_s: float = Field(default=3600.0, gt=0, description="CPU seconds of one session in one process.")
    image: str | None = Field(
        default=None,
        pattern=_IMAGE,
        description="Container image that runs it: Python with gymnasium, numpy and msgpack. None: a plain process.",
    )


def read_token(file: str | None, variable: str | None) -> str:
    """The token that a file or an environment variable holds; no message shows it.

    Raises:
        SpecError: if it is not there, too short to be a secret, or in a file that others may read.
    """
    if file is not None:
        field, where = "token_file", file
        try:
            with Path(file).open("rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                if mode & (stat.S_IRWXG | stat.S_IRWXO):
                    remedy = f"run `chmod 600 {file}`"
                    raise SpecError(refusal(field, file, "a file that only its owner may read", remedy))
                text = opened.read(_TOKEN_BYTES.stop).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            remedy = f"put the token there ({type(error).__name__})"
            raise SpecError(refusal(field, file, "a readable file with one line", remedy)) from None
    else:
        field, where = "token_variable", str(variable)
        text = os.environ.get(where, "").strip()
    if len(text) not in _TOKEN_BYTES:
        possible = f"{_TOKEN_BYTES.start} characters or more, such as `openssl rand -hex 32` prints"
        raise SpecError(
            f"{field}: {where!r} holds {len(text)} characters; possible: {possible}; put such a token there"
        )
    return text
