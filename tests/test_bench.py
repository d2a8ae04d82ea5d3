"""`linearize bench`: what a cell holds, the bytes of the cache, memory that runs out, and the kernels' own script."""

import json
import shutil
import sys

import pytest
import torch
from conftest import make_student, teacher_model, tiny_tokenizer
from transformers import DynamicCache

from linearize import bench, cli
from linearize.console import Console
from linearize.mixers import MIXERS, HeadShape


@pytest.fixture(scope="module")
def saved(teacher_folder, tmp_path_factory):
    student = make_student(teacher_model("llama"), {0: {"kind": "toy"}, 2: {"kind": "toy"}})
    teacher = {"source": str(teacher_folder("llama")), "revision": None}
    student.config.linearize = {**student.config.linearize, "teacher": teacher}
    folder = tmp_path_factory.mktemp("converted") / "student"
    student.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def converted(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "student")


def run(capsys, *argv, code=0):
    assert cli.run(["bench", "decode", *map(str, argv), "--device", "cpu", "--steps", "4"]) == code
    return capsys.readouterr()


# keys and values of 2 KV heads of 32 dims in float32
PER_TOKEN = 2 * 2 * 32 * 4


def test_decode(converted, capsys):
    out, _ = run(capsys, converted, "--teacher", "--context", "16,40", "--batch", "1,3", "--json")
    report = json.loads(out)
    assert json.loads((converted / "eval" / "decode.json").read_text()) == report
    cells = report["cells"]
    assert [(c["context"], c["batch"], c["model"]) for c in cells] == [
        (context, batch, side) for context in (16, 40) for batch in (1, 3) for side in ("teacher", "student")
    ]
    state = MIXERS["toy"].state_bytes(HeadShape.from_config(teacher_model("llama").config))
    for cell in cells:
        layers = 4 if cell["model"] == "teacher" else 2
        softmax = layers * PER_TOKEN * cell["context"] * cell["batch"]
        assert cell["cache_bytes"] == softmax + (0 if layers == 4 else 2 * state * cell["batch"])
        ms = cell["step_ms"]
        assert 0 < ms["p10"] <= ms["median"] <= ms["p90"]
        assert cell["decode_tokens_per_second"] == pytest.approx(1e3 * cell["batch"] / ms["median"])
        assert cell["prefill_tokens_per_second"] > 0
    assert report["machine"]["device"].startswith("CPU") and report["settings"]["steps"] == 4


def test_table(converted, capsys):
    out, err = run(capsys, converted, "--context", "16", "--batch", "2")
    lines = out.splitlines()
    assert lines[1].split() == "context batch model prefill/s decode/s ms/step p10-p90 cache".split()
    assert lines[2].split()[:3] == ["16", "2", "student"]
    assert max(map(len, lines[1:])) <= 80
    assert "decode.json" in err


def test_plain_model_is_left_alone(teacher_folder, capsys):
    folder = teacher_folder("llama")
    report = json.loads(run(capsys, folder, "--context", "8", "--json").out)
    assert [cell["model"] for cell in report["cells"]] == ["model"] and not (folder / "eval").exists()
    assert "names no teacher" in run(capsys, folder, "--teacher", code=1).err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_a_cell_that_does_not_fit(converted, capsys, monkeypatch, error):
    measure = bench.measure

    def small(net, context, *rest):
        if context > 16:
            raise error
        return measure(net, context, *rest)

    monkeypatch.setattr(bench, "measure", small)
    first, second = json.loads(run(capsys, converted, "--context", "16,32", "--json").out)["cells"]
    assert "error" not in first
    assert second == {"model": "student", "context": 32, "batch": 1, "error": "out of memory"}
    assert "out of memory" in run(capsys, converted, "--context", "16,32").out


def test_another_error_is_not_hidden(converted, capsys, monkeypatch):
    def broken(*args):
        raise RuntimeError("shapes")

    monkeypatch.setattr(bench, "measure", broken)
    assert "RuntimeError: shapes" in run(capsys, converted, code=1).err


def test_prefill_in_pieces_is_the_same(monkeypatch):
    model = teacher_model("llama")
    ids = torch.randint(260, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        monkeypatch.setattr(bench, "PIECE", 16)
        cache = DynamicCache(config=model.config)
        assert torch.equal(bench._prefill(model, ids, cache), expected)
    assert cache.get_seq_length() == 50


def test_shared_memory_counts_once():
    cache = DynamicCache(config=teacher_model("llama").config)
    base = torch.zeros(1, 2, 8, 32)
    for layer in cache.layers:
        layer.keys, layer.values = base[:, :, :4], base[:, :, 4:]
    assert bench.cache_bytes(cache) == base.nbytes


@pytest.mark.parametrize("argv", ["--context 0", "--context many", "--batch 1,,2", "--steps 0"])
def test_usage(converted, capsys, argv):
    assert cli.run(["bench", "decode", str(converted), *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1


def test_kernels_outside_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.linearize, "__file__", str(tmp_path / "linearize" / "__init__.py"))
    assert cli.run(["bench", "kernels", "--quick"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "run this in a checkout" in err and len(err.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_kernels_without_a_gpu(capsys):
    assert cli.run(["bench", "kernels"]) == 1
    err = capsys.readouterr().err
    assert ("need a CUDA GPU" in err or "run this in a checkout" in err) and len(err.strip().splitlines()) == 1


def test_kernels_hands_its_arguments_on(monkeypatch, tmp_path):
    script = tmp_path / "kernels" / "benchmarks" / "gpu_check.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"import sys\nopen({str(tmp_path / 'args')!r}, 'w').write(' '.join(sys.argv[1:]))\nsys.exit(3)\n")
    monkeypatch.setattr(bench.linearize, "__file__", str(tmp_path / "linearize" / "__init__.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: sys)
    assert cli.run(["bench", "kernels", "--out", "x.json", "--quick"]) == 3
    assert (tmp_path / "args").read_text() == "--out x.json --quick"


def test_quiet(converted, capsys):
    options = bench.Options(context=(8,), steps=2, device="cpu")
    bench.decode(str(converted), options, Console(quiet=True))
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
