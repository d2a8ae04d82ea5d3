"""S1: log Z of the write weights, Z_t = lambda_t Z_{t-1} + w_t, and its gradient, in chunks.

With L the in-chunk sum of log lambda and z = lZ entering the chunk,

    lZ_t = log( exp(z + L_t) + sum_{s <= t} exp(L_t - L_s + lw_s) )

so a chunk acts on z through (L_last, its own sum at the last token). Backwards, with m the cotangent that lZ_last
receives from later chunks,

    mu_t = sum_{u >= t} exp((L_u - lZ_u) - (L_t - lZ_t)) (dlZ_u + [u last] m),   dlw = b mu,   dll = (1 - b) mu
    cotangent of z = sum_t exp(L_t + z - lZ_t) (dlZ_t + [t last] m)

All exponents are <= 0 up to rounding; -inf stands for no weight at all and never meets another -inf in a difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, locate_chunk, locate_sequence, strides

NONE: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def log_add(a, b):
    """log(exp(a) + exp(b)), -inf for two -inf."""
    top = tl.maximum(a, b)
    some = top > NONE
    safe = tl.where(some, top, 0.0)
    total = tl.exp(tl.where(a > NONE, a - safe, NONE)) + tl.exp(tl.where(b > NONE, b - safe, NONE))
    return tl.where(some, safe + tl.log(tl.where(some, total, 1.0)), NONE)


@triton.jit
def chunk_logs(log_write, log_forget, row, real, w_token, f_token, ACC: tl.constexpr):
    """(lw, ll, L, log of the chunk's own weights up to each token)."""
    write = tl.load(log_write + row * w_token, mask=real, other=NONE).to(ACC)
    forget = tl.load(log_forget + row * f_token, mask=real, other=0.0).to(ACC)
    # Multiples of 2^-10 add up exactly, so that differences of the sums lose nothing.
    coarse = tl.floor(forget * 1024.0 + 0.5) * 0.0009765625
    rest = forget - coarse
    lower = row[:, None] >= row[None, :]
    upto = row[:, None] <= row[None, :]
    L = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
    R = tl.sum(tl.where(upto, rest[:, None], 0.0), axis=0)
    some = write > NONE
    between = (L[:, None] - L[None, :]) + (R[:, None] - R[None, :]) + tl.where(some, write, 0.0)[None, :]
    keep = lower & some[None, :]
    between = tl.where(keep, between, NONE)
    top = tl.max(between, axis=1)
    safe = tl.where(top > NONE, top, 0.0)
    total = tl.sum(tl.exp(tl.where(keep, between - safe[:, None], NONE)), axis=1)
    own = tl.where(top > NONE, safe + tl.log(tl.where(top > NONE, total, 1.0)), NONE)
    return write, forget, L, R, own


@triton.jit(do_not_specialize=["T", "NT", "H"])
def own_kernel(
    log_write, log_forget, own_last, sums, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    _, forget, _, _, own = chunk_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        row, row < count, w_token, f_token, ACC,
    )  # fmt: skip
    # Tail rows write and forget nothing, so the last row of the tile holds the last token's value.
    tl.store(own_last + line, tl.max(tl.where(row == C - 1, own, NONE), axis=0))
    tl.store(sums + line, tl.sum(forget, axis=0))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def carry_kernel(
    own_last, sums, initial, entering, offsets, cu_seqlens,
    T, NT, H,
    C: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    one = tl.arange(0, 1)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    place = tl.cast(chunk, tl.int64) * H + line % H
    if INITIAL:
        z = tl.load(initial + line + one).to(ACC)
    else:
        z = tl.full([1], NONE, dtype=ACC)
    for _ in range(start, end, C):
        tl.store(entering + place + one, z)
        z = log_add(z + tl.load(sums + place + one), tl.load(own_last + place + one))
        place += H


@triton.jit(do_not_specialize=["T", "NT", "H"])
def norm_kernel(
    log_write, log_forget, entering, log_z, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    _, _, L, R, own = chunk_logs(
        log_write + batch * w_batch + first * w_token + head * w_head,
        log_forget + batch * f_batch + first * f_token + head * f_head,
        row, row < count, w_token, f_token, ACC,
    )  # fmt: skip
    z = tl.load(entering + line + row * 0)
    tl.store(log_z + (batch * T + first) * H + head + row * H, log_add(z + (L + R), own), mask=row < count)


@triton.jit
def chunk_slopes(log_forget, log_z, d_log_z, entering, line, at, row, real, H, f_token, ACC: tl.constexpr):
    """(ll, L, R, lZ, exp(L + z - lZ), dlZ) of a chunk."""
    forget = tl.load(log_forget + row * f_token, mask=real, other=0.0).to(ACC)
    coarse = tl.floor(forget * 1024.0 + 0.5) * 0.0009765625
    upto = row[:, None] <= row[None, :]
    L = tl.sum(tl.where(upto, coarse[:, None], 0.0), axis=0)
    R = tl.sum(tl.where(upto, (forget - coarse)[:, None], 0.0), axis=0)
    norm = tl.load(log_z + at + row * H, mask=real, other=NONE).to(ACC)
    z = tl.load(entering + line + row * 0)
    alive = (norm > NONE) & (z > NONE)
    reach = tl.exp(tl.where(alive, (L + R) + (tl.where(alive, z, 0.0) - tl.where(alive, norm, 0.0)), NONE))
    slope = tl.load(d_log_z + at + row * H, mask=real, other=0.0).to(ACC)
    return forget, L, R, norm, reach, tl.where(norm > NONE, slope, 0.0)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def arriving_kernel(
    log_forget, log_z, d_log_z, entering, gained, kept, table, cu_seqlens,
    T, NT, H, f_batch, f_token, f_head,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    _, _, _, _, reach, slope = chunk_slopes(
        log_forget + batch * f_batch + first * f_token + head * f_head, log_z, d_log_z, entering, line,
        (batch * T + first) * H + head, row, row < count, H, f_token, ACC,
    )  # fmt: skip
    tl.store(gained + line, tl.sum(reach * slope, axis=0))
    tl.store(kept + line, tl.sum(tl.where(row == count - 1, reach, 0.0), axis=0))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def reverse_carry_kernel(
    gained, kept, later, d_initial, offsets, cu_seqlens,
    T, NT, H,
    C: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    one = tl.arange(0, 1)
    batch, start, end, chunk = locate_sequence(line // H, offsets, cu_seqlens, T, NT, C, VARLEN)
    place = (tl.cast(chunk, tl.int64) + (end - start + C - 1) // C - 1) * H + line % H
    slope = tl.zeros([1], dtype=ACC)
    for _ in range(start, end, C):
        tl.store(later + place + one, slope)
        slope = tl.load(gained + place + one) + tl.load(kept + place + one) * slope
        place -= H
    if INITIAL:
        tl.store(d_initial + line + one, slope)


@triton.jit(do_not_specialize=["T", "NT", "H", "total"])
def norm_grads_kernel(
    log_write, log_forget, log_z, d_log_z, entering, later, d_logs, table, cu_seqlens,
    T, NT, H, total, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    head = line % H
    batch, first, count = locate_chunk(line // H, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    real = row < count
    at = (batch * T + first) * H + head
    forget, L, R, norm, _, slope = chunk_slopes(
        log_forget + batch * f_batch + first * f_token + head * f_head, log_z, d_log_z, entering, line, at,
        row, real, H, f_token, ACC,
    )  # fmt: skip
    slope += tl.where(row == count - 1, tl.load(later + line), 0.0)
    alive = norm > NONE
    safe = tl.where(alive, norm, 0.0)
    # Rows t, columns u >= t.
    keep = (row[:, None] <= row[None, :]) & alive[:, None] & alive[None, :] & real[None, :]
    between = (L[None, :] - L[:, None]) + (R[None, :] - R[:, None]) + (safe[:, None] - safe[None, :])
    mu = tl.sum(tl.exp(tl.where(keep, between, NONE)) * slope[None, :], axis=1)
    log_write += batch * w_batch + first * w_token + head * w_head
    write = tl.load(log_write + row * w_token, mask=real, other=NONE).to(ACC)
    before = tl.load(log_z + at + (row - 1) * H, mask=real & (row > 0), other=NONE).to(ACC)
    before = tl.where(row == 0, tl.load(entering + line + row * 0), before)
    share = tl.exp(tl.where(alive & (write > NONE), write - safe, NONE))
    stays = tl.exp(tl.where(alive & (before > NONE), forget + (tl.where(before > NONE, before, 0.0) - safe), NONE))
    tl.store(d_logs + at + row * H, share * mu, mask=real)
    tl.store(d_logs + total + at + row * H, stays * mu, mask=real)


def forward(
    log_write: Tensor, log_forget: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(lZ [B,T,H], lZ entering each chunk [chunks,H])."""
    batch, tokens, heads = log_write.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    wide = torch.float64 if log_write.dtype == torch.float64 else torch.float32
    own, sums, entering = (log_write.new_empty(chunks.count, heads, dtype=wide) for _ in range(3))
    log_z = log_write.new_empty(batch, tokens, heads)
    size = tokens, chunks.per_row, heads
    shared = {"C": CHUNK, "VARLEN": chunks.packed, "ACC": tl.float64 if wide == torch.float64 else tl.float32}
    logs = strides(log_write) + strides(log_forget)
    grid = (chunks.count * heads,)
    own_kernel[grid](log_write, log_forget, own, sums, chunks.table, chunks.cu_seqlens, *size, *logs, **shared)
    initial = None if initial is None else initial.contiguous()
    carry_kernel[(chunks.sequences * heads,)](
        own, sums, initial, entering, chunks.offsets, chunks.cu_seqlens, *size,
        INITIAL=initial is not None, num_warps=1, **shared,
    )  # fmt: skip
    norm_kernel[grid](log_write, log_forget, entering, log_z, chunks.table, chunks.cu_seqlens, *size, *logs, **shared)
    return log_z, entering


def backward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, entering: Tensor, d_log_z: Tensor,
    cu_seqlens: Tensor | None, d_initial: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(gradients [2,B,T,H] of log_write and log_forget, d initial [S,H] or empty)."""
    batch, tokens, heads = log_write.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    d_log_z = d_log_z.contiguous()
    gained, kept, later = (torch.empty_like(entering) for _ in range(3))
    first = entering.new_empty((chunks.sequences, heads) if d_initial else 0)
    d_logs = entering.new_empty(2, batch, tokens, heads)
    size = tokens, chunks.per_row, heads
    accumulate = tl.float64 if entering.dtype == torch.float64 else tl.float32
    shared = {"C": CHUNK, "VARLEN": chunks.packed, "ACC": accumulate}
    grid = (chunks.count * heads,)
    arriving_kernel[grid](
        log_forget, log_z, d_log_z, entering, gained, kept, chunks.table, chunks.cu_seqlens,
        *size, *strides(log_forget), **shared,
    )  # fmt: skip
    reverse_carry_kernel[(chunks.sequences * heads,)](
        gained, kept, later, first, chunks.offsets, chunks.cu_seqlens, *size, INITIAL=d_initial, num_warps=1, **shared
    )
    norm_grads_kernel[grid](
        log_write, log_forget, log_z, d_log_z, entering, later, d_logs, chunks.table, chunks.cu_seqlens,
        *size, batch * tokens * heads, *strides(log_write), *strides(log_forget), **shared,
    )  # fmt: skip
    return d_logs, first
