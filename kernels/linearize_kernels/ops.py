"""The kernels as `torch.library` operators: shapes for tracing, gradients, in-place decode.

Importing this module needs Triton; `api.py` does so when a GPU tensor arrives. Saved for the backward pass of the
delta rule: the inputs, the per-chunk scalars, N and A. A gradient of a gradient raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import decode, delta
from .common import CHUNK, Chunks
from .selfcheck import warps_for


@torch.library.custom_op("linearize_kernels::delta_fwd", mutates_args=())
def delta_fwd(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = warps_for(k.shape[-1], v.shape[-1], q.dtype, beta is not None, q.device)
    return delta.forward(q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final, warps)


@delta_fwd.register_fake
def _(q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final):
    batch, tokens, heads = gain.shape
    count = Chunks.bound(batch, tokens, cu_seqlens)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scalar_type = torch.float64 if q.dtype == torch.float64 else torch.float32
    square = (count, heads, CHUNK, CHUNK)
    return (
        q.new_empty(batch, tokens, heads, v.shape[-1]),
        q.new_empty((sequences, heads, k.shape[-1], v.shape[-1]) if final else 0, dtype=scalar_type),
        q.new_empty(count, heads, 4, CHUNK, dtype=scalar_type),
        q.new_empty(square if beta is not None else 0),
        q.new_empty(square),
    )


@torch.library.custom_op("linearize_kernels::delta_bwd", mutates_args=())
def delta_bwd(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, N: Tensor, A: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, do: Tensor, d_final: Tensor | None, scale: float, d_initial: bool, erase: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = warps_for(k.shape[-1], v.shape[-1], q.dtype, erase, q.device)
    return delta.backward(
        q, k, v, scalars, N, A, initial_state, cu_seqlens, do, d_final, scale, d_initial, erase, warps
    )


@delta_bwd.register_fake
def _(q, k, v, scalars, N, A, initial_state, cu_seqlens, do, d_final, scale, d_initial, erase):
    batch, tokens, heads = do.shape[:3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, heads, k.shape[-1], v.shape[-1])
    rows_like = [x.new_empty(x.shape) for x in (q, k, v)]
    return (*rows_like, scalars.new_empty(3, batch, tokens, heads), scalars.new_empty(state if d_initial else 0))


def _save(ctx, inputs, output):
    q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final = inputs
    _, _, scalars, N, A = output
    ctx.save_for_backward(q, k, v, scalars, N, A, initial_state, cu_seqlens)
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.final = scale, final
    ctx.types = [None if x is None else x.dtype for x in (log_decay, beta, gain, initial_state, add_to)]
    ctx.shape = q.shape[0], q.shape[1], gain.shape[2], v.shape[-1]


def _differentiate(ctx, do, d_final, *_):
    q, k, v, scalars, N, A, initial_state, cu_seqlens = ctx.saved_tensors
    decay_type, beta_type, gain_type, initial_type, add_type = ctx.types
    if do is None:
        do = q.new_zeros(ctx.shape)
    d_initial = initial_state is not None and ctx.needs_input_grad[6]
    dq, dk, dv, (d_decay, d_beta, d_gain), first = delta_bwd(
        q, k, v, scalars, N, A, initial_state, cu_seqlens, do.to(q.dtype),
        d_final if ctx.final else None, ctx.scale, d_initial, beta_type is not None,
    )  # fmt: skip
    return (
        dq,
        dk,
        dv,
        None if decay_type is None else d_decay.to(decay_type),
        None if beta_type is None else d_beta.to(beta_type),
        d_gain.to(gain_type),
        first.to(initial_type) if d_initial else None,
        None,
        None if add_type is None else do.to(add_type),
        None,
        None,
    )


delta_fwd.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("linearize_kernels::delta_step", mutates_args={"state"})
def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float,
    state: Tensor, add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    return decode.step(q, k, v, log_decay, beta, gain, scale, state, add_to)


@delta_step.register_fake
def _(q, k, v, log_decay, beta, gain, scale, state, add_to):
    return q.new_empty(*gain.shape, v.shape[-1])
