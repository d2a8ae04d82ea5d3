"""C1 and B3: rows minus their previous running mean, running means, and the gradients of both.

One warp takes a chunk of one head token by token, with the mean in registers, forwards

    centred_t = x_t - mean_{t-1},   mean_t = mean_{t-1} + b_t centred_t,   b = exp(lw - lZ)

and backwards, given dc_t (cotangent of `centred`, that of rho2 = |centred|^2 included) and dm_t (of `mean`), with the
cotangent of the mean in registers:

    slope += dm_t;   dot_t = slope . centred_t (cotangent of b_t);   dx_t = dc_t + b_t slope;   slope -= dx_t

Both stream: a few operations an element, no products of matrices, and a mean of many spreads costs no digits. Where a
token's share is all there is (the first one of a sequence), and before, rows are shown as zeros and have no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, accumulator, locate_chunk, rows, strides
from .lognorm import sequence_end
from .stats import carry, sequence_start, slopes_kernel, sums_kernel


@triton.jit
def load_four(x, at0, at1, at2, at3, ok0, ok1, ok2, ok3):
    """Four rows, zero where not ok; all are on their way before one is used."""
    a = tl.load(x + at0, mask=ok0, other=0.0)
    b = tl.load(x + at1, mask=ok1, other=0.0)
    c = tl.load(x + at2, mask=ok2, other=0.0)
    d = tl.load(x + at3, mask=ok3, other=0.0)
    return a, b, c, d


@triton.jit
def forwards(
    x, extra, share, t, real, at, mean, lengths, centred, means, weight, row,
    CENTRED: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr, LENGTHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token: the mean after it, and the lengths with its own."""
    gap = x.to(ACC) - mean
    mean += share * gap
    if CENTRED:
        tl.store(centred + at, gap.to(x.dtype), mask=real)
    if LENGTHS:
        # Columns beyond D hold zeros throughout.
        lengths = tl.where(row == t, tl.sum(gap * gap, axis=0), lengths)
    if MEANS:
        shown = weight * mean
        if ADD:
            shown += extra.to(ACC)
        tl.store(means + at, shown.to(x.dtype), mask=real)
    return mean, lengths


@triton.jit
def walk(
    x, centred, means, extra, shares, mean, weight, skip, count, x_token, y_token, a_token,
    D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr,
    LENGTHS: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Forwards through a chunk from the mean that enters it; the squared lengths [C] of the centred rows."""
    kind = x.dtype.element_ty
    column = tl.arange(0, BD)
    inside = column < D
    row = tl.arange(0, C)
    lengths = tl.zeros([C], dtype=ACC)
    # Up to the first written token of a sequence, which is the mean then.
    for t in range(0, skip):
        first = tl.load(x + t * x_token + column, mask=inside, other=0.0).to(ACC)
        mean = tl.where(tl.load(shares + t) > 0, first, 0.0)
        if CENTRED:
            tl.store(centred + t * y_token + column, tl.zeros([BD], dtype=kind), mask=inside)
        if MEANS:
            shown = weight * mean
            if ADD:
                shown += tl.load(extra + t * a_token + column, mask=inside, other=0.0).to(ACC)
            tl.store(means + t * y_token + column, shown.to(kind), mask=inside)
    for t in range(skip, count, 4):
        in0, in1, in2, in3 = t < count, t + 1 < count, t + 2 < count, t + 3 < count
        ok0, ok1, ok2, ok3 = inside & in0, inside & in1, inside & in2, inside & in3
        at0 = t * x_token + column
        x0, x1, x2, x3 = load_four(x, at0, at0 + x_token, at0 + 2 * x_token, at0 + 3 * x_token, ok0, ok1, ok2, ok3)
        b0, b1, b2, b3 = load_four(shares, t, t + 1, t + 2, t + 3, in0, in1, in2, in3)
        a0, a1, a2, a3 = x0, x1, x2, x3
        if ADD:
            at0 = t * a_token + column
            a0, a1, a2, a3 = load_four(
                extra, at0, at0 + a_token, at0 + 2 * a_token, at0 + 3 * a_token, ok0, ok1, ok2, ok3
            )
        at0 = t * y_token + column
        mean, lengths = forwards(
            x0, a0, b0, t, ok0, at0, mean, lengths, centred, means, weight, row,
            CENTRED, MEANS, ADD, LENGTHS, ACC,
        )  # fmt: skip
        mean, lengths = forwards(
            x1, a1, b1, t + 1, ok1, at0 + y_token, mean, lengths, centred, means, weight, row,
            CENTRED, MEANS, ADD, LENGTHS, ACC,
        )  # fmt: skip
        mean, lengths = forwards(
            x2, a2, b2, t + 2, ok2, at0 + 2 * y_token, mean, lengths, centred, means, weight, row,
            CENTRED, MEANS, ADD, LENGTHS, ACC,
        )  # fmt: skip
        mean, lengths = forwards(
            x3, a3, b3, t + 3, ok3, at0 + 3 * y_token, mean, lengths, centred, means, weight, row,
            CENTRED, MEANS, ADD, LENGTHS, ACC,
        )  # fmt: skip
    return lengths


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group"])
def centre_kernel(
    k, v, add_to, shares, skips, entering, strength, balance, weights, keys, values, means, lengths, erase, gain,
    table, cu_seqlens,
    T, NT, H, k_group, v_group,
    k_batch, k_token, k_head, v_batch, v_token, v_head, a_batch, a_token, a_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr,
    MEANS: tl.constexpr, READ: tl.constexpr, ADD: tl.constexpr, LENGTHS: tl.constexpr, ERASE: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 + (K > 0)
    head = tl.program_id(0) % H
    part = tl.program_id(0) // H % PARTS
    chunk = tl.program_id(0) // H // PARTS
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    scalars = (batch * H + head) * T + first
    at = (batch * T + first) * H + head
    skip = tl.load(skips + place)
    shares += scalars
    entering += place * (K + V)
    if part < PARTS - 1:
        key = tl.arange(0, BK)
        key_mean = tl.load(entering + key, mask=key < K, other=0.0)
        k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
        rho2 = walk(
            k, keys + at * K, k, k, shares, key_mean, 1.0, skip, count, k_token, H * K, 0,
            K, BK, True, False, False, LENGTHS, C, ACC,
        )  # fmt: skip
        if LENGTHS:
            row = tl.arange(0, C)
            real = row < count
            tl.store(lengths + scalars + row, rho2, mask=real)
            if ERASE:
                c = tl.exp(tl.load(balance + head).to(ACC))
                a = tl.load(strength + scalars + row, mask=real, other=0.0)
                shrink = a / (1.0 + a * c * c * rho2)
                tl.store(erase + scalars + row, shrink * c * c, mask=real)
                tl.store(gain + scalars + row, shrink * c, mask=real)
    else:
        value = tl.arange(0, BV)
        value_mean = tl.load(entering + K + value, mask=value < V, other=0.0)
        v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
        weight = tl.cast(1.0, ACC)
        if READ:
            weight = tl.load(weights + head).to(ACC)
        if ADD:
            add_to += batch * a_batch + first * a_token + tl.cast(head, tl.int64) * a_head
        walk(
            v, values + at * V, means + at * V, add_to, shares, value_mean, weight, skip, count,
            v_token, H * V, a_token, V, BV, VALUES, MEANS, ADD, False, C, ACC,
        )  # fmt: skip


@triton.jit
def backwards(
    d_gap, gap, d_length, d_mean, share, t, real, at, slope, dots, mean, read, dx, weight, row,
    CENTRED: tl.constexpr, MEANS: tl.constexpr, READ: tl.constexpr, LENGTHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token, backwards: the cotangent of the mean before it, the dots with its own, that mean, the read so far."""
    kind = gap.dtype
    gap = gap.to(ACC)
    if MEANS:
        slope += weight * d_mean.to(ACC)
    dots = tl.where(row == t, tl.sum(slope * gap, axis=0), dots)
    result = share * slope
    if CENTRED:
        result += d_gap.to(ACC)
    if LENGTHS:
        result += 2.0 * d_length * gap
    tl.store(dx + at, result.to(kind), mask=real)
    slope -= result
    if READ:
        # Going back a token undoes its step of the mean.
        read += d_mean.to(ACC) * mean
        mean -= share * gap
    return slope, dots, mean, read


@triton.jit
def walk_back(
    d_centred, centred, d_lengths, d_means, shares, slope, mean, weight, skip, count, dx, token,
    D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr, MEANS: tl.constexpr, READ: tl.constexpr,
    LENGTHS: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Backwards through a chunk from the cotangent of the mean that leaves it: (dots [C], sums of dm o mean)."""
    kind = dx.dtype.element_ty
    column = tl.arange(0, BD)
    inside = column < D
    row = tl.arange(0, C)
    dots = tl.zeros([C], dtype=ACC)
    read = tl.zeros([BD], dtype=ACC)
    for i in range(0, count - skip, 4):
        t = count - 1 - i
        in0, in1, in2, in3 = t >= skip, t - 1 >= skip, t - 2 >= skip, t - 3 >= skip
        ok0, ok1, ok2, ok3 = inside & in0, inside & in1, inside & in2, inside & in3
        at0 = t * token + column
        at1, at2, at3 = at0 - token, at0 - 2 * token, at0 - 3 * token
        g0, g1, g2, g3 = load_four(centred, at0, at1, at2, at3, ok0, ok1, ok2, ok3)
        b0, b1, b2, b3 = load_four(shares, t, t - 1, t - 2, t - 3, in0, in1, in2, in3)
        d0, d1, d2, d3 = g0, g1, g2, g3
        if CENTRED:
            d0, d1, d2, d3 = load_four(d_centred, at0, at1, at2, at3, ok0, ok1, ok2, ok3)
        l0, l1, l2, l3 = b0, b1, b2, b3
        if LENGTHS:
            l0, l1, l2, l3 = load_four(d_lengths, t, t - 1, t - 2, t - 3, in0, in1, in2, in3)
        m0, m1, m2, m3 = g0, g1, g2, g3
        if MEANS:
            m0, m1, m2, m3 = load_four(d_means, at0, at1, at2, at3, ok0, ok1, ok2, ok3)
        slope, dots, mean, read = backwards(
            d0, g0, l0, m0, b0, t, ok0, at0, slope, dots, mean, read, dx, weight, row,
            CENTRED, MEANS, READ, LENGTHS, ACC,
        )  # fmt: skip
        slope, dots, mean, read = backwards(
            d1, g1, l1, m1, b1, t - 1, ok1, at1, slope, dots, mean, read, dx, weight, row,
            CENTRED, MEANS, READ, LENGTHS, ACC,
        )  # fmt: skip
        slope, dots, mean, read = backwards(
            d2, g2, l2, m2, b2, t - 2, ok2, at2, slope, dots, mean, read, dx, weight, row,
            CENTRED, MEANS, READ, LENGTHS, ACC,
        )  # fmt: skip
        slope, dots, mean, read = backwards(
            d3, g3, l3, m3, b3, t - 3, ok3, at3, slope, dots, mean, read, dx, weight, row,
            CENTRED, MEANS, READ, LENGTHS, ACC,
        )  # fmt: skip
    for i in range(0, skip):
        t = skip - 1 - i
        written = tl.load(shares + t) > 0
        if MEANS:
            d_mean = tl.load(d_means + t * token + column, mask=inside, other=0.0).to(ACC)
            slope += weight * d_mean
            if READ:
                read += tl.where(written, d_mean * mean, 0.0)
        tl.store(dx + t * token + column, tl.where(written, slope, 0.0).to(kind), mask=inside)
    return dots, read


@triton.jit(do_not_specialize=["T", "NT", "H", "total"])
def centre_grads_kernel(
    d_keys, keys, d_lengths, d_values, values, d_means, shares, skips, factors, d_odds, leaving, entering, final,
    weights, dk, dv, d_shares, d_weights, table, cu_seqlens,
    T, NT, H, total,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LENGTHS: tl.constexpr,
    VALUES: tl.constexpr, MEANS: tl.constexpr, READ: tl.constexpr, ODDS: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 + (K > 0)
    head = tl.program_id(0) % H
    part = tl.program_id(0) // H % PARTS
    chunk = tl.program_id(0) // H // PARTS
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    scalars = (batch * H + head) * T + first
    at = (batch * T + first) * H + head
    skip = tl.load(skips + place)
    row = tl.arange(0, C)
    real = row < count
    factor = tl.load(factors + scalars + row, mask=real, other=0.0)
    shares += scalars
    leaving += place * (K + V)
    d_shares += scalars
    if part < PARTS - 1:
        key = tl.arange(0, BK)
        key_slope = tl.load(leaving + key, mask=key < K, other=0.0)
        key_dots, none = walk_back(
            d_keys + at * K, keys + at * K, d_lengths + scalars, d_keys, shares, key_slope, key_slope, 1.0, skip, count,
            dk + at * K, H * K, K, BK, True, False, False, LENGTHS, C, ACC,
        )  # fmt: skip
        key_dots = key_dots * factor
        if ODDS:
            key_dots += tl.load(d_odds + scalars + row, mask=real, other=0.0)
        tl.store(d_shares + total + row, key_dots, mask=real)
    else:
        value = tl.arange(0, BV)
        slope = tl.load(leaving + K + value, mask=value < V, other=0.0)
        mean = tl.zeros([BV], dtype=ACC)
        weight = tl.cast(1.0, ACC)
        if READ:
            weight = tl.load(weights + head).to(ACC)
            sequence, opening = sequence_start(chunk, first, table, cu_seqlens, NT, VARLEN)
            if first + count < sequence_end(chunk, table, cu_seqlens, T, VARLEN):
                mean = tl.load(entering + (place + H) * (K + V) + K + value, mask=value < V, other=0.0)
            else:
                line = tl.cast(sequence, tl.int64) * H + head
                mean = tl.load(final + line * (K + V) + K + value, mask=value < V, other=0.0)
        dots, read = walk_back(
            d_values + at * V, values + at * V, d_values, d_means + at * V, shares, slope, mean, weight, skip, count,
            dv + at * V, H * V, V, BV, VALUES, MEANS, READ, False, C, ACC,
        )  # fmt: skip
        tl.store(d_shares + row, dots * factor, mask=real)
        if READ:
            tl.store(d_weights + place, tl.sum(read, axis=0))


def _widths(k: Tensor | None, v: Tensor) -> dict:
    dims = 0 if k is None else k.shape[-1], v.shape[-1]
    padded = [max(16, triton.next_power_of_2(dim)) for dim in dims]
    return {"K": dims[0], "V": dims[1], "BK": padded[0], "BV": padded[1], "C": CHUNK, "ACC": accumulator(v.dtype)}


def _sources(k: Tensor | None, v: Tensor, heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(how many recurrence heads share a head of k and of v, their strides)."""
    key = (1, (0, 0, 0)) if k is None else (heads // k.shape[2], strides(k))
    return (key[0], heads // v.shape[2]), (*key[1], *strides(v))


def forward(
    k: Tensor | None, v: Tensor, shares: Tensor, skips: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    *, centred: bool = True, means: bool = True, lengths: bool = True, weights: Tensor | None = None,
    add_to: Tensor | None = None, strength: Tensor | None = None, balance: Tensor | None = None,
    borders: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Keys and values minus their running means, and what comes with them.

    Args:
        shares, skips: from `stats.share` or `gates.forward`. initial: [S,H,K+V], K = 0 without keys.
        centred, means, lengths: which of (vd), (vbar), (rho2) are wanted.
        weights, add_to: [H] and [B,T,H,V]; vbar becomes weights vbar + add_to.
        strength, balance: [B,H,T] and [H]; a and log c of the erase and the gain.
        borders: the means entering the chunks and the totals, of an earlier call; final means are then empty.

    Returns:
        (kd, vd, vbar [B,T,H,*], rho2, erase, gain [B,H,T], means entering the chunks [chunks,H,K+V], totals of p
        [chunks,H], final means [S,H,K+V]); what is not asked for is empty.
    """
    k, v = None if k is None else rows(k), rows(v)
    add_to = None if add_to is None else rows(add_to)
    batch, heads, tokens = shares.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    widths = _widths(k, v)
    key_dim, value_dim = widths["K"], widths["V"]
    groups, places = _sources(k, v, heads)
    tables = chunks.table, chunks.cu_seqlens
    size = tokens, chunks.per_row, heads
    if borders is None:
        sums = shares.new_empty(chunks.count, heads, key_dim + value_dim)
        totals = shares.new_empty(chunks.count, heads)
        sums_kernel[(chunks.count * heads,)](
            k, v, shares, sums, totals, *tables, *size, *groups, *places, VARLEN=chunks.packed, num_warps=SUMS, **widths
        )
        entering, final = carry(sums, totals, chunks, None if initial is None else initial.contiguous(), final=True)
    else:
        entering, totals = borders
        final = shares.new_empty(0)
    lengths, erase = lengths and k is not None, balance is not None
    keys = v.new_empty((batch, tokens, heads, key_dim) if k is not None else 0)
    values, mean = (v.new_empty((batch, tokens, heads, value_dim) if some else 0) for some in (centred, means))
    rho2 = shares.new_empty(shares.shape if lengths else 0)
    erased, gained = (shares.new_empty(shares.shape if erase else 0) for _ in range(2))
    centre_kernel[(chunks.count * heads * (1 if k is None else 2),)](
        v if k is None else k, v, add_to, shares, skips, entering, strength, balance, weights, keys, values, mean,
        rho2, erased, gained,
        *tables, *size, *groups, *places, *((0, 0, 0) if add_to is None else strides(add_to)),
        VALUES=centred, MEANS=means, READ=weights is not None, ADD=add_to is not None, LENGTHS=lengths, ERASE=erase,
        VARLEN=chunks.packed, num_warps=WALK, **widths,
    )  # fmt: skip
    return keys, values, mean, rho2, erased, gained, entering, totals, final


def backward(
    k: Tensor | None, v: Tensor, shares: Tensor, skips: Tensor, cu_seqlens: Tensor | None, keys: Tensor,
    values: Tensor, entering: Tensor, totals: Tensor, final: Tensor | None, d_keys: Tensor | None,
    d_values: Tensor | None, d_means: Tensor | None, d_lengths: Tensor | None, d_final: Tensor | None,
    d_initial: bool, *, weights: Tensor | None = None, factors: Tensor | None = None, d_odds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `forward` from those of kd, vd, vbar, rho2 [B,H,T] and the final means.

    factors [B,H,T]: what the cotangents of the shares are multiplied with, the shares themselves by default; then
    d_odds [B,H,T] is added.

    Returns:
        (dk and dv per recurrence head [B,T,H,*], the result for the shares as two terms [2,B,H,T], of values and of
        keys, d weights [H] or empty, d initial [S,H,K+V] or empty).
    """
    batch, heads, tokens = shares.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    widths = _widths(k, v)
    if k is not None and d_keys is None:
        d_keys = torch.zeros_like(keys)
    d_keys, d_values, d_means, d_lengths, d_final = (
        None if d is None else d.contiguous() for d in (d_keys, d_values, d_means, d_lengths, d_final)
    )
    read = weights is not None and d_means is not None
    constants = {
        "LENGTHS": d_lengths is not None, "VALUES": d_values is not None, "MEANS": d_means is not None,
        "READ": read, "VARLEN": chunks.packed, **widths,
    }  # fmt: skip
    tables = chunks.table, chunks.cu_seqlens
    size = tokens, chunks.per_row, heads
    local = torch.empty_like(entering)
    slopes_kernel[(chunks.count * heads * (1 if k is None else 2),)](
        # Without keys their branch never runs, but compiles.
        keys if d_keys is None else d_keys, keys, d_lengths, d_values, d_means, weights, shares, skips, local, *tables,
        *size, num_warps=SUMS, **constants,
    )  # fmt: skip
    leaving, first = carry(local, totals, chunks, d_final, final=d_initial, reverse=True)
    dk = keys.new_empty(keys.shape)
    dv = values.new_empty(values.shape)
    terms = shares.new_empty(2, *shares.shape)
    if k is None:
        terms[1].zero_()
    # Entries of the chunk table that no sequence uses are not written.
    d_weights = shares.new_zeros((chunks.count, heads) if read else 0)
    centre_grads_kernel[(chunks.count * heads * (1 if k is None else 2),)](
        *(keys if d is None else d for d in (d_keys, keys)), shares if d_lengths is None else d_lengths,
        *(values if d is None else d for d in (d_values, values, d_means)), shares, skips,
        shares if factors is None else factors, d_odds, leaving, entering, final, weights, dk, dv, terms, d_weights,
        *tables, *size, shares.numel(),
        ODDS=d_odds is not None, num_warps=WALK, **constants,
    )  # fmt: skip
    return dk, dv, terms, d_weights.sum(0) if read else d_weights, first


# Warps of the kernels that read a chunk at once, and of those that walk through it.
SUMS = 4
WALK = 1
