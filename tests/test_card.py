"""The model card: metadata that the Hub reads, measured tables, and nothing that breaks out of its cell."""

import copy

import pytest
import yaml

from linearize.card import MARK, kept, licence_of, model_card, ranges, short_name, task_rows, with_error

RECORD = {
    "teacher": {"source": "Org/Model-1B", "revision": "abcdef0123456789", "model_type": "llama"},
    "mixers": {"0": {"kind": "gdn"}, "2": {"kind": "vala"}},
    "recipe": {"align.tokens": 300_000},
    "layers": [{"layer": 0, "kind": "gdn", "losses": [0.1]}, {"layer": 2, "kind": "vala"}],
    "heldout": {
        "tokens": 480,
        "context": 48,
        "teacher_perplexity": 20.0,
        "student_perplexity": 25.0,
        "ratio": 1.25,
        "retained_percent": 80.0,
    },
    "cache": [{"tokens": 1024, "teacher": 47_185_920, "student": 16_151_312}],
}
ACC = {"teacher": 0.8, "teacher_stderr": 0.01, "student": 0.6, "student_stderr": 0.02, "retained_percent": 75.0}
PPL = {"teacher": 17.0, "teacher_stderr": 0.5, "student": 34.0, "student_stderr": 1.25, "ratio": 2.0}
TASKS = {
    "settings": {"limit": None},
    "lm_eval": {"version": "0.4.13"},
    "tasks": {"arc_easy": {"acc": ACC, "acc_norm": PPL}, "wiki": {"perplexity": PPL}},
    "retained": {**ACC, "tasks": {"arc_easy": "acc"}},
}

SELECTION = {
    "kept": [0, 1, 3],
    "damage": {"text": 0.1, "answers": 0.2, "score": 0.3},
    "none": {"text": 1.0, "answers": 2.0, "score": 3.0},
    "uniform": {"kept": [1], "damage": {"text": 0.2, "answers": 0.3, "score": 0.5}},
}


def front(card: str) -> dict:
    head, text, _ = card.split("---\n", 2)
    assert head == ""
    return yaml.safe_load(text)


def test_metadata():
    card = model_card(RECORD, licence={"license": "other", "license_name": "Odd: licence"})
    assert front(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "Odd: licence",
        "base_model": "Org/Model-1B",
        "tags": ["linearize", "linear-attention"],
    }
    assert MARK in card and "Model-1B, linearized" in card and "(Odd: licence) applies" in card
    assert "(gdn, vala): layers 0, 2" in card
    assert "`Org/Model-1B@abcdef012345`" in card


def test_a_local_teacher_is_no_base_model():
    record = copy.deepcopy(RECORD)
    record["teacher"] = {"source": "/home/someone/secret/My Model.gguf", "revision": None}
    card = model_card(record)
    assert "base_model" not in front(card) and "license" not in front(card)
    assert "someone" not in card and "# My Model, linearized" in card


def test_how_it_was_trained():
    assert "trained alone on 300k tokens." in model_card(RECORD)
    assert "then the whole model on 40M tokens" in model_card(RECORD | {"distill": {"tokens": 40_000_000}})
    assert "no gradient step" in model_card(RECORD | {"layers": [], "distill": None})


def test_tables():
    card = model_card(RECORD)
    assert "| perplexity | 20.00 | 25.00 |" in card and "| 1024 tokens | 47.2 MB | 16.2 MB |" in card
    assert "Benchmarks: not measured yet; `linearize eval DIR --tasks piqa,arc_easy`" in card
    evaluation = {
        "tasks": TASKS,
        "recall": {"lengths": {"128": {"teacher": 1.0, "teacher_stderr": 0.0, "student": 0.5, "student_stderr": 0.06}}},
        "decode": {
            "machine": {"device": "a chip"},
            "cells": [
                {"model": "student", "context": 1024, "batch": 1, "decode_tokens_per_second": 31.0},
                {"model": "teacher", "context": 1024, "batch": 1, "error": "out of memory"},
            ],
        },
        "perplexity": {
            "teacher": {"word_perplexity": 60.0, "token_perplexity": 20.0},
            "student": {"word_perplexity": 90.0, "token_perplexity": 30.0},
            "ratio": {"word": 1.5, "token": 1.5},
            "tokens": 99,
            "context": 32,
            "text": {"source": "bundled"},
        },
    }
    card = model_card(RECORD, evaluation)
    for line in (
        r"| arc\_easy | acc | 0.8000 ± 0.0100 | 0.6000 ± 0.0200 | 75.0 % |",
        "| wiki | perplexity | 17.00 ± 0.50 | 34.00 ± 1.25 | × 2.000 |",
        "| 128 tokens | 1.00 ± 0.00 | 0.50 ± 0.06 |",
        "| context 1024, batch 1 | – | 31 |",
        "| word perplexity | 60.00 | 90.00 | × 1.500 |",
        "lm-eval 0.4.13, ± one standard error.",
    ):
        assert line in card.splitlines(), line
    assert "mean of" not in card, "a mean of one task"
    assert "not measured yet" not in card
    tables = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in tables)


def test_a_limited_run_says_so():
    card = model_card(RECORD, {"tasks": TASKS | {"settings": {"limit": 20}}})
    assert "Only the first 20 documents of each task: a test, not a result." in card


def test_mean_of_several_tasks():
    tasks = TASKS | {"retained": {**ACC, "tasks": {"arc_easy": "acc", "piqa": "acc"}}}
    card = model_card(RECORD, {"tasks": tasks})
    assert "| mean of 2 | accuracy | 0.8000 ± 0.0100 | 0.6000 ± 0.0200 | 75.0 % |" in card


def test_measured_choice_of_layers_has_the_even_one_beside_it():
    card = model_card(RECORD | {"selection": SELECTION})
    assert "| chosen | 0-1, 3 | 0.1000 | 0.2000 | 0.3000 |" in card
    assert "| evenly spaced | 1 | 0.2000 | 0.3000 | 0.5000 |" in card
    assert "evenly spaced" not in model_card(RECORD | {"selection": None})


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == "" and ranges([4]) == "4"


def test_hostile_names_stay_text():
    record = copy.deepcopy(RECORD)
    record["teacher"] = {"source": "a/x`|<script>\ny: [", "revision": "0" * 40}
    card = model_card(record, {"tasks": TASKS | {"tasks": {"a|b\nc": {"acc": ACC}}, "retained": None}})
    assert front(card)["base_model"] == record["teacher"]["source"]
    assert r"| a\|b c | acc |" in card
    assert r"# x\`\|\<script\> y: \[, linearized" in card.splitlines()


def test_rows_and_numbers():
    assert [(row["task"], row["metric"]) for row in task_rows(TASKS)] == [("arc_easy", "acc"), ("wiki", "perplexity")]
    assert task_rows({}) == []
    assert with_error(None) == "–" and with_error(0.5) == "0.5000" and with_error(123.456, 0.5) == "123.46 ± 0.50"
    assert kept({"ratio": None, "retained_percent": None}) == "–"
    assert short_name("C:\\models\\x.gguf") == "x" and short_name("a/b/") == "b" and short_name("/") == "/"


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# x\n", {"license": "apache-2.0"}),
        ("---\nlicense: [a, b\n---\n", {}),
        ("no front matter", {}),
        (None, {}),
    ],
)
def test_licence_of_a_folder(tmp_path, text, wanted):
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert licence_of(tmp_path) == wanted
