"""From the shared features of one base forward to a decision a request, in as few computations as may be.

Requests of one policy version are rows of one `decode`. Policies of one architecture decode as one stack where that is
faster and there is one. Each request has the noise that it drew itself. Neither changes anybody's result: a request's
bits on a CPU are those of its own rows through `ActionModule.act`. If a computation of several requests raises, its
requests are decoded one by one with the same noise, so that only the faulty one fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from configs.errors import JoyNexusError, TenantFault
from kernels.action_modules import ActionModule, Decision, Noise, stacking
from kernels.action_modules.stacking import Layout
from kernels.features import VLAFeature

if TYPE_CHECKING:
    from services.policy_stacks import PolicyStacks
    from services.serving import Request, ServingPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Pending:
    """A request, its rows among the shared features, and its noise."""

    request: Request
    rows: slice
    noise: Noise


def decode(
    requests: Sequence[Request], feature: VLAFeature, slices: Sequence[slice], stacks: PolicyStacks
) -> list[Decision | JoyNexusError]:
    """A decision, or its fault, of each request.

    Args:
        requests: of one base forward.
        feature: of all rows of that forward.
        slices: the rows of each request.
        stacks: which policies have a stack.
    """
    # In the requests' order, whatever decodes together: some share a generator.
    noises = [r.policy.module.draw(r.prefix.rows, r.generator, exploring=r.exploring) for r in requests]
    pending = [_Pending(*each) for each in zip(requests, slices, noises, strict=True)]
    found: dict[_Pending, Decision | JoyNexusError] = {}
    for module, tenants in _computations(pending, stacks):
        found |= _decoded(module, tenants, feature)
    return [found[each] for each in pending]


def _computations(
    pending: Sequence[_Pending], stacks: PolicyStacks
) -> Iterator[tuple[ActionModule, list[list[_Pending]]]]:
    """What decodes together: a module or a stack of T, and T lists of requests."""
    of_policy: dict[ServingPolicy, list[_Pending]] = {}
    alike: dict[str, list[ServingPolicy]] = {}
    for each in pending:
        policy = each.request.policy
        if policy not in of_policy:
            alike.setdefault(policy.architecture, []).append(policy)
        of_policy.setdefault(policy, []).append(each)
    for policies in alike.values():
        policies.sort(key=lambda p: (p.config.tenant, p.version))  # the same company, the same stack
        company = _worth_stacking({p: sum(each.request.prefix.rows for each in of_policy[p]) for p in policies})
        stack = stacks.find(company) if company else None
        if stack is not None:
            yield stack, [of_policy[p] for p in company]
        yield from ((p.module, [of_policy[p]]) for p in policies if stack is None or p not in company)


def _worth_stacking(rows: dict[ServingPolicy, int]) -> list[ServingPolicy]:
    """Of policies of one architecture those that are faster together: without the ones with most rows, which would fill
    up all the others, as long as that is what makes it slower; none if no two are left."""
    company = list(rows)
    module = company[0].module
    while len(company) > 1:
        if stacking.is_faster(module.spec.kind, module.device.type, [rows[p] for p in company]):
            return company
        company.remove(max(company, key=rows.__getitem__))
    return []


def _decoded(
    module: ActionModule, tenants: Sequence[Sequence[_Pending]], feature: VLAFeature
) -> dict[_Pending, Decision | JoyNexusError]:
    """Decisions or faults of one computation's requests."""
    together = [each for own in tenants for each in own]
    try:
        return _in_one(module, tenants, feature)
    except Exception as error:  # a boundary between tenants: one's module must not take others along
        if len(together) == 1:
            tenant = together[0].request.policy.config.tenant
            if not isinstance(error, JoyNexusError | RuntimeError):  # not torch's: a fault of ours, perhaps
                logger.exception("action module of tenant %s", tenant)
            fault = TenantFault(f"action module of tenant {tenant!r} failed: {error}")
            return {together[0]: error if isinstance(error, JoyNexusError) else fault}
        names = ", ".join(sorted({each.request.policy.config.tenant for each in together}))
        logger.warning("requests of %s are decoded one by one, since together: %s", names, error)
    found: dict[_Pending, Decision | JoyNexusError] = {}
    for each in together:
        found |= _decoded(each.request.policy.module, [[each]], feature)
    return found


def _in_one(
    module: ActionModule, tenants: Sequence[Sequence[_Pending]], feature: VLAFeature
) -> dict[_Pending, Decision | JoyNexusError]:
    """Decisions of T tenants' requests by one `decode` of a module (T = 1) or a stack."""
    together = [each for own in tenants for each in own]
    feature = feature.only(module.reads)
    # Rows are copied, so that memory is laid out as for a request of its own.
    if len(together) == 1:
        (each,) = together
        own_rows = feature[each.rows].map(torch.clone)
        return {each: module.decode(own_rows, each.request.proprioception, each.noise)}
    layout = Layout(tuple(sum(each.request.prefix.rows for each in own) for own in tenants))
    rows = torch.cat([torch.arange(each.rows.start, each.rows.stop) for each in together])
    state = torch.cat([each.request.proprioception for each in together])
    noise = {name: torch.cat([each.noise[name] for each in together]) for name in together[0].noise}
    spread = layout.spread
    spread_noise = {name: drawn[spread] for name, drawn in noise.items()}
    decision = module.decode(feature[rows[spread]], state[spread], spread_noise)
    found: dict[_Pending, Decision | JoyNexusError] = {}
    start = 0
    for each in together:
        own = layout.kept[start : start + each.request.prefix.rows]
        start += len(own)
        found[each] = Decision(
            decision.action[own],
            None if decision.log_prob is None else decision.log_prob[own],
            None if decision.value is None else decision.value[own],
            {name: kept[own] for name, kept in decision.trace.items()},
        )
    return found
