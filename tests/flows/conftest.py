"""What tests of several flows learn from."""

from __future__ import annotations

import asyncio

import pytest

from configs.home import Home
from configs.platform import PlatformAddresses
from tests.flows.running import collect


@pytest.fixture(scope="session")
def dataset(platform: PlatformAddresses, home: Home) -> str:
    """Name of a few episodes of Reach-v0, collected by the flow: an expert's, as it executed them, with rewards.

    They are demonstrations to supervised training and recorded episodes to offline RL.
    """
    asyncio.run(collect(platform, home, "reach-tests", record="executed", action_noise=0.5))
    return "reach-tests"
