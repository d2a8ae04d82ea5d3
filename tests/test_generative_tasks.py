"""Tasks that let a model write: stop strings, padded batches and the cache with mixers, and recipes/tasks/qa.yaml."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from conftest import make_student, teacher_model, tiny_tokenizer
from test_evaluate import converted, model, no_description_of_the_machine  # noqa: F401  fixtures

from linearize import cli, harness
from linearize.console import Console

TASKS = Path(__file__).parents[1] / "recipes" / "tasks"
CONTEXTS = ["one", "one two three four five", "a b", "seven eight nine", "z"]


def greedy(net, text, tokens):
    """Continuation without a cache and without padding."""
    ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
    begun = ids.shape[1]
    with torch.no_grad():
        for _ in range(tokens):
            following = net(ids, use_cache=False).logits[:, -1:].argmax(-1)
            if following.item() == 2:
                break
            ids = torch.cat([ids, following], dim=1)
    return tiny_tokenizer().decode(ids[0, begun:], skip_special_tokens=True)


@pytest.mark.parametrize("mixers", [{1: {"kind": "gdn"}, 2: {"kind": "toy"}}, {}], ids=["student", "teacher"])
def test_written_answers_in_padded_batches(mixers):
    from lm_eval.api.instance import Instance

    net = make_student(teacher_model("llama"), mixers)
    whole = [greedy(net, text, 12) for text in CONTEXTS]
    stop = whole[1][5]  # a character that ends at least one answer early
    read = []
    hook = net.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for size in (1, 3):
        with harness.quiet_harness(False):
            lm = harness._scorer(net, tiny_tokenizer(), str(size), "student", Console(quiet=True), None)
            asked = {"until": [stop], "do_sample": False, "max_gen_toks": 12}
            requests = [Instance("generate_until", {}, (text, dict(asked)), i) for i, text in enumerate(CONTEXTS)]
            read.clear()
            answers = lm.generate_until(requests)
        assert answers == [text.split(stop)[0] for text in whole], size
        prompts = [shape for shape in read if shape[1] > 1]
        # The longest comes first; of "z", alone in its batch, the prompt is one token too.
        assert max(shape[0] for shape in read) == size and prompts[0] == (size, len(CONTEXTS[1]))
        assert len(read) <= 12 * -(-len(CONTEXTS) // size) and len(prompts) <= -(-len(CONTEXTS) // size)
    hook.remove()
    assert min(map(len, answers)) < max(map(len, answers))


ROWS = [
    {"question": f"What is {i}?", "answer": answer, "support": f"{i} is {answer}."} for i, answer in enumerate("abcdef")
]


@pytest.fixture
def qa(model, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Run the task on rows of questions; returns its line of the report, or what went wrong."""

    def run(rows, *more, name="questions.jsonl", code=0):
        path = tmp_path / name
        text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text if isinstance(rows, list) else rows)
        monkeypatch.setenv("LINEARIZE_QA", str(path))
        argv = ["eval", model, "--tasks", "qa_exact", "--include-path", TASKS, "--device", "cpu", "--json", *more]
        assert cli.run(list(map(str, argv))) == code
        out, err = capsys.readouterr()
        return json.loads(out)["tasks"]["qa_exact"]["exact_match"] if code == 0 else err

    return run


def test_questions_of_a_file(qa, monkeypatch):
    row = qa(ROWS, "--batch-size", "4")
    assert row["documents"] == 6 and row["chance"] == 0 and row["higher_is_better"]
    for side in ("teacher", "student"):
        assert 0 <= row[side] <= 1 and row[f"{side}_stderr"] >= 0
    assert qa([ROWS[0], {**ROWS[1], "support": ""}], "--num-fewshot", "0", name="q.json")["documents"] == 1
    sciq = {"question": "Why?", "correct_answer": "so", "support": "", "distractor1": "no"}
    answers = {"question": "Why?", "answers": ["a", "b"]}
    assert qa([sciq, answers], "--num-fewshot", "0")["documents"] == 2


def test_prompt_and_right_answers(qa, monkeypatch):
    """The model answers as it is told to here, and reads the prompts that are checked."""
    prompts = []

    def answers(self, requests, disable_tqdm=False):
        prompts.extend(request.args[0] for request in requests)
        assert requests[0].args[1]["until"] == ["\n"]
        return [" The " + request.doc["answers"][0].upper() + "!" if i else " b" for i, request in enumerate(requests)]

    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(HFLM, "generate_until", answers)
    assert qa(ROWS)["student"] == pytest.approx(5 / 6)
    first = prompts[0]
    assert first.endswith("\n\n0 is a.\nQuestion: What is 0?\nAnswer:") and first.count("Question:") == 3
    assert "is a." not in first.removesuffix("\n\n0 is a.\nQuestion: What is 0?\nAnswer:"), "its own answer"


def test_what_is_the_same_answer():
    script = runpy.run_path(str(TASKS / "qa.py"))
    for text in ("Amino acids", " the amino   acids.", "an Amino-acids"):
        assert script["score"]({"answers": ["amino acids"]}, [text]) == {"exact_match": 1.0}
    for text in ("amino", "amino acids are", ""):
        assert script["score"]({"answers": ["amino acids", "x"]}, [text]) == {"exact_match": 0.0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "Why?"}], "not questions (KeyError: 'correct_answer')"),
        ([], "no question in the file"),
        ("{", "not questions (JSONDecodeError"),
        ('"text"', "not questions"),
    ],
)
def test_what_is_no_file_of_questions(qa, rows, words):
    err = qa(rows, code=1)
    assert words in err and "LINEARIZE_QA=FILE" in err and len(err.strip().splitlines()) == 1


def test_no_file(model, monkeypatch, capsys):  # noqa: F811
    monkeypatch.delenv("LINEARIZE_QA", raising=False)
    argv = ["eval", str(model), "--tasks", "qa_exact", "--include-path", str(TASKS), "--device", "cpu"]
    assert cli.run(argv) == 1
    err = capsys.readouterr().err
    assert "has no file of questions" in err and len(err.strip().splitlines()) == 1
