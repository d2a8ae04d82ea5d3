"""Chunked KL against the plain one, value and gradients in fp64; the head of every family; the bucket of the tail."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TEACHERS, VOCAB, generator, teacher_model
from torch import nn

from linearize.kl import FullTarget, Head, TopTarget, chunked_kl, chunks


@pytest.mark.parametrize("name", TEACHERS)
def test_the_head_is_the_familys_own(name):
    """Scaled and capped logits included, bit for bit."""
    model = teacher_model(name)
    ids = torch.randint(4, VOCAB, (2, 9), generator=generator(0))
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        assert torch.equal(Head(model)(hidden.flatten(0, 1)).view(2, 9, -1), model(ids, use_cache=False).logits)


class Config:
    vocab_size = 37


class Capped(nn.Module):
    """A ...ForCausalLM with a biased head and a soft cap."""

    def __init__(self, seed: int, frozen: bool = False):
        super().__init__()
        self.config, self.model = Config, nn.Identity()
        self.lm_head = nn.Linear(6, Config.vocab_size).double()
        with torch.no_grad():
            for p in self.lm_head.parameters():
                p.copy_(torch.randn(p.shape, generator=generator(seed)))
        self.requires_grad_(not frozen)

    def forward(self, inputs_embeds, use_cache):
        class Output:
            logits = 3 * torch.tanh(self.lm_head(self.model(inputs_embeds).last_hidden_state) / 3)

        return Output


def batch(tokens: int = 11):
    draw = generator(tokens)
    mine, theirs = (torch.randn(tokens, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    return mine.requires_grad_(True), theirs


def plain(student, teacher, hidden, theirs, temperature):
    q, p = (
        F.log_softmax(3 * torch.tanh(model.lm_head(x) / 3) / temperature, -1)
        for model, x in ((student, hidden), (teacher, theirs))
    )
    return q, p.detach()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [37, 37 * 4, 10**6])
def test_chunked_is_plain(chunk, temperature):
    student, teacher = Capped(0), Capped(1, frozen=True)
    hidden, theirs = batch()
    q, p = plain(student, teacher, hidden, theirs, temperature)
    wanted = 0.3 * temperature**2 * (p.exp() * (p - q)).sum()
    inputs = [hidden, *student.lm_head.parameters()]
    gradients = torch.autograd.grad(1.7 * wanted, inputs)
    target = FullTarget(theirs, Head(teacher), temperature)
    got = chunked_kl(Head(student), hidden, target, weight=0.3, temperature=temperature, chunk=chunk)
    assert got.dtype == torch.float64 and torch.allclose(got, wanted, rtol=1e-13, atol=0)
    for a, b in zip(torch.autograd.grad(1.7 * got, inputs), gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-14)
    with torch.no_grad():  # measured only: no gradient is computed
        assert torch.equal(
            chunked_kl(Head(student), hidden, target, weight=0.3, temperature=temperature, chunk=chunk), got
        )


def test_a_frozen_head_and_equal_models():
    student, teacher = Capped(1, frozen=True), Capped(1, frozen=True)
    hidden, theirs = batch()
    value = chunked_kl(Head(student), hidden, FullTarget(theirs, Head(teacher)), weight=1.0)
    [gradient] = torch.autograd.grad(value, [hidden])
    assert gradient.abs().sum() > 0
    same = theirs.clone().requires_grad_(True)
    value = chunked_kl(Head(student), same, FullTarget(theirs, Head(teacher)), weight=1.0)
    [gradient] = torch.autograd.grad(value, [same])
    assert value.abs() < 1e-12 and gradient.abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 5, 36, 37, 64])
@pytest.mark.parametrize("chunk", [37 * 3, 10**6])
def test_the_top_and_one_bucket(k, chunk):
    student, teacher, temperature = Capped(0), Capped(1, frozen=True), 1.5
    hidden, theirs = batch()
    q, p = plain(student, teacher, hidden, theirs, temperature)
    top = p.topk(min(k, 36), -1).indices
    in_top = torch.zeros_like(p, dtype=torch.bool).scatter(1, top, True)
    tail_p, tail_q = ((log.exp() * ~in_top).sum(-1) for log in (p, q))
    wanted = temperature**2 * ((p.exp() * (p - q) * in_top).sum(-1) + tail_p * (tail_p / tail_q).log()).sum()
    inputs = [hidden, *student.lm_head.parameters()]
    gradients = torch.autograd.grad(wanted, inputs)
    target = TopTarget.of(FullTarget(theirs, Head(teacher), temperature), k, chunk)
    got = chunked_kl(Head(student), hidden, target, weight=1.0, temperature=temperature, chunk=chunk)
    assert torch.allclose(got, wanted, rtol=1e-11, atol=0)
    for a, b in zip(torch.autograd.grad(got, inputs), gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    whole = temperature**2 * (p.exp() * (p - q)).sum()
    assert got < whole * (1 + 1e-12)
    if k >= 36:  # the tail is one token: nothing is left out
        assert torch.allclose(got, whole, rtol=1e-11, atol=0)


def test_a_student_that_is_sure_of_the_top_has_a_gradient():
    """Its tail is beyond fp32 as a probability, and the teacher's is not."""
    log_q = torch.tensor([[0.0, -150.0, -151.0, -152.0]])
    target = TopTarget(torch.tensor([[0]], dtype=torch.int32), torch.tensor([[0.5, 0.5]]).log())
    gradient = log_q.clone()
    kl = target.compare(slice(None), gradient, 1.0, 1.0, True)
    wide = log_q.double().requires_grad_(True)
    q = wide.log_softmax(-1)
    wanted = 0.5 * (math.log(0.5) - q[0, 0]) + 0.5 * (math.log(0.5) - q[0, 1:].logsumexp(0))
    [expected] = torch.autograd.grad(wanted, [wide])
    assert float(kl) == pytest.approx(float(wanted.detach())) and torch.allclose(gradient.double(), expected, atol=1e-6)


def test_no_more_logits_than_a_chunk(monkeypatch):
    """Neither forward nor backward makes the logits of more tokens at once than asked for."""
    made = []
    call = Head.__call__

    def recording(self, hidden):
        logits = call(self, hidden)
        made.append(logits.shape)
        return logits

    monkeypatch.setattr(Head, "__call__", recording)
    hidden, theirs = batch(23)
    chunked_kl(Head(Capped(0)), hidden, FullTarget(theirs, Head(Capped(1, True))), weight=1.0, chunk=37 * 5).backward()
    assert sorted(made) == sorted([(5, 37)] * 8 + [(3, 37)] * 2)


def test_chunks():
    assert [(c.start, c.stop) for c in chunks(7, 10, 35)] == [(0, 3), (3, 6), (6, 7)]
    assert [(c.start, c.stop) for c in chunks(2, 10, 5)] == [(0, 1), (1, 2)]
