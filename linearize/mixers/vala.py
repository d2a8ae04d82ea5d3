"""Vanilla linear attention: the first order of the softmax, a covariance of keys and values (derivation.md §3)."""

from collections.abc import Sequence
from functools import partial

import torch
from linearize_kernels import centred_linear_attn, centred_linear_attn_step, linear_attn
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Sample
from linearize.mixers.centred import CentredMixer, covariance_arguments
from linearize.mixers.fit import Points, centred_at, fit_readout


def covariance_terms(
    scale: float, sample: Sample, points: Points, knobs: Sequence[None], measured: Tensor | None
) -> tuple[Tensor, Tensor]:
    """s A_t^T (q_t - r) at every point, a :data:`fit.Memory` without a knob; nothing is measured."""
    at = centred_at(sample, points, scale)
    zero = torch.zeros((), dtype=at.rho2.dtype, device=at.rho2.device)
    weights = covariance_arguments(at.strengths, zero, zero)
    o, _ = linear_attn(at.gap, at.keys, at.values, *weights, scale=scale, cu_seqlens=at.cu_seqlens)
    return at.pick(o).unflatten(1, points.forget.shape), torch.zeros_like(points.forget)


class VaLA(CentredMixer):
    """``A_t = (1 - b_t) A_{t-1} + b_t (k_t - kbar_t)(v_t - vbar_{t-1})^T``, read with ``s (q - r)``.

    Own parameter beyond :class:`CentredMixer`'s, fp32: read_state [H], rho_A. Its gates are log decay exponent (Wa) and
    the logit of the write strength (Wb).
    """

    kind = "vala"
    memory_gates = 2
    operator = staticmethod(centred_linear_attn)
    stepper = staticmethod(centred_linear_attn_step)
    dense_keys = True

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.read_state = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The plain expansion: r = 0, lambda = .9999, o = vbar + s A^T q, no other term."""
        super().reset_parameters()
        init.ones_(self.read_state)

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting and time scales, and fit the readout (§6); gate weights stay zero (§5)."""
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(covariance_terms, scale),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=(None,),
            search=None,
            derived={"vala": None},
        )
        self.adopt_fit(fit)
        self.read_state.copy_(fit.memory)
        return fit.ladder

    def query(self, gap: Tensor, scale: float) -> Tensor:
        """rho_A s (q - r)."""
        return gap * (self.read_state * scale)[:, None]

    def arguments(
        self,
        gap: Tensor,
        k: Tensor,
        v: Tensor,
        writes: tuple[Tensor, Tensor],
        gates: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, ...]:
        return self.query(gap, scale).to(k.dtype), k, v, *writes, *gates
