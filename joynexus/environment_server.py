"""`joynexus env serve` and `joynexus env register`: a preset served to other installations, folders with own code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from configs.errors import SpecError, refusal
from configs.home import Home


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The grammar of both, below `joynexus env`."""
    text = "Serve an environment preset over TCP to installations whose preset names this address in `remote`."
    serving = verbs.add_parser("serve", help=text, description=text)
    serving.add_argument("preset", help="environment preset; its `remote`, if any, says where the token is")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serving.add_argument("--port", type=int, required=True, help="port; 0 takes a free one")
    token = serving.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="FILE", help="file that holds the token, of mode 600")
    token.add_argument("--token-variable", metavar="NAME", help="environment variable that holds the token")
    serving.add_argument("--sessions", type=int, default=4, help="sessions at one time, a process each (default: 4)")
    serving.add_argument("--max-message-mb", type=int, default=64, help="of one request (default: 64)")
    serving.set_defaults(run=serve)
    text = "Give a folder with tenants' own environments the name by which presets find it."
    registering = verbs.add_parser("register", help=text, description=text)
    registering.add_argument("name")
    registering.add_argument("folder", type=Path)
    registering.set_defaults(run=register)


def register(arguments: argparse.Namespace, home: Home) -> int:
    """Register a folder."""
    from configs import environment_folders

    print(f"{arguments.name}: {environment_folders.register(home, arguments.name, arguments.folder)}")
    return 0


def serve(arguments: argparse.Namespace, home: Home) -> int:
    """Serve a preset until SIGINT or SIGTERM.

    Raises:
        SpecError: there is no such preset or token, or nobody can listen there.
    """
    from configs import presets
    from configs.environment_hosting import read_token
    from services.environment_server import EnvironmentServer
    from services.environment_server import serve as serve_forever

    spec = presets.environment(arguments.preset)
    for field, value, most in (
        ("sessions", arguments.sessions, 256),
        ("max-message-mb", arguments.max_message_mb, 256),
    ):
        if not 0 < value <= most:
            raise SpecError(refusal(f"--{field}", value, f"1 to {most}", "choose one of these"))
    if arguments.token_file is not None:
        token = read_token(str(arguments.token_file.expanduser().resolve()), None)
    elif arguments.token_variable is not None:
        token = read_token(None, arguments.token_variable)
    elif spec.remote is not None:
        token = spec.remote.token()
    else:
        possible = "--token-file FILE or --token-variable NAME"
        raise SpecError(refusal("token", None, possible, "name where it is: without one anybody could connect"))
    server = EnvironmentServer(
        spec,
        token,
        max_sessions=arguments.sessions,
        max_message_bytes=arguments.max_message_mb << 20,
        home=home,
    )

    def told(port: int) -> None:
        bound = f"up to {arguments.sessions} sessions; Ctrl-C ends it"
        print(f"{spec.name} is served at {arguments.host}:{port}, {bound}", flush=True)

    async def main() -> None:
        serving = asyncio.ensure_future(serve_forever(server, arguments.host, arguments.port, told))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(main())
    except OSError as error:
        given = f"{arguments.host}:{arguments.port}"
        raise SpecError(refusal("--port", given, "a free address of this machine", f"choose one ({error})")) from None
    return 0
