"""The claims of derivation.md §1-§4 in float64, one head, one token at a time, written from the document.

Where the package has a function of its own for a step, the same numbers are asked of it.
"""

import math

import pytest
import torch
from linearize_kernels import centre, log_norm
from torch import Tensor

from linearize.mixers import GDN, DeltaNet, HeadShape, MesaNet, Segments, VaLA
from linearize.mixers.expansion import Layout, forget_logit, forgetting, strengths, tilt
from linearize.mixers.gdn import delta_arguments

EXACT = {"atol": 1e-12, "rtol": 1e-12}
T, K, V = 40, 8, 6
SCALE = K**-0.5


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def qkv():
    """Queries and keys with means of their own, so that a tilt matters."""
    q = 1.5 * normal(T, K, seed=1) + normal(K, seed=2)
    k = 2.0 * normal(T, K, seed=3) + normal(K, seed=4)
    return q, k, normal(T, V, seed=5)


@pytest.fixture
def forget():
    """Forgetting lambda_t between 0.7 and 1, different at every token."""
    return 0.7 + 0.3 * torch.rand(T, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def softmax_weights(query: Tensor, k: Tensor, forget: Tensor) -> Tensor:
    """Attention weights of the last key and all before it; forgetting is an additive bias, log lambda a step."""
    age = forget.log().flip(0).cumsum(0).flip(0) - forget.log()
    return (SCALE * k @ query + age).softmax(0)


def expansion(k: Tensor, v: Tensor, r: Tensor, forget: Tensor):
    """§2, token by token: write strengths b, and running means kbar and vbar including each token."""
    z, kbar, vbar = 0.0, torch.zeros_like(k[0]), torch.zeros_like(v[0])
    rows = []
    for key, value, lam in zip(k, v, forget, strict=True):
        w = (SCALE * r @ key).exp()
        z = lam * z + w
        b = w / z
        kbar, vbar = kbar + b * (key - kbar), vbar + b * (value - vbar)
        rows.append((b, kbar, vbar))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))


def before(mean: Tensor) -> Tensor:
    """The running mean before each token; zero before the first."""
    return torch.cat([torch.zeros_like(mean[:1]), mean[:-1]])


def vala(q: Tensor, k: Tensor, v: Tensor, r: Tensor, forget: Tensor) -> Tensor:
    """§3."""
    b, kbar, vbar = expansion(k, v, r, forget)
    a = torch.zeros(K, V, dtype=torch.float64)
    out = []
    for t in range(len(q)):
        a = (1 - b[t]) * a + b[t] * torch.outer(k[t] - kbar[t], v[t] - before(vbar)[t])
        out.append(vbar[t] + SCALE * a.T @ (q[t] - r))
    return torch.stack(out)


def balance(q: Tensor, k: Tensor, kbar: Tensor, r: Tensor) -> Tensor:
    """§4, c_h."""
    return ((SCALE * (q - r)).norm(dim=-1).mean() / (k - kbar).norm(dim=-1).mean()).sqrt()


def derived_gdn(q: Tensor, k: Tensor, v: Tensor, r: Tensor, forget: Tensor, c) -> tuple[Tensor, Tensor]:
    """§4 as derived: the explicit step, in the form with A. Returns outputs and every state."""
    b, kbar, vbar = expansion(k, v, r, forget)
    a = torch.zeros(K, V, dtype=torch.float64)
    out, states = [], []
    for t in range(len(q)):
        key = c * (k[t] - kbar[t])
        a = (1 - b[t]) * a + b[t] * torch.outer(key, v[t] - before(vbar)[t] - a.T @ key)
        out.append(vbar[t] + a.T @ (SCALE * (q[t] - r) / c))
        states.append(a)
    return torch.stack(out), torch.stack(states)


def delta_rule(s: Tensor, alpha, beta, u: Tensor, x: Tensor) -> Tensor:
    """The standard decay-first gated delta rule, one step."""
    s = alpha * s
    return s + beta * torch.outer(u, x - s.T @ u)


def stable_gdn(q, k, v, r, forget, c, start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """§4, stable form, on unit keys. Returns outputs, every state and every beta (0 at the first token)."""
    b, kbar, vbar = expansion(k, v, r, forget)
    s = torch.zeros(K, V, dtype=torch.float64) if start is None else start
    out, states, betas = [], [], []
    for t in range(len(q)):
        beta = torch.zeros((), dtype=torch.float64)
        if t:
            key = c * (k[t] - kbar[t])
            n = key.norm()
            beta = (b[t].log() - (1 - b[t]).log() + 2 * n.log()).sigmoid()
            s = delta_rule(s, 1 - b[t], beta, key / n, (1 - b[t]) * (v[t] - vbar[t - 1]) / n)
        out.append(vbar[t] + s.T @ (SCALE * (q[t] - r) / c))
        states.append(s)
        betas.append(beta)
    return torch.stack(out), torch.stack(states), torch.stack(betas)


# §1


def test_recurrence_is_softmax_attention(qkv):
    q, k, v = qkv
    for t in range(T):
        z, o, shares = 0.0, torch.zeros(V, dtype=torch.float64), []
        for i in range(t + 1):
            e = (SCALE * q[t] @ k[i]).exp()
            z = z + e
            o = o + e / z * (v[i] - o)
            shares.append(e / z)
        weights = (SCALE * k[: t + 1] @ q[t]).softmax(0)
        torch.testing.assert_close(o, weights @ v[: t + 1], **EXACT)
        shares = torch.stack(shares)
        survives = torch.stack([(1 - shares[i + 1 :]).prod() for i in range(t + 1)])
        torch.testing.assert_close(shares * survives, weights, **EXACT)


# §2


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_strengths_and_means_are_weighted_averages(qkv, forget, tilted, forgets):
    q, k, v = qkv
    r = q.mean(0) if tilted else torch.zeros(K, dtype=torch.float64)
    lam = forget if forgets else torch.ones_like(forget)
    b, kbar, vbar = expansion(k, v, r, lam)
    for t in range(T):
        weights = softmax_weights(r, k[: t + 1], lam[: t + 1])
        torch.testing.assert_close(b[t], weights[-1], **EXACT)
        torch.testing.assert_close(kbar[t], weights @ k[: t + 1], **EXACT)
        torch.testing.assert_close(vbar[t], weights @ v[: t + 1], **EXACT)
    if not tilted and not forgets:
        torch.testing.assert_close(b, 1 / torch.arange(1.0, T + 1, dtype=torch.float64), **EXACT)

    log_write, log_forget = tilt(k[None, :, None], r[None], SCALE), lam.log()[None, :, None]
    log_z = log_norm(log_write, log_forget)
    at = strengths(log_write, log_forget, log_z, Layout.of(k[None], Segments()), None)
    kd, vd, mean, rho2, (key_mean, value_mean) = centre(
        k[None, :, None], v[None, :, None], log_write, log_forget, log_z
    )
    assert at.live[0, :, 0].tolist() == [False] + [True] * (T - 1)
    torch.testing.assert_close(at.log_strength[0, 1:, 0].exp(), b[1:], **EXACT)
    torch.testing.assert_close(at.log_keep[0, 1:, 0].exp(), 1 - b[1:], **EXACT)
    torch.testing.assert_close(kd[0, 1:, 0], (k - before(kbar))[1:], **EXACT)
    torch.testing.assert_close(vd[0, 1:, 0], (v - before(vbar))[1:], **EXACT)
    torch.testing.assert_close(rho2[0, 1:, 0], (k - before(kbar))[1:].square().sum(-1), **EXACT)
    torch.testing.assert_close(mean[0, :, 0], vbar, **EXACT)
    torch.testing.assert_close(key_mean[0, 0], kbar[-1], **EXACT)
    torch.testing.assert_close(value_mean[0, 0], vbar[-1], **EXACT)


@pytest.mark.parametrize("decay", [0.9999, 0.97, 0.7])
def test_forgetting_logit(decay):
    logit = torch.tensor(forget_logit(decay), dtype=torch.float64)
    torch.testing.assert_close(forgetting(logit).exp().item(), decay, **EXACT)


@pytest.mark.parametrize("tilted", [False, True])
def test_first_order_expansion_is_the_derivative_of_the_weight(qkv, tilted):
    """a_t(q) = b_t (1 + s (q - r).(k_t - kbar_t)) + O(|q - r|^2)."""
    q, k, v = qkv
    r = (q.mean(0) if tilted else torch.zeros(K, dtype=torch.float64)).requires_grad_()
    one = torch.ones(T, dtype=torch.float64)
    b, kbar, _ = expansion(k, v, r.detach(), one)
    step = normal(K, seed=7)
    for t in (2, 5, T - 1):
        newest = softmax_weights(r, k[: t + 1], one[: t + 1])[-1]
        (slope,) = torch.autograd.grad(newest, r)
        torch.testing.assert_close(slope, b[t] * SCALE * (k[t] - kbar[t]), **EXACT)

        def gap(size, t=t):
            query = r.detach() + size * step
            linear = b[t] * (1 + SCALE * (query - r.detach()) @ (k[t] - kbar[t]))
            return float((softmax_weights(query, k[: t + 1], one[: t + 1])[-1] - linear).abs())

        assert 3.6 < gap(2e-3) / gap(1e-3) < 4.4  # second order: the remainder falls with the square


# §3


def test_vala_is_the_running_covariance(qkv):
    q, k, v = qkv
    zero = torch.zeros(K, dtype=torch.float64)
    got = vala(q, k, v, zero, torch.ones(T, dtype=torch.float64))
    for t in range(T):
        past_k, past_v = k[: t + 1], v[: t + 1]
        covariance = past_k.T @ past_v / (t + 1) - torch.outer(past_k.mean(0), past_v.mean(0))
        torch.testing.assert_close(got[t], past_v.mean(0) + SCALE * covariance.T @ q[t], **EXACT)


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_vala_is_the_tangent_of_softmax_attention_at_the_reference(qkv, forget, tilted, forgets):
    q, k, v = qkv
    r = q.mean(0) if tilted else torch.zeros(K, dtype=torch.float64)
    lam = forget if forgets else torch.ones_like(forget)
    got = vala(q, k, v, r, lam)
    for t in (0, 1, 7, T - 1):

        def attend(query, t=t):
            return softmax_weights(query, k[: t + 1], lam[: t + 1]) @ v[: t + 1]

        slope = torch.autograd.functional.jacobian(attend, r)
        torch.testing.assert_close(got[t], attend(r) + slope @ (q[t] - r), **EXACT)


ONE_HEAD = HeadShape(hidden=3, q_heads=1, kv_heads=1, key_dim=K, value_dim=V)


@torch.no_grad()
def package_mixer(cls, r: Tensor, forget: float, **values):
    """A mixer of one head with reference r, an even forgetting and no part of the readout but vbar and the memory."""
    mixer = cls(ONE_HEAD).double()
    mixer.reference.copy_(r[None])
    # A logit of -60 is a forgetting of 1 - 1e-26.
    mixer.gates.bias[-1] = -60.0 if forget == 1 else forget_logit(forget)
    for name, value in values.items():
        getattr(mixer, name).copy_(value)
    return mixer


@torch.no_grad()
def run(mixer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = (x[None, :, None] for x in (q, k, v))
    return mixer(torch.zeros(1, len(q), 3, dtype=torch.float64), *rows, SCALE, segments=Segments())[0][0, :, 0]


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("decay", [1, 0.9])
def test_package_vala_is_vala(qkv, tilted, decay):
    q, k, v = qkv
    r = q.mean(0) if tilted else torch.zeros(K, dtype=torch.float64)
    lam = torch.full((T,), float(decay), dtype=torch.float64)
    torch.testing.assert_close(run(package_mixer(VaLA, r, decay), q, k, v), vala(q, k, v, r, lam), **EXACT)


def test_package_gdn_without_erase_is_vala(qkv):
    """The distance falls with c_h^2."""
    q, k, v = qkv
    want = run(package_mixer(VaLA, q.mean(0), 0.9), q, k, v)
    gaps = [
        float((run(package_mixer(GDN, q.mean(0), 0.9, log_balance=torch.tensor(c).log()), q, k, v) - want).abs().max())
        for c in (1.0, 1e-2, 1e-3, 1e-6)
    ]
    assert gaps[0] > 0.01 and 90 < gaps[1] / gaps[2] < 110 and gaps[3] < 1e-9


# §4


def test_derived_gdn_is_a_gated_delta_rule(qkv, forget):
    q, k, v = qkv
    r = q.mean(0)
    b, kbar, vbar = expansion(k, v, r, forget)
    c = balance(q, k, kbar, r)
    _, states = derived_gdn(q, k, v, r, forget, c)
    torch.testing.assert_close(states[0], torch.zeros_like(states[0]), **EXACT)
    s = states[0]
    for t in range(1, T):
        key = c * (k[t] - kbar[t])
        n = key.norm()
        x = (1 - b[t]) * (v[t] - vbar[t - 1]) / n
        s = delta_rule(s, 1 - b[t], b[t] * n**2 / (1 - b[t]), key / n, x)
        torch.testing.assert_close(s, states[t], **EXACT)


def test_stable_step_is_the_derived_one_to_first_order():
    n = 1.7
    for b in (1e-3, 1e-4):
        explicit = b * n**2 / (1 - b)
        stable = 1 / (1 + math.exp(-(math.log(b) - math.log(1 - b) + 2 * math.log(n))))
        assert stable == pytest.approx(b * n**2 / ((1 - b) + b * n**2), rel=1e-12)
        assert abs(stable - explicit) < 1.01 * explicit**2
        assert abs(stable - explicit) > 0.98 * explicit**2  # and no closer: the two do differ


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_package_step_is_the_stable_one(qkv, forget, size):
    """`delta_arguments` on centred keys is the unit-key rule: erase |kd|^2 = beta, and the same write."""
    q, k, v = qkv
    k = size * k
    r, c = q.mean(0) / size, torch.tensor([0.8], dtype=torch.float64)
    b, kbar, vbar = expansion(k, v, r, forget)
    log_write, log_forget = tilt(k[None, :, None], r[None], SCALE), forget.log()[None, :, None]
    log_z = log_norm(log_write, log_forget)
    at = strengths(log_write, log_forget, log_z, Layout.of(k[None], Segments()), None)
    kd, vd = k - before(kbar), v - before(vbar)
    zero = torch.zeros((), dtype=torch.float64)
    got = delta_arguments(at, zero, zero, kd.square().sum(-1)[None, :, None], c)
    log_decay, erase, gain = (x[0, :, 0] for x in got)
    assert log_decay[0] == erase[0] == gain[0] == 0  # the first token decays and writes nothing
    _, _, beta = stable_gdn(q, k, v, r, forget, c)
    assert ((beta[1:] > 0) & (beta[1:] < 1)).all()
    for t in range(1, T):
        key = c * (k[t] - kbar[t])
        n = key.norm()
        write = beta[t] * torch.outer(key / n, (1 - b[t]) * (v[t] - vbar[t - 1]) / n)
        torch.testing.assert_close(log_decay[t].exp(), 1 - b[t], **EXACT)
        torch.testing.assert_close((erase * kd.square().sum(-1))[t], beta[t], **EXACT)
        torch.testing.assert_close(gain[t] * torch.outer(kd[t], vd[t]), write, **EXACT)


def test_balance_leaves_scores_and_makes_magnitudes_equal(qkv, forget):
    q, k, v = qkv
    r = q.mean(0)
    _, kbar, _ = expansion(k, v, r, forget)
    c = balance(q, 7 * k, 7 * kbar, r)
    queries, keys = SCALE * (q - r) / c, c * 7 * (k - kbar)
    torch.testing.assert_close(queries @ keys.T, SCALE * (q - r) @ (7 * (k - kbar)).T, **EXACT)
    torch.testing.assert_close(queries.norm(dim=-1).mean(), keys.norm(dim=-1).mean(), **EXACT)


@pytest.mark.parametrize("form", [derived_gdn, stable_gdn])
def test_vanishing_balance_gives_vala(qkv, forget, form):
    """c_h^2 scales the erase term alone, so the distance to VaLA falls with c_h^2."""
    q, k, v = qkv
    r = q.mean(0)
    want = vala(q, k, v, r, forget)
    gaps = [float((form(q, k, v, r, forget, c)[0] - want).abs().max()) for c in (1e-2, 1e-3, 1e-5)]
    assert 90 < gaps[0] / gaps[1] < 110
    assert gaps[2] < 1e-7


def test_raw_magnitudes_explode_and_the_stable_form_does_not():
    """The magnitudes of a real model: |s q| about 1.5, |k - kbar| about 11."""
    length = 200
    q, k, v = normal(length, K, seed=8), normal(length, K, seed=9), normal(length, V, seed=10)
    q, k = 1.5 / SCALE * q / q.norm(dim=-1, keepdim=True), 11 * k / k.norm(dim=-1, keepdim=True)
    zero, one = torch.zeros(K, dtype=torch.float64), torch.ones(length, dtype=torch.float64)
    raw, _ = derived_gdn(q, k, v, zero, one, 1.0)
    assert raw.abs().max() > 1e6
    _, kbar, _ = expansion(k, v, zero, one)
    for c in (1.0, balance(q, k, kbar, zero)):
        o, states, _ = stable_gdn(q, k, v, zero, one, c)
        assert o.norm(dim=-1).max() < 10 * v.norm(dim=-1).max()
        assert states.flatten(1).norm(dim=-1).max() < 10 * v.norm(dim=-1).max()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_stable_form_contracts(qkv, forget, size):
    """Two states under the same tokens approach each other at least as fast as the decay alone."""
    q, k, v = qkv
    r = q.mean(0) / size
    b, _, _ = expansion(size * k, v, r, forget)
    start = normal(K, V, seed=11)
    _, one, _ = stable_gdn(q, size * k, v, r, forget, 1.0)
    _, other, _ = stable_gdn(q, size * k, v, r, forget, 1.0, start)
    distance = (other - one).flatten(1).norm(dim=-1)
    bound = start.norm() * torch.cat([b.new_ones(1), 1 - b[1:]]).cumprod(0)
    assert (distance <= bound * (1 + 1e-9) + 1e-9).all()


def test_first_token_only_starts_the_means(qkv, forget):
    q, k, v = qkv
    r = q.mean(0)
    b, kbar, vbar = expansion(k, v, r, forget)
    assert b[0] == 1 and torch.equal(kbar[0], k[0]) and torch.equal(vbar[0], v[0])
    for form in (derived_gdn, stable_gdn):
        o, states, *_ = form(q, k, v, r, forget, 1.0)
        assert not states[0].any()
        assert torch.equal(o[0], v[0])


# §7


def test_mean_field_of_a_linear_model_is_exact(qkv):
    """sum a_i W^T k_i = W^T sum a_i k_i."""
    q, k, v = qkv
    weight = normal(K, V, seed=12)
    a = (SCALE * k @ q[-1]).softmax(0)
    torch.testing.assert_close(a @ (k @ weight), weight.T @ (a @ k), **EXACT)


@pytest.mark.parametrize("eta", [1e-3, 0.1, 10.0])
def test_delta_rule_step_is_gradient_descent(qkv, eta):
    """S_t is one step of SGD on |v - S^T k|^2 / 2 at the rate eta / (1 + eta n^2), and the implicit step at eta."""
    q, k, v = qkv
    r = q.mean(0)
    _, kbar, vbar = expansion(k, v, r, torch.full((T,), 0.9, dtype=torch.float64))
    mixer = package_mixer(
        DeltaNet, r, 0.9, log_rate=torch.tensor(eta, dtype=torch.float64).log(), key_readout=torch.ones(1, K)
    )
    s = torch.zeros(K, V, dtype=torch.float64)
    want = []
    for t in range(T):
        key, value = k[t] - before(kbar)[t], v[t] - before(vbar)[t]
        if t:

            def loss(state, key=key, value=value):
                return 0.5 * (value - state.T @ key).square().sum()

            start = s.clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss(start), start)
            s = s - eta / (1 + eta * key @ key) * slope
            end = s.clone().requires_grad_()
            (implicit,) = torch.autograd.grad(loss(end), end)
            torch.testing.assert_close(s, start.detach() - eta * implicit, atol=1e-11, rtol=1e-11)
        want.append(vbar[t] + s.T @ (q[t] - r))
    torch.testing.assert_close(run(mixer, q, k, v), torch.stack(want), atol=1e-11, rtol=1e-11)


def test_decreasing_steps_of_the_delta_rule(qkv):
    """schedule = 1 is eta_t = eta b_t; with no forgetting and r = 0, eta / t."""
    q, k, v = qkv
    zero = torch.zeros(K, dtype=torch.float64)
    _, kbar, vbar = expansion(k, v, zero, torch.ones(T, dtype=torch.float64))
    values = {
        "log_rate": torch.tensor(0.3, dtype=torch.float64).log(),
        "schedule": 1.0,
        "key_readout": torch.ones(1, K),
    }
    mixer = package_mixer(DeltaNet, zero, 1, **{n: torch.as_tensor(x) for n, x in values.items()})
    s, want = torch.zeros(K, V, dtype=torch.float64), []
    for t in range(T):
        key, value = k[t] - before(kbar)[t], v[t] - before(vbar)[t]
        if t:
            eta = 0.3 / (t + 1)
            s = s + eta / (1 + eta * key @ key) * torch.outer(key, value - s.T @ key)
        want.append(vbar[t] + s.T @ q[t])
    torch.testing.assert_close(run(mixer, q, k, v), torch.stack(want), **EXACT)


def mesa_values(ridge: float, variance: float) -> dict[str, Tensor]:
    return {
        "log_ridge": torch.full((1, K), ridge, dtype=torch.float64).log(),
        "log_variance": torch.full((1, K), variance, dtype=torch.float64).log(),
    }


def test_mesanet_is_the_ridge_solution_over_all_that_was_seen(qkv):
    """Against weighted ridge regression of v - vbar on k - kbar, with torch.linalg.solve."""
    q, k, v = qkv
    r = q.mean(0)
    lam = torch.full((T,), 0.9, dtype=torch.float64)
    got = run(package_mixer(MesaNet, r, 0.9, **mesa_values(0.5, 3.0)), q, k, v)
    for t in (0, 1, 7, T - 1):
        w = softmax_weights(r, k[: t + 1], lam[: t + 1])
        keys, values = k[: t + 1] - w @ k[: t + 1], v[: t + 1] - w @ v[: t + 1]
        gram = keys.T @ (w[:, None] * keys) + 0.5 * torch.eye(K, dtype=torch.float64)
        model = torch.linalg.solve(gram, keys.T @ (w[:, None] * values))
        want = w @ v[: t + 1] + model.T @ (3.5 * SCALE * (q[t] - r))
        torch.testing.assert_close(got[t], want, atol=1e-9, rtol=1e-9)


def test_infinite_ridge_is_vala(qkv):
    """The distance falls with 1 / Lambda."""
    q, k, v = qkv
    want = run(package_mixer(VaLA, q.mean(0), 0.9), q, k, v)
    gaps = [
        float((run(package_mixer(MesaNet, q.mean(0), 0.9, **mesa_values(x, 1.0)), q, k, v) - want).abs().max())
        for x in (1.0, 1e3, 1e4, 1e9)
    ]
    assert gaps[0] > 0.01 and 9 < gaps[1] / gaps[2] < 11 and gaps[3] < 1e-7


def test_first_order_key_attention_is_the_covariance_of_keys(qkv):
    """sum a_i k_i - kbar = s Cov_kk (q - r) + O(|q - r|^2), which closes the circle to VaLA."""
    q, k, v = qkv
    r, one = q.mean(0), torch.ones(T, dtype=torch.float64)
    step = normal(K, seed=7)
    w = softmax_weights(r, k, one)
    centred = k - w @ k
    covariance = centred.T @ (w[:, None] * centred)

    def gap(size):
        a = softmax_weights(r + size * step, k, one)
        return float((a @ k - w @ k - size * SCALE * covariance @ step).norm())

    assert 3.6 < gap(2e-3) / gap(1e-3) < 4.4
