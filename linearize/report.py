"""One page about a converted model: what it was made from, what it costs, what it kept; and its model card again.

Everything comes from files that other commands left in the folder; what is not there is left out, with the command
that makes it. The page loads nothing: figures are inline SVG.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import linearize
from linearize import card, plots
from linearize.checkpoint import (
    CONFIG,
    atomic_write_bytes,
    atomic_write_text,
    format_bytes,
    read_object,
    writing,
)
from linearize.console import Console, format_count, format_seconds
from linearize.errors import UserError, one_line

PROBES = ("tasks", "perplexity", "recall", "needle", "repetition", "parity", "decode", "generate")
SIDES = card.SIDES
RUNGS = {"mean": "mean", "vala": "VaLA", "gdn": "GDN"}  # where a rung's name is not a plain word


@dataclass(frozen=True)
class Folder:
    """What a converted folder holds about itself.

    record      linearize.json                        metrics  the lines of metrics.jsonl
    evaluation  eval/NAME.json by name                recipe   the text of recipe.yaml, or None
    diagnosis   inspect/inspect.json, or None
    """

    path: Path
    record: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: dict[str, dict[str, Any]]
    recipe: str | None
    diagnosis: dict[str, Any] | None


def read_folder(path: Path) -> Folder:
    """Read what there is. UserError for a folder that is not convert's or not finished, and for a damaged file."""
    if not path.is_dir():
        raise UserError("no such folder", value=str(path), fix="name what linearize convert wrote")
    if (path / ".linearize").is_dir() and not (path / CONFIG).exists():
        raise UserError("the conversion has not finished", value=str(path), fix="run the same convert command again")
    if not (path / "linearize.json").is_file():
        raise UserError("not written by linearize convert: it has no linearize.json", value=str(path))
    record = _object(path / "linearize.json")
    if not record or not {"teacher", "mixers", "layers", "cache"} <= set(record):
        raise UserError("linearize.json is damaged or not convert's", value=str(path), fix="convert again")
    evaluation = {}
    for name in PROBES:
        # What was measured with the teacher beside it says more than what was measured alone.
        found = _object(path / "eval" / f"{name}.json") or _object(path / "eval" / f"{name}-alone.json")
        if found:
            evaluation[name] = found
    for name in {"tasks", "perplexity"} - evaluation.keys():
        limited = sorted((path / "eval").glob(f"{name}-limit-*.json"), key=lambda file: file.stat().st_mtime)
        if limited and (found := _object(limited[-1])):
            evaluation[name] = found
    recipe = path / "recipe.yaml"
    return Folder(
        path=path,
        record=record,
        metrics=_lines(path / "metrics.jsonl"),
        evaluation=evaluation,
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None,
        diagnosis=_object(path / "inspect" / "inspect.json"),
    )


def _object(path: Path) -> dict | None:
    """The object in a JSON file; None where there is none. UserError for a file that is damaged."""
    return read_object(path, "make it again") if path.is_file() else None


def _lines(path: Path) -> list[dict]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break  # the run was killed in the middle of a line
    return lines


# ---- the command ----------------------------------------------------------------------------------------------------


def report(out: Path, console: Console) -> dict:
    """Write OUT/report.html, the figures as OUT/report/*.png and the model card; returns the object of --json."""
    found = read_folder(out)
    pictures: dict[str, Any] = {}
    if plots.available():
        pictures = figures(found)
    else:
        console.warn(f"no figures: matplotlib is missing, {plots.INSTALL}")
    written = []
    for name, figure in pictures.items():
        written.append(out / "report" / f"{name}.png")
        with writing(out):
            written[-1].parent.mkdir(exist_ok=True)
        atomic_write_bytes(written[-1], plots.png(figure))
    atomic_write_text(out / "report.html", page(found, {name: plots.svg(at, name) for name, at in pictures.items()}))
    refreshed = refresh_card(found, console)
    missing = what_is_missing(found)
    result = {
        "report": str(out / "report.html"),
        "figures": [str(path) for path in written],
        "card": str(refreshed) if refreshed else None,
        "missing": missing,
    }
    console.table(
        str(out),
        ("", "written"),
        [("page", result["report"]), ("figures", f"{len(written)} in {out / 'report'}"), ("card", result["card"])],
    )
    for what, command in missing.items():
        console.line(f"not there yet: {what}: {command}")
    console.result(result)
    return result


def refresh_card(found: Folder, console: Console) -> Path | None:
    """Write the model card again when there are results for it; one that a person has changed is left alone."""
    path = found.path / "README.md"
    if not found.evaluation:
        return None
    if path.is_file() and card.MARK not in path.read_text(encoding="utf-8", errors="replace"):
        console.line(f"{path} is not convert's own any more and stays as it is; remove it to have it written")
        return None
    licence = card.licence_of(found.path)
    atomic_write_text(path, card.model_card(found.record, found.evaluation, licence=licence, folder=found.path.name))
    return path


def what_is_missing(found: Folder) -> dict[str, str]:
    """What the page could show and the folder lacks: the command that makes it, by name."""
    path, diagnosis, generated = (shlex.quote(str(found.path / at)) for at in ("", "inspect", "eval/generate.json"))
    commands = {
        "tasks": ("benchmarks", f"linearize eval {path} --tasks piqa,arc_easy"),
        "perplexity": ("perplexity with standard errors", f"linearize eval {path} --tasks perplexity"),
        "recall": ("recall against length", f"linearize eval {path} --tasks recall"),
        "needle": ("a needle in a text", f"linearize eval {path} --tasks needle"),
        "repetition": ("repetition", f"linearize eval {path} --tasks repetition"),
        "parity": ("parity of decoding", f"linearize eval {path} --tasks parity"),
        "decode": ("decoding speed", f"linearize bench decode {path} --teacher"),
        "generate": (
            "samples",
            f'linearize generate {path} "Once upon a time" --teacher --json > {generated}',
        ),
    }
    missing = dict(commands[name] for name in PROBES if name not in found.evaluation)
    if found.diagnosis is None:
        missing["the teacher's attention"] = f"linearize inspect {path} --out {diagnosis}"
    return missing


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(found: Folder) -> dict[str, Any]:
    """Every figure that the folder has the numbers for, by file name."""
    record, at = found.record, found.evaluation
    drawn = {}
    if rows := retained_rows(at.get("tasks")):
        names = [row["task"] for row in rows]
        errors = [_share_error(row) for row in rows]
        drawn["retained"] = plots.retained(names, [row["retained_percent"] for row in rows], errors, "Benchmarks")
    if lengths := recall_rows(at.get("recall")):
        sides = [[row.get(side) for row in lengths.values()] for side in SIDES]
        drawn["recall"] = plots.teacher_and_student(
            list(lengths), *sides, "Recall of key-value pairs", "prompt (tokens)", "accuracy", kind="share"
        )
    if lengths := needle_rows(at.get("needle")):
        drawn["needle"] = needle_figure(lengths)
    cache = record["cache"]
    if cache:
        sides = [[row[side] for row in cache] for side in SIDES]
        tokens = [row["tokens"] for row in cache]
        drawn["cache"] = plots.teacher_and_student(
            tokens, *sides, "Cache of one sequence", "context (tokens)", "size", kind="bytes"
        )
    if (figure := decode_figure(at.get("decode"))) is not None:
        drawn["decode"] = figure
    layers = [layer for layer in record["layers"] if layer.get("ladder")]
    if layers:
        numbers = [layer["layer"] for layer in layers]
        rungs = {RUNGS.get(name, name): [layer["ladder"].get(name) for layer in layers] for name in rung_names(record)}
        drawn["ladder"] = plots.errors_by_layer(numbers, rungs, "Error ladder of the start")
        heads = [(layer.get("heads") or {}).get("full") for layer in layers]
        if all(heads):
            drawn["heads"] = plots.head_map(numbers, heads, "Start error of every head", "relative error")
    if curves := alignment_curves(found):
        drawn["alignment"] = plots.alignment(curves, "Alignment, one layer at a time")
    steps = [line for line in found.metrics if line.get("stage") == "distill"]
    if steps:
        drawn["distillation"] = plots.training(
            [line["tokens"] for line in steps], [line["loss"] for line in steps], "Distillation", "KL (nats per token)"
        )
    if found.diagnosis is not None:
        from linearize.inspect import figures as diagnosis_figures

        chosen = diagnosis_figures(found.diagnosis)
        drawn |= {f"teacher-{name}": chosen[name] for name in ("attention", "key-readout", "starts")}
    return drawn


def retained_rows(tasks: dict | None) -> list[dict]:
    """The tasks of which a share of the teacher's score is known."""
    return [row for row in card.task_rows(tasks or {}) if row.get("retained_percent") is not None]


def _share_error(row: Mapping[str, Any]) -> float | None:
    """Standard error of the student's score, in percent of the teacher's."""
    if row.get("student_stderr") is None or not row.get("teacher"):
        return None
    return 100 * row["student_stderr"] / row["teacher"]


def recall_rows(recall: dict | None) -> dict[int, dict]:
    lengths = (recall or {}).get("lengths") or {}
    return {int(length): row for length, row in lengths.items() if row.get("student") is not None}


def needle_rows(needle: dict | None) -> dict[int, dict[str, dict]]:
    """By length and depth; the lengths that were measured."""
    lengths = (needle or {}).get("lengths") or {}
    return {int(length): row for length, row in lengths.items() if row["all"].get("student") is not None}


def needle_figure(lengths: dict[int, dict[str, dict]]) -> Any:
    depths = [depth for depth in next(iter(lengths.values())) if depth != "all"]
    panels = {
        f"{side}, {what}": [[row[depth].get(side + name) for row in lengths.values()] for depth in depths]
        for side in SIDES
        for what, name in (("exact", ""), ("rank", "_rank"))
        if any(row["all"].get(side) is not None for row in lengths.values())
    }
    return plots.needle_map(list(lengths), [f"{depth} %" for depth in depths], panels)


def decode_figure(decode: dict | None) -> Any:
    """Tokens per second by batch and the cache of the largest one, over the context; None where nothing was measured.

    Needs matplotlib. decode: what `linearize bench decode` writes.
    """
    cells = card.decode_cells(decode or {})
    if not any("decode_tokens_per_second" in cell for sides in cells.values() for cell in sides.values()):
        return None
    contexts, batches = (sorted({key[i] for key in cells}) for i in range(2))

    def values(field: str, batch: int) -> dict[str, list[float | None]]:
        rows = {side: [cells.get((at, batch), {}).get(side, {}).get(field) for at in contexts] for side in SIDES}
        return {side: row for side, row in rows.items() if any(value is not None for value in row)}

    names = {"graph": "graph_tokens_per_second", "plain": "decode_tokens_per_second"}
    speeds = {
        batch: {kind: sides for kind, field in names.items() if (sides := values(field, batch))} for batch in batches
    }
    return plots.decoding(contexts, speeds, values("cache_bytes", batches[-1]), batches[-1])


def decode_speeds(decode: dict | None) -> tuple[int, dict[int, dict[str, float]]] | None:
    """The smallest batch and, by context, tokens per second by side; None where nothing was measured."""
    cells = card.decode_cells(decode or {})
    if not cells:
        return None
    batch = min(size for _, size in cells)
    speeds = {}
    for (context, size), sides in sorted(cells.items()):
        if size == batch:
            speeds[context] = {side: cell.get("decode_tokens_per_second") for side, cell in sides.items()}
    return batch, speeds


def rung_names(record: dict) -> list[str]:
    """The rungs of all layers' ladders in the order in which they come up, "output" last."""
    names = dict.fromkeys(name for layer in record["layers"] for name in layer.get("ladder") or ())
    return sorted(names, key=lambda name: name == "output")


def alignment_curves(found: Folder) -> dict[int, tuple[list[int], list[float]]]:
    curves: dict[int, tuple[list[int], list[float]]] = {}
    for line in found.metrics:
        if "layer" in line and line.get("stage", "align") == "align":
            tokens, losses = curves.setdefault(line["layer"], ([], []))
            tokens.append(line["tokens"])
            losses.append(line["loss"])
    return curves


# ---- the page -------------------------------------------------------------------------------------------------------


def page(found: Folder, pictures: Mapping[str, str]) -> str:
    """The page as HTML. pictures: <svg> elements by name; whatever else goes in is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("linearize", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    record, at, shown = found.record, found.evaluation, tables(found)
    template = environment.get_template("report.html.jinja")
    return template.render(
        name=card.short_name(record["teacher"]["source"]),
        version=linearize.__version__,
        summary=_summary(record),
        headlines=headlines(found),
        pictures={name: Markup(svg) for name, svg in pictures.items()},
        tables=shown,
        kept=any(
            name in shown for name in ("tasks", "heldout", "perplexity", "recall", "needle", "repetition", "parity")
        ),
        limit=card.limit_of(at.get("tasks") or {}),
        samples=samples(at.get("generate")),
        recipe=found.recipe,
        provenance=provenance(found),
        missing=what_is_missing(found),
    )


def _summary(record: dict) -> str:
    mixers = record["mixers"]
    kinds = " and ".join(sorted({spec["kind"] for spec in mixers.values()}))
    return (
        f"{len(mixers)} softmax attention layers of {card.public_name(record['teacher'])} became {kinds} mixers: "
        f"layers {card.ranges([int(i) for i in mixers])}."
    )


def headlines(found: Folder) -> list[tuple[str, str, str]]:
    """(figure, what it is, how it came about) of what a reader looks for first."""
    record, at = found.record, found.evaluation
    lines = []
    mean = (at.get("tasks") or {}).get("retained") or {}
    if mean.get("retained_percent") is not None:
        count = len(mean["tasks"])
        limit = card.limit_of(at["tasks"])
        how = f"mean accuracy of {count} task{'s' * (count != 1)}"
        lines.append((card.percent(mean["retained_percent"]), "of the teacher's score", how + _only(limit)))
    if heldout := record.get("heldout"):
        how = f"{heldout['student_perplexity']:.2f} against {heldout['teacher_perplexity']:.2f}, held-out text"
        lines.append((f"× {heldout['ratio']:.2f}", "perplexity", how))
    if record["cache"]:
        last = record["cache"][-1]
        how = f"{format_bytes(last['student'])} against {format_bytes(last['teacher'])}"
        lines.append(
            (card.percent(100 * last["student"] / last["teacher"]), f"of the cache at {_k(last['tokens'])}", how)
        )
    if speeds := decode_speeds(at.get("decode")):
        context, sides = list(speeds[1].items())[-1]
        if sides.get("teacher") and sides.get("student"):
            how = f"{format_count(sides['student'])} against {format_count(sides['teacher'])} tokens/s"
            lines.append((f"× {sides['student'] / sides['teacher']:.2f}", f"decoding speed at {_k(context)}", how))
    if lengths := recall_rows(at.get("recall")):
        length, row = list(lengths.items())[-1]
        how = f"teacher {row['teacher']:.2f}" if row.get("teacher") is not None else "measured alone"
        lines.append((f"{row['student']:.2f}", f"recall at {_k(length)}", how))
    if record.get("seconds") is not None:
        lines.append((format_seconds(record["seconds"]), "to convert", f"on {record.get('device', 'one device')}"))
    return lines


def _only(limit: int | None) -> str:
    return "" if limit is None else f", only {limit} documents each"


def _k(tokens: int) -> str:
    return f"{tokens / 1024:g}k tokens" if tokens >= 1024 else f"{tokens} tokens"


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; the first column names the row, the others are numbers unless ``plain``."""

    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    plain: bool = False


def tables(found: Folder) -> dict[str, Table]:
    """The tables that the folder has the numbers for, by name."""
    record, at = found.record, found.evaluation
    made = {}
    if tasks := at.get("tasks"):
        made["tasks"] = _task_table(tasks)
    if record.get("heldout"):
        made["heldout"] = _heldout_table(record)
    if perplexity := at.get("perplexity"):
        made["perplexity"] = _perplexity_table(perplexity)
    if lengths := recall_rows(at.get("recall")):
        rows = [
            [str(length), *(card.with_error(row.get(side), row.get(f"{side}_stderr"), 2) for side in SIDES)]
            for length, row in lengths.items()
        ]
        made["recall"] = Table(["recall, prompt (tokens)", *SIDES], rows)
    if lengths := needle_rows(at.get("needle")):
        made["needle"] = _needle_table(lengths, at["needle"])
    if repetition := at.get("repetition"):
        columns = [*SIDES, "text"]
        row = [card.with_error(repetition.get(who), repetition.get(f"{who}_stderr"), 2) for who in columns]
        note = f"greedy, {repetition['prompts']} prompts, {repetition['tokens']} tokens each"
        made["repetition"] = Table(["repetition", *columns], [[f"repeated {repetition['ngram']}-grams", *row]], note)
    if parity := at.get("parity"):
        made["parity"] = _parity_table(parity)
    if cells := card.decode_cells(at.get("decode") or {}):
        made["decode"] = _decode_table(cells, at["decode"])
    if record["cache"]:
        rows = [
            [str(c["tokens"]), *(format_bytes(c[side]) for side in SIDES), f"{c['student'] / c['teacher']:.3f}"]
            for c in record["cache"]
        ]
        made["cache"] = Table(["cache, context (tokens)", *SIDES, "ratio"], rows)
    if rows := card.selection_rows(record):
        note = "nats a token, of the calibrated and shortly aligned student, before the training that followed"
        made["selection"] = Table(list(card.SELECTION), [list(row) for row in rows], note)
    made["layers"] = _layer_table(record)
    return made


def _heldout_table(record: dict) -> Table:
    """What convert measured itself: perplexity, also before distillation where there was one."""
    last, aligned = record["heldout"], record.get("aligned")
    stages = [("perplexity", last)]
    if (record.get("distill") or {}).get("tokens") and aligned and aligned != last:
        stages = [("perplexity before distillation", aligned), ("perplexity after it", last)]
    rows = [
        [
            name,
            f"{found['teacher_perplexity']:.2f}",
            f"{found['student_perplexity']:.2f}",
            card.percent(found["retained_percent"]),
        ]
        for name, found in stages
    ]
    if last.get("kl") is not None:
        rows.append(["KL (nats per token)", "–", f"{last['kl']:.3f}", "–"])
    if last.get("top1_agreement") is not None:
        rows.append(["same likeliest token", "–", card.percent(100 * last["top1_agreement"]), "–"])
    note = f"{last['tokens']} tokens of held-out text, context {last['context']}, measured by convert"
    return Table(["held-out text", *SIDES, "retained"], rows, note)


def _task_table(tasks: dict) -> Table:
    rows = [
        [
            f"{row['task']} ({row['metric']})",
            card.with_error(row.get("teacher"), row.get("teacher_stderr"), 3),
            card.with_error(row.get("student"), row.get("student_stderr"), 3),
            card.kept(row),
            card.percent(row.get("above_chance_percent")),
        ]
        for row in card.task_rows(tasks)
    ]
    mean = tasks.get("retained")
    if mean and len(mean.get("tasks") or ()) > 1:
        scores = [card.with_error(mean.get(side), mean.get(f"{side}_stderr"), 3) for side in SIDES]
        above = card.percent(mean.get("above_chance_percent"))
        rows.append([f"mean of {len(mean['tasks'])} (accuracy)", *scores, card.kept(mean), above])
    version = (tasks.get("lm_eval") or {}).get("version")
    note = f"lm-eval {version}; " if version else ""
    note += "± one standard error; above chance: (student − chance) / (teacher − chance)"
    return Table(["task", *SIDES, "retained", "above chance"], rows, note)


def _perplexity_table(found: dict) -> Table:
    ratio = found.get("ratio") or {}
    names = {
        "word_perplexity": "word perplexity",
        "token_perplexity": "token perplexity",
        "bits_per_byte": "bits per byte",
    }
    rows = []
    for key, name in names.items():
        values = [card.with_error((found.get(side) or {}).get(key)) for side in SIDES]
        kept = ratio.get(key.partition("_")[0])
        rows.append([name, *values, "–" if kept is None else f"× {kept:.3f}"])
    note = f"{found['tokens']} tokens of {found['text']['source']}, context {found['context']}"
    if (limit := card.limit_of(found)) is not None:
        note += f", {limit} documents only: a test"
    if gap := found.get("loss_difference"):
        difference = card.with_error(gap["nats_per_token"], gap.get("stderr"))
        note += f"; the student loses {difference} nats a token more"
    return Table(["text", *SIDES, "ratio"], rows, note)


def _parity_table(found: dict) -> Table:
    rows = []
    for way, name in (("decode", "token by token"), ("chunked", "prefill in pieces")):
        errors, same = [], []
        for side in SIDES:
            at = (found.get(side) or {}).get(way)
            errors.append("–" if at is None or at["max_relative_error"] is None else f"{at['max_relative_error']:.1e}")
            same.append(card.percent(at and at["argmax_agreement_percent"]))
        rows += [[f"{name}: largest error", *errors], [f"{name}: same likeliest token", *same]]
    return Table(["parity with one pass", *SIDES], rows)


def _needle_table(lengths: dict[int, dict[str, dict]], needle: dict) -> Table:
    rows = []
    for length, depths in lengths.items():
        for depth, row in depths.items():
            names = [side + name for name in ("", "_rank") for side in SIDES]
            cells = [card.with_error(row.get(name), row.get(f"{name}_stderr"), 2) for name in names]
            rows.append([f"{length}, {depth if depth == 'all' else f'{depth} %'}", *cells])
    columns = [
        "needle, prompt (tokens) and depth",
        *(f"{side}, {name}" for name in ("exact", "rank") for side in SIDES),
    ]
    note = f"exact: the value word for word; rank: the share of {needle['candidates'] - 1} other values that are "
    return Table(columns, rows, note + f"less likely, 0.5 by chance; {needle['prompts']} prompts of a length and depth")


def _decode_table(cells: dict, decode: dict) -> Table:
    graphs = any("graph_tokens_per_second" in cell for sides in cells.values() for cell in sides.values())
    rows = []
    for (context, batch), sides in cells.items():
        for side, cell in sides.items():
            head = [f"{context} × {batch}", side]
            if "error" in cell:
                rows.append([*head, cell["error"], *["–"] * (3 + graphs)])
                continue
            speeds = [format_count(cell[f"{what}_tokens_per_second"]) for what in ("prefill", "decode")]
            row = [*head, *speeds, f"{cell['step_ms']['median']:.2f}", format_bytes(cell["cache_bytes"])]
            if graphs:
                graph = cell.get("graph_tokens_per_second")
                row.insert(4, "–" if graph is None else format_count(graph))
            rows.append(row)
    columns = ["decoding, context × batch", "model", "prefill tok/s", "decode tok/s", "ms a step", "cache"]
    if graphs:
        columns.insert(4, "as a CUDA graph")
    return Table(columns, rows, one_line((decode.get("machine") or {}).get("device", "")))


def _layer_table(record: dict) -> Table:
    from linearize.inspect import final_error

    rungs = rung_names(record)
    aligned = any(layer.get("losses") for layer in record["layers"])
    rows = []
    for layer in record["layers"]:
        ladder = layer.get("ladder") or {}
        errors = [_error(ladder.get(name)) for name in rungs]
        if aligned:
            errors.append(_error(final_error(layer.get("losses") or ())))
        rows.append([str(layer["layer"]), layer["kind"], *errors])
    columns = ["layer", "mixer", *(RUNGS.get(name, name) for name in rungs), *(["aligned"] if aligned else [])]
    note = (
        "relative error of the head outputs on held-out tokens, rung by rung; output: of the attention output after "
        "the refit of its projection"
    )
    if aligned:
        note += "; aligned: of the attention output, over the last tenth of the steps"
    return Table(columns, rows, note)


def _error(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def samples(generated: dict | None) -> dict | None:
    """The prompt and each side's text, of what `linearize generate --json` printed."""
    if not generated or not isinstance(generated.get("answers"), dict):
        return None
    answers = {side: str(answer.get("text", "")) for side, answer in generated["answers"].items()}
    return {"prompt": str(generated.get("prompt", "")), "answers": answers}


def provenance(found: Folder) -> list[tuple[str, str]]:
    """Where everything comes from, line by line."""
    record = found.record
    teacher = record["teacher"]
    lines = [("teacher", teacher["source"]), ("family", teacher.get("model_type") or "–")]
    if teacher.get("revision"):
        lines.append(("revision", teacher["revision"]))
    lines.append(("linearize", str(record.get("linearize", "–"))))
    lines += [(name, str(version)) for name, version in (record.get("versions") or {}).items()]
    for name, text in (record.get("text") or {}).items():
        lines.append((f"{name} text", f"{format_count(text['tokens'])} tokens, hash {text['hash']}"))
    if (seed := (record.get("recipe") or {}).get("run.seed")) is not None:
        lines.append(("seed", str(seed)))
    if record.get("device"):
        lines.append(("device", record["device"]))
    if record.get("seconds") is not None:
        lines.append(("time", format_seconds(record["seconds"])))
    if distilled := record.get("distill"):
        time = f", {format_seconds(distilled['seconds'])}" if distilled.get("seconds") is not None else ""
        lines.append(("distillation", f"{format_count(distilled['tokens'])} tokens{time}"))
    return lines
