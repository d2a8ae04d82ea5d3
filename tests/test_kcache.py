"""Softmax over a K-only cache (derivation.md §7, §8): the identities in float64, then the mixer and its start."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, perturb
from slow import slow_kcache
from torch import Tensor

from linearize.mixers import HeadShape, Sample, Segments
from linearize.mixers import attended as module
from linearize.mixers.attended import attend, document_starts
from linearize.mixers.kcache import KCache

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SHAPE = HeadShape(hidden=12, q_heads=4, kv_heads=2, key_dim=8, value_dim=6)
SCALE = 0.3


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


def text(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = normal(batch, length, 4, 8, seed=seed), normal(batch, length, 2, 8, seed=seed + 1)
    x, v = normal(batch, length, 12, seed=seed + 2), normal(batch, length, 2, 6, seed=seed + 3)
    return x, 1.5 * q + 0.5, 2 * k + 1, v


def expand(x: Tensor) -> Tensor:
    """[B, T, Hk, D] -> [B, T, Hq, D], by blocks of query heads."""
    return torch.stack([x[:, :, h // 2] for h in range(4)], 2)


def softmax(q: Tensor, k: Tensor, values: Tensor, scale: float = SCALE, allowed: Tensor | None = None) -> Tensor:
    """Softmax attention of the last queries over values [B, n, Hk, D], written out. allowed: [B, T, n] bool or None."""
    length, past = q.shape[1], k.shape[1] - q.shape[1]
    causal = torch.ones(length, k.shape[1], dtype=torch.bool).tril(past)
    seen = causal if allowed is None else causal & allowed | torch.eye(k.shape[1], dtype=torch.bool)[past:]
    score = scale * torch.einsum("bthk,bshk->bhts", q, expand(k))
    score = score.masked_fill(~(seen if seen.ndim == 2 else seen[:, None]), -torch.inf)
    return torch.einsum("bhts,bshv->bthv", score.softmax(-1), expand(values))


def call(mixer: KCache, batch, *, mask=None, reset=None, **kwargs):
    return mixer(*batch, SCALE, segments=Segments(mask, reset), **kwargs)


def made(seed: int = 0, **options) -> KCache:
    mixer = KCache(SHAPE, **options)
    perturb(mixer, seed)
    return mixer.double()


@torch.no_grad()
def regression(ridge: float) -> KCache:
    """The memory alone beside the mean, r = 0, nothing forgotten: ``vbar + G^T (H + ridge)^-1 (kappa - kbar)``."""
    mixer = KCache(SHAPE).double()
    mixer.gates.bias.view(4, -1)[-1] = -100
    mixer.log_ridge.fill_(math.log(ridge))
    return mixer


# The mean key


@pytest.mark.parametrize("block", [7, 256])
@pytest.mark.parametrize("past", [0, 1, 20])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_attend_is_softmax_attention_with_keys_as_values(monkeypatch, length, past, block):
    monkeypatch.setattr(module, "BLOCK", block)
    _, q, k, _ = text(3, past + length)
    q = q[:, past:]
    torch.testing.assert_close(attend(q, k, SCALE), softmax(q, k, k), **EXACT)
    real = torch.rand(3, past + length, generator=generator(5)) < 0.6
    real[0] = False
    want = softmax(q, k, k, allowed=real[:, None].expand(-1, length, -1))
    torch.testing.assert_close(attend(q, k, SCALE, real=real), want, **EXACT)
    if not past:
        reset = torch.rand(3, length, generator=generator(6)) < 0.1
        document = reset.long().cumsum(1)
        want = softmax(q, k, k, allowed=document[:, :, None] == document[:, None])
        torch.testing.assert_close(attend(q, k, SCALE, first=document_starts(reset)), want, **EXACT)


def test_no_square_matrix_is_built(monkeypatch):
    """The largest mask is BLOCK x keys, and a plain prefill has none at all."""
    sizes = []
    fused = F.scaled_dot_product_attention

    def record(query, *args, attn_mask=None, is_causal=False, **kwargs):
        assert is_causal or attn_mask is not None or query.shape[2] <= 2
        sizes.append(0 if attn_mask is None else attn_mask.numel())
        return fused(query, *args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    mixer = KCache(SHAPE)
    batch = [x.float() for x in text(1, 1000)]
    _, state = call(mixer, batch, output_state=True)
    assert sizes == [0]
    call(mixer, [x[:, :1] for x in batch], state=state)
    assert sizes[1:] == [1001]
    del sizes[:]
    call(mixer, batch, mask=torch.arange(1000)[None] > 3)
    call(mixer, batch, reset=torch.arange(1000)[None] == 500)
    assert 0 < max(sizes) <= module.BLOCK * 1000 and sum(sizes) < 1.3 * 1000**2


@pytest.mark.parametrize("tilted", [False, True])
def test_the_mean_key_to_first_order(tilted):
    """sum a_i k_i - kbar = s Cov_kk (q - r) + O(s^2 |q - r|^2) (§7): the remainder falls with the square."""
    _, q, k, _ = text(1, 40)
    step = q / q.norm(dim=-1, keepdim=True)
    r = normal(4, 8, seed=9) if tilted else torch.zeros(4, 8, dtype=torch.float64)
    mean = softmax(r.expand(1, 40, -1, -1), k, k)
    keys = expand(k)
    second = torch.stack([softmax(r.expand(1, 40, -1, -1), k, k * k[..., i : i + 1]) for i in range(8)], -1)
    covariance = second - mean[..., :, None] * mean[..., None, :]
    assert keys.shape == mean.shape
    gaps = []
    for size in (2e-3, 1e-3):
        linear = mean + SCALE * size * torch.einsum("bthij,bthj->bthi", covariance, step)
        gaps.append(float((attend(r + size * step, k, SCALE) - linear).norm()))
    assert 3.8 < gaps[0] / gaps[1] < 4.2


# The mean field


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_a_dirac_model_gives_softmax_attention(length):
    """Up to K + 1 keys a linear model with an intercept gives every value at its key, and nothing is approximate."""
    batch = text(3, length)
    want = softmax(*batch[1:])
    torch.testing.assert_close(call(regression(1e-12), batch)[0], want, atol=1e-8, rtol=1e-8)
    if length > 1:
        assert (call(regression(1.0), batch)[0] - want).abs().max() > 1e-2


def test_values_that_are_a_linear_function_of_the_keys_give_softmax_attention():
    """Beyond K + 1 keys, for then the model is exact at all of them; other values are not reproduced."""
    x, q, k, other = text(2, 100)
    v = torch.einsum("bthk,hkv->bthv", k, normal(2, 8, 6, seed=7)) + normal(2, 6, seed=8)
    mixer = regression(1e-12)
    torch.testing.assert_close(call(mixer, (x, q, k, v))[0], softmax(q, k, v), atol=1e-7, rtol=1e-7)
    gap = call(mixer, (x, q, k, other))[0] - softmax(q, k, other)
    assert gap.norm() > 0.1 * softmax(q, k, other).norm()


def test_a_large_ridge_leaves_the_mean():
    batch = text(1, 60)
    plain = batch[3].cumsum(1) / torch.arange(1.0, 61, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(call(regression(1e12), batch)[0], expand(plain), atol=1e-8, rtol=1e-8)


def test_the_mean_field_step_is_exact_for_a_linear_model():
    """sum a_i mu_W(k_i) = mu_W(sum a_i k_i), W being whatever the memory holds at t."""
    mixer, batch = regression(0.3), text(1, 50)
    o, state = call(mixer, batch, output_state=True)
    q, k = batch[1], batch[2]
    w = torch.linalg.solve(state["key_memory"] + 0.3 * torch.eye(8, dtype=torch.float64), state["memory"])[0]
    for h in range(4):
        weights = (SCALE * k[0, :, h // 2] @ q[0, -1, h]).softmax(0)
        values = state["value_mean"][0, h] + (k[0, :, h // 2] - state["key_mean"][0, h]) @ w[h]
        torch.testing.assert_close(o[0, -1, h], weights @ values, **EXACT)


# The mixer


@pytest.mark.parametrize("options", [{}, {"taps": 1, "time_scales": 0}])
@pytest.mark.parametrize("length", [1, 2, 64, 130])
def test_the_mixer_is_its_slow_form(length, options):
    mixer, batch = made(**options), text(1, length)
    want = slow_kcache(mixer, Sample(*batch, None, None, Segments()), SCALE, lambda h: h // 2)
    torch.testing.assert_close(call(mixer, batch)[0][0], want, **EXACT)


def test_the_state_holds_the_keys_of_real_tokens():
    mixer, batch = made(), text(2, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :7] = False
    _, state = call(mixer, batch, mask=mask, output_state=True)
    assert torch.equal(state["real"], mask) and state["keys"].shape == (2, 30, 2, 8)
    assert torch.equal(state["keys"][1], batch[2][1]) and torch.equal(state["keys"][0, 7:], batch[2][0, 7:])
    assert not state["keys"][0, :7].any()
    _, longer = call(mixer, [x[:, :3] for x in batch], state=state, output_state=True)
    assert longer["keys"].shape[1] == 33 and longer["real"][:, 30:].all()
    assert state["keys"].shape[1] == 30
    for tensor in longer.values():
        assert len(tensor) == 2


def test_left_padding_reorder_and_decode_token_by_token():
    """A padded batch, its rows swapped half-way, is each row on its own."""
    mixer, batch = made(), text(2, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :11] = False
    _, state = call(mixer, [x[:, :20] for x in batch], mask=mask[:, :20], output_state=True)
    state = {name: tensor[[1, 0]] for name, tensor in state.items()}
    for t in range(20, 30):
        o, state = call(mixer, [x[[1, 0], t : t + 1] for x in batch], state=state, output_state=True)
        for row, of in ((0, 1), (1, 0)):
            alone, _ = call(mixer, [x[of : of + 1, : t + 1][:, mask[of, : t + 1]] for x in batch])
            torch.testing.assert_close(o[row, 0], alone[0, -1], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_keeps_the_keys_as_they_came(dtype):
    _, state = call(KCache(SHAPE), [x.to(dtype) for x in text(1, 10)], output_state=True)
    assert state["keys"].dtype == dtype and state["memory"].dtype == torch.float32


@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("options", [{}, {"taps": 1, "time_scales": 0}])
def test_state_bytes_grow_with_the_keys(tokens, options):
    grown = KCache.state_bytes(SHAPE, tokens, **options) - KCache.state_bytes(SHAPE, **options)
    assert grown == tokens * (4 * 2 * 8 + 1)
    half = dataclasses.replace(SHAPE, itemsize=2)
    assert KCache.state_bytes(half, tokens, **options) == KCache.state_bytes(SHAPE, tokens, **options) - tokens * 32
    if tokens:
        _, state = call(KCache(SHAPE, **options), [x.float() for x in text(3, tokens)], output_state=True)
        assert KCache.state_bytes(SHAPE, tokens, **options) == sum(x.nbytes for x in state.values()) // 3


def test_scores_beyond_all_measure_have_a_gradient():
    """Fused attention recomputes its scores; where they are billions their rounding error overflows the exponential."""
    q, k = (1e5 * x.float() for x in text(1, 200)[1:3])
    q.requires_grad_()
    attend(q, k, SCALE).square().mean().backward()
    assert q.grad.isfinite().all()
    with torch.no_grad():
        same = attend(q, k, SCALE)
    torch.testing.assert_close(attend(q, k, SCALE), same, atol=0, rtol=1e-3)


# The closed-form start


def sample(seed: int, *, linear: bool = False) -> Sample:
    """Softmax attention, on values that are half (or, linear: wholly) a function of the keys."""
    x, q, k, noise = (x.float() for x in text(2, 120, seed=seed))
    v = torch.einsum("bthk,hkv->bthv", k, normal(2, 8, 6, seed=77, dtype=torch.float32)) / 8**0.5
    v = v if linear else v + noise
    return Sample(x, q, k, v, softmax(q, k, v), None, Segments())


@torch.no_grad()
def error(mixer: KCache, at: Sample) -> Tensor:
    """Relative error of every head."""
    o, _ = mixer(at.x, at.q, at.k, at.v, SCALE, segments=at.segments)
    return (o - at.heads)[at.real].square().sum((0, 2)).sqrt() / at.heads[at.real].square().sum((0, 2)).sqrt()


@torch.no_grad()
def test_the_ladder_is_what_the_mixer_does():
    """With the fitting batch held out as well, nothing is estimated any more."""
    at, mixer = sample(0), KCache(SHAPE)
    ladder = mixer.start([at, at], SCALE, 2)
    assert list(ladder) == ["mean", "mean-field", "tilted", "readout", "full"]
    torch.testing.assert_close(error(mixer, at), torch.tensor(ladder["full"]), atol=1e-4, rtol=1e-3)
    pooled = {name: sum(x) / 4 for name, x in ladder.items()}
    assert 1 > pooled["mean"] > pooled["mean-field"] > pooled["full"] > 0
    assert pooled["readout"] >= pooled["full"]
    assert not mixer.gates.weight.any() and all(p.isfinite().all() for p in mixer.parameters())


@torch.no_grad()
def test_the_start_finds_a_model_that_holds_everywhere():
    """Held-out text of the same kind is reproduced as well."""
    mixer = KCache(SHAPE)
    mixer.start([sample(0, linear=True), sample(100, linear=True)], SCALE, 2)
    assert error(mixer, sample(300, linear=True)).max() < 0.1
    mixer.start([sample(0), sample(100)], SCALE, 2)
    assert 0.1 < error(mixer, sample(300)).max() < 0.7


@torch.no_grad()
def test_packed_and_padded_samples_give_what_separate_ones_give():
    at = sample(0)
    want = KCache(SHAPE)
    want_ladder = want.start([at, sample(100)], SCALE, 2)

    def pad(x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x[:, :9], 30.0), x, torch.full_like(x[:, :4], 30.0)], 1)

    mask = F.pad(torch.ones(2, 120, dtype=torch.bool), (9, 4))
    reset = (torch.arange(240) % 120 == 0)[None]
    tensors = at.x, at.q, at.k, at.v, at.heads
    padded = Sample(*map(pad, tensors), None, Segments(mask=mask))
    packed = Sample(*(x.flatten(0, 1)[None] for x in tensors), None, Segments(reset=reset))
    for other in (padded, packed):
        got = KCache(SHAPE)
        ladder = got.start([other, sample(100)], SCALE, 2)
        for name in ladder:
            assert ladder[name] == pytest.approx(want_ladder[name], rel=1e-3), name
        for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-3, msg=name)
