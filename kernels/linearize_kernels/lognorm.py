"""S1: log Z of the write weights, Z_t = lambda_t Z_{t-1} + w_t, and its gradient, by scans in two levels.

A stretch of tokens acts on the log Z before it through the pair (sum of log lambda, log Z of the stretch alone); pairs
of neighbours join associatively. Chunks are summed in parallel, the chunks of a sequence are scanned in one program,
and each chunk then ends its own scan from the log Z that enters it. Backwards, with b the share of a token's weight in
Z,

    mu_t = dlZ_t + (1 - b_{t+1}) mu_{t+1},   dlw = b mu,   dll = (1 - b) mu

is a linear recurrence, scanned likewise. All exponents are <= 0 up to rounding; -inf stands for no weight at all and
never meets another -inf in a difference. One program has 64 tokens, or chunks, of up to 16 heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, locate_chunk, locate_sequence, strides

NONE: tl.constexpr = tl.constexpr(float("-inf"))
WARPS = 8


@triton.jit
def log_add(a, b):
    """log(exp(a) + exp(b)), -inf for two -inf."""
    top = tl.maximum(a, b)
    some = top > NONE
    safe = tl.where(some, top, 0.0)
    total = tl.exp(tl.where(a > NONE, a - safe, NONE)) + tl.exp(tl.where(b > NONE, b - safe, NONE))
    return tl.where(some, safe + tl.log(tl.where(some, total, 1.0)), NONE)


@triton.jit
def join(forget, norm, next_forget, next_norm):
    """(sum of log lambda, log Z) of two neighbouring stretches."""
    return forget + next_forget, log_add(norm + next_forget, next_norm)


@triton.jit
def follow(kept, gained, next_kept, next_gained):
    """The affine map y -> gained + kept y, and then the next one."""
    return kept * next_kept, gained * next_kept + next_gained


@triton.jit
def heads_tile(line, count, H, row, BH: tl.constexpr):
    """(heads of this program, mask [rows, heads])."""
    head = (line % tl.cdiv(H, BH)) * BH + tl.arange(0, BH)
    return head, (row < count)[:, None] & (head < H)[None, :]


@triton.jit
def share_left(norm, carried):
    """exp(carried - norm), 0 where one of them is -inf."""
    some = (norm > NONE) & (carried > NONE)
    return tl.exp(tl.where(some, carried - tl.where(some, norm, 0.0), NONE))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def own_kernel(
    log_write, log_forget, own, sums, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    log_write += batch * w_batch + first * w_token
    log_forget += batch * f_batch + first * f_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    forget = tl.load(log_forget + row[:, None] * f_token + head[None, :] * f_head, mask=tile, other=0.0).to(ACC)
    forget, norm = tl.associative_scan((forget, write), 0, join)
    # Tail rows write and forget nothing, so the last row of the tile holds the last token's values.
    last = (row == C - 1)[:, None]
    at = chunk * H + head
    tl.store(own + at, tl.max(tl.where(last, norm, NONE), axis=0), mask=head < H)
    tl.store(sums + at, tl.sum(tl.where(last, forget, 0.0), axis=0), mask=head < H)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def carry_kernel(
    own, sums, initial, entering, offsets, cu_seqlens,
    T, NT, H,
    C: tl.constexpr, BH: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    sequence = line // tl.cdiv(H, BH)
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    count = (end - start + C - 1) // C
    row = tl.arange(0, C)
    head, _ = heads_tile(line, count, H, row, BH)
    if INITIAL:
        z = tl.load(initial + sequence * H + head, mask=head < H, other=NONE).to(ACC)
    else:
        z = tl.full([BH], NONE, dtype=ACC)
    if count > 0:
        tl.store(entering + chunk * H + head, z, mask=head < H)
    for block in range(0, count, C):
        tile = (block + row < count)[:, None] & (head < H)[None, :]
        at = (chunk + block + row)[:, None] * H + head[None, :]
        forget = tl.load(sums + at, mask=tile, other=0.0)
        norm = tl.load(own + at, mask=tile, other=NONE)
        forget, norm = tl.associative_scan((forget, norm), 0, join)
        norm = log_add(z[None, :] + forget, norm)
        tl.store(entering + at + H, norm, mask=tile & (block + row + 1 < count)[:, None])
        z = tl.max(tl.where((row == C - 1)[:, None], norm, NONE), axis=0)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def norm_kernel(
    log_write, log_forget, entering, log_z, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    log_write += batch * w_batch + first * w_token
    log_forget += batch * f_batch + first * f_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    forget = tl.load(log_forget + row[:, None] * f_token + head[None, :] * f_head, mask=tile, other=0.0).to(ACC)
    z = tl.load(entering + chunk * H + head, mask=head < H, other=NONE)
    forget, norm = tl.associative_scan((forget, write), 0, join)
    at = (batch * T + first) * H + row[:, None] * H + head[None, :]
    tl.store(log_z + at, log_add(z[None, :] + forget, norm), mask=tile)


@triton.jit
def chunk_slopes(
    log_forget, log_z, d_log_z, d_odds, entering, chunk, batch, first, count, end, row, head, tile, T, H, total,
    f_batch, f_token, f_head, SLOPE: tl.constexpr, ODDS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(lZ, 1 - b, mu as the affine map (kept, gained) of what arrives at the last token) of a tile [tokens, heads].

    dlZ is `d_log_z`, less the cotangent of the next token's log odds, which are made of this token's lZ.
    """
    log_forget += batch * f_batch + first * f_token
    forget = tl.load(log_forget + row[:, None] * f_token + head[None, :] * f_head, mask=tile, other=0.0).to(ACC)
    at = (batch * T + first) * H + row[:, None] * H + head[None, :]
    norm = tl.load(log_z + at, mask=tile, other=NONE).to(ACC)
    before = tl.load(log_z + at - H, mask=tile & (row > 0)[:, None], other=NONE).to(ACC)
    z = tl.load(entering + chunk * H + head, mask=head < H, other=NONE)
    stays = share_left(norm, forget + tl.where((row == 0)[:, None], z[None, :], before))
    # The factor between a token and the next one is the next one's 1 - b; the last one hands on what arrives.
    inside = (row + 1 < count)[:, None] & tile
    forget = tl.load(log_forget + (row + 1)[:, None] * f_token + head[None, :] * f_head, mask=inside, other=0.0)
    later = tl.load(log_z + at + H, mask=inside, other=NONE).to(ACC)
    kept = tl.where(inside, share_left(later, forget.to(ACC) + norm), 1.0)
    gained = tl.zeros_like(norm)
    if SLOPE:
        gained += tl.load(d_log_z + at, mask=tile, other=0.0).to(ACC)
    if ODDS:
        follows = (first + row + 1 < end)[:, None] & tile
        place = (batch * H + head[None, :]) * T + first + row[:, None] + 1
        gained -= tl.load(d_odds + place, mask=follows, other=0.0)
        gained -= tl.load(d_odds + total + place, mask=follows, other=0.0)
    gained = tl.where(norm > NONE, gained, 0.0)
    kept, gained = tl.associative_scan((kept, gained), 0, follow, reverse=True)
    return norm, stays, kept, gained


@triton.jit
def sequence_end(chunk, table, cu_seqlens, T, VARLEN: tl.constexpr):
    """End of the sequence that a chunk belongs to."""
    if VARLEN:
        return tl.load(cu_seqlens + tl.maximum(tl.load(table + 2 * chunk), 0) + 1).to(tl.int64)
    else:
        return tl.cast(T, tl.int64)


@triton.jit(do_not_specialize=["T", "NT", "H", "total"])
def arriving_kernel(
    log_forget, log_z, d_log_z, d_odds, entering, gained, kept, table, cu_seqlens,
    T, NT, H, total, f_batch, f_token, f_head,
    C: tl.constexpr, BH: tl.constexpr, SLOPE: tl.constexpr, ODDS: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    end = sequence_end(chunk, table, cu_seqlens, T, VARLEN)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    _, stays, factor, mu = chunk_slopes(
        log_forget, log_z, d_log_z, d_odds, entering, chunk, batch, first, count, end, row, head, tile, T, H, total,
        f_batch, f_token, f_head, SLOPE, ODDS, ACC,
    )  # fmt: skip
    opening = (row == 0)[:, None]
    at = chunk * H + head
    tl.store(gained + at, tl.sum(tl.where(opening, stays * mu, 0.0), axis=0), mask=head < H)
    tl.store(kept + at, tl.sum(tl.where(opening, stays * factor, 0.0), axis=0), mask=head < H)


@triton.jit(do_not_specialize=["T", "NT", "H", "total"])
def reverse_carry_kernel(
    gained, kept, d_odds, later, d_initial, offsets, cu_seqlens,
    T, NT, H, total,
    C: tl.constexpr, BH: tl.constexpr, ODDS: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    sequence = line // tl.cdiv(H, BH)
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    count = (end - start + C - 1) // C
    row = tl.arange(0, C)
    head, _ = heads_tile(line, count, H, row, BH)
    slope = tl.zeros([BH], dtype=ACC)
    if count > 0:
        tl.store(later + (chunk + count - 1) * H + head, slope, mask=head < H)
    for block in range(0, count, C):
        # Rows run from the last chunk to the first.
        tile = (block + row < count)[:, None] & (head < H)[None, :]
        at = (chunk + count - 1 - block - row)[:, None] * H + head[None, :]
        factor = tl.load(kept + at, mask=tile, other=1.0)
        mu = tl.load(gained + at, mask=tile, other=0.0)
        factor, mu = tl.associative_scan((factor, mu), 0, follow)
        mu += factor * slope[None, :]
        tl.store(later + at - H, mu, mask=tile & (block + row + 1 < count)[:, None])
        slope = tl.sum(tl.where((row == C - 1)[:, None], mu, 0.0), axis=0)
    if INITIAL:
        if ODDS:
            first = d_odds + (batch * H + head) * T + start
            some = (head < H) & (count > 0)
            slope -= tl.load(first, mask=some, other=0.0) + tl.load(first + total, mask=some, other=0.0)
        tl.store(d_initial + sequence * H + head, slope, mask=head < H)


@triton.jit(do_not_specialize=["T", "NT", "H", "total"])
def norm_grads_kernel(
    log_write, log_forget, log_z, d_log_z, d_odds, entering, later, d_write, d_forget, table, cu_seqlens,
    T, NT, H, total, w_batch, w_token, w_head, f_batch, f_token, f_head,
    C: tl.constexpr, BH: tl.constexpr, SLOPE: tl.constexpr, ODDS: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    end = sequence_end(chunk, table, cu_seqlens, T, VARLEN)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    norm, stays, kept, mu = chunk_slopes(
        log_forget, log_z, d_log_z, d_odds, entering, chunk, batch, first, count, end, row, head, tile, T, H, total,
        f_batch, f_token, f_head, SLOPE, ODDS, ACC,
    )  # fmt: skip
    mu += kept * tl.load(later + chunk * H + head, mask=head < H, other=0.0)[None, :]
    log_write += batch * w_batch + first * w_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    at = (batch * T + first) * H + row[:, None] * H + head[None, :]
    by_write = share_left(norm, write) * mu
    by_forget = stays * mu
    if ODDS:
        place = (batch * H + head[None, :]) * T + first + row[:, None]
        odds = tl.load(d_odds + place, mask=tile, other=0.0) + tl.load(d_odds + total + place, mask=tile, other=0.0)
        by_write += odds
        by_forget -= odds
    tl.store(d_write + at, by_write, mask=tile)
    tl.store(d_forget + at, by_forget, mask=tile)


def head_block(heads: int) -> int:
    """Heads of one program of the scalar kernels."""
    return min(16, triton.next_power_of_2(heads))


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
    block = head_block(heads)
    shared = {"C": CHUNK, "BH": block, "VARLEN": chunks.packed, "num_warps": WARPS}
    shared["ACC"] = tl.float64 if wide == torch.float64 else tl.float32
    logs = strides(log_write) + strides(log_forget)
    blocks = triton.cdiv(heads, block)
    own_kernel[(chunks.count * blocks,)](
        log_write, log_forget, own, sums, chunks.table, chunks.cu_seqlens, *size, *logs, **shared
    )
    initial = None if initial is None else initial.contiguous()
    carry_kernel[(chunks.sequences * blocks,)](
        own, sums, initial, entering, chunks.offsets, chunks.cu_seqlens, *size, INITIAL=initial is not None, **shared
    )
    norm_kernel[(chunks.count * blocks,)](
        log_write, log_forget, entering, log_z, chunks.table, chunks.cu_seqlens, *size, *logs, **shared
    )
    return log_z, entering


def backward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, entering: Tensor, d_log_z: Tensor | None,
    cu_seqlens: Tensor | None, d_initial: bool, d_odds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(gradients [B,T,H] of log_write and log_forget, d initial [S,H] or empty).

    d_odds [2,B,H,T], two terms of the cotangent of the log odds lw - ll - lZ of the token before, adds what they give.
    """
    batch, tokens, heads = log_write.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    d_log_z = None if d_log_z is None else d_log_z.contiguous()
    gained, kept, later = (torch.empty_like(entering) for _ in range(3))
    first = entering.new_empty((chunks.sequences, heads) if d_initial else 0)
    d_write, d_forget = (entering.new_empty(batch, tokens, heads) for _ in range(2))
    size = tokens, chunks.per_row, heads, batch * tokens * heads
    block = head_block(heads)
    shared = {"C": CHUNK, "BH": block, "ODDS": d_odds is not None, "VARLEN": chunks.packed, "num_warps": WARPS}
    shared["ACC"] = tl.float64 if entering.dtype == torch.float64 else tl.float32
    blocks = triton.cdiv(heads, block)
    arriving_kernel[(chunks.count * blocks,)](
        log_forget, log_z, d_log_z, d_odds, entering, gained, kept, chunks.table, chunks.cu_seqlens,
        *size, *strides(log_forget), SLOPE=d_log_z is not None, **shared,
    )  # fmt: skip
    reverse_carry_kernel[(chunks.sequences * blocks,)](
        gained, kept, d_odds, later, first, chunks.offsets, chunks.cu_seqlens, *size, INITIAL=d_initial, **shared
    )
    norm_grads_kernel[(chunks.count * blocks,)](
        log_write, log_forget, log_z, d_log_z, d_odds, entering, later, d_write, d_forget,
        chunks.table, chunks.cu_seqlens, *size, *strides(log_write), *strides(log_forget),
        SLOPE=d_log_z is not None, **shared,
    )  # fmt: skip
    return d_write, d_forget, first
