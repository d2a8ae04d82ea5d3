"""The statistics and the zeroth order of the softmax expansion, shared by derived mixers (derivation.md §2, §5, §6).

All per-head scalars are [B, T, H] in fp32 (fp64 for fp64 inputs), H query heads; a padded token has
``log_write = -inf`` and ``log_forget = 0``, which leaves every sum, mean and normaliser unchanged.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from linearize_kernels import log_norm, readout
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Segments
from linearize.mixers.products import exact_by_head


def tilt(k: Tensor, reference: Tensor, scale: float) -> Tensor:
    """Log write weight of the tilted expansion, ``scale * r_h . k_t`` (derivation.md §2).

    k: [B, T, Hk, K]. reference: [H, K], one reference query per query head. Returns [B, T, H].
    """
    heads, dim = reference.shape
    kv_heads = k.shape[2]
    grouped = reference.view(kv_heads, heads // kv_heads, dim)
    return scale * exact_by_head(k, grouped).flatten(2)


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
        first, total = first.flatten(), batch * length
        index = torch.arange(total, device=x.device)
        start = torch.where(first, index, 0).cummax(0).values
        count = segments.documents
        if count is None:
            count = int(first.sum())
        # Tokens inside a document all write the text's end to the last place; documents that do not exist are empty.
        place = torch.where(first, first.cumsum(0) - 1, count)
        bounds = torch.full((count + 1,), total, device=x.device)
        bounds.scatter_(0, place, torch.where(first, index, total))
        return cls(batch, length, bounds, start[None])

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


class Readout(nn.Module):
    """The zeroth order of derivation.md §6: per-head multiples of values and of running means of values.

        rho_v vbar_t + sum_j tau_j v_{t-j} + rho_s v_1 + sum_m rho_m vbar^(m)_t

    Parameters, fp32, H query heads: mean, sink [H] (rho_v, rho_s); taps [J, H] (tau); scales [H, M] (rho_m);
    scale_reference [H, M, K] and scale_forget [H, M], the reference queries and forgetting logits of the extra means.
    """

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__()
        if taps < 1 or time_scales < 0:
            raise ValueError(f"a readout needs taps >= 1 and time_scales >= 0, got {taps} and {time_scales}")
        heads, f32 = shape.q_heads, torch.float32
        self.mean = nn.Parameter(torch.empty(heads, dtype=f32))
        self.sink = nn.Parameter(torch.empty(heads, dtype=f32))
        self.taps = nn.Parameter(torch.empty(taps, heads, dtype=f32))
        self.scales = nn.Parameter(torch.empty(heads, time_scales, dtype=f32))
        self.scale_reference = nn.Parameter(torch.empty(heads, time_scales, shape.key_dim, dtype=f32))
        self.scale_forget = nn.Parameter(torch.empty(heads, time_scales, dtype=f32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """vbar and nothing else."""
        for zero in (self.sink, self.taps, self.scales, self.scale_reference):
            init.zeros_(zero)
        init.constant_(self.scale_forget, forget_logit(0.9))
        init.ones_(self.mean)

    @staticmethod
    def state_bytes(shape: HeadShape, taps: int, time_scales: int) -> int:
        """Bytes of the state that :meth:`forward` returns, per sequence."""
        value = shape.value_dim
        counter = 8  # `seen` is an int64
        return 4 * (shape.q_heads * time_scales * (value + 1) + shape.kv_heads * value * taps) + counter

    def local(self, v: Tensor, layout: Layout, mask: Tensor | None, old: dict) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of :meth:`forward` that needs no mean: taps and sink [B, T, H, V]; and tail, sink and seen."""
        taps, tail = local_taps(v, self.taps, layout, mask, old.get("tail"))
        sink, first = first_value(v, layout, mask, old.get("sink"), old.get("seen"))
        base = mix_heads(sink, self.sink)
        for j, tap in enumerate(taps):
            base = base + mix_heads(tap, self.taps[j])
        seen = v.new_full((len(v),), v.shape[1], dtype=torch.long) if mask is None else mask.long().sum(1)
        return base, {"tail": tail, "sink": first, "seen": seen + old["seen"] if old else seen}

    def next_local(self, v: Tensor, old: dict) -> dict[str, Tensor]:
        """tail, sink and seen after tokens without padding."""
        length, size = v.shape[1], self.taps.shape[0] - 1
        before = old["tail"] if old else v.new_zeros(len(v), size, *v.shape[2:])
        tail = torch.cat([before, v[:, max(length - size, 0) :]], 1)
        first, seen = v[:, 0], v.new_full((len(v),), length, dtype=torch.long)
        if old:
            first = torch.where((old["seen"] > 0)[:, None, None], old["sink"].to(v.dtype), first)
            seen = seen + old["seen"]
        return {"tail": tail[:, tail.shape[1] - size :], "sink": first, "seen": seen}

    def slow_weights(self, k: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log write weight and log forgetting of the extra means, [B, T, H M], from k [B, T, Hk, K]."""
        write = tilt(k, self.scale_reference.flatten(0, 1), scale)
        return mask_write(write, forgetting(self.scale_forget).flatten().expand_as(write), mask)

    def forward(
        self, mean: Tensor | None, k: Tensor, v: Tensor, scale: float, layout: Layout, mask: Tensor | None, old: dict
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Read one batch.

        mean: [B, T, H, V], the running mean vbar_t of the values, or None to leave its term out. k: [B, T, Hk, K],
        v: [B, T, Hk, V] and scale as the mixer has them, not packed. old: a state with what an earlier call returned
        in it, or {}. Returns the readout [B, T, H, V] in v's dtype, and its part of the state: tail, sink, seen,
        scale_mean, scale_log_z.
        """
        if mask is None:
            new = self.next_local(v, old)
            local = {"taps": self.taps, "sink": self.sink, "tail": old.get("tail")}
            local["first"] = new["sink"] if old else None
            if mean is not None:
                local |= {"add_to": layout.pack(mean), "add_scale": self.mean}
            write, forget = tilt(k, self.scale_reference.flatten(0, 1), scale), forgetting(self.scale_forget).flatten()
        else:
            # Taps and sink skip padding, which the operator does not.
            base, new = self.local(v, layout, mask, old)
            if mean is not None:
                base = base + self.mean[:, None] * mean.to(self.mean.dtype)
            local = {"add_to": layout.pack(base)}
            write, forget = self.slow_weights(k, scale, mask)
        means = None, None, None
        if self.scales.shape[1]:
            write, forget = layout.pack(write), forget if mask is None else layout.pack(forget)
            log_z = log_norm(
                write, forget.expand_as(write), initial_log_z=old.get("scale_log_z"), cu_seqlens=layout.cu_seqlens
            )
            means = write, forget, log_z
        base, last = readout(
            layout.pack(v),
            *means,
            self.scales,
            initial_mean=old.get("scale_mean"),
            cu_seqlens=layout.cu_seqlens,
            **local,
        )
        if self.scales.shape[1]:
            new |= {"scale_mean": last, "scale_log_z": log_z[:, -1]}
        return layout.unpack(base), new
