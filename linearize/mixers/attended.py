"""The mean key that softmax attention sees, in memory linear in the text (derivation.md §7, §8)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # queries that share one mask: BLOCK x keys is the largest mask that is ever built
STEEPEST = 1e4  # largest score that is differentiated: far beyond a one-hot softmax


def attend(q: Tensor, keys: Tensor, scale: float, *, real: Tensor | None = None, first: Tensor | None = None) -> Tensor:
    """The mean key that softmax attention sees, ``kappa_t = sum_i a_i(q_t) k_i``: attention with keys as values.

    q: [B, T, H, K], the queries of the last T of n tokens. keys: [B, n, Hk, K]. real: [B, n] bool, False on tokens that
    no other token sees, or None. first: [B, T], the first token each query sees, or None. Returns [B, T, H, K].

    Memory is linear in n: a mask is needed only beside padding, packing or earlier tokens, and then built for BLOCK
    queries at a time.
    """
    batch, length, heads, dim = q.shape
    past, kv_heads = keys.shape[1] - length, keys.shape[2]
    if q.requires_grad:
        q = _bounded(q, keys, scale)
    memory = keys.transpose(1, 2)
    if length == 1:
        # The query heads of a group are rows of one small product: no key is repeated.
        seen = None if real is None else F.pad(real[:, :-1], (0, 1), value=True)[:, None, None]
        return F.scaled_dot_product_attention(
            q.reshape(batch, kv_heads, -1, dim), memory, memory, attn_mask=seen, scale=scale
        ).reshape(q.shape)
    call = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=heads != kv_heads)
    query = q.transpose(1, 2)
    if not past and real is None and first is None:
        return call(query, memory, memory, is_causal=True).transpose(1, 2)
    out = []
    for begin in range(0, length, BLOCK):
        stop = min(begin + BLOCK, length)
        part = memory[:, :, : past + stop]
        column = torch.arange(past + stop, device=q.device)
        row = column[past + begin :, None]
        seen = (column <= row)[None]
        if real is not None:
            seen = seen & real[:, None, : past + stop]
        if first is not None:
            seen = seen & (column >= first[:, begin:stop, None])
        seen = seen | (column == row)  # padding too: a query that sees nothing would be NaN
        out.append(call(query[:, :, begin:stop], part, part, attn_mask=seen[:, None]))
    return torch.cat(out, 2).transpose(1, 2)


def _bounded(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """q, shortened where a score could exceed STEEPEST.

    The backward pass of fused attention computes scores a second time; where their rounding error reaches hundreds,
    exp(score - log sum) overflows.
    """
    with torch.no_grad():
        longest = keys.float().norm(dim=-1).amax(1).repeat_interleave(q.shape[2] // keys.shape[2], 1)
        reach = scale * q.float().norm(dim=-1) * longest[:, None]
        factor = (STEEPEST / reach.clamp(min=1e-30)).clamp(max=1)
    return q * factor[..., None].to(q.dtype)


def document_starts(reset: Tensor | None) -> Tensor | None:
    """[B, T] bool, True where documents start -> [B, T], index of the first token of each token's document."""
    if reset is None:
        return None
    index = torch.arange(reset.shape[1], device=reset.device)
    return torch.where(reset.bool(), index, 0).cummax(1).values
