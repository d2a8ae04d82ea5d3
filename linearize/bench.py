"""What decoding costs on this machine: time of a step, prefill, and the bytes of the cache; teacher beside student."""

import importlib.util
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import linearize
from linearize.checkpoint import atomic_write_text, format_bytes, writing
from linearize.console import Console, format_count
from linearize.errors import UserError, one_line
from linearize.models import Model, free_memory, open_model, open_named_teacher
from linearize.processes import pick_device
from linearize.replay import WARM, Replay

PIECE = 2048  # tokens of a row that prefill reads at once
PREFILL = 65_536  # tokens that are prefilled for a cell; a batch that needs more repeats its first rows
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
    for part in sides.values():
        longest = getattr(part.config, "max_position_embeddings", None)
        if longest and max(options.context) > longest:
            console.warn(f"{part.source} is made for {longest} tokens: beyond them only speed and bytes mean anything")
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
    graphs = any("graph_step_ms" in cell for cell in cells)
    console.table(
        f"decode of {source}, tokens/s on {report['machine']['device']}",
        ("context", "batch", "model", "prefill/s", "decode/s", "ms/step", "graph/s" if graphs else "p10-p90", "cache"),
        [_row(cell, graphs) for cell in cells],
    )
    if graphs:
        console.line("graph/s: the step as one CUDA graph; decode/s is bound by launching its kernels where it is less")
    for reason in dict.fromkeys(cell["graph_error"] for cell in cells if "graph_error" in cell):
        console.line(f"no CUDA graph of a step: {reason}")
    if model.ours:
        path = Path(source).expanduser() / "eval" / "decode.json"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        atomic_write_text(path, json.dumps(report, indent=2) + "\n")
        console.line(f"wrote {path}")
    console.result(report)
    return report


def _cells(side: str, model: Model, options: Options, device: torch.device, console: Console) -> list[dict]:
    cells = [{"model": side, "context": at, "batch": batch} for at in options.context for batch in options.batch]
    try:
        net = model.load(device, options.dtype)
        measure(net, 16, 1, 1, options.seed)  # what runs for the first time also compiles and allocates
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        console.warn(f"out of memory while loading {model.source}: --dtype bfloat16 or --device cpu")
        return [cell | {"error": "out of memory"} for cell in cells]
    with console.stage(f"{side}: decode", len(cells), "cells") as bar:
        for cell in cells:
            try:
                cell |= measure(net, cell["context"], cell["batch"], options.steps, options.seed)
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                cell["error"] = "out of memory"
            free_memory(device)
            bar.advance(1, context=cell["context"], batch=cell["batch"])
    del net
    free_memory(device)
    return cells


def _out_of_memory(error: Exception) -> bool:
    """torch's allocator for the CPU, and cuBLAS, raise plain RuntimeErrors."""
    words = ("out of memory", "not enough memory", "allocate memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


@torch.no_grad()
def measure(net: PreTrainedModel, context: int, batch: int, steps: int, seed: int = 0) -> dict:
    """Prefill `batch` rows of `context` random tokens, then decode `steps` tokens of each, greedily.

    At most PREFILL tokens are prefilled (one row at least); the cache of a larger batch repeats these rows. Returns
    tokens per second of both, milliseconds a step (median, 10th and 90th percentile, WARM_UP steps left out) and the
    bytes that the cache holds after the prefill; on a GPU, whose times are those of its events, also what
    :func:`replayed` does.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = min(batch, max(1, PREFILL // context))
    ids = torch.randint(net.config.vocab_size, (rows, context), generator=generator).to(net.device)
    clock = _clock(net.device)
    if net.device.type == "cuda":
        _prefill(net, ids[:, : 2 * PIECE], DynamicCache(config=net.config))
    cache = DynamicCache(config=net.config)
    tokens, prefill = clock(lambda: _prefill(net, ids, cache))
    if rows < batch:
        repeated = torch.arange(batch, device=net.device) % rows
        cache.batch_select_indices(repeated)
        tokens = tokens[repeated]
    held = cache_bytes(cache)
    times = []
    for _ in range(WARM_UP + steps):
        tokens, seconds = clock(lambda tokens=tokens: _step(net, tokens, cache))
        times.append(seconds)
    times = torch.tensor(times[WARM_UP:], dtype=torch.float64)
    median, low, high = (1e3 * float(times.quantile(q)) for q in (0.5, 0.1, 0.9))
    result = {
        "prefill_tokens_per_second": rows * context / prefill,
        "prefill_rows": rows,
        "decode_tokens_per_second": 1e3 * batch / median,
        "step_ms": {"median": median, "p10": low, "p90": high},
        "cache_bytes": held,
    }
    return result | (replayed(net, tokens, cache, steps) if net.device.type == "cuda" else {})


class Room(DynamicLayer):
    """Keys and values in memory that has room for more tokens, where a DynamicLayer copies all of them at every step.

    It takes them out of `layer`, which must not be used afterwards.
    """

    def __init__(self, layer: DynamicLayer, more: int) -> None:
        super().__init__()
        self.rooms = []
        for name in ("keys", "values"):
            held = getattr(layer, name)  # [B, H, tokens, D]
            self.rooms.append(held.new_empty(*held.shape[:2], held.shape[2] + more, held.shape[3]))
            length = held.shape[2]
            self.rooms[-1][:, :, :length] = held
            setattr(layer, name, None)  # a cache may be larger than half of the memory
            del held
        self.device, self.is_initialized = self.rooms[0].device, True
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (room[:, :, :length] for room in self.rooms)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()
        end = length + key_states.shape[2]
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, length:end] = new
        self._show(end)
        return self.keys, self.values


@torch.no_grad()
def replayed(net: PreTrainedModel, tokens: Tensor, cache: DynamicCache, steps: int) -> dict:
    """Time of the step after `cache`, tokens [B, 1], as one CUDA graph, with room for keys and values set aside.

    That is what a server with graphs reaches with the same kernels: nothing waits for the CPU to launch a kernel, and
    the cache is not copied. The same step is replayed `steps` times. Returns ``{"graph_step_ms",
    "graph_tokens_per_second"}``, or ``{"graph_error"}`` with the reason why there is no graph. The cache is used up.
    """
    replay = Replay(lambda tokens: _step(net, tokens, cache))
    try:
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = Room(layer, WARM + 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(WARM + 1):
                # What the captured step reads: a mixer's state makes way for the next one.
                before = [dict(vars(layer)) for layer in cache.layers]
                tokens = replay(tokens)
        if not replay.graphs:
            return {"graph_error": one_line(told[-1].message) if told else "the device has none"}
        seconds = _clock(net.device)(lambda: [replay(tokens) for _ in range(steps)][-1])[1]
    except (MemoryError, RuntimeError) as error:
        return {"graph_error": "out of memory" if _out_of_memory(error) else one_line(error)[:200]}
    del before
    return {"graph_step_ms": 1e3 * seconds / steps, "graph_tokens_per_second": len(tokens) * steps / seconds}


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


def _row(cell: dict, graphs: bool) -> tuple:
    head = cell["context"], cell["batch"], cell["model"]
    if "error" in cell:
        return (*head, cell["error"], None, None, None, None)
    ms, graph = cell["step_ms"], cell.get("graph_tokens_per_second")
    shown = f"{ms['p10']:.2f}-{ms['p90']:.2f}"
    if graphs:
        shown = None if graph is None else format_count(graph)
    return (
        *head,
        format_count(cell["prefill_tokens_per_second"]),
        format_count(cell["decode_tokens_per_second"]),
        f"{ms['median']:.2f}",
        shown,
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
