"""B2: gradients of one chunk once its states and their cotangents are known (one program per chunk and head).

With S entering and dS' the cotangent of the leaving state, Y the written values and F their cotangent:

    dA = tril(dO Y^T)        dL = -tril(F Y^T, -1)       Bm = diag(beta) (dL o Gam)
    HQ = scale e (dO S^T)    HW = eta (Y dS'^T)          HF = -e (F S^T)
    dQ = HQ + scale (dA o Gam) K      dK = HW + beta HF + scale (dA o Gam)^T Q + (Bm + Bm^T) K
    dV = gain F
    dgain = rowsum(F o V)             dbeta = rowsum(K o HF) + rowsum(dL o M)
    W = tril(dA o A, -1) + dL o (diag(beta) M)
    dg_t = rowsum(Q o HQ) + beta rowsum(K o HF) - rowsum(K o HW) + rowsum(W) - colsum(W)
    dg_last += sum(K o HW) + gamma <S, dS'>

and dlog_decay is the reverse in-chunk sum of dg. Diagonal terms of dg, which only cancel numerically, never appear.
The left operand of each product is loaded: Bm and scale (dA o Gam) go through memory of the program's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, ROWS, WARPS_FULL, Chunks, accumulator, dot, locate_chunk, registers, strides


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "v_group", "scale", "total"])
def grads_kernel(
    q, k, v, do, scalars, A, states, d_states, Y, F, pairs, dq, dk, dv, d_scalars, table, cu_seqlens,
    T, NT, H, q_group, k_group, v_group, total, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    row = tl.arange(0, C)
    real = row < count
    q += batch * q_batch + first * q_token + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    do += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    token = (batch * T + first) * H + head
    scalars += place * ROWS * C
    A += place * C * C
    states += place * K * V
    d_states += place * K * V
    Y += place * C * V
    F += place * C * V
    pairs += place * 2 * C * C
    dq += token * K
    dk += token * K
    dv += token * V
    d_scalars += token
    square = row[:, None] * C + row[None, :]

    # Pairs of tokens.
    scores = tl.load(A + square)
    dA = tl.zeros([C, C], dtype=ACC)
    dL = tl.zeros([C, C], dtype=ACC)
    d_write = tl.zeros([C], dtype=ACC)
    write = tl.load(scalars + 3 * C + row)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = (value < V)[None, :]
        tile_v = real[:, None] & in_value
        d_out = tl.load(do + row[:, None] * o_token + value[None, :], mask=tile_v, other=0.0)
        y = tl.load(Y + row[:, None] * V + value[None, :], mask=in_value, other=0.0)
        f = tl.load(F + row[:, None] * V + value[None, :], mask=in_value, other=0.0)
        values = tl.load(v + row[:, None] * v_token + value[None, :], mask=tile_v, other=0.0)
        dA += dot(d_out, tl.trans(y), ACC)
        if ERASE:
            dL += dot(f, tl.trans(y), ACC)
        d_write += tl.sum(f.to(ACC) * values.to(ACC), axis=1)
        d_value = (write[:, None] * f.to(ACC)).to(dv.dtype.element_ty)
        tl.store(dv + row[:, None] * (H * V) + value[None, :], d_value, mask=tile_v)
    tl.store(d_scalars + 2 * total + row * H, d_write, mask=real)
    g = tl.load(scalars + row)
    rest = tl.load(scalars + C + row)
    below = row[:, None] > row[None, :]
    between = (g[:, None] - g[None, :]) + (rest[:, None] - rest[None, :])
    decay = tl.exp2(tl.where(row[:, None] >= row[None, :], between, float("-inf")))
    W = tl.where(below, dA * scores.to(ACC), 0.0)
    # As left operands of the products below these two have to be loaded.
    tl.store(pairs + square, (dA * decay * scale).to(pairs.dtype.element_ty))
    d_erase = tl.zeros([C], dtype=ACC)
    if ERASE:
        erase = tl.load(scalars + 2 * C + row)
        dL = tl.where(below, -dL * decay, 0.0)
        tl.store(pairs + C * C + square, (dL * erase[:, None]).to(pairs.dtype.element_ty))
        gram = tl.zeros([C, C], dtype=ACC)
        for key0 in range(0, BK, KT):
            key = key0 + tl.arange(0, KT)
            tile_k = real[:, None] & (key < K)[None, :]
            keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
            gram += dot(keys, tl.trans(keys), ACC)
        # The decay is in dL already, so this is dL o M.
        dL = dL * gram
        d_erase = tl.sum(dL, axis=1)
        W += dL * erase[:, None]
    d_sum = tl.sum(W, axis=1) - tl.sum(W, axis=0)
    tl.debug_barrier()

    # Tokens with the states before and after the chunk.
    d_last = tl.zeros([1], dtype=ACC).sum(axis=0)
    for key0 in range(0, BK, KT):
        key = key0 + tl.arange(0, KT)
        in_key = key < K
        tile_k = real[:, None] & in_key[None, :]
        # Loaded before the products, so that sums along their rows keep the layout of a product.
        queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
        HQ = tl.zeros([C, KT], dtype=ACC)
        HF = tl.zeros([C, KT], dtype=ACC)
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            in_value = (value < V)[None, :]
            tile_s = in_key[:, None] & in_value
            d_out = tl.load(do + row[:, None] * o_token + value[None, :], mask=real[:, None] & in_value, other=0.0)
            s = tl.load(states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
            HQ += dot(d_out, tl.trans(s), ACC)
            if ERASE:
                f = tl.load(F + row[:, None] * V + value[None, :], mask=in_value, other=0.0)
                HF += dot(f, tl.trans(s), ACC)
        reach = tl.load(scalars + 4 * C + row)
        HQ = HQ * (scale * reach)[:, None]
        d_sum += tl.sum(queries.to(ACC) * HQ, axis=1)
        HQ += dot(tl.load(pairs + square), keys, ACC)
        tl.store(dq + row[:, None] * (H * K) + key[None, :], HQ.to(dq.dtype.element_ty), mask=tile_k)
        if ERASE:
            erase = tl.load(scalars + 2 * C + row)
            HF = -HF * reach[:, None]
            d_read = tl.sum(keys.to(ACC) * HF, axis=1)
            d_erase += d_read
            d_sum += erase * d_read
            HF = HF * erase[:, None]
            B = tl.load(pairs + C * C + square)
            HF += dot(B, keys, ACC)
            HF += dot(tl.trans(B), keys, ACC)
        HF += dot(tl.trans(tl.load(pairs + square)), queries, ACC)

        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
        HW = tl.zeros([C, KT], dtype=ACC)
        inner = tl.zeros([KT], dtype=ACC)
        for value0 in range(0, V, BV):
            value = value0 + tl.arange(0, BV)
            in_value = (value < V)[None, :]
            tile_s = in_key[:, None] & in_value
            y = tl.load(Y + row[:, None] * V + value[None, :], mask=in_value, other=0.0)
            s = tl.load(states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
            ds = tl.load(d_states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
            HW += dot(y, tl.trans(ds), ACC)
            inner += tl.sum(s.to(ACC) * ds.to(ACC), axis=1)
        HW = HW * tl.load(scalars + 5 * C + row)[:, None]
        stayed = tl.sum(keys.to(ACC) * HW, axis=1)
        d_sum -= stayed
        d_last += tl.sum(stayed, axis=0) + tl.load(scalars + 5 * C - 1) * tl.sum(inner, axis=0)
        HW += HF
        tl.store(dk + row[:, None] * (H * K) + key[None, :], HW.to(dk.dtype.element_ty), mask=tile_k)
    tl.store(d_scalars + total + row * H, d_erase, mask=real)
    # Through memory into another layout: the compiler would rather change that of all summands, which are tiles.
    tl.store(d_scalars + row * H, d_sum, mask=real)
    tl.debug_barrier()
    d_sum = tl.load(d_scalars + row * H, mask=real, other=0.0)
    d_decay = tl.sum(tl.where(row[:, None] >= row[None, :], d_sum[:, None], 0.0), axis=0) + d_last
    tl.debug_barrier()
    tl.store(d_scalars + row * H, d_decay, mask=real)


# K, or (K, V), rounded up to powers of two -> (tile of keys, tile of values, warps, stages). Not 32 keys by 64 values:
# that was wrong on an H200 at 64 and 128 dims (ptxas 12.8), and right in the interpreter.
GRADS = {
    32: (32, 32, 4, 1),
    64: (64, 32, 4, 1),
    128: (64, 64, 4, 1),
    256: (32, 32, 4, 1),
    (128, 64): (32, 32, 4, 1),
}
FULL = (32, 16, WARPS_FULL, 1)  # the same of float32, for all dims


def grads_launch(
    dtype: torch.dtype, key_dim: int, value_dim: int, erase: bool, warps: int | None
) -> tuple[int, int, int, int, int]:
    """(keys rounded up, tile of keys, tile of values, warps, stages)."""
    padded, padded_value = max(32, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim))
    if dtype == torch.float32:
        return padded, *FULL
    key_tile, tile, default, stages = GRADS.get((padded, padded_value), GRADS[padded])
    tile = tile if erase else min(tile, 32)
    return padded, key_tile, min(tile, padded_value), warps or default, stages


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scalars: Tensor, A: Tensor, states: Tensor, d_states: Tensor,
    Y: Tensor, F: Tensor, chunks: Chunks, scale: float, *, erase: bool, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv per recurrence head [B,T,H,*], d_scalars [3,B,T,H] of log_decay, beta and gain)."""
    batch, tokens, heads = q.shape[0], q.shape[1], A.shape[1]
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded, key_tile, tile, warps, stages = grads_launch(q.dtype, key_dim, value_dim, erase, warps)
    dq = q.new_empty(batch, tokens, heads, key_dim)
    dk = torch.empty_like(dq)
    dv = q.new_empty(batch, tokens, heads, value_dim)
    pairs = q.new_empty(chunks.count, heads, 2, CHUNK, CHUNK)
    d_scalars = scalars.new_empty(3, batch, tokens, heads)
    grads_kernel[(chunks.count * heads,)](
        q, k, v, do, scalars, A, states, d_states, Y, F, pairs, dq, dk, dv, d_scalars, chunks.table, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2],
        batch * tokens * heads, scale, *strides(q), *strides(k), *strides(v), *strides(do),
        K=key_dim, V=value_dim, BK=padded, KT=key_tile, BV=tile, C=CHUNK, ERASE=erase, VARLEN=chunks.packed,
        ACC=accumulator(q.dtype), num_warps=warps, num_stages=stages, maxnreg=registers(q.dtype),
    )  # fmt: skip
    return dq, dk, dv, d_scalars


def sum_group(x: Tensor, heads: int) -> Tensor:
    """Gradients per recurrence head [B,T,H,D] -> per shared head [B,T,heads,D], summed in float32 in a fixed order."""
    if x.shape[2] == heads:
        return x
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.unflatten(2, (heads, -1)).sum(3, dtype=wide).to(x.dtype)
