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
