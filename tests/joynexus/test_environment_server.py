"""`joynexus env serve` and `joynexus env register`, as one types them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs import environment_folders, presets
from configs.home import PROJECT_ROOT, Home
from joynexus.command import main
from services import environment_tcp
from services.environment_protocol import HostClient

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A file with the token that only its owner reads."""
    file = tmp_path / "env.token"
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\n")
    return file


def test_a_served_preset_is_used_with_the_token_and_its_end_ends_its_hosts(token_file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "joynexus.command",
        "env",
        "serve",
        "reach",
        "--port",
        "0",
        "--token-file",
        token_file,
    ]
    with subprocess.Popen(
        command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        said = server.stdout.readline()
        found = re.fullmatch(r"reach is served at (127\.0\.0\.1:[0-9]+), up to 4 sessions; Ctrl-C ends it\n", said)
        assert found is not None, said + server.stderr.read()

        async def use() -> list[psutil.Process]:
            owner = HostClient(await environment_tcp.connect(f"tcp://{found[1]}", TOKEN))
            spec = presets.environment("reach").model_dump(mode="json")
            fields = {"num_envs": 2, "images": True, "session_token": "s" * 32, "tenant_id": "ada"}
            opened = await owner.call("configure", 60.0, spec=spec, **fields)
            assert opened["action_low"] == [-1.0, -1.0]
            seen = await owner.call("reset", 60.0, seeds=[1, 2])
            assert seen["images"]["top"].shape == (2, 64, 64, 3)
            hosts = psutil.Process(server.pid).children()
            assert len(hosts) == 1
            owner.close()
            return hosts

        hosts = asyncio.run(asyncio.wait_for(use(), 120))
        server.terminate()
        log = server.stderr.read()
        assert server.wait(20) == 0, log
        assert TOKEN not in said + log
    assert psutil.wait_procs(hosts, timeout=20)[1] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "moon", "--port", "0"], "environment: got 'moon'; possible: "),
        (["serve", "reach", "--port", "0"], "token: got None; possible: --token-file FILE or --token-variable NAME"),
        (["serve", "reach", "--port", "0", "--sessions", "0"], "--sessions: got 0; possible: 1 to 256"),
        (["register", "../up", "."], "name: got '../up'"),
        (["register", "toys", "nowhere"], "folder: got 'nowhere'; possible: an existing folder; check the path"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["--home", str(tmp_path), "env", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_folder_is_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--home", str(tmp_path), "env", "register", "toys", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"toys: {tmp_path}\n"
    assert environment_folders.registered(Home(tmp_path)) == {"toys": tmp_path}
