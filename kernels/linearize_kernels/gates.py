"""The scalar chain of a centred mixer: from log weights to decay, erase and gain, and its gradient, elementwise.

With log odds of the write strength x = lw - ll - (lZ of the token before), log b = -softplus(-x) and
log(1-b) = -softplus(x),

    log alpha = max(exp(le) log(1-b), -80)
    delta rule:  a = b (1-b) exp(lr), s = a c^2 rho2, erase = a c^2 / (1 + s), gain = a c / (1 + s)
    covariance:  gain = sigmoid(x + lr) (1-b)

and all of them 0 where a token writes nothing or nothing precedes it. One program has 64 tokens of up to 16 heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, Chunks, locate_chunk, softplus, strides

FLOOR: tl.constexpr = tl.constexpr(-80.0)
NONE: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def odds(
    log_write, log_forget, log_z, initial, chunk, first, batch, row, head, tile, table, cu_seqlens, H, NT,
    w_batch, w_token, w_head, f_batch, f_token, f_head,
    INITIAL: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr, T,
):  # fmt: skip
    """(log odds, live, first row of its sequence, number of the sequence) of a tile [tokens, heads]."""
    if VARLEN:
        sequence = tl.load(table + 2 * chunk)
        starts = first == tl.load(cu_seqlens + tl.maximum(sequence, 0)).to(tl.int64)
    else:
        sequence = chunk // NT
        starts = chunk % NT == 0
    opening = starts & (row[:, None] == 0) & tile
    log_write += batch * w_batch + first * w_token
    log_forget += batch * f_batch + first * f_token
    write = tl.load(log_write + row[:, None] * w_token + head[None, :] * w_head, mask=tile, other=NONE).to(ACC)
    forget = tl.load(log_forget + row[:, None] * f_token + head[None, :] * f_head, mask=tile, other=0.0).to(ACC)
    at = (batch * T + first) * H + (row[:, None] - 1) * H + head[None, :]
    before = tl.load(log_z + at, mask=tile & (opening == 0), other=NONE).to(ACC)
    if INITIAL:
        entry = initial + tl.cast(sequence, tl.int64) * H + head[None, :] + row[:, None] * 0
        before = tl.where(opening, tl.load(entry, mask=opening, other=NONE).to(ACC), before)
    live = (write > NONE) & (before > NONE)
    x = tl.where(live, write, 0.0) - forget - tl.where(live, before, 0.0)
    return tl.where(live, x, 0.0), live, opening, sequence


@triton.jit(do_not_specialize=["T", "NT", "H"])
def gates_kernel(
    log_write, log_forget, log_z, initial, log_exponent, log_erase, log_balance, rho2, decay, erase, gain,
    table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    C: tl.constexpr, BH: tl.constexpr, ERASE: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(H, BH)
    chunk = tl.program_id(0) // blocks
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    tile = (row < count)[:, None] & (head < H)[None, :]
    x, live, _, _ = odds(
        log_write, log_forget, log_z, initial, chunk, first, batch, row, head, tile, table, cu_seqlens, H, NT,
        w_batch, w_token, w_head, f_batch, f_token, f_head, INITIAL, VARLEN, ACC, T,
    )  # fmt: skip
    log_exponent += batch * e_batch + first * e_token
    log_erase += batch * r_batch + first * r_token
    exponent = tl.load(log_exponent + row[:, None] * e_token + head[None, :] * e_head, mask=tile, other=0.0).to(ACC)
    moved = tl.load(log_erase + row[:, None] * r_token + head[None, :] * r_head, mask=tile, other=0.0).to(ACC)
    at = (batch * T + first) * H + row[:, None] * H + head[None, :]
    keep = -softplus(x)
    tl.store(decay + at, tl.where(live, tl.maximum(tl.exp(exponent) * keep, FLOOR), 0.0), mask=tile)
    if ERASE:
        a = tl.exp(tl.where(live, keep - softplus(-x) + moved, NONE))
        c = tl.exp(tl.load(log_balance + head, mask=head < H, other=0.0).to(ACC))[None, :]
        length = tl.load(rho2 + at, mask=tile, other=0.0).to(ACC)
        shrink = a / (1.0 + a * c * c * length)
        tl.store(erase + at, shrink * c * c, mask=tile)
        tl.store(gain + at, shrink * c, mask=tile)
    else:
        tl.store(gain + at, tl.exp(tl.where(live, keep - softplus(-(x + moved)), NONE)), mask=tile)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def gates_grads_kernel(
    log_write, log_forget, log_z, initial, log_exponent, log_erase, log_balance, rho2, d_decay, d_erase, d_gain,
    d_x_out, d_norm, d_exponent_out, d_moved_out, d_rho2, d_balance, d_initial, table, cu_seqlens,
    T, NT, H, w_batch, w_token, w_head, f_batch, f_token, f_head, e_batch, e_token, e_head, r_batch, r_token, r_head,
    C: tl.constexpr, BH: tl.constexpr, ERASE: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(H, BH)
    chunk = tl.program_id(0) // blocks
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    row = tl.arange(0, C)
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    tile = (row < count)[:, None] & (head < H)[None, :]
    x, live, opening, sequence = odds(
        log_write, log_forget, log_z, initial, chunk, first, batch, row, head, tile, table, cu_seqlens, H, NT,
        w_batch, w_token, w_head, f_batch, f_token, f_head, INITIAL, VARLEN, ACC, T,
    )  # fmt: skip
    log_exponent += batch * e_batch + first * e_token
    log_erase += batch * r_batch + first * r_token
    exponent = tl.load(log_exponent + row[:, None] * e_token + head[None, :] * e_head, mask=tile, other=0.0).to(ACC)
    moved = tl.load(log_erase + row[:, None] * r_token + head[None, :] * r_head, mask=tile, other=0.0).to(ACC)
    at = (batch * T + first) * H + row[:, None] * H + head[None, :]
    keep = -softplus(x)
    strength = -softplus(-x)
    slope = tl.load(d_decay + at, mask=tile, other=0.0).to(ACC)
    power = tl.exp(exponent)
    slope = tl.where(live & (power * keep > FLOOR), slope * power, 0.0)
    d_exponent = slope * keep
    d_keep = slope
    d_gains = tl.load(d_gain + at, mask=tile, other=0.0).to(ACC)
    if ERASE:
        a = tl.exp(tl.where(live, keep + strength + moved, NONE))
        c = tl.exp(tl.load(log_balance + head, mask=head < H, other=0.0).to(ACC))[None, :]
        s = a * c * c * tl.load(rho2 + at, mask=tile, other=0.0).to(ACC)
        shrink = a / (1.0 + s)
        erased = shrink * c * c * tl.load(d_erase + at, mask=tile, other=0.0).to(ACC)
        gained = shrink * c * d_gains
        d_moved = (erased + gained) / (1.0 + s)
        d_x = d_moved * tl.exp(keep)
        d_keep += d_moved
        tl.store(d_rho2 + at, -shrink * c * c * (erased + gained), mask=tile)
        d_c = tl.where(tile, (2.0 * erased + (1.0 - s) * gained) / (1.0 + s), 0.0)
        tl.store(d_balance + tl.cast(chunk, tl.int64) * H + head, tl.sum(d_c, axis=0), mask=head < H)
    else:
        gained = tl.exp(tl.where(live, keep - softplus(-(x + moved)), NONE)) * d_gains
        d_moved = gained * tl.exp(-softplus(x + moved))
        d_x = d_moved
        d_keep += gained
    d_x = tl.where(live, d_x - d_keep * tl.exp(strength), 0.0)
    tl.store(d_x_out + at, d_x, mask=tile)
    tl.store(d_exponent_out + at, d_exponent, mask=tile)
    tl.store(d_moved_out + at, tl.where(live, d_moved, 0.0), mask=tile)
    # A token's normaliser is what the next one's odds are made of; nothing follows the last one.
    tl.store(d_norm + at - H, -d_x, mask=tile & (opening == 0))
    if VARLEN:
        end = tl.load(cu_seqlens + tl.maximum(sequence, 0) + 1).to(tl.int64)
    else:
        end = tl.cast(T, tl.int64)
    closing = (row == count - 1)[:, None] & (first + count == end) & tile
    tl.store(d_norm + at, tl.zeros([C, BH], dtype=ACC), mask=closing)
    if INITIAL:
        entry = d_initial + tl.cast(sequence, tl.int64) * H + head[None, :] + row[:, None] * 0
        tl.store(entry, -d_x, mask=opening)


def _launch(
    log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, log_erase: Tensor, chunks: Chunks
) -> tuple[int, tuple[int, ...], dict]:
    """(programs, sizes and strides, constants)."""
    heads = log_write.shape[2]
    block = min(16, triton.next_power_of_2(heads))
    gates = [s for x in (log_write, log_forget, log_exponent, log_erase) for s in strides(x)]
    wide = tl.float64 if log_write.dtype == torch.float64 else tl.float32
    constants = {"C": CHUNK, "BH": block, "VARLEN": chunks.packed, "ACC": wide, "num_warps": 4, "num_stages": 1}
    return chunks.count * triton.cdiv(heads, block), (chunks.tokens, chunks.per_row, heads, *gates), constants


def forward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, initial: Tensor | None, log_exponent: Tensor,
    log_erase: Tensor, log_balance: Tensor | None, rho2: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(log decay, erase or empty, gain) [B,T,H]; without log_balance there is no erase."""
    chunks = Chunks(*log_write.shape[:2], cu_seqlens)
    programs, arguments, constants = _launch(log_write, log_forget, log_exponent, log_erase, chunks)
    decay, gain = (torch.empty_like(log_z, memory_format=torch.contiguous_format) for _ in range(2))
    erase = torch.empty_like(gain) if log_balance is not None else gain.new_empty(0)
    initial, rho2 = (None if x is None else x.contiguous() for x in (initial, rho2))
    gates_kernel[(programs,)](
        log_write, log_forget, log_z.contiguous(), initial, log_exponent, log_erase, log_balance, rho2,
        decay, erase, gain, chunks.table, chunks.cu_seqlens, *arguments,
        ERASE=log_balance is not None, INITIAL=initial is not None, **constants,
    )  # fmt: skip
    return decay, erase, gain


def backward(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, initial: Tensor | None, log_exponent: Tensor,
    log_erase: Tensor, log_balance: Tensor | None, rho2: Tensor | None, cu_seqlens: Tensor | None,
    d_decay: Tensor, d_erase: Tensor | None, d_gain: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of log_write (that of log_forget is its negative), log_z, log_exponent, log_erase, rho2, log_balance

    and initial; the last three are empty where there is no such argument.
    """
    chunks = Chunks(*log_write.shape[:2], cu_seqlens)
    programs, arguments, constants = _launch(log_write, log_forget, log_exponent, log_erase, chunks)
    erase = log_balance is not None
    d_x, d_norm, d_exponent, d_moved = (torch.empty_like(d_gain) for _ in range(4))
    d_rho2 = torch.empty_like(d_gain) if erase else d_gain.new_empty(0)
    # Entries of the chunk table that no sequence uses, and sequences without tokens, are not written.
    d_balance = d_gain.new_zeros((chunks.count, log_write.shape[2]) if erase else 0)
    d_initial = d_gain.new_zeros(initial.shape if initial is not None else 0)
    initial, rho2 = (None if x is None else x.contiguous() for x in (initial, rho2))
    gates_grads_kernel[(programs,)](
        log_write, log_forget, log_z.contiguous(), initial, log_exponent, log_erase, log_balance, rho2,
        d_decay, d_erase, d_gain, d_x, d_norm, d_exponent, d_moved, d_rho2, d_balance, d_initial,
        chunks.table, chunks.cu_seqlens, *arguments,
        ERASE=erase, INITIAL=initial is not None, **constants,
    )  # fmt: skip
    return d_x, d_norm, d_exponent, d_moved, d_rho2, d_balance.sum(0) if erase else d_balance, d_initial
