"""Learning curves of RL workloads on the platform: held-out success, or return, against environment steps.

Each curve is a preset workload, by three seeds at once on one platform: real flows, rollouts, jobs and evaluations.
Declared beyond the preset: the seed, lock-step (`delay: 0`, so that the same seed gives the same curve to the bit), a
learning rate that falls to 0 over the jobs, and evaluations of the version of that moment in between. They are on the
same held-out seeds, which no training sees; a Gaussian's mean acts there, and a flow follows from the noise it begins
with. The last point is the last version, not the best one.

A curve that starts from supervised fine-tuning runs that preset first, on demonstrations collected here, and goes on
with the slot that it left (`start: continue`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import charts, report
from benchmarks.temporary_platform import temporary_platform
from configs import presets
from configs.algorithm import RolloutSpec
from configs.platform import PlatformAddresses
from configs.requests import CollectRequest
from configs.workload import WorkloadSpec
from joynexus import following
from joynexus.prefect_api import TERMINAL_STATES, PrefectApi
from services import lookup

_POLL_S = 2.0


@dataclass(frozen=True)
class Curve:
    """What is learned and how it is looked at.

    Attributes:
        preset: the RL workload.
        every: completed jobs between two evaluations.
        episodes: of an evaluation, one a held-out seed.
        jobs: in place of the preset's; None: those.
        first: preset of the supervised workload that it goes on from; None: fresh weights.
        demonstrations: episodes that are collected for that.
        metric: of the evaluations, `success_rate` or `mean_return`.
        aim: least `metric` of the last version, the mean of the seeds; None: see `margin` in `summary`.
    """

    preset: str
    every: int
    episodes: int
    jobs: int | None = None
    first: str | None = None
    demonstrations: int = 0
    metric: str = "success_rate"
    aim: float | None = None


_REACH = {
    "reach-ppo": {"PPO": Curve("reach", 8, 100, jobs=40, aim=0.95)},
    "reach-grpo": {"GRPO": Curve("reach-grpo", 12, 100, aim=0.95)},
    "reach-flow": {"Flow-SDE PPO": Curve("reach-flow", 16, 100, aim=0.95)},
}
TASKS: dict[str, dict[str, Curve]] = {
    "reach": {name: curve for curves in _REACH.values() for name, curve in curves.items()},
    **_REACH,
    "push": {"PPO from SFT": Curve("push-on", 10, 50, first="push-start", demonstrations=150, aim=0.85)},
    "pick": {"PPO": Curve("pick-return", 10, 50, metric="mean_return")},
}
"""{task: {name: curve}}; in lock-step a curve is the same to the bit whichever others are learned beside it."""


@dataclass(frozen=True)
class Learner:
    """One tenant: a curve by one seed.

    Attributes:
        points: (environment steps, the metric) of its evaluations.
    """

    name: str
    curve: Curve
    seed: int
    points: list[tuple[int, float]]

    @property
    def tenant(self) -> str:
        """Its name on the platform."""
        return f"{self.curve.preset}-{self.seed}"


def workload(learner: Learner) -> WorkloadSpec:
    """The RL workload of a learner."""
    curve, preset = learner.curve, presets.workload(learner.curve.preset)
    algorithm, evaluation = preset.algorithm, preset.evaluation
    assert isinstance(algorithm, RolloutSpec)
    assert evaluation is not None
    jobs = algorithm.jobs if curve.jobs is None else curve.jobs
    declared = {"jobs": jobs, "delay": 0, "seed": learner.seed, "cosine": True}
    return preset.model_copy(
        update={
            "tenant": preset.tenant.model_copy(update={"name": learner.tenant}),
            "algorithm": algorithm.model_copy(update=declared),
            "evaluation": evaluation.model_copy(update={"episodes": curve.episodes, "every_jobs": curve.every}),
            "limits": preset.limits.model_copy(update={"max_in_flight_jobs": 1}),
        }
    )


def first_workload(learner: Learner) -> WorkloadSpec:
    """The supervised workload that a learner goes on from."""
    assert learner.curve.first is not None
    preset = presets.workload(learner.curve.first)
    assert preset.evaluation is not None
    # One episode: the curve's first point tells more. Without any nobody would know what its pictures are like.
    seen = preset.evaluation.model_copy(update={"episodes": 1, "before": False})
    return preset.model_copy(
        update={
            "tenant": preset.tenant.model_copy(update={"name": learner.tenant}),
            "algorithm": preset.algorithm.model_copy(update={"seed": learner.seed}),
            "evaluation": seen,
        }
    )


async def _follow(api: PrefectApi, runs: Sequence[str], names: Sequence[str]) -> None:
    """Wait until all flow runs have completed, and say so of each.

    Raises:
        RuntimeError: if one ended otherwise.
    """
    waiting = dict(zip(runs, names, strict=True))
    while waiting:
        for run_id in list(waiting):
            run = await api.run(run_id)
            if (state := run["state_type"]) in TERMINAL_STATES:
                name = waiting.pop(run_id)
                print(f"  {name}: {state.lower()}", flush=True)
                if state != "COMPLETED":
                    raise RuntimeError(f"{name}: {state}: {(run.get('state') or {}).get('message')}")
        await asyncio.sleep(_POLL_S)


async def _run(api: PrefectApi, workloads: Sequence[WorkloadSpec]) -> None:
    await _follow(api, await following.start(workloads, api), [w.policy_key for w in workloads])


async def _points(client: Any, learner: Learner) -> list[tuple[int, float]]:
    """(environment steps, the metric) of its evaluations, in order.

    Raises:
        RuntimeError: if a job of its target did not complete.
    """
    scheduler = await lookup.service(lookup.SCHEDULER, client, timeout_s=60)
    metrics = await lookup.service(lookup.METRICS, client, timeout_s=60)
    jobs = await scheduler.jobs(policy_key=f"{learner.tenant}.rl")
    if others := sorted({job["state"] for job in jobs} - {"completed"}):
        raise RuntimeError(f"{learner.tenant}: jobs ended as {', '.join(others)}; see the flow runs' logs")
    history = await metrics.history(jobs[0]["metadata"]["mlflow_run"], f"evaluation/{learner.curve.metric}")
    found = [(job["metadata"]["version"], job["metadata"]["rollout_summary"]["valid_transitions"]) for job in jobs]
    return at_steps(found, history)


def at_steps(jobs: Sequence[tuple[int, int]], history: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Evaluations by the environment steps that their version was learned from.

    Args:
        jobs: (version that it made, steps) of each job; one that made no version repeats the one before.
        history: (version, the metric), once a version.

    Returns:
        (steps, the metric) in order; a version that no job made has had none.
    """
    found: dict[int, float] = {}
    for version, value in history:
        found[sum(steps for made, steps in jobs if made <= version)] = value
    return sorted(found.items())


async def _measured(task: str, seeds: int, addresses: PlatformAddresses) -> list[Learner]:
    curves = TASKS[task]
    learners = [Learner(name, curve, seed, []) for name, curve in curves.items() for seed in range(seeds)]
    async with PrefectApi(addresses.prefect_api_url) as api, await lookup.connect(addresses.dask_scheduler) as client:
        started = [learner for learner in learners if learner.curve.first is not None]
        for dataset, environment, episodes in sorted({_data(learner) for learner in started}):
            request = CollectRequest(dataset=dataset, environment=environment, episodes=episodes)
            run_id = await api.start("collect", {"request": request.model_dump(mode="json")}, name=dataset)
            await _follow(api, [run_id], [f"collect {dataset}"])
        if started:
            await _run(api, [first_workload(learner) for learner in started])
        await _run(api, [workload(learner) for learner in learners])
        return [replace(learner, points=await _points(client, learner)) for learner in learners]


def _data(learner: Learner) -> tuple[str, str, int]:
    """Dataset that its supervised workload learns from, the environment it is collected in, and its episodes."""
    first = first_workload(learner)
    assert first.data is not None
    assert first.data.dataset is not None  # the preset's
    evaluation = presets.workload(learner.curve.preset).evaluation
    assert evaluation is not None
    return first.data.dataset, evaluation.environment, learner.curve.demonstrations


def report_of(learners: Sequence[Learner]) -> report.Report:
    """A row a learner; of each curve mean and least of the last points, and what they gained against their spread."""
    found = report.Report()
    for learner in learners:
        steps, values = zip(*learner.points, strict=True)
        found.add(
            curve=learner.name,
            seed=learner.seed,
            metric=learner.curve.metric,
            steps=steps[-1],
            first=values[0],
            last=values[-1],
        )
        found.series[f"{learner.name} {learner.seed} steps"] = [float(n) for n in steps]
        found.series[f"{learner.name} {learner.seed}"] = list(values)
    for name in dict.fromkeys(learner.name for learner in learners):
        own = [learner for learner in learners if learner.name == name]
        curve, last = own[0].curve, [learner.points[-1][1] for learner in own]
        gained = [learner.points[-1][1] - learner.points[0][1] for learner in own]
        found.summary[f"{name} last"] = statistics.mean(last)
        found.summary[f"{name} least"] = min(last)
        found.summary[f"{name} first"] = statistics.mean(learner.points[0][1] for learner in own)
        if curve.aim is not None:
            found.aims[f"{name} last"] = (">=", curve.aim)
        elif len(own) > 1:
            # Of the seeds' last points: the difference between the best and the worst.
            found.summary[f"{name} gain over spread"] = min(gained) / max(max(last) - min(last), 1e-9)
            found.aims[f"{name} gain over spread"] = (">=", 1.0)
    return found


def measure(arguments: argparse.Namespace) -> report.Report:
    """A platform under a temporary home, on it the learners of one task."""
    with temporary_platform() as (_, addresses):
        return report_of(asyncio.run(_measured(arguments.task, arguments.seeds, addresses)))


def draw(found: report.Report, path: Path) -> None:
    """All learners' evaluations."""
    curves = {}
    for row in found.rows:
        name = f"{row['curve']} {row['seed']}"
        curves[f"{row['curve']}, seed {row['seed']}"] = found.series[f"{name} steps"], found.series[name]
    metric = str(found.rows[0]["metric"]).replace("_", " ")
    charts.lines(path, curves, "environment steps", metric, "Learning on the platform: held-out seeds")


if __name__ == "__main__":
    report.main(
        "Learning curves of RL workloads on the platform, on held-out seeds",
        measure,
        options=[("task", tuple(TASKS), "what is learned"), ("seeds", 3, "seeds of each curve, side by side")],
        draw=draw,
    )
