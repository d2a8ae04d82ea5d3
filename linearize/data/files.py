"""Local text files as shards that can be read from any document on, whatever their size."""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from linearize.data.holdout import PIECE, line_end_before
from linearize.errors import UserError

FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")
ENDINGS = (*(kind + packed for kind in FORMATS for packed in COMPRESSIONS), ".parquet")
KINDS = "/".join(FORMATS) + " (plain or with .gz/.zst) or .parquet"

# A large .jsonl file is read as several shards of this many bytes, so that shuffling the shards shuffles the file too.
SHARD_BYTES = 64 * 2**20
# A line is held whole to be parsed. Longer ones are mistakes: a JSON array on one line, a binary file.
LONGEST_LINE = 256 * 2**20
CHUNK = 2**18


def exists(text: str) -> bool:
    """Whether the text names something on disk."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, a home that is nobody's
        return False


def find_files(spec: str) -> list[Path]:
    """The text files that a file, folder or glob names, or several of them separated by commas, sorted within each.

    Raises UserError when a path is missing, nothing matches, or the kind of file is unknown.
    """
    # A path that exists is taken as it stands, even when its name has a comma or a bracket.
    parts = [spec] if exists(spec) else [part.strip() for part in spec.split(",")]
    parts = [part for part in parts if part]
    if not parts:
        raise UserError("no data was named", value=spec, fix="give a file, a folder or a glob of text files")
    files: dict[Path, None] = {}
    for part in parts:
        files.update(dict.fromkeys(_expand(part)))
    return list(files)


def _expand(part: str) -> list[Path]:
    path = Path(part).expanduser() if exists(part) else Path(part)
    if exists(part) and path.is_file():
        if not path.name.endswith(ENDINGS):
            raise UserError("this kind of data file cannot be read", value=part, fix=f"use {KINDS}")
        return [path]
    if exists(part):
        inside = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        found = sorted(file for file in inside if file.name.endswith(ENDINGS) and file.is_file())
        if not found:
            raise UserError("the data folder has no text files", value=part, fix=f"looked in it for {KINDS}")
        return found
    if glob.has_magic(part):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        found = sorted(file for file in matches if file.is_file() and file.name.endswith(ENDINGS))
        if not found:
            seen = f"it matches {len(matches)} paths, none of them {KINDS}" if matches else "nothing matches it"
            raise UserError("the data glob finds no text files", value=part, fix=f"{seen}; check it from {Path.cwd()}")
        return found
    raise UserError(
        "the data path does not exist", value=part, fix=f"check it: looked for a file or folder {path.absolute()}"
    )


def fingerprint(files: Sequence[Path]) -> str:
    """Hash (hex) of the files' names, sizes and content: all of it up to 64 kB a file, else 16 samples of 4 kB."""
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        with _opened(file, packed=True) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name} {size} ".encode("utf-8", "surrogateescape"))
            if size <= 2**16:
                digest.update(stream.read(2**16))
                continue
            for sample in range(16):
                stream.seek(sample * (size - 4096) // 15)
                digest.update(stream.read(4096))
    return digest.hexdigest()


@dataclass(frozen=True)
class FileShard:
    """A file, or a part of one: the lines that begin in bytes [start, stop) of a .jsonl, a row group of a .parquet."""

    file: Path
    column: str = "text"
    start: int = 0
    stop: int | None = None

    def read(self, offset: int | None = None) -> Iterator[tuple[str, int]]:
        """Stream (document, offset behind it); `offset` goes on behind the document that came with it.

        Offsets are bytes of the unpacked file, rows of a .parquet's row group. A .txt file is one document, cut at line
        ends into pieces of at most 64 000 characters. Raises UserError for whatever cannot be read.
        """
        if self.file.name.endswith(".parquet"):
            yield from self._read_parquet(offset or 0)
            return
        with _opened(self.file) as stream:
            if self.file.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
                yield from self._read_lines(stream, offset)
            else:
                yield from self._read_text(stream, offset or 0)

    def _read_text(self, stream: io.BufferedIOBase, position: int) -> Iterator[tuple[str, int]]:
        _skip(stream, position)
        decoder = codecs.getincrementaldecoder("utf-8")()
        raw, text, decoded = stream.read(CHUNK), "", position
        if not position and raw.startswith(codecs.BOM_UTF8):
            raw, position, decoded = raw[3:], 3, 3
        while True:
            _refuse_binary(raw, lambda: str(self.file))
            pending = len(decoder.getstate()[0])
            try:
                text += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _not_utf8(decoded - pending + error.start, str(self.file)) from None
            decoded += len(raw)
            while len(text) > PIECE:
                border = line_end_before(text[: PIECE + 1], PIECE)
                piece, text = text[:border], text[border:]
                position += len(piece.encode())
                if piece.strip():
                    yield piece, position
            if not raw:
                break
            raw = stream.read(CHUNK)
        if text.strip():
            yield text, position + len(text.encode())

    def _read_lines(self, stream: io.BufferedIOBase, offset: int | None) -> Iterator[tuple[str, int]]:
        position = self.start if offset is None else offset
        if offset is None and position:
            # The line that straddles the border belongs to the shard before. One byte back, lest a whole line be lost.
            position -= 1
            _skip(stream, position)
            position += len(self._line(stream, position))
        else:
            _skip(stream, position)
        while self.stop is None or position < self.stop:
            line = self._line(stream, position)
            if not line:
                return
            place = _Line(self.file, position)
            position += len(line)
            text = _text_of(line, place, self.column)
            if text.strip():
                yield text, position

    def _line(self, stream: io.BufferedIOBase, position: int) -> bytes:
        line = stream.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            where = _Line(self.file, position)()
            fix = "write one JSON object a line, each with one document"
            raise UserError(f"a line of the data is longer than {LONGEST_LINE // 2**20} MiB", value=where, fix=fix)
        return line

    def _read_parquet(self, offset: int) -> Iterator[tuple[str, int]]:
        with _parquet(self.file) as table:
            _check_column(table, self.file, self.column)
            row = 0
            for batch in table.iter_batches(batch_size=512, row_groups=[self.start], columns=[self.column]):
                if row + len(batch) <= offset:
                    row += len(batch)
                    continue
                for text in batch.column(0).to_pylist():
                    row += 1
                    if row > offset and text is not None and text.strip():
                        yield text, row


def shards(files: Sequence[Path], column: str) -> list[FileShard]:
    """The shards of the files, in order. Reads sizes and the footers of .parquet files, nothing else."""
    found: list[FileShard] = []
    for file in files:
        if file.name.endswith(".parquet"):
            with _parquet(file) as table:
                _check_column(table, file, column)
                found += [FileShard(file, column, group) for group in range(table.num_row_groups)]
        elif file.name.endswith(".jsonl"):
            with _opened(file, packed=True) as stream:
                size = os.fstat(stream.fileno()).st_size
            borders = [*range(0, max(1, size), SHARD_BYTES), None]
            pairs = zip(borders, borders[1:], strict=False)
            found += [FileShard(file, column, start, stop) for start, stop in pairs]
        else:
            found.append(FileShard(file, column))
    return found


# ---- bytes ----------------------------------------------------------------------------------------------------------


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
def _opened(file: Path, packed: bool = False) -> Iterator[io.BufferedIOBase]:
    """Open for reading bytes, unpacked unless `packed`; every failure of disk or archive becomes a UserError."""
    damaged: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    try:
        if file.name.endswith(".zst") and not packed:
            try:
                import zstandard
            except ImportError:
                raise UserError(
                    "reading .zst needs the zstandard package", value=file, fix="pip install zstandard"
                ) from None
            damaged += (zstandard.ZstdError,)
            with open(file, "rb") as raw:
                yield io.BufferedReader(_ZstdFrames(raw, zstandard.ZstdDecompressor()), 1 << 20)
        elif file.name.endswith(".gz") and not packed:
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


def _skip(stream: io.BufferedIOBase, count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count:
        chunk = stream.read(min(count, 2**20))
        if not chunk:
            raise EOFError("the file is shorter than it was")
        count -= len(chunk)


# ---- records --------------------------------------------------------------------------------------------------------


class _Line:
    """FILE:NUMBER of the line that begins at a byte; lines are counted only when an error needs the number."""

    def __init__(self, file: Path, position: int):
        self.file, self.position = file, position

    def __call__(self) -> str:
        number, left = 1, self.position
        with _opened(self.file) as stream:
            while left and (chunk := stream.read(min(left, 2**20))):
                number, left = number + chunk.count(b"\n"), left - len(chunk)
        return f"{self.file}:{number}"


def _refuse_binary(raw: bytes, where: Callable[[], str]) -> None:
    if b"\0" in raw:
        raise UserError("the data file is not text (it has NUL bytes)", value=where(), fix="save it as UTF-8 text")


def _not_utf8(byte: int, where: str) -> UserError:
    return UserError(f"the data file is not UTF-8 (byte {byte})", value=where, fix="save it as UTF-8 text")


def _text_of(line: bytes, where: Callable[[], str], column: str) -> str:
    """The text of one line of .jsonl; "" for a blank line and for null."""
    _refuse_binary(line, where)
    try:
        decoded = line.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error.start, where()) from None
    if not decoded.strip():
        return ""
    form = f'{{"{column}": "..."}}'
    try:
        record = json.loads(decoded)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(
            "a line of the data is not JSON", value=where(), fix=f"one object a line, {form} ({reason})"
        ) from None
    if not isinstance(record, dict):
        raise UserError(
            "a line of the data is not an object", value=f"{where()}: {type(record).__name__}", fix=f"use {form}"
        )
    if column not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise UserError(
            f'a line of the data has no "{column}"',
            value=where(),
            fix=f"name the text's key with --data-column (keys: {keys})",
        )
    text = record[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f'the "{column}" of a line is no string', value=f"{where()}: {type(text).__name__}", fix="use a string"
        )
    return text


@contextmanager
def _parquet(file: Path) -> Iterator:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading .parquet needs the pyarrow package", value=file, fix="pip install pyarrow") from None
    try:
        with open(file, "rb") as stream:
            yield pyarrow.parquet.ParquetFile(stream)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own are about the content
            raise UserError("the data file cannot be read", value=file, fix=error.strerror) from error
        raise UserError("the parquet file is damaged", value=file, fix=f"download it again ({error})") from error


def _check_column(table, file: Path, column: str) -> None:
    import pyarrow

    names = table.schema_arrow.names
    if column not in names:
        fix = f"name the text's column with --data-column (columns: {', '.join(names) or 'none'})"
        raise UserError(f'the data has no column "{column}"', value=file, fix=fix)
    kind = table.schema_arrow.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f'the column "{column}" is no text', value=f"{file}: {kind}", fix="name one of strings")
