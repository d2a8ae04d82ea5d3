"""recipes/measure.py and the ablations on a tiny model: what is written, and that a second call goes on."""

import copy
import json
import math
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, teacher_model
from test_convert import FAST
from test_convert_distill import SHORT
from test_evaluate import DOCUMENTS, TASKS

from linearize import distill, layerwise, models
from linearize.errors import UserError
from linearize.mixers import MIXERS, HeadShape, Sample, Segments, build_mixer
from linearize.mixers.fit import Points
from linearize.recipe import Recipe

SCRIPT = Path(__file__).parents[1] / "recipes" / "measure.py"
MEASURE = runpy.run_path(str(SCRIPT))
STAGES = ("wikitext2", "tasks", "recall", "perplexity-48", "perplexity-96", "needle", "qa", "samples", "decode")
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
    (folder.parent / "qa").mkdir()
    rows = [{"question": f"What {i}?", "answer": "x", "support": "It is x."} for i in range(5)]
    (folder.parent / "qa" / "questions.json").write_text(json.dumps(rows))
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
        argv += ["--contexts", "48,96", "--lengths", "64,128", "--documents", 3, "--prompts", 2, "--limit", 4]
        argv += ["--decode-contexts", "16,32", "--decode-batches", "1,2", *more]
        assert MEASURE["main"](list(map(str, argv))) == code
        found = json.loads((out / "results.json").read_text()) if code == 0 else None
        return found, ["student" if ours else "teacher" for ours in loaded]

    return run


def test_everything_is_measured_once_and_a_second_call_goes_on(measure, tasks, tmp_path, teacher_folder, capsys):
    kept = tmp_path / "teacher.json"
    questions = ["--qa", tasks.parent / "qa" / "questions.json"]
    found, loaded = measure("--teacher-results", kept, *questions)
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
    word = found["evaluation"]["tasks"]["tasks"]["local_lambada"]["acc"]
    ten = summary["mean accuracy of 10 tasks, LAMBADA among them"]
    assert ten["student"] == pytest.approx((9 * mean["student"] + word["student"]) / 10)
    assert ten["chance"] == pytest.approx(9 * mean["chance"] / 10) and word["chance"] == 0
    assert summary["LAMBADA perplexity ratio"] > 0 and summary["WikiText-2 word perplexity"]["ratio"] > 0
    check_what_is_written(found, tmp_path / "out")
    lines = capsys.readouterr().out
    assert all(f"== {name}: " in lines for name in ("convert", *STAGES))
    for path in (tmp_path / "out" / "results.json", kept):
        assert not [
            folder for folder in (tmp_path, teacher_folder("llama-tied").parent) if str(folder) in path.read_text()
        ]

    for name in ("samples.md", "decode.png"):
        (tmp_path / "out" / name).unlink()
    again, loaded = measure(*questions)
    assert (tmp_path / "out" / "samples.md").is_file() and (tmp_path / "out" / "decode.png").is_file()
    assert not loaded and again["evaluation"] == found["evaluation"] and again["seconds"] == found["seconds"]
    path = tmp_path / "out" / "results.json"
    del again["evaluation"]["tasks"]
    path.write_text(json.dumps(again))
    again, loaded = measure("--teacher-results", kept, cache="empty")
    assert loaded == ["student"], "the teacher's results are in the file"
    assert "qa: left out, no questions: --qa FILE" in capsys.readouterr().out and "qa" in again["evaluation"]
    assert again["evaluation"]["tasks"] == found["evaluation"]["tasks"] and again["record"] == found["record"]

    assert measure("--seed", "1", code=1) == (None, [])
    assert "is of another recipe (got 'run.seed')" in capsys.readouterr().err
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"weights": "other"}))
    del found["evaluation"]["recall"]
    path.write_text(json.dumps(found))
    assert measure("--teacher-results", kept, code=1) == (None, [])
    assert "another teacher" in capsys.readouterr().err


def check_what_is_written(found, out):
    """Of the needle, the written answers, the samples and decoding."""
    measured, summary = found["evaluation"], found["summary"]
    needles = measured["needle"]["needle"]["lengths"]
    assert needles["128"]["all"]["questions"] == 6 and needles["64"]["all"]["questions"] is None
    every = needles["128"]["all"]
    assert summary["needle, rank, student / teacher, by length"]["128"] == [
        every["student_rank"],
        every["teacher_rank"],
    ]
    assert measured["qa"]["tasks"]["qa_exact"]["exact_match"]["documents"] == 4
    assert summary["written answers, exact match"]["student_stderr"] is not None
    tasks = json.loads((out / "model" / "eval" / "tasks-limit-4.json").read_text())["tasks"]
    assert {"qa_exact", "local_piqa"} <= set(tasks)
    samples = measured["samples"]["samples"]
    prompts = (SCRIPT.parent / "prompts.txt").read_text().splitlines()
    assert [row["prompt"] for row in samples["samples"]] == prompts and len(set(prompts)) == 10
    assert summary["repeated 4-grams of the samples"]["student"] == samples["student"]
    page = (out / "samples.md").read_text()
    assert page.startswith("# Samples of llama-tied, linearized") and page.count("\n## ") == 10
    cells = measured["decode"]["decode"]["cells"]
    assert len(cells) == 8 and {(c["context"], c["batch"]) for c in cells} == {(16, 1), (16, 2), (32, 1), (32, 2)}
    teacher, student = cells[-2:]
    ratio = summary["cache, student : teacher"]["32 x 2"]
    assert ratio == student["cache_bytes"] / teacher["cache_bytes"] and summary["decoding speed, student : teacher"]
    assert (out / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_stages_can_be_left_out(measure, capsys):
    skipped = "wikitext2,tasks,recall,perplexity,needle,qa,samples"
    found, _ = measure("--set", "distill.tokens=0", "--skip", skipped)
    assert set(found["evaluation"]) == {"decode"}
    assert measure("--set", "distill.tokens=0", "--skip", "decod", code=1) == (None, [])
    assert "--skip names no stage (got 'decod')" in capsys.readouterr().err
    for more, words in (
        (["--qa", "nowhere.json"], "--qa is no file"),
        (["--decode-batches", "1,x"], "not whole numbers"),
    ):
        assert measure("--set", "distill.tokens=0", *more, code=1) == (None, [])
        assert words in capsys.readouterr().err


def test_processes_that_skip_different_stages_share_a_file(measure, monkeypatch):
    asks = ["--set", "distill.tokens=0"]
    measure(*asks, "--no-eval")
    rest = "wikitext2,tasks,recall,needle,qa,samples,decode"
    whole = MEASURE["evaluation"].evaluate

    def meanwhile(*args):
        monkeypatch.setattr(MEASURE["evaluation"], "evaluate", whole)
        measure(*asks, "--skip", rest, "--contexts", "48")
        return whole(*args)

    monkeypatch.setattr(MEASURE["evaluation"], "evaluate", meanwhile)
    found, _ = measure(*asks, "--skip", rest, "--contexts", "96")
    assert set(found["evaluation"]) == {"perplexity-48", "perplexity-96"} < set(found["seconds"])
    assert "--skip" not in found["command"]


def test_a_stage_that_fails_is_told_and_the_next_one_runs(measure, tmp_path, capsys):
    (tmp_path / "bad.json").write_text("[]")
    skipped = ["--set", "distill.tokens=0", "--skip", "wikitext2,tasks,recall,perplexity,needle,samples"]
    assert measure(*skipped, "--qa", tmp_path / "bad.json", code=1)[1] == ["student", "teacher"]
    err = capsys.readouterr().err
    assert "error: qa: no question in the file" in err and "not measured (got 'qa')" in err
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(found["evaluation"]) == {"decode"} and "decoding speed, student : teacher" in found["summary"]


def test_decode_summary_without_what_did_not_fit():
    fits = {"context": 8, "batch": 1, "decode_tokens_per_second": 4.0, "cache_bytes": 10}
    cells = [
        {"model": "teacher", **fits},
        {"model": "student", **fits, "cache_bytes": 5, "graph_tokens_per_second": 9.0},
        {"model": "teacher", "context": 16, "batch": 1, "error": "out of memory"},
        {"model": "student", **fits, "context": 16},
    ]
    assert MEASURE["decode_summary"](cells) == {
        "decoding speed, student : teacher": {"8 x 1": 1.0, "16 x 1": None},
        "cache, student : teacher": {"8 x 1": 0.5, "16 x 1": None},
        "decoding speed as a CUDA graph, student : teacher": {"8 x 1": None, "16 x 1": None},
    }


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


# ---- ablations ------------------------------------------------------------------------------------------------------

ABLATIONS = SCRIPT.parent / "smollm2-135m-ablations"
FAST_MIXER = "--set=convert.mixer=gdn-standard"


@pytest.fixture
def ablate(recipe, teacher_folder, text, tmp_path, monkeypatch):
    """Run the script on tiny budgets; returns its arms, and how often a layer was aligned meanwhile."""
    script = runpy.run_path(str(ABLATIONS / "ablate.py"))
    aligned = []
    align = layerwise.align_layer
    monkeypatch.setattr(layerwise, "align_layer", lambda *args, **kw: aligned.append(1) or align(*args, **kw))

    def run(arms, *more, code=0, out=tmp_path / "results.json"):
        aligned.clear()
        values = {name: FAST[name] for name in ("align.context", "align.batch_tokens", "align.warmup")}
        values |= {"distill.context": 48, "distill.batch_tokens": 96, "distill.warmup": 1}
        values["convert.keep_softmax"] = SHORT["convert_keep_softmax"]
        argv = [teacher_folder("llama-tied"), "--data", text, "--out", out, "--arms", arms, "--recipe", recipe]
        argv += ["--align-tokens", 192, "--distill-tokens", 288, "--heldout-tokens", 192, "--heldout-context", 48]
        argv += ["--work", tmp_path / "work", *(f"--set={name}={value}" for name, value in values.items()), *more]
        assert script["main"](list(map(str, argv))) == code
        found = json.loads(out.read_text())["arms"] if out.exists() else []
        return {f"{at['arm']}@{at['seed']}": at for at in found}, len(aligned)

    run.script = script
    return run


def test_arms_share_what_they_have_in_common(ablate, tmp_path, capsys):
    arms, aligned = ablate("gdn,lr-8e-4")
    base, faster = arms.values()
    assert aligned == 2, "two layers, once"
    assert base["aligned"] == faster["aligned"] and base["losses"][0] == faster["losses"][0]
    assert base["losses"] != faster["losses"] and base["distilled"] != base["aligned"]
    assert len(base["losses"]) == 3 and base["tokens_per_step"] == 96 and base["layers"] == 2
    assert {"kl", "ratio"} <= base["aligned"].keys() & base["distilled"].keys()
    assert base["seconds"].keys() == {"calibrate", "align", "distill"} and base["seconds"]["distill"] > 0

    before = (tmp_path / "results.json").read_bytes()
    assert ablate("gdn,lr-8e-4", "--budget-seconds", "0")[1] == 0
    assert (tmp_path / "results.json").read_bytes() == before
    arms, _ = ablate("gdn@1", "--budget-seconds", "-1")
    assert "gdn@1" not in arms and "no time for gdn@1" in capsys.readouterr().out
    arms, aligned = ablate("gdn@1,gdn-standard")
    assert aligned == 4 and arms["gdn@1"]["losses"] != arms["gdn@0"]["losses"]

    plot = runpy.run_path(str(ABLATIONS / "plot.py"))
    tokens, mean, lowest, highest = plot["curve"]([arms["gdn@0"], arms["gdn@1"]])
    assert tokens == [96, 192, 288]
    pairs = list(zip(arms["gdn@0"]["losses"], arms["gdn@1"]["losses"], strict=True))
    assert mean == pytest.approx([sum(pair) / 2 for pair in pairs])
    assert (lowest, highest) == ([min(pair) for pair in pairs], [max(pair) for pair in pairs])
    assert plot["main"]([str(tmp_path / "results.json"), str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "the control's last loss " in capsys.readouterr().out
    control = ([10, 20, 40], [3.0, 2.0, 1.5], [], [])
    assert plot["reached"](([10, 20, 40], [2.0, 1.5, 1.0], [], []), control) == 0.5
    assert plot["reached"](([10, 20, 40], [2.0, 1.9, 1.8], [], []), control) is None

    assert ablate("gdn", "--set=distill.lr=1e-4", code=1)[1] == 0
    assert "had another recipe" in capsys.readouterr().err


def test_shares_divide_the_time_of_the_base(ablate, tmp_path, capsys):
    ablate("share-50", FAST_MIXER, code=1)
    assert "run --arms gdn first" in capsys.readouterr().err
    arms, _ = ablate("gdn", FAST_MIXER)
    found = json.loads((tmp_path / "results.json").read_text())
    found["arms"][0] |= {"align_tokens_per_second": 192, "distill_tokens_per_second": 96}
    found["arms"][0]["seconds"] |= {"align": 1.0, "distill": 3.0}
    (tmp_path / "results.json").write_text(json.dumps(found))
    arms, _ = ablate("share-50,share-0", FAST_MIXER)
    # Of 4 seconds: 2 x 192 / 2 layers and 2 x 96, in steps of 96.
    assert arms["share-50@0"]["set"] == {"align.tokens": "192", "distill.tokens": "192"}
    assert arms["share-0@0"]["set"] == {"align.tokens": "0", "distill.tokens": "384"}
    assert len(arms["share-0@0"]["losses"]) == 4 and arms["share-0@0"]["align_tokens_per_second"] is None


def test_a_failing_arm_is_told_and_the_next_one_runs(ablate, monkeypatch, capsys):
    def train(self, run, **options):
        if self.options.lr == 8e-4:
            raise UserError("distillation keeps diverging")
        return real(self, run, **options)

    real = distill.Trainer.train
    monkeypatch.setattr(distill.Trainer, "train", train)
    arms, _ = ablate("lr-8e-4,train-attention", FAST_MIXER)
    assert arms["lr-8e-4@0"]["error"] == "distillation keeps diverging"
    assert len(arms["train-attention@0"]["losses"]) == 3 and "error" not in arms["train-attention@0"]
    ablate("nothing", code=1)
    assert "no such arm (got 'nothing')" in capsys.readouterr().err


def test_every_arm_is_a_recipe(ablate):
    """With the base as it is shipped."""
    arms = ablate.script["ARMS"]
    for changes in arms.values():
        made = Recipe.resolve("smollm2-135m-gdn", [f"{key}={value}" for key, value in ablate.script["BASE"].items()])
        with ablate.script["own_mixers"]():
            changed = Recipe.resolve(None, flags={**{k: v for k, v in made.values().items()}, **changes})
        assert changed.fingerprint() != made.fingerprint() or changes == {}
    assert {name for group in ablate.script["GROUPS"].values() for name in group} >= set(arms)


def test_arms_with_a_mixer_of_their_own_start_and_train_in_another_way(ablate):
    known = dict(MIXERS)
    names = ("gdn", "gates-tied", "tilt-0", "forgetting-0", "rope-dropped", "sink-0", "mean-0", "memory-0", "state-kv")
    arms, aligned = ablate(",".join(names), "--set=distill.lr_mixer=1e-2")
    assert aligned == 2 * len(names) and known == MIXERS
    base, tied, *others = (arms[f"{name}@0"] for name in names)
    assert not any("error" in arm for arm in arms.values())
    # The gates have no effect before the first step of training.
    first = [next(iter(arm["align_losses"].values()))[0] for arm in (base, tied, *others)]
    assert first[0] == first[1] and tied["losses"] != base["losses"]
    # The tiny teacher's heads choose to forget nothing anyway.
    assert len({*first[:3], *first[4:]}) == len(names) - 2


@pytest.fixture
def started(ablate):
    """What a mixer of the script's own is after its start on random queries and keys, and its samples."""

    @torch.no_grad()
    def start(name: str, change=lambda sample: None):
        samples = [sample_of(SHAPE, seed) for seed in range(4)]
        for sample in samples:
            change(sample)
        mixer = ablate.script[name](SHAPE)
        mixer.ladder = mixer.start(samples, 8**-0.5, 4)
        return mixer

    return start


SHAPE = HeadShape(24, 4, 2, 8, 8)


def sample_of(shape: HeadShape, seed: int) -> Sample:
    draw = generator(seed)
    x, output = (torch.randn(2, 24, shape.hidden, generator=draw) for _ in range(2))
    # Queries with a mean, so that a tilt is worth something; values that recent tokens decide.
    q = torch.randn(2, 24, shape.q_heads, shape.key_dim, generator=draw) + 2
    k, v = (torch.randn(2, 24, shape.kv_heads, shape.key_dim, generator=draw) for _ in range(2))
    mask = torch.ones(24, 24, dtype=torch.bool).tril().triu(-4)
    keys, values = (rows.repeat_interleave(shape.group, 2).transpose(1, 2) for rows in (k, v))
    heads = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)
    return Sample(x, q, k, v, heads, output, Segments())


def heads_of(mixer, sample: Sample, **options):
    """What a mixer makes of a sample, and its state."""
    return mixer(sample.x, sample.q, sample.k, sample.v, 8**-0.5, segments=sample.segments, **options)


def error_of(mixer) -> float:
    """On what it was fitted on."""
    samples = [sample_of(SHAPE, seed) for seed in range(4)]
    return sum(float((heads_of(mixer, at)[0] - at.heads).square().sum()) for at in samples) ** 0.5


@torch.no_grad()
def test_a_start_without_tilt_or_forgetting(started):
    decays = [-F.softplus(started(name).gates.bias[-4:]) for name in ("GDN", "Unforgetting")]
    assert (decays[0] < -0.02).any() and (decays[1] > -0.001).all()
    assert started("GDN").reference.norm() > 1
    untilted = started("Untilted")
    assert not untilted.reference.any() and not untilted.readout.scale_reference.any()


@torch.no_grad()
def test_tied_gates_are_those_of_the_write_strength(started):
    sample = sample_of(SHAPE, 9)
    outputs = {}
    for name in ("GDN", "Tied"):
        mixer = started(name)
        before, _ = heads_of(mixer, sample)
        mixer.gates.weight[:8].normal_(generator=generator(1))
        after, _ = heads_of(mixer, sample)
        outputs[name] = before, after
    assert torch.equal(outputs["GDN"][0], outputs["Tied"][0])
    assert torch.equal(*outputs["Tied"]) and not torch.allclose(*outputs["GDN"], atol=1e-3)


TERMS = {"Sinkless": "readout.sink", "Meanless": "readout.mean", "Memoryless": "read_state"}


@pytest.mark.parametrize(("name", "term"), TERMS.items())
@torch.no_grad()
def test_a_term_of_the_readout_is_not_fitted(started, name, term):
    """The others are fitted without it, which is better than to leave it out of what was fitted with it."""
    mixer, whole = started(name), started("GDN")
    assert whole.get_parameter(term).all() and not mixer.get_parameter(term).any()
    for other in {*TERMS.values(), "readout.taps", "readout.scales"} - {term}:
        assert mixer.get_parameter(other).all()
        assert not torch.allclose(mixer.get_parameter(other), whole.get_parameter(other), rtol=1e-3)
    whole.get_parameter(term).zero_()
    assert error_of(mixer) < error_of(whole)


@pytest.mark.parametrize(("name", "term"), TERMS.items())
def test_a_term_of_the_readout_stays_away(started, name, term):
    """Whatever training does: the mixer is a GDN with 0 for that term, in whole rows and in steps after them."""
    mixer, whole, sample = started(name), started("GDN"), sample_of(SHAPE, 9)
    for i, parameter in enumerate(mixer.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator(i))
    whole.load_state_dict(mixer.state_dict())
    heads, _ = heads_of(mixer, sample)
    assert not torch.allclose(heads, heads_of(whole, sample)[0], atol=1e-3)
    whole.get_parameter(term).data.zero_()
    assert mixer.get_parameter(term).all() and torch.equal(heads, heads_of(whole, sample)[0])
    heads.square().mean().backward()
    assert not mixer.get_parameter(term).grad.any() and all(p.grad is not None for p in mixer.parameters())
    with torch.no_grad():
        first, last = (cut(sample, *at) for at in ((0, 20), (20, 24)))
        _, state = heads_of(mixer, first, output_state=True)
        step, _ = heads_of(mixer, last, state=state, output_state=True)
    torch.testing.assert_close(step, heads[:, 20:], atol=1e-4, rtol=1e-4)


def cut(sample: Sample, first: int, last: int) -> Sample:
    rows = {name: getattr(sample, name)[:, first:last] for name in ("x", "q", "k", "v", "heads", "output")}
    return Sample(**rows, segments=Segments())


def by_group(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """What the first heads of all groups have, and the second ones; heads, or whole numbers of them, along dim."""
    return list(x.unflatten(dim, (-1, SHAPE.group)).unbind(dim + 1))


@torch.no_grad()
def test_one_state_for_the_heads_of_a_group(started):
    """Whatever the parameters become."""
    mixer, sample = started("Shared"), sample_of(SHAPE, 9)
    shared = [mixer.get_parameter(name) for name in type(mixer).shared]
    own = [p for p in mixer.parameters() if all(p is not other for other in shared)]
    assert {p.numel() for p in own} == {4, 4 * mixer.taps, 4 * mixer.time_scales}, "readout scalars"
    seen = []
    mixer.operator = lambda *args, **kw: seen.append(args) or type(mixer).operator(*args, **kw)
    for change in (0.0, 0.3):  # after the start, and anywhere
        for i, parameter in enumerate(mixer.parameters()):
            parameter += change * torch.randn(parameter.shape, generator=generator(i))
        before, state = heads_of(mixer, sample, output_state=True)
        # Log write weight, forgetting, exponent of the decay and erase of every token, and c_h.
        for x in seen[-1][3:]:
            first, second = by_group(x, x.ndim - 1)
            assert torch.equal(first, second)
            assert not change or not torch.equal(*first.unbind(-1))
        for name in ("memory", "key_mean", "value_mean", "log_z", "scale_mean", "scale_log_z"):
            rows = state[name].unflatten(1, (SHAPE.q_heads, -1))
            first, second = by_group(rows, 1)
            assert torch.equal(first, second) and not torch.equal(*first.unbind(1))
        for parameter in shared:
            first, second = by_group(parameter)
            assert torch.equal(first, second) is (change == 0)
            second.add_(1)
        assert torch.equal(before, heads_of(mixer, sample)[0])
        for parameter in shared:
            by_group(parameter)[1].sub_(1)
    for parameter in own:
        by_group(parameter, parameter.shape.index(4))[1].add_(1)
        assert not torch.equal(before, heads_of(mixer, sample)[0])
        before, _ = heads_of(mixer, sample)
    with torch.enable_grad():
        heads_of(mixer, sample)[0].square().mean().backward()
    assert all(p.grad is not None for p in mixer.parameters())
    assert all(by_group(p.grad)[0].any() and not by_group(p.grad)[1].any() for p in shared)


@torch.no_grad()
def test_a_group_starts_from_its_summed_error(started):
    """Its heads choose together: the one decides whose error is the larger; they fit their readout each for itself."""

    def alike(sample):
        for name in ("q", "heads"):
            x = getattr(sample, name)
            setattr(sample, name, x[:, :, :: SHAPE.group].repeat_interleave(SHAPE.group, 2))

    def close(mixer, other, heads=slice(None)):
        pairs = ((mixer.get_parameter(name), other.get_parameter(name)) for name in type(mixer).shared)
        pairs = [(x.unflatten(0, (-1, SHAPE.q_heads)), y.unflatten(0, (-1, SHAPE.q_heads))) for x, y in pairs]
        return all(torch.allclose(x[:, heads], y[:, heads], atol=1e-5) for x, y in pairs)

    one, other = started("Shared", alike), started("GDN", alike)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), atol=1e-4, rtol=1e-3)
    assert one.ladder["full"] == pytest.approx(other.ladder["full"], rel=1e-3)
    assert not close(started("Shared"), started("GDN"))

    def unlike(sizes):
        """Heads that ask the same but want something else, one of them loudly."""

        def change(sample):
            sample.q = sample.q[:, :, :: SHAPE.group].repeat_interleave(SHAPE.group, 2)
            mean = sample.v.cumsum(1) / torch.arange(1, 25).view(-1, 1, 1)
            noise = 0.3 * torch.randn(mean.shape, generator=generator(5))  # no mixer fits it
            wanted = sizes[0] * sample.heads[:, :, :: SHAPE.group], sizes[1] * (mean + noise)
            sample.heads = torch.stack(wanted, 3).flatten(2, 3)

        return change

    alone = started("GDN", unlike((1.0, 1.0)))
    for decides, sizes in enumerate(((1.0, 0.01), (0.01, 1.0))):
        mixer = started("Shared", unlike(sizes))
        assert close(mixer, alone, slice(decides, None, SHAPE.group))
        assert not close(mixer, alone, slice(1 - decides, None, SHAPE.group))
        assert all(not torch.equal(*by_group(x)) for x in (mixer.readout.mean, mixer.read_state, mixer.readout.sink))


@torch.no_grad()
def test_the_keys_of_a_group_are_balanced_for_all_its_queries(ablate, started):
    """c_h^2 is E|s (q - r)| of all its heads over E|k - kbar|, times the erase scale that was chosen."""

    def louder(sample):
        sample.q[:, :, 1 :: SHAPE.group] *= 3

    module, sample, mixer = ablate.script["gdn"], sample_of(SHAPE, 0), started("Shared", louder)
    louder(sample)
    point = Points(mixer.reference[:, None], mixer.gates.bias[-4:, None])
    _, own = module.erased_terms(8**-0.5, sample, point, (1.0,), None)
    reach = (sample.q - mixer.reference).norm(dim=-1).mean((0, 1))
    together = reach.unflatten(0, (-1, SHAPE.group)).mean(1).repeat_interleave(SHAPE.group)
    erase = (2 * (mixer.log_balance - own[:, 0])).exp() * reach / together
    assert all(any(abs(found / known - 1) < 1e-3 for known in module.ERASES) for found in erase.tolist())


@torch.no_grad()
def test_queries_and_keys_without_rope(ablate):
    """Such a layer does not know where its tokens are, and starts from what its attention gives without RoPE."""
    model = copy.deepcopy(teacher_model("llama"))
    layer = model.model.layers[0].self_attn
    shape = HeadShape.from_config(model.config)
    with ablate.script["own_mixers"]():
        mixed = build_mixer(copy.deepcopy(layer), {"kind": "gdn-unrotated"}, 0, shape)
    x = torch.randn(2, 12, shape.hidden, generator=generator(0))
    plain = torch.arange(12).expand(2, -1)
    one, other = (mixed(x, position_embeddings=model.model.rotary_emb(x, at))[0] for at in (plain, plain**2))
    assert torch.equal(one, other)
    q, k = (projection(x).unflatten(-1, (-1, shape.key_dim)) for projection in (layer.q_proj, layer.k_proj))
    given = Sample(x, q + 1, k + 1, k, q, x, Segments())
    found = mixed.mixer.again(given)
    torch.testing.assert_close((found.q, found.k), (q, k))
    assert found.heads is given.heads


# ---- throughput -----------------------------------------------------------------------------------------------------


def test_the_command_in_the_results_has_every_option():
    """Parsed again it is what was asked for, whatever that was; the committed ones have all options too."""
    folder = SCRIPT.parent / "smollm2-135m-throughput"
    script = runpy.run_path(str(folder / "measure.py"))
    asked = ["MODEL", "--data", "...", "--out", "x", "--device", "cuda", "--sample-batch", "7", "--align-tokens", "9"]
    asked += ["--set", "distill.compile=true", "--set", "data.source=a b"]
    made = script["arguments"](asked)
    text = script["command_of"](made)
    assert script["arguments"]([*shlex.split(text)[1:], "--out", "x"]).__dict__ == made.__dict__ | {"out": Path("x")}
    for arm in json.loads((folder / "results.json").read_text()).values():
        again = script["arguments"]([*shlex.split(arm["command"])[1:], "--out", "x"])
        assert script["command_of"](again) == arm["command"]
