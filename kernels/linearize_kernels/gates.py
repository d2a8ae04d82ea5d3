"""The scalar chain of a centred mixer: from log weights to decay, erase and gain, and its gradient, elementwise.

With log odds of the write strength x = lw - ll - (lZ of the token before), log b = -softplus(-x) and
log(1-b) = -softplus(x),

    log alpha = max(exp(le) log(1-b), -80)
    delta rule:  a = b (1-b) exp(lr), s = a c^2 rho2, erase = a c^2 / (1 + s), gain = a c / (1 + s)
    covariance:  gain = sigmoid(x + lr) (1-b)

and all of them 0 where a token writes nothing or nothing precedes it. What needs rho2 is left to `centring`, which
makes it. One program has 64 tokens of up to 16 heads; results are [B,H,T], as one head of a chunk is read at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, locate_chunk, softplus, strides
from .lognorm import NONE, head_block, heads_tile
from .stats import sequence_start, unseen_rows

FLOOR: tl.constexpr = tl.constexpr(-80.0)
WARPS = 8


@triton.jit
def odds(
    log_write, log_forget, log_z, initial, sequence, opening, first, batch, row, head, tile, H,
    w_batch, w_token, w_head, f_batch, f_token, f_head,
    INITIAL: tl.constexpr, ACC: tl.constexpr, T,
):  # fmt: skip
    """(log odds, live, log write, log Z of the token before) of a tile [tokens, heads]."""
    log_write += batch * w_batch + first * w_token
    log_forget += batch * f_batch + first * f_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    forget = tl.load(log_forget + row[:, None] * f_token + head[None, :] * f_head, mask=tile, other=0.0).to(ACC)
    at = (batch * T + first) * H + (row[:, None] - 1) * H + head[None, :]
    opens = opening & (row == 0)[:, None] & tile
    before = tl.load(log_z + at, mask=tile & (opens == 0), other=NONE).to(ACC)
    if INITIAL:
        entry = initial + tl.cast(sequence, tl.int64) * H + head[None, :] + row[:, None] * 0
        before = tl.where(opens, tl.load(entry, mask=opens, other=NONE).to(ACC), before)
    live = (write > NONE) & (before > NONE)
    x = tl.where(live, write, 0.0) - forget - tl.where(live, before, 0.0)
    return tl.where(live, x, 0.0), live, write, before


@triton.jit(do_not_specialize=["T", "NT", "H"])
def gates_kernel(
    log_write, log_forget, log_z, initial, log_exponent, log_erase, shares, skips, decay, strength,
    table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    C: tl.constexpr, BH: tl.constexpr, ERASE: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    sequence, opening = sequence_start(chunk, first, table, cu_seqlens, NT, VARLEN)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    x, live, write, before = odds(
        log_write, log_forget, log_z, initial, sequence, opening, first, batch, row, head, tile, H,
        w_batch, w_token, w_head, f_batch, f_token, f_head, INITIAL, ACC, T,
    )  # fmt: skip
    log_exponent += batch * e_batch + first * e_token
    log_erase += batch * r_batch + first * r_token
    exponent = tl.load(log_exponent + row[:, None] * e_token + head[None, :] * e_head, mask=tile, other=0.0).to(ACC)
    moved = tl.load(log_erase + row[:, None] * r_token + head[None, :] * r_head, mask=tile, other=0.0).to(ACC)
    place = (batch * H + head[None, :]) * T + first + row[:, None]
    keep = -softplus(x)
    log_share = -softplus(-x)
    tl.store(decay + place, tl.where(live, tl.maximum(tl.exp(exponent) * keep, FLOOR), 0.0), mask=tile)
    if ERASE:
        a = keep + log_share + moved
    else:
        a = keep - softplus(-(x + moved))
    tl.store(strength + place, tl.exp(tl.where(live, a, NONE)), mask=tile)
    # A written token that nothing precedes is the whole of Z.
    share = tl.where(live, tl.exp(log_share), tl.where(write > NONE, 1.0, 0.0))
    tl.store(shares + place, share, mask=tile)
    entered = tl.max(tl.where((row == 0)[:, None], before, NONE), axis=0) > NONE
    tl.store(skips + chunk * H + head, unseen_rows(write, entered, row, tile, count, C), mask=head < H)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def gates_grads_kernel(
    log_write, log_forget, log_z, initial, log_exponent, log_erase, log_balance, rho2, d_decay, d_erase, d_gain,
    d_odds, slack, d_exponent_out, d_moved_out, d_rho2, d_balance, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    d_batch, d_token, d_head, b_batch, b_token, b_head, g_batch, g_token, g_head,
    C: tl.constexpr, BH: tl.constexpr, ERASE: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    chunk = line // tl.cdiv(H, BH)
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    sequence, opening = sequence_start(chunk, first, table, cu_seqlens, NT, VARLEN)
    row = tl.arange(0, C)
    head, tile = heads_tile(line, count, H, row, BH)
    x, live, _, _ = odds(
        log_write, log_forget, log_z, initial, sequence, opening, first, batch, row, head, tile, H,
        w_batch, w_token, w_head, f_batch, f_token, f_head, INITIAL, ACC, T,
    )  # fmt: skip
    r = row[:, None]
    h = head[None, :]
    log_exponent += batch * e_batch + first * e_token
    log_erase += batch * r_batch + first * r_token
    d_decay += batch * d_batch + first * d_token
    d_gain += batch * g_batch + first * g_token
    exponent = tl.load(log_exponent + r * e_token + h * e_head, mask=tile, other=0.0).to(ACC)
    moved = tl.load(log_erase + r * r_token + h * r_head, mask=tile, other=0.0).to(ACC)
    place = (batch * H + h) * T + first + r
    keep = -softplus(x)
    log_share = -softplus(-x)
    slope = tl.load(d_decay + r * d_token + h * d_head, mask=tile, other=0.0).to(ACC)
    power = tl.exp(exponent)
    slope = tl.where(live & (power * keep > FLOOR), slope * power, 0.0)
    d_exponent = slope * keep
    d_keep = slope
    d_gains = tl.load(d_gain + r * g_token + h * g_head, mask=tile, other=0.0).to(ACC)
    if ERASE:
        d_erase += batch * b_batch + first * b_token
        a = tl.exp(tl.where(live, keep + log_share + moved, NONE))
        c = tl.exp(tl.load(log_balance + head, mask=head < H, other=0.0).to(ACC))[None, :]
        s = a * c * c * tl.load(rho2 + place, mask=tile, other=0.0).to(ACC)
        shrink = a / (1.0 + s)
        erased = shrink * c * c * tl.load(d_erase + r * b_token + h * b_head, mask=tile, other=0.0).to(ACC)
        gained = shrink * c * d_gains
        d_moved = (erased + gained) / (1.0 + s)
        d_x = d_moved * tl.exp(keep)
        d_keep += d_moved
        tl.store(d_rho2 + place, -shrink * c * c * (erased + gained), mask=tile)
        d_c = tl.where(tile, (2.0 * erased + (1.0 - s) * gained) / (1.0 + s), 0.0)
        tl.store(d_balance + tl.cast(chunk, tl.int64) * H + head, tl.sum(d_c, axis=0), mask=head < H)
    else:
        gained = tl.exp(tl.where(live, keep - softplus(-(x + moved)), NONE)) * d_gains
        d_moved = gained * tl.exp(-softplus(x + moved))
        d_x = d_moved
        d_keep += gained
    tl.store(d_odds + place, tl.where(live, d_x - d_keep * tl.exp(log_share), 0.0), mask=tile)
    # The slope of the share itself, with which the running means depend on the odds.
    tl.store(slack + place, tl.where(live, tl.exp(keep + log_share), 0.0), mask=tile)
    at = (batch * T + first) * H + r * H + h
    tl.store(d_exponent_out + at, d_exponent, mask=tile)
    tl.store(d_moved_out + at, tl.where(live, d_moved, 0.0), mask=tile)


def _launch(
    log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, log_erase: Tensor, chunks: Chunks
) -> tuple[int, tuple[int, ...], dict]:
    """(programs, sizes and strides, constants)."""
    heads = log_write.shape[2]
    block = head_block(heads)
    gates = [s for x in (log_write, log_forget, log_exponent, log_erase) for s in strides(x)]
    wide = tl.float64 if log_write.dtype == torch.float64 else tl.float32
    constants = {"C": CHUNK, "BH": block, "VARLEN": chunks.packed, "ACC": wide, "num_warps": WARPS, "num_stages": 1}
    return chunks.count * triton.cdiv(heads, block), (chunks.tokens, chunks.per_row, heads, *gates), constants


def forward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, initial: Tensor | None, log_exponent: Tensor,
    log_erase: Tensor, erase: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(log decay, a or without erase the gain, shares [B,H,T], and per chunk the rows that nothing was seen before)."""
    batch, tokens, heads = log_write.shape
    chunks = Chunks(batch, tokens, cu_seqlens)
    programs, arguments, constants = _launch(log_write, log_forget, log_exponent, log_erase, chunks)
    wide = torch.float64 if log_write.dtype == torch.float64 else torch.float32
    decay, strength, shares = (log_z.new_empty(batch, heads, tokens, dtype=wide) for _ in range(3))
    skips = log_z.new_empty(chunks.count, heads, dtype=torch.int32)
    initial = None if initial is None else initial.contiguous()
    gates_kernel[(programs,)](
        log_write, log_forget, log_z, initial, log_exponent, log_erase, shares, skips, decay, strength,
        chunks.table, chunks.cu_seqlens, *arguments, ERASE=erase, INITIAL=initial is not None, **constants,
    )  # fmt: skip
    return decay, strength, shares, skips


def backward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, initial: Tensor | None, log_exponent: Tensor,
    log_erase: Tensor, log_balance: Tensor | None, rho2: Tensor | None, cu_seqlens: Tensor | None,
    d_decay: Tensor, d_erase: Tensor | None, d_gain: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """From gradients of the gates [B,H,T] those of the log odds, slack b (1-b) [B,H,T], gradients of log_exponent and

    log_erase [B,T,H], of rho2 [B,H,T] and log_balance [H]; the last two are empty where there is no erase.
    """
    chunks = Chunks(*log_write.shape[:2], cu_seqlens)
    programs, arguments, constants = _launch(log_write, log_forget, log_exponent, log_erase, chunks)
    erase = log_balance is not None
    batch, tokens, heads = log_write.shape
    d_odds, slack = (d_gain.new_empty(batch, heads, tokens) for _ in range(2))
    d_exponent, d_moved = (d_gain.new_empty(batch, tokens, heads) for _ in range(2))
    d_rho2 = d_gain.new_empty((batch, heads, tokens) if erase else 0)
    # Entries of the chunk table that no sequence uses are not written.
    d_balance = d_gain.new_zeros((chunks.count, heads) if erase else 0)
    initial = None if initial is None else initial.contiguous()
    slopes = [s for d in (d_decay, d_gain if d_erase is None else d_erase, d_gain) for s in strides(d.mT)]
    gates_grads_kernel[(programs,)](
        log_write, log_forget, log_z, initial, log_exponent, log_erase, log_balance, rho2, d_decay, d_erase, d_gain,
        d_odds, slack, d_exponent, d_moved, d_rho2, d_balance, chunks.table, chunks.cu_seqlens,
        *arguments, *slopes, ERASE=erase, INITIAL=initial is not None, **constants,
    )  # fmt: skip
    return d_odds, slack, d_exponent, d_moved, d_rho2, d_balance.sum(0) if erase else d_balance
