"""The text of a conversion from every kind of source: rows for each purpose, held-out text in none but its own."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_tokenizer
from test_convert import recipe

from linearize.console import Console
from linearize.corpus import prepare_text
from linearize.data import content_hash, documents, open_sources
from linearize.errors import UserError
from linearize.processes import Processes
from linearize.teacher import open_teacher


def prepared(folder, tmp_path, source: str, **changes):
    teacher, run = open_teacher(str(folder)), SimpleNamespace(folder=tmp_path / "run")
    chosen = recipe(data_source=source, **changes)
    return prepare_text(teacher, chosen, Processes(torch.device("cpu")), run, Console(quiet=True))


def lines(path, tag: str, n: int = 300, key: str = "text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: f"{tag}{i} " + tag * (20 + i % 90)}) + "\n" for i in range(n)))
    return path


def text_of(rows) -> str:
    return tiny_tokenizer().decode(rows.ids.flatten())


@pytest.mark.parametrize("form", ["hub:{hub}", "{file}", "0.5:hub:{hub},0.5:{file}", "bundled", "0.5:self,0.5:{file}"])
def test_every_kind_of_source_gives_rows(tmp_path, teacher_folder, form):
    source = form.format(hub=lines(tmp_path / "hub" / "train.jsonl", "H").parent, file=lines(tmp_path / "f.jsonl", "F"))
    folder = teacher_folder("llama")
    text = prepared(folder, tmp_path, source)
    assert (text.calibration.tokens, text.alignment.tokens, text.heldout.tokens) == (288, 384, 480)
    assert text.calibration.context == text.alignment.context == 48
    for letter, kind in (("H", "hub"), ("F", "file")):
        for rows in (text.calibration, text.alignment):
            assert (text_of(rows).count(letter * 9) > 0) == ("{" + kind + "}" in form)
    held = list(documents(open_sources(source.replace("0.5:self,0.5:", ""), heldout=True)))
    trained = text_of(text.calibration) + text_of(text.alignment)
    assert held and not [document for document in held if document[:40] in trained]
    again = prepared(folder, tmp_path, source)
    assert [content_hash(rows) for rows in vars(again).values()] == [content_hash(rows) for rows in vars(text).values()]


def test_no_bar_of_a_library_among_ours(tmp_path, teacher_folder, capfd):
    prepared(teacher_folder("llama"), tmp_path, "self", data_self_batch=4)
    out, err = capfd.readouterr()
    assert out == "" and "Loading" not in err


def test_shares_of_a_mixture(tmp_path, teacher_folder):
    a, b = lines(tmp_path / "a.jsonl", "A", 400), lines(tmp_path / "b.jsonl", "B", 400)
    changes = {"calibrate_tokens": 48 * 200, "calibrate_context": 48}
    text = text_of(prepared(teacher_folder("llama"), tmp_path, f"0.8:{a},0.2:{b}", **changes).calibration)
    assert text.count("A") / (text.count("A") + text.count("B")) == pytest.approx(0.8, abs=0.05)


def test_another_column_and_its_absence(tmp_path, teacher_folder):
    path, folder = lines(tmp_path / "a.jsonl", "A", key="body"), teacher_folder("llama")
    assert prepared(folder, tmp_path, str(path), data_column="body").calibration.tokens == 288
    with pytest.raises(UserError, match='no "text".*--data-column .keys: body'):
        prepared(folder, tmp_path, str(path))


def test_a_large_source_is_not_read_whole(tmp_path, teacher_folder, monkeypatch):
    monkeypatch.setattr("linearize.data.sources.BLOCK_CHARACTERS", 20_000)
    path = tmp_path / "a.jsonl"
    lines(path, "A", 20)
    with path.open("a") as stream:
        for i in range(20_000):
            stream.write(json.dumps({"text": f"{i} short"}) + "\n")
        stream.write("not json: reading as far as here would fail\n")
    text = prepared(teacher_folder("llama"), tmp_path, str(path), data_heldout_tokens=0)
    assert text.calibration.tokens == 288 and text.alignment.tokens == 384
