"""MesaNet's read-out against direct solves, in float64."""

import pytest
import torch
from linearize_kernels import linear_attn, mesa, mesa_step
from linearize_kernels.conjugate import recurrent_mesa, solve_queries
from tolerances import TOLERANCE, assert_close

SOLVED = {"max_iter": 200, "tol": 1e-14}


def inputs(tokens, heads=2, groups=(1, 1, 1), dims=(8, 6), batch=2, sequences=None, seed=0):
    """q, k, v, log_decay, gain, ridge, Hkv, Hkk."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True))
    log_decay = -0.1 * torch.nn.functional.softplus(normal(batch, tokens, heads))
    gain = torch.rand(batch, tokens, heads, dtype=torch.float64, generator=make)
    ridge = 0.5 + torch.rand(heads, dims[0], dtype=torch.float64, generator=make)
    count = sequences or batch
    root = normal(count, heads, dims[0], dims[0])
    tensors = q, k, v, log_decay, gain, ridge, normal(count, heads, *dims), root @ root.mT
    return [x.requires_grad_() for x in tensors]


def compare(got, want, leaves, limit=1e-10):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i}", a, b, limit)
    make = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=make) for x in got]
    if got[-1].shape[-1] == got[-1].shape[-2]:
        weights[-1] = weights[-1] + weights[-1].mT  # Hkk is symmetric, and so is what can be said about its gradient
    slopes = [
        torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True) for out in (got, want)
    ]
    for i, (a, b) in enumerate(zip(*slopes, strict=True)):
        if i == 7:
            a, b = (a + a.mT) / 2, (b + b.mT) / 2
        assert_close(f"gradient {i}", a, b, limit)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_mesa_equals_direct_solves(tokens):
    leaves = q, k, v, log_decay, gain, ridge, Hkv, Hkk = inputs(tokens)
    o, final, residual = mesa(
        q, k, v, log_decay, gain, ridge, scale=0.7, initial_state=(Hkv, Hkk), output_final_state=True, **SOLVED
    )
    want, last = recurrent_mesa(q, k, v, log_decay, gain, ridge, 0.7, (Hkv, Hkk))
    compare((o, *final), (want, *last), leaves)
    assert residual.shape == gain.shape and float(residual.max()) < 1e-12


@pytest.mark.parametrize("tol", [1e-4, 1e-6])
def test_float32_is_as_exact_as_residual_and_condition_allow(tol):
    """|x - x*| <= condition |q - A x| / |q| |x*|: what a test asks of the error it must ask of the solve."""
    rounded = [x.detach().float() for x in inputs(100)]
    q, k, _, log_decay, gain, ridge, _, Hkk = (x.double() for x in rounded)
    solution, residual = solve_queries(*(rounded[i] for i in (0, 1, 3, 4, 5, 7)), None, 300, tol)
    assert float(residual.max()) <= tol + 1e-6  # what rounding leaves
    for t in range(100):
        written = gain[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        Hkk = log_decay[:, t, :, None, None].exp() * Hkk + written
        A = Hkk + torch.diag_embed(ridge)
        want = torch.linalg.solve(A, q[:, t])
        errors = (solution[:, t] - want).norm(dim=-1) / want.norm(dim=-1)
        assert bool((errors <= torch.linalg.cond(A) * residual[:, t] + 1e-6).all())
        if tol == 1e-6:
            assert float(errors.max()) <= TOLERANCE["float32 on GPU"][0]


@pytest.mark.parametrize("size", [1e-20, 1e-24, 1e-28])
def test_float32_solves_for_rows_whose_squares_underflow(size):
    q, k, _, log_decay, gain, ridge, _, _ = (x.detach().float() for x in inputs(70))
    found = [solve_queries(x, k, log_decay, gain, ridge, None, None, 300, 1e-6) for x in (q, q * size)]
    assert float(found[1][1].max()) <= 2e-6
    assert_close("solution", found[1][0] / size, found[0][0], TOLERANCE["float32 on GPU"][0])


def test_a_ridge_that_is_lost_beside_long_keys():
    """A state of rank one, 1e10 times the ridge: in float32 the second pivot of its Cholesky factor is 0."""
    q, k, _, log_decay, gain, ridge, _, _ = (x.detach().float() for x in inputs(70))
    state = torch.full((2, 2, 8, 8), 2.0**34)
    assert torch.linalg.cholesky_ex(state + torch.diag_embed(ridge)).info.all()
    leaves = [x.requires_grad_() for x in (q, k, log_decay, gain, ridge, state)]
    solution, residual = solve_queries(*leaves, None, 64, 1e-6)
    slopes = torch.autograd.grad(solution.square().sum(), leaves)
    assert all(x.isfinite().all() for x in (solution, residual, *slopes))


def test_no_tokens():
    q, k, v, log_decay, gain, ridge, Hkv, Hkk = inputs(0)
    o, final, residual = mesa(q, k, v, log_decay, gain, ridge, initial_state=(Hkv, Hkk), output_final_state=True)
    assert o.shape == (2, 0, 2, 6) and residual.shape == (2, 0, 2)
    assert torch.equal(final[0], Hkv) and torch.equal(final[1], Hkk)


def test_grouped_heads_without_state_or_decay():
    q, k, v, _, gain, ridge, _, _ = inputs(70, 4, (1, 2, 4))
    o, final, _ = mesa(q, k, v, None, gain, ridge, **SOLVED)
    assert final is None
    compare([o], [recurrent_mesa(q, k, v, None, gain, ridge, 1.0)[0]], [q, k, v, gain, ridge])


def test_packed_sequences_are_separate():
    bounds = [0, 30, 30, 101]
    leaves = q, k, v, log_decay, gain, ridge, Hkv, Hkk = inputs(101, batch=1, sequences=3)
    cu = torch.tensor(bounds)
    o, final, _ = mesa(
        q, k, v, log_decay, gain, ridge, initial_state=(Hkv, Hkk), output_final_state=True, cu_seqlens=cu, **SOLVED
    )
    parts = []
    for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        rows = [x[:, a:b] for x in (q, k, v, log_decay, gain)]
        parts.append(recurrent_mesa(*rows, ridge, 1.0, (Hkv[i : i + 1], Hkk[i : i + 1])))
    want = torch.cat([o for o, _ in parts], 1), *(torch.cat([s[j] for _, s in parts]) for j in range(2))
    compare((o, *final), want, leaves)


def test_a_large_ridge_is_linear_attention():
    q, k, v, log_decay, gain, *_ = (x.detach() for x in inputs(100))
    ridge = torch.full((2, 8), 1e9, dtype=torch.float64)
    o, _, _ = mesa(q * 1e9, k, v, log_decay, gain, ridge, **SOLVED)
    assert_close("o", o, linear_attn(q, k, v, log_decay, gain, scale=1.0)[0], 1e-6)


def test_a_small_ridge_is_least_squares():
    q, k, v, *_ = (x.detach() for x in inputs(60, 1, batch=1))
    ones = torch.ones(1, 60, 1, dtype=torch.float64)
    o, _, _ = mesa(q, k, v, None, ones, torch.full((1, 8), 1e-8, dtype=torch.float64), max_iter=400, tol=1e-14)
    fit = torch.linalg.lstsq(k[0, :, 0], v[0, :, 0]).solution
    assert_close("o", o[0, -1, 0], fit.mT @ q[0, -1, 0], 1e-5)


def test_the_reported_residual_is_the_true_one():
    q, k, v, log_decay, gain, ridge, *_ = (x.detach() for x in inputs(64, 1, batch=1))
    _, _, rough = mesa(q, k, v, log_decay, gain, ridge * 0.01, max_iter=2, tol=0.0)
    _, _, fine = mesa(q, k, v, log_decay, gain, ridge * 0.01, max_iter=60, tol=0.0)
    assert float(rough.max()) > 1e-3 and float(fine.max()) < 1e-9


def test_steps_continue_a_prefill():
    q, k, v, log_decay, gain, ridge, *_ = (x.detach() for x in inputs(40, 4, (1, 2, 2)))
    want, last, _ = mesa(q, k, v, log_decay, gain, ridge, output_final_state=True, **SOLVED)
    early = [x[:, :30] for x in (q, k, v, log_decay, gain)]
    _, state, _ = mesa(*early, ridge, output_final_state=True, **SOLVED)
    outs = []
    for a in range(30, 40, 5):
        o, same = mesa_step(*(x[:, a : a + 5] for x in (q, k, v, log_decay, gain)), ridge, state=state)
        assert same is state
        outs.append(o)
    assert_close("o", torch.cat(outs, 1), want[:, 30:], 1e-11)
    for a, b in zip(state, last, strict=True):
        assert_close("state", a, b, 1e-12)


def test_gradcheck():
    leaves = inputs(70, 1, dims=(3, 2), batch=1)

    def run(q, k, v, log_decay, gain, ridge, Hkv, root):
        start = Hkv, root @ root.mT  # keeps Hkk symmetric under the check's perturbations
        o, final, _ = mesa(q, k, v, log_decay, gain, ridge, initial_state=start, output_final_state=True, **SOLVED)
        return o, *final

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_bfloat16():
    q, k, v, log_decay, gain, ridge, *_ = (x.detach() for x in inputs(130, 2, dims=(32, 32)))
    low = [x.bfloat16() for x in (q, k, v)]
    o, _, residual = mesa(*low, log_decay.float(), gain.float(), ridge.float())
    want, _ = recurrent_mesa(*(x.double() for x in low), log_decay, gain, ridge, 1.0)
    assert o.dtype == torch.bfloat16 and float(residual.max()) <= 2e-5
    assert_close("o", o, want, 6e-3)
