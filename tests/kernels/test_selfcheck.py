"""The first-use check: what it compiles ahead, and what it remembers. No GPU: a driver is made up, no compiler runs."""

import sys
import threading
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

from compile_gate import all_recorded, specialised  # noqa: E402
from linearize_kernels import selfcheck  # noqa: E402
from triton import compiler  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
CPU, HALF = torch.device("cpu"), torch.bfloat16
CHECKS = {
    "delta": lambda: selfcheck.measure(128, 128, HALF, True, CPU, None),
    "linear": lambda: selfcheck.measure(64, 64, HALF, False, CPU, None),
    "pieces": lambda: selfcheck.measure(64, 64, HALF, True, CPU, None, 64),
    "odd": lambda: selfcheck.measure(50, 100, HALF, True, CPU, None),
    "float32": lambda: selfcheck.measure(64, 64, torch.float32, True, CPU, None),
    "safe": lambda: selfcheck.measure(64, 64, HALF, True, CPU, selfcheck.SAFE_WARPS),
    "readout": lambda: selfcheck.measure_readout(64, HALF, CPU, None),
    "mesa": lambda: selfcheck.measure_mesa(64, 64, HALF, CPU, None),
    "delta step": lambda: selfcheck.measure_step("delta", 3, 64, 64, HALF, CPU, None),
    "gated step": lambda: selfcheck.measure_step("gated", 1, 64, 64, HALF, CPU, None),
    "mesa step": lambda: selfcheck.measure_step("mesa", 1, 64, 64, HALF, CPU, None),
}
needs_threads = pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="compiles in turn")


class Driver:
    """As much of Triton's driver as compiling asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled so far; every kernel starts uncompiled."""
    names = []
    modules = [module for name, module in sys.modules.items() if name.startswith("linearize_kernels.")]
    for kernel in {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}:
        monkeypatch.setattr(kernel, "compile", None, raising=False)  # `create_binder` sets it
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(compiler, "compile", lambda source, **_: names.append(source.fn.__name__) or object())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return names


def needed(check) -> int:
    """How many kernels the launches of a check need."""
    keys = set()
    for kernel, launch in all_recorded(check):
        source, options = specialised(kernel, launch, TARGET)
        keys.add((source.hash(), str(sorted(options.items(), key=str))))
    return len(keys)


@needs_threads
@pytest.mark.parametrize("name", CHECKS)
def test_every_kernel_of_a_check_is_compiled_ahead_and_once(name, compiled, monkeypatch):
    check, launch = CHECKS[name], JITFunction.run
    selfcheck.compile_ahead(check)
    assert JITFunction.run is launch
    assert len(compiled) == needed(check) > 1
    # Now the check itself, on a GPU that is not there: it launches, and compiles nothing more.
    compiled.clear()
    launched = []

    def run(self, *arguments, grid, warmup, **options):
        launched.append(not warmup)
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    check()
    assert all(launched) and launched and not compiled


@needs_threads
def test_kernels_are_compiled_side_by_side(compiled, monkeypatch):
    both = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(compiler, "compile", lambda source, **_: compiled.append(both.wait()) or object())
    selfcheck.compile_ahead(CHECKS["delta step"])  # two kernels: each waits until the other is being compiled
    assert sorted(compiled) == [0, 1]


@needs_threads
def test_only_the_thread_that_asked_compiles_ahead(compiled, monkeypatch):
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, warmup, **__: seen.append((self, warmup)))

    def call():
        thread = threading.Thread(target=lambda: JITFunction.run("other", grid=(1,), warmup=False))
        thread.start()
        thread.join()
        JITFunction.run("own", grid=(1,), warmup=False)

    selfcheck.compile_ahead(call)
    assert seen == [("other", False), ("own", True)]


@needs_threads
def test_what_does_not_compile_is_left_to_its_launch(compiled, monkeypatch):
    def fail(source, **_):
        raise RuntimeError("no code")

    launch = JITFunction.run
    monkeypatch.setattr(compiler, "compile", fail)
    selfcheck.compile_ahead(CHECKS["delta step"])
    with pytest.raises(ZeroDivisionError):
        selfcheck.compile_ahead(lambda: 1 / 0)
    assert JITFunction.run is launch
    with pytest.raises(RuntimeError, match="no code"):
        CHECKS["delta step"]()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A device whose checks may run, and a home of its own for what they find."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LINEARIZE_KERNELS_CHECK", raising=False)
    monkeypatch.setattr(selfcheck, "_environment", lambda: "this machine")
    monkeypatch.setattr(selfcheck, "_warps", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(selfcheck, "compile_ahead", lambda call: call())
    return torch.device("cuda", 1)


GOOD, BAD = {"o": 1e-3}, {"o": float("inf")}


def test_a_second_process_takes_the_verdict_from_disk(gpu, monkeypatch):
    runs = []

    def run(device, warps):
        runs.append((device.type, warps))
        return GOOD

    assert selfcheck._checked(("case", HALF), HALF, gpu, run) is None
    assert runs == [("cpu", None), ("cuda", None)]  # compiled ahead on the CPU, then measured
    selfcheck._checked(("case", HALF), HALF, gpu, run)
    assert len(runs) == 2
    selfcheck._warps.clear()  # what a new process knows
    assert selfcheck._checked(("case", HALF), HALF, gpu, run) is None
    assert len(runs) == 2
    selfcheck._checked(("another case", HALF), HALF, gpu, run)
    assert len(runs) == 4
    selfcheck._warps.clear()
    monkeypatch.setattr(selfcheck, "_environment", lambda: "another driver")
    selfcheck._checked(("case", HALF), HALF, gpu, run)
    assert len(runs) == 6


def test_a_check_does_without_compiling_ahead(gpu):
    runs = []

    def run(device, warps):
        runs.append(device.type)
        if device.type == "cpu":
            raise TypeError("run() got an unexpected keyword argument 'warmup'")
        return GOOD

    assert selfcheck._checked(("case",), HALF, gpu, run) is None
    assert runs == ["cpu", "cuda"]


def test_a_verdict_for_slower_launches_is_remembered_too(gpu):
    runs = []

    def run(device, warps):
        runs.append((device.type, warps))
        return BAD if warps is None else GOOD

    with pytest.warns(UserWarning, match="slower ones run"):
        assert selfcheck._checked(("case",), HALF, gpu, run) == selfcheck.SAFE_WARPS
    assert runs == [("cpu", None), ("cuda", None), ("cpu", selfcheck.SAFE_WARPS), ("cuda", selfcheck.SAFE_WARPS)]
    selfcheck._warps.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selfcheck._checked(("case",), HALF, gpu, run) == selfcheck.SAFE_WARPS
    assert len(runs) == 4


def test_wrong_results_raise_and_are_not_remembered(gpu):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="TRITON_PTXAS_PATH"):
            selfcheck._checked(("case",), HALF, gpu, lambda device, warps: BAD)
    assert not selfcheck.cache_file().exists()
