"""Where training text comes from: bundled, files, Hub data sets, text sampled from the teacher, mixtures of them."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from linearize.data.files import exists, find_files, fingerprint, shards
from linearize.data.holdout import PIECE, HoldOut, cut
from linearize.data.rows import Packer, Rows, tokenised
from linearize.errors import UserError

BUNDLED = Path(__file__).parent.parent / "text"
FORMS = "bundled, self, a path, hub:NAME[:CONFIG][@SPLIT], or a mixture 0.7:hub:NAME,0.3:PATH"

# Documents are shuffled within a block of about this many characters (2M tokens), read from as many shards at once.
BLOCK_CHARACTERS = 8_000_000
INTERLEAVED = 8

Place = dict[str, Any]  # JSON-able; {} is the beginning


@dataclass(frozen=True)
class Filled:
    """Rows of one block: ids and positions [n, context] int64 in random order, and the place of the next block."""

    ids: torch.Tensor
    positions: torch.Tensor
    next: Place


class Source(Protocol):
    """An endless, seekable stream of rows. `name` is for messages; `weight` its share of the tokens."""

    name: str
    weight: float
    fingerprint: str

    def fill(self, place: Place, tokenizer, context: int, seed: Any) -> Filled:
        """The rows of the block at `place`: the same for the same arguments, in every process."""


class Shard(Protocol):
    """A part of a source; `read` streams (document, offset behind it) from an offset on, None being the start."""

    def read(self, offset: Any = None) -> Iterator[tuple[str, Any]]: ...


def generator(*parts: Any) -> torch.Generator:
    """A CPU generator seeded by the parts (anything with a repr that is stable across processes)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


@dataclass
class _Reader:
    shard: int
    offset: Any
    stream: Iterator[tuple[str, Any]]


class TextSource:
    """Documents in shards, one side of a hold-out (None: all of them).

    Every epoch has its own order of shards; INTERLEAVED of them are read in turn, a document each; documents are
    shuffled within a block. A block never reaches over the end of an epoch.
    """

    def __init__(
        self, name: str, parts: Sequence[Shard], fingerprint: str, hold: HoldOut | None, heldout: bool, weight: float
    ):
        self.name, self.weight, self.fingerprint = name, weight, fingerprint
        self.shards, self.hold, self.heldout = parts, hold, heldout
        self._live: tuple[str, list[_Reader]] | None = None  # open readers and the place they stand at

    def pieces(self) -> Iterator[str]:
        """All documents of both sides as the hold-out sees them, shard after shard."""
        for shard in self.shards:
            for text, _ in shard.read():
                yield from cut(text, PIECE)

    def documents(self, seed: Any = 0) -> Iterator[str]:
        """The documents of this side once, in the order of the first epoch of `seed`."""
        place: Place = {}
        while not place.get("epoch"):
            texts, place = self.block(place, seed)
            yield from texts

    def block(self, place: Place, seed: Any) -> tuple[list[str], Place]:
        """The shuffled documents of the block at `place`, and the place of the next one."""
        epoch, number, upcoming, turn = (place.get(key, 0) for key in ("epoch", "block", "next", "turn"))
        order = torch.randperm(len(self.shards), generator=generator(seed, "shards", epoch)).tolist()
        readers, self._live = self._readers(place), None
        size, texts = 0, []
        while size < BLOCK_CHARACTERS:
            while len(readers) < INTERLEAVED and upcoming < len(order):
                readers.append(self._open(order[upcoming]))
                upcoming += 1
            if not readers:
                break
            turn %= len(readers)
            reader = readers[turn]
            found = next(reader.stream, None)
            if found is None:
                # The next shard takes the slot, lest the turns of the others change.
                if upcoming < len(order):
                    readers[turn] = self._open(order[upcoming])
                    upcoming += 1
                else:
                    del readers[turn]
                continue
            text, reader.offset = found
            size += len(text)
            texts.extend(self._own(text))
            turn += 1
        mixed = torch.randperm(len(texts), generator=generator(seed, "documents", epoch, number)).tolist()
        if readers:
            stand = [[reader.shard, reader.offset] for reader in readers]
            after = {"epoch": epoch, "block": number + 1, "next": upcoming, "turn": turn, "open": stand}
        else:
            after = {"epoch": epoch + 1}
        self._live = (_key(after), readers)
        return [texts[i] for i in mixed], after

    def fill(self, place: Place, tokenizer, context: int, seed: Any) -> Filled:
        texts, after = self.block(place, seed)
        packer = Packer(context)
        for ids in place.get("carry", ()):
            packer.add(torch.tensor(ids, dtype=torch.int64))
        for ids in tokenised(texts, tokenizer):
            packer.add(ids)
        ids, positions = packer.tensors()
        order = torch.randperm(len(ids), generator=generator(seed, "rows", place.get("epoch"), place.get("block")))
        after["carry"] = [piece.tolist() for piece in packer.open]
        return Filled(ids[order], positions[order], after)

    def _own(self, text: str) -> Iterator[str]:
        for piece in cut(text, PIECE):
            side = piece if self.hold is None else self.hold.split(piece)[self.heldout]
            if side:
                yield side

    def _readers(self, place: Place) -> list[_Reader]:
        if self._live is not None and self._live[0] == _key(place):
            return self._live[1]
        return [self._open(shard, offset) for shard, offset in place.get("open", ())]

    def _open(self, shard: int, offset: Any = None) -> _Reader:
        return _Reader(shard, offset, self.shards[shard].read(offset))


def _key(place: Place) -> str:
    return json.dumps({name: value for name, value in place.items() if name != "carry"}, sort_keys=True)


@dataclass
class RowSource:
    """Finished rows in batches, such as text sampled from the teacher; every epoch has its own order."""

    batches: Sequence[Rows]
    fingerprint: str
    name: str = "self"
    weight: float = 1.0

    def fill(self, place: Place, tokenizer, context: int, seed: Any) -> Filled:
        epoch, number = place.get("epoch", 0), place.get("block", 0)
        order = torch.randperm(len(self.batches), generator=generator(seed, "batches", epoch)).tolist()
        rows = self.batches[order[number]]
        if rows.context != context:
            raise UserError(
                "the sampled text has rows of another length", value=f"{rows.context} tokens", fix=f"sample {context}"
            )
        mixed = torch.randperm(len(rows), generator=generator(seed, "rows", epoch, number))
        last = number + 1 == len(order)
        after = {"epoch": epoch + 1} if last else {"epoch": epoch, "block": number + 1}
        return Filled(rows.ids[mixed].long(), rows.positions[mixed].long(), after)


# ---- the text of a spec ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a data spec: kind is "bundled", "self", "hub" or "files"; name is what follows the weight."""

    kind: str
    name: str
    weight: float


def parse_sources(spec: str) -> list[Part]:
    """Split `spec` into its parts: one source, or several with a weight each or with none.

    Local paths without weights are one source together, as large as they are; otherwise sources without weights are
    equal. Touches neither disk (but to see whether a path exists) nor network. Raises UserError for an empty spec and
    for weights that are missing, not numbers or not positive.
    """
    whole = exists(spec)
    texts = [text for text in ([spec] if whole else [text.strip() for text in spec.split(",")]) if text]
    if not texts:
        raise UserError("no data was named", value=spec, fix=f"give {FORMS}")
    weighted = [(None, spec)] if whole else [_weight(text) for text in texts]
    bare = [name for weight, name in weighted if weight is None]
    if 0 < len(bare) < len(weighted):
        raise UserError("a part of the mixture has no weight", value=bare[0], fix="give every part a weight, or none")
    parts = [Part(_kind(name), name, 1.0 if weight is None else weight) for weight, name in weighted]
    if bare:
        local = [part.name for part in parts if part.kind == "files"]
        rest = [part for part in parts if part.kind != "files"]
        parts = [*([Part("files", ",".join(local), 1.0)] if local else []), *rest]
    for kind in ("bundled", "self"):
        if sum(part.kind == kind for part in parts) > 1:
            raise UserError(f"the mixture names {kind} twice", value=spec, fix="name it once")
    return parts


def _weight(text: str) -> tuple[float | None, str]:
    number, colon, name = text.partition(":")
    if not colon or not re.fullmatch(r"[-+.\d][-+.\deE]*%?|nan|inf", number) or exists(text):
        return None, text
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UserError("a weight of the mixture is no positive number", value=text, fix="write it like 0.7:PATH")
    if not name.strip():
        raise UserError("a weight of the mixture has no source", value=text, fix=f"behind it comes {FORMS}")
    return weight, name.strip()


def _kind(name: str) -> str:
    if exists(name):
        return "files"
    return name if name in ("bundled", "self") else "hub" if name.startswith("hub:") else "files"


def check_sources(spec: str) -> None:
    """Raise UserError for a spec that is malformed or names local files that are not there; reads none of them."""
    for part in parse_sources(spec):
        if part.kind == "files":
            find_files(part.name)
        elif part.kind == "hub":
            _hub_name(part.name)


def open_sources(
    spec: str, *, heldout: bool = False, column: str = "text", sampled: RowSource | None = None
) -> list[Source]:
    """Open every part of `spec`, for training or, with `heldout`, the text that is never trained on.

    spec: FORMS, as `parse_sources` splits it. column: key or column of the text in .jsonl, .parquet and Hub data.
    sampled: the text of `self`; its held-out text is the bundled one, which is left out when another part has some.

    The sides are those of `split_documents`, whatever the order of reading and the number of processes. Reads about 20
    documents of each part, to see that there is text on both sides. Raises UserError as reading does, for Hub data
    that cannot be opened, and for `self` without `sampled`.
    """
    parts = parse_sources(spec)
    hold = HoldOut()
    found: list[Source] = []
    for part in parts:
        if part.kind == "self" and not heldout:
            if sampled is None:
                raise UserError("the text of self has not been sampled", value=spec, fix="sample it before training")
            found.append(RowSource(sampled.batches, sampled.fingerprint, weight=part.weight))
        elif part.kind == "bundled" or (part.kind == "self" and len(parts) == 1):
            file = BUNDLED / f"{'heldout' if heldout else 'train'}.jsonl"
            found.append(
                TextSource(part.name, shards([file], "text"), fingerprint([file]), None, heldout, part.weight)
            )
        elif part.kind == "hub":
            found.append(_open_hub(part, column, hold, heldout))
        elif part.kind == "files":
            files = find_files(part.name)
            found.append(
                TextSource(part.name, shards(files, column), fingerprint(files), hold, heldout, part.weight)
            )
    for source in found:
        if isinstance(source, TextSource) and source.hold is not None:
            source.hold.learn(_pieces(source))
    return found


def _pieces(source: TextSource) -> Iterator[str]:
    found = False
    for piece in source.pieces():
        found = True
        yield piece
    if not found:
        raise _no_text(source.name)


def _no_text(name: str) -> UserError:
    return UserError("the data has no text in it", value=name, fix="every document is empty; give files with text")


def documents(sources: Sequence[Source], seed: int = 0) -> Iterator[str]:
    """The documents of all text sources once, shuffled; as long as each lasts, in proportion to the weights."""
    left = [
        [0, source.weight, source.documents((seed, i))]
        for i, source in enumerate(sources)
        if isinstance(source, TextSource)
    ]
    while left:
        part = min(left, key=lambda part: part[0] / part[1])
        text = next(part[2], None)
        if text is None:
            left.remove(part)
            continue
        part[0] += len(text)
        yield text


def bundled_documents(split: str) -> list[str]:
    """Return the documents that ship with the package; `split` is "train" or "heldout" (no document is in both)."""
    if split not in ("train", "heldout"):
        raise UserError("unknown part of the bundled text", value=split, fix="use train or heldout")
    return list(read_documents(str(BUNDLED / f"{split}.jsonl")))


def read_documents(spec: str, column: str = "text") -> Iterator[str]:
    """Stream the documents of a file, folder or glob, or of several separated by commas, in sorted file order.

    A .txt file is one document, in pieces if it has over 64 000 characters; a .jsonl file has one object a line with
    the text under `column`; both may end in .gz or .zst; a .parquet file has it in that column. Folders are searched
    recursively, hidden files are left out, and documents without any text are skipped.

    Raises UserError at once when a path is missing or nothing matches; while reading for a file that is not UTF-8 text,
    a damaged file or a bad line (named as file:line); and at the end when there was no text at all.
    """
    return _stream(find_files(spec), spec, column)


def _stream(files: list[Path], spec: str, column: str) -> Iterator[str]:
    found = False
    for file in files:
        for shard in shards([file], column):
            for text, _ in shard.read():
                found = True
                yield text
    if not found:
        raise _no_text(spec)


# ---- Hub data sets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubShard:
    """One shard of a streamed data set (datasets.IterableDataset); offsets are the library's own reading states."""

    data: Any
    index: int
    name: str
    column: str

    def read(self, offset: dict | None = None) -> Iterator[tuple[str, dict]]:
        # An object of its own for every reader: the reading state is kept in it.
        data = self.data.shard(num_shards=self.data.num_shards, index=self.index)
        if offset is not None:
            data.load_state_dict(offset)
        stream = _told(self.name, lambda: iter(data))
        try:
            while (record := _told(self.name, lambda: next(stream, None))) is not None:
                text = self._text(record)
                if text.strip():
                    yield text, data.state_dict()
        finally:
            stream.close()

    def _text(self, record: dict) -> str:
        if self.column not in record:
            fix = f"name the text's column with --data-column (columns: {', '.join(record)})"
            raise UserError(f'the data has no column "{self.column}"', value=self.name, fix=fix)
        text = record[self.column]
        if text is not None and not isinstance(text, str):
            where = f"{self.name}: {type(text).__name__}"
            raise UserError(f'the column "{self.column}" is no text', value=where, fix="name one of strings")
        return text or ""


def _hub_name(name: str) -> tuple[str, str | None, str]:
    """(data set, configuration, split) of hub:NAME[:CONFIG][@SPLIT]."""
    path, _, split = name.removeprefix("hub:").partition("@")
    path, _, config = path.partition(":")
    if not path.strip():
        raise UserError("no Hub data set was named", value=name, fix="write hub:NAME[:CONFIG][@SPLIT]")
    return path.strip(), config.strip() or None, split.strip() or "train"


def _open_hub(part: Part, column: str, hold: HoldOut, heldout: bool) -> TextSource:
    path, config, split = _hub_name(part.name)
    try:
        import datasets
    except ImportError:
        raise UserError(
            "Hub data sets need the datasets package", value=part.name, fix="pip install 'linearize[data]'"
        ) from None
    datasets.disable_progress_bars()  # progress is the console's
    builder = _told(part.name, lambda: datasets.load_dataset_builder(path, config))
    data = _told(part.name, lambda: builder.as_streaming_dataset(split=split))
    if not isinstance(data, datasets.IterableDataset):
        raise UserError("one split of the Hub data set must be named", value=part.name, fix="write hub:NAME@train")
    parts = [HubShard(data, i, part.name, column) for i in range(data.num_shards)]
    return TextSource(part.name, parts, f"{builder.hash} {split}", hold, heldout, part.weight)


def _told(name: str, call: Callable[[], Any]) -> Any:
    """What the call returns; whatever the datasets library raises becomes one UserError."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its readers and the network raise
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON") and isinstance(error, OSError):
            fix = "HF_HUB_OFFLINE is set and the data set is not here; unset it, or use local files"
        else:
            fix = f"check its name, configuration and split, and the network ({type(error).__name__}: {error})"
        raise UserError("the Hub data set cannot be read", value=name, fix=fix) from error
