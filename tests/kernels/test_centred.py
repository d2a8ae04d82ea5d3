"""Centred mixers as one operator, against the recurrence on unit keys of derivation.md §4, token by token."""

import pytest
import torch
from linearize_kernels import (
    centred_delta_step,
    centred_gated_delta,
    centred_gated_delta_step,
    centred_linear_attn,
    centred_linear_attn_step,
    centred_mesa_step,
    mesa,
    reference,
)
from tolerances import assert_close

NAMES = ("q", "k", "v", "log_write", "log_forget", "log_exponent", "log_erase", "log_balance", "read_mean", "add_to")
STATES = ("memory", "key_mean", "value_mean", "log_z")


def inputs(tokens, heads=2, groups=(1, 1, 1), dims=(5, 4), batch=1, sequences=None, dtype=torch.float64, seed=0):
    """All tensors by name; a fifth of the tokens write nothing."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True))
    write = 2 * normal(batch, tokens, heads)
    write[torch.rand(write.shape, generator=make) < 0.2] = -torch.inf
    forget = -torch.nn.functional.softplus(normal(batch, tokens, heads) - 2)
    exponent, erase = 0.5 * normal(batch, tokens, heads), normal(batch, tokens, heads)
    count = sequences or batch
    state = normal(count, heads, *dims), normal(count, heads, dims[0]), normal(count, heads, dims[1])
    tensors = q, k + 1, v, write, forget, exponent, erase, 0.3 * normal(heads), normal(heads)
    tensors = (*tensors, normal(batch, tokens, heads, dims[1]), *state, normal(count, heads))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = ("q", "k", "v", "add_to")
    return {n: x.to(dtype if n in rows else wide) for n, x in zip(NAMES + STATES, tensors, strict=True)}


def one(x, erase):
    """o and the final states of one batch, by the equations as they are written: n_t, u_t, alpha_t, beta_t."""
    heads = x["log_write"].shape[2]
    q, k, v = (x[n].repeat_interleave(heads // x[n].shape[2], 2) for n in "qkv")
    batch = k.shape[0]
    if "memory" in x:
        S, kbar, vbar, log_z = (x[n] for n in STATES)
    else:
        S = k.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
        kbar, vbar = torch.zeros_like(S[..., 0]), torch.zeros_like(S[..., 0, :])
        log_z = torch.full_like(kbar[..., 0], -torch.inf)
    outs = []
    for t in range(k.shape[1]):
        write, forget = x["log_write"][:, t], x["log_forget"][:, t]
        written, seen = write > -torch.inf, log_z > -torch.inf
        live = written & seen
        w = torch.where(written, write, 0.0)
        carried = torch.where(seen, forget + torch.where(seen, log_z, 0.0), 0.0)
        total = torch.where(live, torch.logaddexp(w, carried), torch.where(written, w, carried))
        b = torch.where(written, (w - total).exp(), 0.0)
        keep = torch.where(live, carried - total, 0.0)  # log(1 - b)
        kd, vd = k[:, t] - kbar, v[:, t] - vbar
        alpha = (x["log_exponent"][:, t].exp() * keep).clamp(min=-80).exp()
        move = x["log_erase"][:, t]
        if erase:
            n = (x["log_balance"].exp() * keep.exp())[..., None] * kd
            length = n.norm(dim=-1)
            odds = torch.where(live, b * move.exp() * length.square(), 0.0)
            beta = odds / (keep.exp() + odds)
            unit = n / length.clamp_min(1e-300)[..., None]
            target = keep.exp()[..., None] * vd / length.clamp_min(1e-300)[..., None]
            S = alpha[..., None, None] * S
            read = torch.einsum("bhkv,bhk->bhv", S, unit)
            S = S + beta[..., None, None] * unit[..., :, None] * (target - read)[..., None, :]
        else:
            odds = torch.where(live, w - carried, 0.0)
            gain = torch.where(live, torch.sigmoid(odds + move) * keep.exp(), 0.0)
            S = alpha[..., None, None] * S + gain[..., None, None] * kd[..., :, None] * vd[..., None, :]
        first = (written & ~seen)[..., None]
        kbar = torch.where(first, k[:, t], kbar + b[..., None] * kd)
        vbar = torch.where(first, v[:, t], vbar + b[..., None] * vd)
        log_z = torch.where(written | seen, total, -torch.inf)
        o = 0.6 * torch.einsum("bhkv,bhk->bhv", S, q[:, t])
        outs.append(o + x["read_mean"][:, None] * vbar + x["add_to"][:, t])
    return torch.stack(outs, 1) if outs else x["add_to"], S, kbar, vbar, log_z


def oracle(x, erase=True, bounds=None):
    if bounds is None:
        return one(x, erase)
    parts = []
    for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        part = {n: t[:, a:b] if n in NAMES and t.dim() > 1 else t for n, t in x.items()}
        parts.append(one(part | {n: x[n][i : i + 1] for n in STATES}, erase))
    return torch.cat([p[0] for p in parts], 1), *(torch.cat(s) for s in list(zip(*parts, strict=True))[1:])


def run(x, erase=True, cu=None):
    state = tuple(x[n] for n in STATES) if "memory" in x else None
    gates = [x[n] for n in NAMES[3 : 8 if erase else 7]]
    op = centred_gated_delta if erase else centred_linear_attn
    o, final = op(
        x["q"], x["k"], x["v"], *gates, read_mean=x["read_mean"], scale=0.6, initial_state=state,
        output_final_state=True, cu_seqlens=cu, add_to=x["add_to"],
    )  # fmt: skip
    return o, *final


def check(x, limits=(1e-12, 1e-11, 1e-11), erase=True, bounds=None):
    """Outputs, states and every gradient."""
    if not erase:
        x = {n: t for n, t in x.items() if n != "log_balance"}
    sides = []
    for true in (False, True):
        leaves = {n: (t.double() if true else t).detach().requires_grad_() for n, t in x.items()}
        cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        outputs = oracle(leaves, erase, bounds) if true else run(leaves, erase, cu)
        outputs = [torch.where(t > -torch.inf, t, 0.0) for t in outputs]
        make = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, dtype=torch.float64, generator=make) for t in outputs]
        total = sum((t.double() * w.to(x["q"].dtype)).sum() for t, w in zip(outputs, weights, strict=True))
        sides.append((outputs, torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)))
    for name, a, b in zip(("o", *STATES), sides[0][0], sides[1][0], strict=True):
        assert_close(name, a, b, limits[0])
    for name, a, b in zip(x, sides[0][1], sides[1][1], strict=True):
        assert_close(f"gradient of {name}", a, b, limits[2 if name.startswith(("log", "read")) else 1])


def check_steps(x, erase=True, width=3, scales=2, limit=1e-12, in_place=True):
    """Steps from the initial state against the oracle, with `scales` more running means."""
    tokens, heads, dim = x["k"].shape[1], x["log_write"].shape[2], x["v"].shape[-1]
    make = torch.Generator().manual_seed(2)
    like = {"dtype": torch.float64, "generator": make}
    write = torch.randn(len(x["k"]), tokens, heads * scales, **like)
    forget = -torch.rand(write.shape, **like)
    weights = torch.randn(heads, scales, **like)
    want, *last = oracle({n: t.double() for n, t in x.items()}, erase)
    mean, norm = torch.zeros(len(x["k"]), heads * scales, dim, dtype=torch.float64), torch.full_like(write[:, 0], -1e30)
    slow_mean, slow_norm = mean.to(x["log_z"].dtype), torch.full_like(write[:, 0], -torch.inf).to(x["log_z"].dtype)
    values = x["v"].double().repeat_interleave(heads // x["v"].shape[2], 2).repeat_interleave(scales, 2)
    extra = []
    for t in range(tokens):
        norm = torch.logaddexp(norm + forget[:, t], write[:, t])
        mean = mean + (write[:, t] - norm).exp()[..., None] * (values[:, t] - mean)
        extra.append((weights[..., None] * mean.unflatten(1, weights.shape)).sum(2))
    want = want + torch.stack(extra, 1)
    state = [x[n].clone() for n in STATES]
    state[0] = state[0].mT.contiguous().mT
    state, outs = (*state, slow_mean, slow_norm), []
    slow = [t.to(x["log_z"].dtype) for t in (write, forget, weights)]
    for a in range(0, tokens, width):
        part = {n: t[:, a : a + width] if t.dim() > 1 else t for n, t in x.items() if n in NAMES}
        gates = [part[n] for n in NAMES[3 : 8 if erase else 7]]
        before = [s.clone() for s in state]
        o, new = (centred_gated_delta_step if erase else centred_linear_attn_step)(
            part["q"], part["k"], part["v"], *gates, state=state[:4], read_mean=x["read_mean"], scale=0.6,
            add_to=part["add_to"], in_place=in_place,
            time_scales=(slow[0][:, a : a + width], slow[1][:, a : a + width], slow[2], *state[4:]),
        )  # fmt: skip
        assert all((s.data_ptr() == n.data_ptr()) == in_place for s, n in zip(state, new, strict=True))
        assert all(s.stride() == n.stride() for s, n in zip(state, new, strict=True))
        assert in_place or all(torch.equal(s, b) for s, b in zip(state, before, strict=True))
        state = new
        outs.append(o)
    for name, a, b in zip(
        ("o", *STATES, "slow mean", "slow norm"), (torch.cat(outs, 1), *state), (want, *last, mean, norm), strict=True
    ):
        assert_close(name, a, b, limit)


def check_scheduled_steps(x, width, in_place, limit=1e-12):
    """Steps at a scheduled rate against the equations as they are written, row by row and head by head."""
    q, k, v = (x[n].double().repeat_interleave(x["log_write"].shape[2] // x[n].shape[2], 2) for n in "qkv")
    schedule = x["log_balance"]
    memory, key_mean, value_mean, log_z = (x[n].double().clone() for n in STATES)
    want = []
    for t in range(k.shape[1]):
        before = log_z
        log_z = torch.logaddexp(before + x["log_forget"][:, t].double(), x["log_write"][:, t].double())
        b = (x["log_write"][:, t].double() - log_z).exp()
        kd, vd = k[:, t] - key_mean, v[:, t] - value_mean
        eta = torch.where(b > 0, (x["log_erase"][:, t].double() + schedule * b.log()).exp(), 0.0)
        beta = eta / (1 + eta * kd.square().sum(-1))
        gap = vd - torch.einsum("bhkv,bhk->bhv", memory, kd)
        memory = memory + torch.einsum("bhk,bhv->bhkv", kd, beta[..., None] * gap)
        key_mean, value_mean = key_mean + b[..., None] * kd, value_mean + b[..., None] * vd
        want.append(0.6 * torch.einsum("bhkv,bhk->bhv", memory, q[:, t]) + x["read_mean"][:, None] * value_mean)
    state, outs = tuple(x[n].clone() for n in STATES), []
    for a in range(0, k.shape[1], width):
        rows = [x[n][:, a : a + width] for n in ("q", "k", "v", "log_write", "log_forget", "log_erase")]
        o, state = centred_delta_step(
            *rows, schedule, state=state, read_mean=x["read_mean"], scale=0.6, in_place=in_place
        )  # fmt: skip
        outs.append(o)
    for name, a, b in zip(
        ("o", *STATES), (torch.cat(outs, 1), *state), (torch.stack(want, 1), memory, key_mean, value_mean, log_z),
        strict=True,
    ):  # fmt: skip
        assert_close(name, a, b, limit)


def check_ridge_steps(x, width, in_place, limit=1e-10, inverse=None):
    """Steps that solve, with a time scale, against MesaNet on what `centre` gives."""
    heads, key_dim, tokens = x["log_write"].shape[2], x["k"].shape[-1], x["k"].shape[1]
    make = torch.Generator().manual_seed(3)
    root = torch.randn(len(x["k"]), heads, key_dim, key_dim, dtype=torch.float64, generator=make)
    Hkk, ridge = root @ root.mT, 0.5 + torch.rand(heads, key_dim, dtype=torch.float64, generator=make)
    slow = [torch.randn(len(x["k"]), tokens, heads, dtype=torch.float64, generator=make) for _ in range(2)]
    slow[1] = -slow[1].abs()
    weights, none = (
        torch.randn(heads, 1, dtype=torch.float64, generator=make),
        torch.full_like(slow[0][:, 0], -torch.inf),
    )
    lZ = reference.recurrent_log_norm(x["log_write"], x["log_forget"], x["log_z"])
    kd, _, key_mean = reference.recurrent_means(x["k"], x["log_write"], lZ, x["key_mean"])
    vd, vbar, value_mean = reference.recurrent_means(x["v"], x["log_write"], lZ, x["value_mean"])
    gates = x["log_write"], x["log_forget"], lZ, x["log_z"], x["log_exponent"], x["log_erase"], None, None
    log_decay, _, gain = reference.centred_gates(*gates)
    slow_lZ = reference.recurrent_log_norm(*slow)
    _, extra, slow_mean = reference.recurrent_means(x["v"], slow[0], slow_lZ)
    base = x["read_mean"][:, None] * vbar + x["add_to"] + weights * extra
    want, last, _ = mesa(
        x["q"], kd, vd, log_decay, gain, ridge, max_iter=200, tol=1e-13, scale=0.6,
        initial_state=(x["memory"], Hkk), output_final_state=True, add_to=base,
    )  # fmt: skip
    state = tuple(s.clone() for s in (x["memory"], Hkk, x["key_mean"], x["value_mean"], x["log_z"]))
    state, outs = (*state, torch.zeros_like(slow_mean), none.clone()), []
    for a in range(0, tokens, width):
        rows = [x[n][:, a : a + width] for n in ("q", "k", "v", *NAMES[3:7])]
        scales = slow[0][:, a : a + width], slow[1][:, a : a + width], weights, *state[5:]
        before = [s.clone() for s in state]
        o, new = centred_mesa_step(
            *rows, ridge, state=state[:5], read_mean=x["read_mean"], scale=0.6, add_to=x["add_to"][:, a : a + width],
            time_scales=scales, in_place=in_place, preconditioner=inverse, max_iter=40, tol=1e-12,
        )  # fmt: skip
        assert all((s.data_ptr() == n.data_ptr()) == in_place for s, n in zip(state, new, strict=True))
        assert all(s.stride() == n.stride() for s, n in zip(state, new, strict=True))
        assert in_place or all(torch.equal(s, b) for s, b in zip(state, before, strict=True))
        state = new
        outs.append(o)
    final = *last, key_mean, value_mean, lZ[:, -1], slow_mean, slow_lZ[:, -1]
    for i, (a, b) in enumerate(zip((torch.cat(outs, 1), *state), (want, *final), strict=True)):
        assert_close(f"result {i}", a, b, limit)


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("tokens", [1, 65, 130])
def test_equals_the_recurrence_on_unit_keys(tokens, erase):
    check(inputs(tokens, batch=2), erase=erase)


def test_without_a_state():
    x = inputs(70)
    check({n: t for n, t in x.items() if n not in STATES})


@pytest.mark.parametrize("erase", [True, False])
def test_packed_sequences_of_grouped_heads(erase):
    check(inputs(100, 4, (1, 2, 4), sequences=4), erase=erase, bounds=[0, 1, 66, 66, 100])


def test_no_tokens():
    x = inputs(0)
    for got, name in zip(run(x)[1:], STATES, strict=True):
        assert torch.equal(got, x[name])


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_steps(erase, width, in_place):
    check_steps(inputs(6, 4, (1, 2, 4), batch=2), erase, width, in_place=in_place)


@pytest.mark.parametrize("in_place", [True, False])
def test_scheduled_steps(in_place):
    check_scheduled_steps(inputs(6, 4, (1, 2, 4), batch=2), 2, in_place)


@pytest.mark.parametrize("in_place", [True, False])
def test_ridge_steps(in_place):
    inverse = torch.zeros(2, 4, 5, 5, dtype=torch.float64)
    check_ridge_steps(inputs(6, 4, (1, 2, 4), batch=2), 2, in_place, inverse=inverse)
    assert not inverse.any(), "the torch form leaves it alone"


def test_steps_from_nothing():
    x = inputs(6)
    for name in STATES:
        x[name] = torch.full_like(x[name], -torch.inf if name == "log_z" else 0.0)
    check_steps(x, width=2)


def test_bad_arguments_are_named():
    x = inputs(3)
    with pytest.raises(ValueError, match="log_balance must have shape"):
        run(x | {"log_balance": x["log_balance"][:1]})
    with pytest.raises(ValueError, match=r"state\[3\] must have shape"):
        run(x | {"log_z": x["log_z"][:, :1]})
