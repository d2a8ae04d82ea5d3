"""X1 to X3: MesaNet's states, preconditioners and solves, a program per chunk and half of its tokens.

In a chunk that is entered with states H = Hkk and G = Hkv, column p [K] of token t meets its own matrix

    A p = K^T ((Gam o gain_s)^T (K p)) + e_t H p + ridge o p

X2 solves A x = q by conjugate gradients, preconditioned by the inverse of H + diag(ridge) at this or an earlier chunk's
start, and reads o = scale (V^T ((Gam o gain_s)^T (K x)) + e_t G^T x). Backwards the same kernel solves A y = dq* with
dq* = scale (K^T ((Gam o gain_s)^T (V dO)) + e_t G dO); the rest is the gradient of linear attention (`backward`).

16-bit inputs are computed with float16 products. Keys and values enter them unrounded; states are scaled by a bound of
their entries and split in two float16 numbers, and so is every column but the search direction: that one is rounded
first and then used as it is everywhere, with an exact line search and conjugacy to the last direction, so its rounding
costs no accuracy. float32 inputs use float32 products, float64 ones (interpreter) float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import delta, prep
from .common import (
    CHUNK,
    INTERPRETED,
    LOG2E,
    Chunks,
    accumulator,
    dot,
    launch_warps,
    locate_chunk,
    locate_sequence,
    precision,
    rows,
    strides,
)
from .grads import sum_group
from .reference import expand_heads

MAX_KEY_DIM = 128  # a state of 256 dims, as two float16 numbers, does not fit the shared memory of a multiprocessor
# Rows of per-chunk scalars: g / log 2 in two parts, gain, exp(g), exp(g_last - g) gain.
GATES: tl.constexpr = tl.constexpr(5)
# Per-chunk sizes: bounds of the entries of the chunk's own part of Hkk and of Hkv, the largest gain |k|^2, exp(g_last).
SIZES: tl.constexpr = tl.constexpr(4)
# Per-chunk bounds: of the entries of the entering Hkk and Hkv, and of all matrices of the chunk.
BOUNDS: tl.constexpr = tl.constexpr(3)
TINY: tl.constexpr = tl.constexpr(1e-30)
SMALL: tl.constexpr = tl.constexpr(1e-12)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group"])
def sizes_kernel(
    k, v, log_decay, gain, gates, sizes, table, cu_seqlens,
    T, NT, H, k_group, v_group,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    decay_batch, decay_token, decay_head, gain_batch, gain_token, gain_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    row = tl.arange(0, C)
    real = row < count
    gain += batch * gain_batch + first * gain_token + head * gain_head
    write = tl.load(gain + row * gain_token, mask=real, other=0.0).to(ACC)
    if DECAY:
        log_decay += batch * decay_batch + first * decay_token + head * decay_head
        step = tl.load(log_decay + row * decay_token, mask=real, other=0.0).to(ACC) * LOG2E
        # Multiples of 2^-10 add up exactly, so that differences of the sums lose nothing.
        coarse = tl.floor(step * 1024.0 + 0.5) * 0.0009765625
        upto = row[:, None] <= row[None, :]
        g = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
        rest = tl.sum(tl.where(upto, (step - coarse)[:, None], 0.0), axis=0)
    else:
        g = tl.zeros([C], dtype=ACC)
        rest = g
    g_last = tl.sum(tl.where(row == C - 1, g, 0.0), axis=0)
    rest_last = tl.sum(tl.where(row == C - 1, rest, 0.0), axis=0)
    late = tl.exp2((g_last - g) + (rest_last - rest)) * write
    gates += place * GATES * C
    tl.store(gates + row, g)
    tl.store(gates + C + row, rest)
    tl.store(gates + 2 * C + row, write)
    tl.store(gates + 3 * C + row, tl.exp2(g + rest))
    tl.store(gates + 4 * C + row, late)
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    key = tl.arange(0, BK)
    value = tl.arange(0, BV)
    keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=real[:, None] & (key < K)[None, :], other=0.0)
    values = tl.load(v + row[:, None] * v_token + value[None, :], mask=real[:, None] & (value < V)[None, :], other=0.0)
    length = tl.sum(keys.to(ACC) * keys.to(ACC), axis=1)
    other = tl.sum(values.to(ACC) * values.to(ACC), axis=1)
    sizes += place * SIZES
    tl.store(sizes, tl.sum(tl.abs(late) * length, axis=0))
    tl.store(sizes + 1, tl.sum(tl.abs(late) * tl.sqrt(length * other), axis=0))
    tl.store(sizes + 2, tl.max(tl.abs(write) * length, axis=0))
    tl.store(sizes + 3, tl.exp2(g_last + rest_last))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def plan_kernel(
    sizes, start_kk, start_kv, largest_ridge, bounds, bases, offsets, cu_seqlens,
    T, NT, H,
    C: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    _, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    place = tl.cast(chunk, tl.int64) * H + head
    one = tl.arange(0, 1)
    ridge = tl.load(largest_ridge + head + one).to(ACC)
    if INITIAL:
        bound_kk = tl.load(start_kk + line + one).to(ACC)
        bound_kv = tl.load(start_kv + line + one).to(ACC)
    else:
        bound_kk = tl.zeros([1], dtype=ACC)
        bound_kv = tl.zeros([1], dtype=ACC)
    base = tl.zeros([1], dtype=tl.int32) + chunk
    number = tl.zeros([1], dtype=tl.int32) + chunk
    stays = tl.full([1], 1.0, dtype=ACC)
    for _ in range(start, end, C):
        size = sizes + place * SIZES + one
        kept = tl.load(size + 3)
        tl.store(bounds + place * BOUNDS + one, bound_kk)
        tl.store(bounds + place * BOUNDS + 1 + one, bound_kv)
        tl.store(bounds + place * BOUNDS + 2 + one, bound_kk + tl.load(size + 2) + ridge)
        # A preconditioner serves four chunks, later in the sequence and while half of its state is still there.
        fresh = (number < chunk + 8) | (number - base >= 4) | (stays < 0.5)
        base = tl.where(fresh, number, base)
        tl.store(bases + place + one, base)
        stays = tl.where(fresh, 1.0, stays) * kept
        bound_kk = kept * bound_kk + tl.load(size)
        bound_kv = kept * bound_kv + tl.load(size + 1)
        number += 1
        place += H


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "x_group", "which"])
def state_kernel(
    k, x, gates, sizes, bounds, initial, high, low, final, offsets, cu_seqlens,
    T, NT, H, k_group, x_group, which,
    k_batch, k_token, k_head, x_batch, x_token, x_head, s_batch, s_head, s_key, s_value,
    K: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """States [chunks,H,BK,W] entering the chunks over their bounds, as high + low, zero in the padding; W >= D."""
    tiles: tl.constexpr = W // BD
    line = tl.program_id(0) // tiles
    head = line % H
    column = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = key < K
    inside = column < D
    in_state = in_key[:, None] & inside[None, :]
    if INITIAL:
        initial += tl.cast(line // H, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head
        S = tl.load(initial + key[:, None] * s_key + column[None, :] * s_value, mask=in_state, other=0.0).to(ACC)
    else:
        S = tl.zeros([BK, BD], dtype=ACC)
    token = tl.cast(start, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    k += batch * k_batch + token * k_token + tl.cast(head // k_group, tl.int64) * k_head
    x += batch * x_batch + token * x_token + tl.cast(head // x_group, tl.int64) * x_head
    for first in range(start, end, C):
        real = row < end - first
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=real[:, None] & in_key[None, :], other=0.0)
        lines = tl.load(x + row[:, None] * x_token + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        bound = tl.load(bounds + place * BOUNDS + which)
        scaled = S * tl.where(bound > TINY, 1.0 / tl.maximum(bound, TINY), 0.0)
        at = (place * BK + key[:, None]) * W + column[None, :]
        half = scaled.to(keys.dtype)
        tl.store(high + at, half)
        if SPLIT:
            tl.store(low + at, (scaled - half.to(ACC)).to(keys.dtype))
        kept = tl.load(sizes + place * SIZES + 3)
        written = tl.load(gates + place * GATES * C + 4 * C + row)[:, None] * lines.to(ACC)
        if SPLIT:
            peak = tl.maximum(tl.max(tl.max(tl.abs(written), axis=1), axis=0), TINY)
            written = written * (1.0 / peak)
            half = written.to(keys.dtype)
            fresh = dot(tl.trans(keys), half, PRECISION, ACC)
            fresh += dot(tl.trans(keys), (written - half.to(ACC)).to(keys.dtype), PRECISION, ACC)
            S = kept * S + peak * fresh
        else:
            S = kept * S + dot(tl.trans(keys), written, PRECISION, ACC)
        place += H
        k += C * k_token
        x += C * x_token
    if FINAL:
        tl.store(final + (tl.cast(line, tl.int64) * K + key[:, None]) * D + column[None, :], S, mask=in_state)


@triton.jit
def sweep(A, BK: tl.constexpr):
    """Inverse of a symmetric positive matrix [BK,BK] in registers, by sweeping all its pivots in place."""
    r = tl.arange(0, BK)[:, None]
    c = tl.arange(0, BK)[None, :]
    index = tl.arange(0, BK)
    for i in range(0, BK):
        column = tl.sum(tl.where(c == i, A, 0.0), axis=1)
        pivot = tl.maximum(tl.sum(tl.where(index == i, column, 0.0), axis=0), 1e-12)
        # The pivot less one turns the sweep of row and column i into the same rank-one update as all else.
        column = tl.where(index == i, pivot - 1.0, column)
        A -= column[:, None] * (column * (1.0 / pivot))[None, :]
    return tl.where(r == c, 2.0, 0.0) - A


@triton.jit(do_not_specialize=["H", "T"])
def invert_kernel(
    high, low, ridge, bounds, bases, M, T, H,
    K: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """M = (Hkk + diag(ridge))^-1 over its largest entry, at the chunks that others take theirs from."""
    line = tl.program_id(0)
    place = tl.cast(line, tl.int64)
    head = line % H
    if tl.load(bases + place) != line // H:
        return
    r = tl.arange(0, BK)[:, None]
    c = tl.arange(0, BK)[None, :]
    inside = (r < K) & (c < K)
    at = place * BK * BK + r * BK + c
    A = tl.load(high + at).to(ACC)
    if SPLIT:
        A += tl.load(low + at).to(ACC)
    bound = tl.load(bounds + place * BOUNDS)
    whole = tl.load(bounds + place * BOUNDS + 2)
    # Padding gets a diagonal of 1 here and zeros in M.
    diagonal = tl.load(ridge + head * K + r, mask=r < K, other=0.0).to(ACC) / whole + tl.where(r < K, 0.0, 1.0)
    A = sweep(A * (bound / whole) + tl.where(r == c, diagonal, 0.0), BK)
    largest = tl.max(tl.max(tl.where((r == c) & inside, A, 0.0), axis=1), axis=0)
    A = tl.where(inside, A * (1.0 / tl.maximum(largest, TINY)), 0.0)
    tl.store(M + at, A.to(M.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "v_group", "max_iter", "scale", "tol"])
def solve_kernel(
    q, k, v, do, add_to, ridge, gates, bounds, bases, high, low, value_high, value_low, M, o, solution, residual,
    table, cu_seqlens,
    T, NT, H, q_group, k_group, v_group, max_iter, scale, tol,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    a_batch, a_token, a_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr,
    BACKWARD: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = C // BT
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if part * BT >= count:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    row = tl.arange(0, C)
    token = part * BT + tl.arange(0, BT)
    key = tl.arange(0, BK)
    in_key = key < K
    real = row < count
    shown = token < count
    at = (batch * T + first + token) * H + head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    tile_k = real[:, None] & in_key[None, :]
    keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
    gates += place * GATES * C
    g = tl.load(gates + row)
    rest = tl.load(gates + C + row)
    write = tl.load(gates + 2 * C + row)
    reach = tl.load(gates + 3 * C + token)
    between = (tl.load(gates + token)[None, :] - g[:, None]) + (tl.load(gates + C + token)[None, :] - rest[:, None])
    before = row[:, None] <= token[None, :]
    # Index order [s,t], as everywhere below: rows are keys or dims, columns the tokens whose systems are solved.
    weights = tl.exp2(tl.where(before, between, float("-inf"))) * write[:, None]
    whole = tl.load(bounds + place * BOUNDS + 2)
    bound_kv = tl.load(bounds + place * BOUNDS + 1)
    weights = weights * (1.0 / whole)
    stay = reach * (tl.load(bounds + place * BOUNDS) / whole)
    diagonal = (tl.load(ridge + head * K + key, mask=in_key, other=1.0).to(ACC) / whole)[:, None]
    square = key[:, None] * BK + key[None, :]
    high += place * BK * BK + square
    low += place * BK * BK + square
    M += (tl.cast(tl.load(bases + place), tl.int64) * H + head) * BK * BK + square
    value_high += place * BK * W
    value_low += place * BK * W

    if BACKWARD:
        # A power of two, so that scaling does not round.
        total = tl.zeros([BT], dtype=ACC)
        do += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            tile = (value < V)[:, None] & shown[None, :]
            slope = tl.load(do + token[None, :] * o_token + value[:, None], mask=tile, other=0.0).to(ACC)
            total = tl.maximum(total, tl.max(tl.abs(slope), axis=0))
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(total, TINY))))
        rhs = tl.zeros([BK, BT], dtype=ACC)
        wide = tl.zeros([C, BT], dtype=ACC)
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            in_value = value < V
            tile = in_value[:, None] & shown[None, :]
            slope = tl.load(do + token[None, :] * o_token + value[:, None], mask=tile, other=0.0).to(ACC)
            half = (slope * (1.0 / power)[None, :]).to(keys.dtype)
            lines = tl.load(
                v + row[:, None] * v_token + value[None, :], mask=real[:, None] & in_value[None, :], other=0.0
            )
            wide += dot(lines, half, PRECISION, ACC)
            corner = key[:, None] * W + value[None, :]
            rhs += dot(tl.load(value_high + corner), half, PRECISION, ACC)
            if SPLIT:
                rhs += dot(tl.load(value_low + corner), half, PRECISION, ACC)
        rhs = rhs * (reach * bound_kv)[None, :]
        wide = wide * weights
        peak = tl.maximum(tl.max(tl.abs(wide), axis=0), TINY)
        wide = wide * (1.0 / peak)[None, :]
        rounded = wide.to(keys.dtype)
        own = dot(tl.trans(keys), rounded, PRECISION, ACC)
        if SPLIT:
            own += dot(tl.trans(keys), (wide - rounded.to(ACC)).to(keys.dtype), PRECISION, ACC)
        rhs = (rhs + own * (peak * whole)[None, :]) * (scale * power)[None, :]
    else:
        q += batch * q_batch + first * q_token + tl.cast(head // q_group, tl.int64) * q_head
        rhs = tl.load(q + token[None, :] * q_token + key[:, None], mask=in_key[:, None] & shown[None, :], other=0.0)
        rhs = rhs.to(ACC)

    size = tl.maximum(tl.sqrt(tl.sum(rhs * rhs, axis=0)), TINY)
    left = rhs * (1.0 / size)[None, :]
    x = tl.zeros([BK, BT], dtype=ACC)
    direction = tl.zeros([BK, BT], dtype=keys.dtype)
    Ad = tl.zeros([BK, BT], dtype=ACC)
    curve = tl.zeros([BT], dtype=ACC)
    norm = tl.sqrt(tl.sum(left * left, axis=0))
    i = tl.cast(0, tl.int32)
    while (i < max_iter) & (tl.max(norm, axis=0) > tol):
        # Columns that are done while others go on stay small: their squares underflow long before they do.
        unit = (left * (1.0 / tl.maximum(norm, SMALL))[None, :]).to(keys.dtype)
        z = dot(tl.load(M), unit, PRECISION, ACC)
        turn = tl.where(curve > 0, tl.sum(z * Ad, axis=0) / tl.where(curve > 0, curve, 1.0), 0.0)
        z = z - turn[None, :] * direction.to(ACC)
        z = z * (1.0 / tl.maximum(tl.sqrt(tl.sum(z * z, axis=0)), SMALL))[None, :]
        direction = z.to(keys.dtype)
        Ad = dot(tl.load(high), direction, PRECISION, ACC)
        if SPLIT:
            Ad += dot(tl.load(low), direction, PRECISION, ACC)
        inner = dot(keys, direction, PRECISION, ACC) * weights
        half = inner.to(keys.dtype)
        Ad = Ad * stay[None, :] + diagonal * direction.to(ACC) + dot(tl.trans(keys), half, PRECISION, ACC)
        if SPLIT:
            Ad += dot(tl.trans(keys), (inner - half.to(ACC)).to(keys.dtype), PRECISION, ACC)
        d = direction.to(ACC)
        curve = tl.sum(d * Ad, axis=0)
        step = tl.where(curve > 0, tl.sum(d * left, axis=0) / tl.where(curve > 0, curve, 1.0), 0.0)
        x += step[None, :] * d
        left -= step[None, :] * Ad
        norm = tl.sqrt(tl.sum(left * left, axis=0))
        i += 1
    tl.store(residual + at, norm, mask=shown)
    found = (size / whole)[None, :] * x
    tl.store(solution + at[None, :] * K + key[:, None], found, mask=in_key[:, None] & shown[None, :])
    if not BACKWARD:
        norm = tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), SMALL)
        x = x * (1.0 / norm)[None, :]
        half = x.to(keys.dtype)
        inner = dot(keys, half, PRECISION, ACC)
        if SPLIT:
            other = (x - half.to(ACC)).to(keys.dtype)
            inner += dot(keys, other, PRECISION, ACC)
        inner = inner * weights
        inner_half = inner.to(keys.dtype)
        factor = scale * norm * (size / whole)
        if ADD:
            add_to += batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            in_value = value < V
            tile_v = real[:, None] & in_value[None, :]
            corner = key[:, None] * W + value[None, :]
            entering = tl.trans(tl.load(value_high + corner))
            out = dot(entering, half, PRECISION, ACC)
            if SPLIT:
                out += dot(entering, other, PRECISION, ACC)
                out += dot(tl.trans(tl.load(value_low + corner)), half, PRECISION, ACC)
            lines = tl.trans(tl.load(v + row[:, None] * v_token + value[None, :], mask=tile_v, other=0.0))
            own = dot(lines, inner_half, PRECISION, ACC)
            if SPLIT:
                own += dot(lines, (inner - inner_half.to(ACC)).to(keys.dtype), PRECISION, ACC)
            out = (out * (reach * bound_kv)[None, :] + own * whole) * factor[None, :]
            tile = in_value[:, None] & shown[None, :]
            if ADD:
                out += tl.load(add_to + token[None, :] * a_token + value[:, None], mask=tile, other=0.0).to(ACC)
            tl.store(o + at[None, :] * V + value[:, None], out.to(o.dtype.element_ty), mask=tile)


# K rounded up to a power of two -> (tile of columns of the states, warps, stages), warps of the inverse,
# (columns, tile of values forwards and backwards, warps) of the solve, also by (K, V)
STATE = {32: (32, 4, 1), 64: (64, 4, 1), 128: (64, 4, 1)}
INVERT = {32: 4, 64: 4, 128: 8}
SOLVE = {32: (32, 32, 32, 4), 64: (32, 64, 64, 4), 128: (32, 32, 64, 8), (128, 64): (16, 32, 64, 8)}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the operands of all products for inputs of `dtype`."""
    return torch.float16 if dtype in (torch.float16, torch.bfloat16) else dtype


def value_width(dim: int, tile: int) -> int:
    """Columns that a state keeps for values of `dim` dims: whole tiles."""
    return max(16, triton.next_power_of_2(dim)) if dim <= tile else triton.cdiv(dim, tile) * tile


def solve_launch(padded: int, value_dim: int) -> tuple[int, int, int, int]:
    """Entry of `SOLVE` for keys of `padded` dims."""
    return SOLVE.get((padded, max(16, triton.next_power_of_2(value_dim))), SOLVE[padded])


def serves(k: Tensor) -> bool:
    """Whether these kernels solve for keys like `k`: float32 products do not fit their registers on a GPU."""
    return k.shape[-1] <= MAX_KEY_DIM and (INTERPRETED or work_dtype(k.dtype) == torch.float16)


class Prepared:
    """States, bounds and preconditioners of all chunks of one call, and keys and values as the products take them.

    They are built again for the backward pass: at 128 dims they take 2.5 KB per token and head in 16 bits.
    """

    def __init__(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
        Hkk: Tensor | None, cu_seqlens: Tensor | None, final: bool, warps: int | None,
    ):  # fmt: skip
        work = work_dtype(k.dtype)
        self.k, self.v = rows(k.to(work)), rows(v.to(work))
        k, v = self.k, self.v
        batch, tokens, heads = gain.shape
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        self.chunks = chunks = Chunks(batch, tokens, cu_seqlens)
        self.ridge = ridge.contiguous()
        self.padded = padded = max(32, triton.next_power_of_2(key_dim))
        self.split = work == torch.float16
        wide = torch.float64 if work == torch.float64 else torch.float32
        self.shared = {"C": CHUNK, "VARLEN": chunks.packed, "ACC": accumulator(work)}
        size = chunks.tokens, chunks.per_row, heads
        groups = heads // k.shape[2], heads // v.shape[2]
        decay = gain if log_decay is None else log_decay
        new = gain.new_empty
        self.gates = new(chunks.count, heads, GATES.value, CHUNK, dtype=wide)
        sizes = new(chunks.count, heads, SIZES.value, dtype=wide)
        sizes_kernel[(chunks.count * heads,)](
            k, v, decay, gain, self.gates, sizes, chunks.table, chunks.cu_seqlens, *size, *groups,
            *strides(k), *strides(v), *strides(decay), *strides(gain),
            K=key_dim, V=value_dim, BK=padded, BV=max(16, triton.next_power_of_2(value_dim)),
            DECAY=log_decay is not None, num_warps=4, num_stages=1, **self.shared,
        )  # fmt: skip
        self.bounds = new(chunks.count, heads, BOUNDS.value, dtype=wide)
        self.bases = new(chunks.count, heads, dtype=torch.int32)
        starts = [None if H is None else H.abs().amax((-2, -1)).to(wide).contiguous() for H in (Hkk, Hkv)]
        plan_kernel[(chunks.sequences * heads,)](
            sizes, *starts, self.ridge.abs().amax(-1), self.bounds, self.bases, chunks.offsets, chunks.cu_seqlens,
            *size, INITIAL=Hkk is not None, num_warps=1, num_stages=1, **self.shared,
        )  # fmt: skip
        tile, state_warps, stages = STATE[padded]
        self.widths = padded, value_width(value_dim, solve_launch(padded, value_dim)[2])
        self.states, self.final = [], []
        for which, (x, initial) in enumerate(((k, Hkk), (v, Hkv))):
            dim, wide_dim = x.shape[-1], self.widths[which]
            high = k.new_empty(chunks.count, heads, padded, wide_dim)
            low = torch.empty_like(high) if self.split else high
            last = new((chunks.sequences, heads, key_dim, dim) if final else 0, dtype=wide)
            width = min(tile, wide_dim)
            state_kernel[(chunks.sequences * heads * (wide_dim // width),)](
                k, x, self.gates, sizes, self.bounds, initial, high, low, last, chunks.offsets, chunks.cu_seqlens,
                *size, groups[0], heads // x.shape[2], which, *strides(k), *strides(x),
                *((0, 0, 0, 0) if initial is None else initial.stride()),
                K=key_dim, D=dim, W=wide_dim, BK=padded, BD=width, SPLIT=self.split,
                INITIAL=initial is not None, FINAL=final, PRECISION=precision(work),
                num_warps=launch_warps(work, warps or state_warps), num_stages=stages,
                **self.shared,
            )  # fmt: skip
            self.states += [high, low]
            self.final.append(last)
        self.M = k.new_empty(chunks.count, heads, padded, padded)
        if chunks.packed:
            self.bases = torch.where(chunks.table[:, :1] < 0, -1, self.bases)
        invert_kernel[(chunks.count * heads,)](
            *self.states[:2], self.ridge, self.bounds, self.bases, self.M, tokens, heads,
            K=key_dim, BK=padded, SPLIT=self.split, ACC=accumulator(work), num_warps=INVERT[padded], num_stages=1,
        )  # fmt: skip
        self.groups, self.size, self.dims, self.warps = groups, size, (key_dim, value_dim), warps

    def solve(
        self, q: Tensor | None, do: Tensor | None, add_to: Tensor | None, scale: float, max_iter: int, tol: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(o or empty, solution [B,T,H,K] and residual [B,T,H] in the accumulator's type): of q, or of dO's dq*."""
        work, (key_dim, value_dim), chunks = self.k.dtype, self.dims, self.chunks
        heads, tokens = self.size[2], self.size[0]
        batch = self.k.shape[0]
        wide = torch.float64 if work == torch.float64 else torch.float32
        new = self.gates.new_empty
        o = new(0 if q is None else (batch, tokens, heads, value_dim), dtype=dtype)
        solution, residual = new(batch, tokens, heads, key_dim, dtype=wide), new(batch, tokens, heads, dtype=wide)
        columns, *tiles, warps = solve_launch(self.padded, value_dim)
        tile = tiles[q is None]
        none = (0, 0, 0)
        solve_kernel[(chunks.count * heads * (CHUNK // columns),)](
            q, self.k, self.v, do, add_to, self.ridge, self.gates, self.bounds, self.bases, *self.states, self.M,
            o, solution, residual, chunks.table, chunks.cu_seqlens,
            *self.size, 1 if q is None else heads // q.shape[2], *self.groups, max_iter, scale, tol,
            *(none if q is None else strides(q)), *strides(self.k), *strides(self.v),
            *(none if do is None else strides(do)), *(none if add_to is None else strides(add_to)),
            K=key_dim, V=value_dim, W=self.widths[1], BK=self.padded, BV=min(tile, self.widths[1]),
            BT=columns, BACKWARD=q is None, ADD=add_to is not None, SPLIT=self.split, PRECISION=precision(work),
            num_warps=launch_warps(work, self.warps or warps), num_stages=1, **self.shared,
        )  # fmt: skip
        return o, solution, residual


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, max_iter: int, tol: float,
    final: bool, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final Hkv and Hkk or empty, residual, solution). `warps` replaces those of the launch tables."""
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, final, warps)
    add_to = None if add_to is None else rows(add_to)
    o, solution, residual = prepared.solve(rows(q), None, add_to, scale, max_iter, tol, q.dtype)
    return o, prepared.final[1], prepared.final[0], residual, solution


def backward(
    k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, solution: Tensor, do: Tensor, d_Hkv: Tensor | None,
    d_Hkk: Tensor | None, scale: float, max_iter: int, tol: float, d_initial: bool, warps: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y = dq per recurrence head, dk, dv, gradients [2,B,T,H] of log_decay and gain, dridge, d initial Hkv and Hkk).

    With y and q* the rest is the gradient of linear attention with query q*, values [v ; k] and cotangents [dO ; -y];
    both weigh keys against each other, so float32 is what their products are worth.
    """
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, False, warps)
    _, y, _ = prepared.solve(None, rows(do), None, scale, max_iter, tol, k.dtype)
    chunks, wide, value_dim = prepared.chunks, solution.dtype, v.shape[-1]
    del prepared
    keys, values = k.to(wide), v.to(wide)
    if k.shape[2] == v.shape[2]:
        both = torch.cat([values, keys], -1)
    else:
        both = torch.cat([expand_heads(x, gain.shape[2], 2) for x in (values, keys)], -1)
    start = None if Hkk is None else torch.cat([Hkv, Hkk], -1)
    d_final = None
    if d_Hkv is not None or d_Hkk is not None:
        state = chunks.sequences, gain.shape[2], k.shape[-1]
        ends = [
            y.new_zeros(*state, dim) if d is None else d.to(wide)
            for d, dim in ((d_Hkv, value_dim), (d_Hkk, k.shape[-1]))
        ]
        d_final = torch.cat(ends, -1)
    slopes = torch.cat([scale * do.to(wide), -y], -1)
    scalars, N, A = prep.prepare(solution, keys, log_decay, None, gain, 1.0, chunks, warps)
    _, d_key, d_both, d_scalars, first = delta.backward(
        solution, keys, both, scalars, N, A, start, cu_seqlens, slopes, d_final, 1.0, d_initial, False, warps
    )
    dv, dk = d_both.split([value_dim, k.shape[-1]], -1)
    dk = d_key + sum_group(dk, k.shape[2])
    d_ridge = -(y * solution).sum((0, 1))
    first_kv = first_kk = first
    if d_initial:
        first_kv, first_kk = first.split([value_dim, k.shape[-1]], -1)
        first_kv, first_kk = first_kv.contiguous(), (first_kk + first_kk.mT) / 2
    else:
        first_kk = torch.empty_like(first)
    dv = sum_group(dv, v.shape[2]).to(v.dtype).contiguous()
    return y, dk.to(k.dtype), dv, d_scalars[[0, 2]], d_ridge, first_kv, first_kk
