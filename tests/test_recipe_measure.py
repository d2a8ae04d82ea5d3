"""recipes/measure.py on a tiny model: every stage once, what is written, and that a second call goes on."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
from test_convert import FAST
from test_convert_distill import SHORT
from test_evaluate import DOCUMENTS, TASKS

from linearize import models
from linearize.recipe import Recipe

SCRIPT = Path(__file__).parents[1] / "recipes" / "measure.py"
MEASURE = runpy.run_path(str(SCRIPT))
STAGES = ("wikitext2", "tasks", "recall", "perplexity-48", "perplexity-96")
TASK = "include: choice.yaml\ntask: {}\n"
LAMBADA = """
task: local_lambada
custom_dataset: !function documents.last
dataset_path: ""
test_split: test
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: "{{word}}"
metric_list: [{metric: acc}, {metric: perplexity, aggregation: perplexity, higher_is_better: false}]
metadata: {version: 1.0}
"""
LAST = """

def last(**_):
    return split([{"text": "one two " * i, "word": "three"} for i in range(1, 5)])
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tiny tasks of the names that the script knows."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choice.yaml").write_text(TASKS["choice.yaml"])
    for name in MEASURE["CHOICES"]:
        (folder / f"{name}.yaml").write_text(TASK.format(name))
    (folder / "lambada.yaml").write_text(LAMBADA)
    (folder / "wikitext.yaml").write_text(TASKS["rolling.yaml"].replace("tiny_rolling", "local_wikitext2"))
    (folder / "documents.py").write_text(DOCUMENTS + LAST)
    yield folder
    sys.modules.pop("documents", None)  # of another test's tasks under the same name


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of 100 to 400 characters, of which some are held out."""
    path = tmp_path_factory.mktemp("text") / "some text.jsonl"
    sentence = "The {} of {} went to the {} and back. "
    lines = ["".join(sentence.format(i, j, i * j) for j in range(3 + i % 8)) for i in range(80)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    values = FAST | {name.replace("_", ".", 1): value for name, value in SHORT.items()}
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(Recipe.from_values(values | {"distill.save_steps": 0, "convert.mixer": "gdn"}).to_yaml())
    return path


@pytest.fixture
def measure(recipe, teacher_folder, text, tasks, tmp_path, monkeypatch):
    """Run the script; returns its results and the models it loaded."""
    import lm_eval.evaluator

    for name in ("add_env_info", "simple_evaluate"):  # which it replaces
        monkeypatch.setattr(lm_eval.evaluator, name, getattr(lm_eval.evaluator, name))
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    loaded = []
    load = models.Model.load
    monkeypatch.setattr(models.Model, "load", lambda self, *args: loaded.append(self.ours) or load(self, *args))

    def run(*more, out=tmp_path / "out", cache="cache", code=0):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        loaded.clear()
        argv = [recipe, teacher_folder("llama-tied"), "--data", text, "--tasks", tasks, "--out", out]
        argv += ["--contexts", "48,96", "--lengths", "64,128", "--documents", 3, "--prompts", 2, "--limit", 4, *more]
        assert MEASURE["main"](list(map(str, argv))) == code
        found = json.loads((out / "results.json").read_text()) if code == 0 else None
        return found, ["student" if ours else "teacher" for ours in loaded]

    return run


def test_everything_is_measured_once_and_a_second_call_goes_on(measure, tmp_path, teacher_folder, capsys):
    kept = tmp_path / "teacher.json"
    found, loaded = measure("--teacher-results", kept)
    assert set(found["evaluation"]) == set(STAGES) <= set(found["seconds"])
    assert set(loaded) == {"student", "teacher"}
    record, summary = found["record"], found["summary"]
    done = [json.loads(line) for line in (tmp_path / "out" / "model" / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in done if line["stage"] == "distill"]
    assert found["curve"]["tokens"] == [line["tokens"] for line in done]
    assert found["curve"]["loss"] == pytest.approx([line["loss"] for line in done], rel=1e-4)
    assert record["layers"][0]["curve"]["tokens"] == [96, 192] and "losses" not in record["layers"][0]
    ratio = found["evaluation"]["perplexity-96"]["perplexity"]["ratio"]["token"]
    assert summary["perplexity ratio of long documents, by context"]["96"] == ratio > 0
    assert found["evaluation"]["perplexity-96"]["perplexity"]["documents"] == 3
    rows = [found["evaluation"]["tasks"]["tasks"][name]["acc_norm"] for name in MEASURE["CHOICES"]]
    mean = summary["mean accuracy of 9 tasks"]
    assert mean["student"] == pytest.approx(sum(row["student"] for row in rows) / 9)
    assert mean["student_stderr"] == pytest.approx(math.hypot(*(row["student_stderr"] for row in rows)) / 9)
    assert summary["LAMBADA perplexity ratio"] > 0 and summary["WikiText-2 word perplexity"]["ratio"] > 0
    lines = capsys.readouterr().out
    assert all(f"== {name}: " in lines for name in ("convert", *STAGES))
    for path in (tmp_path / "out" / "results.json", kept):
        assert not [
            folder for folder in (tmp_path, teacher_folder("llama-tied").parent) if str(folder) in path.read_text()
        ]

    again, loaded = measure()
    assert not loaded and again["evaluation"] == found["evaluation"] and again["seconds"] == found["seconds"]
    path = tmp_path / "out" / "results.json"
    del again["evaluation"]["tasks"]
    path.write_text(json.dumps(again))
    again, loaded = measure("--teacher-results", kept, cache="empty")
    assert loaded == ["student"], "the teacher's results are in the file"
    assert again["evaluation"]["tasks"] == found["evaluation"]["tasks"] and again["record"] == found["record"]

    assert measure("--seed", "1", code=1) == (None, [])
    assert "is of another recipe (got 'run.seed')" in capsys.readouterr().err
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"weights": "other"}))
    assert measure("--limit", "3", "--teacher-results", kept, code=1) == (None, [])
    assert "another teacher" in capsys.readouterr().err


def test_without_evaluation(measure, tmp_path):
    found, loaded = measure("--no-eval", "--set", "distill.tokens=0")
    assert not loaded and found["evaluation"] == {} and found["curve"] is None
    assert set(found["summary"]["perplexity ratio, held-out text"]) == {"aligned"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/b/*.gz,/c/d.zst", "*.gz,d.zst"),
        ("0.7:/a/b.txt,0.3:hub:x/y", "0.7:b.txt,0.3:hub:x/y"),
        ("--data '/a b/c.txt'", "--data '/a b/c.txt'"),
        ("data.source=/a/b/c", "data.source=c"),
        ("~/a/b.gguf", "b.gguf"),
        ("x/y and a/b", "x/y and a/b"),
        ("https://x.org/a/b", "https://x.org/a/b"),
    ],
)
def test_paths_are_left_out(text, shown):
    assert MEASURE["public"]([{"k": text}]) == [{"k": shown}]


def test_a_thinned_curve_ends_where_the_whole_one_does():
    thinned = MEASURE["thinned"](list(range(10, 110, 10)), [float(i) for i in range(10)], 4)
    assert thinned == {"tokens": [30, 60, 90, 100], "loss": [1.0, 4.0, 7.0, 9.0]}
