"""Times of the kernels, beside the torch forms and, where it is installed, flash-linear-attention.

    PYTHONPATH=kernels python kernels/benchmarks/bench.py --compile 24
    PYTHONPATH=kernels python kernels/benchmarks/bench.py --out FILE [--budget-seconds 600] [--only delta] [--dry-run]

Candidates of a row are interleaved A B A B with an L2 that holds nothing of theirs before each call (cold: 256 MB were
read, so that nothing waits to be written back either) and without (warm); both sides are CUDA-graph replays where they
can be captured. A row: median and 10-90 % range in ms, ms per 2^20 token-heads, the bytes the design moves, and which
share of their time at 4.3 TB/s the median is. Rows are ordered by importance, and those that the budget does not reach
are named in the file; rows that are in it are not measured again. `--part alone` takes the rows without a baseline,
`--part beside` those with. `--compile N` measures nothing: it runs every candidate of every row once in N processes, so
that the measuring process finds all of it in Triton's cache, also what the baseline tries out. `--dry-run` runs tiny
shapes on a CPU to prove the script, not the kernels: its times mean nothing.

flash-linear-attention refuses its gated backward on Hopper with this Triton; its guard is lifted here for timing only,
and its gradient errors against float64 are in the file next to its times.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "tests" / "kernels")]

BANDWIDTH = 4.3e12
NAMES = ("op", "group", "batch", "tokens", "heads", "dim", "packed")  # what tells rows apart
# (rows, tokens, heads): 8 to 256 chains of 1k to 64k tokens. Those with 16 heads stand beside the baseline, which tunes
# itself anew for every number of heads.
SHAPES = [
    (1, 32768, 16), (1, 8192, 16), (16, 2048, 16), (1, 65536, 16), (4, 8192, 16), (8, 1024, 16),
    (1, 32768, 8), (1, 65536, 8), (1, 8192, 8), (1, 2048, 8), (1, 32768, 32),
]  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def environment() -> dict:
    """What the times depend on."""
    report = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    try:
        import triton

        report["triton"] = triton.__version__
    except ImportError:
        report["triton"] = None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        told = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
        report |= {"gpu": torch.cuda.get_device_name(), "driver": told and told.stdout.strip()}
    report["ptxas"] = os.environ.get("TRITON_PTXAS_PATH", "bundled")
    return report


# ---- timing ---------------------------------------------------------------------------------------------------------


def as_graph(call: Callable) -> tuple[Callable, bool]:
    """A CUDA-graph replay of `call`, or `call` itself where it cannot be captured."""
    if not torch.cuda.is_available():
        return call, False
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def one_time(call: Callable) -> float:
    """Milliseconds of one call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def timed(calls: dict[str, Callable], repeats: int, *, cold: bool) -> dict[str, list[float]]:
    """{name: [median, 10 %, 90 %] in ms}, candidates interleaved; cold: with an L2 full of something else, and clean.

    It is filled by reading: what is written there goes to memory when another line takes its place, and a call after a
    write would pay for up to 50 MB of it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    other = torch.zeros(2**26 if device == "cuda" else 1, dtype=torch.int32, device=device)
    times = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            if cold:
                other.sum()
            elapsed = one_time(call)
            if i >= 3:
                times[name].append(elapsed)
    result = {}
    for name, values in times.items():
        values.sort()
        tenth = len(values) // 10
        result[name] = [
            round(x, 5) for x in (statistics.median(values), values[tenth], values[len(values) - 1 - tenth])
        ]
    return result


def in_a_row(calls: list[Callable], repeats: int = 12) -> float:
    """Microseconds of one of `calls`, made one after the other in one CUDA graph as the layers of a model are.

    Each should have a state of its own, all together far beyond the L2: every call then reads from memory and pays for
    the write-back of an earlier one, and the time of a graph's launch is shared.
    """
    replay, _ = as_graph(lambda: [call() for call in calls])
    return 1e3 * timed({"all": replay}, repeats, cold=False)["all"][0] / len(calls)


# ---- the candidates -------------------------------------------------------------------------------------------------


def reference_of(op: Callable, switch: str) -> Callable:
    """`op` with the torch forms (`reference`) or the kernels (`auto`, `triton`)."""

    def call(*args, **kwargs):
        before = os.environ.get("LINEARIZE_KERNELS")
        os.environ["LINEARIZE_KERNELS"] = switch
        try:
            return op(*args, **kwargs)
        finally:
            os.environ.pop("LINEARIZE_KERNELS") if before is None else os.environ.update(LINEARIZE_KERNELS=before)

    return call


def compile_side_by_side(tuner: type, threads: int) -> None:
    """Let an autotuner class compile the configurations of a kernel in threads before it tries them one by one.

    tuner: triton.runtime.Autotuner, or a class with its `prune_configs(kwargs)`, `nargs` and `fn`.
    """
    prune = tuner.prune_configs

    def prune_and_compile(self, kwargs):
        configs = prune(self, kwargs)

        def compile_one(config):
            # One that does not compile says so when it is tried.
            with contextlib.suppress(Exception):
                self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(compile_one, configs))
        return configs

    tuner.prune_configs = prune_and_compile


@functools.cache
def fla() -> dict[str, Callable]:
    """flash-linear-attention's operators by our names, its Hopper guard lifted; {} where it cannot be imported."""
    try:
        from triton.runtime import Autotuner

        compile_side_by_side(Autotuner, os.cpu_count() or 1)
        import fla.ops.common.chunk_o as guarded
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # an incompatible install must not stop our own numbers
        print("flash-linear-attention is not usable:", (str(error).splitlines() or [type(error).__name__])[0])
        return {}
    guarded.IS_NVIDIA_HOPPER = False
    found = {"delta": lambda *x, scale=0.1, **more: chunk_gated_delta_rule(*x, scale=scale, **more)}
    try:
        from fla.ops.mesa_net import chunk_mesa_net

        found["mesa"] = lambda *x: chunk_mesa_net(*x, max_CG_iteration=30)
    except Exception as error:
        print("without MesaNet of flash-linear-attention:", (str(error).splitlines() or [type(error).__name__])[0])
    return found


def cases(dry: bool) -> Iterator[dict]:
    """All rows, the most important first; "beside": a baseline is measured as well."""
    if dry:
        sizes = {"batch": 1, "tokens": 70, "heads": 2, "dim": 16}
        for op in ("delta", "centred", "mesa", "linear", "statistics"):
            yield {"op": op, "group": 2, **sizes, "torch": True}
        yield {"op": "delta", "group": 1, "packed": 2, **sizes}
        for op in ("delta step", "centred step", "mesa step"):
            yield {"op": op, "group": 1, **sizes | {"tokens": 1}}
        return
    for dim in (128, 64):
        main = {"batch": 8, "tokens": 4096, "heads": 16, "dim": dim}
        for op in ("delta", "centred"):
            # The torch forms of the others take seconds at this size.
            yield {"op": op, "group": 1, **main} | ({"torch": True, "beside": True} if op == "delta" else {})
    main |= {"dim": 128}
    yield {"op": "delta", "group": 4, **main}
    yield {"op": "delta", "group": 1, "packed": 8, **main | {"batch": 1, "tokens": 32768}}
    for op in ("linear", "statistics"):
        yield {"op": op, "group": 1, **main}
    for op in ("delta step", "centred step", "mesa step"):
        for batch in (32, 128, 256, 1):
            yield {"op": op, "group": 1, "batch": batch, "tokens": 1, "heads": 16, "dim": 128}
    for batch, tokens, heads in SHAPES:
        for dim in (128, 64):
            row = {"op": "delta", "group": 1, "batch": batch, "tokens": tokens, "heads": heads, "dim": dim}
            yield row | ({"beside": True} if heads == 16 else {})
    for dim in (128, 64):
        yield {"op": "mesa", "group": 1, **main | {"dim": dim}, "beside": True}


def moved_bytes(case: dict, kind: str) -> float:
    """Bytes the present design moves for a row in 16 bits; per-head scalars and chunk scalars counted as 64 bytes."""
    dim = case["dim"]
    work = case["batch"] * case["tokens"] * case["heads"]
    row = 2 * dim
    state = 2 * 4 * dim * dim
    if case["op"].endswith("step"):
        extra = 8 * dim * dim + 4 * dim * dim if case["op"].startswith("mesa") else 0
        return work * (state + extra + 4 * row)
    square = 4 * 64
    forward = {"delta": 2 * row + square + 4 * row + square, "linear": 2 * row + square / 2 + 4 * row + square / 2}
    forward["statistics"] = 2 * row + 2 * row + 4 * row
    forward["centred"] = forward["statistics"] + forward["delta"] + row
    # States (high and low, keys and values), inverses at every fourth chunk, and what a solve reads.
    states = 2 * 2 * 2 * dim * dim / 64
    forward["mesa"] = 4 * row + 2 * states + 2 * dim * dim / 64 + 4 * row + 4 * dim
    backward = {"delta": 4 * dim * dim / 64 * 3 + 14 * row + 2 * square, "statistics": 12 * row}
    backward["linear"] = backward["delta"]
    backward["centred"] = backward["delta"] + backward["statistics"]
    # Rows of queries, keys and values and of what belongs to them, states and their cotangents, pairs of tokens.
    backward["mesa"] = 39 * row + 13 * 2 * dim * dim / 64 + square
    total = forward[case["op"]] + (backward[case["op"]] if kind == "both" else 0)
    return work * (total + 64)


def problem(case: dict, device: str) -> tuple[Callable, list[Tensor], Tensor]:
    """(operator of the leaves, leaves, cotangent of its first result)."""
    import linearize_kernels as ops

    batch, tokens, heads, dim, group = (case[n] for n in ("batch", "tokens", "heads", "dim", "group"))
    low = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    few = heads // group
    q, k, v = (normal(batch, tokens, h, dim, dtype=low, device=device) for h in (heads, few, few))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay = -torch.nn.functional.softplus(normal(batch, tokens, heads, device=device) - 3)
    beta = torch.rand(batch, tokens, heads, device=device)
    slope = normal(batch, tokens, heads, dim, dtype=low, device=device)
    write, zero = normal(batch, tokens, heads, device=device), torch.zeros(batch, tokens, heads, device=device)
    ridge, balance = torch.full((heads, dim), 0.5, device=device), torch.zeros(heads, device=device)
    cu = None
    if case.get("packed"):
        cu = torch.linspace(0, tokens, case["packed"] + 1, device=device).round().to(torch.int32)
    memory = torch.zeros(batch, heads, dim, dim, device=device).mT
    means = [torch.zeros(batch, heads, dim, device=device) for _ in range(2)]
    norm = torch.zeros(batch, heads, device=device)
    identity = [torch.eye(dim, device=device).repeat(batch, heads, 1, 1) for _ in range(2)]
    calls = {
        "delta": (lambda *x: ops.gated_delta(*x, scale=0.1, cu_seqlens=cu), [q, k, v, decay, beta]),
        "linear": (lambda *x: ops.linear_attn(*x, scale=0.1), [q, k, v, decay, beta]),
        "centred": (
            lambda *x: ops.centred_gated_delta(*x[:8], read_mean=x[8]),
            [q, k, v, write, decay, zero, zero.clone(), balance, torch.ones_like(balance)],
        ),
        "statistics": (
            lambda k, v, w, f: ops.centre(k, v, w, f, ops.log_norm(w, f))[1:3],
            [k, v, write, decay],
        ),
        "mesa": (lambda *x: ops.mesa(*x, max_iter=30, tol=4e-3), [q, k, v, decay, beta, ridge]),
        "delta step": (lambda *x: ops.gated_delta_step(*x, state=memory), [q, k, v, decay, beta]),
        "centred step": (
            lambda *x: ops.centred_gated_delta_step(
                *x, state=(memory, *means, norm), read_mean=balance, in_place=False
            ),
            [q, k, v, write, decay, zero, zero.clone(), balance],
        ),
        "mesa step": (
            lambda *x: ops.mesa_step(*x, state=(memory.mT, identity[0]), preconditioner=identity[1]),
            [q, k, v, decay, beta, ridge],
        ),
    }
    op, leaves = calls[case["op"]]
    return op, leaves, slope


def candidates_of(case: dict, op: Callable, baselines: dict[str, Callable]) -> dict[str, Callable]:
    """What is measured in a row, by name."""
    found = {"kernels": reference_of(op, os.environ.get("LINEARIZE_KERNELS", "auto"))}
    if case.get("torch"):
        found["torch"] = reference_of(op, "reference")
    if case.get("beside") and case["op"] in baselines:
        found["fla"] = baselines[case["op"]]
    return found


def kinds_of(case: dict) -> tuple[str, ...]:
    return ("forward",) if case["op"].endswith("step") else ("forward", "both")


def call_of(kind: str, candidate: Callable, leaves: list[Tensor], slope: Tensor) -> Callable:
    """One call of a candidate on leaves of its own: forward, or forward and backward ("both")."""
    ready = [x.detach().requires_grad_(kind == "both") for x in leaves]

    def forward():
        with torch.no_grad():
            return candidate(*ready)

    def both():
        return torch.autograd.grad(candidate(*ready)[0], ready, slope, allow_unused=True)

    return forward if kind == "forward" else both


def run_once(job: dict) -> None:
    """One candidate of a row, so that all it compiles is on disk; a baseline with few tokens, to tune itself sooner."""
    case = job["case"] if job["name"] == "kernels" else job["case"] | {"tokens": min(1024, job["case"]["tokens"])}
    op, leaves, slope = problem(case, "cuda")
    for kind in job["kinds"]:
        call_of(kind, candidates_of(case, op, fla() if job["name"] == "fla" else {})[job["name"]], leaves, slope)()
    torch.cuda.synchronize()


def compile_all(workers: int, seconds: float, only: str) -> int:
    """Run every candidate of every row once, in so many processes; baselines, which take longest, first."""
    from gpu_check import side_by_side

    jobs, tuned = [], set()
    for case in cases(False):
        if only not in case["op"]:
            continue
        jobs.append({"case": case, "name": "kernels", "kinds": kinds_of(case)})
        if case.get("beside") and (key := (case["op"], case["heads"], case["dim"])) not in tuned:
            tuned.add(key)
            jobs += [{"case": case, "name": "fla", "kinds": kinds} for kinds in (("forward",), ("both",))]
    jobs.sort(key=lambda job: job["name"] != "fla")
    failed = 0
    for job, good, answer in side_by_side(run_once, jobs, workers, seconds):
        failed += not good
        print(job["name"], job["case"], "compiled" if good else answer, flush=True)
    return failed


def solved_errors(baselines: dict[str, Callable], dim: int, device: str) -> dict[str, float]:
    """RMS error over RMS of MesaNet's outputs against solving directly in float64, on the inputs of its row."""
    from linearize_kernels.conjugate import recurrent_mesa

    case = {"op": "mesa", "group": 1, "batch": 1, "tokens": 256, "heads": 16, "dim": dim, "beside": True}
    op, leaves, _ = problem(case, device)
    want = recurrent_mesa(*(x.double() for x in leaves), 1.0)[0]
    found = {}
    with torch.no_grad():
        for name, candidate in candidates_of(case, op, baselines).items():
            error = (candidate(*leaves)[0].double() - want).norm() / want.norm()
            found[name] = float(f"{error:.2e}")
    return found


def measure(case: dict, baselines: dict[str, Callable], repeats: int, device: str) -> dict:
    """One row of the report."""
    op, leaves, slope = problem(case, device)
    row = {**case, "graph": {}, "notes": {}}
    for kind in kinds_of(case):
        calls = {}
        for name, candidate in candidates_of(case, op, baselines).items():
            try:
                call = call_of(kind, candidate, leaves, slope)
                call()
                calls[name], row["graph"][f"{name} {kind}"] = as_graph(call)
            except Exception as error:  # a candidate that cannot run is a note in its row, not the end of all
                row["notes"][f"{name} {kind}"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        times = {kind: timed(calls, repeats, cold=kind == "cold") for kind in ("cold", "warm")}
        work = case["batch"] * case["tokens"] * case["heads"] / 2**20
        floor = 1e3 * moved_bytes(case, kind) / BANDWIDTH
        row[kind] = {"ms": times, "floor ms": round(floor, 5)}
        for name, (median, *_) in times["cold"].items():
            row[kind] |= {f"{name} ms per 2^20": round(median / work, 4)}
        if "kernels" in times["cold"]:
            row[kind]["share of floor"] = round(floor / max(times["cold"]["kernels"][0], 1e-9), 3)
    return row


def table(report: dict) -> str:
    """The rows as Markdown: medians with a cold L2 in ms, and how many times the bytes take at full bandwidth."""
    lines = [
        "| operator | rows x tokens x heads x dims | forward | of floor | forward + backward | of floor | beside |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        if "error" in row:
            continue
        size = "x".join(str(row[name]) for name in ("batch", "tokens", "heads", "dim"))
        notes = [f"packed {row['packed']}"] if row.get("packed") else []
        notes += [f"groups of {row['group']}"] if row["group"] > 1 else []
        cells, beside = [], {}
        for kind in ("forward", "both"):
            cold = row.get(kind, {}).get("ms", {}).get("cold")
            if cold is None:
                cells += ["", ""]
                continue
            own = cold["kernels"][0]
            cells += [f"{own:.3f}" if own >= 0.1 else f"{own:.4f}", f"{own / max(row[kind]['floor ms'], 1e-9):.2f}x"]
            for name in cold.keys() - {"kernels"}:
                beside.setdefault(name, []).append(f"{cold[name][0]:.3f}")
        others = "; ".join(f"{name} {' / '.join(times)}" for name, times in sorted(beside.items()))
        lines.append(f"| {', '.join([row['op'], *notes])} | {size} | {' | '.join(cells)} | {others} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results, as JSON; rows that are in it are not measured again")
    parser.add_argument("--compile", type=int, metavar="N", help="only fill Triton's cache, in N processes")
    parser.add_argument("--part", choices=["all", "alone", "beside"], default="all", help="rows without baseline, with")
    parser.add_argument("--budget-seconds", type=float, default=900.0, help="start no row after this long")
    parser.add_argument("--only", default="", help="operators whose name contains this text")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU where there is no GPU")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print a file of results as a table")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.dry_run:
        parser.error("no GPU here: --dry-run proves the script on a CPU")
    if not arguments.compile and not arguments.out:
        parser.error("--out FILE, or --compile N")
    os.environ.setdefault("LINEARIZE_KERNELS", "auto")
    if arguments.compile:
        return 1 if compile_all(arguments.compile, arguments.budget_seconds, arguments.only) else 0
    started = time.time()
    report = {"environment": environment(), "dry run": arguments.dry_run, "rows": [], "seconds": 0.0}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if before["environment"] != report["environment"]:
            parser.error(f"{arguments.out} was measured elsewhere or with other versions: give another file")
        report |= before | {"rows": [row for row in before["rows"] if "error" not in row]}
    spent, report["not reached"] = report["seconds"], []
    done = [{name: row.get(name) for name in NAMES} for row in report["rows"]]

    def save() -> None:
        report["seconds"] = round(spent + time.time() - started, 1)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    baselines = {} if device == "cpu" or arguments.part == "alone" else fla()
    if "delta" in baselines:
        from gpu_check import fla_errors

        try:
            report["gradient errors (ours, fla)"] = fla_errors(baselines["delta"])
        except Exception as error:
            report["gradient errors (ours, fla)"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
    if "mesa" in baselines:
        for dim in (128, 64):
            report[f"mesa {dim} errors"] = solved_errors(baselines, dim, device)
    repeats = 2 if arguments.dry_run else arguments.repeats
    for case in cases(arguments.dry_run):
        if arguments.only not in case["op"] or {name: case.get(name) for name in NAMES} in done:
            continue
        if arguments.part != "all" and (arguments.part == "beside") != case.get("beside", False):
            continue
        if time.time() - started > arguments.budget_seconds:
            report["not reached"].append(case)
            continue
        try:
            row = measure(case, baselines, repeats, device)
        except Exception as error:  # one broken row must not hide the others
            row = {**case, "error": (str(error).splitlines() or [type(error).__name__])[0][:300]}
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        save()
        if device == "cuda":
            torch.cuda.empty_cache()
    save()
    print(f"{len(report['rows'])} rows, {len(report['not reached'])} not reached, {report['seconds']} s")
    return 1 if any("error" in row for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
