"""The benchmark script on a CPU in tiny shapes: what it measures there means nothing, that it runs does."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

import bench  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="times on a GPU are for the script itself")


def run(monkeypatch, path, *arguments):
    monkeypatch.setenv("LINEARIZE_KERNELS", "reference")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(path), *arguments])
    code = bench.main()
    return code, json.loads(path.read_text())


def test_dry_run(monkeypatch, tmp_path):
    code, report = run(monkeypatch, tmp_path / "bench.json", "--dry-run", "--only", "delta")
    rows = report["rows"]
    assert code == 0 and [row["op"] for row in rows] == ["delta", "delta", "delta step"]
    median, low, high = rows[0]["both"]["ms"]["cold"]["kernels"]
    assert 0 < low <= median <= high and rows[0]["both"]["floor ms"] > rows[0]["forward"]["floor ms"] > 0


def test_the_budget_names_what_it_does_not_reach(monkeypatch, tmp_path):
    _, report = run(monkeypatch, tmp_path / "bench.json", "--dry-run", "--budget-seconds", "-1")
    assert not report["rows"] and len(report["not reached"]) == len(list(bench.cases(dry=True)))


def test_without_a_gpu_only_a_dry_run_is_possible(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "bench.json")


def test_every_row_counts_its_bytes():
    for case in bench.cases(dry=False):
        assert bench.moved_bytes(case, "both") >= bench.moved_bytes(case, "forward") > 0


def test_a_run_goes_on_where_its_file_ends_and_prints_a_table(monkeypatch, tmp_path, capsys):
    path = tmp_path / "bench.json"
    run(monkeypatch, path, "--dry-run", "--only", "step")
    first = path.read_text()
    _, report = run(monkeypatch, path, "--dry-run", "--only", "delta")
    assert [row["op"] for row in report["rows"]] == ["delta step", "centred step", "mesa step", "delta", "delta"]
    assert report["rows"][:3] == json.loads(first)["rows"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["bench.py", "--table", str(path)])
    assert bench.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 5 and "packed 2" in lines[-1] and len({line.count("|") for line in lines}) == 1
    assert f"torch {report['rows'][3]['forward']['ms']['cold']['torch'][0]:.3f}" in lines[5]


def test_parts_divide_the_rows(monkeypatch, tmp_path):
    count = len(list(bench.cases(dry=True)))
    for part in ("beside", "alone"):
        _, report = run(monkeypatch, tmp_path / "bench.json", "--dry-run", "--part", part)
        assert len(report["rows"]) == (0 if part == "beside" else count)
    real = list(bench.cases(dry=False))
    assert {case["op"] for case in real if case.get("beside")} == {"delta", "mesa"}


def test_configurations_are_compiled_side_by_side_and_failures_left_to_the_tuner():
    compiled = []

    class Kernel:
        def run(self, *args, **kwargs):
            compiled.append((args, kwargs))
            if kwargs["tile"] == 2:
                raise RuntimeError("too large")

    class Config:
        def __init__(self, tile):
            self.tile = tile

        def all_kwargs(self):
            return {"tile": self.tile}

    class Tuner:
        fn, nargs = Kernel(), {"x": 5}

        def prune_configs(self, kwargs):
            return [Config(tile) for tile in kwargs["tiles"]]

    bench.compile_side_by_side(Tuner, 3)
    configs = Tuner().prune_configs({"tiles": [1, 2, 3], "warmup": False, "grid": (1,)})
    assert [config.tile for config in configs] == [1, 2, 3]
    assert sorted(kwargs["tile"] for _, kwargs in compiled) == [1, 2, 3]
    assert all(args == (5,) and kwargs["warmup"] and kwargs["grid"] == (1,) for args, kwargs in compiled)
