"""The delta rule of heads whose widths are no multiples of 16, which its kernels get filled up with zeros.

test_interpreted.py runs this file in a process of its own.
"""

import inspect

import interpreter  # noqa: F401
import pytest
import test_centred
import torch
from linearize_kernels import delta, gated_delta, split
from test_interpreted import call, check, inputs
from tolerances import TOLERANCE

DIMS = [(50, 100), (40, 72), (33, 65)]
ROWS = ("q", "k", "v", "add_to", "do")


@pytest.fixture
def seen(monkeypatch):
    """Arguments of the launchers, by name, of every call."""
    calls = []

    def watch(name):
        run = getattr(delta, name)
        names = list(inspect.signature(run).parameters)

        def watched(*arguments):
            calls.append(dict(zip(names, arguments, strict=False)))
            return run(*arguments)

        monkeypatch.setattr(delta, name, watched)

    watch("forward")
    watch("backward")
    return calls


@pytest.mark.parametrize("dims", DIMS)
def test_the_delta_rule(dims, seen):
    check(inputs(70, dims, torch.float64, heads=2, groups=(1, 2, 2)), TOLERANCE["float64"])
    assert len(seen) == 2
    for name in ROWS:
        found = [x[name].shape[-1] for x in seen if x.get(name) is not None]
        wide = -(-dims[name not in "qk"] // 16) * 16
        assert set(found) == {wide}, (name, found)


@pytest.mark.parametrize("dims", [(64, 100), (50, 64), (33, 16)])
def test_one_of_the_widths_is_whole(dims):
    check(inputs(66, dims, torch.float64, heads=1), TOLERANCE["float64"])


def test_linear_attention():
    check(inputs(70, (40, 72), torch.float64), TOLERANCE["float64"], linear=True)


@pytest.mark.parametrize("dims", DIMS)
def test_packed_sequences(dims):
    bounds = torch.tensor([0, 1, 66, 66, 130], dtype=torch.int32)
    check(inputs(130, dims, torch.float64, heads=1, sequences=4), TOLERANCE["float64"], cu=bounds)


def test_sequences_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(split, "piece_length", lambda *_: 64)
    check(inputs(150, (33, 65), torch.float64, heads=1), TOLERANCE["float64"])


def test_without_states():
    x = inputs(70, (50, 100), torch.float64, heads=1)
    del x["initial_state"], x["add_to"], x["log_decay"]
    check(x, TOLERANCE["float64"])
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v")]
    o, final = gated_delta(*leaves, None, x["beta"])
    assert final is None and o.is_contiguous() and o.shape == (1, 70, 1, 100)
    assert all(g.shape == a.shape for g, a in zip(torch.autograd.grad(o.sum(), leaves), leaves, strict=True))


@pytest.mark.parametrize("dims", DIMS)
def test_sixteen_bits(dims):
    check(inputs(70, dims, torch.float16, heads=1), TOLERANCE["float16"])


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 70]])
def test_a_centred_mixer(bounds):
    x = test_centred.inputs(70, dims=(40, 72), sequences=None if bounds is None else 3)
    test_centred.check(x, (1e-11, 1e-10, 1e-10), bounds=bounds)


def test_compiled_without_a_break():
    x = inputs(66, (40, 72), torch.float32, heads=1)
    results = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        outputs = run(leaves, False)
        assert outputs[0].is_contiguous() and outputs[1].shape == (1, 1, 40, 72)
        results.append([*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), list(leaves.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_at_odd_addresses_are_copied():
    """Slices of wider rows, and their cotangents."""
    x = inputs(66, (32, 32), torch.float32, heads=2)
    names = "q", "k", "v", "add_to"
    odd = {n: torch.nn.functional.pad(x[n], (1, 2))[..., 1:-2] for n in names}
    make = torch.Generator().manual_seed(3)
    weight = torch.nn.functional.pad(torch.randn(1, 66, 2, 32, generator=make), (3, 0))[..., 3:]
    results = []
    for case in (x, x | odd):
        leaves = {n: t.detach().requires_grad_() for n, t in case.items()}
        o, _ = call(leaves, False)
        results.append([o, *torch.autograd.grad(o, list(leaves.values()), weight)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_alignment():
    from linearize_kernels.common import aligned_rows

    x = torch.zeros(2, 6, 4, 32, dtype=torch.bfloat16)
    for same in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :, :1].expand(2, 6, 4, 32), x[:, 1:, 2:]):
        assert aligned_rows(same) is same
    wide = torch.zeros(2, 6, 4, 41, dtype=torch.bfloat16)
    # A head alone may have any stride, which `contiguous` leaves as it is.
    alone = torch.zeros(999, dtype=torch.bfloat16).as_strided((1, 5, 1, 32), (7, 32, 9, 1))
    for other in (x[..., 1:17], x[..., ::2], wide[..., :32], wide[..., 9:], alone):
        got = aligned_rows(other)
        assert got.data_ptr() % 16 == 0 and got.stride(-1) == 1 and not any(n % 16 for n in got.stride()[:-1])
        assert torch.equal(got, other)
