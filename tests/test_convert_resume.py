"""A conversion killed at any moment goes on to the same bytes, and never leaves a folder that only looks finished."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_convert import FAST, argv, run_convert, weight_bytes
from test_convert import one_thread as one_thread
from transformers import AutoModelForCausalLM

from linearize import align, calibrate
from linearize.console import Console
from linearize.convert import convert
from linearize.mixers import fit
from linearize.recipe import Recipe

# Three layers to convert, in a folder with several shards, so that every stage has moments to be killed at.
CHANGES = {"run_max_shard_size": 60_000}
# One moment is one of these calls. The file system's own (os.NAME) are told apart by whether weights are being written.
WATCHED = [
    (fit, "mean_terms", "calibrate"),
    (fit, "local_terms", "calibrate"),
    (calibrate, "refit_output", "calibrate"),
    (align, "relative_error", "align"),
]
FILES = ("fsync", "replace", "unlink", "rmdir")


def watch(moment) -> None:
    """Call moment(stage, name of the call, its arguments) before every watched call in this process."""
    for module, name, stage in WATCHED:
        setattr(module, name, before(getattr(module, name), moment, lambda stage=stage: stage, name))
    writing = [False]

    def stage_of_files() -> str:
        return "write" if writing[0] else "save"

    def note(stage, name, arguments):
        writing[0] |= any(str(a).endswith(".safetensors.partial") and ".linearize" not in str(a) for a in arguments)
        moment(stage_of_files(), name, arguments)

    for name in FILES:
        setattr(os, name, before(getattr(os, name), note, stage_of_files, name))


def before(call, moment, stage, name):
    def watched(*args, **kwargs):
        moment(stage(), name, args)
        return call(*args, **kwargs)

    return watched


def job(folder: str, out: str, kill_at: tuple[str, int] | None, log: str | None) -> None:
    """In a process of its own: convert; log every moment, or die by SIGKILL at the n-th moment of a stage."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    counts: dict[str, int] = {}

    def moment(stage, name, arguments):
        counts[stage] = counts.get(stage, 0) + 1
        if kill_at == (stage, counts[stage]):
            os.kill(os.getpid(), signal.SIGKILL)
        if log:
            with open(log, "a") as file:
                file.write(json.dumps([stage, name, [str(a) for a in arguments]]) + "\n")

    watch(moment)
    values = FAST | {name.replace("_", ".", 1): value for name, value in CHANGES.items()}
    convert(folder, Path(out), Recipe.from_values(values), Console(quiet=True))


@pytest.fixture(scope="module")
def start():
    """A function that starts `job` in a fresh process, forked from a server that has only imported the package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["linearize.convert"])

    def started(*args) -> multiprocessing.Process:
        process = context.Process(target=job, args=args)
        process.start()
        return process

    return started


@pytest.fixture(scope="module")
def uninterrupted(teacher_folder, tmp_path_factory, start):
    """(teacher's folder, the bytes of the weights, moments by stage, seconds) of a conversion that nobody stops."""
    folder, base = teacher_folder("llama"), tmp_path_factory.mktemp("uninterrupted")
    run_convert(folder, base / "here", **CHANGES)
    for out, log in (("out", str(base / "log")), ("timed", None)):  # the first waits for the server too
        began = time.monotonic()
        process = start(str(folder), str(base / out), None, log)
        process.join()
        assert process.exitcode == 0
        seconds = time.monotonic() - began
    moments = {}
    for line in (base / "log").read_text().splitlines():
        stage, name, arguments = json.loads(line)
        moments.setdefault(stage, []).append((name, arguments))
    assert weight_bytes(base / "out") == weight_bytes(base / "here"), "two runs with one seed differ"
    assert len(list((base / "out").glob("model-*.safetensors"))) > 3
    assert min(map(len, moments.values())) > 8 and set(moments) == {"calibrate", "align", "save", "write"}
    return folder, weight_bytes(base / "out"), moments, seconds


def check_stopped(out: Path, expected: dict[str, bytes]) -> str:
    """After a kill: no config.json, so that nothing loads the folder; or the whole checkpoint."""
    if not (out / "config.json").exists():
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(out)
        return "unfinished"
    assert weight_bytes(out) == expected
    AutoModelForCausalLM.from_pretrained(out)
    return "whole"


def check_resumed(folder, out: Path, expected: dict[str, bytes]) -> None:
    record = run_convert(folder, out, **CHANGES)
    assert weight_bytes(out) == expected
    assert not (out / ".linearize").exists() and not list(out.rglob("*.partial"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [loss for layer in record["layers"] for loss in layer["losses"]]
    assert {"README.md", "recipe.yaml", "linearize.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize("stage, kills", [("calibrate", 2), ("align", 2), ("save", 3), ("write", 3)])
def test_killed_once(tmp_path, start, uninterrupted, stage, kills):
    folder, expected, moments, _ = uninterrupted
    seed = random.randrange(2**32)
    print(f"seed {seed}: {len(moments[stage])} moments of {stage}")
    for number in random.Random(seed).sample(range(1, len(moments[stage]) + 1), kills):
        name, arguments = moments[stage][number - 1]
        print(f"kill before {stage} {number}, {name} {arguments[:2] if name != 'fsync' else ''}")
        out = tmp_path / str(number)
        process = start(str(folder), str(out), (stage, number), None)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        check_stopped(out, expected)
        check_resumed(folder, out, expected)


def test_killed_around_the_last_file(tmp_path, start, uninterrupted):
    """Just before config.json gets its name there is no model; just after it there is, state or no state."""
    folder, expected, moments, _ = uninterrupted
    [last] = [
        number
        for number, (name, arguments) in enumerate(moments["write"], 1)
        if name == "replace" and arguments[1].endswith("/config.json")
    ]
    assert all(name != "replace" for name, _ in moments["write"][last:]), "a file appears after config.json"
    found = []
    for number in (last, last + 1, len(moments["write"])):
        out = tmp_path / str(number)
        process = start(str(folder), str(out), ("write", number), None)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found.append(check_stopped(out, expected))
        check_resumed(folder, out, expected)
    assert found == ["unfinished", "whole", "whole"]


def test_killed_again_and_again(tmp_path, start, uninterrupted):
    """At random times in one folder, until a run comes through: work is kept, or it would never end."""
    folder, expected, _, seconds = uninterrupted
    seed = random.randrange(2**32)
    print("seed", seed)
    generator, out, kills = random.Random(seed), tmp_path / "out", 0
    for attempt in range(40):
        process = start(str(folder), str(out), None, None)
        # Longer and longer: what else the machine does may make the same work take twice the time.
        process.join(timeout=generator.uniform(0.2, 0.7) * seconds * (1 + attempt / 10))
        if process.exitcode == 0:
            if kills:
                break
            shutil.rmtree(out)  # this machine has become faster: try again
            continue
        process.kill()
        process.join()
        kills += 1
        if out.exists():
            check_stopped(out, expected)
    print(kills, "kills")
    assert process.exitcode == 0 and kills
    check_resumed(folder, out, expected)


def test_overwrite_killed(tmp_path, start, uninterrupted):
    """--overwrite of a finished folder, killed: the old checkpoint is gone as a whole, the new one comes as a whole."""
    folder, expected, _, _ = uninterrupted
    out = tmp_path / "out"
    run_convert(folder, out, **CHANGES)
    with pytest.raises(RuntimeError, match="stop here"):
        convert_stopping(folder, out)
    assert check_stopped(out, expected) == "unfinished" and not list(out.glob("*.safetensors"))
    check_resumed(folder, out, expected)


def convert_stopping(folder, out) -> None:
    class Stopping(Console):
        def stage(self, *args, **kwargs):
            raise RuntimeError("stop here")

    values = FAST | {"run.overwrite": True, "run.max_shard_size": CHANGES["run_max_shard_size"]}
    convert(str(folder), out, Recipe.from_values(values), Stopping(quiet=True))


def command(folder, out, *more: str) -> list[str]:
    shards = ["--max-shard-size", str(CHANGES["run_max_shard_size"])]
    return [sys.executable, "-m", "linearize", *argv(folder, out, *shards, *more)]


def test_ctrl_c_and_the_command_again(tmp_path, uninterrupted):
    """The command itself: SIGINT once a layer is done, then to the end with --json."""
    folder, expected, _, _ = uninterrupted
    out, root = tmp_path / "out", Path(__file__).resolve().parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            command(folder, out),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=tmp_path,
            # A test run in the background of a shell ignores SIGINT, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while not (out / ".linearize/layer-00000.json").exists():
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    error = (tmp_path / "said").read_text()
    assert process.returncode == 130 and printed == b""
    assert error.splitlines()[-1] == "stopped: state kept; run the same command to go on" and "Traceback" not in error
    assert check_stopped(out, expected) == "unfinished"

    done = subprocess.run(
        command(folder, out, "--json"), env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "align (1/3)" not in done.stderr and "align (3/3)" in done.stderr
    assert json.loads(done.stdout)["heldout"]["student_perplexity"] > 1
    assert weight_bytes(out) == expected
