"""MesaNet on centred keys and values: the ridge regression of v on k over all that was seen (derivation.md §7)."""

from collections.abc import Sequence
from functools import partial

import torch
from linearize_kernels import centred_mesa_step, linear_attn, mesa, mesa_step, running_mean
from linearize_kernels.api import MAX_STEP
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Sample
from linearize.mixers.centred import Centred, CentredMixer, covariance_arguments
from linearize.mixers.fit import Points, centred_at, fit_readout

VALA = 1e6  # a Lambda that is as good as infinite
RIDGES = (0.03, 0.3, 3.0, VALA)  # Lambda as a multiple of the keys' mean variance
MAX_ITER = 64  # of the conjugate gradients; K of them are exact but for rounding
# Of their relative residual, by the queries' dtype: half of what rounding a result to bfloat16 takes, for 16 bits.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
START_TOLERANCE = 1e-4  # while the start is chosen
STEP_TOLERANCE = 1e-4  # of a decode step with 16-bit keys, of which it is a small part of the rounding


def ridge_terms(
    scale: float, sample: Sample, points: Points, ridges: Sequence[float], variance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """G~_t^T (H~_t + Lambda)^-1 Lbar s (q_t - r) at every point and ridge, a :data:`fit.Memory`.

    variance: [H, P, K], the mean of H~_t's diagonal, or None to measure it on this batch. Lambda is the ridge times its
    mean over the key dimensions; Lbar = variance + Lambda.
    """
    at = centred_at(sample, points, scale)
    if variance is None:
        # The diagonal of a covariance: mean of squares minus square of the mean, kbar_t = k_t - (1 - b_t) kd_t.
        keys = at.layout.pack(sample.k)
        square, _ = running_mean(keys.square(), at.log_write, at.log_forget, at.log_z, cu_seqlens=at.cu_seqlens)
        keys = keys.repeat_interleave(square.shape[2] // keys.shape[2], 2)
        mean = keys - at.strengths.log_keep.exp()[..., None] * at.keys
        variance = at.pick(square - mean.square()).mean(0).clamp(min=1e-6).unflatten(0, points.forget.shape)
    size, out = variance.flatten(0, 1), []
    log_decay, gain = covariance_arguments(at.strengths, *[torch.zeros((), device=size.device)] * 2)
    for ridge in ridges:
        if ridge == VALA:
            o, _ = linear_attn(at.gap, at.keys, at.values, log_decay, gain, scale=scale, cu_seqlens=at.cu_seqlens)
            out.append(at.pick(o).unflatten(1, points.forget.shape))
            continue
        ridge = (ridge * size.mean(-1, keepdim=True)).expand_as(size).contiguous()
        query = at.gap * (size + ridge)
        o, _, _ = mesa(
            query, at.keys, at.values, log_decay, gain, ridge,
            max_iter=MAX_ITER, tol=START_TOLERANCE, scale=scale, cu_seqlens=at.cu_seqlens,
        )  # fmt: skip
        out.append(at.pick(o).unflatten(1, points.forget.shape))
    return torch.stack(out, 3).flatten(2, 3), variance


def step_tolerance(dtype: torch.dtype) -> float:
    """Of a decode step with rows of this dtype."""
    return STEP_TOLERANCE if dtype.itemsize == 2 else TOLERANCE[dtype]


def read_ridge(
    query: Tensor, at: Centred, gates: list[Tensor], ridge: Tensor, old: dict[str, Tensor], output_state: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """``G^T (H + Lambda)^-1 query`` plus the zeroth order, with the gates and the result of ``CentredMixer.remember``.

    query: [B, T, H, K], packed. ridge: [H, K], the diagonal of Lambda. G and H are the states memory and key_memory.
    The state preconditioner [B, H, K, K], 0 at first, is the kernels': an inverse of H + Lambda at an earlier token,
    which their steps overwrite, and which changes no result by more than the tolerance.
    """
    arguments = (query, at.keys, at.values, *covariance_arguments(at.strengths, *gates), ridge)
    states, inverse = (old["memory"], old["key_memory"]) if old else None, old.get("preconditioner")
    if states and output_state and query.shape[1] <= MAX_STEP and not torch.is_grad_enabled():
        o, states = mesa_step(
            *arguments,
            state=states,
            add_to=at.base,
            preconditioner=inverse,
            tol=step_tolerance(query.dtype),
            in_place=False,
        )
    else:
        o, states, _ = mesa(
            *arguments,
            max_iter=MAX_ITER,
            tol=TOLERANCE[query.dtype],
            initial_state=states,
            output_final_state=output_state,
            cu_seqlens=at.cu_seqlens,
            add_to=at.base,
        )
    if not output_state:
        return o, {}
    inverse = torch.zeros_like(states[1]) if inverse is None else inverse
    return o, {"memory": states[0], "key_memory": states[1], "preconditioner": inverse}


class MesaNet(CentredMixer):
    """``o = ... + rho_A G^T (H + Lambda)^-1 Lbar s (q - r)`` with the running covariances G of k and v and H of k.

    The queries are solved for by conjugate gradients, to a relative residual of TOLERANCE or MAX_ITER steps. A decode
    step of the kernels starts from the inverse at an earlier token, which is a third state as large as H, and solves
    directly where that has become too old; other steps solve directly.

    Own parameters beyond :class:`CentredMixer`'s, fp32, H query heads: log_ridge [H, K], log Lambda; log_variance
    [H, K], log (Lbar - Lambda); read_state [H], rho_A. Its gates are log decay exponent (Wa) and the logit of the write
    strength (Wb), of G and H alike.
    """

    kind = "mesanet"
    memory_gates = 2
    stepper = staticmethod(centred_mesa_step)
    memories = ("memory", "key_memory", "preconditioner")

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.log_ridge = nn.Parameter(torch.empty(shape.q_heads, shape.key_dim, dtype=torch.float32))
        self.log_variance = nn.Parameter(torch.empty(shape.q_heads, shape.key_dim, dtype=torch.float32))
        self.read_state = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """r = 0, lambda = .9999, and a ridge of 1 for keys of unit variance."""
        super().reset_parameters()
        init.zeros_(self.log_ridge)
        init.zeros_(self.log_variance)
        init.ones_(self.read_state)

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting, Lambda and time scales, and fit the readout (§6); gate weights stay zero (§5)."""
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(ridge_terms, scale),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=RIDGES,
            search=VALA,  # no system to solve, and close enough to choose tilt and forgetting by
            derived={"vala": VALA, "mesanet": RIDGES[1]},
        )
        self.adopt_fit(fit)
        ridge = torch.tensor(RIDGES, device=fit.knob.device)[fit.knob] * fit.measured.mean(-1)
        self.log_ridge.copy_(ridge.log()[:, None].expand_as(self.log_ridge))
        self.log_variance.copy_(fit.measured.log())
        self.read_state.copy_(fit.memory)
        return fit.ladder

    @classmethod
    def memory_bytes(cls, shape: HeadShape) -> int:
        return 4 * shape.q_heads * shape.key_dim * (shape.value_dim + 2 * shape.key_dim)

    def query(self, gap: Tensor, scale: float) -> Tensor:
        """rho_A Lbar s (q - r)."""
        return gap * (self.log_variance.exp() + self.log_ridge.exp()) * (self.read_state * scale)[:, None]

    def arguments(
        self,
        gap: Tensor,
        k: Tensor,
        v: Tensor,
        writes: tuple[Tensor, Tensor],
        gates: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, ...]:
        return self.query(gap, scale).to(k.dtype), k, v, *writes, *gates, self.log_ridge.exp()

    def step(self, arguments: tuple[Tensor, ...], **shared) -> tuple[Tensor, tuple[Tensor, ...]]:
        memory, key_memory, inverse, *statistics = shared.pop("state")
        o, (memory, key_memory, *statistics) = super().step(
            arguments,
            state=(memory, key_memory, *statistics),
            preconditioner=inverse,
            tol=step_tolerance(arguments[0].dtype),
            **shared,
        )
        return o, (memory, key_memory, inverse, *statistics)

    def remember(
        self, at: Centred, gates: list[Tensor], scale: float, old: dict[str, Tensor], output_state: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        query = self.query(at.gap, scale).to(at.keys.dtype)
        return read_ridge(query, at, gates, self.log_ridge.exp(), old, output_state)
