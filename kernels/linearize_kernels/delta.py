"""The gated delta rule and linear attention: which kernels run, forwards (P1, P2) and backwards (P2 again, B1, B2).

The states and the written values are recomputed in the backward pass, never saved, but for those at the borders of the
pieces into which few long sequences are cut (`split.py`).
"""

from __future__ import annotations

from torch import Tensor

from . import grads, prep, scan, split
from .common import Chunks, aligned_rows


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, final: bool,
    warps: int | None = None, length: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final state or empty, scalars, N, A, states that enter the pieces, their maps); the last two may be empty.

    `warps` replaces every entry of the launch tables. `length`: tokens of a piece, a multiple of 64; 0 for no pieces.
    """
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    chunks = Chunks(q.shape[0], q.shape[1], cu_seqlens)
    scalars, N, A = prep.prepare(q, k, log_decay, beta, gain, scale, chunks, warps)
    add_to = None if add_to is None else aligned_rows(add_to)
    starts, maps = scalars.new_empty(0), scalars.new_empty(0)
    if length:
        pieces = split.Pieces(chunks, q.shape[0], length, q.device)
        starts, maps = split.entering_states(q, k, v, scalars, N, A, pieces, scale, initial_state, warps)
        chunks, initial_state = pieces.chunked(), starts
    o, last = scan.scan(q, k, v, scalars, N, A, chunks, scale, initial_state, add_to, final=final, warps=warps)
    if length and final:
        last = last[pieces.last]
    return o, last, scalars, N, A, starts, maps


def backward(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, N: Tensor, A: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, do: Tensor, d_final: Tensor | None, scale: float, d_initial: bool, erase: bool,
    warps: int | None = None, length: int = 0, starts: Tensor | None = None, maps: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, gradients [3,B,T,H] of log_decay, beta and gain, d initial or empty); dbeta is 0 without erase.

    With a `length`, `starts` and `maps` are those of the forward pass.
    """
    q, k, v, do = (aligned_rows(x) for x in (q, k, v, do))
    d_final = None if d_final is None else d_final.contiguous()
    runs = chunks = Chunks(q.shape[0], q.shape[1], cu_seqlens)
    if length:
        pieces = split.Pieces(chunks, q.shape[0], length, q.device)
        d_final = split.leaving_cotangents(q, k, do, scalars, N, A, maps, pieces, scale, d_final, warps)
        runs, initial_state = pieces.chunked(), starts
    states, Y = scan.scan(q, k, v, scalars, N, A, runs, scale, initial_state, recompute=True, warps=warps)
    d_states, F, first = scan.reverse_scan(
        q, k, do, scalars, N, A, runs, scale, d_final, d_initial=d_initial, warps=warps
    )
    if length and d_initial:
        first = first[pieces.first]
    dq, dk, dv, d_scalars = grads.gradients(
        q, k, v, do, scalars, A, states, d_states, Y, F, chunks, scale, erase=erase, warps=warps
    )
    dq, dk, dv = (grads.sum_group(d, x.shape[2]) for d, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, d_scalars, first
