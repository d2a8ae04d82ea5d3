"""Torch forms of every operator: token-by-token recurrences (the oracle) and chunked forms (the CPU path).

Shapes follow the public functions of `api.py`: q [B,T,Hq,K], k [B,T,Hk,K], v [B,T,Hv,V], per-head scalars [B,T,H],
states [B,H,K,V] ([S,H,K,V] with `cu_seqlens`). Arithmetic is float64 for float64 inputs and float32 otherwise; sums of
logarithms are always float64, so a decay of exp(-30) per token costs no accuracy. Arguments are trusted here; `api.py`
checks them. The recurrences are those of derivation.md §2-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def compute_dtype(x: Tensor) -> torch.dtype:
    """Type of all arithmetic and of the states for inputs like `x`: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def expand_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """Give each of `heads` recurrence heads h the head h // (heads // Hx) of x; Hx = x.shape[dim]. Blocks, not rows."""
    have = x.shape[dim]
    if have == heads:
        return x
    group = heads // have
    shape = list(x.shape)
    x = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], group, *shape[dim + 1 :])
    return x.reshape(*shape[:dim], heads, *shape[dim + 1 :])


# ---------------------------------------------------------------------------------------------------------------------
# Recurrences: one token at a time, as the equations are written.
# ---------------------------------------------------------------------------------------------------------------------


def _by_sequence(cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[tuple[slice, slice]]:
    """(rows, tokens) slices of each independent run of the recurrence; all rows at once when nothing is packed."""
    if cu_seqlens is None:
        return [(slice(0, batch), slice(0, tokens))]
    ends = cu_seqlens.tolist()
    return [(slice(0, 1), slice(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _pick(initial: Tensor | None, index: int, packed: bool) -> Tensor | None:
    return initial if initial is None or not packed else initial[index : index + 1]


def recurrent_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    gain: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S <- exp(log_decay) S; y = gain v - beta S^T k; S <- S + k y^T; o = scale S^T q (+ add_to), token by token.

    Arguments as `api.gated_delta`, with gain and scale given. Returns o [B,T,H,V] in q's dtype and the final state.
    """
    dtype = compute_dtype(q)
    heads = beta.shape[2]
    queries, keys, values = (expand_heads(x, heads, 2).to(dtype) for x in (q, k, v))
    erase, write = beta.to(dtype), gain.to(dtype)
    decay = torch.ones_like(erase) if log_decay is None else log_decay.to(dtype).exp()
    outs, finals = [], []
    for i, (rows, span) in enumerate(_by_sequence(cu_seqlens, q.shape[0], q.shape[1])):
        state = _pick(initial_state, i, cu_seqlens is not None)
        n = rows.stop - rows.start
        state = keys.new_zeros(n, heads, k.shape[-1], v.shape[-1]) if state is None else state.to(dtype)
        for t in range(span.start, span.stop):
            key = keys[rows, t]
            state = decay[rows, t, :, None, None] * state
            read = torch.einsum("bhkv,bhk->bhv", state, key)
            y = write[rows, t, :, None] * values[rows, t] - erase[rows, t, :, None] * read
            state = state + key[..., :, None] * y[..., None, :]
            outs.append(scale * torch.einsum("bhkv,bhk->bhv", state, queries[rows, t]))
        finals.append(state)
    o = torch.stack(outs, 1) if outs else values.new_zeros(q.shape[0], 0, heads, v.shape[-1])
    if add_to is not None:
        o = o + add_to.to(dtype)
    return o.to(q.dtype), torch.cat(finals)


def recurrent_log_norm(
    log_write: Tensor, log_forget: Tensor, initial_log_z: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """log Z_t with Z_t = exp(log_forget_t) Z_{t-1} + exp(log_write_t), token by token (derivation.md §2). [B,T,H]."""
    outs = []
    for i, (rows, span) in enumerate(_by_sequence(cu_seqlens, log_write.shape[0], log_write.shape[1])):
        log_z = _pick(initial_log_z, i, cu_seqlens is not None)
        for t in range(span.start, span.stop):
            write = log_write[rows, t]
            carried = torch.full_like(write, -torch.inf) if log_z is None else log_forget[rows, t] + log_z
            top = torch.maximum(carried, write)
            some = top > -torch.inf
            # The inner where keeps -inf - -inf, and its NaN gradient, out of the graph.
            safe = torch.where(some, top, 0.0).detach()
            total = (torch.where(some, carried, 0.0) - safe).exp() + (torch.where(some, write, 0.0) - safe).exp()
            log_z = torch.where(some, safe + total.log(), -torch.inf)
            outs.append(log_z)
    return torch.stack(outs, 1) if outs else torch.empty_like(log_write)


def recurrent_means(
    x: Tensor, log_write: Tensor, log_z: Tensor, initial_mean: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Running means token by token: mean <- mean + b (x - mean), b = exp(log_write - log_z) (derivation.md §2).

    Returns (centred, mean, final): centred_t = x_t - mean_{t-1}, zero where no token was seen before and no initial
    mean was given; mean [B,T,H,D] including token t; final [B,H,D]. All in `compute_dtype`.
    """
    dtype = compute_dtype(x)
    heads = log_write.shape[2]
    x = expand_heads(x, heads, 2).to(dtype)
    empty = log_z == -torch.inf
    share = torch.where(empty | (log_write == -torch.inf), 0.0, (log_write - log_z.masked_fill(empty, 0.0)).exp())
    share = share.to(dtype)
    centred, means, finals = [], [], []
    for i, (rows, span) in enumerate(_by_sequence(cu_seqlens, x.shape[0], x.shape[1])):
        mean = _pick(initial_mean, i, cu_seqlens is not None)
        seen = torch.full((x.shape[0], heads), mean is not None, device=x.device)[rows]
        mean = x.new_zeros(rows.stop - rows.start, heads, x.shape[-1]) if mean is None else mean.to(dtype)
        for t in range(span.start, span.stop):
            gap = x[rows, t] - mean
            centred.append(torch.where(seen[..., None], gap, 0.0))
            mean = mean + share[rows, t, :, None] * gap
            seen = seen | ~empty[rows, t]
            means.append(mean)
        finals.append(mean)
    none = x.new_zeros(x.shape[0], 0, heads, x.shape[-1])
    if not means:
        return none, none, torch.cat(finals)
    return torch.stack(centred, 1), torch.stack(means, 1), torch.cat(finals)


# ---------------------------------------------------------------------------------------------------------------------
# Chunk layout
# ---------------------------------------------------------------------------------------------------------------------


class ChunkLayout:
    """Cuts a batch, or packed sequences, into chunks that never straddle sequences.

    Chunks are ordered by their number inside the sequence first, then by sequence from the longest to the shortest:
    step j of a scan over chunks touches the contiguous block of `counts[j]` chunks of the first counts[j] sequences in
    this order, and nothing of size S x longest is ever built. `owner` [chunks] is the sequence of each chunk, `last`
    [chunks] its last real row.
    """

    def __init__(self, batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device, chunk: int = CHUNK):
        self.batch, self.tokens, self.packed = batch, tokens, cu_seqlens is not None
        self.chunk = max(1, min(chunk, tokens))
        if cu_seqlens is None:
            steps = -(-tokens // self.chunk)
            self.counts = [batch] * steps
            self.sequences = batch
            self.owner = torch.arange(batch, device=device).repeat(steps)
            self.last = torch.full((steps * batch,), self.chunk - 1, device=device)
            if steps:
                self.last[-batch:] = (tokens - 1) % self.chunk
            return
        starts, ends = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
        lengths = [b - a for a, b in zip(starts, ends, strict=True)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self.sequences = len(lengths)
        self.order = torch.tensor(order, device=device)
        self.inverse_order = torch.argsort(self.order)
        self.counts = []
        owner, first, last = [], [], []
        for j in range(-(-max(lengths, default=0) // self.chunk)):
            alive = [i for i in order if lengths[i] > j * self.chunk]
            self.counts.append(len(alive))
            owner += alive
            first += [starts[i] + j * self.chunk for i in alive]
            last += [ends[i] for i in alive]
        self.owner, first, last = torch.tensor([owner, first, last], dtype=torch.long, device=device)
        self.last = (last - first).clamp(max=self.chunk) - 1
        index = first[:, None] + torch.arange(self.chunk, device=device)
        self.valid = index < last[:, None]
        self.index = index.clamp(max=max(tokens - 1, 0))
        # Position of every token in the flattened chunk layout; tokens outside all sequences do not exist (api.py).
        self.where = torch.empty(tokens, dtype=torch.long, device=device)
        flat = torch.arange(self.valid.numel(), device=device).view_as(self.valid)
        self.where[self.index[self.valid]] = flat[self.valid]

    def split(self, x: Tensor, pad: float = 0.0) -> Tensor:
        """[B,T,H,...] -> [chunks,H,C,...], rows past a sequence's end filled with `pad`."""
        rest = x.shape[3:]
        if self.packed:
            x = x[0][self.index].transpose(1, 2)
            keep = self.valid[:, None].reshape(-1, 1, self.chunk, *(1 for _ in rest))
            return torch.where(keep, x, pad)
        steps = len(self.counts)
        short = steps * self.chunk - self.tokens
        if short:
            x = torch.cat([x, x.new_full((self.batch, short, *x.shape[2:]), pad)], 1)
        x = x.reshape(self.batch, steps, self.chunk, x.shape[2], *rest).transpose(0, 1).transpose(2, 3)
        return x.reshape(steps * self.batch, x.shape[2], self.chunk, *rest)

    def merge(self, x: Tensor) -> Tensor:
        """[chunks,H,C,...] -> [B,T,H,...]."""
        heads, rest = x.shape[1], x.shape[3:]
        if self.packed:
            return x.transpose(1, 2).reshape(-1, heads, *rest)[self.where].unsqueeze(0)
        steps = len(self.counts)
        x = x.reshape(steps, self.batch, heads, self.chunk, *rest).transpose(2, 3).transpose(0, 1)
        return x.reshape(self.batch, steps * self.chunk, heads, *rest)[:, : self.tokens]

    def scan(self, state: Tensor, step, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run state = step(state, *rows of the chunks) over chunks. Returns (states at chunk entry, final states)."""
        state = state[self.order] if self.packed else state
        entering, finals = [], []
        # Split once: slicing inside the loop would zero-fill a whole tensor per step in the backward pass.
        for count, *block in zip(self.counts, *(x.split(self.counts) for x in rows), strict=True):
            if count < state.shape[0]:
                finals.append(state[count:])
                state = state[:count]
            entering.append(state)
            state = step(state, *block)
        final = torch.cat([state, *reversed(finals)])
        if self.packed:
            final = final[self.inverse_order]
        return torch.cat(entering) if entering else state[:0], final


def _weights(log_rows: Tensor, log_columns: Tensor, dtype: torch.dtype, keep: Tensor | None = None) -> Tensor:
    """exp(log_rows_t + log_columns_s) for s <= t, else 0, from float64 logarithms. [...,C] x [...,C] -> [...,C,C]."""
    size = log_rows.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_rows.device).tril()
    if keep is not None:
        lower = lower & keep
    # Masked before the exponential: above the diagonal the exponent is unbounded.
    exponent = torch.where(lower, log_rows[..., :, None] + log_columns[..., None, :], -torch.inf)
    return exponent.to(dtype).exp()


# ---------------------------------------------------------------------------------------------------------------------
# Gated delta rule and linear attention
# ---------------------------------------------------------------------------------------------------------------------


def chunk_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    gain: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    add_to: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The recurrence of `recurrent_gated_delta` in chunks of 64 tokens; beta = None is linear attention (no erase).

    Per chunk, with Gam the decay between two tokens and M = tril(K K^T o Gam, -1):
    (I + diag(beta) M) Y = gain V - beta e (K S), o = e (Q S) + (Q K^T o Gam) Y, S' = gamma S + K^T (eta Y).
    """
    dtype = compute_dtype(q)
    heads = gain.shape[2]
    plan = ChunkLayout(q.shape[0], q.shape[1], cu_seqlens, q.device, chunk)
    with torch.autocast(q.device.type, enabled=False):
        queries, keys, values = (plan.split(x).to(dtype) for x in (q, k, v))
        write = plan.split(gain).to(dtype)[..., None]
        key_heads = keys.shape[1]
        if queries.shape[1] == key_heads:
            scores = expand_heads(queries @ keys.mT, heads, 1)
        else:
            scores = expand_heads(queries, heads, 1) @ expand_heads(keys, heads, 1).mT
        if beta is not None:
            gram = expand_heads(keys @ keys.mT, heads, 1)
        queries, keys, values = (expand_heads(x, heads, 1) for x in (queries, keys, values))
        if log_decay is None:
            decayed = scores.tril()
            late = reach = None
        else:
            log_sum = plan.split(log_decay).double().cumsum(-1)
            between = _weights(log_sum, -log_sum, dtype)
            decayed = scores * between
            reach = log_sum.to(dtype).exp()[..., None]
            late = (log_sum[..., -1:] - log_sum).to(dtype).exp()[..., None]
        written = write * values
        if beta is not None:
            erase = plan.split(beta).to(dtype)[..., None]
            erased = erase * keys if reach is None else erase * reach * keys
            lower = erase * (gram if log_decay is None else gram * between).tril(-1)
            # The inverse and one product: five times faster on a CPU than a solve with K + V right-hand sides.
            identity = torch.eye(lower.shape[-1], dtype=dtype, device=lower.device).expand_as(lower)
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
            solved = inverse @ torch.cat([written, erased], -1)
            written, erased = solved.split([values.shape[-1], keys.shape[-1]], -1)
        write_keys = (keys if late is None else keys * late).mT
        state = initial_state
        if state is None:
            state = keys.new_zeros(plan.sequences, heads, k.shape[-1], v.shape[-1])
        carry = keys.new_ones(keys.shape[0], 1, 1, 1) if reach is None else reach[..., -1:, :]
        if beta is None:

            def step(state: Tensor, carry: Tensor, fresh: Tensor) -> Tensor:
                return carry * state + fresh

            rows = carry, write_keys @ written
        else:

            def step(state: Tensor, carry: Tensor, write_keys: Tensor, written: Tensor, erased: Tensor) -> Tensor:
                return carry * state + write_keys @ (written - erased @ state)

            rows = carry, write_keys, written, erased
        entering, final = plan.scan(state.to(dtype), step, *rows)
        read = queries @ entering if reach is None else reach * (queries @ entering)
        y = written if beta is None else written - erased @ entering
        o = plan.merge(scale * (read + decayed @ y))
        if add_to is not None:
            o = o + add_to.to(dtype)
    return o.to(q.dtype), final


# ---------------------------------------------------------------------------------------------------------------------
# Running statistics
# ---------------------------------------------------------------------------------------------------------------------


def _shifted(x: Tensor, by: int, fill: float) -> Tensor:
    """x moved `by` tokens later along dim 1, the first ones set to `fill`."""
    head = x.new_full((x.shape[0], min(by, x.shape[1]), *x.shape[2:]), fill)
    return torch.cat([head, x[:, : x.shape[1] - head.shape[1]]], 1)


class _LogNorm(torch.autograd.Function):
    """log Z by a doubling scan over (log_forget, log Z) pairs in float64, with its exact gradient.

    `entry` [B,T,H] is log Z before token t at the tokens flagged in `starts` [T], unused elsewhere. Gradient:
    mu_t = dlZ_t + (1 - b_{t+1}) mu_{t+1};  dlog_write = b mu;  dlog_forget = (1 - b) mu;  dentry = dlog_forget there.
    """

    @staticmethod
    def forward(ctx, log_write: Tensor, log_forget: Tensor, entry: Tensor, starts: Tensor) -> Tensor:
        write, forget, entry = log_write.double(), log_forget.double(), entry.double()
        starts = starts[None, :, None]
        total = torch.where(starts, torch.logaddexp(forget + entry, write), write)
        # A start forgets all that precedes it, so that one scan serves packed sequences.
        span = torch.where(starts, -torch.inf, forget)
        step = 1
        while step < write.shape[1]:
            total = torch.logaddexp(_shifted(total, step, -torch.inf) + span, total)
            span = span + _shifted(span, step, 0.0)
            step *= 2
        carried = forget + torch.where(starts, entry, _shifted(total, 1, -torch.inf))
        some = total > -torch.inf
        safe = total.masked_fill(~some, 0.0)
        ctx.save_for_backward((write - safe).exp(), (carried - safe).exp(), starts)
        ctx.dtypes = log_write.dtype, log_forget.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        share, keep, starts = ctx.saved_tensors
        # Reverse scan mu_t = grad_t + keep_{t+1} mu_{t+1} where token t + 1 continues the sequence, by doubling.
        mu = grad.flip(1)
        factor = _shifted(torch.where(starts, 0.0, keep).flip(1), 1, 0.0)
        step = 1
        while step < mu.shape[1]:
            mu = mu + factor * _shifted(mu, step, 0.0)
            factor = factor * _shifted(factor, step, 0.0)
            step *= 2
        mu = mu.flip(1)
        forget = keep * mu
        return (share * mu).to(ctx.dtypes[0]), forget.to(ctx.dtypes[1]), torch.where(starts, forget, 0.0), None


def _first_tokens(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(index of the first token, number) of every sequence that has tokens; for a batch, token 0 of each row."""
    if cu_seqlens is None:
        one = torch.zeros(min(tokens, 1), dtype=torch.long, device=device)
        return one, one
    number = torch.nonzero(cu_seqlens[1:] > cu_seqlens[:-1])[:, 0]
    return cu_seqlens[number].long(), number


def chunk_log_norm(
    log_write: Tensor, log_forget: Tensor, initial_log_z: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """`recurrent_log_norm` by a scan of logarithmic depth in float64; result in log_write's dtype. [B,T,H]."""
    first, number = _first_tokens(cu_seqlens, log_write.shape[1], log_write.device)
    starts = torch.zeros(log_write.shape[1], dtype=torch.bool, device=log_write.device)
    starts[first] = True
    entry = log_write.new_full(log_write.shape, -torch.inf, dtype=torch.float64)
    if initial_log_z is not None:
        initial = initial_log_z.double()
        rows = initial[:, None].expand(-1, first.numel(), -1) if cu_seqlens is None else initial[number][None]
        entry = entry.index_copy(1, first, rows)
    return _LogNorm.apply(log_write, log_forget, entry, starts).to(log_write.dtype)


class _MeanWeights:
    """P(t,s) = exp((L_t - lZ_t) + (lw_s - L_s)) per chunk, L the in-chunk sum of log_forget, and what follows from it.

    The mean after token t of a chunk entered with mean m0 is m0 + sum_s P(t,s) (x_s - m0). Rows with lZ = -inf are 0.
    """

    def __init__(
        self, log_write: Tensor, log_forget: Tensor, log_z: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype
    ):
        batch, tokens, self.heads = log_write.shape
        device = log_write.device
        self.dtype, self.packed = dtype, cu_seqlens is not None
        self.plan = plan = ChunkLayout(batch, tokens, cu_seqlens, device)
        write = plan.split(log_write, -torch.inf).double()
        norm = plan.split(log_z, -torch.inf).double()
        total = plan.split(log_forget).double().cumsum(-1)
        keep = (norm > -torch.inf)[..., :, None] & (write > -torch.inf)[..., None, :]
        self.matrix = _weights(total - norm, write - total, dtype, keep)
        self.last = self.matrix[torch.arange(plan.last.numel(), device=device), :, plan.last][..., None, :]
        self.kept = 1 - self.last.sum(-1, keepdim=True)
        self.empty = log_z == -torch.inf
        first, _ = _first_tokens(cu_seqlens, tokens, device)
        self.unseen = _shifted(self.empty, 1, True)
        self.unseen[:, first] = True
        # First token of each sequence that is written, T where there is none.
        place = torch.arange(tokens, device=device)[None, :, None]
        place = torch.where(log_write > -torch.inf, place, tokens)
        if cu_seqlens is None:
            self.first_written = place.amin(1) if tokens else place.new_zeros(batch, self.heads)
        else:
            owner = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(tokens, device=device), right=True)
            self.first_written = place.new_full((plan.sequences, self.heads), tokens).scatter_reduce(
                0, owner[:, None].expand(-1, self.heads), place[0], "amin"
            )

    def _shift(self, x: Tensor) -> Tensor:
        """[sequences,H,D]: the first written row of each sequence, 0 where there is none."""
        tokens = x.shape[1]
        if tokens == 0:
            return x.new_zeros(self.plan.sequences, self.heads, x.shape[-1])
        index = self.first_written.clamp(max=tokens - 1)
        head = torch.arange(self.heads, device=x.device) // (self.heads // x.shape[2])
        row = 0 if self.packed else torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.where((self.first_written < tokens)[..., None], x[row, index, head], 0.0)

    def means(self, x: Tensor, initial_mean: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(centred, mean, final) of `recurrent_means` for x [B,T,Hx,D]."""
        plan, dtype, heads = self.plan, self.dtype, self.heads
        # Subtracting a constant from every row changes neither result nor gradient, and keeps a large common mean out
        # of the products.
        shift = (self._shift(x) if initial_mean is None else initial_mean).detach().to(dtype)
        start = torch.zeros_like(shift) if initial_mean is None else initial_mean.to(dtype) - shift
        rows = expand_heads(plan.split(x).to(dtype), heads, 1) - shift[plan.owner][..., None, :]

        def step(mean: Tensor, kept: Tensor, gained: Tensor) -> Tensor:
            return kept * mean + gained

        entering, final = plan.scan(start[..., None, :], step, self.kept, self.last @ rows)
        mean = entering + self.matrix @ (rows - entering)
        centred = plan.merge(rows - torch.cat([entering, mean[..., :-1, :]], -2))
        mean = plan.merge(mean + shift[plan.owner][..., None, :])
        if initial_mean is None:
            centred = torch.where(self.unseen[..., None], 0.0, centred)
            mean = torch.where(self.empty[..., None], 0.0, mean)
        return centred, mean, final[..., 0, :] + shift


def chunk_centre(
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_z: Tensor,
    initial_mean: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Keys and values minus their previous running means, in chunks. Arguments and results as `api.centre`."""
    key_mean, value_mean = initial_mean if initial_mean is not None else (None, None)
    with torch.autocast(k.device.type, enabled=False):
        weights = _MeanWeights(log_write, log_forget, log_z, cu_seqlens, compute_dtype(k))
        kd, _, key_final = weights.means(k, key_mean)
        vd, vbar, value_final = weights.means(v, value_mean)
        rho2 = kd.square().sum(-1)
    return kd.to(k.dtype), vd.to(v.dtype), vbar.to(v.dtype), rho2, (key_final, value_final)


def chunk_running_mean(
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    log_z: Tensor,
    initial_mean: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Running mean of v in chunks. Arguments and results as `api.running_mean`."""
    with torch.autocast(v.device.type, enabled=False):
        weights = _MeanWeights(log_write, log_forget, log_z, cu_seqlens, compute_dtype(v))
        _, mean, final = weights.means(v, initial_mean)
    return mean.to(v.dtype), final


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[B,T,Hx,V] and [H] -> weight_h x_{h // (H // Hx)}, [B,T,H,V]."""
    return (x[:, :, :, None] * weight.view(x.shape[2], -1, 1)).flatten(2, 3)


def readout(
    v: Tensor,
    log_write: Tensor | None,
    log_forget: Tensor | None,
    log_z: Tensor | None,
    scales: Tensor,
    taps: Tensor | None,
    sink: Tensor | None,
    add_to: Tensor | None,
    add_scale: Tensor | None,
    initial_mean: Tensor | None,
    tail: Tensor | None,
    first: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The zeroth-order readout term by term. Arguments and results as `api.readout`."""
    dtype = compute_dtype(v)
    batch, tokens, kv_heads, dim = v.shape
    heads, count = scales.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    with torch.autocast(v.device.type, enabled=False):
        values = v.to(dtype)
        position = torch.arange(tokens, device=v.device)
        start, number = torch.zeros_like(position), torch.zeros_like(position)
        if cu_seqlens is not None:
            number = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
            start = cu_seqlens[number].long()
        age = position - start
        base = values.new_zeros(batch, tokens, heads, dim)
        if add_to is not None:
            base = base + (add_to.to(dtype) if add_scale is None else add_scale.to(dtype)[:, None] * add_to.to(dtype))
        for j in range(0 if taps is None else len(taps)):
            earlier = torch.where((age >= j)[:, None, None], values.roll(j, 1), 0.0)
            if tail is not None and j:
                slot = (len(taps) - 1 + age - j).clamp(max=len(taps) - 2)
                before = tail.to(dtype)[:, slot] if cu_seqlens is None else tail.to(dtype)[number, slot][None]
                earlier = torch.where((age >= j)[:, None, None], earlier, before)
            base = base + per_head(earlier, taps[j].to(dtype))
        if sink is not None:
            if first is None:
                top = values[:, :1] if cu_seqlens is None else values[:, start]
            else:
                top = first.to(dtype)[:, None] if cu_seqlens is None else first.to(dtype)[number][None]
            base = base + per_head(top, sink.to(dtype))
        final = values.new_zeros(sequences, 0, dim)
        if count:
            forget = log_forget.expand_as(log_write)
            weights = _MeanWeights(log_write, forget, log_z, cu_seqlens, dtype)
            _, mean, final = weights.means(v, initial_mean)
            base = base + torch.einsum("bthmv,hm->bthv", mean.unflatten(2, (heads, count)), scales.to(dtype))
    return base.to(v.dtype), final


# ---------------------------------------------------------------------------------------------------------------------
# Centred mixers
# ---------------------------------------------------------------------------------------------------------------------

FLOOR = -80.0  # of log decay: leaves 2e-35 of the state, and keeps sums over a chunk small enough to be exact


def centred_gates(
    log_write: Tensor,
    log_forget: Tensor,
    log_z: Tensor,
    initial_log_z: Tensor | None,
    log_exponent: Tensor,
    log_erase: Tensor,
    log_balance: Tensor | None,
    rho2: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log decay, erase, gain) [B,T,H] of a memory of centred keys and values (derivation.md §4, §5, stable form).

    With b_t the write strength and a = b (1 - b) exp(log_erase), s = a c^2 rho2, c = exp(log_balance):
    log decay = exp(log_exponent) log(1 - b), erase = a c^2 / (1 + s), gain = a c / (1 + s). Without log_balance it is
    the running covariance: no erase, gain = b' (1 - b) with b' moved by log_erase on the logit scale. All are 0 where a
    token writes nothing or nothing precedes it.
    """
    first, number = _first_tokens(cu_seqlens, log_write.shape[1], log_write.device)
    before = _shifted(log_z, 1, -torch.inf)
    if initial_log_z is None:
        entry = before.new_full((before.shape[0], first.numel(), before.shape[2]), -torch.inf)
    elif cu_seqlens is None:
        entry = initial_log_z[:, None].expand(-1, first.numel(), -1)
    else:
        entry = initial_log_z[number][None]
    before = before.index_copy(1, first, entry.to(before.dtype))
    live = (log_write > -torch.inf) & (before > -torch.inf)
    zero = torch.zeros((), dtype=log_z.dtype, device=log_z.device)
    # b / (1 - b) = w / (lambda Z of the token before), in logs: two log Z would cancel where log(1 - b) is small.
    write, forget, before = (torch.where(live, x, zero) for x in (log_write, log_forget, before))
    odds = write - forget - before
    strength, keep = (torch.where(live, torch.nn.functional.logsigmoid(x), zero) for x in (odds, -odds))
    log_decay = (log_exponent.exp() * keep).clamp(min=FLOOR)
    if log_balance is None:
        gain = (torch.nn.functional.logsigmoid(odds + log_erase) + keep).exp()
        return log_decay, None, torch.where(live, gain, zero)
    a = torch.where(live, (strength + keep + log_erase).exp(), zero)
    balance = log_balance.exp()
    shrink = a / (1 + a * balance.square() * rho2)
    return log_decay, shrink * balance.square(), shrink * balance


RATE = 30.0  # of a log learning rate: far beyond any useful value, far below inf * 0 in fp32


def scheduled_gain(
    log_write: Tensor,
    log_forget: Tensor,
    log_z: Tensor,
    initial_log_z: Tensor,
    log_rate: Tensor,
    schedule: Tensor,
    rho2: Tensor,
) -> Tensor:
    """What the delta rule on centred keys erases and writes (derivation.md §7), [B,T,H]: eta / (1 + eta rho2).

    log eta = log_rate + schedule log b, with b the write strength; 0 where a token writes nothing or nothing precedes
    it.
    """
    before = torch.cat([initial_log_z[:, None].to(log_z.dtype), log_z[:, :-1]], 1)
    live = (log_write > -torch.inf) & (before > -torch.inf)
    zero = torch.zeros((), dtype=log_z.dtype, device=log_z.device)
    write, forget, before = (torch.where(live, x, zero) for x in (log_write, log_forget, before))
    strength = torch.nn.functional.logsigmoid(write - forget - before)
    rate = torch.where(live, (log_rate + schedule * strength).clamp(max=RATE).exp(), zero)
    return rate / (1 + rate * rho2)


# ---------------------------------------------------------------------------------------------------------------------
# KL of softmax distributions, of rows of log probabilities or logits.
# ---------------------------------------------------------------------------------------------------------------------


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Log softmax at a temperature, in fp32 or, for fp64 logits, fp64."""
    logits = logits.to(compute_dtype(logits))
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def divergence(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities [n,V] -> (sum_v p_v log(p_v / q_v) [n], q - p [n,V]: its gradient by the logits of q).

    A token that p excludes adds nothing, whatever its q.
    """
    p = log_p.exp()
    return (p * (log_p - log_q)).masked_fill_(p == 0, 0).sum(-1), log_q.exp().sub_(p)


def top_divergence(log_q: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """`divergence` where p is known as the probabilities of k tokens and one of all others, its tail.

    log_q [n,V]; ids [n,k] int64; log_p [n,k+1], the last column the tail's.
    """
    top = log_q.gather(-1, ids)
    rest = log_q.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    kl, slope = divergence(torch.cat([top, rest], -1), log_p)
    q = log_q.exp()
    # A tail token's q_v P / Q, in one exponential: P / Q alone may be beyond the number format.
    gradient = q - (log_q - rest.clamp(min=torch.finfo(rest.dtype).min) + log_p[:, -1:]).exp()
    return kl, gradient.scatter_(-1, ids, slope[:, :-1])


def write_gradient(student: Tensor, slope: Tensor, weight: Tensor | None, scale: float) -> None:
    """slope times `scale` and the weight of each row, over the logits."""
    if weight is not None:
        slope = torch.where(weight[:, None] == 0, 0.0, slope * weight[:, None].to(slope.dtype))
    student.copy_(slope * scale)


def weighted(losses: Tensor, weight: Tensor | None) -> Tensor:
    """losses times weight [n], 0 where that is 0, whatever the loss."""
    return losses if weight is None else torch.where(weight == 0, 0.0, losses * weight.to(losses.dtype))
