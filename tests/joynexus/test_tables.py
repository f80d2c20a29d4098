"""What `joynexus status` says of jobs, from a scheduler's snapshot."""

from __future__ import annotations

import io

from rich.console import Console

from joynexus import tables
from services.scheduler_events import DropIfStale
from services.scheduler_snapshot import snapshot
from tests.services.scheduler_cases import Bench


def test_status_tells_stale_jobs_from_other_dropped_ones() -> None:
    """One dropped for its age, one by a person; a policy without stale jobs says nothing of them."""
    bench = Bench()
    bench.register("push")
    bench.register("pick")
    stale, cancelled = bench.ready_rl(), bench.reserve("pick.rl")
    bench.do(DropIfStale(bench.now, stale, bench.lease()["lease_token"], 11))
    bench.drop(bench.reserve(), reason="cancelled in Prefect")
    bench.drop(cancelled, reason="cancelled in Prefect")
    told = io.StringIO()
    tables._print_waiting(Console(file=told, width=160), snapshot(bench.state))
    lines = [line.strip() for line in told.getvalue().splitlines()]
    assert lines == ["jobs: 3 dropped", "push.rl: 1 of 2 dropped jobs were stale"]


def test_what_is_not_completed_is_listed_by_state_with_the_stale_among_the_dropped() -> None:
    """As `joynexus run` and the demo show beside their bars."""
    bench = Bench()
    bench.register("push")
    stale = bench.ready_rl()
    bench.do(DropIfStale(bench.now, stale, bench.lease()["lease_token"], 11))
    bench.reserve()
    assert tables.not_completed(snapshot(bench.state)["policies"]["push.rl"]) == "1 reserved, 1 dropped (1 stale)"
    bench.close()
    bench.register("push")  # a new workload of the policy counts anew
    bench.drop(bench.reserve(), reason="cancelled in Prefect")
    assert tables.not_completed(snapshot(bench.state)["policies"]["push.rl"]) == "1 dropped"
