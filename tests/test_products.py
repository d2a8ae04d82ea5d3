"""Products of bf16 rows with fp32 weights: as good as fp32, value and gradients."""

import pytest
import torch

from linearize.mixers import products
from linearize.mixers.products import exact_by_head, exact_linear


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def both(call, tensors, slope):
    """Outputs and gradients of `call` as it is, and in fp64."""
    found = []
    for exact in (False, True):
        leaves = [(t.double() if exact else t).detach().requires_grad_() for t in tensors]
        out = call(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, slope.to(out.dtype))])
    return found


@pytest.mark.parametrize("rows", [1, 3, 200, 1000, 4096])
@pytest.mark.parametrize("split", [False, True])
def test_exact_linear(rows, split, monkeypatch):
    monkeypatch.setattr(products, "splits", lambda x, w: split and w.dtype == torch.float32)
    torch.manual_seed(0)
    x, w, b = torch.randn(2, rows, 48).bfloat16(), torch.randn(7, 48), torch.randn(7)
    slope = torch.randn(2, rows, 7)
    got, want = both(exact_linear, (x, w, b), slope)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16 and got[2].dtype == torch.float32
    limits = (1e-5, 6e-3, 2e-5, 1e-6)
    for a, e, limit in zip(got, want, limits, strict=True):
        assert a.shape == e.shape and relative(a, e) < limit


@pytest.mark.parametrize("split", [False, True])
def test_exact_by_head(split, monkeypatch):
    monkeypatch.setattr(products, "splits", lambda x, w: split and w.dtype == torch.float32)
    torch.manual_seed(1)
    x, w = torch.randn(2, 33, 3, 16).bfloat16(), torch.randn(3, 5, 16)
    got, want = both(exact_by_head, (x, w), torch.randn(2, 33, 3, 5))
    for a, e, limit in zip(got, want, (1e-5, 6e-3, 2e-5), strict=True):
        assert a.shape == e.shape and relative(a, e) < limit


@pytest.mark.parametrize(
    "call, rows, shape", [(exact_linear, (2, 0, 16), (5, 16)), (exact_by_head, (0, 7, 3, 16), (3, 5, 16))]
)
@pytest.mark.parametrize("split", [False, True])
def test_no_rows(call, rows, shape, split, monkeypatch):
    monkeypatch.setattr(products, "splits", lambda x, w: split)
    x, w = torch.zeros(rows).bfloat16().requires_grad_(), torch.ones(shape).requires_grad_()
    out = call(x, w)
    assert out.shape == (*rows[:-1], 5)
    dx, dw = torch.autograd.grad(out.sum(), (x, w))
    assert dx.shape == rows and dw.shape == shape and not dw.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    torch.manual_seed(2)
    rows = torch.randn(4, 500, 3, 64).bfloat16()
    cases = [
        (exact_linear, (rows[:, :, 0], torch.randn(36, 64), torch.randn(36)), torch.randn(4, 500, 36)),
        (exact_by_head, (rows, torch.randn(3, 12, 64)), torch.randn(4, 500, 3, 12)),
    ]
    for call, tensors, slope in cases:
        got, want = both(call, [t.cuda() for t in tensors], slope.cuda())
        for a, e, limit in zip(got, want, (1e-5, 6e-3, 2e-5, 1e-5), strict=False):
            assert relative(a, e) < limit
