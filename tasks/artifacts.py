"""Tables on Prefect's pages, in the words of the design."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from prefect import task
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from configs.errors import JoyNexusError
from configs.home import Home
from configs.platform import read_state
from tasks.connection import Platform

logger = logging.getLogger(__name__)


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
async def publish_films(platform: Platform, results: list[dict[str, Any]]) -> None:
    """Links to the films of evaluations on MLflow's page; nothing where there is none."""
    lines = []
    for result in filter(lambda result: result["films"], results):
        try:
            experiment = await (await platform.metrics()).experiment_of(result["mlflow_run"])
        except JoyNexusError as error:
            logger.warning("films of %s are not linked: %s", result["target"], error)
            continue
        links = [
            f"[{film['outcome']}, seed {film['seed']}]"
            f"({film_url(platform.home, experiment, result['mlflow_run'], film['artifact'])})"
            for film in result["films"]
        ]
        lines.append(f"- {result['target']} version {result['policy_version']}: {', '.join(links)}")
    if lines:
        hint = "MLflow's page shows them; where it is not up, `joynexus pages` opens it."
        await acreate_markdown_artifact(
            markdown="\n".join([*lines, "", hint]), key="films", description="Films of a success and of a failure."
        )


def film_url(home: Home, experiment: str, run: str, artifact: str) -> str:
    """Address of a run's artifact on MLflow's page, which shows it there."""
    page = str((read_state(home) or {}).get("mlflow_page", "")).rstrip("/")
    return f"{page}/#/experiments/{experiment}/runs/{run}/artifacts/{quote(artifact)}"


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
