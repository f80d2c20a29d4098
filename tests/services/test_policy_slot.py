"""One tenant's training on samples that differ in the length of their prompts, for every action module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import AwrSpec
from configs.errors import Conflict
from configs.home import PROJECT_ROOT
from kernels import backbones
from kernels.backbones import Backbone
from services.busy import BusyLog
from services.feature_store import FeatureStore
from services.policy_slot import PolicySlot, advantage_fields, advantages, training_fields
from services.training_group import Member, Trained, train_alone
from tests.services.policies import BASE, ROLLOUT_SPECS, SMALL, backend, observation, policy, rollouts

SHORT, LONG = "push", "push the red cube to the green target on the table and then move the gripper back to the left"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbones.load(BASE, PROJECT_ROOT)


def samples(count: int) -> dict[str, Any]:
    """Every third prompt is long."""
    seen = observation(count, 1)
    return {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": [LONG if i % 3 == 1 else SHORT for i in range(count)],
        "action": np.random.default_rng(2).normal(size=(count, 1, 2)).astype(np.float32),
        "action_is_pad": np.zeros((count, 1), bool),
    }


def slot_of(config: Any) -> PolicySlot:
    slot = PolicySlot(config.policy)
    slot.ensure_optimizer(config.policy_key, config.algorithm)
    return slot


def trained_alone(
    backbone: Backbone, slot: PolicySlot, config: Any, data: dict[str, Any], store: FeatureStore | None = None
) -> Trained:
    return train_alone(backbone, Member(slot, config, data), store, BusyLog())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_prompts_of_several_lengths_and_a_last_row_alone_are_trained_on(backbone: Backbone, kind: str) -> None:
    """37 samples in microbatches of 4, twice over: chunks of 32 rows, both lengths in each, one row at the end."""
    config = backend("a", kind=kind, passes=2)
    assert len(set(backbone.lengths([SHORT, LONG], 1))) == 2
    slot = slot_of(config)
    trained, result = trained_alone(backbone, slot, config, samples(37))
    assert result["optimizer_steps"] == 2 * 10
    assert np.isfinite(result["metrics"]["loss"])
    assert trained.version == 20


@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"lora"}))
def test_a_samples_features_are_its_own_whatever_its_neighbours_prompts(backbone: Backbone, kind: str) -> None:
    """In order, each row's real part equal to the bit to that of the row alone; so it is from the store, too."""
    config = backend("a", kind=kind)
    slot, data = slot_of(config), samples(8)
    together = slot._features(backbone, data, slice(0, 8))
    for row in range(8):
        alone = slot._features(backbone, data, torch.tensor([row]))
        for mine, ours in zip(alone.tensors(), together[row : row + 1].tensors(), strict=True):
            real = ours if mine.shape == ours.shape else ours[tuple(slice(0, n) for n in mine.shape)]
            assert torch.equal(mine, real)


@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"lora"}))
def test_kept_features_give_the_same_parameters(backbone: Backbone, kind: str) -> None:
    """Two jobs over the same samples, with a store and without."""
    config, data, store = backend("a", kind=kind, passes=2), samples(8), FeatureStore(64 << 20)
    ends = []
    for use in (store, None):
        slot = slot_of(config)
        for _ in range(2):
            slot, _ = trained_alone(backbone, slot, config, data, use)
        ends.append(slot.parameters())
    assert store.num_bytes()["a"] > 0
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_another_interface_is_not_restored(backbone: Backbone, tmp_path: Any) -> None:
    """Alpha is in no parameter: names, shapes and dtypes are the same."""
    config = backend("a", kind="lora")
    trained, _ = trained_alone(backbone, slot_of(config), config, samples(8))
    manifest = {
        "schema_signature": config.policy.schema_signature,
        "policy": config.policy.model_dump(mode="json"),
    }
    trained.save(tmp_path, config.policy_key, manifest)
    assert PolicySlot.restored(config, tmp_path, None, True).version == 2
    other = config.model_copy(update={"policy": config.policy.model_copy(update={"schema_signature": "f" * 64})})
    with pytest.raises(Conflict, match="schema_signature of the checkpoint of version 2"):
        PolicySlot.restored(other, tmp_path, None, True)


def episodes(backbone: Backbone, slot: PolicySlot, config: Any) -> dict[str, Any]:
    """A rollout of 4 steps in 2 environments, row = 2 t + e, under the slot's policy as recorded.

    Group 7: environment 0's first episode, one step, outcome 1; environment 1's first, two steps, outcome 0.
    Group 8: environment 1's second, two steps, outcome 5; environment 0's second does not end.
    """
    seen, generator = observation(8, 3), np.random.default_rng(4)
    flags = {name: np.zeros((8, 1), bool) for name in ("terminated", "truncated")}
    flags["terminated"][0] = flags["truncated"][3] = flags["terminated"][7] = True
    reward = np.zeros((8, 1), np.float32)
    reward[0], reward[7] = 1, 5
    data = {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": seen["instructions"],
        "action": generator.normal(size=(8, 1, 2)).astype(np.float32),
        "reward": reward,
        **flags,
        "valid": np.ones((8, 1), bool),
        "sample_valid": np.ones(8, bool),
        "group": np.array([7, 7, 8, 7, 8, 8, 8, 8], np.int64),
        "bootstrap_value": np.zeros(8, np.float32),
        "next_value": np.zeros(8, np.float32),
    }
    scored = slot.evaluated(backbone, config, data)
    data |= {"log_prob": scored["actor_log_prob"], "value": scored["actor_value"], **scored}
    return data | advantages({name: data[name] for name in advantage_fields(config)}, config.algorithm)


def test_groups_of_episodes_reach_the_loss_and_unfinished_ones_do_not(backbone: Backbone) -> None:
    """Outcomes 1 and 0 are (1 − ½) / ½ = 1 and −1; one alone is 0. Of five valid rows, with ratios of 1, the loss is
    −(1 − 1 − 1 + 0 + 0) / 5."""
    config = rollouts("a", "grpo", group_size=2, epochs=1)
    slot = slot_of(config)
    data = episodes(backbone, slot, config)
    assert data["advantage"][:, 0].tolist() == [1, -1, 0, -1, 0, 0, 0, 0]
    assert data["loss_mask"][:, 0].tolist() == [True, True, False, True, False, True, False, True]
    assert "return" not in data, "no critic learns"
    trained, result = trained_alone(backbone, slot, config, {**data, "value": None, "return": None})
    assert result["metrics"]["policy_loss"] == pytest.approx(0.2, abs=1e-6)
    assert (result["metrics"]["value_loss"], result["metrics"]["kl"]) == (0, 0)
    assert (trained.version, result["optimizer_steps"]) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "fields", "coef"),
    [
        ("grpo", {"group_size": 2, "epochs": 1, "kl": {"coef": 0.5}}, 0.5),
        ("ppo", {"epochs": 1, "value_coef": 0.0, "kl": {"coef": 3.0, "reference": "reference"}}, 3.0),
        ("reinforce", {"value_coef": 0.0, "kl": {"coef": 2.0, "reference": "reference"}}, 2.0),
    ],
)
def test_the_distance_from_the_policy_that_the_workload_began_with_outlives_a_checkpoint(
    backbone: Backbone, tmp_path: Any, kind: str, fields: dict[str, Any], coef: float
) -> None:
    """First job: 0. Second: mean of (r − 1) − log r, r = π_begun / π, over rows that carry loss; so after a restart.

    What acted in the second is a third policy, 0.3 nats away. Reference: the estimate in numpy from the two policies'
    own log-probabilities, float64.
    """
    config = rollouts("a", kind, **fields)
    begun = slot_of(config)
    data = episodes(backbone, begun, config)
    first, result = trained_alone(backbone, begun, config, data)
    assert result["metrics"]["kl"] == 0
    log_ratio = (
        begun.evaluated(backbone, config, data)["actor_log_prob"].astype(np.float64)
        - first.evaluated(backbone, config, data)["actor_log_prob"]
    )[data.get("loss_mask", data["valid"])]
    expected = (np.exp(log_ratio) - 1 - log_ratio).mean()
    assert expected > 1e-5
    data["log_prob"] = data["log_prob"] - np.float32(0.3)
    _, result = trained_alone(backbone, first, config, data)
    assert result["metrics"]["kl"] == pytest.approx(expected, rel=1e-3)
    told = result["metrics"]
    assert told["loss"] == pytest.approx(told["policy_loss"] + coef * expected, rel=1e-3)
    first.save(
        tmp_path,
        config.policy_key,
        {
            "schema_signature": config.policy.schema_signature,
            "policy": config.policy.model_dump(mode="json"),
        },
    )
    restored = PolicySlot.restored(config, tmp_path, None, True)
    plain = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl": None})})
    assert restored.num_bytes == first.num_bytes > slot_of(plain).num_bytes
    _, again = trained_alone(backbone, restored, config, data)
    assert again["metrics"] == result["metrics"]


def test_the_distance_from_the_policy_that_acted_is_another_one(backbone: Backbone) -> None:
    """What acted found each action 0.1 nats likelier than the slot's policy does: k2 is ½ · 0.1², no copy is kept."""
    for reference, expected in (("behaviour", 0.005), ("reference", 0.0)):
        config = rollouts("a", "ppo", epochs=1, kl={"coef": 1.0, "estimator": "k2", "reference": reference})
        slot = slot_of(config)
        data = episodes(backbone, slot, config)
        data["log_prob"] = data["log_prob"] + np.float32(0.1)
        _, result = trained_alone(backbone, slot, config, data)
        assert result["metrics"]["kl"] == pytest.approx(expected, abs=1e-6)
        assert bool(slot.references) == (reference == "reference")


def test_ratios_are_against_the_actor_that_the_update_begins_from(backbone: Backbone) -> None:
    """Recomputed by version 0, trained on version 1 in one step: the ratio is 1, as with a new forward."""
    config = rollouts("a", "ppo", epochs=1, actor_forward=True, decoupled={})
    begun = slot_of(config)
    data = episodes(backbone, begun, config)
    moved, _ = trained_alone(backbone, begun, config, data)
    assert (data["actor_version"].tolist(), moved.version) == ([0] * 8, 1)
    now = moved.evaluated(backbone, config, data)
    assert np.abs(now["actor_log_prob"] - data["actor_log_prob"]).max() > 1e-3
    late, result = trained_alone(backbone, moved, config, data)
    assert result["metrics"]["ratio_max"] == pytest.approx(1, abs=1e-5)
    fresh, expected = trained_alone(backbone, moved, config, data | now)
    assert expected["metrics"] == result["metrics"]
    assert all(np.array_equal(late.parameters()[name], p) for name, p in fresh.parameters().items())


@pytest.mark.parametrize(
    ("baseline", "advantage"),
    [({"kind": "leave_one_out"}, 3.0), ({"kind": "group_mean", "scale": "none"}, 1.5), ({"kind": "group_mean"}, 1.0)],
    ids=["rloo", "unscaled", "grpo"],
)
def test_a_groups_baseline_is_the_declared_one(backbone: Backbone, baseline: dict[str, Any], advantage: float) -> None:
    """Outcomes 3 and 0: less the other's ±3, less the mean ±1.5, by the deviation of 1.5 ±1. Five rows carry loss, of
    which one won, two lost, two have no rival: −(A − A − A) / 5, with ratios of 1."""
    config = rollouts("a", "grpo", group_size=2, epochs=1, baseline=baseline)
    slot = slot_of(config)
    data = episodes(backbone, slot, config)
    data["reward"][0] = 3
    data |= advantages({name: data[name] for name in advantage_fields(config)}, config.algorithm)
    assert data["advantage"][:, 0].tolist() == [advantage, -advantage, 0, -advantage, 0, 0, 0, 0]
    _, result = trained_alone(backbone, slot, config, data)
    assert result["metrics"]["policy_loss"] == pytest.approx(advantage / 5, abs=1e-6)


def test_reinforce_takes_the_declared_steps_of_reward_and_no_baseline(backbone: Backbone) -> None:
    """Two decisions, γ = 1, then V = 2, or 3 after the truncation. Environment 0 (rows 0, 2, 4, 6): 1 and its end;
    0 + 0 + 2; 0 + 0 + 2; 0 + 2. Environment 1: 0 + 0 + 3; 0 + 3; 0 + 5 and its end; 5. The loss is −mean of G log π."""
    estimator = {"kind": "n_step", "n_steps": 2, "value_baseline": False}
    config = rollouts("a", "reinforce", gamma=1.0, standardise=False, estimator=estimator)
    slot = slot_of(config)
    data = episodes(backbone, slot, config)
    data["next_value"][:], data["bootstrap_value"][3] = 2, 3
    data |= advantages({name: data[name] for name in advantage_fields(config)}, config.algorithm)
    returns = np.array([1, 3, 2, 3, 2, 5, 2, 5], np.float64)
    assert data["return"].tolist() == returns.tolist()
    _, result = trained_alone(backbone, slot, config, data)
    assert result["metrics"]["policy_loss"] == pytest.approx(-(returns * data["log_prob"][:, 0]).mean(), rel=1e-4)
    assert result["metrics"]["value_loss"] == pytest.approx(0.5 * ((data["value"] - returns) ** 2).mean(), rel=1e-4)


def test_reinforce_descends_on_log_probabilities_times_what_the_critic_did_not_expect(backbone: Backbone) -> None:
    """−mean of (G − V) log π over all 8 rows, with γ = 1 and advantages as they are; one pass, whatever the module.

    Returns by hand: environment 0: 1, then 0, 0, 0 and V(next) = 0; environment 1: 0, 0, then 5, 5.
    """
    returns = np.array([1, 0, 0, 0, 0, 5, 0, 5], np.float64)
    for module in ("oft", "lora"):
        config = rollouts("a", "reinforce", gamma=1.0, standardise=False, module=module)
        slot = slot_of(config)
        data = episodes(backbone, slot, config)
        assert data["return"].tolist() == returns.tolist()
        expected = -((returns - data["value"]) * data["log_prob"][:, 0]).mean()
        trained, result = trained_alone(backbone, slot, config, data)
        assert result["metrics"]["policy_loss"] == pytest.approx(expected, rel=1e-4)
        assert (trained.version, result["metrics"]["clip_fraction"]) == (1, 0)
        assert result["metrics"]["value_loss"] > 0


def test_a_job_with_nothing_to_learn_from_leaves_version_and_random_state(backbone: Backbone) -> None:
    """Both outcomes of the group alike."""
    config = rollouts("a", "grpo", group_size=2)
    slot = slot_of(config)
    data = episodes(backbone, slot, config)
    data["advantage"] = np.zeros_like(data["advantage"])
    trained, result = trained_alone(backbone, slot, config, data)
    assert (result["version"], result["optimizer_steps"], result["metrics"]) == (0, 0, {"nothing_to_learn": 1.0})
    assert torch.equal(trained.generator.get_state(), slot.generator.get_state())


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_what_a_chunk_holds_after_its_episodes_end_carries_no_loss(backbone: Backbone, end: str) -> None:
    """Chunks of 4 that ended with their first action, whatever `valid` says: as if it said so. The other three are
    50 nats likelier than recorded, a ratio of e⁵⁰ if they counted. V learns the return, by hand the first reward."""
    config = backend("a", "rl", horizon=4)
    algorithm = config.algorithm.model_copy(update={"epochs": 1, "microbatch_size": 8})
    config = config.model_copy(update={"algorithm": algorithm})
    slot, (seen, generator) = slot_of(config), (observation(8, 3), np.random.default_rng(4))
    first = np.arange(4) == np.zeros((8, 1))
    data = {
        "image.top": seen["images"]["top"],
        "proprioception": seen["proprioception"],
        "instructions": seen["instructions"],
        "action": generator.normal(size=(8, 4, 2)).astype(np.float32),
        "reward": generator.normal(size=(8, 4)).astype(np.float32),
        "terminated": np.zeros((8, 4), bool),
        "truncated": np.zeros((8, 4), bool),
        end: first,
        "valid": np.ones((8, 4), bool),
        "sample_valid": np.ones(8, bool),
        "bootstrap_value": np.zeros(8, np.float32),
        "next_value": np.zeros(8, np.float32),
    }
    found = slot.evaluated(backbone, config, data)
    data["log_prob"] = np.where(first, found["actor_log_prob"], found["actor_log_prob"] - 50)
    data["value"] = found["actor_value"]
    data |= advantages({name: data[name] for name in advantage_fields(config)}, config.algorithm)
    trained, result = trained_alone(backbone, slot, config, data)
    metrics = result["metrics"]
    assert (metrics["ratio_max"], metrics["clip_fraction"]) == (pytest.approx(1, abs=1e-4), 0)
    expected = 0.5 * np.square(data["value"].astype(np.float64) - data["reward"][:, 0]).mean()
    assert metrics["value_loss"] == pytest.approx(expected, rel=1e-4)
    masked, also = trained_alone(backbone, slot, config, data | {"valid": first})
    assert also["metrics"] == metrics
    assert all(np.array_equal(trained.parameters()[name], p) for name, p in masked.parameters().items())


EXECUTED = {"valid", "terminated", "truncated", "sample_valid"}


@pytest.mark.parametrize(
    ("kind", "fields", "read"),
    [
        ("ppo", {}, {"log_prob", "value", "advantage", "return", *EXECUTED}),
        ("reinforce", {}, {"log_prob", "value", "advantage", "return", *EXECUTED}),
        ("grpo", {"group_size": 2}, {"log_prob", "advantage", "loss_mask"}),
        (
            "grpo",
            {"group_size": 2, "actor_forward": True},
            {"actor_log_prob", "actor_version", "advantage", "loss_mask"},
        ),
        (
            "grpo",
            {"group_size": 2, "actor_forward": True, "kl": {"coef": 0.1, "reference": "behaviour"}},
            {"actor_log_prob", "actor_version", "log_prob", "advantage", "loss_mask"},
        ),
    ],
)
def test_an_update_reads_what_its_algorithm_uses_and_no_more(kind: str, fields: dict[str, Any], read: set[str]) -> None:
    config = rollouts("a", kind, **fields)
    seen = {"feature.action_tokens", "proprioception", "action"}
    assert set(training_fields(config)) == read | seen
    estimated = set(advantage_fields(config))
    assert ("group" in estimated) == (kind == "grpo")
    assert ("value" in estimated) == (kind != "grpo")
    assert set(ROLLOUT_SPECS) == {"ppo", "grpo", "reinforce"}


def recorded(config: Any, count: int) -> dict[str, Any]:
    """Samples of one scene in which actions of +1.5 are worth 1 and those of −0.5 nothing: ±½ when normalised."""
    good = np.arange(count) % 2 == 0
    action = np.where(good, 1.5, -0.5).astype(np.float32)[:, None, None].repeat(2, axis=2)
    seen = {name: np.repeat(samples(1)[name], count, axis=0) for name in ("image.top", "proprioception")}
    return (
        samples(count) | seen | {"instructions": [SHORT] * count, "action": action, "return": good.astype(np.float32)}
    )


def awr(**fields: Any) -> Any:
    found = backend("a", "rl")
    settings = {"jobs": 2, "batches_per_job": 1, "microbatch_size": 8, "cosine": False} | fields
    algorithm = AwrSpec.model_validate({"optimizer": {"learning_rate": 1e-2}} | settings)
    return found.model_copy(update={"algorithm": algorithm, "environment": None})


def test_recorded_actions_count_by_how_much_better_they_were_than_the_critic_expected(backbone: Backbone) -> None:
    """One step on 8 samples of which the last is padded: −mean of min(exp((G − V) / ½), 3) · log π over the other 7,
    and half the mean squared error of V.

    Reference: numpy, float64, from the slot's own log-probabilities and values of the normalised actions.
    """
    config = awr(temperature=0.5, weight_cap=3.0)
    slot, data = slot_of(config), recorded(awr(), 8)
    data["action_is_pad"][7], data["action"][7] = True, np.nan
    scored = slot.evaluated(backbone, config, data | {"action": np.nan_to_num((data["action"] - 0.5) / 2)})
    value, log_prob = (scored[name].astype(np.float64)[:7] for name in ("actor_value", "actor_log_prob"))
    weight = np.minimum(np.exp((data["return"][:7] - value) / 0.5), 3.0)
    trained, result = trained_alone(backbone, slot, config, data)
    metrics = result["metrics"]
    assert metrics["policy_loss"] == pytest.approx(-(weight * log_prob[:, 0]).mean(), rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(0.5 * ((value - data["return"][:7]) ** 2).mean(), rel=1e-4)
    assert metrics["weight_mean"] == pytest.approx(weight.mean(), rel=1e-4)
    assert metrics["capped_fraction"] == pytest.approx((weight == 3.0).mean())
    assert (trained.version, metrics["nothing_to_learn"]) == (1, 0)
    assert {"action", "action_is_pad", "return"} < set(training_fields(config))


def test_offline_rl_learns_the_better_of_two_recorded_actions(backbone: Backbone) -> None:
    """The policy imitates both at a large temperature, and the better one at a small one; lora is scored as oft is."""
    for kind in ("oft", "lora"):
        means = []
        for temperature in (100.0, 0.1):
            config = awr(temperature=temperature, passes=24)
            config = config.model_copy(update={"policy": policy("a", kind=kind)})
            slot = slot_of(config)
            trained, _ = trained_alone(backbone, slot, config, recorded(config, 16))
            with torch.no_grad():
                feature = trained._features(backbone, recorded(config, 16), slice(0, 16))
                state = torch.from_numpy(recorded(config, 16)["proprioception"])
                means.append(trained.module.act(feature, state, None).action.mean().item())
        assert abs(means[0]) < 0.2
        assert means[1] > 0.3, "towards +½"


def test_offline_rl_keeps_what_the_base_computed_of_its_dataset(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs over the same 8 samples: one forward with a store, one a job without; the same parameters."""
    config, forwards, ends = awr(passes=2), [0], []
    encode = backbone.encode

    def counted(*given: Any) -> Any:
        forwards[-1] += 1
        return encode(*given)

    monkeypatch.setattr(backbone, "encode", counted)
    for store in (FeatureStore(64 << 20), None):
        slot = slot_of(config)
        for _ in range(2):
            slot, _ = trained_alone(backbone, slot, config, samples(8) | recorded(config, 8), store)
        ends.append(slot.parameters())
        forwards.append(0)
    assert forwards == [1, 2, 0]
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_dataset_in_which_all_is_padding_teaches_nothing(backbone: Backbone) -> None:
    config = awr()
    data = recorded(config, 8) | {"action_is_pad": np.ones((8, 1), bool)}
    _, result = trained_alone(backbone, slot_of(config), config, data)
    assert (result["version"], result["metrics"]) == (0, {"nothing_to_learn": 1.0})
