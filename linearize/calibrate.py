"""Stage 0: start values of a mixer from the teacher's own q, k, v and outputs, in closed form (derivation.md §6).

Everything is least squares on inner products. Per head, the Gram matrix of candidate terms (running means at each
tilt and forgetting, first-order terms, local taps, the sink) and its products with the teacher's head output are
accumulated over a few thousand tokens; choosing terms and fitting their coefficients is then small algebra. Last, the
output projection is refitted by ridge regression, shrunk towards the teacher's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from linearize_kernels import centre, gated_delta, log_norm, running_mean
from torch import Tensor, nn

from linearize.mixers.base import MixedAttention, Segments
from linearize.mixers.expansion import (
    Layout,
    first_value,
    forget_logit,
    forgetting,
    local_taps,
    mask_write,
    strengths,
    tilt,
)
from linearize.mixers.gdn import GDN, delta_arguments

TILTS = (0.0, 0.5, 1.0)  # multiples of the head's mean query taken as reference
DECAYS = (0.9999, 0.998, 0.99, 0.97, 0.9, 0.7)
FIRST_ORDER_TILTS = (0.0, 1.0)  # the first-order term is dearer than a mean, so its grid is coarser
FIRST_ORDER_DECAYS = (0.9999, 0.99, 0.97, 0.9)
ERASES = (0.01, 0.3, 1.0)  # c_h^2 as a multiple of the balanced value; near 0 is VaLA, 1 is GDN
SEARCH_ERASE = 0.3  # while tilt and forgetting are chosen
RIDGE = 1e-4  # of each term's mean square: terms are often nearly collinear
OUTPUT_RIDGE = 0.1  # of the mean square of the head outputs, pulling the output projection to the teacher's


@dataclass
class Sample:
    """One batch of calibration text at one layer.

    x: [B, T, hidden] normed input, q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, Hk, V]: the student's, on the student's
    hidden states. heads [B, T, Hq, V] and output [B, T, hidden]: the teacher's head outputs and attention output on
    the same tokens and the teacher's hidden states.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    output: Tensor
    segments: Segments

    @property
    def real(self) -> Tensor:
        """[B, T] bool, True on real tokens."""
        mask = self.segments.mask
        return torch.ones(self.q.shape[:2], dtype=torch.bool, device=self.q.device) if mask is None else mask.bool()


@dataclass
class Ladder:
    """Relative RMS error of the head outputs on held-out tokens, pooled over heads, rung by rung.

    mean: plain running mean; vala, gdn: as derived (r = 0, no forgetting); tilted: chosen r, lambda and erase scale;
    readout: with two least-squares scalars; full: with taps, sink and time scales; output: relative error of the
    attention output after the refitted projection, on the tokens it was fitted on.
    """

    mean: float
    vala: float
    gdn: float
    tilted: float
    readout: float
    full: float
    output: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


class Moments:
    """Per-head inner products of terms, in fp64, kept apart for a fitting and a held-out half."""

    def __init__(self):
        self.gram: list[Tensor | float] = [0.0, 0.0]
        self.cross: list[Tensor | float] = [0.0, 0.0]
        self.power: list[Tensor | float] = [0.0, 0.0]

    def add(self, terms: Tensor, target: Tensor, half: int) -> None:
        """terms: [N, H, F, V], target: [N, H, V]."""
        self.gram[half] = self.gram[half] + torch.einsum("nhfv,nhgv->hfg", terms, terms).double()
        self.cross[half] = self.cross[half] + torch.einsum("nhfv,nhv->hf", terms, target).double()
        self.power[half] = self.power[half] + target.square().sum((0, 2)).double()

    def fit(self, index: Tensor, *, both: bool = False) -> Tensor:
        """Ridge coefficients [..., H, S] of the terms ``index`` [..., H, S], from the fitting half or from both."""
        gram = self.gram[0] + self.gram[1] if both else self.gram[0]
        cross = self.cross[0] + self.cross[1] if both else self.cross[0]
        gram, cross = _sub_matrix(gram, index), _sub_vector(cross, index)
        # To unit diagonal before solving: the terms' sizes differ by orders of magnitude.
        size = gram.diagonal(dim1=-2, dim2=-1).clamp(min=1e-30).sqrt()
        unit = gram / size[..., :, None] / size[..., None, :]
        unit = unit + RIDGE * torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
        return torch.linalg.solve(unit, cross / size) / size

    def error(self, index: Tensor, coefficients: Tensor) -> Tensor:
        """Squared held-out error [..., H] of fixed coefficients."""
        gram, cross = _sub_matrix(self.gram[1], index), _sub_vector(self.cross[1], index)
        quadratic = torch.einsum("...f,...fg,...g->...", coefficients, gram, coefficients)
        return (quadratic - 2 * (coefficients * cross).sum(-1) + self.power[1]).clamp(min=0)

    def relative(self, index: Tensor, coefficients: Tensor) -> float:
        """Held-out RMS error over RMS target, pooled over heads."""
        return float((self.error(index, coefficients).sum() / self.power[1].sum().clamp(min=1e-30)).sqrt())


def _sub_matrix(gram: Tensor, index: Tensor) -> Tensor:
    """[H, F, F], [..., H, S] -> [..., H, S, S]."""
    heads = torch.arange(gram.shape[0], device=gram.device)[:, None, None]
    return gram[heads, index[..., :, None], index[..., None, :]]


def _sub_vector(cross: Tensor, index: Tensor) -> Tensor:
    """[H, F], [..., H, S] -> [..., H, S]."""
    return cross[torch.arange(cross.shape[0], device=cross.device)[:, None], index]


@dataclass
class Points:
    """Expansion points of every head: P pairs of a reference query and a forgetting logit."""

    reference: Tensor  # [H, P, K]
    forget: Tensor  # [H, P]

    @classmethod
    def grid(cls, mean_query: Tensor, tilts: Sequence[float], decays: Sequence[float]) -> "Points":
        """Every tilt of the mean query [H, K] with every decay, decay fastest."""
        reference = torch.stack([mean_query * t for t in tilts], 1).repeat_interleave(len(decays), 1)
        forget = torch.tensor([forget_logit(d) for d in decays], device=mean_query.device)
        return cls(reference, forget.repeat(len(tilts)).expand(reference.shape[:2]))

    def take(self, index: Tensor) -> "Points":
        """The points ``index`` [H, S] of each head."""
        head = torch.arange(len(index), device=index.device)[:, None]
        return Points(self.reference[head, index], self.forget[head, index])

    def weights(self, sample: Sample, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        """Log write weight and log forgetting, [B, T, H*P] packed, point fastest."""
        write = tilt(sample.k, self.reference.flatten(0, 1), scale)
        forget = forgetting(self.forget).flatten().expand_as(write)
        write, forget = mask_write(write, forget, sample.segments.mask)
        return layout.pack(write), layout.pack(forget)


def mean_terms(sample: Sample, points: Points, scale: float) -> Tensor:
    """Running means of the values at every point, [N, H, P, V] at the N real tokens (derivation.md §2)."""
    layout = Layout.of(sample.q, sample.segments)
    write, forget = points.weights(sample, layout, scale)
    log_z = log_norm(write, forget, cu_seqlens=layout.cu_seqlens)
    mean, _ = running_mean(layout.pack(sample.v), write, forget, log_z, cu_seqlens=layout.cu_seqlens)
    return layout.unpack(mean)[sample.real].unflatten(1, points.forget.shape)


def local_terms(sample: Sample, taps: int) -> Tensor:
    """v_t .. v_{t-J+1} and the first value, [N, H, J+1, V]."""
    layout = Layout.of(sample.q, sample.segments)
    shifted, _ = local_taps(sample.v, torch.empty(taps), layout, sample.segments.mask, None)
    sink, _ = first_value(sample.v, layout, sample.segments.mask, None, None)
    terms = torch.stack([*shifted, sink.expand_as(sample.v)], 3)[sample.real]
    return terms.repeat_interleave(sample.q.shape[2] // sample.v.shape[2], 1)


def first_order_terms(
    sample: Sample, points: Points, scale: float, erases: Sequence[float], log_balance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A_t^T q'_t of the gated delta rule at every point and erase scale (derivation.md §4).

    log_balance: [H, P], or None to measure the balanced ``log c_h`` on this batch (a scale and not a fit: one batch
    tells it well). Returns terms [N, H, P*E, V], erase fastest, and log_balance.
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


def mean_queries(samples: Iterable[Sample]) -> Tensor:
    """Mean query of every head [H, K] over the real tokens."""
    total, count = 0.0, 0
    for sample in samples:
        real = sample.q[sample.real]
        total, count = total + real.sum(0), count + len(real)
    return total / count


@torch.no_grad()
def calibrate_gdn(layer: MixedAttention, samples: list[Sample], scale: float, select: int) -> Ladder:
    """Set one layer's start values from its samples and report the error ladder.

    The first ``select`` samples (at least 2; every second one is held out) choose, per head: the reference and the
    forgetting by the held-out error of the readout {mean, first order, taps, sink}; then the erase scale; then the
    time scales, one after another, that lower it most; all coefficients in one ridge fit. The output projection is
    refitted on all samples. Gate weights stay zero (derivation.md §5).
    """
    mixer: GDN = layer.mixer
    chosen_from = samples[: max(2, select)]
    if len(chosen_from) < 2:
        raise ValueError("calibration needs at least two batches: one to fit, one held out")
    mean_query = mean_queries(samples)
    heads, device = len(mean_query), mean_query.device
    everywhere = Points.grid(mean_query, TILTS, DECAYS)
    coarse = Points.grid(mean_query, FIRST_ORDER_TILTS, FIRST_ORDER_DECAYS)
    pairs, grid = coarse.forget.shape[1], everywhere.forget.shape[1]
    # Where each coarse point stands in the full grid.
    at = [TILTS.index(t) * len(DECAYS) + DECAYS.index(d) for t in FIRST_ORDER_TILTS for d in FIRST_ORDER_DECAYS]
    means = torch.tensor(at, device=device)
    local = torch.arange(grid, grid + mixer.taps + 1, device=device)
    first = grid + mixer.taps + 1
    every_head = torch.arange(heads, device=device)

    def trials(index: Tensor) -> Tensor:
        """[C, S] -> [C, H, S]: the same trial for every head."""
        return index[:, None].expand(-1, heads, -1)

    search, zeroth, log_balance = Moments(), [], None
    for i, sample in enumerate(chosen_from):
        terms = torch.cat([mean_terms(sample, everywhere, scale), local_terms(sample, mixer.taps)], 2)
        states, log_balance = first_order_terms(sample, coarse, scale, (SEARCH_ERASE,), log_balance)
        zeroth.append(terms)
        search.add(torch.cat([terms, states], 2), sample.heads[sample.real], i % 2)
    index = torch.arange(pairs, device=device)
    choice = trials(torch.cat([means[:, None], (first + index)[:, None], local.expand(pairs, -1)], 1))
    best = search.error(choice, search.fit(choice)).argmin(0)  # [H]

    point = coarse.take(best[:, None])
    log_balance = log_balance[every_head, best][:, None]
    plain = Points.grid(mean_query, (0.0,), (DECAYS[0],))
    moments, plain_balance = Moments(), None
    for i, sample in enumerate(chosen_from):
        states, _ = first_order_terms(sample, point, scale, ERASES, log_balance)
        derived, plain_balance = first_order_terms(sample, plain, scale, (ERASES[0], 1.0), plain_balance)
        moments.add(torch.cat([zeroth[i], states, derived], 2), sample.heads[sample.real], i % 2)
    main = means[best]
    choice = torch.stack(
        [
            torch.cat([main[:, None], main.new_full((heads, 1), first + e), local.expand(heads, -1)], 1)
            for e in range(len(ERASES))
        ]
    )
    erase = moments.error(choice, moments.fit(choice)).argmin(0)
    chosen = choice[erase, every_head]  # [H, 2 + J + 1]
    for _ in range(mixer.time_scales):
        extra = trials(torch.arange(grid, device=device)[:, None])
        trial = torch.cat([chosen.expand(grid, -1, -1), extra], -1)
        error = moments.error(trial, moments.fit(trial))
        # A mean that is already in the readout adds nothing but a singular matrix.
        error = error.masked_fill((extra == chosen).any(-1), float("inf"))
        chosen = torch.cat([chosen, error.argmin(0)[:, None]], -1)

    fitted = moments.fit(chosen, both=True).to(mixer.read_mean.dtype)
    scales = everywhere.take(chosen[:, 3 + mixer.taps :])
    shift = 0.5 * torch.log(torch.tensor(ERASES, device=device))
    mixer.reference.copy_(point.reference[:, 0])
    mixer.log_balance.copy_(log_balance[:, 0] + shift[erase])
    mixer.gates.bias.view(4, heads)[3].copy_(point.forget[:, 0])
    mixer.read_mean.copy_(fitted[:, 0])
    mixer.read_state.copy_(fitted[:, 1])
    mixer.read_taps.copy_(fitted[:, 2 : 2 + mixer.taps].T)
    mixer.read_sink.copy_(fitted[:, 2 + mixer.taps])
    mixer.read_scales.copy_(fitted[:, 3 + mixer.taps :])
    mixer.scale_reference.copy_(scales.reference)
    mixer.scale_forget.copy_(scales.forget)
    output = refit_output(layer, samples, scale)

    zero = torch.zeros(heads, 1, dtype=torch.long, device=device)
    derived = zero + first + len(ERASES)
    one = torch.ones(heads, 2, dtype=torch.float64, device=device)
    vala, gdn = torch.cat([zero, derived], 1), torch.cat([zero, derived + 1], 1)
    two = chosen[:, :2]
    return Ladder(
        mean=moments.relative(zero, one[:, :1]),
        vala=moments.relative(vala, one),
        gdn=moments.relative(gdn, one),
        tilted=moments.relative(two, one),
        readout=moments.relative(two, moments.fit(two)),
        full=moments.relative(chosen, moments.fit(chosen)),
        output=output,
    )


@torch.no_grad()
def refit_output(layer: MixedAttention, samples: list[Sample], scale: float) -> float:
    """Ridge regression of the teacher's attention output on the mixer's head outputs; replaces o_proj's weight.

    ``W + argmin_D |Y - X (W + D)^T|^2 + mu |D|^2`` with mu = OUTPUT_RIDGE times the mean square of X, so that with no
    evidence the teacher's projection stays. A bias is kept as it is. Returns the relative error of the output.
    """
    projection: nn.Linear = layer.attn.o_proj
    gram = cross = 0.0
    power = error = 0.0
    weight = projection.weight.detach()
    for sample in samples:
        o, _ = layer.mixer(sample.x, sample.q, sample.k, sample.v, scale, segments=sample.segments)
        o = o[sample.real].flatten(1)
        target = sample.output[sample.real]
        residual = target - F.linear(o, weight, projection.bias)
        gram = gram + (o.T @ o).double()
        cross = cross + (o.T @ residual).double()
        error = error + residual.double().square().sum()
        power = power + target.double().square().sum()
    ridge = OUTPUT_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = torch.linalg.solve(gram + ridge, cross)
    projection.weight.add_(change.T.to(weight.dtype))
    error = error - 2 * (change * cross).sum() + (change * (gram @ change)).sum()
    return float((error / power.clamp(min=1e-30)).clamp(min=0).sqrt())
