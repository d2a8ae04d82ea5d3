"""The page about a converted model: what it says, that it loads nothing, and that it escapes what it is given."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import teacher_model  # noqa: F401  sets up the offline environment
from test_card import ACC, PPL, RECORD, SELECTION, TASKS

from linearize import cli, plots
from linearize.card import MARK, model_card
from linearize.console import Console
from linearize.errors import UserError
from linearize.report import decode_figure, read_folder, report

LAYERS = [
    {
        "layer": i,
        "kind": "gdn",
        "ladder": {
            "mean": 1.5,
            "vala": 1.25,
            "gdn": 1.125,
            "tilted": 0.75,
            "readout": 0.5,
            "full": 0.375,
            "output": 0.25,
        },
        "heads": {"full": [0.25, 0.5]},
        "losses": [0.09, 0.0625],
    }
    for i in (0, 1, 3)
]
FULL = RECORD | {
    "linearize": "0.1.0",
    "versions": {"torch": "2.13.0"},
    "mixers": {str(at["layer"]): {"kind": "gdn"} for at in LAYERS},
    "layers": LAYERS,
    "recipe": {"align.tokens": 300_000, "run.seed": 7},
    "text": {"calibration": {"rows": 2, "tokens": 96, "hash": "c0ffee"}},
    "device": "cpu",
    "seconds": 75.0,
}
EVALUATION = {
    "tasks": TASKS,
    "recall": {
        "lengths": {
            "128": {"questions": 64, "teacher": 1.0, "teacher_stderr": 0.0, "student": 0.5, "student_stderr": 0.0625},
            "512": {"questions": 64, "teacher": 0.75, "teacher_stderr": 0.05, "student": 0.25, "student_stderr": 0.05},
            "8192": {
                "questions": None,
                "teacher": None,
                "teacher_stderr": None,
                "student": None,
                "student_stderr": None,
            },
        }
    },
    "needle": {
        "candidates": 16,
        "prompts": 8,
        "lengths": {
            length: {
                depth: {
                    "questions": 8,
                    "teacher": known and 0.75,
                    "teacher_stderr": known and 0.125,
                    "student": known and 0.25,
                    "student_stderr": known and 0.125,
                    "teacher_rank": known and 1.0,
                    "teacher_rank_stderr": known and 0.0,
                    "student_rank": known and 0.625,
                    "student_rank_stderr": known and 0.0625,
                }
                for depth in ("10", "50", "90", "all")
            }
            for length, known in (("512", True), ("1024", True), ("8192", None))
        },
    },
    "repetition": {
        "ngram": 4,
        "prompts": 16,
        "tokens": 128,
        "teacher": 0.25,
        "teacher_stderr": 0.125,
        "student": 0.5,
        "student_stderr": 0.125,
        "text": 0.0,
        "text_stderr": 0.0,
    },
    "parity": {
        side: {way: {"max_relative_error": 1e-5, "argmax_agreement_percent": 99.5} for way in ("decode", "chunked")}
        for side in ("teacher", "student")
    },
    "perplexity": {
        "teacher": {"word_perplexity": 60.0, "token_perplexity": 20.0, "bits_per_byte": 1.0},
        "student": {"word_perplexity": 90.0, "token_perplexity": 30.0, "bits_per_byte": 1.125},
        "ratio": {"word": 1.5, "token": 1.5},
        "loss_difference": {"nats_per_token": 0.25, "stderr": None},
        "tokens": 99,
        "context": 32,
        "text": {"source": "bundled"},
    },
    "decode": {
        "machine": {"device": "a chip"},
        "cells": [
            {
                "model": side,
                "context": context,
                "batch": 1,
                "prefill_tokens_per_second": 900.0,
                "decode_tokens_per_second": speed,
                "step_ms": {"median": 20.0},
                "cache_bytes": 2_000_000,
            }
            for side, context, speed in (("teacher", 1024, 40.0), ("student", 1024, 20.0), ("student", 8192, 20.0))
        ]
        + [{"model": "teacher", "context": 8192, "batch": 1, "error": "out of memory"}],
    },
    "generate": {"prompt": "Why?", "answers": {"teacher": {"text": "Because."}, "student": {"text": "So."}}},
}
METRICS = [
    {"layer": layer, "stage": "align", "step": step, "tokens": 100 * step, "loss": 0.5 / step}
    for layer in (0, 1, 3)
    for step in (1, 2)
] + [{"stage": "distill", "step": step, "tokens": 1000 * step, "loss": 2.0 / step} for step in range(1, 120)]


def folder(path, record=None, evaluation=None, metrics=METRICS):
    """A converted folder as far as `report` reads it."""
    path.mkdir(exist_ok=True)
    record = record or FULL
    (path / "config.json").write_text("{}")
    (path / "linearize.json").write_text(json.dumps(record))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (path / "recipe.yaml").write_text("# by hand\nalign:\n  tokens: 300k\n")
    (path / "README.md").write_text(model_card(record, licence={"license": "mit"}))
    if evaluation:
        (path / "eval").mkdir()
        for name, found in evaluation.items():
            (path / "eval" / f"{name}.json").write_text(json.dumps(found))
    return path


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style sheets."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.parts, self.open = [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self.open:
            self.parts.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A folder with everything, reported on once: (path, result, page)."""
    path = folder(tmp_path_factory.mktemp("full") / "out", evaluation=EVALUATION)
    result = report(path, Console(quiet=True))
    return path, result, Page((path / "report.html").read_text(encoding="utf-8"))


def test_every_figure_and_table_is_there(full):
    path, result, page = full
    names = ["retained", "recall", "needle", "cache", "decode", "ladder", "heads", "alignment", "distillation"]
    assert result["figures"] == [str(path / "report" / f"{name}.png") for name in names]
    assert all((path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    assert page.count("svg") == len(names) and page.count("img") == 0
    for shown in (
        "Model-1B, linearized", "layers 0-1, 3",
        "75.0 % of the teacher's score mean accuracy of 1 task", "× 1.25 perplexity 25.00 against 20.00",
        "34.2 % of the cache at 1k tokens", "0.25 recall at 512 tokens teacher 0.75", "1 min 15 s to convert on cpu",
        "arc_easy (acc) 0.800 ± 0.010 0.600 ± 0.020 75.0 %", "wiki (perplexity) 17.00 ± 0.50 34.00 ± 1.25 × 2.000",
        "word perplexity 60.00 90.00 × 1.500", "loses 0.2500 nats a token more", "128 1.00 ± 0.00 0.50 ± 0.06",
        "1024, 90 % 0.75 ± 0.12 0.25 ± 0.12 1.00 ± 0.00 0.62 ± 0.06", "512, all 0.75", "of 15 other values",
        "repeated 4-grams 0.25 ± 0.12 0.50 ± 0.12 0.00 ± 0.00", "token by token: largest error 1.0e-05 1.0e-05",
        "8192 × 1 teacher out of memory", "1024 × 1 student 900 20 20.00 2 MB",
        "0 gdn 1.500 1.250 1.125 0.750 0.500 0.375 0.250 0.250", "Why? teacher Because. student So.",
        "revision abcdef0123456789", "calibration text 96 tokens, hash c0ffee", "seed 7",
        "# by hand align: tokens: 300k",
    ):  # fmt: skip
        assert shown in page.text, shown
    assert "decoding speed" not in page.text, "no context has both speeds at the end"
    assert list(result["missing"]) == ["the teacher's attention"] and "linearize inspect" in page.text


def test_the_page_loads_nothing(full):
    _, _, page = full
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "base"), tag
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value)
            assert "url(" not in (value or "") or "url(#" in value
    styles = (full[0] / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "@import" not in styles and "url(" not in styles


def test_ids_of_the_figures_do_not_meet(full):
    ids = [attributes["id"] for _, attributes in full[2].tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 100
    used = {a["xlink:href"][1:] for _, a in full[2].tags if a.get("xlink:href", "").startswith("#")}
    assert used and used <= set(ids)


def test_the_page_suits_phone_print_and_dark(full):
    text = (full[0] / "report.html").read_text()
    assert 'name="viewport" content="width=device-width' in text
    assert "@media print" in text and "prefers-color-scheme: dark" in text
    assert plots.INK not in text.split("</style>")[1], "ink follows the page"
    tables = [i for i, (tag, _) in enumerate(full[2].tags) if tag == "table"]
    assert tables and all(full[2].tags[i - 1] == ("div", {"class": "scroll"}) for i in tables)


def test_the_card_is_written_again(full):
    path, result, _ = full
    card = (path / "README.md").read_text()
    assert result["card"] == str(path / "README.md")
    assert r"| arc\_easy | acc | 0.8000 ± 0.0100" in card and "license: mit" in card
    assert not list(path.glob("*.tmp")) and not list(path.glob("*.partial"))


@pytest.fixture
def sketched(monkeypatch):
    """Figures are drawn but not rendered, which is what takes time."""
    monkeypatch.setattr(plots, "png", lambda figure: b"")
    monkeypatch.setattr(plots, "svg", lambda figure, name: f"<svg>{name}</svg>")


def test_a_card_changed_by_hand_stays(tmp_path, capsys, sketched):
    path = folder(tmp_path / "out", evaluation={"tasks": TASKS})
    (path / "README.md").write_text("my own words")
    assert report(path, Console())["card"] is None
    assert (path / "README.md").read_text() == "my own words"
    assert "stays as it is" in capsys.readouterr().err
    (path / "README.md").unlink()
    assert report(path, Console())["card"] and MARK in (path / "README.md").read_text()


def test_without_results_and_plots_the_rest_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "available", lambda: False)
    before = folder(tmp_path / "my out", RECORD | {"heldout": None}, metrics=[])
    card = (before / "README.md").read_text()
    (before / "recipe.yaml").unlink()
    (before / "metrics.jsonl").unlink()
    assert cli.run(["report", str(before), "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["figures"] == [] and result["card"] is None and len(result["missing"]) == 9
    assert "matplotlib is missing, pip install" in err and (before / "README.md").read_text() == card
    page = Page((before / "report.html").read_text())
    assert page.count("svg") == 0 and "What it kept" not in page.text and "cache, context" in page.text
    assert f"linearize eval '{before}' --tasks recall" in page.text
    assert not (before / "report").exists()


def test_what_is_hostile_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>$^$"
    record = json.loads(json.dumps(FULL).replace("Model-1B", "x" + evil.replace("/", "\\\\u002f")))
    record["teacher"] = {"source": f"a&b{evil[:-12]}", "revision": None, "model_type": evil}
    record["versions"] = {evil: evil}
    record["layers"] = [{**LAYERS[0], "kind": evil}]
    evaluation = EVALUATION | {
        "tasks": TASKS | {"tasks": {evil: {evil: ACC}}, "retained": None},
        "generate": {"prompt": evil, "answers": {evil: {"text": evil}}},
    }
    evaluation["decode"] = {**EVALUATION["decode"], "machine": {"device": evil}}
    path = folder(tmp_path / "out", record, evaluation)
    (path / "recipe.yaml").write_text(evil)
    report(path, Console(quiet=True))
    text = (path / "report.html").read_text()
    page = Page(text)
    assert "<script" not in text and page.count("script") == 0
    assert page.text.count(evil) >= 8 and "a&b<script>alert(1)" in page.text


def test_measured_alone_and_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    path = folder(tmp_path / "out")
    (path / "eval").mkdir()
    alone = {"teacher": None, "teacher_stderr": None, "student": 0.5, "student_stderr": 0.1, "retained_percent": None}
    tasks = {
        "settings": {"limit": 5},
        "tasks": {"piqa": {"acc": alone}},
        "retained": {**alone, "tasks": {"piqa": "acc"}},
    }
    (path / "eval" / "tasks-limit-5.json").write_text(json.dumps(tasks))
    text = EVALUATION["perplexity"] | {"settings": {"limit": 5}}
    (path / "eval" / "perplexity-limit-5.json").write_text(json.dumps(text))
    lengths = {"lengths": {"64": {"questions": 9, "student": 0.5, "student_stderr": 0.1}}}
    (path / "eval" / "recall-alone.json").write_text(json.dumps(lengths))
    report(path, Console(quiet=True))
    page = Page((path / "report.html").read_text())
    assert "Only the first 5 documents of each task were asked: a test, not a result." in page.text
    assert "5 documents only: a test" in page.text and "5 documents only: a test" in (path / "README.md").read_text()
    assert "piqa (acc) – 0.500 ± 0.100 –" in page.text and "64 – 0.50 ± 0.10" in page.text


def test_distillation_and_selection_show_what_they_changed(tmp_path, sketched):
    heldout = RECORD["heldout"]
    after = heldout | {"student_perplexity": 21.0, "retained_percent": 95.25, "kl": 0.125, "top1_agreement": 0.75}
    distilled = {"tokens": 40_000_000, "seconds": 600.0}
    more = {"aligned": heldout, "heldout": after, "distill": distilled, "selection": SELECTION}
    path = folder(tmp_path / "out", FULL | more)
    report(path, Console(quiet=True))
    page = Page((path / "report.html").read_text())
    for shown in (
        "perplexity before distillation 20.00 25.00 80.0 % perplexity after it 20.00 21.00 95.2 %",
        "KL (nats per token) – 0.125 – same likeliest token – 75.0 % –",
        "distillation 40M tokens, 10 min 00 s",
        "chosen 0-1, 3 0.1000 0.2000 0.3000 evenly spaced 1 0.2000 0.3000 0.5000 none – 1.0000 2.0000 3.0000",
    ):
        assert shown in page.text, shown


@pytest.mark.parametrize("missing", list(EVALUATION))
def test_each_part_can_be_missing(tmp_path, missing, sketched):
    path = folder(tmp_path / "out", evaluation={name: at for name, at in EVALUATION.items() if name != missing})
    result = report(path, Console(quiet=True))
    figure = {"recall": "recall", "needle": "needle", "decode": "decode", "tasks": "retained"}.get(missing)
    assert figure not in [Path(path).stem for path in result["figures"]]
    assert len(result["missing"]) == 2 and len(result["figures"]) == 9 - bool(figure)


def test_what_is_no_finished_folder(tmp_path, capsys):
    for made, line in (
        (lambda path: None, "no such folder"),
        (lambda path: path.mkdir(), "not written by linearize convert"),
        (lambda path: (path / ".linearize").mkdir(), "has not finished"),
        (lambda path: folder(path) and (path / "linearize.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "linearize.json").write_text('{"a": 1}'), "damaged or not convert's"),
    ):
        made(tmp_path / "out")
        assert cli.run(["report", str(tmp_path / "out")]) == 1
        out, err = capsys.readouterr()
        assert out == "" and line in err and len(err.splitlines()) == 1
    shutil.rmtree(tmp_path / "out")
    path = folder(tmp_path / "out", evaluation={"tasks": TASKS})
    (path / "eval" / "tasks.json").write_text("[]")
    with pytest.raises(UserError, match="tasks.json"):
        read_folder(path)


def test_a_metrics_line_cut_short_by_a_kill(tmp_path):
    path = folder(tmp_path / "out")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "dist')
    assert read_folder(path).metrics == METRICS


def decode_with_graphs():
    cells = [
        {
            "model": side,
            "context": context,
            "batch": batch,
            "prefill_tokens_per_second": 900.0,
            "decode_tokens_per_second": 40.0 * batch,
            "graph_tokens_per_second": 3000.0 * batch,
            "step_ms": {"median": 25},
            "cache_bytes": at * 1000,
        }
        for at, context in enumerate((1024, 65536), 1)
        for batch in (1, 64)
        for side in ("teacher", "student")
    ]
    cells[-2] = {"model": "teacher", "context": 65536, "batch": 64, "error": "out of memory"}
    del cells[-1]["graph_tokens_per_second"]
    return {"machine": {"device": "a chip"}, "cells": cells}


def test_decoding_with_graphs(tmp_path):
    decode = decode_with_graphs()
    path = folder(tmp_path / "out", evaluation={"decode": decode})
    report(path, Console(quiet=True))
    text = Page((path / "report.html").read_text()).text
    assert "as a CUDA graph" in text and "1024 × 64 student 900 2.56k 192k 25.00" in text.replace("K", "k")
    assert "65536 × 64 teacher out of memory – – – –" in text and "65536 × 64 student 900 2.56k –" in text
    first, second, cache = decode_figure(decode).axes
    assert [line.get_label() for line in second.get_lines()][2:] == ["teacher, no graph", "student, no graph"]
    assert first.get_lines()[0].get_ydata().tolist() == [3000, 3000]
    teacher, student = (line.get_ydata().tolist() for line in second.get_lines()[:2])
    assert teacher[0] == student[0] == 192000 and teacher[1] != teacher[1] and student[1] != student[1]
    assert cache.get_lines()[1].get_ydata().tolist() == [1000, 2000]
    assert decode_figure({"cells": decode["cells"][-2:-1]}) is None is decode_figure(None)


assert PPL["ratio"] == 2.0  # what "× 2.000" above means
