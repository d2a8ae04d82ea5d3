"""Test-time training: a small inner model of v given k, trained by one step a token while it reads (derivation.md §7).

The inner model is ``f(x) = phi(x) W``: a hidden layer whose weights are learned with all others and a last layer W that
is the state. One gradient step on ``|v_t - f(k_t)|^2 / 2`` changes W by an outer product, so that W is linear attention
in phi-space with the errors as values: a delta rule, exactly. As in every derived mixer keys and values are centred and
the query's gap to its reference stands for the mean key; without hidden units this is the gated delta rule of §4.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from linearize_kernels import gated_delta
from linearize_kernels.reference import ChunkLayout, compute_dtype, expand_heads
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Sample
from linearize.mixers.centred import Centred, CentredMixer
from linearize.mixers.fit import Points, centred_at, choosing, fit_readout
from linearize.mixers.gdn import ERASES, delta_arguments, erased_terms

WEIGHTS = (0.1, 0.3, 1.0)  # size of all hidden units beside the linear features; at 0 nothing would train them
SHARES = (0.0, 0.5, 1.0)  # of the read that goes to the average of the memory
SEARCH = (0.3, 0.3, 0.0)  # erase, weight and share while reference and forgetting are chosen
MOMENTUM = 0.9  # theta at the start


def features(x: Tensor, hidden: Tensor, threshold: Tensor, weight: Tensor | float) -> Tensor:
    """``phi(x) = [x ; g relu(Theta x - tau |x|)]``, the inner model up to its last layer.

    x: [B, T, H, K]. hidden: [H, m, K] = Theta, threshold: [H, m] = tau, weight: [H] = g or one number. Returns
    [B, T, H, K + m] in x's dtype. The thresholds go with |x|, so that phi(c x) = c phi(x) for c > 0: the balance of q
    and k (§4) stays a scale, and no threshold depends on it.
    """
    wide = x.to(hidden.dtype)
    unit = torch.einsum("bthk,hmk->bthm", wide, hidden) - threshold * wide.norm(dim=-1, keepdim=True)
    scale = torch.as_tensor(weight, dtype=hidden.dtype, device=hidden.device)[..., None]
    return torch.cat([wide, scale * unit.relu()], -1).to(x.dtype)


def threshold_of(key_dim: int) -> float:
    """tau at the start: the typical size of a unit vector's projection on another."""
    return key_dim**-0.5


def size_of(hidden: Tensor) -> float:
    """g with which all hidden units of directions [H, m, K] together are about as large as the linear features."""
    width, dim = hidden.shape[1:]
    return (dim / max(width, 1)) ** 0.5


def landmarks(samples: Sequence[Sample], width: int) -> Tensor:
    """Directions that a head's text has: centred queries and keys of evenly spaced tokens, of unit length [H, m, K]."""

    def pick(rows: Tensor, count: int) -> Tensor:
        rows = rows.float()
        return (rows - rows.mean(0))[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]

    queries = torch.cat([at.q[at.real] for at in samples])
    keys = torch.cat([at.k[at.real] for at in samples])
    group = queries.shape[1] // keys.shape[1]
    half = width // 2
    rows = torch.cat([pick(queries, width - half), pick(keys, half).repeat_interleave(group, 1)])
    return F.normalize(rows.transpose(0, 1), dim=-1)


def averaged_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    gain: Tensor,
    log_momentum: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The gated delta rule with momentum (derivation.md §7), in chunks of 64 tokens.

        W <- exp(log_decay) W;   y = gain v - beta W^T k;   W <- W + k y^T;   A <- theta A + (1 - theta) W

    A moves with momentum: its steps are ``M_t = theta M_{t-1} + (1 - theta) k_t y_t^T`` with the error y taken where
    the momentum leads, at ``W = A + theta / (1 - theta) M``. Taken at A, as in heavy-ball momentum, the error would not
    know of the steps under way, and a few repeats of one key overshoot without bound; W contracts as without momentum.
    Read at A, token i has the effective value ``y_i sum_{j=i..t} (1 - theta_j) prod_{s=j+1..t} theta_s``.

    q: [B, T, Hq, K], k: [B, T, Hk, K], v: [B, T, Hv, V]; log_decay, beta, gain and log_momentum = log theta: [B, T, H];
    where log_momentum is 0, A stays. initial_state: (W, A), each [B, H, K, V], [S, H, K, V] packed, or None for zeros.
    Returns W_t^T q_t and A_t^T q_t, [B, T, H, V] in q's dtype, and the final (W, A). Torch on every device.
    """
    dtype, heads = compute_dtype(q), gain.shape[2]
    plan = ChunkLayout(q.shape[0], q.shape[1], cu_seqlens, q.device)
    with torch.autocast(q.device.type, enabled=False):
        queries, keys, values = (expand_heads(plan.split(x).to(dtype), heads, 1) for x in (q, k, v))
        erase, write = (plan.split(x).to(dtype)[..., None] for x in (beta, gain))
        decayed, reach = _between(plan.split(log_decay).double(), dtype)
        kept, kept_reach = _between(plan.split(log_momentum).double(), dtype)
        # kept[t, j] (1 - theta_j): what A_t holds of W_j. Padding at the end of a chunk has theta = 1.
        share = kept * -torch.expm1(plan.split(log_momentum).double()).to(dtype)[..., None, :]
        averaged, averaged_reach = share @ decayed, share @ reach
        lower = erase * (keys @ keys.mT * decayed).tril(-1)
        identity = torch.eye(lower.shape[-1], dtype=dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        written, erased = inverse @ (write * values), inverse @ (erase * reach * keys)

        def step(state: Tensor, late: Tensor, late_keys: Tensor, written: Tensor, erased: Tensor) -> Tensor:
            memory, average = state.chunk(2, -2)
            y = written - erased @ memory
            fresh = late_keys.mT @ y
            carried, moved, kept = late[..., None, None].unbind(2)
            return torch.cat([carried * memory, moved * memory + kept * average], -2) + fresh

        late = torch.stack([x[..., -1, 0] for x in (reach, averaged_reach, kept_reach)], -1)
        late_keys = torch.cat([keys * m[..., -1, :, None] for m in (decayed, averaged)], -1)
        state = keys.new_zeros(plan.sequences, heads, 2 * k.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = torch.cat(initial_state, -2).to(dtype)
        entering, final = plan.scan(state, step, late, late_keys, written, erased)
        memory, average = entering.chunk(2, -2)
        y = written - erased @ memory
        scores = queries @ keys.mT
        of_memory, of_average = queries @ memory, queries @ average
        o = reach * of_memory + (scores * decayed) @ y
        o_average = averaged_reach * of_memory + kept_reach * of_average + (scores * averaged) @ y
    return plan.merge(o).to(q.dtype), plan.merge(o_average).to(q.dtype), final.chunk(2, -2)


def _between(log_factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Products of the factors after s up to t, 0 for s > t, [..., C, C]; and of all up to t, [..., C, 1]."""
    total = log_factor.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: above the diagonal the exponent is unbounded.
    weights = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).to(dtype).exp()
    return weights, total.to(dtype).exp()[..., None]


def trained_terms(
    scale: float,
    hidden: Tensor,
    sample: Sample,
    points: Points,
    knobs: Sequence[tuple[float, float, float]],
    log_balance: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What the inner model answers at every point and (erase scale, weight, share), a :data:`fit.Memory`.

    hidden: [H, m, K]. log_balance: [H, P] as :func:`linearize.mixers.gdn.erased_terms` measures it, or None.
    """
    if log_balance is None:
        _, log_balance = erased_terms(scale, sample, points, (1.0,), None)
    at = centred_at(sample, points, scale)
    shape = points.forget.shape
    hidden = hidden.repeat_interleave(shape[1], 0)
    threshold, size = torch.full_like(hidden[..., 0], threshold_of(hidden.shape[-1])), size_of(hidden)
    zero = torch.zeros((), dtype=at.rho2.dtype, device=at.rho2.device)
    reads: dict[tuple[float, float], tuple[Tensor, Tensor]] = {}
    moves = any(share for *_, share in knobs)
    out = []
    for erase, weight, share in knobs:
        if (erase, weight) not in reads:
            keys, gap = (features(x, hidden, threshold, weight * size) for x in (at.keys, at.gap))
            balance = log_balance.flatten().exp() * erase**0.5
            gates = delta_arguments(at.strengths, zero, zero, keys.square().sum(-1), balance)
            query = gap * (scale / balance[:, None])
            if moves:
                kept = momentum_of(at.strengths.live, zero + math.log(MOMENTUM))
                of_memory, of_average, _ = averaged_delta(
                    query, keys, at.values, *gates, kept, cu_seqlens=at.cu_seqlens
                )
            else:
                log_decay, beta, gain = gates
                of_memory, _ = gated_delta(
                    query, keys, at.values, log_decay, beta, gain=gain, scale=1.0, cu_seqlens=at.cu_seqlens
                )
                of_average = of_memory
            reads[erase, weight] = of_memory, of_average
        out.append(at.pick(torch.lerp(*reads[erase, weight], share)).unflatten(1, shape))
    return torch.stack(out, 3).flatten(2, 3), log_balance


def momentum_of(live: Tensor, log_momentum: Tensor) -> Tensor:
    """log theta per token: 0, which changes nothing, where there is no token or none before it."""
    return torch.where(live, log_momentum, torch.zeros_like(log_momentum))


class TTT(CentredMixer):
    """The gated delta rule in the feature space of an inner model with one hidden layer.

    The step on token t has the length of derivation.md §4, that is, it is the exact minimiser of the squared error at
    rate ``b_t r_t`` plus the squared change of W; ``(1 - b_t)^e`` is the weight decay before it.

    Options beyond :class:`CentredMixer`'s: ``ttt_width``, hidden units m; ``ttt_momentum``, whether A of
    :func:`averaged_delta` is kept and read as well as W.

    Own parameters beyond :class:`CentredMixer`'s, fp32, H query heads; its gates are log decay exponent (log e) and
    erase (log r): log_balance [H], log c_h; read_state [H], rho_A; hidden [H, m, K] (Theta), threshold [H, m] (tau) and
    weight [H] (g) of :func:`features`; with momentum also momentum [H], the logit of theta, and share [H], the part of
    the read that goes to A.
    """

    kind = "ttt"
    memory_gates = 2

    def __init__(
        self,
        shape: HeadShape,
        *,
        taps: int = 4,
        time_scales: int = 3,
        ttt_width: int = 32,
        ttt_momentum: bool = False,
    ):
        if ttt_width < 0:
            raise ValueError(f"ttt needs ttt_width >= 0, got {ttt_width}")
        super().__init__(shape, taps=taps, time_scales=time_scales)
        self.width, self.moves = ttt_width, ttt_momentum
        heads, f32 = shape.q_heads, torch.float32
        self.log_balance = nn.Parameter(torch.empty(heads, dtype=f32))
        self.read_state = nn.Parameter(torch.empty(heads, dtype=f32))
        self.hidden = nn.Parameter(torch.empty(heads, ttt_width, shape.key_dim, dtype=f32))
        self.threshold = nn.Parameter(torch.empty(heads, ttt_width, dtype=f32))
        self.weight = nn.Parameter(torch.empty(heads, dtype=f32))
        if ttt_momentum:
            self.momentum = nn.Parameter(torch.empty(heads, dtype=f32))
            self.share = nn.Parameter(torch.empty(heads, dtype=f32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of the gated delta rule: hidden units in random directions, without weight and without momentum."""
        super().reset_parameters()
        init.zeros_(self.log_balance)
        init.ones_(self.read_state)
        draw = torch.randn(self.hidden.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        init.copy_(self.hidden, F.normalize(draw, dim=-1))
        init.constant_(self.threshold, threshold_of(self.shape.key_dim))
        init.zeros_(self.weight)
        if self.moves:
            init.constant_(self.momentum, math.log(MOMENTUM / (1 - MOMENTUM)))
            init.zeros_(self.share)

    @classmethod
    def state_bytes(
        cls,
        shape: HeadShape,
        tokens: int = 0,
        *,
        taps: int = 4,
        time_scales: int = 3,
        ttt_width: int = 32,
        ttt_momentum: bool = False,
    ) -> int:
        linear = super().state_bytes(shape, taps=taps, time_scales=time_scales)
        rows = (1 + ttt_momentum) * (shape.key_dim + ttt_width) - shape.key_dim
        return linear + 4 * shape.q_heads * rows * shape.value_dim

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Choose r, forgetting, erase scale, the hidden units' weight, share and time scales; fit the readout (§6).

        The hidden units point where the text's queries and keys do. The rungs "linear" and "mlp" are as derived without
        and with hidden units. Gate weights stay zero (§5).
        """
        hidden = landmarks(choosing(samples, select), self.width)
        weights, shares = WEIGHTS if self.width else WEIGHTS[:1], SHARES if self.moves else SHARES[:1]
        knobs = list(itertools.product(ERASES, weights, shares))
        fit = fit_readout(
            samples,
            scale,
            select,
            partial(trained_terms, scale, hidden),
            taps=self.taps,
            time_scales=self.time_scales,
            knobs=knobs,
            search=SEARCH,
            derived={"linear": (1.0, 0.0, 0.0), "mlp": (1.0, 1.0, 0.0)},
        )
        self.adopt_fit(fit)
        erase, weight, share = torch.tensor(knobs, device=fit.knob.device)[fit.knob].T
        self.log_balance.copy_(fit.measured + 0.5 * erase.log())
        self.read_state.copy_(fit.memory)
        self.hidden.copy_(hidden)
        self.weight.copy_(weight * size_of(hidden))
        if self.moves:
            self.share.copy_(share)
        return fit.ladder

    def remember(
        self, at: Centred, gates: list[Tensor], scale: float, old: dict[str, Tensor], output_state: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        balance = self.log_balance.exp()
        keys, gap = (features(x, self.hidden, self.threshold, self.weight) for x in (at.keys, at.gap))
        rho2 = keys.to(balance.dtype).square().sum(-1)
        log_decay, beta, gain = delta_arguments(at.strengths, *gates, rho2, balance)
        query = (gap * (self.read_state / balance * scale)[:, None]).to(keys.dtype)
        if not self.moves:
            o, memory = gated_delta(
                query,
                keys,
                at.values,
                log_decay,
                beta,
                gain=gain,
                scale=1.0,
                initial_state=old.get("memory"),
                output_final_state=output_state,
                cu_seqlens=at.cu_seqlens,
                add_to=at.base,
            )
            return o, {"memory": memory}
        of_memory, of_average, (memory, average) = averaged_delta(
            query,
            keys,
            at.values,
            log_decay,
            beta,
            gain,
            momentum_of(at.strengths.live, F.logsigmoid(self.momentum)),
            initial_state=(old["memory"], old["average"]) if old else None,
            cu_seqlens=at.cu_seqlens,
        )
        o = torch.lerp(of_memory.to(self.share.dtype), of_average.to(self.share.dtype), self.share[:, None])
        return o + at.base, {"memory": memory, "average": average}
