"""Gated DeltaNet that starts from the minimum-error expansion of the teacher's softmax (derivation.md §2-§6)."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from linearize_kernels import centre, gated_delta, log_norm, running_mean
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Sample, Segments
from linearize.mixers.expansion import (
    LIMIT,
    Layout,
    delta_arguments,
    first_value,
    forget_logit,
    forgetting,
    local_taps,
    mask_write,
    mix_heads,
    strengths,
    tilt,
)
from linearize.mixers.fit import Points, fit_readout

ERASES = (0.01, 0.3, 1.0)  # c_h^2 as a multiple of the balanced value; near 0 is VaLA, 1 is GDN
SEARCH_ERASE = 0.3  # while tilt and forgetting are chosen


def erased_terms(
    scale: float, sample: Sample, points: Points, erases: Sequence[float], log_balance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A_t^T q'_t of the gated delta rule at every point and erase scale (derivation.md §4), a :data:`fit.Memory`.

    log_balance: [H, P], the balanced ``log c_h``, or None to measure it on this batch.
    """
    layout = Layout.of(sample.q, sample.segments)
    cu, heads = layout.cu_seqlens, points.forget.shape[0]
    write, forget = points.weights(sample, layout, scale)
    log_z = log_norm(write, forget, cu_seqlens=cu)
    kd, vd, _, rho2, _ = centre(layout.pack(sample.k), layout.pack(sample.v), write, forget, log_z, cu_seqlens=cu)
    at = strengths(write, forget, log_z, layout, None)
    query = scale * (sample.q[:, :, :, None] - points.reference)  # [B, T, H, P, K]
    if log_balance is None:
        # c_h^2 = E|s (q - r)| / E|k - kbar|, where k - kbar = (1 - b) kd.
        reach = query[sample.real].norm(dim=-1).mean(0)
        spread = torch.where(at.live, (at.log_keep + 0.5 * rho2.clamp(min=1e-30).log()).exp(), 0.0)
        spread = layout.unpack(spread)[sample.real].mean(0).view(heads, -1)
        log_balance = 0.5 * (reach.clamp(min=1e-12) / spread.clamp(min=1e-12)).log()
    query = layout.pack(query.flatten(2, 3))
    zero = torch.zeros((), dtype=rho2.dtype, device=rho2.device)
    out = []
    for erase in erases:
        balance = log_balance.flatten().exp() * erase**0.5
        log_decay, beta, gain = delta_arguments(at, zero, zero, rho2, balance)
        o, _ = gated_delta(query / balance[:, None], kd, vd, log_decay, beta, gain=gain, scale=1.0, cu_seqlens=cu)
        out.append(layout.unpack(o)[sample.real].unflatten(1, points.forget.shape))
    return torch.stack(out, 3).flatten(2, 3), log_balance


class GDN(Mixer):
    """The gated delta rule on centred, balanced keys, with the zeroth-order readout of derivation.md §6.

    Options: ``taps`` (J values v_t .. v_{t-J+1}), ``time_scales`` (M extra running means).

    Own parameters, all fp32, H query heads:
      gates.weight [4H, hidden], gates.bias [4H]: rows for log decay exponent (Wa), erase (Wb), write (Ww) and
        forgetting (Wl); zero weights and, but for Wl, zero biases at the start;
      reference [H, K]: r; log_balance [H]: log c_h;
      read_mean, read_state, read_sink [H]; read_taps [J, H]; read_scales [H, M]: the rho and tau of §6;
      scale_reference [H, M, K], scale_forget [H, M]: reference queries and forgetting logits of the extra means.
    """

    kind = "gdn"

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__()
        if taps < 1 or time_scales < 0:
            raise ValueError(f"gdn needs taps >= 1 and time_scales >= 0, got {taps} and {time_scales}")
        self.shape, self.taps, self.time_scales = shape, taps, time_scales
        heads, f32 = shape.q_heads, torch.float32
        self.gates = nn.Linear(shape.hidden, 4 * heads, dtype=f32)
        self.reference = nn.Parameter(torch.empty(heads, shape.key_dim, dtype=f32))
        self.log_balance = nn.Parameter(torch.empty(heads, dtype=f32))
        self.read_mean = nn.Parameter(torch.empty(heads, dtype=f32))
        self.read_state = nn.Parameter(torch.empty(heads, dtype=f32))
        self.read_sink = nn.Parameter(torch.empty(heads, dtype=f32))
        self.read_taps = nn.Parameter(torch.empty(taps, heads, dtype=f32))
        self.read_scales = nn.Parameter(torch.empty(heads, time_scales, dtype=f32))
        self.scale_reference = nn.Parameter(torch.empty(heads, time_scales, shape.key_dim, dtype=f32))
        self.scale_forget = nn.Parameter(torch.empty(heads, time_scales, dtype=f32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The plain expansion: r = 0, lambda = .9999, c_h = 1, o = vbar + S^T q', no other term."""
        heads = self.shape.q_heads
        bias = torch.zeros(4, heads)
        bias[3] = forget_logit(0.9999)
        init.zeros_(self.gates.weight)
        init.copy_(self.gates.bias, bias.flatten())
        for zero in (self.reference, self.log_balance, self.read_sink, self.read_taps, self.read_scales):
            init.zeros_(zero)
        init.zeros_(self.scale_reference)
        init.constant_(self.scale_forget, forget_logit(0.9))
        init.ones_(self.read_mean)
        init.ones_(self.read_state)

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0, *, taps: int = 4, time_scales: int = 3) -> int:
        heads, kv, key, value = shape.q_heads, shape.kv_heads, shape.key_dim, shape.value_dim
        means = key + value + 1 + time_scales * (value + 1)
        counter = 8  # `seen` is an int64
        return 4 * (heads * (key * value + means) + kv * value * taps) + counter

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting, erase scale and time scales, and fit the readout (§6); gate weights stay zero (§5)."""
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(erased_terms, scale),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=ERASES,
            search=SEARCH_ERASE,
            derived={"vala": ERASES[0], "gdn": 1.0},
        )
        self.reference.copy_(fit.reference)
        self.log_balance.copy_(fit.measured + 0.5 * fit.knob.log())
        self.gates.bias.view(4, -1)[3].copy_(fit.forget)
        self.read_mean.copy_(fit.mean)
        self.read_state.copy_(fit.state)
        self.read_taps.copy_(fit.taps)
        self.read_sink.copy_(fit.sink)
        self.read_scales.copy_(fit.scales)
        self.scale_reference.copy_(fit.scale_points.reference)
        self.scale_forget.copy_(fit.scale_points.forget)
        return fit.ladder

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Data-dependent residuals of §5: (log e, log r, write residual, forgetting logit), each [B, T, H]."""
        out = F.linear(x.to(self.gates.weight.dtype), self.gates.weight, self.gates.bias)
        log_exponent, log_erase, write, forget = out.chunk(4, -1)
        return log_exponent.clamp(max=LIMIT), log_erase.clamp(max=LIMIT), write, forget

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        segments: Segments,
        state: dict[str, Tensor] | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        heads, scales = self.shape.q_heads, self.time_scales
        mask = segments.mask
        layout = Layout.of(x, segments, cached=state is not None or output_state)
        old = state or {}
        log_exponent, log_erase, write, forget = self.gate(x)
        log_write, log_forget = mask_write(
            tilt(k, self.reference, scale) + write, forgetting(forget).expand_as(write), mask
        )
        pk, pv = layout.pack(k), layout.pack(v)
        log_write, log_forget, log_exponent, log_erase = map(
            layout.pack, (log_write, log_forget, log_exponent, log_erase)
        )
        cu = layout.cu_seqlens

        # First order: running means and centred keys and values (§2), write strengths (§4, §5).
        log_z = log_norm(log_write, log_forget, initial_log_z=old.get("log_z"), cu_seqlens=cu)
        means = (old["key_mean"], old["value_mean"]) if old else None
        kd, vd, mean, rho2, final_means = centre(
            pk, pv, log_write, log_forget, log_z, initial_mean=means, cu_seqlens=cu
        )
        at = strengths(log_write, log_forget, log_z, layout, old.get("log_z"))
        balance = self.log_balance.exp()
        alpha, beta, gain = delta_arguments(at, log_exponent, log_erase, rho2, balance)

        # Zeroth order: everything that is a per-head multiple of a value or of a mean of values (§6).
        taps, tail = local_taps(v, self.read_taps, layout, mask, old.get("tail"))
        sink, first = first_value(v, layout, mask, old.get("sink"), old.get("seen"))
        base = self.read_mean[:, None] * layout.unpack(mean).to(self.read_mean.dtype)
        base = base + mix_heads(sink, self.read_sink)
        for j, tap in enumerate(taps):
            base = base + mix_heads(tap, self.read_taps[j])
        scale_z = scale_mean = None
        if scales:
            w = tilt(k, self.scale_reference.flatten(0, 1), scale)
            w, f = mask_write(w, forgetting(self.scale_forget).flatten().expand_as(w), mask)
            w, f = layout.pack(w), layout.pack(f)
            z = log_norm(w, f, initial_log_z=old.get("scale_log_z"), cu_seqlens=cu)
            extra, scale_mean = running_mean(pv, w, f, z, initial_mean=old.get("scale_mean"), cu_seqlens=cu)
            extra = layout.unpack(extra).unflatten(2, (heads, scales))
            base = base + torch.einsum("bthmv,hm->bthv", extra.to(base.dtype), self.read_scales)
            scale_z = z[:, -1]

        weight = self.read_state / balance * scale
        query = ((q - self.reference) * weight[:, None]).to(q.dtype)
        o, memory = gated_delta(
            layout.pack(query),
            kd,
            vd,
            alpha,
            beta,
            gain=gain,
            scale=1.0,
            initial_state=old.get("memory"),
            output_final_state=output_state,
            cu_seqlens=cu,
            add_to=layout.pack(base).to(kd.dtype),
        )
        o = layout.unpack(o).to(q.dtype)
        if not output_state:
            return o, None
        seen = x.new_full((len(x),), x.shape[1], dtype=torch.long) if mask is None else mask.long().sum(1)
        new = {
            "memory": memory,
            "key_mean": final_means[0],
            "value_mean": final_means[1],
            "log_z": log_z[:, -1],
            "tail": tail,
            "sink": first,
            "seen": seen + old["seen"] if old else seen,
        }
        if scales:
            new |= {"scale_mean": scale_mean, "scale_log_z": scale_z}
        return o, new
