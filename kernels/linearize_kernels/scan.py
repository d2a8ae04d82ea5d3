"""P2 and B1: the sequential passes over chunks, forwards for the state and backwards for its cotangent.

One program per (sequence, head, tile of values); the state tile [K,BV] stays in registers. Per chunk, forwards:

    r = gain V - beta e (K S);   Y = r + N r;   o = scale e (Q S) + A Y + add_to;   S <- gamma S + K^T (eta Y)

and backwards, given dO and dS, the cotangent of the state that leaves the chunk:

    dY = A^T dO + eta (K dS);   F = dY + N^T dY;   dS <- gamma dS + Q^T (scale e dO) - K^T (beta e F)

with e = exp(g), eta = exp(g_last - g), gamma = exp(g_last). Without erase N = 0 and beta = 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CHUNK, ROWS, WARPS_FULL, Chunks, accumulator, dot, locate_sequence, registers, strides


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "v_group", "scale"])
def scan_kernel(
    q, k, v, add_to, scalars, N, A, initial, o, final, states, Y, offsets, cu_seqlens,
    T, NT, H, q_group, k_group, v_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, a_batch, a_token, a_head,
    i_batch, i_head, i_key, i_value,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, ADD: tl.constexpr, INITIAL: tl.constexpr, OUT: tl.constexpr, STORE: tl.constexpr,
    FINAL: tl.constexpr, VARLEN: tl.constexpr, LATE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BV)
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = key < K
    in_value = value < V
    in_state = in_key[:, None] & in_value[None, :]
    line64 = tl.cast(sequence, tl.int64) * H + head
    if INITIAL:
        initial += tl.cast(sequence, tl.int64) * i_batch + tl.cast(head, tl.int64) * i_head
        S = tl.load(initial + key[:, None] * i_key + value[None, :] * i_value, mask=in_state, other=0.0).to(ACC)
    else:
        S = tl.zeros([BK, BV], dtype=ACC)
    token = tl.cast(start, tl.int64)
    place = tl.cast(chunk, tl.int64) * H + head
    q += batch * q_batch + token * q_token + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + token * k_token + tl.cast(head // k_group, tl.int64) * k_head
    v += batch * v_batch + token * v_token + tl.cast(head // v_group, tl.int64) * v_head
    if ADD:
        add_to += batch * a_batch + token * a_token + tl.cast(head, tl.int64) * a_head
    o += ((batch * T + token) * H + head) * V
    # Scalars are fetched a chunk ahead, in registers: the compiler leaves the load of what is used in two layouts where
    # it stands, and each step would wait for memory.
    gates = scalars + place * ROWS * C
    some = start < end
    write = tl.load(gates + 3 * C + row, mask=some, other=0.0)
    reach = tl.load(gates + 4 * C + row, mask=some, other=0.0)
    late = tl.load(gates + 5 * C + row, mask=some, other=0.0)
    erase = tl.load(gates + 6 * C + row, mask=some & ERASE, other=0.0)
    kept = tl.load(gates + 5 * C - 1, mask=some, other=0.0)
    square = row[:, None] * C + row[None, :]
    for first in range(start, end, C):
        count = end - first
        real = row < count
        tile_k = real[:, None] & in_key[None, :]
        tile_v = real[:, None] & in_value[None, :]
        gates += H * ROWS * C
        more = count > C
        next_write = tl.load(gates + 3 * C + row, mask=more, other=0.0)
        next_reach = tl.load(gates + 4 * C + row, mask=more, other=0.0)
        next_late = tl.load(gates + 5 * C + row, mask=more, other=0.0)
        next_erase = tl.load(gates + 6 * C + row, mask=more & ERASE, other=0.0)
        next_kept = tl.load(gates + 5 * C - 1, mask=more, other=0.0)
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
        values = tl.load(v + row[:, None] * v_token + value[None, :], mask=tile_v, other=0.0)
        half = S.to(keys.dtype)
        if STORE:
            tl.store(states + place * K * V + key[:, None] * V + value[None, :], half, mask=in_state)
        if ERASE:
            r = write[:, None] * values.to(ACC) - erase[:, None] * dot(keys, half, ACC)
            y = r + dot(tl.load(N + place * C * C + square), r.to(keys.dtype), ACC)
        else:
            y = write[:, None] * values.to(ACC)
        if STORE:
            tl.store(Y + place * C * V + row[:, None] * V + value[None, :], y.to(keys.dtype), mask=in_value[None, :])
        S = kept * S + dot(tl.trans(keys), (late[:, None] * y).to(keys.dtype), ACC)
        if OUT:
            written = y.to(keys.dtype)
            if ADD:
                extra = tl.load(add_to + row[:, None] * a_token + value[None, :], mask=tile_v, other=0.0)
                if keys.dtype.primitive_bitwidth == 16:  # There is no room for more of float32.
                    # Never true. The compiler fetches ahead what a product may take, and a step waits for the rest.
                    written = tl.where(T < 0, extra, written)
            if LATE:
                out = dot(tl.load(A + place * C * C + square), written, ACC)
                if ADD:
                    out += extra.to(ACC)
                if T > 0:  # Always true. What is loaded under a condition is not fetched ahead.
                    queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
                    out += (scale * reach)[:, None] * dot(queries, half, ACC)
            else:
                queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
                out = (scale * reach)[:, None] * dot(queries, half, ACC)
                out += dot(tl.load(A + place * C * C + square), written, ACC)
                if ADD:
                    out += extra.to(ACC)
            tl.store(o + row[:, None] * (H * V) + value[None, :], out.to(keys.dtype), mask=tile_v)
        write = next_write
        reach = next_reach
        late = next_late
        erase = next_erase
        kept = next_kept
        place += H
        q += C * q_token
        k += C * k_token
        v += C * v_token
        if ADD:
            add_to += C * a_token
        o += C * H * V
    if FINAL:
        tl.store(final + (line64 * K + key[:, None]) * V + value[None, :], S, mask=in_state)


@triton.jit(do_not_specialize=["T", "NT", "H", "q_group", "k_group", "scale"])
def reverse_scan_kernel(
    q, k, do, scalars, N, A, d_final, d_states, F, d_initial, offsets, cu_seqlens,
    T, NT, H, q_group, k_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, o_batch, o_token, o_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, D_FINAL: tl.constexpr, D_INITIAL: tl.constexpr, STORE: tl.constexpr, VARLEN: tl.constexpr,
    LATE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BV)
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    batch, start, end, chunk = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BK)
    in_key = key < K
    in_value = value < V
    in_state = in_key[:, None] & in_value[None, :]
    line64 = tl.cast(sequence, tl.int64) * H + head
    if D_FINAL:
        dS = tl.load(d_final + (line64 * K + key[:, None]) * V + value[None, :], mask=in_state, other=0.0).to(ACC)
    else:
        dS = tl.zeros([BK, BV], dtype=ACC)
    steps = (end - start + C - 1) // C
    token = tl.cast(start, tl.int64) + (tl.cast(steps, tl.int64) - 1) * C
    place = (tl.cast(chunk, tl.int64) + steps - 1) * H + head
    q += batch * q_batch + token * q_token + tl.cast(head // q_group, tl.int64) * q_head
    k += batch * k_batch + token * k_token + tl.cast(head // k_group, tl.int64) * k_head
    do += batch * o_batch + token * o_token + tl.cast(head, tl.int64) * o_head
    # Scalars are fetched a chunk ahead, as in `scan_kernel`.
    gates = scalars + place * ROWS * C
    some = steps > 0
    reach = tl.load(gates + 4 * C + row, mask=some, other=0.0)
    late = tl.load(gates + 5 * C + row, mask=some, other=0.0)
    erase = tl.load(gates + 6 * C + row, mask=some & ERASE, other=0.0)
    kept = tl.load(gates + 5 * C - 1, mask=some, other=0.0)
    square = row[:, None] * C + row[None, :]
    for i in range(0, steps):
        real = row < end - start - (steps - 1 - i) * C
        tile_k = real[:, None] & in_key[None, :]
        tile_v = real[:, None] & in_value[None, :]
        gates -= H * ROWS * C
        more = i + 1 < steps
        next_reach = tl.load(gates + 4 * C + row, mask=more, other=0.0)
        next_late = tl.load(gates + 5 * C + row, mask=more, other=0.0)
        next_erase = tl.load(gates + 6 * C + row, mask=more & ERASE, other=0.0)
        next_kept = tl.load(gates + 5 * C - 1, mask=more, other=0.0)
        keys = tl.load(k + row[:, None] * k_token + key[None, :], mask=tile_k, other=0.0)
        if not LATE:
            queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
        d_out = tl.load(do + row[:, None] * o_token + value[None, :], mask=tile_v, other=0.0)
        half = dS.to(keys.dtype)
        if STORE:
            tl.store(d_states + place * K * V + key[:, None] * V + value[None, :], half, mask=in_state)
        grown = ((scale * reach)[:, None] * d_out.to(ACC)).to(keys.dtype)
        dS = kept * dS
        if not LATE:
            dS += dot(tl.trans(queries), grown, ACC)
        f = late[:, None] * dot(keys, half, ACC)
        f += dot(tl.trans(tl.load(A + place * C * C + square)), d_out, ACC)
        if ERASE:
            f += dot(tl.trans(tl.load(N + place * C * C + square)), f.to(keys.dtype), ACC)
        if STORE:
            cotangent = F + place * C * V + row[:, None] * V + value[None, :]
            tl.store(cotangent, f.to(keys.dtype), mask=in_value[None, :])
        if LATE:
            if T > 0:  # Always true, as in `scan_kernel`.
                queries = tl.load(q + row[:, None] * q_token + key[None, :], mask=tile_k, other=0.0)
                dS += dot(tl.trans(queries), grown, ACC)
        if ERASE:
            lost = (-erase[:, None] * f).to(keys.dtype)
            dS += dot(tl.trans(keys), lost, ACC)
        reach = next_reach
        late = next_late
        erase = next_erase
        kept = next_kept
        place -= H
        q -= C * q_token
        k -= C * k_token
        do -= C * o_token
    if D_INITIAL:
        tl.store(d_initial + (line64 * K + key[:, None]) * V + value[None, :], dS, mask=in_state)


# K rounded up to a power of two -> (largest tile of values, warps, stages): read-out, recomputation, reverse pass.
SCAN = {32: (32, 4, 2), 64: (32, 4, 3), 128: (64, 4, 2), 256: (32, 8, 2)}
SCAN_ADD = {**SCAN, 64: (32, 4, 2)}  # with add_to a third stage leaves no room for a second program
STORE = {32: (32, 4, 2), 64: (32, 4, 3), 128: (64, 4, 3), 256: (32, 8, 2)}
# Beyond 32 dims not one stage backwards: keys that go through registers gave wrong gradients on an H200 (50, 80, 112).
REVERSE = {32: (32, 4, 1), 64: (32, 4, 3), 128: (64, 4, 2), 256: (32, 8, 2)}
# The same for all three where so many programs of a narrower tile still run at once. A step of a chunk takes 1.6, 1.3
# and 1.9 us instead of 2.5, 1.7 and 2.3 (H200, 128 dims, one program on each multiprocessor).
NARROW = {128: (32, 4, 3)}
AT_ONCE = 132
# Keys of the tables whose queries are loaded where they are used and not a chunk ahead, where programs do not all run
# at once: with two stages at 128 dims that leaves room for a second program on each multiprocessor (H200, 2^19
# token-heads: .30, with add_to .34, and backwards .35 ms; with three stages and early queries .36, .40 and .37).
LATE_SCAN = {128}
LATE_REVERSE = {128}


# float32: (tile of values, warps, stages) for all dims.
FULL = (16, WARPS_FULL, 1)


def programs(table: dict, keys: int, values: int, lines: int) -> tuple[int, tuple[int, int, int]]:
    """(programs, (tile of values, warps, stages)) of a scan of `lines` (sequences x heads)."""
    padded, widest = max(32, triton.next_power_of_2(keys)), max(16, triton.next_power_of_2(values))
    for launch in (NARROW.get(padded, table[padded]), table[padded]):
        tile = min(launch[0], widest)
        count = lines * triton.cdiv(values, tile)
        if count <= AT_ONCE:
            break
    return count, (tile, *launch[1:])


def _launch(table: dict, x: Tensor, keys: int, values: int, lines: int, warps: int | None) -> tuple[int, ...]:
    """(programs, keys rounded up, tile of values, warps, stages); `warps` replaces those of tables with WGMMA."""
    padded = max(32, triton.next_power_of_2(keys))
    if x.dtype == torch.float32:
        return lines * triton.cdiv(values, FULL[0]), padded, *FULL
    count, (tile, default, stages) = programs(table, keys, values, lines)
    return count, padded, tile, warps or default, stages


def _late(keys: set[int], x: Tensor, padded: int, count: int) -> bool:
    """Whether queries are loaded where they are used: by `keys` of a table, and in float32, which spills less so."""
    return x.dtype == torch.float32 or (padded in keys and count > AT_ONCE)


def scan(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, N: Tensor, A: Tensor, chunks: Chunks, scale: float,
    initial: Tensor | None, add_to: Tensor | None = None, *, final: bool = False, read: bool = True,
    recompute: bool = False, warps: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Forward pass: (o [B,T,H,V] or empty without `read`, final state [S,H,K,V] or empty).

    With `recompute` nothing is read out; the results are the states entering each chunk [chunks,H,K,V] and the written
    values Y [chunks,H,C,V], as the backward kernels need them.
    """
    batch, tokens, heads = q.shape[0], q.shape[1], A.shape[1]
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    read = read and not recompute
    table = STORE if not read else SCAN if add_to is None else SCAN_ADD
    lines = chunks.sequences * heads
    count, padded, tile, warps, stages = _launch(table, q, key_dim, value_dim, lines, warps)
    empty = q.new_empty(0)
    o = q.new_empty(batch, tokens, heads, value_dim) if read else empty
    last = scalars.new_empty((chunks.sequences, heads, key_dim, value_dim) if final else 0)
    states = q.new_empty(chunks.count, heads, key_dim, value_dim) if recompute else empty
    written = q.new_empty(chunks.count, heads, CHUNK, value_dim) if recompute else empty
    scan_kernel[(count,)](
        q, k, v, add_to, scalars, N, A, initial, o, last, states, written, chunks.offsets, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], scale,
        *strides(q), *strides(k), *strides(v), *((0, 0, 0) if add_to is None else strides(add_to)),
        *((0, 0, 0, 0) if initial is None else initial.stride()),
        K=key_dim, V=value_dim, BK=padded, BV=tile, C=CHUNK, ERASE=N.numel() > 0, ADD=add_to is not None,
        INITIAL=initial is not None, OUT=read, STORE=recompute, FINAL=final, VARLEN=chunks.packed,
        LATE=read and _late(LATE_SCAN, q, padded, count), ACC=accumulator(q.dtype),
        num_warps=warps, num_stages=stages, maxnreg=registers(q.dtype),
    )  # fmt: skip
    return (states, written) if recompute else (o, last)


def reverse_scan(
    q: Tensor, k: Tensor, do: Tensor, scalars: Tensor, N: Tensor, A: Tensor, chunks: Chunks, scale: float,
    d_final: Tensor | None, *, d_initial: bool, store: bool = True, warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward pass: cotangents of the states leaving each chunk, F (laid out as by `scan`), d initial or empty.

    Without `store` the first two are empty.
    """
    tokens, heads = q.shape[1], A.shape[1]
    key_dim, value_dim = k.shape[-1], do.shape[-1]
    lines = chunks.sequences * heads
    count, padded, tile, warps, stages = _launch(REVERSE, q, key_dim, value_dim, lines, warps)
    d_states = q.new_empty((chunks.count, heads, key_dim, value_dim) if store else 0)
    F = q.new_empty((chunks.count, heads, CHUNK, value_dim) if store else 0)
    first = scalars.new_empty((chunks.sequences, heads, key_dim, value_dim) if d_initial else 0)
    reverse_scan_kernel[(count,)](
        q, k, do, scalars, N, A, d_final, d_states, F, first, chunks.offsets, chunks.cu_seqlens,
        tokens, chunks.per_row, heads, heads // q.shape[2], heads // k.shape[2], scale,
        *strides(q), *strides(k), *strides(do),
        K=key_dim, V=value_dim, BK=padded, BV=tile, C=CHUNK, ERASE=N.numel() > 0, D_FINAL=d_final is not None,
        D_INITIAL=d_initial, STORE=store, VARLEN=chunks.packed, LATE=_late(LATE_REVERSE, q, padded, count),
        ACC=accumulator(q.dtype), num_warps=warps, num_stages=stages, maxnreg=registers(q.dtype),
    )  # fmt: skip
    return d_states, F, first
