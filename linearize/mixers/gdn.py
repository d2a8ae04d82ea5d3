"""Gated DeltaNet that starts from the minimum-error expansion of the teacher's softmax (derivation.md §2-§6)."""

from collections.abc import Sequence
from functools import partial

import torch
from linearize_kernels import centred_gated_delta, centred_gated_delta_step, gated_delta
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Sample
from linearize.mixers.centred import FLOOR, CentredMixer
from linearize.mixers.expansion import Strengths
from linearize.mixers.fit import Points, centred_at, fit_readout

ERASES = (0.01, 0.3, 1.0)  # c_h^2 as a multiple of the balanced value; near 0 is VaLA, 1 is GDN
SEARCH_ERASE = 0.3  # while tilt and forgetting are chosen


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


def erased_terms(
    scale: float, sample: Sample, points: Points, erases: Sequence[float], log_balance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A_t^T q'_t of the gated delta rule at every point and erase scale (derivation.md §4), a :data:`fit.Memory`.

    log_balance: [H, P], the balanced ``log c_h``, or None to measure it on this batch.
    """
    at = centred_at(sample, points, scale)
    if log_balance is None:
        # c_h^2 = E|s (q - r)| / E|k - kbar|, where k - kbar = (1 - b) kd.
        reach = (scale * at.gap).norm(dim=-1)
        spread = torch.where(
            at.strengths.live, (at.strengths.log_keep + 0.5 * at.rho2.clamp(min=1e-30).log()).exp(), 0.0
        )
        reach, spread = (at.pick(x).mean(0).view(points.forget.shape) for x in (reach, spread))
        log_balance = 0.5 * (reach.clamp(min=1e-12) / spread.clamp(min=1e-12)).log()
    zero = torch.zeros((), dtype=at.rho2.dtype, device=at.rho2.device)
    out = []
    for erase in erases:
        balance = log_balance.flatten().exp() * erase**0.5
        log_decay, beta, gain = delta_arguments(at.strengths, zero, zero, at.rho2, balance)
        query = scale * at.gap / balance[:, None]
        o, _ = gated_delta(query, at.keys, at.values, log_decay, beta, gain=gain, scale=1.0, cu_seqlens=at.cu_seqlens)
        out.append(at.pick(o).unflatten(1, points.forget.shape))
    return torch.stack(out, 3).flatten(2, 3), log_balance


class GDN(CentredMixer):
    """The gated delta rule on centred, balanced keys, with the zeroth-order readout of derivation.md §6.

    Own parameters beyond :class:`CentredMixer`'s, fp32, H query heads; its gates are log decay exponent (Wa) and erase
    (Wb): log_balance [H], log c_h; read_state [H], rho_A.
    """

    kind = "gdn"
    memory_gates = 2
    operator = staticmethod(centred_gated_delta)
    stepper = staticmethod(centred_gated_delta_step)
    dense_keys = True

    def __init__(self, shape: HeadShape, *, taps: int = 4, time_scales: int = 3):
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.log_balance = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.read_state = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The plain expansion: r = 0, lambda = .9999, c_h = 1, o = vbar + S^T q', no other term."""
        super().reset_parameters()
        init.zeros_(self.log_balance)
        init.ones_(self.read_state)

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
        self.adopt_fit(fit)
        erase = torch.tensor(ERASES, device=fit.knob.device)[fit.knob]
        self.log_balance.copy_(fit.measured + 0.5 * erase.log())
        self.read_state.copy_(fit.memory)
        return fit.ladder

    def query(self, gap: Tensor, scale: float) -> Tensor:
        """rho_A s (q - r) / c_h."""
        return gap * (self.read_state / self.log_balance.exp() * scale)[:, None]

    def arguments(
        self,
        gap: Tensor,
        k: Tensor,
        v: Tensor,
        writes: tuple[Tensor, Tensor],
        gates: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, ...]:
        return self.query(gap, scale).to(k.dtype), k, v, *writes, *gates, self.log_balance
