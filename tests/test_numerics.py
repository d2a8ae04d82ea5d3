"""No mixer, whatever it is fed, gives a number that is not finite: long text, repeated tokens, extreme sizes, bf16.

Every kind in MIXERS is covered, with its own options at their defaults.
"""

import dataclasses

import pytest
import torch
from conftest import generator, perturb
from torch import Tensor

from linearize.mixers import MIXERS, HeadShape, Segments

KINDS = [kind for kind, cls in MIXERS.items() if cls.__module__.startswith("linearize.")]
SHAPE = HeadShape(hidden=16, q_heads=2, kv_heads=1, key_dim=8, value_dim=8)
SCALE = SHAPE.key_dim**-0.5
LONG = 20_000
DTYPES = [torch.float32, torch.bfloat16]


@dataclasses.dataclass
class Batch:
    x: Tensor  # [B, T, hidden]
    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, Hk, K]
    v: Tensor  # [B, T, Hk, V]

    def map(self, change) -> "Batch":
        return Batch(*(change(tensor) for tensor in vars(self).values()))


def text(rows: int, length: int, seed: int = 0) -> Batch:
    """Sizes of a real model: the scaled query about 1.5 long, keys about 11, both with means of their own."""
    draw = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, length, *shape, generator=draw)

    q, k = 1.5 * normal(2, 8) + 0.5, 4 * normal(1, 8) + 1
    return Batch(normal(16), q, k, normal(1, 8))


def call(mixer, batch: Batch, **kwargs):
    return mixer(batch.x, batch.q, batch.k, batch.v, SCALE, segments=Segments(), **kwargs)


def made(kind: str, perturbed: bool = True):
    mixer = MIXERS[kind](SHAPE)
    if perturbed:
        perturb(mixer, 0)
    return mixer


def assert_finite(mixer, batch: Batch, kind: str) -> Tensor:
    """Output, state and every gradient. Returns the output."""
    read = {"x": batch.x} if mixer.own_projections else vars(batch)
    for tensor in read.values():
        tensor.requires_grad_()
    o, state = call(mixer, batch, output_state=True)
    assert o.dtype == batch.x.dtype and o.isfinite().all(), f"{kind}: output"
    for name, tensor in state.items():
        assert tensor.isfinite().all(), f"{kind}: state {name}"
    # A mean, so that the gradient of the loss itself is of ordinary size.
    (o.float() / o.detach().float().abs().amax().clamp(min=1e-30)).square().mean().backward()
    for name, tensor in [*read.items(), *mixer.named_parameters()]:
        assert tensor.grad is not None and tensor.grad.isfinite().all(), f"{kind}: gradient of {name}"
    return o.detach()


# Long text


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text(kind):
    """20k tokens stay finite and of the values' size, and the state reads on alike in one piece and in many."""
    mixer, batch = made(kind), text(1, LONG + 8)
    with torch.no_grad():
        o, state = call(mixer, batch.map(lambda x: x[:, :LONG]), output_state=True)
        rest = batch.map(lambda x: x[:, LONG:])
        together, _ = call(mixer, rest, state=state)
        single = []
        for t in range(8):
            out, state = call(mixer, rest.map(lambda x, t=t: x[:, t : t + 1]), state=state, output_state=True)
            single.append(out)
    assert o.isfinite().all()
    sizes = o[0].norm(dim=-1).unflatten(0, (8, -1)).mean((1, 2))
    assert float(sizes.max() / sizes.min()) < 3  # neither fading nor growing from eighth to eighth
    assert float((torch.cat(single, 1) - together).norm() / together.norm()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_long_text(kind, dtype):
    assert_finite(made(kind), text(1, LONG).map(lambda x: x.to(dtype)), kind)


# Repetition


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_token_again_and_again(kind, dtype):
    """The centred keys vanish, and with them everything that is divided by their size."""
    batch = text(2, 1).map(lambda x: x.expand(-1, 700, *x.shape[2:]).to(dtype, copy=True))
    assert_finite(made(kind), batch, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_bursts_of_one_token(kind):
    """Runs of one token with other text between: what pumps up a memory that overshoots."""
    batch, burst = text(1, 3_000), text(1, 1, seed=1)
    run = (torch.arange(3_000) // 6) % 5 == 0
    batch = Batch(
        *(
            torch.where(run.view(1, -1, *[1] * (x.ndim - 2)), y, x)
            for x, y in zip(vars(batch).values(), vars(burst).values(), strict=True)
        )
    )
    o = assert_finite(made(kind), batch, kind)
    first, last = o[:, :600].abs().max(), o[:, -600:].abs().max()
    assert last < 3 * first


# Sizes


@pytest.mark.parametrize("size", [1e4, 1e-6])
@pytest.mark.parametrize("what", ["q", "k", "v", "x", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_and_tiny(kind, what, size):
    """Each input alone and all of them together, ten thousand times and a millionth of their usual size."""
    for dtype in DTYPES:
        batch = text(1, 200)
        names = list(vars(batch)) if what == "all" else [what]
        batch = dataclasses.replace(batch, **{name: size * getattr(batch, name) for name in names})
        assert_finite(made(kind), batch.map(lambda x, dtype=dtype: x.to(dtype)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_change_within_a_text(kind):
    """Tokens of 1e4, 1 and 1e-6 of the usual size side by side."""
    batch = text(2, 300)
    draw = torch.randint(3, (2, 300), generator=generator(2))
    size = torch.tensor([1e4, 1.0, 1e-6])[draw]
    batch = batch.map(lambda x: x * size.view(2, 300, *[1] * (x.ndim - 2)))
    assert_finite(made(kind), batch, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_zeros(kind):
    assert_finite(made(kind), text(2, 100).map(torch.zeros_like), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_near_single(kind):
    """bf16 activations with fp32 parameters: no further from fp32 than rounded inputs explain, also after 2k tokens."""
    mixer, batch = made(kind), text(1, 2_000)
    rounded = batch.map(lambda x: x.bfloat16())
    with torch.no_grad():
        low, _ = call(mixer, rounded)
        high, _ = call(mixer, rounded.map(lambda x: x.float()))
    assert float((low.float() - high).norm() / high.norm()) < 2e-2


# Saturated gates


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_far_beyond_saturation(kind, size):
    """Every data-dependent gate driven to its ends, token by token: write strengths of 0 and 1, full forgetting."""
    mixer = made(kind)
    gates = [p for name, p in mixer.named_parameters() if p.ndim == 2 and p.shape[-1] == SHAPE.hidden]
    assert gates
    with torch.no_grad():
        for weight in gates:
            weight.mul_(size)
    assert_finite(mixer, text(1, 300), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_uncalibrated_start_on_extreme_text(kind):
    for size in (1e4, 1e-6):
        assert_finite(made(kind, perturbed=False), text(1, 200).map(lambda x, size=size: size * x), kind)
