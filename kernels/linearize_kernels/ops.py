"""The kernels as `torch.library` operators: shapes for tracing, gradients, in-place decode.

Importing this module needs Triton; `api.py` does so when a GPU tensor arrives. Saved for the backward pass of the
delta rule: the inputs, the per-chunk scalars, N and A, and where sequences are cut into pieces what `split.py` found at
their borders; of the means: the inputs, the means at chunk borders, and the centred keys, which their consumer keeps
anyway. A gradient of a gradient raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import centring, decode, delta, gates, lognorm, ridge, split, stats, zeroth
from .common import CHUNK, ROWS, Chunks
from .grads import sum_group
from .selfcheck import mesa_warps_for, readout_warps_for, step_warps_for, warps_for


@torch.library.custom_op("linearize_kernels::delta_fwd", mutates_args=())
def delta_fwd(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, final: bool,
    length: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = warps_for(k.shape[-1], v.shape[-1], q.dtype, beta is not None, q.device, pieces=length > 0)
    return delta.forward(q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final, warps, length)


@delta_fwd.register_fake
def _(q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final, length=0):
    batch, tokens, heads = gain.shape
    count = Chunks.bound(batch, tokens, cu_seqlens)
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    pieces = split.piece_count(batch, tokens, cu_seqlens, length) if length else 0
    erased = length and beta is not None
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scalar_type = torch.float64 if q.dtype == torch.float64 else torch.float32
    square = (count, heads, CHUNK, CHUNK)
    return (
        q.new_empty(batch, tokens, heads, value_dim),
        q.new_empty((sequences, heads, key_dim, value_dim) if final else 0, dtype=scalar_type),
        q.new_empty(count, heads, ROWS.value, CHUNK, dtype=scalar_type),
        q.new_empty(square if beta is not None else 0),
        q.new_empty(square),
        q.new_empty((pieces, heads, key_dim, value_dim) if length else 0, dtype=scalar_type),
        q.new_empty((pieces, heads, key_dim, key_dim) if erased else 0, dtype=scalar_type),
    )


@torch.library.custom_op("linearize_kernels::delta_bwd", mutates_args=())
def delta_bwd(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, N: Tensor, A: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, do: Tensor, d_final: Tensor | None, scale: float, d_initial: bool, erase: bool,
    length: int, starts: Tensor, maps: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = warps_for(k.shape[-1], v.shape[-1], q.dtype, erase, q.device, pieces=length > 0)
    return delta.backward(
        q, k, v, scalars, N, A, initial_state, cu_seqlens, do, d_final, scale, d_initial, erase, warps,
        length, starts, maps,
    )  # fmt: skip


@delta_bwd.register_fake
def _(q, k, v, scalars, N, A, initial_state, cu_seqlens, do, d_final, scale, d_initial, erase, length, starts, maps):
    batch, tokens, heads = do.shape[:3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, heads, k.shape[-1], v.shape[-1])
    rows_like = [x.new_empty(x.shape) for x in (q, k, v)]
    return (*rows_like, scalars.new_empty(3, batch, tokens, heads), scalars.new_empty(state if d_initial else 0))


def _save(ctx, inputs, output):
    q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, final, length = inputs
    _, _, scalars, N, A, starts, maps = output
    ctx.save_for_backward(q, k, v, scalars, N, A, initial_state, cu_seqlens, starts, maps)
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.final, ctx.length = scale, final, length
    ctx.types = [None if x is None else x.dtype for x in (log_decay, beta, gain, initial_state, add_to)]
    ctx.shape = q.shape[0], q.shape[1], gain.shape[2], v.shape[-1]


def _differentiate(ctx, do, d_final, *_):
    q, k, v, scalars, N, A, initial_state, cu_seqlens, starts, maps = ctx.saved_tensors
    decay_type, beta_type, gain_type, initial_type, add_type = ctx.types
    if do is None:
        do = q.new_zeros(ctx.shape)
    d_initial = initial_state is not None and ctx.needs_input_grad[6]
    dq, dk, dv, (d_decay, d_beta, d_gain), first = delta_bwd(
        q, k, v, scalars, N, A, initial_state, cu_seqlens, do.to(q.dtype),
        d_final if ctx.final else None, ctx.scale, d_initial, beta_type is not None, ctx.length, starts, maps,
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
        None,
    )


delta_fwd.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("linearize_kernels::delta_step", mutates_args={"new_state"})
def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, gain: Tensor, scale: float,
    state: Tensor, new_state: Tensor, add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    rule = "linear" if beta is None else "delta"
    warps = step_warps_for(rule, q.shape[1], k.shape[-1], v.shape[-1], q.dtype, q.device)
    return decode.step(q, k, v, log_decay, beta, gain, scale, state, new_state, add_to, warps)


@delta_step.register_fake
def _(q, k, v, log_decay, beta, gain, scale, state, new_state, add_to):
    return q.new_empty(*gain.shape, v.shape[-1])


@torch.library.custom_op("linearize_kernels::centre_fwd", mutates_args=())
def centre_fwd(
    k: Tensor | None, v: Tensor, log_write: Tensor, log_z: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    chunks = Chunks(*log_write.shape[:2], cu_seqlens)
    shares, skips = stats.share(log_write, log_z, chunks, initial is not None)
    results = centring.forward(k, v, shares, skips, initial, cu_seqlens, centred=k is not None)
    keys, values, means, rho2, _, _, *borders = results
    return keys, values, means, rho2, shares, skips, *borders


@centre_fwd.register_fake
def _(k, v, log_write, log_z, initial, cu_seqlens):
    (batch, tokens, heads), value_dim, key_dim = log_write.shape, v.shape[-1], 0 if k is None else k.shape[-1]
    count = Chunks.bound(batch, tokens, cu_seqlens)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scalars = v.new_empty(batch, heads, tokens, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32)
    rows = batch, tokens, heads
    return (
        v.new_empty((*rows, key_dim) if k is not None else 0),
        v.new_empty((*rows, value_dim) if k is not None else 0),
        v.new_empty(*rows, value_dim),
        scalars.new_empty(scalars.shape if k is not None else 0),
        scalars,
        v.new_empty(count, heads, dtype=torch.int32),
        scalars.new_empty(count, heads, key_dim + value_dim),
        scalars.new_empty(count, heads),
        scalars.new_empty(sequences, heads, key_dim + value_dim),
    )


@torch.library.custom_op("linearize_kernels::centre_bwd", mutates_args=())
def centre_bwd(
    k: Tensor | None, v: Tensor, shares: Tensor, skips: Tensor, cu_seqlens: Tensor | None, keys: Tensor,
    values: Tensor, entering: Tensor, totals: Tensor, d_keys: Tensor | None, d_values: Tensor | None,
    d_means: Tensor | None, d_rho2: Tensor | None, d_final: Tensor | None, d_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if k is None:
        # Not kept for the means alone, whose callers have no other use for them.
        values = centring.forward(None, v, shares, skips, None, cu_seqlens, means=False, borders=(entering, totals))[1]
    dk, dv, terms, _, first = centring.backward(
        k, v, shares, skips, cu_seqlens, keys, values, entering, totals, None, d_keys, d_values, d_means, d_rho2,
        d_final, d_initial,
    )  # fmt: skip
    return dk if k is None else sum_group(dk, k.shape[2]), sum_group(dv, v.shape[2]), terms.sum(0).mT, first


@centre_bwd.register_fake
def _(
    k, v, shares, skips, cu_seqlens, keys, values, entering, totals, d_keys, d_values, d_means, d_rho2, d_final,
    d_initial,
):  # fmt: skip
    sequences = shares.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        v.new_empty(0 if k is None else k.shape),
        v.new_empty(v.shape),
        shares.new_empty(shares.shape).mT,
        shares.new_empty((sequences, *entering.shape[1:]) if d_initial else 0),
    )


def _save_centre(ctx, inputs, output):
    k, v, log_write, log_z, initial, cu_seqlens = inputs
    keys, values, _, _, shares, skips, entering, totals, _ = output
    ctx.mark_non_differentiable(shares, skips, entering, totals)
    ctx.save_for_backward(k, v, shares, skips, cu_seqlens, keys, values, entering, totals)
    ctx.set_materialize_grads(False)
    ctx.types = log_write.dtype, log_z.dtype, None if initial is None else initial.dtype


def _differentiate_centre(ctx, d_keys, d_values, d_means, d_rho2, _, __, ___, ____, d_final):
    k, v, shares, skips, cu_seqlens, keys, values, entering, totals = ctx.saved_tensors
    write_type, norm_type, initial_type = ctx.types
    d_initial = initial_type is not None and ctx.needs_input_grad[4]
    if k is None:
        d_keys = d_values = d_rho2 = None
    dk, dv, d_write, first = centre_bwd(
        k, v, shares, skips, cu_seqlens, keys, values, entering, totals, d_keys, d_values, d_means, d_rho2, d_final,
        d_initial,
    )  # fmt: skip
    return (
        None if k is None else dk,
        dv,
        d_write.to(write_type),
        -d_write.to(norm_type),
        first.to(initial_type) if d_initial else None,
        None,
    )


centre_fwd.register_autograd(_differentiate_centre, setup_context=_save_centre)


@torch.library.custom_op("linearize_kernels::log_norm_fwd", mutates_args=())
def log_norm_fwd(
    log_write: Tensor, log_forget: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return lognorm.forward(log_write, log_forget, initial, cu_seqlens)


@log_norm_fwd.register_fake
def _(log_write, log_forget, initial, cu_seqlens):
    batch, tokens, heads = log_write.shape
    wide = torch.float64 if log_write.dtype == torch.float64 else torch.float32
    entering = log_write.new_empty(Chunks.bound(batch, tokens, cu_seqlens), heads, dtype=wide)
    return log_write.new_empty(batch, tokens, heads), entering


@torch.library.custom_op("linearize_kernels::log_norm_bwd", mutates_args=())
def log_norm_bwd(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, entering: Tensor, d_log_z: Tensor,
    cu_seqlens: Tensor | None, d_initial: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return lognorm.backward(log_write, log_forget, log_z, entering, d_log_z, cu_seqlens, d_initial)


@log_norm_bwd.register_fake
def _(log_write, log_forget, log_z, entering, d_log_z, cu_seqlens, d_initial):
    sequences = log_write.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    first = entering.new_empty((sequences, log_write.shape[2]) if d_initial else 0)
    return *(entering.new_empty(log_write.shape) for _ in range(2)), first


def _save_log_norm(ctx, inputs, output):
    log_write, log_forget, initial, cu_seqlens = inputs
    ctx.save_for_backward(log_write, log_forget, *output, cu_seqlens)
    ctx.set_materialize_grads(False)
    ctx.initial_type = None if initial is None else initial.dtype


def _differentiate_log_norm(ctx, d_log_z, _):
    if d_log_z is None:
        return None, None, None, None
    log_write, log_forget, log_z, entering, cu_seqlens = ctx.saved_tensors
    d_initial = ctx.initial_type is not None and ctx.needs_input_grad[2]
    d_write, d_forget, first = log_norm_bwd(log_write, log_forget, log_z, entering, d_log_z, cu_seqlens, d_initial)
    d_first = first.to(ctx.initial_type) if d_initial else None
    return d_write.to(log_write.dtype), d_forget.to(log_forget.dtype), d_first, None


log_norm_fwd.register_autograd(_differentiate_log_norm, setup_context=_save_log_norm)


@torch.library.custom_op("linearize_kernels::centred_fwd", mutates_args=())
def centred_fwd(
    k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, log_erase: Tensor,
    log_balance: Tensor | None, read_mean: Tensor | None, add_to: Tensor | None, initial_means: Tensor | None,
    initial_log_z: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    erase = log_balance is not None
    log_z, norms = lognorm.forward(log_write, log_forget, initial_log_z, cu_seqlens)
    decay, strength, shares, skips = gates.forward(
        log_write, log_forget, log_z, initial_log_z, log_exponent, log_erase, erase, cu_seqlens
    )
    keys, values, base, rho2, erased, gain, entering, totals, final = centring.forward(
        k, v, shares, skips, initial_means, cu_seqlens, means=read_mean is not None, lengths=erase, weights=read_mean,
        add_to=add_to, strength=strength, balance=log_balance,
    )  # fmt: skip
    gain = gain if erase else strength
    return keys, values, base, decay, erased, gain, log_z, final, rho2, shares, skips, entering, totals, norms


@centred_fwd.register_fake
def _(
    k, v, log_write, log_forget, log_exponent, log_erase, log_balance, read_mean, add_to, initial_means, initial_log_z,
    cu_seqlens,
):  # fmt: skip
    (batch, tokens, heads), erase = log_write.shape, log_balance is not None
    count = Chunks.bound(batch, tokens, cu_seqlens)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.float64 if log_write.dtype == torch.float64 else torch.float32
    width = k.shape[-1] + v.shape[-1]

    def scalar(some: bool = True) -> Tensor:
        return log_write.new_empty((batch, heads, tokens) if some else 0, dtype=wide)

    rows = batch, tokens, heads
    return (
        v.new_empty(*rows, k.shape[-1]),
        v.new_empty(*rows, v.shape[-1]),
        v.new_empty((*rows, v.shape[-1]) if read_mean is not None else 0),
        scalar(),
        scalar(erase),
        scalar(),
        log_write.new_empty(rows),
        log_write.new_empty(sequences, heads, width, dtype=wide),
        scalar(erase),
        scalar(),
        log_write.new_empty(count, heads, dtype=torch.int32),
        log_write.new_empty(count, heads, width, dtype=wide),
        log_write.new_empty(count, heads, dtype=wide),
        log_write.new_empty(count, heads, dtype=wide),
    )


@torch.library.custom_op("linearize_kernels::centred_bwd", mutates_args=())
def centred_bwd(
    k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, log_erase: Tensor,
    log_balance: Tensor | None, read_mean: Tensor | None, initial_log_z: Tensor | None, cu_seqlens: Tensor | None,
    saved: list[Tensor], d_keys: Tensor | None, d_values: Tensor | None, d_base: Tensor | None, d_decay: Tensor,
    d_erase: Tensor | None, d_gain: Tensor, d_log_z: Tensor | None, d_final: Tensor | None, d_initial: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    keys, values, log_z, final, rho2, shares, skips, entering, totals, norms = saved
    d_odds, slack, d_exponent, d_moved, d_rho2, d_balance = gates.backward(
        log_write, log_forget, log_z, initial_log_z, log_exponent, log_erase, log_balance, rho2, cu_seqlens,
        d_decay, d_erase, d_gain,
    )  # fmt: skip
    dk, dv, terms, d_read, d_means = centring.backward(
        k, v, shares, skips, cu_seqlens, keys, values, entering, totals, final, d_keys, d_values, d_base,
        None if log_balance is None else d_rho2, d_final, d_initial, weights=read_mean, factors=slack, d_odds=d_odds,
    )  # fmt: skip
    d_write, d_forget, d_norm = lognorm.backward(
        log_write, log_forget, log_z, norms, d_log_z, cu_seqlens, d_initial, terms
    )  # fmt: skip
    dk, dv = sum_group(dk, k.shape[2]), sum_group(dv, v.shape[2])
    return dk, dv, d_write, d_forget, d_exponent, d_moved, d_balance, d_read, d_means, d_norm


@centred_bwd.register_fake
def _(
    k, v, log_write, log_forget, log_exponent, log_erase, log_balance, read_mean, initial_log_z, cu_seqlens, saved,
    d_keys, d_values, d_base, d_decay, d_erase, d_gain, d_log_z, d_final, d_initial,
):  # fmt: skip
    new = d_gain.new_empty
    scalars, heads = tuple(log_write.shape), log_write.shape[2]
    sequences = log_write.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        *(new(scalars) for _ in range(4)),
        new(heads if log_balance is not None else 0),
        new(heads if read_mean is not None and d_base is not None else 0),
        new((sequences, heads, k.shape[-1] + v.shape[-1]) if d_initial else 0),
        new((sequences, heads) if d_initial else 0),
    )


def _save_centred(ctx, inputs, output):
    *tensors, read_mean, add_to, initial_means, initial_log_z, cu_seqlens = inputs
    keys, values, _, _, _, _, log_z, final, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.save_for_backward(*tensors, read_mean, initial_log_z, cu_seqlens, keys, values, log_z, final, *rest)
    ctx.set_materialize_grads(False)
    ctx.types = [None if x is None else x.dtype for x in (add_to, initial_means)]


def _differentiate_centred(ctx, d_keys, d_values, d_base, d_decay, d_erase, d_gain, d_log_z, d_final, *_):
    k, v, write, forget, exponent, erase, balance, read_mean, initial_log_z, cu, *saved = ctx.saved_tensors
    add_type, means_type = ctx.types
    d_initial = means_type is not None and (ctx.needs_input_grad[9] or ctx.needs_input_grad[10])
    zero = saved[2].new_zeros(write.shape, dtype=saved[5].dtype).mT
    d_decay, d_gain = (zero if d is None else d for d in (d_decay, d_gain))
    d_erase = None if balance is None else zero if d_erase is None else d_erase
    dk, dv, d_write, d_forget, d_exponent, d_moved, d_balance, d_read, d_means, d_norm = centred_bwd(
        k, v, write, forget, exponent, erase, balance, read_mean, initial_log_z, cu, saved, d_keys, d_values,
        None if read_mean is None else d_base, d_decay, d_erase, d_gain, d_log_z, d_final, d_initial,
    )  # fmt: skip
    return (
        dk,
        dv,
        d_write.to(write.dtype),
        d_forget.to(forget.dtype),
        d_exponent.to(exponent.dtype),
        d_moved.to(erase.dtype),
        None if balance is None else d_balance.to(balance.dtype),
        None if read_mean is None or d_base is None else d_read.to(read_mean.dtype),
        None if add_type is None or d_base is None else d_base.to(add_type),
        d_means.to(means_type) if d_initial else None,
        d_norm.to(initial_log_z.dtype) if d_initial and initial_log_z is not None else None,
        None,
    )


centred_fwd.register_autograd(_differentiate_centred, setup_context=_save_centred)


@torch.library.custom_op("linearize_kernels::readout_fwd", mutates_args=())
def readout_fwd(
    v: Tensor, log_write: Tensor | None, log_forget: Tensor | None, log_z: Tensor | None, scales: Tensor,
    taps: Tensor | None, sink: Tensor | None, add_to: Tensor | None, add_scale: Tensor | None, initial: Tensor | None,
    tail: Tensor | None, opening: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return zeroth.forward(
        v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, initial, tail, opening, cu_seqlens,
        readout_warps_for(v.shape[-1], v.dtype, v.device),
    )  # fmt: skip


@readout_fwd.register_fake
def _(v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, initial, tail, opening, cu_seqlens):
    batch, tokens, _, dim = v.shape
    heads, count = scales.shape
    chunks = Chunks.bound(batch, tokens, cu_seqlens)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    return (
        v.new_empty(batch, tokens, heads, dim),
        v.new_empty(sequences, heads * count, dim, dtype=wide),
        v.new_empty(chunks, heads, count, dim, dtype=wide),
        v.new_empty(chunks, heads, count, dtype=wide),
    )


@torch.library.custom_op("linearize_kernels::readout_bwd", mutates_args=())
def readout_bwd(
    v: Tensor, log_write: Tensor | None, log_forget: Tensor | None, log_z: Tensor | None, scales: Tensor,
    taps: Tensor | None, sink: Tensor | None, add_to: Tensor | None, add_scale: Tensor | None, tail: Tensor | None,
    opening: Tensor | None, cu_seqlens: Tensor | None, entering: Tensor, totals: Tensor, d_base: Tensor,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return zeroth.backward(
        v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, tail, opening, cu_seqlens, entering,
        totals, d_base, d_final, readout_warps_for(v.shape[-1], v.dtype, v.device),
    )  # fmt: skip


@readout_bwd.register_fake
def _(
    v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, tail, opening, cu_seqlens, entering,
    totals, d_base, d_final,
):  # fmt: skip
    batch, tokens, _, dim = v.shape
    heads, count = scales.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    logs = 2 if log_forget is None or log_forget.dim() == 1 else 3
    columns = 2 * count + (0 if taps is None else taps.shape[0]) + 2
    return (
        v.new_empty(v.shape),
        entering.new_empty(logs, batch, heads * count, tokens),
        entering.new_empty(heads, columns),
        v.new_empty(d_base.shape if add_scale is not None else 0),
        entering.new_empty(sequences, heads * count, dim),
        entering.new_empty(opening.shape if opening is not None else 0),
    )


def _save_readout(ctx, inputs, output):
    *inputs, initial, tail, opening, cu_seqlens = inputs
    v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale = inputs
    _, _, entering, totals = output
    ctx.mark_non_differentiable(entering, totals)
    ctx.types = [None if x is None else x.dtype for x in (*inputs, initial, tail, opening)]
    if add_scale is None:
        add_to = None
    ctx.save_for_backward(
        v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, tail, opening, cu_seqlens, entering,
        totals,
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def _differentiate_readout(ctx, d_base, d_final, *_):
    # Once: under activation checkpointing a tensor can be unpacked a single time.
    *inputs, entering, totals = ctx.saved_tensors
    v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, tail, opening, cu_seqlens = inputs
    heads, count = scales.shape
    size = 0 if taps is None else taps.shape[0]
    if d_base is None:
        d_base = v.new_zeros(*v.shape[:2], heads, v.shape[3])
    d_base = d_base.to(v.dtype)
    dv, d_logs, d_weights, d_add, d_initial, d_opening = readout_bwd(
        v, log_write, log_forget, log_z, scales, taps, sink, add_to, add_scale, tail, opening, cu_seqlens,
        entering, totals, d_base, d_final,
    )  # fmt: skip
    d_scales, d_taps, d_sink, d_add_scale, d_constant = d_weights.split([count, size, 1, 1, count], 1)
    if log_forget is None:
        d_write = d_norm = d_forget = None
    else:
        d_write, d_norm = d_logs[0].mT, d_logs[1].mT
        d_forget = d_constant.flatten() if log_forget.dim() == 1 else d_logs[2].mT
    d_tail = None
    if tail is not None and ctx.needs_input_grad[10]:
        d_tail = zeroth.tail_gradient(d_base, taps, tail, cu_seqlens)
    slopes = [
        dv, d_write, d_forget, d_norm, d_scales, d_taps.T if size else None, d_sink[:, 0],
        d_base if add_scale is None else d_add, d_add_scale[:, 0], d_initial, d_tail, d_opening,
    ]  # fmt: skip
    slopes = [
        None if kind is None or slope is None else slope.to(kind) for slope, kind in zip(slopes, ctx.types, strict=True)
    ]
    return (*slopes, None)


readout_fwd.register_autograd(_differentiate_readout, setup_context=_save_readout)


@torch.library.custom_op("linearize_kernels::mesa_fwd", mutates_args=())
def mesa_fwd(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge_: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, add_to: Tensor | None, scale: float, max_iter: int, tol: float,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = mesa_warps_for(k.shape[-1], v.shape[-1], k.dtype, k.device)
    return ridge.forward(
        q, k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, add_to, scale, max_iter, tol, final, warps
    )


@mesa_fwd.register_fake
def _(q, k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, add_to, scale, max_iter, tol, final):
    batch, tokens, heads = gain.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    K, V = k.shape[-1], v.shape[-1]
    return (
        q.new_empty(batch, tokens, heads, V),
        q.new_empty((sequences, heads, K, V) if final else 0, dtype=wide),
        q.new_empty((sequences, heads, K, K) if final else 0, dtype=wide),
        q.new_empty(batch, tokens, heads, dtype=wide),
        q.new_empty(batch, tokens, heads, K, dtype=wide),
    )


@torch.library.custom_op("linearize_kernels::mesa_bwd", mutates_args=())
def mesa_bwd(
    k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge_: Tensor, Hkv: Tensor | None,
    Hkk: Tensor | None, cu_seqlens: Tensor | None, solution: Tensor, do: Tensor, d_Hkv: Tensor | None,
    d_Hkk: Tensor | None, scale: float, max_iter: int, tol: float, d_initial: bool, narrow: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    warps = mesa_warps_for(k.shape[-1], v.shape[-1], k.dtype, k.device)
    return ridge.backward(
        k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, solution, do, d_Hkv, d_Hkk, scale, max_iter, tol,
        d_initial, warps, narrow,
    )  # fmt: skip


@mesa_bwd.register_fake
def _(
    k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, solution, do, d_Hkv, d_Hkk, scale, max_iter, tol, d_initial,
    narrow,
):  # fmt: skip
    batch, tokens, heads = gain.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, heads, k.shape[-1])
    new = solution.new_empty
    return (
        k.new_empty(solution.shape) if narrow else new(solution.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        new(2, batch, tokens, heads),
        new(ridge_.shape),
        new((*state, v.shape[-1]) if d_initial else 0),
        new((*state, k.shape[-1]) if d_initial else 0),
    )


def _save_mesa(ctx, inputs, output):
    q, k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, add_to, scale, max_iter, tol, final = inputs
    *_, residual, solution = output
    ctx.mark_non_differentiable(residual, solution)
    ctx.save_for_backward(k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, solution)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.final, ctx.heads, ctx.q_type = (scale, max_iter, tol), final, q.shape[2], q.dtype
    ctx.types = [None if x is None else x.dtype for x in (log_decay, gain, ridge_, Hkv, Hkk, add_to)]


def _differentiate_mesa(ctx, do, d_Hkv, d_Hkk, *_):
    k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, solution = ctx.saved_tensors
    decay_type, gain_type, ridge_type, kv_type, kk_type, add_type = ctx.types
    if do is None:
        do = v.new_zeros(*gain.shape, v.shape[-1])
    d_initial = Hkk is not None and (ctx.needs_input_grad[6] or ctx.needs_input_grad[7])
    if not ctx.final:
        d_Hkv = d_Hkk = None
    y, dk, dv, (d_decay, d_gain), d_ridge, first_kv, first_kk = mesa_bwd(
        k, v, log_decay, gain, ridge_, Hkv, Hkk, cu_seqlens, solution, do.to(v.dtype), d_Hkv, d_Hkk, *ctx.options,
        d_initial, ctx.heads == gain.shape[2],
    )  # fmt: skip
    return (
        sum_group(y, ctx.heads).to(ctx.q_type),
        dk,
        dv,
        None if decay_type is None else d_decay.to(decay_type),
        d_gain.to(gain_type),
        d_ridge.to(ridge_type),
        first_kv.to(kv_type) if d_initial else None,
        first_kk.to(kk_type) if d_initial else None,
        None,
        None if add_type is None else do.to(add_type),
        None,
        None,
        None,
        None,
    )


mesa_fwd.register_autograd(_differentiate_mesa, setup_context=_save_mesa)


@torch.library.custom_op("linearize_kernels::mesa_step", mutates_args={"new_Hkv", "new_Hkk", "preconditioner"})
def mesa_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge_: Tensor, scale: float, Hkv: Tensor,
    Hkk: Tensor, new_Hkv: Tensor, new_Hkk: Tensor, preconditioner: Tensor | None, max_iter: int, tol: float,
    add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    warps = step_warps_for("mesa", 1, k.shape[-1], v.shape[-1], q.dtype, q.device)
    state = Hkv, Hkk, new_Hkv, new_Hkk
    cached = preconditioner, max_iter, tol
    return decode.mesa_step(q, k, v, log_decay, gain, ridge_, scale, *state, *cached, add_to, warps)


@mesa_step.register_fake
def _(q, k, v, log_decay, gain, ridge_, scale, Hkv, Hkk, new_Hkv, new_Hkk, preconditioner, max_iter, tol, add_to):
    return q.new_empty(*gain.shape, v.shape[-1])


@torch.library.custom_op("linearize_kernels::centre_step", mutates_args={"new_state"})
def centre_step(
    k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor, logit: Tensor,
    read_mean: Tensor | None, add_to: Tensor | None, state: list[Tensor], new_state: list[Tensor],
    scale_write: Tensor | None, scale_forget: Tensor | None, read_scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return decode.centre_step(
        k, v, log_write, log_forget, log_exponent, logit, read_mean, add_to, state, new_state, scale_write,
        scale_forget, read_scales,
    )  # fmt: skip


@centre_step.register_fake
def _(
    k, v, log_write, log_forget, log_exponent, logit, read_mean, add_to, state, new_state, scale_write, scale_forget,
    read_scales,
):  # fmt: skip
    heads, wide = log_write.shape, state[0].new_empty
    return (
        k.new_empty(*heads, k.shape[-1]), v.new_empty(*heads, v.shape[-1]), wide(*heads, v.shape[-1]), wide(heads),
        wide(heads),
    )  # fmt: skip


@torch.library.custom_op("linearize_kernels::centred_step", mutates_args={"new_state"})
def centred_step(
    q: Tensor, k: Tensor, v: Tensor, log_write: Tensor, log_forget: Tensor, log_exponent: Tensor | None,
    log_erase: Tensor, balance: Tensor | None, read_mean: Tensor | None, add_to: Tensor | None, scale: float,
    state: list[Tensor], new_state: list[Tensor], scale_write: Tensor | None, scale_forget: Tensor | None,
    read_scales: Tensor | None,
) -> Tensor:  # fmt: skip
    rule = "covariance" if balance is None else "scheduled" if log_exponent is None else "gated"
    warps = step_warps_for(rule, q.shape[1], k.shape[-1], v.shape[-1], q.dtype, q.device)
    return decode.centred_step(
        q, k, v, log_write, log_forget, log_exponent, log_erase, balance, read_mean, add_to, scale, state, new_state,
        scale_write, scale_forget, read_scales, warps,
    )  # fmt: skip


@centred_step.register_fake
def _(
    q, k, v, log_write, log_forget, log_exponent, log_erase, balance, read_mean, add_to, scale, state, new_state,
    scale_write, scale_forget, read_scales,
):  # fmt: skip
    return q.new_empty(*log_write.shape, v.shape[-1])
