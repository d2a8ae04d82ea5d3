"""C1 and B3: rows minus their previous running mean, running means, and the gradients of both.

With m0 the mean entering the chunk, P as in `stats` and E(t,s) = P(t-1,s), E(0,:) = 0:

    centred = (x - m0) - E (x - m0)      mean = m0 + P (x - m0) = x - (1 - b) centred,  b = exp(lw - lZ)

Backwards, given dc (cotangent of `centred`, that of rho2 = |centred|^2 included), dm (of `mean`) and d0' (of the mean
that leaves the chunk), with p = P(last,:):

    dx = dc - E^T dc + P^T dm + p d0'
    d0 = (1 - sum p) d0' + sum_t (1 - sum P(t,:)) dm_t - (1 - sum E(t,:)) dc_t
    R = (dm (x - m0)^T) o P,   Q = -(dc (x - m0)^T) o E,   r = p o ((x - m0) d0')
    row_t = sum R(t,:) + sum Q(t+1,:) + [t last] sum r,    column_s = sum R(:,s) + sum Q(:,s) + r_s
    dlw = column,   dlZ = -row,   dll = reverse in-chunk sum of (row - column)

Products are transposed, [D,C] and [s,t], so that each left operand is loaded; what a product subtracts for m0 uses the
same rounded weights, hence a mean of many spreads costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, LOG2E, Chunks, accumulator, dot, launch_warps, locate_chunk, precision, rows, strides
from .stats import borders, dim_tile, last_weights, load_logs, reverse_borders


@triton.jit
def mean_weights(write, forget, norm, row, SHIFT: tl.constexpr):
    """Transposed weights [s,t]: P(t,s) for s <= t, or with SHIFT = 1 E(t,s) = P(t-1,s), where `norm` holds lZ_{t-1}."""
    coarse = tl.floor(forget * 1024.0 + 0.5) * 0.0009765625
    rest = forget - coarse
    upto = row[:, None] <= row[None, :]
    L = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
    R = tl.sum(tl.where(upto, rest[:, None], 0.0), axis=0)
    if SHIFT:
        upto = row[:, None] < row[None, :]
        Lt = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
        Rt = tl.sum(tl.where(upto, rest[:, None], 0.0), axis=0)
    else:
        Lt = L
        Rt = R
    keep = upto & (write > float("-inf"))[:, None] & (norm > float("-inf"))[None, :]
    exponent = (Lt[None, :] - L[:, None]) + (Rt[None, :] - R[:, None]) + (write[:, None] - norm[None, :]) * LOG2E
    return tl.exp2(tl.where(keep, exponent, float("-inf")))


@triton.jit(do_not_specialize=["T", "NT", "H", "x_group", "total"])
def centre_kernel(
    x, log_write, log_forget, log_z, entering, seen, centred, mean, rho2, table, cu_seqlens,
    T, NT, H, x_group, total,
    x_batch, x_token, x_head, w_batch, w_token, w_head, f_batch, f_token, f_head, z_batch, z_token, z_head,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, CENTRED: tl.constexpr, MEAN: tl.constexpr, RHO: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    chunk = line // H
    head = line % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    real = row < count
    log_z += batch * z_batch + first * z_token + head * z_head
    write, forget, norm = load_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        log_z, row, real, w_token, f_token, z_token, ACC,
    )  # fmt: skip
    before = tl.load(log_z + (row - 1) * z_token, mask=real & (row > 0), other=float("-inf")).to(ACC)
    x += batch * x_batch + first * x_token + tl.cast(head // x_group, tl.int64) * x_head
    tile_t = inside[:, None] & real[None, :]
    x_rows = tl.load(x + row[:, None] * x_token + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    x_t = tl.load(x + row[None, :] * x_token + column[:, None], mask=tile_t, other=0.0).to(ACC)
    place = tl.cast(line, tl.int64)
    m0 = tl.load(entering + place * D + column, mask=inside, other=0.0)
    E = mean_weights(write, forget, before, row, 1).to(x_rows.dtype)
    gap = (
        x_t
        - m0[:, None]
        - (dot(tl.trans(x_rows), E, PRECISION, ACC) - m0[:, None] * tl.sum(E.to(ACC), axis=0)[None, :])
    )
    known = tl.load(seen + place) > 0
    written = tl.where(write > float("-inf"), 1, 0)
    earlier = tl.sum(tl.where(row[:, None] < row[None, :], written[:, None], 0), axis=0)
    was_seen = known | (earlier > 0)
    at = (batch * T + first) * H + head
    step = row * H
    if CENTRED:
        shown = tl.where(was_seen[None, :], gap, 0.0)
        tl.store(centred + at * D + step[None, :] * D + column[:, None], shown.to(x_rows.dtype), mask=tile_t)
        if RHO:
            tl.store(rho2 + tile * total + at + step, tl.sum(shown * shown, axis=0), mask=real)
    if MEAN:
        written_now = (write > float("-inf")) & (norm > float("-inf"))
        share = tl.exp2(tl.where(written_now, (write - norm) * LOG2E, float("-inf")))
        now = x_t - (1.0 - share)[None, :] * gap
        now = tl.where((was_seen | (write > float("-inf")))[None, :], now, 0.0)
        tl.store(mean + at * D + step[None, :] * D + column[:, None], now.to(x_rows.dtype), mask=tile_t)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def local_kernel(
    d_centred, centred, d_rho2, d_mean, log_write, log_forget, log_z, local, table, cu_seqlens,
    T, NT, H,
    w_batch, w_token, w_head, f_batch, f_token, f_head, z_batch, z_token, z_head,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, CENTRED: tl.constexpr, MEAN: tl.constexpr, RHO: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    chunk = line // H
    head = line % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    real = row < count
    log_z += batch * z_batch + first * z_token + head * z_head
    write, forget, norm = load_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        log_z, row, real, w_token, f_token, z_token, ACC,
    )  # fmt: skip
    at = (batch * T + first) * H + head
    step = row * H
    tile_rows = real[:, None] & inside[None, :]
    result = tl.zeros([BD], dtype=ACC)
    if CENTRED:
        before = tl.load(log_z + (row - 1) * z_token, mask=real & (row > 0), other=float("-inf")).to(ACC)
        kept = 1.0 - tl.sum(mean_weights(write, forget, before, row, 1), axis=0)
        slope = tl.load(d_centred + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0).to(ACC)
        if RHO:
            gap = tl.load(centred + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0).to(ACC)
            slope += 2.0 * tl.load(d_rho2 + at + step, mask=real, other=0.0).to(ACC)[:, None] * gap
        result -= tl.sum(kept[:, None] * slope, axis=0)
    if MEAN:
        kept = 1.0 - tl.sum(mean_weights(write, forget, norm, row, 0), axis=0)
        slope = tl.load(d_mean + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0).to(ACC)
        result += tl.sum(kept[:, None] * slope, axis=0)
    tl.store(local + tl.cast(line, tl.int64) * D + column, result, mask=inside)


@triton.jit(do_not_specialize=["T", "NT", "H", "x_group", "total"])
def centre_grads_kernel(
    x, d_centred, centred, d_rho2, d_mean, log_write, log_forget, log_z, entering, seen, leaving, dx, d_logs,
    table, cu_seqlens,
    T, NT, H, x_group, total,
    x_batch, x_token, x_head, w_batch, w_token, w_head, f_batch, f_token, f_head, z_batch, z_token, z_head,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, CENTRED: tl.constexpr, MEAN: tl.constexpr, RHO: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    chunk = line // H
    head = line % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    real = row < count
    tile_rows = real[:, None] & inside[None, :]
    tile_t = inside[:, None] & real[None, :]
    log_z += batch * z_batch + first * z_token + head * z_head
    write, forget, norm = load_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        log_z, row, real, w_token, f_token, z_token, ACC,
    )  # fmt: skip
    x += batch * x_batch + first * x_token + tl.cast(head // x_group, tl.int64) * x_head
    x_rows = tl.load(x + row[:, None] * x_token + column[None, :], mask=tile_rows, other=0.0)
    place = tl.cast(line, tl.int64)
    at = (batch * T + first) * H + head
    step = row * H
    m0 = tl.load(entering + place * D + column, mask=inside, other=0.0)
    d0 = tl.load(leaving + place * D + column, mask=inside, other=0.0)
    p = last_weights(write, forget, log_z, count, row, z_token, ACC)
    r = p * tl.sum((x_rows.to(ACC) - m0[None, :]) * d0[None, :], axis=1)
    by_row = tl.where(row == count - 1, tl.sum(r, axis=0), 0.0)
    by_column = r
    d_t = d0[:, None] * p[None, :]
    if CENTRED:
        before = tl.load(log_z + (row - 1) * z_token, mask=real & (row > 0), other=float("-inf")).to(ACC)
        E = mean_weights(write, forget, before, row, 1)
        slope = tl.load(d_centred + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0)
        Q = dot(x_rows, tl.trans(slope), PRECISION, ACC) - tl.sum(slope.to(ACC) * m0[None, :], axis=1)[None, :]
        d_t -= dot(tl.trans(slope), tl.trans(E).to(x_rows.dtype), PRECISION, ACC)
        slope_t = tl.load(d_centred + at * D + step[None, :] * D + column[:, None], mask=tile_t, other=0.0).to(ACC)
        if RHO:
            twice = 2.0 * tl.load(d_rho2 + at + step, mask=real, other=0.0).to(ACC)
            gap = tl.load(centred + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0)
            length = dot(x_rows, tl.trans(gap), PRECISION, ACC) - tl.sum(gap.to(ACC) * m0[None, :], axis=1)[None, :]
            Q += length * twice[None, :]
            d_t -= dot(tl.trans(gap), tl.trans(E * twice[None, :]).to(x_rows.dtype), PRECISION, ACC)
            gap_t = tl.load(centred + at * D + step[None, :] * D + column[:, None], mask=tile_t, other=0.0).to(ACC)
            slope_t += gap_t * twice[None, :]
        written = tl.where(write > float("-inf"), 1, 0)
        earlier = tl.sum(tl.where(row[:, None] < row[None, :], written[:, None], 0), axis=0)
        was_seen = (tl.load(seen + place) > 0) | (earlier > 0)
        d_t += tl.where(was_seen[None, :], slope_t, 0.0)
        Q = -Q * E
        by_column += tl.sum(Q, axis=1)
        later = tl.sum(Q, axis=0)
        by_row += tl.sum(tl.where(row[None, :] == row[:, None] + 1, later[None, :], 0.0), axis=1)
    if MEAN:
        P = mean_weights(write, forget, norm, row, 0)
        slope = tl.load(d_mean + at * D + step[:, None] * D + column[None, :], mask=tile_rows, other=0.0)
        R = dot(x_rows, tl.trans(slope), PRECISION, ACC) - tl.sum(slope.to(ACC) * m0[None, :], axis=1)[None, :]
        d_t += dot(tl.trans(slope), tl.trans(P).to(x_rows.dtype), PRECISION, ACC)
        R = R * P
        by_column += tl.sum(R, axis=1)
        by_row += tl.sum(R, axis=0)
    tl.store(dx + at * D + step[None, :] * D + column[:, None], d_t.to(x_rows.dtype), mask=tile_t)
    gap_sum = by_row - by_column
    d_forget = tl.sum(tl.where(row[:, None] >= row[None, :], gap_sum[:, None], 0.0), axis=0)
    d_logs += tile * 3 * total
    tl.store(d_logs + at + step, by_column, mask=real)
    tl.store(d_logs + total + at + step, d_forget, mask=real)
    tl.store(d_logs + 2 * total + at + step, -by_row, mask=real)


# D rounded up to a power of two -> warps of C1 and of B3
CENTRE = {16: (4, 8), 32: (4, 8), 64: (8, 8), 128: (8, 8), 256: (8, 8)}


def _warps(x: Tensor, warps: int | None) -> tuple[int, int]:
    forward, backward = CENTRE[min(256, max(16, triton.next_power_of_2(x.shape[-1])))]
    return launch_warps(x.dtype, warps or forward), launch_warps(x.dtype, warps or backward)


def forward(
    x: Tensor, log_write: Tensor, log_forget: Tensor, log_z: Tensor, initial: Tensor | None,
    cu_seqlens: Tensor | None, centred: bool, mean: bool, warps: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(centred, mean [B,T,H,D], rho2 [B,T,H], final [S,H,D], entering, totals, seen); what is not asked for is empty.

    rho2 comes with `centred` alone: keys need it, values do not.
    """
    x = rows(x)
    initial = None if initial is None else initial.contiguous()
    batch, tokens, heads = log_write.shape
    dim = x.shape[-1]
    chunks = Chunks(batch, tokens, cu_seqlens)
    entering, totals, seen, final = borders(x, log_write, log_forget, log_z, chunks, initial)
    tile = dim_tile(dim)
    count = triton.cdiv(dim, tile)
    lengths = centred and not mean
    gaps = x.new_empty((batch, tokens, heads, dim) if centred else 0)
    means = x.new_empty((batch, tokens, heads, dim) if mean else 0)
    rho2 = entering.new_empty((count, batch, tokens, heads) if lengths else 0)
    centre_kernel[(chunks.count * heads * count,)](
        x, log_write, log_forget, log_z, entering, seen, gaps, means, rho2, chunks.table, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // x.shape[2], batch * tokens * heads,
        *strides(x), *strides(log_write), *strides(log_forget), *strides(log_z),
        D=dim, BD=tile, C=CHUNK, CENTRED=centred, MEAN=mean, RHO=lengths, VARLEN=chunks.packed,
        PRECISION=precision(x.dtype), ACC=accumulator(x.dtype), num_warps=_warps(x, warps)[0], num_stages=1,
    )  # fmt: skip
    if lengths:
        rho2 = rho2.sum(0) if count > 1 else rho2[0]
    return gaps, means, rho2, final, entering, totals, seen


def backward(
    x: Tensor, log_write: Tensor, log_forget: Tensor, log_z: Tensor, cu_seqlens: Tensor | None, centred: Tensor,
    entering: Tensor, totals: Tensor, seen: Tensor, d_centred: Tensor | None, d_mean: Tensor | None,
    d_rho2: Tensor | None, d_final: Tensor | None, d_initial: bool, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx like x, gradients [3,B,T,H] of log_write, log_forget and log_z, d initial or empty)."""
    x = rows(x)
    batch, tokens, heads = log_write.shape
    dim = x.shape[-1]
    chunks = Chunks(batch, tokens, cu_seqlens)
    slopes = [None if d is None else d.contiguous() for d in (d_centred, d_rho2, d_mean)]
    d_final = None if d_final is None else d_final.contiguous()
    tile = dim_tile(dim)
    count = triton.cdiv(dim, tile)
    shared = {
        "D": dim, "C": CHUNK, "CENTRED": slopes[0] is not None, "MEAN": slopes[2] is not None,
        "RHO": slopes[1] is not None, "VARLEN": chunks.packed, "ACC": accumulator(x.dtype),
        "num_warps": _warps(x, warps)[1], "num_stages": 1,
    }  # fmt: skip
    logs = log_write, log_forget, log_z
    log_strides = [s for log in logs for s in strides(log)]
    local = torch.empty_like(entering)
    wide = dim_tile(dim, 128)
    local_kernel[(chunks.count * heads * triton.cdiv(dim, wide),)](
        slopes[0], centred, slopes[1], slopes[2], *logs, local, chunks.table, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, *log_strides, BD=wide, **shared,
    )  # fmt: skip
    leaving, first = reverse_borders(local, totals, chunks, d_final, d_initial)
    dx = x.new_empty(batch, tokens, heads, dim)
    d_logs = entering.new_empty(count, 3, batch, tokens, heads)
    centre_grads_kernel[(chunks.count * heads * count,)](
        x, slopes[0], centred, slopes[1], slopes[2], *logs, entering, seen, leaving, dx, d_logs,
        chunks.table, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // x.shape[2], batch * tokens * heads, *strides(x), *log_strides,
        BD=tile, PRECISION=precision(x.dtype), **shared,
    )  # fmt: skip
    return dx, d_logs.sum(0) if count > 1 else d_logs[0], first
