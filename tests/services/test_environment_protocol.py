"""The wire format: what travels comes back the same, what must not travel is refused, a bad peer breaks one client."""

import asyncio
import socket
import struct
import threading

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from configs.errors import EnvironmentFault, TenantFault
from services import environment_protocol as protocol
from services.environment_protocol import HostClient, ProtocolError

_DTYPES = st.sampled_from([np.dtype(n) for n in ("uint8", "bool", "float32", "int64", "float16", ">f4")])


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(_DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_arrays_come_back_the_same_and_writable(array):
    back = protocol.decode(bytearray(protocol.encode({"a": array, "b": [1, "x", None]})[4:]))
    assert back["a"].dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(back["a"], array)
    assert back["a"].flags.writeable
    assert back["b"] == [1, "x", None]


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array(["text"]), object(), {1, 2}, np.zeros(2, np.longdouble), np.zeros(2, "M8[s]")],
)
def test_objects_do_not_travel(value):
    with pytest.raises(ProtocolError, match="does not travel"):
        protocol.encode({"value": value})


def _body(*extension, tail=b""):
    """A body whose only array is described by `extension`."""
    message = msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(list(extension)))})
    padding = bytes(-(4 + len(message)) % 8)
    return bytearray(struct.pack(">I", len(message)) + message + padding + tail)


def test_the_layout_is_what_the_module_says():
    """A frame made by hand, byte by byte, is what `encode` makes; two arrays begin at 0 and 8."""
    sent = {"a": np.array([1, 2, 3], np.uint8), "b": np.array([1.0], np.float32)}
    extensions = [msgpack.packb(["|u1", [3], 0]), msgpack.packb(["<f4", [1], 8])]
    message = msgpack.packb({k: msgpack.ExtType(1, e) for k, e in zip("ab", extensions, strict=True)})
    padding = bytes(-(4 + len(message)) % 8)
    arrays = b"\x01\x02\x03" + bytes(5) + struct.pack("<f", 1.0) + bytes(4)
    body = struct.pack(">I", len(message)) + message + padding + arrays
    assert protocol.encode(sent) == struct.pack(">I", len(body)) + body


def test_arrays_begin_at_multiples_of_eight():
    odd = {"a": np.zeros(3, np.uint8), "b": np.arange(3, dtype=np.float64), "c": np.zeros((0, 2), np.float32)}
    back = protocol.decode(bytearray(protocol.encode(odd)[4:]))
    assert back["b"].flags.aligned
    assert back["c"].shape == (0, 2)
    np.testing.assert_array_equal(back["b"], [0, 1, 2])


@pytest.mark.parametrize(
    "extension",
    [
        ["|O", [1], 0],
        ["<f4", [1000000], 0],
        ["<f4", [-2], 0],
        ["<f4", [2], -8],
        ["<f4", [2], 8],
        ["<f4", [2**40, 2**40], 0],
        ["<f4", [2.0], 0],
        ["<f4", [True], 0],
        ["nonsense", [1], 0],
        ["(1,2", [1], 0],
        ["(09,)f4", [1], 0],
        ["<f16", [1], 0],
        [["<f4"], [1], 0],
        ["<f4", [1]],
        ["<f4", [0] * 100, 0],
    ],
    ids=str,
)
def test_an_array_that_does_not_fit_its_bytes_or_claims_objects_is_refused(extension):
    with pytest.raises(ProtocolError, match="not a message"):
        protocol.decode(_body(*extension, tail=b"12345678"))


@pytest.mark.parametrize("body", [b"", b"\0\0", struct.pack(">I", 9) + b"\x80", struct.pack(">I", 1) + b"\x90"])
def test_a_body_that_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError, match="frame: "):
        protocol.decode(bytearray(body))


def test_an_announced_length_is_checked_before_memory_is_taken():
    with pytest.raises(ProtocolError, match="announces 4294967295 bytes"):
        protocol.body_length(struct.pack(">I", 2**32 - 1))


def test_a_torn_frame_is_an_error_and_an_orderly_end_is_not():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(protocol.encode({"a": 1})[:-1])
        theirs.close()
        with pytest.raises(ProtocolError, match="ended inside it"):
            protocol.receive_frame(ours)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert protocol.receive_frame(ours) is None


def _peer(answer):
    """A client whose other end answers one request with `answer(request)`."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            request = protocol.receive_frame(theirs)
            reply = answer(request)
            if reply is not None:
                protocol.send_frame(theirs, reply)
                protocol.receive_frame(theirs)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return HostClient(ours, name="peer"), thread


def test_a_late_host_breaks_its_client_with_the_operation_and_the_time():
    ours, _theirs = socket.socketpair()
    client = HostClient(ours, name="peer")

    async def main():
        with pytest.raises(EnvironmentFault) as caught:
            await client.call("reset", 0.05, seeds=[1])
        assert str(caught.value) == "peer: reset did not return within 0.05 s; its session ends; open a new one"
        with pytest.raises(EnvironmentFault, match="did not return within"):
            await client.call("reset", 5.0, seeds=[1])

    asyncio.run(main())


def test_a_reply_to_another_request_is_an_error():
    client, _ = _peer(lambda request: {"id": request["id"] + 7, "result": 1})
    with pytest.raises(EnvironmentFault, match="got the reply to request 8 instead of 1"):
        asyncio.run(client.call("ping", 5.0))


def test_errors_keep_their_class_and_unknown_ones_are_the_environments():
    client, _ = _peer(lambda r: {"id": r["id"], "error": {"type": "TenantFault", "message": "actions: NaN"}})
    with pytest.raises(TenantFault, match=r"^actions: NaN$"):
        asyncio.run(client.call("batch_step", 5.0))
    assert client.broken is None
    client.close()
    client, _ = _peer(lambda r: {"id": r["id"], "error": {"type": "SystemExit", "message": "boo"}})
    with pytest.raises(EnvironmentFault, match=r"^boo$"):
        asyncio.run(client.call("batch_step", 5.0))
    client.close()


def test_a_client_closed_under_a_call_leaves_its_descriptors_number_to_the_next_socket():
    """The call ends with the connection; a socket that gets the same number afterwards is heard."""
    ours, theirs = socket.socketpair()

    async def main():
        loop = asyncio.get_running_loop()
        client = HostClient(ours, name="peer")
        number = ours.fileno()
        call = asyncio.create_task(client.call("ping", 30.0))
        while client._socket is None or not theirs.recv(1, socket.MSG_PEEK):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        a, b = socket.socketpair()
        with a, b:
            assert number in (a.fileno(), b.fileno())
            mine, other = (a, b) if a.fileno() == number else (b, a)
            mine.setblocking(False)
            waiting = asyncio.create_task(loop.sock_recv(mine, 4))
            await asyncio.sleep(0)
            other.sendall(b"here")
            assert await asyncio.wait_for(waiting, 5) == b"here"

    theirs.settimeout(5)
    asyncio.run(main())
    theirs.close()


def test_a_host_that_closes_is_a_fault():
    client, _ = _peer(lambda request: None)
    with pytest.raises(EnvironmentFault, match="ping failed"):
        asyncio.run(client.call("ping", 5.0))
