"""P1: what a chunk of the delta rule needs before any state is known (one program per chunk and head).

g = in-chunk sum of log_decay (stored in units of log 2), N = (I + diag(beta) tril(K K^T o Gam, -1))^-1 - I and
A = scale (Q K^T) o Gam, with Gam(t,s) = exp(g_t - g_s) for s <= t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, LOG2E, ROWS, Chunks, accumulator, dot, launch_warps, locate_chunk, precision, strides

SCRATCH: tl.constexpr = tl.constexpr(2560)


@triton.jit
def store_inverse(L, scratch, N, ACC: tl.constexpr):
    """Write N = (I + L)^-1 - I for a strictly lower L [64,64]: four 16x16 substitutions in step, then two merges.

    `scratch` points to `SCRATCH` numbers of this program's own: four diagonal blocks (of L, later of the inverse,
    transposed), the two 16x16 blocks left of the odd ones (likewise) and L's lower left quarter. Blocks change shape
    through it, at the price of a barrier, and each step of the substitution reads its row there and stays in a warp.
    """
    # Plain tf32 loses three digits here, and doubling series diverge for correlated keys.
    SPLIT: tl.constexpr = "tf32x3"
    index = tl.arange(0, 64)
    r = index[:, None]
    c = index[None, :]
    inside = (r % 16) * 16 + c % 16
    tl.store(scratch + (r // 16) * 256 + inside, L, mask=r // 16 == c // 16)
    tl.store(scratch + 1024 + (r // 32) * 256 + inside, L, mask=(r // 16 == c // 16 + 1) & (r // 16 % 2 == 1))
    tl.store(scratch + 1536 + (r - 32) * 32 + c, L, mask=(r >= 32) & (c < 32))
    tl.debug_barrier()
    # X[block, column, row] is the inverse transposed, so that the sum over earlier rows runs along the last axis, which
    # a thread holds four at a time; stored like that, so that no layout with the axis across warps is chosen.
    row = tl.arange(0, 16)
    block = tl.arange(0, 4)[:, None, None] * 256
    X = tl.zeros([4, 16, 16], dtype=ACC)
    for i in tl.static_range(1, 16):
        line = scratch + block + i * 16
        along_rows = tl.load(line + row[None, None, :])
        along_columns = tl.load(line + row[None, :, None])
        solved = -(along_columns + tl.sum(X * along_rows, axis=2)[:, :, None])
        X = tl.where(row[None, None, :] == i, solved, X)
    pair = tl.arange(0, 2)[:, None, None]
    square = row[None, :, None] * 16 + row[None, None, :]
    corner = tl.load(scratch + 1024 + pair * 256 + square)
    tl.debug_barrier()
    X += tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    tl.store(scratch + block + row[None, :, None] * 16 + row[None, None, :], X)
    tl.debug_barrier()
    flipped = row[None, None, :] * 16 + row[None, :, None]
    first = tl.load(scratch + pair * 512 + flipped)
    second = tl.load(scratch + pair * 512 + 256 + flipped)
    corner = -dot(dot(second, corner, SPLIT, ACC), first, SPLIT, ACC)
    tl.store(scratch + 1024 + pair * 256 + square, corner)
    tl.debug_barrier()
    half = tl.arange(0, 32)
    r = half[:, None]
    c = half[None, :]
    at = tl.where(r // 16 == c // 16, (r // 16) * 256 + (c % 16) * 16 + r % 16, 1024 + (r % 16) * 16 + c % 16)
    step = tl.where(r // 16 == c // 16, 512, 256)
    keep = r // 16 >= c // 16
    first = tl.load(scratch + at, mask=keep, other=0.0)
    second = tl.load(scratch + at + step, mask=keep, other=0.0)
    corner = tl.load(scratch + 1536 + r * 32 + c)
    corner = -dot(dot(second, corner, SPLIT, ACC), first, SPLIT, ACC)
    place = N + r * 64 + c
    kind = N.dtype.element_ty
    tl.store(place, tl.where(r > c, first, 0.0).to(kind))
    tl.store(place + 32 * 64 + 32, tl.where(r > c, second, 0.0).to(kind))
    tl.store(place + 32 * 64, corner.to(kind))
    tl.store(place + 32, tl.zeros([32, 32], dtype=kind))


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "scale"])
def prep_kernel(
    q, k, log_decay, beta, gain, scalars, N, A, scratch, table, cu_seqlens,
    T, NT, H, q_group, k_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    decay_batch, decay_token, decay_head, beta_batch, beta_token, beta_head, gain_batch, gain_token, gain_head,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
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
        step = tl.load(log_decay + row * decay_token, mask=real, other=0.0).to(ACC) * LOG2E
        # Multiples of 2^-10 add up exactly in float32, so differences of these sums do not lose what the sums gain.
        coarse = tl.floor(step * 1024.0 + 0.5) * 0.0009765625
        # Summed down the columns of a tile, which costs additions within a thread; along rows it costs shuffles.
        upto = row[:, None] <= row[None, :]
        g = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
        rest = tl.sum(tl.where(upto, (step - coarse)[:, None], 0.0), axis=0)
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
    scores = dot(queries, tl.trans(keys), PRECISION, ACC) * scale
    tl.store(A + square, (scores * decay).to(A.dtype.element_ty))
    if ERASE:
        beta += batch * beta_batch + first * beta_token + head * beta_head
        erase = tl.load(beta + row * beta_token, mask=real, other=0.0).to(ACC)
        tl.store(out + 2 * C + row, erase)
        tl.store(out + 6 * C + row, erase * reach)
        gram = dot(keys, tl.trans(keys), PRECISION, ACC)
        L = tl.where(row[:, None] > row[None, :], gram * decay, 0.0) * erase[:, None]
        store_inverse(L, scratch + place * SCRATCH, N + place * C * C, ACC)


# (K rounded up to a power of two) -> (warps, stages)
PREP = {32: (4, 1), 64: (4, 1), 128: (4, 1), 256: (4, 1)}


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
    prep_kernel[(chunks.count * heads,)](
        q, k, decay, erase, gain, scalars, N, A, scratch, chunks.table, chunks.cu_seqlens,
        chunks.tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], scale,
        *strides(q), *strides(k), *strides(decay), *strides(erase), *strides(gain),
        K=dim, BK=padded, C=CHUNK, ERASE=beta is not None, DECAY=log_decay is not None, VARLEN=chunks.packed,
        PRECISION=precision(q.dtype), ACC=accumulator(q.dtype),
        num_warps=launch_warps(q.dtype, warps or default), num_stages=stages,
    )  # fmt: skip
    return scalars, N, A
