"""recipes/smollm2-135m-mixers/measure.py on a tiny model: arms by several commands, put together, timed and shown."""

import copy
import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-mixers" / "measure.py"
MEASURE = runpy.run_path(str(SCRIPT))
SMALL = "--calibrate-tokens 288 --align-tokens 192 --align-batch 96 --context 48".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents to train on, of which some are held out, and articles."""
    folder = tmp_path_factory.mktemp("text")
    lines = ["".join(f"The {i} of {j} went to the {i * j} and back. " for j in range(3 + i % 8)) for i in range(80)]
    for name, key, count in (("text", "text", 80), ("articles", "page", 2)):
        rows = [json.dumps({key: line}) + "\n" for line in lines[:count]]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def measure(teacher_folder, texts):
    """Run the script for some mixers with half of the layers left as softmax; returns what it wrote into `out`."""

    def run(out: Path, mixers: str, *more) -> dict:
        argv = [teacher_folder("llama-tied"), "--data", texts / "text.jsonl", "--out", out, "--mixers", mixers]
        MEASURE["main"](list(map(str, [*argv, "--keep", "50%", *SMALL, *more])))
        return json.loads(out.read_text())

    return run


@pytest.fixture(scope="module")
def parts(measure, texts, tmp_path_factory):
    """Two files by a command each, the first with the articles, and the students of both. Read only."""
    folder = tmp_path_factory.mktemp("mixers")
    students = ["--students", folder / "students"]
    measure(folder / "a.json", "gdn-standard", *students, "--wikitext", texts / "articles.jsonl")
    measure(folder / "b.json", "gdn", *students)
    return folder


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def test_what_is_written(parts):
    first, second = read(parts / "a.json"), read(parts / "b.json")
    assert first["command"] == second["command"] and "--align-tokens 192" in first["command"]
    assert first["teacher"]["token_perplexity"] > 1 and "teacher" not in second
    for results, mixer in ((first, "gdn-standard"), (second, "gdn")):
        (arm,) = results["arms"]
        assert (arm["mixer"], arm["keep"]) == (mixer, "50%") and arm["cache_bytes"]["8192"] > 0
        start, aligned = arm["start"], arm["aligned"]
        assert len(aligned["losses"]) == len(aligned["errors"]) == 2 and "losses" not in start
        assert start["heldout"]["teacher_perplexity"] == aligned["heldout"]["teacher_perplexity"]
        assert start["heldout"]["student_perplexity"] != aligned["heldout"]["student_perplexity"]
        assert ("wikitext2" in start, "wikitext2" in aligned) == (results is first,) * 2
        record = read(parts / "students" / f"{mixer}-50" / "linearize.json")
        assert record["heldout"] == aligned["heldout"] and record["recipe"]["align.tokens"] == 192
    assert {path.name for path in (parts / "students").iterdir()} == {"gdn-standard-50", "gdn-50"}


def test_an_arm_that_is_there_is_not_run_again(measure, parts, tmp_path, monkeypatch, capsys):
    def once(mixer, *args):
        ran.append(mixer)
        return {**copy.deepcopy(before["arms"][0]), "mixer": mixer}

    ran, out = [], tmp_path / "a.json"
    before = read(parts / "a.json")
    out.write_text(json.dumps(before))
    monkeypatch.setitem(MEASURE["main"].__globals__, "measure", once)
    after = measure(out, "gdn-standard,vala")
    assert ran == ["vala"] and after["arms"][0] == before["arms"][0] and len(after["arms"]) == 2
    measure(out, "gdn-standard,vala,ttt", "--budget-seconds", "-1")
    assert ran == ["vala"] and read(out) == after
    with pytest.raises(SystemExit):
        measure(out, "ttt", "--align-tokens", "96")
    assert "measured by another command" in capsys.readouterr().err
    assert ran == ["vala"] and read(out) == after


def test_a_student_of_another_command_is_not_taken_for_this_one(measure, parts, tmp_path):
    with pytest.raises(SystemExit, match="gdn-50 was made with other settings"):
        measure(tmp_path / "c.json", "gdn", "--students", parts / "students", "--align-tokens", "96")
    assert not (tmp_path / "c.json").exists()


def test_merged(parts, tmp_path, capsys):
    files, out = [str(parts / name) for name in ("a.json", "b.json")], tmp_path / "all.json"
    first, second = map(read, map(Path, files))
    MEASURE["main"](["--merge", *files, "--out", str(out)])
    found = read(out)
    assert [arm["mixer"] for arm in found["arms"]] == ["gdn", "gdn-standard"], "not as the files come"
    assert found["arms"] == [*second["arms"], *first["arms"]]
    for order in (files, files[::-1]):
        MEASURE["main"](["--merge", *order, "--out", str(out)])
        assert read(out) == found and found["teacher"] == first["teacher"]

    none = {**second["arms"][0], "keep": "none"}
    merged = MEASURE["merged"]([{**second, "arms": [none]}, first, second])
    order = [(arm["keep"], arm["mixer"]) for arm in merged["arms"]]
    assert order == [("none", "gdn"), ("50%", "gdn"), ("50%", "gdn-standard")]

    for name in ("command", "device", "torch"):
        (tmp_path / "other.json").write_text(json.dumps({**second, name: "another"}))
        with pytest.raises(SystemExit, match=f"the files differ in {name}$"):
            MEASURE["main"](["--merge", files[0], str(tmp_path / "other.json"), "--out", str(out)])
    assert read(out) == found


def test_times_are_added_where_a_student_was_kept(parts, tmp_path, capsys):
    """And nothing else changes; a second call has nothing to add."""
    out, lost = tmp_path / "all.json", {"mixer": "vala", "keep": "50%"}
    before = MEASURE["merged"]([read(parts / "a.json"), read(parts / "b.json")])
    before["arms"].append({**copy.deepcopy(before["arms"][0]), **lost})
    out.write_text(json.dumps(before))
    argv = ["--times", "--out", str(out), "--students", str(parts / "students"), "--decode-context", "64"]
    MEASURE["main"](argv)
    timed = read(out)
    untimed = copy.deepcopy(timed)
    for arm in untimed["arms"][:2]:
        decode = arm["aligned"].pop("decode")
        assert decode["dtype"] == "bfloat16" and decode["step_ms"]["median"] > 0
    assert untimed == before
    MEASURE["main"](argv)
    assert read(out) == timed

    capsys.readouterr()
    MEASURE["main"](["--table", str(out)])
    table = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [row[0] for row in rows[2:]] == ["gdn", "gdn-standard", "vala"] and {len(row) for row in rows} == {8}
    for row, arm in zip(rows[2:], timed["arms"], strict=True):
        assert row[1:4] == ["50%", *(f"{arm[stage]['heldout']['ratio']:.3f}" for stage in ("start", "aligned"))]
    theirs = timed["teacher"]["token_perplexity"]
    ratios = [timed["arms"][1][stage]["wikitext2"]["token_perplexity"] / theirs for stage in ("start", "aligned")]
    assert rows[3][4:6] == [f"{ratio:.3f}" for ratio in ratios] and rows[2][4:6] == ["", ""]
    assert [row[7] != "" for row in rows[2:]] == [True, True, False] and rows[2][7].endswith(" ms, no graph")
    fast = copy.deepcopy(timed)
    fast["arms"][0]["aligned"]["decode"]["graph_step_ms"] = 1.234
    assert "| 1.23 ms |" in MEASURE["table"](fast)


@pytest.mark.parametrize("argv", [["--out", "x"], ["--merge", "a"], ["--times", "--out", "x"]], ids=" ".join)
def test_an_incomplete_command(argv, capsys):
    with pytest.raises(SystemExit) as error:
        MEASURE["main"](argv)
    assert error.value.code == 2 and "MODEL, --data and --out; --table FILE" in capsys.readouterr().err
