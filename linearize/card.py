"""The model card: what the checkpoint is, what was measured, how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from linearize.checkpoint import format_bytes
from linearize.console import format_count
from linearize.errors import one_line

MARK = "<!-- Written by linearize; `linearize report` writes it again. Without this line it stays as it is. -->"
LICENCE_KEYS = ("license", "license_name", "license_link")

Evaluation = Mapping[str, dict[str, Any]]  # what eval/NAME.json holds, by name: tasks, perplexity, recall, decode, ...


def licence_of(folder: Path) -> dict[str, str]:
    """The licence keys of the front matter of a folder's README.md; {} where there are none that can be read."""
    path = folder / "README.md"
    try:
        fields = (metadata_load(path) if path.is_file() else None) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # a card that is not one says nothing about the licence
    return {name: str(fields[name]) for name in LICENCE_KEYS if fields.get(name)}


def model_card(
    record: dict, evaluation: Evaluation | None = None, *, licence: Mapping[str, str] | None = None, folder: str = "DIR"
) -> str:
    """README.md of a converted model.

    record: what linearize.json holds. evaluation: what its eval folder holds. licence: the teacher's, as
    :func:`licence_of` gives it. folder: how the commands name the model's folder.
    """
    teacher, mixers = record["teacher"], record["mixers"]
    evaluation = evaluation or {}
    licence = dict(licence or {})
    name = short_name(teacher["source"])
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= licence
    if teacher.get("revision"):  # only the Hub's have one, and a path of this machine tells others nothing
        front["base_model"] = teacher["source"]
    front["tags"] = ["linearize", "linear-attention"]
    kinds = ", ".join(sorted({spec["kind"] for spec in mixers.values()}))
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip("\n"),
        "---",
        MARK,
        "",
        f"# {_text(name)}, linearized",
        "",
        f"{len(mixers)} softmax attention layers of {_code(public_name(teacher))} became linear-time mixers "
        f"({kinds}): layers {', '.join(mixers)}. Everything else is the teacher's{_trained(record)}.",
        "",
        "## Measured",
        "",
    ]
    parts = [_heldout(record), _tasks(evaluation), _perplexity(evaluation), _recall(evaluation), _decode(evaluation)]
    for part in parts:
        lines += [*part, ""] if part else []
    if "tasks" not in evaluation:
        lines += [f"Benchmarks: not measured yet; `linearize eval {folder} --tasks piqa,arc_easy` measures them.", ""]
    if rows := selection_rows(record):
        lines += [*table(SELECTION, rows), "", "KL in nats a token, of the calibrated and shortly aligned student.", ""]
    lines += table(
        ("cache of one sequence", "teacher", "student"),
        [(f"{c['tokens']} tokens", format_bytes(c["teacher"]), format_bytes(c["student"])) for c in record["cache"]],
    )
    lines += [
        "",
        "## Load",
        "",
        "```python",
        "import linearize  # registers the architecture; or pass trust_remote_code=True",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        "```",
        "",
        f"The licence of the teacher{_licence(licence)} applies to these weights. `recipe.yaml` makes this checkpoint "
        "again, `linearize.json` holds every figure, `metrics.jsonl` the loss of every step.",
        "",
    ]
    return "\n".join(lines)


# ---- rows that the page of `report` shows as well -------------------------------------------------------------------


def short_name(source: str) -> str:
    """The last part of a Hub id or path, without the ending of a .gguf file."""
    return re.split(r"[/\\]", source.rstrip("/\\"))[-1].removesuffix(".gguf") or source


def public_name(teacher: dict) -> str:
    """The teacher as others can name it: the Hub id with its revision, or the last part of a path."""
    revision = teacher.get("revision")
    return f"{teacher['source']}@{revision[:12]}" if revision else short_name(teacher["source"])


def task_rows(tasks: dict) -> list[dict]:
    """One row for each task of eval/tasks.json: its main metric where it has one, else every metric.

    Each has "task", "metric" and the fields of that metric.
    """
    main = (tasks.get("retained") or {}).get("tasks") or {}
    rows = []
    for name, metrics in (tasks.get("tasks") or {}).items():
        shown = [main[name]] if main.get(name) in metrics else list(metrics)
        rows += [{"task": name, "metric": metric, **metrics[metric]} for metric in shown]
    return rows


def with_error(value: float | None, error: float | None = None, digits: int = 4) -> str:
    """A score and its standard error with the same decimals, fewer from 10 on; a dash for none."""
    if value is None:
        return "–"
    digits = digits if abs(value) < 10 else 2
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def kept(row: Mapping[str, Any]) -> str:
    """What the student kept of one metric: a percentage, or where lower is better the factor it grew by."""
    if row.get("ratio") is not None:
        return f"× {row['ratio']:.3f}"
    return percent(row.get("retained_percent"))


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"


def selection_rows(record: dict) -> list[tuple[str, ...]]:
    """What choosing the layers by measurement found: (choice, layers, KL of text, of answers, both), or nothing."""
    found = record.get("selection")
    if not found:
        return []
    choices = [
        ("chosen", found["kept"], found["damage"]),
        ("evenly spaced", found["uniform"]["kept"], found["uniform"]["damage"]),
        ("none", [], found["none"]),
    ]
    return [
        (name, ranges(layers) or "–", *(f"{damage[part]:.4f}" for part in ("text", "answers", "score")))
        for name, layers, damage in choices
    ]


SELECTION = ("softmax kept in", "layers", "KL of text", "of answers", "score")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together: 0-3, 5, 7-8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def limit_of(measured: dict) -> int | None:
    """The --limit with which tasks or perplexity were measured: such a result is a test and no figure to publish."""
    return (measured.get("settings") or {}).get("limit")


# ---- parts ----------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; what would end a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines]


def _heldout(record: dict) -> list[str]:
    if not (at := record.get("heldout")):
        return []
    return table(
        (f"held-out text, {at['tokens']} tokens, context {at['context']}", "teacher", "student"),
        [
            ("perplexity", f"{at['teacher_perplexity']:.2f}", f"{at['student_perplexity']:.2f}"),
            ("retained", "", f"{at['retained_percent']:.1f} %"),
        ],
    )


def _tasks(evaluation: Evaluation) -> list[str]:
    if "tasks" not in evaluation:
        return []
    tasks = evaluation["tasks"]
    rows = [
        (
            row["task"],
            row["metric"],
            with_error(row.get("teacher"), row.get("teacher_stderr")),
            with_error(row.get("student"), row.get("student_stderr")),
            kept(row),
        )
        for row in task_rows(tasks)
    ]
    mean = tasks.get("retained")
    if mean and len(mean.get("tasks") or ()) > 1:
        teacher, student = (with_error(mean.get(side), mean.get(f"{side}_stderr")) for side in ("teacher", "student"))
        rows.append((f"mean of {len(mean['tasks'])}", "accuracy", teacher, student, kept(mean)))
    lines = table(("task", "metric", "teacher", "student", "retained"), rows)
    version = (tasks.get("lm_eval") or {}).get("version")
    note = f"lm-eval {version}, ± one standard error." if version else "± one standard error."
    if (limit := limit_of(tasks)) is not None:
        note = f"**Only the first {limit} documents of each task: a test, not a result.** {note}"
    return [*lines, "", note]


def _perplexity(evaluation: Evaluation) -> list[str]:
    at = evaluation.get("perplexity")
    if not at:
        return []
    ratio = at.get("ratio") or {}
    rows = []
    for unit in ("word", "token"):
        values = [with_error((at.get(side) or {}).get(f"{unit}_perplexity")) for side in ("teacher", "student")]
        rows.append((f"{unit} perplexity", *values, f"× {ratio[unit]:.3f}" if unit in ratio else "–"))
    limit = limit_of(at)
    few = "" if limit is None else f", {limit} documents only: a test"
    text = f"{at['tokens']} tokens of {at['text']['source']}, context {at['context']}{few}"
    return table((text, *SIDES, "ratio"), rows)


def _recall(evaluation: Evaluation) -> list[str]:
    lengths = evaluation.get("recall", {}).get("lengths") or {}
    rows = [
        (f"{length} tokens", *(with_error(at.get(side), at.get(f"{side}_stderr"), 2) for side in SIDES))
        for length, at in lengths.items()
        if at.get("student") is not None
    ]
    return table(("recall of key-value pairs, accuracy", *SIDES), rows) if rows else []


def _decode(evaluation: Evaluation) -> list[str]:
    rows = []
    at = evaluation.get("decode")
    for (context, batch), cells in decode_cells(at or {}).items():
        speeds = [cells.get(side, {}).get("decode_tokens_per_second") for side in SIDES]
        rows.append((f"context {context}, batch {batch}", *("–" if v is None else format_count(v) for v in speeds)))
    if not rows:
        return []
    return table((f"decoding, tokens/s, {one_line(at['machine']['device'])}", *SIDES), rows)


def decode_cells(decode: dict) -> dict[tuple[int, int], dict[str, dict]]:
    """The cells of eval/decode.json by (context, batch), then by side."""
    found: dict[tuple[int, int], dict[str, dict]] = {}
    for cell in decode.get("cells") or ():
        found.setdefault((cell["context"], cell["batch"]), {})[cell["model"]] = cell
    return found


SIDES = ("teacher", "student")


def _trained(record: dict) -> str:
    """How the student was trained after the closed-form start, for the end of a sentence."""
    aligned = any(layer.get("losses") for layer in record["layers"])
    distilled = (record.get("distill") or {}).get("tokens")
    parts = []
    if aligned:
        parts.append(f"each was trained alone on {format_count(record['recipe']['align.tokens'])} tokens")
    if distilled:
        parts.append(f"the whole model on {format_count(distilled)} tokens of the teacher's logits")
    return "; " + ", then ".join(parts) if parts else "; no gradient step was taken"


def _licence(licence: Mapping[str, str]) -> str:
    shown = licence.get("license_name") or licence.get("license")
    return f" ({_text(shown)})" if shown else ""


def _text(cell: object) -> str:
    """One line that Markdown takes as text."""
    return re.sub(r"([\\`|<>\[\]*_])", r"\\\1", one_line(cell))


def _code(text: str) -> str:
    return "`" + one_line(text).replace("`", "'") + "`"
