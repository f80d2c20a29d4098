"""The Inference Model Service on the real tiny base: grouping, versions, isolation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from configs import presets
from configs.environment import CameraSpec
from configs.errors import AdmissionRefused, Conflict, SpecError, TenantFault, UnknownObject
from configs.transforms import TransformsSpec
from kernels import action_modules, tiny_qwen3_vl
from services.inference_model import InferenceModelService
from tests.services.policies import BASE, BASES, SMALL, observation, policy

T = TypeVar("T")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., InferenceModelService]:
    def build(**changes: Any) -> InferenceModelService:
        arguments = {
            "home": str(tmp_path_factory.mktemp("home")),
            "base_models": BASES,
            "batching": {"max_batch_size": 64, "batch_timeout_s": 0.05},
            "max_slots": 4,
            "max_pinned_versions": 2,
        }
        return InferenceModelService(**(arguments | changes))

    return build


def run(coroutine: Awaitable[T]) -> T:
    async def main() -> T:
        return await coroutine

    return asyncio.run(main())


def tensors(tenant: str, seed: int, **interface: Any) -> dict[str, np.ndarray]:
    """Parameters other than the initial ones."""
    config = policy(tenant, **interface)
    return action_modules.export_parameters(action_modules.build(config.action_module, config.base_model, seed))


async def open_tenants(service: InferenceModelService, *configs: Any) -> None:
    for config in configs:
        await service.open_policy(config.model_dump(mode="json"), fresh=True)


def test_tenants_of_every_module_and_of_other_schemas_share_a_forward_to_the_bit(
    make: Callable[..., InferenceModelService],
) -> None:
    """LIBERO's and CALVIN's cameras, sizes and widths, four kinds of module: one forward, and each its own bits.

    A fifth tenant sends another camera than it declared: its request alone is refused.
    """
    libero = {"cameras": {"image": 128, "wrist_image": 128}, "state_width": 8, "action_width": 7, "horizon": 8}
    calvin = {"cameras": {"rgb_gripper": 84, "rgb_static": 200}, "state_width": 15, "action_width": 7, "horizon": 4}
    schemas = {"oft": libero, "gr00t": calvin, "pi": libero, "lora": calvin, "wrong": {**libero, "horizon": 1}}

    def seen(tenant: str, rows: int) -> dict[str, Any]:
        schema, rng = schemas[tenant], np.random.default_rng(rows)
        names = ["image", "side"] if tenant == "wrong" else list(schema["cameras"])
        sizes = list(schema["cameras"].values())
        return {
            "images": {
                n: rng.integers(0, 256, (rows, s, s, 3), dtype=np.uint8) for n, s in zip(names, sizes, strict=True)
            },
            "proprioception": rng.normal(size=(rows, schema["state_width"])).astype(np.float32),
            "instructions": ["put the bowl on the plate"] * rows,
        }

    async def main() -> None:
        # Pictures are prepared in a thread: a busy machine takes its time between the first request and the fourth.
        service = make(max_slots=8, batching={"max_batch_size": 64, "batch_timeout_s": 1.0})
        for number, (tenant, schema) in enumerate(schemas.items()):
            kind = "oft" if tenant == "wrong" else tenant
            config = policy(tenant, kind=kind, seed=number, **{**schema, "cameras": tuple(schema["cameras"])})
            await open_tenants(service, config)
        sent = {tenant: seen(tenant, rows) for rows, tenant in enumerate(schemas, start=1)}
        right = [tenant for tenant in schemas if tenant != "wrong"]
        alone = {t: await service.predict(sent[t], t, seed=7) for t in right}
        before = (await service.status())["batches"]
        *together, refused = await asyncio.gather(
            *(service.predict(sent[t], t, seed=7) for t in [*right, "wrong"]), return_exceptions=True
        )
        assert (await service.status())["batches"] == before + 1, "the four requests shared one forward"
        assert isinstance(refused, TenantFault)
        assert "images: got 'side'" in str(refused)
        for tenant, grouped in zip(right, together, strict=True):
            assert not isinstance(grouped, BaseException)
            assert grouped["action"].shape == (right.index(tenant) + 1, schemas[tenant]["horizon"], 7)
            assert ("value" in grouped) == (tenant in ("oft", "lora"))
            for name in alone[tenant].keys() - {"policy_version"}:
                np.testing.assert_array_equal(grouped[name], alone[tenant][name], err_msg=f"{tenant}.{name}")

    run(main())


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_grouped_equals_single_to_the_bit_for_every_tenant(
    make: Callable[..., InferenceModelService], kind: str
) -> None:
    """Three tenants with other widths, horizons and row counts share a forward; each gets its own bits."""
    interfaces: dict[str, dict[str, Any]] = {
        "a": {"seed": 1, "kind": kind},
        "b": {"seed": 2, "state_width": 3 if kind == "pi05" else 5, "action_width": 3, "horizon": 2, "kind": kind},
        "c": {"seed": 3, "kind": kind},
    }

    async def main() -> None:
        service = make()
        await open_tenants(service, *(policy(t, **i) for t, i in interfaces.items()))
        seen = {
            t: observation(rows, seed=rows, state_width=i.get("state_width", 2))
            for rows, (t, i) in zip((3, 1, 5), interfaces.items(), strict=True)
        }
        alone = {t: await service.predict(seen[t], t, seed=7) for t in seen}
        before = (await service.status())["batches"]
        grouped = dict(
            zip(seen, await asyncio.gather(*(service.predict(seen[t], t, seed=7) for t in seen)), strict=True)
        )
        assert (await service.status())["batches"] == before + 1, "the three requests shared one forward"
        for tenant in seen:
            scored = ("log_prob", "value") if kind in ("oft", "lora") else ()
            for name in ("action", "environment_action", *scored):
                np.testing.assert_array_equal(grouped[tenant][name], alone[tenant][name], err_msg=f"{tenant}.{name}")

    run(main())


def test_equal_sized_pictures_are_not_swapped_between_tenants(make: Callable[..., InferenceModelService]) -> None:
    """Two tenants with equal weights and states but other pictures: each gets the answer to its own picture."""

    async def main() -> None:
        service = make()
        await open_tenants(service, policy("a"), policy("b"))
        first, second = observation(2, 1), observation(2, 2)
        second["proprioception"] = first["proprioception"]
        of_a, of_b = await asyncio.gather(service.predict(first, "a"), service.predict(second, "b"))
        swapped = await service.predict(second, "a")
        assert not np.array_equal(of_a["action"], of_b["action"])
        np.testing.assert_array_equal(of_b["action"], swapped["action"])

    run(main())


def test_a_tenants_nan_is_its_own_and_neighbours_keep_their_bits(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make()
        await open_tenants(service, policy("a"), policy("b"), policy("c"))
        await service.load_weights("c", policy("c").schema_signature, 3, tensors("c", 5))
        good, bad = observation(2, 1), observation(2, 2)
        bad["proprioception"][1, 0] = np.nan
        alone = await service.predict(good, "a")
        answers = await asyncio.gather(
            service.predict(good, "a"), service.predict(bad, "b"), service.predict(good, "c"), return_exceptions=True
        )
        np.testing.assert_array_equal(answers[0]["action"], alone["action"])  # type: ignore[index]
        assert isinstance(answers[1], TenantFault)
        assert "NaN" in str(answers[1])
        assert answers[2]["policy_version"] == 3  # type: ignore[index]
        again = observation(2, 2)
        assert np.isfinite((await service.predict(again, "b"))["action"]).all(), "its slot stays usable"

    run(main())


def test_a_wrong_camera_is_refused_with_the_names(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make()
        await open_tenants(service, policy("a"))
        with pytest.raises(TenantFault, match=r"(?s)wrist.*top|top.*wrist"):
            await service.predict(observation(1, 1, cameras=("wrist",)), "a")

    run(main())


def test_actions_are_unnormalised_on_the_way_out(make: Callable[..., InferenceModelService]) -> None:
    """Declared mean 0.5 and std 2: environment action = 2 × action + 0.5."""

    async def main() -> None:
        service = make()
        await open_tenants(service, policy("a"))
        answer = await service.predict(observation(3, 1), "a", seed=1)
        np.testing.assert_allclose(answer["environment_action"], 2 * answer["action"] + 0.5, rtol=1e-6)

    run(main())


def test_each_reply_is_of_one_version_and_names_it(make: Callable[..., InferenceModelService]) -> None:
    """Loads race with predictions: every reply equals that of the version it names, never a mix."""

    async def main() -> None:
        service = make()
        config = policy("a")
        await open_tenants(service, config)
        seen = observation(2, 1)
        expected = {0: await service.predict(seen, "a")}
        for version in range(1, 5):
            await service.load_weights("a", config.schema_signature, version, tensors("a", version))
            expected[version] = await service.predict(seen, "a")
        assert len({answer["action"].tobytes() for answer in expected.values()}) == 5
        await service.open_policy(config.model_dump(mode="json"), fresh=True)

        async def load() -> None:
            for version in range(1, 5):
                await service.load_weights("a", config.schema_signature, version, tensors("a", version))

        async def ask() -> None:
            for _ in range(6):
                answer = await service.predict(seen, "a")
                np.testing.assert_array_equal(answer["action"], expected[answer["policy_version"]]["action"])

        await asyncio.gather(load(), ask(), ask())

    run(main())


def test_pinned_versions_stay_until_released_and_are_bounded(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make()
        config = policy("a")
        await open_tenants(service, config)
        seen = observation(1, 1)
        old = await service.predict(seen, "a")
        assert await service.pin("a") == 0
        for version in range(1, 6):
            await service.load_weights("a", config.schema_signature, version, tensors("a", version))
        pinned = await service.predict(seen, "a", policy_version=0)
        np.testing.assert_array_equal(pinned["action"], old["action"])
        assert await service.pin("a", 5) == 5
        with pytest.raises(Conflict, match="at most 2 pinned"):
            await service.pin("a", 4)
        await service.release("a", 0)
        with pytest.raises(Conflict, match=r"policy_version: got 0; possible: \[3, 4, 5\]"):
            await service.predict(seen, "a", policy_version=0)

    run(main())


def test_as_many_versions_are_kept_as_rollouts_may_be_behind(make: Callable[..., InferenceModelService]) -> None:
    """Delay 4: of seven versions the last five; who joins with less takes nothing away, who joins with more adds."""

    async def main() -> None:
        service, config = make(), policy("a")
        opened, seen = config.model_dump(mode="json"), observation(1, 1)
        await service.open_policy(opened, fresh=True, delay=4)
        expected = {}
        for version in range(1, 7):
            await service.load_weights("a", config.schema_signature, version, tensors("a", version))
            expected[version] = (await service.predict(seen, "a"))["action"]
        await service.open_policy(opened, fresh=False)
        for version in range(2, 7):
            kept = await service.predict(seen, "a", policy_version=version)
            np.testing.assert_array_equal(kept["action"], expected[version])
        with pytest.raises(Conflict, match=r"policy_version: got 1; possible: \[2, 3, 4, 5, 6\]"):
            await service.pin("a", 1)
        await service.open_policy(opened, fresh=False, delay=5)
        await service.load_weights("a", config.schema_signature, 7, tensors("a", 7))
        assert await service.pin("a", 2) == 2
        await service.load_weights("a", config.schema_signature, 8, tensors("a", 8))
        assert (await service.predict(seen, "a", policy_version=2))["policy_version"] == 2

    run(main())


def test_a_late_publish_does_not_turn_the_clock_back(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make()
        config = policy("a")
        await open_tenants(service, config)
        await service.load_weights("a", config.schema_signature, 2, tensors("a", 2))
        with pytest.raises(Conflict, match="2 or newer"):
            await service.load_weights("a", config.schema_signature, 1, tensors("a", 1))

    run(main())


def test_a_payload_of_another_interface_is_refused(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make()
        config, other = policy("a"), policy("a", action_width=3)
        await open_tenants(service, config)
        with pytest.raises(Conflict, match="schema_signature"):
            await service.load_weights("a", other.schema_signature, 1, tensors("a", 1, action_width=3))
        with pytest.raises(Conflict):
            await service.load_weights("a", config.schema_signature, 1, tensors("a", 1, action_width=3))
        broken = {name: np.full_like(value, np.nan) for name, value in tensors("a", 1).items()}
        with pytest.raises(TenantFault, match="NaN"):
            await service.load_weights("a", config.schema_signature, 1, broken)
        assert await service.current_version("a") == 0

    run(main())


def test_slots_are_bounded_and_unknown_tenants_are_named(make: Callable[..., InferenceModelService]) -> None:
    async def main() -> None:
        service = make(max_slots=1)
        await open_tenants(service, policy("a"))
        with pytest.raises(AdmissionRefused, match="1 slots, all taken"):
            await open_tenants(service, policy("b"))
        with pytest.raises(UnknownObject, match="got 'b'; possible: a"):
            await service.predict(observation(1, 1), "b")
        await service.close_policy("a")
        await open_tenants(service, policy("b"))

    run(main())


def test_requests_go_to_their_own_base(make: Callable[..., InferenceModelService], tmp_path: Path) -> None:
    """Two resident bases: each tenant's answer is that of a service with its base alone."""
    second = BASE.model_copy(update={"name": "second", "source": str(tmp_path / "second")})
    words = tiny_qwen3_vl.tokenizer()
    for part in (tiny_qwen3_vl.random_model(second, words, 11), words, tiny_qwen3_vl.image_processor()):
        part.save_pretrained(tmp_path / "second")

    async def main() -> None:
        alone = [second.model_dump(mode="json")]
        both, second_only = make(base_models=[*BASES, *alone]), make(base_models=alone)
        seen = observation(2, 1)
        a, b = policy("a"), policy("b", base=second)
        await open_tenants(both, a, b)
        await open_tenants(second_only, b)
        of_a, of_b = await asyncio.gather(both.predict(seen, "a"), both.predict(seen, "b"))
        np.testing.assert_array_equal(of_b["action"], (await second_only.predict(seen, "b"))["action"])
        assert not np.array_equal(of_a["action"], of_b["action"])
        with pytest.raises(UnknownObject, match="base_model"):
            await open_tenants(second_only, a)

    run(main())


def test_tenants_of_one_architecture_decode_together_as_alone(make: Callable[..., InferenceModelService]) -> None:
    """Status tells the bytes of their stack: there from the second shared forward on, anew after a load, then gone."""

    async def main() -> None:
        service, alone = make(), make(batching={"max_stack_bytes": 0})
        configs = [policy(tenant, kind="gr00t", seed=seed) for seed, tenant in enumerate("abc")]
        for each in (service, alone):
            await open_tenants(each, *configs)
        seen = {"a": observation(2, 1), "b": observation(1, 2), "c": observation(3, 3)}

        async def stack_bytes_after_both_answer() -> int:
            together = await asyncio.gather(*(service.predict(seen[t], t, seed=7) for t in seen))
            for tenant, answer in zip(seen, together, strict=True):
                right = await alone.predict(seen[tenant], tenant, seed=7)
                assert answer["policy_version"] == right["policy_version"]
                np.testing.assert_array_equal(answer["action"], right["action"])
            assert (await alone.status())["stack_bytes"] == 0
            return int((await service.status())["stack_bytes"])

        sizes = [await stack_bytes_after_both_answer() for _ in range(3)]
        own = sum(array.nbytes for array in tensors("a", 0, kind="gr00t").values())
        assert sizes == [0, 3 * own, 3 * own]
        for version in range(1, 4):  # two versions before the current one are still served
            for each in (service, alone):
                published = tensors("b", version, kind="gr00t")
                await each.load_weights("b", configs[1].schema_signature, version, published)
        assert (await service.status())["stack_bytes"] == 0
        assert [await stack_bytes_after_both_answer() for _ in range(2)] == [0, 3 * own]
        await service.close_policy("c")
        assert (await service.status())["stack_bytes"] == 0

    run(main())


@pytest.mark.parametrize(
    ("learned", "shown", "fits"),
    [(("top",), ("top",), True), (("top",), (), False), ((), ("top",), False), ((), (), True), (None, ("top",), True)],
)
def test_an_evaluation_on_pictures_turned_otherwise_is_refused(
    make: Callable[..., InferenceModelService], learned: tuple[str, ...] | None, shown: tuple[str, ...], fits: bool
) -> None:
    """Before an environment is asked for: there is none here, which is what the others hear of."""
    config = policy("a").model_copy(update={"turned_cameras": learned})
    environment = presets.environment("reach").model_copy(update={"turned_cameras": shown}).model_dump(mode="json")

    async def main() -> None:
        service = make()
        await open_tenants(service, config)
        await service.evaluate("a", environment, episodes=1, first_seed=40_000, num_envs=1, hosts=1, run_id="r")

    with pytest.raises(Exception, match="." if fits else "environment: got 'reach") as caught:
        run(main())
    assert isinstance(caught.value, SpecError) != fits, caught.value


@pytest.mark.parametrize(
    ("size", "declared", "fits"), [(BASE.image_height, None, True), (96, None, False), (96, BASE.image_height, True)]
)
def test_an_evaluation_on_pictures_of_another_size_is_refused_unless_a_size_is_declared(
    make: Callable[..., InferenceModelService], size: int, declared: int | None, fits: bool
) -> None:
    sizes = {} if declared is None else {"cameras": {"top": {"height": declared, "width": declared}}}
    config = policy("a").model_copy(update={"transforms": TransformsSpec.model_validate(sizes)})
    shown = presets.environment("reach").model_copy(
        update={"cameras": (CameraSpec(name="top", height=size, width=size),)}
    )

    async def main() -> None:
        service = make()
        await open_tenants(service, config)
        environment = shown.model_dump(mode="json")
        await service.evaluate("a", environment, episodes=1, first_seed=40_000, num_envs=1, hosts=1, run_id="r")

    with pytest.raises(
        Exception, match="." if fits else r"environment: got \"reach \(cameras \{'top': '96 × 96'"
    ) as caught:
        run(main())
    assert isinstance(caught.value, SpecError) != fits, caught.value
