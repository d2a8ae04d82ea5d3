"""The main job end to end on tiny random models: what is written, what is measured, what is said, what goes wrong."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TEACHERS, VOCAB, make_student, teacher_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from linearize import cli, corpus
from linearize import convert as convert_module
from linearize.checkpoint import RunState, format_bytes
from linearize.console import Console
from linearize.convert import convert
from linearize.data import bundled_documents, documents, open_sources, pack_rows
from linearize.recipe import Recipe

# Small enough for a second a conversion; rows of 48 tokens hold the ends of several documents.
FAST = {
    "calibrate.tokens": 288,
    "calibrate.select_tokens": 192,
    "calibrate.context": 48,
    "calibrate.taps": 2,
    "calibrate.time_scales": 1,
    "align.tokens": 384,
    "align.context": 48,
    "align.batch_tokens": 96,
    "align.warmup": 1,
    "data.heldout_tokens": 480,
    "run.device": "cpu",
}
STEPS = 4
CONVERTED = (0, 1, 2)  # of four layers, 25 % stay softmax


def recipe(**changes) -> Recipe:
    """FAST with changes; align_tokens=0 for align.tokens."""
    return Recipe.from_values(FAST | {name.replace("_", ".", 1): value for name, value in changes.items()})


def run_convert(folder, out, **changes) -> dict:
    return convert(str(folder), Path(out), recipe(**changes), Console(quiet=True))


def argv(folder, out, *more: str) -> list[str]:
    settings = [word for name, value in FAST.items() for word in ("-s", f"{name}={value}")]
    return ["convert", str(folder), str(out), *settings, *more]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    parts = [load_file(file) for file in files]
    assert sum(map(len, parts)) == len(set().union(*parts)), "a tensor lies in two shards"
    return {name: tensor for part in parts for name, tensor in part.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weight_bytes(folder: Path) -> dict[str, bytes]:
    """What a run must give again: the weights, their index and the config."""
    found = {name: data for name, data in file_bytes(folder).items() if re.match(r"(model.*safetensors|config)", name)}
    assert "config.json" in found and any(name.endswith(".safetensors") for name in found)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The order of sums, and with it the last bit, depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(teacher_folder, tmp_path_factory):
    """A finished conversion of the llama teacher: (teacher's folder, OUT, the record). Read only."""
    out = tmp_path_factory.mktemp("finished") / "out"
    folder = teacher_folder("llama")
    return folder, out, run_convert(folder, out)


@pytest.fixture
def teacher_copy(teacher_folder, tmp_path):
    """The llama teacher's folder, to be damaged."""
    return shutil.copytree(teacher_folder("llama"), tmp_path / "teacher")


WORDS = bundled_documents("train")[0].split()
PARAGRAPHS = [f"Paragraph {i}: {word} and so on.\n" * 6 for i, word in enumerate(WORDS)]
SHORT = [f"{i}: " + " ".join(WORDS[i : i + 2 + i % 7]) for i in range(0, 900, 3)]  # rows hold several of them


def jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# ---- what is written ------------------------------------------------------------------------------------------------

# name: (the dtype in which the teacher is stored, the changes to the recipe)
FAMILIES = {
    "llama": (torch.float32, {"run_max_shard_size": 60_000}),
    "llama-tied": (torch.bfloat16, {}),
    "mistral": (torch.float32, {"run_dtype": "bfloat16"}),
    "qwen2": (torch.float32, {"convert_keep_softmax": "none", "run_max_shard_size": 1}),
    "qwen3": (torch.bfloat16, {"run_dtype": "float32"}),
    "smollm3": (torch.float32, {"convert_keep_softmax": "0-1"}),
    "olmo2": (torch.bfloat16, {"run_dtype": "bfloat16", "run_max_shard_size": 30_000}),
    "granite": (torch.float32, {"run_dtype": "float32"}),
    "phi3": (torch.float32, {"convert_mixer": "0=gdn-standard,rest=gdn"}),
    "gemma3_text": (torch.float32, {}),
    "glm4": (torch.float32, {"align_tokens": 0}),
    "gemma2": (torch.float32, {"convert_keep_softmax": "0-1"}),
    "qwen3_moe": (torch.bfloat16, {"run_max_shard_size": 30_000}),
}


def expected_name(name: str, converted: set[int]) -> str:
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(.*)", name)
    return f"model.layers.{match[1]}.self_attn.attn.{match[2]}" if match and int(match[1]) in converted else name


@torch.no_grad()
def plain_perplexity(model, tokenizer, texts: Path) -> float:
    """Document by document, with the model as anyone would run it; nothing of linearize.evaluate."""
    heldout = documents(open_sources(str(texts), heldout=True))
    rows = pack_rows(heldout, tokenizer, FAST["calibrate.context"], FAST["data.heldout_tokens"], seed=0)
    total, count, pieces = 0.0, 0, 0
    for ids, positions in zip(rows.ids, rows.positions, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in zip(starts, starts[1:], strict=False):
            document = ids[None, start:end]
            loss = F.cross_entropy(model(document).logits[0, :-1].double(), document[0, 1:], reduction="sum")
            total, count, pieces = total + float(loss), count + end - start - 1, pieces + 1
    assert pieces > len(rows), "no row holds two documents: this shows nothing about packing"
    return math.exp(total / count)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_family_ends_in_a_folder_that_loads(tmp_path, teacher_folder, name):
    stored, changes = FAMILIES[name]
    folder = shutil.copytree(teacher_folder(name), tmp_path / "teacher")
    if stored != torch.float32:
        cast_folder(folder, stored)
    texts = jsonl(tmp_path / "texts.jsonl", SHORT)
    out = tmp_path / "out"
    record = run_convert(folder, out, data_source=str(texts), **changes)

    teacher, student = tensors_of(folder), tensors_of(out)
    converted = set(map(int, record["mixers"]))
    assert converted == {"0-1": {2, 3}, "none": {0, 1, 2, 3}}.get(changes.get("convert_keep_softmax"), {0, 1, 2})
    asked = changes.get("run_dtype", "auto")
    dtype = stored if asked == "auto" else getattr(torch, asked)
    left = dict(student)
    for key, tensor in teacher.items():
        got = left.pop(expected_name(key, converted))
        assert got.dtype == dtype and got.shape == tensor.shape, key
        if ".attn." in expected_name(key, converted):
            # Alignment trains the borrowed projections, calibration the output projection.
            assert torch.isfinite(got).all(), key
            if changes.get("align_tokens") == 0 and not key.endswith("o_proj.weight"):
                assert same_bits(got, tensor.to(dtype)), key
        else:
            assert same_bits(got, tensor.to(dtype)), key
    assert {key.partition(".mixer.")[0] for key in left} == {f"model.layers.{i}.self_attn" for i in converted}
    assert all(".mixer." in key and t.dtype == torch.float32 and torch.isfinite(t).all() for key, t in left.items())
    assert ("lm_head.weight" in student) == ("lm_head.weight" in teacher)

    limit = changes.get("run_max_shard_size", 10**9)
    shards = sorted(out.glob("*.safetensors"))
    assert (len(shards) > 3) == (limit < 10**5)
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= limit

    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == f"linearize_{TEACHERS[name][0]}" and config["dtype"] == str(dtype).split(".")[1]
    assert set(config["linearize"]["mixers"]) == set(record["mixers"])
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert all(p.dtype == (torch.float32 if ".mixer." in n else dtype) for n, p in model.named_parameters())
    assert not (out / ".linearize").exists() and not list(out.rglob("*.partial"))

    # The measurement against the loaded models, in float32.
    tokenizer = AutoTokenizer.from_pretrained(out)
    measured = record["heldout"]
    of_teacher = plain_perplexity(
        type(teacher_model(name)).from_pretrained(folder, dtype=torch.float32), tokenizer, texts
    )
    assert math.log(measured["teacher_perplexity"]) == pytest.approx(math.log(of_teacher), rel=1e-5)
    if dtype == stored:
        of_student = plain_perplexity(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), tokenizer, texts)
        assert math.log(measured["student_perplexity"]) == pytest.approx(math.log(of_student), rel=1e-5)
    assert measured["student_perplexity"] != measured["teacher_perplexity"]


def cast_folder(folder: Path, dtype: torch.dtype) -> None:
    """The same teacher with its weights stored in another dtype."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": str(dtype).split(".")[1]}))


def test_records_agree(finished):
    folder, out, record = finished
    assert json.loads((out / "linearize.json").read_text()) == json.loads(json.dumps(record))
    assert record["teacher"]["source"] == str(folder)
    assert record["recipe"]["align.tokens"] == FAST["align.tokens"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for layer in record["layers"]:
        own = [line for line in lines if line["layer"] == layer["layer"]]
        assert [line["loss"] for line in own] == layer["losses"] and len(own) == STEPS
        assert [line["step"] for line in own] == [1, 2, 3, 4]
        assert [line["tokens"] for line in own] == [96, 192, 288, 384]
        assert set(layer["ladder"]) == {"mean", "vala", "gdn", "tilted", "readout", "full", "output"}
    assert len(lines) == STEPS * len(record["layers"]) and [x["layer"] for x in record["layers"]] == [*CONVERTED]
    assert record["text"]["calibration"]["tokens"] == 288 and record["text"]["alignment"]["tokens"] == 384
    # Every token but the first of each document.
    heldout = documents(open_sources("bundled", heldout=True))
    rows = pack_rows(heldout, AutoTokenizer.from_pretrained(out), 48, 480, seed=0)
    assert record["heldout"]["tokens"] == int((rows.positions > 0).sum())

    card = (out / "README.md").read_text()
    measured = record["heldout"]
    for shown in (
        f"{measured['teacher_perplexity']:.2f} | {measured['student_perplexity']:.2f}",
        f"{measured['retained_percent']:.1f} %",
        f"{measured['tokens']} tokens",
        "layers 0, 1, 2",
        format_bytes(record["cache"][0]["student"]),
    ):
        assert shown in card, shown
    assert "base_model" not in card, "a local teacher is not on the Hub"


def test_losses_are_those_of_a_layer_that_learns(tmp_path, teacher_folder):
    record = run_convert(teacher_folder("qwen2"), tmp_path / "out", align_tokens=7680, align_lr=3e-3)
    for layer in record["layers"]:
        assert sum(layer["losses"][-5:]) < 0.9 * sum(layer["losses"][:5]), layer["losses"]


def test_the_written_recipe_runs_again(finished, tmp_path, capsys):
    folder, out, _ = finished
    assert cli.run(["convert", str(folder), str(tmp_path / "again"), "-r", str(out / "recipe.yaml"), "-q"]) == 0
    assert weight_bytes(tmp_path / "again") == weight_bytes(out)
    assert (tmp_path / "again/recipe.yaml").read_bytes() == (out / "recipe.yaml").read_bytes()


def test_another_seed_gives_other_weights(finished, tmp_path):
    folder, out, record = finished
    other = run_convert(folder, tmp_path / "out", run_seed=1)
    assert weight_bytes(tmp_path / "out").keys() == weight_bytes(out).keys()
    assert weight_bytes(tmp_path / "out") != weight_bytes(out)
    assert other["text"]["alignment"]["hash"] != record["text"]["alignment"]["hash"]


def test_sharding_changes_files_only(finished, tmp_path):
    folder, out, _ = finished
    run_convert(folder, tmp_path / "out", run_max_shard_size=50_000)
    one, many = tensors_of(out), tensors_of(tmp_path / "out")
    assert one.keys() == many.keys() and all(same_bits(one[name], many[name]) for name in one)


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(monkeypatch):
    """The documents of every packing, in order: calibration, alignment, held out."""
    seen = []

    def recording(documents, *args, **kwargs):
        documents = list(documents)
        seen.append(documents)
        return pack_rows(documents, *args, **kwargs)

    monkeypatch.setattr(corpus, "pack_rows", recording)
    return seen


@pytest.mark.parametrize("kind", ["bundled", "txt", "jsonl"])
def test_held_out_text_is_never_trained_on(tmp_path, teacher_folder, packed, kind):
    source = {
        "bundled": lambda: "bundled",
        "txt": lambda: str((tmp_path / "a.txt").write_text("".join(PARAGRAPHS[:60])) and tmp_path / "a.txt"),
        "jsonl": lambda: str(jsonl(tmp_path / "a.jsonl", PARAGRAPHS[:60] * 2)),  # every text twice
    }[kind]()
    changes = {"data_source": source, "convert_keep_softmax": "0-2"}
    record = run_convert(teacher_folder("llama"), tmp_path / "out", **changes)
    calibration, alignment, heldout = [{hashlib.sha256(d.encode()).digest() for d in docs} for docs in packed]
    assert calibration == alignment and heldout and not heldout & calibration
    if kind == "txt":
        assert "".join(packed[0]) + "".join(packed[2]) == "".join(PARAGRAPHS[:60])
    hashes = {part["hash"] for part in record["text"].values()}
    assert len(hashes) == 3 and record["text"]["heldout"]["tokens"] <= 480
    assert (tmp_path / "out/config.json").exists()


def test_text_of_the_teacher_itself(tmp_path, teacher_folder, packed):
    folder = teacher_folder("llama-tied")
    changes = {"data_source": "self", "convert_keep_softmax": "0-2"}
    record = run_convert(folder, tmp_path / "a", **changes)
    assert {name: part["rows"] for name, part in record["text"].items()} == {
        "calibration": 6, "alignment": 8, "heldout": 10
    }  # fmt: skip
    assert [sorted(texts) for texts in packed] == [sorted(bundled_documents("heldout"))]
    run_convert(folder, tmp_path / "b", **changes)
    assert weight_bytes(tmp_path / "a") == weight_bytes(tmp_path / "b")


def test_text_of_the_teacher_in_rows_of_two_lengths(tmp_path, teacher_folder):
    """The text is sampled in rows of the longer context, and each purpose gets whole rows of its own."""
    changes = {"data_source": "self", "convert_keep_softmax": "0-2", "align_context": 24, "align_tokens": 24}
    record = run_convert(teacher_folder("llama"), tmp_path / "out", **changes, calibrate_tokens=290)
    assert {name: part["rows"] for name, part in record["text"].items()} == {
        "calibration": 7, "alignment": 1, "heldout": 10
    }  # fmt: skip
    assert len(record["layers"][0]["losses"]) == 1


def test_alignment_of_no_tokens_and_no_comparison(tmp_path, teacher_folder, capsys):
    out = tmp_path / "out"
    record = run_convert(teacher_folder("llama"), out, align_tokens=0, data_heldout_tokens=0)
    assert record["heldout"] is None and set(record["text"]) == {"calibration"}
    assert all("losses" not in layer and "ladder" in layer for layer in record["layers"])
    assert (out / "metrics.jsonl").read_text() == ""
    assert "perplexity" not in (out / "README.md").read_text() + capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(out)


# ---- the same command again -----------------------------------------------------------------------------------------


def test_a_finished_output_is_left_alone(finished, capsys):
    folder, out, record = finished
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.rglob("*"))}
    for more in ([], ["--seed", "3"]):
        assert cli.run(argv(folder, out, *more)) == 0
        captured = capsys.readouterr()
        assert f"{out} is finished; --overwrite starts afresh" in captured.err
        assert f"{record['heldout']['student_perplexity']:.4g}" in captured.out
        assert ("run.seed was 0 and is 3" in captured.err) == bool(more)
    assert cli.run(argv(folder, out, "-q", "--json", "--calibrate-tokens", "5k")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["recipe"] == record["recipe"]
    assert captured.err.startswith("warning:") and "calibrate.tokens was" in captured.err
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.rglob("*"))}


def test_overwrite_does_it_again(finished, tmp_path, monkeypatch):
    folder, out, _ = finished
    copy = shutil.copytree(out, tmp_path / "out")
    run_convert(folder, copy, run_overwrite=True, run_seed=1, run_max_shard_size=50_000)
    assert len(list(copy.glob("model-*.safetensors"))) > 3 and not (copy / "model.safetensors").exists()
    assert json.loads((copy / "linearize.json").read_text())["recipe"]["run.seed"] == 1
    run_convert(folder, copy, run_overwrite=True)
    assert weight_bytes(copy) == weight_bytes(out)

    # From the first moment on, nothing loads the old weights.
    def stop(*args, **kwargs):
        assert not (copy / "config.json").exists() and not list(copy.glob("*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "convert_layers", stop)
    with pytest.raises(KeyboardInterrupt):
        run_convert(folder, copy, run_overwrite=True)


@contextmanager
def stopped_after_layer(monkeypatch, layer: int):
    """Inside, a conversion stops once that layer is saved."""
    save = RunState.save_layer

    def save_and_stop(self, i, tensors, info):
        save(self, i, tensors, info)
        if i == layer:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "save_layer", save_and_stop)
        yield


def test_an_unfinished_output_goes_on_with_its_own_recipe_only(finished, tmp_path, monkeypatch, capsys):
    folder, whole, record = finished
    out = tmp_path / "out"
    with stopped_after_layer(monkeypatch, 1):
        assert cli.run(argv(folder, out, "-q")) == 130
    assert capsys.readouterr().err.strip().endswith("stopped: state kept; run the same command to go on")
    state = file_bytes(out)
    for more, key in ((["--seed", "1"], "run.seed"), (["--align-lr", "2e-3"], "align.lr")):
        assert cli.run(argv(folder, out, "-q", *more)) == 1
        [line] = capsys.readouterr().err.strip().splitlines()
        assert re.match(rf"error: {out} was begun with another recipe: recipe\.{key} was \S+ and is \S+: ", line)
        assert file_bytes(out) == state
    with stopped_after_layer(monkeypatch, 0):  # layers 0 and 1 are not done again, so it does not stop
        assert cli.run(argv(folder, out, "-q")) == 0
    assert weight_bytes(out) == weight_bytes(whole)
    resumed = json.loads((out / "linearize.json").read_text())
    assert resumed["heldout"] == record["heldout"] and resumed["text"] == record["text"]
    assert [layer["losses"] for layer in resumed["layers"]] == [layer["losses"] for layer in record["layers"]]


def test_a_damaged_layer_is_done_again(finished, tmp_path, monkeypatch, capsys):
    folder, whole, _ = finished
    out = tmp_path / "out"
    with stopped_after_layer(monkeypatch, 2), pytest.raises(KeyboardInterrupt):
        run_convert(folder, out)
    damaged = out / ".linearize/layer-00001.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))
    capsys.readouterr()
    assert cli.run(argv(folder, out)) == 0
    assert "layer-00001 is done again" in capsys.readouterr().err
    assert weight_bytes(out) == weight_bytes(whole)


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_json_is_one_object_and_the_tables_are_all_of_stdout(teacher_folder, tmp_path, capsys):
    folder, out = teacher_folder("llama"), tmp_path / "out"
    assert cli.run(argv(folder, out, "--keep-softmax", "0-2", "--json")) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == captured.out.strip().count("\n") + 1
    assert answer["out"] == str(out) and answer["samples"] is None
    assert {k: answer[k] for k in answer if k not in ("out", "samples")} == json.loads(
        (out / "linearize.json").read_text()
    )
    assert "calibrate (1/1)" in captured.err and "3 of 4" not in captured.err

    assert cli.run(argv(folder, out, "--keep-softmax", "0-2", "--quiet")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].strip() == str(out) and lines[1].split() == ["teacher", "student"]
    assert [line[:8] for line in lines[2:]] == ["perplexi", "retained", *["cache at"] * 3]
    shown = answer["heldout"]
    assert lines[2].split()[-2:] == [f"{shown[f'{who}_perplexity']:.4g}" for who in ("teacher", "student")]


def test_a_sample_comes_from_both_models(finished, capsys):
    folder, out, _ = finished
    assert cli.run(argv(folder, out, "--json", "--sample", "Once")) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert set(samples) == {"teacher", "student"}
    tokenizer = AutoTokenizer.from_pretrained(out)
    for who, load, path in (
        ("teacher", type(teacher_model("llama")).from_pretrained, folder),
        ("student", AutoModelForCausalLM.from_pretrained, out),
    ):
        inputs = tokenizer("Once", return_tensors="pt")
        ids = load(path).generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert samples[who] == tokenizer.decode(ids, skip_special_tokens=True).strip()


# ---- failures -------------------------------------------------------------------------------------------------------


def refused(capsys, arguments, code: int, *words: str) -> str:
    """The command fails with one line on stderr that has the words, and nothing on stdout; returns the line."""
    capsys.readouterr()
    assert cli.run([*arguments, "-q"]) == code
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if not re.match(r"(calibrate|align|write) ?[(\d/)]*: ", line)]
    assert captured.out == "" and len(said) == 1 and said[0].startswith("error: "), captured
    for word in words:
        assert word in said[0], said[0]
    assert "not expected" not in said[0]
    return said[0]


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weight(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


CONFIGS = {
    "unknown": ({"model_type": "nobody"}, "no entry"),
    "encoder": ({"model_type": "bert"}, "encoder"),
    "experts": (MixtralConfig(num_hidden_layers=4).to_diff_dict() | {"model_type": "mixtral"}, "mixture of experts"),
    "experts-within": ({"num_experts": 8}, "mixture of experts"),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
    "converted": ({"model_type": "linearize_llama"}, "already converted"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_cannot_be_converted(teacher_copy, tmp_path, capsys, case):
    fields, reason = CONFIGS[case]
    edit_config(teacher_copy, **fields)
    refused(capsys, argv(teacher_copy, tmp_path / "out"), 1, reason)
    assert not (tmp_path / "out").exists()


def test_no_such_model(tmp_path, capsys):
    refused(capsys, argv(tmp_path / "nowhere", tmp_path / "out"), 1, "no such model", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("cut", [1, 100_000, 10**9])
def test_a_truncated_weight_file(teacher_copy, tmp_path, capsys, cut):
    path = teacher_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    refused(capsys, argv(teacher_copy, tmp_path / "out"), 1, "model.safetensors", "again")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard(tmp_path, capsys, teacher_folder):
    folder = shutil.copytree(teacher_folder("llama"), tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    teacher_model("llama").save_pretrained(folder, max_shard_size="200KB")
    [first, *_] = sorted(folder.glob("model-*.safetensors"))
    kept = first.read_bytes()
    first.unlink()
    refused(capsys, argv(folder, tmp_path / "out"), 1, first.name, "lacks 1 of")
    first.write_bytes(kept)
    assert cli.run(argv(folder, tmp_path / "out", "--keep-softmax", "0-2")) == 0


def test_nan_in_a_weight_keeps_the_layers_before_it(finished, teacher_copy, tmp_path, capsys):
    _, whole, _ = finished
    name, good = "model.layers.2.mlp.up_proj.weight", (teacher_copy / "model.safetensors").read_bytes()
    edit_weight(teacher_copy, name, lambda weight: weight[3].fill_(float("nan")))
    out = tmp_path / "out"
    refused(capsys, argv(teacher_copy, out), 1, name, "NaN", "again")
    assert not (out / "config.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (out / ".linearize").glob("layer-*")}
    assert set(kept) == {f"layer-0000{i}.{end}" for i in (0, 1) for end in ("json", "safetensors")}
    (teacher_copy / "model.safetensors").write_bytes(good)
    assert cli.run(argv(teacher_copy, out, "-q")) == 0
    ours, theirs = tensors_of(out), tensors_of(whole)
    assert all(same_bits(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("4", ["no layer 4", "0 to 3"]),
        ("0-3", ["all 4 layers"]),
        ("100%", ["all 4 layers"]),
        ("1,1", ["layer 1 twice"]),
        ("every:5", ["4 layers"]),
        ("1%", ["keeps no layer"]),
        ("second", ["not understood"]),
    ],
)
def test_wrong_layers(teacher_folder, tmp_path, capsys, spec, words):
    refused(capsys, argv(teacher_folder("llama"), tmp_path / "out", "--keep-softmax", spec), 2, repr(spec), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_here(teacher_folder, tmp_path, capsys):
    refused(capsys, argv(teacher_folder("llama"), tmp_path / "out", "--device", "cuda"), 2, "'cuda'", "--device cpu")


def test_text_that_will_not_do(teacher_folder, tmp_path, capsys):
    def fails(*words, more=()):
        refused(capsys, argv(folder, tmp_path / "out", "--data", str(data), *more), 1, *words)
        assert not (tmp_path / "out/config.json").exists()

    folder, data = teacher_folder("llama"), tmp_path / "data.txt"
    fails("does not exist", "data.txt")
    data.write_text("")
    fails("no text", "data.txt")
    data.write_text("word " * 5)
    fails("shorter than one context of 48 tokens")
    data.write_text("word " * 17)
    fails("two rows of text", more=("--heldout-tokens", "0"))
    data.write_text("many words " * 40)
    fails("held-out text", "--heldout-tokens 0")
    data.write_bytes(b"\xff\xfe\x00")
    fails("not text")
    # As long as no layer is done, another recipe is no mistake: it is what these messages ask for.
    data = jsonl(tmp_path / "data.jsonl", ["fine"])
    data.write_text(data.read_text() + '{"txt": "no"}\n')
    fails("data.jsonl:2", '"text"')
    data.write_text(jsonl(tmp_path / "good.jsonl", SHORT).read_text())
    assert cli.run(argv(folder, tmp_path / "out", "--data", str(data), "--keep-softmax", "0-2", "-q")) == 0


def test_a_folder_with_other_files(teacher_copy, tmp_path, capsys):
    for out in (tmp_path / "mine", teacher_copy):
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("precious")
        before = file_bytes(out)
        for more in ([], ["--overwrite"]):
            refused(capsys, argv(teacher_copy, out, *more), 1, str(out), "linearize did not write", "new folder")
        assert file_bytes(out) == before


def test_two_at_once(teacher_folder, tmp_path, capsys):
    with RunState(tmp_path / "out", {}):
        refused(capsys, argv(teacher_folder("llama"), tmp_path / "out"), 1, f"another process ({os.getpid()})")


def test_alignment_that_diverges_keeps_the_state(teacher_folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = argv(teacher_folder("llama"), out, "--align-lr", "1e30", "--align-lr-min", "1")
    refused(capsys, arguments, 1, "layer 0 diverged at step", "lower align.lr")
    assert (out / ".linearize/recipe.json").exists() and not (out / "config.json").exists()


# ---- a disk that will not take it -----------------------------------------------------------------------------------


def test_an_output_that_cannot_be_written(teacher_folder, tmp_path, capsys):
    folder, file = teacher_folder("llama"), tmp_path / "file"
    file.write_text("a file")
    refused(capsys, argv(folder, file), 1, f"{file} is a file", "name a folder")
    refused(capsys, argv(folder, file / "out"), 1, f"{file / 'out'}", "Not a directory")
    refused(capsys, argv(folder, "/proc/linearize-out"), 1, "/proc/linearize-out")
    assert file.read_text() == "a file"


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a tmpfs with these options and returns its folder."""
    mounts = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounts)}"
        folder.mkdir()
        try:
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounts.append(folder)
        return folder

    yield mount
    for folder in mounts:
        subprocess.run(["umount", "-l", folder], check=True)  # lazily: loaded weights may be mapped


def test_a_read_only_disk(teacher_folder, mounted, capsys):
    out = mounted("size=1m,ro") / "out"
    refused(capsys, argv(teacher_folder("llama"), out), 1, str(out), "Read-only file system", "OUT folder that you may")


def test_a_small_disk(teacher_folder, mounted, capsys, monkeypatch):
    folder, disk = teacher_folder("llama"), mounted("size=1m")
    refused(capsys, argv(folder, disk / "out"), 1, "free and the run needs", "free some space")
    # With the check out of the way the disk fills up in the middle.
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12))
        refused(capsys, argv(folder, disk / "out"), 1, "no space left for", str(disk / "out"))
        assert not (disk / "out/config.json").exists()
        kept = sorted(path.name for path in (disk / "out/.linearize").glob("layer-*.safetensors"))
        assert kept, "what was done before the disk was full is kept"
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
    assert cli.run(argv(folder, disk / "out", "-q")) == 0
    AutoModelForCausalLM.from_pretrained(disk / "out")


def test_a_disk_that_fills_up_at_any_write(finished, tmp_path, monkeypatch, capsys):
    """fsync, where real file systems too say so, fails at the n-th call; then the same command goes on."""
    folder, whole, _ = finished
    real, out, calls, failing = os.fsync, tmp_path / "out", 0, 1

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    failures = 0
    while True:
        calls = 0
        if cli.run(argv(folder, out, "-q")) == 0:
            break
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.match(r"error: no space left( for .*)? (at|on) ", error), error
        if (out / "config.json").exists():  # the very last sync: the checkpoint is whole
            assert weight_bytes(out) == weight_bytes(whole)
        failures += 1
        # The next run resumes, so it makes fewer calls: step on unevenly, to reach early and late ones.
        failing += 1 + failures % 3
    assert failures >= 5
    assert weight_bytes(out) == weight_bytes(whole)


# ---- odd teachers ---------------------------------------------------------------------------------------------------


def test_no_layer_is_special(tmp_path, teacher_folder):
    """Converting a single layer leaves the others' outputs alone: the student is the teacher up to there."""
    out = tmp_path / "out"
    run_convert(teacher_folder("llama"), out, convert_keep_softmax="0-2")
    student, teacher = AutoModelForCausalLM.from_pretrained(out), teacher_model("llama")
    ids = torch.randint(4, VOCAB, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, theirs = (m(ids, output_hidden_states=True, use_cache=False).hidden_states for m in (student, teacher))
    assert all(torch.equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))
    assert not torch.equal(ours[4], theirs[4])
    close = (ours[4] - theirs[4]).norm() / theirs[4].norm()
    untrained = make_student(teacher, {3: {"kind": "gdn", "taps": 2, "time_scales": 1}})
    with torch.no_grad():
        start = untrained(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert close < (start[4] - theirs[4]).norm() / theirs[4].norm()
