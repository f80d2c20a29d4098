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
    back = protocol.decode(protocol.encode({"a": array, "b": [1, "x", None]})[4:])
    assert back["a"].dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(back["a"], array)
    assert back["a"].flags.writeable
    assert back["b"] == [1, "x", None]


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), object(), {1, 2}])
def test_objects_do_not_travel(value):
    with pytest.raises(ProtocolError, match="does not travel"):
        protocol.encode({"value": value})


def test_an_array_that_claims_objects_is_refused():
    head = msgpack.packb(["|O", [1]])
    body = msgpack.packb({"a": msgpack.ExtType(1, head + b"12345678")})
    with pytest.raises(ProtocolError, match="not a message"):
        protocol.decode(body)


def test_a_shape_that_does_not_fit_its_bytes_is_refused():
    head = msgpack.packb(["<f4", [1000000]])
    with pytest.raises(ProtocolError, match="not a message"):
        protocol.decode(msgpack.packb({"a": msgpack.ExtType(1, head + b"1234")}))


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


def test_a_host_that_closes_is_a_fault():
    client, _ = _peer(lambda request: None)
    with pytest.raises(EnvironmentFault, match="ping failed"):
        asyncio.run(client.call("ping", 5.0))
