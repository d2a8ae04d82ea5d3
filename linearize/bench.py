"""What decoding costs on this machine: time of a step, prefill, and the bytes of the cache; teacher beside student."""

import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import linearize
from linearize.checkpoint import atomic_write_text, format_bytes, writing
from linearize.console import Console, format_count
from linearize.errors import UserError
from linearize.models import Model, free_memory, open_model, open_named_teacher
from linearize.processes import pick_device

PIECE = 2048  # tokens of a row that prefill reads at once
WARM_UP = 3  # decode steps before the first that counts


@dataclass(frozen=True)
class Options:
    """What `linearize bench decode` measures; the fields are its flags."""

    context: tuple[int, ...] = (1024, 8192)
    batch: tuple[int, ...] = (1,)
    steps: int = 32
    teacher: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"


def decode(source: str, options: Options, console: Console) -> dict:
    """Time prefill and decoding at every context and batch; show, write and return what was found.

    Writes source/eval/decode.json when convert or export made the folder. A cell that does not fit into memory says so
    and the others go on.
    """
    model = open_model(source, say=console.line)
    sides = {"student" if model.ours else "model": model}
    if options.teacher:
        fix = "leave out --teacher, or bench the teacher itself"
        sides["teacher"] = open_named_teacher(model, say=console.line, fix=fix)
    device = pick_device(options.device)
    cells = []
    for side, part in sides.items():
        cells += _cells(side, part, options, device, console)
    cells.sort(key=lambda cell: (cell["context"], cell["batch"], cell["model"] != "teacher"))
    report = {
        "linearize": linearize.__version__,
        "model": source,
        "teacher": sides["teacher"].source if "teacher" in sides else None,
        "machine": _machine(device),
        "settings": {"dtype": options.dtype, "steps": options.steps, "seed": options.seed},
        "cells": cells,
    }
    rows = [_row(cell) for cell in cells]
    console.table(
        f"decode of {source}, tokens/s on {report['machine']['device']}",
        ("context", "batch", "model", "prefill/s", "decode/s", "ms/step", "p10-p90", "cache"),
        rows,
    )
    if model.ours:
        path = Path(source).expanduser() / "eval" / "decode.json"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        atomic_write_text(path, json.dumps(report, indent=2) + "\n")
        console.line(f"wrote {path}")
    console.result(report)
    return report


def _cells(side: str, model: Model, options: Options, device: torch.device, console: Console) -> list[dict]:
    out_of_memory = f"out of memory while loading {model.source}"
    try:
        net = model.load(device, options.dtype)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UserError(out_of_memory, fix="--dtype bfloat16 or --device cpu") from error
    cells = []
    grid = [(context, batch) for context in options.context for batch in options.batch]
    with console.stage(f"{side}: decode", len(grid), "cells") as bar:
        measure(net, 16, 1, 1, options.seed)  # what runs for the first time also compiles and allocates
        for context, batch in grid:
            cell = {"model": side, "context": context, "batch": batch}
            try:
                cell |= measure(net, context, batch, options.steps, options.seed)
            except (MemoryError, RuntimeError) as error:
                # torch's allocator for the CPU raises a plain RuntimeError.
                if isinstance(error, RuntimeError) and "memory" not in str(error):
                    raise
                cell["error"] = "out of memory"
            free_memory(device)
            cells.append(cell)
            bar.advance(1, context=context, batch=batch)
    del net
    free_memory(device)
    return cells


@torch.no_grad()
def measure(net: PreTrainedModel, context: int, batch: int, steps: int, seed: int = 0) -> dict:
    """Prefill `batch` rows of `context` random tokens, then decode `steps` tokens of each, greedily.

    Returns tokens per second of both, milliseconds a step (median, 10th and 90th percentile, WARM_UP steps left out)
    and the bytes that the cache holds after the prefill. On a GPU times are those of its events, and prefill is done
    twice, the first time to warm up.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(net.config.vocab_size, (batch, context), generator=generator).to(net.device)
    clock = _clock(net.device)
    for _ in range(2 if net.device.type == "cuda" else 1):
        cache = DynamicCache(config=net.config)
        tokens, prefill = clock(lambda cache=cache: _prefill(net, ids, cache))
    held = cache_bytes(cache)
    times = []
    for _ in range(WARM_UP + steps):
        tokens, seconds = clock(lambda tokens=tokens: _step(net, tokens, cache))
        times.append(seconds)
    times = torch.tensor(times[WARM_UP:], dtype=torch.float64)
    median, low, high = (1e3 * float(times.quantile(q)) for q in (0.5, 0.1, 0.9))
    return {
        "prefill_tokens_per_second": batch * context / prefill,
        "decode_tokens_per_second": 1e3 * batch / median,
        "step_ms": {"median": median, "p10": low, "p90": high},
        "cache_bytes": held,
    }


def _prefill(net: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    for piece in ids.split(PIECE, dim=1):
        logits = net(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def _step(net: PreTrainedModel, tokens: Tensor, cache: DynamicCache) -> Tensor:
    return net(input_ids=tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)


def _clock(device: torch.device) -> Callable[[Callable[[], Tensor]], tuple[Tensor, float]]:
    """A function that runs another and returns its result and its seconds."""

    def on_gpu(run):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3

    def on_cpu(run):
        begin = time.perf_counter()
        result = run()
        return result, time.perf_counter() - begin

    return on_gpu if device.type == "cuda" else on_cpu


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the memory behind all tensors of a cache, each piece of memory once."""
    found: dict[int, int] = {}

    def walk(value: object) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)

    for layer in cache.layers:
        walk(vars(layer))
    return sum(found.values())


def _row(cell: dict) -> tuple:
    head = cell["context"], cell["batch"], cell["model"]
    if "error" in cell:
        return (*head, cell["error"], None, None, None, None)
    ms = cell["step_ms"]
    return (
        *head,
        format_count(cell["prefill_tokens_per_second"]),
        format_count(cell["decode_tokens_per_second"]),
        f"{ms['median']:.2f}",
        f"{ms['p10']:.2f}-{ms['p90']:.2f}",
        format_bytes(cell["cache_bytes"]),
    )


def _machine(device: torch.device) -> dict:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name if device.type == "cuda" else f"CPU ({name}), {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# ---- kernels --------------------------------------------------------------------------------------------------------


def kernels(arguments: Sequence[str]) -> int:
    """Run the kernel library's own measurement, which only a checkout of the repository has; returns its exit code.

    arguments: handed on. Raises UserError outside a checkout and without a GPU.
    """
    script = Path(linearize.__file__).parents[1] / "kernels" / "benchmarks" / "gpu_check.py"
    if not script.is_file():
        raise UserError("the kernel benchmarks are in the repository, not in the package", fix="run this in a checkout")
    if not torch.cuda.is_available():
        raise UserError("the kernel benchmarks need a CUDA GPU, and this machine has none")
    if importlib.util.find_spec("triton") is None:
        raise UserError("the kernel benchmarks need Triton", fix="pip install 'linearize[triton]'")
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
