"""Importing the package and choosing between torch and Triton."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from linearize_kernels import api
from linearize_kernels.api import uses_kernels


def test_importing_the_package_loads_neither_triton_nor_a_driver():
    code = "import sys, linearize_kernels, torch; print('triton' in sys.modules, torch.cuda.is_initialized())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert run.stdout.split() == ["False", "False"], run.stderr


def test_the_environment_switch(monkeypatch):
    x = torch.zeros(1)
    monkeypatch.delenv("LINEARIZE_KERNELS", raising=False)
    assert not uses_kernels(x)
    assert uses_kernels(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16))
    assert not uses_kernels(SimpleNamespace(is_cuda=True, dtype=torch.float64))
    gpu = SimpleNamespace(is_cuda=True, dtype=torch.float64)
    monkeypatch.setenv("LINEARIZE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert uses_kernels(x) and uses_kernels(gpu)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert uses_kernels(gpu)
    with pytest.raises(ValueError, match=r"needs tensors on a GPU \(got cpu\): set it to auto"):
        uses_kernels(x)
    monkeypatch.setattr(api, "_has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"needs Triton \(got not installed\): install triton"):
        uses_kernels(gpu)
    monkeypatch.setenv("LINEARIZE_KERNELS", "reference")
    assert not uses_kernels(x)
    monkeypatch.setenv("LINEARIZE_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, reference or triton"):
        uses_kernels(x)


def test_heads_too_wide_for_a_kernel_are_one_clear_line(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(api, "uses_kernels", lambda x, *dims: True)
    wide, gate = torch.zeros(1, 1, 1, 257), torch.zeros(1, 1, 1)
    for call in (
        lambda: api.gated_delta(wide, wide, wide, gate, gate),
        lambda: api.readout(wide, gate, gate, gate, torch.ones(1, 1)),
    ):
        with pytest.raises(ValueError, match=r"of at most 256 dims \(got 257\): set LINEARIZE_KERNELS=reference$"):
            call()


def test_wide_heads_take_the_torch_form_unless_asked(monkeypatch):
    for dtype, widest in ((torch.bfloat16, 256), (torch.float16, 256), (torch.float32, 128)):
        x = SimpleNamespace(is_cuda=True, dtype=dtype)
        monkeypatch.setenv("LINEARIZE_KERNELS", "auto")
        assert uses_kernels(x, widest, widest)
        for dims in ((widest + 1, 64), (64, widest + 1)):
            assert not uses_kernels(x, *dims)
        monkeypatch.setenv("LINEARIZE_KERNELS", "triton")
        assert uses_kernels(x, 257, 257)


def test_operators_tell_the_dims_of_their_heads(monkeypatch):
    asked, rows, gate = [], torch.zeros(1, 1, 2, 256), torch.zeros(1, 1, 2)
    monkeypatch.setattr(api, "uses_kernels", lambda x, *dims: asked.append(dims) or False)
    for call in (
        lambda: api.gated_delta(rows, rows, rows, gate, gate),
        lambda: api.linear_attn(rows, rows, rows, gate, gate),
        lambda: api.mesa(rows, rows, rows, gate, gate, torch.ones(2, 256)),
        lambda: api.centre(rows, rows, gate, gate, gate),
        lambda: api.centred_linear_attn(rows, rows, rows, gate, gate, gate, gate),
        lambda: api.gated_delta_step(rows, rows, rows, gate, gate, state=torch.zeros(1, 2, 256, 256)),
    ):
        asked.clear()
        call()
        assert asked[0] == (256, 256)
    asked.clear()
    api.running_mean(rows, gate, gate, gate)
    assert asked == [(256,)]


def test_no_module_hides_an_operator():
    """A submodule becomes an attribute of the package when it is first imported."""
    code = (
        "import importlib, pkgutil, linearize_kernels as p\n"
        "for m in pkgutil.iter_modules(p.__path__):\n"
        "    try:\n        importlib.import_module(f'linearize_kernels.{m.name}')\n"
        "    except ImportError:\n        pass\n"
        "print(all(callable(getattr(p, name)) for name in p.__all__))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert run.stdout.split() == ["True"], run.stderr
