"""`linearize eval`: the same numbers as lm-eval's own command, our measures, the cache, and what is refused."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_student, teacher_model, tiny_tokenizer

from linearize import cli, harness, models, probes, processes
from linearize.errors import UserError

TASKS = {
    "choice.yaml": """
task: tiny_choice
tag: tiny_tag
custom_dataset: !function documents.choice
dataset_path: ""
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 1.0}
""",
    "second.yaml": """
include: choice.yaml
task: tiny_second
tag: tiny_tag
custom_dataset: !function documents.second
metric_list: [{metric: acc}]
""",
    "rolling.yaml": """
task: tiny_rolling
custom_dataset: !function documents.text
dataset_path: ""
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
metadata: {version: 1.0}
""",
    "write.yaml": """
task: tiny_write
custom_dataset: !function documents.choice
dataset_path: ""
test_split: test
output_type: generate_until
doc_to_text: "Q: {{q}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], do_sample: false, max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
""",
    "group.yaml": """
group: tiny_group
task: [tiny_choice, tiny_second]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1.0}
""",
}
DOCUMENTS = """
import datasets

COLOURS = [" red", " green", " blue", " grey"]


def split(rows):
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def choice(**_):
    return split([{"q": f"number {i}", "choices": COLOURS[: 2 + i % 3], "answer": i % 2} for i in range(9)])


def second(**_):
    return split([{"q": f"thing {i}", "choices": COLOURS[:2], "answer": (i // 2) % 2} for i in range(6)])


def text(**_):
    return split([{"text": " ".join(["one two three"] * (4 + 9 * i))} for i in range(3)])
"""


@pytest.fixture
def task_folder(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / name).write_text(text)
    (folder / "documents.py").write_text(DOCUMENTS)
    return folder


@pytest.fixture(scope="session")
def converted(teacher_folder, tmp_path_factory):
    """A converted folder of the tiny llama, as convert leaves it."""
    student = make_student(teacher_model("llama"), {2: {"kind": "gdn"}})
    student.config.linearize = {
        **student.config.linearize,
        "teacher": {"source": str(teacher_folder("llama")), "revision": None},
    }
    folder = tmp_path_factory.mktemp("converted") / "student"
    student.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(converted, tmp_path, monkeypatch):
    """A copy to write into, with an empty cache of teachers' results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(converted, tmp_path / "student")


@pytest.fixture(autouse=True)
def no_description_of_the_machine(monkeypatch):
    """Every run of lm-eval asks pip for all packages, which takes seconds and changes no number."""
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture
def own_tasks_only(monkeypatch):
    """lm-eval's index without its 15,000 own tasks, which take long to read."""
    import lm_eval.tasks

    class Manager(lm_eval.tasks.TaskManager):
        def __init__(self, include_defaults=True, **kwargs):
            super().__init__(include_defaults=False, **kwargs)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Manager)


def run_json(capsys, *argv):
    code = cli.run(["eval", *map(str, argv), "--json", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out), err


def plain(folder, names, tasks, **settings):
    """What `lm_eval --model hf` does once its arguments are read."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with harness.quiet_harness(False):
        return lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={folder}",
            tasks=names,
            device="cpu",
            task_manager=TaskManager(include_path=tasks, include_defaults=False),
            log_samples=False,
            **settings,
        )


def numbers(results):
    return {name: {k: v for k, v in row.items() if "," in k} for name, row in results["results"].items()}


# ---- tasks of lm-eval -----------------------------------------------------------------------------------------------


def test_tasks_equal_plain_lm_eval_to_the_last_digit(model, teacher_folder, task_folder, capsys):
    names = ["tiny_choice", "tiny_rolling", "tiny_write"]
    report, err = run_json(capsys, model, "--tasks", ",".join(names), "--include-path", task_folder)
    written = [json.loads(path.read_text()) for path in (model / "eval").rglob("results_*.json")]
    assert len(written) == 2
    for side, folder in (("student", model), ("teacher", teacher_folder("llama"))):
        expected = plain(folder, names, task_folder)
        for name, row in numbers(expected).items():
            for key, value in row.items():
                metric = key.partition(",")[0]
                if metric.endswith("_stderr"):
                    told = report["tasks"][name][metric.removesuffix("_stderr")][f"{side}_stderr"]
                    assert told == (None if value == "N/A" else value), (side, name, key)
                else:
                    assert report["tasks"][name][metric][side] == value, (side, name, key)
        [found] = [r for r in written if r["model_name"] == str(folder)]
        assert numbers(found) == numbers(expected)
        assert found["configs"]["tiny_choice"]["metadata"]["pretrained"] == str(folder)
        assert expected.keys() <= found.keys()
    assert report["tasks"]["tiny_rolling"]["word_perplexity"]["teacher"] > 1
    assert "Traceback" not in err and "INFO" not in err and "WARNING" not in err
    assert len(err.strip().splitlines()) == 7, "a line for each kind of request of each model, and where results are"


def test_batches_and_fewshot_as_plain(model, task_folder, capsys):
    argv = [model, "--tasks", "tiny_choice", "--include-path", task_folder, "--no-teacher", "--limit", "7"]
    report, _ = run_json(capsys, *argv, "--batch-size", "3", "--num-fewshot", "2")
    expected = numbers(plain(model, ["tiny_choice"], task_folder, limit=7, batch_size=3, num_fewshot=2))["tiny_choice"]
    row = report["tasks"]["tiny_choice"]
    assert row["acc"]["student"] == expected["acc,none"] and row["acc"]["documents"] == 7
    assert row["acc_norm"]["student"] == expected["acc_norm,none"]
    assert row["acc"]["teacher"] is None and row["acc"]["retained_percent"] is None
    assert (model / "eval" / "tasks-limit-7-alone.json").is_file()
    assert not (model / "eval" / "tasks.json").exists()


def test_groups_tags_and_the_mean(model, task_folder, capsys):
    report, _ = run_json(capsys, model, "--tasks", "tiny_group,tiny_write", "--include-path", task_folder)
    tasks = report["tasks"]
    assert set(tasks) == {"tiny_group", "tiny_choice", "tiny_second", "tiny_write"}
    # 2, 3 and 4 choices in turn; the group counts documents, 9 of the one and 6 of the other
    assert tasks["tiny_choice"]["acc"]["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert tasks["tiny_group"]["acc"]["chance"] == pytest.approx((9 * 13 / 36 + 6 / 2) / 15)
    mean = report["retained"]
    assert mean["tasks"] == {"tiny_group": "acc", "tiny_write": "exact_match"}
    for side in ("teacher", "student"):
        rows = [tasks[name][metric] for name, metric in mean["tasks"].items()]
        assert mean[side] == pytest.approx(sum(row[side] for row in rows) / 2)
        assert mean[f"{side}_stderr"] == pytest.approx(math.hypot(*(row[f"{side}_stderr"] for row in rows)) / 2)
    report, _ = run_json(capsys, model, "--tasks", "tiny_tag", "--include-path", task_folder)
    assert set(report["tasks"]) == {"tiny_choice", "tiny_second"}
    assert report["retained"]["tasks"] == {"tiny_choice": "acc_norm", "tiny_second": "acc"}


def test_what_is_kept():
    row = harness.compared(0.75, 0.6, True, 0.5, 0.01)
    assert row["retained_percent"] == pytest.approx(80) and row["above_chance_percent"] == pytest.approx(40)
    assert row["ratio"] is None
    assert harness.compared(0.505, 0.5, True, 0.5, 0.01)["above_chance_percent"] is None, "the teacher is at chance"
    row = harness.compared(10.0, 12.0, False, None, None)
    assert row["ratio"] == pytest.approx(1.2) and row["retained_percent"] is None
    assert harness.compared(-0.1, 0.1, True, None, None)["retained_percent"] is None


def test_later_tasks_join_the_file_of_the_same_models(model, task_folder, capsys):
    include = ["--include-path", task_folder]
    run_json(capsys, model, "--tasks", "tiny_choice", *include)
    run_json(capsys, model, "--tasks", "tiny_second", *include)
    path = model / "eval" / "tasks.json"
    both = json.loads(path.read_text())
    assert set(both["tasks"]) == set(both["retained"]["tasks"]) == {"tiny_choice", "tiny_second"}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    run_json(capsys, model, "--tasks", "tiny_second", *include)
    assert set(json.loads(path.read_text())["tasks"]) == {"tiny_second"}, "of another student"


# ---- the teacher's results are kept ---------------------------------------------------------------------------------


def test_teacher_is_measured_once(model, teacher_folder, task_folder, tmp_path, capsys, monkeypatch):
    teacher = shutil.copytree(teacher_folder("llama"), tmp_path / "teacher")
    argv = [model, "--teacher", teacher, "--tasks", "tiny_choice,recall", "--include-path", task_folder]
    argv += ["--lengths", "64", "--limit", "3", "--prompts", "1"]
    loaded = []
    load = models.Model.load
    monkeypatch.setattr(models.Model, "load", lambda self, *args: loaded.append(self.source) or load(self, *args))

    def again(*more):
        loaded.clear()
        report, err = run_json(capsys, *argv, *more)
        return report, err, str(teacher) in loaded

    first, _, measured = again()
    assert measured
    second, err, measured = again()
    assert not measured and second == first and "measured before" in err
    assert again("--refresh")[2]
    assert again("--dtype", "bfloat16")[2]
    assert again("--num-fewshot", "1")[2]
    assert again("--limit", "4")[2]
    assert not again()[2], "the first one is still there"

    documents = task_folder / "documents.py"
    documents.write_text(documents.read_text().replace('"number {i}"', '"numeral {i}"'))
    sys.modules.pop("documents", None)
    assert again()[2], "other documents"
    assert not again()[2]
    weights = teacher / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert again()[2], "other weights"
    for path in (tmp_path / "cache" / "linearize" / "eval").iterdir():
        path.write_text("{")
    assert again()[2], "a damaged cache is measured again"


def test_only_the_new_task_is_measured(model, task_folder, capsys, monkeypatch):
    asked = []
    run = harness.run

    def counted(net, tokenizer, requests, *args, **kwargs):
        asked.append((kwargs["who"], [r.name for r in requests]))
        return run(net, tokenizer, requests, *args, **kwargs)

    monkeypatch.setattr(harness, "run", counted)
    include = ["--include-path", task_folder]
    run_json(capsys, model, "--tasks", "tiny_choice", *include)
    report, _ = run_json(capsys, model, "--tasks", "tiny_choice,tiny_second", *include)
    assert asked[2:] == [("student", ["tiny_choice", "tiny_second"]), ("teacher", ["tiny_second"])]
    assert set(report["tasks"]) == {"tiny_choice", "tiny_second"}
    assert None not in [row["acc"]["teacher"] for row in report["tasks"].values()]


# ---- measures of our own --------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    """Steps of one token are what takes time."""
    monkeypatch.setattr("linearize.evaluate.PARITY", (2, 20))
    monkeypatch.setattr(probes, "CONTINUATION", 12)


def test_own_measures_need_no_lm_eval(model, capsys, monkeypatch, short):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    own, few = "perplexity,parity,recall,needle,repetition", ("--limit", "2", "--prompts", "2")
    report, _ = run_json(capsys, model, "--tasks", own, *few, "--lengths", "64,128,512", "--context", "64")
    files = dict(zip(own.split(","), ("perplexity-limit-2", "parity", "recall", "needle", "repetition"), strict=True))
    assert {path.stem for path in (model / "eval").iterdir()} == set(files.values()), "of all documents, there is none"
    for name, stem in files.items():
        file = json.loads((model / "eval" / f"{stem}.json").read_text())
        assert {key: file[key] for key in report[name]} == report[name]
    ratio = report["perplexity"]["ratio"]["token"]
    gap = report["perplexity"]["loss_difference"]
    assert ratio == pytest.approx(math.exp(gap["nats_per_token"])) and gap["stderr"] > 0
    for side in ("teacher", "student"):
        for way in ("decode", "chunked"):
            assert report["parity"][side][way]["max_relative_error"] < 1e-4
            assert report["parity"][side][way]["argmax_agreement_percent"] == 100
    lengths = report["recall"]["lengths"]
    assert lengths["64"]["questions"] == 2 * 8 and 0 <= lengths["64"]["student"] <= 1
    assert lengths["512"] == dict.fromkeys(("questions", "teacher", "teacher_stderr", "student", "student_stderr"))
    needles = report["needle"]["lengths"]
    assert needles["64"]["all"]["student"] is None and list(needles) == ["64", "128", "512"]
    every = needles["128"]["all"]
    assert every["questions"] == 6 and needles["128"]["10"]["questions"] == 2
    for name in ("teacher", "student", "teacher_rank", "student_rank"):
        assert every[name] == pytest.approx(sum(needles["128"][depth][name] for depth in ("10", "50", "90")) / 3)
        assert 0 <= every[name] <= 1 and every[f"{name}_stderr"] >= 0
    assert 0 <= report["repetition"]["student"] <= 1 and 0 <= report["repetition"]["text"] <= 1


def test_tables(model, task_folder, capsys, short):
    argv = f"eval {model} --tasks tiny_choice,tiny_rolling,tiny_second,perplexity,parity,recall,needle,repetition"
    more = ["--include-path", str(task_folder), "--lengths", "128", "--limit", "2", "--device", "cpu"]
    assert cli.run([*argv.split(), *more]) == 0
    out = capsys.readouterr().out
    assert "--limit 2, a test only" in out
    for words in ("retained", "mean of 2", "word perplexity", "token by token", "recall", "needle", "repeated 4-grams"):
        assert words in out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(model) not in line) <= 80


def test_perplexity_is_that_of_lm_eval(model, task_folder, tmp_path):
    """Documents longer than the window, against lm-eval's rolling log-likelihood with the same window."""
    net = models.open_model(str(model)).load(torch.device("cpu"))
    documents = [" ".join(["one two three"] * (4 + 9 * i)) for i in range(3)]
    assert len(documents[-1]) > 256
    found = probes.perplexities(probes.document_losses(net, tiny_tokenizer(), documents, 256))
    expected = numbers(plain(model, ["tiny_rolling"], task_folder))["tiny_rolling"]
    assert found["word_perplexity"] == pytest.approx(expected["word_perplexity,none"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte,none"], rel=1e-5)
    assert found["token_perplexity"] == pytest.approx(2 ** found["bits_per_byte"], rel=1e-9), "a token a byte"


def test_loss_difference():
    teacher = [{"nats": 10.0, "tokens": 10}, {"nats": 40.0, "tokens": 20}]
    student = [{"nats": 12.0, "tokens": 10}, {"nats": 41.0, "tokens": 20}]
    mean, error = probes.loss_difference(teacher, student)
    assert mean == pytest.approx(3 / 30)
    assert error == pytest.approx(math.sqrt(2 * ((2 - 1) ** 2 + (1 - 2) ** 2)) / 30)
    assert probes.loss_difference(teacher[:1], student[:1]) == (pytest.approx(0.2), None)


def test_parity_sees_a_state_that_is_lost():
    net = make_student(teacher_model("llama"), {1: {"kind": "gdn"}})
    rows = torch.randint(4, 260, (1, 24), generator=torch.Generator().manual_seed(0))
    assert probes.parity(net, rows)["decode"]["max_relative_error"] < 1e-4
    mixer = net.model.layers[1].self_attn.mixer
    forward = mixer.forward
    mixer.forward = lambda *args, state=None, **kwargs: forward(*args, state=None, **kwargs)
    found = probes.parity(net, rows)
    assert found["decode"]["max_relative_error"] > 1e-2 and found["chunked"]["max_relative_error"] > 1e-2


class Perfect(torch.nn.Module):
    """Looks the last key up in the text: what a model with perfect recall answers."""

    def __init__(self, per_line):
        super().__init__()
        self.config, self.per_line = teacher_model("llama").config, per_line

    def forward(self, input_ids, use_cache, logits_to_keep):
        ids = input_ids[0].tolist()
        logits = torch.zeros(1, len(logits_to_keep), 260)
        for row, position in enumerate(logits_to_keep.tolist()):
            [first] = [i for i in range(0, position - 1, self.per_line) if ids[i] == ids[position - 1]]
            logits[0, row, ids[first + 2]] = 1
        return type("Out", (), {"logits": logits})

    device = torch.device("cpu")


def test_recall_asks_for_what_is_in_the_text():
    tokenizer = tiny_tokenizer()
    assert probes.recall(Perfect(4), tokenizer, [64, 100, 128], 3, seed=1) == {
        "64": {"correct": 24, "asked": 24},
        "100": {"correct": 36, "asked": 36},
        "128": {"correct": 48, "asked": 48},
    }
    words = probes.words_of(tokenizer)
    assert len(words) == 26
    ids, positions, answers = probes.recall_prompt(tokenizer, words, 100, 0)
    assert len(ids) == 100 and [ids[p + 1] for p in positions] == answers
    assert probes.recall_prompt(tokenizer, words, 100, 0) == (ids, positions, answers)
    assert probes.recall_prompt(tokenizer, words, 100, 1) != (ids, positions, answers)
    text = tokenizer.decode(ids).splitlines()
    pairs, questions = dict(line.split(":") for line in text[:13]), text[13:]
    assert len(pairs) == 13 and all(pairs[line[0]] == line[2] for line in questions)
    assert probes.recall_prompt(tokenizer, words, 1000, 0) is None, "more keys than there are words"


def needle_in(tokenizer, **asked):
    filler = probes.encoded(tokenizer, "All is well here. " * 9 + "And so it goes. " * 9)
    return probes.needle_prompt(tokenizer, filler, **{"length": 400, "depth": 50, "seed": 0} | asked)


def test_needle_prompt():
    tokenizer = tiny_tokenizer()
    ids, values = needle_in(tokenizer)
    text, values = tokenizer.decode(ids), [tokenizer.decode(value) for value in values]
    assert len(ids) == 400 and len(set(values)) == len({word for value in values for word in value.split()}) / 2 == 16
    asked = text[text.rindex("The secret code of ") :].rstrip()
    assert text.count(asked) == 2 and f"{asked} {values[0]}." in " ".join(text.split())
    assert not any(value in text for value in values[1:])
    before, after = text.split(f"\n\n{asked} {values[0]}.\n\n")
    assert before.endswith(".") and abs(len(before) - len(before + after) / 2) < 40
    places = [tokenizer.decode(needle_in(tokenizer, depth=depth)[0]).index("The secret") for depth in probes.DEPTHS]
    assert places == sorted(places) and places[0] < 60 and places[2] > 250
    assert needle_in(tokenizer) == needle_in(tokenizer) != needle_in(tokenizer, seed=1)
    assert needle_in(tokenizer, length=90) is None, "no room for text"


def test_needle_scores_are_those_of_whole_texts():
    """Every value scored in one pass over prompt and value, and the greedy continuation, for a student with mixers."""
    net, tokenizer = make_student(teacher_model("llama"), {1: {"kind": "gdn"}}), tiny_tokenizer()
    made = [needle_in(tokenizer, length=200, seed=seed) for seed in range(2)]
    # One value that is what the model says anyway.
    with torch.no_grad():
        said = net.generate(torch.tensor([made[1][0]]), max_new_tokens=6, do_sample=False)[0, 200:].tolist()
        made[1][1][0] = said
        greedy, logs = probes.value_scores(net, *zip(*made, strict=True))
        assert greedy == [False, True] and logs.shape == (2, 16)
        for (ids, values), row in zip(made, logs, strict=True):
            for value, found in list(zip(values, row, strict=True))[::5]:
                logits = net(torch.tensor([ids + value]), use_cache=False).logits[0, 199:-1].log_softmax(-1)
                expected = logits.gather(1, torch.tensor(value)[:, None]).sum()
                assert float(found) == pytest.approx(float(expected), rel=1e-4)


def test_needle_ranks(monkeypatch):
    seen = []

    def scores(model, prompts, values):
        seen.append(len(prompts))
        logs = torch.arange(16.0).flip(0).expand(len(prompts), 16).clone()
        logs[:, 0] = torch.tensor([float(len(prompts[0]) == 128) * 20 + 7.0])  # the best at 128, else a tie with one
        return [len(prompts[0]) == 128] * len(prompts), logs

    monkeypatch.setattr(probes, "value_scores", scores)
    monkeypatch.setitem(probes.NEEDLE_TOKENS, "cpu", 128 * 16 * 4)
    counted = []
    tokenizer = tiny_tokenizer()
    filler = probes.encoded(tokenizer, "All is well. ")
    found = probes.needle(Perfect(4), tokenizer, filler, [64, 128, 200, 512], 2, 0, counted.append)
    assert list(found) == ["64", "128", "200", "512"] and seen == [4, 2, 2, 2, 2] and sum(counted) == 6 * 328
    assert found["128"] == {depth: {"exact": [1, 1], "rank": [1, 1]} for depth in ("10", "50", "90")}
    assert found["200"]["10"] == {"exact": [0, 0], "rank": [pytest.approx(7.5 / 15)] * 2}
    assert found["64"]["90"] == found["512"]["10"] == {"exact": [], "rank": []}, "no room, and longer than the model"


def test_repeated():
    assert probes.repeated([1, 2, 3, 4, 5]) == 0
    assert probes.repeated([7] * 10) == pytest.approx(6 / 7)
    assert probes.repeated([1, 2, 3]) is None


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(capsys, *argv, code):
    assert cli.run(["eval", *map(str, argv), "--device", "cpu"]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_unknown_task_names_the_nearest(model, task_folder, capsys, own_tasks_only):
    include = ["--include-path", task_folder]
    assert "did you mean tiny_choice" in refused(capsys, model, "--tasks", "tiny_choise", *include, code=2)
    assert "did you mean perplexity" in refused(capsys, model, "--tasks", "perplexty", *include, code=2)
    assert "no such task (got 'xyzzy')" in refused(capsys, model, "--tasks", "xyzzy", *include, code=2)
    line = refused(capsys, model, "--tasks", "tiny_group,tiny_second", *include, code=2)
    assert "asked for twice (got 'tiny_second')" in line


def test_lm_eval_not_installed(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'linearize[eval]'" in refused(capsys, model, "--tasks", "piqa", code=1)


def test_not_a_converted_model(teacher_folder, tmp_path, capsys, task_folder):
    teacher = teacher_folder("llama")
    line = refused(capsys, teacher, "--tasks", "perplexity", code=1)
    assert "is not a converted model" in line and "--teacher" in line
    assert "no such folder" in refused(capsys, tmp_path / "nowhere", "--tasks", "perplexity", code=1)
    report, _ = run_json(capsys, teacher, "--tasks", "tiny_second", "--include-path", task_folder, "--no-teacher")
    assert report["teacher"] is None and not (teacher / "eval").exists(), "nothing is written into others' folders"


def test_missing_tokenizer_and_teacher(model, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "has no tokenizer that can be read" in refused(capsys, model, "--tasks", "perplexity", code=1)
    tiny_tokenizer().save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config["linearize"]["teacher"]["source"] = str(model / "gone")
    (model / "config.json").write_text(json.dumps(config))
    line = refused(capsys, model, "--tasks", "perplexity", code=1)
    assert "cannot open the teacher that" in line and "--no-teacher" in line


def test_other_vocabulary(model, teacher_folder, tmp_path, capsys):
    teacher = shutil.copytree(teacher_folder("llama"), tmp_path / "teacher")
    text = (teacher / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    line = refused(capsys, model, "--teacher", teacher, "--tasks", "perplexity", code=1)
    assert "vocabularies" in line and "2 of them not the same" in line


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--tasks ,", "--tasks names nothing"),
        ("--tasks recall --lengths 0", "--lengths is too small"),
        ("--tasks recall --lengths many", "not a size"),
        ("--tasks recall --batch-size some", "--batch-size is auto or a number"),
        ("--tasks recall --teacher a --no-teacher", "exclude each other"),
        ("--tasks recall --include-path nowhere", None),
        ("", "--tasks"),
    ],
)
def test_usage(model, capsys, argv, words):
    if words is None:
        assert "--include-path is not a folder" in refused(
            capsys, model, "--tasks", "x", "--include-path", "nowhere", code=2
        )
    else:
        assert words in refused(capsys, model, *argv.split(), code=2)


def test_damaged_weights(model, capsys):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, model, "--tasks", "perplexity", code=1)


def test_task_that_fails_is_one_line(model, task_folder, capsys):
    (task_folder / "write.yaml").write_text(TASKS["write.yaml"].replace("max_gen_toks: 6", "max_gen_toks: 600"))
    line = refused(capsys, model, "--tasks", "tiny_write", "--include-path", task_folder, code=1)
    assert "lm-eval stopped on student" in line and "600" in line


def test_identity_follows_the_files(model):
    opened = models.open_model(str(model))
    before = opened.identity()
    assert models.open_model(str(model)).identity() == before
    (model / "generation_config.json").write_text("{}")
    assert models.open_model(str(model)).identity() != before


def test_pick_device():
    assert processes.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="no such device"):
        processes.pick_device("gpu5x")
    with pytest.raises(UserError, match="CUDA devices"):
        processes.pick_device("cuda:99")


# ---- real tasks, where a checkout has them beside it ----------------------------------------------------------------

REAL = Path(__file__).parents[2] / "shared" / "lm_eval_tasks"


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/lm_eval_tasks beside the checkout")
def test_real_tasks_equal_plain_lm_eval(model, capsys):
    names = ["local_copa", "local_winogrande", "local_openbookqa"]
    argv = [model, "--tasks", ",".join(names), "--include-path", REAL, "--limit", "6", "--no-teacher"]
    report, _ = run_json(capsys, *argv)
    for name, row in numbers(plain(model, names, REAL, limit=6)).items():
        for key, value in row.items():
            metric, _, _ = key.partition(",")
            if not metric.endswith("_stderr"):
                assert report["tasks"][name][metric]["student"] == value
    assert report["tasks"]["local_winogrande"]["acc"]["chance"] == 0.5
