"""The zeroth and first order of the softmax expansion, shared by every derived mixer (derivation.md §2, §5, §6).

All per-head scalars are [B, T, H] in fp32 (fp64 for fp64 inputs), H query heads; a padded token has
``log_write = -inf`` and ``log_forget = 0``, which leaves every sum, mean and normaliser unchanged.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.mixers.base import Segments

LIMIT = 30.0  # of log e_t and log r_t: far beyond any useful value, and far below where fp32 overflows to inf * 0
FLOOR = -80.0  # of log alpha_t: leaves 2e-35 of the state, and keeps sums over a chunk small enough to be exact


def tilt(k: Tensor, reference: Tensor, scale: float) -> Tensor:
    """Log write weight of the tilted expansion, ``scale * r_h . k_t`` (derivation.md §2).

    k: [B, T, Hk, K]. reference: [H, K], one reference query per query head. Returns [B, T, H].
    """
    heads, dim = reference.shape
    kv_heads = k.shape[2]
    grouped = reference.view(kv_heads, heads // kv_heads, dim)
    return scale * torch.einsum("btnk,ngk->btng", k.to(reference.dtype), grouped).flatten(2)


def forget_logit(decay: float) -> float:
    """The logit ``c`` with ``exp(-softplus(c)) = decay``."""
    return math.log(math.expm1(-math.log(decay)))


def mask_write(log_write: Tensor, log_forget: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Make padded tokens no-ops: weight 0 (log -inf), forgetting 1 (log 0)."""
    if mask is None:
        return log_write, log_forget
    pad = ~mask.bool()[..., None]
    return log_write.masked_fill(pad, float("-inf")), log_forget.masked_fill(pad, 0.0)


@dataclass
class Layout:
    """A batch as the kernels take it: rows as they are, or packed documents as one row with ``cu_seqlens``."""

    batch: int
    length: int
    cu_seqlens: Tensor | None
    start: Tensor | None  # [1, B*T] index of each token's first token, packed only

    @classmethod
    def of(cls, x: Tensor, segments: Segments, *, cached: bool = False) -> "Layout":
        """x: [B, T, ...]. cached: whether a state comes in or goes out, which packed documents do not have."""
        batch, length = x.shape[:2]
        if segments.reset is None:
            return cls(batch, length, None, None)
        if cached:
            raise ValueError("packed documents cannot be combined with a cache: call with use_cache=False")
        first = segments.reset.clone()
        first[:, 0] = True
        starts = first.flatten().nonzero().flatten()
        total = torch.tensor([batch * length], device=x.device)
        index = torch.arange(batch * length, device=x.device)
        start = torch.where(first.flatten(), index, 0).cummax(0).values
        return cls(batch, length, torch.cat([starts, total]), start[None])

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> what the kernels take."""
        return x if self.cu_seqlens is None else x.reshape(1, self.batch * self.length, *x.shape[2:])

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return x if self.cu_seqlens is None else x.reshape(self.batch, self.length, *x.shape[2:])


@dataclass
class Strengths:
    """What the normaliser says about each token: log b_t, log(1 - b_t) and where nothing precedes it."""

    log_strength: Tensor
    log_keep: Tensor
    live: Tensor  # bool: a real token with something before it; elsewhere both logs are 0 and meaningless


def strengths(
    log_write: Tensor, log_forget: Tensor, log_z: Tensor, layout: Layout, initial: Tensor | None
) -> Strengths:
    """Write strength ``b_t = w_t / Z_t`` and ``1 - b_t = lambda_t Z_{t-1} / Z_t`` from the log normaliser.

    Never forms ``1 - b`` or ``b / (1 - b)`` (derivation.md §4). initial: [B, H] log Z before the first token.
    """
    if initial is None:
        initial = torch.full_like(log_z[:, 0], float("-inf"))
    previous = torch.cat([initial[:, None], log_z[:, :-1]], 1)
    if layout.start is not None:
        index = torch.arange(layout.start.shape[1], device=log_z.device)
        previous = previous.masked_fill((layout.start == index)[..., None], float("-inf"))
    live = (log_write > float("-inf")) & (previous > float("-inf"))
    zero = torch.zeros((), dtype=log_z.dtype, device=log_z.device)
    write, forget, before = (torch.where(live, x, zero) for x in (log_write, log_forget, previous))
    # b / (1 - b) = w / (lambda Z_{t-1}), in logs. A difference of two log Z would lose the digits of a small log(1 - b)
    # and could come out above 0.
    odds = write - forget - before
    log_strength = torch.where(live, F.logsigmoid(odds), zero)
    log_keep = torch.where(live, F.logsigmoid(-odds), zero)
    return Strengths(log_strength, log_keep, live)


def real_positions(mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index of every token among its row's real tokens [B, T] and the number of real tokens [B]."""
    batch, length = x.shape[:2]
    if mask is None:
        index = torch.arange(length, device=x.device).expand(batch, length)
        return index, torch.full((batch,), length, device=x.device)
    count = mask.long().cumsum(1)
    return (count - 1).clamp(min=0), count[:, -1]


def local_taps(
    v: Tensor, taps: Tensor, layout: Layout, mask: Tensor | None, tail: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The last J values before and at each real token, the inputs of the short convolution (derivation.md §6).

    v: [B, T, Hk, V]; taps: anything whose first dimension is J; tail: [B, J-1, Hk, V], the last real values of an
    earlier call. Returns J tensors shaped like v (entry j holds v_{t-j}, zero before the start of the document) and
    the new tail. Padding anywhere in a row is skipped, so a right-padded prefill can be continued exactly.
    """
    size = taps.shape[0]
    batch, length = v.shape[:2]
    if tail is None:
        tail = v.new_zeros(batch, size - 1, *v.shape[2:])
    position, count = real_positions(mask, v)
    if mask is None:
        dense = v
    else:
        # Real tokens moved to the front of their row; padding goes to a spare slot that is cut off.
        slot = torch.where(mask.bool(), position, length)[..., None, None].expand_as(v)
        dense = v.new_zeros(batch, length + 1, *v.shape[2:]).scatter(1, slot, v)[:, :length]
    line = torch.cat([tail, dense], 1)
    shifted = [line[:, size - 1 - j : size - 1 - j + length] for j in range(size)]
    if mask is not None:
        back = position[..., None, None].expand_as(v)
        shifted = [s.gather(1, back) for s in shifted]
    if layout.start is not None:
        index = torch.arange(batch * length, device=v.device)
        age = (index - layout.start[0]).view(batch, length, 1, 1)
        shifted = [torch.where(age >= j, s, torch.zeros_like(s)) for j, s in enumerate(shifted)]
    keep = count[:, None] + torch.arange(size - 1, device=v.device)
    new_tail = line.gather(1, keep[..., None, None].expand(batch, size - 1, *v.shape[2:]))
    return shifted, new_tail


def first_value(
    v: Tensor, layout: Layout, mask: Tensor | None, sink: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The value of each document's first token, which attention sinks return to (derivation.md §6).

    v: [B, T, Hk, V]; sink: [B, Hk, V] and seen: [B] (real tokens so far) of an earlier call. Returns the sink of every
    token [B, T or 1, Hk, V] and of the row [B, Hk, V].
    """
    if layout.start is not None:
        flat = layout.pack(v)
        values = layout.unpack(flat.gather(1, layout.start[..., None, None].expand_as(flat)))
        return values, values[:, -1]
    if mask is None:
        row = v[:, 0]
    else:
        first = mask.to(torch.int8).argmax(1)
        row = v.gather(1, first[:, None, None, None].expand(-1, 1, *v.shape[2:]))[:, 0]
        row = torch.where(mask.any(1)[:, None, None], row, torch.zeros_like(row))
    if sink is not None:
        row = torch.where((seen > 0)[:, None, None], sink.to(row.dtype), row)
    return row[:, None], row


def mix_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Per-query-head multiples of per-KV-head values, by head blocks.

    x: [B, T, Hk, V] (T may be 1), weight: [H]. Returns [B, T, H, V] = weight_h x_{h // G}.
    """
    kv_heads = x.shape[2]
    grouped = weight.view(kv_heads, -1, 1)
    return (x.to(weight.dtype)[:, :, :, None] * grouped).flatten(2, 3)


def forgetting(logit: Tensor) -> Tensor:
    """log lambda = -softplus(logit), so 0 < lambda <= 1 (derivation.md §5)."""
    return -F.softplus(logit)


def delta_arguments(at: Strengths, log_exponent, log_erase, rho2: Tensor, balance: Tensor):
    """Arguments of the gated delta rule on centred keys (derivation.md §4, §5, stable form).

    With the previous-mean centred key of squared norm rho2, ``n_t^2 = c_h^2 (1 - b_t)^2 rho2``, the proximal step
    erases with ``beta_t n_t^2 / (1 + ...)`` per unit key; written on the raw centred key, so that nothing is 0/0:
    ``a = b (1-b) r``, ``s = a c_h^2 rho2``, erase ``a c_h^2 / (1 + s)``, gain ``a c_h / (1 + s)``.
    All [B, T, H]; balance: [H] = c_h; log_exponent, log_erase: log e_t and log r_t. Returns (log decay, erase, gain).
    """
    zero = torch.zeros((), dtype=rho2.dtype, device=rho2.device)
    a = torch.where(at.live, (at.log_strength + at.log_keep + log_erase).exp(), zero)
    shrink = a / (1 + a * balance.square() * rho2)
    log_decay = (log_exponent.exp() * at.log_keep).clamp(min=FLOOR)
    return log_decay, shrink * balance.square(), shrink * balance
