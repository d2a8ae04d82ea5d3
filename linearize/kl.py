"""KL(teacher || student) over the vocabulary, a chunk of tokens at a time, value and gradient in one pass.

The logits of a whole batch, [tokens, vocabulary], never exist: each chunk's are made from hidden states by the model's
own head, compared, and turned into gradients of the hidden states and of the head's weights before the next chunk.
Where kernels run, a chunk's logits are read in the head's number format and its gradient takes their place.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from linearize_kernels import kl_divergence_, top_kl_divergence_
from linearize_kernels.api import uses_kernels
from linearize_kernels.reference import log_probabilities
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

CHUNK = 2**25  # logits at a time: 128 MB in fp32, of which the comparison holds about five
KERNEL_CHUNK = 2**28  # with kernels, which hold no more than both models' logits: 512 MB each in 16 bits
TILE = 256  # tokens: with kernels, chunks are whole tiles of the matrix products


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
        return self._model(inputs_embeds=hidden[None], use_cache=False).logits.squeeze(0)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]


class Target(Protocol):
    """The teacher's distribution for every token of a batch."""

    def compare(self, part: slice, logits: Tensor, temperature: float, scale: float, gradient: bool) -> Tensor:
        """logits [n, V], the student's for these tokens -> KL [n] at the temperature.

        With `gradient`, `scale` times that of the KL's sum with respect to the logits is written over them.
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

    def compare(self, part: slice, logits: Tensor, temperature: float, scale: float, gradient: bool) -> Tensor:
        with torch.no_grad():
            theirs = self.head(self.hidden[part])
        return kl_divergence_(logits, theirs, temperature=temperature, scale=scale, gradient=gradient)


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

    def compare(self, part: slice, logits: Tensor, temperature: float, scale: float, gradient: bool) -> Tensor:
        ids, log_p = self.ids[part], self.log_p[part]
        return top_kl_divergence_(logits, ids, log_p, temperature=temperature, scale=scale, gradient=gradient)


def chunks(tokens: int, vocabulary: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices of `tokens` tokens with at most `size` logits each (one token's, if those are more)."""
    step = max(1, size // vocabulary)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def chunk_size(hidden: Tensor, vocabulary: int) -> int:
    """Logits at a time for these hidden states [N, d]; with kernels, equal chunks as near as tiles allow."""
    if not uses_kernels(hidden):
        return CHUNK
    parts = -(-len(hidden) * vocabulary // max(KERNEL_CHUNK, TILE * vocabulary))
    return -(-len(hidden) // (parts * TILE)) * TILE * vocabulary


def _logits(head: Head, piece: Tensor) -> tuple[Tensor, Tensor]:
    """(the head's logits, the same to be overwritten): a copy only where the gradient of the head needs them itself."""
    kept = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = head(piece)
    buffer = logits.detach()
    needed = buffer.untyped_storage().data_ptr() in kept or not buffer.is_contiguous()
    return logits, buffer.clone(memory_format=torch.contiguous_format) if needed else buffer


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head: Head, target: Target, weight: float, temperature: float, chunk: int, hidden, *parameters):
        wanted = any(ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_parameters: list[Tensor] = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters if wanted
        ]
        scale = weight * temperature**2
        for part in chunks(len(hidden), head.vocabulary, chunk):
            with torch.set_grad_enabled(wanted):
                piece = hidden[part].detach().requires_grad_(wanted)
                logits, buffer = _logits(head, piece)
            total += target.compare(part, buffer, temperature, scale, wanted).sum()
            if not wanted:
                continue
            given = torch.autograd.grad(logits, [piece, *parameters], buffer)
            d_hidden[part] = given[0]
            for total_gradient, new in zip(d_parameters, given[1:], strict=True):
                total_gradient += new
        ctx.save_for_backward(*([d_hidden, *d_parameters] if wanted else ()))
        return total * scale

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        d_hidden, *d_parameters = ctx.saved_tensors
        return None, None, None, None, None, d_hidden * d_loss, *(d * d_loss for d in d_parameters)


def chunked_kl(
    head: Head, hidden: Tensor, target: Target, *, weight: float, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """``weight * temperature^2 * sum over tokens of KL(teacher || student)``, a scalar in fp32 (fp64 for fp64).

    hidden: [N, d], what leaves the student's base model. target: the teacher's distributions, at the same temperature.
    weight: 1 / (number of tokens that the mean is taken over), which may be more than these N. temperature: of both
    distributions; its square keeps the gradient's size (Hinton et al., 2015). chunk: logits made at a time;
    None chooses.

    Gradients reach `hidden` and the head's weights; they are computed in the forward pass, so that backward holds
    nothing but them. Second derivatives are not supported.
    """
    chunk = chunk_size(hidden, head.vocabulary) if chunk is None else chunk
    return _ChunkedKL.apply(head, target, weight, temperature, chunk, hidden, *head.parameters())
