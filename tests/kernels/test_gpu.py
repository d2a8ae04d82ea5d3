"""The kernels on a GPU, against the float64 torch forms; gpu_check.py has the full grid and the times."""

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

import gpu_check  # noqa: E402


@pytest.mark.parametrize("case", gpu_check.cases(quick=True), ids=str)
def test_against_float64(case):
    result = gpu_check.correctness(case)
    assert not result["failed"], result["errors"]


def test_decode_steps():
    assert max(gpu_check.check_decode().values()) < 6e-3


@pytest.mark.parametrize("case", gpu_check.step_cases(), ids=str)
def test_steps_of_centred_mixers_and_mesanet(case):
    assert not {name: value for name, value in gpu_check.step_errors(case).items() if not value < 1.2e-2}


def test_runs_are_bitwise_equal():
    assert gpu_check.determinism(20)
