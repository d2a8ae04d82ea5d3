"""Distillation as a stage of a conversion: what it writes and says, and that a killed run goes on to the same bits."""

import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import teacher_model
from test_convert import FAST, argv, run_convert, same_bits, tensors_of, weight_bytes
from test_convert import one_thread as one_thread
from test_convert_resume import before, check_stopped
from transformers import AutoModelForCausalLM, PreTrainedModel

from linearize import align, cli, corpus
from linearize import distill as distill_module
from linearize.console import Console
from linearize.convert import convert
from linearize.distill import Trainer
from linearize.recipe import Recipe

SHORT = {
    "convert_mixer": "gdn-standard",
    "convert_keep_softmax": "0-1",
    "align_tokens": 192,
    "distill_tokens": 6 * 96,
    "distill_context": 48,
    "distill_batch_tokens": 96,
    "distill_micro_tokens": 48,
    "distill_lr": 3e-4,
    "distill_lr_mixer": 1e-3,
    "distill_warmup": 1,
    "distill_save_steps": 1,
}
FLAGS = [word for name, value in SHORT.items() for word in ("-s", f"{name.replace('_', '.', 1)}={value}")]


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(teacher_folder, tmp_path_factory):
    """(teacher's folder, OUT, the record) of a conversion with distillation that nothing stops. Read only."""
    folder, out = teacher_folder("llama-tied"), tmp_path_factory.mktemp("finished") / "out"
    return folder, out, run_convert(folder, out, **SHORT)


def test_the_record_and_the_metrics(finished):
    _, out, record = finished
    done = record["distill"]
    assert done["steps"] == 6 and done["tokens"] == 576 and len(done["losses"]) == 6
    assert done["skipped_batches"] == done["roll_backs"] == 0
    assert record["heldout"] == done["heldout"] != record["aligned"]
    assert record["heldout"]["tokens"] == record["aligned"]["tokens"]
    close = pytest.approx(math.log(record["aligned"]["teacher_perplexity"]), rel=1e-5)
    assert math.log(record["heldout"]["teacher_perplexity"]) == close
    assert json.loads((out / "linearize.json").read_text()) == json.loads(json.dumps(record))
    lines = lines_of(out)
    assert [line["stage"] for line in lines] == ["align"] * 4 + ["distill"] * 6
    assert [line["loss"] for line in lines[4:]] == done["losses"]
    assert [(line["layer"], line["step"]) for line in lines[:4]] == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert [line["tokens"] for line in lines[4:]] == [96 * n for n in range(1, 7)]
    assert not (out / ".linearize").exists()


def test_the_checkpoint_is_the_trained_student(finished, tmp_path, monkeypatch):
    """Bit for bit what training ended with, every weight of it; and what was measured is what loads."""
    folder, out, record = finished
    trained = {}
    finish = Trainer.finish

    def recording(self, dtype):
        finish(self, dtype)
        trained.update({name: p.detach().clone() for name, p in self.student.named_parameters()})

    monkeypatch.setattr(Trainer, "finish", recording)
    run_convert(folder, tmp_path / "out", **SHORT)
    written = tensors_of(tmp_path / "out")
    assert written.keys() == trained.keys() and "lm_head.weight" not in written
    assert all(same_bits(written[name], trained[name]) for name in trained)
    assert weight_bytes(tmp_path / "out") == weight_bytes(out)
    start = teacher_model("llama-tied").state_dict()
    for name in written.keys() & start.keys():
        assert not torch.equal(written[name], start[name]), name
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert all(same_bits(p.detach(), trained[name]) for name, p in model.named_parameters())


def test_the_students_divergence_falls(finished, tmp_path):
    """On held-out text, against the same conversion with one step of distillation at a rate of nearly nothing."""
    folder = finished[0]
    longer = run_convert(folder, tmp_path / "longer", **SHORT | {"distill_tokens": 20 * 96, "distill_save_steps": 0})
    start = run_convert(
        folder, tmp_path / "start", **SHORT | {"distill_tokens": 96, "distill_lr": 1e-9, "distill_lr_mixer": 1e-9}
    )
    assert start["heldout"]["student_perplexity"] == pytest.approx(start["aligned"]["student_perplexity"], rel=1e-4)
    kl = [made["heldout"]["kl"] for made in (start, longer)]
    assert kl[1] < 0.9 * kl[0], kl
    assert longer["heldout"]["top1_agreement"] > start["heldout"]["top1_agreement"]


@pytest.mark.parametrize("name, dtype", [("qwen3_moe", "bfloat16"), ("gemma2", "auto"), ("llama", "float32")])
def test_other_families(teacher_folder, tmp_path, name, dtype):
    """Experts that a checkpoint keeps apart, capped logits, an untied head with biases: every tensor comes back."""
    out = tmp_path / "out"
    changes = SHORT | {"distill_tokens": 96, "convert_keep_softmax": "0-2", "convert_mixer": "gdn"}
    run_convert(teacher_folder(name), out, **changes, run_dtype=dtype)
    stored = {re.sub(r"(layers\.3\.self_attn\.)", r"\1attn.", n) for n in tensors_of(teacher_folder(name))}
    assert {n for n in tensors_of(out) if ".mixer." not in n} == stored
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())


def test_long_rows_mean_weights_and_the_top_k(finished, tmp_path):
    folder = finished[0]
    changes = SHORT | {"distill_tokens": 192, "distill_long_tokens": 192, "distill_long_context": 96}
    changes |= {"distill_ema": 0.5, "distill_top_k": 16, "distill_cache": str(tmp_path / "cache")}
    record = run_convert(folder, tmp_path / "out", **changes)
    assert record["distill"]["steps"] == 4 and record["distill"]["tokens"] == 384
    assert [line["lr"] for line in lines_of(tmp_path / "out")][-1] <= 1e-5
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) >= 6


def test_text_of_the_teacher_itself(finished, tmp_path):
    changes = SHORT | {"data_source": "self", "distill_tokens": 192}
    record = run_convert(finished[0], tmp_path / "out", **changes)
    assert record["distill"]["steps"] == 2


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_what_is_printed(finished, tmp_path, capsys):
    folder = finished[0]
    assert cli.run(argv(folder, tmp_path / "out", *FLAGS)) == 0
    said = capsys.readouterr().err
    assert re.search(r"^distill: 576 tokens; weights, gradients, moments and teacher take about [\d.]+ MB", said, re.M)
    assert re.search(r"^distill: 6 steps of about .*; peak memory [\d.]+ [MG]B", said, re.M)
    assert re.search(r"^distill: loss [\d.]+, memory [\d.]+ [MG]B, [\d.k]+ tok/s, 576 tok, ", said, re.M)


def test_out_of_memory_names_the_key(finished, tmp_path, capsys, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    monkeypatch.setattr(Trainer, "gradients", full)
    assert cli.run(argv(finished[0], tmp_path / "out", *FLAGS, "-q")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: out of GPU memory (got '2.50 GiB more needed'): lower distill.micro_tokens")


@pytest.mark.parametrize("stage", [0, 1], ids=["alignment", "distillation"])
@pytest.mark.parametrize("batch", [4, 0])
def test_out_of_memory_while_text_is_sampled_names_the_key(finished, tmp_path, capsys, monkeypatch, stage, batch):
    def full(*args, **options):
        if len(calls) == stage:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")
        calls.append(args)
        return sample(*args, **options)

    calls, sample = [], corpus.sample_text
    monkeypatch.setattr(corpus, "sample_text", full)
    more = ["--data", "self", "-s", f"data.self_batch={batch}", "--heldout-tokens", "0", "-q"]
    assert cli.run(argv(finished[0], tmp_path / "out", *FLAGS, *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    fix = "lower data.self_batch" if batch else "set data.self_batch: "
    assert len(calls) == stage
    assert error.startswith(f"error: out of GPU memory (got '2.50 GiB more needed'): {fix}")


def test_a_teacher_too_large_to_sample_from(finished, tmp_path, capsys, monkeypatch):
    def full(self, *args, **options):
        raise MemoryError

    monkeypatch.setattr(PreTrainedModel, "to", full)
    assert cli.run(argv(finished[0], tmp_path / "out", *FLAGS, "--data", "self", "-q")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: out of memory: ") and error.endswith("give other text with --data")


def test_divergence_is_one_line(finished, tmp_path, capsys, monkeypatch):
    gradients = Trainer.gradients
    monkeypatch.setattr(Trainer, "gradients", lambda self, *args: gradients(self, *args) * float("nan"))
    assert cli.run(argv(finished[0], tmp_path / "out", *FLAGS, "-q")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: distillation keeps diverging at step 1") and "lower distill.lr" in error


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboard"), ("trackio", "trackio")])
def test_a_tracker_that_is_not_installed(finished, tmp_path, capsys, monkeypatch, name, package):
    for module in ("torch.utils.tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.run(argv(finished[0], tmp_path / "out", *FLAGS, "--log-to", name, "-q")) == 1
    assert f"pip install {package}" in capsys.readouterr().err


def test_trackers_see_every_step(finished, tmp_path, monkeypatch):
    """The numbers of metrics.jsonl, under names that start with the stage."""
    seen, ends = [], []

    class SummaryWriter:
        def __init__(self, log_dir):
            assert log_dir == str(tmp_path / "a/tensorboard")

        def add_scalar(self, name, value, step):
            seen.append((name, value, step))

        def close(self):
            ends.append("tensorboard")

    trackio = types.SimpleNamespace(
        init=lambda project, name: ends.append((project, name)),
        log=lambda values: seen.append(values),
        finish=lambda: ends.append("trackio"),
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    run_convert(finished[0], tmp_path / "a", **SHORT, run_log_to="tensorboard")
    losses = [(value, step) for name, value, step in seen if name == "distill/loss"]
    assert losses == [(line["loss"], line["step"]) for line in lines_of(tmp_path / "a") if line["stage"] == "distill"]
    assert ("align/2/lr", FAST["align.tokens"] and seen[0][1], 1) and any(n == "align/3/loss" for n, _, _ in seen)
    seen.clear()
    run_convert(finished[0], tmp_path / "b", **SHORT, run_log_to="trackio")
    assert [v["step"] for v in seen if "distill/loss" in v] == [1, 2, 3, 4, 5, 6]
    assert ends == ["tensorboard", ("linearize", "b"), "trackio"]


def test_ctrl_c_in_the_middle(finished, tmp_path, capsys, monkeypatch):
    """The step is finished and saved, the exit code says so, and the same command goes on to the same bits."""
    folder, whole, _ = finished
    out, update = tmp_path / "out", Trainer.update

    def interrupted(self, at):
        if self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        assert cli.run(argv(folder, out, *FLAGS, "-s", "distill.save_steps=0")) == 130
    assert capsys.readouterr().err.strip().endswith("stopped: state kept; run the same command to go on")
    assert json.loads((out / ".linearize/training.json").read_text())["info"]["step"] == 4
    assert cli.run(argv(folder, out, *FLAGS)) == 0
    assert weight_bytes(out) == weight_bytes(whole)


# ---- killed ---------------------------------------------------------------------------------------------------------

# A moment is a call of one of these; files are synced and renamed in between.
WATCHED = [
    (align, "relative_error", "align"),
    (distill_module, "chunked_kl", "distill"),
    (distill_module.dcp, "save", "save"),
]
FILES = ("fsync", "replace", "unlink", "rmdir")
KILLED = SHORT | {"convert_keep_softmax": "0-2", "distill_tokens": 4 * 96, "data_heldout_tokens": 96}


def job(folder: str, out: str, kill_at: int | None, log: str) -> None:
    """In a process of its own: convert, and die by SIGKILL at the n-th moment; the log says what each moment was."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    count, stage = 0, "calibrate"

    def moment(now, name, arguments):
        nonlocal count, stage
        count, stage = count + 1, now or stage
        if count == kill_at or kill_at is None:
            with open(log, "a") as file:
                file.write(f"{stage} {name}\n")
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for module, name, now in WATCHED:
        setattr(module, name, before(getattr(module, name), moment, lambda now=now: now, name))
    for name in FILES:
        setattr(os, name, before(getattr(os, name), moment, lambda: None, name))
    values = FAST | {name.replace("_", ".", 1): value for name, value in KILLED.items()}
    convert(folder, Path(out), Recipe.from_values(values), Console(quiet=True))


@pytest.mark.slow
def test_killed_twenty_times(finished, tmp_path):
    """SIGKILL at random moments of both stages, again and again in one folder; every run goes on from the last."""
    folder, whole = finished[0], tmp_path / "whole"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["linearize.convert"])
    seed = random.randrange(2**32)
    print("seed", seed)
    draw, log, kills, number = random.Random(seed), tmp_path / "log", 0, 0

    def start(*args) -> int:
        process = context.Process(target=job, args=(str(folder), *args, str(log)))
        process.start()
        process.join()
        return process.exitcode

    assert start(str(whole), None) == 0
    moments = [line.split()[0] for line in log.read_text().splitlines()]
    log.unlink()
    losses = [line["loss"] for line in lines_of(whole)]
    assert {"calibrate", "align", "distill", "save"} <= set(moments)
    while kills < 20 or number < 2:
        number += 1
        out = tmp_path / str(number)
        # The first kill of a folder is in one stage or the other, those after it wherever the work then is.
        stage = ("align", "distill")[number % 2]
        at = 1 + draw.choice([i for i, name in enumerate(moments) if name == stage])
        while (code := start(str(out), at)) != 0:
            at = draw.randrange(1, len(moments) // 2)
            assert code == -signal.SIGKILL
            kills += 1
            if out.exists():
                check_stopped(out, weight_bytes(whole))
        assert weight_bytes(out) == weight_bytes(whole)
        lines = lines_of(out)
        assert [(line["stage"], line["step"]) for line in lines] == [
            *[("align", step) for step in (1, 2)],
            *[("distill", step) for step in range(1, 5)],
        ]
        assert [line["loss"] for line in lines] == losses
        assert not (out / ".linearize").exists() and not list(out.rglob("*.partial"))
    killed = log.read_text().split("\n")
    print(kills, "kills in", number, "folders:", killed)
    assert {"align", "distill"} <= {line.split()[0] for line in killed if line}
