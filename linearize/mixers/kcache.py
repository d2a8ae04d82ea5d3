"""Softmax attention over cached keys alone: a memory of v given k stands for the values (derivation.md §8).

Where the value of a key is taken from a linear model mu of v given k, softmax attention is the model of the mean key,

    sum_i a_i mu(k_i) = mu(kappa_t),   kappa_t = sum_i a_i k_i,

so that no value is cached: half a softmax layer's cache, growing as its keys do, plus a memory of constant size. With
a model that gives every v_i at k_i this is softmax attention itself.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from linearize_kernels import mesa
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.attended import attend, document_starts
from linearize.mixers.base import HeadShape, Sample, Segments
from linearize.mixers.centred import Centred, CentredMixer, covariance_arguments
from linearize.mixers.expansion import Strengths
from linearize.mixers.fit import Points, centred_at, fit_readout, mean_keys
from linearize.mixers.mesanet import MAX_ITER, START_TOLERANCE, read_ridge

RIDGES = (0.03, 0.3, 3.0)  # of the keys' mean variance
SEARCH = (0.3, 16, 1e-3)  # ridge, solver steps and tolerance while reference and forgetting are chosen


def away(kappa: Tensor, k: Tensor) -> Tensor:
    """kappa_t - k_t per query head. kappa: [B, T, H, K], k: [B, T, Hk, K]; in fp32 at least: both may be long."""
    wide = torch.promote_types(kappa.dtype, torch.float32)
    return kappa.to(wide) - k.to(wide).repeat_interleave(kappa.shape[2] // k.shape[2], 2)


def mean_key_gap(away: Tensor, keys: Tensor, at: Strengths) -> Tensor:
    """kappa_t - kbar_t from kappa_t - k_t [B, T, H, K] and the centred keys, as ``kbar_t = k_t - (1 - b_t) kd_t``."""
    return away + at.log_keep.exp()[..., None] * keys.to(away.dtype)


def recalled_terms(
    scale: float, sample: Sample, points: Points, knobs: Sequence[tuple[float, int, float]], spread: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the memory gives at kappa - kbar at every point and (ridge, solver steps, tolerance), a :data:`fit.Memory`.

    spread: [H, P], the keys' mean variance, or None to measure it on this batch.
    """
    kappa = mean_keys(sample, scale)
    at = centred_at(dataclasses.replace(sample, q=away(kappa, sample.k)), points, scale)
    if spread is None:
        # k - kbar = (1 - b) kd.
        square = torch.where(at.strengths.live, (2 * at.strengths.log_keep).exp() * at.rho2, 0.0)
        spread = at.pick(square).mean(0).view(points.forget.shape) / sample.k.shape[-1]
        spread = spread.clamp(min=1e-12)
    query = mean_key_gap(at.gap + points.reference.flatten(0, 1), at.keys, at.strengths)
    weights = covariance_arguments(at.strengths, *[torch.zeros((), device=query.device)] * 2)
    out = []
    for ridge, steps, tolerance in knobs:
        ridge = (ridge * spread.flatten())[:, None].expand(-1, query.shape[-1]).contiguous()
        o, _, _ = mesa(
            query.to(at.keys.dtype), at.keys, at.values, *weights, ridge,
            max_iter=steps, tol=tolerance, cu_seqlens=at.cu_seqlens,
        )  # fmt: skip
        out.append(at.pick(o).unflatten(1, points.forget.shape))
    return torch.stack(out, 3).flatten(2, 3), spread


class KCache(CentredMixer):
    """Softmax attention over cached keys, read through a centred ridge regression of v on k, plus the zeroth order.

    ``o_t = zeroth order + rho_A G_t^T (H_t + Lambda)^-1 (kappa_t - kbar_t)``, G and H the running covariances of
    derivation.md §7.

    Own parameters beyond :class:`CentredMixer`'s, fp32, H query heads: log_ridge [H], log Lambda; read_state [H],
    rho_A. Its gates are log decay exponent (Wa) and the logit of the write strength (Wb), of G and H alike.

    The state grows: keys [B, n, Hk, K] as they came (zero on padding) and real [B, n], n the tokens so far.
    """

    kind = "k-cache"
    memory_gates = 2

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.log_ridge = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.read_state = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """r = 0, lambda = .9999, Lambda = 1: ``o = vbar + G^T (H + 1)^-1 (kappa - kbar)``."""
        super().reset_parameters()
        init.zeros_(self.log_ridge)
        init.ones_(self.read_state)

    @classmethod
    def memory_bytes(cls, shape: HeadShape) -> int:
        return 4 * shape.q_heads * shape.key_dim * (shape.value_dim + 2 * shape.key_dim)

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0, *, taps: int = 4, time_scales: int = 3) -> int:
        constant = super().state_bytes(shape, taps=taps, time_scales=time_scales)
        return constant + tokens * (shape.itemsize * shape.kv_heads * shape.key_dim + 1)

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting, ridge and time scales, and fit the readout (§6); gate weights stay zero (§5).

        The rung "mean-field" is the memory as derived, r = 0 without forgetting and the smallest ridge.
        """
        knobs = [(ridge, MAX_ITER, START_TOLERANCE) for ridge in RIDGES]
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(recalled_terms, scale),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=knobs,
            search=SEARCH,
            derived={"mean-field": knobs[0]},
        )
        self.adopt_fit(fit)
        ridge = fit.measured * torch.tensor(RIDGES, device=fit.knob.device)[fit.knob]
        self.log_ridge.copy_(ridge.log())
        self.read_state.copy_(fit.memory)
        return fit.ladder

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
        mask = segments.mask
        real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if mask is None else mask.bool()
        keys = k if mask is None else torch.where(real[..., None, None], k, 0)
        if state is not None:
            keys, real = torch.cat([state["keys"], keys], 1), torch.cat([state["real"], real], 1)
        whole = mask is None and state is None
        kappa = attend(q, keys, scale, real=None if whole else real, first=document_starts(segments.reset))
        # The base class centres what it is given as queries on r; `remember` moves it to the keys' running mean.
        o, new = super().forward(
            x, away(kappa, k), k, v, scale, segments=segments, state=state, output_state=output_state
        )
        return o.to(q.dtype), None if new is None else new | {"keys": keys, "real": real}

    def remember(
        self, at: Centred, gates: list[Tensor], scale: float, old: dict[str, Tensor], output_state: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        query = mean_key_gap(at.gap + self.reference, at.keys, at.strengths) * self.read_state[:, None]
        ridge = self.log_ridge.exp()[:, None].expand(-1, self.shape.key_dim)
        return read_ridge(query.to(at.keys.dtype), at, gates, ridge, old, output_state)
