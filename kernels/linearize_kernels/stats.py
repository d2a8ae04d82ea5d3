"""M1 and M2: running means at chunk borders, forwards, and their cotangents, backwards.

With the share b_t = exp(lw_t - lZ_t) of a token the mean moves by b_t (x_t - mean), so a chunk acts on the mean that
enters it as

    mean <- (1 - total) mean + sum_s p_s x_s,   p_s = b_s prod_{u > s} (1 - b_u),   total = sum_s p_s

and backwards, given dc (cotangent of the centred rows) and dm (of the means after each token), on the cotangent of the
mean that leaves it as

    slope <- (1 - total) slope + sum_t (1 - b_t) A_t dm_t - A_t dc_t,   A_t = prod_{u < t} (1 - b_u)

Keys and values lie side by side, [.., K + V], in everything that has no tokens. Shares are [B,H,T].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, locate_chunk, locate_sequence
from .lognorm import NONE, WARPS, follow, head_block, heads_tile, share_left


@triton.jit
def sequence_start(chunk, first, table, cu_seqlens, NT, VARLEN: tl.constexpr):
    """(number of the sequence of a chunk, whether the chunk is its first one)."""
    if VARLEN:
        sequence = tl.load(table + 2 * chunk)
        return sequence, first == tl.load(cu_seqlens + tl.maximum(sequence, 0)).to(tl.int64)
    else:
        return chunk // NT, chunk % NT == 0


@triton.jit
def unseen_rows(write, entered, row, tile, count, C: tl.constexpr):
    """How many rows at the head of a chunk precede or are the first written token of a sequence, per head."""
    first = tl.min(tl.where((write > NONE) & tile, row[:, None], C), axis=0)
    return tl.where(entered, 0, tl.minimum(first + 1, count))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def shares_kernel(
    log_write, log_z, shares, skips, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, z_batch, z_token, z_head,
    C: tl.constexpr, BH: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    _, opening = sequence_start(chunk, first, table, cu_seqlens, NT, VARLEN)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    log_write += batch * w_batch + first * w_token
    log_z += batch * z_batch + first * z_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    norm = tl.load(log_z + row[:, None] * z_token + head[None, :] * z_head, mask=tile, other=NONE).to(ACC)
    place = (batch * H + head[None, :]) * T + first + row[:, None]
    tl.store(shares + place, share_left(norm, write), mask=tile)
    before = tl.load(log_z + head * z_head - z_token, mask=(head < H) & (opening == 0), other=NONE).to(ACC)
    entered = (opening & INITIAL) | (before > NONE)
    tl.store(skips + chunk * H + head, unseen_rows(write, entered, row, tile, count, C), mask=head < H)


@triton.jit
def load_rows(x, row, real, token, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a chunk, [C,BD]."""
    column = tl.arange(0, BD)
    return tl.load(x + row[:, None] * token + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "NT", "H", "k_group", "v_group"])
def sums_kernel(
    k, v, shares, sums, totals, table, cu_seqlens,
    T, NT, H, k_group, v_group, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // H
    head = line % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    real = row < count
    # All loads come before anything that waits for one.
    if K > 0:
        k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
        keys = load_rows(k, row, real, k_token, K, BK)
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    values = load_rows(v, row, real, v_token, V, BV)
    shares += (batch * H + head) * T + first
    own = tl.load(shares + row, mask=real, other=0.0)
    following = tl.load(shares + row + 1, mask=row + 1 < count, other=0.0)
    p = own * tl.cumprod(1.0 - following, axis=0, reverse=True)
    place = tl.cast(line, tl.int64)
    tl.store(totals + place, tl.sum(p, axis=0))
    sums += place * (K + V)
    if K > 0:
        gained = tl.sum(p[:, None] * keys.to(ACC), axis=0)
        tl.store(sums + tl.arange(0, BK), gained, mask=tl.arange(0, BK) < K)
    gained = tl.sum(p[:, None] * values.to(ACC), axis=0)
    tl.store(sums + K + tl.arange(0, BV), gained, mask=tl.arange(0, BV) < V)


@triton.jit
def reaching(shares, skip, row, real):
    """(A_t, -A_t where rows are shown) of a chunk: those shown as zeros have no cotangent, nothing was seen before."""
    earlier = tl.load(shares + row - 1, mask=real & (row > 0), other=0.0)
    reach = tl.cumprod(1.0 - earlier, axis=0)
    return reach, tl.where(row >= skip, -reach, 0.0)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def slopes_kernel(
    d_keys, keys, d_lengths, d_values, d_means, weights, shares, skips, local, table, cu_seqlens,
    T, NT, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LENGTHS: tl.constexpr,
    VALUES: tl.constexpr, MEANS: tl.constexpr, READ: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 + (K > 0)
    head = tl.program_id(0) % H
    part = tl.program_id(0) // H % PARTS
    chunk = tl.program_id(0) // H // PARTS
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    real = row < count
    shares += (batch * H + head) * T + first
    place = tl.cast(chunk, tl.int64) * H + head
    at = (batch * T + first) * H + head
    local += place * (K + V)
    # As in `sums_kernel`, all loads come first. Tiles have names of their own in each branch: one name in both has one
    # type, which keys and values of different widths do not have.
    if part < PARTS - 1:
        d_rows = load_rows(d_keys + at * K, row, real, H * K, K, BK)
        if LENGTHS:
            gaps = load_rows(keys + at * K, row, real, H * K, K, BK)
            twice = 2.0 * tl.load(d_lengths + (batch * H + head) * T + first + row, mask=real, other=0.0)
        reach, shown = reaching(shares, tl.load(skips + place), row, real)
        keyed = shown[:, None] * d_rows.to(ACC)
        if LENGTHS:
            keyed += (shown * twice)[:, None] * gaps.to(ACC)
        tl.store(local + tl.arange(0, BK), tl.sum(keyed, axis=0), mask=tl.arange(0, BK) < K)
    else:
        if VALUES:
            slopes = load_rows(d_values + at * V, row, real, H * V, V, BV)
        if MEANS:
            read = load_rows(d_means + at * V, row, real, H * V, V, BV)
        kept = 1.0 - tl.load(shares + row, mask=real, other=0.0)
        if READ:
            kept *= tl.load(weights + head).to(ACC)
        reach, shown = reaching(shares, tl.load(skips + place), row, real)
        gained = tl.zeros([C, BV], dtype=ACC)
        if VALUES:
            gained += shown[:, None] * slopes.to(ACC)
        if MEANS:
            gained += (reach * kept)[:, None] * read.to(ACC)
        tl.store(local + K + tl.arange(0, BV), tl.sum(gained, axis=0), mask=tl.arange(0, BV) < V)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def carry_means_kernel(
    sums, totals, initial, entering, final, offsets, cu_seqlens,
    T, NT, H,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What enters each chunk: means, from the first chunk on, or with REVERSE cotangents, from the last one on."""
    tiles = tl.cdiv(D, BD)
    tile = tl.program_id(0) % tiles
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    column = tile * BD + tl.arange(0, BD)
    inside = column < D
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    count = (end - start + C - 1) // C
    row = tl.arange(0, BLOCK)
    if INITIAL:
        mean = tl.load(initial + tl.cast(line, tl.int64) * D + column, mask=inside, other=0.0).to(ACC)
    else:
        mean = tl.zeros([BD], dtype=ACC)
    step = -H if REVERSE else H
    origin = tl.cast(chunk + (count - 1 if REVERSE else 0), tl.int64) * H + head
    if count > 0:
        tl.store(entering + origin * D + column, mean, mask=inside)
    for block in range(0, count, BLOCK):
        real = block + row < count
        place = origin + (block + row) * step
        mask = real[:, None] & inside[None, :]
        kept = tl.broadcast_to(1.0 - tl.load(totals + place, mask=real, other=0.0)[:, None], [BLOCK, BD])
        gained = tl.load(sums + place[:, None] * D + column[None, :], mask=mask, other=0.0)
        kept, gained = tl.associative_scan((kept, gained), 0, follow)
        means = gained + kept * mean[None, :]
        more = mask & (block + row + 1 < count)[:, None]
        tl.store(entering + (place + step)[:, None] * D + column[None, :], means, mask=more)
        mean = tl.sum(tl.where((row == BLOCK - 1)[:, None], means, 0.0), axis=0)
    if FINAL:
        tl.store(final + tl.cast(line, tl.int64) * D + column, mean, mask=inside)


# Chunks and columns of one step of the scan over chunks, and its warps.
CARRY = (32, 32, 4)


def share(log_write: Tensor, log_z: Tensor, chunks: Chunks, initial: bool) -> tuple[Tensor, Tensor]:
    """(shares [B,H,T], rows of each chunk that nothing was seen before [chunks,H])."""
    batch, tokens, heads = log_write.shape
    wide = torch.float64 if log_write.dtype == torch.float64 else torch.float32
    shares = log_write.new_empty(batch, heads, tokens, dtype=wide)
    skips = log_write.new_empty(chunks.count, heads, dtype=torch.int32)
    block = head_block(heads)
    shares_kernel[(chunks.count * triton.cdiv(heads, block),)](
        log_write, log_z, shares, skips, chunks.table, chunks.cu_seqlens, tokens, chunks.per_row, heads,
        *log_write.stride(), *log_z.stride(),
        C=CHUNK, BH=block, INITIAL=initial, VARLEN=chunks.packed,
        ACC=tl.float64 if wide == torch.float64 else tl.float32, num_warps=WARPS,
    )  # fmt: skip
    return shares, skips


def carry(
    sums: Tensor, totals: Tensor, chunks: Chunks, initial: Tensor | None, *, final: bool, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """(what enters each chunk, [chunks,H,D], and what leaves the last one [S,H,D] or empty)."""
    _, heads, dim = sums.shape
    entering = torch.empty_like(sums)
    last = sums.new_empty((chunks.sequences, heads, dim) if final else 0)
    block, widest, warps = CARRY
    tile = min(widest, triton.next_power_of_2(dim))
    carry_means_kernel[(chunks.sequences * heads * triton.cdiv(dim, tile),)](
        sums, totals, initial, entering, last, chunks.offsets, chunks.cu_seqlens,
        chunks.tokens, chunks.per_row, heads,
        D=dim, BD=tile, BLOCK=block, C=CHUNK, INITIAL=initial is not None, FINAL=final, REVERSE=reverse,
        VARLEN=chunks.packed, ACC=tl.float64 if sums.dtype == torch.float64 else tl.float32, num_warps=warps,
    )  # fmt: skip
    return entering, last
