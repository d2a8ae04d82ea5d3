"""Text in, rows of token ids out: bundled and local documents, hold-out, packing, and text sampled from the teacher.

A row is `context` token ids with positions that restart at 0 wherever a new document begins, so that no stage has to
guess where one document ends and the next starts.
"""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import DynamicCache

from linearize.errors import UserError

FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")
ENDINGS = tuple(kind + packed for kind in FORMATS for packed in COMPRESSIONS)
BUNDLED = Path(__file__).parent / "text"

# Tokenisers are called on many documents at once (they use threads) but never on so many that reading runs far ahead.
TOKENIZER_BATCH = 64
# A longer document is cut at a line end first: tokenising a whole book to use its first page would be slow.
LONGEST_DOCUMENT = 1_000_000
# The hold-out works on pieces of at most this many characters, so that one long file has something to hold out.
HOLDOUT_PIECE = 64_000


# ---- documents ------------------------------------------------------------------------------------------------------


def bundled_documents(split: str) -> list[str]:
    """Return the documents that ship with the package; `split` is "train" or "heldout" (no document is in both)."""
    if split not in ("train", "heldout"):
        raise UserError("unknown part of the bundled text", value=split, fix="use train or heldout")
    return list(read_documents(str(BUNDLED / f"{split}.jsonl")))


def read_documents(spec: str) -> Iterator[str]:
    """Stream the documents of a file, folder or glob, or of several separated by commas, in sorted file order.

    A .txt file is one document; a .jsonl file has one object a line with the text under "text"; both may end in .gz or
    .zst. Folders are searched recursively, hidden files are left out, and documents without any text are skipped.

    Raises UserError at once when a path is missing or nothing matches; while reading for a file that is not UTF-8 text,
    a damaged archive or a bad line (named as file:line); and at the end when there was no text at all.
    """
    return _stream(_find_files(spec), spec)


def _stream(files: list[Path], spec: str) -> Iterator[str]:
    found = False
    for file in files:
        for text in _read_file(file):
            if text.strip():
                found = True
                yield text
    if not found:
        raise UserError("the data has no text in it", value=spec, fix="every document is empty; give files with text")


def _find_files(spec: str) -> list[Path]:
    # A path that exists is taken as it stands, even when its name has a comma or a bracket.
    parts = [spec] if Path(spec).expanduser().exists() else [part.strip() for part in spec.split(",")]
    parts = [part for part in parts if part]
    if not parts:
        raise UserError("no data was named", value=spec, fix="give a file, a folder or a glob of .txt or .jsonl files")
    files: dict[Path, None] = {}
    for part in parts:
        files.update(dict.fromkeys(_expand(part)))
    return list(files)


def _expand(part: str) -> list[Path]:
    path = Path(part).expanduser()
    kinds = "/".join(FORMATS) + ", plain or with .gz/.zst"
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise UserError("this kind of data file cannot be read", value=part, fix=f"use {kinds}")
        return [path]
    if path.is_dir():
        inside = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        found = sorted(file for file in inside if file.is_file() and file.name.endswith(ENDINGS))
        if not found:
            raise UserError("the data folder has no text files", value=part, fix=f"looked in it for {kinds}")
        return found
    if glob.has_magic(part):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        found = sorted(file for file in matches if file.is_file() and file.name.endswith(ENDINGS))
        if not found:
            seen = f"it matches {len(matches)} paths, none of them {kinds}" if matches else "nothing matches it"
            raise UserError("the data glob finds no text files", value=part, fix=f"{seen}; check it from {Path.cwd()}")
        return found
    raise UserError(
        "the data path does not exist", value=part, fix=f"check it: looked for a file or folder {path.absolute()}"
    )


class _ZstdFrames(io.RawIOBase):
    """Bytes of a .zst file of any number of frames. zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, raw: io.BufferedIOBase, decompressor):
        self.raw, self.decompressor = raw, decompressor
        self.frame = None
        self.packed = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        while not len(self.ready):
            if self.frame is not None and self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
            packed, self.packed = self.packed or self.raw.read(1 << 17), b""
            if not packed:
                if self.frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            self.ready = memoryview(self.frame.decompress(packed))
        size = min(len(target), len(self.ready))
        target[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedIOBase]:
    """Open for reading bytes, decompressed; every failure of disk or archive becomes a UserError."""
    damaged: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    try:
        if file.name.endswith(".zst"):
            try:
                import zstandard
            except ImportError:
                raise UserError(
                    "reading .zst needs the zstandard package", value=file, fix="pip install zstandard"
                ) from None
            damaged += (zstandard.ZstdError,)
            with open(file, "rb") as raw:
                yield io.BufferedReader(_ZstdFrames(raw, zstandard.ZstdDecompressor()), 1 << 20)
        elif file.name.endswith(".gz"):
            with gzip.open(file, "rb") as stream:
                yield stream
        else:
            with open(file, "rb") as stream:
                yield stream
    except damaged as error:
        raise UserError(
            "the compressed data file is damaged", value=file, fix=f"download or pack it again ({error})"
        ) from error
    except OSError as error:
        raise UserError("the data file cannot be read", value=file, fix=error.strerror or str(error)) from error


def _read_file(file: Path) -> Iterator[str]:
    jsonl = file.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")
    with _opened(file) as stream:
        if not jsonl:
            yield _decode(stream.read(), str(file))
            return
        for number, raw in enumerate(stream, start=1):
            where = f"{file}:{number}"
            line = _decode(raw, where)
            if line.strip():
                yield _text_of(line, where)


def _decode(raw: bytes, where: str) -> str:
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if b"\0" in raw:
        raise UserError("the data file is not text (it has NUL bytes)", value=where, fix="save it as UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"the data file is not UTF-8 (byte {error.start})", value=where, fix="save it as UTF-8 text"
        ) from None


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            "a line of the data is not JSON", value=where, fix=f'one object a line, {{"text": "..."}} ({error.msg})'
        ) from None
    if not isinstance(record, dict):
        raise UserError(
            "a line of the data is not an object", value=f"{where}: {type(record).__name__}", fix='use {"text": "..."}'
        )
    if "text" not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise UserError('a line of the data has no "text"', value=where, fix=f"rename the text's key (keys: {keys})")
    if not isinstance(record["text"], str):
        raise UserError(
            'the "text" of a line is no string', value=f"{where}: {type(record['text']).__name__}", fix="use a string"
        )
    return record["text"]


# ---- hold-out -------------------------------------------------------------------------------------------------------


def split_documents(
    documents: Iterable[str], heldout_fraction: float = 0.05, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Split documents into (train, heldout); about `heldout_fraction` of them are held out.

    The side is decided by a hash of the text alone: the same text falls on the same side in every run, in any order
    and any company, and a duplicate never straddles the two. Documents over 64 000 characters are first cut at line
    ends. When the hash holds out nothing, the piece with the smallest hash is held out; a single piece gives its end.

    Raises UserError for a fraction outside (0, 1) and for data without text.
    """
    if not 0 < heldout_fraction < 1:
        raise UserError("the held-out fraction must lie between 0 and 1", value=heldout_fraction, fix="use 0.05")
    pieces = [piece for text in documents for piece in _cut(text, HOLDOUT_PIECE)]
    marks = [_unit_hash(piece, seed) for piece in pieces]
    if len(set(marks)) == 1:
        text = pieces[0]
        border = _line_end_before(text, max(1, round(len(text) * (1 - heldout_fraction))))
        pieces, marks = [text[:border], text[border:]], [1.0, 0.0]
        if not all(piece.strip() for piece in pieces):
            raise UserError("the text is too short to hold a part out", value=text[:40], fix="give more text")
    if not pieces:
        raise UserError("there is no text to split", value="0 documents", fix="give files with text")
    limit = max(heldout_fraction, min(marks))
    train = [piece for piece, mark in zip(pieces, marks, strict=True) if mark > limit]
    heldout = [piece for piece, mark in zip(pieces, marks, strict=True) if mark <= limit]
    if not train:
        raise UserError("the hold-out leaves no text to train on", value=heldout_fraction, fix="lower the fraction")
    return train, heldout


def _unit_hash(text: str, seed: int) -> float:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def _line_end_before(text: str, limit: int) -> int:
    """The last line end at or before `limit`, else the last space, else `limit` itself; never 0."""
    for mark in ("\n", " "):
        border = text.rfind(mark, 1, limit) + 1
        if border > 1:
            return border
    return limit


def _cut(text: str, limit: int) -> Iterator[str]:
    while len(text) > limit:
        border = _line_end_before(text, limit)
        yield text[:border]
        text = text[border:]
    if text.strip():
        yield text


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Packed token ids.

    ids [N, context] int64; positions [N, context] int64, restarting at 0 at the start of every row and document;
    requested: how many tokens were asked for (None: all there are).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    requested: int | None = None

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

    def split(self, n: int) -> tuple["Rows", "Rows"]:
        """Return the first `n` rows and the rest."""
        if not 0 <= n <= len(self):
            raise UserError("cannot take that many rows", value=n, fix=f"there are {len(self)}")
        return Rows(self.ids[:n], self.positions[:n]), Rows(self.ids[n:], self.positions[n:])


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
) -> Rows:
    """Tokenise documents in order and pack them into full rows of `context` tokens.

    A document is cut into windows of `context` tokens; what is left of it shares rows with the remains of others, with
    positions restarting at each border. Special tokens are the tokenizer's own habit (a BOS per document where it adds
    one). Reading stops when `tokens` (rounded up to whole rows) are in hand; None takes everything. The last,
    incomplete row is dropped. `long_only` keeps only full windows of a single document. `shuffle` orders the rows by
    `seed`; the same input, tokenizer and seed give the same rows.

    Raises UserError when there is not a single full row. Fewer rows than asked for are not an error: see
    `Rows.shortfall`.
    """
    if context < 2:
        raise UserError("the context is too short", value=context, fix="use at least 2 tokens")
    if tokens is not None and tokens < 1:
        raise UserError("at least one token must be asked for", value=tokens, fix="ask for one context or more")
    wanted = None if tokens is None else -(-tokens // context)
    packer = _Packer(context, long_only)
    count = total = longest = 0
    for ids in _tokenised(documents, tokenizer):
        count, total, longest = count + 1, total + len(ids), max(longest, len(ids))
        packer.add(ids)
        if wanted is not None and packer.rows >= wanted:
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
    ids, positions = packer.tensors(wanted)
    if shuffle:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        ids, positions = ids[order], positions[order]
    return Rows(ids, positions, requested=tokens)


def _tokenised(documents: Iterable[str], tokenizer) -> Iterator[torch.Tensor]:
    batch: list[str] = []

    def flush() -> Iterator[torch.Tensor]:
        if batch:
            # verbose=False: rows are cut to the context below, so "longer than the maximum length" would mislead.
            encoded = tokenizer(batch, add_special_tokens=True, truncation=False, padding=False, verbose=False)
            for ids in encoded["input_ids"]:
                yield torch.tensor(ids, dtype=torch.int64)
            batch.clear()

    for document in documents:
        for piece in _cut(document, LONGEST_DOCUMENT):
            batch.append(piece)
            if len(batch) == TOKENIZER_BATCH or len(piece) > LONGEST_DOCUMENT // TOKENIZER_BATCH:
                yield from flush()
    yield from flush()


class _Packer:
    def __init__(self, context: int, long_only: bool):
        self.context, self.long_only = context, long_only
        self.rows = 0
        self.ids: list[torch.Tensor] = []  # each [n, context]
        self.positions: list[torch.Tensor] = []
        self.open: list[torch.Tensor] = []  # pieces of the row being filled
        self.used = 0

    def add(self, ids: torch.Tensor) -> None:
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

    def tensors(self, wanted: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self.ids)[:wanted], torch.cat(self.positions)[:wanted]


# ---- text sampled from the teacher ----------------------------------------------------------------------------------


def self_text(
    model,
    tokenizer,
    tokens: int,
    context: int,
    *,
    seed: int = 0,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
    cache_path: Path | None = None,
) -> Rows:
    """Sample rows of text from a causal language model `model` (transformers, already on `device`), data-free.

    Every document starts with the tokenizer's BOS, where it adds one, and a token drawn uniformly from the vocabulary
    without special tokens; then the model is sampled at `temperature` until it ends the document (EOS) and the next
    one starts in the same row. A document never attends to the one before it, so all rows are full and positions
    restart exactly as in `pack_rows`.

    `tokens` is rounded up to whole rows. Batch b has its own generator, seeded from (`seed`, b): rows do not depend on
    how many were asked for, and with `cache_path` (a folder) finished batches are kept, so that a run that was killed
    goes on with the same rows. The same seed gives the same bytes on a CPU. `progress` is called with the number of
    tokens just sampled.

    Raises UserError for a temperature that is not positive and when the model's logits are not finite.
    """
    if temperature <= 0:
        raise UserError("the sampling temperature must be positive", value=temperature, fix="use 1.0")
    if tokens < 1 or context < 2 or batch_size < 1:
        asked = f"{tokens} tokens, context {context}, batch {batch_size}"
        raise UserError("nothing to sample", value=asked, fix="ask for at least 1 token, context 2, batch 1")
    wanted = -(-tokens // context)
    sampler = _Sampler(model, tokenizer, context, batch_size, torch.device(device), temperature)
    folder = None if cache_path is None else _cache_folder(Path(cache_path) / sampler.key(seed))
    report = progress or (lambda _: None)
    ids, positions = [], []
    for index in range(-(-wanted // batch_size)):
        used = min(batch_size, wanted - index * batch_size)
        batch = _load_batch(folder, index, (batch_size, context))
        if batch is None:
            batch = sampler.sample(seed, index, partial(report, used))
            _save_batch(folder, index, batch)
        else:
            report(used * context)
        ids.append(batch["ids"][:used].long())
        positions.append(batch["positions"][:used].long())
    return Rows(torch.cat(ids), torch.cat(positions), requested=tokens)


class _Sampler:
    def __init__(self, model, tokenizer, context: int, batch_size: int, device: torch.device, temperature: float):
        self.model, self.context, self.batch_size = model, context, batch_size
        self.device, self.temperature = device, temperature
        probe = tokenizer("a", add_special_tokens=True)["input_ids"]
        bos = tokenizer.bos_token_id
        self.bos = bos if bos is not None and probe[:1] == [bos] else None
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        self.ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
        special = set(tokenizer.all_special_ids)
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # The embedding is often padded beyond the vocabulary; only ids the tokenizer knows may start a document.
        size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
        self.starts = torch.tensor([i for i in range(size) if i not in special], device=device)

    def key(self, seed: int) -> str:
        """Name of the cache folder: changes with anything that changes the text, weights included (by a sample)."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(repr((seed, self.context, self.batch_size, self.temperature, self.bos, self.ends)).encode())
        digest.update(repr(self.starts.shape).encode())
        for name, weight in self.model.named_parameters():
            sample = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample)
        return digest.hexdigest()

    @torch.inference_mode()
    def sample(self, seed: int, index: int, step_done: Callable[[], None]) -> dict[str, torch.Tensor]:
        mixed = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(mixed, "big"))
        batch, device = self.batch_size, self.device
        ids = torch.zeros(batch, self.context, dtype=torch.int64, device=device)
        positions = torch.zeros_like(ids)
        visible = torch.zeros_like(ids)  # 1 where the row's present document is
        position = torch.zeros(batch, dtype=torch.int64, device=device)
        ends = torch.tensor(self.ends, dtype=torch.int64, device=device)
        first_free = 0 if self.bos is None else 1  # position of a document's random token
        cache, logits = DynamicCache(config=self.model.config), None
        for t in range(self.context):
            # Every draw is made for every row, needed or not: the stream of random numbers never depends on the text.
            pick = torch.randint(len(self.starts), (batch,), generator=generator, device=device)
            token = self.starts[pick]
            if logits is not None:
                chances = torch.softmax(logits.float() / self.temperature, dim=-1)
                drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
                token = torch.where(position > first_free, drawn, token)
            if self.bos is not None:
                token = torch.where(position == 0, self.bos, token)
            ids[:, t], positions[:, t] = token, position
            visible[:, t] = 1
            visible.masked_fill_((position == 0)[:, None] & (torch.arange(self.context, device=device) < t), 0)
            if t + 1 < self.context:
                out = self.model(
                    input_ids=token[:, None],
                    attention_mask=visible[:, : t + 1],
                    position_ids=position[:, None],
                    cache=cache,
                    use_cache=True,
                )
                logits = out.logits[:, -1]
                if not torch.isfinite(logits).all():
                    raise UserError(
                        "the teacher's logits are not finite",
                        value=f"token {t} of batch {index}",
                        fix="use --dtype float32",
                    )
            ended = torch.isin(token, ends) & (position > first_free)
            position = torch.where(ended, 0, position + 1)
            step_done()
        return {"ids": ids.int().cpu(), "positions": positions.int().cpu()}


def _cache_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("the sampled text cannot be kept", value=folder, fix=f"check it ({error.strerror})") from error
    return folder


def _load_batch(folder: Path | None, index: int, shape: tuple[int, int]) -> dict[str, torch.Tensor] | None:
    if folder is None:
        return None
    try:
        batch = load_tensors((folder / f"batch-{index:05d}.safetensors").read_bytes())
    except FileNotFoundError:
        return None
    except Exception:  # a damaged file is sampled again: the result is the same by construction
        return None
    good = set(batch) == {"ids", "positions"} and all(tuple(tensor.shape) == shape for tensor in batch.values())
    return batch if good else None


def _save_batch(folder: Path | None, index: int, batch: dict[str, torch.Tensor]) -> None:
    if folder is None:
        return
    name = folder / f"batch-{index:05d}.safetensors"
    partial = name.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_bytes(save_tensors(batch))
        os.replace(partial, name)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError("the sampled text cannot be kept", value=name, fix=f"check it ({error.strerror})") from error
