"""Mixers that are the zeroth order of the expansion plus a memory of centred keys and values (derivation.md §2-§7)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from linearize_kernels import centre, log_norm
from linearize_kernels.api import MAX_STEP
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Segments
from linearize.mixers.expansion import (
    Layout,
    Readout,
    Strengths,
    forget_logit,
    forgetting,
    mask_write,
    strengths,
    tilt,
)
from linearize.mixers.fit import Fit
from linearize.mixers.products import exact_linear

LIMIT = 30.0  # of the memory's gates, which are logs: far beyond any useful value, far below inf * 0 in fp32
STATISTICS = ("key_mean", "value_mean", "log_z")
SLOW = ("scale_mean", "scale_log_z")
FLOOR = -80.0  # of log alpha_t: leaves 2e-35 of the state, and keeps sums over a chunk small enough to be exact


@dataclass
class Centred:
    """What a memory works on, as the kernels take it (packed documents as one row); H recurrence heads.

    gap: [B, T, H, K], q - r. keys: [B, T, H, K] and values: [B, T, H, V], minus their running means before each token;
    rho2: [B, T, H], |keys|^2. base: [B, T, H, V], the zeroth order, to add to what is read.
    """

    gap: Tensor
    keys: Tensor
    values: Tensor
    rho2: Tensor
    strengths: Strengths
    base: Tensor
    cu_seqlens: Tensor | None


def covariance_arguments(at: Strengths, log_exponent: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments of a running covariance of centred keys and values (derivation.md §3, §5).

    ``A_t = (1 - b_t)^e A_{t-1} + b_t (1 - b_t) kd (vd)^T`` with b_t moved by ``logit`` on the logit scale, so that the
    gain stays below 1. All [B, T, H]; log_exponent: log e_t. Returns (log decay, gain).
    """
    gain = (F.logsigmoid(at.log_strength - at.log_keep + logit) + at.log_keep).exp()
    log_decay = (log_exponent.exp() * at.log_keep).clamp(min=FLOOR)
    return log_decay, torch.where(at.live, gain, torch.zeros_like(gain))


class CentredMixer(Mixer):
    """Zeroth-order readout plus what a memory of centred keys and values answers to q - r.

    A subclass names the gates of its memory and implements :meth:`remember` and :meth:`memory_bytes`; where the kernels
    have all of it as one operator, it names that and its step in place of :meth:`remember`, with :meth:`arguments`.

    Options: ``taps`` (J values v_t .. v_{t-J+1}), ``time_scales`` (M extra running means).

    Own parameters, all fp32, H query heads:
      gates.weight [(n + 2) H, hidden], gates.bias [(n + 2) H]: rows for the n gates of the memory, then write weight
        (Ww) and forgetting (Wl); zero weights and, but for Wl, zero biases at the start;
      reference [H, K]: r; readout.*: :class:`linearize.mixers.expansion.Readout`.
    """

    memory_gates: ClassVar[int]
    # The whole mixer as one operator of the kernels, with gradients, and as one of their steps, where there are such.
    operator: ClassVar[Callable | None] = None
    stepper: ClassVar[Callable | None] = None
    memories: ClassVar[tuple[str, ...]] = ("memory",)  # names of the memory's own states, in the order a step has them
    dense_keys: ClassVar[bool] = False  # whether "memory" is kept with K dense, as the kernels' steps read it fastest

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__()
        self.shape, self.taps, self.time_scales = shape, taps, time_scales
        self.gates = nn.Linear(shape.hidden, (self.memory_gates + 2) * shape.q_heads, dtype=torch.float32)
        self.reference = nn.Parameter(torch.empty(shape.q_heads, shape.key_dim, dtype=torch.float32))
        self.readout = Readout(shape, taps=taps, time_scales=time_scales)

    def reset_parameters(self) -> None:
        """The plain expansion: r = 0, lambda = .9999, gates without effect."""
        init.zeros_(self.gates.weight)
        bias = torch.zeros(self.memory_gates + 2, self.shape.q_heads)
        bias[-1] = forget_logit(0.9999)
        init.copy_(self.gates.bias, bias.flatten())
        init.zeros_(self.reference)
        self.readout.reset_parameters()

    def adopt_fit(self, fit: Fit) -> None:
        """Set reference, forgetting and readout to what was fitted."""
        self.reference.copy_(fit.reference)
        self.gates.bias.view(-1, self.shape.q_heads)[-1].copy_(fit.forget)
        for name in ("mean", "sink", "taps", "scales"):
            getattr(self.readout, name).copy_(getattr(fit, name))
        self.readout.scale_reference.copy_(fit.scale_points.reference)
        self.readout.scale_forget.copy_(fit.scale_points.forget)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """gates: what depends on the data, without effect at first; readout: the zeroth order; memory: the rest."""
        gates, readout = list(self.gates.parameters()), list(self.readout.parameters())
        taken = {id(p) for p in gates + readout}
        return {"gates": gates, "readout": readout, "memory": [p for p in self.parameters() if id(p) not in taken]}

    @classmethod
    def memory_bytes(cls, shape: HeadShape) -> int:
        """Bytes of the memory's own state per sequence."""
        return 4 * shape.q_heads * shape.key_dim * shape.value_dim

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0, *, taps: int = 4, time_scales: int = 3) -> int:
        means = 4 * shape.q_heads * (shape.key_dim + shape.value_dim + 1)
        return cls.memory_bytes(shape) + means + Readout.state_bytes(shape, taps, time_scales)

    def remember(
        self, at: Centred, gates: list[Tensor], scale: float, old: dict[str, Tensor], output_state: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Write every token to the memory, read it with q - r and add the zeroth order.

        gates: n tensors [B, T, H], packed, zero where they have no effect, at most LIMIT. old: the state before, or {}.
        Returns o [B, T, H, V], packed, and with ``output_state`` the memory's own state.
        """
        raise NotImplementedError

    def arguments(
        self,
        gap: Tensor,
        k: Tensor,
        v: Tensor,
        writes: tuple[Tensor, Tensor],
        gates: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, ...]:
        """What :attr:`operator` and :attr:`stepper` take, up to their keyword arguments.

        gap: [B, T, H, K], q - r. k: [B, T, Hk, K] and v: [B, T, Hk, V], as they are. writes: log write weight and log
        forgetting, [B, T, H]. gates: as :meth:`remember` has them.
        """
        raise NotImplementedError

    def step(self, arguments: tuple[Tensor, ...], **shared) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The whole mixer for the next 1 to MAX_STEP tokens, without gradients.

        shared: keyword arguments of :attr:`stepper`. Returns o [B, T, H, V] and the states ``memories``, STATISTICS and
        SLOW. Those before are left as they are, but for one that only tells where a search may start.
        """
        return self.stepper(*arguments, **shared)

    def kept(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The states after many tokens as the steps after them want them in memory; steps leave them like that."""
        return states | {"memory": states["memory"].mT.contiguous().mT} if self.dense_keys else states

    def can_step(self, x: Tensor, rows: tuple[Tensor, ...], state: dict[str, Tensor] | None) -> bool:
        """Whether :meth:`step` may stand for the full form: few tokens after others, and nothing to differentiate."""
        if self.stepper is None or state is None or not 1 <= x.shape[1] <= MAX_STEP:
            return False
        if not torch.is_grad_enabled():
            return True
        return not any(tensor.requires_grad for tensor in (x, *rows, *state.values(), *self.parameters()))

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
        mask, old = segments.mask, state or {}
        layout = Layout.of(x, segments, cached=state is not None or output_state)
        gates = exact_linear(x, self.gates.weight, self.gates.bias)
        *gates, write, forget = gates.chunk(self.memory_gates + 2, -1)
        log_write, log_forget = map(
            layout.pack, mask_write(tilt(k, self.reference, scale) + write, forgetting(forget), mask)
        )

        gates = [layout.pack(gate.clamp(max=LIMIT)) for gate in gates]
        if output_state and self.can_step(x, (q, k, v), state):
            base, new = self.readout.local(v, layout, mask, old)
            slow = None
            if self.time_scales:
                slow = *self.readout.slow_weights(k, scale, mask), self.readout.scales, *(old[n] for n in SLOW)
            names = (*self.memories, *STATISTICS)
            shared = {"state": tuple(old[n] for n in names), "read_mean": self.readout.mean, "add_to": base}
            shared |= {"time_scales": slow, "in_place": False}
            arguments = self.arguments(q - self.reference, k, v, (log_write, log_forget), gates, scale)
            o, states = self.step(arguments, **shared)
            return o.to(q.dtype), new | dict(zip((*names, *SLOW), states, strict=False))

        gap = layout.pack(q - self.reference)
        if self.operator is not None:
            mean = self.readout.mean  # before the call, after which accelerate may have put it away again
            base, zeroth = self.readout(None, k, v, scale, layout, mask, old)
            names = (*self.memories, *STATISTICS)
            o, states = self.operator(
                *self.arguments(gap, layout.pack(k), layout.pack(v), (log_write, log_forget), gates, scale),
                read_mean=mean,
                initial_state=tuple(old[n] for n in names) if old else None,
                output_final_state=output_state,
                cu_seqlens=layout.cu_seqlens,
                add_to=layout.pack(base),
            )
            o = layout.unpack(o).to(q.dtype)
            return o, self.kept(dict(zip(names, states, strict=True)) | zeroth) if output_state else None

        # First order: running means and centred keys and values (§2), write strengths (§4, §5).
        cu = layout.cu_seqlens
        log_z = log_norm(log_write, log_forget, initial_log_z=old.get("log_z"), cu_seqlens=cu)
        keys, values, mean, rho2, (key_mean, value_mean) = centre(
            layout.pack(k),
            layout.pack(v),
            log_write,
            log_forget,
            log_z,
            initial_mean=(old["key_mean"], old["value_mean"]) if old else None,
            cu_seqlens=cu,
        )
        base, zeroth = self.readout(layout.unpack(mean), k, v, scale, layout, mask, old)
        at = Centred(
            gap=gap,
            keys=keys,
            values=values,
            rho2=rho2,
            strengths=strengths(log_write, log_forget, log_z, layout, old.get("log_z")),
            base=layout.pack(base).to(keys.dtype),
            cu_seqlens=cu,
        )
        o, memory = self.remember(at, gates, scale, old, output_state)
        o = layout.unpack(o).to(q.dtype)
        if not output_state:
            return o, None
        means = {"key_mean": key_mean, "value_mean": value_mean, "log_z": log_z[:, -1]}
        return o, self.kept(memory | zeroth | means)
