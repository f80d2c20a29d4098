"""Where a running platform is: addresses that `joynexus up` writes and every process of the installation reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import ServiceUnavailable
from configs.home import Home

ROLES = ("training", "inference", "environments", "control")
"""Names of the Dask workers, one a role; actors are pinned to them by name."""

READY_EVENT = "joynexus-platform-ready"
"""Name of the Dask event that the `platform` flow sets once every resident service answers."""


@dataclass(frozen=True)
class PlatformAddresses:
    """What a client needs to reach one running platform."""

    home: str
    cluster: str
    prefect_api_url: str
    dask_scheduler: str
    mlflow_uri: str

    def export(self) -> dict[str, str]:
        """Environment variables that make a process of any kind use this platform."""
        return {
            "JOYNEXUS_HOME": self.home,
            "PREFECT_API_URL": self.prefect_api_url,
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
        }

    def asdict(self) -> dict[str, str]:
        """The fields by name."""
        return asdict(self)


def read_state(home: Home) -> dict[str, Any] | None:
    """The whole of `platform.json`, or None where there is none; says nothing about whether it still lives."""
    try:
        state = json.loads(home.state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return dict(state)


def write_state(home: Home, state: dict[str, Any]) -> None:
    """Replace `platform.json` at once: a reader sees the former or the new one, never half of one."""
    partial = home.state.with_name(f".{home.state.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, home.state)


def addresses(home: Home | None = None) -> PlatformAddresses:
    """Addresses of the platform that runs under `home` (default: the folder that `JOYNEXUS_HOME` names).

    Raises:
        ServiceUnavailable: if no platform was started there.
    """
    home = home or Home.from_environment()
    state = read_state(home)
    if state is None or "addresses" not in state:
        raise ServiceUnavailable(
            f"platform: nothing runs under {str(home.root)!r}; possible: a home whose platform is up; "
            "run `joynexus up` or set JOYNEXUS_HOME"
        )
    return PlatformAddresses(**state["addresses"])
