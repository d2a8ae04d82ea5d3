"""MesaNet's launches compiled for sm_90: where they compute left operands no WGMMA may take them (`common`)."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

import compile_gate  # noqa: E402
import triton  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.mark.skipif(not (TOOLS / "ptxas").exists() or not (TOOLS / "cuobjdump").exists(), reason="triton without ptxas")
@pytest.mark.parametrize("name", ["state {}", "solve {}", "solve alone exact {}", "target {}", "slope {}"])
def test_no_asynchronous_products(name):
    name = f"mesa {name.format('bf16 K=64 V=64')}"
    (launch,) = [rest for entry, *rest in compile_gate.mesa_entries("bf16", [(64, 64)]) if entry == name]
    result = compile_gate.check(*launch)
    assert result["wgmma"] == 0
    assert compile_gate.verdict(result, "bf16", name) is None


def test_the_verdict_refuses_asynchronous_products():
    result = {"register_a": 0, "wgmma": 4, "stack": 0, "shared": 1024, "registers": 100}
    assert compile_gate.verdict(result, "bf16", "scan bf16") is None
    assert "WGMMA" in compile_gate.verdict(result, "bf16", "mesa solve bf16")
    assert compile_gate.verdict(result, "bf16", "mesa pairs bf16") is None
    assert "registers" in compile_gate.verdict(result | {"register_a": 1}, "bf16", "mesa pairs bf16")


@pytest.mark.skipif(not (TOOLS / "ptxas").exists() or not (TOOLS / "cuobjdump").exists(), reason="triton without ptxas")
@pytest.mark.parametrize("name", ["pairs", "keys", "values"])
def test_products_with_loaded_left_operands(name):
    name = f"mesa {name} bf16 K=64 V=64"
    (launch,) = [rest for entry, *rest in compile_gate.mesa_entries("bf16", [(64, 64)]) if entry == name]
    result = compile_gate.check(*launch)
    assert result["wgmma"] > 0 and result["register_a"] == 0
    assert compile_gate.verdict(result, "bf16", name) is None
