"""Correctness, determinism and speed of the kernels on the GPU at hand.

    PYTHONPATH=kernels python kernels/benchmarks/gpu_check.py --out FILE [--skip timing] [--sweep] [--workers 12]
        [--budget-seconds 900] [--only mesa] [--dims 50,100]

Stages come in the order of their importance, and so do the cases in each; what the budget does not reach is named in
FILE. A case that fails or raises is recorded and stops nothing. Correctness cases run in worker processes, which also
fill the compile cache. Timing: medians of CUDA-graph replays with a cold L2,
beside flash-linear-attention where it can be imported. Its backward refuses Hopper with this Triton; for timing the
guard is lifted, and its gradient errors are printed next to its times. `--sweep` times other launch tables. `--only`
and `--dims` run the correctness cases of one operator or of heads of these widths (keys, values), and nothing else.
Results go to FILE after every stage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import torch
from bench import BANDWIDTH, as_graph, in_a_row, timed

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "tests" / "kernels")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU serves dry runs in the interpreter
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMIT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32 on GPU"}


def inputs(
    batch, tokens, heads, groups, dims, dtype, *, erase=True, sequences=None, gates="mixed", keys="plain", seed=0
):
    """q, k, v, log_decay, beta, gain, initial state, add_to on the GPU."""
    make = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device=DEVICE)

    q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True))
    if keys == "correlated":
        k = 0.45 * k + 0.9 * normal(batch, 1, heads // groups[1], dims[0])
    elif keys == "equal":
        k = k[:, :1].expand_as(k)
    k = k / k.norm(dim=-1, keepdim=True) if keys != "plain" else k / math.sqrt(dims[0])
    log_decay = -torch.nn.functional.softplus(normal(batch, tokens, heads))
    if gates == "none":
        log_decay = torch.zeros_like(log_decay)
    elif gates == "strong":
        log_decay = 20 * log_decay
    beta = torch.rand(batch, tokens, heads, generator=make, device=DEVICE)
    gain = torch.rand(batch, tokens, heads, generator=make, device=DEVICE)
    if gates == "mixed":
        beta = 2 * beta * (beta > 0.1)
    state = normal(sequences or batch, heads, *dims)
    add_to = normal(batch, tokens, heads, dims[1])
    tensors = [*(x.to(dtype) for x in (q, k, v)), log_decay, beta if erase else None, gain, state, add_to.to(dtype)]
    return tensors


def run_op(tensors, cu=None):
    """(o, final) through the public API."""
    from linearize_kernels import gated_delta, linear_attn

    q, k, v, log_decay, beta, gain, state, add_to = tensors
    shared = {"initial_state": state, "output_final_state": True, "add_to": add_to, "cu_seqlens": cu, "scale": 0.3}
    if beta is None:
        return linear_attn(q, k, v, log_decay, gain, **shared)
    return gated_delta(q, k, v, log_decay, beta, gain=gain, **shared)


def outputs_and_gradients(tensors, weights, cu=None):
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    o, final = run_op(tensors, cu)
    wanted = [x for x in tensors if x is not None]
    slopes = torch.autograd.grad([o, final], wanted, [w.to(x.dtype) for w, x in zip(weights, (o, final), strict=True)])
    return [o.detach(), final.detach(), *slopes]


NAMES = ("o", "final", "dq", "dk", "dv", "dlog_decay", "dbeta", "dgain", "dstate", "dadd")


def correctness(case: dict) -> dict:
    """Errors of one case, and the names of those beyond their limit."""
    from tolerances import TOLERANCE, error

    if case.get("statistics"):
        return statistics_case(case)
    if case.get("op"):
        return operator_case(case)
    dtype = DTYPES[case["dtype"]]
    cu = None if case.get("bounds") is None else torch.tensor(case["bounds"], device=DEVICE, dtype=torch.int32)
    tensors = inputs(
        case.get("batch", 1), case["tokens"], case["heads"], case.get("groups", (1, 1, 1)), case["dims"], dtype,
        erase=case.get("erase", True), gates=case.get("gates", "mixed"), keys=case.get("keys", "plain"),
        sequences=None if cu is None else cu.numel() - 1,
    )  # fmt: skip
    make = torch.Generator(DEVICE).manual_seed(1)
    gain, state = tensors[5], tensors[6]
    weights = [
        torch.randn(*gain.shape, case["dims"][1], generator=make, device=DEVICE).to(dtype),
        torch.randn(state.shape, generator=make, device=DEVICE),
    ]
    got = outputs_and_gradients(tensors, weights, cu)
    want = outputs_and_gradients([None if x is None else x.double() for x in tensors], weights, cu)
    names = [n for n in NAMES if n != "dbeta" or case.get("erase", True)]
    errors = {name: error(a, b) for name, a, b in zip(names, got, want, strict=True)}
    outputs, rows, scalars = TOLERANCE[LIMIT_NAMES[case["dtype"]]]
    limits = dict.fromkeys(("o", "final"), outputs) | dict.fromkeys(("dlog_decay", "dbeta", "dgain"), scalars)
    small = {name: float((a.double() - b).abs().max()) <= 1e-6 for name, a, b in zip(names, got, want, strict=True)}
    failed = [name for name, e in errors.items() if not (e <= limits.get(name, rows) or small[name])]
    return {**case, "errors": {name: float(f"{e:.2e}") for name, e in errors.items()}, "failed": failed}


def operator_inputs(case: dict) -> dict:
    """Tensors by name for `centred`, `covariance`, `mesa` and `readout` cases."""
    dtype, (K, V), tokens, heads = DTYPES[case["dtype"]], case["dims"], case["tokens"], case["heads"]
    groups, batch = case.get("groups", (1, 1, 1)), case.get("batch", 1)
    count = len(case["bounds"]) - 1 if case.get("bounds") else batch
    make = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device=DEVICE)

    q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, (K, K, V), strict=True))
    gate = [normal(batch, tokens, heads) for _ in range(4)]
    decay = -torch.nn.functional.softplus(gate[1] - 2) * (20 if case.get("gates") == "strong" else 1)
    if case["op"] == "readout":
        scales, slow = 3, (batch, tokens, 3 * heads)
        write = 2 * normal(*slow)
        write[torch.rand(slow, generator=make, device=DEVICE) < 0.1] = -torch.inf
        x = {"v": (v + case.get("shift", 1.0)).to(dtype), "log_write": write, "log_forget": -normal(3 * heads).exp()}
        x |= {"scales": normal(heads, scales), "taps": normal(4, heads), "sink": normal(heads)}
        x |= {"add_scale": normal(heads), "add_to": normal(*gate[0].shape, V).to(dtype)}
        return x | {"mean": normal(count, scales * heads, V), "log_z": normal(count, scales * heads)}
    x = {"q": q.to(dtype), "k": ((k + case.get("shift", 1.0)) / math.sqrt(K)).to(dtype), "v": v.to(dtype)}
    if case["op"] == "mesa":
        x |= {"log_decay": 0.1 * decay, "gain": torch.rand(gate[0].shape, generator=make, device=DEVICE)}
        root = normal(count, heads, K, K) / math.sqrt(K)
        x |= {"ridge": 0.2 + torch.rand(heads, K, generator=make, device=DEVICE)}
        return x | {
            "Hkv": normal(count, heads, K, V),
            "Hkk": root @ root.mT,
            "add_to": normal(*gate[0].shape, V).to(dtype),
        }
    write = 2 * gate[0]
    write[torch.rand(write.shape, generator=make, device=DEVICE) < 0.1] = -torch.inf
    x |= {"log_write": write, "log_forget": decay, "log_exponent": 0.5 * gate[2], "log_erase": gate[3]}
    if case["op"] == "centred":
        x |= {"log_balance": 0.3 * normal(heads)}
    x |= {"read_mean": normal(heads), "memory": normal(count, heads, K, V), "key_mean": normal(count, heads, K)}
    x |= {"value_mean": normal(count, heads, V), "log_z": normal(count, heads)}
    return x | {"add_to": normal(*gate[0].shape, V).to(dtype)}


def run_operator(op: str, x: dict, cu) -> tuple:
    """(o, states...) through the public API."""
    import linearize_kernels as ops

    if op == "readout":
        write, forget, names = x["log_write"], x["log_forget"], ("scales", "taps", "sink", "add_scale", "add_to")
        norm = ops.log_norm(write, forget.expand_as(write), initial_log_z=x["log_z"], cu_seqlens=cu)
        scales, taps, sink, add_scale, add_to = (x[n] for n in names)
        extra = {"taps": taps, "sink": sink, "add_scale": add_scale, "add_to": add_to, "initial_mean": x["mean"]}
        return ops.readout(x["v"], write, forget, norm, scales, cu_seqlens=cu, **extra)
    shared = {"output_final_state": True, "cu_seqlens": cu, "add_to": x["add_to"]}
    if op == "mesa":
        exact = x["q"].dtype == torch.float64
        # The error of a solution is its residual times the condition: float32's limits need a small one.
        tol = 1e-6 if x["q"].dtype == torch.float32 else 1e-4
        solve = {"max_iter": 300, "tol": 1e-12} if exact else {"max_iter": 100, "tol": tol}
        gates = x["log_decay"], x["gain"], x["ridge"]
        o, final, _ = ops.mesa(
            x["q"], x["k"], x["v"], *gates, initial_state=(x["Hkv"], x["Hkk"]), scale=0.7, **solve, **shared
        )
        return o, *final
    state = tuple(x[n] for n in ("memory", "key_mean", "value_mean", "log_z"))
    gates = [x[n] for n in ("log_write", "log_forget", "log_exponent", "log_erase", "log_balance") if n in x]
    call = ops.centred_gated_delta if op == "centred" else ops.centred_linear_attn
    o, final = call(
        x["q"], x["k"], x["v"], *gates, read_mean=x["read_mean"], initial_state=state, scale=0.3, **shared
    )  # fmt: skip
    return o, *final


def operator_case(case: dict) -> dict:
    """Errors of a centred mixer, of MesaNet or of the readout, outputs, states and all gradients, as `correctness`."""
    from tolerances import TOLERANCE, error

    x = operator_inputs(case)
    cu = None if case.get("bounds") is None else torch.tensor(case["bounds"], device=DEVICE, dtype=torch.int32)
    sides = []
    for exact in (False, True):
        leaves = {n: (t.double() if exact else t).detach().requires_grad_() for n, t in x.items()}
        outputs = run_operator(case["op"], leaves, cu)
        make = torch.Generator(DEVICE).manual_seed(1)
        weights = [torch.randn(t.shape, generator=make, device=DEVICE).to(DTYPES[case["dtype"]]) for t in outputs]
        if case["op"] == "mesa":
            weights[2] = weights[2] + weights[2].mT
        total = sum((t.double() * w.double()).sum() for t, w in zip(outputs, weights, strict=True))
        slopes = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        if "Hkk" in slopes:
            slopes["Hkk"] = (slopes["Hkk"] + slopes["Hkk"].mT) / 2
        sides.append([*outputs, *slopes.values()])
    names = ["o", *(f"state {i}" for i in range(len(sides[0]) - 1 - len(x))), *(f"d {n}" for n in x)]
    errors = {name: error(a, b) for name, a, b in zip(names, *sides, strict=True)}
    outputs, rows, scalars = TOLERANCE[LIMIT_NAMES[case["dtype"]]]
    wide = ("d log", "d gain", "d ridge", "d read", "d scales", "d taps", "d sink", "d add_scale")
    limits = {n: scalars if n.startswith(wide) else rows if n.startswith("d ") else outputs for n in names}
    failed = [n for n, e in errors.items() if not e <= limits[n]]
    return {**case, "errors": {n: float(f"{e:.2e}") for n, e in errors.items()}, "failed": failed}


STATISTICS = ("lZ", "kd", "vd", "vbar", "rho2", "kbar final", "vbar final", "dk", "dv", "dlog_write", "dlog_forget")


def statistics_case(case: dict) -> dict:
    """Errors of log_norm and centre, as `correctness`."""
    from linearize_kernels import centre, log_norm
    from tolerances import TOLERANCE, error

    dtype, dims, tokens, heads = DTYPES[case["dtype"]], case["dims"], case["tokens"], case["heads"]
    cu = None if case.get("bounds") is None else torch.tensor(case["bounds"], device=DEVICE, dtype=torch.int32)
    make = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device=DEVICE)

    k, v = ((case.get("shift", 3.0) + normal(2 if cu is None else 1, tokens, heads // 2, d)).to(dtype) for d in dims)
    write = 2 * normal(k.shape[0], tokens, heads)
    write[torch.rand(write.shape, generator=make, device=DEVICE) < 0.2] = -torch.inf
    forget = -torch.nn.functional.softplus(2 * normal(k.shape[0], tokens, heads) - 3)
    sides = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in (k, v, write, forget)]
        lZ = log_norm(*leaves[2:], cu_seqlens=cu)
        kd, vd, vbar, rho2, last = centre(*leaves, lZ, cu_seqlens=cu)
        outputs = [torch.where(lZ > -torch.inf, lZ, 0.0), kd, vd, vbar, rho2, *last]
        make = torch.Generator(DEVICE).manual_seed(1)
        weights = [normal(*x.shape).to(dtype) for x in outputs]
        total = sum((x.double() * w.double()).sum() for x, w in zip(outputs, weights, strict=True))
        sides.append([*outputs, *torch.autograd.grad(total, leaves)])
    errors = {name: error(a, b) for name, a, b in zip(STATISTICS, *sides, strict=True)}
    outputs, rows, scalars = TOLERANCE[LIMIT_NAMES[case["dtype"]]]
    limits = {"dk": rows, "dv": rows, "dlog_write": scalars, "dlog_forget": scalars}
    failed = [name for name, e in errors.items() if not e <= limits.get(name, outputs)]
    return {**case, "errors": {name: float(f"{e:.2e}") for name, e in errors.items()}, "failed": failed}


OTHER_DIMS = 72, 80, 112  # of heads of models, besides powers of two and 96


def operator_cases(quick: bool) -> list[dict]:
    """Centred mixers and MesaNet."""
    grid = []
    for op in ("centred", "mesa", "covariance", "readout"):
        for dims in ((128, 128), (64, 64)):
            grid.append({"op": op, "dtype": "bf16", "dims": dims, "tokens": 500, "heads": 4, "groups": (1, 2, 2)})
    if quick:
        return grid
    packed = [0, 1, 100, 100, 300, 1200]
    for op in ("centred", "mesa", "covariance", "readout"):
        for dtype in ("bf16", "fp16", "fp32"):
            base = {"op": op, "dtype": dtype, "dims": (128, 128), "heads": 2}
            grid.append({**base, "tokens": 1200, "bounds": packed})
            grid += [{**base, "tokens": tokens} for tokens in (1, 63, 64, 65, 1024)]
            grid.append({**base, "tokens": 300, "gates": "strong"})
            grid.append({**base, "tokens": 300, "shift": 20.0} if op != "mesa" else {**base, "tokens": 4096})
        for dims in ((32, 32), (96, 96), (64, 128), (128, 64), (50, 100), (256, 256)):
            grid.append({"op": op, "dtype": "bf16", "dims": dims, "tokens": 300, "heads": 2})
    for dim in OTHER_DIMS:
        grid.append({"op": "centred", "dtype": "bf16", "dims": (dim, dim), "tokens": 300, "heads": 2})
    return grid


def cases(quick: bool = False) -> list[dict]:
    """The correctness grid, the most important first; `quick`: one case for each kernel variant that training uses."""
    if not quick:
        first = cases(quick=True)
        return first + [case for case in all_cases() if case not in first]
    return [*operator_cases(True), *delta_cases(True)]


def operator_name(case: dict) -> str:
    return case.get("op", "statistics" if "statistics" in case else "delta")


def all_cases() -> list[dict]:
    return [*operator_cases(False), *delta_cases(False)]


def delta_cases(quick: bool) -> list[dict]:
    """The delta rule, linear attention and the running statistics alone."""
    grid = []
    for dtype in ("bf16",) if quick else DTYPES:
        for dims in ((64, 64), (128, 128)) if quick else ((64, 64), (128, 128), (32, 256), (96, 50)):
            for shift in (3.0, 20.0):
                grid.append(
                    {"statistics": True, "dtype": dtype, "dims": dims, "tokens": 500, "heads": 4, "shift": shift}
                )
            bounds = [0, 1, 100, 100, 300, 1200]
            grid.append(
                {"statistics": True, "dtype": dtype, "dims": dims, "tokens": 1200, "heads": 2, "bounds": bounds}
            )
    if quick:
        for dims in ((64, 64), (128, 128)):
            grid.append({"dtype": "bf16", "dims": dims, "tokens": 500, "heads": 4, "groups": (1, 2, 2), "batch": 2})
            grid.append({"dtype": "bf16", "dims": dims, "tokens": 500, "heads": 2, "erase": False})
        grid.append({"dtype": "fp32", "dims": (64, 64), "tokens": 300, "heads": 2, "gates": "strong"})
        return grid
    for dtype in DTYPES:
        for dims in ((64, 64), (128, 128)):
            for tokens in (1, 15, 63, 64, 65, 127, 500, 1024):
                grid.append({"dtype": dtype, "dims": dims, "tokens": tokens, "heads": 2})
            grid.append({"dtype": dtype, "dims": dims, "tokens": 2048, "heads": 5, "batch": 2})
            for groups in ((1, 4, 4), (2, 2, 1), (1, 2, 4)):
                grid.append({"dtype": dtype, "dims": dims, "tokens": 300, "heads": 4, "groups": groups, "batch": 2})
            for gates in ("none", "strong"):
                grid.append({"dtype": dtype, "dims": dims, "tokens": 500, "heads": 2, "gates": gates})
            grid.append({"dtype": dtype, "dims": dims, "tokens": 500, "heads": 2, "keys": "correlated"})
            grid.append({"dtype": dtype, "dims": dims, "tokens": 500, "heads": 2, "erase": False})
            for bounds in ([0, 15], [0, 1, 100, 100, 300, 1200, 2048]):
                grid.append({"dtype": dtype, "dims": dims, "tokens": bounds[-1], "heads": 2, "bounds": bounds})
    for dims in ((32, 32), (96, 96), (256, 256), (64, 128), (128, 64), (50, 100)):
        for erase in (True, False):
            grid.append({"dtype": "bf16", "dims": dims, "tokens": 500, "heads": 2, "erase": erase})
    for dim in OTHER_DIMS:
        grid.append({"dtype": "bf16", "dims": (dim, dim), "tokens": 500, "heads": 2})
    return grid


def check_decode() -> dict:
    """Steps against the float64 recurrence, in place and not, in both layouts: worst error by dims and tokens."""
    from linearize_kernels import gated_delta_step, reference
    from tolerances import error

    worst = {}
    for dims in ((64, 64), (128, 128), (256, 256), (96, 64)):
        for width in (1, 3, 8):
            q, k, v, log_decay, beta, gain, state, add_to = inputs(3, width, 4, (1, 2, 2), dims, torch.bfloat16)
            exact = [x.double() for x in (q, k, v, log_decay, beta, gain)]
            want, last = reference.recurrent_gated_delta(*exact, 0.3, state.double(), None, add_to.double())
            rows = q, k, v, log_decay, beta
            for name, in_place, turned in (
                (" in place", True, True), ("", False, True), (" by value", False, False),
                (" by value in place", True, False),
            ):  # fmt: skip
                start = state.mT.contiguous().mT if turned else state.clone()
                o, new = gated_delta_step(
                    *rows, gain=gain, scale=0.3, state=start, add_to=add_to, in_place=in_place
                )  # fmt: skip
                kept = (in_place or torch.equal(start, state)) and new.stride() == start.stride()
                worst[f"{dims} T={width}{name}"] = max(error(o, want), error(new, last)) if kept else math.inf
    return worst


def operator_step(op: str, dims: tuple[int, int], width: int) -> dict:
    """Worst error of one step of a centred mixer or MesaNet, in place, of its replay as a CUDA graph, and out of place.

    Centred steps out of place have three time scales more, whose states are compared as well, and the memory K dense.
    """
    import linearize_kernels as ops
    from tolerances import error

    case = {"op": op, "dtype": "bf16", "dims": dims, "tokens": width, "heads": 4, "groups": (1, 2, 2), "batch": 3}
    x = operator_inputs(case)
    want = run_operator(op, {n: t.double() for n, t in x.items()}, None)
    if op == "mesa":
        call, names, rest = ops.mesa_step, ("Hkv", "Hkk"), ("log_decay", "gain", "ridge")
        # Zeros at first, so that the first call solves directly and the next ones take its inverse.
        extra = {"scale": 0.7, "preconditioner": torch.zeros_like(x["Hkk"]), "max_iter": 32, "tol": 1e-5}
    else:
        call = ops.centred_gated_delta_step if op == "centred" else ops.centred_linear_attn_step
        names = "memory", "key_mean", "value_mean", "log_z"
        rest = "log_write", "log_forget", "log_exponent", "log_erase", "log_balance"
        extra = {"scale": 0.3, "read_mean": x["read_mean"]}
    rows = [x[n] for n in ("q", "k", "v", *rest) if n in x]
    state = tuple(x[n].clone() for n in names)

    def step():
        return call(*rows, state=state, add_to=x["add_to"], **extra)[0]

    def worst(o):
        return max(error(a, b) for a, b in zip((o, *state), want, strict=True))

    results = {"": worst(step())}
    if DEVICE == "cuda":
        kept = {}
        replay, captured = as_graph(lambda: kept.update(o=step()))
        for old, n in zip(state, names, strict=True):
            old.copy_(x[n])
        replay()
        torch.cuda.synchronize()
        results[" replayed"] = worst(kept["o"]) if captured else float("inf")
    start = tuple(x[n].clone() for n in names)
    slow = {}
    if op != "mesa":
        start = start[0].mT.contiguous().mT, *start[1:]
        make = torch.Generator(DEVICE).manual_seed(5)
        shapes = (3, width, 12), (3, width, 12), (4, 3), (3, 12, dims[1]), (3, 12)
        slow = [torch.randn(shape, generator=make, device=DEVICE) for shape in shapes]
        slow[1] = -slow[1].abs()
        lZ = ops.log_norm(*(t.double() for t in slow[:2]), initial_log_z=slow[4].double())
        weights = [t.double() for t in slow[:2]]
        mean, last = ops.running_mean(x["v"].double(), *weights, lZ, initial_mean=slow[3].double())
        o = want[0] + torch.einsum("bthmv,hm->bthv", mean.unflatten(2, (4, 3)), slow[2].double())
        want = (o, *want[1:], last, lZ[:, -1])
        slow = {"time_scales": tuple(slow)}
    o, new = call(*rows, state=start, add_to=x["add_to"], in_place=False, **slow, **extra)
    kept = all(torch.equal(s, x[n]) for s, n in zip(start, names, strict=True))
    errors = [error(a, b) for a, b in zip((o, *new), want, strict=True)]
    return results | {" out of place": max(errors) if kept else float("inf")}


def step_cases() -> list[dict]:
    """The one-launch steps over operators, dims and numbers of tokens."""
    return [
        {"op": op, "dims": dims, "width": width}
        for dims in ((128, 128), (64, 64), (96, 64), (32, 50))
        for op in ("centred", "mesa", "covariance")
        for width in (1, 3, 8)
    ]


def step_errors(case: dict) -> dict:
    """Worst errors of one of `step_cases`, named."""
    name = f"{case['op']} {case['dims']} T={case['width']}"
    return {name + kind: value for kind, value in operator_step(**case).items()}


def determinism(runs: int) -> bool:
    """Whether `runs` forward and backward passes are bitwise equal."""
    tensors = inputs(2, 1000, 4, (1, 2, 2), (128, 128), torch.bfloat16)
    weights = [torch.randn(2, 1000, 4, 128, device=DEVICE), torch.randn(2, 4, 128, 128, device=DEVICE)]
    first = outputs_and_gradients(tensors, weights)
    for _ in range(runs - 1):
        again = outputs_and_gradients(tensors, weights)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return False
    return True


# ---- many cases at once ---------------------------------------------------------------------------------------------


def all_steps(workers: int, seconds: float) -> dict:
    """Worst errors of the one-launch steps; infinite for those that raised or were not reached."""
    missed, found = step_cases(), {}
    for case, good, answer in side_by_side(step_errors, list(missed), workers, seconds):
        missed.remove(case)
        found |= answer if good else {str(case): math.inf}
        if not good:
            print(case, answer, flush=True)
    return found | {f"not reached {case}": math.inf for case in missed}


def serve(function, pipe) -> None:
    """Answer jobs until one raises: a GPU that faulted is of no use to this process any more."""
    while True:
        try:
            pipe.send((True, function(pipe.recv())))
        except EOFError:
            return
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"[:400]))
            return


def compiled(case: dict) -> str:
    """What a correctness case compiles, nearly: cases that differ in sizes and contents share it."""
    sizes = ("tokens", "heads", "groups", "batch", "gates", "keys", "shift")
    return str({name: value for name, value in case.items() if name not in sizes} | {"bounds": "bounds" in case})


def side_by_side(
    function, jobs: list, workers: int, seconds: float, first: Callable[[dict], str] = id
) -> Iterator[tuple[dict, bool, object]]:
    """(job, whether it was answered, answer or error) of as many jobs as `seconds` allow, in processes of their own.

    Of jobs with the same `first`, one runs alone at first: the others then find on disk what it compiled.
    """
    context = multiprocessing.get_context("spawn")
    until, waiting, busy = time.time() + seconds, deque(jobs), {}
    known: set = set()

    def next_job():
        """The next job that waits for no other, or None."""
        alone = {first(job) for _, job in busy.values()} - known
        job = next((job for job in waiting if first(job) not in alone), None)
        if job is not None:
            waiting.remove(job)
        return job

    def start():
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(function, there), daemon=True)
        process.start()
        there.close()
        return here, process

    idle = [start() for _ in range(min(workers, len(jobs)))]
    try:
        while waiting or busy:
            while idle and (job := next_job()) is not None:
                worker = idle.pop()
                worker[0].send(job)
                busy[worker[0]] = worker, job
            ready = wait(list(busy), timeout=max(0.0, until - time.time()))
            if not ready:
                return
            for pipe in ready:
                worker, job = busy.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    good, answer = False, "the process died"
                known.add(first(job))
                if not good:
                    worker[1].terminate()
                idle.append(worker if good else start())
                yield job, good, answer
    finally:
        for _, process in [*idle, *(worker for worker, _ in busy.values())]:
            process.terminate()  # one of them may hang


def first_use() -> dict:
    """Seconds until a new user's first gradient of a GDN layer's operator, checks and compilation included, and again.

    In processes of their own with an empty cache, at the head size of most models.
    """
    code = (
        "import time; began = time.time(); import torch, gpu_check\n"
        "case = dict(op='centred', dtype='bf16', dims=(128, 128), tokens=500, heads=4, groups=(1, 2, 2))\n"
        "x = {n: t.requires_grad_() for n, t in gpu_check.operator_inputs(case).items()}\n"
        "gpu_check.run_operator('centred', x, None)[0].sum().backward(); torch.cuda.synchronize()\n"
        "print(time.time() - began)"
    )
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        own = {"TRITON_CACHE_DIR": folder, "XDG_CACHE_HOME": folder, "PYTHONPATH": path}
        own |= {"LINEARIZE_KERNELS_CHECK": "1", "LINEARIZE_KERNELS": "auto"}
        for name in ("first", "again"):
            command = [sys.executable, "-c", code]
            run = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(run.stderr.strip().splitlines()[-1])
            seconds[name] = round(float(run.stdout), 1)
    return seconds


# ---- timing ---------------------------------------------------------------------------------------------------------


def fla_op():
    """flash-linear-attention's chunked gated delta rule with its Hopper guard lifted, or None."""
    try:
        import fla.ops.common.chunk_o as guarded
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # an incompatible install must not stop our own numbers
        print("flash-linear-attention is not usable:", str(error).splitlines()[0], flush=True)
        return None
    guarded.IS_NVIDIA_HOPPER = False
    return chunk_gated_delta_rule


def fla_errors(op) -> dict:
    """Errors of the baseline on our inputs, against the same float64 form."""
    from tolerances import error

    q, k, v, log_decay, beta, _, state, _ = inputs(2, 500, 16, (1, 1, 1), (128, 128), torch.bfloat16, gates="plain")
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]
    weight = torch.randn(2, 500, 16, 128, device="cuda")
    o, _ = op(*leaves, scale=0.3, initial_state=state, output_final_state=True)
    got = [o, *torch.autograd.grad(o, leaves, weight.to(o.dtype))]
    from linearize_kernels import gated_delta

    ours = [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]
    o, _ = gated_delta(*ours, scale=0.3, initial_state=state)
    mine = [o, *torch.autograd.grad(o, ours, weight.to(o.dtype))]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, log_decay, beta)]
    o, _ = gated_delta(*exact, scale=0.3, initial_state=state.double())
    want = [o, *torch.autograd.grad(o, exact, weight.to(torch.bfloat16).double())]
    names = ("o", "dq", "dk", "dv", "dlog_decay", "dbeta")
    return {
        name: [float(f"{error(a, c):.2e}"), float(f"{error(b, c):.2e}")]
        for name, a, b, c in zip(names, mine, got, want, strict=True)
    }


def timing(shapes, baseline) -> list[dict]:
    from linearize_kernels import gated_delta

    table = []
    for batch, tokens, heads, dim in shapes:
        q, k, v, log_decay, beta, *_ = inputs(
            batch, tokens, heads, (1, 1, 1), (dim, dim), torch.bfloat16, gates="plain"
        )
        k = torch.nn.functional.normalize(k, dim=-1)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]
        do = torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        calls, captured = {}, {}

        def forward(op, leaves=leaves):
            with torch.no_grad():
                return op(*leaves)

        def both(op, leaves=leaves, do=do):
            return torch.autograd.grad(op(*leaves)[0], leaves, do)

        for name, op in (("ours", gated_delta), ("fla", baseline)):
            if op is None:
                continue
            for kind, run in (("forward", forward), ("both", both)):
                try:
                    calls[f"{name} {kind}"], captured[f"{name} {kind}"] = as_graph(lambda run=run, op=op: run(op))
                except Exception as error:  # a baseline that cannot run is a row of the table, not the end of it
                    print(f"{name} {kind} {batch}x{tokens}x{heads}x{dim}: {str(error).splitlines()[0]}", flush=True)
        times = timed(calls, 20, cold=True)
        per = batch * tokens * heads / 2**20
        row = {"batch": batch, "tokens": tokens, "heads": heads, "dim": dim, "ms": times, "graph": captured}
        row["ms per 2^20"] = {name: round(x[0] / per, 3) for name, x in times.items()}
        print(json.dumps(row), flush=True)
        table.append(row)
        del calls
        torch.cuda.empty_cache()
    return table


def stage_times(batch, tokens, heads, dim) -> dict:
    """Milliseconds of each kernel of one forward and backward pass."""
    from linearize_kernels import grads, prep, scan
    from linearize_kernels.common import Chunks

    q, k, v, log_decay, beta, gain, *_ = inputs(batch, tokens, heads, (1, 1, 1), (dim, dim), torch.bfloat16)
    do = torch.randn_like(v)
    chunks = Chunks(batch, tokens, None)
    scalars, N, A = prep.prepare(q, k, log_decay, beta, gain, 0.1, chunks)
    states, Y = scan.scan(q, k, v, scalars, N, A, chunks, 0.1, None, recompute=True)
    d_states, F, _ = scan.reverse_scan(q, k, do, scalars, N, A, chunks, 0.1, None, d_initial=False)
    calls = {
        "prep": lambda: prep.prepare(q, k, log_decay, beta, gain, 0.1, chunks),
        "scan": lambda: scan.scan(q, k, v, scalars, N, A, chunks, 0.1, None),
        "scan store": lambda: scan.scan(q, k, v, scalars, N, A, chunks, 0.1, None, recompute=True),
        "reverse": lambda: scan.reverse_scan(q, k, do, scalars, N, A, chunks, 0.1, None, d_initial=False),
        "grads": lambda: grads.gradients(q, k, v, do, scalars, A, states, d_states, Y, F, chunks, 0.1, erase=True),
    }
    return {name: x[0] for name, x in timed({n: as_graph(c)[0] for n, c in calls.items()}, 10, cold=True).items()}


def mesa_times(batch, tokens, heads, dim) -> dict:
    """Milliseconds of MesaNet: states and preconditioners alone, and all of it by the number of iterations."""
    from linearize_kernels import mesa, ridge

    q, k, v, log_decay, _, gain, *_ = inputs(batch, tokens, heads, (1, 1, 1), (dim, dim), torch.bfloat16, gates="plain")
    log_decay = 0.01 * log_decay
    weights = torch.full((heads, dim), 0.5, device=DEVICE)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, gain, weights)]
    slope = torch.randn_like(v)

    def states():
        return ridge.Prepared(k, v, log_decay, gain, weights, None, None, None, False, False, None)

    def forward(steps):
        with torch.no_grad():
            return mesa(*leaves, max_iter=steps, tol=0.0)

    calls = {"states": states} | {f"forward {n} steps": lambda n=n: forward(n) for n in (1, 7, 30)}
    calls["both 7 steps"] = lambda: torch.autograd.grad(mesa(*leaves, max_iter=7, tol=0.0)[0], leaves, slope)
    times = {name: x[0] for name, x in timed({n: as_graph(c)[0] for n, c in calls.items()}, 10, cold=True).items()}
    residual = mesa(*leaves, max_iter=30, tol=1e-3)[2]
    return times | {"worst residual of 30 steps": float(residual.max())}


def prelude_times(batch, tokens, heads, dim) -> dict:
    """Milliseconds of the statistics of a centred mixer, forwards and backwards, keys and values with G = 1."""
    from linearize_kernels import centre, log_norm

    k, v = (torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    write = torch.randn(batch, tokens, heads, device="cuda")
    leaves = [x.requires_grad_() for x in (k, v, write, -torch.rand_like(write))]
    slopes = [torch.randn_like(v) for _ in range(3)] + [torch.randn_like(write)]

    def forward():
        return centre(*leaves, log_norm(*leaves[2:]))[:4]

    def alone():
        with torch.no_grad():
            return log_norm(*leaves[2:])

    def plain():
        with torch.no_grad():
            return forward()

    calls = {"log norm": alone, "forward": plain, "both": lambda: torch.autograd.grad(forward(), leaves, slopes)}
    return {name: x[0] for name, x in timed({n: as_graph(c)[0] for n, c in calls.items()}, 10, cold=True).items()}


SWEEP = {
    "PREP": [(4, 1), (2, 1)],
    "SCAN": [(64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3)],
    "STORE": [(64, 4, 3), (64, 4, 2), (32, 4, 3)],
    "REVERSE": [(64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3)],
    "GRADS": [(64, 64, 4, 1), (64, 32, 4, 1), (128, 64, 8, 1)],
}
STAGES = {"PREP": "prep", "SCAN": "scan", "STORE": "scan store", "REVERSE": "reverse", "GRADS": "grads"}


@contextlib.contextmanager
def table_entry(name: str, dim: int, entry: tuple):
    from linearize_kernels import grads, prep, scan

    module = {"PREP": prep, "SCAN": scan, "STORE": scan, "REVERSE": scan, "GRADS": grads}[name]
    table = getattr(module, name)
    before = table[dim]
    table[dim] = entry
    try:
        yield
    finally:
        table[dim] = before


def sweep_one(job: tuple) -> dict:
    """Times of one launch-table entry at one shape."""
    name, dim, entry, shape = job
    if name == "GRADS" and entry[0] > dim:
        return {}
    with table_entry(name, dim, entry):
        try:
            times = stage_times(*shape, dim)
        except Exception as error:  # an entry that does not launch is simply no candidate
            return {"table": name, "dim": dim, "entry": entry, "error": str(error).splitlines()[0][:100]}
    return {"table": name, "dim": dim, "entry": entry, "shape": shape, "ms": times[STAGES[name]]}


def decode_times() -> list[dict]:
    """Decode steps at 128 dims, one after the other as the layers of a model are: microseconds of one, and the ratio to

    reading and writing the states once at 4.3 TB/s.
    """
    from linearize_kernels import centred_gated_delta_step, gated_delta_step, mesa_step

    dim, table = 128, []
    for heads in (16, 32):
        for batch in (1, 8, 32, 64, 128, 256):
            q, k, v, log_decay, beta, _, state, _ = inputs(batch, 1, heads, (1, 1, 1), (dim, dim), torch.bfloat16)
            layers = max(2, min(128, 300 * 2**20 // (4 * state.numel())))
            states = [torch.zeros(state.mT.shape, device=DEVICE).mT for _ in range(layers)]
            vector, norm = torch.zeros(batch, heads, dim, device=DEVICE), torch.zeros(batch, heads, device=DEVICE)
            gate, per_head = torch.zeros_like(beta), torch.ones(heads, device=DEVICE)
            slow_gate = torch.zeros(batch, 1, 3 * heads, device=DEVICE)
            slow = slow_gate, slow_gate, torch.ones(heads, 3, device=DEVICE), vector.repeat(1, 3, 1), slow_gate[:, 0]
            ridge = torch.full((heads, dim), 0.5, device=DEVICE)

            def delta(s, a=(q, k, v, log_decay, beta)):
                return gated_delta_step(*a, state=s)

            def centred(s, extra=None, a=(q, k, v, gate, gate, gate, gate, per_head), rest=(vector, vector, norm)):
                return centred_gated_delta_step(
                    *a, state=(s, *rest), read_mean=a[-1], time_scales=extra, in_place=False
                )  # fmt: skip

            def ridge_step(s, H, M=None, a=(q, k, v, 0.01 * log_decay, 0.01 * beta, ridge)):
                return mesa_step(*a, state=(s, H), preconditioner=M)

            calls = {
                "delta": [lambda s=s: delta(s) for s in states],
                "centred": [lambda s=s: centred(s) for s in states],
                "centred, 3 time scales": [lambda s=s, slow=slow: centred(s, slow) for s in states],
            }
            if batch == 32:
                few = [[torch.zeros_like(state) for _ in range(3)] for _ in range(max(2, layers // 3))]
                for _, H, _ in few:
                    H += torch.eye(dim, device=DEVICE)
                calls["mesa"] = [lambda s=s, H=H, M=M: ridge_step(s, H, M) for s, H, M in few]
                calls["mesa, solving directly"] = [lambda s=s, H=H: ridge_step(s, H) for s, H, _ in few]
            for name, steps in calls.items():
                us = in_a_row(steps)
                floor = batch * heads * 2 * 4 * dim * (dim + dim * name.startswith("mesa")) / BANDWIDTH * 1e6
                row = {"step": name, "batch": batch, "heads": heads, "us": round(us, 2)}
                table.append(row | {"over floor": round(us / floor, 2)})
                print(json.dumps(table[-1]), flush=True)
    return table


STAGE_NAMES = "first use", "correctness", "determinism", "timing", "fla", "decode"


def widths(text: str) -> tuple[int, int]:
    """(keys, values) of a head, as given to --dims."""
    keys, values = text.split(",")
    return int(keys), int(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=STAGE_NAMES,
    )
    parser.add_argument(
        "--dims", action="append", type=widths, default=[], help="of keys and values, as 50,100: only their cases"
    )
    parser.add_argument("--only", default="", help="operators whose name contains this text: only their cases")
    parser.add_argument("--sweep", action="store_true", help="time other launch tables as well")
    parser.add_argument("--quick", action="store_true", help="a small correctness grid, two shapes timed")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--budget-seconds", type=float, default=900.0, help="two thirds of it at most for correctness")
    arguments = parser.parse_args()
    grid = [case for case in cases(arguments.quick) if arguments.only in operator_name(case)]
    if not grid:
        parser.error(f"--only: no case is of an operator named {arguments.only}")
    if arguments.dims:
        grid = [case for case in grid if case["dims"] in arguments.dims]
        if missing := [dims for dims in arguments.dims if all(case["dims"] != dims for case in grid)]:
            parser.error(f"--dims: no case has heads of {missing[0]} dims")
    if arguments.dims or arguments.only:
        arguments.sweep, arguments.skip = False, [name for name in STAGE_NAMES if name != "correctness"]
    import triton

    report = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None, "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    started = time.time()

    def note(key, value):
        report[key] = value
        report["seconds"] = round(time.time() - started, 1)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    def left() -> float:
        return arguments.budget_seconds - (time.time() - started)

    def stage(name: str, run, needed: float = 0.0) -> None:
        """Record run() under `name`; what it raises, or that there is no time for it, is recorded as well."""
        if left() < needed:
            report.setdefault("not reached", []).append(name)
            return
        try:
            note(name, run())
            print(name, json.dumps(report[name])[:600], flush=True)
        except Exception as error:  # the later stages must run
            note(name, {"error": (str(error).splitlines() or [type(error).__name__])[0][:300]})
            print("FAIL", name, report[name], flush=True)

    note("argv", sys.argv[1:])
    # The cases below are the check; each process would make the first-use check of every operator again.
    os.environ.setdefault("LINEARIZE_KERNELS_CHECK", "0")
    failures = 0
    if "first use" not in arguments.skip and DEVICE == "cuda":
        stage("first use", first_use)
    if "correctness" not in arguments.skip:
        results, missed = [], grid
        # A third of the time is kept for what comes after.
        seconds = max(1.0, left() * 2 / 3)
        for case, good, answer in side_by_side(correctness, list(missed), arguments.workers, seconds, compiled):
            missed.remove(case)
            results.append(answer if good else {**case, "failed": ["raised"], "error": answer})
            if results[-1]["failed"]:
                failures += 1
                print("FAIL", json.dumps(results[-1]), flush=True)
        print(
            f"correctness: {len(results)} cases, {failures} failed, {len(missed)} not reached, "
            f"{time.time() - started:.0f} s",
            flush=True,
        )
        note("correctness", results)
        note("correctness not reached", missed)
    if "decode" not in arguments.skip:
        stage("operator step errors", lambda: all_steps(arguments.workers, left() / 2))
        stage("decode errors", check_decode)
        for name, limit in (("operator step errors", 1.2e-2), ("decode errors", 6e-3)):
            worst = report.get(name, {})
            bad = [n for n, e in worst.items() if isinstance(e, str) or not e <= limit]
            failures += len(bad)
            print(name, "beyond the limit:", bad, flush=True)
    if "determinism" not in arguments.skip:
        stage("deterministic over 100 runs", lambda: determinism(100))
    if "timing" not in arguments.skip:
        for dim in (128, 64):
            stage(f"kernels 8x4096x16x{dim} ms", lambda dim=dim: stage_times(8, 4096, 16, dim), 20)
            stage(f"statistics 8x4096x16x{dim} ms", lambda dim=dim: prelude_times(8, 4096, 16, dim), 20)
            stage(f"mesa 8x4096x16x{dim} ms", lambda dim=dim: mesa_times(8, 4096, 16, dim), 20)
    if arguments.sweep:
        jobs = [(name, dim, entry) for dim in (128, 64) for name, entries in SWEEP.items() for entry in entries]
        # Compiles in parallel.
        list(side_by_side(sweep_one, [(*job, (1, 128, 16)) for job in jobs], arguments.workers, left()))
        rows = []
        for job in jobs:
            if left() < 60:
                report.setdefault("not reached", []).append("sweep")
                break
            rows.append(sweep_one((*job, (8, 4096, 16))))
            if rows[-1]:
                print(json.dumps(rows[-1]), flush=True)
            note("sweep", rows)
    if "decode" not in arguments.skip and "timing" not in arguments.skip:
        stage("decode", decode_times, 20)
    if "timing" not in arguments.skip:
        baseline = None if "fla" in arguments.skip else fla_op()
        if baseline is not None:
            stage("errors beside fla", lambda: fla_errors(baseline), 20)
        shapes = [
            (1, 32768, 32, 128),
            (8, 4096, 16, 128),
            (1, 8192, 16, 128),
            (1, 8192, 64, 128),
            (8, 4096, 16, 64),
            (1, 2048, 16, 128),
        ]
        stage("timing", lambda: timing(shapes[1:5:3] if arguments.quick else shapes, baseline), 60)
    print(f"done in {time.time() - started:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
