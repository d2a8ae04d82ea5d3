"""X1 to X3: MesaNet's states and preconditioners, its systems and its read-out.

In a chunk that is entered with states H = Hkk and G = Hkv, a row p [K] of token t meets its own matrix

    A p = ((p K^T) o Gam o gain_s) K + e_t p H + ridge o p

X2 solves A x = q by conjugate gradients, preconditioned where that pays by the inverse of H + diag(ridge) at the start
of this or an earlier chunk; X3 reads o = scale (((x K^T) o Gam o gain_s) V + e_t x G). Backwards X3 with K and V
exchanged gives dq* = scale (((dO V^T) o Gam o gain_s) K + e_t dO G^T), X2 solves A y = dq*, and the rest is the
gradient of linear attention (`backward`).

16-bit inputs are computed with float16 products. Keys and values enter them unrounded, but for bfloat16's smallest
numbers; states are scaled by a bound of their entries and split in two float16 numbers. A round of conjugate gradients
uses the first of them, with directions that are rounded first and then used as they are everywhere, an exact line
search and conjugacy to the last direction. Then the residual of what was found so far is computed with both, and the
next round solves for that: no accuracy is lost to the rounding. float32 inputs use float32 products, float64 ones
(interpreter) float64.

Tokens are the rows of all tiles here, 32 at most: that is too few for a WGMMA, so that products may take the left
operand from registers (see `common`).
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

MAX_KEY_DIM = 128  # a state of 256 dims, as two float16 numbers, does not fit the shared memory of a multiprocessor
# Rows of per-chunk scalars: g / log 2 in two parts, gain, exp(g), exp(g_last - g) gain.
GATES: tl.constexpr = tl.constexpr(5)
# Per-chunk sizes: bounds of the entries of the chunk's own part of Hkk and of Hkv, the largest gain |k|^2, exp(g_last).
SIZES: tl.constexpr = tl.constexpr(4)
# Per-chunk bounds: of the entries of the entering Hkk and Hkv, and of all matrices of the chunk.
BOUNDS: tl.constexpr = tl.constexpr(3)
TINY: tl.constexpr = tl.constexpr(1e-30)
SMALL: tl.constexpr = tl.constexpr(1e-12)
DEPTH: tl.constexpr = tl.constexpr(0.001)  # of a round of conjugate gradients with a rounded matrix
# Least ratio of the mean eigenvalue of Hkk and the ridge, and least exp(g_last), of a chunk that is preconditioned.
WORTH: tl.constexpr = tl.constexpr(2.0)
KEPT: tl.constexpr = tl.constexpr(0.3)


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
    sizes, start_kk, start_kv, start_trace, largest_ridge, total_ridge, bounds, bases, offsets, cu_seqlens,
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
        trace = tl.load(start_trace + line + one).to(ACC)
    else:
        bound_kk = tl.zeros([1], dtype=ACC)
        bound_kv = tl.zeros([1], dtype=ACC)
        trace = tl.zeros([1], dtype=ACC)
    total = tl.load(total_ridge + head + one).to(ACC)
    base = tl.full([1], -1, dtype=tl.int32)
    number = tl.zeros([1], dtype=tl.int32) + chunk
    stays = tl.full([1], 1.0, dtype=ACC)
    for _ in range(start, end, C):
        size = sizes + place * SIZES + one
        kept = tl.load(size + 3)
        tl.store(bounds + place * BOUNDS + one, bound_kk)
        tl.store(bounds + place * BOUNDS + 1 + one, bound_kv)
        tl.store(bounds + place * BOUNDS + 2 + one, bound_kk + tl.load(size + 2) + ridge)
        # The systems of a large ridge, or of a state that the chunk forgets, are solved as fast without.
        worth = (trace > WORTH * total) & (kept > KEPT)
        # A preconditioner serves four chunks, later in the sequence and while half of its state is still there.
        fresh = worth & ((base < 0) | (number < chunk + 8) | (number - base >= 4) | (stays < 0.5))
        base = tl.where(fresh, number, base)
        tl.store(bases + place + one, tl.where(worth, base, -1))
        stays = tl.where(fresh, 1.0, stays) * kept
        bound_kk = kept * bound_kk + tl.load(size)
        trace = kept * trace + tl.load(size)
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
    """States [chunks,H,W,BK], transposed, entering the chunks over their bounds, as high + low, zero in the padding."""
    tiles: tl.constexpr = W // BD
    line = tl.program_id(0) // tiles
    head = line % H
    column = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = key < K
    inside = column < D
    in_state = inside[:, None] & in_key[None, :]
    work = high.dtype.element_ty
    if INITIAL:
        initial += tl.cast(line // H, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head
        S = tl.load(initial + key[None, :] * s_key + column[:, None] * s_value, mask=in_state, other=0.0).to(ACC)
    else:
        S = tl.zeros([BD, BK], dtype=ACC)
    token = tl.cast(start, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    k += batch * k_batch + token * k_token + tl.cast(head // k_group, tl.int64) * k_head
    x += batch * x_batch + token * x_token + tl.cast(head // x_group, tl.int64) * x_head
    for first in range(start, end, C):
        real = row < end - first
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=real[:, None] & in_key[None, :], other=0.0)
        keys = keys.to(work)
        lines = tl.load(x + row[None, :] * x_token + column[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        late = tl.load(gates + place * GATES * C + 4 * C + row)
        bound = tl.load(bounds + place * BOUNDS + which)
        kept = tl.load(sizes + place * SIZES + 3)
        scaled = S * tl.where(bound > TINY, 1.0 / tl.maximum(bound, TINY), 0.0)
        at = (place * W + column[:, None]) * BK + key[None, :]
        half = scaled.to(work)
        tl.store(high + at, half)
        if SPLIT:
            tl.store(low + at, (scaled - half.to(ACC)).to(work))
            # The largest weight becomes 1, so that no product is out of float16's range.
            peak = tl.maximum(tl.max(tl.abs(late), axis=0), TINY)
            written = lines.to(ACC) * (late * (1.0 / peak))[None, :]
            half = written.to(work)
            fresh = dot(half, keys, PRECISION, ACC)
            fresh += dot((written - half.to(ACC)).to(work), keys, PRECISION, ACC)
            S = kept * S + peak * fresh
        else:
            S = kept * S + dot(late[None, :] * lines.to(ACC), keys, PRECISION, ACC)
        place += H
        k += C * k_token
        x += C * x_token
    if FINAL:
        tl.store(final + (tl.cast(line, tl.int64) * K + key[None, :]) * D + column[:, None], S, mask=in_state)


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


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "max_iter", "tol"])
def solve_kernel(
    q, k, ridge, gates, bounds, bases, high, low, M, solution, residual, table, cu_seqlens,
    T, NT, H, q_group, k_group, max_iter, tol,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, PRE: tl.constexpr,
    SPLIT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Solutions [B,T,H,K] of A x = q and their relative residuals [B,T,H], a row of each tile per token."""
    parts: tl.constexpr = C // BT
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    place = tl.cast(line, tl.int64)
    base = tl.load(bases + place)
    if (part * BT >= count) | ((base >= 0) != PRE):
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    token = part * BT + tl.arange(0, BT)
    key = tl.arange(0, BK)
    in_key = key < K
    shown = token < count
    work = high.dtype.element_ty
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    tile = (row < count)[:, None] & in_key[None, :]
    keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile, other=0.0).to(work)
    gates += place * GATES * C
    whole = tl.load(bounds + place * BOUNDS + 2)
    weights = reaching(gates, token, C) * (1.0 / whole)
    stay = tl.load(gates + 3 * C + token) * (tl.load(bounds + place * BOUNDS) / whole)
    diagonal = tl.load(ridge + head * K + key, mask=in_key, other=1.0).to(ACC) / whole
    square = key[:, None] * BK + key[None, :]
    high += place * BK * BK
    low += place * BK * BK
    upper = tl.load(high + square)
    if SPLIT:
        # What rounding took off the diagonal, the larger part of what it took.
        lost = tl.load(low + key * (BK + 1)).to(ACC)
    M += (tl.cast(tl.maximum(base, 0), tl.int64) * H + head) * BK * BK + square

    q += batch * q_batch + first * q_token + tl.cast(head // q_group, tl.int64) * q_head
    q += token[:, None] * q_token + key[None, :]
    tile = shown[:, None] & in_key[None, :]
    left = tl.load(q, mask=tile, other=0.0).to(ACC)
    size = tl.maximum(tl.sqrt(tl.sum(left * left, axis=1)), TINY)
    left = left * (1.0 / size)[:, None]
    norm = tl.full([BT], 1.0, dtype=ACC)
    x = tl.zeros([BT, BK], dtype=ACC)
    worst = tl.cast(1.0, ACC)
    before = tl.cast(4.0, ACC)
    i = tl.cast(0, tl.int32)
    # A round solves for what is left with the rounded matrix, then meets the whole matrix: float16 is refined so.
    while (i < max_iter) & (worst > tol) & (worst < 0.5 * before):
        goal = tl.maximum(0.5 * tol, DEPTH * norm) if SPLIT else 0.5 * tol + 0.0 * norm
        if PRE:
            pre = tl.load(M)
        direction = tl.zeros([BT, BK], dtype=work)
        Ad = tl.zeros([BT, BK], dtype=ACC)
        curve = tl.zeros([BT], dtype=ACC)
        while (i < max_iter) & (tl.max(norm - goal, axis=0) > 0):
            # Rows that are done while others go on stay small: their squares underflow long before they do.
            z = left * (1.0 / tl.maximum(norm, SMALL))[:, None]
            if PRE:
                z = dot(z.to(work), pre, PRECISION, ACC)
            turn = tl.where(curve > 0, tl.sum(z * Ad, axis=1) / tl.where(curve > 0, curve, 1.0), 0.0)
            z = z - turn[:, None] * direction.to(ACC)
            z = z * (1.0 / tl.maximum(tl.sqrt(tl.sum(z * z, axis=1)), SMALL))[:, None]
            direction = z.to(work)
            d = direction.to(ACC)
            inner = dot(direction, tl.trans(keys), PRECISION, ACC) * weights
            Ad = dot(direction, upper, PRECISION, ACC)
            if SPLIT:
                Ad += lost[None, :] * d
            Ad = Ad * stay[:, None] + diagonal[None, :] * d
            Ad += dot(inner.to(work), keys, PRECISION, ACC)
            curve = tl.sum(d * Ad, axis=1)
            step = tl.where(curve > 0, tl.sum(d * left, axis=1) / tl.where(curve > 0, curve, 1.0), 0.0)
            x += step[:, None] * d
            left -= step[:, None] * Ad
            norm = tl.sqrt(tl.sum(left * left, axis=1))
            i += 1
        length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), SMALL)
        d = x * (1.0 / length)[:, None]
        inner = tl.zeros([BT, C], dtype=ACC)
        Ad = tl.zeros([BT, BK], dtype=ACC)
        digits = d
        # Loops, not statements: with both parts in one block their operands would be in registers at the same time.
        for _ in range(0, 2 if SPLIT else 1):
            half = digits.to(work)
            Ad += dot(half, upper, PRECISION, ACC)
            inner += dot(half, tl.trans(keys), PRECISION, ACC)
            digits -= half.to(ACC)
        if SPLIT:
            Ad += dot(d.to(work), tl.load(low + square), PRECISION, ACC)
        # Negative, and added last: what a product is added to has its layout, and so has the norm.
        digits = inner * -weights
        left = tl.load(q, mask=tile, other=0.0).to(ACC) * (1.0 / size)[:, None] * (1.0 / length)[:, None]
        left = left - Ad * stay[:, None] - diagonal[None, :] * d
        for _ in range(0, 2 if SPLIT else 1):
            half = digits.to(work)
            left += dot(half, keys, PRECISION, ACC)
            digits -= half.to(ACC)
        left = left * length[:, None]
        norm = tl.sqrt(tl.sum(left * left, axis=1))
        before = worst
        worst = tl.max(norm, axis=0)
    at = (batch * T + first + token) * H + head
    tl.store(residual + at, norm, mask=shown)
    tl.store(solution + at[:, None] * K + key[None, :], (size / whole)[:, None] * x, mask=tile)


@triton.jit
def reaching(gates, token, C: tl.constexpr):
    """Gam(t,s) gain_s of `token` rows t and all columns s of a chunk."""
    row = tl.arange(0, C)
    between = tl.load(gates + token)[:, None] - tl.load(gates + row)[None, :]
    between += tl.load(gates + C + token)[:, None] - tl.load(gates + C + row)[None, :]
    upto = row[None, :] <= token[:, None]
    return tl.exp2(tl.where(upto, between, float("-inf"))) * tl.load(gates + 2 * C + row)[None, :]


@triton.jit(do_not_specialize=["T", "NT", "H", "x_group", "k_group", "v_group", "s_key", "s_value", "scale"])
def read_kernel(
    x, k, v, add_to, gates, bounds, high, low, o, table, cu_seqlens,
    T, NT, H, x_group, k_group, v_group, s_key, s_value, scale,
    x_batch, x_token, x_head, k_batch, k_token, k_head, v_batch, v_token, v_head, a_batch, a_token, a_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """o [B,T,H,V] = scale (((x k^T) o Gam o gain_s) v + e x S) + add_to, S [chunks,H,BK,*] by its strides."""
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
    work = high.dtype.element_ty
    x += batch * x_batch + first * x_token + tl.cast(head // x_group, tl.int64) * x_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    tile = shown[:, None] & in_key[None, :]
    rows = tl.load(x + token[:, None] * x_token + key[None, :], mask=tile, other=0.0).to(ACC)
    length = tl.maximum(tl.sqrt(tl.sum(rows * rows, axis=1)), TINY)
    rows = rows * (1.0 / length)[:, None]
    half = rows.to(work)
    tile = real[:, None] & in_key[None, :]
    keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile, other=0.0).to(work)
    gates += place * GATES * C
    # Over the bound of both parts, so that neither leaves float16's range.
    bound = tl.load(bounds + place * BOUNDS + 1)
    reach = tl.load(gates + 3 * C + token) * bound
    inner = dot(half, tl.trans(keys), PRECISION, ACC)
    if SPLIT:
        rest = (rows - half.to(ACC)).to(work)
        inner += dot(rest, tl.trans(keys), PRECISION, ACC)
    inner = inner * reaching(gates, token, C)
    peak = tl.maximum(tl.max(tl.abs(inner), axis=1), TINY)
    inner = inner * (1.0 / peak)[:, None]
    inner_half = inner.to(work)
    high += place * BK * W
    low += place * BK * W
    at = (batch * T + first + token) * H + head
    if ADD:
        add_to += batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        lines = tl.load(
            v + row[:, None] * v_token + value[None, :], mask=real[:, None] & in_value[None, :], other=0.0
        ).to(work)
        corner = key[:, None] * s_key + value[None, :] * s_value
        entering = tl.load(high + corner)
        out = dot(half, entering, PRECISION, ACC)
        own = dot(inner_half, lines, PRECISION, ACC)
        if SPLIT:
            out += dot(rest, entering, PRECISION, ACC)
            out += dot(half, tl.load(low + corner), PRECISION, ACC)
            own += dot((inner - inner_half.to(ACC)).to(work), lines, PRECISION, ACC)
        out = (out * reach[:, None] + own * peak[:, None]) * (scale * length)[:, None]
        stored = shown[:, None] & in_value[None, :]
        if ADD:
            out += tl.load(add_to + token[:, None] * a_token + value[None, :], mask=stored, other=0.0).to(ACC)
        tl.store(o + at[:, None] * V + value[None, :], out.to(o.dtype.element_ty), mask=stored)


# K rounded up to a power of two -> (tile of columns of the states, warps, stages), warps of the inverse,
# (tokens, warps) of the solve
STATE = {32: (32, 4, 3), 64: (32, 4, 3), 128: (32, 4, 3)}
INVERT = {32: 4, 64: 4, 128: 8}
SOLVE = {32: (16, 4), 64: (32, 4), 128: (32, 8)}
# Dims of x, rounded up -> (tokens, tile of columns that are read, warps)
READ = {16: (32, 32, 4), 32: (32, 32, 4), 64: (32, 32, 4), 128: (32, 32, 4), 256: (16, 16, 4)}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the operands of all products for inputs of `dtype`."""
    return torch.float16 if dtype in (torch.float16, torch.bfloat16) else dtype


def serves(k: Tensor) -> bool:
    """Whether these kernels solve for keys like `k`: float32 products do not fit their registers on a GPU."""
    return k.shape[-1] <= MAX_KEY_DIM and (INTERPRETED or work_dtype(k.dtype) == torch.float16)


class Prepared:
    """States, bounds and preconditioners of all chunks of one call.

    They are built again for the backward pass: at 128 dims they take 2 KB per token and head in 16 bits.
    """

    def __init__(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
        Hkk: Tensor | None, cu_seqlens: Tensor | None, final: bool, warps: int | None,
    ):  # fmt: skip
        self.k, self.v = k, v = rows(k), rows(v)
        self.work = work = work_dtype(k.dtype)
        batch, tokens, heads = gain.shape
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        self.chunks = chunks = Chunks(batch, tokens, cu_seqlens)
        self.ridge = ridge.contiguous()
        self.padded = padded = max(32, triton.next_power_of_2(key_dim))
        self.padded_value = max(16, triton.next_power_of_2(value_dim))
        self.split = work == torch.float16
        self.wide = wide = torch.float64 if work == torch.float64 else torch.float32
        self.shared = {"C": CHUNK, "VARLEN": chunks.packed, "ACC": accumulator(work)}
        self.size = size = chunks.tokens, chunks.per_row, heads
        self.groups = groups = heads // k.shape[2], heads // v.shape[2]
        self.warps = warps
        decay = gain if log_decay is None else log_decay
        new = gain.new_empty
        self.gates = new(chunks.count, heads, GATES.value, CHUNK, dtype=wide)
        sizes = new(chunks.count, heads, SIZES.value, dtype=wide)
        sizes_kernel[(chunks.count * heads,)](
            k, v, decay, gain, self.gates, sizes, chunks.table, chunks.cu_seqlens, *size, *groups,
            *strides(k), *strides(v), *strides(decay), *strides(gain),
            K=key_dim, V=value_dim, BK=padded, BV=self.padded_value,
            DECAY=log_decay is not None, num_warps=4, num_stages=1, **self.shared,
        )  # fmt: skip
        self.bounds = new(chunks.count, heads, BOUNDS.value, dtype=wide)
        self.bases = new(chunks.count, heads, dtype=torch.int32)
        starts = [None if H is None else H.abs().amax((-2, -1)).to(wide).contiguous() for H in (Hkk, Hkv)]
        starts.append(None if Hkk is None else Hkk.diagonal(dim1=-2, dim2=-1).sum(-1).to(wide).contiguous())
        size_of_ridge = self.ridge.abs()
        plan_kernel[(chunks.sequences * heads,)](
            sizes, *starts, size_of_ridge.amax(-1), size_of_ridge.sum(-1), self.bounds, self.bases, chunks.offsets,
            chunks.cu_seqlens, *size, INITIAL=Hkk is not None, num_warps=1, num_stages=1, **self.shared,
        )  # fmt: skip
        tile, state_warps, stages = STATE[padded]
        self.states, self.final = [], []
        for which, (x, initial) in enumerate(((k, Hkk), (v, Hkv))):
            dim, wide_dim = x.shape[-1], (padded, self.padded_value)[which]
            high = k.new_empty(chunks.count, heads, wide_dim, padded, dtype=work)
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
        self.M = k.new_empty(chunks.count, heads, padded, padded, dtype=work)
        if chunks.packed:
            self.bases = torch.where(chunks.table[:, :1] < 0, -1, self.bases)
        invert_kernel[(chunks.count * heads,)](
            *self.states[:2], self.ridge, self.bounds, self.bases, self.M, tokens, heads,
            K=key_dim, BK=padded, SPLIT=self.split, ACC=accumulator(work), num_warps=INVERT[padded], num_stages=1,
        )  # fmt: skip

    def solve(self, q: Tensor, max_iter: int, tol: float) -> tuple[Tensor, Tensor]:
        """(x [B,T,H,K] with A x = q, relative residual [B,T,H]), both in the accumulator's type."""
        chunks, heads, key_dim = self.chunks, self.size[2], self.k.shape[-1]
        batch, tokens = q.shape[:2]
        new = self.gates.new_empty
        x, residual = new(batch, tokens, heads, key_dim, dtype=self.wide), new(batch, tokens, heads, dtype=self.wide)
        columns, warps = SOLVE[self.padded]
        for preconditioned in (False, True):
            solve_kernel[(chunks.count * heads * (CHUNK // columns),)](
                q, self.k, self.ridge, self.gates, self.bounds, self.bases, *self.states[:2], self.M,
                x, residual, chunks.table, chunks.cu_seqlens,
                *self.size, heads // q.shape[2], self.groups[0], max_iter, tol, *strides(q), *strides(self.k),
                K=key_dim, BK=self.padded, BT=columns, PRE=preconditioned, SPLIT=self.split,
                PRECISION=precision(self.work), num_warps=launch_warps(self.work, self.warps or warps), num_stages=1,
                **self.shared,
            )  # fmt: skip
        return x, residual

    def read(self, x: Tensor, add_to: Tensor | None, scale: float, dtype: torch.dtype, transposed: bool) -> Tensor:
        """scale Hkv_t^T x_t + add_to, or scale Hkv_t x_t, of rows [B,T,H,*]."""
        chunks, heads = self.chunks, self.size[2]
        keys, values, k_group, v_group = self.k, self.v, *self.groups
        BK, W = self.padded, self.padded_value
        steps = 1, BK
        if transposed:
            keys, values, k_group, v_group, BK, W, steps = values, keys, v_group, k_group, W, BK, (BK, 1)
        o = x.new_empty(*x.shape[:3], values.shape[-1], dtype=dtype)
        columns, tile, warps = READ[BK]
        read_kernel[(chunks.count * heads * (CHUNK // columns),)](
            x, keys, values, add_to, self.gates, self.bounds, *self.states[2:], o, chunks.table, chunks.cu_seqlens,
            *self.size, heads // x.shape[2], k_group, v_group, *steps, scale,
            *strides(x), *strides(keys), *strides(values), *((0, 0, 0) if add_to is None else strides(add_to)),
            K=keys.shape[-1], V=values.shape[-1], W=W, BK=BK, BV=min(tile, W), BT=columns, ADD=add_to is not None,
            SPLIT=self.split, PRECISION=precision(self.work),
            num_warps=launch_warps(self.work, self.warps or warps), num_stages=1, **self.shared,
        )  # fmt: skip
        return o


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, max_iter: int, tol: float,
    final: bool, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final Hkv and Hkk or empty, residual, solution). `warps` replaces those of the launch tables."""
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, final, warps)
    solution, residual = prepared.solve(rows(q), max_iter, tol)
    o = prepared.read(solution, None if add_to is None else rows(add_to), scale, q.dtype, False)
    return o, prepared.final[1], prepared.final[0], residual, solution


def _unit(x: Tensor) -> Tensor:
    """The power of two next above all entries, as a tensor."""
    return x.abs().amax().float().clamp(min=1e-30).log2().ceil().exp2()


def backward(
    k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, solution: Tensor, do: Tensor, d_Hkv: Tensor | None,
    d_Hkk: Tensor | None, scale: float, max_iter: int, tol: float, d_initial: bool, warps: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y = dq per recurrence head, dk, dv, gradients [2,B,T,H] of log_decay and gain, dridge, d initial Hkv and Hkk).

    With y and q* the rest is the gradient of linear attention with query q*, once with values v and cotangent dO, once
    with values k and cotangent -y. That depends on a token's query and cotangent by their product alone, so queries are
    taken at length 1; keys, values, gains and cotangents are scaled below 1: products of float16 numbers lose least so.
    """
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, False, warps)
    y, _ = prepared.solve(prepared.read(rows(do), None, scale, solution.dtype, True), max_iter, tol)
    chunks, work, wide = prepared.chunks, prepared.work, solution.dtype
    del prepared
    length = solution.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    queries = (solution / length).to(work)
    units = _unit(k), _unit(v), _unit(gain)
    keys, values, write = (x / unit for x, unit in zip((k, v, gain), units, strict=True))
    keys, values, write = keys.to(work), values.to(work), write.to(gain.dtype)
    scalars, N, A = prep.prepare(queries, keys, log_decay, None, write, 1.0, chunks, warps)
    parts = []
    pairs = (values, units[1], scale * do.to(wide), Hkv, d_Hkv), (keys, units[0], -y, Hkk, d_Hkk)
    for lines, unit, slopes, start, d_final in pairs:
        size = units[0] * units[2] * unit  # of the state, over that of the scaled problem
        slopes = slopes * length
        largest = slopes.abs().amax()
        if d_final is not None:
            largest = torch.maximum(largest, d_final.abs().amax())
        # A sixteenth leaves room for the sum over many tokens.
        grain = 16 * _unit(largest)
        start = None if start is None else start / size
        d_final = None if d_final is None else d_final.to(wide) / grain
        _, d_key, d_line, d_scalars, first = delta.backward(
            queries, keys, lines, scalars, N, A, start, cu_seqlens, (slopes / grain).to(work), d_final, 1.0, d_initial,
            False, warps,
        )  # fmt: skip
        back = grain * size
        parts.append((
            d_key.to(wide) * (back / units[0]), d_line.to(wide) * (back / unit), d_scalars[0] * back,
            d_scalars[2] * (back / units[2]), first * grain,
        ))  # fmt: skip
    (key_a, dv, decay_a, gain_a, first_kv), (key_b, key_c, decay_b, gain_b, first_kk) = parts
    if d_initial:
        first_kk = (first_kk + first_kk.mT) / 2
    d_ridge = -(y * solution).sum((0, 1))
    d_scalars = torch.stack([decay_a + decay_b, gain_a + gain_b])
    return y, (key_a + key_b + key_c).to(k.dtype), dv.to(v.dtype), d_scalars, d_ridge, first_kv, first_kk
