"""A few launches compiled for sm_90 without a GPU; kernels/benchmarks/compile_gate.py checks all of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

import compile_gate  # noqa: E402
import triton  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHOSEN = (
    "prep bf16 K=128 V=128",
    "scan out bf16 K=64 V=64",
    "reverse bf16 K=128 V=128",
    "grads bf16 K=64 V=64",
    "gates grads",
    "uneven slopes bf16 K=64 V=128",
    "uneven slopes bf16 K=0 V=128",
    "step centred alone bf16 K=128 V=128",
)


@pytest.mark.skipif(not (TOOLS / "ptxas").exists() or not (TOOLS / "cuobjdump").exists(), reason="triton without ptxas")
@pytest.mark.parametrize("name", CHOSEN)
def test_launch_compiles_for_hopper(name):
    (launch,) = [rest for entry, *rest in compile_gate.entries(quick=True) if entry == name]
    assert compile_gate.verdict(compile_gate.check(*launch), launch[1]) is None


def test_no_table_of_gradients_has_the_tile_that_was_wrong_on_an_h200():
    from linearize_kernels import grads

    assert all(launch[:2] != (32, 64) for launch in grads.GRADS.values())


def test_the_verdict_refuses_spills_and_register_operands():
    fine = {"register_a": 0, "stack": 0, "shared": 1024, "registers": 100}
    assert compile_gate.verdict(fine, "bf16") is None
    assert "registers" in compile_gate.verdict({**fine, "register_a": 1}, "bf16")
    assert "spills" in compile_gate.verdict({**fine, "stack": 8}, "bf16")
    assert compile_gate.verdict({**fine, "stack": 8}, "fp32") is None
    assert "shared" in compile_gate.verdict({**fine, "shared": 2**18}, "bf16")
    assert compile_gate.verdict(fine, "bf16", "scan", {"scan": 92}) is None
    assert "91 registers before" in compile_gate.verdict(fine, "bf16", "scan", {"scan": 91})
    assert compile_gate.verdict({**fine, "stack": 64}, "bf16", "step mesa bf16 K=128 V=128") is None
