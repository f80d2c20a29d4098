"""How a host process is started: a child of this interpreter, or, for a tenant's own code, confined further.

A tenant's own process gets an environment without the platform's variables, which may hold secrets. Where its
declaration names an image it runs in a container: no network, no capabilities, a read-only root, its code read-only,
and the folder of sockets as the one place where it meets the platform. The protocol is the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.environment import EnvironmentSpec
from configs.environment_folders import folder_of
from configs.errors import SpecError, refusal
from configs.home import PROJECT_ROOT, Home
from services import environment_installs
from services.environments import renderer

ENGINES = ("docker", "podman")
SOCKETS, CODE, OWN = "/run/joynexus", "/opt/joynexus", "/opt/own"  # inside a container
_ANSWER_S = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_OURS = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JOYNEXUS_PLATFORM")
_SIMULATORS = ("VK_ICD_FILENAMES", "MUJOCO_GL", "PYOPENGL_PLATFORM", "CUDA_VISIBLE_DEVICES")
"""With `_OURS` what a tenant's own code sees of our variables; JOYNEXUS_PLATFORM is how the platform finds it."""


@dataclass(frozen=True)
class Launch:
    """What starts a host.

    Attributes:
        interpreter: its Python.
        own: the code is a tenant's own.
        engine: container engine that runs it, None for a plain process.
        image: that the engine runs.
        folder: the tenant's code.
        memory_mb: of a container.
    """

    interpreter: str = sys.executable
    own: bool = False
    engine: str | None = None
    image: str = ""
    folder: str = ""
    memory_mb: int = 0

    def environment(self) -> dict[str, str]:
        """All variables of the process."""
        known = dict(os.environ)
        found = {name: known[name] for name in _OURS + _SIMULATORS if name in known} if self.own else known
        found.update(dict.fromkeys(_ONE_THREAD, "1"))
        # A host may run under another interpreter, where our packages are not installed.
        path = known.get("PYTHONPATH")
        found["PYTHONPATH"] = str(PROJECT_ROOT) + (os.pathsep + path if path else "")
        return found


def container_command(launch: Launch, name: str, sockets: Path) -> list[str]:
    """The command line that runs a host in a container.

    Args:
        launch: with engine, image, folder and memory.
        name: of the container.
        sockets: folder here, of this host alone: its owner's socket is `control.sock` in it, that for direct
            connections `host.sock`.
    """
    assert launch.engine is not None
    return [
        *(launch.engine, "run", "--rm", "--init", "--name", name, "--pull", "never"),
        *("--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--pids-limit", "256", "--user", f"{os.getuid()}:{os.getgid()}"),
        *("--memory", f"{launch.memory_mb}m", "--memory-swap", f"{launch.memory_mb}m", "--cpus", "1"),
        *("--volume", f"{sockets}:{SOCKETS}", "--volume", f"{launch.folder}:{OWN}:ro"),
        *("--volume", f"{PROJECT_ROOT / 'services'}:{CODE}/services:ro"),
        *("--volume", f"{PROJECT_ROOT / 'configs'}:{CODE}/configs:ro"),
        *("--workdir", CODE, "--env", f"PYTHONPATH={CODE}", "--env", "PYTHONDONTWRITEBYTECODE=1"),
        *(word for variable in _ONE_THREAD for word in ("--env", f"{variable}=1")),
        *(launch.image, "python", "-m", "services.environment_host"),
        *("--control-path", f"{SOCKETS}/control.sock", "--listen", f"{SOCKETS}/host.sock"),
    ]


def answering_engine() -> tuple[str | None, str]:
    """The first container engine whose server answers, or None and why none does. Takes seconds where one hangs."""
    reasons = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            reasons.append(f"no {engine} is installed")
            continue
        try:
            done = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=_ANSWER_S)
        except (subprocess.TimeoutExpired, OSError) as error:
            reasons.append(f"{engine} does not answer ({type(error).__name__})")
            continue
        if done.returncode == 0:
            return engine, ""
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons.append(f"{engine} says: {said[-1][:200] if said else 'nothing'}")
    return None, "; ".join(reasons)


def prepared(spec: EnvironmentSpec, home: Home | None) -> tuple[dict[str, Any], Launch]:
    """`spec` as a host of this machine takes it, and how the host is started. Blocks where an engine has to answer.

    A tenant's own code is found at `own.path`, which no declaration has: it is the registered folder, or where a
    container sees that; there `own.memory_mb` is None, since the engine limits it.

    Raises:
        SpecError: if its requirements are not installed, its folder is not registered, or it names an image and no
            container engine answers.
    """
    plain = spec.model_dump(mode="json")
    interpreter = environment_installs.interpreter(spec.requirements)
    if spec.own is None:
        return plain, Launch(interpreter)
    folder = str(folder_of(home, spec.own.folder))
    if spec.own.image is None:
        return {**plain, "own": {**plain["own"], "path": folder}}, Launch(interpreter, own=True)
    engine, why = answering_engine()
    if engine is None:
        raise SpecError(
            refusal(
                "own.image", spec.own.image, f"a container engine that answers ({why})", "start one, or leave it out"
            )
        )
    launch = Launch(own=True, engine=engine, image=spec.own.image, folder=folder, memory_mb=spec.own.memory_mb)
    return {**plain, "own": {**plain["own"], "path": OWN, "memory_mb": None}}, launch


def lacking(spec: EnvironmentSpec, home: Home | None) -> str | None:
    """What a session of `spec` lacks here, in one line, or None: as far as one sees that starts and connects nothing.

    Of a remote environment that is its token: what the simulator needs is its server's business. Blocks where a
    container engine has to answer.
    """
    try:
        if spec.remote is not None:
            spec.remote.token()
            return None
        prepared(spec, home)
    except SpecError as error:
        return str(error)
    return renderer.check() if spec.kind == "maniskill" else None
