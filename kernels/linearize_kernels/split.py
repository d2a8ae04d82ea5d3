"""Few heads and long sequences: a sequence is cut into pieces, and the pieces are scanned side by side.

Over a piece the delta rule maps the state that enters it to the one that leaves it by S -> M S + L, and backwards the
cotangent by dS -> M^T dS + dL. L is what the piece writes from a zero state, M is what it does to the identity when it
writes nothing; without erase M is a number, the product of the decays. So the states at the borders need one scan for
L, one for M, both over all pieces at once, and a short chain over the pieces; then the pieces are sequences of their
own with known initial states. The first piece starts from the true state, so its M is never needed, and neither are L
and M of the last (backwards: of the first). Pieces are whole chunks, so what `prep` has computed serves them all.
"""

from __future__ import annotations

import copy

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import scan
from .common import CHUNK, ROWS, Chunks, accumulator, dot, locate_sequence

# Up to so many rows (sequences x heads) pieces x heads aim at the second number. Of 1 to 32 pieces of 4096 to 65536
# tokens (H200, 8 to 128 rows, 64 and 128 dims), forwards and backwards, this is the best or 5 % from it with pieces of
# at least 1024 tokens, and below four of these the scans that find the borders take what the pieces save.
FEW_ROWS = 16
AIMED_ROWS = 128
SHORTEST = 16 * CHUNK


def piece_length(sequences: int, tokens: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Tokens of a piece for `sequences` that have `tokens` in all; 0: not worth a split. Reads shapes alone.

    More rows are cut in two, at best, where all programs of the pieces still run at once: that gains a tenth, which a
    narrower tile of values gains too, and three or more pieces lose.
    """
    rows = sequences * heads
    if tokens < 4 * SHORTEST * sequences:
        return 0
    pieces = AIMED_ROWS // rows if rows <= FEW_ROWS else 2
    if rows > FEW_ROWS and 2 * scan.programs(scan.SCAN, key_dim, value_dim, rows)[0] > scan.AT_ONCE:
        return 0
    return max(SHORTEST, -(-tokens // (CHUNK * pieces * sequences)) * CHUNK)


def piece_count(batch: int, tokens: int, cu_seqlens: Tensor | None, length: int) -> int:
    """Pieces of a call from shapes alone; an upper bound for packed sequences."""
    if cu_seqlens is None:
        return batch * -(-tokens // length)
    return tokens // length + cu_seqlens.shape[0] - 1


@triton.jit(do_not_specialize=["T", "NT", "S", "length", "P"])
def pieces_kernel(
    tables, first_pieces, last_pieces, offsets, cu_seqlens, T, NT, S, length, P,
    BP: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BP + tl.arange(0, BP)
    row = tl.zeros([BP], dtype=tl.int32)
    begin = tl.zeros([BP], dtype=tl.int32)
    stop = tl.zeros([BP], dtype=tl.int32)
    chunk = tl.zeros([BP], dtype=tl.int32)
    ends = tl.zeros([BP], dtype=tl.int32)
    total = 0
    for sequence in range(0, S):
        batch, start, end, chunk0 = locate_sequence(sequence, offsets, cu_seqlens, T, NT, C, VARLEN)
        count = tl.maximum((end - start + length - 1) // length, 1)
        mine = (index >= total) & (index < total + count)
        offset = (index - total) * length
        row = tl.where(mine, batch.to(tl.int32), row)
        begin = tl.where(mine, start + offset, begin)
        stop = tl.where(mine, tl.minimum(start + offset + length, end), stop)
        chunk = tl.where(mine, chunk0 + offset // C, chunk)
        ends = tl.where(mine & (index == total), ends + 1, ends)
        ends = tl.where(mine & (index == total + count - 1), ends + 2, ends)
        if tl.program_id(0) == 0:
            tl.store(first_pieces + sequence, total)
            tl.store(last_pieces + sequence, total + count - 1)
        total += count
    for left_out in tl.static_range(4):
        line = tables + (left_out * P + index) * 4
        tl.store(line, row, mask=index < P)
        tl.store(line + 1, begin, mask=index < P)
        tl.store(line + 2, tl.where((ends & left_out) > 0, begin, stop), mask=index < P)
        tl.store(line + 3, chunk, mask=index < P)


class Pieces:
    """Where the pieces of `length` tokens of each sequence lie, found on the device in one launch.

    `first` and `last` [S] are the numbers of each sequence's first and last piece. Every sequence has at least one
    piece, and numbers that none uses are pieces without tokens.
    """

    def __init__(self, chunks: Chunks, batch: int, length: int, device: torch.device):
        self.chunks = chunks
        self.count = piece_count(batch, chunks.tokens, chunks.cu_seqlens, length)
        self.tables = torch.empty(4, self.count, 4, dtype=torch.int32, device=device)
        # Zeros, so that indexing is safe where launches only compile.
        self.first, self.last = torch.zeros(2, chunks.sequences, dtype=torch.int64, device=device)
        pieces_kernel[(triton.cdiv(self.count, 128),)](
            self.tables, self.first, self.last, chunks.offsets, chunks.cu_seqlens, chunks.tokens, chunks.per_row,
            chunks.sequences, length, self.count, BP=128, C=CHUNK, VARLEN=chunks.packed, num_warps=4,
        )  # fmt: skip

    def chunked(self, *, first: bool = True, last: bool = True) -> Chunks:
        """The pieces as sequences for `scan`; without `first` or `last`, those of each sequence have no tokens."""
        cut = copy.copy(self.chunks)
        cut.packed, cut.sequences = True, self.count
        cut.offsets = self.tables[(not first) + 2 * (not last)]
        return cut


@triton.jit(do_not_specialize=["H"])
def borders_kernel(
    local, maps, scalars, borders, pieces, first_pieces, last_pieces, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, KT: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, REVERSE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BV)
    line = tl.program_id(0) // tiles
    sequence = line // H
    head = line % H
    value = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    in_value = value < V
    key = tl.arange(0, BK)
    in_state = (key < K)[:, None] & in_value[None, :]
    first = tl.load(first_pieces + sequence)
    steps = tl.load(last_pieces + sequence) - first
    for i in range(0, steps):
        piece = first + (steps - i if REVERSE else i)
        place = tl.cast(piece, tl.int64) * H + head
        S = tl.load(local + (place * K + key[:, None]) * V + value[None, :], mask=in_state, other=0.0)
        if i > 0:
            if ERASE:
                for inner0 in range(0, K, KT):
                    inner = inner0 + tl.arange(0, KT)
                    in_inner = inner < K
                    part = borders + (place * K + inner[:, None]) * V + value[None, :]
                    part = tl.load(part, mask=in_inner[:, None] & in_value[None, :], other=0.0)
                    if REVERSE:
                        M = maps + (place * K + inner[None, :]) * K + key[:, None]
                    else:
                        M = maps + (place * K + key[:, None]) * K + inner[None, :]
                    M = tl.load(M, mask=(key < K)[:, None] & in_inner[None, :], other=0.0)
                    S += dot(M, part, ACC)
            else:
                start = tl.load(pieces + 4 * piece + 1)
                chunks = (tl.load(pieces + 4 * piece + 2) - start + C - 1) // C
                last = scalars + (tl.load(pieces + 4 * piece + 3).to(tl.int64) * H + head) * ROWS * C + C - 1
                decay = tl.zeros([C], dtype=ACC)
                for chunk0 in range(0, chunks, C):
                    chunk = chunk0 + tl.arange(0, C)
                    g = last + chunk.to(tl.int64) * H * ROWS * C
                    decay += tl.load(g, mask=chunk < chunks, other=0.0)
                    decay += tl.load(g + C, mask=chunk < chunks, other=0.0)
                before = tl.load(borders + (place * K + key[:, None]) * V + value[None, :], mask=in_state, other=0.0)
                S += tl.exp2(tl.sum(decay, axis=0)) * before
        place += -H if REVERSE else H
        tl.store(borders + (place * K + key[:, None]) * V + value[None, :], S, mask=in_state)
        tl.debug_barrier()


# K rounded up to a power of two -> (tile of keys of a product, tile of values, warps, stages)
BORDERS = {32: (32, 16, 4, 1), 64: (32, 16, 4, 2), 128: (32, 16, 8, 2), 256: (32, 16, 8, 2)}


def fill_borders(
    borders: Tensor, local: Tensor, maps: Tensor, scalars: Tensor, pieces: Pieces, *, reverse: bool
) -> None:
    """Write the states that enter all pieces but each first one; with `reverse` the cotangents that leave, but last."""
    heads, key_dim, value_dim = borders.shape[1:]
    padded = max(32, triton.next_power_of_2(key_dim))
    key_tile, tile, warps, stages = BORDERS[padded]
    borders_kernel[(pieces.first.numel() * heads * triton.cdiv(value_dim, tile),)](
        local, maps, scalars, borders, pieces.tables, pieces.first, pieces.last, heads,
        K=key_dim, V=value_dim, BK=padded, KT=key_tile, BV=tile, C=CHUNK, ERASE=maps.numel() > 0, REVERSE=reverse,
        ACC=accumulator(borders.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def entering_states(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, N: Tensor, A: Tensor, pieces: Pieces, scale: float,
    initial: Tensor | None, warps: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(states that enter the pieces [P,H,K,V], their maps M [P,H,K,K] or empty without erase)."""
    heads, key_dim, value_dim = A.shape[1], k.shape[-1], v.shape[-1]
    borders = scalars.new_zeros(pieces.count, heads, key_dim, value_dim)
    if initial is not None:
        borders[pieces.first] = initial.to(borders.dtype)
    alone = {"final": True, "read": False, "warps": warps}
    chunks = pieces.chunked(last=False)
    _, local = scan.scan(q, k, v, scalars, N, A, chunks, scale, borders, **alone)
    maps = scalars.new_empty(0)
    if N.numel():
        nothing = v.new_zeros(key_dim).expand(*v.shape[:2], 1, key_dim)
        identity = torch.eye(key_dim, dtype=scalars.dtype, device=v.device).expand(pieces.count, heads, -1, -1)
        chunks = pieces.chunked(first=False, last=False)
        _, maps = scan.scan(q, k, nothing, scalars, N, A, chunks, scale, identity, **alone)
    fill_borders(borders, local, maps, scalars, pieces, reverse=False)
    return borders, maps


def leaving_cotangents(
    q: Tensor, k: Tensor, do: Tensor, scalars: Tensor, N: Tensor, A: Tensor, maps: Tensor, pieces: Pieces,
    scale: float, d_final: Tensor | None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """Cotangents of the states that leave the pieces [P,H,K,V]."""
    borders = scalars.new_zeros(pieces.count, A.shape[1], k.shape[-1], do.shape[-1])
    if d_final is not None:
        borders[pieces.last] = d_final.to(borders.dtype)
    chunks = pieces.chunked(first=False)
    *_, local = scan.reverse_scan(
        q, k, do, scalars, N, A, chunks, scale, borders, d_initial=True, store=False, warps=warps
    )
    fill_borders(borders, local, maps, scalars, pieces, reverse=True)
    return borders
