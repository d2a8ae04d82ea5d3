"""The main job: plan, calibrate and align one layer after another, measure, write. Running it again goes on."""

import copy
import ctypes
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import transformers
from torch import Tensor, nn

from linearize import __version__
from linearize.align import Step, align_layer
from linearize.calibrate import calibrate_layer
from linearize.card import licence_of, model_card
from linearize.checkpoint import RunState, atomic_write_text, format_bytes
from linearize.console import Console
from linearize.data import Rows, bundled_documents, content_hash, pack_rows, read_documents, self_text, split_documents
from linearize.errors import UserError
from linearize.evaluate import continue_text, perplexity
from linearize.mixers import HeadShape, MixedAttention, Sample, Segments, build_mixer
from linearize.observe import observe
from linearize.plan import Plan, plan_model
from linearize.recipe import Recipe
from linearize.student import packed_starts, student_config, student_name, write_shim
from linearize.teacher import BlockRunner, Teacher, open_teacher

BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}  # tokens of calibration text that go through a layer at once


@dataclass
class Text:
    """Rows of text by purpose; no held-out document is among the others."""

    calibration: Rows
    alignment: Rows | None
    heldout: Rows | None


@dataclass
class Stream:
    """The hidden states of some rows as they move up the layers, of the teacher and, where needed, the student."""

    rows: Rows
    teacher: Tensor
    student: Tensor | None = None


def convert(model: str, out: Path, recipe: Recipe, console: Console) -> dict:
    """Convert MODEL by the recipe, write OUT and print the comparison; returns what OUT/linearize.json holds."""
    plan = plan_model(model, recipe)
    console.line(plan.summary())
    teacher = open_teacher(
        model, revision=recipe.model.revision, trust_remote_code=recipe.model.trust_remote_code, say=console.line
    )
    specs = recipe.mixer_specs(teacher.config.num_hidden_layers)
    identity = {"teacher": _teacher_identity(teacher), "recipe": recipe.fingerprint()}
    needed = plan.disk["checkpoint"] + plan.disk["finished_layers"]
    with RunState(out, identity, overwrite=recipe.run.overwrite, needed=needed, say=console.line) as run:
        if run.finished:
            record = _read_record(out)
            console.line(f"{out} is finished; --overwrite starts afresh")
        else:
            record = _measure(plan, teacher, specs, recipe, run, console)
            write_checkpoint(teacher, specs, recipe, record, run, console)
    _show(record, teacher, out, recipe, console)
    return record


def _measure(
    plan: Plan, teacher: Teacher, specs: dict[int, dict], recipe: Recipe, run: RunState, console: Console
) -> dict:
    """Convert every layer and compare teacher and student; a finished measurement is taken as it is."""
    saved = run.load("record")
    if saved is not None and all(run.load_layer(i) is not None for i in specs):
        return saved[1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.run.device != "auto":
        device = torch.device(recipe.run.device)
    began = time.monotonic()
    text = prepare_text(teacher, recipe, device, run, console)
    layers, heldout = convert_layers(teacher, specs, recipe, text, device, run, console)
    record = {
        "linearize": __version__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
        "teacher": _teacher_identity(teacher),
        "recipe": recipe.values(),
        "mixers": {str(i): spec for i, spec in specs.items()},
        "text": {
            name: {"rows": len(rows), "tokens": rows.tokens, "hash": content_hash(rows)}
            for name, rows in vars(text).items()
            if rows is not None
        },
        "layers": layers,
        "heldout": heldout,
        "cache": plan.cache,
        "device": str(device),
        "seconds": round(time.monotonic() - began, 1),
    }
    run.save("record", {}, record)
    return record


# ---- text -----------------------------------------------------------------------------------------------------------


def prepare_text(teacher: Teacher, recipe: Recipe, device: torch.device, run: RunState, console: Console) -> Text:
    """Rows for calibration, alignment and measurement. Raises UserError when the text cannot fill one row."""
    calibrate, align, seed = recipe.calibrate, recipe.align, recipe.run.seed
    source, tokenizer = recipe.data.source, teacher.tokenizer
    if source == "self":
        heldout = bundled_documents("heldout")
        longest = max(calibrate.context, align.context)
        # Whole rows for each, so that the one does not eat the other's.
        wanted = -(-calibrate.tokens // longest) * longest + align.tokens
        model = teacher.family.causal_lm_class().from_pretrained(teacher.folder, dtype=torch.float32).to(device).eval()
        with console.stage("sample text from the teacher", wanted) as bar:
            rows = self_text(
                model, tokenizer, wanted, longest, seed=seed, device=device, progress=bar.advance, cache_path=run.folder
            )
        del model
        calibration, alignment = rows.split(-(-calibrate.tokens // longest))
        if not align.tokens:
            alignment = None
    else:
        if source == "bundled":
            train, heldout = bundled_documents("train"), bundled_documents("heldout")
        else:
            train, heldout = split_documents(read_documents(source))
        # Files often hold one kind of text each, and a start needs only the first few thousand tokens.
        for documents in (train, heldout):
            random.Random(seed).shuffle(documents)
        calibration = _rows(train, tokenizer, calibrate.context, calibrate.tokens, seed)
        alignment = None
        if align.tokens:
            alignment = _rows(train, tokenizer, align.context, align.tokens, seed + 1)
        for rows in (calibration, alignment):
            if rows is not None and rows.shortfall:
                console.line(
                    f"{rows.shortfall}; alignment goes over its rows again" if rows is alignment else rows.shortfall
                )
    measured = None
    if recipe.data.heldout_tokens:
        try:
            measured = _rows(heldout, tokenizer, calibrate.context, recipe.data.heldout_tokens, seed)
        except UserError as error:
            fix = "give more text, lower --calibrate-context, or --heldout-tokens 0 to compare on none"
            raise UserError(f"held-out text: {error.what}", value=error.value, fix=fix) from error
    return Text(calibration, alignment, measured)


def _rows(documents: list[str], tokenizer, context: int, tokens: int, seed: int) -> Rows:
    """Whole windows of single documents where the text has enough of them, else packed rows, full of short contexts."""
    try:
        rows = pack_rows(documents, tokenizer, context, tokens, seed=seed, long_only=True)
        if not rows.shortfall:
            return rows
    except UserError:
        pass  # no document fills a window: pack_rows decides below whether all of them together do
    return pack_rows(documents, tokenizer, context, tokens, seed=seed)


# ---- layers ---------------------------------------------------------------------------------------------------------


def convert_layers(
    teacher: Teacher,
    specs: dict[int, dict],
    recipe: Recipe,
    text: Text,
    device: torch.device,
    run: RunState,
    console: Console,
) -> tuple[list[dict], dict | None]:
    """Calibrate and align every layer of ``specs``, in order, and measure teacher and student on the held-out rows.

    Holds the hidden states of the text and one block; each finished layer is kept by ``run``. Returns one record per
    converted layer and the held-out comparison.
    """
    runner = teacher.runner(device, torch.float32)
    batch = BATCH_TOKENS[device.type]
    shape = HeadShape.from_config(teacher.config)
    written = teacher.dtype if recipe.run.dtype == "auto" else getattr(torch, recipe.run.dtype)

    def stream(rows: Rows | None, student: bool) -> Stream | None:
        if rows is None:
            return None
        hidden = runner.embed(rows.ids)
        return Stream(rows, hidden, hidden.clone() if student else None)

    calibration = stream(text.calibration, True)
    alignment = stream(text.alignment, False)
    heldout = stream(text.heldout, True)
    streams = [s for s in (calibration, alignment, heldout) if s is not None]
    records = []
    for i in range(runner.num_layers):
        with runner.block(i) as layer:
            mixed = None
            if i in specs:
                label = f"({sum(j < i for j in specs) + 1}/{len(specs)})"
                saved = run.load_layer(i)
                mixed = build_mixer(copy.deepcopy(layer.self_attn), specs[i], i, shape).to(device)
                if saved is None:
                    record = _convert_layer(
                        runner, i, layer, mixed, calibration, alignment, recipe, batch, label, console
                    )
                    # Rounded as it will be written: what is measured is what will be loaded.
                    mixed.attn.to(written).float()
                    run.save_layer(i, mixed.state_dict(), record)
                else:
                    mixed.load_state_dict(saved[0], strict=True)
                    record = saved[1]
                mixed.eval().requires_grad_(False)
                records.append(record)
            for s in streams:
                _advance(runner, i, layer, mixed, s, batch)
        del layer, mixed
        _give_back_memory()
    return records, _compare(runner, heldout)


def _give_back_memory() -> None:
    """Return what the C heap keeps of freed weights to the system: glibc would hold on to a model's worth of them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _convert_layer(
    runner: BlockRunner,
    i: int,
    layer: nn.Module,
    mixed: MixedAttention,
    calibration: Stream,
    alignment: Stream | None,
    recipe: Recipe,
    batch: int,
    label: str,
    console: Console,
) -> dict:
    """Calibrate and align one layer; returns its record."""
    record = {"layer": i, "kind": mixed.mixer.kind}
    began = time.monotonic()
    if mixed.mixer.calibrated:
        with console.stage(f"calibrate {label}", calibration.rows.tokens) as bar:
            # Half of what chooses is held out, so that it takes two batches at least.
            samples = _samples(runner, i, layer, calibration, min(batch, recipe.calibrate.select_tokens // 2))
            per_batch = samples[0].q.shape[0] * samples[0].q.shape[1]
            ladder = calibrate_layer(
                mixed, samples, layer.self_attn.scaling, -(-recipe.calibrate.select_tokens // per_batch)
            )
            bar.advance(calibration.rows.tokens, error=ladder.pooled["output"])
        record["ladder"] = {name: round(error, 4) for name, error in ladder.pooled.items()}
        record["heads"] = {name: [round(e, 4) for e in errors] for name, errors in ladder.heads.items()}
    record["calibrate_seconds"] = round(time.monotonic() - began, 2)
    if alignment is not None:
        began = time.monotonic()
        options = recipe.align
        rows = max(1, options.batch_tokens // alignment.rows.context)
        count = max(1, options.tokens // (rows * alignment.rows.context))
        steps = _steps(runner, i, layer, alignment, rows, recipe.run.seed)
        with console.stage(f"align {label}", count * rows * alignment.rows.context) as bar:
            record["losses"] = align_layer(
                mixed,
                steps,
                count,
                options,
                name=f"layer {i}",
                progress=lambda tokens, loss: bar.advance(tokens, loss=loss),
            )
        record["tokens_per_step"] = rows * alignment.rows.context
        record["align_seconds"] = round(time.monotonic() - began, 2)
    return record


def _batches(stream: Stream, tokens: int) -> Iterator[slice]:
    rows = max(1, tokens // stream.rows.context)
    for start in range(0, len(stream.rows), rows):
        yield slice(start, start + rows)


def _kwargs(runner: BlockRunner, i: int, hidden: Tensor, positions: Tensor) -> tuple[dict, Tensor | None]:
    """What the base model would hand layer i for these packed rows, and the document starts for a mixer."""
    reset = packed_starts(positions, len(hidden))
    kwargs = runner.layer_kwargs(i, hidden, positions if reset is not None else None)
    return kwargs, None if reset is None else reset.to(hidden.device)


def _samples(runner: BlockRunner, i: int, layer: nn.Module, stream: Stream, batch: int) -> list[Sample]:
    if len(stream.rows) < 2:
        raise UserError(
            "calibration needs two rows of text, one to fit and one to choose by",
            value=f"1 row of {stream.rows.context} tokens",
            fix="raise --calibrate-tokens, lower --calibrate-context or give more text",
        )
    samples = []
    for part in _batches(stream, min(batch, stream.rows.tokens // 2)):
        kwargs, reset = _kwargs(runner, i, stream.teacher[part], stream.rows.positions[part])
        _, of_teacher = observe(layer, stream.teacher[part], kwargs, attention_only=True)
        _, own = observe(layer, stream.student[part], kwargs, attention_only=True)
        samples.append(Sample(own.x, own.q, own.k, own.v, of_teacher.heads, of_teacher.output, Segments(reset=reset)))
    return samples


def _steps(runner: BlockRunner, i: int, layer: nn.Module, stream: Stream, rows: int, seed: int) -> Iterator[Step]:
    """Endless batches of ``rows`` rows; every pass over the text has an order of its own, fixed by seed and layer."""
    generator = torch.Generator().manual_seed(seed * 100_003 + i)
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < rows:
            order = torch.cat([order, torch.randperm(len(stream.rows), generator=generator)])
        pick, order = order[:rows], order[rows:]
        hidden = stream.teacher[pick.to(stream.teacher.device)]
        kwargs, reset = _kwargs(runner, i, hidden, stream.rows.positions[pick])
        _, seen = observe(layer, hidden, kwargs, attention_only=True)
        yield Step(seen.x, seen.output, {**kwargs, "mixer_reset": reset})


@torch.no_grad()
def _advance(
    runner: BlockRunner, i: int, layer: nn.Module, mixed: MixedAttention | None, stream: Stream, batch: int
) -> None:
    """Move a stream through layer i: the teacher's states through the layer, the student's through its own."""
    softmax = layer.self_attn
    for part in _batches(stream, batch):
        kwargs, reset = _kwargs(runner, i, stream.teacher[part], stream.rows.positions[part])
        stream.teacher[part] = layer(stream.teacher[part], **kwargs)
        if stream.student is not None:
            if mixed is not None:
                layer.self_attn, kwargs = mixed, {**kwargs, "mixer_reset": reset}
            stream.student[part] = layer(stream.student[part], **kwargs)
            layer.self_attn = softmax


def _compare(runner: BlockRunner, heldout: Stream | None) -> dict | None:
    if heldout is None:
        return None
    teacher, tokens = perplexity(runner, heldout.teacher, heldout.rows)
    student, _ = perplexity(runner, heldout.student, heldout.rows)
    return {
        "tokens": tokens,
        "context": heldout.rows.context,
        "teacher_perplexity": teacher,
        "student_perplexity": student,
        "ratio": student / teacher,
        "retained_percent": 100 * teacher / student,
    }


# ---- output ---------------------------------------------------------------------------------------------------------


def write_checkpoint(
    teacher: Teacher, specs: dict[int, dict], recipe: Recipe, record: dict, run: RunState, console: Console
) -> None:
    """Write OUT: weights layer by layer, tokenizer, card, records, and config.json as the last file."""
    chosen = None if recipe.run.dtype == "auto" else getattr(torch, recipe.run.dtype)
    config = student_config(teacher.config, specs, {"source": teacher.source, "revision": teacher.revision})
    config.dtype = chosen or teacher.dtype
    prefixes = {i: teacher.family.layers_prefix.format(i=i) + "self_attn." for i in specs}
    owner = {name: i for i, prefix in prefixes.items() for name in teacher.tensors.names() if name.startswith(prefix)}
    writer = run.writer(recipe.run.max_shard_size)
    names = teacher.tensors.names()
    with console.stage("write", len(names), unit="tensors") as bar:
        for name in names:
            if name not in owner:
                tensor = teacher.tensors.get(name)
                writer.add(name, tensor.to(chosen or tensor.dtype))
                bar.advance()
        for i, prefix in prefixes.items():
            saved = run.load_layer(i)
            if saved is None:
                raise UserError(f"layer {i} is not on disk any more", fix="run the same command again: it is redone")
            for key, tensor in saved[0].items():
                name = prefix + key
                if key.startswith("mixer."):
                    writer.add(name, tensor)
                else:
                    source = prefix + key.removeprefix("attn.")
                    assert student_name(source, specs) == name
                    writer.add(name, tensor.to(chosen or teacher.tensors.dtype(source)))
                    bar.advance()
        writer.finish()
    out = run.out
    teacher.copy_side_files(out)
    write_shim(out)
    atomic_write_text(out / "README.md", model_card(record, licence=licence_of(teacher.folder)))
    metrics = [
        {"layer": layer["layer"], "step": step + 1, "tokens": (step + 1) * layer["tokens_per_step"], "loss": loss}
        for layer in record["layers"]
        for step, loss in enumerate(layer.get("losses", ()))
    ]
    atomic_write_text(out / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in metrics))
    atomic_write_text(out / "recipe.yaml", recipe.to_yaml(f"linearize convert {teacher.source} OUT -r recipe.yaml"))
    atomic_write_text(out / "linearize.json", json.dumps(record, indent=2) + "\n")
    run.finish(config.to_json_string())


def _teacher_identity(teacher: Teacher) -> dict:
    return {"source": teacher.source, "revision": teacher.revision, "model_type": teacher.family.model_type}


def _read_record(out: Path) -> dict:
    path = out / "linearize.json"
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read", value=error, fix="--overwrite converts again") from error


def _show(record: dict, teacher: Teacher, out: Path, recipe: Recipe, console: Console) -> None:
    rows = []
    heldout = record["heldout"]
    if heldout:
        rows.append(("perplexity, held-out text", heldout["teacher_perplexity"], heldout["student_perplexity"]))
        rows.append(("retained", None, f"{heldout['retained_percent']:.1f} %"))
    for cache in record["cache"]:
        name = f"cache at {cache['tokens'] // 1024}k tokens"
        rows.append((name, format_bytes(cache["teacher"]), format_bytes(cache["student"])))
    console.table(f"{out}", ("", "teacher", "student"), rows)
    samples = _samples_of_text(teacher, out, recipe.data.sample) if recipe.data.sample else None
    if samples:
        console.table(f"“{recipe.data.sample}”", ("", "answer"), list(samples.items()))
    console.result({**record, "out": out, "samples": samples})


def _samples_of_text(teacher: Teacher, out: Path, prompt: str) -> dict[str, str]:
    """One greedy answer from each, both models loaded as any user would load them."""
    answers = {}
    for name, load, folder in (
        ("teacher", teacher.family.causal_lm_class().from_pretrained, teacher.folder),
        ("student", transformers.AutoModelForCausalLM.from_pretrained, out),
    ):
        answers[name] = continue_text(load(folder).eval(), teacher.tokenizer, prompt)
    return answers
