"""The zeroth-order readout in one pass over the values: taps, sink and running means of several time scales.

    base_t = sum_j tau_j v_{t-j} + rho_s v_first + sum_m rho_m vbar^(m)_t + rho_a a_t

All but the last term is linear in v. In a chunk entered with the means v0^(m), with L the in-chunk sum of log lambda,

    P(t,s) = exp((L_t - L_s) + (lw_s - lZ_t)), s <= t      G_t = (1 - b_0) exp((L_t - L_0) - (lZ_t - lZ_0))

    sum_m rho_m vbar^(m) = (sum_m rho_m P^(m)) V + sum_m rho_m G^(m) v0^(m)

so one product per chunk and head serves all time scales, and no mean is ever written but those at chunk borders. Since
the rows of P and G sum to 1, v0 + P (V - v0) is the same mean; the gradients are those of that form, which needs no G:
with dO of one head, D = dO V^T - dO v0 and y that leaves the chunk as cotangent of the mean,

    drho_m = sum P o D + sum dO v0      E = rho_m P o D, and E(last,s) += P(last,s) y (v_s - v0)
    dlw = colsum E      dlZ = -rowsum E      dL = rowsum E - colsum E
    dV = sum_h (sum_m rho_m P)^T dO + sum_m P(last,:) y

A program has a chunk of a KV head and goes through the query heads that share it. Tiles are [s,t] and [V,C], so that
the left operand of each product is loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, LOG2E, Chunks, accumulator, dot, locate_chunk, locate_sequence, rows
from .common import strides as strides_of
from .lognorm import NONE, follow

DEAD: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def locate_origin(chunk, table, cu_seqlens, T, NT, VARLEN: tl.constexpr):
    """(number, first token, end) of the sequence of a chunk."""
    if VARLEN:
        sequence = tl.load(table + 2 * chunk)
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        return sequence, start, tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    else:
        return chunk // NT, tl.cast(0, tl.int64), tl.cast(T, tl.int64)


@triton.jit
def chunk_logs(
    log_write, log_forget, log_z, row, count, w_token, f_token, z_token, CONSTANT: tl.constexpr, ACC: tl.constexpr
):
    """(L, lw, lZ) of one time scale of a chunk, times log2(e); lZ is +inf where nothing is written yet."""
    real = row < count
    write = tl.load(log_write + row * w_token, mask=real, other=NONE).to(ACC) * LOG2E
    norm = tl.load(log_z + row * z_token, mask=real, other=NONE).to(ACC) * LOG2E
    if CONSTANT:
        sums = tl.load(log_forget).to(ACC) * LOG2E * (row + 1).to(ACC)
    else:
        forget = tl.load(log_forget + row * f_token, mask=real, other=0.0).to(ACC) * LOG2E
        sums = tl.sum(tl.where(row[:, None] <= row[None, :], forget[:, None], 0.0), axis=0)
    return sums, write, tl.where(norm > NONE, norm, DEAD)


@triton.jit
def store_logs(logs, sums, write, norm, row, C: tl.constexpr):
    """The three as rows of numbers side by side, as which the other kernels can read them cheaply."""
    tl.store(logs + row, sums)
    tl.store(logs + C + row, write)
    tl.store(logs + 2 * C + row, norm)


@triton.jit
def at_row(x, row, i):
    """x_i, finite or not."""
    return tl.max(tl.where(row == i, x, NONE), axis=0)


@triton.jit
def mean_weights(logs, row, C: tl.constexpr):
    """P as [s,t]."""
    sums = tl.load(logs + row)
    write = tl.load(logs + C + row)
    norm = tl.load(logs + 2 * C + row)
    exponent = (sums[None, :] - sums[:, None]) + (write[:, None] - norm[None, :])
    return tl.exp2(tl.where(row[:, None] <= row[None, :], exponent, NONE))


@triton.jit
def last_weights(sums, write, last_sum, last_norm, row, count):
    """P(last,s)."""
    return tl.exp2(tl.where(row < count, (last_sum - sums) + (write - last_norm), NONE))


@triton.jit
def entering_weights(sums, norm, first_sum, first_write, first_norm):
    """G: what is left of the mean that enters the chunk."""
    kept = 1.0 - tl.exp2(first_write - first_norm)
    some = tl.maximum(norm, first_norm) < DEAD
    change = (sums - first_sum) - (tl.where(some, norm, 0.0) - tl.where(some, first_norm, 0.0))
    return tl.where(norm < DEAD, tl.exp2(tl.where(some, change, NONE)) * kept, 1.0)


@triton.jit(do_not_specialize=["T", "NT", "H", "group"])
def sums_kernel(
    v, log_write, log_forget, log_z, logs, sums, totals, table, cu_seqlens,
    T, NT, H, group, v_batch, v_token, v_head, w_batch, w_token, w_head, f_batch, f_token, f_head,
    z_batch, z_token, z_head,
    M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CONSTANT: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to each mean, sum_s P(last,s) v_s, and sum_s P(last,s); and its logs [chunks,H*M,3,C]."""
    kv_heads = H // group
    chunk = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tl.arange(0, BV)
    v += batch * v_batch + first * v_token + tl.cast(kv_head, tl.int64) * v_head
    mask = (row < count)[:, None] & (column < V)[None, :]
    values = tl.load(v + row[:, None] * v_token + column[None, :], mask=mask, other=0.0).to(ACC)
    log_write += batch * w_batch + first * w_token
    log_forget += batch * f_batch + first * f_token
    log_z += batch * z_batch + first * z_token
    for i in range(0, group * M):
        scale = kv_head * group * M + i
        sum_forget, write, norm = chunk_logs(
            log_write + scale * w_head, log_forget + scale * f_head, log_z + scale * z_head, row, count,
            w_token, f_token, z_token, CONSTANT, ACC,
        )  # fmt: skip
        place = tl.cast(chunk, tl.int64) * H * M + scale
        store_logs(logs + place * 3 * C, sum_forget, write, norm, row, C)
        last = at_row(sum_forget, row, count - 1), at_row(norm, row, count - 1)
        p = last_weights(sum_forget, write, last[0], last[1], row, count)
        tl.store(sums + place * V + column, tl.sum(p[:, None] * values, axis=0), mask=column < V)
        tl.store(totals + place, tl.sum(p, axis=0))


@triton.jit
def earlier_rows(
    v, tail, row, column, age, count, sequence, kv_head, kv_heads, v_token,
    j, J: tl.constexpr, V: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """v_{t-j} as [V,C]; before the start of the sequence from `tail`, or zero. age: tokens before the chunk."""
    place = age + row - j
    inside = (column < V)[:, None] & (row < count)[None, :]
    mask = inside & (place >= 0)[None, :]
    values = tl.load(v + (row - j)[None, :] * v_token + column[:, None], mask=mask, other=0.0).to(ACC)
    if TAIL:
        slot = (tl.cast(sequence, tl.int64) * (J - 1) + place + J - 1) * kv_heads + kv_head
        mask = inside & (place < 0)[None, :]
        values += tl.load(tail + slot[None, :] * V + column[:, None], mask=mask, other=0.0).to(ACC)
    return values


@triton.jit
def top_row(v, opening, sequence, kv_head, kv_heads, back, v_token, column, V: tl.constexpr, OPENING: tl.constexpr):
    """The value that the sink of a sequence returns to, `back` tokens before the chunk unless it is given."""
    if OPENING:
        source = opening + (tl.cast(sequence, tl.int64) * kv_heads + kv_head) * V
    else:
        source = v - back * v_token
    return tl.load(source + column, mask=column < V, other=0.0)


@triton.jit(do_not_specialize=["T", "NT", "H", "group"])
def local_grads_kernel(
    v, d_base, log_write, log_forget, log_z, scales, add_to, add_scale, entering, tail, opening, logs, reads, local,
    d_add, d_weights, table, cu_seqlens,
    T, NT, H, group, v_batch, v_token, v_head, o_batch, o_token, o_head, w_batch, w_token, w_head,
    f_batch, f_token, f_head, z_batch, z_token, z_head, a_batch, a_token, a_head,
    M: tl.constexpr, J: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CONSTANT: tl.constexpr,
    SINK: tl.constexpr, OPENING: tl.constexpr, TAIL: tl.constexpr, SCALED: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """What needs no product: the gradients of add_to, of its weight and of those of taps and sink, and

    `local`: by each chunk the cotangents of the means that enter it, sum_t rho_m G_t dO_t, and last sum_t dO_t;
    `reads` [chunks,H*M,C]: dO v0.
    """
    COLUMNS: tl.constexpr = 2 * M + J + 2
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    kv_heads = H // group
    kv_head = head // group
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    sequence, start, _ = locate_origin(chunk, table, cu_seqlens, T, NT, VARLEN)
    age = (first - start).to(tl.int32)
    row = tl.arange(0, C)
    column = tl.arange(0, BV)
    inside = column < V
    tile = inside[:, None] & (row < count)[None, :]
    v += batch * v_batch + first * v_token + tl.cast(kv_head, tl.int64) * v_head
    d_base += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    line = tl.cast(tl.program_id(0), tl.int64)
    d_weights += line * COLUMNS
    local += line * (M + 1) * V
    logs += line * M * 3 * C
    slope = tl.load(d_base + row[None, :] * o_token + column[:, None], mask=tile, other=0.0).to(ACC)
    for j in range(0, J):
        earlier = earlier_rows(
            v, tail, row, column, age, count, sequence, kv_head, kv_heads, v_token, j, J, V, TAIL, ACC
        )
        tl.store(d_weights + M + j, tl.sum(tl.sum(slope * earlier, axis=0), axis=0))
    if SCALED:
        add_to += batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
        added = tl.load(add_to + row[None, :] * a_token + column[:, None], mask=tile, other=0.0).to(ACC)
        tl.store(d_weights + M + J + 1, tl.sum(tl.sum(slope * added, axis=0), axis=0))
        result = (slope * tl.load(add_scale + head).to(ACC)).to(d_add.dtype.element_ty)
        d_add += ((batch * T + first) * H + head) * V
        tl.store(d_add + row[None, :] * (H * V) + column[:, None], result, mask=tile)
    whole = tl.sum(slope, axis=1)
    tl.store(local + M * V + column, whole, mask=inside)
    if SINK:
        top = top_row(v, opening, sequence, kv_head, kv_heads, age, v_token, column, V, OPENING).to(ACC)
        tl.store(d_weights + M + J, tl.sum(whole * top, axis=0))
    if M > 0:
        log_write += batch * w_batch + first * w_token
        log_forget += batch * f_batch + first * f_token
        log_z += batch * z_batch + first * z_token
        for m in range(0, M):
            scale = head * M + m
            sum_forget, write, norm = chunk_logs(
                log_write + scale * w_head, log_forget + scale * f_head, log_z + scale * z_head, row, count,
                w_token, f_token, z_token, CONSTANT, ACC,
            )  # fmt: skip
            store_logs(logs + m * 3 * C, sum_forget, write, norm, row, C)
            first_sum, first_write = at_row(sum_forget, row, 0), at_row(write, row, 0)
            kept = entering_weights(sum_forget, norm, first_sum, first_write, at_row(norm, row, 0))
            kept *= tl.load(scales + scale).to(ACC)
            tl.store(local + m * V + column, tl.sum(kept[None, :] * slope, axis=1), mask=inside)
            mean = tl.load(entering + (line * M + m) * V + column, mask=inside, other=0.0)
            tl.store(reads + (line * M + m) * C + row, tl.sum(slope * mean[:, None], axis=0))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def carry_kernel(
    gained, totals, initial, border, final, offsets, cu_seqlens,
    T, NT, H,
    M: tl.constexpr, LINES: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What enters each chunk of a sequence, from its first one on, or with REVERSE from its last one: per head M means

    that keep 1 - total over a chunk and, with LINES = M + 1, a sum. `border` and `final` are [.., H, LINES, V].
    """
    tiles = tl.cdiv(V, BD)
    line = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    inside = column < V
    m = line % LINES
    head = line // LINES % H
    sequence = line // LINES // H
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    count = (end - start + C - 1) // C
    mean = tl.zeros([BD], dtype=ACC)
    if INITIAL:
        given = (tl.cast(sequence, tl.int64) * H + head) * M + m
        mean += tl.load(initial + given * V + column, mask=inside & (m < M), other=0.0).to(ACC)
    row = tl.arange(0, BLOCK)
    for block in range(0, count, BLOCK):
        real = block + row < count
        at = tl.cast(chunk, tl.int64) + (count - 1 - block - row if REVERSE else block + row)
        share = tl.load(totals + (at * H + head) * M + m, mask=real & (m < M), other=0.0)
        place = ((at * H + head) * LINES + m)[:, None] * V + column[None, :]
        mask = real[:, None] & inside[None, :]
        kept = tl.broadcast_to(1.0 - share[:, None], [BLOCK, BD])
        added = tl.load(gained + place, mask=mask, other=0.0)
        kept, added = tl.associative_scan((kept, added), 0, follow)
        means = added + kept * mean[None, :]
        # Row i of the scan is what enters the chunk after the one of row i.
        step = -H * LINES * V if REVERSE else H * LINES * V
        tl.store(border + place + step, means, mask=mask & (block + row + 1 < count)[:, None])
        if block == 0:
            tl.store(border + place, tl.broadcast_to(mean[None, :], [BLOCK, BD]), mask=mask & (row == 0)[:, None])
        mean = tl.sum(tl.where((row == BLOCK - 1)[:, None], means, 0.0), axis=0)
    tl.store(final + tl.cast(line, tl.int64) * V + column, mean, mask=inside)


@triton.jit(do_not_specialize=["T", "NT", "H", "group"])
def readout_kernel(
    v, logs, scales, taps, sink, add_to, add_scale, entering, tail, opening, base, table, cu_seqlens,
    T, NT, H, group, v_batch, v_token, v_head, a_batch, a_token, a_head,
    M: tl.constexpr, J: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SINK: tl.constexpr, OPENING: tl.constexpr, TAIL: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    kv_heads = H // group
    chunk = tl.program_id(0) // TILES // kv_heads
    kv_head = tl.program_id(0) // TILES % kv_heads
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    sequence, start, _ = locate_origin(chunk, table, cu_seqlens, T, NT, VARLEN)
    age = (first - start).to(tl.int32)
    row = tl.arange(0, C)
    column = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    tile = (column < V)[:, None] & (row < count)[None, :]
    v += batch * v_batch + first * v_token + tl.cast(kv_head, tl.int64) * v_head
    kind = base.dtype.element_ty
    if SINK:
        top = top_row(v, opening, sequence, kv_head, kv_heads, age, v_token, column, V, OPENING).to(ACC)
    if M > 0:
        values = tl.load(v + row[None, :] * v_token + column[:, None], mask=tile, other=0.0)
    for g in range(0, group):
        head = kv_head * group + g
        local = tl.zeros([BV, C], dtype=ACC)
        for j in range(0, J):
            earlier = earlier_rows(
                v, tail, row, column, age, count, sequence, kv_head, kv_heads, v_token, j, J, V, TAIL, ACC
            )
            local += tl.load(taps + j * H + head).to(ACC) * earlier
        if SINK:
            local += (tl.load(sink + head).to(ACC) * top)[:, None]
        if ADD:
            given = add_to + batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
            added = tl.load(given + row[None, :] * a_token + column[:, None], mask=tile, other=0.0).to(ACC)
            local += added * tl.load(add_scale + head).to(ACC) if SCALED else added
        if M > 0:
            weights = tl.zeros([C, C], dtype=ACC)
            read = tl.zeros([BV, C], dtype=ACC)
            for m in range(0, M):
                place = (tl.cast(chunk, tl.int64) * H + head) * M + m
                line = logs + place * 3 * C
                rho = tl.load(scales + head * M + m).to(ACC)
                weights += rho * mean_weights(line, row, C)
                mean = tl.load(entering + place * V + column, mask=column < V, other=0.0)
                kept = entering_weights(
                    tl.load(line + row), tl.load(line + 2 * C + row), tl.load(line), tl.load(line + C),
                    tl.load(line + 2 * C),
                )  # fmt: skip
                read += mean[:, None] * (rho * kept)[None, :]
            read += dot(values, weights.to(values.dtype), ACC)
            local += read
        at = (batch * T + first) * H + head
        tl.store(base + at * V + row[None, :] * (H * V) + column[:, None], local.to(kind), mask=tile)


@triton.jit
def leaving_weights(logs, row, count, C: tl.constexpr):
    """P(last,s)."""
    last_sum = tl.load(logs + count - 1)
    last_norm = tl.load(logs + 2 * C + count - 1)
    return last_weights(tl.load(logs + row), tl.load(logs + C + row), last_sum, last_norm, row, count)


@triton.jit(do_not_specialize=["T", "NT", "H", "group", "size"])
def weight_grads_kernel(
    v, d_base, logs, reads, scales, entering, leaving, d_logs, d_weights, table, cu_seqlens,
    T, NT, H, group, size, v_batch, v_token, v_head, o_batch, o_token, o_head,
    M: tl.constexpr, J: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CONSTANT: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradients of the logs and of rho_m."""
    COLUMNS: tl.constexpr = 2 * M + J + 2
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tl.arange(0, BV)
    inside = column < V
    real = row < count
    v += batch * v_batch + first * v_token + tl.cast(head // group, tl.int64) * v_head
    d_base += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    line = tl.cast(tl.program_id(0), tl.int64)
    tile = real[:, None] & inside[None, :]
    values = tl.load(v + row[:, None] * v_token + column[None, :], mask=tile, other=0.0)
    slope = tl.load(d_base + row[None, :] * o_token + column[:, None], mask=tl.trans(tile), other=0.0)
    scores = dot(values, slope, ACC)
    for m in range(0, M):
        own = logs + (line * M + m) * 3 * C
        out = d_weights + line * COLUMNS + m
        rho = tl.load(scales + head * M + m).to(ACC)
        mean = tl.load(entering + (line * M + m) * V + column, mask=inside, other=0.0)
        later = tl.load(leaving + (line * (M + 1) + m) * V + column, mask=inside, other=0.0)
        read = tl.load(reads + (line * M + m) * C + row)
        E = (scores - read[None, :]) * mean_weights(own, row, C)
        by_row = tl.sum(E, axis=0)
        whole = tl.sum(by_row, axis=0)
        tl.store(out, whole + tl.sum(read, axis=0))
        # Loaded again: a register for each of its numbers would not last through the loop.
        again = tl.load(v + row[:, None] * v_token + column[None, :], mask=tile, other=0.0).to(ACC)
        gap = tl.sum((again - mean[None, :]) * later[None, :], axis=1)
        by_column = rho * tl.sum(E, axis=1) + leaving_weights(own, row, count, C) * gap
        # Rows and columns have one sum, so the last row gets what the columns got.
        by_row = rho * by_row + tl.where(row == count - 1, tl.sum(by_column, axis=0) - rho * whole, 0.0)
        slopes = d_logs + ((batch * H + head) * M + m) * T + first
        tl.store(slopes + row, by_column, mask=real)
        tl.store(slopes + size + row, -by_row, mask=real)
        d_sums = by_row - by_column
        if CONSTANT:
            tl.store(out + M + J + 2, tl.sum(tl.where(real, (row + 1).to(ACC) * d_sums, 0.0), axis=0))
        else:
            d_forget = tl.sum(tl.where(row[:, None] >= row[None, :], d_sums[:, None], 0.0), axis=0)
            tl.store(slopes + 2 * size + row, d_forget, mask=real)


@triton.jit(do_not_specialize=["T", "NT", "H", "group"])
def value_grads_kernel(
    d_base, logs, scales, taps, sink, leaving, ahead, dv, d_opening, table, cu_seqlens,
    T, NT, H, group, o_batch, o_token, o_head,
    M: tl.constexpr, J: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SINK: tl.constexpr,
    OPENING: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradients of the values: the readout backwards, over the query heads of a KV head."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    kv_heads = H // group
    chunk = tl.program_id(0) // TILES // kv_heads
    kv_head = tl.program_id(0) // TILES % kv_heads
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    sequence, start, end = locate_origin(chunk, table, cu_seqlens, T, NT, VARLEN)
    rest = tl.minimum(end - first, C + J).to(tl.int32)
    row = tl.arange(0, C)
    column = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    inside = column < V
    tile = inside[:, None] & (row < count)[None, :]
    through = tl.zeros([BV, C], dtype=ACC)
    direct = tl.zeros([BV, C], dtype=ACC)
    for g in range(0, group):
        head = kv_head * group + g
        slopes = d_base + batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
        for j in range(0, J):
            mask = tile & (row + j < rest)[None, :]
            later = tl.load(slopes + (row + j)[None, :] * o_token + column[:, None], mask=mask, other=0.0).to(ACC)
            direct += tl.load(taps + j * H + head).to(ACC) * later
        if M > 0:
            weights = tl.zeros([C, C], dtype=ACC)
            for m in range(0, M):
                line = tl.cast(chunk, tl.int64) * H + head
                own = logs + (line * M + m) * 3 * C
                weights += tl.load(scales + head * M + m).to(ACC) * mean_weights(own, row, C)
                later = tl.load(leaving + (line * (M + 1) + m) * V + column, mask=inside, other=0.0)
                through += later[:, None] * leaving_weights(own, row, count, C)[None, :]
            slope = tl.load(slopes + row[None, :] * o_token + column[:, None], mask=tile, other=0.0)
            through += dot(slope, tl.trans(weights).to(slope.dtype), ACC)
    if SINK:
        if first == start:
            d_top = tl.zeros([BV], dtype=ACC)
            for g in range(0, group):
                head = kv_head * group + g
                place = ((tl.cast(sequence, tl.int64) * H + head) * (M + 1) + M) * V
                whole = tl.load(ahead + place + column, mask=inside, other=0.0)
                d_top += tl.load(sink + head).to(ACC) * whole
            if OPENING:
                place = (tl.cast(sequence, tl.int64) * kv_heads + kv_head) * V
                tl.store(d_opening + place + column, d_top, mask=inside)
            else:
                direct += tl.where((row == 0)[None, :], d_top[:, None], 0.0)
    dv += ((batch * T + first) * kv_heads + kv_head) * V
    result = (direct + through).to(dv.dtype.element_ty)
    tl.store(dv + row[None, :] * (kv_heads * V) + column[:, None], result, mask=tile)


# Chunks and columns of one step of the scan over chunks, and its warps.
CARRY = (32, 32, 4)
# V, or V rounded up to a power of two -> warps of what has no product, of the readout, and of the gradients of weights
# and of values. Readout and gradients of values take V in tiles of at most 128.
WARPS = {
    16: (4, 2, 4, 2),
    32: (4, 2, 4, 2),
    64: (4, 4, 4, 4),
    96: (4, 8, 4, 8),
    128: (4, 8, 4, 4),
    256: (8, 8, 8, 8),
}
TILE = 128


def _width(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _warps(v: Tensor, warps: int | None) -> list[int]:
    """Warps of the launches of WARPS; those with products may be replaced, but float32 has its own: no WGMMA."""
    simple, *products = WARPS.get(v.shape[-1], WARPS[_width(v.shape[-1])])
    return [simple, *(8 if v.dtype == torch.float32 else warps or default for default in products)]


def _widths(v: Tensor, scales: Tensor) -> dict:
    dim = v.shape[-1]
    return {"M": scales.shape[1], "V": dim, "BV": _width(dim), "C": CHUNK, "ACC": accumulator(v.dtype)}


def _logs(log_write: Tensor, log_forget: Tensor, log_z: Tensor) -> tuple[tuple[int, ...], bool]:
    """(strides of the three, whether the forgetting is one number per time scale)."""
    constant = log_forget.dim() == 1
    forget = (0, 0, log_forget.stride(0)) if constant else strides_of(log_forget)
    return (*strides_of(log_write), *forget, *strides_of(log_z)), constant


def _carry(
    gained: Tensor, totals: Tensor, chunks: Chunks, initial: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(what enters each chunk, like `gained` [chunks,H,lines,V]; what is left at the end [sequences,H,lines,V])."""
    _, heads, lines, dim = gained.shape
    border = torch.empty_like(gained)
    final = gained.new_empty(chunks.sequences, heads, lines, dim)
    block, tile, warps = CARRY
    tile = min(tile, _width(dim))
    carry_kernel[(chunks.sequences * heads * lines * triton.cdiv(dim, tile),)](
        gained, totals, None if initial is None else initial.contiguous(), border, final, chunks.offsets,
        chunks.cu_seqlens, chunks.tokens, chunks.per_row, heads,
        M=totals.shape[2], LINES=lines, V=dim, BD=tile, BLOCK=block, C=CHUNK, INITIAL=initial is not None,
        REVERSE=reverse, VARLEN=chunks.packed, ACC=accumulator(gained.dtype), num_warps=warps,
    )  # fmt: skip
    return border, final


def forward(
    v: Tensor, log_write: Tensor, log_forget: Tensor, log_z: Tensor, scales: Tensor, taps: Tensor | None,
    sink: Tensor | None, add_to: Tensor | None, add_scale: Tensor | None, initial: Tensor | None,
    tail: Tensor | None, opening: Tensor | None, cu_seqlens: Tensor | None, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(base [B,T,H,V], final means [S,H*M,V], means that enter the chunks [chunks,H,M,V], sums of P(last,:)).

    Arguments as `api.readout`; `opening` is its `first`. `warps` replaces the entry of the launch table.
    """
    v = rows(v)
    add_to = None if add_to is None else rows(add_to)
    batch, tokens, kv_heads, dim = v.shape
    heads, count = scales.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    widths = _widths(v, scales)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    logs, constant = _logs(log_write, log_forget, log_z) if count else ((0,) * 9, False)
    size = tokens, chunks.per_row, heads, heads // kv_heads
    tables = chunks.table, chunks.cu_seqlens
    shared = {"VARLEN": chunks.packed, "num_stages": 1, **widths}
    simple, product, *_ = _warps(v, warps)
    totals = v.new_empty(chunks.count, heads, count, dtype=wide)
    sums = v.new_empty(chunks.count, heads, count, dim, dtype=wide)
    lines = v.new_empty(chunks.count, heads * count, 3, CHUNK, dtype=wide)
    if count:
        sums_kernel[(chunks.count * kv_heads,)](
            v, log_write, log_forget, log_z, lines, sums, totals, *tables, *size, *strides_of(v), *logs,
            CONSTANT=constant, num_warps=simple, **shared,
        )  # fmt: skip
        entering, final = _carry(sums, totals, chunks, initial, reverse=False)
    else:
        entering, final = sums, sums.new_empty(chunks.sequences, heads, 0, dim)
    base = v.new_empty(batch, tokens, heads, dim)
    tile = min(TILE, widths["BV"])
    readout_kernel[(chunks.count * kv_heads * triton.cdiv(dim, tile),)](
        v, lines, scales, taps, sink, add_to, add_scale, entering,
        None if tail is None else tail.contiguous(), None if opening is None else opening.contiguous(), base,
        *tables, *size, *strides_of(v), *((0, 0, 0) if add_to is None else strides_of(add_to)),
        J=0 if taps is None else taps.shape[0], SINK=sink is not None, OPENING=opening is not None,
        TAIL=tail is not None, ADD=add_to is not None, SCALED=add_scale is not None,
        num_warps=product, **shared | {"BV": tile},
    )  # fmt: skip
    return base, final.flatten(1, 2), entering, totals


def backward(
    v: Tensor, log_write: Tensor, log_forget: Tensor, log_z: Tensor, scales: Tensor, taps: Tensor | None,
    sink: Tensor | None, add_to: Tensor | None, add_scale: Tensor | None, tail: Tensor | None,
    opening: Tensor | None, cu_seqlens: Tensor | None, entering: Tensor, totals: Tensor, d_base: Tensor,
    d_final: Tensor | None, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by those of base and of the final means.

    Returns:
        (dv, [3,B,H*M,T] of log write, log Z and log forget, d weights [H,2M+J+2] of scales, taps, sink, add_scale and
        constant forgettings, d add_to, d initial means [S,H*M,V], d opening); the third part of the second is not set
        where the forgetting is constant, and the columns and tensors of what is absent are not to be used.
    """
    v, d_base = rows(v), rows(d_base)
    add_to = None if add_to is None else rows(add_to)
    batch, tokens, kv_heads, dim = v.shape
    heads, count = scales.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    widths = _widths(v, scales)
    logs, constant = _logs(log_write, log_forget, log_z) if count else ((0,) * 9, False)
    tables = chunks.table, chunks.cu_seqlens
    size = 0 if taps is None else taps.shape[0]
    tail, opening = (None if x is None else x.contiguous() for x in (tail, opening))
    local = entering.new_empty(chunks.count, heads, count + 1, dim)
    lines = entering.new_empty(chunks.count, heads * count, 3, CHUNK)
    reads = entering.new_empty(chunks.count, heads * count, CHUNK)
    d_add = v.new_empty((batch, tokens, heads, dim) if add_scale is not None else 0)
    # Entries of the chunk table that no sequence uses are not written, nor are columns of what is absent.
    d_weights = entering.new_zeros(chunks.count, heads, 2 * count + size + 2)
    sizes = tokens, chunks.per_row, heads, heads // kv_heads
    simple, _, of_weights, of_values = _warps(v, warps)
    flags = {"SINK": sink is not None, "OPENING": opening is not None}
    shared = {"J": size, "VARLEN": chunks.packed, "num_stages": 1, **widths}
    local_grads_kernel[(chunks.count * heads,)](
        v, d_base, log_write, log_forget, log_z, scales, add_to, add_scale, entering, tail, opening, lines, reads,
        local, d_add, d_weights, *tables, *sizes, *strides_of(v), *strides_of(d_base), *logs,
        *((0, 0, 0) if add_scale is None else strides_of(add_to)),
        CONSTANT=constant, TAIL=tail is not None, SCALED=add_scale is not None, num_warps=simple, **flags, **shared,
    )  # fmt: skip
    leaving, ahead = _carry(local, totals, chunks, d_final, reverse=True)
    d_logs = entering.new_empty(2 if constant else 3, batch, heads * count, tokens)
    if count:
        weight_grads_kernel[(chunks.count * heads,)](
            v, d_base, lines, reads, scales, entering, leaving, d_logs, d_weights, *tables, *sizes,
            batch * tokens * heads * count, *strides_of(v), *strides_of(d_base),
            CONSTANT=constant, num_warps=of_weights, **shared,
        )  # fmt: skip
    dv = v.new_empty(batch, tokens, kv_heads, dim)
    d_opening = entering.new_zeros(opening.shape if opening is not None else 0)
    tile = min(TILE, widths["BV"])
    value_grads_kernel[(chunks.count * kv_heads * triton.cdiv(dim, tile),)](
        d_base, lines, scales, taps, sink, leaving, ahead, dv, d_opening, *tables, *sizes, *strides_of(d_base),
        num_warps=of_values, **flags, **shared | {"BV": tile},
    )  # fmt: skip
    return dv, d_logs, d_weights.sum(0), d_add, ahead[:, :, :count].flatten(1, 2), d_opening


def tail_gradient(d_base: Tensor, taps: Tensor, tail: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """d tail [S,J-1,Hk,V]: every sequence's first rows of d_base through the taps that reach before it."""
    size = taps.shape[0]
    sequences, slots, kv_heads, _ = tail.shape
    tokens = d_base.shape[1]
    place = torch.arange(slots, device=tail.device)
    if cu_seqlens is None:
        valid = (place < tokens).expand(sequences, slots)
        head = d_base[:, place.clamp(max=tokens - 1)]
    else:
        index = cu_seqlens[:-1, None] + place
        valid = index < cu_seqlens[1:, None]
        head = d_base[0, index.clamp(max=tokens - 1)]
    head = torch.where(valid[..., None, None], head, 0.0).to(tail.dtype)
    result = torch.zeros_like(tail)
    for j in range(1, size):
        # Token i reads slot J - 1 + i - j.
        term = (head[:, :j] * taps[j].to(tail.dtype)[:, None]).unflatten(2, (kv_heads, -1)).sum(3)
        result[:, size - 1 - j :] += term
    return result
