"""D1: the next few tokens, from a state to the next one, which may lie in the same place.

The delta rule and the whole centred mixer with its running statistics and time scales have a program per row, head and
tile of values (one per row and head where the statistics are overwritten), MesaNet one per row and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, accumulator, rows, softplus, strides
from .ridge import sweep

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def load_state(
    place, value, key, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    S_KEY: tl.constexpr, S_VALUE: tl.constexpr,
):  # fmt: skip
    """[BV,BK] of a state, padded with zeros. Without masks, and with strides known, one address serves a thread."""
    at = place + value[:, None] * S_VALUE + key[None, :] * S_KEY
    if (K == BK) and (V % BV == 0):
        return tl.load(at)
    else:
        return tl.load(at, mask=(value < V)[:, None] & (key < K)[None, :], other=0.0)


@triton.jit
def fetch(at):
    """Ask for the lines of memory at these addresses, into the L2 cache, without waiting for them."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fetch_state(
    place, value0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, S_KEY: tl.constexpr,
    S_VALUE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`fetch` of a tile of a state: the compiler puts its loads off until there are registers, after other waits."""
    step: tl.constexpr = 128 // (ACC.primitive_bitwidth // 8)
    if (K == BK) and (V % BV == 0) and (BK % step == 0) and (S_KEY == 1):
        line = tl.arange(0, BV * BK // step)
        fetch(place + (value0 + line // (BK // step)) * S_VALUE + line % (BK // step) * step)


@triton.jit
def store_state(
    place, S, value, key, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    S_KEY: tl.constexpr, S_VALUE: tl.constexpr,
):  # fmt: skip
    at = place + value[:, None] * S_VALUE + key[None, :] * S_KEY
    if (K == BK) and (V % BV == 0):
        tl.store(at, S.to(place.dtype.element_ty))
    else:
        tl.store(at, S.to(place.dtype.element_ty), mask=(value < V)[:, None] & (key < K)[None, :])


@triton.jit(do_not_specialize=["scale"])
def decode_kernel(
    q, k, v, log_decay, beta, gain, add_to, state, new_state, o, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    decay_batch, decay_token, decay_head, beta_batch, beta_token, beta_head, gain_batch, gain_token, gain_head,
    a_batch, a_token, a_head, s_batch, s_head,
    H: tl.constexpr, Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    S_KEY: tl.constexpr, S_VALUE: tl.constexpr, ERASE: tl.constexpr, DECAY: tl.constexpr, ADD: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    line = tl.program_id(0) // tiles
    batch = tl.cast(line // H, tl.int64)
    head = line % H
    key = tl.arange(0, BK)
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    in_key = key < K
    in_value = value < V
    at = batch * s_batch + head * s_head
    S = load_state(state + at, value, key, K, V, BK, BV, S_KEY, S_VALUE).to(ACC)
    q += batch * q_batch + tl.cast(head // Q_GROUP, tl.int64) * q_head
    k += batch * k_batch + tl.cast(head // K_GROUP, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // V_GROUP, tl.int64) * v_head
    for t in range(T):
        # Whatever a token needs is asked for before anything waits for a part of it.
        queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
        keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
        y = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
        write = tl.load(gain + batch * gain_batch + t * gain_token + head * gain_head).to(ACC)
        if DECAY:
            kept = tl.exp(tl.load(log_decay + batch * decay_batch + t * decay_token + head * decay_head).to(ACC))
        else:
            kept = tl.cast(1.0, ACC)
        if ERASE:
            erase = tl.load(beta + batch * beta_batch + t * beta_token + head * beta_head).to(ACC)
        if ADD:
            extra = add_to + batch * a_batch + t * a_token + head * a_head + value
            extra = tl.load(extra, mask=in_value, other=0.0).to(ACC)
        y *= write
        # Both reads are of the state as it came, so that neither waits for the other.
        out = tl.sum(S * queries[None, :], axis=1)
        if ERASE:
            y -= (erase * kept) * tl.sum(S * keys[None, :], axis=1)
        out = scale * (kept * out + tl.sum(queries * keys, axis=0) * y)
        S = kept * S + y[:, None] * keys[None, :]
        if ADD:
            out += extra
        tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
    store_state(new_state + at, S, value, key, K, V, BK, BV, S_KEY, S_VALUE)


# (K rounded up to a power of two) -> (tile of values, warps), where K is dense in memory and where V is. With K dense a
# warp has a tile of 4 KB by itself: nothing is exchanged between warps, and many programs are under way.
DECODE = {32: (32, 1), 64: (16, 1), 128: (8, 1), 256: (4, 1)}
DECODE_BY_VALUE = {32: (32, 1), 64: (32, 2), 128: (32, 4), 256: (16, 4)}


def launch_of(table: dict, key_dim: int, value_dim: int, warps: int | None) -> tuple[int, int, int]:
    """(K rounded up, tile of values, warps)."""
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, usual = table[padded]
    return padded, min(tile, max(16, triton.next_power_of_2(value_dim))), warps or usual


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float,
    state: Tensor, new_state: Tensor, add_to: Tensor | None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens; the state after them goes to `new_state`, alike in shape and strides.

    `state` and `new_state` [B,H,K,V] have any strides and may be the same tensor. warps: instead of the table's.
    """
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = gain.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    table = DECODE if state.stride(2) == 1 else DECODE_BY_VALUE
    padded, tile, warps = launch_of(table, key_dim, value_dim, warps)
    decay = gain if log_decay is None else log_decay
    erase = gain if beta is None else beta
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    decode_kernel[(batch * heads * triton.cdiv(value_dim, tile),)](
        q, k, v, decay, erase, gain, add_to, state, new_state, o, scale,
        *strides(q), *strides(k), *strides(v), *strides(decay), *strides(erase), *strides(gain),
        *((0, 0, 0) if add_to is None else strides(add_to)), state.stride(0), state.stride(1),
        H=heads, Q_GROUP=heads // q.shape[2], K_GROUP=heads // k.shape[2], V_GROUP=heads // v.shape[2],
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=tile, S_KEY=state.stride(2), S_VALUE=state.stride(3),
        ERASE=beta is not None, DECAY=log_decay is not None, ADD=add_to is not None, ACC=accumulator(q.dtype),
        num_warps=warps,
    )  # fmt: skip
    return o


@triton.jit
def next_norm(write, forget, before):
    """(log Z, share b of the token, whether both the token and something before it count, log odds of b) of a token."""
    none = float("-inf")
    some = before > none
    written = write > none
    carried = tl.where(some, forget + tl.where(some, before, 0.0), none)
    top = tl.maximum(carried, write)
    any_ = top > none
    safe = tl.where(any_, top, 0.0)
    total = tl.exp(tl.where(some, carried - safe, none)) + tl.exp(tl.where(written, write - safe, none))
    norm = tl.where(any_, safe + tl.log(tl.where(any_, total, 1.0)), none)
    share = tl.exp(tl.where(written, tl.where(written, write, 0.0) - tl.where(any_, norm, 0.0), none))
    live = some & written
    odds = tl.where(live, tl.where(written, write, 0.0) - forget - tl.where(some, before, 0.0), 0.0)
    return norm, share, live, odds


# What the memory of a centred step does with a token: it only decays and writes, also erases, or erases at a scheduled
# rate and never decays.
COVARIANCE, GATED, SCHEDULED = (tl.constexpr(rule) for rule in range(3))


@triton.jit(do_not_specialize=["scale"])
def centred_step_kernel(
    q, k, v, log_write, log_forget, log_exponent, log_erase, balance, read_mean, add_to, scale_write, scale_forget,
    read_scales, state, key_mean, value_mean, log_z, scale_mean, scale_log_z,
    new_state, new_key_mean, new_value_mean, new_log_z, new_scale_mean, new_scale_log_z, o, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    a_batch, a_token, a_head, s_batch, s_head, y_batch, y_token, y_head, z_batch, z_token, z_head,
    H: tl.constexpr, Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, S_KEY: tl.constexpr,
    S_VALUE: tl.constexpr, PARTS: tl.constexpr, SCALES: tl.constexpr, BM: tl.constexpr, RULE: tl.constexpr,
    MEAN: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.cast(tl.program_id(0) // PARTS, tl.int64)
    part = tl.program_id(0) % PARTS
    span: tl.constexpr = ((V + BV - 1) // BV + PARTS - 1) // PARTS * BV
    batch = line // H
    head = line % H
    at = batch * s_batch + head * s_head
    if PARTS > 1:
        fetch_state(state + at, part * span, K, V, BK, BV, S_KEY, S_VALUE, ACC)
    if (PARTS > 1) and (SCALES > 0):
        means = tl.arange(0, 2 * BM)
        means = tl.where(means < SCALES, scale_mean + (line * SCALES + means) * V, value_mean + line * V)
        fetch(means + part * span)
    key = tl.arange(0, BK)
    in_key = key < K
    q += batch * q_batch + tl.cast(head // Q_GROUP, tl.int64) * q_head
    k += batch * k_batch + tl.cast(head // K_GROUP, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // V_GROUP, tl.int64) * v_head
    log_write += batch * w_batch + head * w_head
    log_forget += batch * f_batch + head * f_head
    log_exponent += batch * e_batch + head * e_head
    log_erase += batch * r_batch + head * r_head
    for value0 in range(0, span, BV):
        value = part * span + value0 + tl.arange(0, BV)
        in_value = value < V
        S = load_state(state + at, value, key, K, V, BK, BV, S_KEY, S_VALUE).to(ACC)
        mean = tl.load(key_mean + line * K + key, mask=in_key, other=0.0).to(ACC)
        norm = tl.load(log_z + line).to(ACC)
        shown = tl.load(value_mean + line * V + value, mask=in_value, other=0.0).to(ACC)
        if SCALES > 0:
            m = tl.arange(0, BM)
            in_m = m < SCALES
            own = in_m[:, None] & in_value[None, :]
            slow_at = (line * SCALES + m)[:, None] * V + value[None, :]
            slow = tl.load(scale_mean + slow_at, mask=own, other=0.0).to(ACC)
            slow_norm = tl.load(scale_log_z + line * SCALES + m, mask=in_m, other=float("-inf")).to(ACC)
            weight = tl.load(read_scales + head * SCALES + m, mask=in_m, other=0.0).to(ACC)
            slow_write = scale_write + batch * y_batch + (head * SCALES + m) * y_head
            slow_forget = scale_forget + batch * z_batch + (head * SCALES + m) * z_head
        for t in range(T):
            # Whatever a token needs is asked for before anything waits for a part of it.
            queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
            keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
            values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
            write = tl.load(log_write + t * w_token).to(ACC)
            forget = tl.load(log_forget + t * f_token).to(ACC)
            moved = tl.load(log_erase + t * r_token).to(ACC)
            if RULE != SCHEDULED:
                exponent = tl.load(log_exponent + t * e_token).to(ACC)
            if RULE != COVARIANCE:
                size = tl.load(balance + head).to(ACC)
            if SCALES > 0:
                writes = tl.load(slow_write + t * y_token, mask=in_m, other=float("-inf")).to(ACC)
                forgets = tl.load(slow_forget + t * z_token, mask=in_m, other=0.0).to(ACC)
            if MEAN:
                read = tl.load(read_mean + head).to(ACC)
            if ADD:
                extra = add_to + batch * a_batch + t * a_token + head * a_head + value
                extra = tl.load(extra, mask=in_value, other=0.0).to(ACC)
            out = tl.sum(S * queries[None, :], axis=1)
            before = norm > float("-inf")
            norm, share, live, odds = next_norm(write, forget, norm)
            keep = -softplus(odds)
            kept = tl.cast(1.0, ACC)
            if RULE != SCHEDULED:
                kept = tl.exp(tl.where(live, tl.maximum(tl.exp(exponent) * keep, -80.0), 0.0))
            kd = tl.where(before, keys - mean, 0.0)
            y = tl.where(before, values - shown, 0.0)
            mean += share * (keys - mean)
            shown += share * (values - shown)
            if RULE == COVARIANCE:
                y *= tl.exp(tl.where(live, keep - softplus(-(odds + moved)), float("-inf")))
            else:
                if RULE == GATED:
                    c = tl.exp(size)
                    a = tl.exp(tl.where(live, keep - softplus(-odds) + moved, float("-inf")))
                else:
                    c = tl.cast(1.0, ACC)
                    rate = moved - size * softplus(-odds)
                    a = tl.exp(tl.where(live, tl.minimum(rate, 30.0), float("-inf")))
                shrink = a * c / (1.0 + a * c * c * tl.sum(kd * kd, axis=0))
                y = shrink * (y - (c * kept) * tl.sum(S * kd[None, :], axis=1))
            out = scale * (kept * out + tl.sum(queries * kd, axis=0) * y)
            S = kept * S + y[:, None] * kd[None, :]
            if MEAN:
                out += read * shown
            if SCALES > 0:
                slow_norm, slow_share, _, _ = next_norm(writes, forgets, slow_norm)
                slow += slow_share[:, None] * (values[None, :] - slow)
                out += tl.sum(weight[:, None] * slow, axis=0)
            if ADD:
                out += extra
            tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
        store_state(new_state + at, S, value, key, K, V, BK, BV, S_KEY, S_VALUE)
        # Threads hold copies of a row: all must have read the old one.
        tl.debug_barrier()
        tl.store(new_value_mean + line * V + value, shown.to(new_value_mean.dtype.element_ty), mask=in_value)
        if SCALES > 0:
            tl.store(new_scale_mean + slow_at, slow.to(new_scale_mean.dtype.element_ty), mask=own)
        if (value0 + BV >= span) & (part == 0):
            tl.store(new_key_mean + line * K + key, mean.to(new_key_mean.dtype.element_ty), mask=in_key)
            tl.store(new_log_z + line, norm.to(new_log_z.dtype.element_ty))
            if SCALES > 0:
                slow_norm_at = new_scale_log_z + line * SCALES + m
                tl.store(slow_norm_at, slow_norm.to(new_scale_log_z.dtype.element_ty), mask=in_m)


# As DECODE. What overwrites its statistics takes the tiles of a head one after the other, by the second table.
CENTRED = {32: (32, 1), 64: (16, 1), 128: (8, 1), 256: (4, 1)}
CENTRED_BY_VALUE = {32: (32, 2), 64: (32, 4), 128: (32, 4), 256: (16, 8)}


def centred_step(
    q: Tensor, k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor | None,
    log_erase: Tensor, balance: Tensor | None, read_mean: Tensor | None, add_to: Tensor | None, scale: float,
    state: list[Tensor], new_state: list[Tensor], scale_write: Tensor | None, scale_forget: Tensor | None,
    read_scales: Tensor | None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens in one launch; the state after them goes to `new_state`.

    state, new_state: memory [B,H,K,V] of any strides, key mean, value mean, log Z and, with scale_write, the means and
    log Z of the time scales, contiguous; alike in shape and strides. Where they are the same tensors, one program has
    the whole head, because all tiles must have read what it overwrites; else each tile of values has one. balance: None
    for the covariance; log c_h for the gated delta rule; without log_exponent, the power of b_t in the learning rate.
    """
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = log_write.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    in_place = state[1].data_ptr() == new_state[1].data_ptr()
    table = CENTRED if state[0].stride(2) == 1 and not in_place else CENTRED_BY_VALUE
    padded, tile, warps = launch_of(table, key_dim, value_dim, warps)
    rule = COVARIANCE if balance is None else SCHEDULED if log_exponent is None else GATED
    scales = 0 if scale_write is None else read_scales.shape[1]
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    gates = log_write, log_forget, log_erase if log_exponent is None else log_exponent, log_erase
    slow = [(0, 0, 0) if x is None else strides(x) for x in (scale_write, scale_forget)]
    states = [*state, *(None,) * (6 - len(state)), *new_state, *(None,) * (6 - len(state))]
    parts = 1 if in_place else triton.cdiv(value_dim, tile)
    centred_step_kernel[(batch * heads * parts,)](
        q, k, v, *gates, balance, read_mean, add_to, scale_write, scale_forget, read_scales, *states, o, scale,
        *strides(q), *strides(k), *strides(v), *(s for x in gates for s in strides(x)),
        *((0, 0, 0) if add_to is None else strides(add_to)), *state[0].stride()[:2], *slow[0], *slow[1],
        H=heads, Q_GROUP=heads // q.shape[2], K_GROUP=heads // k.shape[2], V_GROUP=heads // v.shape[2],
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=tile, S_KEY=state[0].stride(2), S_VALUE=state[0].stride(3),
        PARTS=parts, SCALES=scales, BM=max(1, triton.next_power_of_2(scales)), RULE=rule, MEAN=read_mean is not None,
        ADD=add_to is not None, ACC=accumulator(q.dtype), num_warps=warps,
    )  # fmt: skip
    return o


@triton.jit
def load_square(place, K: tl.constexpr, BK: tl.constexpr):
    """[K,K], contiguous, padded with zeros. Without masks, and with strides known, one address serves a thread."""
    index = tl.arange(0, BK)
    at = place + index[:, None] * K + index[None, :]
    if K == BK:
        return tl.load(at)
    else:
        return tl.load(at, mask=(index < K)[:, None] & (index < K)[None, :], other=0.0)


@triton.jit
def store_square(place, A, K: tl.constexpr, BK: tl.constexpr):
    index = tl.arange(0, BK)
    at = place + index[:, None] * K + index[None, :]
    if K == BK:
        tl.store(at, A)
    else:
        tl.store(at, A, mask=(index < K)[:, None] & (index < K)[None, :])


@triton.jit
def times(A, x):
    """A x of a symmetric A [BK,BK] and x [BK]."""
    return tl.sum(A * x[None, :], axis=1)


@triton.jit(do_not_specialize=["H", "k_group", "v_group"])
def centre_step_kernel(
    k, v, log_write, log_forget, log_exponent, logit, read_mean, add_to, scale_write, scale_forget, read_scales,
    key_mean, value_mean, log_z, scale_mean, scale_log_z,
    new_key_mean, new_value_mean, new_log_z, new_scale_mean, new_scale_log_z, kd, vd, base, log_decay, gain,
    H, k_group, v_group,
    k_batch, k_token, k_head, v_batch, v_token, v_head, w_batch, w_token, w_head, f_batch, f_token, f_head,
    e_batch, e_token, e_head, r_batch, r_token, r_head, a_batch, a_token, a_head,
    y_batch, y_token, y_head, z_batch, z_token, z_head,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALES: tl.constexpr,
    BM: tl.constexpr, MEAN: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.cast(tl.program_id(0), tl.int64)
    batch = line // H
    head = line % H
    key = tl.arange(0, BK)
    value = tl.arange(0, BV)
    in_key = key < K
    in_value = value < V
    k += batch * k_batch + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // v_group, tl.int64) * v_head
    mean = tl.load(key_mean + line * K + key, mask=in_key, other=0.0).to(ACC)
    shown = tl.load(value_mean + line * V + value, mask=in_value, other=0.0).to(ACC)
    norm = tl.load(log_z + line).to(ACC)
    if SCALES > 0:
        m = tl.arange(0, BM)
        in_m = m < SCALES
        own = in_m[:, None] & in_value[None, :]
        slow_at = (line * SCALES + m)[:, None] * V + value[None, :]
        slow = tl.load(scale_mean + slow_at, mask=own, other=0.0).to(ACC)
        slow_norm = tl.load(scale_log_z + line * SCALES + m, mask=in_m, other=float("-inf")).to(ACC)
        weight = tl.load(read_scales + head * SCALES + m, mask=in_m, other=0.0).to(ACC)
        slow_write = scale_write + batch * y_batch + (head * SCALES + m) * y_head
        slow_forget = scale_forget + batch * z_batch + (head * SCALES + m) * z_head
    for t in range(T):
        keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
        values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
        write = tl.load(log_write + batch * w_batch + t * w_token + head * w_head).to(ACC)
        forget = tl.load(log_forget + batch * f_batch + t * f_token + head * f_head).to(ACC)
        exponent = tl.load(log_exponent + batch * e_batch + t * e_token + head * e_head).to(ACC)
        moved = tl.load(logit + batch * r_batch + t * r_token + head * r_head).to(ACC)
        before = norm > float("-inf")
        norm, share, live, odds = next_norm(write, forget, norm)
        keep = -softplus(odds)
        row = (batch * T + t) * H + head
        decay = tl.where(live, tl.maximum(tl.exp(exponent) * keep, -80.0), 0.0)
        tl.store(log_decay + row, decay.to(log_decay.dtype.element_ty))
        strength = tl.exp(tl.where(live, keep - softplus(-(odds + moved)), float("-inf")))
        tl.store(gain + row, strength.to(gain.dtype.element_ty))
        centred = tl.where(before, keys - mean, 0.0)
        tl.store(kd + row * K + key, centred.to(kd.dtype.element_ty), mask=in_key)
        centred = tl.where(before, values - shown, 0.0)
        tl.store(vd + row * V + value, centred.to(vd.dtype.element_ty), mask=in_value)
        mean += share * (keys - mean)
        shown += share * (values - shown)
        out = tl.zeros([BV], dtype=ACC)
        if MEAN:
            out += tl.load(read_mean + head).to(ACC) * shown
        if SCALES > 0:
            slow_norm, slow_share, _, _ = next_norm(
                tl.load(slow_write + t * y_token, mask=in_m, other=float("-inf")).to(ACC),
                tl.load(slow_forget + t * z_token, mask=in_m, other=0.0).to(ACC),
                slow_norm,
            )
            slow += slow_share[:, None] * (values[None, :] - slow)
            out += tl.sum(weight[:, None] * slow, axis=0)
        if ADD:
            extra = add_to + batch * a_batch + t * a_token + head * a_head + value
            out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
        tl.store(base + row * V + value, out.to(base.dtype.element_ty), mask=in_value)
    # Threads hold copies of a row: all must have read the old one.
    tl.debug_barrier()
    tl.store(new_key_mean + line * K + key, mean.to(new_key_mean.dtype.element_ty), mask=in_key)
    tl.store(new_value_mean + line * V + value, shown.to(new_value_mean.dtype.element_ty), mask=in_value)
    tl.store(new_log_z + line, norm.to(new_log_z.dtype.element_ty))
    if SCALES > 0:
        tl.store(new_scale_mean + slow_at, slow.to(new_scale_mean.dtype.element_ty), mask=own)
        slow_norm_at = new_scale_log_z + line * SCALES + m
        tl.store(slow_norm_at, slow_norm.to(new_scale_log_z.dtype.element_ty), mask=in_m)


def centre_step(
    k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, logit: Tensor,
    read_mean: Tensor | None, add_to: Tensor | None, state: list[Tensor], new_state: list[Tensor],
    scale_write: Tensor | None, scale_forget: Tensor | None, read_scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(kd, vd, zeroth order, log decay, gain) of T = 1 to 8 tokens for a memory that is a running covariance.

    Arguments as `centred_step`, without the memory among the states.
    """
    k, v = rows(k), rows(v)
    batch, tokens, heads = log_write.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    scales = 0 if scale_write is None else read_scales.shape[1]
    add_to = None if add_to is None else rows(add_to)
    kd, vd = (x.new_empty(batch, tokens, heads, x.shape[-1]) for x in (k, v))
    base = torch.empty(vd.shape, dtype=state[0].dtype, device=v.device)
    log_decay, gain = (torch.empty(log_write.shape, dtype=state[0].dtype, device=v.device) for _ in range(2))
    gates = log_write, log_forget, log_exponent, logit
    slow = [(0, 0, 0) if x is None else strides(x) for x in (scale_write, scale_forget)]
    states = [*state, *(None,) * (5 - len(state)), *new_state, *(None,) * (5 - len(state))]
    centre_step_kernel[(batch * heads,)](
        k, v, *gates, read_mean, add_to, scale_write, scale_forget, read_scales, *states, kd, vd, base, log_decay, gain,
        heads, heads // k.shape[2], heads // v.shape[2],
        *strides(k), *strides(v), *(s for x in gates for s in strides(x)),
        *((0, 0, 0) if add_to is None else strides(add_to)), *slow[0], *slow[1],
        T=tokens, K=key_dim, V=value_dim, BK=max(32, triton.next_power_of_2(key_dim)),
        BV=max(32, triton.next_power_of_2(value_dim)), SCALES=scales, BM=max(1, triton.next_power_of_2(scales)),
        MEAN=read_mean is not None, ADD=add_to is not None, ACC=accumulator(k.dtype), num_warps=1,
    )  # fmt: skip
    return kd, vd, base, log_decay, gain


@triton.jit(do_not_specialize=["H", "q_group", "k_group", "v_group", "max_iter", "scale", "tol"])
def mesa_step_kernel(
    q, k, v, log_decay, gain, ridge, add_to, Hkv, Hkk, new_Hkv, new_Hkk, M, o,
    H, q_group, k_group, v_group, max_iter, scale, tol,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, decay_batch, decay_head, gain_batch, gain_head,
    a_batch, a_head, o_batch, s_batch, s_head, s_key, s_value,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    ADD: tl.constexpr, CACHED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.cast(tl.program_id(0), tl.int64)
    batch = line // H
    head = line % H
    key = tl.arange(0, BK)
    in_key = key < K
    q += batch * q_batch + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // v_group, tl.int64) * v_head
    Hkv += batch * s_batch + head * s_head
    Hkk += line * K * K
    new_Hkv += batch * s_batch + head * s_head
    new_Hkk += line * K * K
    shift = tl.load(ridge + head * K + key, mask=in_key, other=1.0).to(ACC)
    queries = tl.load(q + key, mask=in_key, other=0.0).to(ACC)
    keys = tl.load(k + key, mask=in_key, other=0.0).to(ACC)
    write = tl.load(gain + batch * gain_batch + head * gain_head).to(ACC)
    # In registers no longer than needed, and read back after a barrier.
    A = load_square(Hkk, K, BK).to(ACC)
    if DECAY:
        kept = tl.exp(tl.load(log_decay + batch * decay_batch + head * decay_head).to(ACC))
        A *= kept
    A += (write * keys)[:, None] * keys[None, :]
    store_square(new_Hkk, A.to(new_Hkk.dtype.element_ty), K, BK)
    tl.debug_barrier()
    size = tl.maximum(tl.sqrt(tl.sum(queries * queries, axis=0)), 1e-30)
    left = queries * (1.0 / size)
    x = tl.zeros([BK], dtype=ACC)
    norm = tl.sqrt(tl.sum(left * left, axis=0))
    if CACHED:
        p = times(load_square(M + line * K * K, K, BK).to(ACC), left)
        rz = tl.sum(left * p, axis=0)
        i = tl.cast(0, tl.int32)
        while (i < max_iter) & (norm > tol) & (rz > 0):
            Ap = times(A, p) + shift * p
            curve = tl.sum(p * Ap, axis=0)
            step = tl.where(curve > 0, rz / tl.where(curve > 0, curve, 1.0), 0.0)
            x += step * p
            left -= step * Ap
            norm = tl.sqrt(tl.sum(left * left, axis=0))
            # From the cache every time: with A it would not fit the registers.
            z = times(load_square(M + line * K * K, K, BK).to(ACC), left)
            new = tl.sum(left * z, axis=0)
            p = z + (new / rz) * p
            rz = new
            i += 1
    if norm > tol:
        # Directly, and once more for the residual: this token's inverse then serves the next ones.
        whole = tl.max(tl.max(tl.abs(A), axis=1), axis=0) + tl.max(shift, axis=0)
        diagonal = tl.where(key[:, None] == key[None, :], (shift * (1.0 / whole))[None, :], 0.0)
        swept = sweep(A * (1.0 / whole) + diagonal, BK)
        first = times(swept, left * (1.0 / whole))
        left -= times(load_square(new_Hkk, K, BK).to(ACC), first) + shift * first
        x += first + times(swept, left * (1.0 / whole))
        if CACHED:
            tl.debug_barrier()
            store_square(M + line * K * K, swept.to(M.dtype.element_ty), K, BK)
    x = x * (scale * size)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        tile = in_key[:, None] & in_value[None, :]
        at = key[:, None] * s_key + value[None, :] * s_value
        S = tl.load(Hkv + at, mask=tile, other=0.0).to(ACC)
        if DECAY:
            S *= kept
        values = tl.load(v + value, mask=in_value, other=0.0).to(ACC)
        S += (write * keys)[:, None] * values[None, :]
        out = tl.sum(S * x[:, None], axis=0)
        if ADD:
            extra = add_to + batch * a_batch + head * a_head + value
            out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
        tl.store(o + batch * o_batch + head * V + value, out.to(o.dtype.element_ty), mask=in_value)
        tl.store(new_Hkv + at, S.to(new_Hkv.dtype.element_ty), mask=tile)


# (K rounded up to a power of two) -> (tile of values, warps): Hkk stays in registers
MESA = {32: (32, 2), 64: (32, 8), 128: (16, 8)}


def mesa_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, scale: float, Hkv: Tensor,
    Hkk: Tensor, new_Hkv: Tensor, new_Hkk: Tensor, preconditioner: Tensor | None, max_iter: int, tol: float,
    add_to: Tensor | None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens, a launch for each; the states after them go to `new_Hkv` and `new_Hkk`.

    The new states are alike in shape and strides to those before, Hkk contiguous, and may be the same tensors. The
    preconditioner is overwritten.
    """
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = gain.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, usual = MESA[padded]
    add_to = None if add_to is None else rows(add_to)
    ridge = ridge.contiguous()
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    for t in range(tokens):
        decay = gain if log_decay is None else log_decay
        now, out = [x[:, t] for x in (q, k, v, decay, gain)], o[:, t]
        extra = None if add_to is None else add_to[:, t]
        mesa_step_kernel[(batch * heads,)](
            *now, ridge, extra, Hkv, Hkk, new_Hkv, new_Hkk, Hkk if preconditioner is None else preconditioner, out,
            heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], max_iter, scale, tol,
            *(s for x in now for s in x.stride()[:2]), *((0, 0) if extra is None else extra.stride()[:2]),
            out.stride(0), *Hkv.stride(),
            K=key_dim, V=value_dim, BK=padded, BV=min(tile, max(16, triton.next_power_of_2(value_dim))),
            DECAY=log_decay is not None, ADD=extra is not None, CACHED=preconditioner is not None,
            ACC=accumulator(q.dtype), num_warps=warps or usual,
        )  # fmt: skip
        Hkv, Hkk = new_Hkv, new_Hkk
    return o
