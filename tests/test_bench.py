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


def test_a_model_that_does_not_fit_loses_no_other_cell(converted, teacher_folder, capsys, monkeypatch):
    load = bench.Model.load

    def loads(self, *args):
        if not self.ours:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(self, *args)

    monkeypatch.setattr(bench.Model, "load", loads)
    out, err = run(capsys, converted, "--teacher", "--context", "16", "--json")
    teacher, student = json.loads(out)["cells"]
    assert teacher["error"] == "out of memory" and student["decode_tokens_per_second"] > 0
    assert "out of memory while loading" in err and "--dtype bfloat16" in err


def test_an_illegal_access_is_no_lack_of_memory(converted, capsys, monkeypatch):
    def broken(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench, "measure", broken)
    assert "illegal memory access" in run(capsys, converted, code=1).err


def test_longer_than_the_model_is_measured_and_said(converted, capsys):
    out, err = run(capsys, converted, "--context", "300", "--json")
    assert json.loads(out)["cells"][0]["decode_tokens_per_second"] > 0
    assert "is made for 256 tokens" in err
    assert "is made for" not in run(capsys, converted, "--context", "200").err


def test_a_large_batch_repeats_its_rows(converted, monkeypatch):
    """The cache weighs what that of the whole batch does, and every row decodes as the one that it repeats."""
    net = bench.open_model(str(converted)).load(torch.device("cpu"))
    whole = bench.measure(net, 20, 5, 2)
    monkeypatch.setattr(bench, "PREFILL", 45)
    decoded = []
    step = bench._step
    monkeypatch.setattr(bench, "_step", lambda net, *args: decoded.append(step(net, *args)) or decoded[-1])
    found = bench.measure(net, 20, 5, 2)
    assert (whole["prefill_rows"], found["prefill_rows"]) == (5, 2)
    assert found["cache_bytes"] == whole["cache_bytes"]
    for tokens in decoded:
        assert torch.equal(tokens[:2], tokens[2:4]) and torch.equal(tokens[0], tokens[4])


class Captured:
    """Stands for Replay where there is no GPU: the third call is as if captured."""

    def __init__(self, run):
        self.run, self.calls, self.graphs = run, 0, {}

    def __call__(self, tokens):
        self.calls += 1
        if self.calls == 3:
            self.graphs, self.result = {"key": "graph"}, self.run(tokens)
        return self.result if self.graphs else self.run(tokens)


@torch.no_grad()
def test_room_gives_the_tokens_of_a_growing_cache(converted, monkeypatch):
    net = bench.open_model(str(converted)).load(torch.device("cpu"))
    ids = torch.randint(260, (2, 30), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=net.config) for _ in range(2)]
    tokens = [bench._prefill(net, ids, cache) for cache in caches][0]
    expected, following = [], tokens
    for _ in range(3):
        following = bench._step(net, following, caches[0])
        expected.append(following)
    steps = []
    step = bench._step
    monkeypatch.setattr(bench, "_step", lambda net, *args: steps.append(step(net, *args)) or steps[-1])
    monkeypatch.setattr(bench, "Replay", Captured)
    found = bench.replayed(net, tokens, caches[1], 5)
    assert torch.equal(torch.stack(steps), torch.stack(expected)), "three steps run, five are replayed"
    assert found["graph_tokens_per_second"] == pytest.approx(2e3 / found["graph_step_ms"])
    assert isinstance(caches[1].layers[1], bench.Room) and caches[1].get_seq_length() == 33
    assert torch.equal(caches[1].layers[1].keys, caches[0].layers[1].keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_captured_step_gives_the_tokens_of_a_plain_one(monkeypatch):
    class Kept(bench.Replay):
        def __call__(self, *args):
            results.append(super().__call__(*args).clone())
            return results[-1]

    net = make_student(teacher_model("llama"), {0: {"kind": "gdn"}, 2: {"kind": "k-cache"}}).cuda()
    ids = torch.randint(260, (3, 30), generator=torch.Generator().manual_seed(0)).cuda()
    caches, results = [DynamicCache(config=net.config) for _ in range(2)], []
    tokens = [bench._prefill(net, ids, cache) for cache in caches][0]
    expected = [tokens]
    for _ in range(3):
        expected.append(bench._step(net, expected[-1], caches[0]))
    monkeypatch.setattr(bench, "Replay", Kept)
    found = bench.replayed(net, tokens, caches[1], 5)
    assert found.get("graph_step_ms", 0) > 0, found
    assert torch.equal(torch.stack(results[:3]), torch.stack(expected[1:]))


@torch.no_grad()
@pytest.mark.parametrize("error", [None, RuntimeError("a kernel\nwaits"), torch.OutOfMemoryError("CUDA out of memory")])
def test_without_a_graph_the_reason_is_told(converted, monkeypatch, error):
    def refuses(run):
        def replay(tokens):
            if error:
                raise error
            bench.warnings.warn("not possible: a sync", stacklevel=1)
            return run(tokens)

        replay.graphs = {}
        return replay

    monkeypatch.setattr(bench, "Replay", refuses)
    net = bench.open_model(str(converted)).load(torch.device("cpu"))
    cache = DynamicCache(config=net.config)
    tokens = bench._prefill(net, torch.ones(1, 8, dtype=torch.long), cache)
    reason = {None: "not possible: a sync", RuntimeError: "a kernel waits"}.get(error and type(error), "out of memory")
    assert bench.replayed(net, tokens, cache, 2) == {"graph_error": reason}


def test_table_with_graphs(converted, capsys, monkeypatch):
    measure = bench.measure

    def on_gpu(net, context, *rest):
        more = {"graph_step_ms": 0.5, "graph_tokens_per_second": 2000.0}
        return measure(net, context, *rest) | (more if context < 32 else {"graph_error": "a sync"})

    monkeypatch.setattr(bench, "measure", on_gpu)
    out, err = run(capsys, converted, "--teacher", "--context", "16,32")
    lines = out.splitlines()
    assert lines[1].split() == "context batch model prefill/s decode/s ms/step graph/s cache".split()
    assert lines[2].split()[6] == bench.format_count(2000.0) and "–" not in lines[2]
    assert max(map(len, lines[1:])) <= 80
    assert "no CUDA graph of a step: a sync" in err and err.count("a sync") == 1 and "one CUDA graph" in err


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
