"""What the Triton kernels share: the dot helper, where a chunk lies, and the launch tables.

Rules that all kernels follow.
* The left operand of every dot that runs on four or more warps is loaded, never computed: ptxas below 13.3 may reuse
  the registers of a register-A WGMMA too early. Products are written transposed where that needs it. float32 has no
  WGMMA, and launches of its own: `WARPS_FULL` warps, whose threads each hold less of the operands.
* Decays are differences of in-chunk sums, masked before the exponential.
* 16-bit tiles are raised to float32 before any arithmetic but a dot.
* A program adds one 64-bit base; offsets inside a tile are 32-bit.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
# Warps of launches with products of float32, and registers of a thread: all there are, where ptxas would take fewer
# and spill. Local memory is reserved for all threads that a GPU can hold: 10 KB of spills in each are 2.8 GB of an
# H200, and a launch that does not get them fails.
WARPS_FULL = 16
REGISTERS_FULL = 65536 // (32 * WARPS_FULL)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Rows of per-chunk scalars that `prep` leaves for the other kernels of the delta rule.
ROWS: tl.constexpr = tl.constexpr(7)


@triton.jit
def dot(a, b, ACC: tl.constexpr):
    # The interpreter multiplies the bit patterns of bfloat16, so it gets float operands. float32 is multiplied as it
    # is, without tensor cores: split for three tf32 products, its operands spill 26 KB in each thread at 128 dims.
    if _INTERPRETED:
        return tl.dot(a.to(ACC), b.to(ACC), out_dtype=ACC)
    else:
        return tl.dot(a, b, input_precision="ieee", out_dtype=ACC)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits where exp(x) is far below 1 too."""
    small = tl.exp(-tl.abs(x))
    one = 1.0 + small
    exact = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.maximum(x, 0.0) + exact


@triton.jit
def locate_chunk(chunk, table, cu_seqlens, T, NT, C: tl.constexpr, VARLEN: tl.constexpr):
    """(row of the batch, first token, number of real tokens) of a chunk; no tokens for an unused table entry."""
    if VARLEN:
        sequence = tl.load(table + 2 * chunk)
        first = tl.load(table + 2 * chunk + 1)
        end = tl.load(cu_seqlens + tl.maximum(sequence, 0) + 1).to(tl.int32)
        batch = tl.cast(0, tl.int64)
        count = tl.where(sequence < 0, 0, tl.minimum(end - first, C))
    else:
        batch = tl.cast(chunk // NT, tl.int64)
        first = (chunk % NT) * C
        count = tl.minimum(T - first, C)
    return batch, first, count


@triton.jit
def locate_sequence(sequence, offsets, cu_seqlens, T, NT, C: tl.constexpr, VARLEN: tl.constexpr):
    """(row of the batch, first token, end, number of its first chunk) of a sequence."""
    if VARLEN:
        batch = tl.load(offsets + 4 * sequence).to(tl.int64)
        start = tl.load(offsets + 4 * sequence + 1)
        end = tl.load(offsets + 4 * sequence + 2)
        chunk = tl.load(offsets + 4 * sequence + 3)
    else:
        start = 0
        end = T
        batch = tl.cast(sequence, tl.int64)
        chunk = sequence * NT
    return batch, start, end, chunk


@triton.jit(do_not_specialize=["S", "count"])
def number_kernel(cu_seqlens, offsets, table, S, count, C: tl.constexpr, BLOCK: tl.constexpr):
    """The tables of `Chunks`: a program for each sequence."""
    sequence = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    before = 0
    total = 0
    for other0 in range(0, S, BLOCK):
        other = other0 + step
        length = tl.load(cu_seqlens + other + 1, mask=other < S, other=0)
        length -= tl.load(cu_seqlens + other, mask=other < S, other=0)
        chunks = (length.to(tl.int32) + C - 1) // C
        total += tl.sum(chunks, axis=0)
        before += tl.sum(tl.where(other < sequence, chunks, 0), axis=0)
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    tl.store(offsets + 4 * sequence, 0)
    tl.store(offsets + 4 * sequence + 1, start)
    tl.store(offsets + 4 * sequence + 2, end)
    tl.store(offsets + 4 * sequence + 3, before)
    for chunk0 in range(0, (end - start + C - 1) // C, BLOCK):
        chunk = chunk0 + step
        mine = start + chunk * C < end
        tl.store(table + 2 * (before + chunk), sequence, mask=mine)
        tl.store(table + 2 * (before + chunk) + 1, start + chunk * C, mask=mine)
    if sequence == S - 1:
        for chunk0 in range(total, count, BLOCK):
            chunk = chunk0 + step
            tl.store(table + 2 * chunk, -1, mask=chunk < count)
            tl.store(table + 2 * chunk + 1, 0, mask=chunk < count)


class Chunks:
    """Chunk numbering of one call: rows of the batch, or packed sequences, one after the other.

    For packed sequences the tables are built on the device, without reading `cu_seqlens` on the host: `count` is the
    upper bound T // 64 + S, and entries of `table` [count,2] (sequence, first token) that no sequence uses have
    sequence -1. `offsets` [S,4] holds (row of the batch, first token, end, number of the first chunk).
    """

    def __init__(self, batch: int, tokens: int, cu_seqlens: Tensor | None):
        self.tokens, self.packed = tokens, cu_seqlens is not None
        self.per_row = -(-tokens // CHUNK)
        self.count = self.bound(batch, tokens, cu_seqlens)
        if cu_seqlens is None:
            self.sequences, self.cu_seqlens, self.table, self.offsets = batch, None, None, None
            return
        self.cu_seqlens = cu_seqlens = cu_seqlens.contiguous()
        self.sequences = cu_seqlens.numel() - 1
        table = torch.empty(2 * self.count + 4 * self.sequences, dtype=torch.int32, device=cu_seqlens.device)
        self.offsets, self.table = table[: 4 * self.sequences].view(-1, 4), table[4 * self.sequences :].view(-1, 2)
        number_kernel[(self.sequences,)](
            cu_seqlens, self.offsets, self.table, self.sequences, self.count, C=CHUNK, BLOCK=256, num_warps=4
        )

    @staticmethod
    def bound(batch: int, tokens: int, cu_seqlens: Tensor | None) -> int:
        """`count` from shapes alone."""
        if cu_seqlens is None:
            return batch * -(-tokens // CHUNK)
        return tokens // CHUNK + cu_seqlens.numel() - 1


def accumulator(dtype: torch.dtype):
    """Triton type of sums for inputs of `dtype`."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def registers(dtype: torch.dtype) -> int | None:
    """Registers to demand for a thread of a launch with products of `dtype`."""
    return REGISTERS_FULL if dtype == torch.float32 else None


def rows(x: Tensor) -> Tensor:
    """x [B,T,H,D] with a dense last dimension; the kernels take the other strides as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_rows(x: Tensor) -> Tensor:
    """`rows`, with heads and tokens as far apart as whole memory transactions are: copied where they are not.

    Triton compiles a kernel apart for them. Of others the products of the delta rule were wrong (see `api.WHOLE_DIMS`).
    """
    x = rows(x)
    if x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides over batch, token and head of [B,T,H,D] or [B,T,H]."""
    return x.stride(0), x.stride(1), x.stride(2)
