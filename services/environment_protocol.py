"""The protocol between an environment host and those who drive it: msgpack frames over a socket, local or not.

Frame: 4 bytes, the body's length (unsigned, big-endian), then the body: 4 bytes, the message's length; the message in
msgpack; zeros up to a multiple of 8; the arrays' bytes in C order, each from a multiple of 8 on. In the message an
array is msgpack extension 1: `[dtype string, shape, where its bytes begin, counted from the first array's]`, in
msgpack. So a picture is copied once on each side. Nothing is pickled, a body is at most `MAX_BODY_BYTES`, and only
plain number types are taken, so that a tenant's own simulator can be at the other end.

Request  `{"id": int, "op": str, "token": str | None, **fields}`; reply `{"id": int, "result": …}` or
`{"id": int, "error": {"type": NAME, "message": one line}}`, NAME being a class of `configs.errors`.

First the *core* (encode, decode, one frame each way), then `HostClient`, which adds connecting, matching of ids,
time-outs and errors. A client that timed out is broken for good: its stream could still carry the late reply.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from configs import errors
from configs.errors import EnvironmentFault, JoyNexusError
from services import environment_tcp

MAX_BODY_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct(">I")
_ARRAY = 1
_ALIGNED = 8  # bytes; torch and numpy compute on whole numbers
_NUMBERS = ("?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, _NUMBERS)}


class ProtocolError(ValueError):
    """A frame that is too long, torn or not of this protocol; the connection cannot be used any further."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame.

    Raises:
        ProtocolError: if the body is longer than `MAX_BODY_BYTES` or holds a type that does not travel.
    """
    # Where the arrays' bytes begin depends on the message's length, so what it says counts from their first.
    arrays: list[np.ndarray] = []
    used = 0

    def pack_array(value: Any) -> Any:
        nonlocal used
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} does not travel")
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in _DTYPES:
            raise TypeError(f"array of {value.dtype} does not travel; use bool, integers or floats of up to 64 bits")
        begin, used = used, used + _padded(value.nbytes)
        arrays.append(np.ascontiguousarray(value, dtype))
        return msgpack.ExtType(_ARRAY, msgpack.packb([dtype.str, list(value.shape), begin]))

    try:
        packed = msgpack.packb(message, default=pack_array)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"message: {error}") from None
    first = _padded(_HEADER.size + len(packed))
    if first + used > MAX_BODY_BYTES:
        raise ProtocolError(f"message: got {first + used} bytes; possible: up to {MAX_BODY_BYTES}; send it in parts")
    parts: list[Any] = [_HEADER.pack(first + used), _HEADER.pack(len(packed)), packed]
    parts.append(bytes(first - _HEADER.size - len(packed)))
    for array in arrays:
        parts += [array.data.cast("B") if array.size else b"", bytes(_padded(array.nbytes) - array.nbytes)]
    return b"".join(parts)


def decode(body: bytearray) -> dict[str, Any]:
    """The message of one body; its arrays are writable and share the body's memory.

    Raises:
        ProtocolError: if it is not a msgpack map of plain values and arrays.
    """
    try:
        (length,) = _HEADER.unpack_from(body)
        end = _HEADER.size + length
        if end > len(body):
            raise ValueError(f"a message of {length} bytes in a body of {len(body)}")
        first = _padded(end)
        message = msgpack.unpackb(
            memoryview(body)[_HEADER.size : end],
            ext_hook=lambda code, data: _array_of(body, first, code, data),
            strict_map_key=True,
        )
    except (ValueError, TypeError, struct.error, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame: not a message ({error})") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"frame: got {type(message).__name__}; possible: a map")
    return message


def body_length(header: bytes | bytearray, longest: int = MAX_BODY_BYTES) -> int:
    """Length that a header announces, checked before anything is allocated for it."""
    (length,) = _HEADER.unpack(header)
    if length > longest:
        raise ProtocolError(f"frame: announces {length} bytes; possible: up to {longest}")
    return int(length)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _array_of(body: bytearray, first: int, code: int, data: bytes) -> np.ndarray:
    """The array that an extension describes; every number of it is the peer's."""
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype_name, shape, begin = msgpack.unpackb(data)
    dtype = _DTYPES.get(dtype_name)  # numpy would take names that are little programs
    sizes = [*shape, begin]
    if dtype is None or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"array of {dtype_name}, shape {shape}, at {begin} does not travel")
    count = math.prod(shape)
    if first + begin + count * dtype.itemsize > len(body):
        raise ValueError(f"array of {dtype_name} and shape {shape} goes beyond the body's {len(body)} bytes")
    if count == 0:  # nothing may lie behind the last array's bytes
        return np.empty(shape, dtype)
    return np.frombuffer(body, dtype, count, first + begin).reshape(shape)


def send_frame(sock: socket.socket, message: dict[str, Any]) -> None:
    """Blocking send of one frame."""
    sock.sendall(encode(message))


def receive_frame(sock: socket.socket) -> dict[str, Any] | None:
    """Blocking receipt of one message; None where the other side closed between two frames."""
    header = _receive_exactly(sock, _HEADER.size)
    if header is None:
        return None
    body = _receive_exactly(sock, body_length(header))
    if body is None:
        raise ProtocolError("frame: the connection ended inside it")
    return decode(body)


def _receive_exactly(sock: socket.socket, length: int) -> bytearray | None:
    buffer = bytearray(length)
    view, got = memoryview(buffer), 0
    while got < length:
        count = sock.recv_into(view[got:])
        if count == 0:
            if got == 0:
                return None
            raise ProtocolError("frame: the connection ended inside it")
        got += count
    return buffer


def error_reply(request_id: int, error: JoyNexusError) -> dict[str, Any]:
    """The reply that carries an error of ours by name."""
    return {"id": request_id, "error": {"type": type(error).__name__, "message": str(error)}}


def longest_s(op: str, fields: Mapping[str, Any], step_timeout_s: float, max_episode_steps: int) -> float:
    """How long a call may take: `step_timeout_s` for every step that it asks for, one where it asks for none.

    Args:
        op: the operation; `batch_step` asks for H steps, `expert_episode` for an episode.
        fields: the operation's; `actions` float32 [B, H, A].
        step_timeout_s: of the environment's declaration.
        max_episode_steps: likewise.
    """
    steps = max_episode_steps if op == "expert_episode" else 1
    actions = fields.get("actions")
    if op == "batch_step" and isinstance(actions, np.ndarray) and actions.ndim == 3:
        steps = max(1, actions.shape[1])
    return step_timeout_s * steps


class HostClient:
    """Drives one host from an event loop; calls are made one after another.

    Args:
        address: path of the host's socket, `tcp://host:port` of a remote environment's server, or a connected socket.
        token: what the session's opener was given; None on the owner's control socket.
        name: how messages call the host.
    """

    def __init__(self, address: str | socket.socket, *, token: str | None = None, name: str = "host") -> None:
        self._address = address
        self._token = token
        self._name = name
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: str | None = None
        self._next_id = 0
        self._lock = asyncio.Lock()

    @property
    def broken(self) -> str | None:
        """Why this client cannot be used any more, or None."""
        return self._broken

    async def call(self, op: str, timeout_s: float, **fields: Any) -> Any:
        """The result of one operation.

        Raises:
            EnvironmentFault: the host did not answer in `timeout_s`, closed the connection, broke the protocol, or
                its simulator failed. After the first three the client stays broken.
            JoyNexusError: another refusal of the host, by its own class; the client stays usable.
        """
        async with self._lock:
            if self._broken is not None:
                raise EnvironmentFault(self._broken)
            self._next_id += 1
            request = {"id": self._next_id, "op": op, "token": self._token, **fields}
            try:
                frame = encode(request)
            except ProtocolError as error:
                raise errors.TenantFault(f"{self._name}: {op}: {error}") from None
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._exchange(frame)
            except TimeoutError:
                raise self._break(f"{op} did not return within {timeout_s:g} s") from None
            except (OSError, ProtocolError) as error:
                raise self._break(f"{op} failed ({error or type(error).__name__})") from None
            except BaseException:
                # Cancelled half-way: the reply may still come, so the stream is of no use any more.
                self._break(f"{op} was cancelled")
                raise
            if reply.get("id") != self._next_id:
                raise self._break(f"{op} got the reply to request {reply.get('id')} instead of {self._next_id}")
        if "error" in reply:
            raise _error_from(reply["error"])
        return reply["result"]

    async def _exchange(self, frame: bytes) -> dict[str, Any]:
        self._loop = loop = asyncio.get_running_loop()
        if self._socket is None:
            if isinstance(self._address, str):
                self._socket = await environment_tcp.connect(self._address, self._token)
            else:
                self._socket = self._address
                self._socket.setblocking(False)
        await loop.sock_sendall(self._socket, frame)
        header = await self._exactly(loop, self._socket, _HEADER.size)
        return decode(await self._exactly(loop, self._socket, body_length(header)))

    @staticmethod
    async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, length: int) -> bytearray:
        buffer = bytearray(length)
        view, got = memoryview(buffer), 0
        while got < length:
            count = await loop.sock_recv_into(sock, view[got:])
            if count == 0:
                raise ProtocolError("the host closed the connection")
            got += count
        return buffer

    def _break(self, reason: str) -> EnvironmentFault:
        if self._broken is None:
            self._broken = f"{self._name}: {reason}; its session ends; open a new one"
        self.close()
        return EnvironmentFault(self._broken)

    def close(self) -> None:
        """Close the connection; harmless if repeated."""
        if self._broken is None:
            self._broken = f"{self._name}: the client was closed; open a new session"
        if self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                # A call may wait on it still; else the loop would take the next socket of this number for it.
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None


def _error_from(error: dict[str, Any]) -> JoyNexusError:
    cls = getattr(errors, str(error.get("type")), None)
    if not (isinstance(cls, type) and issubclass(cls, JoyNexusError)):
        cls = EnvironmentFault
    return cls(str(error.get("message")))
