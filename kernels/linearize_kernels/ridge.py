"""X1 to X3: MesaNet's states and preconditioners, its systems and its read-out.

In a chunk that is entered with states H = Hkk and G = Hkv, a row p [K] of token t meets its own matrix

    A p = ((p K^T) o Gam o gain_s) K + e_t p H + ridge o p

X2 solves A x = q by conjugate gradients, preconditioned where that pays by the inverse of H + diag(ridge) at the start
of this or an earlier chunk; X3 reads o = scale (((x K^T) o Gam o gain_s) V + e_t x G). Backwards X3 with K and V
exchanged gives dq* = scale (((dO V^T) o Gam o gain_s) K + e_t dO G^T), X2 solves A y = dq*, and the rest is the
gradient of linear attention (`backward`).

16-bit inputs are computed with float16 products. Keys and values enter them unrounded, but for bfloat16's smallest
numbers; states are scaled by a bound of their entries and rounded to float16, Hkk for tolerances below `ROUGH` to two
such numbers. A round of conjugate gradients uses the first of them, with directions that are rounded first and then
used as they are everywhere, an exact line search and conjugacy to the last direction. Then the residual of what was
found so far is computed, with both, and the next round solves for that: no accuracy is lost to the rounding but that of
states in one number, by which a residual may differ from the true one: by 2e-4 for independent keys, by 2e-2 for keys
of which all but a tenth is their mean. float32 inputs use float32 products, float64 ones (interpreter) float64.

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
    _INTERPRETED,
    CHUNK,
    INTERPRETED,
    LOG2E,
    Chunks,
    accumulator,
    dot,
    locate_chunk,
    locate_sequence,
    rows,
    strides,
)

# Tolerance from which on Hkk is one float16 number, and so is the solution: their rounding leaves a residual of up to
# about .003.
ROUGH = 4e-3
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
WORTH: tl.constexpr = tl.constexpr(8.0)
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
    sizes, start_kk, start_kv, start_trace, ridge, bounds, bases, offsets, cu_seqlens,
    T, NT, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    _, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    place = tl.cast(chunk, tl.int64) * H + head
    one = tl.arange(0, 1)
    key = tl.arange(0, BK)
    diagonal = tl.abs(tl.load(ridge + head * K + key, mask=key < K, other=0.0).to(ACC))
    largest = tl.max(diagonal, axis=0)
    total = tl.sum(diagonal, axis=0)
    if INITIAL:
        bound_kk = tl.load(start_kk + line + one).to(ACC)
        bound_kv = tl.load(start_kv + line + one).to(ACC)
        trace = tl.load(start_trace + line + one).to(ACC)
    else:
        bound_kk = tl.zeros([1], dtype=ACC)
        bound_kv = tl.zeros([1], dtype=ACC)
        trace = tl.zeros([1], dtype=ACC)
    base = tl.full([1], -1, dtype=tl.int32)
    number = tl.zeros([1], dtype=tl.int32) + chunk
    stays = tl.full([1], 1.0, dtype=ACC)
    for _ in range(start, end, C):
        size = sizes + place * SIZES + one
        kept = tl.load(size + 3)
        tl.store(bounds + place * BOUNDS + one, bound_kk)
        tl.store(bounds + place * BOUNDS + 1 + one, bound_kv)
        tl.store(bounds + place * BOUNDS + 2 + one, bound_kk + tl.load(size + 2) + largest)
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


@triton.jit
def written(S, lines, late, keys, kept, SPLIT: tl.constexpr, ACC: tl.constexpr):
    """The transposed state [BD,BK] after a chunk of keys [C,BK] and lines [BD,C]."""
    # The largest weight becomes 1, so that no product is out of float16's range.
    peak = tl.maximum(tl.max(tl.abs(late), axis=0), TINY)
    lines = lines.to(ACC) * (late * (1.0 / peak))[None, :]
    half = lines.to(keys.dtype)
    fresh = dot(half, keys, ACC)
    if SPLIT:
        fresh += dot((lines - half.to(ACC)).to(keys.dtype), keys, ACC)
    return kept * S + peak * fresh


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group"])
def state_kernel(
    k, v, gates, sizes, bounds, start_kk, start_kv, high, low, values_high, final_kk, final_kv, offsets, cu_seqlens,
    T, NT, H, k_group, v_group,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    i_batch, i_head, i_key, i_value, s_batch, s_head, s_key, s_value,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    SPLIT: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """States, transposed, that enter the chunks, over their bounds and zero in the padding, and those that are left.

    Hkk [chunks,H,BK,BK] as high, and with SPLIT as high + low, Hkv [chunks,H,W,BK] as one number.
    """
    tiles: tl.constexpr = (W if W > BK else BK) // BD
    line = tl.program_id(0) // tiles
    head = line % H
    column = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = key < K
    work = high.dtype.element_ty
    S = tl.zeros([BD, BK], dtype=ACC)
    G = tl.zeros([BD, BK], dtype=ACC)
    if INITIAL:
        wide = tl.cast(line // H, tl.int64)
        start_kk += wide * i_batch + tl.cast(head, tl.int64) * i_head
        start_kv += wide * s_batch + tl.cast(head, tl.int64) * s_head
        tile = (column < K)[:, None] & in_key[None, :]
        S += tl.load(start_kk + key[None, :] * i_key + column[:, None] * i_value, mask=tile, other=0.0).to(ACC)
        tile = (column < V)[:, None] & in_key[None, :]
        G += tl.load(start_kv + key[None, :] * s_key + column[:, None] * s_value, mask=tile, other=0.0).to(ACC)
    token = tl.cast(start, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    k += batch * k_batch + token * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + token * v_token + tl.cast(head // v_group, tl.int64) * v_head
    for first in range(start, end, C):
        real = row < end - first
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=real[:, None] & in_key[None, :], other=0.0)
        keys = keys.to(work)
        mine = tl.load(k + row[None, :] * k_token + column[:, None], mask=(column < K)[:, None] & real, other=0.0)
        lines = tl.load(v + row[None, :] * v_token + column[:, None], mask=(column < V)[:, None] & real, other=0.0)
        late = tl.load(gates + place * GATES * C + 4 * C + row)
        kept = tl.load(sizes + place * SIZES + 3)
        bound = tl.load(bounds + place * BOUNDS)
        scaled = S * tl.where(bound > TINY, 1.0 / tl.maximum(bound, TINY), 0.0)
        half = scaled.to(work)
        at = (place * BK + column[:, None]) * BK + key[None, :]
        tl.store(high + at, half, mask=(column < BK)[:, None])
        if SPLIT:
            tl.store(low + at, (scaled - half.to(ACC)).to(work), mask=(column < BK)[:, None])
        bound = tl.load(bounds + place * BOUNDS + 1)
        scaled = G * tl.where(bound > TINY, 1.0 / tl.maximum(bound, TINY), 0.0)
        at = (place * W + column[:, None]) * BK + key[None, :]
        tl.store(values_high + at, scaled.to(work), mask=(column < W)[:, None])
        S = written(S, mine, late, keys, kept, SPLIT, ACC)
        G = written(G, lines, late, keys, kept, SPLIT, ACC)
        place += H
        k += C * k_token
        v += C * v_token
    if FINAL:
        at = tl.cast(line, tl.int64) * K + key[None, :]
        tl.store(final_kk + at * K + column[:, None], S, mask=(column < K)[:, None] & in_key[None, :])
        tl.store(final_kv + at * V + column[:, None], G, mask=(column < V)[:, None] & in_key[None, :])


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


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b):
    """Sums of the rows of a and of b: the warps meet once for both."""
    if _INTERPRETED:  # which adds pairs one at a time
        return tl.sum(a, axis=1), tl.sum(b, axis=1)
    else:
        return tl.reduce((a, b), 1, add_pairs)


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "v_group", "max_iter", "tol", "scale"])
def solve_kernel(
    q, k, v, add_to, ridge, gates, bounds, bases, high, low, M, values_high, o, solution, residual, table, cu_seqlens,
    T, NT, H, q_group, k_group, v_group, max_iter, tol, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, a_batch, a_token, a_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, READ: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Solutions [B,T,H,K] of A x = q, their relative residuals [B,T,H], and with READ o [B,T,H,V] by `read_rows`.

    A row of each tile is a token. Warps share its columns, so that what is multiplied with stays in registers.
    """
    parts: tl.constexpr = C // BT
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if part * BT >= count:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    base = tl.load(bases + place)
    token = part * BT + tl.arange(0, BT)
    key = tl.arange(0, BK)
    in_key = key < K
    shown = token < count
    work = high.dtype.element_ty
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    row = tl.arange(0, C)
    keys = load_rows(k, k_token, row, count, K, BK).to(work)
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
    square_left = tl.full([BT], 1.0, dtype=ACC)
    x = tl.zeros([BT, BK], dtype=ACC)
    worst = tl.cast(1.0, ACC)
    before = tl.cast(4.0, ACC)
    i = tl.cast(0, tl.int32)
    # A round solves for what is left with the rounded matrix, then meets the whole matrix: float16 is refined so.
    while (i < max_iter) & (worst > tol) & (worst < 0.5 * before):
        goal = 0.8 * tol
        if work == tl.float16:
            goal = tl.maximum(goal, DEPTH * worst)
        goal = goal * goal
        direction = tl.zeros([BT, BK], dtype=work)
        Ad = tl.zeros([BT, BK], dtype=ACC)
        across = tl.zeros([BT], dtype=ACC)
        inverse = tl.zeros([BT], dtype=ACC)
        while (i < max_iter) & (tl.max(square_left, axis=0) > goal):
            # Rows that are done while others go on stay small: their squares underflow long before they do.
            unit = tl.rsqrt(tl.maximum(square_left, SMALL * SMALL))
            z = left
            turn = across * unit
            if base >= 0:
                z = dot((left * unit[:, None]).to(work), tl.load(M), ACC)
                unit = tl.rsqrt(tl.maximum(tl.sum(z * z, axis=1), SMALL * SMALL))
                turn = tl.sum(z * Ad, axis=1) * unit
            turn *= inverse
            # Both have length 1, so that float16's range holds this.
            shrink = 1.0 / (1.0 + tl.abs(turn))
            direction = (z * (unit * shrink)[:, None] - direction.to(ACC) * (turn * shrink)[:, None]).to(work)
            inner = (dot(direction, tl.trans(keys), ACC) * weights).to(work)
            Ad = dot(direction, upper, ACC)
            d = direction.to(ACC)
            if SPLIT:
                Ad += lost[None, :] * d
            Ad = Ad * stay[:, None] + diagonal[None, :] * d
            Ad += dot(inner, keys, ACC)
            curve, step = sums(d * Ad, d * left)
            inverse = tl.where(curve > TINY, 1.0 / tl.maximum(curve, TINY), 0.0)
            step *= inverse
            x += step[:, None] * d
            left -= step[:, None] * Ad
            square_left, across = sums(left * left, left * Ad)
            i += 1
        length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), SMALL)
        digits = x * (1.0 / length)[:, None]
        inner = tl.zeros([BT, C], dtype=ACC)
        Ad = tl.zeros([BT, BK], dtype=ACC)
        if not SPLIT:
            # The solution is what is read with.
            digits = digits.to(work).to(ACC)
            x = digits * length[:, None]
        d = digits
        # Loops, not statements: with both parts in one block their operands would be in registers at the same time.
        for _ in range(0, 2 if SPLIT else 1):
            half = digits.to(work)
            inner += dot(half, tl.trans(keys), ACC)
            Ad += dot(half, upper, ACC)
            digits -= half.to(ACC)
        if SPLIT:
            Ad += dot(d.to(work), tl.load(low + square), ACC)
        # Negative, and added last: what a product is added to has its layout, and so has the norm.
        inner = inner * -weights
        left = tl.load(q, mask=tile, other=0.0).to(ACC) * (1.0 / size)[:, None] * (1.0 / length)[:, None]
        left = left - Ad * stay[:, None] - diagonal[None, :] * d
        for _ in range(0, 2 if SPLIT else 1):
            half = inner.to(work)
            left += dot(half, keys, ACC)
            inner -= half.to(ACC)
        left = left * length[:, None]
        square_left = tl.sum(left * left, axis=1)
        before = worst
        worst = tl.sqrt(tl.max(square_left, axis=0))
    at = (batch * T + first + token) * H + head
    tl.store(residual + at, tl.sqrt(square_left), mask=shown)
    tl.store(solution + at[:, None] * K + key[None, :], (size / whole)[:, None] * x, mask=tile)
    if READ:
        length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), SMALL)
        half = (x * (1.0 / length)[:, None]).to(work)
        v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
        if ADD:
            add_to += batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
        # The weights are over the bound of the matrices here, and so is x: what remains is the bound of Hkv.
        stay = tl.load(gates + 3 * C + token) * (tl.load(bounds + place * BOUNDS + 1) / whole)
        read_rows(
            half, keys, weights, stay, size * length * scale, v, v_token, values_high + place * BK * W, 1, BK, o,
            add_to, a_token, at, token, count, V, BV, C, ADD, ACC,
        )  # fmt: skip


@triton.jit
def load_rows(x, x_token, row, count, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a chunk, zero from row `count` on."""
    column = tl.arange(0, BD)
    tile = (row < count)[:, None] & (column < D)[None, :]
    return tl.load(x + row[:, None] * x_token + column[None, :], mask=tile, other=0.0)


@triton.jit
def reaching(gates, token, C: tl.constexpr):
    """Gam(t,s) gain_s of `token` rows t and all columns s of a chunk."""
    row = tl.arange(0, C)
    between = tl.load(gates + token)[:, None] - tl.load(gates + row)[None, :]
    between += tl.load(gates + C + token)[:, None] - tl.load(gates + C + row)[None, :]
    upto = row[None, :] <= token[:, None]
    return tl.exp2(tl.where(upto, between, float("-inf"))) * tl.load(gates + 2 * C + row)[None, :]


@triton.jit
def read_rows(
    half, keys, weights, stay, factor, v, v_token, states, s_key, s_value, o, add_to, a_token, at, token, count,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store factor (((x keys^T) o weights) v + stay x S) + add_to of rows x = half [BT,BK] of length 1."""
    BK: tl.constexpr = half.shape[1]
    work = half.dtype
    key = tl.arange(0, BK)
    shown = (token < count)[:, None]
    inner = dot(half, tl.trans(keys), ACC) * weights
    peak = tl.maximum(tl.max(tl.abs(inner), axis=1), TINY)
    inner = (inner * (1.0 / peak)[:, None]).to(work)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = (value < V)[None, :]
        row = tl.arange(0, C)[:, None]
        lines = tl.load(v + row * v_token + value[None, :], mask=(row < count) & in_value, other=0.0).to(work)
        own = dot(inner, lines, ACC)
        out = dot(half, tl.load(states + key[:, None] * s_key + value[None, :] * s_value), ACC)
        out = (out * stay[:, None] + own * peak[:, None]) * factor[:, None]
        if ADD:
            extra = tl.load(add_to + token[:, None] * a_token + value[None, :], mask=shown & in_value, other=0.0)
            out += extra.to(ACC)
        tl.store(o + at[:, None] * V + value[None, :], out.to(o.dtype.element_ty), mask=shown & in_value)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group", "scale"])
def target_kernel(
    do, k, v, gates, bounds, high, target, table, cu_seqlens,
    T, NT, H, k_group, v_group, scale,
    o_batch, o_token, o_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Cotangents of the solutions, dq* [B,T,H,K] = scale (((dO v^T) o Gam o gain_s) k + e dO S^T), BW columns each."""
    parts: tl.constexpr = C // BT
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if part * BT >= count:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    token = part * BT + tl.arange(0, BT)
    work = high.dtype.element_ty
    do += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    rows = load_rows(do, o_token, token, count, V, BV).to(ACC)
    length = tl.maximum(tl.sqrt(tl.sum(rows * rows, axis=1)), TINY)
    half = (rows * (1.0 / length)[:, None]).to(work)
    values = load_rows(v, v_token, tl.arange(0, C), count, V, BV).to(work)
    gates += place * GATES * C
    stay = tl.load(gates + 3 * C + token) * tl.load(bounds + place * BOUNDS + 1)
    read_rows(
        half, values, reaching(gates, token, C), stay, length * scale, k, k_token, high + place * BK * BV, BK, 1,
        target, None, 0, (batch * T + first + token) * H + head, token, count, K, BW, C, False, ACC,
    )  # fmt: skip


# K rounded up to a power of two -> (tile of columns of the states, warps, stages), warps of the inverse,
# (tokens, tile of columns that are read, warps, largest number of registers) of the solve
STATE = {32: (32, 4, 3), 64: (32, 4, 3), 128: (32, 8, 3)}
INVERT = {32: 4, 64: 4, 128: 8}
SOLVE = {32: (16, 64, 4, 160), 64: (32, 64, 4, None), 128: (32, 128, 8, None)}
EXACT = SOLVE | {128: (16, 128, 8, None)}  # where Hkk is two numbers
# Dims of values, rounded up -> (tokens, tile of columns that are read, warps)
TARGET = {16: (32, 64, 4), 32: (32, 64, 4), 64: (32, 64, 4), 128: (32, 64, 4), 256: (16, 32, 4)}


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
        Hkk: Tensor | None, cu_seqlens: Tensor | None, final: bool, exact: bool, warps: int | None,
    ):  # fmt: skip
        self.k, self.v = k, v = rows(k), rows(v)
        self.work = work = work_dtype(k.dtype)
        batch, tokens, heads = gain.shape
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        self.chunks = chunks = Chunks(batch, tokens, cu_seqlens)
        self.ridge = ridge.contiguous()
        self.padded = padded = max(32, triton.next_power_of_2(key_dim))
        self.padded_value = max(16, triton.next_power_of_2(value_dim))
        self.split = exact and work == torch.float16
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
            DECAY=log_decay is not None, num_warps=8 if max(padded, self.padded_value) > 64 else 4, num_stages=1,
            **self.shared,
        )  # fmt: skip
        self.bounds = new(chunks.count, heads, BOUNDS.value, dtype=wide)
        self.bases = new(chunks.count, heads, dtype=torch.int32)
        starts = [None if H is None else H.abs().amax((-2, -1)).to(wide).contiguous() for H in (Hkk, Hkv)]
        starts.append(None if Hkk is None else Hkk.diagonal(dim1=-2, dim2=-1).sum(-1).to(wide).contiguous())
        plan_kernel[(chunks.sequences * heads,)](
            sizes, *starts, self.ridge, self.bounds, self.bases, chunks.offsets, chunks.cu_seqlens, *size,
            K=key_dim, BK=padded, INITIAL=Hkk is not None, num_warps=1, num_stages=1, **self.shared,
        )  # fmt: skip
        tile, state_warps, stages = STATE[padded]
        tile, wide_dim = min(tile, padded, self.padded_value), self.padded_value
        square = chunks.count, heads, padded, padded
        self.high = k.new_empty(square, dtype=work)
        self.low = torch.empty_like(self.high) if self.split else self.high
        self.values_high = k.new_empty(chunks.count, heads, wide_dim, padded, dtype=work)
        last = (chunks.sequences, heads, key_dim) if final else (0,)
        self.final = [new((*last, dim) if final else 0, dtype=wide) for dim in (key_dim, value_dim)]
        starts = [(0, 0, 0, 0) if H is None else H.stride() for H in (Hkk, Hkv)]
        state_kernel[(chunks.sequences * heads * (max(padded, wide_dim) // tile),)](
            k, v, self.gates, sizes, self.bounds, Hkk, Hkv, self.high, self.low, self.values_high, *self.final,
            chunks.offsets, chunks.cu_seqlens, *size, *groups, *strides(k), *strides(v), *starts[0], *starts[1],
            K=key_dim, V=value_dim, W=wide_dim, BK=padded, BD=tile, SPLIT=self.split,
            INITIAL=Hkk is not None, FINAL=final,
            num_warps=warps or state_warps, num_stages=stages, **self.shared,
        )  # fmt: skip
        self.M = torch.empty_like(self.high)
        if chunks.packed:
            self.bases = torch.where(chunks.table[:, :1] < 0, -1, self.bases)
        invert_kernel[(chunks.count * heads,)](
            self.high, self.low, self.ridge, self.bounds, self.bases, self.M, tokens, heads,
            K=key_dim, BK=padded, SPLIT=self.split, ACC=accumulator(work), num_warps=INVERT[padded], num_stages=1,
        )  # fmt: skip

    def solve(
        self, q: Tensor, max_iter: int, tol: float, read: bool = False, add_to: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(x [B,T,H,K] with A x = q, relative residual [B,T,H], o = scale Hkv_t^T x_t + add_to or empty).

        x and the residual are in the accumulator's type, o [B,T,H,V] is in that of q.
        """
        chunks, heads, key_dim, value_dim = self.chunks, self.size[2], self.k.shape[-1], self.v.shape[-1]
        batch, tokens = q.shape[:2]
        new = self.gates.new_empty
        x, residual = new(batch, tokens, heads, key_dim, dtype=self.wide), new(batch, tokens, heads, dtype=self.wide)
        o = q.new_empty((batch, tokens, heads, value_dim) if read else 0)
        columns, tile, warps, registers = (EXACT if self.split else SOLVE)[self.padded]
        solve_kernel[(chunks.count * heads * (CHUNK // columns),)](
            q, self.k, self.v, add_to, self.ridge, self.gates, self.bounds, self.bases, self.high, self.low, self.M,
            self.values_high, o, x, residual, chunks.table, chunks.cu_seqlens,
            *self.size, heads // q.shape[2], *self.groups, max_iter, tol, scale, *strides(q), *strides(self.k),
            *strides(self.v), *((0, 0, 0) if add_to is None else strides(add_to)),
            K=key_dim, V=value_dim, W=self.padded_value, BK=self.padded, BV=min(tile, self.padded_value), BT=columns,
            READ=read, ADD=add_to is not None, SPLIT=self.split,
            num_warps=self.warps or warps, num_stages=1,
            maxnreg=None if self.warps else registers, **self.shared,
        )  # fmt: skip
        return x, residual, o

    def target(self, do: Tensor, scale: float) -> Tensor:
        """scale Hkv_t dO_t [B,T,H,K] of cotangents dO [B,T,H,V], in the accumulator's type."""
        chunks, heads, key_dim = self.chunks, self.size[2], self.k.shape[-1]
        target = do.new_empty(*do.shape[:3], key_dim, dtype=self.wide)
        columns, tile, warps = TARGET[self.padded_value]
        target_kernel[(chunks.count * heads * (CHUNK // columns),)](
            do, self.k, self.v, self.gates, self.bounds, self.values_high, target, chunks.table, chunks.cu_seqlens,
            *self.size, *self.groups, scale, *strides(do), *strides(self.k), *strides(self.v),
            K=key_dim, V=do.shape[-1], BK=self.padded, BV=self.padded_value, BW=min(tile, self.padded), BT=columns,
            num_warps=self.warps or warps, num_stages=1, **self.shared,
        )  # fmt: skip
        return target


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, max_iter: int, tol: float,
    final: bool, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final Hkv and Hkk or empty, residual, solution). `warps` replaces those of the launch tables."""
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, final, tol < ROUGH, warps)
    add_to = None if add_to is None else rows(add_to)
    solution, residual, o = prepared.solve(rows(q), max_iter, tol, True, add_to, scale)
    return o, prepared.final[1], prepared.final[0], residual, solution


def _unit(*largest: Tensor) -> Tensor:
    """The power of two next above all of these numbers, as a tensor."""
    return torch.stack([x.float() for x in largest]).amax().clamp(min=1e-30).log2().ceil().exp2()


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`, in one pass."""
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


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
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, False, tol < ROUGH, warps)
    y, _, _ = prepared.solve(prepared.target(rows(do), scale), max_iter, tol)
    chunks, work, wide = prepared.chunks, prepared.work, solution.dtype
    del prepared
    length = solution.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    queries = _times(solution, 1 / length, work)
    units = [_unit(torch.linalg.vector_norm(x, torch.inf)) for x in (k, v, gain)]
    keys, values = (_times(x, 1 / unit, work) for x, unit in zip((k, v), units, strict=False))
    write = (gain / units[2]).to(gain.dtype)
    scalars, N, A = prep.prepare(queries, keys, log_decay, None, write, 1.0, chunks, warps)
    parts = []
    pairs = (values, units[1], do, scale * length, Hkv, d_Hkv), (keys, units[0], y, -length, Hkk, d_Hkk)
    for lines, unit, slopes, factor, start, d_final in pairs:
        size = units[0] * units[2] * unit  # of the state, over that of the scaled problem
        largest = [(torch.linalg.vector_norm(slopes, torch.inf, dim=-1, keepdim=True) * factor).abs().amax()]
        if d_final is not None:
            largest.append(d_final.abs().amax())
        # A sixteenth leaves room for the sum over many tokens.
        grain = 16 * _unit(*largest)
        start = None if start is None else start / size
        d_final = None if d_final is None else d_final.to(wide) / grain
        _, d_key, d_line, d_scalars, first = delta.backward(
            queries, keys, lines, scalars, N, A, start, cu_seqlens, _times(slopes, factor / grain, work), d_final, 1.0,
            d_initial, False, warps,
        )  # fmt: skip
        back = grain * size
        # One number each, with a dimension: a product of float16 and that is float32.
        to_key, to_line = ((back / of).to(wide).view(1) for of in (units[0], unit))
        parts.append((
            d_key, to_key, d_line, to_line, d_scalars[0] * back, d_scalars[2] * (back / units[2]), first * grain,
        ))  # fmt: skip
    (key_a, to_a, line, to_line, decay_a, gain_a, first_kv) = parts[0]
    (key_b, to_b, key_c, to_c, decay_b, gain_b, first_kk) = parts[1]
    dk = torch.addcmul(_times(key_a, to_a, wide), key_b, to_b)
    dk = torch.addcmul(dk, key_c, to_c, out=torch.empty(dk.shape, dtype=k.dtype, device=k.device))
    if d_initial:
        first_kk = (first_kk + first_kk.mT) / 2
    d_ridge = -(y * solution).sum((0, 1))
    d_scalars = torch.stack([decay_a + decay_b, gain_a + gain_b])
    return y, dk, _times(line, to_line, v.dtype), d_scalars, d_ridge, first_kv, first_kk
