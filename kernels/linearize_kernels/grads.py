"""B2: gradients of one chunk once its states and their cotangents are known (one program per chunk, head and key tile).

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
Everything is computed transposed, [K,C] and [s,t], so that the left operand of each product is loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, ROWS, Chunks, accumulator, dot, launch_warps, locate_chunk, precision, strides


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "v_group", "scale", "total"])
def grads_kernel(
    q, k, v, do, scalars, A, states, d_states, Y, F, dq, dk, dv, d_scalars, table, cu_seqlens,
    T, NT, H, q_group, k_group, v_group, total, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BK // KT
    tile = tl.program_id(0) % TILES
    line = tl.program_id(0) // TILES
    chunk = line // H
    head = line % H
    batch, first, count = locate_chunk(chunk, table, cu_seqlens, T, NT, C, VARLEN)
    if count == 0:
        return
    first = tl.cast(first, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    row = tl.arange(0, C)
    key = tile * KT + tl.arange(0, KT)
    real = row < count
    in_key = key < K
    tile_k = real[:, None] & in_key[None, :]
    tile_kt = in_key[:, None] & real[None, :]
    q += batch * q_batch + first * q_token + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + first * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + first * v_token + tl.cast(head // v_group, tl.int64) * v_head
    do += batch * o_batch + first * o_token + tl.cast(head, tl.int64) * o_head
    token = (batch * T + first) * H + head
    scalars += place * ROWS * C
    g = tl.load(scalars + row)
    rest = tl.load(scalars + C + row)
    states += place * K * V
    d_states += place * K * V
    Y += place * C * V
    F += place * C * V

    dA = tl.zeros([C, C], dtype=ACC)
    HQ = tl.zeros([KT, C], dtype=ACC)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        d_out = tl.load(do + row[:, None] * o_token + value[None, :], mask=real[:, None] & in_value[None, :], other=0.0)
        y = tl.load(Y + row[:, None] * V + value[None, :], mask=in_value[None, :], other=0.0)
        s = tl.load(states + key[:, None] * V + value[None, :], mask=in_key[:, None] & in_value[None, :], other=0.0)
        dA += dot(y, tl.trans(d_out), PRECISION, ACC)
        HQ += dot(s, tl.trans(d_out), PRECISION, ACC)
    # Index order [s,t] from here on: rows are the earlier token.
    upper = row[:, None] < row[None, :]
    between = (g[None, :] - g[:, None]) + (rest[None, :] - rest[:, None])
    decay = tl.exp2(tl.where(row[:, None] <= row[None, :], between, float("-inf")))
    stored = tl.load(A + place * C * C + row[None, :] * C + row[:, None]).to(ACC)
    d_sum = tl.zeros([C], dtype=ACC)
    if tile == 0:
        W = tl.where(upper, dA * stored, 0.0)
        d_sum += tl.sum(W, axis=0) - tl.sum(W, axis=1)
    dA = dA * decay * scale
    HQ = HQ * (scale * tl.load(scalars + 4 * C + row))[None, :]
    queries_t = tl.load(q + row[None, :] * q_token + key[:, None], mask=tile_kt, other=0.0)
    d_sum += tl.sum(queries_t.to(ACC) * HQ, axis=0)
    keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
    HQ += dot(tl.trans(keys), dA.to(keys.dtype), PRECISION, ACC)
    tl.store(dq + (token + row[None, :] * H) * K + key[:, None], HQ.to(keys.dtype), mask=tile_kt)
    queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
    dK = dot(tl.trans(queries), tl.trans(dA).to(keys.dtype), PRECISION, ACC)

    HW = tl.zeros([KT, C], dtype=ACC)
    inner = tl.zeros([KT], dtype=ACC)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        tile_s = in_key[:, None] & in_value[None, :]
        y = tl.load(Y + row[:, None] * V + value[None, :], mask=in_value[None, :], other=0.0)
        s = tl.load(states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
        ds = tl.load(d_states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
        HW += dot(ds, tl.trans(y), PRECISION, ACC)
        inner += tl.sum(s.to(ACC) * ds.to(ACC), axis=1)
    HW = HW * tl.load(scalars + 5 * C + row)[None, :]
    keys_t = tl.load(k + row[None, :] * k_token + key[:, None], mask=tile_kt, other=0.0).to(ACC)
    stayed = tl.sum(keys_t * HW, axis=0)
    d_sum -= stayed
    d_last = tl.sum(stayed, axis=0) + tl.load(scalars + 5 * C - 1) * tl.sum(inner, axis=0)
    dK += HW

    dL = tl.zeros([C, C], dtype=ACC)
    HF = tl.zeros([KT, C], dtype=ACC)
    d_write = tl.zeros([C], dtype=ACC)
    for value0 in range(0, V, BV):
        value = value0 + tl.arange(0, BV)
        in_value = value < V
        tile_v = real[:, None] & in_value[None, :]
        f = tl.load(F + row[:, None] * V + value[None, :], mask=in_value[None, :], other=0.0)
        if ERASE:
            y = tl.load(Y + row[:, None] * V + value[None, :], mask=in_value[None, :], other=0.0)
            tile_s = in_key[:, None] & in_value[None, :]
            s = tl.load(states + key[:, None] * V + value[None, :], mask=tile_s, other=0.0)
            dL += dot(y, tl.trans(f), PRECISION, ACC)
            HF += dot(s, tl.trans(f), PRECISION, ACC)
        if tile == 0:
            values = tl.load(v + row[:, None] * v_token + value[None, :], mask=tile_v, other=0.0)
            d_write += tl.sum(f.to(ACC) * values.to(ACC), axis=1)
            write = tl.load(scalars + 3 * C + row)
            d_value = (write[:, None] * f.to(ACC)).to(keys.dtype)
            tl.store(dv + (token + row[:, None] * H) * V + value[None, :], d_value, mask=tile_v)
    d_erase = tl.zeros([C], dtype=ACC)
    if ERASE:
        erase = tl.load(scalars + 2 * C + row)
        HF = -HF * tl.load(scalars + 4 * C + row)[None, :]
        keys_t = tl.load(k + row[None, :] * k_token + key[:, None], mask=tile_kt, other=0.0).to(ACC)
        d_erase = tl.sum(keys_t * HF, axis=0)
        d_sum += erase * d_erase
        dK += HF * erase[None, :]
        # Loaded again, so that no [C,C] tile has to live through the loops.
        g = tl.load(scalars + row)
        rest = tl.load(scalars + C + row)
        between = (g[None, :] - g[:, None]) + (rest[None, :] - rest[:, None])
        dL = -dL * tl.exp2(tl.where(upper, between, float("-inf")))
        B = dL * erase[None, :]
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
        dK += dot(tl.trans(keys), (B + tl.trans(B)).to(keys.dtype), PRECISION, ACC)
        gram = dot(keys, tl.trans(keys), PRECISION, ACC)
        for other in range(1, TILES):
            key2 = ((tile + other) % TILES) * KT + tl.arange(0, KT)
            tile_2 = real[:, None] & (key2 < K)[None, :]
            keys2 = tl.load(k + row[:, None] * k_token + key2[None, :], mask=tile_2, other=0.0)
            gram += dot(keys2, tl.trans(keys2), PRECISION, ACC)
        # The decay is in dL already, so this is dL o M.
        if tile == 0:
            dLM = dL * gram
            d_row = tl.sum(dLM, axis=0)
            d_erase += d_row
            d_sum += erase * d_row - tl.sum(dLM * erase[None, :], axis=1)
    tl.store(dk + (token + row[None, :] * H) * K + key[:, None], dK.to(keys.dtype), mask=tile_kt)
    d_decay = tl.sum(tl.where(row[:, None] >= row[None, :], d_sum[:, None], 0.0), axis=0) + d_last
    out = d_scalars + tile * 3 * total + token + row * H
    tl.store(out, d_decay, mask=real)
    tl.store(out + total, d_erase, mask=real)
    tl.store(out + 2 * total, d_write, mask=real)


# K, or (K, V), rounded up to powers of two -> (tile of keys, tile of values, warps, stages)
GRADS = {
    32: (32, 32, 8, 1),
    64: (64, 32, 4, 1),
    128: (128, 64, 8, 1),
    256: (128, 16, 8, 1),
    (64, 128): (64, 32, 8, 1),
    (128, 64): (128, 32, 8, 1),
}


def grads_launch(
    dtype: torch.dtype, key_dim: int, value_dim: int, erase: bool, warps: int | None
) -> tuple[int, int, int, int, int]:
    """(keys rounded up, tile of keys, tile of values, warps, stages)."""
    padded, padded_value = max(32, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim))
    key_tile, tile, default, stages = GRADS.get((padded, padded_value), GRADS[padded])
    tile = tile if erase else min(tile, 32)
    return padded, key_tile, min(tile, padded_value), launch_warps(dtype, warps or default), stages


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
    d_scalars = scalars.new_empty(padded // key_tile, 3, batch, tokens, heads)
    grads_kernel[(chunks.count * heads * (padded // key_tile),)](
        q, k, v, do, scalars, A, states, d_states, Y, F, dq, dk, dv, d_scalars, chunks.table, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2],
        batch * tokens * heads, scale, *strides(q), *strides(k), *strides(v), *strides(do),
        K=key_dim, V=value_dim, BK=padded, KT=key_tile, BV=tile, C=CHUNK, ERASE=erase, VARLEN=chunks.packed,
        PRECISION=precision(q.dtype), ACC=accumulator(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv, d_scalars.sum(0) if padded > key_tile else d_scalars[0]


def sum_group(x: Tensor, heads: int) -> Tensor:
    """Gradients per recurrence head [B,T,H,D] -> per shared head [B,T,heads,D], summed in float32 in a fixed order."""
    if x.shape[2] == heads:
        return x
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.unflatten(2, (heads, -1)).sum(3, dtype=wide).to(x.dtype)
