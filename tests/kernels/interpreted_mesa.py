"""MesaNet's kernels in the interpreter; test_interpreted.py runs this file in a process of its own."""

import interpreter  # noqa: F401
import numpy as np
import pytest
import torch
from linearize_kernels import linear_attn, mesa
from linearize_kernels.conjugate import _Systems, recurrent_mesa
from linearize_kernels.ridge import ROUGH, Prepared, backward, forward
from tolerances import TOLERANCE, assert_close
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NAMES = ("q", "k", "v", "log_decay", "gain", "ridge", "Hkv", "Hkk", "add_to")
EXACT = (1e-10, 1e-9, 1e-9)


def inputs(tokens, dims=(8, 6), dtype=torch.float64, heads=1, groups=(1, 1, 1), sequences=1, decay=0.1, gain=1.0):
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    q, k, v = (normal(1, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True))
    log_decay = -decay * torch.nn.functional.softplus(normal(1, tokens, heads))
    write = gain * torch.rand(1, tokens, heads, dtype=torch.float64, generator=make)
    ridge = 0.5 + torch.rand(heads, dims[0], dtype=torch.float64, generator=make)
    root = normal(sequences, heads, dims[0], dims[0])
    state = normal(sequences, heads, *dims), root @ root.mT
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = q, k, v, log_decay, write, ridge, *state, normal(1, tokens, heads, dims[1])
    types = (dtype,) * 3 + (wide,) * 5 + (dtype,)
    return {name: x.to(t) for name, x, t in zip(NAMES, tensors, types, strict=True)}


def exact(x, bounds):
    """The oracle: every sequence alone, with direct solves."""
    parts = []
    for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        rows = [None if x.get(n) is None else x[n][:, a:b] for n in NAMES[:5]]
        state = (x["Hkv"][i : i + 1], x["Hkk"][i : i + 1]) if "Hkv" in x else None
        parts.append(recurrent_mesa(*rows, x["ridge"], 0.7, state))
    o = torch.cat([o for o, _ in parts], 1)
    return o + x["add_to"] if "add_to" in x else o, *(torch.cat([s[j] for _, s in parts]) for j in range(2))


def check(x, limits=EXACT, bounds=None, tol=1e-13):
    sides = []
    tokens = x["q"].shape[1]
    for true in (False, True):
        leaves = {n: (t.double() if true else t).detach().requires_grad_() for n, t in x.items()}
        if true:
            outputs = exact(leaves, bounds or [0, tokens])
        else:
            cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
            state = (leaves["Hkv"], leaves["Hkk"]) if "Hkv" in x else None
            o, final, residual = mesa(
                *(leaves.get(n) for n in NAMES[:6]), max_iter=100, tol=tol, scale=0.7, initial_state=state,
                output_final_state=True, cu_seqlens=cu, add_to=leaves.get("add_to"),
            )  # fmt: skip
            outputs = o, *final
            assert float(residual.max()) <= tol
        make = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, dtype=torch.float64, generator=make) for t in outputs]
        weights[2] = weights[2] + weights[2].mT  # Hkk is symmetric, and so is what can be said about its gradient
        total = sum((t.double() * w.to(x["q"].dtype)).sum() for t, w in zip(outputs, weights, strict=True))
        slopes = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        if "Hkk" in slopes:
            slopes["Hkk"] = (slopes["Hkk"] + slopes["Hkk"].mT) / 2
        sides.append((outputs, slopes))
    (got, got_slopes), (want, want_slopes) = sides
    for name, a, b in zip(("o", "Hkv", "Hkk"), got, want, strict=True):
        assert_close(name, a, b, limits[0])
    for name in x:
        limit = limits[2 if name in ("log_decay", "gain", "ridge") else 1]
        assert_close(f"gradient of {name}", got_slopes[name], want_slopes[name], limit)


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_lengths(tokens):
    check(inputs(tokens))


def test_preconditioned_and_plain_chunks():
    x = inputs(270, heads=2, decay=0.01)
    x["ridge"][0] *= 0.1
    x["ridge"][1] *= 1e3
    check(x)
    prepared = Prepared(*(x[n] for n in NAMES[1:8]), None, False, True, None)
    assert prepared.bases[:, 0].ge(0).all() and prepared.bases[:, 1].eq(-1).all()


@pytest.mark.parametrize("groups", [(1, 2, 2), (2, 1, 2)])
def test_packed_sequences_of_grouped_heads(groups):
    bounds = [0, 63, 63, 64, 129]
    check(inputs(129, (5, 20), heads=2, groups=groups, sequences=4), bounds=bounds)


def test_several_tiles_of_keys_and_of_values():
    check(inputs(70, (72, 130), gain=0.1), (1e-9, 1e-8, 1e-8), tol=1e-11)


def test_without_optional_arguments():
    x = inputs(65)
    check({n: t for n, t in x.items() if n not in ("log_decay", "Hkv", "Hkk", "add_to")})


@pytest.mark.parametrize("decay,gain", [(20.0, 1.0), (0.02, 1e4)])
def test_extreme_gates(decay, gain):
    # The residual is the true one: at a condition of 1e6 it cannot be computed to less than this.
    check(inputs(70, decay=decay, gain=gain), (1e-9, 1e-8, 1e-8), tol=1e-11)


def test_queries_and_keys_that_are_zero():
    x = inputs(66, dtype=torch.float16)
    x["q"][:, ::3] = 0
    x["k"][:, ::2] = 0
    o, _, residual = mesa(*(x[n] for n in NAMES[:6]), max_iter=20, tol=1e-4)
    want, _ = recurrent_mesa(*(x[n].double() for n in NAMES[:6]), 1.0)
    assert_close("o", o, want, TOLERANCE["float16"][0])
    assert float(residual.max()) <= 1e-4 and not residual[:, ::3].any()


@pytest.mark.parametrize("dtype,tol", [("float16", 1e-4), ("bfloat16", ROUGH)])
def test_sixteen_bits(dtype, tol):
    outputs, rows, scalars = TOLERANCE[dtype + " interpreted" * (dtype == "bfloat16")]
    check(inputs(66, (32, 16), getattr(torch, dtype)), (outputs, rows, scalars), tol=tol)


@pytest.mark.parametrize("tol,limit,ridge", [(1e-4, 1.1e-4, 0.05), (ROUGH, 1.5 * ROUGH, 2.0)])
def test_the_residual_is_the_true_one_in_sixteen_bits(tol, limit, ridge):
    x = inputs(130, (16, 16), torch.float16, decay=0.01)
    x["ridge"] *= ridge
    *_, solution = forward(*(x[n] for n in NAMES[:8]), None, None, 1.0, 100, tol, False)
    systems = _Systems(x["k"].double(), *(x[n].double() for n in ("log_decay", "gain", "ridge", "Hkk")), None)
    rows = systems.plan.split(x["q"].double())
    gap = (rows - systems.apply(systems.plan.split(solution.double()))).norm(dim=-1)
    assert float((gap / rows.norm(dim=-1).clamp_min(1e-30)).max()) <= limit


def check_gradients_in_sixteen_bits(x, do, scale=1.0):
    """Against direct solves, relative to the largest entry of each."""
    rows = [x[n] for n in NAMES[:6]]
    solution = forward(*rows, None, None, None, None, 1.0, 100, 1e-4, False)[4]
    got = backward(*rows[1:], None, None, None, solution, do, None, None, scale, 100, 1e-4, False)
    leaves = [t.double().requires_grad_() for t in rows]
    o, _ = recurrent_mesa(*leaves, scale)
    want = torch.autograd.grad(o, leaves, do)
    _, rows_limit, scalars = TOLERANCE["bfloat16 interpreted"]
    limits = dict.fromkeys("qkv", rows_limit)
    for name, a, b in zip(NAMES[:6], (*got[:3], *got[3], got[4]), want, strict=True):
        assert torch.isfinite(a).all(), name
        unit = b.abs().max()
        assert_close(name, a.double() / unit, b / unit, limits.get(name, scalars))


@pytest.mark.parametrize("slope,value", [(1.0, 1e-4), (1e-9, 1.0), (1e9, 1e3)])
def test_gradients_of_any_size_in_sixteen_bits(slope, value):
    """Cotangents far outside float16's range, and values near the end of it; one chunk has no cotangent at all."""
    x = inputs(150, (16, 16), torch.bfloat16, heads=2, groups=(1, 1, 2))
    x["v"] = (x["v"].float() * value).bfloat16()
    do = torch.randn(1, 150, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    do[:, 64:128] = 0
    check_gradients_in_sixteen_bits(x, do, slope)


@pytest.mark.parametrize("size", [1e-18, 1e-20, None])
@pytest.mark.parametrize("short", ["cotangents", "targets", "solutions"])
def test_rows_whose_squares_underflow_have_gradients(short, size, monkeypatch):
    """Cotangents dO, right sides dq* or solutions y that no sum of squares in float32 can tell the length of: all rows,

    or (None) each by another power of ten, down to where nothing is left of them.
    The second token of a document that begins with one token twice has next to no value less the mean before it.
    """

    def root(self, x):
        """A GPU's: what is below the normal numbers is zero."""
        flushed = np.where(x.data < np.finfo(np.float32).tiny, 0, x.data).astype(x.data.dtype)
        return TensorHandle(np.sqrt(flushed), x.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_sqrt", root)
    x = inputs(70, (16, 16), torch.bfloat16)
    do = torch.randn(1, 70, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    small = 10.0 ** -(torch.arange(70.0, dtype=torch.float64) % 40)[:, None, None] if size is None else size
    if short == "targets":
        x["gain"] *= 1e-10
        do *= 1e10 * small
    elif short == "solutions":
        x["q"], x["ridge"] = (1e10 * x["q"].float()).bfloat16(), 1e10 * x["ridge"]
        do *= 1e10 * small
    else:
        do *= small
    check_gradients_in_sixteen_bits(x, do)


def test_float32():
    check(inputs(65, dtype=torch.float32), (1e-5, 3e-5, 1e-4), tol=1e-6)


def test_a_large_ridge_is_linear_attention_and_a_small_one_least_squares():
    x = inputs(60)
    q, k, v, ones = x["q"], x["k"], x["v"], torch.ones(1, 60, 1, dtype=torch.float64)
    o, _, _ = mesa(1e9 * q, k, v, x["log_decay"], x["gain"], torch.full_like(x["ridge"], 1e9))
    assert_close("o", o, linear_attn(q, k, v, x["log_decay"], x["gain"], scale=1.0)[0], 1e-6)
    o, _, _ = mesa(q, k, v, None, ones, torch.full_like(x["ridge"], 1e-8), tol=1e-13)
    fit = torch.linalg.lstsq(k[0, :, 0], v[0, :, 0]).solution
    assert_close("o", o[0, -1, 0], fit.mT @ q[0, -1, 0], 1e-5)


def test_the_residual_is_the_true_one_and_stops_the_iterations():
    x = inputs(64)
    x["ridge"] = 0.01 * x["ridge"]
    rows = [x[n] for n in NAMES[:6]]
    _, _, rough = mesa(*rows, max_iter=50, tol=0.3)
    _, _, fine = mesa(*rows, max_iter=50, tol=1e-9)
    assert float(fine.max()) < 1e-9 < 1e-4 < float(rough.max()) < 0.3
    from linearize_kernels.ops import mesa_fwd

    none = (None,) * 4
    *_, residual, solution = mesa_fwd(*rows, *none, 1.0, 2, 0.0, False)
    keys, write = x["k"][0, :, 0], x["gain"][0, :, 0]
    state = torch.zeros(8, 8, dtype=torch.float64)
    for t in range(64):
        state = x["log_decay"][0, t, 0].exp() * state + write[t] * torch.outer(keys[t], keys[t])
        gap = x["q"][0, t, 0] - (state + torch.diag(x["ridge"][0])) @ solution[0, t, 0]
        true = gap.norm() / x["q"][0, t, 0].norm()
        assert abs(float(true - residual[0, t, 0])) < 1e-9


def test_the_operators_are_registered_soundly():
    from linearize_kernels.ops import mesa_fwd

    x = inputs(3)
    leaves = [x[n].requires_grad_() for n in NAMES]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    call = (*leaves[:8], None, leaves[8], 0.7, 20, 1e-12, True)
    torch.library.opcheck(mesa_fwd, call, test_utils=tests)


def test_the_self_check_passes_here():
    from linearize_kernels import selfcheck

    errors = selfcheck.measure_mesa(16, 16, torch.float16, torch.device("cpu"), None)
    assert selfcheck.passes(errors, torch.float16), errors
