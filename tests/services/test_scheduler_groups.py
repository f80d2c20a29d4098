"""Which ready jobs may be leased to be trained together."""

from __future__ import annotations

from typing import Any

import pytest

from configs.errors import Conflict, LeaseLost, UnknownObject
from tests.services.scheduler_cases import Bench


def bench(**bases: str | None) -> Bench:
    """SFT policies of these tenants on these bases, 40 bytes a job."""
    found = Bench()
    for tenant, base in bases.items():
        found.register(tenant, "sft", base_model=base, job_bytes=40)
    return found


def lead(found: Bench) -> str:
    """The first ready job, leased."""
    job = found.lease()
    assert job is not None
    return job["job_id"]


def named(job: dict[str, Any] | None) -> str | None:
    return None if job is None else job["job_id"]


def test_a_group_takes_the_next_jobs_of_other_tenants_in_their_order() -> None:
    """a, a, b, c became ready in this order: a leads, its second job waits for its first, b and c join."""
    found = bench(a="tiny", b="tiny", c="tiny")
    ready = [found.ready(key) for key in ("a.sft", "a.sft", "b.sft", "c.sft")]
    first = lead(found)
    second = named(found.lease_beside(first, max_bytes=120))
    third = named(found.lease_beside(first, f"{second}", max_bytes=120))
    assert [first, second, third] == [ready[0], ready[2], ready[3]]
    assert found.lease_beside(first, f"{second}", f"{third}", max_bytes=1000) is None
    assert found.state.jobs[ready[1]].state == "ready"


def test_a_group_overtakes_nobody() -> None:
    """b's job is next and of another base: c, which would fit, waits behind it."""
    found = bench(a="tiny", b="large", c="tiny")
    for key in ("a.sft", "b.sft", "c.sft"):
        found.ready(key)
    first = lead(found)
    assert found.lease_beside(first) is None
    assert named(found.lease()) is not None  # b
    assert named(found.lease_beside(first)) is not None  # c is next now


def test_a_higher_priority_that_does_not_fit_ends_the_group() -> None:
    found = bench(a="tiny", b="tiny")
    found.register("urgent", "sft", base_model="large", priority=5)
    found.ready("a.sft")
    first = lead(found)
    found.ready("b.sft")
    found.ready("urgent.sft")
    assert found.lease_beside(first) is None


def test_jobs_without_a_declared_base_are_trained_alone() -> None:
    found = bench(a=None, b=None)
    found.ready("a.sft")
    found.ready("b.sft")
    assert found.lease_beside(lead(found)) is None


def test_a_group_stays_within_its_bytes() -> None:
    """40 + 40 bytes: 80 are enough, 79 are not."""
    found = bench(a="tiny", b="tiny")
    found.ready("a.sft")
    found.ready("b.sft")
    first = lead(found)
    assert found.lease_beside(first, max_bytes=79) is None
    assert named(found.lease_beside(first, max_bytes=80)) is not None


def test_no_group_while_an_rl_policy_is_open_unless_asked_for() -> None:
    """It need have no ready job: one that comes would wait for the whole group. After a restart too."""
    found = bench(a="tiny", b="tiny", c="tiny")
    found.register("push", "rl", base_model="tiny")
    for key in ("a.sft", "b.sft", "c.sft"):
        found.ready(key)
    first = lead(found)
    assert found.lease_beside(first) is None
    found.restart()
    assert found.lease_beside(first) is None
    second = named(found.lease_beside(first, beside_rl=True))
    assert second is not None
    found.close("push.rl")
    assert named(found.lease_beside(first, second, max_bytes=200)) is not None


def test_an_rl_job_neither_leads_nor_joins() -> None:
    found = bench(a="tiny", b="tiny")
    found.register("push", "rl", base_model="tiny")
    found.register("pick", "rl", base_model="tiny")
    found.ready_rl("push.rl")
    found.ready_rl("pick.rl")
    found.ready("a.sft")
    rl = lead(found)
    assert found.state.jobs[rl].task_type == "rl"
    assert found.lease_beside(rl, beside_rl=True) is None  # pick's job is next
    assert found.lease() is not None  # pick
    assert found.lease_beside(rl, beside_rl=True) is None  # a's job is next
    sft = lead(found)
    found.ready_rl("push.rl")  # of a tenant whose turn is taken
    found.ready("b.sft")
    assert named(found.lease_beside(sft, beside_rl=True)) is not None


def test_only_the_holder_of_all_of_them_gets_company() -> None:
    found = bench(a="tiny", b="tiny")
    found.ready("a.sft")
    found.ready("b.sft")
    first = lead(found)
    assert isinstance(found.refused(found.beside(first, holder="another")), LeaseLost)
    assert isinstance(found.refused(found.beside("job-99999999")), UnknownObject)
    found.wait(60.0)
    with pytest.raises(LeaseLost, match="ready, held by None"):
        found.lease_beside(first)


def test_a_policy_of_an_older_journal_is_renewed_with_its_base() -> None:
    """Journalled without a base and leased by the same run: it goes on, and its jobs may be grouped from then on."""
    found = Bench()
    found.register("a", "sft", holder="run", lease_s=60.0)
    found.restart()
    found.register("a", "sft", holder="run", lease_s=60.0, base_model="tiny", job_bytes=40)
    found.restart()
    assert found.state.policies["a.sft"].spec.base_model == "tiny"


def test_company_that_is_asked_for_twice_under_one_id_is_leased_once() -> None:
    """Retry, also after a restart: the same lease, and c stays for the next ask. Reuse by others or for the job that
    leads: refused. With nothing that fits, an id names nothing yet."""
    found = bench(a="tiny", b="tiny", c="tiny")
    found.ready("a.sft")
    leader = found.lease(request_id="lead")["job_id"]
    assert found.lease_beside(leader, request_id="r1") is None
    ready = [found.ready(key) for key in ("b.sft", "c.sft")]
    taken = found.lease_beside(leader, request_id="r1")
    assert taken is not None
    assert found.lease_beside(leader, request_id="r1") == taken
    found.restart()
    again = found.lease_beside(leader, request_id="r1")
    assert (again["job_id"], again["lease_token"], again["attempts"]) == (ready[0], taken["lease_token"], 1)
    assert found.state.jobs[ready[1]].state == "ready"
    for event in (found.beside(leader, holder="another", request_id="r1"), found.beside(leader, request_id="lead")):
        assert isinstance(found.refused(event), Conflict)
    assert named(found.lease_beside(leader, ready[0], request_id="r2", max_bytes=200)) == ready[1]
