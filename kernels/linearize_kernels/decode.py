"""D1: the next few tokens, all states updated in place: the delta rule (a program per row, head and tile of values),

the whole centred mixer with its running statistics and time scales, and MesaNet (a program per row and head each).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import accumulator, rows, softplus, strides
from .ridge import sweep


@triton.jit(do_not_specialize=["H", "q_group", "k_group", "v_group", "scale"])
def decode_kernel(
    q, k, v, log_decay, beta, gain, add_to, state, o,
    H, q_group, k_group, v_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    decay_batch, decay_token, decay_head, beta_batch, beta_token, beta_head, gain_batch, gain_token, gain_head,
    a_batch, a_token, a_head, s_batch, s_head, s_key, s_value,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, DECAY: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BV)
    line = tl.program_id(0) // tiles
    batch = tl.cast(line // H, tl.int64)
    head = line % H
    key = tl.arange(0, BK)
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    in_key = key < K
    in_value = value < V
    tile = in_value[:, None] & in_key[None, :]
    state += batch * s_batch + head * s_head
    place = state + value[:, None] * s_value + key[None, :] * s_key
    S = tl.load(place, mask=tile, other=0.0).to(ACC)
    q += batch * q_batch + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // v_group, tl.int64) * v_head
    for t in tl.static_range(T):
        queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
        keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
        values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
        write = tl.load(gain + batch * gain_batch + t * gain_token + head * gain_head).to(ACC)
        if DECAY:
            S *= tl.exp(tl.load(log_decay + batch * decay_batch + t * decay_token + head * decay_head).to(ACC))
        y = write * values
        if ERASE:
            erase = tl.load(beta + batch * beta_batch + t * beta_token + head * beta_head).to(ACC)
            y -= erase * tl.sum(S * keys[None, :], axis=1)
        S += y[:, None] * keys[None, :]
        out = scale * tl.sum(S * queries[None, :], axis=1)
        if ADD:
            extra = add_to + batch * a_batch + t * a_token + head * a_head + value
            out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
        tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
    tl.store(place, S.to(state.dtype.element_ty), mask=tile)


# (K rounded up to a power of two) -> (tile of values, warps)
DECODE = {32: (32, 1), 64: (32, 2), 128: (32, 4), 256: (16, 4)}


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float,
    state: Tensor, add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens; `state` [B,H,K,V], any strides, is overwritten. Fastest with K dense."""
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = gain.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, warps = DECODE[padded]
    decay = gain if log_decay is None else log_decay
    erase = gain if beta is None else beta
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    decode_kernel[(batch * heads * triton.cdiv(value_dim, tile),)](
        q, k, v, decay, erase, gain, add_to, state, o,
        heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], scale,
        *strides(q), *strides(k), *strides(v), *strides(decay), *strides(erase), *strides(gain),
        *((0, 0, 0) if add_to is None else strides(add_to)),
        state.stride(0), state.stride(1), state.stride(2), state.stride(3),
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=tile, ERASE=beta is not None, DECAY=log_decay is not None,
        ADD=add_to is not None, ACC=accumulator(q.dtype), num_warps=warps,
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


@triton.jit
def slow_mean(
    v, scale_write, scale_forget, scale_mean, scale_log_z, line, batch, column, value, in_value, v_token,
    y_batch, y_token, y_head, z_batch, z_token, z_head, count, m,
    V: tl.constexpr, SCALES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of the running mean at time scale m after `count` of the new tokens, from the state before them."""
    norm = tl.load(scale_log_z + line * SCALES + m).to(ACC)
    mean = tl.load(scale_mean + (line * SCALES + m) * V + value, mask=in_value, other=0.0).to(ACC)
    for u in range(count):
        norm, share, _, _ = next_norm(
            tl.load(scale_write + batch * y_batch + u * y_token + column * y_head).to(ACC),
            tl.load(scale_forget + batch * z_batch + u * z_token + column * z_head).to(ACC),
            norm,
        )
        mean += share * (tl.load(v + u * v_token + value, mask=in_value, other=0.0).to(ACC) - mean)
    return mean


@triton.jit(do_not_specialize=["H", "q_group", "k_group", "v_group", "scale"])
def centred_step_kernel(
    q, k, v, log_write, log_forget, log_exponent, log_erase, balance, read_mean, add_to, scale_write, scale_forget,
    read_scales, state, key_mean, value_mean, log_z, scale_mean, scale_log_z, o,
    H, q_group, k_group, v_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    a_batch, a_token, a_head, s_batch, s_head, s_key, s_value,
    y_batch, y_token, y_head, z_batch, z_token, z_head,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALES: tl.constexpr,
    ERASE: tl.constexpr, MEAN: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.cast(tl.program_id(0), tl.int64)
    batch = line // H
    head = line % H
    key = tl.arange(0, BK)
    in_key = key < K
    q += batch * q_batch + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + tl.cast(head // v_group, tl.int64) * v_head
    log_write += batch * w_batch + head * w_head
    log_forget += batch * f_batch + head * f_head
    log_exponent += batch * e_batch + head * e_head
    log_erase += batch * r_batch + head * r_head
    state += batch * s_batch + head * s_head
    start_mean = tl.load(key_mean + line * K + key, mask=in_key, other=0.0).to(ACC)
    start_norm = tl.load(log_z + line).to(ACC)
    # One program has the whole head, so the statistics may be overwritten once all tiles of values have used them.
    mean = start_mean
    norm = start_norm
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        place = state + value[:, None] * s_value + key[None, :] * s_key
        tile = in_value[:, None] & in_key[None, :]
        S = tl.load(place, mask=tile, other=0.0).to(ACC)
        shown = tl.load(value_mean + line * V + value, mask=in_value, other=0.0).to(ACC)
        mean = start_mean
        norm = start_norm
        for t in range(T):
            queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
            keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
            values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
            before = norm > float("-inf")
            norm, share, live, odds = next_norm(
                tl.load(log_write + t * w_token).to(ACC), tl.load(log_forget + t * f_token).to(ACC), norm
            )
            strength = -softplus(-odds)
            keep = -softplus(odds)
            exponent = tl.load(log_exponent + t * e_token).to(ACC)
            moved = tl.load(log_erase + t * r_token).to(ACC)
            S *= tl.exp(tl.where(live, tl.maximum(tl.exp(exponent) * keep, -80.0), 0.0))
            kd = tl.where(before, keys - mean, 0.0)
            vd = tl.where(before, values - shown, 0.0)
            if ERASE:
                c = tl.exp(tl.load(balance + head).to(ACC))
                a = tl.exp(tl.where(live, strength + keep + moved, float("-inf")))
                shrink = a / (1.0 + a * c * c * tl.sum(kd * kd, axis=0))
                y = shrink * c * vd - (shrink * c * c) * tl.sum(S * kd[None, :], axis=1)
            else:
                y = tl.exp(tl.where(live, keep - softplus(-(odds + moved)), float("-inf"))) * vd
            S += y[:, None] * kd[None, :]
            mean += share * (keys - mean)
            shown += share * (values - shown)
            out = scale * tl.sum(S * queries[None, :], axis=1)
            if MEAN:
                out += tl.load(read_mean + head).to(ACC) * shown
            for m in range(SCALES):
                slow = slow_mean(
                    v, scale_write, scale_forget, scale_mean, scale_log_z, line, batch, head * SCALES + m, value,
                    in_value, v_token, y_batch, y_token, y_head, z_batch, z_token, z_head, t + 1, m, V, SCALES, ACC,
                )  # fmt: skip
                out += tl.load(read_scales + head * SCALES + m).to(ACC) * slow
            if ADD:
                extra = add_to + batch * a_batch + t * a_token + head * a_head + value
                out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
            tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
        tl.store(place, S.to(state.dtype.element_ty), mask=tile)
        # Warps hold copies of a row of values: all must have read the old one.
        tl.debug_barrier()
        tl.store(value_mean + line * V + value, shown.to(value_mean.dtype.element_ty), mask=in_value)
        for m in range(SCALES):
            slow = slow_mean(
                v, scale_write, scale_forget, scale_mean, scale_log_z, line, batch, head * SCALES + m, value,
                in_value, v_token, y_batch, y_token, y_head, z_batch, z_token, z_head, T, m, V, SCALES, ACC,
            )  # fmt: skip
            tl.debug_barrier()
            at = scale_mean + (line * SCALES + m) * V + value
            tl.store(at, slow.to(scale_mean.dtype.element_ty), mask=in_value)
    tl.debug_barrier()
    tl.store(key_mean + line * K + key, mean.to(key_mean.dtype.element_ty), mask=in_key)
    tl.store(log_z + line, norm.to(log_z.dtype.element_ty))
    for m in range(SCALES):
        norm_m = tl.load(scale_log_z + line * SCALES + m).to(ACC)
        for t in range(T):
            norm_m, _, _, _ = next_norm(
                tl.load(scale_write + batch * y_batch + t * y_token + (head * SCALES + m) * y_head).to(ACC),
                tl.load(scale_forget + batch * z_batch + t * z_token + (head * SCALES + m) * z_head).to(ACC),
                norm_m,
            )
        tl.debug_barrier()
        tl.store(scale_log_z + line * SCALES + m, norm_m.to(scale_log_z.dtype.element_ty))


# (K rounded up to a power of two) -> (tile of values, warps): a program serves a whole head
CENTRED = {32: (16, 2), 64: (16, 4), 128: (16, 4), 256: (16, 8)}


def centred_step(
    q: Tensor, k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, log_erase: Tensor,
    balance: Tensor | None, read_mean: Tensor | None, add_to: Tensor | None, scale: float, state: Tensor,
    key_mean: Tensor, value_mean: Tensor, log_z: Tensor, scale_write: Tensor | None, scale_forget: Tensor | None,
    read_scales: Tensor | None, scale_mean: Tensor | None, scale_log_z: Tensor | None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens in one launch; all states are overwritten. balance = None: no erase."""
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = log_write.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, warps = CENTRED[padded]
    tile = min(tile, max(16, triton.next_power_of_2(value_dim)))
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    gates = log_write, log_forget, log_exponent, log_erase
    slow = [(0, 0, 0) if x is None else strides(x) for x in (scale_write, scale_forget)]
    centred_step_kernel[(batch * heads,)](
        q, k, v, *gates, log_z if balance is None else balance, read_mean, add_to, scale_write, scale_forget,
        read_scales, state, key_mean, value_mean, log_z, scale_mean, scale_log_z, o,
        heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], scale,
        *strides(q), *strides(k), *strides(v), *(s for x in gates for s in strides(x)),
        *((0, 0, 0) if add_to is None else strides(add_to)), *state.stride(), *slow[0], *slow[1],
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=tile,
        SCALES=0 if scale_write is None else read_scales.shape[1], ERASE=balance is not None,
        MEAN=read_mean is not None, ADD=add_to is not None, ACC=accumulator(q.dtype), num_warps=warps,
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


@triton.jit(do_not_specialize=["H", "q_group", "k_group", "v_group", "max_iter", "scale", "tol"])
def mesa_step_kernel(
    q, k, v, log_decay, gain, ridge, add_to, Hkv, Hkk, M, o,
    H, q_group, k_group, v_group, max_iter, scale, tol,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    decay_batch, decay_token, decay_head, gain_batch, gain_token, gain_head, a_batch, a_token, a_head,
    s_batch, s_head, s_key, s_value,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
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
    shift = tl.load(ridge + head * K + key, mask=in_key, other=1.0).to(ACC)
    for t in range(T):
        queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
        keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
        write = tl.load(gain + batch * gain_batch + t * gain_token + head * gain_head).to(ACC)
        # In registers no longer than needed, and read back after a barrier.
        A = load_square(Hkk + line * K * K, K, BK).to(ACC)
        if DECAY:
            kept = tl.exp(tl.load(log_decay + batch * decay_batch + t * decay_token + head * decay_head).to(ACC))
            A *= kept
        A += (write * keys)[:, None] * keys[None, :]
        store_square(Hkk + line * K * K, A.to(Hkk.dtype.element_ty), K, BK)
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
            left -= times(load_square(Hkk + line * K * K, K, BK).to(ACC), first) + shift * first
            x += first + times(swept, left * (1.0 / whole))
            if CACHED:
                tl.debug_barrier()
                store_square(M + line * K * K, swept.to(M.dtype.element_ty), K, BK)
        x = x * (scale * size)
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            in_value = value < V
            tile = in_key[:, None] & in_value[None, :]
            at = Hkv + key[:, None] * s_key + value[None, :] * s_value
            S = tl.load(at, mask=tile, other=0.0).to(ACC)
            if DECAY:
                S *= kept
            values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
            S += (write * keys)[:, None] * values[None, :]
            out = tl.sum(S * x[:, None], axis=0)
            if ADD:
                extra = add_to + batch * a_batch + t * a_token + head * a_head + value
                out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
            tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
            tl.store(at, S.to(Hkv.dtype.element_ty), mask=tile)
        tl.debug_barrier()


# (K rounded up to a power of two) -> (tile of values, warps): Hkk stays in registers
MESA = {32: (32, 2), 64: (32, 8), 128: (16, 8)}


def mesa_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, scale: float, Hkv: Tensor,
    Hkk: Tensor, preconditioner: Tensor | None, max_iter: int, tol: float, add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens in one launch; the states and the preconditioner are overwritten."""
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = gain.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, warps = MESA[padded]
    decay = gain if log_decay is None else log_decay
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    mesa_step_kernel[(batch * heads,)](
        q, k, v, decay, gain, ridge.contiguous(), add_to, Hkv, Hkk, Hkk if preconditioner is None else preconditioner,
        o,
        heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], max_iter, scale, tol,
        *strides(q), *strides(k), *strides(v), *strides(decay), *strides(gain),
        *((0, 0, 0) if add_to is None else strides(add_to)), *Hkv.stride(),
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=min(tile, max(16, triton.next_power_of_2(value_dim))),
        DECAY=log_decay is not None, ADD=add_to is not None, CACHED=preconditioner is not None,
        ACC=accumulator(q.dtype), num_warps=warps,
    )  # fmt: skip
    return o
