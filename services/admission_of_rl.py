"""What reinforcement learning asks of a workload, beyond what every workload is asked: a part of services/admission.py.

Faults are given as (field, given, possible, remedy), the arguments of `configs.errors.refusal`.
"""

from __future__ import annotations

from collections.abc import Iterator

from configs.algorithm import RolloutSpec
from configs.environment import EnvironmentSpec
from configs.workload import WorkloadSpec

Fault = tuple[str, object, str, str]


def faults_of_module(workload: WorkloadSpec) -> Iterator[Fault]:
    """Whether the action module has what the algorithm asks of it: log-probabilities of what it did, or a critic."""
    module = workload.action_module
    if workload.task == "rl" and not module.learns_by_rl:
        possible = f"flow_sde, flow_noise for {module.kind!r} with task 'rl'"
        yield "action_module.policy", None, possible, "declare one, in the supervised workload before it too"
        return
    entropy_coef = workload.algorithm.entropy_coef if isinstance(workload.algorithm, RolloutSpec) else 0
    if entropy_coef and not module.learns_deviation:
        policy = f"the policy of {module.kind!r}, whose deviation is not learned: its entropy is a constant"
        remedy = "leave it out, or declare policy flow_noise"
        yield "algorithm.entropy_coef", entropy_coef, f"0 with {policy}", remedy


def faults_of_data(
    workload: WorkloadSpec, environment: EnvironmentSpec | None, source: str, *, rewards: bool
) -> Iterator[Fault]:
    """Whether what is collected or was recorded can be learned from.

    Args:
        workload: the declaration.
        environment: that rollouts are collected in; None where a dataset is learned from.
        source: environment or dataset in words.
        rewards: whether they are known.
    """
    algorithm = workload.algorithm
    if workload.task == "rl" and not rewards:
        possible = f"datasets with a column next.reward for algorithm {algorithm.kind!r}"
        remedy = "collect one with record: executed, or fine-tune with task sft"
        yield "data.dataset", f"{source} without rewards", possible, remedy
    if environment is None or not isinstance(algorithm, RolloutSpec) or algorithm.episodes_per_start == 1:
        return
    # Where episodes are compared, those of a group are side by side, and a rollout sees some of them end.
    size, num_envs = algorithm.episodes_per_start, algorithm.num_envs
    if num_envs % size:
        divisors = ", ".join(str(n) for n in range(2, num_envs + 1) if num_envs % n == 0) or "none"
        remedy = "change one: the episodes of a group run in environments side by side"
        yield "algorithm.group_size", size, f"{divisors} with num_envs {num_envs}, which it divides", remedy
    steps, horizon = environment.max_episode_steps, workload.action_module.horizon
    needed = -(-steps // horizon)
    if algorithm.rollout_steps < needed:
        terms = f"{steps} steps an episode of {environment.name!r}, {horizon} a chunk"
        possible = f"{needed} or more with kind {algorithm.kind!r} ({terms})"
        remedy = "make rollouts longer: episodes that do not end in them carry no loss"
        yield "algorithm.rollout_steps", algorithm.rollout_steps, possible, remedy
