"""Compile every kernel of the launch tables for sm_90 without a GPU, and refuse what would be slow or unsafe there.

    python kernels/benchmarks/compile_gate.py [--quick] [--only scan] [--json FILE] [--accept]

Per entry: registers, stack (a spill fails, in float32 one of more than 3 KB), shared memory (at most 227 KB), how many
programs a multiprocessor can hold, and WGMMA instructions that take their left operand from registers (any fails: ptxas
below 13.3 may reuse those too early; in float32 any WGMMA fails, since it would round). Registers may exceed those of
registers.json by 8; `--accept` stores new ones. Needs triton and its ptxas; 1 to 10 s per entry and core. `--quick`:
bfloat16 with 64 and 128 dims.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SHARED = 232448
# Bytes: one step of MesaNet has two matrices of 128x128 in flight, and where it solves directly some vectors spill.
SPILLS = {"step mesa bf16 K=128": 96, "step mesa fp16 K=128": 96}
# Of float32, whose operands do not fit the registers. A launch reserves that for each thread that a GPU can hold: .8 GB
# on an H200.
SPILLS_FULL = 3072
WIDE = "bf16 K=96", "bf16 K=128", "fp16 K=96", "fp16 K=128"
# What a scan with everything asked for spills are addresses, of which it reads three again in each chunk. Two programs
# on a multiprocessor are worth more than that.
SCANS = [f"{part} scan{kind}" for part in ("whole", "cut") for kind in ("", " add")]
SCANS += ["scan out", "reverse", "whole reverse", "cut reverse", "cut reverse alone"]
SPILLS |= {f"{scan} {x}": 80 for scan in SCANS for x in WIDE}
REGISTERS = Path(__file__).with_name("registers.json")  # of every entry that was accepted; 8 more may be used
SHARED_PER_SM = 233472  # of which each program also takes 1 KB for the system
POINTER = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


def describe(
    fn, dtype: str, constants: dict, fp32: tuple[str, ...], absent: tuple[str, ...], ones: tuple[str, ...] = ()
):
    """(signature, constexprs, attributes) of a launch: tensors of `dtype` unless named in `fp32` or `absent`.

    Arguments are told apart by the naming rule of the kernels: pointers are those before `T` or `H`; `*_batch`,
    `*_token` and `*_head` are strides, divisible by 16 for rows and 1 for the heads named in `ones`.
    """
    signature, constexprs, attributes = {}, {}, {}
    pointer = True
    for i, name in enumerate(fn.arg_names):
        pointer = pointer and name not in ("T", "H")
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name in absent:
            signature[name], constexprs[(i,)] = "constexpr", None
        elif name in ones:
            signature[name], constexprs[(i,)] = "constexpr", 1
        elif pointer:
            tables = ("table", "offsets", "cu_seqlens", "skips", "bases")
            # MesaNet keeps states and inverses in float16 for bfloat16 inputs too.
            kind = "fp16" if dtype == "bf16" and name in ("high", "low", "M") else dtype
            signature[name] = "*i32" if name in tables else "*fp32" if name in fp32 else POINTER[kind]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "tol"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.startswith(("q_", "k_", "v_", "o_", "a_", "i_", "x_")) and not name.endswith("_group"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attributes


@dataclass(frozen=True)
class Launch:
    """What a launcher hands to a kernel: tensors, numbers, None for what is absent, and options."""

    arguments: tuple
    options: dict


def recorded(call: Callable[[], object]) -> tuple:
    """(kernel, launch) of the one launch that call() makes on CPU tensors; nothing runs."""
    (one,) = all_recorded(call)
    return one


def all_recorded(call: Callable[[], object]) -> list[tuple]:
    """(kernel, launch) of every launch that call() makes on CPU tensors; nothing runs.

    Triton specialises a kernel for arguments that are None, 1 or divisible by 16, so what compiles from a description
    by hand may not compile as it is launched.
    """
    from triton.runtime.jit import JITFunction

    found, before = [], JITFunction.run
    JITFunction.run = lambda self, *arguments, grid, warmup, **options: found.append((self, Launch(arguments, options)))
    try:
        call()
    finally:
        JITFunction.run = before
    return found


def specialised(fn, launch: Launch, target) -> tuple:
    """(source, options) of a recorded launch, as Triton's own launcher makes them."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialisation, _ = bind(*launch.arguments, **launch.options)
    options, *rest = fn._pack_args(backend, launch.options, bound, specialisation, None)
    return ASTSource(fn, *rest), options.__dict__


def entries(quick: bool) -> Iterator[tuple]:
    """(name, kernel, dtype, how it is launched...) of every launch to check.

    How: constants, fp32 pointers, absent, ones, warps, stages; or one recorded `Launch`.
    """
    import torch
    import triton
    import triton.language as tl
    from linearize_kernels import grads, prep, scan
    from linearize_kernels.api import WIDEST
    from linearize_kernels.common import Chunks

    row_types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    packed = ("table", "offsets", "cu_seqlens")
    all_shapes = (
        [(64, 64), (128, 128)]
        if quick
        else [(32, 32), (64, 64), (128, 128), (256, 256), (96, 96), (64, 128), (128, 64)]
    )
    dtypes = ["bf16"] if quick else ["bf16", "fp16", "fp32"]
    yield from scalar_entries()
    for dtype in dtypes:
        shapes = [shape for shape in all_shapes if max(shape) <= WIDEST[row_types[dtype]]]
        yield from step_entries(dtype, shapes)
        for K, V in shapes:
            BK = max(32, triton.next_power_of_2(K))
            for erase in (True,) if quick else (True, False):
                label = f"{dtype} K={K} V={V}{'' if erase else ' linear'}"
                shared = {"C": 64, "ERASE": erase, "VARLEN": False, "ACC": tl.float32}
                full = dtype == "fp32"
                x, gate = torch.zeros(1, 256, 4, K, dtype=row_types[dtype]), torch.zeros(1, 256, 4)
                rest = gate, gate if erase else None, gate, 1.0, Chunks(1, 256, None)
                fn, launch = recorded(functools.partial(prep.prepare, x, x, *rest))
                yield f"prep {label}", fn, dtype, launch
                for mode in ("out", "store"):
                    out = mode == "out"
                    tile, warps, stages = scan.FULL if full else (scan.SCAN_ADD if out else scan.STORE)[BK]
                    BV = min(tile, triton.next_power_of_2(V))
                    constants = {**shared, "K": K, "V": V, "BK": BK, "BV": BV, "ADD": out, "INITIAL": True}
                    constants["LATE"] = out and (full or BK in scan.LATE_SCAN)
                    constants |= {"OUT": out, "STORE": not out, "FINAL": out}
                    floats = ("scalars", "initial", "final")
                    absent = packed if out else (*packed, "add_to")
                    yield (
                        f"scan {mode} {label}",
                        scan.scan_kernel,
                        dtype,
                        constants,
                        floats,
                        absent,
                        ("i_value",),
                        warps,
                        stages,
                    )
                tile, warps, stages = scan.FULL if full else scan.REVERSE[BK]
                BV = min(tile, triton.next_power_of_2(V))
                constants = {**shared, "K": K, "V": V, "BK": BK, "BV": BV, "D_FINAL": True, "D_INITIAL": True}
                constants |= {"STORE": True, "LATE": full or BK in scan.LATE_REVERSE}
                floats = ("scalars", "d_final", "d_initial")
                yield f"reverse {label}", scan.reverse_scan_kernel, dtype, constants, floats, packed, (), warps, stages
                _, KT, BV, warps, stages = grads.grads_launch(row_types[dtype], K, V, erase, None)
                constants = {**shared, "K": K, "V": V, "BK": BK, "KT": KT, "BV": BV}
                floats = ("scalars", "d_scalars")
                yield f"grads {label}", grads.grads_kernel, dtype, constants, floats, packed, (), warps, stages
        yield from split_entries(dtype, shapes)
        yield from mesa_entries(dtype, shapes)
        yield from divergence_entries(dtype)
        yield from mean_entries(dtype, shapes)
        yield from uneven_mean_entries(dtype)
        yield from readout_entries(dtype, shapes)


def split_entries(dtype: str, shapes: list[tuple[int, int]]) -> Iterator[tuple]:
    """Scans as they are launched, of few sequences and heads or many, whole or cut, and what pieces need besides."""
    import torch
    import triton
    from linearize_kernels import scan, split
    from linearize_kernels.common import Chunks

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tokens, heads, length = 256, 4, 128
    made = []
    chunks = Chunks(1, tokens, None)
    tables = recorded(lambda: made.append(split.Pieces(chunks, 1, length, torch.device("cpu"))))
    yield f"pieces {dtype}", tables[0], dtype, tables[1]
    pieces = made[0]
    scalars, N = torch.zeros(4, heads, 7, 64), torch.zeros(4, heads, 64, 64, dtype=row_type)
    for K, V in shapes:
        q, k = (torch.zeros(1, tokens, heads // g, K, dtype=row_type) for g in (1, 2))
        v, do = (torch.zeros(1, tokens, heads // g, V, dtype=row_type) for g in (2, 1))
        state, maps = torch.zeros(pieces.count, heads, K, V), torch.zeros(pieces.count, heads, K, K)
        rest = scalars, N, N, pieces.chunked(), 1.0, state
        whole = scalars, N, N, chunks, 1.0, None
        alone = {"final": True, "read": False}
        calls = {
            "cut scan": functools.partial(scan.scan, q, k, v, *rest),
            "cut scan alone": functools.partial(scan.scan, q, k, v, *rest, **alone),
            "cut scan store": functools.partial(scan.scan, q, k, v, *rest, recompute=True),
            "cut reverse": functools.partial(scan.reverse_scan, q, k, do, *rest, d_initial=False),
            "cut reverse alone": functools.partial(scan.reverse_scan, q, k, do, *rest, d_initial=True, store=False),
            "whole scan": functools.partial(scan.scan, q, k, v, *whole),
            "whole scan add": functools.partial(scan.scan, q, k, v, *whole, add_to=do),
            "whole scan store": functools.partial(scan.scan, q, k, v, *whole, recompute=True),
            "whole reverse": functools.partial(scan.reverse_scan, q, k, do, *whole, d_initial=False),
            "cut borders": functools.partial(split.fill_borders, state, state, maps, scalars, pieces, reverse=False),
            "cut borders reverse": functools.partial(
                split.fill_borders, state, state, maps, scalars, pieces, reverse=True
            ),
        }
        narrow = dtype != "fp32" and max(32, triton.next_power_of_2(K)) in scan.NARROW
        for name, call in calls.items():
            for few in (False, True) if narrow and "borders" not in name else (False,):
                fn, launch = launched(call, few)
                yield f"{'narrow ' * few}{name} {dtype} K={K} V={V}", fn, dtype, launch


def launched(call: Callable[[], object], few: bool) -> tuple:
    """`recorded`, of a scan of few sequences and heads or of many."""
    from linearize_kernels import scan

    before, scan.AT_ONCE = scan.AT_ONCE, sys.maxsize if few else 0
    try:
        return recorded(call)
    finally:
        scan.AT_ONCE = before


def mesa_entries(dtype: str, shapes: list[tuple[int, int]]) -> Iterator[tuple]:
    """What MesaNet launches, with Hkk in one number and in two: forwards with a state and a term to add, backwards."""
    import torch
    from linearize_kernels import ridge

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for K, V in shapes:
        if K > ridge.MAX_KEY_DIM or dtype == "fp32":
            continue
        k, v = (torch.zeros(1, 256, 4, size, dtype=row_type) for size in (K, V))
        gate, weights = torch.zeros(1, 256, 4), torch.ones(4, K)
        states = torch.zeros(1, 4, K, V), torch.zeros(1, 4, K, K)

        def backward(exact, k=k, v=v, gate=gate, weights=weights, states=states):
            prepared = ridge.Prepared(k, v, gate, gate, weights, None, None, None, False, exact, None)
            target, *slopes = prepared.target(v, 1.0)
            y = prepared.solve(target, 20, 1e-4)[0]
            prepared.gradients(y, y, *slopes, *states, True, True)

        for mode, tol in (("", ridge.ROUGH), (" exact", ridge.ROUGH / 10)):
            call = functools.partial(ridge.forward, k, k, v, gate, gate, weights, *states, None, v, 1.0, 20, tol, True)
            for fn, launch in all_recorded(call) + all_recorded(functools.partial(backward, mode != ""))[4:]:
                name = fn.__name__.removesuffix("_kernel") + " alone" * (launch.options.get("READ") is False)
                if not mode or name in ("state", "invert", "solve", "solve alone"):
                    yield f"mesa {name}{mode} {dtype} K={K} V={V}", fn, dtype, launch


def divergence_entries(dtype: str) -> Iterator[tuple]:
    """KL over a vocabulary, as it is launched."""
    import torch
    from linearize_kernels import divergence

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for vocabulary, name in ((49152, ""), (49155, " unaligned")):
        student, teacher = torch.zeros(2, 2, vocabulary, dtype=row_type)
        ids, log_p, weight = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 5), torch.zeros(2)
        for call, rest in ((divergence.kl_, (teacher, None)), (divergence.top_kl_, (ids, log_p, weight))):
            fn, launch = recorded(functools.partial(call, student, *rest, 1.0, 1.0, True))
            yield f"{fn.__name__.removesuffix('_kernel')} {dtype}{name}", fn, dtype, launch


def scalar_entries() -> Iterator[tuple]:
    """The scalar chain of the centred mixers, and the log normaliser."""
    import triton.language as tl
    from linearize_kernels import gates, lognorm, stats

    packed = ("table", "offsets", "cu_seqlens")
    shared = {"C": 64, "BH": 16, "INITIAL": True, "SLOPE": True, "ODDS": True, "VARLEN": False, "ACC": tl.float32}
    ones = ("w_head", "f_head", "z_head", "e_head", "r_head", "d_head", "b_head", "g_head")
    kernels = {f"log norm {n}": getattr(lognorm, f"{n}_kernel") for n in ("own", "carry", "norm", "arriving")}
    kernels |= {
        "log norm reverse_carry": lognorm.reverse_carry_kernel,
        "log norm norm_grads": lognorm.norm_grads_kernel,
    }
    kernels |= {"shares": stats.shares_kernel, "gates": gates.gates_kernel, "gates grads": gates.gates_grads_kernel}
    for name, fn in kernels.items():
        pointers = tuple(fn.arg_names[: fn.arg_names.index("T")])
        for erase in (True, False) if "ERASE" in fn.arg_names else (True,):
            constants = {n: value for n, value in (shared | {"ERASE": erase}).items() if n in fn.arg_names}
            label = f"{name}{'' if erase else ' linear'}"
            yield label, fn, "fp32", constants, pointers, packed, ones, lognorm.WARPS, 1


def mean_entries(dtype: str, shapes: list[tuple[int, int]]) -> Iterator[tuple]:
    """The running means: of keys and values in a mixer, and of values alone."""
    import triton
    import triton.language as tl
    from linearize_kernels import centring, stats

    packed = ("table", "offsets", "cu_seqlens")
    floats = ("shares", "sums", "totals", "entering", "strength", "balance", "weights", "lengths", "erase", "gain")
    floats += ("d_lengths", "local", "initial", "final", "factors", "d_odds", "leaving", "d_shares", "d_weights")
    for K, V in shapes:
        shared = {"K": K, "V": V, "BK": triton.next_power_of_2(K), "BV": triton.next_power_of_2(V), "C": 64}
        shared |= {"VARLEN": False, "ACC": tl.float32}
        label = f"{dtype} K={K} V={V}"
        block, tile, warps = stats.CARRY
        carry = {"D": K + V, "BD": tile, "BLOCK": block, "C": 64, "INITIAL": True, "FINAL": True, "VARLEN": False}
        for name, reverse in (("means", False), ("reverse means", True)):
            constants = carry | {"REVERSE": reverse, "ACC": tl.float32}
            yield f"{name} {label}", stats.carry_means_kernel, dtype, constants, floats, packed, (), warps, 1
        yield f"sums {label}", stats.sums_kernel, dtype, shared, floats, packed, (), centring.SUMS, 1
        flags = {"LENGTHS": True, "VALUES": True, "MEANS": True, "READ": True}
        alone = shared | {"K": 0, "BK": 16, "LENGTHS": False, "VALUES": False, "MEANS": True, "READ": False}
        forward = {"ADD": True, "ERASE": True}
        yield f"slopes {label}", stats.slopes_kernel, dtype, shared | flags, floats, packed, (), centring.SUMS, 1
        walks = (("centre", shared | flags | forward), ("centre mean", alone | {"ADD": False, "ERASE": False}))
        for name, constants in walks:
            fn = centring.centre_kernel
            yield f"{name} {label}", fn, dtype, constants, floats, packed, (), centring.WALK, 1
        walks = (("centre grads", shared | flags | {"ODDS": True}), ("centre grads mean", alone | {"ODDS": False}))
        for name, constants in walks:
            fn = centring.centre_grads_kernel
            yield f"{name} {label}", fn, dtype, constants, floats, packed, (), centring.WALK, 1


def uneven_mean_entries(dtype: str) -> Iterator[tuple]:
    """The running means as they are launched for keys and values of different widths; and of values alone, centred."""
    import torch
    from linearize_kernels import centring

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tokens, heads = 300, 2
    shares, skips = torch.zeros(1, heads, tokens), torch.zeros(5, heads, dtype=torch.int32)
    per_head = torch.zeros(heads)
    for K, V in ((64, 128), (128, 64), (50, 100), (0, 128)):
        k, v = (torch.zeros(1, tokens, heads, dim, dtype=row_type) if dim else None for dim in (K, V))
        means = torch.zeros(1, heads, K + V)
        entering, totals = torch.zeros(5, heads, K + V), torch.zeros(5, heads)
        forward = functools.partial(
            centring.forward, k, v, shares, skips, means, None, weights=per_head, add_to=v,
            strength=shares if K else None, balance=per_head if K else None,
        )  # fmt: skip
        backward = functools.partial(
            centring.backward, k, v, shares, skips, None, v if k is None else k, v, entering, totals, means, k, v, v,
            shares if K else None, means, True, weights=per_head, factors=shares, d_odds=shares if K else None,
        )  # fmt: skip
        for call in (forward, backward):
            for fn, launch in all_recorded(call):
                name = fn.__name__.removesuffix("_kernel").replace("_", " ")
                name = f"{'reverse ' * launch.options.get('REVERSE', False)}{name}"
                yield f"uneven {name} {dtype} K={K} V={V}", fn, dtype, launch


def readout_entries(dtype: str, shapes: list[tuple[int, int]]) -> Iterator[tuple]:
    """The zeroth-order readout with all terms and a constant forgetting; and with a state and one of every token."""
    import torch
    from linearize_kernels import zeroth

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tokens, heads, group, scales, taps = 128, 6, 3, 3, 4
    wide, weights = torch.zeros(1, tokens, heads * scales), torch.zeros(heads, scales)
    per_head, taps = weights[:, 0].contiguous(), torch.zeros(taps, heads)
    for V in sorted({V for _, V in shapes}):
        v, rows = (torch.zeros(1, tokens, n, V, dtype=row_type) for n in (heads // group, heads))
        means, opening = torch.zeros(1, heads * scales, V), v[:, 0].contiguous()
        for name, forget, state in (
            ("", wide[0, 0].clone(), (None,) * 3),
            (" with a state", wide, (means, v[:, : len(taps) - 1], opening)),
        ):
            terms = v, wide, forget, wide, weights, taps, per_head, rows, per_head
            entering = torch.zeros(2, heads, scales, V), torch.zeros(2, heads, scales)
            found = all_recorded(functools.partial(zeroth.forward, *terms, *state, None))
            found += all_recorded(
                functools.partial(zeroth.backward, *terms, *state[1:], None, *entering, rows, state[0])
            )
            for fn, launch in found:
                kernel = fn.__name__.removesuffix("_kernel").replace("_", " ")
                kernel = f"{'reverse ' * launch.options.get('REVERSE', False)}{kernel}"
                yield f"zeroth {kernel}{name} {dtype} V={V}", fn, dtype, launch


def step_entries(dtype: str, shapes: list[tuple[int, int]]) -> Iterator[tuple]:
    """The decode kernels, as they are launched."""
    import torch
    from linearize_kernels import decode, ridge

    row_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    batch, heads = 3, 4

    def entry(name: str, call: Callable[[], object]) -> tuple:
        fn, launch = recorded(call)
        return name, fn, dtype, launch

    for K, V in shapes:
        label = f"{dtype} K={K} V={V}"
        memory, Hkk = torch.zeros(batch, heads, K, V), torch.zeros(batch, heads, K, K)
        states = [memory.mT.contiguous().mT, memory[..., 0].contiguous(), memory[..., 0, :].contiguous()]
        states.append(memory[..., 0, 0].contiguous())
        per_head, ridge_ = torch.zeros(heads), torch.zeros(heads, K)
        for tokens in (1, 3):
            q, k = (torch.zeros(batch, tokens, heads // g, K, dtype=row_type) for g in (1, 2))
            v = torch.zeros(batch, tokens, heads // 2, V, dtype=row_type)
            add_to, gate = torch.zeros(batch, tokens, heads, V), torch.zeros(batch, tokens, heads)
            slow_gate, slow = torch.zeros(batch, tokens, 3 * heads), torch.zeros(batch, 3 * heads, V)
            scales = slow_gate, slow_gate, torch.zeros(heads, 3)
            slow_states = slow, slow_gate[:, 0].contiguous()
            tail = f"{label}{'' if tokens == 1 else f' T={tokens}'}"
            plain = q, k, v, gate, gate, gate, 1.0, states[0], states[0], add_to
            yield entry(f"step {tail}", functools.partial(decode.step, *plain))
            by_value = *plain[:7], memory, memory, add_to
            yield entry(f"step by value {tail}", functools.partial(decode.step, *by_value))
            for name, exponent, balance, few, in_place in (
                ("", gate, per_head, False, False),
                ("alone ", gate, per_head, True, False),
                ("in place ", gate, per_head, False, True),
                ("covariance ", gate, None, True, False),
                ("scheduled ", None, per_head, True, False),
            ):
                old = states if few else [*states, *slow_states]
                new = old if in_place else [x.clone() for x in old]
                rest = (None, None) if few else (per_head, add_to)
                call = functools.partial(
                    decode.centred_step, q, k, v, gate, gate, exponent, gate, balance, *rest, 1.0, old, new,
                    *((None,) * 3 if few else scales),
                )  # fmt: skip
                yield entry(f"step centred {name}{tail}", call)
            old = [memory, *states[1:], *slow_states]
            call = functools.partial(
                decode.centred_step, q, k, v, gate, gate, gate, gate, per_head, per_head, add_to, 1.0, old,
                [x.clone() for x in old], *scales,
            )  # fmt: skip
            yield entry(f"step centred by value {tail}", call)
            call = functools.partial(
                decode.centre_step, k, v, gate, gate, gate, gate, per_head, add_to, [*states[1:], *slow_states],
                [x.clone() for x in (*states[1:], *slow_states)], *scales,
            )  # fmt: skip
            yield entry(f"step centre {tail}", call)
            if K <= ridge.MAX_KEY_DIM and tokens == 1:
                for name, cache in (("", Hkk.clone()), ("direct ", None)):
                    states_of = memory, Hkk, memory, Hkk
                    call = functools.partial(
                        decode.mesa_step, q, k, v, gate, gate, ridge_, 1.0, *states_of, cache, 16, 1e-4, add_to
                    )
                    yield entry(f"step mesa {name}{tail}", call)


def check(fn, dtype: str, *how) -> dict:
    """Compile one launch for sm_90; registers, stack, shared bytes and register-A WGMMA count."""
    import triton
    from linearize_kernels.common import REGISTERS_FULL, WARPS_FULL
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", 90, 32)
    if isinstance(how[0], Launch):
        source, options = specialised(fn, how[0], target)
        warps, stages = options["num_warps"], options["num_stages"]
    else:
        constants, fp32, absent, ones, warps, stages = how
        source = ASTSource(fn, *describe(fn, dtype, constants, fp32, absent, ones))
        options = {"num_warps": warps, "num_stages": stages}
        if dtype == "fp32" and warps == WARPS_FULL:
            options["maxnreg"] = REGISTERS_FULL
    compiled = triton.compile(source, target=target, options=options)
    products = re.findall(r"wgmma\.mma_async[^;]*;", compiled.asm["ptx"])
    from_registers = [x for x in products if re.search(r"\},\s*\{", x)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "per_sm": min(SHARED_PER_SM // (compiled.metadata.shared + 1024), 65536 // (int(registers) * 32 * warps)),
        "wgmma": len(products),
        "register_a": len(from_registers),
        "warps": warps,
        "stages": stages,
    }


def verdict(result: dict, dtype: str, name: str = "", accepted: dict[str, int] | None = None) -> str | None:
    """Why an entry fails, or None. accepted: {name: registers} of earlier builds."""
    if result["register_a"]:
        return f"{result['register_a']} WGMMA with a left operand in registers"
    computed = name.startswith("mesa") and name.split()[1] not in ("pairs", "keys", "values")
    if computed and result.get("wgmma"):
        return f"{result['wgmma']} WGMMA: tiles of at most 32 rows have none"
    if dtype == "fp32" and result.get("wgmma"):
        return f"{result['wgmma']} WGMMA: float32 is not rounded to tf32"
    allowed = SPILLS_FULL if dtype == "fp32" else 0
    allowed = max((limit for entry, limit in SPILLS.items() if name.startswith(entry)), default=allowed)
    if result["stack"] > allowed:
        return f"{result['stack']} bytes of spills"
    if result["shared"] > MAX_SHARED:
        return f"{result['shared']} bytes of shared memory"
    before = (accepted or {}).get(name)
    if before is not None and result["registers"] > before + 8:
        return f"{before} registers before"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="bfloat16, 64 and 128 dims")
    parser.add_argument("--only", default="", help="entries whose name contains this text")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--accept", action="store_true", help="store the registers of entries that pass")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    results, failed = {}, 0
    accepted = json.loads(REGISTERS.read_text()) if REGISTERS.exists() else {}
    for name, *launch in entries(arguments.quick):
        if arguments.only not in name:
            continue
        try:
            results[name] = result = check(*launch)
            reason = verdict(result, launch[1], name, {} if arguments.accept else accepted)
            if arguments.accept and reason is None:
                accepted[name] = result["registers"]
        except Exception as error:
            results[name], reason = {"error": str(error)}, f"does not compile: {str(error).splitlines()[0]}"
            print(f"FAIL {name}: {reason}", flush=True)
            failed += 1
            continue
        failed += reason is not None
        print(
            f"{'FAIL' if reason else 'ok  '} {name:34} warps {result['warps']} stages {result['stages']} registers "
            f"{result['registers']:3} stack {result['stack']:4} shared {result['shared']:6} per SM {result['per_sm']} "
            f"wgmma {result['wgmma']:3}"
            f"{'  ' + reason if reason else ''}",
            flush=True,
        )
    if arguments.accept:
        REGISTERS.write_text(json.dumps(accepted, indent=0, sort_keys=True) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results)} entries, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
