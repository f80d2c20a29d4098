"""The Training Model Service on the real tiny base: jobs, isolation between tenants, checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.algorithm import PpoSpec
from configs.errors import Conflict, DataFault, SpecError, TenantFault, UnknownObject
from configs.home import PROJECT_ROOT
from configs.workload import ResourcesSpec
from kernels import backbones
from services.feature_store import SHARED
from services.rollout import FEATURE
from services.training_model import TrainingModelService
from storage.checkpoints import CheckpointStore
from tests.services.policies import BASE, BASES, SMALL, backend, job, observation, put_demonstrations, rollouts

KINDS = ("oft", "pi", "lora")
Parameters = dict[str, np.ndarray]


@pytest.fixture
def service(tmp_path: Path) -> TrainingModelService:
    return TrainingModelService(str(tmp_path), BASES, 4)


def partitions(tmp_path: Path) -> Path:
    return tmp_path / "partitions"


async def opened(service: TrainingModelService, tmp_path: Path, config: Any, *, fresh: bool = True) -> dict[str, Any]:
    folder = tmp_path / "tenants" / config.policy.tenant / config.task
    return await service.open_slot(config.model_dump(mode="json"), str(folder), fresh=fresh)


async def parameters(service: TrainingModelService, tenant: str) -> Parameters:
    return dict((await service.export_params(tenant))["tensors"])


def equal(a: Parameters, b: Parameters) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_a_job_makes_one_step_a_microbatch_and_moves_the_version_by_as_many(
    service: TrainingModelService, tmp_path: Path, kind: str
) -> None:
    """8 samples in microbatches of 4: two steps, version 2."""

    async def main() -> None:
        config = backend("a", kind=kind)
        assert (await opened(service, tmp_path, config))["version"] == 0
        before = await parameters(service, "a")
        result = await service.train_job(put_demonstrations(partitions(tmp_path), config))
        assert (result["optimizer_steps"], result["version"]) == (2, 2)
        assert result["metrics"]["grad_norm"] > 0
        assert not equal(before, await parameters(service, "a"))

    asyncio.run(main())


def test_a_resent_job_is_done_once(service: TrainingModelService, tmp_path: Path) -> None:
    async def main() -> None:
        config = backend("a")
        await opened(service, tmp_path, config)
        sent = put_demonstrations(partitions(tmp_path), config)
        first, second = await asyncio.gather(service.train_job(sent), service.train_job(sent))
        assert first == second
        assert (await service.versions())["a"] == 2

    asyncio.run(main())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_training_one_tenant_leaves_the_others_bits(service: TrainingModelService, tmp_path: Path, kind: str) -> None:
    """A and B train in turns; B's parameters are those of B trained without A, and while A trains B's do not move."""

    async def main() -> None:
        a, b = backend("a", learning_rate=0.1), backend("b", seed=3, kind=kind)
        await opened(service, tmp_path, a)
        await opened(service, tmp_path, b)
        for number in range(2):
            untouched = await parameters(service, "b")
            await service.train_job(put_demonstrations(partitions(tmp_path), a, number, seed=number))
            assert equal(untouched, await parameters(service, "b"))
            await service.train_job(put_demonstrations(partitions(tmp_path), b, number, seed=10 + number))
        alone = TrainingModelService(str(tmp_path / "alone"), BASES, 4)
        await opened(alone, tmp_path / "alone", b)
        for number in range(2):
            await alone.train_job(put_demonstrations(partitions(tmp_path / "alone"), b, number, seed=10 + number))
        assert equal(await parameters(alone, "b"), await parameters(service, "b"))

    asyncio.run(main())


def test_the_same_seeds_give_the_same_parameters_twice(tmp_path: Path) -> None:
    async def trained(folder: Path) -> Parameters:
        service = TrainingModelService(str(folder), BASES, 4)
        config = backend("a")
        await opened(service, folder, config)
        for number in range(3):
            await service.train_job(put_demonstrations(partitions(folder), config, number, seed=number))
        return await parameters(service, "a")

    assert equal(asyncio.run(trained(tmp_path / "one")), asyncio.run(trained(tmp_path / "two")))


def test_a_nan_fails_the_job_and_leaves_the_slot_usable(service: TrainingModelService, tmp_path: Path) -> None:
    async def main() -> None:
        config = backend("a")
        await opened(service, tmp_path, config)
        before = await parameters(service, "a")
        with pytest.raises(TenantFault, match="action: got 'NaN or infinity'"):
            await service.train_job(put_demonstrations(partitions(tmp_path), config, 0, nan=True))
        assert equal(before, await parameters(service, "a"))
        assert (await service.versions())["a"] == 0
        assert (await service.train_job(put_demonstrations(partitions(tmp_path), config, 1)))["version"] == 2

    asyncio.run(main())


def test_another_tenants_partition_is_not_trained_on(service: TrainingModelService, tmp_path: Path) -> None:
    async def main() -> None:
        a, b = backend("a"), backend("b")
        await opened(service, tmp_path, a)
        await opened(service, tmp_path, b)
        theirs = put_demonstrations(partitions(tmp_path), b)
        mine = job(a) | {"partition_id": theirs["partition_id"]}
        with pytest.raises(DataFault, match="tenant_id"):
            await service.train_job(mine)
        with pytest.raises(UnknownObject, match="partition_id"):
            await service.train_job(job(a, 9))

    asyncio.run(main())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_resume_with_optimizer_equals_the_uninterrupted_run(
    service: TrainingModelService, tmp_path: Path, kind: str
) -> None:
    """Two jobs, restore the checkpoint after the first, train the second again: the same bits; without the optimizer
    not."""

    async def main() -> None:
        config = backend("a", kind=kind)
        await opened(service, tmp_path, config)
        folder = str(tmp_path / "tenants" / "a" / "sft")
        await service.train_job(put_demonstrations(partitions(tmp_path), config, 0))
        second = put_demonstrations(partitions(tmp_path), config, 1, seed=1)
        await service.train_job(second)
        through = await parameters(service, "a")
        ends = []
        for with_optimizer in (True, False):
            assert await service.restore("a", "a.sft", folder=folder, version=2, with_optimizer=with_optimizer) == 2
            for half in (0, 1):
                await service.train_batch("a", "a.sft", _samples(tmp_path, second, half))
            ends.append(await parameters(service, "a"))
        assert equal(through, ends[0])
        assert not equal(through, ends[1])

    asyncio.run(main())


def test_who_continues_goes_on_after_the_last_batch_that_was_trained_on(
    service: TrainingModelService, tmp_path: Path
) -> None:
    """Batches 3 and 4, in whichever order they are trained: 5 comes next, also out of a checkpoint; afresh it is 0."""

    async def main() -> None:
        config = backend("a")
        assert (await opened(service, tmp_path, config))["next_number"] == 0
        for number in (4, 3):
            described = put_demonstrations(partitions(tmp_path), config, number)
            described["metadata"]["batch"] = number
            await service.train_job(described)
        assert (await opened(service, tmp_path, config, fresh=False))["next_number"] == 5
        assert (await opened(service, tmp_path, config))["next_number"] == 0
        folder = str(tmp_path / "tenants" / "a" / "sft")
        await service.restore("a", "a.sft", folder=folder, version=4, with_optimizer=True)
        assert (await opened(service, tmp_path, config, fresh=False))["next_number"] == 5

    asyncio.run(main())


def _samples(tmp_path: Path, described: dict[str, Any], half: int) -> dict[str, Any]:
    """The first or second microbatch of a job's partition."""
    from storage.partitions import PartitionStore

    store = PartitionStore(partitions(tmp_path))
    fields = ["image.top", "proprioception", "action", "action_is_pad"]
    store.reset_cursor(described["partition_id"], "test")
    for _ in range(half + 1):
        meta = store.get_meta(described["partition_id"], task_name="test", data_fields=fields, batch_size=4)
    assert meta is not None
    return {**store.get_data(meta), "instructions": ["reach the red target"] * 4}


def test_sft_and_rl_of_one_tenant_share_the_slot_and_its_version(service: TrainingModelService, tmp_path: Path) -> None:
    async def main() -> None:
        sft, rl = backend("a"), backend("a", "rl")
        await opened(service, tmp_path, sft)
        await service.train_job(put_demonstrations(partitions(tmp_path), sft))
        assert (await opened(service, tmp_path, rl, fresh=False))["version"] == 2
        other = backend("a", "rl", action_width=3)
        with pytest.raises(Conflict, match="start fresh"):
            await opened(service, tmp_path, other, fresh=False)

    asyncio.run(main())


def test_who_goes_on_with_a_slot_goes_on_with_its_statistics(service: TrainingModelService, tmp_path: Path) -> None:
    """Supervised under the data's statistics, then by RL in an environment that declares others: what the adapter's
    manifest says is what its weights were learned under."""

    async def main() -> None:
        supervised, rl = backend("a"), backend("a", "rl")
        widened = rl.policy.action.model_copy(update={"std": (7.0,) * 2})
        declared = rl.model_copy(update={"policy": rl.policy.model_copy(update={"action": widened})})
        await opened(service, tmp_path, supervised)
        reply = await opened(service, tmp_path, declared, fresh=False)
        assert reply["policy"] == supervised.policy.model_dump(mode="json")
        saved = await service.save("a", declared.policy_key)
        store = CheckpointStore(Path(saved["path"]).parents[1])
        assert store.load().manifest["policy"] == reply["policy"]
        afresh = await opened(service, tmp_path, declared)
        assert afresh["policy"]["action"]["std"] == [7.0, 7.0]

    asyncio.run(main())


def test_a_restored_slot_has_its_checkpoints_statistics(service: TrainingModelService, tmp_path: Path) -> None:
    """Whatever the workload declares that restores it; what it saves next says the same."""

    async def main() -> None:
        learned = backend("a")
        await opened(service, tmp_path, learned)
        await service.save("a", learned.policy_key)
        widened = learned.policy.action.model_copy(update={"std": (7.0,) * 2})
        declared = learned.model_copy(update={"policy": learned.policy.model_copy(update={"action": widened})})
        assert (await opened(service, tmp_path, declared))["policy"]["action"]["std"] == [7.0, 7.0]
        folder = tmp_path / "tenants" / "a" / "sft"
        await service.restore("a", "a.sft", folder=str(folder), version=0, with_optimizer=True)
        # A slot at another version than what is saved: else saving writes nothing.
        await service.train_job(put_demonstrations(partitions(tmp_path), learned, 0))
        saved = CheckpointStore(folder / "checkpoints").load().manifest
        assert saved["policy_version"] == 2
        assert saved["policy"] == learned.policy.model_dump(mode="json")

    asyncio.run(main())


def test_slots_are_bounded(tmp_path: Path) -> None:
    """What they cost is in test_slot_bytes."""

    async def main() -> None:
        service = TrainingModelService(str(tmp_path), BASES, 4)
        for tenant in "abcd":
            await opened(service, tmp_path, backend(tenant))
        with pytest.raises(TenantFault, match="4 slots, all taken"):
            await opened(service, tmp_path, backend("e"))
        await service.close_slot("a")
        await opened(service, tmp_path, backend("e"))

    asyncio.run(main())


def _seen(config: Any, seen: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a rollout's partition tells of the pictures."""
    if not config.features_travel:
        return {"image.top": seen["images"]["top"]}
    backbone = backbones.load(BASE, PROJECT_ROOT)
    feature = backbone.encode(backbone.prepare(seen, ["top"]))
    assert feature.action_tokens is not None
    return {FEATURE: feature.action_tokens.numpy()}


def _rollout(tmp_path: Path, config: Any, *, number: int = 0, **columns: np.ndarray) -> dict[str, Any]:
    """An RL partition of 4 steps in 2 environments with behaviour values and rewards from a fixed generator.

    `columns` are others in their place, or further ones.
    """
    from storage.partitions import PartitionStore

    rng = np.random.default_rng(5)
    seen = observation(8, 5)
    described = job(config, number) | {"behavior_policy_version": 0}
    data = {
        **_seen(config, seen),
        "proprioception": seen["proprioception"],
        "action": rng.normal(size=(8, 1, 2)).astype(np.float32),
        "log_prob": rng.normal(size=(8, 1)).astype(np.float32),
        "value": rng.normal(size=8).astype(np.float32),
        "reward": rng.normal(size=(8, 1)).astype(np.float32),
        "valid": np.ones((8, 1), bool),
        "terminated": np.zeros((8, 1), bool),
        "truncated": np.zeros((8, 1), bool),
        "next_value": rng.normal(size=8).astype(np.float32),
        "bootstrap_value": np.zeros(8, np.float32),
        "sample_valid": np.ones(8, bool),
        "done": np.zeros(8, bool),
        **columns,
    }
    PartitionStore(partitions(tmp_path)).put(
        described["partition_id"],
        data,
        tenant_id=config.policy.tenant,
        schema_signature=config.policy.schema_signature,
        policy_version=0,
        chunk=4,
        instructions=["reach the red target"],
    )
    return described


def test_rl_stages_add_their_columns_and_training_moves_the_policy(
    service: TrainingModelService, tmp_path: Path
) -> None:
    """PPO, 2 epochs over 8 samples in microbatches of 4: four steps."""

    async def main() -> None:
        config = backend("a", "rl")
        await opened(service, tmp_path, config)
        described = _rollout(tmp_path, config)
        assert await service.compute_advantages(described) == {"samples": 8, "group_counts": {}}
        result = await service.train_job(described)
        assert result["optimizer_steps"] == 4
        assert result["metrics"]["grad_norm"] > 0

    asyncio.run(main())


def test_a_job_with_nothing_to_learn_from_makes_no_version_and_says_so(
    service: TrainingModelService, tmp_path: Path
) -> None:
    """All rewards alike in two groups of episodes of one step; the next job, with unequal ones, makes version 1."""

    async def main() -> None:
        config = rollouts("a", "grpo", group_size=2, epochs=1)
        await opened(service, tmp_path, config)
        before = await parameters(service, "a")
        alike = _rollout(tmp_path, config, **_ended(np.ones(8)))
        counts = (await service.compute_advantages(alike))["group_counts"]
        assert counts == {"groups": 4, "filtered_groups": 0, "constant_groups": 4, "unfinished_episodes": 0}
        alike["metadata"]["group_counts"] = counts  # as the advantage stage's task notes them
        result = await service.train_job(alike)
        assert result["nothing_to_learn"] is True
        assert result["metrics"] == {"nothing_to_learn": 1.0, **counts}
        assert (result["version"], result["optimizer_steps"], result["checkpoint"]) == (0, 0, None)
        assert await service.versions() == {"a": 0}
        assert equal(before, await parameters(service, "a"))
        assert not list(tmp_path.rglob("checkpoints/*"))
        unequal = _rollout(tmp_path, config, number=1, **_ended(np.arange(8)))
        await service.compute_advantages(unequal)
        result = await service.train_job(unequal)
        assert (result["nothing_to_learn"], result["version"]) == (False, 1)
        assert result["checkpoint"]["version"] == 1

    asyncio.run(main())


def _ended(reward: np.ndarray) -> dict[str, np.ndarray]:
    """Episodes of one step, those of one step in a group."""
    return {
        "reward": reward.astype(np.float32)[:, None],
        "terminated": np.ones((8, 1), bool),
        "group": np.repeat(np.arange(4), 2),
    }


def test_with_frozen_weights_the_recomputed_ratio_is_one(service: TrainingModelService, tmp_path: Path) -> None:
    """Learning rate 0 and recomputed log-probabilities: approximate KL 0, nothing clipped."""

    async def main() -> None:
        config = backend("a", "rl", learning_rate=0.0)
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"actor_forward": True})})
        await opened(service, tmp_path, config)
        described = _rollout(tmp_path, config)
        await service.actor_forward(described)
        await service.compute_advantages(described)
        metrics = (await service.train_job(described))["metrics"]
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["clip_fraction"] == 0.0

    asyncio.run(main())


def test_every_declared_setting_of_ppo_reaches_the_update(service: TrainingModelService, tmp_path: Path) -> None:
    """Estimator, importance weights, distance: what the recorded policy found impossible counts 5 and is far off."""

    async def trained(tenant: str, **changes: Any) -> dict[str, float]:
        config = backend(tenant, "rl")
        algorithm = PpoSpec.model_validate(config.algorithm.model_dump() | {"actor_forward": True, **changes})
        config = config.model_copy(update={"algorithm": algorithm})
        await opened(service, tmp_path, config)
        described = _rollout(tmp_path, config, log_prob=np.full((8, 1), -50.0, np.float32))
        await service.actor_forward(described)
        await service.compute_advantages(described)
        return dict((await service.train_job(described))["metrics"])

    async def main() -> None:
        plain = await trained("plain")
        assert (plain["capped_fraction"], plain["kl"]) == (0, 0)
        old = await trained("old", decoupled={"weight_cap": 5.0}, kl={"coef": 0.1, "estimator": "k2"})
        assert old["capped_fraction"] == pytest.approx(1.0)
        assert old["kl"] > 100, "half the square of tens of nats"
        losses = {plain["value_loss"]}
        for estimator in ({"kind": "n_step", "n_steps": 1}, {"kind": "monte_carlo"}):
            metrics = await trained(str(estimator["kind"]), estimator=estimator, gae_lambda=None)
            losses.add(metrics["value_loss"])
        assert len(losses) == 3, "each estimator has returns of its own"

    asyncio.run(main())


class Forwards:
    """Counts the rows that a service's base looks at."""

    def __init__(self, service: TrainingModelService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        backbone = service._bases[BASE.name].backbone
        encode = backbone.encode

        def counted(prefix: Any, *args: Any) -> Any:
            self.rows += prefix.rows
            return encode(prefix, *args)

        monkeypatch.setattr(backbone, "encode", counted)


def reusing(config: Any, how: str) -> Any:
    return config.model_copy(update={"resources": ResourcesSpec(reuse_features=how)})


def test_an_update_on_features_that_travelled_runs_no_forward_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO on what the rollout's forward computed, against PPO on its pictures: recomputed log-probabilities too."""

    async def trained(how: str) -> tuple[Parameters, int]:
        folder = tmp_path / how
        service = TrainingModelService(str(folder), BASES, 4)
        config = reusing(backend("a", "rl"), how)
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"actor_forward": True})})
        await opened(service, folder, config)
        described = _rollout(folder, config)
        forwards = Forwards(service, monkeypatch)
        await service.actor_forward(described)
        await service.compute_advantages(described)
        await service.train_job(described)
        return await parameters(service, "a"), forwards.rows

    (kept, no_rows), (anew, rows) = asyncio.run(trained("own")), asyncio.run(trained("never"))
    assert (no_rows, rows) == (0, 16), "8 samples in the actor forward, 8 in training"
    assert equal(kept, anew)


def test_a_service_without_room_for_a_jobs_features_encodes_each_microbatch_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO in two epochs on pictures: 8 samples in the actor forward, then 8 held or 16 in turn; the same bits."""

    async def trained(name: str, **bound: int) -> tuple[Parameters, int]:
        folder = tmp_path / name
        service = TrainingModelService(str(folder), BASES, 4, **bound)
        config = reusing(backend("a", "rl"), "never")
        await opened(service, folder, config)
        described = _rollout(folder, config)
        forwards = Forwards(service, monkeypatch)
        await service.actor_forward(described)
        await service.compute_advantages(described)
        await service.train_job(described)
        return await parameters(service, "a"), forwards.rows

    held, rows = asyncio.run(trained("held"))
    in_turn, more = asyncio.run(trained("in turn", max_update_feature_bytes=8 * 4 * 128 * 4 - 1))
    assert (rows, more) == (16, 24)
    assert equal(held, in_turn)


def test_demonstrations_seen_before_are_not_encoded_again_and_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs over the same 8 samples and one over others, with and without the store."""

    async def trained(how: str, seeds: tuple[int, ...] = (0, 0, 0, 1)) -> tuple[Parameters, list[int], dict[str, int]]:
        folder = tmp_path / how
        service = TrainingModelService(str(folder), BASES, 4, max_feature_bytes=4 << 20)
        config = reusing(backend("a"), how)
        await opened(service, folder, config)
        forwards, rows = Forwards(service, monkeypatch), []
        for number, seed in enumerate(seeds):
            before = forwards.rows
            await service.train_job(put_demonstrations(partitions(folder), config, number, seed=seed))
            rows.append(forwards.rows - before)
        return await parameters(service, "a"), rows, (await service.status())["feature_bytes"]

    kept, rows, held = asyncio.run(trained("own"))
    anew, all_rows, nothing = asyncio.run(trained("never"))
    assert (rows, all_rows) == ([8, 0, 0, 8], [8, 8, 8, 8])
    assert held == {"a": 16 * 4 * 128 * 4}, "16 samples of 4 action tokens × 128 float32"
    assert nothing == {}
    assert equal(kept, anew)


def test_kept_features_are_a_tenants_own_unless_it_shares_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tenants train on the same samples. One finds only what it kept itself, or what sharers kept for sharers."""
    reuses = {"a": "own", "b": "shared", "c": "own", "d": "shared", "e": "never", "f": "own"}

    async def main() -> None:
        service = TrainingModelService(str(tmp_path), BASES, 8, max_feature_bytes=4 << 20)
        forwards, rows = Forwards(service, monkeypatch), {}
        for tenant, how in reuses.items():
            before = forwards.rows
            config = reusing(backend(tenant), how)
            await opened(service, tmp_path, config)
            await service.train_job(put_demonstrations(partitions(tmp_path), config))
            rows[tenant] = forwards.rows - before
        assert rows == {"a": 8, "b": 8, "c": 8, "d": 0, "e": 8, "f": 8}
        eight = 8 * 4 * 128 * 4  # samples of 4 action tokens × 128 float32
        assert (await service.status())["feature_bytes"] == {"a": eight, "c": eight, "f": eight, SHARED: eight}

    asyncio.run(main())


def test_kept_features_go_with_the_last_tenant_that_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing, or opening anew with another declaration: what nobody uses any more takes no bytes."""

    async def main() -> None:
        service = TrainingModelService(str(tmp_path), BASES, 4, max_feature_bytes=4 << 20)
        forwards = Forwards(service, monkeypatch)
        for tenant, how in {"a": "shared", "b": "shared", "c": "own", "d": "own"}.items():
            config = reusing(backend(tenant), how)
            await opened(service, tmp_path, config)
            await service.train_job(put_demonstrations(partitions(tmp_path), config))
        eight = 8 * 4 * 128 * 4

        async def held() -> dict[str, int]:
            return dict((await service.status())["feature_bytes"])

        assert await held() == {SHARED: eight, "c": eight, "d": eight}
        await service.close_slot("a")
        assert await held() == {SHARED: eight, "c": eight, "d": eight}, "b shares still"
        await service.close_slot("d")
        assert await held() == {SHARED: eight, "c": eight}
        await opened(service, tmp_path, reusing(backend("b"), "own"), fresh=False)
        assert await held() == {"c": eight}, "nobody shares any more"
        await opened(service, tmp_path, reusing(backend("c"), "never"), fresh=False)
        assert await held() == {}
        again = reusing(backend("e"), "shared")
        await opened(service, tmp_path, again)
        before = forwards.rows
        await service.train_job(put_demonstrations(partitions(tmp_path), again))
        assert forwards.rows == before + 8, "what was forgotten is computed anew"

    asyncio.run(main())


def test_jobs_that_are_called_as_a_group_give_what_each_gives_alone(
    service: TrainingModelService, tmp_path: Path
) -> None:
    """Three tenants of three kinds, one with a bad sample: versions, checkpoints and parameters as without company."""

    async def main() -> None:
        configs = [backend(name, kind=kind, seed=i) for i, (name, kind) in enumerate(zip("abc", KINDS, strict=False))]
        for config in configs:
            await opened(service, tmp_path, config)
        jobs = [put_demonstrations(partitions(tmp_path), c, seed=i, nan=i == 1) for i, c in enumerate(configs)]
        group = [sent["job_id"] for sent in jobs]
        ends = await asyncio.gather(*(service.train_job(sent, group) for sent in jobs), return_exceptions=True)
        assert isinstance(ends[1], TenantFault)
        assert await service.versions() == {"a": 2, "b": 0, "c": 2}
        alone = TrainingModelService(str(tmp_path / "alone"), BASES, 4)
        for i in (0, 2):
            config = configs[i]
            await opened(alone, tmp_path / "alone", config)
            by_itself = await alone.train_job(put_demonstrations(partitions(tmp_path / "alone"), config, seed=i))
            end = ends[i]
            assert isinstance(end, dict)
            assert end["metrics"] == by_itself["metrics"]
            assert end["checkpoint"]["digest"] == by_itself["checkpoint"]["digest"]
            tenant = config.policy.tenant
            assert equal(await parameters(service, tenant), await parameters(alone, tenant))

    asyncio.run(main())


def test_a_group_waits_neither_for_a_job_done_before_nor_for_one_without_a_partition(
    service: TrainingModelService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-sent job answers at once, a missing partition is its own fault; the third does not wait for them."""
    monkeypatch.setattr(service._gathering, "_patience_s", 10_000.0)

    async def main() -> None:
        configs = [backend(name, seed=i) for i, name in enumerate("abc")]
        for config in configs:
            await opened(service, tmp_path, config)
        done, sent = (put_demonstrations(partitions(tmp_path), c, seed=i) for i, c in enumerate(configs[:2]))
        missing = job(configs[2])
        first = await service.train_job(done)
        group = [one["job_id"] for one in (done, sent, missing)]
        calls = (service.train_job(one, group) for one in (done, sent, missing))
        again, trained, lost = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert again == first
        assert isinstance(trained, dict)
        assert trained["version"] == 2
        assert isinstance(lost, UnknownObject)
        with pytest.raises(SpecError, match="group"):
            await service.train_job(sent, ["another"])

    asyncio.run(main())
