"""Choosing the layers that keep their softmax: the measure, the greedy search, and convert from end to end."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import make_student, teacher_model, tiny_tokenizer
from test_convert import recipe, run_convert

from linearize import probes
from linearize.data import Rows, sampling
from linearize.errors import UsageError, UserError
from linearize.plan import plan_model
from linearize.processes import Processes
from linearize.recipe import Recipe, Select
from linearize.select import Hybrid, Questions, choose, measurements

ALL = dict.fromkeys(range(4), {"kind": "gdn"})
ALONE = Processes(torch.device("cpu"))


def rows(n: int = 3, context: int = 24) -> Rows:
    ids = torch.randint(4, 260, (n, context), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(10), torch.arange(context - 10)]).expand(n, -1)  # two documents a row
    return Rows(ids, positions)


def make_hybrid(**options) -> Hybrid:
    select = Select(**{"questions": 2, "question_tokens": 40} | options)
    teacher = teacher_model("llama")
    questions = Questions.make(tiny_tokenizer(), select, seed=0)
    return Hybrid(make_student(teacher, ALL), teacher, list(ALL), rows(), questions, select, batch=48)


def plain_kl(student, teacher, **inputs) -> torch.Tensor:
    log_q, log_p = (F.log_softmax(model(**inputs).logits.double(), -1) for model in (student, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.no_grad()
@pytest.mark.parametrize("kept", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_damage_is_the_divergence_of_that_hybrid(kept):
    """Against a hybrid that is built as such, whole logits, document by document."""
    hybrid, teacher = make_hybrid(answers_weight=0.5), teacher_model("llama")
    found = hybrid.damage(kept)
    student = make_student(teacher, {i: spec for i, spec in ALL.items() if i not in kept})
    text = []
    for row in hybrid.rows.ids:
        for document in (row[:10], row[10:]):
            text.append(plain_kl(student, teacher, input_ids=document[None]).flatten())
    asked = plain_kl(student, teacher, input_ids=hybrid.questions.ids)
    answers = torch.stack([kl[at] for kl, at in zip(asked, hybrid.questions.positions, strict=True)]).mean()
    assert found["text"] == pytest.approx(float(torch.cat(text).mean()), rel=1e-4, abs=1e-9)
    assert found["answers"] == pytest.approx(float(answers), rel=1e-4, abs=1e-9)
    assert found["score"] == found["text"] + 0.5 * found["answers"]
    assert (found["score"] < 1e-9) == (len(kept) == 4)
    assert all(layer.self_attn is hybrid.mixed[i] for i, layer in enumerate(hybrid.student.model.layers))


def test_answers_are_asked_at_their_places():
    tokenizer = tiny_tokenizer()
    questions = Questions.make(tokenizer, Select(questions=2, question_tokens=40), seed=0)
    for ids, at in zip(questions.ids, questions.positions, strict=True):
        text = tokenizer.decode(ids)
        pairs = dict(line.split(":") for line in text.split("\n") if ":" in line)
        for place in at.tolist():
            asked = tokenizer.decode(ids[: place + 1]).rsplit("\n", 1)[-1]
            assert tokenizer.decode(ids[place + 1]) == pairs[asked.rstrip(":")]
    assert Questions.make(tokenizer, Select(questions=0), seed=0) is None


def test_no_question_is_one_that_recall_is_measured_on():
    """eval takes seeds from 0 on, and may ask at the same length."""
    tokenizer = tiny_tokenizer()
    questions = Questions.make(tokenizer, Select(questions=4, question_tokens=40), seed=0)
    measured = [probes.recall_prompt(tokenizer, probes.words_of(tokenizer), 40, seed)[0] for seed in range(20)]
    assert not any(ids in measured for ids in questions.ids.tolist())
    assert len({tuple(ids) for ids in questions.ids.tolist()}) == 4


class Table:
    """A damage that is known: what each layer takes away, and two layers that help only together."""

    def __init__(self, method: str):
        self.options = Select(method=method)
        self.calls = 0

    def damage(self, kept):
        self.calls += 1
        worth = {0: 1.0, 1: 3.0, 2: 2.5, 3: 0.5, 4: 0.1, 5: 0.0}
        score = 10.0 - sum(worth[i] for i in kept)
        if {1, 2} <= set(kept):
            score += 2.4  # they do the same
        return {"text": score, "answers": 0.0, "score": score}


def test_greedy_measures_again_after_each_choice():
    table, seen = Table("greedy"), []
    result = choose(table, range(6), 2, ALONE, lambda n, score: seen.append(n))
    assert result["kept"] == [0, 1] and result["order"] == [1, 0]
    assert result["damage"]["score"] == pytest.approx(6.0) and result["none"]["score"] == 10.0
    assert result["uniform"]["kept"] == [2, 5] and result["uniform"]["damage"]["score"] == pytest.approx(7.5)
    assert list(result["rounds"][0]["scores"]) == ["1", "2", "0", "3", "4", "5"], "a ranking, the best first"
    assert sum(seen) == measurements(6, 2, "greedy") == table.calls


def test_once_ranks_by_one_measurement():
    table, seen = Table("once"), []
    result = choose(table, range(6), 2, ALONE, lambda n, score: seen.append(n))
    assert result["kept"] == [1, 2] and len(result["rounds"]) == 1
    assert sum(seen) == measurements(6, 2, "once") == table.calls


def test_layers_that_cannot_be_chosen_are_left_out():
    result = choose(Table("greedy"), [0, 3, 4, 5], 1, ALONE, lambda n, score: None)
    assert result["kept"] == [0] and set(result["rounds"][0]["scores"]) == {"0", "3", "4", "5"}


SELECT = {
    "convert_keep_softmax": "auto:2",
    "select_tokens": 96,
    "select_context": 48,
    "select_questions": 2,
    "select_question_tokens": 40,
    "select_align_tokens": 96,
}


def test_convert_keeps_what_it_chose(tmp_path, teacher_folder, capsys):
    folder, out = teacher_folder("llama"), tmp_path / "out"
    record = run_convert(folder, out, **SELECT)
    chosen = record["selection"]
    assert len(chosen["kept"]) == 2 and set(map(int, record["mixers"])) == set(range(4)) - set(chosen["kept"])
    assert json.loads((out / "linearize.json").read_text())["selection"] == chosen
    assert set(json.loads((out / "config.json").read_text())["linearize"]["mixers"]) == set(record["mixers"])
    assert chosen["damage"]["score"] <= min(chosen["rounds"][1]["scores"].values()) + 1e-6
    assert not (out / ".linearize").exists()
    # The chosen layers by name give the same weights.
    named = run_convert(folder, tmp_path / "named", convert_keep_softmax=",".join(map(str, chosen["kept"])))
    assert named["selection"] is None and named["heldout"] == record["heldout"]
    for file in out.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "named" / file.name).read_bytes()


def test_a_stopped_run_does_not_choose_again(tmp_path, teacher_folder, monkeypatch):
    from linearize import convert as module

    whole = run_convert(teacher_folder("llama"), tmp_path / "whole", **SELECT)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run_convert(teacher_folder("llama"), tmp_path / "out", **SELECT)
    monkeypatch.undo()
    monkeypatch.setattr(module, "choose", stop)
    again = run_convert(teacher_folder("llama"), tmp_path / "out", **SELECT)
    assert again["selection"] == whole["selection"] and again["heldout"] == whole["heldout"]


def test_how_many_is_known_before_which():
    recipe = Recipe.resolve(sets=["convert.keep_softmax=auto:8"])
    assert recipe.measured_count() == 8 and Recipe().measured_count() is None
    assert len(recipe.mixer_specs(30)) == 22
    assert set(recipe.mixer_specs(30, kept=range(8))) == set(range(8, 30))
    with pytest.raises(UsageError):
        recipe.mixer_specs(8)


def test_questions_that_cannot_be_asked_are_refused_before_the_work(tmp_path, teacher_folder, monkeypatch):
    from linearize import convert as module

    monkeypatch.setattr(module, "convert_layers", lambda *a: pytest.fail("hours of work"))
    with pytest.raises(UserError, match="lower --select-question-tokens"):
        run_convert(teacher_folder("llama"), tmp_path / "out", **SELECT | {"select_question_tokens": 100_000})


def test_text_that_the_teacher_makes_is_made_once(tmp_path, teacher_folder, monkeypatch):
    made, sample = [], sampling._Sampler.sample

    def counted(self, seed, index, look):
        made.append((seed, index))
        return sample(self, seed, index, look)

    monkeypatch.setattr(sampling._Sampler, "sample", counted)
    run_convert(teacher_folder("llama"), tmp_path / "out", **SELECT, data_source="self", data_self_batch=4)
    assert made and len(made) == len(set(made))


def test_there_must_be_room_for_the_choice(tmp_path, teacher_folder, monkeypatch):
    folder = str(teacher_folder("llama"))
    disk = plan_model(folder, recipe(**SELECT)).disk
    room = sum(disk.values()) - disk["choosing_layers"] // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, room))
    with pytest.raises(UserError, match="free and the run needs"):
        run_convert(folder, tmp_path / "out", **SELECT)
