"""What the interpreter can tell of memory: every buffer the kernels get lies between guards and starts as NaN.

A write beside a buffer shows in its guards, a read of what nobody wrote in the results. The delta rule runs with tiles
that the launch tables use or may use, for heads of whole, odd and unequal widths. test_interpreted.py runs these cases.
"""

import interpreter  # noqa: F401
import pytest
import torch
from linearize_kernels import centring, delta, grads, reference, scan, selfcheck, stats
from linearize_kernels.common import Chunks
from tolerances import TOLERANCE, assert_close

GUARD = 4096
LIMITS = TOLERANCE["float32"]


@pytest.fixture
def guards(monkeypatch):
    """Makes new tensors NaN between guards, and looks at the guards afterwards."""
    made, empty = [], torch.empty

    def guarded(dims, dtype):
        size = dims.numel()
        buffer = empty(size + 2 * GUARD, dtype=dtype)
        buffer.fill_(torch.nan if dtype.is_floating_point else -7)
        made.append((buffer, buffer.clone(), size))
        return buffer[GUARD : GUARD + size].view(dims)

    def shape(size):
        return torch.Size(size if isinstance(size[0], int) else size[0])

    def new_empty(self, *size, dtype=None, **_):
        return guarded(shape(size), dtype or self.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: guarded(x.shape, x.dtype))
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: guarded(shape(size), dtype))
    yield
    monkeypatch.undo()
    assert made
    for buffer, before, size in made:
        for part in (slice(GUARD), slice(GUARD + size, None)):
            assert torch.equal(buffer[part].nan_to_num(7e7), before[part].nan_to_num(7e7)), (buffer.dtype, size)


def check_delta(dims, length):
    inputs = [x[:, :70] if i < 6 else x for i, x in enumerate(selfcheck.problem(*dims, torch.float32, True, "cpu"))]
    exact = [x.double().requires_grad_() for x in inputs]
    want = reference.recurrent_gated_delta(*exact[:6], 0.5, exact[6])
    make = torch.Generator().manual_seed(1)
    do, d_final = (torch.randn(x.shape, generator=make) for x in want)
    slopes = torch.autograd.grad(want, exact, [do.double(), d_final.double()])
    o, final, scalars, N, A, *borders = delta.forward(*inputs, None, None, 0.5, True, None, length)
    q, k, v, *_, state = inputs
    dq, dk, dv, gates, d_state = delta.backward(
        q, k, v, scalars, N, A, state, None, do, d_final, 0.5, True, True, None, length, *borders
    )
    for name, got, true in zip(("o", "final"), (o, final), want, strict=True):
        assert_close(name, got, true.detach(), LIMITS[0])
    got = dq, dk, dv, *gates, d_state
    for name, limit, a, b in zip(("dq", "dk", "dv", "dlog_decay", "dbeta", "dgain", "dstate"),
                                 (1, 1, 1, 2, 2, 2, 1), got, slopes, strict=True):  # fmt: skip
        assert_close(name, a, b, LIMITS[limit])


@pytest.mark.parametrize("dims,length", [((50, 100), 0), ((50, 100), 64), ((64, 128), 64), ((256, 256), 0)])
def test_delta_rule(guards, dims, length):
    check_delta(dims, length)


@pytest.mark.parametrize("tiles", [(32, 64), (64, 32), (32, 32), (32, 16)])
def test_tiles_of_the_gradients(guards, monkeypatch, tiles):
    monkeypatch.setitem(grads.GRADS, 64, (*tiles, 4, 1))
    check_delta((64, 64), 0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_of_the_scans(guards, monkeypatch, tile, late):
    for table in (scan.SCAN, scan.SCAN_ADD, scan.STORE, scan.REVERSE):
        monkeypatch.setitem(table, 64, (tile, 4, 2))
    monkeypatch.setattr(scan, "AT_ONCE", 0)
    for name in ("LATE_SCAN", "LATE_REVERSE"):
        monkeypatch.setattr(scan, name, {64} if late else set())
    check_delta((64, 64), 0)


@pytest.mark.parametrize("dims", [(64, 128), (50, 100), (256, 256), (None, 256)])
def test_running_means(guards, dims):
    make = torch.Generator().manual_seed(2)
    key_dim, value_dim = dims
    k, v = (None if d is None else torch.randn(1, 70, 2, d, generator=make) + 3 for d in dims)
    write, forget = torch.randn(1, 70, 2, generator=make), -torch.rand(1, 70, 2, generator=make)
    start = torch.zeros(1, 2)
    norm = reference.chunk_log_norm(write, forget, start)
    means = torch.randn(1, 2, (key_dim or 0) + value_dim, generator=make)
    shares, skips = stats.share(write, norm, Chunks(1, 70, None), True)
    keys, values, mean, rho2, _, _, entering, totals, final = centring.forward(k, v, shares, skips, means, None)
    exact = [x.double().requires_grad_() for x in (v if k is None else k, v)]
    wide = [x.double() for x in (write, forget, norm)]
    first = means[..., :key_dim] if k is not None else means
    kd, vd, vbar, lengths, _ = reference.chunk_centre(*exact, *wide, (first.double(), means[..., -value_dim:].double()))
    results = [("vd", values, vd), ("vbar", mean, vbar)]
    results += [("kd", keys, kd), ("rho2", rho2, lengths)] * (k is not None)
    weights = [torch.randn(true.shape, generator=make) for _, _, true in results]
    slopes = torch.autograd.grad([true for *_, true in results], exact[(k is None) :], [w.double() for w in weights])
    for name, got, true in results:
        assert_close(name, got.mT if name == "rho2" else got, true.detach(), LIMITS[0])
    d_values, d_means, *rest = weights
    d_keys, d_lengths = rest or (None, None)
    dk, dv, terms, *_ = centring.backward(
        k, v, shares, skips, None, keys, values, entering, totals, final, d_keys, d_values, d_means,
        None if d_lengths is None else d_lengths.mT, None, True,
    )  # fmt: skip
    for name, got, true in zip(("dk", "dv")[(k is None) :], (dk, dv)[(k is None) :], slopes, strict=True):
        assert_close(name, got, true, LIMITS[1])
    assert torch.isfinite(terms).all()
