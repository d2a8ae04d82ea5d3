"""The centred mixers' kernels in the interpreter; test_interpreted.py runs this file in a process of its own."""

import interpreter  # noqa: F401
import pytest
import torch
from linearize_kernels import centred_gated_delta_step, mesa_step
from linearize_kernels.conjugate import recurrent_mesa
from test_centred import NAMES, STATES, check, check_ridge_steps, check_scheduled_steps, check_steps, inputs
from tolerances import TOLERANCE, assert_close


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("tokens", [1, 65])
def test_equals_the_recurrence_on_unit_keys(tokens, erase):
    check(inputs(tokens), (1e-11, 1e-10, 1e-10), erase)


def test_packed_sequences_of_grouped_heads():
    check(inputs(100, 2, (1, 2, 2), sequences=4), (1e-11, 1e-10, 1e-10), bounds=[0, 1, 66, 66, 100])


def test_without_a_state():
    x = inputs(70)
    check({n: t for n, t in x.items() if n not in STATES}, (1e-11, 1e-10, 1e-10))


def test_float32():
    check(inputs(66, dims=(16, 16), dtype=torch.float32), TOLERANCE["float32 strong decay"])


def test_tiny_shares_keep_their_digits():
    """log(1 - b) of b = 1e-8 in float32, where 1 - b is 1."""
    from linearize_kernels import gates, reference

    write = torch.linspace(-20.0, 20.0, 64)[None, :, None].expand(1, 64, 1).contiguous()
    zero = torch.zeros_like(write)
    decay = gates.forward(write, zero, zero, zero[:, 0], zero, zero, False, None)[0].mT
    want, _, _ = reference.centred_gates(*(t.double() for t in (write, zero, zero, zero[:, 0], zero, zero)), None, None)
    assert float(((decay - want) / want).abs().max()) < 1e-6


@pytest.mark.parametrize("erase,width,in_place", [(True, 1, True), (False, 3, True), (True, 3, False)])
def test_steps(erase, width, in_place):
    check_steps(inputs(4, 2, (1, 2, 2), dims=(20, 40)), erase, width, in_place=in_place)


def test_steps_without_masks():
    check_steps(inputs(2, dims=(64, 32)), width=2, scales=3)


def test_scheduled_steps():
    check_scheduled_steps(inputs(4, 2, (1, 2, 2), dims=(20, 40)), 3, False)


def test_steps_from_nothing():
    x = inputs(3)
    for name in STATES:
        x[name] = torch.full_like(x[name], -torch.inf if name == "log_z" else 0.0)
    check_steps(x, width=2, scales=1)


@pytest.mark.parametrize("cached", [False, True])
def test_ridge_steps(cached):
    inverse = torch.zeros(1, 2, 12, 12, dtype=torch.float64) if cached else None
    check_ridge_steps(inputs(3, 2, (1, 2, 2), dims=(12, 20)), 2, False, inverse=inverse)
    assert inverse is None or float(inverse.abs().max()) > 0.9


@pytest.mark.parametrize("turned", [False, True])
def test_a_step_keeps_the_layout_of_the_memory(turned):
    x = inputs(1, 2, dims=(32, 16))
    state = [x[n] for n in STATES]
    state[0] = state[0].mT.contiguous().mT if turned else state[0]
    gates = [x[n] for n in NAMES[3:8]]
    results = [
        centred_gated_delta_step(x["q"], x["k"], x["v"], *gates, state=s, in_place=False)
        for s in (state, [t.contiguous() for t in state])
    ]
    (o, new), (want, other) = results
    assert new[0].stride() == state[0].stride() and other[0].is_contiguous()
    assert_close("o", o, want, 1e-12)
    assert_close("memory", new[0], other[0], 1e-12)


@pytest.mark.parametrize("cached,width,in_place", [(False, 3, True), (True, 1, True), (False, 3, False)])
def test_mesa_steps(cached, width, in_place):
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    q, k, v = normal(1, 4, 2, 12), normal(1, 4, 1, 12), normal(1, 4, 2, 40)
    decay, gain = -torch.rand(1, 4, 2, dtype=torch.float64), torch.rand(1, 4, 2, dtype=torch.float64)
    ridge, root, add_to = 0.5 + torch.rand(2, 12, dtype=torch.float64), normal(1, 2, 12, 12), normal(1, 4, 2, 40)
    Hkv, Hkk = normal(1, 2, 12, 40), root @ root.mT
    want, last = recurrent_mesa(q, k, v, decay, gain, ridge, 0.7, (Hkv, Hkk))
    state = Hkv.clone(), Hkk.clone()
    preconditioner = torch.zeros_like(Hkk) if cached else None
    outs = []
    for a in range(0, 4, width):
        rows = [x[:, a : a + width] for x in (q, k, v, decay, gain)]
        old, before = state, [x.clone() for x in state]
        o, state = mesa_step(
            *rows, ridge, state=state, scale=0.7, add_to=add_to[:, a : a + width], preconditioner=preconditioner,
            max_iter=40, tol=1e-12, in_place=in_place,
        )  # fmt: skip
        assert (state is old) == in_place
        assert in_place or all(torch.equal(x, b) for x, b in zip(old, before, strict=True))
        outs.append(o)
        if cached and a == 0:
            first = preconditioner.clone()
    assert_close("o", torch.cat(outs, 1), want + add_to, 1e-10)
    for a, b in zip(state, last, strict=True):
        assert_close("state", a, b, 1e-12)
    if cached:
        # The first step had none and solved directly; the next ones took its inverse and left it.
        assert float(first.abs().max()) > 0.9 and torch.equal(first, preconditioner)


@pytest.mark.parametrize("rule", ["delta", "linear", "covariance", "gated", "scheduled", "mesa"])
def test_the_self_check_of_steps_passes_here(rule):
    from linearize_kernels import selfcheck

    errors = selfcheck.measure_step(rule, 1, 16, 20, torch.float32, torch.device("cpu"), None)
    assert len(errors) == {"delta": 2, "linear": 2, "mesa": 3}.get(rule, 7)
    assert selfcheck.passes(errors, torch.float32), errors


def test_the_self_check_of_steps_notices_errors(monkeypatch):
    from linearize_kernels import decode, selfcheck

    step = decode.step
    monkeypatch.setattr(decode, "step", lambda *a: step(*a[:6], 1.001 * a[6], *a[7:]))
    errors = selfcheck.measure_step("delta", 2, 16, 16, torch.float32, torch.device("cpu"), None)
    assert not selfcheck.passes(errors, torch.float32), errors


def test_the_operators_are_registered_soundly():
    from linearize_kernels.ops import centre_step, centred_fwd, centred_step, mesa_step

    x = inputs(3, dims=(16, 16), dtype=torch.float32)
    x["log_write"] = x["log_write"].clamp(min=-3)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    means = torch.cat([x["key_mean"], x["value_mean"]], -1)
    leaves = [t.requires_grad_() for t in (*(x[n] for n in NAMES[1:]), means, x["log_z"].clone())]
    torch.library.opcheck(centred_fwd, (*leaves, None), test_utils=tests)
    alone = [*leaves[:6], None, None, None, None, None, torch.tensor([0, 1, 3], dtype=torch.int32)]
    torch.library.opcheck(centred_fwd, tuple(alone), test_utils=tests[:3])
    flat = {n: t.detach() for n, t in x.items()}
    states = [flat[n] for n in STATES]
    call = [flat[n] for n in NAMES[:9]] + [flat["add_to"], 0.6, states, [s.clone() for s in states]] + [None] * 3
    torch.library.opcheck(centred_step, tuple(call), test_utils=("test_schema", "test_faketensor"))
    call = [flat[n] for n in (*NAMES[1:7], "read_mean", "add_to")] + [states[1:], [s.clone() for s in states[1:]]]
    # The check of schemas does not know several results beside a list that is overwritten.
    torch.library.opcheck(centre_step, (*call, None, None, None), test_utils=("test_faketensor",))
    Hkk = torch.eye(16).expand(1, 2, 16, 16).contiguous()
    gates = flat["log_forget"], flat["log_exponent"].abs(), torch.ones(2, 16)
    state = flat["memory"], Hkk, flat["memory"].clone(), Hkk.clone()
    call = (flat["q"], flat["k"], flat["v"], *gates, 1.0, *state, torch.zeros_like(Hkk), 9, 1e-4, None)
    torch.library.opcheck(mesa_step, call, test_utils=("test_schema", "test_faketensor"))
