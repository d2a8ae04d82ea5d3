"""`linearize generate`: the text of transformers, streamed, from stdin, beside the teacher, stopped and refused."""

import io
import json
import shutil

import pytest
import torch
from conftest import make_student, teacher_model, tiny_tokenizer

from linearize import cli, generate
from linearize.console import Console
from linearize.errors import UserError

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def converted(teacher_folder, tmp_path_factory):
    student = make_student(teacher_model("llama"), {1: {"kind": "toy"}})
    teacher = {"source": str(teacher_folder("llama")), "revision": None}
    student.config.linearize = {**student.config.linearize, "teacher": teacher}
    folder = tmp_path_factory.mktemp("converted") / "student"
    student.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def chatty(converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def greedy(folder, text, tokens):
    """The continuation by a plain loop of transformers' own."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), tiny_tokenizer()
    ids = tokenizer(text, return_tensors="pt").input_ids
    made = []
    with torch.no_grad():
        for _ in range(tokens):
            made.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[made[-1]]])], dim=1)
            if made[-1] == tokenizer.eos_token_id:
                break
    return tokenizer.decode(made, skip_special_tokens=True), len(made)


def run(capsys, *argv, code=0):
    assert cli.run(["generate", *map(str, argv), "--device", "cpu"]) == code
    return capsys.readouterr()


def run_json(capsys, *argv):
    return json.loads(run(capsys, *argv, "--json").out)


def test_greedy_text_streams_to_stdout(converted, capsys):
    text, count = greedy(converted, "one two", 12)
    out, err = run(capsys, converted, "one two", "--max-new-tokens", "12")
    assert out == text + "\n"
    assert err.strip().splitlines()[-1].startswith(f"student: {count} tokens in ")
    assert run(capsys, converted, "one two", "--max-new-tokens", "12", "-q").err == ""


def test_json_is_one_object(converted, teacher_folder, capsys):
    out, _ = run(capsys, converted, "one two", "--max-new-tokens", "9", "--teacher", "--json")
    report = json.loads(out)
    assert list(report["answers"]) == ["student", "teacher"] and not report["stopped"]
    for side, folder in (("student", converted), ("teacher", teacher_folder("llama"))):
        answer = report["answers"][side]
        assert (answer["text"], answer["tokens"]) == greedy(folder, "one two", 9)
        assert answer["prompt_tokens"] == 7 and answer["seconds"] >= answer["first_token_seconds"] > 0
        assert answer["tokens_per_second"] == pytest.approx(answer["tokens"] / answer["seconds"])
    assert report["settings"]["chat"] is False and report["settings"]["device"] == "cpu"


def test_teacher_beside_in_sections(converted, teacher_folder, capsys):
    teacher = teacher_folder("llama")
    out, _ = run(capsys, converted, "one two", "--max-new-tokens", "9", "--teacher")
    first, second = greedy(teacher, "one two", 9)[0], greedy(converted, "one two", 9)[0]
    assert out == f"student: {converted}\n\n{second}\n\nteacher: {teacher}\n\n{first}\n"


def test_teacher_beside_in_columns_on_a_terminal(converted, teacher_folder, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    options = generate.Options(max_new_tokens=9, teacher=True, device="cpu")
    answers = {"teacher": {"text": "left " * 30}, "student": {"text": "right " * 30}}
    monkeypatch.setattr(generate, "_answer", lambda model, inputs, o, device, side, *rest: (answers[side], False))
    generate.generate(str(converted), "one two", options, Console())
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("left" in line and "right" in line and line.index("left") < line.index("right") for line in lines)
    assert lines[0].startswith("teacher: ") and "student: " in lines[0]


def test_prompt_from_stdin(converted, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one two"))
    assert run_json(capsys, converted, "-", "--max-new-tokens", "3")["prompt"] == "one two"


def test_chat_template(chatty, capsys):
    report = run_json(capsys, chatty, "hi", "--max-new-tokens", "5", "--system", "be brief")
    prompt = "[system]be brief[user]hi>"
    assert report["answers"]["student"]["prompt_tokens"] == len(prompt)
    assert report["answers"]["student"]["text"] == greedy(chatty, prompt, 5)[0]
    plain = run_json(capsys, chatty, "hi", "--max-new-tokens", "5", "--no-chat")
    assert plain["answers"]["student"]["prompt_tokens"] == 2


def test_sampling_follows_the_seed(converted, capsys):
    def text(*argv):
        report = run_json(capsys, converted, "one", "--max-new-tokens", "12", "--temperature", "2", *argv)
        return report["answers"]["student"]["text"]

    assert text() == text("--seed", "0") != text("--seed", "1")
    assert text("--top-p", "0.000001") == greedy(converted, "one", 12)[0]


def test_plain_teacher(teacher_folder, capsys):
    folder = teacher_folder("llama")
    report = run_json(capsys, folder, "one two", "--max-new-tokens", "4")
    assert report["answers"]["model"]["text"] == greedy(folder, "one two", 4)[0]
    capsys.readouterr()
    err = run(capsys, folder, "one two", "--teacher", code=1).err
    assert "names no teacher" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("flags", [(), ("--json",), ("--teacher",)])
def test_ctrl_c_keeps_what_was_made(converted, capsys, monkeypatch, flags):
    put, puts = generate._Stream.put, []

    def stops(self, value):
        puts.append(value)
        if len(puts) == 5:  # the prompt and three tokens came through
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(generate._Stream, "put", stops)
    out, err = run(capsys, converted, "one two", "--max-new-tokens", "12", *flags, code=130)
    assert "Traceback" not in err
    if flags == ("--json",):
        report = json.loads(out)
        assert report["stopped"] and report["answers"]["student"]["tokens"] == 3
        assert report["answers"]["student"]["text"] == greedy(converted, "one two", 3)[0]
    else:
        assert out.endswith("\n") and "teacher" not in out, "the second model is not begun"
        if not flags:
            assert out == greedy(converted, "one two", 3)[0] + "\n"


def test_samples_are_what_each_prompt_gives_alone(converted, teacher_folder):
    prompts = ["one two", "a much longer prompt than the other", "x"]
    options = generate.Options(max_new_tokens=20, device="cpu")
    report = generate.samples(str(converted), prompts, options, Console(quiet=True))
    assert [sample["prompt"] for sample in report["samples"]] == prompts and not report["chat"]
    for side, folder in (("student", converted), ("teacher", teacher_folder("llama"))):
        rates = []
        for sample in report["samples"]:
            text, count = greedy(folder, sample["prompt"], 20)
            answer = sample[side]
            assert answer["text"] == text.strip()
            assert answer["tokens"] == count - answer["ended"] and (answer["ended"] or count == 20)
            rates += [] if answer["repeated"] is None else [answer["repeated"]]
        assert report[side] == pytest.approx(sum(rates) / len(rates)) and report[f"{side}_stderr"] >= 0


def test_samples_in_the_chat_template(chatty):
    report = generate.samples(
        str(chatty), ["hi"], generate.Options(max_new_tokens=5, device="cpu"), Console(quiet=True)
    )
    assert report["chat"] and report["student_stderr"] is None
    assert report["samples"][0]["student"]["text"] == greedy(chatty, "[user]hi>", 5)[0].strip()


def test_samples_that_no_model_can_give(teacher_folder, converted, monkeypatch):
    options = generate.Options(max_new_tokens=5, device="cpu")
    with pytest.raises(UserError, match="names no teacher"):
        generate.samples(str(teacher_folder("llama")), ["x"], options, Console(quiet=True))

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate, "_together", full)
    with pytest.raises(UserError, match="out of memory while .* answers"):
        generate.samples(str(converted), ["x"], options, Console(quiet=True))


def test_samples_page():
    answers = {
        "teacher": {"text": "one|two\n<b>*x*</b>", "tokens": 9, "ended": True, "repeated": 0.25},
        "student": {"text": "so", "tokens": 2, "ended": False, "repeated": None},
    }
    report = {"chat": True, "max_new_tokens": 9, "ngram": 4, "samples": [{"prompt": "Why\nso?", **answers}]}
    report |= {"teacher": 0.25, "teacher_stderr": 0.125, "student": None, "student_stderr": None}
    lines = generate.samples_page(report, "a_b").splitlines()
    assert lines[0] == r"# Samples of a\_b" and "* teacher: 0.25 ± 0.12" in lines
    assert lines[-5] == "## 1. Why so?" and lines[-3] == "| teacher (0.25) | student (–) |"
    assert lines[-1] == r"| one\|two<br>&lt;b&gt;\*x\*&lt;/b&gt; | so … |"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["", "--max-new-tokens", "3"], "the prompt is empty"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens is too small"),
        (["x", "--temperature", "-1"], "--temperature is below 0"),
        (["x", "--top-p", "0.9"], "does nothing at temperature 0"),
        (["x", "--temperature", "1", "--top-p", "1.5"], "--top-p is a share"),
        (["x", "--chat"], "has no chat template"),
        (["x", "--system", "y"], "--system needs a chat template"),
        (["x", "--device", "cuda:77"], "CUDA devices"),
        ([], "PROMPT"),
    ],
)
def test_usage(converted, capsys, argv, words):
    assert cli.run(["generate", str(converted), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.strip().splitlines()) == 1


def test_no_model(tmp_path, capsys):
    out, err = run(capsys, tmp_path / "nowhere", "x", code=1)
    assert out == "" and err.startswith("error: no such model")


def test_longer_than_the_model_warns(converted, capsys):
    out, err = run(capsys, converted, "a" * 250, "--max-new-tokens", "10")
    assert "is made for 256 tokens, and this takes 260" in err and out
