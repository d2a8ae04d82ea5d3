"""Public operators: argument checks and dispatch by device.

Common shapes. B rows, T tokens, H recurrence heads; q [B,T,Hq,K], k [B,T,Hk,K], v [B,T,Hv,V] of one dtype (bfloat16,
float16, float32; float64 on the reference path); per-head scalars [B,T,H] float32; states [B,H,K,V] float32 (float64
for float64 inputs). H is the head count of the scalars, which Hq, Hk and Hv must divide: recurrence head h reads head
h // (H // Hx) of x, so grouped heads are blocks and nothing is repeated by the caller.

Packed sequences: `cu_seqlens` [S+1] integers from 0 to T, non-decreasing; then B = 1 and per-sequence tensors have S
rows. Padding: a token with beta = gain = 0 and log_decay = 0 (for the running statistics log_write = -inf and
log_forget = 0) changes nothing; its own output rows are finite and unspecified.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from . import reference

MAX_STEP = 8
# Heads of other widths are filled up with zeros to a multiple of this many dims for the delta rule's kernels: of rows
# that start at other addresses they were compiled to wrong gradients (50 and 100 dims, ptxas 12.8, H200).
WHOLE_DIMS = 16
# Dims of a head up to which the kernels run unasked: wider ones do not fit their tiles, and in float32 spill too much.
WIDEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _fail(what: str, value: object, fix: str) -> None:
    raise ValueError(f"{what} (got {value}): {fix}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(x: Tensor, *dims: int) -> bool:
    """Whether the Triton kernels serve tensors like `x`, of heads of `dims` (keys, values), by LINEARIZE_KERNELS.

    auto (default): on a GPU, unless Triton is missing, the tensors are float64, or a head has more than 256 dims (in
    float32 128).
    reference: never; the torch forms run on every device. triton: always; on a CPU that needs TRITON_INTERPRET=1.
    """
    choice = os.environ.get("LINEARIZE_KERNELS", "auto")
    if choice not in ("auto", "reference", "triton"):
        _fail("LINEARIZE_KERNELS", choice, "set it to auto, reference or triton")
    if choice == "reference":
        return False
    if choice == "triton":
        if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            _fail("LINEARIZE_KERNELS=triton needs tensors on a GPU", x.device.type, "set it to auto")
        if not _has_triton():
            _fail("LINEARIZE_KERNELS=triton needs Triton", "not installed", "install triton, or set it to auto")
        return True
    if not x.is_cuda or max(dims, default=0) > WIDEST.get(x.dtype, -1):
        return False
    if not _has_triton():
        warnings.warn("Triton is not installed: sequence mixers run as slower torch operators", stacklevel=3)
        return False
    return True


def _check_rows(name: str, x: Tensor, batch: int, tokens: int, heads: int) -> None:
    if x.dim() != 4 or tuple(x.shape[:2]) != (batch, tokens):
        _fail(f"{name} must be [B,T,heads,dim] with B={batch}, T={tokens}", tuple(x.shape), "pass matching tensors")
    if x.dtype not in _FLOATS:
        _fail(f"{name} has an unsupported dtype", x.dtype, "use bfloat16, float16, float32 or float64")
    if x.shape[2] == 0 or heads % x.shape[2]:
        _fail(f"heads of {name} must divide the {heads} recurrence heads", x.shape[2], "check the head grouping")


def _check_scalar(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        _fail(f"{name} must have shape {shape}", tuple(x.shape), "per-head scalars are [B,T,H]")


def _check_packing(cu_seqlens: Tensor | None, batch: int, tokens: int) -> int:
    """Number of independent sequences."""
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        _fail("cu_seqlens must be [S+1] int32 or int64", tuple(cu_seqlens.shape), "give the bounds of each sequence")
    if batch != 1:
        _fail("packed sequences need batch 1", batch, "flatten the rows and give their bounds in cu_seqlens")
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in zip(bounds[:-1], bounds[1:], strict=True)):
            _fail(f"cu_seqlens must rise from 0 to T={tokens}", bounds, "cover every token exactly once")
    return cu_seqlens.numel() - 1


def _check_state(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        _fail(f"{name} must have shape {shape}", tuple(x.shape), "one state per sequence and recurrence head")


def _check_kernel_dims(dim: int, what: str = "keys") -> None:
    if dim > 256:
        _fail(f"the kernels hold {what} of at most 256 dims", dim, "set LINEARIZE_KERNELS=reference")


def _widened(x: Tensor | None, *dims: int) -> Tensor | None:
    """`x` with zeros after its last dimensions, up to `dims`; None stays None."""
    if x is None or tuple(x.shape[-len(dims) :]) == dims:
        return x
    missing = [n - size for n, size in zip(dims, x.shape[-len(dims) :], strict=True)]
    return torch.nn.functional.pad(x, [n for after in reversed(missing) for n in (0, after)])


def _delta_kernels(
    q, k, v, log_decay, beta, gain, scale, initial_state, output_final_state, cu_seqlens, add_to, sequences
):
    """(o, final state or an empty tensor) of checked arguments, from heads of whole widths."""
    from .ops import delta_fwd
    from .split import piece_length

    key_dim, value_dim = k.shape[-1], v.shape[-1]
    keys, values = (-(-dim // WHOLE_DIMS) * WHOLE_DIMS for dim in (key_dim, value_dim))
    q, k = _widened(q, keys), _widened(k, keys)
    v, add_to = _widened(v, values), _widened(add_to, values)
    initial_state = _widened(initial_state, keys, values)
    batch, tokens, heads = gain.shape
    length = piece_length(sequences, batch * tokens, heads, keys, values)
    o, final, *_ = delta_fwd(
        q, k, v, log_decay, beta, gain, initial_state, cu_seqlens, add_to, scale, output_final_state, length
    )
    if values != value_dim:
        o = o[..., :value_dim].contiguous()
    if output_final_state and (keys, values) != (key_dim, value_dim):
        final = final[..., :key_dim, :value_dim].contiguous()
    return o, final


def _delta_rule(q, k, v, log_decay, beta, gain, scale, initial_state, output_final_state, cu_seqlens, add_to):
    gates = gain if beta is None else beta
    if gates.dim() != 3:
        _fail("gain and beta must be [B,T,H]", tuple(gates.shape), "pass one scalar per recurrence head")
    batch, tokens, heads = gates.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x, batch, tokens, heads)
    if not q.dtype == k.dtype == v.dtype:
        if torch.is_autocast_enabled(q.device.type):
            low = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(low), k.to(low), v.to(low)
        else:
            _fail("q, k and v must share one dtype", (q.dtype, k.dtype, v.dtype), "cast them alike")
    if q.shape[-1] != k.shape[-1]:
        _fail("q and k must have the same dim", (q.shape[-1], k.shape[-1]), "check the projections")
    for name, x in (("log_decay", log_decay), ("gain", gain)):
        _check_scalar(name, x, (batch, tokens, heads))
    sequences = _check_packing(cu_seqlens, batch, tokens)
    _check_state("initial_state", initial_state, (sequences, heads, k.shape[-1], v.shape[-1]))
    _check_state("add_to", add_to, (batch, tokens, heads, v.shape[-1]))
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    if tokens and uses_kernels(q, k.shape[-1], v.shape[-1]):
        _check_kernel_dims(k.shape[-1])
        o, final = _delta_kernels(
            q, k, v, log_decay, beta, gain, scale, initial_state, output_final_state, cu_seqlens, add_to, sequences
        )
    else:
        o, final = reference.chunk_gated_delta(q, k, v, log_decay, beta, gain, scale, initial_state, cu_seqlens, add_to)
    return o, final if output_final_state else None


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    gain: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, decay first, then erase and write (Gated DeltaNet; derivation.md §4).

        S <- exp(log_decay) S;   y = gain v - beta S^T k;   S <- S + k y^T;   o = scale S^T q + add_to

    Keys need no normalisation: (c k, beta / c^2, gain / c) is the same recurrence for any c > 0.

    Args:
        log_decay: [B,T,H], finite and <= 0; None for no decay (DeltaNet).
        beta: [B,T,H] what is erased. gain: [B,T,H] what is written; None means gain = beta.
        scale: factor of the read; None means K**-0.5.
        initial_state, add_to: [B,H,K,V] (or [S,H,K,V]) and [B,T,H,V]; None means zero.
        output_final_state: also return the state after the last token.

    Returns:
        (o [B,T,H,V] in q's dtype, final state or None). Differentiable once in every tensor argument.

    Raises:
        ValueError: a shape, dtype or head count that does not fit.
    """
    gain = beta if gain is None else gain
    return _delta_rule(q, k, v, log_decay, beta, gain, scale, initial_state, output_final_state, cu_seqlens, add_to)


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decayed linear attention, `gated_delta` without the erase (derivation.md §3): S <- exp(log_decay) S + gain k v^T.

    Arguments, results and errors as `gated_delta`.
    """
    return _delta_rule(q, k, v, log_decay, None, gain, scale, initial_state, output_final_state, cu_seqlens, add_to)


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    ridge: Tensor,
    *,
    max_iter: int = 64,
    tol: float = 1e-5,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]:
    """MesaNet: the read-out by the ridge solution over all that was written (von Oswald et al.; derivation.md §7).

        (Hkv, Hkk) <- exp(log_decay) (Hkv, Hkk) + gain k (v, k)^T;   o = scale Hkv^T (Hkk + diag(ridge))^-1 q + add_to

    Args:
        ridge: [H,K] positive. Large values give linear attention, small ones the least-squares memory.
        max_iter, tol: preconditioned conjugate gradients stop at |residual| / |q| <= tol for every token, or there.
        initial_state: (Hkv [B,H,K,V], Hkk [B,H,K,K] symmetric) or None for zero.

    Returns:
        (o [B,T,H,V] in q's dtype, final (Hkv, Hkk) or None, relative residual [B,T,H]). Differentiable once, to the
        accuracy of the solve; the residual has no gradient. Other arguments and errors as `linear_attn`.
    """
    if gain.dim() != 3:
        _fail("gain must be [B,T,H]", tuple(gain.shape), "pass one scalar per recurrence head")
    batch, tokens, heads = gain.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x, batch, tokens, heads)
    if not q.dtype == k.dtype == v.dtype:
        _fail("q, k and v must share one dtype", (q.dtype, k.dtype, v.dtype), "cast them alike")
    if q.shape[-1] != k.shape[-1]:
        _fail("q and k must have the same dim", (q.shape[-1], k.shape[-1]), "check the projections")
    _check_scalar("log_decay", log_decay, (batch, tokens, heads))
    sequences, key_dim = _check_packing(cu_seqlens, batch, tokens), k.shape[-1]
    _check_state("ridge", ridge, (heads, key_dim))
    Hkv, Hkk = initial_state if initial_state is not None else (None, None)
    _check_state("initial_state[0]", Hkv, (sequences, heads, key_dim, v.shape[-1]))
    _check_state("initial_state[1]", Hkk, (sequences, heads, key_dim, key_dim))
    if tokens and uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import mesa_fwd
        from .ridge import serves

        if serves(k):
            state = Hkv, Hkk
            o, *last, residual, _ = mesa_fwd(
                q, k, v, log_decay, gain, ridge, *state, cu_seqlens, add_to, scale, max_iter, tol, output_final_state
            )
            return o, tuple(last) if output_final_state else None, residual
    from .conjugate import solve_queries

    solution, residual = solve_queries(q, k, log_decay, gain, ridge, Hkk, cu_seqlens, max_iter, tol)
    # The solution weighs keys against each other: its digits, and theirs, are worth float32.
    keys, values = k.to(solution.dtype), v.to(solution.dtype)
    shared = {"scale": scale, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
    add_to = None if add_to is None else add_to.to(solution.dtype)
    o, Hkv = linear_attn(solution, keys, values, log_decay, gain, initial_state=Hkv, add_to=add_to, **shared)
    o = o.to(q.dtype)
    if not output_final_state:
        return o, None, residual
    _, Hkk = linear_attn(solution, keys, keys, log_decay, gain, initial_state=Hkk, **shared)
    return o, (Hkv, Hkk), residual


def _check_statistics(log_write: Tensor, log_forget: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None) -> int:
    if log_write.dim() != 3:
        _fail("log_write must be [B,T,H]", tuple(log_write.shape), "pass one scalar per recurrence head")
    _check_scalar("log_forget", log_forget, tuple(log_write.shape))
    _check_scalar("lZ", log_z, tuple(log_write.shape))
    return _check_packing(cu_seqlens, *log_write.shape[:2])


def log_norm(
    log_write: Tensor, log_forget: Tensor, *, initial_log_z: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Log normaliser of the write weights (derivation.md §2): Z_t = exp(log_forget_t) Z_{t-1} + exp(log_write_t).

    Args:
        log_write: [B,T,H], -inf writes nothing. log_forget: [B,T,H], finite and <= 0.
        initial_log_z: [B,H] or [S,H], log Z before the first token; None means Z = 0.

    Returns:
        lZ = log Z [B,T,H] in log_write's dtype; -inf until something is written.
    """
    sequences = _check_statistics(log_write, log_forget, None, cu_seqlens)
    _check_state("initial_log_z", initial_log_z, (sequences, log_write.shape[2]))
    if not (log_write.shape[1] and uses_kernels(log_write)):
        return reference.chunk_log_norm(log_write, log_forget, initial_log_z, cu_seqlens)
    from .ops import log_norm_fwd

    return log_norm_fwd(log_write, log_forget, initial_log_z, cu_seqlens)[0]


def _side_by_side(means: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """[.., K + V] of means of keys and values, as the kernels keep them."""
    return None if means is None else torch.cat(means, -1)


def centre(
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    lZ: Tensor,
    *,
    initial_mean: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Keys and values minus their running means *before* each token (derivation.md §2-4).

        b_t = exp(log_write_t - lZ_t);   kbar_t = kbar_{t-1} + b_t (k_t - kbar_{t-1});   kd_t = k_t - kbar_{t-1}

    vd, vbar likewise; k_t - kbar_t = (1 - b_t) kd_t exactly. Means are per recurrence head, because log_write is.

    Args:
        log_write, log_forget, lZ: [B,T,H], lZ from `log_norm`. Their gradients are the partial ones of this op, lZ
            being a variable of its own; through `log_norm` they add up to the total.
        initial_mean: (kbar [B,H,K], vbar [B,H,V]) before the first token; None if nothing was seen.

    Returns:
        kd [B,T,H,K], vd [B,T,H,V], vbar [B,T,H,V] (the mean including token t) in the inputs' dtype,
        rho2 [B,T,H] = |kd|^2, and the final (kbar, vbar) in float32 (float64). Where nothing was seen before a token,
        kd = vd = 0; where nothing was seen up to it, vbar = 0.
    """
    sequences = _check_statistics(log_write, log_forget, lZ, cu_seqlens)
    batch, tokens, heads = log_write.shape
    _check_rows("k", k, batch, tokens, heads)
    _check_rows("v", v, batch, tokens, heads)
    if initial_mean is not None:
        _check_state("initial_mean[0]", initial_mean[0], (sequences, heads, k.shape[-1]))
        _check_state("initial_mean[1]", initial_mean[1], (sequences, heads, v.shape[-1]))
    if not (tokens and uses_kernels(k, k.shape[-1], v.shape[-1])):
        return reference.chunk_centre(k, v, log_write, log_forget, lZ, initial_mean, cu_seqlens)
    if k.dtype != v.dtype:
        _fail("k and v must share one dtype", (k.dtype, v.dtype), "cast them alike")
    from .ops import centre_fwd

    kd, vd, vbar, rho2, *_, last = centre_fwd(k, v, log_write, lZ, _side_by_side(initial_mean), cu_seqlens)
    return kd, vd, vbar, rho2.mT, last.split([k.shape[-1], v.shape[-1]], -1)


def running_mean(
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    lZ: Tensor,
    *,
    initial_mean: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Running mean of v with the weights of `centre`: one more time scale (derivation.md §6).

    Arguments as `centre`. Returns (vbar [B,T,H,V] in v's dtype, final mean [B,H,V] or [S,H,V]).
    """
    sequences = _check_statistics(log_write, log_forget, lZ, cu_seqlens)
    batch, tokens, heads = log_write.shape
    _check_rows("v", v, batch, tokens, heads)
    _check_state("initial_mean", initial_mean, (sequences, heads, v.shape[-1]))
    if not (tokens and uses_kernels(v, v.shape[-1])):
        return reference.chunk_running_mean(v, log_write, log_forget, lZ, initial_mean, cu_seqlens)
    from .ops import centre_fwd

    _, _, vbar, *_, last = centre_fwd(None, v, log_write, lZ, initial_mean, cu_seqlens)
    return vbar, last


def readout(
    v: Tensor,
    log_write: Tensor | None,
    log_forget: Tensor | None,
    lZ: Tensor | None,
    scales: Tensor,
    *,
    taps: Tensor | None = None,
    sink: Tensor | None = None,
    add_to: Tensor | None = None,
    add_scale: Tensor | None = None,
    initial_mean: Tensor | None = None,
    tail: Tensor | None = None,
    first: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Zeroth-order readout (derivation.md §6): per-head multiples of values and of running means of values.

        o_t = sum_j taps_j v_{t-j} + sink v_first + sum_m scales_m vbar^(m)_t + add_scale add_to_t

    Args:
        v: [B,T,Hk,V]; the H heads of `scales` [H,M] are H / Hk for each of its heads.
        log_write, lZ: [B,T,H*M] as in `running_mean`, heads first; None with M = 0. log_forget: likewise, or [H*M].
            Their gradients are the partial ones of this op, as in `centre`.
        taps: [J,H]. sink, add_scale: [H]; None for add_scale means 1. add_to: [B,T,H,V].
        initial_mean: [B,H*M,V] or [S,H*M,V]. tail: [B,J-1,Hk,V], the values before the first token; None means zeros.
        first: [B,Hk,V], the value of the first token, where that is an earlier one; it and `tail` per sequence, too.

    Returns:
        (o [B,T,H,V] in v's dtype, final means [B,H*M,V] or [S,H*M,V] in float32 (float64)). Differentiable once.
        Values of padding are seen by taps and sink: leave those to `add_to` where there is padding.
    """
    batch, tokens, kv_heads, dim = v.shape
    heads, count = scales.shape
    _check_rows("v", v, batch, tokens, heads)
    sequences = _check_packing(cu_seqlens, batch, tokens)
    wide = (batch, tokens, heads * count)
    if count:
        if log_write is None or log_forget is None or lZ is None:
            _fail("time scales need log_write, log_forget and lZ", count, "pass them, or scales [H,0]")
        for name, x in (("log_write", log_write), ("lZ", lZ)):
            _check_scalar(name, x, wide)
        _check_scalar("log_forget", log_forget, wide if log_forget.dim() == 3 else wide[2:])
    size = 0 if taps is None else taps.shape[0]
    _check_state("taps", taps, (size, heads))
    _check_state("sink", sink, (heads,))
    _check_state("add_scale", add_scale, (heads,))
    _check_state("add_to", add_to, (batch, tokens, heads, dim))
    _check_state("initial_mean", initial_mean, (sequences, heads * count, dim))
    _check_state("tail", tail, (sequences, max(size - 1, 0), kv_heads, dim))
    _check_state("first", first, (sequences, kv_heads, dim))
    if add_to is None:
        add_scale = None
    tail, first = tail if size > 1 else None, None if sink is None else first
    arguments = v, log_write, log_forget, lZ, scales, taps, sink, add_to, add_scale, initial_mean, tail, first
    if not (tokens and uses_kernels(v, v.shape[-1])):
        return reference.readout(*arguments, cu_seqlens)
    from .ops import readout_fwd

    _check_kernel_dims(v.shape[-1], "values of a readout")
    return readout_fwd(*arguments, cu_seqlens)[:2]


def _check_step(tokens: int, **tensors: Tensor | None) -> None:
    if not 1 <= tokens <= MAX_STEP:
        _fail(
            f"a decode step takes 1 to {MAX_STEP} tokens", tokens, "prefill with the full operator and its final state"
        )
    for name, x in tensors.items():
        if x is None:
            _fail(f"{name} is missing", None, "allocate the decode state first")
        if torch.is_grad_enabled() and x.requires_grad:
            _fail(f"{name} requires grad and would be overwritten", "requires_grad", "decode under torch.no_grad()")


def _kept(state: tuple[Tensor, ...], new: tuple[Tensor, ...], in_place: bool) -> tuple[Tensor, ...]:
    """`state` with `new` written over it; or new tensors with what is in `new`, laid out like `state`."""
    if not in_place:
        state = tuple(torch.empty_like(old, dtype=x.dtype) for old, x in zip(state, new, strict=True))
    for target, x in zip(state, new, strict=True):
        target.copy_(x)
    return state


@torch.no_grad()
def _delta_rule_step(q, k, v, log_decay, beta, gain, scale, state, add_to, in_place):
    batch, tokens, heads = gain.shape
    _check_step(tokens, state=state)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x, batch, tokens, heads)
    _check_scalar("log_decay", log_decay, (batch, tokens, heads))
    _check_scalar("beta", beta, (batch, tokens, heads))
    _check_state("state", state, (batch, heads, k.shape[-1], v.shape[-1]))
    _check_state("add_to", add_to, (batch, tokens, heads, v.shape[-1]))
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    if uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import delta_step

        _check_kernel_dims(k.shape[-1])
        new = state if in_place else torch.empty_like(state)
        return delta_step(q, k, v, log_decay, beta, gain, scale, state, new, add_to), new
    erase = torch.zeros_like(gain) if beta is None else beta
    o, new = reference.recurrent_gated_delta(q, k, v, log_decay, erase, gain, scale, state, None, add_to)
    return o, _kept((state,), (new,), in_place)[0]


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    state: Tensor,
    gain: Tensor | None = None,
    scale: float | None = None,
    add_to: Tensor | None = None,
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """`gated_delta` for the next 1 to 8 tokens. No gradient.

    Args:
        state: [B,H,K,V]. in_place: overwrite it; False: leave it, at no more traffic.

    Returns:
        (o [B,T,H,V], state after the last token): the same tensor `state`, or a new one.
    """
    gain = beta if gain is None else gain
    return _delta_rule_step(q, k, v, log_decay, beta, gain, scale, state, add_to, in_place)


def linear_attn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    *,
    state: Tensor,
    scale: float | None = None,
    add_to: Tensor | None = None,
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """`linear_attn` for the next 1 to 8 tokens, as `gated_delta_step`. Returns (o, state)."""
    return _delta_rule_step(q, k, v, log_decay, None, gain, scale, state, add_to, in_place)


@torch.no_grad()
def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    ridge: Tensor,
    *,
    state: tuple[Tensor, Tensor],
    scale: float = 1.0,
    add_to: Tensor | None = None,
    preconditioner: Tensor | None = None,
    max_iter: int = 16,
    tol: float = 1e-4,
    in_place: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`mesa` for the next 1 to 8 tokens, one launch on a GPU. No gradient.

    Args:
        in_place: overwrite both states; False: leave them, at no more traffic. A preconditioner is always overwritten.
        preconditioner: [B,H,K,K] contiguous, zero before the first step; the kernels keep the inverse of an earlier
            Hkk + diag(ridge) there. Conjugate gradients then replace the direct solve of every token, until `tol` is
            not reached within `max_iter` steps: that token is solved directly and renews it. None always solves
            directly, and so do the torch form and keys of more than 128 dims, which leave it alone.

    Returns:
        (o [B,T,H,V], state after the last token): the same tensors `state`, or new ones.
    """
    batch, tokens, heads = gain.shape
    _check_step(tokens, Hkv=state[0], Hkk=state[1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x, batch, tokens, heads)
    _check_scalar("log_decay", log_decay, (batch, tokens, heads))
    _check_state("ridge", ridge, (heads, k.shape[-1]))
    _check_state("state[0]", state[0], (batch, heads, k.shape[-1], v.shape[-1]))
    _check_state("state[1]", state[1], (batch, heads, k.shape[-1], k.shape[-1]))
    _check_state("add_to", add_to, (batch, tokens, heads, v.shape[-1]))
    _check_state("preconditioner", preconditioner, (batch, heads, k.shape[-1], k.shape[-1]))
    if uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import mesa_step as step
        from .ridge import MAX_KEY_DIM

        if k.shape[-1] <= MAX_KEY_DIM:
            for name, x in (("state[1]", state[1]), ("preconditioner", preconditioner)):
                if x is not None and not x.is_contiguous():
                    _fail(f"{name} is overwritten and must be contiguous", x.stride(), "allocate it as it is")
            cached = preconditioner, max_iter, float(tol)
            new = state if in_place else tuple(torch.empty_like(x) for x in state)
            return step(q, k, v, log_decay, gain, ridge, float(scale), *state, *new, *cached, add_to), new
    from .conjugate import recurrent_mesa

    o, new = recurrent_mesa(q, k, v, log_decay, gain, ridge, scale, state)
    return o if add_to is None else (o + add_to).to(o.dtype), _kept(state, new, in_place)


@torch.no_grad()
def _mean_step(tensors, log_write, log_forget, log_z, means):
    """lZ [B,T,H] and, per tensor, (centred, mean) [B,T,H,D]; `log_z` and `means` are updated in place."""
    batch, tokens, heads = log_write.shape
    _check_scalar("log_forget", log_forget, (batch, tokens, heads))
    _check_step(tokens, log_z=log_z, mean=means[0])
    _check_state("log_z", log_z, (batch, heads))
    lZ = reference.chunk_log_norm(log_write, log_forget, log_z)
    seen = torch.cat([log_z[:, None], lZ[:, :-1]], 1) > -torch.inf
    results = []
    for x, mean in zip(tensors, means, strict=True):
        _check_rows("k and v", x, batch, tokens, heads)
        _check_state("mean", mean, (batch, heads, x.shape[-1]))
        centred, rows, final = reference.recurrent_means(x, log_write, lZ, mean)
        mean.copy_(final)
        results.append((torch.where(seen[..., None], centred, 0.0), rows))
    log_z.copy_(lZ[:, -1])
    return lZ, results


def centre_step(
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    *,
    log_z: Tensor,
    mean: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`log_norm` and `centre` for the next 1 to 8 tokens. No gradient.

    `log_z` [B,H] and `mean` = (kbar [B,H,K], vbar [B,H,V]) are updated in place; before the first token they are
    -inf and 0.

    Returns:
        (kd, vd, vbar, rho2, lZ [B,T,H]) as the full operators give them.
    """
    lZ, ((kd, _), (vd, vbar)) = _mean_step((k, v), log_write, log_forget, log_z, mean)
    return kd.to(k.dtype), vd.to(v.dtype), vbar.to(v.dtype), kd.square().sum(-1), lZ


def running_mean_step(
    v: Tensor, log_write: Tensor, log_forget: Tensor, *, log_z: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """`log_norm` and `running_mean` for the next 1 to 8 tokens. No gradient.

    `log_z` [B,H] and `mean` [B,H,V] are updated in place. Returns (vbar [B,T,H,V], lZ [B,T,H]).
    """
    lZ, ((_, vbar),) = _mean_step((v,), log_write, log_forget, log_z, (mean,))
    return vbar.to(v.dtype), lZ


State = tuple[Tensor, Tensor, Tensor, Tensor]


def _check_centred(q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, read_mean, state, sequences):
    batch, tokens, heads = log_write.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x, batch, tokens, heads)
    for name, x in (("log_forget", log_forget), ("log_exponent", log_exponent), ("log_erase", log_erase)):
        _check_scalar(name, x, (batch, tokens, heads))
    _check_state("log_balance", log_balance, (heads,))
    _check_state("read_mean", read_mean, (heads,))
    shapes = (k.shape[-1], v.shape[-1]), (k.shape[-1],), (v.shape[-1],), ()
    for i, shape in enumerate(shapes):
        _check_state(f"state[{i}]", None if state is None else state[i], (sequences, heads, *shape))


def _last_norm(log_z: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """log Z after the last token of every sequence."""
    if cu_seqlens is None:
        return log_z[:, -1]
    last = log_z[0, (cu_seqlens[1:] - 1).clamp(min=0).long()]
    none = torch.full_like(last, -torch.inf) if initial is None else initial.to(last.dtype)
    return torch.where((cu_seqlens[1:] > cu_seqlens[:-1])[:, None], last, none)


def _centred(
    q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, read_mean, scale, initial_state,
    output_final_state, cu_seqlens, add_to,
):  # fmt: skip
    sequences = _check_statistics(log_write, log_forget, None, cu_seqlens)
    gates = log_exponent, log_erase, log_balance
    _check_centred(q, k, v, log_write, log_forget, *gates, read_mean, initial_state, sequences)
    memory, key_mean, value_mean, start = initial_state if initial_state is not None else (None,) * 4
    means = None if initial_state is None else (key_mean, value_mean)
    if log_write.shape[1] and uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import centred_fwd

        if k.dtype != v.dtype:
            _fail("k and v must share one dtype", (k.dtype, v.dtype), "cast them alike")
        added = None if read_mean is None else add_to
        kd, vd, base, log_decay, erase, gain, log_z, means, *_ = centred_fwd(
            k, v, log_write, log_forget, *gates, read_mean, added, _side_by_side(means), start, cu_seqlens
        )
        add_to = add_to if read_mean is None else base
        log_decay, erase, gain = log_decay.mT, None if log_balance is None else erase.mT, gain.mT
        means = means.split([k.shape[-1], v.shape[-1]], -1)
    else:
        log_z = log_norm(log_write, log_forget, initial_log_z=start, cu_seqlens=cu_seqlens)
        kd, vd, vbar, rho2, means = centre(
            k, v, log_write, log_forget, log_z, initial_mean=means, cu_seqlens=cu_seqlens
        )  # fmt: skip
        log_decay, erase, gain = reference.centred_gates(
            log_write, log_forget, log_z, start, *gates, rho2, cu_seqlens
        )  # fmt: skip
        if read_mean is not None:
            base = read_mean[:, None] * vbar.to(read_mean.dtype)
            add_to = (base if add_to is None else base + add_to).to(kd.dtype)
        erase = None if log_balance is None else erase
    o, memory = _delta_rule(
        q, kd, vd, log_decay, erase, gain, float(scale), memory, output_final_state, cu_seqlens, add_to
    )
    if not output_final_state:
        return o, None
    last = log_z.new_full((sequences, log_z.shape[2]), -torch.inf) if start is None else start
    return o, (memory, *means, _last_norm(log_z, start, cu_seqlens) if log_z.shape[1] else last)


def centred_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_exponent: Tensor,
    log_erase: Tensor,
    log_balance: Tensor,
    *,
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """The gated delta rule on keys and values minus their running means (derivation.md §4, §5, stable form).

        lZ = log_norm(log_write, log_forget);   kd, vd, vbar, rho2 = centre(k, v, ...)
        log decay = max(exp(log_exponent) log(1 - b), -80), b the write strength exp(log_write - lZ)
        a = b (1 - b) exp(log_erase);   s = a c^2 rho2;   erase = a c^2 / (1 + s);   gain = a c / (1 + s)
        o, S = gated_delta(q, kd, vd, log decay, erase, gain=gain, scale, add_to = read_mean vbar + add_to)

    Args:
        q: [B,T,Hq,K] what reads the memory: s (q - r) / c in the derivation's terms.
        log_write: [B,T,H], -inf writes nothing. log_forget, log_exponent, log_erase: [B,T,H], finite; log_forget <= 0,
            the other two below about 30.
        log_balance: [H] = log c. read_mean: [H], what of vbar is added to o; None for nothing.
        initial_state: (memory [B,H,K,V], key mean [B,H,K], value mean [B,H,V], log Z [B,H]), or None.

    Returns:
        (o [B,T,H,V] in q's dtype, the same four states after the last token, or None). Differentiable once in every
        tensor argument. Other arguments and errors as `gated_delta`.
    """
    return _centred(
        q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, read_mean, scale, initial_state,
        output_final_state, cu_seqlens, add_to,
    )  # fmt: skip


def centred_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_exponent: Tensor,
    logit: Tensor,
    *,
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """The running covariance of keys and values (derivation.md §3): `centred_gated_delta` without the erase.

    gain = sigmoid(logit of b + logit) (1 - b), so logit = log_exponent = 0 is the covariance itself. Arguments, results
    and errors as `centred_gated_delta`.
    """
    return _centred(
        q, k, v, log_write, log_forget, log_exponent, logit, None, read_mean, scale, initial_state, output_final_state,
        cu_seqlens, add_to,
    )  # fmt: skip


TimeScales = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _check_scales(time_scales: TimeScales | None, v: Tensor, log_write: Tensor) -> tuple[Tensor, ...]:
    """The states among checked `time_scales`, none without."""
    if time_scales is None:
        return ()
    (batch, tokens, heads), (write, forget, weights, mean, norm) = log_write.shape, time_scales
    _check_step(tokens, scale_mean=mean, scale_log_z=norm)
    slow = heads * weights.shape[-1]
    _check_state("time_scales[2]", weights, (heads, weights.shape[-1]))
    for name, x, shape in (
        ("time_scales[0]", write, (batch, tokens, slow)), ("time_scales[1]", forget, (batch, tokens, slow)),
        ("time_scales[3]", mean, (batch, slow, v.shape[-1])), ("time_scales[4]", norm, (batch, slow)),
    ):  # fmt: skip
        _check_state(name, x, shape)
    return mean, norm


def _dense(statistics: tuple[Tensor, ...], in_place: bool) -> tuple[Tensor, ...]:
    """Running statistics as the kernels take them."""
    names = "key_mean", "value_mean", "log_z", "scale_mean", "scale_log_z"
    for name, x in zip(names, statistics, strict=False):
        if in_place and not x.is_contiguous():
            _fail(f"{name} is overwritten and must be contiguous", tuple(x.stride()), "allocate it as it is")
    return tuple(x.contiguous() for x in statistics)


def _zeroth_order(v, vbar, read_mean, add_to, time_scales, slow, dtype):
    """What is added to the memory's answer, in torch, or None; the states `slow` of the time scales are updated."""
    base = 0.0 if add_to is None else add_to.to(dtype)
    if read_mean is not None:
        base = base + read_mean[:, None] * vbar.to(read_mean.dtype)
    if time_scales is not None:
        write, forget, weights, *_ = time_scales
        extra, _ = running_mean_step(v, write, forget, log_z=slow[1], mean=slow[0])
        base = base + torch.einsum("bthmv,hm->bthv", extra.to(dtype).unflatten(2, weights.shape), weights)
    return base if isinstance(base, Tensor) else None


@torch.no_grad()
def _centred_step(
    q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, state, read_mean, scale, add_to, time_scales,
    in_place,
):  # fmt: skip
    batch, tokens, heads = log_write.shape
    names = ("memory", "key_mean", "value_mean", "log_z")
    _check_step(tokens, **dict(zip(names, state, strict=True)))
    gates = log_exponent, log_erase, log_balance
    _check_centred(q, k, v, log_write, log_forget, *gates, read_mean, state, batch)
    _check_state("add_to", add_to, (batch, tokens, heads, v.shape[-1]))
    state = (*state, *_check_scales(time_scales, v, log_write))
    if uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import centred_step

        _check_kernel_dims(k.shape[-1])
        state = state[0], *_dense(state[1:], in_place)
        new = state if in_place else tuple(torch.empty_like(x) for x in state)
        slow = time_scales[:3] if time_scales is not None else (None,) * 3
        return centred_step(
            q, k, v, log_write, log_forget, *gates, read_mean, add_to, float(scale), list(state), list(new), *slow
        ), new  # fmt: skip
    rest = state, read_mean, scale, add_to, time_scales, in_place
    return torch_centred_step(q, k, v, log_write, log_forget, *gates, *rest)


@torch.no_grad()
def torch_centred_step(
    q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, state, read_mean, scale, add_to, time_scales,
    in_place,
):  # fmt: skip
    """`_centred_step` with checked arguments, in torch; `state` with the states of the time scales."""
    gates = log_exponent, log_erase, log_balance
    # The memory is copied by what it becomes.
    state = state if in_place else (state[0], *(x.clone() for x in state[1:]))
    memory, key_mean, value_mean, log_z, *slow = state
    start = log_z.clone()
    kd, vd, vbar, rho2, lZ = centre_step(k, v, log_write, log_forget, log_z=log_z, mean=(key_mean, value_mean))
    if log_exponent is None:
        log_decay, erase = None, reference.scheduled_gain(log_write, log_forget, lZ, start, *gates[1:], rho2)
        gain = erase
    else:
        log_decay, erase, gain = reference.centred_gates(log_write, log_forget, lZ, start, *gates, rho2)
    base = _zeroth_order(v, vbar, read_mean, add_to, time_scales, slow, lZ.dtype)
    base = None if base is None else base.to(q.dtype)
    erase = torch.zeros_like(gain) if erase is None else erase
    o, new = reference.recurrent_gated_delta(q, kd, vd, log_decay, erase, gain, scale, memory, None, base)
    return o, (*_kept((memory,), (new,), in_place), *state[1:])


def centred_gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_exponent: Tensor,
    log_erase: Tensor,
    log_balance: Tensor,
    *,
    state: State,
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    add_to: Tensor | None = None,
    time_scales: TimeScales | None = None,
    in_place: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`centred_gated_delta` for the next 1 to 8 tokens, one launch on a GPU.

    Args:
        state: (memory, key mean, value mean, log Z); before the first token 0, 0, 0 and -inf.
        time_scales: M more running means of v per head, added to o by per-head weights: (log_write [B,T,H*M],
            log_forget [B,T,H*M], weights [H,M], means [B,H*M,V], log Z [B,H*M]); the last two are states as well.
        in_place: overwrite all states; False: leave them. That is faster: of a state that is overwritten one program
            serves a whole head, whose statistics all its tiles must have read.

    Returns:
        (o [B,T,H,V], states after the last token): memory, key mean, value mean, log Z and, with time_scales, their
        means and log Z; the same tensors, or new ones. No gradient.
    """
    return _centred_step(
        q, k, v, log_write, log_forget, log_exponent, log_erase, log_balance, state, read_mean, scale, add_to,
        time_scales, in_place,
    )  # fmt: skip


def centred_linear_attn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_exponent: Tensor,
    logit: Tensor,
    *,
    state: State,
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    add_to: Tensor | None = None,
    time_scales: TimeScales | None = None,
    in_place: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`centred_linear_attn` for the next 1 to 8 tokens, as `centred_gated_delta_step`."""
    return _centred_step(
        q, k, v, log_write, log_forget, log_exponent, logit, None, state, read_mean, scale, add_to, time_scales,
        in_place,
    )  # fmt: skip


def centred_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_rate: Tensor,
    schedule: Tensor,
    *,
    state: State,
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    add_to: Tensor | None = None,
    time_scales: TimeScales | None = None,
    in_place: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The delta rule on centred keys and values at a scheduled rate (derivation.md §7), for the next 1 to 8 tokens.

    `gated_delta` without decay and with beta = eta / (1 + eta rho2), log eta = log_rate + schedule log b, at most 30.
    log_rate: [B,T,H]; schedule: [H]. The rest as `centred_gated_delta_step`.
    """
    return _centred_step(
        q, k, v, log_write, log_forget, None, log_rate, schedule, state, read_mean, scale, add_to, time_scales,
        in_place,
    )  # fmt: skip


@torch.no_grad()
def centred_mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_exponent: Tensor,
    logit: Tensor,
    ridge: Tensor,
    *,
    state: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    read_mean: Tensor | None = None,
    scale: float = 1.0,
    add_to: Tensor | None = None,
    time_scales: TimeScales | None = None,
    preconditioner: Tensor | None = None,
    max_iter: int = 16,
    tol: float = 1e-4,
    in_place: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`mesa` on centred keys and values for the next 1 to 8 tokens: two launches on a GPU, for one token.

    The covariances of k and v and of k are those of `centred_linear_attn`.

    Args:
        state: (Hkv [B,H,K,V], Hkk [B,H,K,K], key mean, value mean, log Z). ridge: [H,K], as `mesa` has it.
        preconditioner, max_iter, tol: as `mesa_step` has them.

    Returns:
        (o [B,T,H,V], states after the last token): those of `state` and, with time_scales, their means and log Z. The
        rest as `centred_gated_delta_step`.
    """
    batch, tokens, _ = log_write.shape
    memory, key_memory, *statistics = state
    _check_step(tokens, memory=memory, key_mean=statistics[0])
    _check_centred(
        q, k, v, log_write, log_forget, log_exponent, logit, None, read_mean, (memory, *statistics), batch
    )  # fmt: skip
    statistics = (*statistics, *_check_scales(time_scales, v, log_write))
    if uses_kernels(q, k.shape[-1], v.shape[-1]):
        from .ops import centre_step as launch

        _check_kernel_dims(k.shape[-1])
        old = _dense(statistics, in_place)
        new = old if in_place else tuple(torch.empty_like(x) for x in old)
        slow = time_scales[:3] if time_scales is not None else (None,) * 3
        kd, vd, base, log_decay, gain = launch(
            k, v, log_write, log_forget, log_exponent, logit, read_mean, add_to, list(old), list(new), *slow
        )  # fmt: skip
    else:
        new = statistics if in_place else tuple(x.clone() for x in statistics)
        key_mean, value_mean, log_z, *slow = new
        start = log_z.clone()
        kd, vd, vbar, _, lZ = centre_step(k, v, log_write, log_forget, log_z=log_z, mean=(key_mean, value_mean))
        log_decay, _, gain = reference.centred_gates(
            log_write, log_forget, lZ, start, log_exponent, logit, None, None
        )  # fmt: skip
        base = _zeroth_order(v, vbar, read_mean, add_to, time_scales, slow, lZ.dtype)
    cached = {"preconditioner": preconditioner, "max_iter": max_iter, "tol": tol}
    o, memories = mesa_step(
        q, kd, vd, log_decay, gain, ridge, state=(memory, key_memory), scale=scale, add_to=base, in_place=in_place,
        **cached,
    )  # fmt: skip
    return o, (*memories, *new)


def _check_logits(student: Tensor, weight: Tensor | None, temperature: float) -> None:
    if student.dim() != 2 or student.dtype not in _FLOATS or student.stride(1) != 1:
        _fail("student must be [n,V] floats, dense in V", (tuple(student.shape), student.dtype), "pass rows of logits")
    if student.requires_grad:
        _fail("student requires grad and would be overwritten", "requires_grad", "detach it")
    if weight is not None and tuple(weight.shape) != student.shape[:1]:
        _fail(f"weight must have shape ({student.shape[0]},)", tuple(weight.shape), "pass one weight per row")
    if not temperature > 0:
        _fail("temperature must be positive", temperature, "use 1 for the models' own distributions")


@torch.no_grad()
def kl_divergence_(
    student: Tensor,
    teacher: Tensor,
    *,
    weight: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    gradient: bool = True,
) -> Tensor:
    """KL(softmax(teacher / temperature) || softmax(student / temperature)) of every row, its gradient in place.

    Args:
        student, teacher: logits [n,V], each of any float type; -inf excludes a token, also from both.
        weight: [n] of each row; 0 leaves a row out, whatever it holds. None means 1.
        scale: of the gradient alone.
        gradient: overwrite `student` by scale times the gradient of the sum of the result; False: leave it.

    Returns:
        weight times KL, [n] float32 (float64 for float64 logits), infinite where the student excludes a token that the
        teacher does not. Arithmetic is that of the result. Not differentiable.
    """
    _check_logits(student, weight, temperature)
    if teacher.shape != student.shape or teacher.dtype not in _FLOATS:
        _fail(f"teacher must be [n,V] = {tuple(student.shape)} floats", tuple(teacher.shape), "pass matching logits")
    if student.numel() and uses_kernels(student):
        from .divergence import kl_

        teacher = teacher if teacher.stride(1) == 1 else teacher.contiguous()
        return kl_(student, teacher, weight, float(temperature), float(scale), gradient)
    log_q, log_p = (reference.log_probabilities(logits, temperature) for logits in (student, teacher))
    losses, slope = reference.divergence(log_q, log_p.to(log_q.dtype))
    if gradient:
        reference.write_gradient(student, slope, weight, scale / temperature)
    return reference.weighted(losses, weight)


@torch.no_grad()
def top_kl_divergence_(
    student: Tensor,
    ids: Tensor,
    log_p: Tensor,
    *,
    weight: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    gradient: bool = True,
) -> Tensor:
    """`kl_divergence_` with the teacher's k likeliest tokens and one bucket for all the others.

    Args:
        ids: [n,k] integers, no token twice in a row, k < V. log_p: [n,k+1] log probabilities at the temperature, the
            last column that of the bucket, whose student's probability is the sum over the other tokens.
    """
    _check_logits(student, weight, temperature)
    rows, vocabulary = student.shape
    if ids.dim() != 2 or len(ids) != rows or not 0 < ids.shape[1] < vocabulary:
        _fail(f"ids must be [{rows},k] with 0 < k < {vocabulary}", tuple(ids.shape), "keep fewer tokens")
    if log_p.shape != (rows, ids.shape[1] + 1):
        _fail(f"log_p must be {(rows, ids.shape[1] + 1)}", tuple(log_p.shape), "the last column is the bucket's")
    ids = ids.long()
    if student.numel() and uses_kernels(student):
        from .divergence import top_kl_

        return top_kl_(student, ids, log_p, weight, float(temperature), float(scale), gradient)
    log_q = reference.log_probabilities(student, temperature)
    losses, slope = reference.top_divergence(log_q, ids, log_p.to(log_q.dtype))
    if gradient:
        reference.write_gradient(student, slope, weight, scale / temperature)
    return reference.weighted(losses, weight)
