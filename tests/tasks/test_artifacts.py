"""Tables on Prefect's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.home import Home
from configs.platform import write_state
from tasks.artifacts import film_url, workload_row

REPORT: dict[str, Any] = {
    "tenant": "reach",
    "jobs": {"completed": 3, "failed": 0, "dropped": 1},
    "stale_jobs": 1,
    "nothing_to_learn": 2,
    "group_counts": {"groups": 12, "filtered_groups": 1, "constant_groups": 10, "unfinished_episodes": 5},
    "adapter": {"name": "reach.rl", "version": 7, "champion": True},
    "policy_key": "reach.rl",
}


def test_a_workloads_row_says_what_became_of_its_jobs_and_of_their_groups() -> None:
    assert workload_row(REPORT) == {
        "tenant": "reach",
        "stale_jobs": 1,
        "nothing_to_learn": 2,
        "groups": 12,
        "filtered_groups": 1,
        "constant_groups": 10,
        "unfinished_episodes": 5,
        "jobs completed": 3,
        "jobs failed": 0,
        "jobs dropped": 1,
        "adapter": "reach.rl version 7",
    }


def test_a_row_of_another_algorithm_has_no_groups_and_one_without_an_adapter_none() -> None:
    row = workload_row(REPORT | {"group_counts": {}, "adapter": None})
    assert row.keys() == {"tenant", "stale_jobs", "nothing_to_learn", "jobs completed", "jobs failed", "jobs dropped"}


def test_a_films_address_is_its_place_on_mlflows_page(tmp_path: Path) -> None:
    """The page reads what stands behind `/artifacts/` and opens that file."""
    write_state(Home(tmp_path), {"mlflow_page": "http://127.0.0.1:5000"})
    assert film_url(Home(tmp_path), "3", "ab12", "films/a b.mp4") == (
        "http://127.0.0.1:5000/#/experiments/3/runs/ab12/artifacts/films/a%20b.mp4"
    )
