"""M1 and M2: running means at chunk borders, forwards, and their cotangents, backwards.

Inside a chunk entered with mean m0 the mean after token t is m0 + sum_s P(t,s) (x_s - m0), where

    P(t,s) = exp((L_t - lZ_t) + (lw_s - L_s)) for s <= t,   L = in-chunk sum of log_forget

so a chunk acts on the mean through p = P(last,:) alone. A sequence of which nothing was written yet has no mean; its
chunk is centred on its first written row instead, which is exact, and keeps a large common mean out of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, LOG2E, Chunks, accumulator, locate_chunk, locate_sequence, strides


@triton.jit
def load_logs(log_write, log_forget, log_z, row, real, w_token, f_token, z_token, ACC: tl.constexpr):
    """Write, forget (times log2 e) and normaliser of a chunk; tail rows write nothing and forget nothing."""
    write = tl.load(log_write + row * w_token, mask=real, other=float("-inf")).to(ACC)
    forget = tl.load(log_forget + row * f_token, mask=real, other=0.0).to(ACC) * LOG2E
    norm = tl.load(log_z + row * z_token, mask=real, other=float("-inf")).to(ACC)
    return write, forget, norm


@triton.jit
def last_weights(write, forget, log_z, count, row, z_token, ACC: tl.constexpr):
    """p_s = P(last,s)."""
    after = tl.sum(tl.where(row[None, :] > row[:, None], forget[None, :], 0.0), axis=1)
    norm = tl.load(log_z + (count - 1) * z_token + row * 0).to(ACC)
    keep = (write > float("-inf")) & (norm > float("-inf"))
    return tl.exp2(tl.where(keep, after + (write - norm) * LOG2E, float("-inf")))


@triton.jit(do_not_specialize=["T", "NT", "H", "x_group"])
def sums_kernel(
    x, log_write, log_forget, log_z, sums, totals, firsts, table, cu_seqlens,
    T, NT, H, x_group,
    x_batch, x_token, x_head, w_batch, w_token, w_head, f_batch, f_token, f_head, z_batch, z_token, z_head,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
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
    real = row < count
    log_z += batch * z_batch + first * z_token + head * z_head
    write, forget, norm = load_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        log_z, row, real, w_token, f_token, z_token, ACC,
    )  # fmt: skip
    p = last_weights(write, forget, log_z, count, row, z_token, ACC)
    x += batch * x_batch + first * x_token + tl.cast(head // x_group, tl.int64) * x_head
    rows = tl.load(
        x + row[:, None] * x_token + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0
    ).to(ACC)
    place = tl.cast(line, tl.int64)
    tl.store(sums + place * D + column, tl.sum(p[:, None] * rows, axis=0), mask=column < D)
    if tile == 0:
        tl.store(totals + place, tl.sum(p, axis=0))
        tl.store(firsts + place, tl.min(tl.where(write > float("-inf"), row, C), axis=0))


@triton.jit(do_not_specialize=["T", "NT", "H", "x_group"])
def means_kernel(
    x, sums, totals, firsts, initial, entering, seen, final, offsets, cu_seqlens,
    T, NT, H, x_group,
    x_batch, x_token, x_head,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    x += batch * x_batch + tl.cast(start, tl.int64) * x_token + tl.cast(head // x_group, tl.int64) * x_head
    place = tl.cast(chunk, tl.int64) * H + head
    if INITIAL:
        mean = tl.load(initial + tl.cast(line, tl.int64) * D + column, mask=inside, other=0.0).to(ACC)
    else:
        mean = tl.zeros([BD], dtype=ACC)
    known = 1 if INITIAL else 0
    for _ in range(start, end, C):
        first = tl.load(firsts + place)
        total = tl.load(totals + place)
        gained = tl.load(sums + place * D + column, mask=inside, other=0.0)
        starts = (known == 0) & (first < C)
        row = tl.load(x + first * x_token + column, mask=inside & starts, other=0.0).to(ACC)
        mean = tl.where(starts, row, mean)
        tl.store(entering + place * D + column, mean, mask=inside)
        if tile == 0:
            tl.store(seen + place, known)
        mean += gained - total * mean
        known = tl.where(first < C, 1, known)
        place += H
        x += C * x_token
    tl.store(final + tl.cast(line, tl.int64) * D + column, mean, mask=inside)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def reverse_means_kernel(
    local, totals, d_final, leaving, d_initial, offsets, cu_seqlens,
    T, NT, H,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, D_FINAL: tl.constexpr, D_INITIAL: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    if D_FINAL:
        slope = tl.load(d_final + tl.cast(line, tl.int64) * D + column, mask=inside, other=0.0).to(ACC)
    else:
        slope = tl.zeros([BD], dtype=ACC)
    place = (tl.cast(chunk, tl.int64) + (end - start + C - 1) // C - 1) * H + head
    for _ in range(start, end, C):
        tl.store(leaving + place * D + column, slope, mask=inside)
        total = tl.load(totals + place)
        slope += tl.load(local + place * D + column, mask=inside, other=0.0) - total * slope
        place -= H
    if D_INITIAL:
        tl.store(d_initial + tl.cast(line, tl.int64) * D + column, slope, mask=inside)


def dim_tile(dim: int, largest: int = 64) -> int:
    """Width of the tiles of a row of `dim` numbers."""
    return min(largest, max(16, triton.next_power_of_2(dim)))


def borders(
    x: Tensor, log_write: Tensor, log_forget: Tensor, log_z: Tensor, chunks: Chunks, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(means entering the chunks [chunks,H,D], totals of p [chunks,H], seen flags [chunks,H], final means [S,H,D])."""
    heads, dim = log_write.shape[2], x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums, entering = (torch.empty(chunks.count, heads, dim, dtype=wide, device=x.device) for _ in range(2))
    totals = sums.new_empty(chunks.count, heads)
    firsts, seen = (torch.empty(chunks.count, heads, dtype=torch.int32, device=x.device) for _ in range(2))
    final = sums.new_empty(chunks.sequences, heads, dim)
    shared = {"D": dim, "C": CHUNK, "VARLEN": chunks.packed, "ACC": accumulator(x.dtype)}
    size = chunks.tokens, chunks.per_row, heads, heads // x.shape[2]
    tile = dim_tile(dim, 128)
    sums_kernel[(chunks.count * heads * triton.cdiv(dim, tile),)](
        x, log_write, log_forget, log_z, sums, totals, firsts, chunks.table, chunks.cu_seqlens,
        *size, *strides(x), *strides(log_write), *strides(log_forget), *strides(log_z),
        BD=tile, num_warps=4, num_stages=1, **shared,
    )  # fmt: skip
    means_kernel[(chunks.sequences * heads * triton.cdiv(dim, tile),)](
        x, sums, totals, firsts, initial, entering, seen, final, chunks.offsets, chunks.cu_seqlens,
        *size, *strides(x), BD=tile, INITIAL=initial is not None, num_warps=1, num_stages=1, **shared,
    )  # fmt: skip
    return entering, totals, seen, final


def reverse_borders(
    local: Tensor, totals: Tensor, chunks: Chunks, d_final: Tensor | None, d_initial: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of the means leaving the chunks [chunks,H,D], and of the initial means [S,H,D] or empty."""
    _, heads, dim = local.shape
    leaving = torch.empty_like(local)
    first = local.new_empty((chunks.sequences, heads, dim) if d_initial else 0)
    tile = dim_tile(dim, 128)
    reverse_means_kernel[(chunks.sequences * heads * triton.cdiv(dim, tile),)](
        local, totals, d_final, leaving, first, chunks.offsets, chunks.cu_seqlens,
        chunks.tokens, chunks.per_row, heads,
        D=dim, BD=tile, C=CHUNK, D_FINAL=d_final is not None, D_INITIAL=d_initial, VARLEN=chunks.packed,
        ACC=accumulator(local.dtype), num_warps=1, num_stages=1,
    )  # fmt: skip
    return leaving, first
