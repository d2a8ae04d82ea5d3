"""The training stream: exact resume, world sizes, epochs, mixtures, hold-out."""

import gzip
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from conftest import tiny_tokenizer

from linearize.data import Loader, Rows, RowSource, content_hash, open_sources, read_documents, split_documents
from linearize.data import files as files_module
from linearize.data import sources as sources_module
from linearize.errors import UserError

TOKENIZER = tiny_tokenizer()  # a token a byte
CONTEXT = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many blocks, shards and turns in little text."""
    monkeypatch.setattr(sources_module, "BLOCK_CHARACTERS", 1500)
    monkeypatch.setattr(sources_module, "INTERLEAVED", 3)
    monkeypatch.setattr(files_module, "SHARD_BYTES", 1000)


def texts(n: int, tag: str = "d", seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{tag}{i} " + "é" * draw.randrange(3) + "x" * draw.randrange(1, 90) for i in range(n)]


def lines(documents: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "n": 1}) + "\n" for text in documents).encode()


def write(path, documents: list[str], key: str = "text"):
    name = path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        table = pyarrow.table({key: documents, "n": list(range(len(documents)))})
        pyarrow.parquet.write_table(table, path, row_group_size=17)
    else:
        raw = lines(documents, key) if ".jsonl" in name else "\n".join(documents).encode()
        if name.endswith(".gz"):
            raw = gzip.compress(raw, mtime=0)
        if name.endswith(".zst"):
            raw = zstandard.compress(raw[: len(raw) // 2]) + zstandard.compress(raw[len(raw) // 2 :])
        path.write_bytes(raw)
    return path


def sampled(context: int = CONTEXT) -> RowSource:
    draw = torch.Generator().manual_seed(0)
    positions = torch.arange(context).expand(4, -1)
    batches = [Rows(torch.randint(4, 250, (4, context), generator=draw), positions) for _ in range(6)]
    return RowSource(batches, "sampled")


@pytest.fixture
def spec(tmp_path, request):
    """A data spec of the named form on fresh files."""
    form = request.param
    if form == "folder":
        for i, ending in enumerate((".jsonl", ".txt", ".jsonl.gz", ".txt.zst", ".parquet", ".jsonl")):
            write(tmp_path / f"sub{i % 2}" / f"f{i}{ending}", texts(40, f"f{i}-", i))
        return str(tmp_path)
    if form == "hub":
        for i in range(4):
            write(tmp_path / f"train-{i}.jsonl", texts(50, f"h{i}-", i))
        return f"hub:{tmp_path}"
    if form == "hub-parquet":
        for i in range(2):
            write(tmp_path / f"train-{i}.parquet", texts(90, f"h{i}-", i))
        return f"hub:{tmp_path}@train"
    if form == "mixture":
        write(tmp_path / "hub" / "train-0.jsonl", texts(120, "h"))
        write(tmp_path / "hub" / "train-1.jsonl", texts(120, "i", 1))
        write(tmp_path / "a.jsonl.zst", texts(120, "a", 2))
        return f"0.5:hub:{tmp_path}/hub,0.2:{tmp_path}/a.jsonl.zst,0.2:self,0.1:bundled"
    if form in ("self", "bundled"):
        return form
    return str(write(tmp_path / f"data{form}", texts(200)))


FORMS = [
    ".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet",
    "folder", "hub", "hub-parquet", "mixture", "self", "bundled",
]  # fmt: skip


def loader(spec: str, rows: int = 4, *, context: int = CONTEXT, seed: int = 0, **options) -> Loader:
    return Loader(open_sources(spec, sampled=sampled(context)), TOKENIZER, context, rows, seed=seed, **options)


def equal(a, b) -> bool:
    return torch.equal(a.ids, b.ids) and torch.equal(a.positions, b.positions)


def decoded(batch) -> list[str]:
    """The text of every document piece of a batch."""
    pieces = []
    for ids, positions in zip(batch.ids, batch.positions, strict=True):
        borders = [*torch.where(positions == 0)[0].tolist(), len(ids)]
        pieces += [TOKENIZER.decode(ids[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    return pieces


# ---- resume


@pytest.mark.parametrize("spec", FORMS, indirect=True)
def test_resuming_anywhere_gives_the_same_batches(spec):
    whole = loader(spec)
    states, batches = [], []
    for _ in range(150):
        states.append(json.dumps(whole.state_dict()))
        batches.append(next(whole))
    assert max(whole.epochs.values()) >= 1 or spec == "bundled"
    assert max(map(len, states)) < 6000
    for start in [0, 149, *random.Random(spec[-6:]).sample(range(150), 8)]:
        again = loader(spec, world=2, rank=1)
        again.load_state_dict(json.loads(states[start]))
        for batch in batches[start : start + 5]:
            half = next(again)
            assert torch.equal(half.ids, batch.ids[1::2]) and torch.equal(half.positions, batch.positions[1::2])


@pytest.mark.parametrize("spec", ["folder", "mixture"], indirect=True)
def test_the_state_of_a_resumed_run_is_that_of_an_uninterrupted_one(spec):
    whole, again = loader(spec), loader(spec)
    for _ in range(5):
        next(whole)
    again.load_state_dict(whole.state_dict())
    for _ in range(40):
        assert equal(next(whole), next(again))
    assert whole.state_dict() == again.state_dict()


@pytest.mark.parametrize("spec", [".jsonl"], indirect=True)
def test_going_back_in_one_loader(spec):
    stream = loader(spec)
    start = stream.state_dict()
    first = [next(stream) for _ in range(30)]
    stream.load_state_dict(start)
    assert all(equal(batch, next(stream)) for batch in first)


@pytest.mark.parametrize("spec", ["mixture"], indirect=True)
def test_a_batch_that_was_interrupted_comes_again(spec, monkeypatch):
    whole, broken = loader(spec), loader(spec)
    batches = [next(whole) for _ in range(30)]
    feed = type(broken._feeds[0])
    take, calls = feed.take, []

    def killed(self, count):
        calls.append(count)
        if len(calls) % 6 == 3:
            raise KeyboardInterrupt
        return take(self, count)

    monkeypatch.setattr(feed, "take", killed)
    got = []
    while len(got) < 30:
        state = broken.state_dict()
        try:
            got.append(next(broken))
        except KeyboardInterrupt:
            assert broken.state_dict() == state
    assert all(equal(a, b) for a, b in zip(batches, got, strict=True)) and len(calls) > 120


# ---- world sizes


@pytest.mark.parametrize("spec", ["folder", "hub", "mixture", "self"], indirect=True)
def test_every_world_size_sees_the_same_global_batches(spec):
    whole = loader(spec, rows=8)
    for world in (2, 4):
        ranks = [loader(spec, rows=8, rank=rank, world=world) for rank in range(world)]
        for _ in range(12):
            parts = [next(rank) for rank in ranks]
            batch = next(whole)
            for rank, part in enumerate(parts):
                assert part.ids.shape == part.positions.shape == (8 // world, CONTEXT)
                assert torch.equal(part.ids, batch.ids[rank::world])
                assert torch.equal(part.positions, batch.positions[rank::world])
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
        whole = loader(spec, rows=8)


@pytest.mark.parametrize("spec", [".jsonl"], indirect=True)
def test_rows_must_divide_by_the_world(spec):
    with pytest.raises(UserError, match="do not divide.*6 rows, 4 processes"):
        loader(spec, rows=6, world=4)


# ---- epochs and order


@pytest.mark.parametrize("spec", [".jsonl", "folder", "hub"], indirect=True)
def test_an_epoch_holds_every_token_once_and_the_next_one_another_order(spec):
    [source] = open_sources(spec)
    expected = sum(len(TOKENIZER(text)["input_ids"]) for text in source.documents())
    stream = loader(spec, rows=1)
    epochs: list[list] = [[]]
    while stream.epochs[spec] < 2:
        batch = next(stream)
        if stream.epochs[spec] == len(epochs):
            epochs.append([])
        epochs[-1].append(batch)
    assert abs(len(epochs[0]) * CONTEXT - expected) <= CONTEXT
    text = [sorted("".join(decoded(batch)) for batch in epoch) for epoch in epochs]
    assert text[0] != text[1]
    letters = [sorted("".join("".join(rows) for rows in epoch)) for epoch in text]
    assert abs(len(letters[0]) - len(letters[1])) <= 2 * CONTEXT


@pytest.mark.parametrize("spec", [".jsonl"], indirect=True)
def test_the_seed_decides_the_order(spec):
    first, other = loader(spec, seed=1), loader(spec, seed=2)
    assert not equal(next(first), next(other))
    assert equal(next(loader(spec, seed=1)), next(loader(spec, seed=1)))


@pytest.mark.parametrize("spec", ["folder"], indirect=True)
def test_files_are_mixed(spec):
    """A block holds documents of several files, not one file after the other."""
    pieces = decoded(next(loader(spec, rows=8)))
    assert len({piece[:3] for piece in pieces if piece[:1] == "f" and piece[2:3] == "-"}) >= 2


def test_documents_are_cut_to_rows_with_borders_known(tmp_path):
    write(tmp_path / "a.jsonl", ["A" * 70, "B" * 10, "C" * 33, *("D" * 5 for _ in range(30))])
    stream = loader(str(tmp_path), rows=2)
    for _ in range(20):
        batch = next(stream)
        for ids, positions in zip(batch.ids.tolist(), batch.positions.tolist(), strict=True):
            assert positions[0] == 0
            for t in range(1, CONTEXT):
                assert positions[t] in (0, positions[t - 1] + 1)
                # No document begins where the text goes on, and none goes on where another begins.
                assert positions[t] == 0 or ids[t] == ids[t - 1]


# ---- mixtures


def test_the_weights_are_shares_of_the_tokens(tmp_path):
    write(tmp_path / "long.jsonl", ["A" * (3000 + i) for i in range(30)])
    write(tmp_path / "short.jsonl", ["B" * (1 + i % 9) for i in range(900)])
    write(tmp_path / "hub" / "train.parquet", ["C" * (40 + i) for i in range(100)])
    stream = loader(f"5:{tmp_path}/long.jsonl,3:{tmp_path}/short.jsonl,2:hub:{tmp_path}/hub", rows=6)
    letters = "".join("".join(decoded(next(stream))) for _ in range(60))
    share = {letter: letters.count(letter) / len(letters) for letter in "ABC"}
    assert share == pytest.approx({"A": 0.5, "B": 0.3, "C": 0.2}, abs=0.01)
    # Every rank sees every source.
    rank = loader(f"1:{tmp_path}/long.jsonl,1:{tmp_path}/short.jsonl", rows=2, world=2)
    assert {letter for _ in range(20) for piece in decoded(next(rank)) for letter in piece} == {"A", "B"}


def test_sources_without_weights(tmp_path):
    """Files are one source, as large as they are; other sources are equal to it."""
    a, b = write(tmp_path / "a.jsonl", texts(30, "a")), write(tmp_path / "b.jsonl", texts(90, "b"))
    write(tmp_path / "hub" / "train.jsonl", texts(90, "h"))
    [both] = open_sources(f"{a}, {b}")
    assert len(list(both.documents())) > 90
    assert [source.weight for source in open_sources(f"{a},hub:{tmp_path}/hub,{b}")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no data was named"),
        (" , ", "no data was named"),
        ("0.5:{a},{a}", "no weight .got .*a.jsonl"),
        ("0:{a}", "no positive number.*0:"),
        ("-1:{a}", "no positive number"),
        ("nan:{a}", "no positive number"),
        ("inf:{a}", "no positive number"),
        ("0.5.5:{a}", "no positive number"),
        ("50%:{a}", "no positive number"),
        ("0.5:", "has no source"),
        ("bundled,bundled", "names bundled twice"),
        ("0.5:nowhere.jsonl,0.5:{a}", "does not exist.*nowhere.jsonl"),
        ("self", "has not been sampled"),
        ("hub:", "no Hub data set was named"),
        ("hub:no/such-set", "Hub data set cannot be read.*HF_HUB_OFFLINE is set"),
        ("hub:{folder}@nosuch", "cannot be read.*Available splits: .'train'"),
        ("hub:{folder}:nosuch", "cannot be read.*Available: .'default'"),
    ],
)
def test_bad_specs_are_user_errors(tmp_path, spec, message):
    a = write(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(UserError, match=message):
        open_sources(spec.format(a=a, folder=tmp_path))


# ---- hold-out


@pytest.mark.parametrize("spec", ["folder", ".jsonl.gz", ".parquet", "hub"], indirect=True)
def test_held_out_text_is_never_trained_on_and_is_that_of_split_documents(spec):
    [train], [heldout] = open_sources(spec), open_sources(spec, heldout=True)
    local = spec.removeprefix("hub:")
    expected = split_documents(read_documents(local))
    for seed in (0, 1):
        assert sorted(train.documents(seed)) == sorted(expected[0])
        assert sorted(heldout.documents(seed)) == sorted(expected[1])
    assert expected[1]


def test_little_text_holds_out_the_same_in_both_ways(tmp_path):
    for documents in (["one text", "two text", "three text"], ["".join(f"line {i}\n" for i in range(40))]):
        path = write(tmp_path / "a.jsonl", documents)
        [train], [heldout] = open_sources(str(path)), open_sources(str(path), heldout=True)
        expected = split_documents(documents)
        assert (sorted(train.documents()), sorted(heldout.documents())) == tuple(map(sorted, expected))


def test_a_text_held_out_of_one_source_is_trained_on_in_none(tmp_path):
    small = write(tmp_path / "small.jsonl", ["one text", "two text", "three text"])
    [only] = open_sources(str(small), heldout=True)
    [held] = only.documents()
    large = write(tmp_path / "large.jsonl", [*texts(80), "one text", "two text", "three text"])
    for spec in (f"0.5:{large},0.5:{small}", f"0.5:{small},0.5:{large}"):
        for source in open_sources(spec):
            assert held not in list(source.documents())


def test_held_out_text_of_bundled_and_self():
    for spec in ("bundled", "self"):
        [source] = open_sources(spec, heldout=True)
        assert set(source.documents()) == set(read_documents(str(sources_module.BUNDLED / "heldout.jsonl")))


# ---- refusals


@pytest.mark.parametrize("spec", [".jsonl", "folder", "hub"], indirect=True)
def test_data_that_changed_is_refused(spec, tmp_path):
    stream = loader(spec)
    next(stream)
    state = stream.state_dict()
    loader(spec).load_state_dict(state)
    changed = sorted(tmp_path.rglob("*.jsonl"))[-1]
    changed.write_bytes(changed.read_bytes().replace(b"xx", b"yy", 1) + b'{"text": "more"}\n' * (spec[:3] == "hub"))
    with pytest.raises(UserError, match="data has changed since"):
        loader(spec).load_state_dict(state)


@pytest.mark.parametrize("spec", ["mixture"], indirect=True)
def test_a_state_of_another_loader_is_refused(spec):
    state = loader(spec).state_dict()
    for options, message in (
        ({"rows": 8}, "another rows .got 8.*it had 4"),
        ({"seed": 3}, "another seed"),
        ({"context": 16}, "another context"),
        ({"spec": "bundled"}, "read other data.*it had 4"),
        ({"spec": spec.replace("0.5:", "0.6:")}, "another weight .got 0.6"),
    ):
        with pytest.raises(UserError, match=message):
            loader(**{"spec": spec} | options).load_state_dict(state)
    other = loader(spec)
    other._tokenizer_hash = "other"
    with pytest.raises(UserError, match="another tokenizer"):
        other.load_state_dict(state)


def test_too_little_text(tmp_path):
    path = write(tmp_path / "a.jsonl", ["ab", "cd", "ef"])
    with pytest.raises(UserError, match="shorter than one context of 32 tokens.*a.jsonl"):
        next(loader(str(path)))
    with pytest.raises(UserError, match="context is too short"):
        loader("bundled", context=1)
    with pytest.raises(UserError, match="no data to train on"):
        Loader([], TOKENIZER, 32, 4, seed=0)
    with pytest.raises(UserError, match="rows of another length .got '32 tokens'"):
        next(Loader(open_sources("self", sampled=sampled(32)), TOKENIZER, 64, 4, seed=0))


def test_take_gives_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(100))
    rows = loader(str(path), rows=2).take(5 * CONTEXT)
    assert (len(rows), rows.context, rows.requested) == (6, CONTEXT, 5 * CONTEXT)
    assert content_hash(rows) == content_hash(loader(str(path), rows=2).take(6 * CONTEXT))
