"""Chunked torch forms against the token-by-token recurrences, in float64 unless said otherwise."""

import math

import pytest
import torch
from linearize_kernels import (
    centre,
    centre_step,
    gated_delta,
    gated_delta_step,
    linear_attn,
    linear_attn_step,
    log_norm,
    reference,
    running_mean,
    running_mean_step,
)
from tolerances import TOLERANCE, assert_close

LENGTHS = [0, 1, 15, 63, 64, 65, 100, 200]
EXACT = TOLERANCE["float64"][0]


def delta_inputs(batch, tokens, heads, groups=(1, 1, 1), dims=(16, 12), dtype=torch.float64, seed=0, sequences=None):
    """q, k, v, log_decay, beta, gain, initial state, add_to; unit-scale keys, decays from none to strong."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True))
    k = k / math.sqrt(dims[0])
    log_decay = -torch.nn.functional.softplus(4 * normal(batch, tokens, heads))
    beta, gain = (torch.rand(batch, tokens, heads, dtype=torch.float64, generator=make) for _ in range(2))
    state = normal(sequences or batch, heads, *dims)
    tensors = [q, k, v, log_decay, 2 * beta, 2 * gain, state, normal(batch, tokens, heads, dims[1])]
    return [x.to(dtype).requires_grad_() for x in tensors]


def weighted_sum(outputs, seed=1):
    make = torch.Generator().manual_seed(seed)
    return sum((x * torch.randn(x.shape, dtype=torch.float64, generator=make).to(x.dtype)).sum() for x in outputs)


def gradients(outputs, inputs):
    total = weighted_sum(outputs)
    if not total.requires_grad:  # no token and no initial state
        return [torch.zeros_like(x) for x in inputs]
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True, retain_graph=True)


def pad(x, left, right, fill):
    """x [B,T,...] with `left` and `right` more tokens of value `fill`; None: noise."""
    shape = (x.shape[0], left + right, *x.shape[2:])
    extra = torch.randn(shape, dtype=x.dtype) if fill is None else x.new_full(shape, fill)
    return torch.cat([extra[:, :left], x, extra[:, left:]], 1)


def compare(got, want, inputs, limits=(EXACT, EXACT, EXACT)):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i}", a, b, limits[0])
    for i, (a, b) in enumerate(zip(gradients(got, inputs), gradients(want, inputs), strict=True)):
        assert_close(f"gradient {i}", a, b, limits[1])


@pytest.mark.parametrize("tokens", LENGTHS)
def test_gated_delta_equals_recurrence(tokens):
    inputs = q, k, v, log_decay, beta, gain, state, add_to = delta_inputs(2, tokens, 3)
    got = gated_delta(
        q, k, v, log_decay, beta, gain=gain, scale=0.7, initial_state=state, output_final_state=True, add_to=add_to
    )
    want = reference.recurrent_gated_delta(q, k, v, log_decay, beta, gain, 0.7, state, None, add_to)
    compare(got, want, inputs)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_linear_attn_equals_recurrence(tokens):
    q, k, v, log_decay, _, gain, state, add_to = delta_inputs(2, tokens, 3)
    got = linear_attn(q, k, v, log_decay, gain, initial_state=state, output_final_state=True, add_to=add_to)
    zero = torch.zeros_like(gain)
    want = reference.recurrent_gated_delta(q, k, v, log_decay, zero, gain, 0.25, state, None, add_to)
    compare(got, want, [q, k, v, log_decay, gain, state, add_to])


@pytest.mark.parametrize("groups", [(1, 4, 4), (2, 2, 1), (1, 2, 4), (4, 4, 1)])
def test_grouped_heads_are_blocks(groups):
    inputs = q, k, v, log_decay, beta, gain, state, add_to = delta_inputs(2, 70, 4, groups)
    got = gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True)
    # Head h of the recurrence reads head h // group: each head run alone.
    alone = []
    for h in range(4):
        one = [x[:, :, h // g : h // g + 1] for x, g in zip((q, k, v), groups, strict=True)]
        gates = [x[:, :, h : h + 1] for x in (log_decay, beta, gain)]
        alone.append(reference.recurrent_gated_delta(*one, *gates, 0.25, state[:, h : h + 1]))
    want = torch.cat([o for o, _ in alone], 2), torch.cat([f for _, f in alone], 1)
    compare(got, want, inputs[:-1])


def test_defaults_are_gain_beta_no_decay_and_root_scale():
    q, k, v, _, beta, _, _, _ = delta_inputs(1, 70, 2)
    o, final = gated_delta(q, k, v, None, beta)
    assert final is None
    want, _ = reference.recurrent_gated_delta(q, k, v, torch.zeros_like(beta), beta, beta, 0.25)
    compare([o], [want], [q, k, v, beta])


@pytest.mark.parametrize("bounds", [[0, 15], [0, 1, 100, 100, 165, 229], [0, 0, 64, 64], [0, 70, 70]])
def test_packed_equals_separate(bounds):
    cu = torch.tensor(bounds, dtype=torch.int32)
    total, count = bounds[-1], len(bounds) - 1
    inputs = q, k, v, log_decay, beta, gain, state, _ = delta_inputs(1, total, 2, sequences=count)
    spans = list(zip(bounds[:-1], bounds[1:], strict=True))
    for op in ("delta", "linear"):
        gates = (log_decay, beta) if op == "delta" else (log_decay, gain)
        kwargs = {"gain": gain} if op == "delta" else {}
        call = gated_delta if op == "delta" else linear_attn
        got = call(q, k, v, *gates, initial_state=state, output_final_state=True, cu_seqlens=cu, **kwargs)
        parts = []
        for i, (a, b) in enumerate(spans):
            extra = {name: x[:, a:b] for name, x in kwargs.items()}
            rows = [x[:, a:b] for x in (q, k, v, *gates)]
            parts.append(call(*rows, initial_state=state[i : i + 1], output_final_state=True, **extra))
        want = torch.cat([o for o, _ in parts], 1), torch.cat([f for _, f in parts])
        compare(got, want, inputs[:-1])
    oracle = reference.recurrent_gated_delta(q, k, v, log_decay, beta, gain, 0.25, state, cu)
    got = gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True, cu_seqlens=cu)
    compare(got, oracle, inputs[:-1])


@pytest.mark.parametrize("left,right", [(1, 0), (63, 5), (64, 0), (200, 70)])
def test_padding_changes_nothing(left, right):
    q, k, v, log_decay, beta, gain, state, _ = delta_inputs(2, 70, 2)
    inputs = [q, k, v, log_decay, beta, gain, state]
    want = gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True)

    padded = [pad(x, left, right, None) for x in (q, k, v)]
    padded += [pad(x, left, right, 0.0) for x in (log_decay, beta, gain)]
    o, final = gated_delta(*padded[:5], gain=padded[5], initial_state=state, output_final_state=True)
    assert torch.isfinite(o).all()
    compare((o[:, left : left + 70], final), want, inputs)


@pytest.mark.parametrize("kind", ["no decay", "-30 a token", "beta 0", "beta 1", "beta 2", "zero keys", "equal keys"])
def test_extreme_gates_and_keys(kind):
    q, k, v, log_decay, beta, gain, state, _ = delta_inputs(1, 130, 2)
    with torch.no_grad():
        k /= k.norm(dim=-1, keepdim=True)
        if kind == "no decay":
            log_decay.zero_()
        elif kind == "-30 a token":
            log_decay.mul_(0).sub_(30.0)
        elif kind.startswith("beta"):
            beta.mul_(0).add_(float(kind[-1]))
        elif kind == "zero keys":
            k[:, ::3] = 0
        else:
            k.copy_(k[:, :1].clone())
    inputs = [q, k, v, log_decay, beta, gain, state]
    got = gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True)
    want = reference.recurrent_gated_delta(q, k, v, log_decay, beta, gain, 0.25, state)
    compare(got, want, inputs, (1e-11, 1e-11, 1e-11) if kind in ("equal keys", "beta 2") else (EXACT,) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_inputs(dtype):
    exact = delta_inputs(2, 130, 4, (1, 2, 2), (32, 32))
    rounded = [x.detach().to(dtype if x.dim() == 4 and i < 3 else torch.float32) for i, x in enumerate(exact)]
    rounded = [x.requires_grad_() for x in rounded]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    outputs = []
    for q, k, v, log_decay, beta, gain, state, add_to in (rounded, exact):
        outputs.append(
            gated_delta(
                q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True, add_to=add_to
            )
        )
    assert outputs[0][0].dtype == dtype and outputs[0][1].dtype == torch.float32
    limits = TOLERANCE[str(dtype).removeprefix("torch.")]
    for a, b in zip(*outputs, strict=True):
        assert_close("output", a, b, limits[0])
    got, want = (gradients([x.float() for x in out], ins) for out, ins in zip(outputs, (rounded, exact), strict=True))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"gradient {i}", a, b, limits[2])


def test_autocast_does_not_lower_the_precision():
    q, k, v, log_decay, beta, *_ = (x.detach().float() for x in delta_inputs(1, 70, 2))
    plain, _ = gated_delta(q, k, v, log_decay, beta)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = gated_delta(q, k, v, log_decay, beta)
    assert torch.equal(plain, inside)


def test_scale_free_keys():
    q, k, v, log_decay, beta, gain, _, _ = (x.detach() for x in delta_inputs(1, 100, 2))
    c = torch.rand(1, 100, 2, dtype=torch.float64) + 0.5
    want, _ = gated_delta(q, k, v, log_decay, beta, gain=gain)
    got, _ = gated_delta(q, k * c[..., None], v, log_decay, beta / c**2, gain=gain / c)
    assert_close("o", got, want, EXACT)


def test_delta_rule_is_one_gradient_step():
    """Without decay and with gain = beta the state is that of SGD on |S^T k - v|^2 / 2 (derivation.md §7)."""
    q, k, v, _, beta, *_ = (x.detach() for x in delta_inputs(1, 5, 1))
    memory = torch.zeros(16, 12, dtype=torch.float64)
    for t in range(5):
        memory.requires_grad_()
        loss = 0.5 * (memory.mT @ k[0, t, 0] - v[0, t, 0]).square().sum()
        (slope,) = torch.autograd.grad(loss, memory)
        memory = (memory - beta[0, t, 0] * slope).detach()
    _, final = gated_delta(q, k, v, None, beta, output_final_state=True)
    assert_close("state", final[0, 0], memory, EXACT)


def test_split_at_any_token_equals_one_call():
    q, k, v, log_decay, beta, gain, state, _ = (x.detach() for x in delta_inputs(2, 150, 2))
    want, last = gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True)
    parts = []
    for a, b in ((0, 37), (37, 128), (128, 150)):
        o, state = gated_delta(
            *(x[:, a:b] for x in (q, k, v, log_decay, beta)),
            gain=gain[:, a:b],
            initial_state=state,
            output_final_state=True,
        )
        parts.append(o)
    assert_close("o", torch.cat(parts, 1), want, EXACT)
    assert_close("state", state, last, EXACT)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_steps_continue_a_prefill_in_place(width):
    q, k, v, log_decay, beta, gain, _, _ = (x.detach() for x in delta_inputs(2, 80, 4, (1, 2, 2)))
    for linear in (False, True):
        if linear:
            want, last = linear_attn(q, k, v, log_decay, gain, output_final_state=True)
            _, state = linear_attn(*(x[:, :40] for x in (q, k, v, log_decay, gain)), output_final_state=True)
        else:
            want, last = gated_delta(q, k, v, log_decay, beta, gain=gain, output_final_state=True)
            _, state = gated_delta(
                *(x[:, :40] for x in (q, k, v, log_decay, beta)), gain=gain[:, :40], output_final_state=True
            )
        # Decode caches keep the state transposed in memory.
        state = state.mT.contiguous().mT
        address = state.data_ptr()
        outs = []
        for a in range(40, 80, width):
            now = slice(a, min(a + width, 80))
            rows = [x[:, now] for x in (q, k, v, log_decay)]
            if linear:
                o, same = linear_attn_step(*rows, gain[:, now], state=state)
            else:
                o, same = gated_delta_step(*rows, beta[:, now], gain=gain[:, now], state=state)
            assert same is state and state.data_ptr() == address
            outs.append(o)
        assert_close("o", torch.cat(outs, 1), want[:, 40:], EXACT)
        assert_close("state", state, last, EXACT)


@pytest.mark.parametrize("turned", [True, False])
def test_a_step_out_of_place_keeps_the_layout_of_the_state(turned):
    q, k, v, log_decay, beta, gain, state, _ = (x.detach() for x in delta_inputs(2, 3, 4, (1, 2, 2)))
    state = state.mT.contiguous().mT if turned else state
    before = state.clone()
    for o, new in (
        gated_delta_step(q, k, v, log_decay, beta, gain=gain, state=state, in_place=False),
        linear_attn_step(q, k, v, log_decay, gain, state=state, in_place=False),
    ):
        assert new.stride() == state.stride() and o.shape == v.shape[:2] + (4, v.shape[-1])
        assert new.data_ptr() != state.data_ptr() and torch.equal(state, before) and not torch.equal(new, before)


# ---- running statistics ---------------------------------------------------------------------------------------------


def statistics_inputs(batch, tokens, heads, groups=(1, 1), dims=(16, 12), seed=0, sequences=None):
    """k, v, log_write, log_forget, initial means and log Z; keys with a common mean, a few unwritten tokens."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    k, v = (3 + normal(batch, tokens, heads // g, d) for g, d in zip(groups, dims, strict=True))
    log_write = 3 * normal(batch, tokens, heads)
    log_write[torch.rand(log_write.shape, generator=make) < 0.2] = -torch.inf
    log_forget = -torch.nn.functional.softplus(3 * normal(batch, tokens, heads) - 3)
    count = sequences or batch
    tensors = [k, v, log_write, log_forget, normal(count, heads, dims[0]), normal(count, heads, dims[1])]
    return [x.requires_grad_() for x in (*tensors, normal(count, heads))]


def oracle_centre(k, v, log_write, log_forget, initial_mean, initial_log_z, cu=None):
    lZ = reference.recurrent_log_norm(log_write, log_forget, initial_log_z, cu)
    kbar, vbar = initial_mean or (None, None)
    kd, _, key_final = reference.recurrent_means(k, log_write, lZ, kbar, cu)
    vd, mean, value_final = reference.recurrent_means(v, log_write, lZ, vbar, cu)
    return lZ, kd, vd, mean, kd.square().sum(-1), key_final, value_final


def chunked_centre(k, v, log_write, log_forget, initial_mean, initial_log_z, cu=None):
    lZ = log_norm(log_write, log_forget, initial_log_z=initial_log_z, cu_seqlens=cu)
    *rows, finals = centre(k, v, log_write, log_forget, lZ, initial_mean=initial_mean, cu_seqlens=cu)
    return lZ, *rows, *finals


def finite(outputs):
    """lZ is -inf before anything is written; Z itself is compared there."""
    return [torch.where(outputs[0] > -torch.inf, outputs[0], 0.0), *outputs[1:]]


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_centre_equals_recurrence(tokens, initial):
    inputs = k, v, log_write, log_forget, kbar, vbar, log_z = statistics_inputs(2, tokens, 4, (2, 4))
    start = ((kbar, vbar), log_z) if initial else (None, None)
    got = chunked_centre(k, v, log_write, log_forget, *start)
    want = oracle_centre(k, v, log_write, log_forget, *start)
    assert torch.equal(got[0] > -torch.inf, want[0] > -torch.inf)
    compare(finite(got), finite(want), inputs if initial else inputs[:4], (1e-12, 1e-11, 1e-11))


@pytest.mark.parametrize("bounds", [[0, 1, 100, 100, 165, 229], [0, 0, 64, 64], [0, 70, 70]])
def test_packed_centre(bounds):
    cu, count = torch.tensor(bounds), len(bounds) - 1
    inputs = statistics_inputs(1, bounds[-1], 4, (2, 4), sequences=count)
    k, v, log_write, log_forget, kbar, vbar, log_z = inputs
    for start in (((kbar, vbar), log_z), (None, None)):
        got = chunked_centre(k, v, log_write, log_forget, *start, cu)
        want = oracle_centre(k, v, log_write, log_forget, *start, cu)
        compare(finite(got), finite(want), inputs if start[1] is not None else inputs[:4], (1e-12, 1e-11, 1e-11))


def test_running_mean_is_the_value_half_of_centre():
    k, v, log_write, log_forget, kbar, vbar, log_z = statistics_inputs(2, 100, 4, (2, 2))
    lZ = log_norm(log_write, log_forget, initial_log_z=log_z)
    _, _, want, _, (_, last) = centre(k, v, log_write, log_forget, lZ, initial_mean=(kbar, vbar))
    got = running_mean(v, log_write, log_forget, lZ, initial_mean=vbar)
    compare(got, (want, last), [v, log_write, log_forget, vbar, log_z])


def test_plain_weights_give_the_cumulative_mean():
    v = torch.randn(1, 100, 1, 8, dtype=torch.float64)
    zero = torch.zeros(1, 100, 1, dtype=torch.float64)
    count = torch.arange(1, 101, dtype=torch.float64)
    lZ = log_norm(zero, zero)
    assert_close("lZ", lZ[0, :, 0], count.log(), EXACT)
    vbar, final = running_mean(v, zero, zero, lZ)
    assert_close("mean", vbar, v.cumsum(1) / count[None, :, None, None], EXACT)
    assert_close("final", final, v.mean(1), EXACT)


@pytest.mark.parametrize("jump,forget", [(25.0, -1e-3), (-25.0, -1e-3), (0.0, -30.0), (0.0, 0.0)])
def test_extreme_weights_stay_exact(jump, forget):
    inputs = k, v, log_write, log_forget, *_ = statistics_inputs(1, 130, 2)
    with torch.no_grad():
        log_write[:, 70:] += jump
        log_forget.copy_(torch.full_like(log_forget, forget))
    got = chunked_centre(k, v, log_write, log_forget, None, None)
    want = oracle_centre(k, v, log_write, log_forget, None, None)
    compare(finite(got), finite(want), inputs[:4], (1e-12, 1e-10, 1e-10))


@pytest.mark.parametrize("left,right", [(1, 0), (63, 5), (64, 3), (200, 70)])
def test_padding_does_not_enter_the_statistics(left, right):
    inputs = k, v, log_write, log_forget, *_ = statistics_inputs(2, 70, 2)
    want = chunked_centre(k, v, log_write, log_forget, None, None)

    fills = None, None, -torch.inf, 0.0
    padded = [pad(x, left, right, fill) for x, fill in zip((k, v, log_write, log_forget), fills, strict=True)]
    got = chunked_centre(*padded, None, None)
    assert all(torch.isfinite(x).all() for x in got[1:])
    inner = [x[:, left : left + 70] for x in got[:5]]
    compare(finite([*inner, *got[5:]]), finite(want), inputs[:4])


def test_a_common_mean_costs_no_accuracy():
    """bfloat16 inputs whose mean is 20 times their spread: the error is that of rounding the result."""
    k, v, log_write, log_forget, *_ = (x.detach() for x in statistics_inputs(1, 200, 2))
    k = (k + 60).bfloat16()
    lZ = log_norm(log_write.float(), log_forget.float())
    kd, *_ = centre(k, v.bfloat16(), log_write.float(), log_forget.float(), lZ)
    exact = oracle_centre(k.double(), v, log_write, log_forget, None, None)[1]
    assert_close("kd", kd, exact, TOLERANCE["bfloat16"][0])
    kd32, *_ = centre(k.float(), v.float(), log_write.float(), log_forget.float(), lZ)
    assert_close("kd", kd32, exact, 5e-6)


def test_statistics_steps_continue_a_prefill():
    k, v, log_write, log_forget, *_ = (x.detach() for x in statistics_inputs(2, 30, 4, (2, 2)))
    log_write[:, :11] = -torch.inf
    want = chunked_centre(k, v, log_write, log_forget, None, None)
    log_z = torch.full((2, 4), -torch.inf, dtype=torch.float64)
    mean = torch.zeros(2, 4, 16, dtype=torch.float64), torch.zeros(2, 4, 12, dtype=torch.float64)
    other, other_z = torch.zeros(2, 4, 12, dtype=torch.float64), log_z.clone()
    rows = []
    for a in range(0, 30, 4):
        now = slice(a, min(a + 4, 30))
        part = [x[:, now] for x in (k, v, log_write, log_forget)]
        kd, vd, vbar, rho2, lZ = centre_step(*part, log_z=log_z, mean=mean)
        rows.append((lZ, kd, vd, vbar, rho2))
        again, _ = running_mean_step(*part[1:], log_z=other_z, mean=other)
        assert torch.equal(again, vbar)
    got = [torch.cat(x, 1) for x in zip(*rows, strict=True)]
    for a, b in zip(finite([*got, *mean]), finite(want), strict=True):
        assert_close("step", a, b, EXACT)
    assert torch.equal(log_z, got[0][:, -1])


def test_log_norm_of_a_long_sequence():
    """-30 a token over 65536 tokens, in float32 inputs: sums of logarithms reach -2e6 and cost nothing."""
    log_write = torch.randn(1, 65536, 1)
    lZ = log_norm(log_write, torch.full_like(log_write, -30.0))
    assert_close("lZ", lZ, log_write, 1e-6)
    flat = log_norm(torch.zeros(1, 65536, 1), torch.zeros(1, 65536, 1))
    assert_close("lZ", flat[0, :, 0], torch.arange(1, 65537).double().log(), 1e-7)


@pytest.mark.parametrize("op", ["gated_delta", "linear_attn", "log_norm", "centre"])
def test_gradcheck(op):
    if op in ("gated_delta", "linear_attn"):
        q, k, v, log_decay, beta, gain, state, _ = delta_inputs(1, 70, 2, (1, 2, 2), (3, 2))

        def call(q, k, v, log_decay, beta, gain, state):
            if op == "linear_attn":
                return linear_attn(q, k, v, log_decay, gain, initial_state=state, output_final_state=True)
            return gated_delta(q, k, v, log_decay, beta, gain=gain, initial_state=state, output_final_state=True)

        inputs = (q, k, v, log_decay, beta, gain, state)
    else:
        k, v, log_write, log_forget, kbar, vbar, log_z = statistics_inputs(1, 70, 2, (2, 2), (3, 2))
        log_write = log_write.detach().clamp(min=-4).requires_grad_()

        def call(k, v, log_write, log_forget, kbar, vbar, log_z):
            out = chunked_centre(k, v, log_write, log_forget, (kbar, vbar), log_z)
            return out[0] if op == "log_norm" else out

        inputs = (k, v, log_write, log_forget, kbar, vbar, log_z)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (1, 8, 3, 16)}, "heads of q must divide"),
        ({"k": (1, 8, 2, 8)}, "same dim"),
        ({"v": (1, 9, 2, 16)}, "v must be"),
        ({"log_decay": (1, 8, 1)}, "log_decay must have shape"),
        ({"state": (1, 2, 16, 15)}, "initial_state must have shape"),
        ({"cu": [0, 4]}, "must rise from 0 to T=8"),
        ({"cu": [0, 6, 4, 8]}, "must rise from 0 to T=8"),
    ],
)
def test_bad_arguments_are_named(change, message):
    shapes = {"q": (1, 8, 2, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16), "log_decay": (1, 8, 2)}
    x = {name: torch.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    state = torch.zeros(change["state"]) if "state" in change else None
    cu = torch.tensor(change["cu"]) if "cu" in change else None
    with pytest.raises(ValueError, match=message) as caught:
        gated_delta(x["q"], x["k"], x["v"], x["log_decay"], torch.zeros(1, 8, 2), initial_state=state, cu_seqlens=cu)
    assert "\n" not in str(caught.value)


def test_a_step_refuses_what_it_cannot_do():
    x = torch.zeros(1, 9, 1, 4)
    with pytest.raises(ValueError, match="1 to 8 tokens"):
        gated_delta_step(x, x, x, None, x[..., 0], state=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="state must have shape"):
        gated_delta_step(x[:, :1], x[:, :1], x[:, :1], None, x[:, :1, :, 0], state=torch.zeros(1, 1, 4, 5))
