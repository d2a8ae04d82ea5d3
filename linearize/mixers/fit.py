"""Closed-form start values: least squares of a mixer's terms on the teacher's head outputs (derivation.md §6).

Everything is least squares on inner products. Per head, the Gram matrix of candidate terms (running means at each tilt
and forgetting, first-order terms, local taps, the sink) and its products with the teacher's head output are accumulated
over a few thousand tokens; choosing terms and fitting their coefficients is then small algebra.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from linearize_kernels import centre, log_norm, running_mean
from torch import Tensor

from linearize.mixers.attended import attend, document_starts
from linearize.mixers.base import Sample
from linearize.mixers.expansion import (
    Layout,
    Strengths,
    first_value,
    forget_logit,
    forgetting,
    local_taps,
    mask_write,
    strengths,
    tilt,
)

TILTS = (0.0, 0.5, 1.0)  # multiples of the head's mean query taken as reference
DECAYS = (0.9999, 0.998, 0.99, 0.97, 0.9, 0.7)
FIRST_ORDER_TILTS = (0.0, 1.0)  # the first-order term is dearer than a mean, so its grid is coarser
FIRST_ORDER_DECAYS = (0.9999, 0.99, 0.97, 0.9)
RIDGE = 1e-4  # of each term's mean square: terms are often nearly collinear

# memory(sample, points, knobs, measured) -> (terms, measured): what a mixer's memory reads at the N real tokens of a
# sample, terms [N, H, P*E, V], for every one of the P points of a head and E values of the mixer's own knob, knob
# fastest. measured [H, P, ...] are sizes the mixer needs, taken from the sample if None; a size and not a fit, so that
# one batch tells it well.
Memory = Callable[[Sample, "Points", Sequence[Any], Tensor | None], tuple[Tensor, Tensor]]


class Moments:
    """Per-head inner products of terms, in fp64, kept apart for a fitting and a held-out half."""

    def __init__(self):
        self.gram: list[Tensor | float] = [0.0, 0.0]
        self.cross: list[Tensor | float] = [0.0, 0.0]
        self.power: list[Tensor | float] = [0.0, 0.0]

    def add(self, terms: Tensor, target: Tensor, half: int) -> None:
        """terms: [N, H, F, V], target: [N, H, V]."""
        rows = terms.permute(1, 2, 0, 3).flatten(2)  # copied once; an einsum would copy it for each operand
        self.gram[half] = self.gram[half] + (rows @ rows.mT).double()
        column = target.transpose(0, 1).flatten(1)[..., None]
        self.cross[half] = self.cross[half] + (rows @ column)[..., 0].double()
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

    def relative(self, index: Tensor, coefficients: Tensor) -> Tensor:
        """Held-out RMS error over RMS target, [..., H]."""
        return (self.error(index, coefficients) / self.power[1].clamp(min=1e-30)).sqrt()


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


@dataclass
class CentredAt:
    """A sample centred at every point of every head, as the kernels take it; R = H*P recurrence heads, point fastest.

    gap: [B, T, R, K], q - r. keys: [B, T, R, K], values: [B, T, R, V], minus their running means before each token.
    mean: [B, T, R, V], of the values. rho2: [B, T, R], |keys|^2. log_write, log_forget, log_z: [B, T, R], of
    the running means.
    """

    gap: Tensor
    keys: Tensor
    values: Tensor
    mean: Tensor
    rho2: Tensor
    log_write: Tensor
    log_forget: Tensor
    log_z: Tensor
    strengths: Strengths
    layout: Layout
    real: Tensor

    @property
    def cu_seqlens(self) -> Tensor | None:
        return self.layout.cu_seqlens

    def pick(self, x: Tensor) -> Tensor:
        """The rows of the N real tokens, [B, T, R, ...] packed -> [N, R, ...]."""
        return self.layout.unpack(x)[self.real]


def centred_at(sample: Sample, points: Points, scale: float) -> CentredAt:
    """Running means, centred keys and values and write strengths of a sample at every point (derivation.md §2)."""
    layout = Layout.of(sample.q, sample.segments)
    write, forget = points.weights(sample, layout, scale)
    log_z = log_norm(write, forget, cu_seqlens=layout.cu_seqlens)
    keys, values, mean, rho2, _ = centre(
        layout.pack(sample.k), layout.pack(sample.v), write, forget, log_z, cu_seqlens=layout.cu_seqlens
    )
    gap = layout.pack((sample.q[:, :, :, None] - points.reference).flatten(2, 3))
    at = strengths(write, forget, log_z, layout, None)
    return CentredAt(gap, keys, values, mean, rho2, write, forget, log_z, at, layout, sample.real)


def attended_keys(sample: Sample, scale: float) -> Tensor:
    """sum_i a_i k_i of the softmax attention, the K=V attention of derivation.md §7; [N, H, K] at the real tokens."""
    return mean_keys(sample, scale)[sample.real]


def mean_keys(sample: Sample, scale: float) -> Tensor:
    """The same at every token, [B, T, H, K]; finite and meaningless on padding."""
    real = sample.segments.mask
    keys = sample.k if real is None else torch.where(real[..., None, None], sample.k, 0)
    return attend(sample.q, keys, scale, real=real, first=document_starts(sample.segments.reset))


def mean_queries(samples: Iterable[Sample]) -> Tensor:
    """Mean query of every head [H, K] over the real tokens."""
    total, count = 0.0, 0
    for sample in samples:
        real = sample.q[sample.real]
        total, count = total + real.sum(0), count + len(real)
    return total / count


@dataclass
class Fit:
    """What :func:`fit_readout` chose and fitted, per head."""

    reference: Tensor  # [H, K]: r
    forget: Tensor  # [H]: forgetting logit
    knob: Tensor  # [H]: index of the mixer's knob
    measured: Tensor  # [H, ...]: what the memory measured at r and the forgetting
    mean: Tensor  # [H]: rho_v
    memory: Tensor  # [H]: rho_A
    taps: Tensor  # [J, H]
    sink: Tensor  # [H]
    scales: Tensor  # [H, M]
    scale_points: Points  # M of them
    ladder: dict[str, list[float]]


def choosing(samples: list[Sample], select: int) -> list[Sample]:
    """The samples that choose and fit: the first ``select``, at least 2, every second one held out."""
    chosen = samples[: max(2, select)]
    if len(chosen) < 2:
        raise ValueError("calibration needs at least two batches: one to fit, one held out")
    return chosen


def fit_readout(
    samples: list[Sample],
    scale: float,
    select: int,
    memory: Memory,
    *,
    taps: int,
    time_scales: int,
    knobs: Sequence[Any],
    search: Any,
    derived: Mapping[str, Any],
) -> Fit:
    """Choose and fit the readout ``rho_v vbar + rho_A memory + taps + sink + time scales`` of §6, head by head.

    Chosen by held-out error: the reference and the forgetting, with the knob at ``search`` and the readout {mean,
    memory, taps, sink}; then the knob, out of ``knobs``; then the time scales, one after another, that lower the error
    most. All coefficients then come from one ridge fit on all the samples that chose.

    The ladder, per head on the held-out samples: mean, the plain running mean; one rung for each of ``derived`` (name:
    knob), mean and memory as derived (r = 0, no forgetting); tilted, with chosen r, forgetting and knob; readout, with
    two least-squares scalars; full, with taps, sink and time scales.
    """
    chosen_from = choosing(samples, select)
    mean_query = mean_queries(samples)
    heads, device = len(mean_query), mean_query.device
    everywhere = Points.grid(mean_query, TILTS, DECAYS)
    coarse = Points.grid(mean_query, FIRST_ORDER_TILTS, FIRST_ORDER_DECAYS)
    pairs, grid = coarse.forget.shape[1], everywhere.forget.shape[1]
    # Where each coarse point stands in the full grid.
    at = [TILTS.index(t) * len(DECAYS) + DECAYS.index(d) for t in FIRST_ORDER_TILTS for d in FIRST_ORDER_DECAYS]
    means = torch.tensor(at, device=device)
    local = torch.arange(grid, grid + taps + 1, device=device)
    first = grid + taps + 1
    every_head = torch.arange(heads, device=device)

    def trials(index: Tensor) -> Tensor:
        """[C, S] -> [C, H, S]: the same trial for every head."""
        return index[:, None].expand(-1, heads, -1)

    moments, zeroth, measured = Moments(), [], None
    for i, sample in enumerate(chosen_from):
        terms = torch.cat([mean_terms(sample, everywhere, scale), local_terms(sample, taps)], 2)
        states, measured = memory(sample, coarse, (search,), measured)
        zeroth.append(terms)
        moments.add(torch.cat([terms, states], 2), sample.heads[sample.real], i % 2)
    index = torch.arange(pairs, device=device)
    choice = trials(torch.cat([means[:, None], (first + index)[:, None], local.expand(pairs, -1)], 1))
    best = moments.error(choice, moments.fit(choice)).argmin(0)  # [H]

    point, measured = coarse.take(best[:, None]), measured[every_head, best][:, None]
    plain = Points.grid(mean_query, (0.0,), (DECAYS[0],))
    moments, plain_measured = Moments(), None
    for i, sample in enumerate(chosen_from):
        states, _ = memory(sample, point, knobs, measured)
        as_derived, plain_measured = memory(sample, plain, tuple(derived.values()), plain_measured)
        moments.add(torch.cat([zeroth[i], states, as_derived], 2), sample.heads[sample.real], i % 2)
    main = means[best]
    choice = torch.stack(
        [
            torch.cat([main[:, None], main.new_full((heads, 1), first + e), local.expand(heads, -1)], 1)
            for e in range(len(knobs))
        ]
    )
    knob = moments.error(choice, moments.fit(choice)).argmin(0)
    chosen = choice[knob, every_head]  # [H, 2 + J + 1]
    for _ in range(time_scales):
        extra = trials(torch.arange(grid, device=device)[:, None])
        trial = torch.cat([chosen.expand(grid, -1, -1), extra], -1)
        error = moments.error(trial, moments.fit(trial))
        # A mean that is already in the readout adds nothing but a singular matrix.
        error = error.masked_fill((extra == chosen).any(-1), float("inf"))
        chosen = torch.cat([chosen, error.argmin(0)[:, None]], -1)

    zero = torch.zeros(heads, 1, dtype=torch.long, device=device)
    one = torch.ones(heads, 2, dtype=torch.float64, device=device)
    two = chosen[:, :2]
    rungs = {"mean": moments.relative(zero, one[:, :1])}
    for e, name in enumerate(derived):
        rungs[name] = moments.relative(torch.cat([zero, zero + first + len(knobs) + e], 1), one)
    rungs["tilted"] = moments.relative(two, one)
    rungs["readout"] = moments.relative(two, moments.fit(two))
    rungs["full"] = moments.relative(chosen, moments.fit(chosen))
    fitted = moments.fit(chosen, both=True)
    return Fit(
        reference=point.reference[:, 0],
        forget=point.forget[:, 0],
        knob=knob,
        measured=measured[:, 0],
        mean=fitted[:, 0],
        memory=fitted[:, 1],
        taps=fitted[:, 2 : 2 + taps].T,
        sink=fitted[:, 2 + taps],
        scales=fitted[:, 3 + taps :],
        scale_points=everywhere.take(chosen[:, 3 + taps :]),
        ladder={name: error.tolist() for name, error in rungs.items()},
    )
