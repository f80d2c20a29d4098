"""Requests that decode together: the bits of each alone, one's fault its own, stacks bounded and of served versions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from configs.errors import JoyNexusError, TenantFault
from configs.home import PROJECT_ROOT
from kernels import backbones
from kernels.backbones import Backbone
from services import serving
from services.policy_stacks import PolicyStacks
from services.rollout import Prediction
from services.serving import Request, ServingPolicy
from tests.services import policies

PLENTY = 64 << 20


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(policies.BASE, PROJECT_ROOT)


def served(kind: str, *tenants: str, version: int = 0) -> list[ServingPolicy]:
    """Policies of one architecture and other parameters."""
    seeds = {tenant: 100 * version + ord(tenant[0]) for tenant in tenants}
    return [ServingPolicy(policies.policy(t, kind=kind, seed=seed), version, None) for t, seed in seeds.items()]


def request(
    backbone: Backbone, policy: ServingPolicy, rows: int, seed: int = 0, generator: torch.Generator | None = None
) -> Request:
    return Request(policy, *policy.prepare(backbone, policies.observation(rows, seed)), generator)


def assert_same(found: Prediction | JoyNexusError, expected: Prediction | JoyNexusError) -> None:
    assert isinstance(found, Prediction)
    assert isinstance(expected, Prediction)
    for name, value in vars(expected).items():
        if value is None:
            assert getattr(found, name) is None
        else:
            np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


def alone(backbone: Backbone, requests: Sequence[Request]) -> list[Prediction | JoyNexusError]:
    """Each in a forward of its own."""
    return [serving.forward(backbone, [each], PolicyStacks(0))[0] for each in requests]


def test_a_mixed_group_gets_the_bits_of_each_request_alone(backbone: Backbone) -> None:
    """Two requests of one gr00t tenant, one of another, three of pi, two of oft; stacked from the second forward on."""
    (a, b), (c, d, e), (f, g) = served("gr00t", "a", "b"), served("pi", "c", "d", "e"), served("oft", "f", "g")
    order = [(f, 2), (a, 3), (c, 1), (b, 4), (d, 2), (a, 1), (g, 1), (e, 1)]

    def requests() -> list[Request]:
        return [
            request(backbone, policy, rows, seed, torch.Generator().manual_seed(seed) if seed % 2 else None)
            for seed, (policy, rows) in enumerate(order)
        ]

    expected = alone(backbone, requests())
    stacks, sizes = PolicyStacks(PLENTY), []
    for _ in range(3):
        for found, right in zip(serving.forward(backbone, requests(), stacks), expected, strict=True):
            assert_same(found, right)
        sizes.append(stacks.num_bytes)
    own = sum(policy.module.num_bytes for policy in (a, b, c, d, e))
    assert sizes == [0, own, own], "the company that came up once more has a stack; two oft tenants have none"


def test_requests_that_share_a_generator_draw_in_their_order(backbone: Backbone) -> None:
    """Whatever decodes together: of three requests, the first and the third are one tenant's."""
    a, b = served("pi", "a", "b")

    def requests() -> list[Request]:
        generator = torch.Generator().manual_seed(3)
        return [request(backbone, policy, 1, seed, generator) for seed, policy in enumerate((a, b, a))]

    expected = alone(backbone, requests())
    for found, right in zip(serving.forward(backbone, requests(), PolicyStacks(0)), expected, strict=True):
        assert_same(found, right)


def test_a_fault_in_a_company_is_its_own(backbone: Backbone) -> None:
    """A state of another width stops the computation of all; a NaN comes out of it. The others' bits are theirs."""
    good, wide, nan = served("gr00t", "a", "b", "c")
    stacks = PolicyStacks(PLENTY)

    def requests() -> list[Request]:
        of = [
            request(backbone, policy, 2, seed, torch.Generator().manual_seed(seed))
            for seed, policy in enumerate((good, wide, wide, nan))
        ]
        of[1].proprioception = torch.zeros(2, 3)
        of[3].proprioception = torch.full_like(of[3].proprioception, float("nan"))
        return of

    expected = alone(backbone, requests())
    for turn in range(3):
        found = serving.forward(backbone, requests(), stacks)
        assert isinstance(found[1], TenantFault), turn
        assert "proprioception: got (2, 3); possible: shape (2, 2)" in str(found[1])
        assert isinstance(found[3], TenantFault)
        assert "tenant 'c' at version 0 gave NaN" in str(found[3])
        for right in (0, 2):
            assert_same(found[right], expected[right])
    assert stacks.num_bytes > 0
    only_nan = [requests()[i] for i in (0, 2, 3)]
    for _ in range(2):
        found = serving.forward(backbone, only_nan, stacks)
        assert isinstance(found[2], TenantFault)


def test_what_torch_cannot_compute_for_one_is_computed_for_the_others(backbone: Backbone) -> None:
    a, b = served("pi", "a", "b")
    requests = [request(backbone, policy, 1) for policy in (a, b)]
    expected = alone(backbone, requests[:1])
    b.module.get_parameter("action_out.bias").data = torch.zeros(7)
    for _ in range(2):
        found = serving.forward(backbone, requests, PolicyStacks(0))
        assert_same(found[0], expected[0])
        assert isinstance(found[1], TenantFault)
        assert "action module of tenant 'b' failed" in str(found[1])


@pytest.mark.parametrize(("rows", "used"), [((2, 1, 1), True), ((4, 1), False), ((1, 1), True), ((3,), False)])
def test_the_rule_decides_where_a_stack_is_made(backbone: Backbone, rows: tuple[int, ...], used: bool) -> None:
    """Of 6 rows for 4 there is one, of 8 for 5 there is none."""
    stacks = PolicyStacks(PLENTY)
    company = served("gr00t", *"abc"[: len(rows)])
    for _ in range(3):
        serving.forward(backbone, [request(backbone, p, n) for p, n in zip(company, rows, strict=True)], stacks)
    assert (stacks.num_bytes > 0) is used


def test_a_stack_is_made_when_its_company_comes_up_again_and_never_past_the_bound() -> None:
    """Room for one pair: a second pair gets it only once the first has not come up since the second last did."""
    a, b, c, d = served("oft", "a", "b", "c", "d")
    pair = a.module.num_bytes + b.module.num_bytes
    stacks = PolicyStacks(pair)
    assert stacks.find([a, b]) is None, "the first time"
    assert stacks.find([c, d]) is None
    first = stacks.find([a, b])
    assert first is not None
    for _ in range(3):  # in turns: nothing is copied again and again
        assert stacks.find([c, d]) is None
        assert stacks.find([a, b]) is first
        assert stacks.num_bytes == pair
    assert stacks.find([c, d]) is None
    assert stacks.find([c, d]) is not None, "the other pair is gone"
    assert stacks.num_bytes == pair
    assert stacks.find([a, b]) is None
    for _ in range(3):
        assert stacks.find([a, b, c]) is None, "three are more than fits"
        assert PolicyStacks(0).find([a, b]) is None
    assert stacks.num_bytes == pair


def test_a_new_version_answers_at_once_and_stacks_of_unserved_ones_go(backbone: Backbone) -> None:
    company, stacks = served("gr00t", "a", "b"), PolicyStacks(PLENTY)
    for _ in range(2):
        serving.forward(backbone, [request(backbone, p, 1) for p in company], stacks)
    size = stacks.num_bytes
    assert size > 0
    company[1:] = served("gr00t", "b", version=1)
    for turn in range(3):
        requests = [request(backbone, p, 1, turn) for p in company]
        for found, right in zip(serving.forward(backbone, requests, stacks), alone(backbone, requests), strict=True):
            assert_same(found, right)
        assert stacks.num_bytes == (0 if turn == 0 else size), "none with the version that is gone"
    del requests
    company.clear()
    stacks.forget_unserved()
    assert stacks.num_bytes == 0


def test_a_tenant_with_many_rows_does_not_keep_the_others_from_decoding_together(backbone: Backbone) -> None:
    """Rows 1, 1, 1 and 9: nine each would be three times as many as there are. The three have a stack."""
    few, many = served("pi", "a", "b", "c"), served("pi", "d")
    order = [(policy, 1) for policy in few] + [(many[0], 9)]

    def requests() -> list[Request]:
        return [request(backbone, policy, rows, seed) for seed, (policy, rows) in enumerate(order)]

    expected, stacks = alone(backbone, requests()), PolicyStacks(PLENTY)
    for _ in range(3):
        for found, right in zip(serving.forward(backbone, requests(), stacks), expected, strict=True):
            assert_same(found, right)
    assert stacks.num_bytes == sum(policy.module.num_bytes for policy in few)
