"""Documents into rows of token ids with known borders."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from linearize.data.holdout import cut
from linearize.errors import UserError

# Tokenisers are called on many documents at once (they use threads) but never on so many that reading runs far ahead.
TOKENIZER_BATCH = 64
# A longer document is cut at a line end first: tokenising a whole book to use its first page would be slow.
LONGEST_DOCUMENT = 1_000_000


@dataclass(frozen=True)
class Rows:
    """Packed token ids.

    ids [N, context] int64; positions [N, context] int64, restarting at the start of every row and document, at 0 where
    rows are made;
    requested: how many tokens were asked for (None: all there are); dropped: how many tokens were read and filled no
    row.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    requested: int | None = None
    dropped: int = 0

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def context(self) -> int:
        """Tokens in a row."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return self.ids.numel()

    @property
    def shortfall(self) -> str | None:
        """One line saying that the text gave fewer tokens than asked for, or None when it gave enough."""
        if self.requested is None or self.tokens >= self.requested:
            return None
        return f"the text gives {self.tokens:,} tokens where {self.requested:,} were asked for; it is used once"

    def batches(self, rows_per_batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (ids, positions) of up to `rows_per_batch` rows in order; the last batch may have fewer."""
        if rows_per_batch < 1:
            raise UserError("a batch needs at least one row", value=rows_per_batch, fix="raise the tokens per step")
        if len(self):
            yield from zip(self.ids.split(rows_per_batch), self.positions.split(rows_per_batch), strict=True)


def followed(positions: torch.Tensor) -> torch.Tensor:
    """[N, T] positions -> [N, T] bool: whether the next token of the row is of the same document."""
    follows = torch.zeros_like(positions, dtype=torch.bool)
    follows[:, :-1] = positions[:, 1:] == positions[:, :-1] + 1
    return follows


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """[N, T] positions -> [N, T] bool: the first token of every row and document."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = ~followed(positions)[:, :-1]
    return first


def moved(ids: torch.Tensor, positions: torch.Tensor, limit: int, seed: int) -> torch.Tensor:
    """The same documents at other positions: ids and positions [N, T] -> positions [N, T], all below `limit`.

    Half of the documents stay where they begin and the others begin anywhere, by a hash of `seed` and their tokens, so
    that neither the order of rows nor the number of processes matters. With rotary embeddings that changes nothing for
    a softmax layer, which sees differences of positions; a mixer whose write weights depend on the positions themselves
    learns from short rows what holds in long ones. Rows that are not shorter than `limit` stay as they are.
    """
    room = limit - positions.shape[1]
    if room <= 0 or not positions.numel():
        return positions
    first = document_starts(positions)
    index = torch.arange(positions.shape[1]).expand_as(positions)
    counted = index - torch.where(first, index, 0).cummax(1).values
    place = np.flatnonzero(first.flatten().numpy())
    tokens = ids.flatten().numpy().astype(np.uint64) ^ _mixed(counted.flatten().numpy().astype(np.uint64))
    hashed = _mixed(np.add.reduceat(_mixed(tokens), place) + np.uint64(seed))
    start = (hashed >> np.uint64(1)) % np.uint64(room + 1) * (hashed & np.uint64(1))
    start = start.astype(np.int64)
    size = np.diff(place, append=positions.numel())
    while True:
        # One that began where its neighbour in the row ends would be taken for its continuation.
        joined = (start[1:] == start[:-1] + size[:-1]) & (place[1:] % positions.shape[1] > 0)
        if not joined.any():
            break
        start[1:][joined] = 0
    return counted + torch.from_numpy(start.repeat(size)).view_as(positions)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A permutation of 64-bit integers that looks random: the output function of SplitMix64 (Steele et al., 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def content_hash(rows: Rows) -> str:
    """Hash (hex, 128 bits) of shape, ids and positions: equal when two runs saw the same tokens in the same order."""
    digest = hashlib.blake2b(repr(tuple(rows.ids.shape)).encode(), digest_size=16)
    for tensor in (rows.ids, rows.positions):
        digest.update(tensor.cpu().contiguous().to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def pack_rows(
    documents: Iterable[str],
    tokenizer,
    context: int,
    tokens: int | None = None,
    *,
    seed: int = 0,
    long_only: bool = False,
    shuffle: bool = True,
    read_tokens: int | None = None,
) -> Rows:
    """Tokenise documents in order and pack them into full rows of `context` tokens.

    A document is cut into windows of `context` tokens; what is left of it shares rows with the remains of others, with
    positions restarting at each border. Special tokens are the tokenizer's own habit (a BOS per document where it adds
    one). Reading stops when `tokens` (rounded up to whole rows) are in hand; None takes everything. The last,
    incomplete row is dropped, and `Rows.dropped` says how long it was. `long_only` keeps only full windows of a single
    document; `read_tokens` is where to give up looking for more of them. `shuffle` orders the rows by `seed`; the same
    input, tokenizer and seed give the same rows.

    Raises UserError when there is not a single full row. Fewer rows than asked for are not an error: see
    `Rows.shortfall`.
    """
    if tokens is not None and tokens < 1:
        raise UserError("at least one token must be asked for", value=tokens, fix="ask for one context or more")
    packer = Packer(context, long_only)
    wanted = None if tokens is None else -(-tokens // context)
    count = total = longest = 0
    for ids in tokenised(documents, tokenizer):
        count, total, longest = count + 1, total + len(ids), max(longest, len(ids))
        packer.add(ids)
        if (wanted is not None and packer.rows >= wanted) or (read_tokens is not None and total >= read_tokens):
            break
    if not packer.rows:
        if long_only and total >= context:
            raise UserError(
                f"no document has as many as {context} tokens",
                value=f"the longest has {longest}",
                fix="give longer documents or a shorter context",
            )
        raise UserError(
            f"the text is shorter than one context of {context} tokens",
            value=f"{total} tokens in {count} documents",
            fix="give more text or a shorter context",
        )
    ids, positions = (tensor[:wanted] for tensor in packer.tensors())
    if shuffle:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        ids, positions = ids[order], positions[order]
    return Rows(ids, positions, requested=tokens, dropped=total - ids.numel())


def tokenised(documents: Iterable[str], tokenizer) -> Iterator[torch.Tensor]:
    """Token ids [n] int64 of each document in order; a document of over a million characters comes in pieces."""
    batch: list[str] = []

    def flush() -> Iterator[torch.Tensor]:
        if batch:
            for ids in _encode(batch, tokenizer):
                yield torch.tensor(ids, dtype=torch.int64)
            batch.clear()

    for document in documents:
        for piece in cut(document, LONGEST_DOCUMENT):
            batch.append(piece)
            if len(batch) == TOKENIZER_BATCH or len(piece) > LONGEST_DOCUMENT // TOKENIZER_BATCH:
                yield from flush()
    yield from flush()


def _encode(texts: list[str], tokenizer) -> list[list[int]]:
    if getattr(tokenizer, "is_fast", False):
        # Straight to the library below: the wrapper's masks and conversions cost a third of the time.
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=True)]
    # verbose=False: rows are cut to the context later, so "longer than the maximum length" would mislead.
    encoded = tokenizer(texts, add_special_tokens=True, truncation=False, padding=False, verbose=False)
    return encoded["input_ids"]


class Packer:
    """Fills rows of `context` tokens: whole windows of a document as they come, the rest of it in a row with others.

    `open` holds the pieces (token ids [n]) of the row that is being filled; each begins at position 0 there.
    """

    def __init__(self, context: int, long_only: bool = False):
        if context < 2:
            raise UserError("the context is too short", value=context, fix="use at least 2 tokens")
        self.context, self.long_only = context, long_only
        self.rows = 0
        self.ids: list[torch.Tensor] = []  # each [n, context]
        self.positions: list[torch.Tensor] = []
        self.open: list[torch.Tensor] = []
        self.used = 0

    def add(self, ids: torch.Tensor) -> None:
        """Add a document's token ids [n] int64."""
        windows = len(ids) // self.context
        if windows:
            whole = ids[: windows * self.context].view(windows, self.context)
            self._emit(whole, torch.arange(self.context).expand(windows, -1))
        rest = ids[windows * self.context :]
        while len(rest) and not self.long_only:
            piece = rest[: self.context - self.used]
            self.open.append(piece)
            self.used += len(piece)
            rest = rest[len(piece) :]
            if self.used == self.context:
                positions = torch.cat([torch.arange(len(part)) for part in self.open])
                self._emit(torch.cat(self.open)[None], positions[None])
                self.open, self.used = [], 0

    def _emit(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.ids.append(ids)
        self.positions.append(positions)
        self.rows += len(ids)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, positions) [rows, context] int64 of all full rows so far."""
        if not self.rows:
            return torch.empty(0, self.context, dtype=torch.int64), torch.empty(0, self.context, dtype=torch.int64)
        return torch.cat(self.ids), torch.cat(self.positions)
