"""Connecting to a host: over its local socket, or over TCP to the server of a remote environment.

Over TCP a handshake of fixed size comes first, so that nothing is parsed for who has no token: the server sends
`JNX1` and 32 random bytes, the client the HMAC-SHA256 of those under its token, the server one byte. A token is not
sent, and an answer that was overheard is of no use for another connection. What follows is not encrypted: between
machines, use a network of your own, a tunnel or a VPN.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Mapping

from configs.addresses import parse_address

SCHEME = "tcp://"
CHALLENGE_BYTES, ANSWER_BYTES = 36, 32
ACCEPTED, REFUSED, FULL = b"+", b"-", b"!"
_MAGIC = b"JNX1"
_SILENT_S, _BETWEEN_S, _UNANSWERED = 15, 5, 3
"""A peer that is gone without a word (a cut cable) is noticed within 30 s."""


class TokenRefused(ConnectionError):
    """The server does not know the token."""


class ServerFull(ConnectionError):
    """The server has as many connections as it takes."""


def challenge() -> bytes:
    """What a server sends first."""
    return _MAGIC + secrets.token_bytes(CHALLENGE_BYTES - len(_MAGIC))


def answer(challenged: bytes, token: str) -> bytes:
    """What shows that one has the token."""
    return hmac.digest(token.encode(), b"joynexus environment\0" + challenged, hashlib.sha256)


def recognised(challenged: bytes, given: bytes, tokens: Mapping[str, str]) -> str | None:
    """Whose token was answered with, of {name: token}; all are compared, each in constant time."""
    found = None
    for name, token in tokens.items():
        if hmac.compare_digest(answer(challenged, token), given):
            found = name
    return found


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a peer that is gone, and send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _SILENT_S), ("TCP_KEEPINTVL", _BETWEEN_S), ("TCP_KEEPCNT", _UNANSWERED)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENT_S + _BETWEEN_S * _UNANSWERED))


async def connect(address: str, token: str | None) -> socket.socket:
    """A non-blocking socket to the host: at a path, or at `tcp://host:port` after the handshake.

    Raises:
        OSError: nobody answers there, or it is no such server.
        TokenRefused, ServerFull: as the server says.
    """
    loop = asyncio.get_running_loop()
    if not address.startswith(SCHEME):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return await _connected(loop, local, address)
    host, port = parse_address(address.removeprefix(SCHEME))
    family, kind, number, _, place = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = await _connected(loop, socket.socket(family, kind, number), place)
    try:
        keep_alive(sock)
        challenged = await _exactly(loop, sock, CHALLENGE_BYTES)
        if not challenged.startswith(_MAGIC):
            raise ConnectionError(f"{address} is no environment server")
        await loop.sock_sendall(sock, answer(challenged, token or ""))
        said = await _exactly(loop, sock, 1)
        if said == FULL:
            raise ServerFull(f"{address} has as many connections as it takes")
        if said != ACCEPTED:
            raise TokenRefused(f"{address} does not know the token")
    except BaseException:
        sock.close()
        raise
    return sock


async def _connected(loop: asyncio.AbstractEventLoop, sock: socket.socket, place: object) -> socket.socket:
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, place)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        part = await loop.sock_recv(sock, length - len(got))
        if not part:
            raise ConnectionError("the server closed the connection")
        got += part
    return got
