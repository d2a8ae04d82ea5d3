"""Products of activations with fp32 weights that are worth fp32, at the speed of 16-bit ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PIECES = 32  # of the rows over which a weight's gradient is summed
PIECE = 256  # rows in each at least
FEW = 64  # rows below which a product is one in fp32


def _halves(x: Tensor, dim: int) -> Tensor:
    """x fp32 as two bf16 numbers, high and low, beside each other: together they hold 16 bits of it.

    Each is padded to a multiple of 8 along `dim`, without which the products run on slow kernels.
    """
    size = x.shape[dim]
    both = x.new_zeros(*x.shape[:dim], 2, -(-size // 8) * 8, *x.shape[dim + 1 :], dtype=torch.bfloat16)
    halves = both.narrow(dim + 1, 0, size).unbind(dim)
    halves[0].copy_(x)
    halves[1].copy_(x - halves[0])
    return both.flatten(dim, dim + 1)


def _joined(x: Tensor, dim: int, size: int) -> Tensor:
    """The sum of what came of the two halves."""
    high, low = x.chunk(2, dim)
    return (high + low).narrow(dim, 0, size)


def _to_float(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b of bf16 matrices, summed and returned in fp32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def _over_rows(a: Tensor, b: Tensor) -> Tensor:
    """a^T @ b over the rows of a [N, R, M] and b [N, R, K] to [N, M, K] fp32.

    Few outputs and many rows leave most of a GPU idle, so pieces of the rows are products of their own.
    """
    count, rows = a.shape[:2]
    pieces = math.gcd(rows, PIECES)
    while pieces > 1 and rows // pieces < PIECE:
        pieces //= 2
    a, b = (x.unflatten(1, (pieces, -1)).flatten(0, 1) for x in (a, b))
    return _to_float(a.mT, b).unflatten(0, (count, pieces)).sum(1)


class SplitProduct(torch.autograd.Function):
    """x @ w^T for x [N, R, K] bf16 and w [N, M, K] fp32, to fp32; the gradient of x is bf16, that of w fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _joined(_to_float(x, _halves(w, 1).mT), 2, w.shape[1])

    @staticmethod
    def backward(ctx, slope: Tensor):
        x, w = ctx.saved_tensors
        slopes = _halves(slope, 2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            (high, _), (weight, _) = slopes.chunk(2, 2), _halves(w, 1).chunk(2, 1)
            dx = torch.bmm(high, weight)
        if ctx.needs_input_grad[1]:
            dw = _joined(_over_rows(slopes, x), 1, w.shape[1])
        return dx, dw


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in the weight's precision, which decides gates and write weights.

    x: [..., K] in any format; weight: [M, K] fp32 or fp64; bias: [M]. Returns [..., M] in the weight's dtype, with an
    error of 2^-16 of the summed magnitudes for bf16 x on a GPU, where fp32 products are slow, and rounded like any
    product of this dtype elsewhere.
    """
    if not splits(x, weight):
        return F.linear(x.to(weight.dtype), weight, bias)
    out = SplitProduct.apply(x.reshape(1, -1, x.shape[-1]), weight[None])[0].view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def exact_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's rows times its own weights, as :func:`exact_linear`.

    x: [B, T, N, K]; weight: [N, M, K]. Returns [B, T, N, M] in the weight's dtype.
    """
    if not splits(x, weight):
        return torch.einsum("btnk,nmk->btnm", x.to(weight.dtype), weight)
    batch, tokens = x.shape[:2]
    out = SplitProduct.apply(x.flatten(0, 1).transpose(0, 1), weight)
    return out.transpose(0, 1).unflatten(0, (batch, tokens))


def splits(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of these two is made of bf16 products: not for so few rows that launches are all it costs."""
    wide = x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return wide and x.numel() >= FEW * x.shape[-1]
