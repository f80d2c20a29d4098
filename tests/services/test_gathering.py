"""Members of a group find each other, whoever is missing."""

from __future__ import annotations

import asyncio

import pytest

from configs.errors import TenantFault
from services.gathering import Gathering, Resolve

NEVER_S = 1000.0
GROUP = ("j1", "j2", "j3")


class Trainer:
    """Records the groups that were started; each member gets its group's size."""

    def __init__(self, patience_s: float = NEVER_S) -> None:
        self.started: list[list[str]] = []
        self.gathering: Gathering[str, int] = Gathering(self.start, patience_s)

    def start(self, members: list[tuple[str, Resolve[int]]]) -> None:
        self.started.append([member for member, _ in members])
        for member, resolve in members:
            resolve(TenantFault("bad") if member == "bad" else len(members))

    def join(self, job_id: str, member: str | None = None) -> asyncio.Task[int]:
        return asyncio.ensure_future(self.gathering.join(GROUP, job_id, member or job_id))


def test_the_last_to_come_starts_the_group() -> None:
    async def main() -> None:
        trainer = Trainer()
        waiting = [trainer.join("j2"), trainer.join("j1")]
        await asyncio.sleep(0)
        assert trainer.started == []
        assert await trainer.join("j3") == 3
        assert await asyncio.gather(*waiting) == [3, 3]
        assert trainer.started == [["j2", "j1", "j3"]]

    asyncio.run(main())


def test_a_member_that_gives_up_is_not_waited_for() -> None:
    """Before the others come, and after."""

    async def main() -> None:
        trainer = Trainer()
        trainer.gathering.give_up(GROUP, "j1")
        waiting = trainer.join("j2")
        await asyncio.sleep(0)
        trainer.gathering.give_up(GROUP, "j3")
        assert await waiting == 1
        assert trainer.started == [["j2"]]

    asyncio.run(main())


def test_a_member_that_never_comes_is_waited_for_so_long() -> None:
    async def main() -> None:
        trainer = Trainer(patience_s=0.01)
        assert await asyncio.wait_for(trainer.join("j1"), 10) == 1
        trainer.gathering._patience_s = NEVER_S
        assert await asyncio.wait_for(trainer.join("j2"), 10) == 1  # too late for its group: it waits for nobody
        assert trainer.started == [["j1"], ["j2"]]

    asyncio.run(main())


def test_a_group_of_one_starts_at_once() -> None:
    async def main() -> None:
        trainer = Trainer()
        assert await trainer.gathering.join(("alone",), "alone", "alone") == 1

    asyncio.run(main())


def test_one_members_fault_is_its_own() -> None:
    async def main() -> None:
        trainer = Trainer()
        trainer.gathering.give_up(GROUP, "j3")
        good, bad = trainer.join("j1"), trainer.join("j2", "bad")
        assert await good == 2
        with pytest.raises(TenantFault, match="bad"):
            await bad

    asyncio.run(main())


def test_a_caller_that_went_away_disturbs_nobody() -> None:
    async def main() -> None:
        trainer = Trainer()
        gone, stays = trainer.join("j1"), trainer.join("j2")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert await trainer.join("j3") == 3
        assert await stays == 3

    asyncio.run(main())
