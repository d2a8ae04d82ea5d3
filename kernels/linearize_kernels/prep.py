"""P1: what a chunk of the delta rule needs before any state is known (one program per chunk and head).

g = in-chunk sum of log_decay (stored in units of log 2), N = (I + diag(beta) tril(K K^T o Gam, -1))^-1 - I and
A = scale (Q K^T) o Gam, with Gam(t,s) = exp(g_t - g_s) for s <= t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, LOG2E, ROWS, WARPS_FULL, Chunks, accumulator, dot, locate_chunk, registers, strides

SCRATCH: tl.constexpr = tl.constexpr(2560)


@triton.jit
def split_dot(a, b, ACC: tl.constexpr):
    """a @ b for float32 tiles as three tf32 products, without the guards against infinities that tl.dot adds."""
    if ACC == tl.float32:
        # To the nearest number of 11 bits, by its pattern; what is left over has 12 bits, of which 11 count.
        high_a = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        high_b = ((b.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        c = tl.dot(a - high_a, high_b, input_precision="tf32", out_dtype=ACC)
        c = tl.dot(high_a, b - high_b, c, input_precision="tf32", out_dtype=ACC)
        return tl.dot(high_a, high_b, c, input_precision="tf32", out_dtype=ACC)
    else:
        return tl.dot(a, b, out_dtype=ACC)


@triton.jit
def store_inverse(L, scratch, N, ACC: tl.constexpr):
    """Write N = (I + L)^-1 - I for a strictly lower L [64,64]: four 16x16 substitutions in step, then two merges.

    `scratch` points to `SCRATCH` numbers of this program's own: four diagonal blocks (of L, later of the inverse), the
    two 16x16 blocks left of the odd ones and L's lower left quarter. Blocks change shape through it, at the price of a
    barrier. Plain tf32 would lose three digits in the merges, and doubling series diverge for correlated keys.
    """
    index = tl.arange(0, 64)
    r = index[:, None]
    c = index[None, :]
    inside = (r % 16) * 16 + c % 16
    tl.store(scratch + (r // 16) * 256 + inside, L, mask=r // 16 == c // 16)
    tl.store(scratch + 1024 + (r // 32) * 256 + inside, L, mask=(r // 16 == c // 16 + 1) & (r // 16 % 2 == 1))
    tl.store(scratch + 1536 + (r - 32) * 32 + c, L, mask=(r >= 32) & (c < 32))
    tl.debug_barrier()
    # A thread owns one column of one block and keeps its rows: no sum crosses threads.
    column = index % 16
    block = scratch + (index // 16) * 256
    rows = (tl.where(column == 0, 1.0, 0.0).to(ACC),)
    for i in tl.static_range(1, 16):
        total = tl.where(column == i, 1.0, 0.0).to(ACC)
        for j in tl.static_range(0, i):
            total -= tl.load(block + i * 16 + j) * rows[j]
        rows = rows + (total,)
    pair = tl.arange(0, 2)[:, None, None]
    half = tl.arange(0, 16)
    square = half[None, :, None] * 16 + half[None, None, :]
    corner = tl.load(scratch + 1024 + pair * 256 + square)
    tl.debug_barrier()
    for i in tl.static_range(0, 16):
        tl.store(block + i * 16 + column, rows[i])
    tl.debug_barrier()
    first = tl.load(scratch + pair * 512 + square)
    second = tl.load(scratch + pair * 512 + 256 + square)
    corner = -split_dot(split_dot(second, corner, ACC), first, ACC)
    tl.store(scratch + 1024 + pair * 256 + square, corner)
    tl.debug_barrier()
    half = tl.arange(0, 32)
    r = half[:, None]
    c = half[None, :]
    # Blocks on the diagonal lie 256 apart, and so do those left of the odd ones.
    at = (r % 16) * 16 + c % 16 + tl.where(r // 16 == c // 16, (r // 16) * 256, 1024)
    step = tl.where(r // 16 == c // 16, 512, 256)
    keep = r // 16 >= c // 16
    first = tl.load(scratch + at, mask=keep, other=0.0)
    second = tl.load(scratch + at + step, mask=keep, other=0.0)
    corner = tl.load(scratch + 1536 + r * 32 + c)
    corner = -split_dot(split_dot(second, corner, ACC), first, ACC)
    place = N + r * 64 + c
    kind = N.dtype.element_ty
    tl.store(place, tl.where(r > c, first, 0.0).to(kind))
    tl.store(place + 32 * 64 + 32, tl.where(r > c, second, 0.0).to(kind))
    tl.store(place + 32 * 64, corner.to(kind))
    tl.store(place + 32, tl.zeros([32, 32], dtype=kind))


@triton.jit
def split_steps(log_decay, token, count, stride, ACC: tl.constexpr):
    """Log decays of tokens in units of log 2, as multiples of 2^-10 and what is left over.

    Multiples of 2^-10 add up exactly in float32, so differences of their sums do not lose what the sums gain.
    """
    step = tl.load(log_decay + token * stride, mask=token < count, other=0.0).to(ACC) * LOG2E
    coarse = tl.floor(step * 1024.0 + 0.5) * 0.0009765625
    return coarse, step - coarse


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "scale"])
def prep_kernel(
    q, k, log_decay, beta, gain, scalars, N, A, scratch, table, cu_seqlens,
    T, NT, H, q_group, k_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    decay_batch, decay_token, decay_head, beta_batch, beta_token, beta_head, gain_batch, gain_token, gain_head,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    column = tl.arange(0, BK)
    real = row < count
    tile = real[:, None] & (column < K)[None, :]
    q += batch * q_batch + first * q_token + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    keys = tl.load(k + row[:, None] * k_token + column[None, :], mask=tile, other=0.0)
    queries = tl.load(q + row[:, None] * q_token + column[None, :], mask=tile, other=0.0)
    place = tl.cast(chunk, tl.int64) * H + head
    gain += batch * gain_batch + first * gain_token + head * gain_head
    write = tl.load(gain + row * gain_token, mask=real, other=0.0).to(ACC)
    lower = row[:, None] >= row[None, :]
    out = scalars + place * ROWS * C
    tl.store(out + 3 * C + row, write)
    if DECAY:
        log_decay += batch * decay_batch + first * decay_token + head * decay_head
        # Sums of sixteen within a quarter of the chunk, then over the quarters before it; rows of a tile, of which a
        # thread holds four numbers.
        within = tl.arange(0, 16)
        token = (row // 16 * 16)[:, None] + within[None, :]
        coarse, fine = split_steps(log_decay, token, count, decay_token, ACC)
        upto = within[None, :] <= (row % 16)[:, None]
        g = tl.sum(tl.where(upto, coarse, 0.0), axis=1)
        rest = tl.sum(tl.where(upto, fine, 0.0), axis=1)
        quarter = tl.arange(0, C // 16)
        coarse, fine = split_steps(log_decay, quarter[:, None] * 16 + within[None, :], count, decay_token, ACC)
        before = quarter[None, :] < (row // 16)[:, None]
        g += tl.sum(tl.where(before, tl.sum(coarse, axis=1)[None, :], 0.0), axis=1)
        rest += tl.sum(tl.where(before, tl.sum(fine, axis=1)[None, :], 0.0), axis=1)
    else:
        g = tl.zeros([C], dtype=ACC)
        rest = g
    tl.store(out + row, g)
    tl.store(out + C + row, rest)
    reach = tl.exp2(g + rest)
    g_last = tl.sum(tl.where(row == C - 1, g, 0.0), axis=0)
    rest_last = tl.sum(tl.where(row == C - 1, rest, 0.0), axis=0)
    tl.store(out + 4 * C + row, reach)
    tl.store(out + 5 * C + row, tl.exp2((g_last - g) + (rest_last - rest)))
    between = (g[:, None] - g[None, :]) + (rest[:, None] - rest[None, :])
    decay = tl.exp2(tl.where(lower, between, float("-inf")))
    square = place * C * C + row[:, None] * C + row[None, :]
    scores = dot(queries, tl.trans(keys), ACC) * scale
    tl.store(A + square, (scores * decay).to(A.dtype.element_ty))
    if ERASE:
        beta += batch * beta_batch + first * beta_token + head * beta_head
        erase = tl.load(beta + row * beta_token, mask=real, other=0.0).to(ACC)
        tl.store(out + 2 * C + row, erase)
        tl.store(out + 6 * C + row, erase * reach)
        gram = dot(keys, tl.trans(keys), ACC)
        L = tl.where(row[:, None] > row[None, :], gram * decay, 0.0) * erase[:, None]
        store_inverse(L, scratch + place * SCRATCH, N + place * C * C, ACC)


# (K rounded up to a power of two) -> (warps, stages)
PREP = {32: (4, 1), 64: (4, 1), 128: (4, 1), 256: (4, 1)}
# Registers of a thread where four warps run: four programs then share a multiprocessor.
MAX_REGISTERS = 128


def prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float, chunks: Chunks,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(scalars [chunks,H,7,C], N and A [chunks,H,C,C]); N is empty without beta.

    The scalars: g / log 2 in two parts that must be added after taking differences, beta, gain, exp(g), exp(g_last - g)
    and beta exp(g).
    """
    heads, dim = gain.shape[2], k.shape[-1]
    padded = max(32, triton.next_power_of_2(dim))
    scalar_type = torch.float64 if q.dtype == torch.float64 else torch.float32
    scalars = torch.empty(chunks.count, heads, ROWS.value, CHUNK, dtype=scalar_type, device=q.device)
    square = (chunks.count, heads, CHUNK, CHUNK)
    N = torch.empty(square if beta is not None else 0, dtype=q.dtype, device=q.device)
    A = torch.empty(square, dtype=q.dtype, device=q.device)
    if chunks.count == 0:
        return scalars, N, A
    decay = gain if log_decay is None else log_decay
    erase = gain if beta is None else beta
    scratch = scalars.new_empty(chunks.count * heads * SCRATCH.value if beta is not None else 0)
    default, stages = PREP[padded]
    warps = WARPS_FULL if q.dtype == torch.float32 else warps or default
    prep_kernel[(chunks.count * heads,)](
        q, k, decay, erase, gain, scalars, N, A, scratch, chunks.table, chunks.cu_seqlens,
        chunks.tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], scale,
        *strides(q), *strides(k), *strides(decay), *strides(erase), *strides(gain),
        K=dim, BK=padded, C=CHUNK, ERASE=beta is not None, DECAY=log_decay is not None, VARLEN=chunks.packed,
        ACC=accumulator(q.dtype),
        num_warps=warps, num_stages=stages, maxnreg=MAX_REGISTERS if warps == 4 else registers(q.dtype),
    )  # fmt: skip
    return scalars, N, A
