"""Environment declarations that several test files use."""

from __future__ import annotations

from typing import Any

from configs import presets


def toy(env: str = "Counter-v0", **changes: Any) -> dict[str, Any]:
    """One of `faulty_environments`, as plain data."""
    spec = presets.environment("reach").model_dump(mode="json")
    spec |= {
        "name": "toy",
        "id": f"tests.services.faulty_environments:{env}",
        "instruction": "count",
        "cameras": [{"name": "front", "height": 4, "width": 6}],
        "state_width": 2,
        "action_width": 1,
        "action": {"mean": [0.0], "std": [1.0]},
        "max_episode_steps": 5,
        "step_timeout_s": 20.0,
    }
    return spec | changes


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """A preset as plain data."""
    return presets.environment(name).model_dump(mode="json") | changes
