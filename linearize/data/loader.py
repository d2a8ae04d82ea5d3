"""The training stream: endless batches of packed rows from one source or a mixture, exact to resume."""

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from linearize.data.rows import Packer, Rows, moved, tokenised
from linearize.data.sources import BUNDLED, Filled, Place, Source, generator
from linearize.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Batch:
    """Rows of one step: ids and positions [rows, context] int64, positions restarting at 0 at each document start."""

    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.ids.numel()


class Loader:
    """Iterates over batches without end, in an order fixed by sources, tokenizer, context, rows and seed alone.

    limit: documents begin at positions of their own below it, as :func:`linearize.data.moved` has it; 0: at 0.
    rows: rows of the global batch; process `rank` of `world` gets rows rank::world of it. Every process reads and
    tokenises the whole stream, so that the global batch is the same for every world size. A row holds text of one
    source; the sources share the rows of the run by their weights, exact to one row. Documents over one row are cut
    into windows, shorter ones share rows, and no token is left out: what fills no row at the end of a block waits for
    the next. The next block is read while the present one is used.

    Raises UserError when `rows` does not divide by `world`, when a source has less text than one row, and as its
    reading does.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer,
        context: int,
        rows: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        limit: int = 0,
    ):
        if not sources:
            raise UserError("there is no data to train on", value="no sources", fix="name a data source")
        if rows < 1 or rows % world:
            raise UserError(
                "the rows of a step do not divide by the processes", value=f"{rows} rows, {world} processes",
                fix=f"use a multiple of {world}",
            )  # fmt: skip
        Packer(context)  # refuses a context that is too short
        self.context, self.rows, self.seed, self.rank, self.world = context, rows, seed, rank, world
        self.limit = limit
        self.step = 0
        tokenizer = copy.deepcopy(tokenizer)  # its own: another thread uses it, and a tokenizer serves one at a time
        self._tokenizer_hash = _tokenizer_hash(tokenizer)
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._feeds = [_Feed(source, (seed, i), tokenizer, context, pool) for i, source in enumerate(sources)]
        total = sum(source.weight for source in sources)
        self._shares = [source.weight / total for source in sources]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        before = [feed.mark() for feed in self._feeds]
        try:
            batch = self._batch()
        except BaseException:  # a Ctrl-C too: the state is that of the batches handed out
            for feed, mark in zip(self._feeds, before, strict=True):
                feed.back(mark)
            raise
        self.step += 1
        return batch

    def _batch(self) -> Batch:
        drawn = [feed.drawn for feed in self._feeds]
        start = sum(drawn)
        for row in range(start + 1, start + self.rows + 1):
            # The source that is furthest behind its share.
            behind = [share * row - taken for share, taken in zip(self._shares, drawn, strict=True)]
            drawn[behind.index(max(behind))] += 1
        parts = [feed.take(count - feed.drawn) for feed, count in zip(self._feeds, drawn, strict=True)]
        order = torch.randperm(self.rows, generator=generator(self.seed, "batch", self.step))[self.rank :: self.world]
        ids, positions = (torch.cat(tensors)[order] for tensors in zip(*parts, strict=True))
        return Batch(ids, moved(ids, positions, self.limit, self.seed))

    def take(self, tokens: int) -> Rows:
        """The next `tokens` tokens, rounded up to whole batches, as Rows."""
        batches = [next(self) for _ in range(-(-tokens // (self.rows // self.world * self.context)))]
        return Rows(
            torch.cat([batch.ids for batch in batches]), torch.cat([batch.positions for batch in batches]), tokens
        )

    @property
    def epochs(self) -> dict[str, int]:
        """How often each source has been read to its end, by name."""
        return {feed.source.name: feed.place.get("epoch", 0) for feed in self._feeds}

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, JSON-able and small: offsets and counts, and at most one row of tokens a source.

        It belongs to the batches handed out so far, whatever has been read ahead, and is the same on every rank.
        """
        return {
            "format": FORMAT,
            "context": self.context,
            "rows": self.rows,
            "seed": self.seed,
            "tokenizer": self._tokenizer_hash,
            "step": self.step,
            "sources": [feed.state_dict() for feed in self._feeds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, also of another world size: the next batch is the one that would have come next.

        Raises UserError when the state is of another loader (context, rows, seed, tokenizer, sources, weights) or of
        data that has changed since.
        """
        own = self.state_dict()
        for key in ("format", "context", "rows", "seed", "tokenizer"):
            if state.get(key) != own[key]:
                raise UserError(
                    f"the run to go on with read its data with another {key}", value=own[key],
                    fix=f"it had {state.get(key)}; use that, or start afresh with --overwrite",
                )  # fmt: skip
        saved = state["sources"]
        if len(saved) != len(self._feeds):
            raise UserError(
                "the run to go on with read other data", value=f"{len(self._feeds)} sources",
                fix=f"it had {len(saved)}: {', '.join(part['name'] for part in saved)}",
            )  # fmt: skip
        for feed, part in zip(self._feeds, saved, strict=True):
            feed.check(part)
        for feed, part in zip(self._feeds, saved, strict=True):
            feed.load_state_dict(part)
        self.step = state["step"]


class _Feed:
    """The rows of one source, block by block, the next block read ahead by the pool's only thread."""

    def __init__(self, source: Source, seed: Any, tokenizer, context: int, pool: ThreadPoolExecutor):
        self.source, self.seed, self.tokenizer, self.context, self.pool = source, seed, tokenizer, context, pool
        self.place: Place = {}
        self.taken = self.drawn = 0  # rows taken of the block at `place`, and of all blocks
        self.block: Filled | None = None
        self.ahead: Future[Filled] | None = None
        self.fruitful = -1  # the last epoch that gave a row

    def mark(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("place", "taken", "drawn", "block", "ahead", "fruitful")}

    def back(self, mark: dict[str, Any]) -> None:
        vars(self).update(mark)

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, positions = [], []
        self.drawn += count
        while count:
            block = self._present()
            size = min(count, len(block.ids) - self.taken)
            ids.append(block.ids[self.taken : self.taken + size])
            positions.append(block.positions[self.taken : self.taken + size])
            self.taken, count = self.taken + size, count - size
            if self.ahead is None and self.taken * 2 >= len(block.ids):
                self.ahead = self._read(block.next)
            if count:
                self._advance(block)
        if not ids:
            none = torch.empty(0, self.context, dtype=torch.int64)
            return none, none
        return torch.cat(ids), torch.cat(positions)

    def _present(self) -> Filled:
        if self.block is None:
            self.block = self._read(self.place).result()
        return self.block

    def _advance(self, block: Filled) -> None:
        if len(block.ids):
            self.fruitful = self.place.get("epoch", 0)
        if block.next.get("epoch", 0) - self.fruitful > 1:
            raise UserError(
                f"the text is shorter than one context of {self.context} tokens",
                value=self.source.name,
                fix="give more text or a shorter context",
            )
        self.place, self.taken = block.next, 0
        self.block, self.ahead = (self.ahead or self._read(block.next)).result(), None

    def _read(self, place: Place) -> Future[Filled]:
        return self.pool.submit(self.source.fill, place, self.tokenizer, self.context, self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.source.name,
            "weight": self.source.weight,
            "fingerprint": self.source.fingerprint,
            "place": self.place,
            "taken": self.taken,
            "drawn": self.drawn,
        }

    def check(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.source.fingerprint:
            raise UserError(
                "the data has changed since the run began", value=self.source.name,
                fix=f"put back what {state['name']} held, or start afresh with --overwrite",
            )  # fmt: skip
        if state["weight"] != self.source.weight:
            raise UserError(
                f"the run to go on with mixed {state['name']} with another weight", value=self.source.weight,
                fix=f"it had {state['weight']}; use that, or start afresh with --overwrite",
            )  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.taken, self.drawn = state["place"], state["taken"], state["drawn"]
        self.block = self.ahead = None
        self.fruitful = self.place.get("epoch", 0)


def _tokenizer_hash(tokenizer) -> str:
    """Hash (hex) of what the tokenizer makes of a little text."""
    text = (BUNDLED / "heldout.jsonl").read_text("utf-8")[:2000] + " ".join(map(chr, range(32, 700)))
    [ids] = tokenised([text], tokenizer)
    return hashlib.blake2b(json.dumps(ids.tolist()).encode(), digest_size=8).hexdigest()
