"""KL of softmax distributions over long rows of logits: value, and gradient over the student's logits.

With rows s and t of the student's and the teacher's logits over a temperature, p = softmax(t) and q = softmax(s),

    KL = sum_v p_v (log p_v - log q_v),   d KL / d s = q - p

and with the teacher known as k tokens' probabilities and one of all others (the tail), P and Q the tails' masses,

    KL = sum_{v in top} p_v log(p_v / q_v) + P log(P / Q),   d KL / d s = q - p in the top, q (1 - P / Q) in the tail.

One program has one row. A first pass finds the log-sum-exp in one reading: every line of a tile, which is what one
thread loads at once, keeps a maximum and a sum of its own, so that nothing is exchanged until the end. A second pass
reads the row again, mostly from the cache, and writes the gradient over the logits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import LOG2E, accumulator
from .reference import compute_dtype, divergence, weighted

NONE: tl.constexpr = tl.constexpr(float("-inf"))
# (lines of a tile, warps). A row of both models should be in the cache still when it is read again, so few programs,
# large ones, share a multiprocessor.
LAUNCH = 2048, 32


@triton.jit
def fold(top, total, x, RATE: tl.constexpr):
    """(maximum, sum of exp((x - maximum) / temperature)) of each line, with those of a tile x [lines, width]."""
    new = tl.maximum(top, tl.max(x, axis=1))
    # -inf stands for nothing yet, and never meets another -inf in a difference.
    safe = tl.where(new > NONE, new, 0.0)
    return new, total * tl.exp2((top - safe) * RATE) + tl.sum(tl.exp2((x - safe[:, None]) * RATE), axis=1)


@triton.jit
def log_total(top, total, RATE: tl.constexpr):
    """(maximum, log2 of the sum) of all lines. They stay apart: their sum would round away digits of large logits."""
    peak = tl.max(top, axis=0)
    peak = tl.where(peak > NONE, peak, 0.0)
    return peak, tl.log2(tl.sum(total * tl.exp2((top - peak) * RATE), axis=0))


@triton.jit
def share_of(weight, row, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    if WEIGHTED:
        return tl.load(weight + row).to(ACC)
    else:
        return tl.cast(1.0, ACC)


@triton.jit
def clear(student, V, place, L: tl.constexpr, E: tl.constexpr):
    for first in range(0, V, L * E):
        tl.store(student + first + place, tl.zeros([L, E], student.dtype.element_ty), mask=first + place < V)


@triton.jit(do_not_specialize=["scale"])
def kl_kernel(
    student, teacher, weight, losses, V, s_row, t_row, scale,
    RATE: tl.constexpr, L: tl.constexpr, E: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """losses[row] = weight KL, and with GRADIENT scale weight (q - p) over the student's row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    student += row * s_row
    teacher += row * t_row
    place = tl.arange(0, L)[:, None] * E + tl.arange(0, E)[None, :]
    share = share_of(weight, row, WEIGHTED, ACC)
    if share == 0.0:
        if GRADIENT:
            clear(student, V, place, L, E)
        tl.store(losses + row, share)
        return
    s_top = tl.full([L], NONE, ACC)
    t_top = tl.full([L], NONE, ACC)
    s_total = tl.zeros([L], ACC)
    t_total = tl.zeros([L], ACC)
    for first in range(0, V, L * E):
        inside = first + place < V
        s = tl.load(student + first + place, mask=inside, other=NONE, eviction_policy="evict_last").to(ACC)
        t = tl.load(teacher + first + place, mask=inside, other=NONE, eviction_policy="evict_last").to(ACC)
        s_top, s_total = fold(s_top, s_total, s, RATE)
        t_top, t_total = fold(t_top, t_total, t, RATE)
    s_peak, s_log = log_total(s_top, s_total, RATE)
    t_peak, t_log = log_total(t_top, t_total, RATE)
    kl = tl.zeros([L], ACC)
    for first in range(0, V, L * E):
        inside = first + place < V
        s = tl.load(student + first + place, mask=inside, other=NONE, eviction_policy="evict_first").to(ACC)
        t = tl.load(teacher + first + place, mask=inside, other=NONE, eviction_policy="evict_first").to(ACC)
        s = (s - s_peak) * RATE - s_log
        t = (t - t_peak) * RATE - t_log
        p = tl.exp2(t)
        kl += tl.sum(tl.where(p == 0.0, 0.0, p * (t - s)), axis=1)
        if GRADIENT:
            slope = (tl.exp2(s) - p) * (scale * share)
            tl.store(student + first + place, slope.to(student.dtype.element_ty), mask=inside)
    tl.store(losses + row, tl.sum(kl, axis=0) * (share / LOG2E))


@triton.jit(do_not_specialize=["n", "scale"])
def tail_kernel(
    student, weight, log_tail, top_peak, top_total, found, n, V, s_row, scale,
    RATE: tl.constexpr, L: tl.constexpr, E: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """found[:, row] = (largest logit, log2 of the sum of all relative to it, log2 of the student's tail mass Q).

    The top's logits are -inf in the row; top_peak[row] is their maximum and top_total[row] their sum relative to it.
    With GRADIENT scale weight q (1 - P / Q) is written over the row, 0 in the top; log P = log_tail[row].
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    student += row * s_row
    place = tl.arange(0, L)[:, None] * E + tl.arange(0, E)[None, :]
    share = share_of(weight, row, WEIGHTED, ACC)
    if share == 0.0:
        if GRADIENT:
            clear(student, V, place, L, E)
        for i in tl.static_range(3):
            tl.store(found + i * n + row, share)
        return
    top = tl.full([L], NONE, ACC)
    total = tl.zeros([L], ACC)
    for first in range(0, V, L * E):
        inside = first + place < V
        s = tl.load(student + first + place, mask=inside, other=NONE, eviction_policy="evict_last").to(ACC)
        top, total = fold(top, total, s, RATE)
    tail_peak, tail = log_total(top, total, RATE)
    own = tl.load(top_peak + row).to(ACC)
    peak = tl.maximum(tail_peak, own)
    rest = (tail_peak - peak) * RATE + tail
    log = tl.log2(tl.exp2(rest) + tl.load(top_total + row).to(ACC) * tl.exp2((own - peak) * RATE))
    tl.store(found + row, peak)
    tl.store(found + n + row, log)
    tl.store(found + 2 * n + row, rest - log)
    if GRADIENT:
        # P / Q alone may be beyond the number format, q P / Q is not.
        lift = tl.load(log_tail + row).to(ACC) * LOG2E - tl.where(tail > NONE, tail, 0.0)
        for first in range(0, V, L * E):
            inside = first + place < V
            s = tl.load(student + first + place, mask=inside, other=NONE, eviction_policy="evict_first").to(ACC)
            slope = tl.exp2((s - peak) * RATE - log) - tl.exp2((s - tail_peak) * RATE + lift)
            tl.store(student + first + place, (slope * (scale * share)).to(student.dtype.element_ty), mask=inside)


def _constants(rows: tuple[Tensor, ...], temperature: float, weight: Tensor | None, gradient: bool) -> dict:
    student, vocabulary = rows[0], rows[0].shape[1]
    # Numbers that one thread loads at once; rows that are not aligned are loaded one by one.
    width = 16 // student.element_size()
    aligned = all(x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 for x in rows) and vocabulary % 16 == 0
    width = width if aligned else 1
    lines, warps = LAUNCH
    lines = max(1, min(lines, triton.next_power_of_2(vocabulary) // width))
    return {
        "RATE": 1 / (math.log(2) * temperature), "L": lines, "E": width, "WEIGHTED": weight is not None,
        "GRADIENT": gradient, "ACC": accumulator(student.dtype), "num_warps": warps, "num_stages": 1,
    }  # fmt: skip


@torch.library.custom_op("linearize_kernels::kl_", mutates_args={"student"})
def kl_(
    student: Tensor, teacher: Tensor, weight: Tensor | None, temperature: float, scale: float, gradient: bool
) -> Tensor:
    """weight KL [n] of rows [n,V]; with `gradient` that of its sum, times `scale`, is written over `student`."""
    rows, vocabulary = student.shape
    losses = student.new_empty(rows, dtype=compute_dtype(student))
    weight = None if weight is None else weight.contiguous()
    kl_kernel[(rows,)](
        student, teacher, weight, losses, vocabulary, student.stride(0), teacher.stride(0), scale / temperature,
        **_constants((student, teacher), temperature, weight, gradient),
    )  # fmt: skip
    return losses


@kl_.register_fake
def _(student, teacher, weight, temperature, scale, gradient):
    return student.new_empty(student.shape[0], dtype=compute_dtype(student))


@torch.library.custom_op("linearize_kernels::top_kl_", mutates_args={"student"})
def top_kl_(
    student: Tensor, ids: Tensor, log_p: Tensor, weight: Tensor | None, temperature: float, scale: float, gradient: bool
) -> Tensor:
    """As `kl_`, of the top and one bucket: ids [n,k] int64, log_p [n,k+1] with the tail's in the last column."""
    rows, vocabulary = student.shape
    wide = compute_dtype(student)
    kept = student.gather(-1, ids)
    student.scatter_(-1, ids, float("-inf"))
    top = kept.to(wide)
    peak = top.amax(-1)
    total = ((top - peak[:, None]) / temperature).exp().sum(-1)
    log_p = log_p.to(wide)
    weight = None if weight is None else weight.contiguous()
    found = student.new_empty(3, rows, dtype=wide)
    tail_kernel[(rows,)](
        student, weight, log_p[:, -1].contiguous(), peak, total, found, rows, vocabulary, student.stride(0),
        scale / temperature, **_constants((student,), temperature, weight, gradient),
    )  # fmt: skip
    peak, log, tail = found[..., None]
    log_q = torch.cat([(top - peak) / temperature - log * math.log(2), tail * math.log(2)], -1)
    losses, slope = divergence(log_q, log_p)
    slope = slope[:, :-1] * (scale / temperature)
    if weight is not None:
        slope = torch.where(weight[:, None] == 0, 0.0, slope * weight[:, None].to(wide))
    student.scatter_(-1, ids, slope.to(student.dtype) if gradient else kept)
    return weighted(losses, weight)


@top_kl_.register_fake
def _(student, ids, log_p, weight, temperature, scale, gradient):
    return student.new_empty(student.shape[0], dtype=compute_dtype(student))
