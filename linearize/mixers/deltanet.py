"""DeltaNet on centred keys and values: streaming least squares of v given k, one step a token (derivation.md §7)."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from linearize_kernels import centred_delta_step, gated_delta
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Sample
from linearize.mixers.centred import LIMIT, Centred, CentredMixer
from linearize.mixers.expansion import Strengths
from linearize.mixers.fit import Points, attended_keys, centred_at, fit_readout

# (m, p): learning rate eta_t = m b_t^p / E|kd|^2. p = 0 is a constant rate, p = 1 the decreasing rate of stochastic
# approximation, b_t being 1 / t where nothing is forgotten.
STEPS = ((0.03, 0.0), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0), (1.0, 1.0), (3.0, 1.0), (10.0, 1.0), (30.0, 1.0))
SEARCH_STEP = (0.1, 0.0)  # while tilt and forgetting are chosen


def step_size(at: Strengths, rho2: Tensor, log_rate: Tensor, schedule: Tensor) -> Tensor:
    """``beta_t / n_t^2 = eta_t / (1 + eta_t n_t^2)``, ``log eta_t = log_rate + schedule log b_t`` (derivation.md §7).

    The implicit step: never more than the whole error, whatever eta is. [B, T, H]; 0 where a token writes nothing.
    rho2: n_t^2.
    """
    rate = (log_rate + schedule * at.log_strength).clamp(max=LIMIT).exp()
    rate = torch.where(at.live, rate, torch.zeros_like(rate))
    return rate / (1 + rate * rho2)


def step_terms(
    scale: float, sample: Sample, points: Points, steps: Sequence[tuple[float, float]], measured: Tensor | None
) -> tuple[Tensor, Tensor]:
    """S_t^T lambda_q (q_t - r) at every point and (m, p), a :data:`fit.Memory`.

    measured: [H, P, 1 + K], log of the keys' mean square and lambda_q, or None to measure them on this batch: lambda_q
    is what ``sum_i a_i k_i - kbar_t`` is of ``q_t - r``, by least squares, key dimension by key dimension.
    """
    at = centred_at(sample, points, scale)
    if measured is None:
        gap = at.pick(at.gap)
        # kbar_t = k_t - (1 - b_t) kd_t.
        key_mean = at.layout.pack(sample.k).repeat_interleave(gap.shape[1] // sample.k.shape[2], 2)
        key_mean = at.pick(key_mean - at.strengths.log_keep.exp()[..., None] * at.keys)
        attended = attended_keys(sample, scale).repeat_interleave(points.forget.shape[1], 1) - key_mean
        readout = (attended * gap).sum(0) / gap.square().sum(0).clamp(min=1e-12)
        size = at.pick(at.rho2).mean(0).clamp(min=1e-12).log()
        measured = torch.cat([size[:, None], readout], 1).unflatten(0, points.forget.shape)
    size, readout = measured[..., 0].flatten(), measured[..., 1:].flatten(0, 1)
    query, out = at.gap * readout, []
    for rate, schedule in steps:
        beta = step_size(at.strengths, at.rho2, math.log(rate) - size, torch.full_like(size, schedule))
        o, _ = gated_delta(query, at.keys, at.values, None, beta, scale=1.0, cu_seqlens=at.cu_seqlens)
        out.append(at.pick(o).unflatten(1, points.forget.shape))
    return torch.stack(out, 3).flatten(2, 3), measured


class DeltaNet(CentredMixer):
    """``S_t = S_{t-1} + beta_t u (vd / n - S_{t-1}^T u)^T`` on centred keys kd = n u and values vd, read with
    lambda_q (q - r).

    The fast weight does not decay; only the running means forget. Own parameters beyond :class:`CentredMixer`'s, fp32,
    H query heads: log_rate [H], log eta; schedule [H], the power of b_t in eta_t; key_readout [H, K], lambda_q times
    rho_A. Its one gate is added to log eta.
    """

    kind = "deltanet"
    memory_gates = 1
    stepper = staticmethod(centred_delta_step)
    dense_keys = True

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.log_rate = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.schedule = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.key_readout = nn.Parameter(torch.empty(shape.q_heads, shape.key_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """r = 0, lambda = .9999, a constant eta of 1 / K, and lambda_q the softmax scale of keys of unit variance."""
        super().reset_parameters()
        init.constant_(self.log_rate, -math.log(self.shape.key_dim))
        init.zeros_(self.schedule)
        init.constant_(self.key_readout, self.shape.key_dim**-0.5)

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting, learning rate and time scales and fit the readout (§6); gate weights stay zero (§5)."""
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(step_terms, scale),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=STEPS,
            search=SEARCH_STEP,
            derived={"deltanet": SEARCH_STEP},
        )
        self.adopt_fit(fit)
        rate, schedule = torch.tensor(STEPS, device=fit.knob.device)[fit.knob].unbind(-1)
        self.log_rate.copy_(rate.log() - fit.measured[:, 0])
        self.schedule.copy_(schedule)
        self.key_readout.copy_(fit.memory[:, None] * fit.measured[:, 1:])
        return fit.ladder

    def arguments(
        self,
        gap: Tensor,
        k: Tensor,
        v: Tensor,
        writes: tuple[Tensor, Tensor],
        gates: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, ...]:
        return (gap * self.key_readout).to(k.dtype), k, v, *writes, self.log_rate + gates[0], self.schedule

    def remember(
        self, at: Centred, gates: list[Tensor], scale: float, old: dict[str, Tensor], output_state: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        o, memory = gated_delta(
            (at.gap * self.key_readout).to(at.keys.dtype),
            at.keys,
            at.values,
            None,
            step_size(at.strengths, at.rho2, self.log_rate + gates[0], self.schedule),
            scale=1.0,
            initial_state=old.get("memory"),
            output_final_state=output_state,
            cu_seqlens=at.cu_seqlens,
            add_to=at.base,
        )
        return o, {"memory": memory}
