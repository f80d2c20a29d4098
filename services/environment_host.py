"""An environment host: a child process that holds simulators and answers the environment protocol.

`python -m services.environment_host (--control-fd N --parent PID | --control-path PATH) --listen PATH`

The control socket is inherited from the process that started the host, or, from a container, the first connection to
`--control-path`; when it closes, the host exits (as it does, on Linux, when the process that started it dies). The
listening socket takes direct connections, for instance from an inference worker: they are served only with the token
of the present session, and are closed when the next one begins. One request is carried out at a time.

Operations: `configure`, `reset`, `batch_step`, `expert_episode`, `scene_positions`, `remarks`, `ping`, `close`. On the
control socket alone: `configure`, `close`.

It may run under an interpreter that has gymnasium, numpy, msgpack and a simulator and nothing else: whatever is
imported here, and under `services.environments`, keeps to these.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

from configs.errors import EnvironmentFault, JoyNexusError, UnknownObject, refusal
from services import environment_limits
from services.environment_protocol import ProtocolError, error_reply, receive_frame, send_frame

logger = logging.getLogger("joynexus.environment_host")

FRAME_TIMEOUT_S = 30.0
"""A peer that leaves a frame half sent or half read for so long is disconnected, so that it cannot block others."""
_PR_SET_PDEATHSIG = 1


class Host:
    """The operations; no sockets in here."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._adapter: Any = None
        self._spec: dict[str, Any] | None = None
        self.token: str | None = None
        self.last_use = time.monotonic()
        self.connections = 0

    def handle(self, op: str, fields: dict[str, Any]) -> Any:
        """The result of `op`.

        Raises:
            JoyNexusError: as a message fit for a tenant.
        """
        if op == "ping":
            return {"idle_s": time.monotonic() - self.last_use, "connections": self.connections, "pid": os.getpid()}
        self.last_use = time.monotonic()
        if op == "configure":
            return self._configure(**fields)
        if self._batch is None:
            raise UnknownObject(f"{op}: this host has no session; configure it first")
        if op == "reset":
            return self._batch.reset(fields["seeds"])
        if op == "batch_step":
            return self._batch.batch_step(fields["actions"], fields["next_seeds"], fields.get("every_step", False))
        if op == "scene_positions":
            return self._batch.scene_positions()
        if op == "expert_episode":
            return self._batch.expert_episode(fields["seed"], fields["noise"])
        if op == "remarks":
            return list(getattr(self._adapter, "remarks", ()))
        known = "batch_step, close, configure, expert_episode, ping, remarks, reset, scene_positions"
        raise UnknownObject(refusal("op", op, known, "correct it"))

    def _configure(self, spec: dict[str, Any], num_envs: int, images: bool, session_token: str) -> dict[str, Any]:
        from services.environments.adapter import make_adapter
        from services.environments.batch import EnvironmentBatch

        if own := spec.get("own"):
            environment_limits.begin(own["path"], own["memory_mb"], own["cpu_s"])
        if self._adapter is None:
            self._adapter = make_adapter(spec, num_envs)
            self._spec = spec
        elif spec != self._spec:
            raise UnknownObject(refusal("spec", spec["name"], str(self._spec and self._spec["name"]), "use a new host"))
        else:
            self._adapter.resize(num_envs)
        self._batch = EnvironmentBatch(spec, self._adapter, num_envs, images=images)
        self.token = session_token
        return {
            "action_low": self._adapter.action_low.tolist(),
            "action_high": self._adapter.action_high.tolist(),
            "versions": {"python": sys.version.split()[0], **self._adapter.versions},
        }

    def close(self) -> None:
        """Release the simulator."""
        if self._adapter is not None:
            self._adapter.close()


class Server:
    """Sockets: one control connection, any number of direct ones, one request at a time."""

    def __init__(self, host: Host, control: socket.socket, listener: socket.socket) -> None:
        self._host = host
        self._control = control
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._direct: set[socket.socket] = set()

    def serve(self) -> None:
        """Until the control connection closes or asks for it."""
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                if sock is self._listener:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock.fileno() >= 0 and not self._serve_one(sock):
                    return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(FRAME_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ)
        self._direct.add(connection)
        self._host.connections = len(self._direct)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._direct.discard(sock)
        self._host.connections = len(self._direct)
        sock.close()

    def _serve_one(self, sock: socket.socket) -> bool:
        """Answer one request; False when the host is to end."""
        control = sock is self._control
        try:
            request = receive_frame(sock)
        except (OSError, ProtocolError) as error:
            logger.warning("connection dropped: %s", error)
            request = None
        if request is None:
            if control:
                return False
            self._drop(sock)
            return True
        request_id, op, token = request.pop("id", -1), request.pop("op", None), request.pop("token", None)
        if control and op == "configure":
            for direct in list(self._direct):
                self._drop(direct)
        reply = self._reply(request_id, op, token, request, control=control)
        try:
            send_frame(sock, reply)
        except ProtocolError as error:
            send_frame(sock, error_reply(request_id, EnvironmentFault(f"{op}: {error}")))
        except OSError as error:
            logger.warning("reply to %s not sent: %s", op, error)
            if not control:
                self._drop(sock)
        return not (control and op == "close")

    def _reply(self, request_id: int, op: Any, token: Any, fields: dict[str, Any], *, control: bool) -> dict[str, Any]:
        try:
            if not control:
                if self._host.token is None or token != self._host.token:
                    raise UnknownObject(f"{op}: this session is closed; open a new one")
                if op in ("configure", "close"):
                    raise UnknownObject(refusal("op", op, "any other on a direct connection", "ask the service"))
            if op == "close":
                return {"id": request_id, "result": None}
            return {"id": request_id, "result": self._host.handle(str(op), fields)}
        except JoyNexusError as error:
            return error_reply(request_id, error)
        except (environment_limits.CpuSecondsUsed, MemoryError) as error:
            return error_reply(request_id, EnvironmentFault(environment_limits.fault(str(op), error)))
        except (KeyError, TypeError) as error:
            # Missing or unexpected fields, or a fault inside the simulator: the log can tell, the tenant need not.
            logger.exception("%s failed", op)
            return error_reply(request_id, EnvironmentFault(f"{op}: {type(error).__name__} in the environment host"))
        except Exception as error:
            # A boundary: simulators raise anything, and the host has to answer.
            logger.exception("%s failed", op)
            line = " ".join(str(error).split())[:300]
            return error_reply(
                request_id, EnvironmentFault(f"{op}: the simulator raised {type(error).__name__}: {line}")
            )


def _die_with_parent(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent's thread ends; the parent may be gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)


def _listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    return listener


def _accepted(listener: socket.socket) -> socket.socket:
    """The owner's connection; nobody else is let in. Its end ends the process, in the middle of a step too."""
    with listener:
        listener.settimeout(FRAME_TIMEOUT_S)
        control, _ = listener.accept()
    threading.Thread(target=_exit_with, args=(control,), daemon=True).start()
    return control


def _exit_with(control: socket.socket) -> None:
    watched = select.poll()
    watched.register(control, select.POLLRDHUP)
    watched.poll()
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the child process."""
    parser = argparse.ArgumentParser(description="JoyNexus environment host")
    control_of = parser.add_mutually_exclusive_group(required=True)
    control_of.add_argument("--control-fd", type=int)
    control_of.add_argument("--control-path")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(arguments)
    if options.parent is not None:
        _die_with_parent(options.parent)
    # Ctrl-C in a terminal reaches the whole process group; hosts end by their control socket, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    waiting = None if options.control_path is None else _listening(options.control_path)
    listener = _listening(options.listen)
    control = socket.socket(fileno=options.control_fd) if waiting is None else _accepted(waiting)
    control.setblocking(True)
    host = Host()
    try:
        Server(host, control, listener).serve()
    finally:
        listener.close()
        host.close()
        if os.path.exists(options.listen):
            os.unlink(options.listen)


if __name__ == "__main__":
    main()
