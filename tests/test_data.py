"""Documents, hold-out and packing."""

import gzip
import json

import pytest
import torch
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from linearize.data import Rows, bundled_documents, content_hash, pack_rows, read_documents, split_documents
from linearize.data import rows as rows_module
from linearize.errors import UserError

WORDS = [f"w{i}" for i in range(60)]


def make_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def words(n: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(n))


# ---- documents


def test_reads_files_folders_and_globs_in_sorted_order(tmp_path):
    (tmp_path / "b.txt").write_text("second\nfile", "utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "title": "x"}\n', "utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "sub" / "d.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "fourth"}\n{"text": "  "}\n'))
    (tmp_path / ".hidden.txt").write_text("no", "utf-8")
    (tmp_path / "notes.md").write_text("no", "utf-8")
    expected = ["one", "two", "second\nfile", "third", "fourth"]
    assert list(read_documents(str(tmp_path))) == expected
    assert list(read_documents(f"{tmp_path}/**/*")) == expected
    assert list(read_documents(f"{tmp_path}/b.txt, {tmp_path}/sub,{tmp_path}/b.txt")) == ["second\nfile", *expected[3:]]


def test_path_with_a_comma_or_bracket_is_taken_as_it_stands(tmp_path):
    for name in ("a,b.txt", "a[1].txt"):
        (tmp_path / name).write_text(name, "utf-8")
        assert list(read_documents(str(tmp_path / name))) == [name]


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_text("text", "utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "line"}', "utf-8-sig")
    assert list(read_documents(str(tmp_path))) == ["text", "line"]


def test_zst_of_several_frames_is_read_whole(tmp_path):
    frames = [zstandard.compress(json.dumps({"text": text}).encode() + b"\n") for text in ("one", "two")]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert list(read_documents(str(tmp_path / "a.jsonl.zst"))) == ["one", "two"]


def test_reading_is_lazy(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnot json\n', "utf-8")
    documents = read_documents(str(tmp_path))
    assert next(documents) == "one"
    with pytest.raises(UserError, match="not JSON.*a.jsonl:2"):
        next(documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfebad", "not UTF-8.*a.txt"),
        ("a.txt", b"te\0xt", "NUL bytes.*a.txt"),
        ("a.txt", b" \n", "no text in it"),
        ("a.jsonl", b"", "no text in it"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', "not an object.*a.jsonl:2: list"),
        ("a.jsonl", b'{"content": "x"}\n', 'no "text".*a.jsonl:1.*keys: content'),
        ("a.jsonl", b'{"text": 3}\n', "no string.*a.jsonl:1: int"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not UTF-8.*a.jsonl:1"),
        ("a.txt.gz", b"plain", "damaged.*a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"some text " * 50, mtime=0)[:-12], "damaged.*a.txt.gz"),
        ("a.txt.zst", b"plain text", "damaged.*a.txt.zst"),
        ("a.csv", b"text", "cannot be read.*a.csv.*.jsonl"),
        ("a.parquet", b"PAR1", "parquet file is damaged.*a.parquet"),
    ],
)
def test_bad_files_are_user_errors(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_documents(str(path)))


def test_truncated_zst_is_a_user_error(tmp_path):
    whole = zstandard.compress(" ".join(str(i * i) for i in range(90_000)).encode())
    path = tmp_path / "a.txt.zst"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged.*a.txt.zst"):
        list(read_documents(str(path)))


def test_missing_data_is_an_error_before_reading(tmp_path):
    with pytest.raises(UserError, match="does not exist.*nowhere.*looked for"):
        read_documents(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no text files.*looked in it"):
        read_documents(str(tmp_path))
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(UserError, match="matches 1 paths"):
        read_documents(f"{tmp_path}/*.md")
    with pytest.raises(UserError, match="nothing matches it"):
        read_documents(f"{tmp_path}/*.txt")
    with pytest.raises(UserError, match="no data was named"):
        read_documents(" , ")


def test_missing_zstandard_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"x"))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UserError, match="pip install zstandard"):
        list(read_documents(str(tmp_path)))


def test_bundled_text_is_long_enough_and_its_parts_are_disjoint():
    train, heldout = bundled_documents("train"), bundled_documents("heldout")
    assert len(train) >= 50 and len(heldout) >= 15
    assert not set(train) & set(heldout)
    assert sum(len(text.split()) for text in train + heldout) >= 30_000
    assert min(len(text.split()) for text in train + heldout) >= 200
    # Held-out text that repeats a paragraph of the training text would flatter the student.
    paragraphs = {part.strip() for text in train for part in text.split("\n") if len(part) > 60}
    assert not [part for text in heldout for part in text.split("\n") if part.strip() in paragraphs]
    with pytest.raises(UserError, match="unknown part.*test"):
        bundled_documents("test")


# ---- hold-out


def test_holdout_is_disjoint_stable_and_independent_of_order():
    documents = [f"document {i} {words(5, i)}" for i in range(400)]
    train, heldout = split_documents(documents, 0.1)
    assert set(train) | set(heldout) == set(documents) and not set(train) & set(heldout)
    assert 20 <= len(heldout) <= 65
    again = split_documents(reversed(documents), 0.1)
    assert set(again[1]) == set(heldout)
    # Company does not matter: what is held out of a part was held out of the whole.
    assert set(split_documents(documents[:200], 0.1)[1]) == set(heldout) & set(documents[:200])
    assert set(split_documents(documents, 0.1, seed=1)[1]) != set(heldout)


def test_holdout_is_the_same_in_every_process():
    documents = [f"document {i}" for i in range(30)]
    assert split_documents(documents, 0.1)[1] == ["document 5", "document 25"]


def test_duplicates_never_straddle_the_holdout():
    documents = [f"document {i}" for i in range(30)] * 2
    train, heldout = split_documents(documents, 0.1)
    assert not set(train) & set(heldout)


def test_holdout_of_few_or_single_documents_is_not_empty():
    train, heldout = split_documents(["one", "two", "three"], 0.01)
    assert len(heldout) == 1 and len(train) == 2
    lines = "".join(f"line {i}\n" for i in range(200))
    train, heldout = split_documents([lines], 0.1)
    assert train[0] + heldout[0] == lines and heldout[0].startswith("line ")
    assert 0.05 < len(heldout[0]) / len(lines) < 0.15
    long = "".join(f"line {i}\n" for i in range(60_000))
    train, heldout = split_documents([long], 0.2)
    assert sorted("".join(train + heldout)) == sorted(long) and len(heldout) >= 1


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_bad_holdout_fraction(fraction):
    with pytest.raises(UserError, match="between 0 and 1"):
        split_documents(["a", "b"], fraction)


def test_nothing_to_hold_out():
    with pytest.raises(UserError, match="no text to split"):
        split_documents([])
    with pytest.raises(UserError, match="too short to hold"):
        split_documents(["x"])


# ---- packing


def test_windows_then_tails_with_boundaries():
    tokenizer = make_tokenizer()
    documents = [words(9), words(2, 20), words(5, 30)]  # with <s>: 10, 3 and 6 tokens
    rows = pack_rows(documents, tokenizer, context=4, shuffle=False)
    text = [" ".join(tokenizer.convert_ids_to_tokens(row)) for row in rows.ids.tolist()]
    assert text == [
        "<s> w0 w1 w2",
        "w3 w4 w5 w6",
        "w7 w8 <s> w20",  # the tail of the first document, then the second one
        "<s> w30 w31 w32",
    ]  # and w21 w33 w34, an incomplete row, is dropped
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert rows.ids.dtype == rows.positions.dtype == torch.int64
    assert (len(rows), rows.context, rows.tokens, rows.requested) == (4, 4, 16, None)


def test_no_bos_where_the_tokenizer_adds_none():
    rows = pack_rows([words(8)], make_tokenizer(bos=False), context=4, shuffle=False)
    assert rows.ids.tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]


def test_a_row_may_hold_many_documents():
    rows = pack_rows([words(1, i) for i in range(9)], make_tokenizer(), context=6, shuffle=False)
    assert rows.positions.tolist() == [[0, 1] * 3] * 3
    assert rows.ids[1].tolist() == [1, 6, 1, 7, 1, 8]


def test_long_only_keeps_windows_of_single_documents():
    documents = [words(9), words(2, 20), words(5, 30)]
    rows = pack_rows(documents, make_tokenizer(), context=4, long_only=True, shuffle=False)
    assert rows.ids[:, 0].tolist() == [1, 6, 1]
    assert (rows.positions == torch.arange(4)).all()
    with pytest.raises(UserError, match="no document has as many as 11 tokens .got .the longest has 10"):
        pack_rows(documents, make_tokenizer(), context=11, long_only=True)


def test_every_token_is_used_once_and_shuffling_only_reorders():
    documents = [words(3 + i % 7, i) for i in range(50)]
    plain = pack_rows(documents, make_tokenizer(), context=5, shuffle=False)
    total = sum(4 + i % 7 for i in range(50))
    assert plain.tokens == total // 5 * 5
    mixed = pack_rows(documents, make_tokenizer(), context=5, seed=3)
    assert sorted(mixed.ids.tolist()) == sorted(plain.ids.tolist())
    assert content_hash(mixed) != content_hash(plain)
    assert content_hash(mixed) == content_hash(pack_rows(iter(documents), make_tokenizer(), context=5, seed=3))
    assert content_hash(mixed) != content_hash(pack_rows(documents, make_tokenizer(), context=5, seed=4))


def test_content_hash_sees_the_positions():
    rows = pack_rows([words(8)], make_tokenizer(), context=4, shuffle=False)
    assert content_hash(rows) != content_hash(Rows(rows.ids, torch.zeros_like(rows.positions)))
    assert content_hash(rows) != content_hash(Rows(rows.ids.view(1, 8), rows.positions.view(1, 8)))


def test_reading_stops_once_there_are_enough_tokens():
    read = []

    def documents():
        for i in range(10_000):
            read.append(i)
            yield words(20, i)

    rows = pack_rows(documents(), make_tokenizer(), context=8, tokens=50)
    assert len(rows) == 7 and rows.requested == 50 and rows.shortfall is None
    assert len(read) <= rows_module.TOKENIZER_BATCH


def test_a_long_document_is_cut_before_tokenising(monkeypatch):
    monkeypatch.setattr(rows_module, "LONGEST_DOCUMENT", 40)
    seen = []
    tokenizer = make_tokenizer()

    def spy(batch, **options):
        seen.extend(batch)
        return tokenizer(batch, **options)

    rows = pack_rows([words(200)], spy, context=8, tokens=16)
    assert len(rows) == 2 and len(seen) <= 3 and all(len(piece) <= 40 for piece in seen)
    assert "".join(seen) == words(200)[: len("".join(seen))]


def test_ids_are_those_of_the_tokenizer_whatever_it_did_before():
    documents = [words(30), "w1 <s> w2 </s> unknown é", "w3"]
    for bos in (True, False):
        tokenizer = make_tokenizer(bos)
        expected = make_tokenizer(bos)(documents)["input_ids"]
        tokenizer.pad_token = "</s>"
        tokenizer(documents, padding="max_length", truncation=True, max_length=5)
        assert [ids.tolist() for ids in rows_module.tokenised(documents, tokenizer)] == expected


def test_too_little_text():
    with pytest.raises(UserError, match="shorter than one context of 32 tokens .got .7 tokens in 2 documents"):
        pack_rows([words(3), words(2)], make_tokenizer(), context=32)
    rows = pack_rows([words(40)], make_tokenizer(), context=8, tokens=1000)
    assert len(rows) == 5 and "gives 40 tokens where 1,000 were asked" in rows.shortfall
    with pytest.raises(UserError, match="context is too short"):
        pack_rows([words(40)], make_tokenizer(), context=1)
    with pytest.raises(UserError, match="at least one token"):
        pack_rows([words(40)], make_tokenizer(), context=8, tokens=0)


def test_batches():
    rows = pack_rows([words(59)], make_tokenizer(), context=6, shuffle=False)
    batches = list(rows.batches(3))
    assert [len(ids) for ids, _ in batches] == [3, 3, 3, 1]
    assert torch.equal(torch.cat([ids for ids, _ in batches]), rows.ids)
    assert all(ids.shape == positions.shape for ids, positions in batches)
    with pytest.raises(UserError, match="at least one row"):
        list(rows.batches(0))
