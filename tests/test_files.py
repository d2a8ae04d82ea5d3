"""Local files: pieces, offsets, shards, parquet, damage, and bounded memory."""

import gzip
import json
import random
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from linearize.data import files, open_sources, read_documents
from linearize.data.files import FileShard, find_files, fingerprint, shards
from linearize.data.holdout import PIECE, cut
from linearize.errors import UserError


def parquet(path, columns: dict, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


# ---- pieces and offsets


def test_a_long_text_comes_in_the_pieces_of_the_whole(tmp_path, monkeypatch):
    draw = random.Random(0)
    words = ["é", "語", "🙂", "a", "bc", " ", "  ", "\n", "\r\n", "\n\n"]
    text = "".join(draw.choice(words) for _ in range(150_000)) + "z" * 150_000 + " end"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
    monkeypatch.setattr(files, "CHUNK", 10_007)  # borders fall inside of characters
    shard = FileShard(tmp_path / "a.txt")
    found = list(shard.read())
    assert [piece for piece, _ in found] == list(cut(text, PIECE)) and len(found) > 5
    for i, (_, offset) in enumerate(found):
        assert list(shard.read(offset)) == found[i + 1 :]


def test_every_line_is_in_one_shard(tmp_path, monkeypatch):
    texts = ["x" * n for n in (1, 40, 3, 200, 7, 7, 90, 1)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n\n\n")
    for size in range(1, 130):
        monkeypatch.setattr(files, "SHARD_BYTES", size)
        parts = shards([path], "text")
        assert len(parts) == -(-path.stat().st_size // size)
        assert [text for part in parts for text, _ in part.read()] == texts


def test_errors_name_the_line_in_any_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 64)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 30 + "broken\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n' * 30 + b"broken\n", mtime=0))
    for name in ("a.jsonl", "b.jsonl.gz"):
        with pytest.raises(UserError, match=f"not JSON.*{name}:31"):
            list(read_documents(str(tmp_path / name)))


@pytest.mark.parametrize("at", [0, 5, 10_006, 10_007, 25_000])
def test_a_byte_that_is_no_text_is_named(tmp_path, monkeypatch, at):
    monkeypatch.setattr(files, "CHUNK", 10_007)
    raw = bytearray("é".encode() * 15_000)
    raw[at] = 0xFF
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(UserError, match=r"not UTF-8 .byte (\d+)") as caught:
        list(read_documents(str(tmp_path / "a.txt")))
    named = int(str(caught.value).split("byte ")[1].split(")")[0])
    assert at - 1 <= named <= at  # a character that loses its second byte is bad from its first on


def test_the_end_of_a_file_inside_of_a_character(tmp_path):
    (tmp_path / "a.txt").write_bytes("text é".encode()[:-1])
    with pytest.raises(UserError, match="not UTF-8 .byte 5"):
        list(read_documents(str(tmp_path / "a.txt")))


def test_null_is_an_empty_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n')
    parquet(tmp_path / "b.parquet", {"text": [None, "two", " "]})
    assert list(read_documents(str(tmp_path))) == ["one", "two"]


def test_the_text_may_be_in_another_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    parquet(tmp_path / "b.parquet", {"body": ["two", "three"], "n": [1, 2]})
    assert list(read_documents(str(tmp_path), column="body")) == ["one", "two", "three"]
    [source] = open_sources(str(tmp_path), column="body")
    assert len(list(source.documents())) == 2


# ---- memory and laziness


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of one line without end, and one of many."""
    (tmp_path / "line.txt").write_text("word " * 2_000_000)
    (tmp_path / "lines.jsonl").write_text('{"text": "' + "w" * 1000 + '"}\n' * 1)
    with open(tmp_path / "lines.jsonl", "a") as stream:
        for _ in range(10_000):
            stream.write('{"text": "' + "w" * 1000 + '"}\n')
    for name in ("line.txt", "lines.jsonl"):
        tracemalloc.start()
        size = sum(len(text) for text in read_documents(str(tmp_path / name)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size >= 9_900_000 and peak < 3_000_000, (name, size, peak)


def test_a_line_that_is_too_long_is_refused_before_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 2**20)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "short"}\n{"text": "' + "w" * (8 * 2**20) + '"}\n')
    tracemalloc.start()
    with pytest.raises(UserError, match="longer than 1 MiB.*a.jsonl:2"):
        list(read_documents(str(path)))
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


def test_opening_a_large_folder_reads_little_of_it(tmp_path, monkeypatch):
    draw = random.Random(0)
    for i in range(60):
        lines = (json.dumps({"text": f"{i} {j} {draw.random()}"}) for j in range(50))
        (tmp_path / f"{i:02}.jsonl").write_text("\n".join(lines))
    read, plain = [], FileShard.read

    def counted(self, offset=None):
        for item in plain(self, offset):
            read.append(self.file.name)
            yield item

    monkeypatch.setattr(FileShard, "read", counted)
    [source] = open_sources(str(tmp_path))
    assert len(read) < 300 and len(set(read)) < 7
    read.clear()
    monkeypatch.setattr("linearize.data.sources.BLOCK_CHARACTERS", 2000)
    source.block({}, 0)
    assert len(read) < 120 and len(set(read)) == 8  # in turn from the first eight shards


# ---- what cannot be read


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"], "n": [1]}, 'no column "text".*b.parquet.*--data-column .columns: body, n'),
        ({"text": [1, 2]}, 'column "text" is no text.*b.parquet: int64'),
        ({"text": [["x"]]}, 'column "text" is no text.*list'),
        ({"text": [None, ""]}, "no text in it"),
    ],
)
def test_parquet_without_text(tmp_path, columns, message):
    if columns["text" if "text" in columns else "body"][0] is None:
        columns = {"text": pyarrow.array(columns["text"], pyarrow.string())}
    path = parquet(tmp_path / "b.parquet", columns)
    with pytest.raises(UserError, match=message):
        list(read_documents(str(path)))
    with pytest.raises(UserError, match=message):
        open_sources(str(path))


def test_dictionary_and_large_strings_are_text(tmp_path):
    parquet(tmp_path / "a.parquet", {"text": pyarrow.array(["x", "y", "x"]).dictionary_encode()})
    parquet(tmp_path / "b.parquet", {"text": pyarrow.array(["z"], pyarrow.large_string())})
    assert list(read_documents(str(tmp_path))) == ["x", "y", "x", "z"]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_damaged_parquet(tmp_path, part):
    path = parquet(tmp_path / "b.parquet", {"text": [f"{i} " * 50 for i in range(2000)]})
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * part)])
    with pytest.raises(UserError, match="parquet file is damaged.*b.parquet"):
        list(read_documents(str(path)))
    path.write_bytes(raw[:2000] + bytes(b ^ 0x5A for b in raw[2000:9000]) + raw[9000:])  # the footer is whole
    with pytest.raises(UserError, match="parquet file is damaged.*b.parquet"):
        list(read_documents(str(path)))


@pytest.mark.parametrize(
    ("package", "name", "message"),
    [("pyarrow", "b.parquet", "pip install pyarrow"), ("datasets", "hub:some/set", "datasets package.*pip install")],
)
def test_missing_packages_are_named(tmp_path, monkeypatch, package, name, message):
    parquet(tmp_path / "b.parquet", {"text": ["x"]})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=message):
        open_sources(name if name.startswith("hub:") else str(tmp_path / name))


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(UserError, match="cannot be read.*gone.jsonl.*No such file"):
        list(FileShard(tmp_path / "gone.jsonl").read())
    for name in ("x" * 5000, "~nobody-at-all/x.txt", "a\0b"):
        with pytest.raises(UserError, match="does not exist"):
            find_files(name)


def test_fingerprints_see_content_size_and_names(tmp_path):
    path = tmp_path / "a.txt"

    def prints(raw: bytes, name: str = "a.txt") -> str:
        (tmp_path / name).write_bytes(raw)
        return fingerprint([tmp_path / name])

    small, large = b"x" * 1000, b"x" * 300_000
    seen = [prints(small), prints(b"y" + small[1:]), prints(small + b"x"), prints(small, "b.txt"), prints(large)]
    seen += [prints(b"y" + large[1:]), prints(large[:-1] + b"y")]
    assert len(set(seen)) == len(seen)
    assert prints(small) == seen[0] and path.exists()
