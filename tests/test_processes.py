"""Two processes on one CPU: as one process but for rounding, split or repeated; and resumed by another number."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_convert import FAST, run_convert, same_bits, tensors_of
from test_convert import one_thread as one_thread
from test_convert_distill import SHORT, lines_of

from linearize.processes import Processes, join

ROOT = Path(__file__).resolve().parents[1]
# Several steps of both stages; the third layer is left over when two processes share three.
CHANGES = SHORT | {"convert_keep_softmax": "3", "distill_tokens": 4 * 96, "distill_save_steps": 2}

# Stops, as a kill would, once a number of steps of distillation is done.
STOPPING = """
import os, signal, sys
from linearize import cli
from linearize.distill import Trainer

save, stop = Trainer.save, int(sys.argv[1])

def save_and_die(self, run):
    save(self, run)
    if self.progress.step == stop:
        self.here.wait()
        os._exit(9)

Trainer.save = save_and_die
sys.exit(cli.run(sys.argv[2:]))
"""


def convert_with(world: int, folder, out: Path, *, stop: int = 0, launcher=(), environ=None, **changes) -> str:
    """The command in `world` processes; returns what was said. stop: the step of distillation after which it dies."""
    settings = FAST | {name.replace("_", ".", 1): value for name, value in (CHANGES | changes).items()}
    command = ["convert", str(folder), str(out), *(w for n, v in settings.items() for w in ("-s", f"{n}={v}"))]
    script = out.parent / "stopping.py"
    script.write_text(STOPPING)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port} | (environ or {})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    if launcher:
        words = [*launcher, f"--main_process_port={port}", "-m", "linearize", *command]
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr
    started = []
    for rank in range(world):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        words = [sys.executable, str(script), str(stop), *command]
        started.append(subprocess.Popen(words, env=env | ranks, stdout=-1, stderr=-1, text=True))
    said = [process.communicate(timeout=300) for process in started]
    for process, (printed, error) in zip(started, said, strict=True):
        assert process.returncode == (9 if stop else 0), error[-3000:]
        assert process is started[0] or printed == "", "only the first process prints"
    return said[0][1]


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
def test_two_processes_are_one(alone, tmp_path, shard):
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
@pytest.mark.parametrize("first, then, shard", [(2, 1, "full"), (1, 2, "full"), (2, 1, "none")])
def test_another_number_of_processes_goes_on(alone, tmp_path, first, then, shard):
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
    """The shipped FSDP configuration, but for a machine without a GPU."""
    folder, whole, _ = alone
    config = ROOT / "recipes/accelerate/fsdp2.yaml"
    launcher = ("-m", "accelerate.commands.launch", "--config_file", str(config), "--cpu", "--num_processes=2")
    said = convert_with(2, folder, tmp_path / "out", launcher=launcher)
    assert "distill: " in said
    close(whole, tmp_path / "out")


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
