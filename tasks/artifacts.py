"""Tables on Prefect's pages, in the words of the design."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE


@task(cache_policy=NO_CACHE)
async def publish_evaluation(results: list[dict[str, Any]]) -> None:
    """One row an evaluation."""
    columns = ("target", "environment", "policy_version", "episodes", "successes", "success_rate", "mean_return")
    await acreate_table_artifact(
        table=[{column: result[column] for column in columns} for result in results],
        key="evaluation",
        description="Evaluations under one policy version each.",
    )


@task(cache_policy=NO_CACHE)
async def publish_workload_report(report: dict[str, Any]) -> None:
    """One row for the workload."""
    await acreate_table_artifact(table=[workload_row(report)], key="workload", description="What the workload came to.")


def workload_row(report: Mapping[str, Any]) -> dict[str, Any]:
    """The workload's row: its report, flat."""
    row = {k: v for k, v in report.items() if k not in ("jobs", "group_counts", "adapter", "policy_key")}
    row |= report["group_counts"]
    row |= {f"jobs {state}": n for state, n in report["jobs"].items()}
    if report["adapter"]:
        row["adapter"] = f"{report['adapter']['name']} version {report['adapter']['version']}"
    return row
