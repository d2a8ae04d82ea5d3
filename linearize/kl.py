"""KL(teacher || student) over the vocabulary, a chunk of tokens at a time, value and gradient in one pass.

The logits of a whole batch, [tokens, vocabulary], never exist: each chunk's are made from hidden states by the model's
own head, compared, and turned into gradients of the hidden states and of the head's weights before the next chunk.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

CHUNK = 2**25  # logits at a time: 128 MB in fp32, of which the comparison holds about five


class _Given(nn.Module):
    """Stands in for the base model of a ...ForCausalLM: its last hidden state is what it is given."""

    def forward(self, inputs_embeds: Tensor, **kwargs: object) -> MoeModelOutputWithPast:
        # The richest of transformers' outputs, so that every family finds the fields it looks for.
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class Head:
    """What a ...ForCausalLM does after its base model: head, and the family's scaling or soft cap of the logits.

    The model's own forward runs around a stand-in for its base model, so that no family needs an entry here. Weights
    are those of the model at the time of the call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.vocabulary = model.config.vocab_size
        self._model = copy.copy(model)
        self._model._modules = {**model._modules, "model": _Given()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, d], what leaves the base model (after its final norm) -> logits [n, vocabulary]."""
        return self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]


class Target(Protocol):
    """The teacher's distribution for every token of a batch."""

    def compare(self, part: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """log_q [n, V], the student's log probabilities for these tokens -> (KL [n], q - p~ [n, V]).

        q - p~ is the KL's gradient with respect to the student's logits.
        """


@dataclass
class FullTarget:
    """Every probability: made from the teacher's hidden states [N, d] by its head, at a temperature."""

    hidden: Tensor
    head: Head
    temperature: float = 1.0

    def log_p(self, part: slice) -> Tensor:
        with torch.no_grad():
            return log_probabilities(self.head(self.hidden[part]), self.temperature)

    def compare(self, part: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        log_p = self.log_p(part).to(log_q.dtype)
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), log_q.exp().sub_(p)


@dataclass
class TopTarget:
    """The k largest probabilities and one bucket for all the others (the tail).

    ids [N, k] int; log_p [N, k + 1], the last column the tail's. With P and Q the tail masses of teacher and student,

        KL_k = sum_{v in top} p_v log(p_v / q_v) + P log(P / Q),     Q = 1 - sum_{v in top} q_v

    which is at most the KL over the whole vocabulary (log-sum inequality) and zero when both agree. Its gradient with
    respect to the student's logits is q_v - p_v in the top and q_v (1 - P / Q) in the tail.
    """

    ids: Tensor
    log_p: Tensor

    @classmethod
    def of(cls, full: FullTarget, k: int, chunk: int = CHUNK) -> "TopTarget":
        """Keep k of the probabilities of every token, and one at least for the tail."""
        k = min(k, full.head.vocabulary - 1)
        ids, kept = [], []
        for part in chunks(len(full.hidden), full.head.vocabulary, chunk):
            log_p = full.log_p(part)
            top, index = log_p.topk(k, dim=-1)
            rest = log_p.scatter(-1, index, float("-inf")).logsumexp(-1, keepdim=True)
            ids.append(index.int())
            kept.append(torch.cat([top, rest], -1))
        return cls(torch.cat(ids), torch.cat(kept))

    def compare(self, part: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_p = self.ids[part].long(), self.log_p[part].to(log_q.dtype)
        top = log_q.gather(-1, ids)
        rest = log_q.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        p = log_p.exp()
        kl = (p * (log_p - torch.cat([top, rest], -1))).sum(-1)
        q = log_q.exp()
        # A tail token's q_v P / Q, in one exponential: P / Q alone may be beyond the number format.
        gradient = q - (log_q - rest + log_p[:, -1:]).exp()
        return kl, gradient.scatter_(-1, ids, top.exp() - p[:, :-1])


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Log softmax at a temperature, in fp32 or, for fp64 logits, fp64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def chunks(tokens: int, vocabulary: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices of `tokens` tokens with at most `size` logits each (one token's, if those are more)."""
    step = max(1, size // vocabulary)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head: Head, target: Target, weight: float, temperature: float, chunk: int, hidden, *parameters):
        wanted = any(ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden = torch.zeros_like(hidden) if wanted else None
        d_parameters: list[Tensor] = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters if wanted
        ]
        for part in chunks(len(hidden), head.vocabulary, chunk):
            with torch.set_grad_enabled(wanted):
                piece = hidden[part].detach().requires_grad_(wanted)
                logits = head(piece)
            kl, gradient = target.compare(part, log_probabilities(logits.detach(), temperature))
            total += kl.sum()
            if not wanted:
                continue
            # d/dz of temperature^2 KL(p || softmax(z / temperature))
            gradient = gradient.mul_(weight * temperature).to(logits.dtype)
            given = torch.autograd.grad(logits, [piece, *parameters], gradient)
            d_hidden[part] = given[0]
            for total_gradient, new in zip(d_parameters, given[1:], strict=True):
                total_gradient += new
        ctx.save_for_backward(*([d_hidden, *d_parameters] if wanted else ()))
        return total * (weight * temperature**2)

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        d_hidden, *d_parameters = ctx.saved_tensors
        return None, None, None, None, None, d_hidden * d_loss, *(d * d_loss for d in d_parameters)


def chunked_kl(
    head: Head, hidden: Tensor, target: Target, *, weight: float, temperature: float = 1.0, chunk: int = CHUNK
) -> Tensor:
    """``weight * temperature^2 * sum over tokens of KL(teacher || student)``, a scalar in fp32 (fp64 for fp64).

    hidden: [N, d], what leaves the student's base model. target: the teacher's distributions, at the same temperature.
    weight: 1 / (number of tokens that the mean is taken over), which may be more than these N. temperature: of both
    distributions; its square keeps the gradient's size (Hinton et al., 2015). chunk: logits made at a time.

    Gradients reach `hidden` and the head's weights; they are computed in the forward pass, so that backward holds
    nothing but them. Second derivatives are not supported.
    """
    return _ChunkedKL.apply(head, target, weight, temperature, chunk, hidden, *head.parameters())
