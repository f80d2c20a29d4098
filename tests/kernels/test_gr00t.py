"""The gr00t head against a float64 re-implementation, published sizes, and what it must be able to learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from configs import presets
from configs.errors import SpecError
from configs.model import Gr00tSpec
from configs.spec import parse
from kernels import action_modules
from kernels.action_modules import Gr00tModule, export_parameters
from kernels.action_modules.diffusion_transformer import DiffusionTransformer, sinusoid
from kernels.action_modules.gr00t import EmbodimentLayers
from kernels.features import VLAFeature

BASE = presets.base_model("tiny-qwen3-vl")
TINY = Gr00tSpec(
    horizon=4,
    action_width=3,
    state_width=5,
    proprioception="head",
    hidden_width=64,
    layers=3,
    heads=2,
    head_width=32,
    future_tokens=3,
    repeated_steps=4,
    embodiments=3,
    embodiment=2,
)


Learned = tuple[Gr00tModule, VLAFeature, torch.Tensor, torch.Tensor, list[float]]


def built(seed: int = 0, **changes: object) -> Gr00tModule:
    module = action_modules.build(TINY.model_copy(update=changes), BASE, seed)
    assert isinstance(module, Gr00tModule)
    return module


def inputs(rows: int, length: int = 9, seed: int = 0) -> tuple[VLAFeature, torch.Tensor]:
    """Rows of 1 to `length` real tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(rows, length, BASE.hidden_width, generator=generator)
    lengths = 1 + torch.arange(rows) * (length - 1) // max(rows - 1, 1)
    mask = torch.arange(length) < lengths[:, None]
    return VLAFeature(tokens=tokens, mask=mask), torch.randn(rows, TINY.state_width, generator=generator)


class Reference:
    """The head on one row in float64, written from the papers' formulas; no masks, since a row has its tokens only."""

    def __init__(self, module: Gr00tModule) -> None:
        self.spec = module.spec
        self.p = {name: value.astype(np.float64) for name, value in export_parameters(module).items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]

    def attention(self, name: str, x: np.ndarray, source: np.ndarray) -> np.ndarray:
        q, k, v = (self.linear(f"{name}.{part}", s) for part, s in (("query", x), ("key", source), ("value", source)))
        width = self.spec.head_width
        heads = []
        for h in range(self.spec.heads):
            columns = slice(h * width, (h + 1) * width)
            weights = np.exp(q[:, columns] @ k[:, columns].T / math.sqrt(width))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, columns])
        return self.linear(f"{name}.out", np.concatenate(heads, axis=1))

    def adaptive(self, name: str, x: np.ndarray, time: np.ndarray, eps: float) -> np.ndarray:
        scale, shift = np.split(self.linear(f"{name}.linear", time), 2)
        return norm(x, eps) * (1 + scale) + shift

    def velocity(self, tokens: np.ndarray, state: np.ndarray, x_t: np.ndarray, bucket: int) -> np.ndarray:
        """tokens [L, D], state [S], x_t [H, A] to [H, A]."""
        own = f"embodiments.{self.spec.embodiment}"
        width = self.spec.heads * self.spec.head_width
        state_token = self.linear(f"{own}.state.2", np.maximum(self.linear(f"{own}.state.0", state[None]), 0))
        angle = [bucket / 10_000 ** (i / (width // 2)) for i in range(width // 2)]
        embedded = np.broadcast_to([*np.sin(angle), *np.cos(angle)], (len(x_t), width))
        actions = np.concatenate([self.linear(f"{own}.encoder.first", x_t), embedded], axis=1)
        actions = self.linear(f"{own}.encoder.rest.2", silu(self.linear(f"{own}.encoder.rest.0", actions)))
        x = np.concatenate([state_token, self.p["future"], actions + self.p["position"]])
        angle = [bucket / 10_000 ** (i / 127) for i in range(128)]
        time = self.linear("transformer.time.layers.0", np.array([*np.cos(angle), *np.sin(angle)]))
        time = silu(self.linear("transformer.time.layers.2", silu(time)))
        for i in range(self.spec.layers):
            block = f"transformer.blocks.{i}"
            normed = self.adaptive(f"{block}.norm", x, time, 1e-5)
            x = x + self.attention(f"{block}.attention", normed, tokens if i % 2 == 0 else normed)
            inner = self.linear(f"{block}.feed_forward.0", norm(x, 1e-5))
            inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
            x = x + self.linear(f"{block}.feed_forward.2", inner)
        x = self.linear("transformer.out", self.adaptive("transformer.norm", x, time, 1e-6))
        x = self.linear(f"{own}.decoder.2", np.maximum(self.linear(f"{own}.decoder.0", x), 0))
        return x[-len(x_t) :]


def norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_sines_and_cosines_of_a_time_by_hand() -> None:
    """Position 2 at frequencies 1 and 1 / 100 (10,000^(−1/2)); the last of two with last = 1 is 1 / 10,000."""
    sine, cosine = sinusoid(torch.tensor([0, 2]), 2, last=2)
    torch.testing.assert_close(sine, torch.tensor([[0.0, 0.0], [math.sin(2), math.sin(0.02)]]))
    torch.testing.assert_close(cosine, torch.tensor([[1.0, 1.0], [math.cos(2), math.cos(0.02)]]))
    assert sinusoid(torch.tensor([1.0]), 2, last=1)[0][0, 1].item() == pytest.approx(1e-4, rel=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_velocity_equals_the_float64_reference(layers: int) -> None:
    """Rows of 1 to 9 tokens at times of their own; 0.2504 falls into bucket 250, 0.9999 into 999."""
    module = built(layers=layers)
    with torch.no_grad():  # fresh tokens of deviation 0.02 would hide a token in the wrong place
        module.future.mul_(50)
        module.position.mul_(50)
    reference = Reference(module)
    feature, state = inputs(4)
    x_t = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(1))
    time = torch.tensor([0.0, 0.2504, 0.75, 0.9999])
    got = module.velocity(feature, state, x_t, time).detach().numpy()
    for row, bucket in enumerate((0, 250, 750, 999)):
        tokens = feature.tokens[row][feature.mask[row]].double().numpy()
        expected = reference.velocity(tokens, state[row].double().numpy(), x_t[row].double().numpy(), bucket)
        np.testing.assert_allclose(got[row], expected, atol=1e-5)
        other = reference.velocity(tokens, state[row].double().numpy(), x_t[row].double().numpy(), bucket + 20)
        assert np.abs(other - expected).max() > 1e-4, "the time is seen"


def test_a_chunk_is_the_references_four_euler_steps_from_the_fixed_noise() -> None:
    module = built()
    reference = Reference(module)
    feature, state = inputs(2)
    got = module.act(feature, state, None).action.numpy()
    for row in range(2):
        tokens = feature.tokens[row][feature.mask[row]].double().numpy()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double().numpy()
        for bucket in (0, 250, 500, 750):
            x = x + 0.25 * reference.velocity(tokens, state[row].double().numpy(), x, bucket)
        np.testing.assert_allclose(got[row], x, atol=1e-5)


def test_training_times_are_those_published() -> None:
    """(1 − u) · 0.999 with u from Beta(1.5, 1): mean 0.3996, median (1 − 0.5^(2/3)) · 0.999 = 0.3697; whole buckets."""
    module = built(repeated_steps=64, layers=1)
    seen: list[torch.Tensor] = []
    module.transformer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    feature, state = inputs(64)
    module.imitation_loss(
        feature, state, torch.zeros(64, 4, 3), torch.zeros(64, 4, dtype=torch.bool), 1.0, torch.Generator()
    )
    (buckets,) = seen
    assert buckets.shape == (64 * 64,)
    assert torch.equal(buckets, buckets.round())
    assert 0 <= buckets.min() < buckets.max() <= 999
    assert buckets.mean().item() == pytest.approx(399.1, abs=15)
    assert buckets.median().item() == pytest.approx(369.2, abs=20)


def test_the_loss_is_a_mean_over_draws() -> None:
    """A head that says 0 is wrong by action − noise: for actions of 2 a mean square of 2² + 1, whatever the repeats."""
    feature, state = inputs(64)
    action, is_pad = torch.full((64, 4, 3), 2.0), torch.zeros(64, 4, dtype=torch.bool)
    for repeats in (1, 16):
        module = built(repeated_steps=repeats, layers=1)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "decoder.2" in name:
                    p.zero_()
        loss = module.imitation_loss(feature, state, action, is_pad, 64 * 4 * 3, torch.Generator().manual_seed(0))
        # (2 − z)² has variance 18, so the mean of 768 has a standard error of 0.15, of 12,288 one of 0.04.
        assert loss.item() == pytest.approx(5.0, abs=0.6 if repeats == 1 else 0.16)


def test_published_sizes() -> None:
    """DiT-B over a base of width 2048, by hand: 150,740,992 parameters (DiT-B of 12 self-attending layers has 130 M).

    Time 256 · 768 + 768 + 768² + 768; a block's norm 768 · 1536 + 1536, attention 4 · (768² + 768), feed-forward
    2 · 4 · 768² + 5 · 768; keys and values of even ones from 2048; final norm and 768 · 1024 + 1024.
    """
    spec = Gr00tSpec(horizon=8, action_width=7, state_width=7, proprioception="head")
    square, bias = 768 * 768, 768
    time = 256 * 768 + square + 2 * bias
    norm_, feed_forward = 2 * square + 2 * bias, 8 * square + 5 * bias
    odd = norm_ + 4 * (square + bias) + feed_forward
    even = odd + 2 * (2048 - 768) * 768
    expected = time + 8 * (odd + even) + norm_ + 768 * 1024 + 1024
    assert expected == 150_740_992
    with torch.device("meta"):
        transformer = DiffusionTransformer(
            spec.heads * spec.head_width, spec.heads, spec.layers, 2048, spec.hidden_width
        )
        robot = EmbodimentLayers(spec)
    assert sum(p.numel() for p in transformer.parameters()) == expected
    state = 7 * 1024 + 1024 + 1024 * 768 + 768
    encoder = 7 * 768 + 768 + 1536 * 768 + 768 + square + 768
    decoder = 1024 * 1024 + 1024 + 1024 * 7 + 7
    assert sum(p.numel() for p in robot.parameters()) == state + encoder + decoder


@pytest.fixture(scope="module")
def learned() -> Learned:
    """A tiny head after 120 steps on eight demonstrations; those; the losses."""
    module = built(layers=2, repeated_steps=8)
    feature, state = inputs(8)
    action = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(2)).clamp(-2, 2)
    is_pad = torch.zeros(8, 4, dtype=torch.bool)
    steps = 120
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module.imitation_loss(feature, state, action, is_pad, 8 * 4 * 3, generator)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return module, feature, state, action, losses


def test_eight_demonstrations_are_learned(learned: Learned) -> None:
    losses = learned[-1]
    assert np.mean(losses[-20:]) < 0.1 * np.mean(losses[:3])


def test_what_was_learned_comes_out_again_from_any_noise(learned: Learned) -> None:
    """The steps lead from noise to action: the other way, or with the sign turned, they would end far away."""
    module, feature, state, action, _ = learned
    backwards = torch.arange(7, -1, -1)
    assert (action - action[backwards]).abs().mean() > 0.8
    for generator in (None, torch.Generator().manual_seed(9)):
        assert (module.act(feature, state, generator).action - action).abs().mean() < 0.12
        turned = module.act(feature[backwards], state[backwards], generator).action
        assert (turned - action[backwards]).abs().mean() < 0.12


def test_an_embodiment_has_layers_of_its_own_and_leaves_the_others_alone() -> None:
    feature, state = inputs(3)
    one, two = built(embodiment=0), built(embodiment=1)
    assert not torch.equal(one.act(feature, state, None).action, two.act(feature, state, None).action)
    before = export_parameters(one)
    assert {name: value.shape for name, value in before.items()} == {n: p.shape for n, p in two.named_parameters()}
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    one.imitation_loss(
        feature, state, torch.zeros(3, 4, 3), torch.zeros(3, 4, dtype=torch.bool), 36.0, torch.Generator()
    ).backward()
    optimizer.step()
    moved = {name for name, value in export_parameters(one).items() if not np.array_equal(before[name], value)}
    assert moved == {name for name in before if not name.startswith(("embodiments.1.", "embodiments.2."))}


@pytest.mark.parametrize(("state", "future"), [("head", 0), ("none", 3), ("none", 0)])
def test_state_and_future_tokens_may_be_absent(state: str, future: int) -> None:
    module = built(proprioception=state, future_tokens=future)
    seen: list[torch.Tensor] = []
    module.transformer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    feature, proprioception = inputs(2)
    module.act(feature, proprioception, None)
    assert {tuple(x.shape) for x in seen} == {(2, (state == "head") + future + 4, 64)}


@pytest.mark.parametrize("given", [{"embodiment": 2, "embodiments": 2}, {"embodiment": 1}])
def test_an_embodiment_that_is_not_there_is_refused(given: dict[str, int]) -> None:
    data = {"horizon": 4, "action_width": 3, "state_width": 5, "proprioception": "head", **given}
    count = given.get("embodiments", 1)
    with pytest.raises(
        SpecError, match=rf"got embodiment {given['embodiment']} with embodiments {count}; possible: 0 … "
    ):
        parse(Gr00tSpec, data, where="module")
