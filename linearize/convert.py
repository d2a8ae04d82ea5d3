"""The main job: plan, calibrate and align layer by layer, distil, measure, write. Running it again goes on."""

import functools
import json
import platform
import time
from contextlib import nullcontext
from pathlib import Path

import safetensors
import torch
import transformers

from linearize import __version__
from linearize.assemble import (
    aligned_weights,
    assemble,
    distilled_weights,
    fill,
    holds_distilled,
    save_distilled,
)
from linearize.card import licence_of, model_card
from linearize.checkpoint import RunState, atomic_write_text, format_bytes, read_object, recipe_difference
from linearize.console import Console, format_count, format_seconds
from linearize.corpus import Text, prepare_text, training_streams
from linearize.data import Rows, content_hash
from linearize.distill import STATE, Trainer, memory_needed, splits_weights
from linearize.errors import memory_for
from linearize.evaluate import continue_text
from linearize.layerwise import BATCH_TOKENS, Layerwise, aligned_lines
from linearize.metrics import Metrics
from linearize.models import content_digest, hushed
from linearize.plan import Plan, plan_model
from linearize.processes import Processes, join, one_after_the_first
from linearize.recipe import Recipe
from linearize.select import Hybrid, Questions, choose, measurements
from linearize.student import student_config, write_shim
from linearize.teacher import Teacher, open_teacher


def convert(model: str, out: Path, recipe: Recipe, console: Console) -> dict:
    """Convert MODEL by the recipe, write OUT and print the comparison; returns what OUT/linearize.json holds.

    Each of several processes calls it; the first one alone says and writes things.
    """
    here = join(recipe.run.device)
    plan = one_after_the_first(here, lambda: plan_model(model, recipe))
    console.line(plan.summary())
    teacher = one_after_the_first(
        here,
        lambda: open_teacher(
            model, revision=recipe.model.revision, trust_remote_code=recipe.model.trust_remote_code, say=console.line
        ),
    )
    identity = {"teacher": _teacher_identity(teacher), "recipe": recipe.fingerprint()}
    elsewhere = ("download", "dequantised_copy")  # in caches
    needed = sum(size for name, size in plan.disk.items() if name not in elsewhere)
    begin = functools.partial(RunState, out, identity, overwrite=recipe.run.overwrite, needed=needed, say=console.line)
    with begin() if here.first else nullcontext() as own:
        here.wait()
        run = own or RunState.join(out)
        if run.finished:
            record = read_object(out / "linearize.json", "--overwrite converts again")
            console.line(f"{out} is finished; --overwrite starts afresh")
            if difference := _made_otherwise(record, teacher, recipe):
                console.warn(f"{out} stays as it is, made from another command: {difference}")
        else:
            fix = "lower --select-align-tokens or --align-batch-tokens; or name the layers in --keep-softmax"
            with memory_for(fix):
                selection = select_layers(teacher, recipe, here, run, console)
            specs = recipe.mixer_specs(teacher.config.num_hidden_layers, selection and selection["kept"])
            record = _measure(plan, teacher, specs, selection, recipe, here, run, console)
            if here.first:
                write_checkpoint(teacher, specs, recipe, record, run, console)
        here.leave()
    if here.first:
        _show(record, teacher, out, recipe, console)
    return record


def _measure(
    plan: Plan,
    teacher: Teacher,
    specs: dict[int, dict],
    selection: dict | None,
    recipe: Recipe,
    here: Processes,
    run: RunState,
    console: Console,
) -> dict:
    """Convert every layer, distil, and compare teacher and student; a finished measurement is taken as it is.

    Returns the record of linearize.json; in processes but the first its parts that are known to all.
    """
    saved = run.load("record")
    whole = saved is not None and all(run.load_layer(i) is not None for i in specs)
    whole = whole and (saved[1]["distill"] is None or holds_distilled(run, saved[1]["distill"]))
    here.wait()
    if whole:
        return saved[1]
    began = time.monotonic()
    with Metrics(run.out, recipe.run.log_to, writes=here.first) as metrics:
        with memory_for("lower --align-batch-tokens, --calibrate-context or --calibrate-tokens"):
            text = prepare_text(teacher, recipe, here, run, console)
            layers, heldout = convert_layers(teacher, specs, recipe, text, here, run, metrics, console)
        fix = "lower distill.micro_tokens; or set distill.checkpointing=true, distill.shard=full for several GPUs"
        with memory_for(fix):
            distilled = distil(teacher, specs, recipe, text.heldout, layers, here, run, metrics, console)
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
        "selection": selection,
        "layers": layers,
        "aligned": heldout,
        "distill": distilled,
        "heldout": distilled["heldout"] if distilled and distilled["heldout"] else heldout,
        "cache": plan.cache,
        "device": str(here.device),
        "processes": here.world,
        "seconds": round(time.monotonic() - began, 1),
    }
    if here.first:
        run.save("record", {}, record)
    return record


def written_dtype(teacher: Teacher, recipe: Recipe) -> torch.dtype:
    """The number format of the checkpoint's weights, but for the mixers' own, which are fp32."""
    return teacher.dtype if recipe.run.dtype == "auto" else getattr(torch, recipe.run.dtype)


# ---- stages ---------------------------------------------------------------------------------------------------------


def select_layers(teacher: Teacher, recipe: Recipe, here: Processes, run: RunState, console: Console) -> dict | None:
    """Choose the layers that keep their softmax by measurement, where the recipe says so; what `choose` returns.

    A student without softmax is calibrated and aligned for it in a part of the run of its own; text to compare on comes
    from the training side, so that held-out text stays unseen.
    """
    count, options = recipe.measured_count(), recipe.select
    if count is None:
        return None
    saved = run.load("selection")
    here.wait()
    if saved is not None:
        return saved[1]
    linear = recipe.replace(
        {"convert.keep_softmax": "none", "align.tokens": options.align_tokens, "data.heldout_tokens": 0}
    )
    compared = linear.replace(
        {
            "calibrate.tokens": options.tokens,
            "calibrate.context": options.context,
            "align.tokens": 0,
            "run.seed": recipe.run.seed + 3,
            "data.positions": 0,  # measured as it will be read
        }
    )
    part, specs = run.part("select"), linear.mixer_specs(teacher.config.num_hidden_layers)
    questions = Questions.make(teacher.tokenizer, options, recipe.run.seed)  # which may fail, so before the work
    console.line(f"choosing {count} of {len(specs)} layers: a student without softmax first")
    with Metrics(part.folder, writes=False) as metrics:
        # Sampled text lies in the run, which samples no more of it for what comes after.
        text = prepare_text(teacher, linear, here, run, console)
        rows = prepare_text(teacher, compared, here, run, console).calibration
        convert_layers(teacher, specs, linear, text, here, part, metrics, console)
    student, model = assemble(teacher, specs, here)
    for whole in (student, model):
        whole.to(here.device).eval().requires_grad_(False)
    fill(student, model, teacher, specs, part)
    hybrid = Hybrid(student, model, list(specs), rows, questions, options, BATCH_TOKENS[here.device.type])
    total = measurements(len(specs), count, options.method)
    with console.stage("choose layers", total, unit="hybrid") as bar:
        selection = choose(hybrid, list(specs), count, here, lambda n, score: bar.advance(n, damage=score))
    if here.first:
        run.save("selection", {}, selection)
    here.wait()
    kept = ", ".join(map(str, selection["kept"]))
    score, even = selection["damage"]["score"], selection["uniform"]["damage"]["score"]
    console.line(f"softmax stays in {kept}: damage {score:.4f} nats a token, evenly spaced {even:.4f}")
    return selection


def convert_layers(
    teacher: Teacher,
    specs: dict[int, dict],
    recipe: Recipe,
    text: Text,
    here: Processes,
    run: RunState,
    metrics: Metrics,
    console: Console,
) -> tuple[list[dict], dict | None]:
    """Stages 0 and 1: one record per converted layer, and teacher and student compared on the held-out rows."""
    written = written_dtype(teacher, recipe)
    return Layerwise(teacher, specs, recipe, text, here, run, metrics, console, written).convert()


def distil(
    teacher: Teacher,
    specs: dict[int, dict],
    recipe: Recipe,
    heldout: Rows | None,
    layers: list[dict],
    here: Processes,
    run: RunState,
    metrics: Metrics,
    console: Console,
) -> dict | None:
    """Stage 2: train the student whole and keep its weights in `run`; returns what was done, or None without tokens."""
    options, written = recipe.distill, written_dtype(teacher, recipe)
    if not options.tokens:
        return None
    saved = run.load("distilled")
    here.wait()
    if saved is not None and holds_distilled(run, saved[1]):
        return saved[1]
    student, model = assemble(teacher, specs, here)
    size = format_bytes(memory_needed(student, model, options, here))
    shared = f", split over {here.world} processes" if splits_weights(options, here) else ""
    console.line(
        f"distill: {format_count(options.tokens + options.long_tokens)} tokens; weights, gradients, moments and "
        f"teacher take about {size} in each process{shared}"
    )
    trainer = Trainer(
        student,
        model,
        options,
        training_streams(teacher, recipe, here, run, console),
        here,
        seed=recipe.run.seed,
        identity={**_teacher_identity(teacher), "files": content_digest(teacher.folder)},
        fill=lambda: fill(student, model, teacher, specs, run),
    )
    seconds, peak = trainer.trial()
    console.line(
        f"distill: {trainer.steps} steps of about {format_seconds(seconds)}: {format_seconds(seconds * trainer.steps)} "
        f"in all; peak memory {format_bytes(peak)}"
    )
    aligned = [line for record in layers for line in aligned_lines(record, recipe.align)]
    with console.stage("distill", trainer.tokens) as bar:
        trainer.train(run, metrics, aligned=aligned, advance=bar.advance, say=console.line)
    trainer.finish(written)
    progress = trainer.progress
    done = {
        "steps": progress.step,
        "tokens": trainer.tokens,
        "skipped_batches": progress.skipped,
        "roll_backs": progress.roll_backs,
        "losses": progress.losses,
        "seconds": round(progress.seconds, 1),
        "heldout": trainer.measure(heldout) if heldout is not None else None,
    }
    save_distilled(run, student, written, here, done)
    if here.first:
        run.drop_folder(STATE)
    here.wait()
    return done


# ---- output ---------------------------------------------------------------------------------------------------------


def write_checkpoint(
    teacher: Teacher, specs: dict[int, dict], recipe: Recipe, record: dict, run: RunState, console: Console
) -> None:
    """Write OUT: weights layer by layer, tokenizer, card, records, and config.json as the last file."""
    chosen = None if recipe.run.dtype == "auto" else getattr(torch, recipe.run.dtype)
    config = student_config(teacher.config, specs, {"source": teacher.source, "revision": teacher.revision})
    config.dtype = chosen or teacher.dtype
    writer = run.writer(recipe.run.max_shard_size)
    with console.stage("write", len(teacher.tensors), unit="tensors") as bar:
        weights = aligned_weights(teacher, specs, chosen, run)
        if record["distill"] is not None:
            weights = distilled_weights(teacher, record["distill"], run)
        for name, tensor in weights:
            writer.add(name, tensor)
            bar.advance()
        writer.finish()
    out = run.out
    teacher.copy_side_files(out)
    write_shim(out)
    atomic_write_text(out / "README.md", model_card(record, licence=licence_of(teacher.folder)))
    atomic_write_text(out / "recipe.yaml", recipe.to_yaml(f"linearize convert {teacher.source} OUT -r recipe.yaml"))
    atomic_write_text(out / "linearize.json", json.dumps(record, indent=2) + "\n")
    run.finish(config.to_json_string())


def _teacher_identity(teacher: Teacher) -> dict:
    return {"source": teacher.source, "revision": teacher.revision, "model_type": teacher.family.model_type}


def _made_otherwise(record: dict, teacher: Teacher, recipe: Recipe) -> str:
    """In what the teacher or the recipe of a finished folder differ from those of this command; "" if in nothing."""
    asked = recipe.fingerprint()
    made = {key: value for key, value in record["recipe"].items() if key in asked}
    asked = {key: value for key, value in asked.items() if key in made}
    return recipe_difference({"teacher": record["teacher"]["source"], **made}, {"teacher": teacher.source, **asked})


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
        with hushed():
            model = load(folder).eval()
        answers[name] = continue_text(model, teacher.tokenizer, prompt)
    return answers
