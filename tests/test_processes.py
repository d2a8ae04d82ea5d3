"""Two processes on one CPU: as one process but for rounding, split or repeated; and resumed by another number."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_convert import FAST, run_convert, same_bits, tensors_of
from test_convert import one_thread as one_thread
from test_convert_distill import SHORT, lines_of

from linearize import cli
from linearize.distill import Trainer
from linearize.processes import Processes, join

ROOT = Path(__file__).resolve().parents[1]
# Several steps of both stages; the third layer is left over when two processes share three.
CHANGES = SHORT | {"convert_keep_softmax": "3", "distill_tokens": 4 * 96, "distill_save_steps": 2}


def job(command: list[str], environ: dict[str, str], stop: int, said: str) -> None:
    """One process of a run, which dies with its fellows once `stop` steps of distillation are done and saved."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(said, "w")
    save = Trainer.save

    def save_and_die(self, run):
        save(self, run)
        if self.progress.step == stop:
            self.here.wait()
            os._exit(9)

    Trainer.save = save_and_die
    code = cli.run(command)
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="module")
def convert_with(tmp_path_factory):
    """A function that runs the command in `world` processes and returns what the first one said.

    stop: all of them die once that many steps of distillation are done. fails: the second one's exit code; what each
    process said is returned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["linearize.convert", "accelerate"])

    def run(world: int, folder, out: Path, *, stop: int = 0, fails: int = 0, **changes):
        settings = {name.replace("_", ".", 1): value for name, value in (CHANGES | changes).items()}
        flags = [w for name, value in (FAST | settings).items() for w in ("-s", f"{name}={value}")]
        port, log = free_port(), tmp_path_factory.mktemp("said")
        started = []
        for rank in range(world):
            environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            command = ["convert", str(folder), str(out), *flags]
            process = context.Process(target=job, args=(command, environ, stop, str(log / str(rank))))
            process.start()
            started.append(process)
        for process in started if not fails else started[1:]:
            process.join()
        if fails:  # as a launcher does
            started[0].kill()
            started[0].join()
        said = [(log / str(rank)).read_text() for rank in range(world)]
        if fails:
            assert started[1].exitcode == fails, said
            return said
        assert [process.exitcode for process in started] == [9 if stop else 0] * world, said
        assert not any(line for text in said[1:] for line in text.splitlines() if "Warning" not in line), said[1:]
        return said[0]

    return run


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def close(one: Path, other: Path, tolerance: float = 2e-4) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name in a:
        if a[name].numel():
            # Weights near 0 move by a step of AdamW, whatever the size of their gradient.
            scale = float(a[name].abs().max())
            assert float((a[name] - b[name]).abs().max()) <= tolerance * max(scale, 1.0), name


@pytest.fixture(scope="module")
def alone(teacher_folder, tmp_path_factory):
    """(teacher's folder, OUT, the record) of one process that works in the order of several."""
    folder, out = teacher_folder("llama-tied"), tmp_path_factory.mktemp("alone") / "out"
    return folder, out, run_convert(folder, out, **CHANGES, align_order="calibrate-first")


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_are_one(alone, convert_with, tmp_path, shard):
    folder, whole, record = alone
    out = tmp_path / "out"
    said = convert_with(2, folder, out, distill_shard=shard)
    close(whole, out)
    assert "align (1/3)" in said and "align (2/3)" not in said  # that one the other process did, silently
    made = json.loads((out / "linearize.json").read_text())
    assert made["processes"] == 2
    assert made["distill"]["losses"] == pytest.approx(record["distill"]["losses"], rel=1e-4)
    for name in ("kl", "student_perplexity"):
        assert made["heldout"][name] == pytest.approx(record["heldout"][name], rel=2e-3)
    # Alignment is not split at all: the same bits.
    assert [layer["losses"] for layer in made["layers"]] == [layer["losses"] for layer in record["layers"]]
    steps = [(line["stage"], line.get("layer"), line["step"]) for line in lines_of(out)]
    assert steps == [(line["stage"], line.get("layer"), line["step"]) for line in lines_of(whole)]
    assert not (out / ".linearize").exists()


@pytest.mark.slow
@pytest.mark.parametrize("first, then, shard", [(2, 1, "full"), (1, 2, "none")])
def test_another_number_of_processes_goes_on(alone, convert_with, tmp_path, first, then, shard):
    folder, whole, record = alone
    out = tmp_path / "out"
    order = {"align_order": "calibrate-first", "distill_shard": shard}
    convert_with(first, folder, out, stop=2, **order)
    assert json.loads((out / ".linearize/training.json").read_text())["info"]["step"] == 2
    said = convert_with(then, folder, out, **order)
    assert "align (" not in said and "distill: " in said
    close(whole, out)
    assert [line["step"] for line in lines_of(out) if line["stage"] == "distill"] == [1, 2, 3, 4]
    losses = json.loads((out / "linearize.json").read_text())["distill"]["losses"]
    assert losses == pytest.approx(record["distill"]["losses"], rel=1e-4)


@pytest.mark.slow
def test_accelerates_own_command_and_configuration(alone, tmp_path):
    """The shipped FSDP configuration, with the run on the CPU: both processes are there and weights are split."""
    folder, whole, _ = alone
    settings = FAST | {name.replace("_", ".", 1): value for name, value in CHANGES.items()}
    flags = [w for name, value in settings.items() for w in ("-s", f"{name}={value}")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "recipes/accelerate/fsdp2.yaml"), "--num_processes=2"]
    launch += [f"--main_process_port={free_port()}", "-m", "linearize", "convert", str(folder), str(tmp_path / "out")]
    done = subprocess.run([*launch, *flags], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "split over 2 processes" in done.stderr, done.stderr[-3000:]
    close(whole, tmp_path / "out")


@pytest.mark.slow
def test_an_error_in_any_process_is_said(alone, convert_with, tmp_path):
    """Layer 1 belongs to the second process: its alignment diverges there, and the first has nothing to say of it."""
    said = convert_with(2, alone[0], tmp_path / "out", fails=1, align_lr=1e30, align_lr_min=1.0)
    assert re.search(r"^process 1: error: alignment of layer 1 diverged at step .* lower align.lr$", said[1], re.M), (
        said
    )
    assert "Traceback" not in said[0] + said[1]


def test_alone_without_a_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    here = join("cpu")
    assert here == Processes(torch.device("cpu"), 0, 1) and here.first
    here.wait()
    here.leave()
    assert here.sum(1.5, 2) == [1.5, 2]


def test_one_process_makes_the_same_bits_in_the_order_of_many(alone, tmp_path):
    folder, whole, _ = alone
    run_convert(folder, tmp_path / "out", **CHANGES, align_order="calibrate-first")
    a, b = tensors_of(whole), tensors_of(tmp_path / "out")
    assert all(same_bits(a[name], b[name]) for name in a)
