"""What a conversion would do and need, from the config and the safetensors headers alone."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from linearize.checkpoint import format_bytes
from linearize.console import Console, format_count, format_seconds
from linearize.data import check_sources
from linearize.errors import UsageError, UserError, one_line
from linearize.export import exportable
from linearize.families import Family, family_of
from linearize.hidden import states_budget
from linearize.mixers import MIXERS, HeadShape
from linearize.processes import pick_device
from linearize.recipe import Recipe
from linearize.teacher import empty_model, open_teacher, stored_shapes

LENGTHS = (1024, 8192, 32768)  # tokens at which the caches are compared
CHUNK = 64  # tokens that the mixers' kernels take at once
H200_BYTES = 142e9  # of an H200's memory, without what CUDA and fragments take
# What the search for a layer's start evaluates: this many memories on the tokens that choose.
SEARCHED = 12
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # safetensors names


@dataclass(frozen=True)
class Measured:
    """Floating point operations a second that the stages of :func:`work` reached with layers of a model.

    hidden: the model's hidden size. A stage that was not measured with it has no rate.
    """

    model: str
    hidden: int
    rates: dict[str, float]


# From narrow to wide. SmolLM2: results.json of the recipes smollm2-135m-cpu-demo and smollm2-135m-start, with loading
# and writing; its alignment on the GPU was timed apart (1.97M tokens a second and layer, steps of 8192), and text in
# bf16 moves at least as fast, as it is less work and fewer kernels than such a step. The others: single layers
# with random weights, from recipes/costs by table.py --rates, distillation without CUDA graphs, as several GPUs run it.
# A CPU computes in fp32 only. Tests compare all that is in a file.
RATES = {
    "two CPU cores": [
        Measured("SmolLM2-135M", 576, {"forward_fp32": 60e9, "forward_bf16": 60e9, "calibrate": 13e9, "align": 25e9})
    ],
    "one H200": [
        Measured(
            "SmolLM2-135M",
            576,
            {"forward_fp32": 2.2e12, "forward_bf16": 14e12, "calibrate": 0.43e12, "align": 17e12},
        ),
        Measured(
            "Qwen3-8B",
            4096,
            {
                "forward_fp32": 43.3e12,
                "forward_bf16": 396e12,
                "calibrate": 11.6e12,
                "align": 189e12,
                "distill": 329e12,
            },
        ),
        Measured(
            "Llama-3.1-70B",
            8192,
            {"forward_fp32": 48e12, "forward_bf16": 527e12, "calibrate": 17e12, "align": 338e12, "distill": 519e12},
        ),
    ],
}


@dataclass(frozen=True)
class States:
    """Hidden states in bytes, as :class:`linearize.layerwise.Layerwise` keeps them.

    memory: of one process, at most at a time. files: of all processes together. own, copy: of the alignment text, the
    share of it that a process moves, and the copy of all rows that it trains a layer on (0 for a single process, which
    trains on its share). own_in_file, copy_in_file: whether those are beyond align.cache_bytes.
    """

    memory: int
    files: int
    own: int
    copy: int
    own_in_file: bool
    copy_in_file: bool


@dataclass(frozen=True)
class Source:
    """A teacher as far as its headers tell.

    shapes: tensor shapes by name that are still to be checked; None where open_teacher has checked them, and for a
    .gguf file. download: bytes that convert fetches first. unpack: whether it keeps a dequantised copy in its cache.
    """

    model: str
    config: PreTrainedConfig
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]] | None = None
    download: int = 0
    unpack: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """One layer: what it is, what it becomes, and what it holds. Sizes in bytes, per sequence."""

    layer: int
    now: str
    becomes: str
    parameters: int  # of the attention module, as far as it stays
    mixer_parameters: int
    kv_bytes_per_token: int
    window: int | None
    state_bytes: int
    state_bytes_per_token: int  # 0 but for a mixer that keeps something of every token

    def cache_bytes(self, tokens: int, converted: bool) -> int:
        """Bytes this layer holds of a sequence of `tokens`, as the teacher has it or as the student will."""
        if converted and self.state_bytes:
            return self.state_bytes + tokens * self.state_bytes_per_token
        return self.kv_bytes_per_token * min(tokens, self.window or tokens)

    @property
    def breaks_even(self) -> int | None:
        """Tokens from which on the converted layer holds no more than the teacher's; None if there are none."""
        saved = self.kv_bytes_per_token - self.state_bytes_per_token
        return -(-self.state_bytes // saved) if self.state_bytes and saved > 0 else None


@dataclass(frozen=True)
class Plan:
    """Everything `linearize plan` says. Sizes in bytes; memory, disk and time are estimates, see :func:`make_plan`.

    seconds: by device, where there is an estimate. seconds_from: by device, what it rests on or why there is none.
    """

    model: str
    family: str
    notes: str
    dtype: str
    parameters: int
    mixer_parameters: int
    layers: list[LayerPlan]
    cache: list[dict[str, int]]
    calibrate_tokens: int
    align_tokens_per_layer: int
    align_steps_per_layer: int
    align_tokens: int
    distill_tokens: int
    memory: dict[str, int]
    distill_memory: dict[str, int]
    select_memory: dict[str, int]
    disk: dict[str, int]
    seconds: dict[str, float]
    seconds_from: dict[str, str]
    export: dict[str, str | None]  # by target: why the student cannot be written so, None when it can

    @property
    def converted(self) -> list[int]:
        return [layer.layer for layer in self.layers if layer.state_bytes]

    def memories(self) -> dict[str, dict[str, int]]:
        """The parts of the memory that each stage needs, by what it is called; {} for a stage that is left out."""
        return {
            "memory, layer by layer": self.memory,
            "memory, choosing layers": self.select_memory,
            "memory, end to end": self.distill_memory,
        }

    def summary(self) -> str:
        """The plan in one line, as convert prints it before it starts."""
        kinds = sorted({layer.becomes for layer in self.layers if layer.state_bytes})
        kept = [str(layer.layer) for layer in self.layers if not layer.state_bytes]
        stays = f"{len(kept)}, measured first" if self.select_memory else ", ".join(kept) or "none"
        memory = format_bytes(max(sum(parts.values()) for parts in self.memories().values()))
        disk = format_bytes(sum(self.disk.values()))
        return (
            f"{self.model}: {self.family}, {format_count(self.parameters)} parameters; {len(self.converted)} of "
            f"{len(self.layers)} layers become {' and '.join(kinds)}, softmax stays in {stays}; "
            f"memory about {memory}, disk about {disk}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints: the numbers of the tables under stable keys."""
        return asdict(self) | {
            "converted_layers": self.converted,
            "memory_bytes": sum(self.memory.values()),
            "distill_memory_bytes": sum(self.distill_memory.values()),
            "select_memory_bytes": sum(self.select_memory.values()),
            "disk_bytes": sum(self.disk.values()),
        }

    def show(self, console: Console) -> None:
        """Print the tables, or with --json the object."""
        console.table(
            f"{self.model} ({self.family}, {format_count(self.parameters)} parameters, {self.dtype})",
            ("layer", "is", "becomes", "parameters", "new", "KV B/token", "state B", "breaks even at"),
            [
                (
                    at.layer,
                    at.now,
                    at.becomes,
                    at.parameters,
                    at.mixer_parameters or None,
                    at.kv_bytes_per_token,
                    at.state_bytes or None,
                    at.breaks_even,
                )
                for at in self.layers
            ],
        )
        console.table(
            "cache, all layers",
            ("sequences", "tokens each", "teacher", "student", "student / teacher"),
            [
                (c["batch"], c["tokens"], format_bytes(c["teacher"]), format_bytes(c["student"]), _share(c))
                for c in self.cache
            ],
        )
        needs = [("calibration tokens", format_count(self.calibrate_tokens))]
        needs.append(
            (
                "alignment tokens",
                f"{format_count(self.align_tokens_per_layer)} x {len(self.converted)} layers "
                f"({self.align_steps_per_layer} steps each)",
            )
        )
        if self.distill_tokens:
            needs.append(("distillation tokens", format_count(self.distill_tokens)))
        for title, parts in (self.memories() | {"disk": self.disk}).items():
            if parts:
                needs.append((title, f"about {format_bytes(sum(parts.values()))}"))
                needs += [(f"  {name.replace('_', ' ')}", format_bytes(size)) for name, size in parts.items()]
        for device, basis in self.seconds_from.items():
            seconds = self.seconds.get(device)
            about = "no estimate" if seconds is None else f"about {format_seconds(seconds)}"
            needs.append((f"time on {device}", f"{about}: {basis}"))
        needs += [(f"export to {name}", f"no: {why}" if why else "yes") for name, why in self.export.items()]
        console.table("what convert needs", ("", "amount"), needs)
        if self.notes:
            console.line(f"note: {self.notes}")
        if warning := memory_warning(self):
            console.warn(warning)
        console.result(self.as_dict())


def _share(cache: dict[str, int]) -> str:
    return f"{100 * cache['student'] / cache['teacher']:.1f} %"


def plan_model(
    model: str, recipe: Recipe, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = (1,)
) -> Plan:
    """The plan of `linearize convert MODEL`. Raises UserError for whatever would stop it from starting.

    lengths, batches: tokens and numbers of sequences at which the caches of teacher and student are compared.
    """
    pick_device(recipe.run.device)
    check_sources(recipe.data.source)
    return make_plan(read_source(model, recipe), recipe, lengths, batches)


def read_source(model: str, recipe: Recipe) -> Source:
    """Read config and headers of a folder, a .gguf file or a Hub id; no weight is read or downloaded.

    Raises UserError as open_teacher does, which opens a folder here just as it will for convert.
    """
    path, revision = Path(model).expanduser(), recipe.model.revision
    if not path.is_file():
        return _local(model, recipe) if path.exists() else _hub(model, path, revision)
    if revision is not None:
        raise UsageError("a revision belongs to a Hub id, and this is a local path", value=model, fix="drop --revision")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the parser indexes into whatever bytes it finds
        raise UserError("not a readable .gguf file", value=model, fix=one_line(error)) from error
    return Source(model, config, torch.float32, unpack=True)


def _local(model: str, recipe: Recipe) -> Source:
    teacher = open_teacher(model, revision=recipe.model.revision, trust_remote_code=recipe.model.trust_remote_code)
    return Source(model, teacher.config, teacher.dtype)


def _hub(model: str, path: Path, revision: str | None) -> Source:
    import huggingface_hub

    try:
        file = huggingface_hub.hf_hub_download(model, "config.json", revision=revision)
        fields = json.loads(Path(file).read_bytes())
    except (OSError, ValueError) as error:  # the Hub's own errors, a name that cannot be one, a file that is not JSON
        looked = f"no file or folder {path.absolute()}; on the Hub: {one_line(error)}"
        raise UserError("no such model", value=model, fix=looked) from error
    family = family_of(fields)
    try:
        config = family.config_class().from_pretrained(Path(file).parent, local_files_only=True)
        files = huggingface_hub.get_safetensors_metadata(model, revision=revision).files_metadata
    except Exception as error:  # of the transport, of the repository or of the files
        raise UserError("cannot read the model's headers on the Hub", value=model, fix=one_line(error)) from error
    headers = {name: info for file in files.values() for name, info in file.tensors.items()}
    by_dtype: Counter[str] = Counter()
    for info in headers.values():
        by_dtype[info.dtype] += info.data_offsets[1] - info.data_offsets[0]
    most = by_dtype.most_common(1)[0][0]
    if most not in DTYPES:
        raise UserError("the weights are not floating point of 16 bits or more", value=model, fix=f"they are {most}")
    shapes = {name: tuple(info.shape) for name, info in headers.items()}
    return Source(model, config, DTYPES[most], shapes, download=by_dtype.total())


def make_plan(
    source: Source, recipe: Recipe, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = (1,)
) -> Plan:
    """Work out the plan of a teacher. Raises UserError for a family or layers that cannot be converted.

    Memory, layer by layer, of one process: one block in fp32 with AdamW's gradient and two moments for its attention
    and mixer, embeddings and head in fp32, the hidden states of the text as far as align.cache_bytes allows
    (:func:`hidden_states`), and one step's activations; on a GPU all of it is there. Choosing layers: the student
    without softmax and a second softmax layer beside each of its own in fp32, and the teacher. End to end, in one
    process: fp32 weights, gradients, two moments and the running mean of what trains, the rest in fp32, and the
    teacher. Disk, at most at a time, of all processes: the checkpoint; the finished layers in fp32 that a stopped run
    goes on from, and where all are calibrated first their starts; those of the student that layers are chosen in;
    beside the checkpoint the states and the result of distillation; hidden states beyond the budget; and a .gguf file's
    dequantised copy or the download. Time, in one process: the operations of :func:`work` at rates that were measured,
    see :func:`rate`; none where layers are chosen, which was not. Downloads and the disk are not in it.
    """
    config, family = source.config, family_of(source.config)
    model = empty_model(family, config, source.model, source.shapes)
    _check_tensors(source, model, family)
    blocks = model.model.layers
    specs = recipe.mixer_specs(len(blocks))
    dtype = source.dtype if recipe.run.dtype == "auto" else getattr(torch, recipe.run.dtype)
    shape = replace(HeadShape.from_config(config), itemsize=dtype.itemsize)
    layers = [_layer(i, block, family, config, shape, specs.get(i)) for i, block in enumerate(blocks)]

    parameters = _count(model)
    new = sum(layer.mixer_parameters for layer in layers)
    stays = parameters - sum(
        _count(getattr(block, family.attention)) - at.parameters for block, at in zip(blocks, layers, strict=True)
    )
    trained = max(layer.parameters + layer.mixer_parameters for layer in layers if layer.state_bytes)
    align, calibrate, world = recipe.align, recipe.calibrate, int(os.environ.get("WORLD_SIZE", "1"))
    step_tokens = max(1, align.batch_tokens // align.context) * align.context
    steps = max(1, align.tokens // step_tokens) if align.tokens else 0
    block = max(_count(block) for block in blocks)
    measured = recipe.measured_count() is not None
    every = layers
    if measured:
        linear = recipe.replace({"convert.keep_softmax": "none"}).mixer_specs(len(blocks))
        every = [_layer(i, block, family, config, shape, linear[i]) for i, block in enumerate(blocks)]
    rows = max(align.batch_tokens if align.tokens else 0, calibrate.context)
    width = config.hidden_size + 2 * config.intermediate_size + 6 * shape.q_heads * shape.key_dim
    states = hidden_states(recipe, config.hidden_size, len(specs), world)
    distill_memory = _distill_memory(recipe, layers, parameters, stays)
    disk = {
        "checkpoint": stays * dtype.itemsize + 4 * new,
        "finished_layers": _saved_layers(layers, recipe, world),
    }
    if measured:
        disk["choosing_layers"] = _saved_layers(every, recipe, world)
    if recipe.distill.tokens:
        # Weights and moments, as much as gradients and moments. The old state goes after the new one is whole, the last
        # after the result is, and the result after the checkpoint.
        state, result = distill_memory["gradients_and_moments"], disk["checkpoint"]
        disk["distillation"] = max(2 * state, state + result, 2 * result) - result
    if states.files:
        disk["hidden_states"] = states.files
    if source.unpack:
        disk["dequantised_copy"] = 4 * parameters
    if source.download:
        disk["download"] = source.download
    if measured:
        seconds, seconds_from = {}, dict.fromkeys(RATES, "choosing layers was not measured")
    else:
        flops = work(config, model, shape, recipe, len(specs))
        held = sum(distill_memory.values()) <= H200_BYTES
        seconds, seconds_from = _times(flops, config.hidden_size, bool(states.files), held)
    return Plan(
        model=source.model,
        family=family.model_type,
        notes=_notes(family, layers, recipe.measured_count()),
        dtype=str(dtype).removeprefix("torch."),
        parameters=parameters,
        mixer_parameters=new,
        layers=layers,
        cache=[
            {
                "batch": batch,
                "tokens": tokens,
                "teacher": batch * sum(layer.cache_bytes(tokens, False) for layer in layers),
                "student": batch * sum(layer.cache_bytes(tokens, True) for layer in layers),
            }
            for batch in batches
            for tokens in lengths
        ],
        calibrate_tokens=calibrate.tokens,
        align_tokens_per_layer=align.tokens,
        align_steps_per_layer=steps,
        align_tokens=align.tokens * len(specs),
        distill_tokens=recipe.distill.tokens + recipe.distill.long_tokens,
        memory={
            "block_and_optimizer": 4 * block + (12 * trained if align.tokens else 0),
            "embeddings_and_head": 4 * (parameters - sum(_count(block) for block in blocks)),
            "hidden_states": states.memory,
            "activations": 4 * rows * width,
        },
        distill_memory=distill_memory,
        select_memory=_select_memory(recipe, every, parameters) if measured else {},
        disk=disk,
        seconds=seconds,
        seconds_from=seconds_from,
        export={"qwen3_5": exportable(config, specs)},
    )


def _notes(family: Family, layers: list[LayerPlan], measured: int | None) -> str:
    notes = []
    if measured is not None:
        notes.append(f"convert measures which {measured} layers keep their softmax; evenly spaced ones stand in here")
    # What a family notes is about windows or capped logits, which only some configurations have.
    if family.notes and (family.softmax == "eager" or any(at.window for at in layers if at.state_bytes)):
        notes.append(family.notes)
    return "; ".join(notes)


def _calibrates_first(recipe: Recipe, world: int) -> bool:
    """Whether all layers are calibrated before any is aligned, and processes share the alignment."""
    return recipe.align.order == "calibrate-first" or (recipe.align.order == "auto" and world > 1)


def _saved_layers(layers: list[LayerPlan], recipe: Recipe, world: int) -> int:
    """Bytes of converted layers as a run keeps them, and of their starts where those are kept as well."""
    saved = sum(at.parameters + at.mixer_parameters for at in layers if at.state_bytes)
    return 4 * saved * (1 + _calibrates_first(recipe, world))


def hidden_states(recipe: Recipe, hidden_size: int, converted: int, world: int = 1) -> States:
    """What `world` processes that convert `converted` layers keep of the text as it moves up the layers.

    Calibration and held-out text have states of teacher and student, alignment the teacher's. In the interleaved order
    one process keeps all at the same time, else one text comes after the other. The budget is for every text on its
    own, but for a share and the copy of all rows together, of which the copy comes first where it fits.
    """
    size = getattr(torch, recipe.align.cache_dtype).itemsize * hidden_size
    gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
    budget = states_budget(recipe.align.cache_bytes, torch.device("cuda" if gpu else "cpu"))
    calibration, alignment, heldout = (
        size * tokens for tokens in (recipe.calibrate.tokens, recipe.align.tokens, recipe.data.heldout_tokens)
    )
    first = _calibrates_first(recipe, world)
    own, copy = alignment, 0
    if first and world > 1:
        own, copy = -(-alignment // world), alignment
    own_in_file = own > budget - (copy if copy <= budget else 0)
    copy_in_file = copy > budget - (0 if own_in_file else own)
    in_file = [calibration > budget, heldout > budget]
    both = [2 * calibration, 2 * heldout]
    together = max if first else sum
    processes = world if first else 1
    return States(
        memory=together(
            [
                *(0 if beyond else size for size, beyond in zip(both, in_file, strict=True)),
                own * (not own_in_file) + copy * (not copy_in_file),
            ]
        ),
        files=together(
            [
                *(size if beyond else 0 for size, beyond in zip(both, in_file, strict=True)),
                processes * own * own_in_file + min(processes, converted) * copy * copy_in_file,
            ]
        ),
        own=own,
        copy=copy,
        own_in_file=own_in_file,
        copy_in_file=copy_in_file,
    )


def _teacher_itemsize(device: str) -> int:
    """Bytes of a weight of the whole teacher beside the whole student: bf16 on a GPU, else fp32."""
    return 2 if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else 4


def _select_memory(recipe: Recipe, layers: list[LayerPlan], parameters: int) -> dict[str, int]:
    """layers: all of them converted; parameters: of the teacher."""
    return {
        "student": 4 * (parameters + sum(at.mixer_parameters for at in layers)),
        "second_softmax": 4 * sum(at.parameters for at in layers),
        "teacher": _teacher_itemsize(recipe.run.device) * parameters,
    }


def _distill_memory(recipe: Recipe, layers: list[LayerPlan], parameters: int, stays: int) -> dict[str, int]:
    """parameters: of the teacher; stays: those of them that the student keeps."""
    options = recipe.distill
    if not options.tokens:
        return {}
    new = sum(at.mixer_parameters for at in layers)
    attention = sum(at.parameters for at in layers if at.state_bytes)
    trained = {"all": stays + new, "attention": attention + new, "mixers": new}[options.train]
    return {
        "student": 4 * (stays + new),
        "gradients_and_moments": (12 + 4 * bool(options.ema)) * trained,
        "teacher": _teacher_itemsize(recipe.run.device) * parameters,
    }


def work(
    config: PreTrainedConfig, model: nn.Module, shape: HeadShape, recipe: Recipe, converted: int
) -> dict[str, float]:
    """Floating point operations of a conversion by stage; two for a multiply and add.

    forward_fp32: calibration and held-out text through every layer, teacher and student, and held-out text through the
    head. forward_bf16: alignment text through every layer. calibrate: on each converted layer, the search on the tokens
    that choose, and queries, keys, values and the refit of the output on all. align: teacher forward, student forward
    and backward. distill: with weights alone, the teacher forward, the student forward, again where it checkpoints, and
    backward, heads included. A memory of a head costs a token ``6 K V + 2 C (3 K + V)`` in chunks of C.
    """
    calibrate, align, distill = recipe.calibrate, recipe.align, recipe.distill
    heads, key, value = shape.q_heads, shape.key_dim, shape.value_dim
    blocks = model.model.layers
    memory = heads * (6 * key * value + 2 * CHUNK * (3 * key + value))
    attention = 2 * _count(blocks[0].self_attn)
    layers = len(blocks) * attention + sum(2 * _used(block, config) for block in blocks)
    head = 2 * config.hidden_size * config.vocab_size
    heldout = recipe.data.heldout_tokens
    chosen = min(calibrate.select_tokens, calibrate.tokens)
    refit = 2 * (heads * value) ** 2
    # Gradients of weights as far as they train, and of what goes into all layers and the head.
    trained = {"all": layers + head, "attention": converted * attention, "mixers": 0}[distill.train]
    step = (3 + distill.checkpointing) * layers + 3 * head + trained
    return {
        "forward_fp32": 2 * (calibrate.tokens + heldout) * layers + 2 * heldout * head,
        "forward_bf16": align.tokens * layers,
        "calibrate": converted * (chosen * SEARCHED * memory + calibrate.tokens * (2 * attention + memory + refit)),
        "align": converted * align.tokens * (4 * attention + 3 * memory),
        "distill": (distill.tokens + distill.long_tokens) * step,
    }


def rate(stage: str, hidden: int, measured: list[Measured]) -> tuple[float, list[str]] | None:
    """(operations a second of a stage at a hidden size, the models whose measurements say so), or None.

    Between two measured sizes both logarithms run straight; beyond the widest and a little below the narrowest its rate
    stands. At less than half of the narrowest nothing is said: starting kernels takes a share there that nobody knows.
    """
    points = [point for point in measured if stage in point.rates]
    if not points or 2 * hidden < points[0].hidden:
        return None
    low = max((point for point in points if point.hidden <= hidden), key=lambda p: p.hidden, default=points[0])
    high = min((point for point in points if point.hidden >= hidden), key=lambda p: p.hidden, default=points[-1])
    if low is high:
        return low.rates[stage], [low.model]
    share = math.log(hidden / low.hidden) / math.log(high.hidden / low.hidden)
    return low.rates[stage] ** (1 - share) * high.rates[stage] ** share, [low.model, high.model]


def _times(
    flops: dict[str, float], hidden: int, files: bool, held: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by device, and what they rest on or why there are none.

    files: whether hidden states are in files, whose time is not counted. held: whether an H200 holds the distillation.
    """
    seconds, basis = {}, {}
    for device, measured in RATES.items():
        found = {stage: rate(stage, hidden, measured) for stage, count in flops.items() if count}
        lacking = [stage for stage, at in found.items() if at is None]
        if lacking:
            what = "distillation" if lacking == ["distill"] else "a conversion"
            least = next((point.model for point in measured if lacking[0] in point.rates), None)
            basis[device] = f"{what} was not measured" + (f" with much narrower layers than {least}'s" if least else "")
            continue
        seconds[device] = sum(flops[stage] / speed for stage, (speed, _) in found.items())
        used = {name for _, names in found.values() for name in names}
        names = [point.model for point in measured if point.model in used]
        basis[device] = f"at rates of the layers of {' and '.join(names)}" + ", without files of hidden states" * files
        if device == "one H200" and not held:
            basis[device] += "; one does not hold the distillation, several share that time"
    return seconds, basis


def _used(block: nn.Module, config: PreTrainedConfig) -> float:
    """Weights of a block beyond its attention that one token meets: of the experts only the chosen ones."""
    of_experts = sum(p.numel() for name, p in block.named_parameters() if ".experts." in name)
    others = _count(block) - _count(block.self_attn) - of_experts
    if of_experts:
        of_experts *= config.num_experts_per_tok / config.num_experts
    return others + of_experts


def _layer(
    i: int,
    block: nn.Module,
    family: Family,
    config: PreTrainedConfig,
    shape: HeadShape,
    spec: dict | None,
) -> LayerPlan:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds and kinds[i] != "sliding_attention":
        window = None
    mixer_parameters = state = growth = 0
    attention = getattr(block, family.attention)
    if spec is not None:
        options = {name: value for name, value in spec.items() if name != "kind"}
        mixer = MIXERS[spec["kind"]]
        state = mixer.state_bytes(shape, **options)
        growth = mixer.state_bytes(shape, tokens=1, **options) - state
        with torch.device("meta"):
            mixer_parameters = _count(mixer(shape, **options))
        if mixer.own_projections:
            attention = attention.o_proj
    now = f"softmax, window {window}" if window else "softmax"
    return LayerPlan(
        layer=i,
        now=now,
        becomes=spec["kind"] if spec else now,
        parameters=_count(attention),
        mixer_parameters=mixer_parameters,
        kv_bytes_per_token=shape.itemsize * shape.kv_heads * (shape.key_dim + shape.value_dim),
        window=window,
        state_bytes=state,
        state_bytes_per_token=growth,
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _check_tensors(source: Source, model: nn.Module, family: Family) -> None:
    """UserError when the headers lack a weight of the model or have it in another shape."""
    if source.shapes is None:
        return
    tied = model.all_tied_weights_keys
    partner = {**tied, **{origin: name for name, origin in tied.items()}}
    for name, shape in stored_shapes(model, family).items():
        found = source.shapes.get(name, source.shapes.get(partner.get(name)))
        if found is None:
            raise UserError("the checkpoint lacks a tensor", value=source.model, fix=f"there is no {name}")
        if found != shape:
            shapes = f"{list(found)}, and config.json asks for {list(shape)}"
            raise UserError("a tensor does not fit config.json", value=source.model, fix=f"{name} is {shapes}")


def memory_warning(plan: Plan) -> str | None:
    """What to say when the machine has less memory than the plan asks for, or None."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for parts, fix in (
        (plan.memory, "lower --align-batch-tokens or --align-cache-bytes"),
        (plan.select_memory, "name the layers in --keep-softmax"),
        (plan.distill_memory, "share it over more processes, or train less with --distill-train mixers"),
    ):
        if sum(parts.values()) > here:
            return (
                f"about {format_bytes(sum(parts.values()))} of memory are needed and this machine has "
                f"{format_bytes(here)}: {fix}"
            )
    return None
