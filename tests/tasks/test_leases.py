"""Leases whose replies are lost, against the real scheduler and its journal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from distributed import Client

from configs import presets
from configs.cluster import TrainingGroupSpec
from configs.errors import ServiceUnavailable
from configs.home import Home
from configs.platform import PlatformAddresses
from services.lookup import Service
from services.training_scheduler import TrainingScheduler
from tasks.connection import Platform
from tasks.jobs import lease_company
from tasks.leases import leased
from tests.services.policies import backend


class Losing(Platform):
    """A platform whose scheduler carries out each lease verb, and is lost before it answers so many times: then another
    one is made from the journal."""

    def __init__(self, folder: Path, losses: int, lease_s: float = 60.0) -> None:
        addresses = PlatformAddresses(str(folder), "laptop", "http://127.0.0.1:1/api", "tcp://127.0.0.1:1", "sqlite://")
        cluster = presets.cluster("laptop").model_copy(update={"lease_s": lease_s})
        super().__init__(addresses, Client.__new__(Client), cluster, Home(folder))  # nobody but the scheduler is asked
        self.journal = str(folder / "journal.sqlite")
        self.actor = TrainingScheduler(self.journal, 3)
        self.losses = losses

    async def scheduler(self) -> Service:
        return cast(Service, self)

    async def lease_next(self, **arguments: Any) -> dict[str, Any]:
        return self._reply(await self.actor.lease_next(**arguments))

    async def lease_beside(self, **arguments: Any) -> dict[str, Any]:
        return self._reply(await self.actor.lease_beside(**arguments))

    def _reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        if self.losses:
            self.losses -= 1
            self.actor = TrainingScheduler(self.journal, 3)
            raise ServiceUnavailable("service: 'scheduler' was lost with its worker")
        return reply

    async def ready(self, *tenants: str) -> None:
        """A supervised job each, ready to be trained."""
        for tenant in tenants:
            policy = {
                "policy_key": f"{tenant}.sft",
                "tenant_id": tenant,
                "task_type": "sft",
                "domain": "vla",
                "priority": 0,
                "max_in_flight": 8,
                "completion_target": None,
                "max_active_rollouts": None,
                "base_model": "tiny",
                "job_bytes": 40,
            }
            await self.actor.register_policy(policy)
            job = (await self.actor.reserve(None, f"{tenant}.sft", 8, None, None, {}))["job"]
            await self.actor.mark(job["job_id"], "ready")


async def lead(platform: Losing) -> dict[str, Any]:
    job = await leased(platform, "lease_next", consumer_role="actor", domains=["vla"], holder="h")
    assert job is not None
    return job


def test_company_whose_reply_was_lost_joins_all_the_same(tmp_path: Path) -> None:
    """The scheduler is lost after it leased b's job: asked again, its successor names that job, and then c's."""

    async def main() -> None:
        platform = Losing(tmp_path, losses=0)
        await platform.ready("a", "b", "c")
        first = await lead(platform)
        platform.losses = 1
        company = await lease_company(platform, first, "h", None)
        assert [job["tenant_id"] for job in company] == ["b", "c"]
        jobs = await platform.actor.jobs()
        assert [(job["state"], job["attempts"]) for job in jobs] == [("leased", 1)] * 3

    asyncio.run(main())


def test_a_lease_whose_reply_was_lost_is_the_same_lease(tmp_path: Path) -> None:
    async def main() -> None:
        platform = Losing(tmp_path, losses=1)
        await platform.ready("a", "b")
        job = await lead(platform)
        assert (job["tenant_id"], job["attempts"]) == ("a", 1)
        assert (await lead(platform))["tenant_id"] == "b"

    asyncio.run(main())


def test_a_scheduler_that_stays_away_is_not_asked_for_ever(tmp_path: Path) -> None:
    """Half of the lease, in which nothing that is held is renewed."""

    async def main() -> None:
        platform = Losing(tmp_path, losses=100, lease_s=1.0)
        await platform.ready("a")
        with pytest.raises(ServiceUnavailable, match="lost with its worker"):
            await lead(platform)
        assert platform.losses == 99

    asyncio.run(main())


def test_a_group_stays_within_the_clusters_bytes(tmp_path: Path) -> None:
    """40 bytes a job: 80 hold two, 79 one."""

    async def main() -> None:
        platform = Losing(tmp_path, losses=0)
        await platform.ready("a", "b", "c")
        first = await lead(platform)
        for max_bytes, company in ((79, []), (80, ["b"])):
            groups = TrainingGroupSpec(max_bytes=max_bytes)
            platform.cluster = platform.cluster.model_copy(update={"training_groups": groups})
            found = await lease_company(platform, first, "h", None)
            assert [job["tenant_id"] for job in found] == company

    asyncio.run(main())


def test_a_job_takes_its_pictures_and_what_it_is_trained_on() -> None:
    """8 samples of 64 × 64 pictures, and a copy of 1,000 bytes once that is known."""
    config = backend("a")
    assert config.scheduler_policy()["job_bytes"] == 8 * 3 * 64 * 64
    assert config.scheduler_policy(1_000)["job_bytes"] == 8 * 3 * 64 * 64 + 1_000
