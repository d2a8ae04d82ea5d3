"""Several processes on one CPU: as one process, to the bit in the alignment and but for rounding in the distillation,
split or repeated; and resumed by another number.
"""

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
from test_convert import FAST, recipe, run_convert, same_bits, tensors_of, weight_bytes
from test_convert import one_thread as one_thread
from test_convert_distill import SHORT, lines_of

from linearize import cli, layerwise, processes
from linearize.checkpoint import RunState
from linearize.console import Console
from linearize.corpus import Text
from linearize.data import Rows
from linearize.distill import Trainer
from linearize.errors import UserError
from linearize.layerwise import Layerwise
from linearize.metrics import Metrics
from linearize.processes import Processes, half_precision, join
from linearize.teacher import open_teacher

ROOT = Path(__file__).resolve().parents[1]
# Several steps of both stages; the third layer is left over when two processes share three.
CHANGES = SHORT | {"convert_keep_softmax": "3", "distill_tokens": 4 * 96, "distill_save_steps": 2}
# Alignment alone.
ALIGN = CHANGES | {"align_order": "calibrate-first", "distill_tokens": 0, "data_heldout_tokens": 0, "align_tokens": 384}
IN_FILES = {"align_cache_bytes": 0, "align_cache_dtype": "bfloat16"}
BATCH = 96  # tokens, two rows: every process has batches of its own


def job(command: list[str], environ: dict[str, str], stop: int | str, said: str) -> None:
    """One process of a run, which dies with its fellows where `stop` says: see convert_with."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(said, "w")
    layerwise.BATCH_TOKENS["cpu"] = layerwise.MOVED_TOKENS["cpu"] = BATCH
    layerwise.PIECE_BYTES = 3 * 48 * 64 * 4  # three rows in fp32
    processes.BUCKET = 5000  # some weights are more, some less
    save, align = Trainer.save, Layerwise._align_saved

    def save_and_die(self, run):
        save(self, run)
        if self.progress.step == stop:
            self.here.wait()
            os._exit(9)

    def align_and_die(self, i, layer, stream):
        align(self, i, layer, stream)
        self.here.wait()
        os._exit(9)

    Trainer.save = save_and_die
    if stop == "aligned":
        Layerwise._align_saved = align_and_die
    code = cli.run(command)
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="module")
def convert_with(tmp_path_factory):
    """A function that runs the command in `world` processes and returns what the first one said.

    stop: all of them die once that many steps of distillation are done; "aligned": once each has aligned a layer.
    fails: the second one's exit code; what each process said is returned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["linearize.convert", "accelerate"])

    def run(world: int, folder, out: Path, *, stop: int | str = 0, fails: int = 0, **changes):
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


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """What one process does, in the batches of many."""
    before = layerwise.BATCH_TOKENS["cpu"]
    layerwise.BATCH_TOKENS["cpu"] = layerwise.MOVED_TOKENS["cpu"] = BATCH
    yield
    layerwise.BATCH_TOKENS["cpu"] = layerwise.MOVED_TOKENS["cpu"] = before


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
    # Of alignment the same bits.
    assert [layer["losses"] for layer in made["layers"]] == [layer["losses"] for layer in record["layers"]]
    steps = [(line["stage"], line.get("layer"), line["step"]) for line in lines_of(out)]
    assert steps == [(line["stage"], line.get("layer"), line["step"]) for line in lines_of(whole)]
    assert not (out / ".linearize").exists()


@pytest.mark.slow
def test_two_processes_are_one_with_derived_mixers_too(teacher_folder, convert_with, tmp_path):
    """Those read weights of their submodules directly, which split weights must be whole for."""
    folder = teacher_folder("llama-tied")
    changes = {"convert_mixer": "0=gdn,rest=deltanet", "convert_keep_softmax": "2-3", "align_order": "calibrate-first"}
    record = run_convert(folder, tmp_path / "alone", **CHANGES | changes)
    convert_with(2, folder, tmp_path / "out", **changes, distill_shard="full")
    close(tmp_path / "alone", tmp_path / "out")
    made = json.loads((tmp_path / "out/linearize.json").read_text())
    assert made["distill"]["losses"] == pytest.approx(record["distill"]["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, changes",
    [
        (2, {}),  # the second one is idle in the end
        # An odd number of rows, and a layer that nobody owns below two of the three.
        (3, {"align_tokens": 336, "convert_keep_softmax": "1"} | IN_FILES),
        (3, {"align_tokens": 96, "convert_keep_softmax": "2-3"}),  # one batch of rows and two layers for three
    ],
    ids=["two", "three", "more-than-needed"],
)
def test_alignment_is_the_same_to_the_bit(teacher_folder, convert_with, tmp_path, world, changes):
    folder, changes = teacher_folder("llama-tied"), ALIGN | changes
    record = run_convert(folder, tmp_path / "alone", **changes)
    convert_with(world, folder, tmp_path / "out", **changes)
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "alone")
    made = json.loads((tmp_path / "out/linearize.json").read_text())
    assert made["processes"] == world
    assert [layer["losses"] for layer in made["layers"]] == [layer["losses"] for layer in record["layers"]]


@pytest.mark.slow
@pytest.mark.parametrize("first, then, rest", [(2, 1, [3]), (1, 2, [2, 3])])
def test_another_number_of_processes_aligns_the_rest(teacher_folder, convert_with, tmp_path, first, then, rest):
    folder, out = teacher_folder("llama-tied"), tmp_path / "out"
    run_convert(folder, tmp_path / "alone", **ALIGN)
    convert_with(first, folder, out, stop="aligned", **ALIGN)
    assert [path.stem for path in sorted(out.glob(".linearize/layer-*.json"))] == [
        f"layer-{i:05d}" for i in range(3 - len(rest))
    ]
    said = convert_with(then, folder, out, **ALIGN)
    mine = [f"align ({i}/3)" for i in rest[::then]]
    assert list(dict.fromkeys(re.findall(r"align \(\d/3\)", said))) == mine
    assert weight_bytes(out) == weight_bytes(tmp_path / "alone")


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


def test_rows_are_shared_at_multiples_of_the_batch():
    def shares(world, *args):
        return [(part.start, part.stop) for part in Processes(torch.device("cpu"), 0, world).shares(*args)]

    assert shares(1, 7, 2) == [(0, 7)]
    assert shares(2, 7, 2) == [(0, 4), (4, 7)]
    assert shares(3, 7, 2) == [(0, 2), (2, 4), (4, 7)]
    assert shares(3, 8, 16) == [(0, 0), (0, 0), (0, 8)]
    for world in (5, 8):
        cut = shares(world, 1001, 3)
        assert cut[0][0] == 0 and cut[-1][1] == 1001
        assert all(end == start for (_, end), (start, _) in zip(cut, cut[1:], strict=False))
        assert {end - start for start, end in cut[:-1]} <= {1001 // 3 // world * 3, (1001 // 3 // world + 1) * 3}


class Second(Processes):
    """The second of two processes, which hears nothing from the first."""

    def gather(self, piece, owner):
        return [torch.zeros_like(piece), piece] if owner == self.rank else []

    def agree(self, value):
        return value


@pytest.fixture
def second(teacher_folder, tmp_path):
    """A function from settings to the Layerwise of the second of two processes with 7 rows, 3 of them its own."""
    teacher = open_teacher(str(teacher_folder("llama")))
    ids = torch.arange(7 * 48).view(7, 48) % 100
    rows = Rows(ids, torch.arange(48).expand(7, 48))
    (tmp_path / ".linearize").mkdir()

    def make(here=Second, **changes):
        run, metrics = RunState.join(tmp_path), Metrics(tmp_path, writes=False)
        text, here = Text(rows, rows, None), here(torch.device("cpu"), 1, 2)
        return Layerwise(teacher, {}, recipe(**changes), text, here, run, metrics, Console(quiet=True), torch.float32)

    return make


ROW = 48 * 64 * 4  # bytes


@pytest.mark.parametrize(
    "budget, own_in_file, whole_in_file",
    [
        (10 * ROW, False, False),
        (10 * ROW - 1, True, False),  # not both: the copy is read in random order
        (7 * ROW, True, False),
        (7 * ROW - 1, False, True),
        (3 * ROW - 1, True, True),
    ],
)
def test_the_budget_is_for_the_own_rows_and_the_copy(second, budget, own_in_file, whole_in_file):
    job = second(align_cache_bytes=budget)
    own = job._own_rows(job.text.alignment)
    assert torch.equal(own.teacher[:], job.runner.embed(job.text.alignment.ids[4:]))
    whole = job._gathered(own, 1)
    assert (own.teacher.in_file, whole.teacher.in_file) == (own_in_file, whole_in_file)
    assert torch.equal(whole.teacher[:][4:], own.teacher[:]) and not whole.teacher[:][:4].any()
    assert whole.rows is job.text.alignment and job._gathered(own, 0) is None


def test_all_that_waits_for_a_gpu_is_done_beside_the_step_before(second, monkeypatch):
    """Picked rows go to the device, and masks are made, by code that waits for the stream that it runs on."""
    inside, read = [], []

    class Aside:
        def __init__(self, device):
            pass

        def __call__(self, run, *args):
            inside.append(True)
            found = run(*args)
            inside.clear()
            return found

    def watched(cls, name):
        method = getattr(cls, name)

        def call(*args, **kwargs):
            read.append((name, bool(inside)))
            return method(*args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    job = second()
    stream = job._own_rows(job.text.alignment)
    with job.runner.block(0) as layer:
        monkeypatch.setattr(layerwise, "Aside", Aside)
        watched(layerwise.HiddenStates, "__getitem__")
        watched(type(job.runner), "layer_kwargs")
        steps = job._steps(0, layer, stream, 2)
        next(steps), next(steps)
        assert read == [("__getitem__", True), ("layer_kwargs", True)] * 2
        read.clear()
        job._advance(0, layer, None, stream)  # three rows, two at once
    assert read == [("__getitem__", True), ("layer_kwargs", True)] * 2


def test_other_text_in_another_process_is_said(second):
    class Other(Second):
        def agree(self, value):
            return "of other text"

    job = second(Other)
    with pytest.raises(UserError, match="this process has other text for the alignment than the first one"):
        job._own_rows(job.text.alignment)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_no_copy_of_a_weight_outlives_its_layer_in_half_precision():
    with half_precision(torch.device("cuda")):
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
