"""Grouped equals alone, to the bit, whoever else is in the group."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs import presets
from configs.errors import Conflict
from configs.model import OftSpec
from kernels import action_modules
from kernels.backbones import Backbone
from kernels.features import VLAFeature
from kernels.group_batching import group, split
from tests.kernels.conftest import observation


def test_grouped_equals_alone_at_every_size(backbone: Backbone) -> None:
    """Row counts of 1 to 31, each with pictures of its own."""
    alone = [backbone.prepare(observation(n, n), ["base"]) for n in (1, 2, 3, 5, 8, 16, 31)]
    grouped, slices = group(alone)
    assert grouped.rows == 66
    for prefix, feature in zip(alone, split(backbone.encode(grouped), slices), strict=True):
        assert torch.equal(backbone.encode(prefix).action_tokens, feature.action_tokens)


def test_grouped_equals_alone_across_prompts_and_camera_counts(backbone: Backbone) -> None:
    """A long instruction with one camera shares a bucket, and so a forward, with a short one with two."""
    one = backbone.prepare(observation(3, 1, text="push the cube " * 5), ["base"])
    two = backbone.prepare(observation(2, 2, ("left", "right"), "push the cube"), ["left", "right"])
    assert one.length == two.length
    for order in ([one, two], [two, one], [two, one, two]):
        grouped, slices = group(order)
        for prefix, feature in zip(order, split(backbone.encode(grouped), slices), strict=True):
            assert torch.equal(backbone.encode(prefix).action_tokens, feature.action_tokens)


def test_pictures_swapped_between_tenants_are_noticed(backbone: Backbone) -> None:
    """The flat pixel batch alone does not tell whose picture is whose; distinguishable inputs do."""
    a, b = (backbone.prepare(observation(1, seed), ["base"]) for seed in (1, 2))
    grouped, slices = group([a, b])
    right = split(backbone.encode(grouped), slices)
    wrong = split(backbone.encode(group([b, a])[0]), slices)
    assert torch.equal(right[0].action_tokens, wrong[1].action_tokens)
    assert not torch.equal(right[0].action_tokens, wrong[0].action_tokens)


def test_a_row_alone_equals_the_same_row_of_a_batch(backbone: Backbone) -> None:
    batch = backbone.prepare(observation(40, 7), ["base"])
    whole = backbone.encode(batch).action_tokens
    for rows in (slice(0, 1), slice(17, 18), slice(5, 12), slice(39, 40)):
        assert torch.equal(backbone.encode(batch[rows]).action_tokens, whole[rows])


def test_slices_of_rows_take_their_own_pictures(backbone: Backbone) -> None:
    grouped, _ = group(
        [
            backbone.prepare(observation(2, 1, ("a", "b"), "push the cube"), ["a", "b"]),
            backbone.prepare(observation(2, 2, text="push the cube " * 5), ["base"]),
        ]
    )
    assert grouped.images_per_row == (2, 2, 1, 1)
    middle = grouped[1:3]
    assert middle.images_per_row == (2, 1)
    assert torch.equal(middle.pixels, grouped.pixels[2:5])


def test_nan_in_one_tenants_state_leaves_its_neighbours_bits(backbone: Backbone) -> None:
    base = presets.base_model("tiny-qwen3-vl")
    spec = OftSpec(horizon=2, action_width=2, state_width=2, hidden_width=256, proprioception="head")
    modules = [action_modules.build(spec, base, seed) for seed in (0, 1)]
    prefixes = [backbone.prepare(observation(2, seed), ["base"]) for seed in (1, 2)]
    grouped, slices = group(prefixes)
    good, bad = torch.zeros(2, 2), torch.full((2, 2), float("nan"))
    quiet, _ = (
        m.act(f, s, None)
        for m, f, s in zip(modules, split(backbone.encode(grouped), slices), (good, good), strict=True)
    )
    beside, ill = (
        m.act(f, s, None) for m, f, s in zip(modules, split(backbone.encode(grouped), slices), (good, bad), strict=True)
    )
    assert torch.equal(quiet.action, beside.action)
    assert torch.equal(quiet.value, beside.value)
    assert ill.action.isnan().all()
    within = modules[0].act(
        split(backbone.encode(grouped), slices)[0], torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]), None
    )
    assert torch.equal(within.action[0], quiet.action[0])


def test_unequal_buckets_and_wrong_slices_are_refused(backbone: Backbone) -> None:
    short = backbone.prepare(observation(1, 1), ["base"])
    longer = backbone.prepare(observation(1, 1, text="push the cube " * 9), ["base"])
    with pytest.raises(Conflict, match=r"prefixes: got .* possible: prefixes of one length bucket"):
        group([short, longer])
    with pytest.raises(Conflict, match="prefixes"):
        group([])
    feature = VLAFeature(torch.zeros(3, 4, 128))
    for slices in ([slice(0, 2)], [slice(0, 2), slice(1, 3)], [slice(0, 1), slice(2, 3)]):
        with pytest.raises(Conflict, match="slices"):
            split(feature, slices)


def test_split_features_are_copies() -> None:
    feature = VLAFeature(torch.arange(16.0).reshape(2, 2, 4))
    first, second = split(feature, [slice(0, 1), slice(1, 2)])
    first.action_tokens.zero_()
    assert torch.equal(feature.action_tokens[0].flatten(), torch.arange(8.0))
    assert np.isclose(float(second.action_tokens.sum()), sum(range(8, 16)))
    assert feature.finite_rows().tolist() == [True, True]
