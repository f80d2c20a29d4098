"""Calls that take longer than a reply is waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from configs import presets
from configs.errors import NoReply
from configs.home import Home
from configs.platform import PlatformAddresses
from services import lookup
from services.admission import admit
from tasks.connection import platform_connection


def test_a_long_call_is_repeated_while_its_service_answers_and_carried_out_once(
    platform: PlatformAddresses, home: Home
) -> None:
    """An evaluation of some seconds, a reply of which is waited for half a second: the calls join the first one."""
    backend = admit(presets.workload("reach"), home, presets.cluster("laptop"))
    policy = backend.policy.model_copy(update={"tenant": "patient"})
    assert backend.environment is not None
    environment = backend.environment.model_dump(mode="json")

    def asked(run_id: str) -> dict[str, Any]:
        few = {"episodes": 24, "first_seed": 60_000, "num_envs": 4, "hosts": 1}
        return {"tenant_id": "patient", "environment": environment, "run_id": run_id, **few}

    async def main() -> None:
        async with platform_connection(home) as connection:
            inference = await connection.inference()
            await inference.open_policy(policy.model_dump(mode="json"), fresh=True)
            try:
                before = (await inference.status())["rows"]
                expected = await inference.evaluate(**asked("in-one-call"))
                between = (await inference.status())["rows"]
                hasty = await lookup.service(lookup.INFERENCE, connection.client, timeout_s=0.5)
                with pytest.raises(NoReply, match=r"evaluate: no reply in 0\.5 s"):
                    await hasty.evaluate(**asked("in-many"))
                connection._services[lookup.INFERENCE] = hasty
                assert await connection.patiently(lookup.INFERENCE, "evaluate", **asked("in-many")) == expected
                assert (await inference.status())["rows"] - between == between - before
            finally:
                await inference.close_policy("patient")

    asyncio.run(main())
