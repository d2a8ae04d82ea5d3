"""X1 to X5: MesaNet's states and preconditioners, its systems, its read-out and its gradients.

In a chunk that is entered with states H = Hkk and G = Hkv, a row p [K] of token t meets its own matrix

    A p = ((p K^T) o Gam o gain_s) K + e_t p H + ridge o p

X2 solves A x = q by conjugate gradients, preconditioned where that pays by the inverse of H + diag(ridge) at the start
of this or an earlier chunk; X3 reads o = scale (((x K^T) o Gam o gain_s) V + e_t x G). Backwards X3 with K and V
exchanged gives dq* = scale (((dO V^T) o Gam o gain_s) K + e_t dO G^T), X2 solves A y = dq*, and the rest is the
gradient of linear attention with query q*, values [v ; k] and cotangents [scale dO ; -y]: X4 runs over the chunks from
the last to the first for the cotangents of the states, X5 does the rest in each chunk, with the states of X1.

16-bit inputs are computed with float16 products. Keys and values enter them unrounded, but for bfloat16's smallest
numbers; states are scaled by a bound of their entries and rounded to float16, Hkk for tolerances below `ROUGH` to two
such numbers. A round of conjugate gradients uses the first of them, with directions that are rounded first and then
used as they are everywhere, an exact line search and conjugacy to the last direction. Then the residual of what was
found so far is computed, with both, and the next round solves for that: no accuracy is lost to the rounding but that of
states in one number, by which a residual may differ from the true one: by 2e-4 for independent keys, by 2e-2 for keys
of which all but a tenth is their mean. float32 inputs use float32 products, float64 ones (interpreter) float64.

Tokens are the rows of all tiles of X1 to X3, and values those of X4, 32 at most: that is too few for a WGMMA, so that
products may take the left operand from registers (see `common`). X5 loads its left operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import grads
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
# Least length of a row that is brought to length 1; shorter ones stay shorter, and lose digits. The square root of a
# GPU takes nothing below 1e-38: a row of 1e-20 has no length by its squares, and over TINY it is infinite in float16.
SHORT: tl.constexpr = tl.constexpr(1e-18)
ROOM: tl.constexpr = tl.constexpr(1024.0)  # largest entry of a state's cotangent as it is stored
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
    tl.store(sizes + 1, tl.sum(tl.abs(late) * tl.sqrt(length) * tl.sqrt(other), axis=0))
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
    size = tl.maximum(tl.sqrt(tl.sum(left * left, axis=1)), SHORT)
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
    do, k, v, gates, bounds, high, target, slopes, weights, table, cu_seqlens,
    T, NT, H, k_group, v_group, scale,
    o_batch, o_token, o_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Cotangents of the solutions, dq* [B,T,H,K] = scale (((dO v^T) o Gam o gain_s) k + e dO S^T), BW columns each.

    Leaves dO at length 1 in the first columns of slopes [chunks,H,C,BV+BK], and scale |dO| in weights [chunks,H,2,C].
    """
    parts: tl.constexpr = C // BT
    part = tl.program_id(0) % parts
    line = tl.program_id(0) // parts
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    token = part * BT + tl.arange(0, BT)
    work = high.dtype.element_ty
    do += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    rows = load_rows(do, o_token, token, count, V, BV).to(ACC)
    length = tl.maximum(tl.sqrt(tl.sum(rows * rows, axis=1)), SHORT)
    half = (rows * (1.0 / length)[:, None]).to(work)
    at = place * C + token
    tl.store(slopes + at[:, None] * (BV + BK) + tl.arange(0, BV)[None, :], half)
    tl.store(weights + place * 2 * C + token, tl.where(token < count, length * scale, 0.0))
    values = load_rows(v, v_token, tl.arange(0, C), count, V, BV).to(work)
    gates += place * GATES * C
    stay = tl.load(gates + 3 * C + token) * tl.load(bounds + place * BOUNDS + 1)
    read_rows(
        half, values, reaching(gates, token, C), stay, length * scale, k, k_token, high + place * BK * BV, BK, 1,
        target, None, 0, (batch * T + first + token) * H + head, token, count, K, BW, C, False, ACC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NT", "H"])
def lengths_kernel(
    solution, y, queries, slopes, weights, d_query, d_ridge, table, cu_seqlens,
    T, NT, H,
    K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STORE: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """From solutions q* and y [B,T,H,K]: what the gradients of a chunk take, and -sum y o q* [chunks,H,K].

    Queries q* [chunks,H,C,BK] and, in the last columns of `slopes`, -y, both at length 1; as weights those of
    `target_kernel` by |q*|, and |y| |q*|. With STORE y in the type of d_query.
    """
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    place = tl.cast(line, tl.int64)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    from_here = (batch * T + tl.cast(first, tl.int64)) * H + head
    inside = row[:, None] * (H * K) + key[None, :]
    real = (row < count)[:, None] & (key < K)[None, :]
    found = tl.load(solution + from_here * K + inside, mask=real, other=0.0).to(ACC)
    slope = tl.load(y + from_here * K + inside, mask=real, other=0.0).to(ACC)
    tl.store(d_ridge + place * K + key, -tl.sum(found * slope, axis=0), mask=key < K)
    if count == 0:
        return
    if STORE:
        tl.store(d_query + from_here * K + inside, slope.to(d_query.dtype.element_ty), mask=real)
    length = tl.maximum(tl.sqrt(tl.sum(found * found, axis=1)), SHORT)
    size = tl.maximum(tl.sqrt(tl.sum(slope * slope, axis=1)), SHORT)
    work = queries.dtype.element_ty
    tl.store(queries + place * C * BK + row[:, None] * BK + key[None, :], (found * (1.0 / length)[:, None]).to(work))
    slopes += place * C * (W + BK) + W
    tl.store(slopes + row[:, None] * (W + BK) + key[None, :], (slope * (-1.0 / size)[:, None]).to(work))
    weights += place * 2 * C + row
    read = tl.load(weights)
    tl.debug_barrier()
    tl.store(weights, read * length)
    tl.store(weights + C, tl.where(row < count, size * length, 0.0))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def slope_kernel(
    queries, slopes, weights, gates, sizes, d_kv, d_kk, end_kv, end_kk, d_states, limits, first_kv, first_kk, offsets,
    cu_seqlens,
    T, NT, H,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Cotangents of the states that leave the chunks, transposed and over their bounds, [chunks,H,W+BK,BK].

    The first W lines belong to Hkv, the others to Hkk; limits [chunks,H,2] are their bounds over `ROOM`.
    """
    tiles: tl.constexpr = (W + BK) // BD
    line = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    head = line % H
    column = tile * BD + tl.arange(0, BD)
    part = tl.where(tile * BD < W, 0, 1)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    steps = (end - start + C - 1) // C
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = (key < K)[None, :]
    in_kv = (column < V)[:, None] & in_key
    in_kk = (column >= W)[:, None] & (column < W + K)[:, None] & in_key
    at = tl.cast(line, tl.int64) * K + key[None, :]
    at_kv = at * V + column[:, None]
    at_kk = at * K + (column - W)[:, None]
    S = tl.zeros([BD, BK], dtype=ACC)
    limit = tl.cast(0.0, ACC)
    if FINAL:
        S += tl.load(d_kv + at_kv, mask=in_kv, other=0.0).to(ACC)
        S += tl.load(d_kk + at_kk, mask=in_kk, other=0.0).to(ACC)
        limit += tl.where(part == 0, tl.load(end_kv + line), tl.load(end_kk + line)).to(ACC)
    place = (tl.cast(chunk, tl.int64) + steps - 1) * H + head
    queries += place * C * BK
    slopes += place * C * (W + BK)
    d_states += place * (W + BK) * BK
    for _ in range(0, steps):
        rows = tl.load(queries + row[:, None] * BK + key[None, :])
        lines = tl.load(slopes + row[None, :] * (W + BK) + column[:, None])
        weight = tl.load(weights + (place * 2 + part) * C + row) * tl.load(gates + place * GATES * C + 3 * C + row)
        kept = tl.load(sizes + place * SIZES + 3)
        bound = tl.maximum(limit, TINY) * (1.0 / ROOM)
        tl.store(limits + place * 2 + part, bound)
        half = (S * (1.0 / bound)).to(d_states.dtype.element_ty)
        tl.store(d_states + column[:, None] * BK + key[None, :], half)
        S = written(S, lines, weight, rows, kept, False, ACC)
        limit = kept * limit + tl.sum(tl.abs(weight), axis=0)
        place -= H
        queries -= H * C * BK
        slopes -= H * C * (W + BK)
        d_states -= H * (W + BK) * BK
    if INITIAL:
        tl.store(first_kv + at_kv, S, mask=in_kv)
        tl.store(first_kk + at_kk, S, mask=in_kk)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group", "everything"])
def pairs_kernel(
    k, v, queries, slopes, weights, gates, bounds, high, values_high, d_states, limits, pairs, sums, d_scalars, table,
    cu_seqlens,
    T, NT, H, k_group, v_group, everything,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KT: tl.constexpr,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a chunk's gradients need of pairs of tokens and of the states before it.

    With L = [v ; k], D = [scale dO ; -y], S and dS the states before and the cotangents after the chunk, [Hkv | Hkk]:

        P = (D L^T) o Gam o gain_s     R = P o (q* K^T)     J = L dS^T
        dL = gain (((q* K^T) o Gam)^T D + eta (K dS))     dk += P^T q* + late J
        dgain = colsum(R) / gain_s + eta rowsum(K o J)
        dg = e rowsum(q* o (D S^T)) + rowsum(tril(R, -1)) - colsum(tril(R, -1)) - late rowsum(K o J)
        dg_last += sum(late rowsum(K o J)) + exp(g_last) <S, dS>

    P over its largest entry [chunks,H,C,C]; sums [chunks,H,2] are <S, dS> and that entry; d_scalars [2,B,T,H] get what
    there is of dg and dgain. `keys_kernel` and `values_kernel` do the rest. The left operand of every product is
    loaded: where that needs it tiles are transposed.
    """
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    work = queries.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    real = row < count
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    d_scalars += (batch * T + first) * H + head
    queries += place * C * BK
    slopes += place * C * (W + BK)
    weights += place * 2 * C + row
    gates += place * GATES * C
    d_states += place * (W + BK) * BK
    high += place * BK * BK
    values_high += place * W * BK
    d_kk = d_states + W * BK
    limit_kv = tl.load(limits + place * 2)
    limit_kk = tl.load(limits + place * 2 + 1)

    # The states before the chunk.
    rows = tl.load(queries + row[:, None] * BK + key[None, :])
    total = tl.zeros([C, BK], dtype=ACC)
    inner = tl.zeros([BV], dtype=ACC)
    for value0 in range(0, W, BV):
        value = value0 + tl.arange(0, BV)
        at = value[:, None] * BK + key[None, :]
        state = tl.load(values_high + at)
        inner += tl.sum(state.to(ACC) * tl.load(d_states + at).to(ACC), axis=1)
        total += dot(tl.load(slopes + row[:, None] * (W + BK) + value[None, :]), state, ACC)
    bound = tl.load(bounds + place * BOUNDS + 1)
    d_sum = tl.sum(total * rows.to(ACC), axis=1) * (tl.load(weights) * bound)
    near = tl.sum(inner, axis=0) * (bound * limit_kv)
    total = tl.zeros([C, BK], dtype=ACC)
    inner_keys = tl.zeros([KT], dtype=ACC)
    for key0 in range(0, BK, KT):
        value = key0 + tl.arange(0, KT)
        at = value[:, None] * BK + key[None, :]
        state = tl.load(high + at)
        inner_keys += tl.sum(state.to(ACC) * tl.load(d_kk + at).to(ACC), axis=1)
        total += dot(tl.load(slopes + row[:, None] * (W + BK) + (W + value)[None, :]), state, ACC)
    bound = tl.load(bounds + place * BOUNDS)
    d_sum += tl.sum(total * rows.to(ACC), axis=1) * (tl.load(weights + C) * bound)
    d_sum *= tl.load(gates + 3 * C + row)
    near += tl.sum(inner_keys, axis=0) * (bound * limit_kk)

    # Pairs of tokens.
    P = tl.zeros([C, C], dtype=ACC)
    for value0 in range(0, W, BV):
        value = value0 + tl.arange(0, BV)
        lines = load_across(v, v_token, value, V, real, C)
        P += dot(tl.load(slopes + row[:, None] * (W + BK) + value[None, :]), lines.to(work), ACC)
    P = P * tl.load(weights)[:, None]
    products = tl.zeros([C, C], dtype=ACC)
    for key0 in range(0, BK, KT):
        value = key0 + tl.arange(0, KT)
        lines = load_across(k, k_token, value, K, real, C)
        products += dot(tl.load(slopes + row[:, None] * (W + BK) + (W + value)[None, :]), lines.to(work), ACC)
    P = P + products * tl.load(weights + C)[:, None]
    rows = tl.load(queries + row[:, None] * BK + key[None, :])
    keys = load_rows(k, k_token, row, count, K, BK).to(work)
    scores = dot(rows, tl.trans(keys), ACC) * falling(gates, C)
    products = P * scores
    tl.store(d_scalars + everything + row * H, tl.sum(products, axis=0), mask=real)
    products = tl.where(row[:, None] > row[None, :], products, 0.0) * tl.load(gates + 2 * C + row)[None, :]
    d_sum += tl.sum(products, axis=1)
    d_sum -= tl.sum(products, axis=0)
    P = P * falling(gates, C) * tl.load(gates + 2 * C + row)[None, :]
    peak = largest(tl.max(tl.abs(P), axis=1))
    pairs += place * C * C
    tl.store(pairs + row[:, None] * C + row[None, :], (P * (1.0 / peak)).to(work))
    tl.store(sums + place * 2, near)
    tl.store(sums + place * 2 + 1, peak)
    tl.store(d_scalars + row * H, d_sum, mask=real)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group", "everything"])
def keys_kernel(
    k, v, queries, slopes, weights, gates, d_states, limits, pairs, sums, dk, d_scalars, table, cu_seqlens,
    T, NT, H, k_group, v_group, everything,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KT: tl.constexpr,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk [B,T,H,K], and d_scalars completed."""
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    work = queries.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    real = row < count
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    token = (batch * T + first) * H + head
    dk += token * K
    d_scalars += token
    queries += place * C * BK
    slopes += place * C * (W + BK)
    weights += place * 2 * C + row
    gates += place * GATES * C
    d_states += place * (W + BK) * BK
    d_kk = d_states + W * BK
    limit_kv = tl.load(limits + place * 2)
    limit_kk = tl.load(limits + place * 2 + 1)
    pairs += place * C * C
    square = row[:, None] * C + row[None, :]
    pair_peak = tl.load(sums + place * 2 + 1)
    keys, read, peak = read_of(queries, k, k_token, weights + C, gates, count, K, BK, C, ACC)
    stayed = tl.zeros([C], dtype=ACC)
    for key0 in range(0, BK, KT):
        mine = key0 + tl.arange(0, KT)
        J = tl.zeros([KT, C], dtype=ACC)
        for value0 in range(0, W, BV):
            value = value0 + tl.arange(0, BV)
            lines = load_across(v, v_token, value, V, real, C)
            J += dot(tl.trans(tl.load(d_states + value[:, None] * BK + mine[None, :])), lines.to(work), ACC)
        d_key = tl.zeros([KT, C], dtype=ACC)
        for value0 in range(0, BK, KT):
            value = value0 + tl.arange(0, KT)
            lines = load_across(k, k_token, value, K, real, C)
            d_key += dot(tl.trans(tl.load(d_kk + value[:, None] * BK + mine[None, :])), lines.to(work), ACC)
        J = J * limit_kv + d_key * limit_kk
        stayed += tl.sum(J * load_across(k, k_token, mine, K, real, C).to(ACC), axis=0)
        d_key = dot(tl.load(d_kk + mine[:, None] * BK + key[None, :]), tl.trans(keys), ACC)
        d_key *= leaving(gates, C)[None, :] * limit_kk
        d_key += dot(tl.load(slopes + row[None, :] * (W + BK) + (W + mine)[:, None]), read, ACC) * peak
        d_key = d_key * tl.load(gates + 2 * C + row)[None, :] + J * tl.load(gates + 4 * C + row)[None, :]
        part = tl.trans(tl.load(queries + row[:, None] * BK + mine[None, :]))
        d_key += dot(part, tl.load(pairs + square), ACC) * pair_peak
        at = row[None, :] * (H * K) + mine[:, None]
        tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=(mine < K)[:, None] & real[None, :])
    d_write = tl.load(d_scalars + everything + row * H, mask=real, other=0.0) + leaving(gates, C) * stayed
    stayed *= tl.load(gates + 4 * C + row)
    d_sum = tl.load(d_scalars + row * H, mask=real, other=0.0) - stayed
    d_last = tl.sum(stayed, axis=0) + tl.load(gates + 4 * C - 1) * tl.load(sums + place * 2)
    d_decay = tl.sum(tl.where(row[:, None] >= row[None, :], d_sum[:, None], 0.0), axis=0) + d_last
    tl.debug_barrier()
    tl.store(d_scalars + row * H, d_decay, mask=real)
    tl.store(d_scalars + everything + row * H, d_write, mask=real)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group"])
def values_kernel(
    k, queries, slopes, weights, gates, d_states, limits, dv, table, cu_seqlens,
    T, NT, H, k_group,
    k_batch, k_token, k_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dv [B,T,H,V]."""
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(line, tl.int64)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    real = row < count
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    dv += ((batch * T + first) * H + head) * V
    queries += place * C * BK
    slopes += place * C * (W + BK)
    weights += place * 2 * C + row
    gates += place * GATES * C
    d_states += place * (W + BK) * BK
    limit_kv = tl.load(limits + place * 2)
    keys, read, peak = read_of(queries, k, k_token, weights, gates, count, K, BK, C, ACC)
    for value0 in range(0, W, BV):
        value = value0 + tl.arange(0, BV)
        d_line = dot(tl.load(d_states + value[:, None] * BK + key[None, :]), tl.trans(keys), ACC)
        d_line *= (leaving(gates, C) * (limit_kv / peak))[None, :]
        d_line += dot(tl.load(slopes + row[None, :] * (W + BK) + value[:, None]), read, ACC)
        d_line *= (tl.load(gates + 2 * C + row) * peak)[None, :]
        at = row[None, :] * (H * V) + value[:, None]
        tl.store(dv + at, d_line.to(dv.dtype.element_ty), mask=(value < V)[:, None] & real[None, :])


@triton.jit
def read_of(
    queries, k, k_token, weights, gates, count, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr
):
    """Keys of a chunk; (Gam o (q* K^T)) by its weights over their largest, in the same type; and the largest."""
    row = tl.arange(0, C)
    rows = tl.load(queries + row[:, None] * BK + tl.arange(0, BK)[None, :])
    keys = load_rows(k, k_token, row, count, K, BK).to(rows.dtype)
    weight = tl.load(weights)
    peak = largest(tl.abs(weight))
    scores = dot(rows, tl.trans(keys), ACC) * falling(gates, C)
    return keys, (scores * (weight * (1.0 / peak))[:, None]).to(rows.dtype), peak


@triton.jit
def load_across(x, x_token, column, D: tl.constexpr, real, C: tl.constexpr):
    """Some columns of the rows of a chunk, transposed."""
    row = tl.arange(0, C)
    tile = (column < D)[:, None] & real[None, :]
    return tl.load(x + row[None, :] * x_token + column[:, None], mask=tile, other=0.0)


@triton.jit
def largest(x):
    """The largest of positive numbers, or 1 where there is none."""
    x = tl.max(x, axis=0)
    return tl.where(x > TINY, x, 1.0)


@triton.jit
def leaving(gates, C: tl.constexpr):
    """exp(g_last - g) of a chunk."""
    row = tl.arange(0, C)
    between = tl.load(gates + C - 1) - tl.load(gates + row)
    return tl.exp2(between + (tl.load(gates + 2 * C - 1) - tl.load(gates + C + row)))


@triton.jit
def falling(gates, C: tl.constexpr):
    """Gam(t,s) of all rows t and columns s of a chunk."""
    row = tl.arange(0, C)
    between = tl.load(gates + row)[:, None] - tl.load(gates + row)[None, :]
    between += tl.load(gates + C + row)[:, None] - tl.load(gates + C + row)[None, :]
    return tl.exp2(tl.where(row[:, None] >= row[None, :], between, float("-inf")))


# K rounded up to a power of two -> (tile of columns of the states, warps, stages), warps of the inverse,
# (tokens, tile of columns that are read, warps, largest number of registers) of the solve
STATE = {32: (32, 4, 3), 64: (32, 4, 3), 128: (32, 4, 3)}
STATE_EXACT = STATE | {128: (32, 8, 3)}  # where Hkk is two numbers: 4 warps spill
INVERT = {32: 4, 64: 4, 128: 8}
SOLVE = {32: (16, 64, 4, 160), 64: (32, 64, 4, None), 128: (32, 128, 8, None)}
EXACT = SOLVE | {128: (16, 128, 8, None)}  # where Hkk is two numbers
# Dims of values, rounded up -> (tokens, tile of columns that are read, warps)
TARGET = {16: (32, 64, 4), 32: (32, 64, 4), 64: (32, 64, 4), 128: (32, 64, 4), 256: (16, 32, 4)}
# K rounded up -> (tile of lines of the cotangents of states, warps, stages), warps of `lengths_kernel`; (tile, warps,
# largest number of registers) of what is done in each chunk
SLOPE = {32: (32, 4, 3), 64: (32, 4, 3), 128: (32, 4, 2)}
LENGTHS = {32: 4, 64: 4, 128: 8}
PAIRS = {32: (32, 4, None), 64: (64, 8, 128), 128: (64, 4, None)}
KEYS = {32: (32, 4, None), 64: (64, 8, 128), 128: (64, 8, None)}
VALUES = {32: (32, 4, None), 64: (64, 4, None), 128: (64, 4, None)}


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
        self.sizes = sizes = new(chunks.count, heads, SIZES.value, dtype=wide)
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
        tile, state_warps, stages = (STATE_EXACT if self.split else STATE)[padded]
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

    def target(self, do: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """scale Hkv_t dO_t [B,T,H,K] of cotangents dO [B,T,H,V], in the accumulator's type; slopes; weights.

        Of the last two the second halves, of Hkk, are left to `gradients`.
        """
        chunks, heads, key_dim = self.chunks, self.size[2], self.k.shape[-1]
        target = do.new_empty(*do.shape[:3], key_dim, dtype=self.wide)
        slopes = do.new_empty(chunks.count, heads, CHUNK, self.padded_value + self.padded, dtype=self.work)
        weights = self.gates.new_empty(chunks.count, heads, 2, CHUNK)
        columns, tile, warps = TARGET[self.padded_value]
        target_kernel[(chunks.count * heads * (CHUNK // columns),)](
            do, self.k, self.v, self.gates, self.bounds, self.values_high, target, slopes, weights, chunks.table,
            chunks.cu_seqlens,
            *self.size, *self.groups, scale, *strides(do), *strides(self.k), *strides(self.v),
            K=key_dim, V=do.shape[-1], BK=self.padded, BV=self.padded_value, BW=min(tile, self.padded), BT=columns,
            num_warps=self.warps or warps, num_stages=1, **self.shared,
        )  # fmt: skip
        return target, slopes, weights

    def gradients(
        self, solution: Tensor, y: Tensor, slopes: Tensor, weights: Tensor, d_Hkv: Tensor | None,
        d_Hkk: Tensor | None, d_initial: bool, narrow: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(dq per recurrence head, dk, dv, gradients [2,B,T,H] of log_decay and gain, dridge, d initial Hkv and Hkk).

        From the solutions q* and y [B,T,H,K], and from `target`. dq = y, in k's type if `narrow`.
        """
        chunks, heads, work = self.chunks, self.size[2], self.work
        batch, tokens = y.shape[:2]
        key_dim, value_dim, wide_dim = self.k.shape[-1], self.v.shape[-1], self.padded_value
        new = self.gates.new_empty
        queries = new(chunks.count, heads, CHUNK, self.padded, dtype=work)
        d_query = torch.empty_like(y, dtype=self.k.dtype) if narrow else y
        d_ridge = new(chunks.count, heads, key_dim)
        lengths_kernel[(chunks.count * heads,)](
            solution, y, queries, slopes, weights, d_query, d_ridge, chunks.table, chunks.cu_seqlens, *self.size,
            K=key_dim, W=wide_dim, BK=self.padded, STORE=narrow, num_warps=LENGTHS[self.padded], num_stages=1,
            **self.shared,
        )  # fmt: skip
        d_final = [None, None]
        if d_Hkv is not None or d_Hkk is not None:
            shape = chunks.sequences, heads, key_dim
            pairs = (d_Hkv, value_dim), (d_Hkk, key_dim)
            d_final = [new(*shape, size).zero_() if d is None else d.contiguous() for d, size in pairs]
        ends = [None if d is None else d.abs().amax((-2, -1)) for d in d_final]
        d_states = new(chunks.count, heads, wide_dim + self.padded, self.padded, dtype=work)
        limits = new(chunks.count, heads, 2)
        state = (chunks.sequences, heads, key_dim) if d_initial else (0,)
        first_kv, first_kk = (new((*state, size) if d_initial else 0) for size in (value_dim, key_dim))
        tile, warps, stages = SLOPE[self.padded]
        tile = min(tile, self.padded, wide_dim)
        slope_kernel[(chunks.sequences * heads * ((wide_dim + self.padded) // tile),)](
            queries, slopes, weights, self.gates, self.sizes, *d_final, *ends, d_states, limits, first_kv, first_kk,
            chunks.offsets, chunks.cu_seqlens, *self.size,
            K=key_dim, V=value_dim, W=wide_dim, BK=self.padded, BD=tile, FINAL=d_final[0] is not None,
            INITIAL=d_initial, num_warps=self.warps or warps, num_stages=stages, **self.shared,
        )  # fmt: skip
        # Shared heads get sums of what their recurrence heads get: those are rounded once.
        dk, dv = (
            new(batch, tokens, heads, x.shape[-1], dtype=x.dtype if group == 1 else self.wide)
            for x, group in zip((self.k, self.v), self.groups, strict=True)
        )
        d_scalars = new(2, batch, tokens, heads)
        pairs = new(chunks.count, heads, CHUNK, CHUNK, dtype=work)
        sums = new(chunks.count, heads, 2)
        place = chunks.table, chunks.cu_seqlens, *self.size, *self.groups
        rest = batch * tokens * heads, *strides(self.k), *strides(self.v)
        shared = {"K": key_dim, "V": value_dim, "W": wide_dim, "BK": self.padded, "num_stages": 1} | self.shared
        tile, warps, registers = PAIRS[self.padded]
        tiles = {"BV": min(tile, wide_dim), "KT": min(tile, self.padded)}
        pairs_kernel[(chunks.count * heads,)](
            self.k, self.v, queries, slopes, weights, self.gates, self.bounds, self.high, self.values_high, d_states,
            limits, pairs, sums, d_scalars, *place, *rest, **tiles, **shared,
            num_warps=self.warps or warps, maxnreg=None if self.warps else registers,
        )  # fmt: skip
        tile, warps, registers = KEYS[self.padded]
        tiles = {"BV": min(tile, wide_dim), "KT": min(tile, self.padded)}
        keys_kernel[(chunks.count * heads,)](
            self.k, self.v, queries, slopes, weights, self.gates, d_states, limits, pairs, sums, dk, d_scalars, *place,
            *rest, **tiles, **shared, num_warps=self.warps or warps, maxnreg=None if self.warps else registers,
        )  # fmt: skip
        tile, warps, registers = VALUES[self.padded]
        values_kernel[(chunks.count * heads,)](
            self.k, queries, slopes, weights, self.gates, d_states, limits, dv, *place[:-1], *strides(self.k),
            BV=min(tile, wide_dim), **shared, num_warps=self.warps or warps,
            maxnreg=None if self.warps else registers,
        )  # fmt: skip
        dk, dv = (grads.sum_group(d, x.shape[2]).to(x.dtype) for d, x in ((dk, self.k), (dv, self.v)))
        if d_initial:
            first_kk = (first_kk + first_kk.mT) / 2
        return d_query, dk, dv, d_scalars, d_ridge.sum(0), first_kv, first_kk


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


def backward(
    k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, solution: Tensor, do: Tensor, d_Hkv: Tensor | None,
    d_Hkk: Tensor | None, scale: float, max_iter: int, tol: float, d_initial: bool, warps: int | None = None,
    narrow: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y = dq per recurrence head, dk, dv, gradients [2,B,T,H] of log_decay and gain, dridge, d initial Hkv and Hkk).

    With y and q* the rest is the gradient of linear attention with query q*, once with values v and cotangent dO, once
    with values k and cotangent -y. Queries and cotangents enter it at length 1, their lengths with what is summed in
    the accumulator's type. y is in that type, or with `narrow` in k's.
    """
    prepared = Prepared(k, v, log_decay, gain, ridge, Hkv, Hkk, cu_seqlens, False, tol < ROUGH, warps)
    target, slopes, weights = prepared.target(rows(do), scale)
    y, _, _ = prepared.solve(target, max_iter, tol)
    del target
    prepared.low = prepared.M = None  # Memory for what comes.
    return prepared.gradients(solution, y, slopes, weights, d_Hkv, d_Hkk, d_initial, narrow)
