"""D1: the next few tokens of the delta rule, the state updated in place (a program per row, head, tile of values)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import accumulator, rows, strides


@triton.jit(do_not_specialize=["H", "q_group", "k_group", "v_group", "scale"])
def decode_kernel(
    q, k, v, log_decay, beta, gain, add_to, state, o,
    H, q_group, k_group, v_group, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    decay_batch, decay_token, decay_head, beta_batch, beta_token, beta_head, gain_batch, gain_token, gain_head,
    a_batch, a_token, a_head, s_batch, s_head, s_key, s_value,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, DECAY: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BV)
    line = tl.program_id(0) // tiles
    batch = tl.cast(line // H, tl.int64)
    head = line % H
    key = tl.arange(0, BK)
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    in_key = key < K
    in_value = value < V
    tile = in_value[:, None] & in_key[None, :]
    state += batch * s_batch + head * s_head
    place = state + value[:, None] * s_value + key[None, :] * s_key
    S = tl.load(place, mask=tile, other=0.0).to(ACC)
    q += batch * q_batch + (head // q_group) * q_head
    k += batch * k_batch + (head // k_group) * k_head
    v += batch * v_batch + (head // v_group) * v_head
    for t in tl.static_range(T):
        queries = tl.load(q + t * q_token + key, mask=in_key, other=0.0).to(ACC)
        keys = tl.load(k + t * k_token + key, mask=in_key, other=0.0).to(ACC)
        values = tl.load(v + t * v_token + value, mask=in_value, other=0.0).to(ACC)
        write = tl.load(gain + batch * gain_batch + t * gain_token + head * gain_head).to(ACC)
        if DECAY:
            S *= tl.exp(tl.load(log_decay + batch * decay_batch + t * decay_token + head * decay_head).to(ACC))
        y = write * values
        if ERASE:
            erase = tl.load(beta + batch * beta_batch + t * beta_token + head * beta_head).to(ACC)
            y -= erase * tl.sum(S * keys[None, :], axis=1)
        S += y[:, None] * keys[None, :]
        out = scale * tl.sum(S * queries[None, :], axis=1)
        if ADD:
            extra = add_to + batch * a_batch + t * a_token + head * a_head + value
            out += tl.load(extra, mask=in_value, other=0.0).to(ACC)
        tl.store(o + ((batch * T + t) * H + head) * V + value, out.to(o.dtype.element_ty), mask=in_value)
    tl.store(place, S.to(state.dtype.element_ty), mask=tile)


# (K rounded up to a power of two) -> (tile of values, warps)
DECODE = {32: (32, 1), 64: (32, 2), 128: (32, 4), 256: (16, 4)}


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float,
    state: Tensor, add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    """o [B,T,H,V] of T = 1 to 8 tokens; `state` [B,H,K,V], any strides, is overwritten. Fastest with K dense."""
    q, k, v = rows(q), rows(k), rows(v)
    batch, tokens, heads = gain.shape
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    padded = max(32, triton.next_power_of_2(key_dim))
    tile, warps = DECODE[padded]
    decay = gain if log_decay is None else log_decay
    erase = gain if beta is None else beta
    add_to = None if add_to is None else rows(add_to)
    o = torch.empty(batch, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    decode_kernel[(batch * heads * triton.cdiv(value_dim, tile),)](
        q, k, v, decay, erase, gain, add_to, state, o,
        heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], scale,
        *strides(q), *strides(k), *strides(v), *strides(decay), *strides(erase), *strides(gain),
        *((0, 0, 0) if add_to is None else strides(add_to)),
        state.stride(0), state.stride(1), state.stride(2), state.stride(3),
        T=tokens, K=key_dim, V=value_dim, BK=padded, BV=tile, ERASE=beta is not None, DECAY=log_decay is not None,
        ADD=add_to is not None, ACC=accumulator(q.dtype), num_warps=warps,
    )  # fmt: skip
    return o
