"""CUDA graphs of steps; on a CPU the function as it is."""

import pytest
import torch
from torch import nn

from linearize.mixers import Segments
from linearize.mixers.expansion import Layout
from linearize.replay import GRAPHS, Aside, Replay
from linearize.student import packed_documents

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_runs_plainly_on_a_cpu():
    calls = []
    replay = Replay(lambda x, more: calls.append(x) or x + more["y"])
    for i in range(5):
        assert torch.equal(replay(torch.full((2,), i), {"y": 1}), torch.full((2,), i + 1))
    assert len(calls) == 5


@pytest.mark.gpu
@gpu
def test_adds_up_the_same_gradients():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).cuda()

    def run(x, kwargs):
        loss = (layer(x) * kwargs["weight"]).square().sum() * kwargs["scale"]
        loss.backward()
        return loss.detach()

    replay = Replay(run)
    for i in range(12):
        x, weight = torch.randn(3 + i % 2, 8).cuda(), torch.randn(8).cuda()
        layer.zero_grad(set_to_none=False)
        loss = float(replay(x, {"weight": weight, "scale": 2.0, "none": None}))
        got = layer.weight.grad.clone()
        layer.zero_grad(set_to_none=False)
        assert float(run(x, {"weight": weight, "scale": 2.0})) == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(got, layer.weight.grad)
    assert len(replay.graphs) == 2 and replay.enabled


@pytest.mark.gpu
@gpu
def test_what_cannot_be_captured_runs_plainly():
    replay = Replay(lambda x: x * float(x.sum()))
    with pytest.warns(UserWarning, match="one kernel at a time"):
        for _ in range(4):
            assert torch.equal(replay(torch.ones(2).cuda()), torch.full((2,), 2.0).cuda())
    assert not replay.enabled


@pytest.mark.gpu
@gpu
def test_old_graphs_are_dropped():
    replay = Replay(lambda x: x + 1)
    for size in range(1, GRAPHS + 4):
        for _ in range(3):
            replay(torch.ones(size).cuda())
    assert len(replay.graphs) == GRAPHS


@pytest.mark.parametrize("rows", [[[5, 3], [8]], [[1] * 8, [2, 6]], [[8], [8]]])
def test_a_bound_of_the_documents_is_enough(rows):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    reset, documents = packed_documents(positions, 2)
    count = sum(map(len, rows))
    x = torch.zeros(2, 8, 1)
    if reset is None:
        assert count == 2 and documents == 2
        return
    assert documents >= count and documents & (documents - 1) == 0 and documents == (8 if count <= 8 else 16)
    exact = Layout.of(x, Segments(reset=reset))
    bounded = Layout.of(x, Segments(reset=reset, documents=documents))
    assert exact.cu_seqlens.tolist() == torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).tolist()
    assert bounded.cu_seqlens.tolist() == exact.cu_seqlens.tolist() + [16] * (documents - count)
    assert torch.equal(bounded.start, exact.start)


def test_whole_rows_as_packed_ones(monkeypatch):
    positions = torch.arange(8).expand(2, -1)
    assert packed_documents(positions, 2) == (None, 2)
    reset, documents = packed_documents(positions, 2, always=True)
    assert reset.tolist() == [[True, *[False] * 7]] * 2 and documents == 8
    # A long text in one row is cut into pieces by the number of its documents.
    assert packed_documents(torch.tensor([[0, 1, 0, 1, 2, 0]]), 1)[1] == 4
    one, _ = packed_documents(positions[:1], 2, always=True)
    assert torch.equal(one, reset)
    x = torch.zeros(2, 8, 1)
    assert Layout.of(x, Segments(reset=reset, documents=documents)).cu_seqlens.tolist() == [0, 8] + [16] * 7
    monkeypatch.setattr("linearize.student.SHORT_ROWS", 7)
    assert packed_documents(positions, 2, always=True) == (None, 2)


def test_aside_is_a_plain_call_on_a_cpu():
    assert Aside(torch.device("cpu"))(lambda a, b: a - b, 5, 3) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_aside_does_not_wait_for_the_device():
    busy = torch.ones(4096, 4096, device="cuda")
    aside, done, small = Aside(torch.device("cuda")), torch.cuda.Event(), torch.ones(4)
    torch.cuda.synchronize()
    for _ in range(200):
        busy = busy @ busy * 1e-4
    done.record()
    found = aside(lambda x: {"sum": float(x.cuda().sum()), "twice": 2 * x.cuda()}, small)
    assert not done.query() and found["sum"] == 4
    assert found["twice"].sum().item() == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_aside_reads_what_was_written_before_it_was_made():
    busy, states = torch.ones(4096, 4096, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        busy = busy @ busy * 1e-4
    states += 1
    aside = Aside(torch.device("cuda"))
    assert aside(lambda rows: states[rows.cuda()].sum().item(), torch.tensor([0, 2])) == 2
