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
FULL = "prep fp32 K=64 V=64", "whole scan fp32 K=64 V=64", "reverse fp32 K=64 V=64", "grads fp32 K=128 V=128"


@pytest.mark.skipif(not (TOOLS / "ptxas").exists() or not (TOOLS / "cuobjdump").exists(), reason="triton without ptxas")
@pytest.mark.parametrize("name", CHOSEN)
def test_launch_compiles_for_hopper(name):
    (launch,) = [rest for entry, *rest in compile_gate.entries(quick=True) if entry == name]
    assert compile_gate.verdict(compile_gate.check(*launch), launch[1]) is None


@pytest.mark.skipif(not (TOOLS / "ptxas").exists() or not (TOOLS / "cuobjdump").exists(), reason="triton without ptxas")
@pytest.mark.parametrize("name", FULL)
def test_launch_of_float32_compiles_without_large_spills(name):
    (launch,) = [rest for entry, *rest in compile_gate.entries(quick=False) if entry == name]
    result = compile_gate.check(*launch)
    assert compile_gate.verdict(result, "fp32") is None
    assert result["wgmma"] == 0 and result["stack"] < 3072


def test_float32_is_compiled_up_to_the_heads_that_run_so():
    dims = [name.split("K=")[1] for name, *_ in compile_gate.entries(quick=False) if name.startswith("whole scan fp32")]
    assert {"32 V=32", "128 V=128", "96 V=96", "64 V=128"} <= set(dims) and not any("256" in x for x in dims)


def test_no_table_of_gradients_has_the_tile_that_was_wrong_on_an_h200():
    from linearize_kernels import grads

    assert all(launch[:2] != (32, 64) for launch in grads.GRADS.values())


def test_no_table_of_the_reverse_scan_has_the_single_stage_that_was_wrong_on_an_h200():
    from linearize_kernels import scan

    assert all(stages > 1 for padded, (_, _, stages) in scan.REVERSE.items() if padded > 32)


def test_the_verdict_refuses_spills_and_register_operands():
    fine = {"register_a": 0, "stack": 0, "shared": 1024, "registers": 100}
    assert compile_gate.verdict(fine, "bf16") is None
    assert "registers" in compile_gate.verdict({**fine, "register_a": 1}, "bf16")
    assert "spills" in compile_gate.verdict({**fine, "stack": 8}, "bf16")
    assert compile_gate.verdict({**fine, "stack": 3072}, "fp32") is None
    assert "spills" in compile_gate.verdict({**fine, "stack": 3080}, "fp32")
    assert "WGMMA" in compile_gate.verdict({**fine, "wgmma": 1}, "fp32")
    assert "shared" in compile_gate.verdict({**fine, "shared": 2**18}, "bf16")
    assert compile_gate.verdict(fine, "bf16", "scan", {"scan": 92}) is None
    assert "91 registers before" in compile_gate.verdict(fine, "bf16", "scan", {"scan": 91})
    assert compile_gate.verdict({**fine, "stack": 64}, "bf16", "step mesa bf16 K=128 V=128") is None
