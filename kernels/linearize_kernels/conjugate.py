"""MesaNet's read-out: the ridge solution over all that was written, by conjugate gradients in chunks.

State Hkv, Hkk <- exp(log_decay) (Hkv, Hkk) + gain k (v, k)^T and o = scale Hkv^T (Hkk + diag(ridge))^-1 q. In a chunk
that is entered with state H, a row vector p meets the matrix of its own token as

    A(p) = ((p K^T) o Gam o gain_s) K + e o (p Hkk) + ridge o p

The solution q* is preconditioned by (Hkk + diag(ridge))^-1 at the chunk's start. Its gradient is implicit: with
dq* = scale Hkv dO and A y = dq*, dq = y, dridge = -sum y o q*, and all else is the gradient of linear attention with
query q*, values [v ; k] and cotangents [dO ; -y]. Torch operators; `ridge.py` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ChunkLayout, _weights, compute_dtype, expand_heads


class _Systems:
    """The matrices of all tokens, as an operator on rows [chunks,H,C,K]."""

    def __init__(
        self, k: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, state: Tensor | None, cu_seqlens
    ):
        dtype, heads = compute_dtype(k), gain.shape[2]
        self.plan = plan = ChunkLayout(k.shape[0], k.shape[1], cu_seqlens, k.device)
        self.keys = expand_heads(plan.split(k).to(dtype), heads, 1)
        decay = torch.zeros_like(gain) if log_decay is None else log_decay
        total = plan.split(decay).double().cumsum(-1)
        write = plan.split(gain).to(dtype)
        self.weights = _weights(total, -total, dtype) * write[..., None, :]
        self.reach = total.to(dtype).exp()[..., None]
        self.ridge = ridge.to(dtype)[:, None, :]
        late = (total[..., -1:] - total).to(dtype).exp() * write
        fresh = (self.keys * late[..., None]).mT @ self.keys
        if state is None:
            state = self.keys.new_zeros(plan.sequences, heads, k.shape[-1], k.shape[-1])

        def step(state: Tensor, kept: Tensor, fresh: Tensor) -> Tensor:
            return kept * state + fresh

        self.state, _ = plan.scan(state.to(dtype), step, self.reach[..., -1:, :], fresh)
        start = self.state + torch.diag_embed(self.ridge[:, 0])
        # cholesky_ex: a row that is NaN stays NaN by itself, where cholesky would stop all of them. Where the ridge is
        # lost in the rounding of long keys the matrix may not be definite, and its diagonal has to do.
        factor, failed = torch.linalg.cholesky_ex(start)
        rough = torch.diag_embed(start.diagonal(dim1=-2, dim2=-1).sqrt())
        self.inverse = torch.cholesky_inverse(torch.where(failed[..., None, None] > 0, rough, factor))

    def apply(self, p: Tensor) -> Tensor:
        return ((p @ self.keys.mT) * self.weights) @ self.keys + self.reach * (p @ self.state) + self.ridge * p

    def solve(self, target: Tensor, max_iter: int, tol: float) -> tuple[Tensor, Tensor]:
        """(x with A x = target, |target - A x| / |target| per row).

        Of every row the nearest iterate: the last may be far off where rounding is all that is left of the matrix.
        """
        # In two steps: squares of a short row underflow long before its entries do.
        peak = target.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        size = peak * (target / peak).norm(dim=-1, keepdim=True).clamp_min(1.0)
        target = target / size
        x = found = torch.zeros_like(target)
        rest = target
        least = torch.full_like(size, torch.inf)
        z = rest @ self.inverse
        p, rz = z, (rest * z).sum(-1, keepdim=True)
        for i in range(max_iter + 1 if target.numel() else 0):
            gap = rest.norm(dim=-1, keepdim=True)
            found, least = torch.where(gap < least, x, found), torch.where(gap < least, gap, least)
            if i == max_iter or float(least.max()) <= tol:
                break
            Ap = self.apply(p)
            curvature = (p * Ap).sum(-1, keepdim=True)
            # The ridge's own part, below which only rounding can take it: where keys are long the sum is lost in it.
            curvature = torch.maximum(curvature, (self.ridge * p * p).sum(-1, keepdim=True))
            step = rz / curvature.clamp_min(1e-30)
            x = x + step * p
            rest = rest - step * Ap
            z = rest @ self.inverse
            new = (rest * z).sum(-1, keepdim=True)
            p = z + new / rz.clamp_min(1e-30) * p
            rz = new
        return found * size, (target - self.apply(found)).norm(dim=-1)


class _Solve(torch.autograd.Function):
    """q* = (Hkk + diag(ridge))^-1 q per token; the gradient solves the same systems once more.

    Its backward pass returns y as the gradient of q and the part of every other gradient that comes through Hkk.
    """

    @staticmethod
    def forward(ctx, q, k, log_decay, gain, ridge, state, cu_seqlens, max_iter, tol):
        systems = _Systems(k, log_decay, gain, ridge, state, cu_seqlens)
        rows = expand_heads(systems.plan.split(q).to(compute_dtype(q)), gain.shape[2], 1)
        solution, residual = systems.solve(rows, max_iter, tol)
        solution, residual = systems.plan.merge(solution), systems.plan.merge(residual)
        ctx.save_for_backward(q, k, log_decay, gain, ridge, state, solution, cu_seqlens)
        ctx.max_iter, ctx.tol = max_iter, tol
        ctx.mark_non_differentiable(residual)
        return solution, residual

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope, _):
        from .api import linear_attn

        q, k, log_decay, gain, ridge, state, solution, cu_seqlens = ctx.saved_tensors
        systems = _Systems(k, log_decay, gain, ridge, state, cu_seqlens)
        y, _ = systems.solve(systems.plan.split(slope.to(solution.dtype)), ctx.max_iter, ctx.tol)
        y = systems.plan.merge(y)
        dq = y.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype)
        d_ridge = -(y * solution).sum((0, 1)).to(ridge.dtype)
        # Through Hkk: -y^T dHkk q*, which is linear attention of q* over values k with cotangent -y.
        leaves = [x if x is None else x.detach().requires_grad_() for x in (k, k, log_decay, gain, state)]
        with torch.enable_grad():
            as_key, as_value, decay, write, start = leaves
            read, _ = linear_attn(
                solution, as_key.to(solution.dtype), as_value.to(solution.dtype), decay, write, scale=1.0,
                initial_state=start, cu_seqlens=cu_seqlens,
            )  # fmt: skip
        wanted = [x for x in leaves if x is not None]
        slopes = iter(torch.autograd.grad(read, wanted, -y.to(read.dtype), allow_unused=True, materialize_grads=True))
        d_key, d_value, d_decay, d_write, d_start = (None if x is None else next(slopes) for x in leaves)
        if d_start is not None:
            d_start = (d_start + d_start.mT) / 2
        return dq, d_key + d_value, d_decay, d_write, d_ridge, d_start, None, None, None


def solve_queries(
    q: Tensor, k: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None, max_iter: int, tol: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q* [B,T,H,K], relative residual [B,T,H]), both in `compute_dtype`."""
    with torch.autocast(q.device.type, enabled=False):
        return _Solve.apply(q, k, log_decay, gain, ridge, state, cu_seqlens, max_iter, tol)


def recurrent_mesa(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor, ridge: Tensor, scale: float,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Token by token with a direct solve of every system: the oracle, and the decode step. No packing."""
    dtype, heads = compute_dtype(q), gain.shape[2]
    queries, keys, values = (expand_heads(x, heads, 2).to(dtype) for x in (q, k, v))
    write, matrix = gain.to(dtype), torch.diag_embed(ridge.to(dtype))
    decay = torch.ones_like(write) if log_decay is None else log_decay.to(dtype).exp()
    if state is None:
        shape = q.shape[0], heads, k.shape[-1]
        state = keys.new_zeros(*shape, v.shape[-1]), keys.new_zeros(*shape, k.shape[-1])
    Hkv, Hkk = (x.to(dtype) for x in state)
    outs = []
    for t in range(q.shape[1]):
        key = write[:, t, :, None, None] * keys[:, t, :, :, None]
        kept = decay[:, t, :, None, None]
        Hkv = kept * Hkv + key * values[:, t, :, None, :]
        Hkk = kept * Hkk + key * keys[:, t, :, None, :]
        solution = torch.linalg.solve(Hkk + matrix, queries[:, t])
        outs.append(scale * torch.einsum("bhkv,bhk->bhv", Hkv, solution))
    o = torch.stack(outs, 1) if outs else values.new_zeros(q.shape[0], 0, heads, v.shape[-1])
    return o.to(q.dtype), (Hkv, Hkk)
