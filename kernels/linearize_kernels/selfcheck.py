"""First-use check of the kernels on the user's GPU, compiler and driver.

Some pairs of GPU and ptxas compile matrix products to code that gives wrong gradients without any error. So the first
call of each (head sizes, dtype, erase) runs a small problem, forwards and backwards, twice, against the float64
recurrence on the same device. A pass is remembered on disk for this device, driver, torch, triton, ptxas and kernel
source. On failure the launch tables are replaced by two warps, which use no asynchronous matrix product, and the check
is repeated; if that fails too, the operator raises. LINEARIZE_KERNELS_CHECK=0 skips it.

What takes the time is compilation, 20 to 45 s one kernel after the other. So the problem is first run on the CPU, where
launches only compile, side by side in threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from . import decode, delta, reference, ridge, scan, zeroth
from .common import CHUNK
from .conjugate import recurrent_mesa

SAFE_WARPS = 2
# (outputs and states, gradients of rows, gradients of per-head scalars): twice what the tests allow.
LIMITS = {
    torch.float32: (2e-5, 6e-5, 2e-4),
    torch.float16: (4e-3, 8e-3, 2e-2),
    torch.bfloat16: (1.2e-2, 2e-2, 4e-2),
}
_warps: dict[tuple, int | None] = {}
_compiling = threading.Lock()


def cache_file() -> Path:
    """Where passed checks are remembered."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "linearize_kernels" / "selfcheck.json"


@functools.cache
def _environment() -> str:
    import triton

    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        ptxas = get_ptxas_version(torch.cuda.get_device_capability()[0] * 10)
    except (ImportError, TypeError):
        ptxas = os.environ.get("TRITON_PTXAS_PATH", "bundled")
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source.update(path.read_bytes())
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    parts = torch.cuda.get_device_name(), driver, torch.__version__, triton.__version__, ptxas, source.hexdigest()
    return " | ".join(str(part) for part in parts)


def _enter(device: torch.device) -> None:
    """Make `device` the one this thread launches on; a CUDA device without an index is the current one already."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def problem(key_dim: int, value_dim: int, dtype: torch.dtype, erase: bool, device) -> list[Tensor | None]:
    """q, k, v, log_decay, beta, gain, initial state: 200 tokens, two heads in one group, one of them decaying fast."""
    make = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    q, k, v = normal(1, 200, 2, key_dim), normal(1, 200, 1, key_dim) * key_dim**-0.5, normal(1, 200, 1, value_dim)
    log_decay = -torch.nn.functional.softplus(normal(1, 200, 2)) * torch.tensor([0.05, 5.0])
    beta, gain = (2 * torch.rand(1, 200, 2, generator=make) for _ in range(2))
    tensors = [x.to(device, dtype) for x in (q, k, v)] + [x.to(device) for x in (log_decay, beta, gain)]
    tensors.append(normal(1, 2, key_dim, value_dim).to(device))
    if not erase:
        tensors[4] = None
    return tensors


def measure(
    key_dim: int, value_dim: int, dtype: torch.dtype, erase: bool, device, warps: int | None, length: int = 0
) -> dict[str, float]:
    """Largest RMS-relative error of every output and gradient over all launches that the tables have for these dims.

    It is inf where two runs, or equal sequences of one run, differ or anything is not finite.

    length: tokens of the pieces into which the sequence is cut; 0 for none.
    """
    _enter(device)
    inputs = problem(key_dim, value_dim, dtype, erase, device)
    exact = [None if x is None else x.double().requires_grad_() for x in inputs]
    q, k, v, log_decay, beta, gain, state = exact
    none = torch.zeros_like(gain) if beta is None else beta
    o, final = reference.recurrent_gated_delta(q, k, v, log_decay, none, gain, 0.5, state)
    make = torch.Generator().manual_seed(8)
    do, d_final = (torch.randn(x.shape, generator=make).to(device) for x in (o, final))
    do = do.to(dtype)
    wanted = [x for x in exact if x is not None]
    slopes = iter(torch.autograd.grad([o, final], wanted, [do.double(), d_final.double()]))
    want = [o.detach(), final.detach(), *(None if x is None else next(slopes) for x in exact)]
    names = "o", "final", "dq", "dk", "dv", "dlog_decay", "dbeta", "dgain", "dstate"
    errors = {}
    for copies in _copies(key_dim, value_dim):
        runs = []
        for _ in range(2):
            q, k, v, log_decay, beta, gain, state, d_o, d_last = (
                None if x is None else x.expand(copies, *x.shape[1:]) for x in (*inputs, do, d_final)
            )
            o, final, scalars, N, A, *borders = delta.forward(
                q, k, v, log_decay, beta, gain, state, None, None, 0.5, True, warps, length
            )
            dq, dk, dv, gates, d_state = delta.backward(
                q, k, v, scalars, N, A, state, None, d_o, d_last, 0.5, True, erase, warps, length, *borders
            )
            runs.append([o, final, dq, dk, dv, gates[0], gates[1] if erase else None, gates[2], d_state])
        # Once more with a term to add, which is a launch of its own.
        added, *_ = delta.forward(q, k, v, log_decay, beta, gain, state, None, d_o, 0.5, False, warps, length)
        results = [*zip(names, *runs, want, strict=True), ("o", added, added, want[0] + do)]
        for name, first, second, true in results:
            if true is None:
                continue
            error = ((first[:1].double() - true).square().mean() / true.square().mean()).sqrt()
            same = torch.equal(first, second) and torch.equal(first, first[:1].expand_as(first))
            error = float(error) if same and torch.isfinite(error) else float("inf")
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _copies(key_dim: int, value_dim: int) -> list[int]:
    """How many equal sequences of two heads it takes to get each launch of the scans: few and many have others."""
    tables = scan.SCAN, scan.SCAN_ADD, scan.STORE, scan.REVERSE
    many = scan.AT_ONCE // 2 + 1
    few, wide = ([scan.programs(table, key_dim, value_dim, 2 * n)[1] for table in tables] for n in (1, many))
    return [1] if few == wide else [1, many]


def measure_readout(dim: int, dtype: torch.dtype, device, warps: int | None) -> dict[str, float]:
    """As `measure`, for the zeroth-order readout: two heads that share values, two time scales, all terms.

    With a forgetting of every token and with one number per time scale, for which other launches are compiled.
    """
    cases = {name: _readout_errors(dim, dtype, device, warps, name == " constant") for name in ("", " constant")}
    return {f"{key}{name}": error for name, errors in cases.items() for key, error in errors.items()}


def _readout_errors(dim: int, dtype: torch.dtype, device, warps: int | None, constant: bool) -> dict[str, float]:
    _enter(device)
    make = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    v, write, weights = (normal(1, 200, 1, dim) + 1).to(device, dtype), 2 * normal(1, 200, 4), normal(2, 2)
    write[:, ::7] = -torch.inf
    forget = -torch.nn.functional.softplus(normal(1, 200, 4)) * torch.tensor([0.02, 3.0, 0.1, 1.0])
    initial, start = normal(1, 4, dim), normal(1, 4)
    if constant:
        forget = forget[0, 0].clone()
    norm = reference.chunk_log_norm(write, forget.expand_as(write), start)
    rest = [x.to(device) for x in (write, forget, norm, weights, normal(3, 2), normal(2))]
    given = [normal(1, 200, 2, dim).to(device, dtype), normal(2).to(device), initial.to(device)]
    inputs = [v, *rest, *given]
    exact = [x.double().requires_grad_() for x in inputs]
    o, final = reference.readout(*exact, None, None, None)
    do, d_final = (torch.randn(x.shape, generator=make).to(device) for x in (o, final))
    do = do.to(dtype)
    want = [o.detach(), final.detach(), *torch.autograd.grad([o, final], exact, [do.double(), d_final.double()])]
    runs = []
    for _ in range(2):
        o, final, *kept = zeroth.forward(*inputs, None, None, None, warps)
        dv, d_logs, d_weights, d_add, first, _ = zeroth.backward(
            *inputs[:9], None, None, None, *kept, do, d_final, warps
        )
        d_scales, d_taps, d_sink, d_add_scale, d_forget = d_weights.split([2, 3, 1, 1, 2], 1)
        logs = d_logs[0].mT, d_forget.flatten() if constant else d_logs[2].mT, d_logs[1].mT
        runs.append([o, final, dv, *logs, d_scales, d_taps.T, d_sink[:, 0], d_add, d_add_scale[:, 0], first])
    names = "o", "final", "dv", "dwrite", "dforget", "dnorm", "dscales", "dtaps", "dsink", "dk add", "dadd", "dstate"
    errors = {}
    for name, first, second, true in zip(names, *runs, want, strict=True):
        error = ((first.double() - true).square().mean() / true.square().mean()).sqrt()
        errors[name] = float(error) if torch.equal(first, second) and torch.isfinite(error) else float("inf")
    return errors


def measure_mesa(key_dim: int, value_dim: int, dtype: torch.dtype, device, warps: int | None) -> dict[str, float]:
    """As `measure`, for MesaNet: outputs, states and all gradients against direct solves."""
    _enter(device)
    q, k, v, log_decay, _, gain, Hkv = problem(key_dim, value_dim, dtype, True, device)
    log_decay = 0.1 * log_decay
    make = torch.Generator().manual_seed(10)
    root = torch.randn(1, 2, key_dim, key_dim, generator=make).to(device) * key_dim**-0.5
    # Small for the head that decays slowly: it is preconditioned, the other is not.
    weights = (0.2 + torch.rand(2, key_dim, generator=make)) * torch.tensor([[0.1], [1.0]])
    inputs = [q, k, v, log_decay, gain, weights.to(device), Hkv, root @ root.mT]
    exact = [x.double().requires_grad_() for x in inputs]
    o, last = recurrent_mesa(*exact[:6], 0.5, tuple(exact[6:]))
    do, d_kv, d_kk = (torch.randn(x.shape, generator=make).to(device) for x in (o, *last))
    do, d_kk = do.to(dtype), d_kk + d_kk.mT
    slopes = torch.autograd.grad([o, *last], exact, [x.double() for x in (do, d_kv, d_kk)])
    want = [o.detach(), *(x.detach() for x in last), *slopes[:7], (slopes[7] + slopes[7].mT) / 2]
    names = "o", "final kv", "final kk", "dq", "dk", "dv", "dlog_decay", "dgain", "dridge", "dstate kv", "dstate kk"
    errors = dict.fromkeys(names, 0.0)
    for tol in (ridge.ROUGH, ridge.ROUGH / 10):  # with states in one number, and in two
        runs = []
        for _ in range(2):
            o, kv, kk, _, solution = ridge.forward(*inputs, None, None, 0.5, 400, tol, True, warps)
            y, dk, dv, gates, d_ridge, *first = ridge.backward(
                *inputs[1:], None, solution, do, d_kv, d_kk, 0.5, 400, tol, True, warps
            )
            runs.append([o, kv, kk, y, dk, dv, *gates, d_ridge, *first])
        for name, first, second, true in zip(names, *runs, want, strict=True):
            error = ((first.double() - true).square().mean() / true.square().mean()).sqrt()
            same = torch.equal(first, second) and torch.isfinite(error)
            errors[name] = max(errors[name], float(error) if same else float("inf"))
    return errors


def passes(errors: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every error is within `LIMITS`."""
    outputs, row_gradients, scalar_gradients = LIMITS[dtype]
    limit = {"o": outputs, "final": outputs, "dq": row_gradients, "dk": row_gradients, "dv": row_gradients}
    limit["dstate"] = row_gradients
    return all(error <= limit.get(name.split()[0], scalar_gradients) for name, error in errors.items())


def _remember(key: str, warps: int | None) -> None:
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**known, key: warps}))
        temporary.replace(path)
    except (OSError, ValueError):
        return  # A home that cannot be written to costs a repeated check, nothing else.


def compile_ahead(call: Callable[[], object]) -> None:
    """Compile side by side, for this thread's GPU, all that call() launches; none of it runs.

    The kernels are then where Triton looks for them. Triton 3.4 cannot do so, and nothing happens.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if not hasattr(triton, "AsyncCompileMode"):
        return
    here = threading.get_ident()
    # Processes of one machine compile at the same time.
    count = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with _compiling, ThreadPoolExecutor(count) as threads:
        launch = JITFunction.run

        def run(self, *arguments, grid, warmup, **options):
            only_compile = warmup or threading.get_ident() == here
            return launch(self, *arguments, grid=grid, warmup=only_compile, **options)

        JITFunction.run = run
        try:
            # What does not compile raises where it is launched.
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                call()
        finally:
            JITFunction.run = launch


def _errors(run: Callable, device: torch.device, warps: int | None) -> dict[str, float]:
    """run(device, warps) with its kernels compiled ahead."""
    _enter(device)
    # A head start and no more: with a Triton that will not have it, kernels are compiled one after the other.
    with contextlib.suppress(Exception):
        compile_ahead(lambda: run(torch.device("cpu"), warps))
    return run(device, warps)


def _checked(case: tuple, dtype: torch.dtype, device: torch.device, run: Callable) -> int | None:
    """Warps to use for `case`, from memory, from disk or from errors = run(device, warps)."""
    if device.type != "cuda" or os.environ.get("LINEARIZE_KERNELS_CHECK") == "0":
        return None
    place = *case, device.index
    if place in _warps:
        return _warps[place]
    key = f"{_environment()} | {case}"
    try:
        known = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        known = {}
    if key in known:
        _warps[place] = known[key]
        return known[key]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("kernels cannot be checked inside a CUDA graph capture: run the model once before capturing")
    # Inside an operator autograd is switched off for this thread, so the check runs in another one.
    with ThreadPoolExecutor(1) as thread:
        errors = thread.submit(_errors, run, device, None).result()
        chosen = None
        if not passes(errors, dtype):
            if not passes(thread.submit(_errors, run, device, SAFE_WARPS).result(), dtype):
                raise RuntimeError(
                    f"the kernels give wrong results on this GPU (errors {errors}): use another triton, set "
                    "TRITON_PTXAS_PATH to a ptxas of CUDA 13.3 or later, or LINEARIZE_KERNELS=reference"
                )
            chosen = SAFE_WARPS
            warnings.warn(
                f"fast launches of the kernels are wrong on this GPU and compiler (errors {errors}); slower ones run. "
                "A ptxas of CUDA 13.3 or later in TRITON_PTXAS_PATH may help",
                stacklevel=2,
            )
    _warps[place] = chosen
    _remember(key, chosen)
    return chosen


def warps_for(
    key_dim: int, value_dim: int, dtype: torch.dtype, erase: bool, device: torch.device, pieces: bool = False
) -> int | None:
    """None when the launch tables of the delta rule may be used as they are, 2 when only the safe launches are right.

    pieces: of sequences that are cut, whose launches are others.

    Raises:
        RuntimeError: both are wrong on this machine.
    """
    case, length = (key_dim, value_dim, dtype, erase), CHUNK * pieces
    place = (*case, "pieces") if pieces else case
    return _checked(place, dtype, device, lambda on, warps: measure(*case, on, warps, length))


def readout_warps_for(dim: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """`warps_for` of the zeroth-order readout."""
    return _checked(("readout", dim, dtype), dtype, device, lambda on, warps: measure_readout(dim, dtype, on, warps))


def mesa_warps_for(key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """`warps_for` of MesaNet."""
    case = "mesa", key_dim, value_dim, dtype
    return _checked(case, dtype, device, lambda on, warps: measure_mesa(*case[1:], on, warps))


def measure_step(
    rule: str, tokens: int, key_dim: int, value_dim: int, dtype: torch.dtype, device, warps: int | None
) -> dict[str, float]:
    """As `measure`, for a decode step: outputs and states, in both layouts, into new tensors twice and in place."""
    from .api import torch_centred_step

    _enter(device)
    q, k, v, log_decay, beta, gain, memory = problem(key_dim, value_dim, dtype, True, device)
    q, k, v, log_decay, beta, gain = (x[:, :tokens].contiguous() for x in (q, k, v, log_decay, beta, gain))
    make = torch.Generator().manual_seed(12)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).to(device)

    states = [memory]
    if rule in ("delta", "linear"):
        rows, beta = (q, k, v, log_decay), None if rule == "linear" else beta
        launches = (lambda old, new: decode.step(*rows, beta, gain, 0.5, *old, *new, None, warps),)
        exact = [x.double() for x in (*rows, gain if beta is None else beta, gain)]
        exact[4] = torch.zeros_like(exact[4]) if beta is None else exact[4]
        o, *want = reference.recurrent_gated_delta(*exact, 0.5, memory.double())
    elif rule == "mesa":
        root, ridge_ = normal(1, 2, key_dim, key_dim) * key_dim**-0.5, 0.2 + normal(2, key_dim).abs()
        states, rows = [memory, root @ root.mT], (q, k, v, 0.1 * log_decay, gain, ridge_)
        inverse = torch.zeros_like(states[1])
        # With an inverse to keep, the first run leaves it and the others find it.
        launches = [
            lambda old, new, M=M: decode.mesa_step(*rows, 0.5, *old, *new, M, 32, 1e-5, None, warps)
            for M in (None, inverse)
        ]
        o, want = recurrent_mesa(*(x.double() for x in rows), 0.5, tuple(x.double() for x in states))
    else:
        states += [normal(1, 2, key_dim), normal(1, 2, value_dim), normal(1, 2), normal(1, 6, value_dim), normal(1, 6)]
        balance, read_mean, weights = normal(2), normal(2), normal(2, 3)
        write, exponent, erase = (normal(1, tokens, 2) for _ in range(3))
        gates = write, log_decay, None if rule == "scheduled" else exponent, erase
        gates = *gates, None if rule == "covariance" else balance
        slow = normal(1, tokens, 6), -normal(1, tokens, 6).abs(), weights
        rows = q, k, v, *gates
        launches = (
            lambda old, new: decode.centred_step(*rows, read_mean, None, 0.5, list(old), list(new), *slow, warps),
        )
        exact = [None if x is None else x.double() for x in rows]
        wide = [x.double() for x in states]
        o, want = torch_centred_step(
            *exact, wide, read_mean.double(), 0.5, None, (*(x.double() for x in slow), *wide[5:]), False
        )  # fmt: skip
    # Memories with K dense have launches of their own.
    layouts = [states] if rule == "mesa" else [states, [memory.mT.contiguous().mT, *states[1:]]]
    errors = {}
    for launch, given in itertools.product(launches, layouts):
        runs = []
        for in_place in (False, False, True):
            old = [x.clone() for x in given]
            new = old if in_place else [torch.empty_like(x) for x in old]
            runs.append([launch(old, new), *new])
        for i, (true, *got) in enumerate(zip((o, *want), *runs, strict=True)):
            error = max(float(((x.double() - true).square().mean() / true.square().mean()).sqrt()) for x in got)
            same = rule == "mesa" or torch.equal(got[0], got[1])
            name = f"final {i}" if i else "o"
            errors[name] = max(errors.get(name, 0.0), error if same and math.isfinite(error) else math.inf)
    return errors


def step_warps_for(
    rule: str, tokens: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> int | None:
    """`warps_for` of a decode step; rule: delta, linear, covariance, gated, scheduled or mesa."""
    case = rule, tokens, key_dim, value_dim, dtype
    return _checked(("step", *case), dtype, device, lambda on, warps: measure_step(*case, on, warps))
