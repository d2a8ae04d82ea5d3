"""Gated DeltaNet that starts from the minimum-error expansion of the teacher's softmax (derivation.md §2-§6)."""

import torch
import torch.nn.functional as F
from linearize_kernels import centre, gated_delta, log_norm, running_mean
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Segments
from linearize.mixers.expansion import (
    Layout,
    Strengths,
    first_value,
    forget_logit,
    forgetting,
    local_taps,
    mask_write,
    mix_heads,
    strengths,
    tilt,
)

LIMIT = 30.0  # of log e_t and log r_t: far beyond any useful value, and far below where fp32 overflows to inf * 0
FLOOR = -80.0  # of log alpha_t: leaves 2e-35 of the state, and keeps sums over a chunk small enough to be exact


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
    def state_bytes(cls, shape: HeadShape, *, taps: int = 4, time_scales: int = 3) -> int:
        heads, kv, key, value = shape.q_heads, shape.kv_heads, shape.key_dim, shape.value_dim
        means = key + value + 1 + time_scales * (value + 1)
        counter = 8  # `seen` is an int64
        return 4 * (heads * (key * value + means) + kv * value * taps) + counter

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
