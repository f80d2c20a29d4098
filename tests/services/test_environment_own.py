"""A tenant's own environment: found in its folder alone, limited, kept from others, in a process or a container."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import environment_folders
from configs.environment import EnvironmentSpec
from configs.environment_hosting import OwnSpec, RemoteSpec, read_token
from configs.errors import EnvironmentFault, SpecError
from configs.home import PROJECT_ROOT, Home
from configs.spec import parse
from services import environment_launch
from services.environment_launch import Launch, container_command
from services.environment_protocol import HostClient
from services.environments.python_adapter import load_factory
from tests.services.environment_specs import toy
from tests.services.test_environment_service import action, pids, request, run, service

HUNGRY, BUSY, STEP = -0.95, -0.7, 0.0

CODE = """
import os, sys, numpy as np
from gymnasium import spaces

class Counter:
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    sessions = []

    def reset(self, *, seed):
        self.state = np.array([seed, 0], np.float32)
        told = "|".join([*self.sessions, *sorted(k for k in os.environ if "SECRET" in k)])
        return self.observation(), {"instruction": told or "nothing"}

    def step(self, action):
        if action[0] < -0.9:
            self.kept = np.ones(4 << 30, np.uint8)
        if action[0] < -0.6:
            while True:
                try:
                    sum(range(1000))
                except Exception:
                    pass
        self.state[1] += 1
        self.sessions.append("stepped")
        return self.observation(), 1.0, False, False, {"success": False}

    def observation(self):
        return {"proprioception": self.state, "front": np.full((4, 6, 3), self.state[1], np.uint8)}

def make():
    return Counter()

def broken():
    raise ValueError("no such arm")

number = 7
"""


@pytest.fixture
def home(tmp_path):
    """An installation where the folder `toys`, with the package `toybox`, is registered."""
    folder = tmp_path / "code"
    (folder / "toybox").mkdir(parents=True)
    (folder / "toybox" / "__init__.py").touch()
    (folder / "toybox" / "counter.py").write_text(CODE)
    (folder / "toybox" / "torn.py").write_text("import nothing_of_that_name")
    made = Home(tmp_path / "home")
    environment_folders.register(made, "toys", folder)
    return made


def own(entry="toybox.counter:make", *, memory_mb=2048, cpu_s=600.0, image=None, folder="toys", **changes):
    limits = {"folder": folder, "memory_mb": memory_mb, "cpu_s": cpu_s, "image": image}
    return toy(kind="python", id=entry, own=limits, **changes)


def test_an_own_environment_runs_and_is_one_tenants_alone(home, monkeypatch):
    """It sees no variable of the platform's; a warm process goes on for its tenant, and never for another."""
    monkeypatch.setenv("JOYNEXUS_SECRET", "x")

    async def main():
        async with service(home=str(home.root)) as svc:
            told, seen = [], []
            for tenant in ("ada", "ada", "bob"):
                name = (await svc.open(request(own(), tenant_id=tenant)))["session_id"]
                first = await svc.reset(name, [3, 4])
                np.testing.assert_array_equal(first["proprioception"], [[3, 0], [4, 0]])
                result = await svc.batch_step(name, action(STEP, 2, 2), [None, None])
                np.testing.assert_array_equal(result["observation"]["images"]["front"][:, 0, 0], np.full((2, 3), 2))
                told.append(first["instructions"][0])
                seen += (await pids(svc))[name]
                await svc.close(name)
            assert seen[0] == seen[1] != seen[2]
            # The trial steps once; what ada's sessions left there is hers.
            assert told == ["stepped", "|".join(["stepped"] * (1 + 2 * 2)), "stepped"]

    run(main())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (HUNGRY, r"batch_step: got Unable to allocate 4.00 GiB .*; possible: own.memory_mb, which is 2048; use less"),
        (BUSY, r"batch_step: own.cpu_s is used up; possible: that many CPU seconds a session; compute less"),
    ],
)
def test_a_limit_ends_its_session_alone_and_says_which(home, value, reason):
    async def main():
        async with service(home=str(home.root)) as svc:
            limited = (await svc.open(request(own(cpu_s=1.0 if value == BUSY else 600.0, step_timeout_s=100.0))))[
                "session_id"
            ]
            neighbour = (await svc.open(request(own(), tenant_id="bob")))["session_id"]
            await svc.reset(limited, [1, 2])
            await svc.reset(neighbour, [3, 4])
            with pytest.raises(EnvironmentFault, match=reason):
                await svc.batch_step(limited, action(value), [None, None])
            assert list(await pids(svc)) == [neighbour]
            result = await svc.batch_step(neighbour, action(STEP), [None, None])
            np.testing.assert_array_equal(result["observation"]["proprioception"], [[3, 1], [4, 1]])

    run(main())


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("toybox.nowhere:make", "mend it (ModuleNotFoundError: No module named 'toybox.nowhere')"),
        ("toybox.torn:make", "mend it (ModuleNotFoundError: No module named 'nothing_of_that_name')"),
        ("toybox.counter:number", "id: got 'toybox.counter:number'; possible: Counter, make, broken; name a function"),
        ("configs.home:Home", "rename the package: 'configs.home' is "),
    ],
)
def test_what_is_not_in_the_folder_is_refused_with_what_is(home, monkeypatch, entry, wanted):
    folder = environment_folders.folder_of(home, "toys")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    for name in [name for name in sys.modules if name.startswith("toybox")]:  # of another test's folder
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SpecError) as caught:
        load_factory(entry, folder)
    assert wanted in str(caught.value)


def test_an_own_environment_that_cannot_be_made_is_the_declarations_fault(home):
    async def main():
        async with service(home=str(home.root)) as svc:
            with pytest.raises(SpecError, match=r"mend the factory \(ValueError: no such arm\)"):
                await svc.open(request(own("toybox.counter:broken")))
            with pytest.raises(
                SpecError, match=r"own\.folder: got 'games'; possible: toys; run `joynexus env register"
            ):
                await svc.open(request(own(folder="games")))
            assert (await svc.capabilities())["hosts"]["in_use"] == 0

    run(main())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "toybox/../x:make"}, "possible: package.module:factory; name the function to call"),
        ({"id": "toybox.counter"}, "possible: package.module:factory; name the function to call"),
        ({"own": None}, "possible: given with python alone; mend one"),
        ({"kind": "gymnasium"}, "possible: given with python alone; mend one"),
        ({"own": {"folder": "../etc"}}, "no path, no dot, no space"),
        ({"own": {"folder": "toys", "image": "--privileged"}}, "own.image"),
        ({"remote": {"address": "host"}}, "possible: host:port, such as 10.0.0.7:7400; correct it"),
        ({"remote": {"address": "h:1"}}, "possible: one of the two; name where the token is"),
        ({"remote": {"address": "h:1", "token_file": "secret"}}, "possible: an absolute path; write it in full"),
    ],
)
def test_wrong_declarations_are_refused(changes, message):
    with pytest.raises(SpecError) as caught:
        parse(EnvironmentSpec, own() | changes, where="spec")
    assert message in str(caught.value)


def test_folders_are_registered_by_name(home, tmp_path):
    with pytest.raises(SpecError, match=r"name: got '\.\./x'"):
        environment_folders.register(home, "../x", tmp_path)
    with pytest.raises(SpecError, match="possible: an existing folder; check the path"):
        environment_folders.register(home, "gone", tmp_path / "gone")
    environment_folders.register(home, "other", tmp_path)
    assert environment_folders.registered(home) == {"toys": tmp_path / "code", "other": tmp_path}
    assert json.loads(home.environment_folders.read_text())["other"] == str(tmp_path)
    shutil.rmtree(tmp_path / "code")
    with pytest.raises(SpecError, match="is gone; register it again"):
        environment_folders.folder_of(home, "toys")


def test_a_token_is_read_from_where_only_its_owner_reads_and_never_shown(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("a-secret-of-some-length\n")
    file.chmod(0o644)
    with pytest.raises(SpecError, match="possible: a file that only its owner may read; run `chmod 600"):
        read_token(str(file), None)
    file.chmod(0o600)
    spec = RemoteSpec(address="h:1", token_file=str(file))
    assert spec.token() == "a-secret-of-some-length"
    assert "a-secret" not in repr(spec) + spec.model_dump_json()
    monkeypatch.setenv("SHORT_TOKEN", "short")
    with pytest.raises(SpecError) as caught:
        read_token(None, "SHORT_TOKEN")
    assert "holds 5 characters; possible: 16 characters or more" in str(caught.value)
    assert "'short'" not in str(caught.value)
    with pytest.raises(SpecError, match=r"put the token there \(FileNotFoundError\)"):
        read_token(str(tmp_path / "none"), None)


def test_a_containers_command_line_confines_it():
    """Word by word: what is mounted and how, and nothing of the platform's environment."""
    launch = Launch(own=True, engine="docker", image="lab/arm:3", folder="/srv/toys", memory_mb=512)
    command = container_command(launch, "joynexus-hosts-x-1", Path("/tmp/joynexus-hosts-x/1"))
    wanted = f"""docker run --rm --init --name joynexus-hosts-x-1 --pull never
        --network none --read-only --tmpfs /tmp --cap-drop ALL
        --security-opt no-new-privileges --pids-limit 256 --user {os.getuid()}:{os.getgid()}
        --memory 512m --memory-swap 512m --cpus 1
        --volume /tmp/joynexus-hosts-x/1:/run/joynexus --volume /srv/toys:/opt/own:ro
        --volume {PROJECT_ROOT}/services:/opt/joynexus/services:ro
        --volume {PROJECT_ROOT}/configs:/opt/joynexus/configs:ro
        --workdir /opt/joynexus --env PYTHONPATH=/opt/joynexus --env PYTHONDONTWRITEBYTECODE=1
        --env OMP_NUM_THREADS=1 --env MKL_NUM_THREADS=1 --env OPENBLAS_NUM_THREADS=1 --env NUMEXPR_NUM_THREADS=1
        lab/arm:3 python -m services.environment_host
        --control-path /run/joynexus/control.sock --listen /run/joynexus/host.sock"""
    assert command == wanted.split()


def test_an_image_is_refused_where_no_engine_answers(home):
    engine, why = environment_launch.answering_engine()
    if engine is not None:
        pytest.skip(f"{engine} answers here")

    async def main():
        async with service(home=str(home.root)) as svc:
            with pytest.raises(SpecError) as caught:
                await svc.open(request(own(image="lab/arm:3")))
            told = f"own.image: got 'lab/arm:3'; possible: a container engine that answers ({why}); start one, or leave"
            assert str(caught.value).startswith(told)
            assert why

    run(main())


def test_a_host_is_driven_over_a_mounted_folder_and_ends_with_its_owner(home, tmp_path):
    """What runs in a container, without one: the owner connects to a path; its end ends the host, hanging or not."""
    code = environment_folders.folder_of(home, "toys")
    spec = own() | {"own": own()["own"] | {"path": str(code), "memory_mb": None}}
    control = tmp_path / "control.sock"
    host = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "services.environment_host",
            "--control-path",
            control,
            "--listen",
            tmp_path / "host.sock",
        ],
        cwd=PROJECT_ROOT,
    )

    async def main():
        async with asyncio.timeout(60):
            while not (tmp_path / "host.sock").exists():
                await asyncio.sleep(0.02)
        owner = HostClient(str(control))
        await owner.call("configure", 60.0, spec=spec, num_envs=1, images=True, session_token="t" * 32)
        direct = HostClient(str(tmp_path / "host.sock"), token="t" * 32)
        assert (await direct.call("reset", 5.0, seeds=[3]))["proprioception"].tolist() == [[3, 0]]
        with socket.socket(socket.AF_UNIX) as second, pytest.raises(ConnectionRefusedError):
            second.connect(str(control))
        stepping = asyncio.create_task(direct.call("batch_step", 60.0, actions=action(BUSY, 1), next_seeds=[None]))
        await asyncio.sleep(0)
        owner.close()
        with pytest.raises(EnvironmentFault, match=r"closed the connection|Connection reset"):
            await stepping

    try:
        run(main())
        assert host.wait(20) == 0
    finally:
        host.kill()
        host.wait()


def test_hosts_need_neither_pydantic_nor_torch():
    code = "import sys; sys.modules['pydantic'] = None; import services.environment_host, services.environments."
    for module in ("python_adapter", "gymnasium_adapter"):
        assert subprocess.run([sys.executable, "-c", code + module], cwd=PROJECT_ROOT, check=False).returncode == 0


def test_memory_has_a_floor():
    with pytest.raises(SpecError, match="memory_mb"):
        parse(OwnSpec, {"folder": "toys", "memory_mb": 1}, where="own")


def test_the_example_of_the_readme_runs(tmp_path):
    """The same seed begins the same episode; a full turn of neither joint is asked for, so the hand moves a little."""
    environment_folders.register(Home(tmp_path), "toys", PROJECT_ROOT / "examples")
    widths = {"state_width": 2, "action_width": 2, "cameras": [{"name": "top", "height": 64, "width": 64}]}
    zeros = {"state": {"mean": [0, 0], "std": [1, 1]}, "action": {"mean": [0, 0], "std": [1, 1]}}

    async def main():
        async with service(home=str(tmp_path)) as svc:
            arm = own("mypackage.arm:make", instruction="reach the red mark", **widths, **zeros)
            name = (await svc.open(request(arm)))["session_id"]
            first, again = await svc.reset(name, [3, 4]), await svc.reset(name, [3, 4])
            np.testing.assert_array_equal(first["images"]["top"], again["images"]["top"])
            assert first["instructions"] == ["reach the red mark"] * 2
            seen = (await svc.batch_step(name, np.full((2, 1, 2), 0.1, np.float32), [None, None]))["observation"]
            moved = np.angle(np.exp(1j * (seen["proprioception"] - first["proprioception"])))
            np.testing.assert_allclose(moved, 0.1, atol=1e-5)
            assert (seen["images"]["top"] != first["images"]["top"]).any()

    run(main())
